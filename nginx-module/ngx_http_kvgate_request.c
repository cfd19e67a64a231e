/* The way of a request through the module, up to the point where nginx goes on to proxy_pass.
 *
 *   handler -> (body read) -> body_read -> prompt_run, here or in a thread -> prompt_done -> limit_ask -> limited -> lookup ->
 *   decided -> phases resumed
 *
 * The handler is in PRECONTENT, after authentication and limits. While the request waits for a thread or for Redis, its
 * write_event_handler is prompt_done or wait, and a client that leaves is noticed by ngx_http_test_reading.
 */
#include "ngx_http_kvgate.h"
#include <ngx_sha1.h>

#if (NGX_THREADS)
#include <ngx_thread_pool.h>
#endif

#define NGX_HTTP_KVGATE_THREAD_TIMEOUT  60000

/* Longer salts (tokens, say) travel as their hash. */
#define NGX_HTTP_KVGATE_SALT  128


static void ngx_http_kvgate_prompt_done(ngx_http_request_t *r);


uint64_t
ngx_http_kvgate_microseconds(void)
{
    struct timespec  ts;

    (void) clock_gettime(CLOCK_MONOTONIC, &ts);

    return (uint64_t) ts.tv_sec * 1000000 + ts.tv_nsec / 1000;
}


/* ---- the context ---- */

static void
ngx_http_kvgate_cleanup(void *data)
{
    ngx_http_kvgate_ctx_t  *ctx = data;

    if (ctx->lookup) {
        ngx_http_kvgate_redis_cancel(ctx->lookup);
        ctx->lookup = NULL;
    }

    kvg_arena_free(&ctx->prompt.work);
    kvg_arena_free(&ctx->prompt.keep);
}


static ngx_http_kvgate_ctx_t *
ngx_http_kvgate_create_ctx(ngx_http_request_t *r)
{
    ngx_pool_cleanup_t     *cln;
    ngx_http_kvgate_ctx_t  *ctx;

    cln = ngx_pool_cleanup_add(r->pool, sizeof(ngx_http_kvgate_ctx_t));
    if (cln == NULL) {
        return NULL;
    }

    ctx = cln->data;
    ngx_memzero(ctx, sizeof(ngx_http_kvgate_ctx_t));
    ctx->request = r;
    ctx->cached_tokens = -1;
    kvg_arena_init(&ctx->prompt.work, 0);
    kvg_arena_init(&ctx->prompt.keep, 0);
    cln->handler = ngx_http_kvgate_cleanup;
    ngx_http_set_ctx(r, ctx, ngx_http_kvgate_module);

    return ctx;
}


ngx_http_kvgate_ctx_t *
ngx_http_kvgate_ctx(ngx_http_request_t *r)
{
    ngx_pool_cleanup_t     *cln;
    ngx_http_kvgate_ctx_t  *ctx;

    if (r != r->main) {
        return NULL;
    }

    ctx = ngx_http_get_module_ctx(r, ngx_http_kvgate_module);

    if (ctx == NULL && (r->internal || r->filter_finalize)) {
        for (cln = r->pool->cleanup; cln; cln = cln->next) {
            if (cln->handler == ngx_http_kvgate_cleanup) {
                ctx = cln->data;
                ngx_http_set_ctx(r, ctx, ngx_http_kvgate_module);
                break;
            }
        }
    }

    return ctx;
}


/* ---- what is routed ---- */

static ngx_uint_t
ngx_http_kvgate_ends(ngx_str_t *uri, const char *end, size_t len)
{
    return uri->len >= len && ngx_memcmp(uri->data + uri->len - len, end, len) == 0;
}


static ngx_uint_t
ngx_http_kvgate_is_json(ngx_http_request_t *r)
{
    ngx_str_t  *type;

    if (r->headers_in.content_type == NULL) {
        return 0;
    }

    type = &r->headers_in.content_type->value;

    return type->len >= sizeof("application/json") - 1
           && ngx_strncasecmp(type->data, (u_char *) "application/json", sizeof("application/json") - 1) == 0
           && (type->len == sizeof("application/json") - 1 || ngx_strchr("; \t", type->data[sizeof("application/json") - 1]) != NULL);
}


