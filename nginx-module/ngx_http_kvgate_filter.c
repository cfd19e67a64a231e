/* What passes on its way to the client: how much of the prompt the worker found in its cache, and the end of a stream whose
 * upstream failed. nginx only cuts the connection then; a client of an SSE stream shall see why.
 *
 * When an upstream fails after the header was sent, nginx finalizes it (u->cleanup is NULL from then on) and sends one flush
 * buffer without data. The frame takes its place, and ends the reply properly: the client's connection stays, as the header said.
 */
#include "ngx_http_kvgate.h"


static ngx_http_output_body_filter_pt  ngx_http_next_body_filter;

/* The longest lead ends a line and an event that were cut. */
static u_char  ngx_http_kvgate_frame[] = "\n\ndata: {\"error\":{\"message\":\"the worker's reply ended early\","
                                         "\"type\":\"server_error\",\"param\":null,\"code\":\"upstream_ended_early\"}}\n\n";


static ngx_uint_t
ngx_http_kvgate_is_stream(ngx_http_request_t *r)
{
    ngx_str_t  *type = &r->headers_out.content_type;

    return r->headers_out.content_length_n == -1 && type->len >= sizeof("text/event-stream") - 1
           && ngx_strncasecmp(type->data, (u_char *) "text/event-stream", sizeof("text/event-stream") - 1) == 0;
}


static ngx_uint_t
ngx_http_kvgate_ended_early(ngx_http_request_t *r, ngx_chain_t *in)
{
    ngx_buf_t  *b;

    if (in == NULL || in->next || r->upstream == NULL || !r->upstream->header_sent || r->upstream->cleanup != NULL) {
        return 0;
    }

    b = in->buf;

    return b->flush && !b->last_buf && ngx_buf_size(b) == 0 && ngx_http_kvgate_is_stream(r);
}


static void
ngx_http_kvgate_remember_last(ngx_http_kvgate_ctx_t *ctx, ngx_chain_t *in)
{
    ngx_buf_t  *b;

    for ( /* void */ ; in; in = in->next) {
        b = in->buf;

        if (!ngx_buf_in_memory(b) || b->last == b->pos) {
            continue;
        }

        ctx->last[0] = b->last - b->pos > 1 ? b->last[-2] : ctx->last[1];
        ctx->last[1] = b->last[-1];
    }
}


/* The number behind this member of the reply's usage. Within a string of the reply the quotation mark would be escaped, so the model
 * cannot write it. */
static void
ngx_http_kvgate_read_usage(ngx_http_kvgate_ctx_t *ctx, u_char *p, u_char *last)
{
    static const char  member[] = "{\"cached_tokens\":";

    const ngx_uint_t  whole = sizeof(member) - 1;

    while (p < last) {
        if (ctx->usage_matched == 0) {
            p = memchr(p, '{', last - p);

            if (p == NULL) {
                return;
            }

            ctx->usage_matched = 1;
            p++;
            continue;
        }

        if (ctx->usage_matched < whole) {
            if (*p == member[ctx->usage_matched]) {
                ctx->usage_matched++;
                p++;

            } else {
                ctx->usage_matched = 0;  /* the same byte may be the start */
            }

            continue;
        }

        if (*p >= '0' && *p <= '9' && ctx->usage_matched < whole + 12) {
            ctx->cached_tokens = (ctx->usage_matched == whole ? 0 : ctx->cached_tokens * 10) + *p - '0';
            ctx->usage_matched++;
            p++;

        } else {
            ctx->usage_matched = 0;
        }
    }
}


static void
ngx_http_kvgate_look_at(ngx_http_kvgate_ctx_t *ctx, ngx_chain_t *in)
{
    for ( /* void */ ; in; in = in->next) {
        if (ngx_buf_in_memory(in->buf)) {
            ngx_http_kvgate_read_usage(ctx, in->buf->pos, in->buf->last);
        }
    }
}


static ngx_int_t
ngx_http_kvgate_body_filter(ngx_http_request_t *r, ngx_chain_t *in)
{
    ngx_buf_t              *b;
    ngx_uint_t              skip;
    ngx_chain_t             out;
    ngx_http_kvgate_ctx_t  *ctx;

    ctx = r == r->main ? ngx_http_get_module_ctx(r, ngx_http_kvgate_module) : NULL;

    if (ctx == NULL || ctx->mode != NGX_HTTP_KVGATE_ON || ctx->failed) {
        return ngx_http_next_body_filter(r, in);
    }

    if (!ngx_http_kvgate_ended_early(r, in)) {
        ngx_http_kvgate_remember_last(ctx, in);
        ctx->keepalive = r->keepalive;

        if (ctx->decision) {
            ngx_http_kvgate_look_at(ctx, in);
        }

        return ngx_http_next_body_filter(r, in);
    }

    b = ngx_calloc_buf(r->pool);
    if (b == NULL) {
        return NGX_ERROR;
    }

    skip = ctx->last[1] != '\n' ? 0 : ctx->last[0] != '\n' ? 1 : 2;
    ctx->failed = 1;
    r->keepalive = ctx->keepalive;  /* nginx has just cleared it */
    b->memory = 1;
    b->flush = 1;
    b->last_buf = 1;
    b->last_in_chain = 1;
    b->start = b->pos = ngx_http_kvgate_frame + skip;
    b->end = b->last = ngx_http_kvgate_frame + sizeof(ngx_http_kvgate_frame) - 1;
    out.buf = b;
    out.next = NULL;

    return ngx_http_next_body_filter(r, &out);
}


void
ngx_http_kvgate_filter_init(void)
{
    ngx_http_next_body_filter = ngx_http_top_body_filter;
    ngx_http_top_body_filter = ngx_http_kvgate_body_filter;
}
