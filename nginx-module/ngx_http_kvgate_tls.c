/* rediss://: TLS between hiredis and its socket, by nginx's own OpenSSL, since hiredis of Debian 12 (0.14) has none.
 *
 *   attach -> (TCP connected) -> handshake, with the server's certificate and name verified -> shaken
 *   read    what was decrypted is fed to hiredis' reader, whose replies are then delivered
 *   write   what hiredis has queued is encrypted; the rest of it stays queued
 *
 * hiredis itself never touches the socket then. Events are edge-triggered, as nginx's SSL functions have them.
 */
#include "ngx_http_kvgate.h"
#include <hiredis/async.h>
#include <hiredis/sds.h>

#if (NGX_SSL)

#define NGX_HTTP_KVGATE_TLS_READ   16384
#define NGX_HTTP_KVGATE_TLS_DEPTH  5


/* Exported by every version of hiredis, declared by none: delivers the replies that its reader has. */
void redisProcessCallbacks(redisAsyncContext *context);


/* ---- configuration ---- */

/* The context of all connections, where some address asks for one. */
char *
ngx_http_kvgate_tls_init(ngx_conf_t *cf, ngx_http_kvgate_main_conf_t *mcf)
{
    size_t               i;
    ngx_pool_cleanup_t  *cln;

    for (i = 0; i < mcf->redis.n && !mcf->redis.urls[i].tls; i++) { /* void */ }

    if (i == mcf->redis.n) {
        if (mcf->redis_ca.len || mcf->redis_certificate.data) {
            ngx_log_error(NGX_LOG_WARN, cf->log, 0,
                          "kvgate_redis_ca and kvgate_redis_certificate are of no use: no address in kvgate_redis is a rediss://");
        }

        return NGX_CONF_OK;
    }

    mcf->redis_ssl = ngx_pcalloc(cf->pool, sizeof(ngx_ssl_t));
    cln = ngx_pool_cleanup_add(cf->pool, 0);

    if (mcf->redis_ssl == NULL || cln == NULL) {
        return NGX_CONF_ERROR;
    }

    mcf->redis_ssl->log = cf->log;

    if (ngx_ssl_create(mcf->redis_ssl, NGX_SSL_TLSv1_2|NGX_SSL_TLSv1_3, NULL) != NGX_OK) {
        return NGX_CONF_ERROR;
    }

    cln->handler = ngx_ssl_cleanup_ctx;
    cln->data = mcf->redis_ssl;

    /* hiredis may move what it has queued before a write is repeated */
    (void) SSL_CTX_set_mode(mcf->redis_ssl->ctx, SSL_MODE_ENABLE_PARTIAL_WRITE|SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);

    if (mcf->redis_ca.len == 0 && SSL_CTX_set_default_verify_paths(mcf->redis_ssl->ctx) == 0) {
        ngx_ssl_error(NGX_LOG_EMERG, cf->log, 0, "SSL_CTX_set_default_verify_paths() failed");
        return NGX_CONF_ERROR;
    }

    if (ngx_ssl_trusted_certificate(cf, mcf->redis_ssl, &mcf->redis_ca, NGX_HTTP_KVGATE_TLS_DEPTH) != NGX_OK) {
        return NGX_CONF_ERROR;
    }

    /* after nginx's, whose callback lets everything pass: the handshake itself is to fail */
    SSL_CTX_set_verify(mcf->redis_ssl->ctx, SSL_VERIFY_PEER, NULL);

    if (mcf->redis_certificate.data
        && ngx_ssl_certificate(cf, mcf->redis_ssl, &mcf->redis_certificate, &mcf->redis_certificate_key, NULL) != NGX_OK)
    {
        return NGX_CONF_ERROR;
    }

    return NGX_CONF_OK;
}


/* ---- a connection ---- */

/* nginx's SSL functions say in the log what is wrong. This keeps it, for the one line that an outage gets. */
static void
ngx_http_kvgate_tls_log(ngx_log_t *log, ngx_uint_t level, u_char *text, size_t len)
{
    u_char                  *from;
    ngx_http_kvgate_link_t  *link = log->wdata;

    from = ngx_strnstr(text, "(SSL:", len);

    if (from) {
        len = ngx_min((size_t) (text + len - from), sizeof(link->why));
        (void) ngx_cpystrn((u_char *) link->why, from, len);
    }
}


static void
ngx_http_kvgate_tls_fail(ngx_http_kvgate_link_t *link, const char *what)
{
    u_char  *last, text[256];

    last = ngx_snprintf(text, sizeof(text) - 1, "TLS: %s%s%s", what, link->why[0] ? " " : "", link->why);
    *last = '\0';
    link->failed(link->context, (char *) text);
    redisAsyncFree(link->context);
}


static void
ngx_http_kvgate_tls_write(ngx_event_t *ev)
{
    size_t                   len;
    ssize_t                  n;
    ngx_connection_t        *c = ev->data;
    ngx_http_kvgate_link_t  *link = c->data;
    redisContext            *hiredis = &link->context->c;

    while ((len = sdslen(hiredis->obuf)) > 0) {
        n = c->send(c, (u_char *) hiredis->obuf, len);

        if (n == NGX_AGAIN) {
            break;
        }

        if (n <= 0) {
            ngx_http_kvgate_tls_fail(link, "connection lost");
            return;
        }

        ngx_memmove(hiredis->obuf, hiredis->obuf + n, len - n + 1);
        sdssetlen(hiredis->obuf, len - n);
    }

    if (ngx_handle_write_event(c->write, 0) != NGX_OK) {
        ngx_http_kvgate_tls_fail(link, "no event");
    }
}


