/* kvgate_limit: how many requests and prompt tokens a key may send. The counts are in Redis, where all gateways share them
 * (redis-schemas/limit.lua); tokens are counted before anything is sent. Where Redis cannot be asked, requests pass.
 */
#include "ngx_http_kvgate.h"
#include <ngx_sha1.h>
#include <math.h>


/* ---- the directive ---- */

/* N/s, Nr/m and the like; the burst is N unless it is given. NULL, or what is wrong. */
static const char *
ngx_http_kvgate_limit_rate(ngx_str_t *text, struct kvg_limit_rate *rate)
{
    u_char     *slash;
    size_t      len;
    ngx_int_t   n, seconds;

    slash = ngx_strlchr(text->data, text->data + text->len, '/');

    if (slash == NULL) {
        return "a rate is a number and a unit, as in 60r/m";
    }

    len = slash - text->data;
    len -= len > 1 && slash[-1] == 'r';
    n = ngx_atoi(text->data, len);
    seconds = 0;

    if (text->data + text->len == slash + 2) {
        seconds = slash[1] == 's' ? 1 : slash[1] == 'm' ? 60 : slash[1] == 'h' ? 3600 : slash[1] == 'd' ? 86400 : 0;
    }

    if (seconds == 0) {
        return "the unit must be /s, /m, /h or /d";
    }

    if (n <= 0) {
        return "the number before the unit must be whole and over 0";
    }

    rate->rate = (double) n / seconds;
    rate->burst = rate->burst > 0 ? rate->burst : n;

    return NULL;
}


static const char *
ngx_http_kvgate_limit_burst(ngx_str_t *text, struct kvg_limit_rate *rate)
{
    ngx_int_t  n;

    n = ngx_atoi(text->data, text->len);

    if (n <= 0) {
        return "a burst must be a whole number over 0";
    }

    rate->burst = n;

    return NULL;
}


static ngx_uint_t
ngx_http_kvgate_limit_is(ngx_str_t *text, const char *name, ngx_str_t *value)
{
    size_t  len = ngx_strlen(name);

    if (text->len < len || ngx_strncmp(text->data, name, len) != 0) {
        return 0;
    }

    value->data = text->data + len;
    value->len = text->len - len;

    return 1;
}


static char *
ngx_http_kvgate_limit_key(ngx_conf_t *cf, ngx_str_t *value, ngx_http_kvgate_limit_t *limit)
{
    ngx_http_compile_complex_value_t  ccv;

    ngx_memzero(&ccv, sizeof(ccv));
    ccv.cf = cf;
    ccv.value = value;
    ccv.complex_value = &limit->key;

    return ngx_http_compile_complex_value(&ccv) == NGX_OK ? NGX_CONF_OK : NGX_CONF_ERROR;
}


