/* Who shall serve a request: Redis' answer, or rendezvous hashing over the workers last seen there. */
#include "ngx_http_kvgate.h"


/* route.lua's own, where kvgate_alpha is not set. */
#define NGX_HTTP_KVGATE_ALPHA  8


typedef struct {
    ngx_uint_t   index;
    ngx_uint_t   down;
    double       rank;   /* smaller is better */
} ngx_http_kvgate_order_t;


static int ngx_libc_cdecl
ngx_http_kvgate_order_cmp(const void *one, const void *two)
{
    const ngx_http_kvgate_order_t  *a = one, *b = two;

    if (a->down != b->down) {
        return (int) a->down - (int) b->down;
    }

    return a->rank < b->rank ? -1 : a->rank > b->rank;
}


static ngx_int_t
ngx_http_kvgate_unix_address(ngx_pool_t *pool, ngx_str_t *text, ngx_http_kvgate_candidate_t *candidate)
{
    size_t               len;
    struct sockaddr_un  *sun;

    len = text->len - (sizeof("unix:") - 1);

    if (len == 0 || len >= sizeof(sun->sun_path) || text->data[sizeof("unix:") - 1] != '/') {
        return NGX_DECLINED;
    }

    sun = ngx_pcalloc(pool, sizeof(struct sockaddr_un));
    if (sun == NULL) {
        return NGX_ERROR;
    }

    sun->sun_family = AF_UNIX;
    ngx_memcpy(sun->sun_path, text->data + sizeof("unix:") - 1, len);
    candidate->sockaddr = (struct sockaddr *) sun;
    candidate->socklen = sizeof(struct sockaddr_un);

    return NGX_OK;
}


/* The address of an advertised worker: numeric only, and inside kvgate_allow. */
static ngx_int_t
ngx_http_kvgate_address(ngx_http_request_t *r, ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_candidate_t *candidate)
{
    ngx_int_t   rc;
    ngx_addr_t  addr;

    if (candidate->addr.len > 5 && ngx_strncmp(candidate->addr.data, "unix:", 5) == 0) {
        rc = ngx_http_kvgate_unix_address(r->pool, &candidate->addr, candidate);

    } else {
        rc = ngx_parse_addr_port(r->pool, &addr, candidate->addr.data, candidate->addr.len);

        if (rc == NGX_OK && ngx_inet_get_port(addr.sockaddr) == 0) {
            rc = NGX_DECLINED;
        }

        candidate->sockaddr = addr.sockaddr;
        candidate->socklen = addr.socklen;
    }

    if (rc != NGX_OK) {
        ngx_http_kvgate_complain(NGX_LOG_ERR, r->connection->log,
                                 "worker \"%V\" advertises \"%V\", which is no numeric address with a port and no absolute unix: path", &candidate->worker,
                                 &candidate->addr);
        return NGX_DECLINED;
    }

    if (ngx_cidr_match(candidate->sockaddr, conf->allow) != NGX_OK) {
        ngx_http_kvgate_complain(NGX_LOG_ERR, r->connection->log,
                                 "worker \"%V\" advertises \"%V\", which is outside kvgate_allow", &candidate->worker,
                                 &candidate->addr);
        return NGX_DECLINED;
    }

    return NGX_OK;
}


static ngx_int_t
ngx_http_kvgate_copy(ngx_pool_t *pool, ngx_str_t *to, const char *from)
{
    to->len = ngx_strlen(from);
    to->data = ngx_pnalloc(pool, to->len + 1);

    if (to->data == NULL) {
        return NGX_ERROR;
    }

    ngx_memcpy(to->data, from, to->len + 1);

    return NGX_OK;
}


/* What Redis or the zone says of a worker. */
typedef struct {
    ngx_http_kvgate_pool_t  *pool;
    const char              *worker;
    const char              *addr;
    uint64_t                 lease;
    uint32_t                 hit_blocks;
    ngx_uint_t               down;
    double                   backlog;     /* as Redis says it; -1: the zone says it */
    double                   cost;
} ngx_http_kvgate_offer_t;


