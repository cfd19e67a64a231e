/* What the gateway remembers of its own requests, in shared memory: the last decisions of each model, what each worker served, and
 * who was sent which block. kvgate_status shows the first two; where Redis does not say it, the third finds the worker of a known
 * prompt.
 *
 * Placements are a table of buckets of four blocks. A request enters blocks 1, 2, 4, … and the last of its chain; a later one looks
 * from its own last block backwards, so the next turn of a conversation meets the last block of the turn before. A full bucket gives
 * up the block that was used longest ago.
 */
#include "ngx_http_kvgate.h"

#define NGX_HTTP_KVGATE_BUCKETS_MIN  64
#define NGX_HTTP_KVGATE_BUCKETS_MAX  65536


/* ---- placements ---- */

/* A model's part of what the zone has beside the pools, in equal parts for the models of this configuration and as many that a reload
 * may put in their place. */
void
ngx_http_kvgate_placements_alloc(ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_pool_t *pool)
{
    size_t      bucket, pools, part;
    ngx_uint_t  n;

    bucket = NGX_HTTP_KVGATE_WAYS * sizeof(ngx_http_kvgate_placement_t);
    pools = 2 * conf->models.nelts * (sizeof(ngx_http_kvgate_pool_t) + ngx_pagesize);
    part = conf->zone->shm.size > pools ? (conf->zone->shm.size - pools) / 2 / conf->models.nelts : 0;
    n = NGX_HTTP_KVGATE_BUCKETS_MAX;

    while (n > NGX_HTTP_KVGATE_BUCKETS_MIN && n * bucket > part) {
        n /= 2;
    }

    for ( /* void */ ; n >= NGX_HTTP_KVGATE_BUCKETS_MIN; n /= 2) {
        pool->placements = ngx_slab_calloc(conf->shpool, n * bucket);

        if (pool->placements) {
            pool->buckets = n;
            return;
        }
    }
}


static uint64_t
ngx_http_kvgate_placement_hash(const struct kvg_hash *block)
{
    uint64_t  hash;

    ngx_memcpy(&hash, block->bytes, sizeof(hash));

    return hash;
}


static ngx_http_kvgate_placement_t *
ngx_http_kvgate_bucket(ngx_http_kvgate_pool_t *pool, uint64_t hash)
{
    return &pool->placements[(hash & (pool->buckets - 1)) * NGX_HTTP_KVGATE_WAYS];
}


static void
ngx_http_kvgate_place(ngx_http_kvgate_pool_t *pool, const struct kvg_hash *block, uint32_t lease)
{
    uint64_t                      hash;
    ngx_uint_t                    i;
    ngx_http_kvgate_placement_t  *bucket, *entry;

    hash = ngx_http_kvgate_placement_hash(block);
    bucket = ngx_http_kvgate_bucket(pool, hash);
    entry = bucket;

    for (i = 0; i < NGX_HTTP_KVGATE_WAYS; i++) {
        if (bucket[i].hash == hash || bucket[i].lease == 0) {
            entry = &bucket[i];
            break;
        }

        if (bucket[i].used < entry->used) {
            entry = &bucket[i];
        }
    }

    entry->hash = hash;
    entry->lease = lease;
    entry->used = (uint32_t) ngx_time();
}


void
ngx_http_kvgate_sent(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx)
{
    size_t                        mark;
    uint32_t                      lease;
    ngx_http_kvgate_pool_t       *pool;
    ngx_http_kvgate_prompt_t     *p = &ctx->prompt;
    ngx_http_kvgate_main_conf_t  *conf;

    pool = ctx->chosen->pool;
    lease = (uint32_t) ctx->chosen->lease;

    if (p->n_blocks == 0 || pool->buckets == 0) {
        return;
    }

    conf = ngx_http_get_module_main_conf(r, ngx_http_kvgate_module);
    ngx_shmtx_lock(&conf->shpool->mutex);

    for (mark = 1; mark < p->n_blocks; mark *= 2) {
        ngx_http_kvgate_place(pool, &p->chain[mark - 1], lease);
    }

    ngx_http_kvgate_place(pool, &p->chain[p->n_blocks - 1], lease);

    ngx_shmtx_unlock(&conf->shpool->mutex);
}


uint32_t
ngx_http_kvgate_placed(ngx_http_kvgate_pool_t *pool, const struct kvg_hash *chain, size_t n, uint32_t *blocks)
{
    uint64_t                      hash;
    ngx_uint_t                    i;
    ngx_http_kvgate_placement_t  *bucket;

    for ( /* void */ ; pool->buckets && n; n--) {
        hash = ngx_http_kvgate_placement_hash(&chain[n - 1]);
        bucket = ngx_http_kvgate_bucket(pool, hash);

        for (i = 0; i < NGX_HTTP_KVGATE_WAYS; i++) {
            if (bucket[i].hash == hash && bucket[i].lease) {
                *blocks = (uint32_t) n;
                return bucket[i].lease;
            }
        }
    }

    return 0;
}