char *
ngx_http_kvgate_limit(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    ngx_http_kvgate_loc_conf_t *lcf = conf;

    ngx_str_t                *value, text;
    ngx_uint_t                i;
    const char               *wrong;
    ngx_http_kvgate_limit_t  *limit;

    if (lcf->limit != NGX_CONF_UNSET_PTR) {
        return "is duplicate";
    }

    value = cf->args->elts;

    if (cf->args->nelts == 2 && ngx_strcmp(value[1].data, "off") == 0) {
        lcf->limit = NULL;
        return NGX_CONF_OK;
    }

    limit = ngx_pcalloc(cf->pool, sizeof(ngx_http_kvgate_limit_t));
    if (limit == NULL) {
        return NGX_CONF_ERROR;
    }

    lcf->limit = limit;

    for (i = 1; i < cf->args->nelts; i++) {
        wrong = NULL;

        if (ngx_http_kvgate_limit_is(&value[i], "key=", &text) && text.len) {
            if (ngx_http_kvgate_limit_key(cf, &text, limit) != NGX_CONF_OK) {
                return NGX_CONF_ERROR;
            }

        } else if (ngx_http_kvgate_limit_is(&value[i], "requests=", &text)) {
            wrong = ngx_http_kvgate_limit_rate(&text, &limit->requests);

        } else if (ngx_http_kvgate_limit_is(&value[i], "tokens=", &text)) {
            wrong = ngx_http_kvgate_limit_rate(&text, &limit->tokens);

        } else if (ngx_http_kvgate_limit_is(&value[i], "burst_requests=", &text)) {
            wrong = ngx_http_kvgate_limit_burst(&text, &limit->requests);

        } else if (ngx_http_kvgate_limit_is(&value[i], "burst_tokens=", &text)) {
            wrong = ngx_http_kvgate_limit_burst(&text, &limit->tokens);

        } else if (ngx_http_kvgate_limit_is(&value[i], "name=", &text)) {
            limit->name = text;
            wrong = kvg_name_valid((char *) text.data, text.len) ? NULL : "a name is made of A-Z a-z 0-9 . _ / -";

        } else {
            wrong = "expected key=, requests=, tokens=, burst_requests=, burst_tokens= or name=";
        }

        if (wrong) {
            ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "invalid parameter \"%V\" of kvgate_limit: %s", &value[i], wrong);
            return NGX_CONF_ERROR;
        }
    }

    if (limit->key.value.data == NULL) {
        return "needs a \"key=\"";
    }

    if (limit->requests.rate == 0 && limit->tokens.rate == 0) {
        return "needs \"requests=\" or \"tokens=\"";
    }

    return NGX_CONF_OK;
}


/* ---- asking ---- */

static void
ngx_http_kvgate_limit_id(ngx_http_kvgate_limit_t *limit, ngx_str_t *key, char *id)
{
    u_char      digest[20];
    ngx_sha1_t  sha1;

    ngx_sha1_init(&sha1);
    ngx_sha1_update(&sha1, limit->name.data, limit->name.len);
    ngx_sha1_update(&sha1, ":", 1);
    ngx_sha1_update(&sha1, key->data, key->len);
    ngx_sha1_final(digest, &sha1);
    *ngx_hex_dump((u_char *) id, digest, sizeof(digest)) = '\0';
}


static void
ngx_http_kvgate_limit_unchecked(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_http_kvgate_reason_e failure, const char *why)
{
    ngx_http_kvgate_main_conf_t  *conf;

    conf = ngx_http_get_module_main_conf(r, ngx_http_kvgate_module);
    ctx->limit = NGX_HTTP_KVGATE_LIMIT_UNCHECKED;
    ctx->failure = failure == NGX_HTTP_KVGATE_REDIS_ERROR ? NGX_HTTP_KVGATE_NONE : failure;
    (void) ngx_atomic_fetch_add(&conf->shared->limits[ctx->limit], 1);
    ngx_http_kvgate_complain(NGX_LOG_ERR, r->connection->log, "kvgate_limit cannot be asked (%s): requests pass without it", why);
}


static void
ngx_http_kvgate_limit_read(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, const redisReply *answer)
{
    struct kvg_error              err;
    ngx_http_kvgate_main_conf_t  *conf;

    if (kvg_limit_parse(answer, &ctx->left, &err) != KVG_OK) {
        ngx_http_kvgate_limit_unchecked(r, ctx, NGX_HTTP_KVGATE_REDIS_ERROR, err.message);
        return;
    }

    conf = ngx_http_get_module_main_conf(r, ngx_http_kvgate_module);
    ctx->limit = ngx_strcmp(ctx->left.why, "ok") == 0         ? NGX_HTTP_KVGATE_LIMIT_PASSED
                 : ngx_strcmp(ctx->left.why, "requests") == 0 ? NGX_HTTP_KVGATE_LIMIT_REQUESTS
                                                              : NGX_HTTP_KVGATE_LIMIT_TOKENS;
    (void) ngx_atomic_fetch_add(&conf->shared->limits[ctx->limit], 1);
}


