/* $kvgate_* */
#include "ngx_http_kvgate.h"


const ngx_str_t  ngx_http_kvgate_reasons[NGX_HTTP_KVGATE_REASONS] = {
    ngx_string(""),
    ngx_string("prefix"),
    ngx_string("load"),
    ngx_string("tie"),
    ngx_string("mismatch"),
    ngx_string("no_workers"),
    ngx_string("redis_timeout"),
    ngx_string("redis_down"),
    ngx_string("redis_error"),
    ngx_string("denied"),
    ngx_string("unparsed"),
    ngx_string("bypass"),
    ngx_string("refused"),
    ngx_string("limited")
};


const ngx_str_t  ngx_http_kvgate_limits[NGX_HTTP_KVGATE_LIMITS] = {
    ngx_string(""),
    ngx_string("passed"),
    ngx_string("requests"),
    ngx_string("tokens"),
    ngx_string("unchecked")
};


/* The hash of the prompt's last whole block: it names the whole prefix, and is what the redis-cli cookbook starts from. */
static ngx_int_t
ngx_http_kvgate_chain_value(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_str_t *value)
{
    value->data = ngx_pnalloc(r->pool, KVG_HASH_HEX + 1);
    if (value->data == NULL) {
        return NGX_ERROR;
    }

    kvg_hash_hex(&ctx->prompt.chain[ctx->prompt.n_blocks - 1], (char *) value->data);
    value->len = KVG_HASH_HEX;

    return NGX_OK;
}


static ngx_int_t
ngx_http_kvgate_number(ngx_http_request_t *r, ngx_str_t *value, const char *format, ngx_uint_t one, ngx_uint_t two)
{
    value->data = ngx_pnalloc(r->pool, 2 * NGX_INT_T_LEN);
    if (value->data == NULL) {
        return NGX_ERROR;
    }

    value->len = ngx_sprintf(value->data, format, one, two) - value->data;

    return NGX_OK;
}


static ngx_int_t
ngx_http_kvgate_model_name(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_str_t *value)
{
    if (ctx->prompt.model) {
        value->data = (u_char *) ctx->prompt.model->name;
        value->len = ngx_strlen(value->data);
    }

    return NGX_OK;
}


/* The worker that the request went to; under observe, the one that it would have gone to. */
static ngx_int_t
ngx_http_kvgate_worker_name(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_str_t *value)
{
    if (ctx->chosen) {
        *value = ctx->chosen->worker;

    } else if (ctx->n_candidates) {
        *value = ctx->candidates[0].worker;
    }

    return NGX_OK;
}


static ngx_int_t
ngx_http_kvgate_prompt_tokens(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_str_t *value)
{
    return ctx->prompt.n_ids ? ngx_http_kvgate_number(r, value, "%ui", ctx->prompt.n_ids, 0) : NGX_OK;
}


static ngx_int_t
ngx_http_kvgate_hit_tokens(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_str_t *value)
{
    size_t  tokens;

    if (ctx->prompt.n_ids == 0) {
        return NGX_OK;
    }

    tokens = ctx->chosen ? ngx_http_kvgate_candidate_hit(ctx, ctx->chosen) : ctx->hit_tokens;

    return ngx_http_kvgate_number(r, value, "%ui", tokens, 0);
}


static ngx_int_t
ngx_http_kvgate_reason_word(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_str_t *value)
{
    *value = ngx_http_kvgate_reasons[ctx->reason];

    return NGX_OK;
}


static ngx_int_t
ngx_http_kvgate_limit_word(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_str_t *value)
{
    *value = ngx_http_kvgate_limits[ctx->limit];

    return NGX_OK;
}


static ngx_int_t
ngx_http_kvgate_chain_hex(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_str_t *value)
{
    return ctx->prompt.n_blocks ? ngx_http_kvgate_chain_value(r, ctx, value) : NGX_OK;
}


static ngx_int_t
ngx_http_kvgate_seconds(ngx_http_request_t *r, ngx_str_t *value, ngx_uint_t microseconds)
{
    return ngx_http_kvgate_number(r, value, "%ui.%06ui", microseconds / 1000000, microseconds % 1000000);
}


static ngx_int_t
ngx_http_kvgate_tokenize_time(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_str_t *value)
{
    return ctx->prompt.conf ? ngx_http_kvgate_seconds(r, value, ctx->prompt.microseconds) : NGX_OK;
}


static ngx_int_t
ngx_http_kvgate_lookup_time(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_str_t *value)
{
    return ctx->lookup_start ? ngx_http_kvgate_seconds(r, value, ctx->lookup_microseconds) : NGX_OK;
}


typedef ngx_int_t (*ngx_http_kvgate_value_pt)(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_str_t *value);

typedef struct {
    ngx_str_t                 name;
    ngx_http_kvgate_value_pt  value;
} ngx_http_kvgate_variable_t;


static ngx_http_kvgate_variable_t  ngx_http_kvgate_variables[] = {
    { ngx_string("kvgate_model"), ngx_http_kvgate_model_name },
    { ngx_string("kvgate_worker"), ngx_http_kvgate_worker_name },
    { ngx_string("kvgate_prompt_tokens"), ngx_http_kvgate_prompt_tokens },
    { ngx_string("kvgate_hit_tokens"), ngx_http_kvgate_hit_tokens },
    { ngx_string("kvgate_reason"), ngx_http_kvgate_reason_word },
    { ngx_string("kvgate_limit_status"), ngx_http_kvgate_limit_word },
    { ngx_string("kvgate_chain"), ngx_http_kvgate_chain_hex },
    { ngx_string("kvgate_tokenize_time"), ngx_http_kvgate_tokenize_time },
    { ngx_string("kvgate_lookup_time"), ngx_http_kvgate_lookup_time }
};


static ngx_int_t
ngx_http_kvgate_get_variable(ngx_http_request_t *r, ngx_http_variable_value_t *v, uintptr_t data)
{
    ngx_str_t               value = ngx_null_string;
    ngx_http_kvgate_ctx_t  *ctx;

    ctx = ngx_http_kvgate_ctx(r->main);

    if (ctx && ngx_http_kvgate_variables[data].value(r, ctx, &value) != NGX_OK) {
        return NGX_ERROR;
    }

    if (value.len == 0) {
        v->not_found = 1;
        return NGX_OK;
    }

    v->valid = 1;
    v->no_cacheable = 0;
    v->not_found = 0;
    v->len = value.len;
    v->data = value.data;

    return NGX_OK;
}


ngx_int_t
ngx_http_kvgate_add_variables(ngx_conf_t *cf)
{
    ngx_uint_t            i;
    ngx_http_variable_t  *var;

    for (i = 0; i < sizeof(ngx_http_kvgate_variables) / sizeof(ngx_http_kvgate_variables[0]); i++) {
        var = ngx_http_add_variable(cf, &ngx_http_kvgate_variables[i].name, NGX_HTTP_VAR_NOCACHEABLE);
        if (var == NULL) {
            return NGX_ERROR;
        }

        var->get_handler = ngx_http_kvgate_get_variable;
        var->data = i;
    }

    return NGX_OK;
}
