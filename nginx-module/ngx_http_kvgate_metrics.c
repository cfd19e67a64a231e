/* What kvgate_status counts, in Prometheus' text format (version 0.0.4). README.md lists the metrics. */
#include "ngx_http_kvgate.h"


typedef struct {
    struct kvg_buf                *buf;
    ngx_http_kvgate_main_conf_t   *conf;
    ngx_http_kvgate_pool_t         pool;        /* a copy of one model's */
} ngx_http_kvgate_metrics_t;

/* Where a worker's number is found, and what it is. */
typedef enum {
    NGX_HTTP_KVGATE_READY,      /* nowhere: it is worked out */
    NGX_HTTP_KVGATE_FLIGHT,
    NGX_HTTP_KVGATE_DOUBLE,
    NGX_HTTP_KVGATE_WIDE        /* uint64_t */
} ngx_http_kvgate_kind_e;

typedef struct {
    const char                    *name;
    const char                    *type;
    const char                    *help;
    ngx_http_kvgate_kind_e         kind;
    size_t                         offset;
} ngx_http_kvgate_worker_metric_t;

#define ngx_http_kvgate_live(member)    NGX_HTTP_KVGATE_DOUBLE, offsetof(ngx_http_kvgate_worker_t, live.member)
#define ngx_http_kvgate_had(member)     NGX_HTTP_KVGATE_WIDE, offsetof(ngx_http_kvgate_worker_t, served.member)

static const ngx_http_kvgate_worker_metric_t  ngx_http_kvgate_worker_metrics[] = {
    { "worker_ready", "gauge", "Whether the worker takes requests: 0 while it drains or refuses connections.", NGX_HTTP_KVGATE_READY, 0 },
    { "worker_running", "gauge", "Requests that it computes, by its last heartbeat.", ngx_http_kvgate_live(running) },
    { "worker_waiting", "gauge", "Requests that wait there.", ngx_http_kvgate_live(waiting) },
    { "worker_backlog_tokens", "gauge", "Prompt tokens that it has still to compute, and 16 for each running reply.",
      ngx_http_kvgate_live(backlog) },
    { "worker_blocks_used", "gauge", "KV blocks in use.", ngx_http_kvgate_live(blocks_used) },
    { "worker_blocks", "gauge", "KV blocks in all.", ngx_http_kvgate_live(blocks_total) },
    { "worker_in_flight", "gauge", "Requests of this gateway that it has.", NGX_HTTP_KVGATE_FLIGHT, 0 },
    { "worker_requests_total", "counter", "Requests that it served.", ngx_http_kvgate_had(requests) },
    { "worker_failures_total", "counter", "Of these with a status of 500 or more, or a stream that ended early.",
      ngx_http_kvgate_had(failures) },
    { "worker_prompt_tokens_total", "counter", "Their prompt tokens.", ngx_http_kvgate_had(prompt_tokens) },
    { "worker_predicted_hit_tokens_total", "counter", "Prompt tokens that it was expected to hold.", ngx_http_kvgate_had(hit_tokens) },
    { "worker_told_requests_total", "counter", "Requests whose usage told the cached tokens.", ngx_http_kvgate_had(told) },
    { "worker_told_prompt_tokens_total", "counter", "Prompt tokens of these.", ngx_http_kvgate_had(told_prompt_tokens) },
    { "worker_told_predicted_hit_tokens_total", "counter", "Tokens of these that it was expected to hold.",
      ngx_http_kvgate_had(told_hit_tokens) },
    { "worker_told_cached_tokens_total", "counter", "Tokens of these that it did hold.", ngx_http_kvgate_had(cached_tokens) },
};


static double
ngx_http_kvgate_worker_value(const ngx_http_kvgate_worker_t *w, const ngx_http_kvgate_worker_metric_t *metric)
{
    const void  *at = (const u_char *) w + metric->offset;

    switch (metric->kind) {

    case NGX_HTTP_KVGATE_READY:
        return ngx_strcmp(w->live.state, "ready") == 0 && !ngx_http_kvgate_is_down(w);

    case NGX_HTTP_KVGATE_FLIGHT:
        return w->flight;

    case NGX_HTTP_KVGATE_DOUBLE:
        return *(const double *) at;

    default:
        return (double) *(const uint64_t *) at;
    }
}


