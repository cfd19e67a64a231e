/* kvgate_balance: connects a request to the workers chosen for it, best first; others go to the balancer configured before it.
 *
 * The retry rule: a generation never runs twice. Before a byte of the request was sent, the next worker is tried; after that,
 * only a 503 in place of the reply moves the request on. nginx itself would retry any error that proxy_next_upstream names, so in
 * every other case free() leaves no tries; and where nginx adds one for a reused connection, get() answers NGX_BUSY.
 *
 * A reused connection that its worker has closed meanwhile is noticed before the first byte (output()), and the same worker is
 * asked again on another one.
 */
#include "ngx_http_kvgate.h"


typedef struct {
    ngx_http_request_t            *request;
    ngx_http_kvgate_ctx_t         *ctx;
    ngx_uint_t                     next;       /* candidate */
    ngx_uint_t                     original_tries;

    void                          *data;       /* of the balancer beneath */
    ngx_event_get_peer_pt          original_get_peer;
    ngx_event_free_peer_pt         original_free_peer;
#if (NGX_HTTP_SSL || NGX_COMPAT)
    ngx_event_set_peer_session_pt  original_set_session;
    ngx_event_save_peer_session_pt original_save_session;
#endif
    ngx_output_chain_filter_pt     original_output;
    void                          *original_output_ctx;

    unsigned                       own:1;      /* the present peer is a candidate */
    unsigned                       spent:1;    /* no further try */
    unsigned                       sent:1;     /* something was sent to some peer */
} ngx_http_kvgate_peer_t;


static void
ngx_http_kvgate_peer_flight(ngx_http_kvgate_peer_t *peer, ngx_int_t step)
{
    ngx_http_kvgate_candidate_t  *candidate = peer->ctx->chosen;

    ngx_http_kvgate_worker_flight(ngx_http_get_module_main_conf(peer->request, ngx_http_kvgate_module), candidate->pool,
                                  &candidate->worker, candidate->lease, step);
}


/* n further tries, or as many of them as proxy_next_upstream_tries leaves after those that were begun. */
static ngx_uint_t
ngx_http_kvgate_within_tries(ngx_http_kvgate_peer_t *peer, ngx_uint_t n)
{
    ngx_uint_t  limit = peer->request->upstream->conf->next_upstream_tries;

    return limit ? ngx_min(n, limit - ngx_min(limit, peer->next)) : n;
}


static ngx_int_t
ngx_http_kvgate_get_peer(ngx_peer_connection_t *pc, void *data)
{
    ngx_http_kvgate_ctx_t        *ctx;
    ngx_http_kvgate_peer_t       *peer = data;
    ngx_http_kvgate_candidate_t  *candidate;

    ctx = peer->ctx;
    peer->own = 0;

    if (peer->spent) {
        return NGX_BUSY;
    }

    if (!ctx->routed) {
        return peer->original_get_peer(pc, peer->data);
    }

    if (peer->next == ctx->n_candidates) {
        return NGX_BUSY;
    }

    candidate = &ctx->candidates[peer->next++];
    ctx->chosen = candidate;
    peer->own = 1;

    if (peer->next == ctx->n_candidates) {
        /* nginx looks at the tries that are left before it gives this one up */
        pc->tries += ngx_http_kvgate_within_tries(peer, ngx_http_kvgate_add_others(peer->request, ctx));
    }

    ngx_http_kvgate_peer_flight(peer, 1);

    pc->cached = 0;
    pc->connection = NULL;
    pc->sockaddr = candidate->sockaddr;
    pc->socklen = candidate->socklen;
    pc->name = &candidate->addr;

    ngx_log_debug2(NGX_LOG_DEBUG_HTTP, pc->log, 0, "kvgate: worker \"%V\" at \"%V\"", &candidate->worker, &candidate->addr);

    return NGX_OK;
}


/* Whether another worker may be tried after a failure. */
static ngx_uint_t
ngx_http_kvgate_may_retry(ngx_peer_connection_t *pc, ngx_http_kvgate_peer_t *peer)
{
    ngx_http_request_t  *r = peer->request;

    if (pc->connection == NULL || pc->connection->sent == 0) {
        return 1;
    }

    return r->upstream->headers_in.status_n == NGX_HTTP_SERVICE_UNAVAILABLE && !r->header_sent;
}


