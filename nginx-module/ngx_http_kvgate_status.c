/* kvgate_status: what this gateway knows and has counted, as JSON. */
#include "ngx_http_kvgate.h"


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
                        "\"blocks_total\":%.0f,\"backlog\":%.0f,\"reachable\":%s}",
                   (unsigned long long) w->live.lease, (unsigned long long) w->live.beat, w->live.running, w->live.waiting,
                   w->live.blocks_used, w->live.blocks_total, w->live.backlog,
                   w->down && w->down_lease == w->live.lease && w->live.beat <= w->down_beat ? "false" : "true");
}


static void
ngx_http_kvgate_status_model(struct kvg_buf *buf, ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_model_t *model)
{
    ngx_uint_t                i, n;
    time_t                    polled;
    ngx_http_kvgate_worker_t  workers[NGX_HTTP_KVGATE_WORKERS];

    /* copied, so that the mutex is held for no formatting */
    ngx_shmtx_lock(&conf->shpool->mutex);
    n = model->pool->n;
    polled = model->pool->polled;
    ngx_memcpy(workers, model->pool->workers, n * sizeof(workers[0]));
    ngx_shmtx_unlock(&conf->shpool->mutex);

    kvg_buf_printf(buf, "{\"name\":\"%s\",\"fingerprint\":\"%s\",\"block_size\":%u,\"requests\":%lu,\"prompt_tokens\":%lu,"
                        "\"predicted_hit_tokens\":%lu,\"workers_seen\":%lld,\"workers\":[",
                   model->name, model->fingerprint, (unsigned) model->block_size, (unsigned long) model->pool->requests,
                   (unsigned long) model->pool->prompt_tokens, (unsigned long) model->pool->hit_tokens, (long long) polled);

    for (i = 0; i < n; i++) {
        kvg_buf_puts(buf, i ? "," : "");
        ngx_http_kvgate_status_worker(buf, &workers[i]);
    }

    kvg_buf_puts(buf, "]}");
}


static void
ngx_http_kvgate_status_write(struct kvg_buf *buf, ngx_http_kvgate_main_conf_t *conf)
{
    ngx_uint_t                i;
    ngx_http_kvgate_model_t  *model;

    kvg_buf_printf(buf, "{\"version\":\"%s\",\"models\":[", NGX_HTTP_KVGATE_VERSION);
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

    kvg_buf_puts(buf, "}}\n");
}


ngx_int_t
ngx_http_kvgate_status_handler(ngx_http_request_t *r)
{
    ngx_int_t                     rc;
    ngx_str_t                     type = ngx_string("application/json");
    struct kvg_buf                buf = { NULL, 0, 0, false };
    ngx_http_complex_value_t      text;
    ngx_http_kvgate_main_conf_t  *conf;

    if (!(r->method & (NGX_HTTP_GET|NGX_HTTP_HEAD))) {
        return NGX_HTTP_NOT_ALLOWED;
    }

    conf = ngx_http_get_module_main_conf(r, ngx_http_kvgate_module);
    ngx_http_kvgate_status_write(&buf, conf);

    ngx_memzero(&text, sizeof(text));
    text.value.len = buf.len;
    text.value.data = buf.failed ? NULL : ngx_pnalloc(r->pool, buf.len);
    rc = NGX_HTTP_INTERNAL_SERVER_ERROR;

    if (text.value.data) {
        ngx_memcpy(text.value.data, buf.bytes, buf.len);
        rc = ngx_http_send_response(r, NGX_HTTP_OK, &type, &text);
    }

    kvg_buf_free(&buf);

    return rc;
}
