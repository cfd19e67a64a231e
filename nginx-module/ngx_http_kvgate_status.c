/* kvgate_status: what this gateway knows and has counted, as JSON, for Prometheus or as a page for people. The page is status.html,
 * which asks for the JSON every two seconds.
 */
#include "ngx_http_kvgate.h"
#include "ngx_http_kvgate_page.h"  /* made of status.html by nginx's configure */


static void
ngx_http_kvgate_status_served(struct kvg_buf *buf, const ngx_http_kvgate_served_t *served)
{
    kvg_buf_printf(buf, "{\"requests\":%llu,\"failures\":%llu,\"prompt_tokens\":%llu,\"predicted_hit_tokens\":%llu,"
                        "\"told\":{\"requests\":%llu,\"prompt_tokens\":%llu,\"predicted_hit_tokens\":%llu,\"cached_tokens\":%llu}}",
                   (unsigned long long) served->requests, (unsigned long long) served->failures,
                   (unsigned long long) served->prompt_tokens, (unsigned long long) served->hit_tokens,
                   (unsigned long long) served->told, (unsigned long long) served->told_prompt_tokens,
                   (unsigned long long) served->told_hit_tokens, (unsigned long long) served->cached_tokens);
}


static void
ngx_http_kvgate_status_worker(struct kvg_buf *buf, const ngx_http_kvgate_worker_t *w)
{
    kvg_buf_puts(buf, "{\"id\":");
    kvg_buf_json_string(buf, w->live.worker, ngx_strlen(w->live.worker));
    kvg_buf_puts(buf, ",\"addr\":");
    kvg_buf_json_string(buf, w->live.addr, ngx_strlen(w->live.addr));
    kvg_buf_puts(buf, ",\"state\":");
    kvg_buf_json_string(buf, w->live.state, ngx_strlen(w->live.state));
    kvg_buf_puts(buf, ",\"version\":");
    kvg_buf_json_string(buf, w->live.version, ngx_strlen(w->live.version));
    kvg_buf_printf(buf, ",\"lease\":%llu,\"beat\":%llu,\"running\":%.0f,\"waiting\":%.0f,\"blocks_used\":%.0f,"
                        "\"blocks_total\":%.0f,\"backlog\":%.0f,\"reachable\":%s,\"in_flight\":%u,\"served\":",
                   (unsigned long long) w->live.lease, (unsigned long long) w->live.beat, w->live.running, w->live.waiting,
                   w->live.blocks_used, w->live.blocks_total, w->live.backlog, ngx_http_kvgate_is_down(w) ? "false" : "true",
                   (unsigned) w->flight);
    ngx_http_kvgate_status_served(buf, &w->served);
    kvg_buf_puts(buf, "}");
}


static void
ngx_http_kvgate_status_choice(struct kvg_buf *buf, const ngx_http_kvgate_shown_t *choice)
{
    kvg_buf_puts(buf, "{\"worker\":");
    kvg_buf_json_string(buf, choice->worker, ngx_strlen(choice->worker));
    kvg_buf_printf(buf, ",\"hit_tokens\":%llu", (unsigned long long) choice->hit_tokens);

    if (choice->cost >= 0) {
        kvg_buf_printf(buf, ",\"backlog\":%.0f,\"cost\":%.0f}", choice->backlog, choice->cost);

    } else {
        kvg_buf_puts(buf, ",\"backlog\":null,\"cost\":null}");
    }
}


static void
ngx_http_kvgate_status_decision(struct kvg_buf *buf, const ngx_http_kvgate_decision_t *decision)
{
    ngx_uint_t  i;

    kvg_buf_printf(buf, "{\"number\":%llu,\"at\":%llu,\"reason\":\"%s\",\"prompt_tokens\":%llu,\"cached_tokens\":",
                   (unsigned long long) decision->number, (unsigned long long) decision->at,
                   (char *) ngx_http_kvgate_reasons[decision->reason].data, (unsigned long long) decision->prompt_tokens);

    if (decision->cached_tokens >= 0) {
        kvg_buf_printf(buf, "%lld", (long long) decision->cached_tokens);

    } else {
        kvg_buf_puts(buf, "null");
    }

    kvg_buf_printf(buf, ",\"tokenize_us\":%u,\"lookup_us\":%u,\"choices\":[", (unsigned) decision->tokenize, (unsigned) decision->lookup);

    for (i = 0; i < decision->n; i++) {
        kvg_buf_puts(buf, i ? "," : "");
        ngx_http_kvgate_status_choice(buf, &decision->choices[i]);
    }

    kvg_buf_puts(buf, "]}");
}