/* A POST of JSON to an endpoint that takes a prompt. Workers read bodies whatever their Content-Type says, so where tokens are
 * limited, no other type passes by that. */
static ngx_uint_t
ngx_http_kvgate_has_prompt(ngx_http_request_t *r, ngx_uint_t limited, enum kvg_endpoint *endpoint)
{
    if (!(r->method & NGX_HTTP_POST) || !(limited || ngx_http_kvgate_is_json(r))) {
        return 0;
    }

    if (ngx_http_kvgate_ends(&r->uri, "/chat/completions", sizeof("/chat/completions") - 1)) {
        *endpoint = KVG_CHAT_COMPLETIONS;
        return 1;
    }

    *endpoint = KVG_COMPLETIONS;

    return ngx_http_kvgate_ends(&r->uri, "/completions", sizeof("/completions") - 1);
}


/* The operator's salt as it travels in a header: as it is where it is short and printable without spaces, else "sha1:" and its
 * hash. */
static ngx_int_t
ngx_http_kvgate_salt(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_http_kvgate_loc_conf_t *lcf)
{
    u_char      digest[20];
    size_t      i;
    ngx_str_t   value;
    ngx_sha1_t  sha1;

    if (lcf->salt == NULL) {
        return NGX_OK;
    }

    if (ngx_http_complex_value(r, lcf->salt, &value) != NGX_OK) {
        return NGX_ERROR;
    }

    for (i = 0; i < value.len; i++) {
        if (value.data[i] <= ' ' || value.data[i] >= 0x7f) {
            break;
        }
    }

    if (i < value.len || value.len > NGX_HTTP_KVGATE_SALT) {
        ngx_sha1_init(&sha1);
        ngx_sha1_update(&sha1, value.data, value.len);
        ngx_sha1_final(digest, &sha1);

        value.len = sizeof("sha1:") - 1 + 2 * sizeof(digest);
        value.data = ngx_pnalloc(r->pool, value.len);
        if (value.data == NULL) {
            return NGX_ERROR;
        }

        (void) ngx_hex_dump(ngx_cpymem(value.data, "sha1:", sizeof("sha1:") - 1), digest, sizeof(digest));
    }

    ctx->prompt.salt.bytes = (char *) value.data;
    ctx->prompt.salt.len = value.len;

    return NGX_OK;
}


/* ---- deciding ---- */

static void
ngx_http_kvgate_account(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx)
{
    ngx_http_kvgate_pool_t       *pool;
    ngx_http_kvgate_main_conf_t  *conf;

    conf = ngx_http_get_module_main_conf(r, ngx_http_kvgate_module);
    ngx_http_kvgate_count(conf, ctx->reason);
    ngx_http_kvgate_remember(r, ctx);

    if (ctx->prompt.n_ids) {
        ngx_http_kvgate_count_time(&conf->shared->tokenize, ctx->prompt.microseconds);
    }

    if (ctx->lookup_start) {
        ngx_http_kvgate_count_time(&conf->shared->lookup, ctx->lookup_microseconds);
    }

    if (ctx->prompt.model) {
        pool = ctx->prompt.model->pool;
        (void) ngx_atomic_fetch_add(&pool->requests, 1);
        (void) ngx_atomic_fetch_add(&pool->prompt_tokens, ctx->prompt.n_ids);
        (void) ngx_atomic_fetch_add(&pool->hit_tokens, ctx->hit_tokens);
    }
}


static ngx_int_t
ngx_http_kvgate_refuse_prompt(ngx_http_request_t *r, ngx_http_kvgate_prompt_t *p)
{
    return ngx_http_kvgate_send_error(r, p->http_status, "invalid_request_error", p->error.message, p->error.param[0] ? p->error.param : NULL,
                                      p->error_code);
}


