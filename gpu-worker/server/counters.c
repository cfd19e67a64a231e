#include "gpu-worker/server/counters.h"

static const char *const route_names[ROUTE_COUNT] = {
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/v1/models/{model}",
    "/health",
    "/ready",
    "/metrics",
    "/version",
    "other",
};

static const double token_bounds[] = {0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072};

void counters_init(struct counters *counters)
{
    histogram_init(&counters->hit_error, token_bounds, sizeof token_bounds / sizeof *token_bounds);
}

void counters_hit(struct counters *counters, int64_t predicted, uint32_t found)
{
    int64_t error = predicted - (int64_t)found;
    atomic_fetch_add(&counters->predicted_hit_tokens, (uint64_t)predicted);
    atomic_fetch_add(&counters->found_hit_tokens, found);
    histogram_add(&counters->hit_error, (double)(error < 0 ? -error : error));
}

void counters_reply(struct counters *counters, int route, int status)
{
    int class = status / 100;
    if (class >= 1 && class <= 5)
        atomic_fetch_add_explicit(&counters->replies[route][class], 1, memory_order_relaxed);
}

struct page {
    struct kvg_buf *out;
    const char *model;
};

static void series(const struct page *page, const char *name, const char *type, const char *help, uint64_t value)
{
    kvg_buf_printf(page->out, "# HELP kvgate_%s %s\n# TYPE kvgate_%s %s\nkvgate_%s{model_name=", name, help, name, type, name);
    kvg_buf_json_string(page->out, page->model, __builtin_strlen(page->model));
    kvg_buf_printf(page->out, "} %llu\n", (unsigned long long)value);
}

static void counter(const struct page *page, const char *name, const char *help, uint64_t value)
{
    series(page, name, "counter", help, value);
}

static void gauge(const struct page *page, const char *name, const char *help, uint64_t value)
{
    series(page, name, "gauge", help, value);
}

static void render_replies(const struct page *page, struct counters *counters)
{
    kvg_buf_puts(page->out, "# HELP kvgate_http_requests_total Replies by handler and class of status.\n"
                            "# TYPE kvgate_http_requests_total counter\n");
    for (int route = 0; route < ROUTE_COUNT; route++)
        for (int class = 1; class <= 5; class ++) {
            uint64_t n = atomic_load(&counters->replies[route][class]);
            if (n)
                kvg_buf_printf(page->out, "kvgate_http_requests_total{handler=\"%s\",status=\"%dxx\"} %llu\n", route_names[route],
                               class, (unsigned long long)n);
        }
}

static void render_publisher(const struct page *page, struct publisher *publisher)
{
    struct publisher_stats stats;
    publisher_stats(publisher, &stats);
    gauge(page, "redis_connected", "1 while the connection to Redis stands.", stats.connected);
    gauge(page, "redis_registered", "1 while this worker holds a lease.", stats.registered);
    gauge(page, "redis_mismatch", "1 where Redis holds another block size or fingerprint for this model: nothing is published.",
          stats.mismatch);
    gauge(page, "redis_lease", "The number of the lease.", stats.lease);
    counter(page, "published_batches_total", "Batches written to Redis.", stats.batches);
    counter(page, "published_stored_blocks_total", "Blocks published as held.", stats.stored);
    counter(page, "published_evicted_blocks_total", "Blocks published as evicted.", stats.evicted);
    counter(page, "publisher_resyncs_total", "Snapshots written under a new lease.", stats.resyncs);
    counter(page, "publisher_dropped_events_total", "Events that the queue could not hold.", stats.dropped);
    counter(page, "publisher_errors_total", "Errors of Redis or its connection.", stats.errors);
}

void counters_render(struct counters *counters, const char *model, struct publisher *publisher, struct kvg_buf *out)
{
    struct page page = {out, model};

    render_replies(&page, counters);
    gauge(&page, "http_connections", "Open connections.", atomic_load(&counters->connections));
    counter(&page, "clients_left_total", "Clients that left before their answer was complete.",
            atomic_load(&counters->clients_left));
    counter(&page, "clients_dropped_total", "Clients that read too slowly and were dropped.",
            atomic_load(&counters->clients_dropped));
    counter(&page, "stream_errors_total", "Streams that ended in an error frame.", atomic_load(&counters->stream_errors));
    counter(&page, "unknown_fields_total", "Members of request bodies that nobody knows.",
            atomic_load(&counters->unknown_fields));
    counter(&page, "gateway_ids_used_total", "Prompts whose ids came with the request.", atomic_load(&counters->ids_used));
    counter(&page, "gateway_fingerprint_mismatches_total", "Prompts whose ids came under another fingerprint.",
            atomic_load(&counters->fingerprint_mismatches));
    counter(&page, "gateway_predicted_hit_tokens_total", "Prompt tokens that the gateway expected to be cached here.",
            atomic_load(&counters->predicted_hit_tokens));
    counter(&page, "gateway_found_hit_tokens_total", "Tokens of the same prompts that were cached here.",
            atomic_load(&counters->found_hit_tokens));
    histogram_render(&counters->hit_error, "gateway_hit_error_tokens",
                     "Of one prompt: tokens between what the gateway expected to be cached and what was.", model, out);
    if (publisher)
        render_publisher(&page, publisher);
}