/* None of the candidates can be reached: what Redis says of the workers' addresses is wrong, or they have all gone. The server lines
 * are the operator's own word. */
static void
ngx_http_kvgate_leave_candidates(ngx_peer_connection_t *pc, ngx_http_kvgate_peer_t *peer)
{
    ngx_uint_t  tries = ngx_http_kvgate_within_tries(peer, peer->original_tries);

    if (tries) {
        peer->ctx->routed = 0;
        peer->ctx->chosen = NULL;
        peer->ctx->n_candidates = 0;
        peer->ctx->hit_tokens = 0;
        pc->tries = tries;
    }
}


static void
ngx_http_kvgate_failed_peer(ngx_peer_connection_t *pc, ngx_http_kvgate_peer_t *peer)
{
    ngx_http_kvgate_candidate_t  *candidate;

    peer->sent |= pc->connection && pc->connection->sent;

    if ((peer->request->method & NGX_HTTP_POST) && !ngx_http_kvgate_may_retry(pc, peer)) {
        peer->spent = 1;
        pc->tries = 0;
        return;
    }

    if (!peer->own || (pc->connection && pc->connection->sent)) {
        return;
    }

    if (pc->cached) {
        /* only the idle connection was gone: nginx gives the try back */
        peer->next--;
        return;
    }

    candidate = peer->ctx->chosen;
    ngx_http_kvgate_worker_mark(ngx_http_get_module_main_conf(peer->request, ngx_http_kvgate_module), candidate->pool,
                                &candidate->worker, candidate->lease);
    ngx_http_kvgate_complain(NGX_LOG_WARN, pc->log, "worker \"%V\" at \"%V\" cannot be reached; avoided until its next heartbeat",
                             &candidate->worker, &candidate->addr);

    if (peer->next == peer->ctx->n_candidates && !peer->sent) {
        ngx_http_kvgate_leave_candidates(pc, peer);
    }
}


static void
ngx_http_kvgate_free_peer(ngx_peer_connection_t *pc, void *data, ngx_uint_t state)
{
    ngx_http_kvgate_peer_t  *peer = data;

    if (!peer->own) {
        peer->original_free_peer(pc, peer->data, state);

    } else {
        ngx_http_kvgate_peer_flight(peer, -1);
        pc->tries -= pc->tries > 0;
    }

    /* NEXT: a 403 or 404 that proxy_next_upstream names */
    if (state & (NGX_PEER_FAILED|NGX_PEER_NEXT)) {
        ngx_http_kvgate_failed_peer(pc, peer);
    }
}


#if (NGX_HTTP_SSL || NGX_COMPAT)

static ngx_int_t
ngx_http_kvgate_set_session(ngx_peer_connection_t *pc, void *data)
{
    ngx_http_kvgate_peer_t  *peer = data;

    return peer->own ? NGX_OK : peer->original_set_session(pc, peer->data);
}


static void
ngx_http_kvgate_save_session(ngx_peer_connection_t *pc, void *data)
{
    ngx_http_kvgate_peer_t  *peer = data;

    if (!peer->own) {
        peer->original_save_session(pc, peer->data);
    }
}

#endif


/* Stands before nginx's chain writer. The event of a FIN may not have been handled yet: look once more before the first byte. Who is
 * sent it is noted here: one that could not be reached keeps nothing of the prompt. */
static ngx_int_t
ngx_http_kvgate_output(void *data, ngx_chain_t *in)
{
    char                     byte;
    ssize_t                  n;
    ngx_connection_t        *c;
    ngx_uint_t               first;
    ngx_http_kvgate_peer_t  *peer = data;

    c = peer->request->upstream->peer.connection;
    first = c && c->sent == 0;

    if (first && peer->request->upstream->peer.cached
#if (NGX_HTTP_SSL)
        && c->ssl == NULL
#endif
    ) {
        n = recv(c->fd, &byte, 1, MSG_PEEK|MSG_DONTWAIT);

        if (n >= 0 || (ngx_socket_errno != NGX_EAGAIN && ngx_socket_errno != NGX_EINTR)) {
            ngx_log_error(NGX_LOG_INFO, c->log, 0, "kvgate: upstream closed a kept connection");
            return NGX_ERROR;
        }
    }

    if (first && peer->own) {
        ngx_http_kvgate_sent(peer->request, peer->ctx);
    }

    return peer->original_output(peer->original_output_ctx, in);
}