void
ngx_http_kvgate_decided(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx)
{
    ctx->waiting = 0;
    ctx->done = 1;
    kvg_arena_free(&ctx->prompt.work);
    ngx_http_kvgate_account(r, ctx);

    r->read_event_handler = ngx_http_block_reading;
    r->write_event_handler = ngx_http_core_run_phases;

    if (ctx->mode == NGX_HTTP_KVGATE_ON) {
        if (ctx->reason == NGX_HTTP_KVGATE_REFUSED || ctx->reason == NGX_HTTP_KVGATE_LIMITED) {
            ngx_http_finalize_request(r, ctx->reason == NGX_HTTP_KVGATE_LIMITED ? ngx_http_kvgate_limit_refuse(r, ctx)
                                                                                 : ngx_http_kvgate_refuse_prompt(r, &ctx->prompt));
            return;
        }

        ctx->routed = ctx->n_candidates != 0;

        if (ngx_http_kvgate_set_body(r, ctx, 1) != NGX_OK || ngx_http_kvgate_set_headers(r, ctx, 1) != NGX_OK
            || ngx_http_kvgate_limit_headers(r, ctx) != NGX_OK)
        {
            ngx_http_finalize_request(r, NGX_HTTP_INTERNAL_SERVER_ERROR);
            return;
        }
    }

    ngx_http_core_run_phases(r);
}


/* Nothing to write yet; nginx calls this on any write event. */
static void
ngx_http_kvgate_wait(ngx_http_request_t *r)
{
    ngx_log_debug0(NGX_LOG_DEBUG_HTTP, r->connection->log, 0, "kvgate: waiting");
}


static void
ngx_http_kvgate_wait_for_redis(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx)
{
    ctx->waiting = 1;
    r->read_event_handler = ngx_http_test_reading;
    r->write_event_handler = ngx_http_kvgate_wait;
}


/* It may be served: by whom? */
static void
ngx_http_kvgate_choose(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx)
{
    ngx_http_kvgate_prompt_t  *p = &ctx->prompt;

    if (!ctx->prompted || p->reason == NGX_HTTP_KVGATE_UNPARSED) {
        ctx->reason = p->reason;

        if (ctx->prompted) {
            ngx_log_error(NGX_LOG_INFO, r->connection->log, 0, "kvgate: not routed by its prompt: %s", p->error.message);
        }

        ngx_http_kvgate_any_worker(r, ctx);

    } else if (ngx_http_kvgate_lookup(r, ctx) == NGX_AGAIN) {
        ngx_http_kvgate_wait_for_redis(r, ctx);
        return;
    }

    ngx_http_kvgate_decided(r, ctx);
}


void
ngx_http_kvgate_limited(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx)
{
    if (ctx->limit == NGX_HTTP_KVGATE_LIMIT_REQUESTS || ctx->limit == NGX_HTTP_KVGATE_LIMIT_TOKENS) {
        ctx->reason = NGX_HTTP_KVGATE_LIMITED;
        ngx_http_kvgate_decided(r, ctx);
        return;
    }

    ngx_http_kvgate_choose(r, ctx);
}


static void
ngx_http_kvgate_prompt_done(ngx_http_request_t *r)
{
    ngx_int_t               rc;
    ngx_http_kvgate_ctx_t  *ctx;

    ctx = ngx_http_kvgate_ctx(r);

    if (ctx->in_thread) {
        return;
    }

    if (ctx->prompt.reason == NGX_HTTP_KVGATE_REFUSED) {
        ctx->reason = ctx->prompt.reason;
        ngx_http_kvgate_decided(r, ctx);
        return;
    }

    rc = ngx_http_kvgate_limit_ask(r, ctx);

    if (rc == NGX_AGAIN) {
        ngx_http_kvgate_wait_for_redis(r, ctx);
        return;
    }

    if (rc == NGX_ERROR) {
        ngx_http_finalize_request(r, NGX_HTTP_INTERNAL_SERVER_ERROR);
        return;
    }

    ngx_http_kvgate_limited(r, ctx);
}


/* ---- the prompt, in a thread where the body is large ---- */

#if (NGX_THREADS)

static void
ngx_http_kvgate_thread(void *data, ngx_log_t *log)
{
    ngx_http_kvgate_prompt_run(*(ngx_http_kvgate_prompt_t **) data);
}


