/* What the upstream is sent: the client's body with the ids in place of its final brace, and our headers in place of the
 * client's X-Kvgate-*. The client's own body stays beside it: a location without kvgate, reached by an internal redirect, sends
 * that.
 */
#include "ngx_http_kvgate.h"


static ngx_uint_t
ngx_http_kvgate_own_header(const ngx_table_elt_t *h)
{
    return h->key.len >= sizeof("X-Kvgate-") - 1
           && ngx_strncasecmp(h->key.data, (u_char *) "X-Kvgate-", sizeof("X-Kvgate-") - 1) == 0;
}


/* nginx keeps pointers into the list's parts, so headers cannot move: the list is made anew without X-Kvgate-*, and the old parts
 * stay for those pointers. */
static ngx_int_t
ngx_http_kvgate_strip(ngx_http_request_t *r)
{
    ngx_uint_t        i, found;
    ngx_list_t        old;
    ngx_list_part_t  *part;
    ngx_table_elt_t  *h, *copy;

    found = 0;

    for (part = &r->headers_in.headers.part; part; part = part->next) {
        h = part->elts;

        for (i = 0; i < part->nelts; i++) {
            found |= ngx_http_kvgate_own_header(&h[i]);
        }
    }

    if (!found) {
        return NGX_OK;
    }

    old = r->headers_in.headers;

    if (ngx_list_init(&r->headers_in.headers, r->pool, 20, sizeof(ngx_table_elt_t)) != NGX_OK) {
        return NGX_ERROR;
    }

    for (part = &old.part; part; part = part->next) {
        h = part->elts;

        for (i = 0; i < part->nelts; i++) {
            if (ngx_http_kvgate_own_header(&h[i])) {
                continue;
            }

            copy = ngx_list_push(&r->headers_in.headers);
            if (copy == NULL) {
                return NGX_ERROR;
            }

            *copy = h[i];
        }
    }

    return NGX_OK;
}


static ngx_int_t
ngx_http_kvgate_push(ngx_http_request_t *r, char *name, char *lowcase, size_t len, ngx_str_t *value)
{
    ngx_table_elt_t  *h;

    h = ngx_list_push(&r->headers_in.headers);
    if (h == NULL) {
        return NGX_ERROR;
    }

    h->hash = 1;
    h->key.data = (u_char *) name;
    h->key.len = len;
    h->lowcase_key = (u_char *) lowcase;
    h->value = *value;
#if (nginx_version >= 1023000)
    h->next = NULL;
#endif

    return NGX_OK;
}


/* What Redis says of the first candidate. Without an answer from there nothing is known, and nothing said. */
static ngx_int_t
ngx_http_kvgate_push_hit(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx)
{
    ngx_str_t  value;

    if (ctx->reason < NGX_HTTP_KVGATE_PREFIX || ctx->reason > NGX_HTTP_KVGATE_TIE) {
        return NGX_OK;
    }

    value.data = ngx_pnalloc(r->pool, NGX_SIZE_T_LEN);
    if (value.data == NULL) {
        return NGX_ERROR;
    }

    value.len = ngx_sprintf(value.data, "%uz", ctx->hit_tokens) - value.data;

    return ngx_http_kvgate_push(r, "X-Kvgate-Hit-Tokens", "x-kvgate-hit-tokens", sizeof("X-Kvgate-Hit-Tokens") - 1, &value);
}


ngx_int_t
ngx_http_kvgate_set_headers(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_uint_t ours)
{
    ngx_str_t                    value;
    ngx_http_kvgate_loc_conf_t  *lcf;

    if (ngx_http_kvgate_strip(r) != NGX_OK) {
        return NGX_ERROR;
    }

    if (!ours) {
        return NGX_OK;
    }

    lcf = ngx_http_get_module_loc_conf(r, ngx_http_kvgate_module);
    ngx_str_set(&value, "off");

    /* also where the body is not looked at: the worker reads it whatever its Content-Type says */
    if (!lcf->priority && (r->method & NGX_HTTP_POST)
        && ngx_http_kvgate_push(r, "X-Kvgate-Priority", "x-kvgate-priority", sizeof("X-Kvgate-Priority") - 1, &value) != NGX_OK)
    {
        return NGX_ERROR;
    }

    if (ctx->prompt.salt.len) {
        value.data = (u_char *) ctx->prompt.salt.bytes;
        value.len = ctx->prompt.salt.len;

        if (ngx_http_kvgate_push(r, "X-Kvgate-Salt", "x-kvgate-salt", sizeof("X-Kvgate-Salt") - 1, &value) != NGX_OK) {
            return NGX_ERROR;
        }
    }

    if (ctx->prompt.n_ids == 0) {
        return NGX_OK;
    }

    value.data = (u_char *) ctx->prompt.model->fingerprint;
    value.len = KVG_HASH_HEX;

    if (ngx_http_kvgate_push(r, "X-Kvgate-Fingerprint", "x-kvgate-fingerprint", sizeof("X-Kvgate-Fingerprint") - 1, &value)
        != NGX_OK)
    {
        return NGX_ERROR;
    }

    return ngx_http_kvgate_push_hit(r, ctx);
}