static void
ngx_http_kvgate_tls_read(ngx_event_t *ev)
{
    char                     data[NGX_HTTP_KVGATE_TLS_READ];
    ssize_t                  n;
    ngx_uint_t               freed;
    ngx_connection_t        *c = ev->data;
    ngx_http_kvgate_link_t  *link = c->data;

    if (c->close) {
        /* nginx closes idle connections: this worker is quitting */
        redisAsyncFree(link->context);
        return;
    }

    freed = 0;
    link->freed = &freed;

    do {
        n = c->recv(c, (u_char *) data, sizeof(data));

        if (n > 0 && redisReaderFeed(link->context->c.reader, data, n) != REDIS_OK) {
            n = NGX_ERROR;  /* no memory */
        }

        if (n > 0) {
            redisProcessCallbacks(link->context);
        }

    } while (n > 0 && !freed);

    if (freed) {
        return;
    }

    link->freed = NULL;

    if (n != NGX_AGAIN || ngx_handle_read_event(c->read, 0) != NGX_OK) {
        ngx_http_kvgate_tls_fail(link, "connection lost");
    }
}


static void
ngx_http_kvgate_tls_shaken(ngx_connection_t *c)
{
    long                     verified;
    ngx_uint_t               freed;
    ngx_http_kvgate_link_t  *link = c->data;

    if (!c->ssl->handshaked) {
        verified = SSL_get_verify_result(c->ssl->connection);
        ngx_http_kvgate_tls_fail(link, verified != X509_V_OK ? X509_verify_cert_error_string(verified) : "no handshake");
        return;
    }

    c->read->handler = ngx_http_kvgate_tls_read;
    c->write->handler = ngx_http_kvgate_tls_write;
    link->context->c.flags |= REDIS_CONNECTED;

    freed = 0;
    link->freed = &freed;
    ngx_http_kvgate_tls_write(c->write);

    if (!freed) {
        ngx_http_kvgate_tls_read(c->read);
    }
}


/* The certificate must be for the host that the URL names. */
static ngx_int_t
ngx_http_kvgate_tls_expect(ngx_connection_t *c, const char *name)
{
    SSL        *ssl = c->ssl->connection;
    u_char      address[sizeof(struct in6_addr)];

    if (inet_pton(AF_INET, name, address) == 1 || inet_pton(AF_INET6, name, address) == 1) {
        return X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), name) ? NGX_OK : NGX_ERROR;
    }

    return SSL_set_tlsext_host_name(ssl, name) && SSL_set1_host(ssl, name) ? NGX_OK : NGX_ERROR;
}


static void
ngx_http_kvgate_tls_connected(ngx_event_t *ev)
{
    int                      err;
    socklen_t                len;
    ngx_connection_t        *c = ev->data;
    ngx_http_kvgate_link_t  *link = c->data;

    if (c->close) {
        redisAsyncFree(link->context);
        return;
    }

    err = 0;
    len = sizeof(err);

    if (getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &err, &len) == -1 || err) {
        ngx_http_kvgate_tls_fail(link, err ? strerror(err) : "cannot connect");
        return;
    }

    if (ngx_ssl_create_connection(link->ssl, c, NGX_SSL_CLIENT) != NGX_OK || ngx_http_kvgate_tls_expect(c, link->name) != NGX_OK) {
        ngx_http_kvgate_tls_fail(link, "no connection");
        return;
    }

    c->ssl->handler = ngx_http_kvgate_tls_shaken;

    if (ngx_ssl_handshake(c) != NGX_AGAIN) {
        ngx_http_kvgate_tls_shaken(c);
    }
}


/* Before the handshake everything waits in hiredis' buffer; after it, what a round of nginx's loop has queued goes at its end. */
static void
ngx_http_kvgate_tls_add_write(void *data)
{
    ngx_connection_t  *c = data;

    if (c->ssl && c->ssl->handshaked && !c->write->posted) {
        ngx_post_event(c->write, &ngx_posted_events);
    }
}


ngx_int_t
ngx_http_kvgate_tls_attach(ngx_connection_t *c, ngx_ssl_t *ssl, const char *name)
{
    ngx_log_t               *log;
    ngx_http_kvgate_link_t  *link = c->data;

    c->pool = ngx_create_pool(1024, ngx_cycle->log);
    if (c->pool == NULL) {
        return NGX_ERROR;
    }

    log = ngx_pcalloc(c->pool, sizeof(ngx_log_t));
    if (log == NULL) {
        return NGX_ERROR;
    }

    log->log_level = NGX_LOG_INFO;
    log->writer = ngx_http_kvgate_tls_log;
    log->wdata = link;
    c->log = log;
    c->read->log = log;
    c->write->log = log;

    link->ssl = ssl;
    link->name = name;
    c->read->handler = ngx_http_kvgate_tls_connected;
    c->write->handler = ngx_http_kvgate_tls_connected;

    link->context->ev.addRead = NULL;
    link->context->ev.delRead = NULL;
    link->context->ev.addWrite = ngx_http_kvgate_tls_add_write;
    link->context->ev.delWrite = NULL;

    return ngx_handle_write_event(c->write, 0);
}


void
ngx_http_kvgate_tls_detach(ngx_connection_t *c)
{
    if (c->ssl) {
        c->ssl->no_wait_shutdown = 1;
        c->ssl->no_send_shutdown = 1;
        (void) ngx_ssl_shutdown(c);
    }

    if (c->pool) {
        ngx_destroy_pool(c->pool);
        c->pool = NULL;
    }
}

#endif