static void
ngx_http_kvgate_thread_event(ngx_event_t *ev)
{
    ngx_connection_t       *c;
    ngx_http_request_t     *r;
    ngx_http_kvgate_ctx_t  *ctx = ev->data;

    r = ctx->request;
    c = r->connection;
    ngx_http_set_log_request(c->log, r);

    if (ev->timedout) {
        ngx_log_error(NGX_LOG_WARN, c->log, 0, "kvgate: tokenizing a body of %uz bytes takes over a minute", ctx->prompt.size);
        ev->timedout = 0;
        ngx_add_timer(ev, NGX_HTTP_KVGATE_THREAD_TIMEOUT);
        return;
    }

    if (ev->timer_set) {
        ngx_del_timer(ev);
    }

    ctx->in_thread = 0;
    ctx->waiting = 0;
    r->main->blocked--;
    r->aio = 0;

    /* prompt_done, or nginx's finalizer where the client has left meanwhile */
    r->write_event_handler(r);
    ngx_http_run_posted_requests(c);
}


static ngx_int_t
ngx_http_kvgate_post_thread(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx)
{
    ngx_str_t           name = ngx_string("default");
    ngx_thread_pool_t  *tp;
    ngx_thread_task_t  *task;

    tp = ngx_thread_pool_get((ngx_cycle_t *) ngx_cycle, &name);
    task = tp ? ngx_thread_task_alloc(r->pool, sizeof(ngx_http_kvgate_prompt_t *)) : NULL;

    if (task == NULL) {
        return NGX_DECLINED;
    }

    *(ngx_http_kvgate_prompt_t **) task->ctx = &ctx->prompt;
    task->handler = ngx_http_kvgate_thread;
    task->event.data = ctx;
    task->event.handler = ngx_http_kvgate_thread_event;
    task->event.log = r->connection->log;

    if (ngx_thread_task_post(tp, task) != NGX_OK) {
        return NGX_DECLINED;
    }

    /* The timer keeps a quitting nginx worker alive until the thread has ended. */
    ngx_add_timer(&task->event, NGX_HTTP_KVGATE_THREAD_TIMEOUT);
    r->main->blocked++;
    r->aio = 1;
    ctx->in_thread = 1;
    ctx->waiting = 1;
    r->read_event_handler = ngx_http_test_reading;
    r->write_event_handler = ngx_http_kvgate_prompt_done;

    return NGX_OK;
}

#endif


static ngx_int_t
ngx_http_kvgate_slices(ngx_http_request_t *r, ngx_http_kvgate_prompt_t *p)
{
    ngx_uint_t    n;
    ngx_buf_t    *b;
    ngx_chain_t  *cl;

    n = 0;

    for (cl = r->request_body ? r->request_body->bufs : NULL; cl; cl = cl->next) {
        n++;
    }

    p->slices = ngx_palloc(r->pool, (n + 1) * sizeof(ngx_buf_t *));
    if (p->slices == NULL) {
        return NGX_ERROR;
    }

    for (cl = r->request_body ? r->request_body->bufs : NULL; cl; cl = cl->next) {
        b = cl->buf;
        p->size += ngx_buf_size(b);

        if (b->in_file) {
            p->fd = b->file->fd;
            p->file_pos = b->file_pos;

        } else if (b->last > b->pos) {
            p->slices[p->n_slices++] = b;
        }
    }

    return NGX_OK;
}


static void
ngx_http_kvgate_body_read(ngx_http_request_t *r)
{
    ngx_http_kvgate_ctx_t       *ctx;
    ngx_http_kvgate_loc_conf_t  *lcf;

    ctx = ngx_http_kvgate_ctx(r);
    lcf = ngx_http_get_module_loc_conf(r, ngx_http_kvgate_module);
    r->preserve_body = 1;

    ctx->prompt.conf = ngx_http_get_module_main_conf(r, ngx_http_kvgate_module);
    ctx->prompt.now = ngx_time();
    ctx->prompt.priority = lcf->priority;
    ctx->prompt.append = ctx->mode == NGX_HTTP_KVGATE_ON;
    ctx->prompt.count = lcf->limit && lcf->limit->tokens.rate > 0;

    if (!ctx->prompted) {
        ngx_http_kvgate_prompt_done(r);
        return;
    }

    if (ngx_http_kvgate_slices(r, &ctx->prompt) != NGX_OK) {
        ngx_http_finalize_request(r, NGX_HTTP_INTERNAL_SERVER_ERROR);
        return;
    }

#if (NGX_THREADS)
    if (ctx->prompt.size > NGX_HTTP_KVGATE_INLINE && ngx_http_kvgate_post_thread(r, ctx) == NGX_OK) {
        return;
    }
#endif

    ngx_http_kvgate_prompt_run(&ctx->prompt);
    ngx_http_kvgate_prompt_done(r);
}