static ngx_chain_t **
ngx_http_kvgate_append(ngx_pool_t *pool, ngx_chain_t **last, ngx_buf_t *b)
{
    ngx_chain_t  *cl;

    cl = ngx_alloc_chain_link(pool);
    if (cl == NULL) {
        return NULL;
    }

    cl->buf = b;
    cl->next = NULL;
    *last = cl;

    return &cl->next;
}


/* The first `cut` bytes of the body and the tail. Buffers are copied, not their bytes; nginx's reinit for a second upstream
 * rewinds each to its start, and files to offset 0, which holds for the one file that a body can be. */
static ngx_int_t
ngx_http_kvgate_make_body(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx)
{
    off_t         rest, size;
    ngx_buf_t    *b;
    ngx_chain_t  *cl, **last;

    rest = ctx->prompt.cut;
    last = &ctx->bufs;

    for (cl = r->request_body->bufs; cl && rest; cl = cl->next) {
        size = ngx_min(ngx_buf_size(cl->buf), rest);

        if (size == 0) {
            continue;
        }

        b = ngx_alloc_buf(r->pool);
        if (b == NULL) {
            return NGX_ERROR;
        }

        *b = *cl->buf;
        b->last_buf = 0;
        b->last_in_chain = 0;

        if (b->in_file) {
            b->file_last = b->file_pos + size;

        } else {
            b->start = b->pos;
            b->last = b->pos + size;
        }

        rest -= size;
        last = ngx_http_kvgate_append(r->pool, last, b);
        if (last == NULL) {
            return NGX_ERROR;
        }
    }

    b = ngx_calloc_buf(r->pool);
    if (b == NULL) {
        return NGX_ERROR;
    }

    b->memory = 1;
    b->last_buf = 1;
    b->start = b->pos = (u_char *) ctx->prompt.tail.bytes;
    b->end = b->last = b->pos + ctx->prompt.tail.len;

    return ngx_http_kvgate_append(r->pool, last, b) ? NGX_OK : NGX_ERROR;
}


static ngx_int_t
ngx_http_kvgate_set_length(ngx_http_request_t *r, off_t length)
{
    u_char           *p;
    ngx_table_elt_t  *h;

    r->headers_in.content_length_n = length;
    h = r->headers_in.content_length;

    if (h == NULL) {
        return NGX_OK;
    }

    p = ngx_pnalloc(r->pool, NGX_OFF_T_LEN);
    if (p == NULL) {
        return NGX_ERROR;
    }

    h->value.data = p;
    h->value.len = ngx_sprintf(p, "%O", length) - p;

    return NGX_OK;
}


ngx_int_t
ngx_http_kvgate_set_body(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_uint_t ours)
{
    if (ctx->prompt.tail.len == 0 || ours == ctx->rewritten) {
        return NGX_OK;
    }

    if (!ours) {
        ctx->rewritten = 0;
        r->request_body->bufs = ctx->client_bufs;
        return ngx_http_kvgate_set_length(r, ctx->client_length);
    }

    if (ctx->bufs == NULL) {
        ctx->client_bufs = r->request_body->bufs;
        ctx->client_length = ctx->prompt.size;

        if (ngx_http_kvgate_make_body(r, ctx) != NGX_OK) {
            return NGX_ERROR;
        }
    }

    ctx->rewritten = 1;
    r->request_body->bufs = ctx->bufs;

    return ngx_http_kvgate_set_length(r, ctx->prompt.cut + ctx->prompt.tail.len);
}