/* Newest first. */
static void
ngx_http_kvgate_status_decisions(struct kvg_buf *buf, const ngx_http_kvgate_pool_t *pool)
{
    uint64_t                           number;
    ngx_uint_t                         written;
    const ngx_http_kvgate_decision_t  *decision;

    kvg_buf_puts(buf, "\"decisions\":[");
    written = 0;

    for (number = pool->decided; number && number + NGX_HTTP_KVGATE_DECISIONS > pool->decided; number--) {
        decision = &pool->decisions[number % NGX_HTTP_KVGATE_DECISIONS];

        if (decision->number == number) {
            kvg_buf_puts(buf, written++ ? "," : "");
            ngx_http_kvgate_status_decision(buf, decision);
        }
    }

    kvg_buf_puts(buf, "]");
}


static void
ngx_http_kvgate_status_model(struct kvg_buf *buf, ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_model_t *model)
{
    ngx_str_t               *alias;
    ngx_uint_t               i;
    ngx_http_kvgate_pool_t   pool;  /* copied, so that the mutex is held for no formatting */

    ngx_http_kvgate_pool_copy(conf, model->pool, &pool);

    kvg_buf_printf(buf, "{\"name\":\"%s\",\"aliases\":[", model->name);
    alias = model->aliases.elts;

    for (i = 0; i < model->aliases.nelts; i++) {
        kvg_buf_puts(buf, i ? "," : "");
        kvg_buf_json_string(buf, (char *) alias[i].data, alias[i].len);
    }

    kvg_buf_printf(buf, "],\"fingerprint\":\"%s\",\"block_size\":%u,\"requests\":%lu,\"prompt_tokens\":%lu,"
                        "\"predicted_hit_tokens\":%lu,\"workers_seen\":%lld,\"served\":",
                   model->fingerprint, (unsigned) model->block_size, (unsigned long) pool.requests, (unsigned long) pool.prompt_tokens,
                   (unsigned long) pool.hit_tokens, (long long) pool.polled);
    ngx_http_kvgate_status_served(buf, &pool.served);
    kvg_buf_puts(buf, ",\"workers\":[");

    for (i = 0; i < pool.n; i++) {
        kvg_buf_puts(buf, i ? "," : "");
        ngx_http_kvgate_status_worker(buf, &pool.workers[i]);
    }

    kvg_buf_puts(buf, "],");
    ngx_http_kvgate_status_decisions(buf, &pool);
    kvg_buf_puts(buf, "}");
}


static void
ngx_http_kvgate_status_write(struct kvg_buf *buf, ngx_http_kvgate_main_conf_t *conf)
{
    ngx_uint_t                i;
    ngx_http_kvgate_model_t  *model;

    kvg_buf_printf(buf, "{\"version\":\"%s\",\"now\":%lld,\"models\":[", NGX_HTTP_KVGATE_VERSION, (long long) ngx_time());
    model = conf->models.elts;

    for (i = 0; i < conf->models.nelts; i++) {
        kvg_buf_puts(buf, i ? "," : "");
        ngx_http_kvgate_status_model(buf, conf, &model[i]);
    }

    kvg_buf_puts(buf, "],\"reasons\":{");

    /* without a model there is no zone */
    for (i = NGX_HTTP_KVGATE_PREFIX; conf->shared && i < NGX_HTTP_KVGATE_REASONS; i++) {
        kvg_buf_printf(buf, "%s\"%s\":%lu", i > NGX_HTTP_KVGATE_PREFIX ? "," : "", (const char *) ngx_http_kvgate_reasons[i].data,
                       (unsigned long) conf->shared->reasons[i]);
    }

    kvg_buf_puts(buf, "},\"limits\":{");

    for (i = NGX_HTTP_KVGATE_LIMIT_PASSED; conf->shared && i < NGX_HTTP_KVGATE_LIMITS; i++) {
        kvg_buf_printf(buf, "%s\"%s\":%lu", i > NGX_HTTP_KVGATE_LIMIT_PASSED ? "," : "", (const char *) ngx_http_kvgate_limits[i].data,
                       (unsigned long) conf->shared->limits[i]);
    }

    kvg_buf_puts(buf, "}}\n");
}


/* ---- which form ---- */