static void
ngx_http_kvgate_limit_answered(void *data, ngx_http_kvgate_reason_e failure, const redisReply *answer)
{
    ngx_connection_t       *c;
    ngx_http_request_t     *r;
    ngx_http_kvgate_ctx_t  *ctx = data;

    r = ctx->request;
    c = r->connection;
    ctx->lookup = NULL;
    ngx_http_set_log_request(c->log, r);

    if (answer) {
        ngx_http_kvgate_limit_read(r, ctx, answer);

    } else {
        ngx_http_kvgate_limit_unchecked(r, ctx, failure, (char *) ngx_http_kvgate_reasons[failure].data);
    }

    ngx_http_kvgate_limited(r, ctx);
    ngx_http_run_posted_requests(c);
}


ngx_int_t
ngx_http_kvgate_limit_ask(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx)
{
    ngx_str_t                     key;
    struct kvg_limit_query        query;
    ngx_http_kvgate_limit_t      *limit;
    ngx_http_kvgate_reason_e      failure;
    ngx_http_kvgate_loc_conf_t   *lcf;
    ngx_http_kvgate_main_conf_t  *conf;

    lcf = ngx_http_get_module_loc_conf(r, ngx_http_kvgate_module);
    limit = lcf->limit;

    if (limit == NULL || ctx->mode != NGX_HTTP_KVGATE_ON) {
        return NGX_OK;
    }

    if (ngx_http_complex_value(r, &limit->key, &key) != NGX_OK) {
        return NGX_ERROR;
    }

    if (key.len == 0) {
        return NGX_OK;
    }

    conf = ngx_http_get_module_main_conf(r, ngx_http_kvgate_module);
    ngx_memzero(&query, sizeof(query));
    query.prefix = (char *) conf->redis_prefix.data;
    query.tokens = ctx->prompt.all_tokens;
    query.requests_rate = limit->requests;
    query.tokens_rate = limit->tokens;
    ngx_http_kvgate_limit_id(limit, &key, query.id);

    ctx->lookup = ngx_http_kvgate_redis_limit(&query, ngx_http_kvgate_limit_answered, ctx, &failure);

    if (ctx->lookup) {
        return NGX_AGAIN;
    }

    ngx_http_kvgate_limit_unchecked(r, ctx, failure, (char *) ngx_http_kvgate_reasons[failure].data);

    return NGX_OK;
}


/* ---- saying ---- */

/* As OpenAI writes it: 20ms, 1.5s, 6m0s, 2h3m0s. */
static u_char *
ngx_http_kvgate_duration(u_char *p, double seconds)
{
    ngx_uint_t  ms, whole;

    ms = (ngx_uint_t) (seconds * 1000 + 0.999);
    whole = ms / 1000;
    ms %= 1000;

    if (whole == 0) {
        return ngx_sprintf(p, "%uims", ms);
    }

    if (whole >= 3600) {
        p = ngx_sprintf(p, "%uih", whole / 3600);
    }

    if (whole >= 60) {
        return ngx_sprintf(p, "%uim%uis", whole / 60 % 60, whole % 60);
    }

    return ms ? ngx_sprintf(p, "%ui.%03uis", whole, ms) : ngx_sprintf(p, "%uis", whole);
}


static ngx_int_t
ngx_http_kvgate_limit_header(ngx_http_request_t *r, const char *name, double number, ngx_uint_t is_time)
{
    ngx_str_t  value;

    value.data = ngx_pnalloc(r->pool, 4 * NGX_INT_T_LEN);
    if (value.data == NULL) {
        return NGX_ERROR;
    }

    value.len = (is_time ? ngx_http_kvgate_duration(value.data, number) : ngx_sprintf(value.data, "%.0f", ngx_max(number, 0))) - value.data;

    return ngx_http_kvgate_add_header(r, name, &value);
}