/* ---- decisions ---- */

static void
ngx_http_kvgate_show(ngx_http_kvgate_ctx_t *ctx, ngx_http_kvgate_candidate_t *candidate, ngx_http_kvgate_shown_t *shown)
{
    ngx_cpystrn((u_char *) shown->worker, candidate->worker.data, NGX_HTTP_KVGATE_SHOWN);
    shown->hit_tokens = ngx_http_kvgate_candidate_hit(ctx, candidate);
    shown->backlog = candidate->backlog;
    shown->cost = candidate->cost;
}


void
ngx_http_kvgate_remember(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx)
{
    ngx_uint_t                    i;
    ngx_time_t                   *tp;
    ngx_http_kvgate_pool_t       *pool;
    ngx_http_kvgate_decision_t   *decision;
    ngx_http_kvgate_prompt_t     *p = &ctx->prompt;
    ngx_http_kvgate_main_conf_t  *conf;

    if (p->n_ids == 0 || ctx->reason == NGX_HTTP_KVGATE_LIMITED) {
        return;
    }

    conf = ngx_http_get_module_main_conf(r, ngx_http_kvgate_module);
    pool = p->model->pool;
    tp = ngx_timeofday();

    ngx_shmtx_lock(&conf->shpool->mutex);

    ctx->decision = ++pool->decided;
    decision = &pool->decisions[ctx->decision % NGX_HTTP_KVGATE_DECISIONS];
    decision->number = ctx->decision;
    decision->at = (uint64_t) tp->sec * 1000 + tp->msec;
    decision->reason = ctx->reason;
    decision->prompt_tokens = p->n_ids;
    decision->cached_tokens = -1;
    decision->tokenize = (uint32_t) p->microseconds;
    decision->lookup = (uint32_t) ctx->lookup_microseconds;
    decision->n = ngx_min(ctx->n_candidates, NGX_HTTP_KVGATE_CHOICES);

    for (i = 0; i < decision->n; i++) {
        ngx_http_kvgate_show(ctx, &ctx->candidates[i], &decision->choices[i]);
    }

    ngx_shmtx_unlock(&conf->shpool->mutex);
}


/* ---- what became of it ---- */

static void
ngx_http_kvgate_serve(ngx_http_kvgate_ctx_t *ctx, ngx_http_kvgate_served_t *served, ngx_uint_t failed)
{
    size_t  hit;

    hit = ngx_http_kvgate_candidate_hit(ctx, ctx->chosen);
    served->requests++;
    served->failures += failed;
    served->prompt_tokens += ctx->prompt.n_ids;
    served->hit_tokens += hit;

    if (ctx->cached_tokens >= 0) {
        served->told++;
        served->told_prompt_tokens += ctx->prompt.n_ids;
        served->told_hit_tokens += hit;
        served->cached_tokens += (uint64_t) ctx->cached_tokens;
    }
}


ngx_int_t
ngx_http_kvgate_served(ngx_http_request_t *r)
{
    ngx_uint_t                    failed;
    ngx_http_kvgate_ctx_t        *ctx;
    ngx_http_kvgate_pool_t       *pool;
    ngx_http_kvgate_worker_t     *w;
    ngx_http_kvgate_decision_t   *decision;
    ngx_http_kvgate_main_conf_t  *conf;

    ctx = ngx_http_kvgate_ctx(r);

    if (ctx == NULL || ctx->decision == 0 || ctx->chosen == NULL) {
        return NGX_OK;
    }

    conf = ngx_http_get_module_main_conf(r, ngx_http_kvgate_module);
    pool = ctx->prompt.model->pool;
    failed = ctx->failed || r->headers_out.status >= NGX_HTTP_INTERNAL_SERVER_ERROR;

    if (ctx->prompt.n_prompts > 1) {
        ctx->cached_tokens = -1;  /* of all prompts: no measure of what was predicted for the first */
    }

    ngx_shmtx_lock(&conf->shpool->mutex);

    ngx_http_kvgate_serve(ctx, &pool->served, failed);
    w = ngx_http_kvgate_worker_find(pool, (char *) ctx->chosen->worker.data, ctx->chosen->worker.len);

    if (w) {
        ngx_http_kvgate_serve(ctx, &w->served, failed);
    }

    decision = &pool->decisions[ctx->decision % NGX_HTTP_KVGATE_DECISIONS];

    if (decision->number == ctx->decision) {
        decision->cached_tokens = ctx->cached_tokens;
    }

    ngx_shmtx_unlock(&conf->shpool->mutex);

    return NGX_OK;
}