/* ---- the phase handler ---- */

/* Another pass: of a request that is decided and was resumed, or in the location that it was redirected to (also when its body
 * could not be read). */
static ngx_int_t
ngx_http_kvgate_again(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_uint_t mode)
{
    if (!ctx->done) {
        ctx->done = r->internal;
        return r->internal ? NGX_DECLINED : NGX_AGAIN;
    }

    if (ctx->mode == NGX_HTTP_KVGATE_ON && r->internal) {
        if (ngx_http_kvgate_set_body(r, ctx, mode == NGX_HTTP_KVGATE_ON) != NGX_OK
            || ngx_http_kvgate_set_headers(r, ctx, mode == NGX_HTTP_KVGATE_ON) != NGX_OK)
        {
            return NGX_HTTP_INTERNAL_SERVER_ERROR;
        }

    } else if (mode == NGX_HTTP_KVGATE_ON && r->internal && ngx_http_kvgate_set_headers(r, ctx, 0) != NGX_OK) {
        /* from a location that observes: nothing is added, but a client's X-Kvgate-* stays out all the same */
        return NGX_HTTP_INTERNAL_SERVER_ERROR;
    }

    return NGX_DECLINED;
}


static ngx_int_t
ngx_http_kvgate_pass(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_uint_t bypassed)
{
    ngx_int_t  rc;

    ctx->done = 1;

    if (bypassed) {
        ctx->reason = NGX_HTTP_KVGATE_BYPASS;
        ngx_http_kvgate_account(r, ctx);

    } else if (ctx->mode == NGX_HTTP_KVGATE_ON) {
        rc = ngx_http_kvgate_models(r);

        if (rc != NGX_DECLINED) {
            ngx_http_finalize_request(r, rc);
            return NGX_DONE;
        }

        ngx_http_kvgate_any_worker(r, ctx);
        ctx->routed = ctx->n_candidates != 0;
    }

    return NGX_DECLINED;
}


ngx_int_t
ngx_http_kvgate_handler(ngx_http_request_t *r)
{
    ngx_int_t                    rc;
    ngx_uint_t                   bypassed, limited;
    ngx_http_kvgate_ctx_t       *ctx;
    ngx_http_kvgate_loc_conf_t  *lcf;

    if (r != r->main) {
        return NGX_DECLINED;
    }

    lcf = ngx_http_get_module_loc_conf(r, ngx_http_kvgate_module);
    ctx = ngx_http_kvgate_ctx(r);

    if (ctx) {
        return ngx_http_kvgate_again(r, ctx, lcf->mode);
    }

    if (lcf->mode == NGX_HTTP_KVGATE_OFF) {
        return NGX_DECLINED;
    }

    ctx = ngx_http_kvgate_create_ctx(r);
    if (ctx == NULL) {
        return NGX_HTTP_INTERNAL_SERVER_ERROR;
    }

    ctx->mode = lcf->mode;
    rc = ngx_http_test_predicates(r, lcf->bypass);
    bypassed = rc == NGX_DECLINED;

    if (rc == NGX_ERROR || ngx_http_kvgate_salt(r, ctx, lcf) != NGX_OK
        || (ctx->mode == NGX_HTTP_KVGATE_ON && ngx_http_kvgate_set_headers(r, ctx, 1) != NGX_OK))
    {
        return NGX_HTTP_INTERNAL_SERVER_ERROR;
    }

    limited = lcf->limit && ctx->mode == NGX_HTTP_KVGATE_ON;
    ctx->prompted = ngx_http_kvgate_has_prompt(r, limited, &ctx->prompt.endpoint);

    if (bypassed || (!ctx->prompted && !(limited && (r->method & NGX_HTTP_POST)))) {
        return ngx_http_kvgate_pass(r, ctx, bypassed);
    }

    r->request_body_in_single_buf = 1;
    rc = ngx_http_read_client_request_body(r, ngx_http_kvgate_body_read);

    if (rc >= NGX_HTTP_SPECIAL_RESPONSE) {
        return rc;
    }

    ngx_http_finalize_request(r, NGX_DONE);

    return NGX_DONE;
}