ngx_int_t
ngx_http_kvgate_limit_headers(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx)
{
    ngx_uint_t                   i;
    ngx_http_kvgate_limit_t     *limit;
    ngx_http_kvgate_loc_conf_t  *lcf;

    lcf = ngx_http_get_module_loc_conf(r, ngx_http_kvgate_module);
    limit = lcf->limit;

    if (limit == NULL || ctx->limit == NGX_HTTP_KVGATE_LIMIT_NONE || ctx->limit == NGX_HTTP_KVGATE_LIMIT_UNCHECKED) {
        return NGX_OK;
    }

    struct {
        const char  *name;
        double       number;
        ngx_uint_t   is_time;
    } headers[] = {
        { "x-ratelimit-limit-requests", limit->requests.burst, 0 },
        { "x-ratelimit-remaining-requests", ctx->left.requests.left, 0 },
        { "x-ratelimit-reset-requests", ctx->left.requests.full, 1 },
        { "x-ratelimit-limit-tokens", limit->tokens.burst, 0 },
        { "x-ratelimit-remaining-tokens", ctx->left.tokens.left, 0 },
        { "x-ratelimit-reset-tokens", ctx->left.tokens.full, 1 }
    };

    for (i = limit->requests.rate > 0 ? 0 : 3; i < (limit->tokens.rate > 0 ? 6 : 3); i++) {
        if (ngx_http_kvgate_limit_header(r, headers[i].name, headers[i].number, headers[i].is_time) != NGX_OK) {
            return NGX_ERROR;
        }
    }

    return NGX_OK;
}


static ngx_int_t
ngx_http_kvgate_limit_retry(ngx_http_request_t *r, double seconds)
{
    ngx_str_t  no = ngx_string("false");

    if (seconds < 0) {
        return ngx_http_kvgate_add_header(r, "x-should-retry", &no);
    }

    if (ngx_http_kvgate_limit_header(r, "Retry-After", ceil(ngx_max(seconds, 0.001)), 0) != NGX_OK) {
        return NGX_ERROR;
    }

    return ngx_http_kvgate_limit_header(r, "retry-after-ms", ceil(seconds * 1000), 0);
}


ngx_int_t
ngx_http_kvgate_limit_refuse(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx)
{
    u_char                       message[256], wait[4 * NGX_INT_T_LEN];
    ngx_uint_t                   tokens;
    struct kvg_limit_rate       *rate;
    ngx_http_kvgate_loc_conf_t  *lcf;

    lcf = ngx_http_get_module_loc_conf(r, ngx_http_kvgate_module);
    tokens = ctx->limit == NGX_HTTP_KVGATE_LIMIT_TOKENS;
    rate = tokens ? &lcf->limit->tokens : &lcf->limit->requests;

    if (ngx_http_kvgate_limit_headers(r, ctx) != NGX_OK || ngx_http_kvgate_limit_retry(r, ctx->left.retry_after) != NGX_OK) {
        return NGX_HTTP_INTERNAL_SERVER_ERROR;
    }

    if (ctx->left.retry_after < 0) {
        *ngx_snprintf(message, sizeof(message) - 1, "Request too large: its %ui prompt tokens are over the limit of %.0f", ctx->prompt.all_tokens,
                      rate->burst) = '\0';

    } else {
        *ngx_http_kvgate_duration(wait, ctx->left.retry_after) = '\0';
        *ngx_snprintf(message, sizeof(message) - 1, "Rate limit reached on %s: limit %.0f, left %.0f, requested %ui. Please try again in %s.",
                      tokens ? "tokens" : "requests", rate->burst, ngx_max((tokens ? ctx->left.tokens.left : ctx->left.requests.left), 0),
                      tokens ? ctx->prompt.all_tokens : 1, wait) = '\0';
    }

    return ngx_http_kvgate_send_error(r, NGX_HTTP_TOO_MANY_REQUESTS, tokens ? "tokens" : "requests", (char *) message, NULL,
                                      "rate_limit_exceeded");
}