/* Makes the offer a candidate, behind the others, unless it is one or there are enough. NGX_DECLINED where its address is refused. */
static ngx_int_t
ngx_http_kvgate_add(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, const ngx_http_kvgate_offer_t *offer)
{
    ngx_uint_t                    i;
    ngx_http_kvgate_candidate_t  *candidate;
    ngx_http_kvgate_main_conf_t  *conf;

    for (i = 0; i < ctx->n_candidates; i++) {
        if (ngx_strcmp(ctx->candidates[i].worker.data, offer->worker) == 0) {
            return NGX_OK;
        }
    }

    if (ctx->n_candidates == NGX_HTTP_KVGATE_CANDIDATES) {
        return NGX_OK;
    }

    conf = ngx_http_get_module_main_conf(r, ngx_http_kvgate_module);
    candidate = &ctx->candidates[ctx->n_candidates];

    if (ngx_http_kvgate_copy(r->pool, &candidate->worker, offer->worker) != NGX_OK
        || ngx_http_kvgate_copy(r->pool, &candidate->addr, offer->addr) != NGX_OK)
    {
        return NGX_ERROR;
    }

    if (ngx_http_kvgate_address(r, conf, candidate) != NGX_OK) {
        return NGX_DECLINED;
    }

    candidate->pool = offer->pool;
    candidate->lease = offer->lease;
    candidate->hit_blocks = offer->hit_blocks;
    candidate->down = offer->down;
    candidate->backlog = offer->backlog;
    candidate->cost = offer->cost;
    ctx->n_candidates++;

    return NGX_OK;
}


/* Whether Redis has not said who holds the prompt's blocks. */
static ngx_uint_t
ngx_http_kvgate_unasked(ngx_http_kvgate_reason_e reason)
{
    return (reason >= NGX_HTTP_KVGATE_REDIS_TIMEOUT && reason <= NGX_HTTP_KVGATE_REDIS_ERROR) || reason == NGX_HTTP_KVGATE_MISMATCH;
}


/* Without Redis: the worker that was sent the longest beginning of this prompt comes first in order[], before the one that rendezvous
 * puts there, where what it need not compute outweighs what more it has to do. Requests are counted for that, those of this gateway;
 * each weighs a mean prompt. A beginning that ends where rendezvous order looks, or before, is known to all gateways by that order: this
 * one's memory would only part them. Returns the blocks that it was sent; 0: the order stands. */
static uint32_t
ngx_http_kvgate_placed_first(ngx_http_kvgate_ctx_t *ctx, ngx_http_kvgate_pool_t *pool, double alpha, ngx_http_kvgate_worker_t *known,
    ngx_http_kvgate_order_t *order, ngx_uint_t n)
{
    double                    saved, more;
    uint32_t                  lease, blocks, turn;
    ngx_uint_t                i;
    ngx_http_kvgate_order_t   first;
    ngx_http_kvgate_prompt_t *p = &ctx->prompt;

    lease = ngx_http_kvgate_placed(pool, p->chain, p->n_blocks, &blocks);
    turn = kvg_rendezvous_block(p->n_blocks, p->model->block_size) + 1;

    if (lease == 0 || (blocks <= turn && turn < p->n_blocks)) {
        return 0;
    }

    for (i = 0; i < n; i++) {
        if (known[order[i].index].live.lease == lease) {
            break;
        }
    }

    if (i == n || order[i].down) {
        return 0;
    }

    saved = alpha * blocks * p->model->block_size;
    more = ((double) known[order[i].index].flight - known[order[0].index].flight) * pool->prompt_tokens / (pool->requests + 1);

    if (more > saved) {
        return 0;
    }

    first = order[i];
    ngx_memmove(&order[1], &order[0], i * sizeof(order[0]));
    order[0] = first;

    return blocks;
}


/* Known workers in the order of the request's rendezvous scores; without a whole block, of load, ties at random. Where Redis has
 * not answered, one that was sent this prompt before comes first. Appends those that are not candidates yet. Returns NGX_DECLINED
 * where an address was refused. */
static ngx_int_t
ngx_http_kvgate_add_known(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_http_kvgate_pool_t *pool)
{
    uint32_t                      placed;
    ngx_int_t                     rc;
    ngx_uint_t                    i, n;
    const struct kvg_hash        *hash;
    ngx_http_kvgate_prompt_t     *p;
    ngx_http_kvgate_worker_t     *w, known[NGX_HTTP_KVGATE_WORKERS];
    ngx_http_kvgate_order_t       order[NGX_HTTP_KVGATE_WORKERS];
    ngx_http_kvgate_offer_t       offer;
    ngx_http_kvgate_main_conf_t  *conf;

    conf = ngx_http_get_module_main_conf(r, ngx_http_kvgate_module);
    p = &ctx->prompt;
    n = ngx_http_kvgate_workers_get(conf, pool, known);
    hash = p->n_blocks ? &p->chain[kvg_rendezvous_block(p->n_blocks, p->model->block_size)] : NULL;

    for (i = 0; i < n; i++) {
        order[i].index = i;
        order[i].down = known[i].down;
        order[i].rank = hash ? -(double) kvg_rendezvous_score(hash, known[i].live.worker)
                             : known[i].live.backlog + (double) (ngx_random() & 0xffff) / 0x10000;
    }

    ngx_qsort(order, n, sizeof(order[0]), ngx_http_kvgate_order_cmp);
    rc = NGX_OK;
    placed = 0;

    if (hash && ctx->n_candidates == 0 && ngx_http_kvgate_unasked(ctx->reason)) {
        placed = ngx_http_kvgate_placed_first(ctx, pool, conf->alpha > 0 ? conf->alpha : NGX_HTTP_KVGATE_ALPHA, known, order, n);
    }

    for (i = 0; i < n; i++) {
        w = &known[order[i].index];
        offer.pool = pool;
        offer.worker = w->live.worker;
        offer.addr = w->live.addr;
        offer.lease = w->live.lease;
        offer.hit_blocks = i == 0 ? placed : 0;
        offer.down = w->down;
        offer.backlog = -1;
        offer.cost = -1;

        if (ngx_http_kvgate_add(r, ctx, &offer) == NGX_DECLINED) {
            rc = NGX_DECLINED;
        }
    }

    return rc;
}