static ngx_str_t *
ngx_http_kvgate_status_accept(ngx_http_request_t *r)
{
    ngx_uint_t        i;
    ngx_list_part_t  *part;
    ngx_table_elt_t  *h;

    for (part = &r->headers_in.headers.part; part; part = part->next) {
        h = part->elts;

        for (i = 0; i < part->nelts; i++) {
            if (h[i].key.len == sizeof("Accept") - 1 && ngx_strncasecmp(h[i].key.data, (u_char *) "Accept", sizeof("Accept") - 1) == 0) {
                return &h[i].value;
            }
        }
    }

    return NULL;
}


typedef enum {
    NGX_HTTP_KVGATE_JSON,
    NGX_HTTP_KVGATE_PROMETHEUS,
    NGX_HTTP_KVGATE_HTML,
    NGX_HTTP_KVGATE_FORMATS
} ngx_http_kvgate_format_e;


/* ?format=json|prometheus|html (FORMATS where it is none of these), else what a browser or Prometheus says that it takes, else JSON. */
static ngx_http_kvgate_format_e
ngx_http_kvgate_status_format(ngx_http_request_t *r)
{
    ngx_str_t   value, *accept;
    ngx_uint_t  i;

    static const ngx_str_t  names[] = { ngx_string("json"), ngx_string("prometheus"), ngx_string("html") };

    if (ngx_http_arg(r, (u_char *) "format", sizeof("format") - 1, &value) == NGX_OK) {
        for (i = 0; i < NGX_HTTP_KVGATE_FORMATS; i++) {
            if (value.len == names[i].len && ngx_memcmp(value.data, names[i].data, value.len) == 0) {
                break;
            }
        }

        return i;
    }

    accept = ngx_http_kvgate_status_accept(r);

    if (accept == NULL) {
        return NGX_HTTP_KVGATE_JSON;
    }

    if (ngx_strstrn(accept->data, "text/html", sizeof("text/html") - 2)) {
        return NGX_HTTP_KVGATE_HTML;
    }

    if (ngx_strstrn(accept->data, "openmetrics", sizeof("openmetrics") - 2)
        || ngx_strstrn(accept->data, "text/plain;version", sizeof("text/plain;version") - 2))
    {
        return NGX_HTTP_KVGATE_PROMETHEUS;
    }

    return NGX_HTTP_KVGATE_JSON;
}


ngx_int_t
ngx_http_kvgate_status_handler(ngx_http_request_t *r)
{
    ngx_str_t                     no_store = ngx_string("no-store"), accept = ngx_string("Accept");
    struct kvg_buf                buf = { NULL, 0, 0, false };
    ngx_http_kvgate_format_e      format;
    ngx_http_kvgate_main_conf_t  *conf;

    static ngx_str_t  types[] = {
        ngx_string("application/json"), ngx_string("text/plain; version=0.0.4; charset=utf-8"), ngx_string("text/html; charset=utf-8")
    };

    if (!(r->method & (NGX_HTTP_GET|NGX_HTTP_HEAD))) {
        return NGX_HTTP_NOT_ALLOWED;
    }

    if (ngx_http_discard_request_body(r) != NGX_OK) {
        return NGX_HTTP_BAD_REQUEST;
    }

    conf = ngx_http_get_module_main_conf(r, ngx_http_kvgate_module);
    format = ngx_http_kvgate_status_format(r);

    if (format == NGX_HTTP_KVGATE_FORMATS) {
        return ngx_http_kvgate_send_error(r, NGX_HTTP_BAD_REQUEST, "invalid_request_error", "format must be json, prometheus or html", "format", NULL);
    }

    if (format == NGX_HTTP_KVGATE_HTML) {
        kvg_buf_add(&buf, ngx_http_kvgate_page, sizeof(ngx_http_kvgate_page) - 1);

    } else if (format == NGX_HTTP_KVGATE_PROMETHEUS) {
        ngx_http_kvgate_metrics(&buf, conf);

    } else {
        ngx_http_kvgate_status_write(&buf, conf);
    }

    if (ngx_http_kvgate_add_header(r, "Cache-Control", &no_store) != NGX_OK || ngx_http_kvgate_add_header(r, "Vary", &accept) != NGX_OK) {
        kvg_buf_free(&buf);
        return NGX_HTTP_INTERNAL_SERVER_ERROR;
    }

    return ngx_http_kvgate_send(r, NGX_HTTP_OK, &types[format], &buf);
}
