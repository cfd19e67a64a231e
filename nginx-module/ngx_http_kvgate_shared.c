/* What all nginx workers share: the workers last seen in Redis, which of them refuse connections, and the counters. */
#include "ngx_http_kvgate.h"


static ngx_http_kvgate_pool_t *
ngx_http_kvgate_pool_find(ngx_http_kvgate_shared_t *shared, const char *name)
{
    ngx_http_kvgate_pool_t  *pool;

    for (pool = shared->pools; pool; pool = pool->next) {
        if (ngx_strcmp(pool->name, name) == 0) {
            return pool;
        }
    }

    return NULL;
}


static ngx_uint_t
ngx_http_kvgate_pool_wanted(ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_pool_t *pool)
{
    ngx_uint_t                i;
    ngx_http_kvgate_model_t  *model;

    model = conf->models.elts;

    for (i = 0; i < conf->models.nelts; i++) {
        if (ngx_strcmp(pool->name, model[i].name) == 0) {
            return 1;
        }
    }

    return 0;
}


/* Frees the pools of models that are gone, but for those that nginx workers of an older configuration still use. A worker that
 * was killed never says that it ended, so what it used stays. */
static void
ngx_http_kvgate_pools_sweep(ngx_http_kvgate_main_conf_t *conf)
{
    ngx_http_kvgate_pool_t  *pool, **link;

    link = &conf->shared->pools;

    while (*link) {
        pool = *link;

        if (pool->users || ngx_http_kvgate_pool_wanted(conf, pool)) {
            link = &pool->next;
            continue;
        }

        *link = pool->next;

        if (pool->placements) {
            ngx_slab_free(conf->shpool, pool->placements);
        }

        ngx_slab_free(conf->shpool, pool);
    }
}


void
ngx_http_kvgate_pools_use(ngx_http_kvgate_main_conf_t *conf, ngx_int_t step)
{
    ngx_uint_t                i;
    ngx_http_kvgate_model_t  *model;

    model = conf->models.elts;

    for (i = 0; i < conf->models.nelts; i++) {
        (void) ngx_atomic_fetch_add(&model[i].pool->users, step);
    }
}


/* Called at start and at each reload, by the master, which alone walks the list; then the memory is the old cycle's, and models may
 * have come and gone. */
ngx_int_t
ngx_http_kvgate_zone_init(ngx_shm_zone_t *zone, void *old)
{
    ngx_uint_t                    i;
    ngx_slab_pool_t              *shpool;
    ngx_http_kvgate_pool_t       *pool;
    ngx_http_kvgate_model_t      *model;
    ngx_http_kvgate_main_conf_t  *conf;

    conf = zone->data;
    shpool = (ngx_slab_pool_t *) zone->shm.addr;
    conf->shpool = shpool;

    if (shpool->data == NULL) {
        shpool->data = ngx_slab_calloc(shpool, sizeof(ngx_http_kvgate_shared_t));
        if (shpool->data == NULL) {
            goto full;
        }

        shpool->log_nomem = 0;
    }

    conf->shared = shpool->data;
    ngx_http_kvgate_pools_sweep(conf);
    model = conf->models.elts;

    for (i = 0; i < conf->models.nelts; i++) {
        pool = ngx_http_kvgate_pool_find(conf->shared, model[i].name);

        if (pool == NULL) {
            pool = ngx_slab_calloc(shpool, sizeof(ngx_http_kvgate_pool_t));
            if (pool == NULL) {
                goto full;
            }

            ngx_cpystrn((u_char *) pool->name, (u_char *) model[i].name, sizeof(pool->name));
            pool->next = conf->shared->pools;
            conf->shared->pools = pool;
        }

        model[i].pool = pool;
    }

    for (i = 0; i < conf->models.nelts; i++) {
        if (model[i].pool->placements == NULL) {
            ngx_http_kvgate_placements_alloc(conf, model[i].pool);
        }
    }

    return NGX_OK;

full:

    ngx_log_error(NGX_LOG_EMERG, zone->shm.log, 0, "kvgate_zone \"%V\" of %uz bytes is too small: each of %ui models takes %uz",
                  &zone->shm.name, zone->shm.size, conf->models.nelts, sizeof(ngx_http_kvgate_pool_t));
    return NGX_ERROR;
}


void
ngx_http_kvgate_count(ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_reason_e reason)
{
    (void) ngx_atomic_fetch_add(&conf->shared->reasons[reason], 1);
}


const ngx_uint_t  ngx_http_kvgate_bounds[NGX_HTTP_KVGATE_TIMES - 1] = {
    50, 100, 250, 500, 1000, 2500, 5000, 10000, 25000, 100000, 1000000
};


void
ngx_http_kvgate_count_time(ngx_http_kvgate_times_t *times, ngx_uint_t microseconds)
{
    ngx_uint_t  i;

    for (i = 0; i < NGX_HTTP_KVGATE_TIMES - 1 && microseconds > ngx_http_kvgate_bounds[i]; i++) { /* void */ }

    (void) ngx_atomic_fetch_add(&times->n[i], 1);
    (void) ngx_atomic_fetch_add(&times->sum, microseconds);
}