size_t
ngx_http_kvgate_candidate_hit(ngx_http_kvgate_ctx_t *ctx, ngx_http_kvgate_candidate_t *candidate)
{
    uint32_t  size = ctx->prompt.model->block_size;

    return ngx_min((size_t) candidate->hit_blocks, (ctx->prompt.n_ids - 1) / size) * size;
}


/* Candidates that refused a connection lately come last. */
static void
ngx_http_kvgate_down_last(ngx_http_kvgate_ctx_t *ctx)
{
    ngx_uint_t                   i, n, pass;
    ngx_http_kvgate_candidate_t  sorted[NGX_HTTP_KVGATE_CANDIDATES];

    n = 0;

    for (pass = 0; pass < 2; pass++) {
        for (i = 0; i < ctx->n_candidates; i++) {
            if (ctx->candidates[i].down == pass) {
                sorted[n++] = ctx->candidates[i];
            }
        }
    }

    ngx_memcpy(ctx->candidates, sorted, n * sizeof(sorted[0]));
}


static void
ngx_http_kvgate_candidates(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, const struct kvg_route_reply *reply)
{
    size_t                         i;
    ngx_str_t                      id;
    ngx_uint_t                     denied, down;
    ngx_http_kvgate_offer_t        offer;
    ngx_http_kvgate_model_t       *model;
    const struct kvg_route_choice *choice;
    ngx_http_kvgate_main_conf_t   *conf;

    denied = 0;
    model = ctx->prompt.model;
    conf = ngx_http_get_module_main_conf(r, ngx_http_kvgate_module);

    for (i = 0; reply && i < reply->n_choices; i++) {
        choice = &reply->choices[i];
        id.data = (u_char *) choice->worker;
        id.len = ngx_strlen(choice->worker);

        offer.pool = model->pool;
        offer.worker = choice->worker;
        offer.addr = choice->addr;
        offer.lease = choice->lease;
        offer.hit_blocks = choice->hit_blocks;
        offer.backlog = choice->backlog;
        offer.cost = choice->cost;
        offer.down = ngx_http_kvgate_worker_down(conf, model->pool, &id, choice->lease);

        if (ngx_http_kvgate_add(r, ctx, &offer) == NGX_DECLINED) {
            denied = 1;
        }
    }

    down = 0;

    for (i = 0; i < ctx->n_candidates; i++) {
        down |= ctx->candidates[i].down;
    }

    if (ctx->n_candidates && !down && !denied) {
        ctx->others = 1;

    } else if (ngx_http_kvgate_add_known(r, ctx, model->pool) == NGX_DECLINED) {
        denied = 1;
    }

    ngx_http_kvgate_down_last(ctx);

    if (ctx->n_candidates == 0 && denied) {
        ctx->reason = NGX_HTTP_KVGATE_DENIED;
    }

    if (ctx->n_candidates) {
        ctx->hit_tokens = ngx_http_kvgate_candidate_hit(ctx, &ctx->candidates[0]);
    }
}


ngx_uint_t
ngx_http_kvgate_add_others(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx)
{
    ngx_uint_t  n = ctx->n_candidates;

    if (!ctx->others) {
        return 0;
    }

    ctx->others = 0;
    (void) ngx_http_kvgate_add_known(r, ctx, ctx->prompt.model->pool);

    return ctx->n_candidates - n;
}


static ngx_http_kvgate_reason_e
ngx_http_kvgate_choice_reason(const struct kvg_route_choice *choice)
{
    ngx_uint_t        i;
    const ngx_str_t  *name;

    for (i = NGX_HTTP_KVGATE_PREFIX; i <= NGX_HTTP_KVGATE_TIE; i++) {
        name = &ngx_http_kvgate_reasons[i];

        if (ngx_strcmp(choice->reason, name->data) == 0) {
            return i;
        }
    }

    return NGX_HTTP_KVGATE_LOAD;
}