static void
ngx_http_kvgate_head(struct kvg_buf *buf, const char *name, const char *type, const char *help)
{
    kvg_buf_printf(buf, "# HELP kvgate_nginx_%s %s\n# TYPE kvgate_nginx_%s %s\n", name, help, name, type);
}


/* A label's value: \, " and newlines are escaped. */
static void
ngx_http_kvgate_label(struct kvg_buf *buf, const char *text)
{
    for ( /* void */ ; *text; text++) {
        if (*text == '\\' || *text == '"') {
            kvg_buf_puts(buf, "\\");
        }

        kvg_buf_add(buf, *text == '\n' ? "\\n" : text, *text == '\n' ? 2 : 1);
    }
}


static void
ngx_http_kvgate_metrics_worker(ngx_http_kvgate_metrics_t *m, const ngx_http_kvgate_worker_metric_t *metric)
{
    ngx_uint_t                i, k;
    ngx_http_kvgate_model_t  *model;

    ngx_http_kvgate_head(m->buf, metric->name, metric->type, metric->help);
    model = m->conf->models.elts;

    for (i = 0; i < m->conf->models.nelts; i++) {
        ngx_http_kvgate_pool_copy(m->conf, model[i].pool, &m->pool);

        for (k = 0; k < m->pool.n; k++) {
            kvg_buf_printf(m->buf, "kvgate_nginx_%s{model=\"%s\",worker=\"", metric->name, model[i].name);
            ngx_http_kvgate_label(m->buf, m->pool.workers[k].live.worker);
            kvg_buf_printf(m->buf, "\"} %.15g\n", ngx_http_kvgate_worker_value(&m->pool.workers[k], metric));
        }
    }
}


typedef struct {
    const char  *name;
    const char  *type;
    const char  *help;
    size_t       offset;    /* in a pool */
    unsigned     wide:1;    /* uint64_t; else ngx_atomic_t */
} ngx_http_kvgate_model_metric_t;

#define ngx_http_kvgate_at(member)  offsetof(ngx_http_kvgate_pool_t, member)

static const ngx_http_kvgate_model_metric_t  ngx_http_kvgate_model_metrics[] = {
    { "requests_total", "counter", "Requests whose model was known.", ngx_http_kvgate_at(requests), 0 },
    { "prompt_tokens_total", "counter", "Prompt tokens of these.", ngx_http_kvgate_at(prompt_tokens), 0 },
    { "predicted_hit_tokens_total", "counter", "Prompt tokens that the chosen workers were expected to hold.", ngx_http_kvgate_at(hit_tokens), 0 },
    { "served_requests_total", "counter", "Requests that workers served.", ngx_http_kvgate_at(served.requests), 1 },
    { "failures_total", "counter", "Of these with a status of 500 or more, or a stream that ended early.", ngx_http_kvgate_at(served.failures), 1 },
    { "told_requests_total", "counter", "Requests whose usage told the cached tokens.", ngx_http_kvgate_at(served.told), 1 },
    { "told_prompt_tokens_total", "counter", "Prompt tokens of these.", ngx_http_kvgate_at(served.told_prompt_tokens), 1 },
    { "told_predicted_hit_tokens_total", "counter", "Tokens of these that the workers were expected to hold.",
      ngx_http_kvgate_at(served.told_hit_tokens), 1 },
    { "told_cached_tokens_total", "counter", "Tokens of these that the workers did hold.", ngx_http_kvgate_at(served.cached_tokens), 1 },
};


static void
ngx_http_kvgate_metrics_model(ngx_http_kvgate_metrics_t *m, const ngx_http_kvgate_model_metric_t *metric)
{
    u_char                   *at;
    ngx_uint_t                i;
    ngx_http_kvgate_model_t  *model;

    ngx_http_kvgate_head(m->buf, metric->name, metric->type, metric->help);
    model = m->conf->models.elts;

    for (i = 0; i < m->conf->models.nelts; i++) {
        at = (u_char *) model[i].pool + metric->offset;
        kvg_buf_printf(m->buf, "kvgate_nginx_%s{model=\"%s\"} %llu\n", metric->name, model[i].name,
                       metric->wide ? (unsigned long long) *(uint64_t *) at : (unsigned long long) *(ngx_atomic_t *) at);
    }
}