static ngx_int_t
ngx_http_kvgate_init_peer(ngx_http_request_t *r, ngx_http_upstream_srv_conf_t *us)
{
    ngx_http_upstream_t         *u;
    ngx_http_kvgate_ctx_t       *ctx;
    ngx_http_kvgate_peer_t      *peer;
    ngx_http_kvgate_loc_conf_t  *lcf;
    ngx_http_kvgate_srv_conf_t  *scf;

    u = r->upstream;
    scf = ngx_http_conf_upstream_srv_conf(us, ngx_http_kvgate_module);
    lcf = ngx_http_get_module_loc_conf(r, ngx_http_kvgate_module);

    peer = ngx_pcalloc(r->pool, sizeof(ngx_http_kvgate_peer_t));
    if (peer == NULL) {
        return NGX_ERROR;
    }

    if (scf->original_init_peer(r, us) != NGX_OK) {
        return NGX_ERROR;
    }

    if (lcf->mode != NGX_HTTP_KVGATE_ON) {
        return NGX_OK;
    }

    ctx = ngx_http_kvgate_ctx(r);

    if (ctx == NULL || ctx->mode != NGX_HTTP_KVGATE_ON) {
        return NGX_OK;
    }

    peer->request = r;
    peer->ctx = ctx;
    peer->data = u->peer.data;
    peer->original_get_peer = u->peer.get;
    peer->original_free_peer = u->peer.free;
    peer->original_output = u->output.output_filter;
    peer->original_output_ctx = u->output.filter_ctx;

    u->peer.data = peer;
    u->peer.get = ngx_http_kvgate_get_peer;
    u->peer.free = ngx_http_kvgate_free_peer;
    u->output.output_filter = ngx_http_kvgate_output;
    u->output.filter_ctx = peer;

#if (NGX_HTTP_SSL || NGX_COMPAT)
    peer->original_set_session = u->peer.set_session;
    peer->original_save_session = u->peer.save_session;
    u->peer.set_session = ngx_http_kvgate_set_session;
    u->peer.save_session = ngx_http_kvgate_save_session;
#endif

    peer->original_tries = u->peer.tries;

    if (ctx->routed) {
        u->peer.tries = ctx->n_candidates;
    }

    return NGX_OK;
}


static ngx_int_t
ngx_http_kvgate_init_upstream(ngx_conf_t *cf, ngx_http_upstream_srv_conf_t *us)
{
    ngx_http_kvgate_srv_conf_t  *scf;

    scf = ngx_http_conf_upstream_srv_conf(us, ngx_http_kvgate_module);

    if (scf->original_init_upstream(cf, us) != NGX_OK) {
        return NGX_ERROR;
    }

    scf->original_init_peer = us->peer.init;
    us->peer.init = ngx_http_kvgate_init_peer;

    return NGX_OK;
}


char *
ngx_http_kvgate_balance(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    ngx_http_kvgate_srv_conf_t    *scf = conf;
    ngx_http_upstream_srv_conf_t  *us;

    if (scf->original_init_upstream) {
        return "is duplicate";
    }

    us = ngx_http_conf_get_module_srv_conf(cf, ngx_http_upstream_module);

    scf->original_init_upstream = us->peer.init_upstream ? us->peer.init_upstream : ngx_http_upstream_init_round_robin;
    us->peer.init_upstream = ngx_http_kvgate_init_upstream;
    us->flags = NGX_HTTP_UPSTREAM_CREATE
                |NGX_HTTP_UPSTREAM_WEIGHT
                |NGX_HTTP_UPSTREAM_MAX_CONNS
                |NGX_HTTP_UPSTREAM_MAX_FAILS
                |NGX_HTTP_UPSTREAM_FAIL_TIMEOUT
                |NGX_HTTP_UPSTREAM_DOWN
                |NGX_HTTP_UPSTREAM_BACKUP;

    return NGX_CONF_OK;
}