static void
ngx_http_kvgate_read_reply(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, const redisReply *answer)
{
    struct kvg_error        err;
    struct kvg_arena        arena;
    struct kvg_route_reply  reply;

    kvg_arena_init(&arena, 0);
    ngx_memzero(&reply, sizeof(reply));
    err.message[0] = '\0';

    if (kvg_route_parse(answer, &arena, &reply, &err) != KVG_OK) {
        ngx_http_kvgate_complain(NGX_LOG_WARN, r->connection->log, "%s", err.message);
        ctx->reason = NGX_HTTP_KVGATE_REDIS_ERROR;
        ngx_http_kvgate_candidates(r, ctx, NULL);

    } else if (reply.status == KVG_ROUTE_MISMATCH) {
        ngx_http_kvgate_complain(NGX_LOG_ERR, r->connection->log, "model \"%s\": workers and gateway differ: %s",
                                 ctx->prompt.model->name, reply.mismatch);
        ctx->reason = NGX_HTTP_KVGATE_MISMATCH;
        ngx_http_kvgate_candidates(r, ctx, NULL);

    } else if (reply.status == KVG_ROUTE_NO_WORKERS || reply.n_choices == 0) {
        ctx->reason = NGX_HTTP_KVGATE_NO_WORKERS;

    } else {
        if (err.message[0]) {
            ngx_http_kvgate_complain(NGX_LOG_WARN, r->connection->log, "%s", err.message);
        }

        ctx->reason = ngx_http_kvgate_choice_reason(&reply.choices[0]);
        ngx_http_kvgate_candidates(r, ctx, &reply);
    }

    kvg_arena_free(&arena);
}


static void
ngx_http_kvgate_answered(void *data, ngx_http_kvgate_reason_e failure, const redisReply *answer)
{
    ngx_connection_t       *c;
    ngx_http_request_t     *r;
    ngx_http_kvgate_ctx_t  *ctx = data;

    r = ctx->request;
    c = r->connection;
    ctx->lookup = NULL;
    ctx->lookup_microseconds = (ngx_uint_t) (ngx_http_kvgate_microseconds() - ctx->lookup_start);
    ngx_http_set_log_request(c->log, r);

    if (answer) {
        ngx_http_kvgate_read_reply(r, ctx, answer);

    } else {
        ctx->reason = failure;
        ngx_http_kvgate_candidates(r, ctx, NULL);
    }

    ngx_http_kvgate_decided(r, ctx);
    ngx_http_run_posted_requests(c);
}


ngx_int_t
ngx_http_kvgate_lookup(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx)
{
    struct kvg_route_query        query;
    ngx_http_kvgate_reason_e      failure;
    ngx_http_kvgate_main_conf_t  *conf;

    conf = ngx_http_get_module_main_conf(r, ngx_http_kvgate_module);

    if (ctx->failure) {
        ctx->reason = ctx->failure;  /* a request waits for Redis once */
        ngx_http_kvgate_candidates(r, ctx, NULL);
        return NGX_OK;
    }

    ngx_memzero(&query, sizeof(query));
    query.prefix = (char *) conf->redis_prefix.data;
    query.model = ctx->prompt.model->name;
    query.fingerprint = *kvg_prompt_model_fingerprint(ctx->prompt.model->prompt);
    query.block_size = ctx->prompt.model->block_size;
    query.chain = ctx->prompt.chain;
    query.n_blocks = ctx->prompt.n_blocks;
    query.prompt_tokens = ctx->prompt.n_ids;
    query.alpha = conf->alpha;
    query.observe = ctx->mode == NGX_HTTP_KVGATE_OBSERVE;

    ctx->lookup_start = ngx_http_kvgate_microseconds();
    ctx->lookup = ngx_http_kvgate_redis_route(&query, ngx_http_kvgate_answered, ctx, &failure);

    if (ctx->lookup) {
        return NGX_AGAIN;
    }

    ctx->reason = failure;
    ngx_http_kvgate_candidates(r, ctx, NULL);

    return NGX_OK;
}


void
ngx_http_kvgate_any_worker(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx)
{
    ngx_uint_t                    i;
    ngx_http_kvgate_model_t      *model;
    ngx_http_kvgate_main_conf_t  *conf;

    conf = ngx_http_get_module_main_conf(r, ngx_http_kvgate_module);
    model = conf->models.elts;

    if (ctx->prompt.model) {
        (void) ngx_http_kvgate_add_known(r, ctx, ctx->prompt.model->pool);
    }

    for (i = 0; i < conf->models.nelts && ctx->prompt.model == NULL && ctx->n_candidates == 0; i++) {
        (void) ngx_http_kvgate_add_known(r, ctx, model[i].pool);
    }

    ngx_http_kvgate_down_last(ctx);
}