static void
ngx_http_kvgate_metrics_times(struct kvg_buf *buf, const char *name, const char *help, const ngx_http_kvgate_times_t *times)
{
    ngx_uint_t  i, n;

    ngx_http_kvgate_head(buf, name, "histogram", help);
    n = 0;

    for (i = 0; i < NGX_HTTP_KVGATE_TIMES - 1; i++) {
        n += times->n[i];
        kvg_buf_printf(buf, "kvgate_nginx_%s_bucket{le=\"%g\"} %lu\n", name, ngx_http_kvgate_bounds[i] / 1e6, (unsigned long) n);
    }

    n += times->n[i];
    kvg_buf_printf(buf, "kvgate_nginx_%s_bucket{le=\"+Inf\"} %lu\nkvgate_nginx_%s_sum %.6f\nkvgate_nginx_%s_count %lu\n", name,
                   (unsigned long) n, name, times->sum / 1e6, name, (unsigned long) n);
}


static void
ngx_http_kvgate_metrics_seen(ngx_http_kvgate_metrics_t *m)
{
    ngx_uint_t                i;
    ngx_http_kvgate_model_t  *model;

    ngx_http_kvgate_head(m->buf, "workers_seen_timestamp_seconds", "gauge", "When Redis last told the live workers; 0: never.");
    model = m->conf->models.elts;

    for (i = 0; i < m->conf->models.nelts; i++) {
        kvg_buf_printf(m->buf, "kvgate_nginx_workers_seen_timestamp_seconds{model=\"%s\"} %lld\n", model[i].name,
                       (long long) model[i].pool->polled);
    }
}


void
ngx_http_kvgate_metrics(struct kvg_buf *buf, ngx_http_kvgate_main_conf_t *conf)
{
    ngx_uint_t                 i;
    ngx_http_kvgate_metrics_t  m;

    ngx_http_kvgate_head(buf, "info", "gauge", "The module's version.");
    kvg_buf_printf(buf, "kvgate_nginx_info{version=\"%s\"} 1\n", NGX_HTTP_KVGATE_VERSION);

    if (conf->shared == NULL) {
        return;  /* without a model there is no zone */
    }

    ngx_http_kvgate_head(buf, "decisions_total", "counter", "Requests by the reason of where they went.");

    for (i = NGX_HTTP_KVGATE_PREFIX; i < NGX_HTTP_KVGATE_REASONS; i++) {
        kvg_buf_printf(buf, "kvgate_nginx_decisions_total{reason=\"%s\"} %lu\n", (const char *) ngx_http_kvgate_reasons[i].data,
                       (unsigned long) conf->shared->reasons[i]);
    }

    ngx_http_kvgate_head(buf, "limit_total", "counter", "What kvgate_limit said: passed, refused for requests or tokens, or unchecked.");

    for (i = NGX_HTTP_KVGATE_LIMIT_PASSED; i < NGX_HTTP_KVGATE_LIMITS; i++) {
        kvg_buf_printf(buf, "kvgate_nginx_limit_total{status=\"%s\"} %lu\n", (const char *) ngx_http_kvgate_limits[i].data,
                       (unsigned long) conf->shared->limits[i]);
    }

    ngx_http_kvgate_metrics_times(buf, "tokenize_seconds", "Body to chain.", &conf->shared->tokenize);
    ngx_http_kvgate_metrics_times(buf, "lookup_seconds", "Waiting for Redis.", &conf->shared->lookup);
    m.buf = buf;
    m.conf = conf;

    for (i = 0; i < sizeof(ngx_http_kvgate_model_metrics) / sizeof(ngx_http_kvgate_model_metrics[0]); i++) {
        ngx_http_kvgate_metrics_model(&m, &ngx_http_kvgate_model_metrics[i]);
    }

    ngx_http_kvgate_metrics_seen(&m);

    for (i = 0; i < sizeof(ngx_http_kvgate_worker_metrics) / sizeof(ngx_http_kvgate_worker_metrics[0]); i++) {
        ngx_http_kvgate_metrics_worker(&m, &ngx_http_kvgate_worker_metrics[i]);
    }
}