void
ngx_http_kvgate_pool_copy(ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_pool_t *pool, ngx_http_kvgate_pool_t *copy)
{
    ngx_shmtx_lock(&conf->shpool->mutex);
    ngx_memcpy(copy, pool, offsetof(ngx_http_kvgate_pool_t, workers) + pool->n * sizeof(pool->workers[0]));
    ngx_shmtx_unlock(&conf->shpool->mutex);
}


ngx_http_kvgate_worker_t *
ngx_http_kvgate_worker_find(ngx_http_kvgate_pool_t *pool, const char *id, size_t len)
{
    ngx_uint_t                 i;
    ngx_http_kvgate_worker_t  *workers = pool->workers;

    for (i = 0; i < pool->n; i++) {
        if (ngx_strncmp(workers[i].live.worker, id, len) == 0 && workers[i].live.worker[len] == '\0') {
            return &workers[i];
        }
    }

    return NULL;
}


ngx_uint_t
ngx_http_kvgate_is_down(const ngx_http_kvgate_worker_t *w)
{
    return w->down && w->down_lease == w->live.lease && w->live.beat <= w->down_beat;
}


void
ngx_http_kvgate_workers_set(ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_pool_t *pool,
    const struct kvg_live_worker *workers, size_t n)
{
    size_t                     i;
    ngx_http_kvgate_worker_t  *old;
    ngx_http_kvgate_worker_t   next[NGX_HTTP_KVGATE_WORKERS];

    if (n > NGX_HTTP_KVGATE_WORKERS) {
        ngx_http_kvgate_complain(NGX_LOG_WARN, ngx_cycle->log, "model \"%s\" has more than %d workers, the others are not used",
                                 pool->name, NGX_HTTP_KVGATE_WORKERS);
        n = NGX_HTTP_KVGATE_WORKERS;
    }

    ngx_shmtx_lock(&conf->shpool->mutex);

    for (i = 0; i < n; i++) {
        ngx_memzero(&next[i], sizeof(next[i]));
        next[i].live = workers[i];
        old = ngx_http_kvgate_worker_find(pool, workers[i].worker, ngx_strlen(workers[i].worker));

        if (old) {
            next[i].served = old->served;
            next[i].flight = old->live.lease == workers[i].lease ? old->flight : 0;
        }

        if (old && old->down && old->down_lease == workers[i].lease && workers[i].beat <= old->down_beat) {
            next[i].down = 1;
            next[i].down_lease = old->down_lease;
            next[i].down_beat = old->down_beat;
        }
    }

    ngx_memcpy(pool->workers, next, n * sizeof(next[0]));
    pool->n = n;
    pool->polled = ngx_time();

    ngx_shmtx_unlock(&conf->shpool->mutex);
}


ngx_uint_t
ngx_http_kvgate_workers_get(ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_pool_t *pool, ngx_http_kvgate_worker_t *out)
{
    ngx_uint_t  i, n;

    n = 0;
    ngx_shmtx_lock(&conf->shpool->mutex);

    for (i = 0; i < pool->n; i++) {
        if (ngx_strcmp(pool->workers[i].live.state, "draining") != 0) {
            out[n] = pool->workers[i];
            out[n].down = ngx_http_kvgate_is_down(&out[n]);
            n++;
        }
    }

    ngx_shmtx_unlock(&conf->shpool->mutex);

    return n;
}


ngx_uint_t
ngx_http_kvgate_worker_down(ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_pool_t *pool, ngx_str_t *id, uint64_t lease)
{
    ngx_uint_t                 down;
    ngx_http_kvgate_worker_t  *w;

    ngx_shmtx_lock(&conf->shpool->mutex);

    w = ngx_http_kvgate_worker_find(pool, (char *) id->data, id->len);
    down = w && w->live.lease == lease && ngx_http_kvgate_is_down(w);

    ngx_shmtx_unlock(&conf->shpool->mutex);

    return down;
}


void
ngx_http_kvgate_worker_mark(ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_pool_t *pool, ngx_str_t *id, uint64_t lease)
{
    ngx_http_kvgate_worker_t  *w;

    ngx_shmtx_lock(&conf->shpool->mutex);

    w = ngx_http_kvgate_worker_find(pool, (char *) id->data, id->len);

    if (w && w->live.lease == lease) {
        w->down = 1;
        w->down_lease = lease;
        w->down_beat = w->live.beat;
    }

    ngx_shmtx_unlock(&conf->shpool->mutex);
}


void
ngx_http_kvgate_worker_flight(ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_pool_t *pool, ngx_str_t *id, uint64_t lease,
    ngx_int_t step)
{
    ngx_http_kvgate_worker_t  *w;

    ngx_shmtx_lock(&conf->shpool->mutex);

    w = ngx_http_kvgate_worker_find(pool, (char *) id->data, id->len);

    if (w && w->live.lease == lease && (step > 0 || w->flight)) {
        w->flight += (int32_t) step;
    }

    ngx_shmtx_unlock(&conf->shpool->mutex);
}
