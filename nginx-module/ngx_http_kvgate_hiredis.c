/* hiredis' asynchronous client on nginx's events. They are level-triggered: it reads 16 KiB an event and would stall under edge-triggered
 * ones. Connections with TLS have theirs in tls.c.
 */
#include "ngx_http_kvgate.h"
#include <hiredis/async.h>


static void
ngx_http_kvgate_hiredis_read(ngx_event_t *ev)
{
    ngx_connection_t        *c = ev->data;
    ngx_http_kvgate_link_t  *link = c->data;

    if (c->close) {
        /* nginx closes idle connections: this worker is quitting */
        redisAsyncFree(link->context);
        return;
    }

    redisAsyncHandleRead(link->context);
}


static void
ngx_http_kvgate_hiredis_write(ngx_event_t *ev)
{
    ngx_connection_t        *c = ev->data;
    ngx_http_kvgate_link_t  *link = c->data;

    ngx_uint_t               freed = 0;

    link->writing = 1;
    link->freed = &freed;
    redisAsyncHandleWrite(link->context);

    if (!freed) {
        link->writing = 0;
        link->freed = NULL;
    }
}


static void
ngx_http_kvgate_hiredis_add_read(void *data)
{
    ngx_connection_t  *c = data;

    if (!c->read->active) {
        (void) ngx_add_event(c->read, NGX_READ_EVENT, NGX_LEVEL_EVENT);
    }
}


static void
ngx_http_kvgate_hiredis_del_read(void *data)
{
    ngx_connection_t  *c = data;

    if (c->read->active) {
        (void) ngx_del_event(c->read, NGX_READ_EVENT, 0);
    }
}


/* Redis takes nearly always all there is to write, so no event is asked for: what a round of nginx's loop has queued goes at its end,
 * in one write. hiredis comes back here where something is left. */
static void
ngx_http_kvgate_hiredis_add_write(void *data)
{
    ngx_connection_t        *c = data;
    ngx_http_kvgate_link_t  *link = c->data;

    if (c->write->posted || c->write->active) {
        return;
    }

    if (!link->writing && (link->context->c.flags & REDIS_CONNECTED)) {
        ngx_post_event(c->write, &ngx_posted_events);

    } else {
        (void) ngx_add_event(c->write, NGX_WRITE_EVENT, NGX_LEVEL_EVENT);
    }
}


static void
ngx_http_kvgate_hiredis_del_write(void *data)
{
    ngx_connection_t  *c = data;

    if (c->write->active) {
        (void) ngx_del_event(c->write, NGX_WRITE_EVENT, 0);
    }
}


/* hiredis closes the descriptor itself, after this. */
static void
ngx_http_kvgate_hiredis_cleanup(void *data)
{
    ngx_connection_t        *c = data;
    ngx_http_kvgate_link_t  *link = c->data;

    ngx_http_kvgate_hiredis_del_read(c);
    ngx_http_kvgate_hiredis_del_write(c);

    if (c->read->posted) {
        ngx_delete_posted_event(c->read);
    }

    if (c->write->posted) {
        ngx_delete_posted_event(c->write);
    }

#if (NGX_SSL)
    ngx_http_kvgate_tls_detach(c);
#endif

    link->gone(link->context);

    if (link->freed) {
        *link->freed = 1;
    }

    ngx_free(link);
    ngx_free_connection(c);
    c->fd = (ngx_socket_t) -1;
}


ngx_int_t
ngx_http_kvgate_hiredis_attach(redisAsyncContext *context, void (*gone)(redisAsyncContext *context),
    void (*failed)(redisAsyncContext *context, const char *what))
{
    ngx_connection_t        *c;
    ngx_http_kvgate_link_t  *link;

    link = ngx_calloc(sizeof(ngx_http_kvgate_link_t), ngx_cycle->log);
    if (link == NULL) {
        return NGX_ERROR;
    }

    c = ngx_get_connection(context->c.fd, ngx_cycle->log);
    if (c == NULL) {
        ngx_free(link);
        return NGX_ERROR;
    }

    link->context = context;
    link->gone = gone;
    link->failed = failed;
    c->data = link;
    c->idle = 1;
    c->read->handler = ngx_http_kvgate_hiredis_read;
    c->write->handler = ngx_http_kvgate_hiredis_write;
    c->read->log = ngx_cycle->log;
    c->write->log = ngx_cycle->log;

    context->ev.data = c;
    context->ev.addRead = ngx_http_kvgate_hiredis_add_read;
    context->ev.delRead = ngx_http_kvgate_hiredis_del_read;
    context->ev.addWrite = ngx_http_kvgate_hiredis_add_write;
    context->ev.delWrite = ngx_http_kvgate_hiredis_del_write;
    context->ev.cleanup = ngx_http_kvgate_hiredis_cleanup;

    return NGX_OK;
}
