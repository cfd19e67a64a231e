#include "gpu-worker/metrics.h"
#include <math.h>

void histogram_init(struct histogram *h, const double *bounds, int n_bounds)
{
    h->bounds = bounds;
    h->n_bounds = n_bounds < HISTOGRAM_BUCKETS ? n_bounds : HISTOGRAM_BUCKETS - 1;
    for (int i = 0; i < HISTOGRAM_BUCKETS; i++)
        atomic_init(&h->counts[i], 0);
    atomic_init(&h->n, 0);
    atomic_init(&h->sum_micro, 0);
}

/* A negative or NaN observation counts as 0: it can only come from a clock that stepped. */
void histogram_add(struct histogram *h, double value)
{
    int bucket = 0;
    if (!(value > 0))
        value = 0;
    while (bucket < h->n_bounds && value > h->bounds[bucket])
        bucket++;
    atomic_fetch_add_explicit(&h->counts[bucket], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&h->sum_micro, (uint64_t)llround(fmin(value, 1e12) * 1e6), memory_order_relaxed);
    atomic_fetch_add_explicit(&h->n, 1, memory_order_relaxed);
}

static const double seconds_short[] = {.001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 10};
static const double seconds_long[] = {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75,
                                      1,    2.5,  5,   7.5, 10,  20,  40,  80, 160, 640};
static const double rows[] = {1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384};
static const double sequences[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024};
static const double shares[] = {.005, .01, .02, .03, .05, .075, .1, .2, .3, .4, .5, .6, .7, .8, .9, .95, 1};

#define BOUNDS(array) array, (int)(sizeof(array) / sizeof *(array))

void engine_metrics_init(struct engine_metrics *metrics)
{
    *metrics = (struct engine_metrics){0};
    histogram_init(&metrics->ttft, BOUNDS(seconds_long));
    histogram_init(&metrics->inter_token, BOUNDS(seconds_short));
    histogram_init(&metrics->queue_time, BOUNDS(seconds_long));
    histogram_init(&metrics->prefill_time, BOUNDS(seconds_long));
    histogram_init(&metrics->decode_time, BOUNDS(seconds_long));
    histogram_init(&metrics->e2e_time, BOUNDS(seconds_long));
    histogram_init(&metrics->rows_per_forward, BOUNDS(rows));
    histogram_init(&metrics->sequences_per_forward, BOUNDS(sequences));
    histogram_init(&metrics->batch_utilization, BOUNDS(shares));
}

/* One page being written: where to, and the label that every series carries, already escaped. */
struct page {
    struct kvg_buf *out;
    struct kvg_buf label;
};

static void head(struct page *page, const char *name, const char *type, const char *help)
{
    kvg_buf_printf(page->out, "# HELP kvgate_%s %s\n# TYPE kvgate_%s %s\n", name, help, name, type);
}

static void number(struct page *page, const char *name, const char *type, const char *help, double value)
{
    head(page, name, type, help);
    kvg_buf_printf(page->out, "kvgate_%s{%s} %.17g\n", name, page->label.bytes, value);
}

static void gauge(struct page *page, const char *name, const char *help, double value)
{
    number(page, name, "gauge", help, value);
}

static void counter(struct page *page, const char *name, const char *help, uint64_t value)
{
    number(page, name, "counter", help, (double)value);
}

/* _count is the sum of the buckets just read, so that one page never contradicts itself while writers run. */
static void histogram(struct page *page, const char *name, const char *help, struct histogram *h)
{
    uint64_t below = 0;

    head(page, name, "histogram", help);
    double sum = (double)atomic_load_explicit(&h->sum_micro, memory_order_relaxed) / 1e6;
    for (int i = 0; i < h->n_bounds; i++) {
        below += atomic_load_explicit(&h->counts[i], memory_order_relaxed);
        kvg_buf_printf(page->out, "kvgate_%s_bucket{%s,le=\"%g\"} %llu\n", name, page->label.bytes, h->bounds[i],
                       (unsigned long long)below);
    }
    below += atomic_load_explicit(&h->counts[h->n_bounds], memory_order_relaxed);
    kvg_buf_printf(page->out, "kvgate_%s_bucket{%s,le=\"+Inf\"} %llu\n", name, page->label.bytes, (unsigned long long)below);
    kvg_buf_printf(page->out, "kvgate_%s_sum{%s} %.17g\nkvgate_%s_count{%s} %llu\n", name, page->label.bytes, sum, name,
                   page->label.bytes, (unsigned long long)below);
}

/* model_name="...", with the three escapes of the text format. */
static void write_label(struct kvg_buf *label, const char *model)
{
    kvg_buf_puts(label, "model_name=\"");
    for (; *model; model++) {
        if (*model == '\n')
            kvg_buf_puts(label, "\\n");
        else
            kvg_buf_printf(label, *model == '"' || *model == '\\' ? "\\%c" : "%c", *model);
    }
    kvg_buf_add(label, "\"", 2); /* with the NUL */
}

static void render_load(struct page *page, struct engine_metrics *m)
{
    uint32_t total = m->blocks_total;

    gauge(page, "tensor_parallel_size", "Ranks (processes) that compute each layer together.", m->tensor_parallel_size);
    gauge(page, "num_requests_running", "Sequences that hold KV blocks and take part in steps.", m->running);
    gauge(page, "num_requests_waiting", "Sequences that wait for admission.", m->waiting);
    gauge(page, "kv_cache_usage_perc", "Share of KV blocks that requests hold now (1 = all).",
          total ? (double)m->blocks_used / total : 0);
    gauge(page, "kv_blocks_total", "KV blocks in the pool.", total);
    gauge(page, "kv_blocks_used", "KV blocks that requests hold now.", m->blocks_used);
    gauge(page, "kv_blocks_cached", "KV blocks that only the prefix cache holds; evictable.", m->blocks_cached);
    gauge(page, "kv_blocks_warm", "KV blocks of the prompts given by --warm: evicted when no others can be.", m->blocks_warm);
    gauge(page, "backlog_tokens", "Prompt tokens queued or admitted and not yet computed, plus 16 a running decode.",
          (double)m->backlog_tokens);
}

static void render_totals(struct page *page, struct engine_metrics *m)
{
    counter(page, "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", m->prefix_query_tokens);
    counter(page, "prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", m->prefix_hit_tokens);
    counter(page, "prompt_tokens_total", "Prompt tokens of admitted sequences.", m->prompt_tokens);
    counter(page, "computed_prompt_tokens_total", "Rows of prefill computed, recomputation after preemption included.",
            m->computed_prompt_tokens);
    counter(page, "generation_tokens_total", "Tokens generated.", m->generation_tokens);
    counter(page, "num_preemptions_total", "Sequences that lost their blocks to an older one and were queued again.",
            m->preemptions);
    counter(page, "evicted_blocks_total", "Blocks evicted from the prefix cache.", m->evicted_blocks);
    counter(page, "engine_steps_total", "Steps that ran a forward.", m->steps);
    counter(page, "requests_cancelled_total", "Requests whose client left.", m->cancelled);
    head(page, "request_success_total", "counter", "Finished sequences by reason.");
    const struct {
        const char *reason;
        uint64_t n;
    } ends[] = {{"stop", m->finished_stop}, {"length", m->finished_length}, {"abort", m->finished_abort}};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        kvg_buf_printf(page->out, "kvgate_request_success_total{%s,finished_reason=\"%s\"} %llu\n", page->label.bytes,
                       ends[i].reason, (unsigned long long)ends[i].n);
}

static void render_step_parts(struct page *page, struct engine_metrics *m)
{
    static const char *const names[STEP_PARTS] = {"intake", "schedule", "forward", "sample", "emit", "report"};

    head(page, "step_seconds_total", "counter", "Time of the engine thread in steps, by what it was spent on.");
    for (int i = 0; i < STEP_PARTS; i++)
        kvg_buf_printf(page->out, "kvgate_step_seconds_total{%s,part=\"%s\"} %.9f\n", page->label.bytes, names[i],
                       (double)m->step_nanos[i] * 1e-9);
}

static void render_speculation(struct page *page, struct engine_metrics *m)
{
    counter(page, "spec_decode_num_drafts_total", "Runs of draft tokens that were verified.", m->spec_verifications);
    counter(page, "spec_decode_num_draft_tokens_total", "Draft tokens in these runs.", m->spec_drafted);
    counter(page, "spec_decode_num_accepted_tokens_total", "Draft tokens that were accepted, so committed.", m->spec_accepted);
    head(page, "spec_decode_num_accepted_tokens_per_pos_total", "counter", "Accepted draft tokens by their place in the run.");
    for (int i = 0; i < SPEC_POSITIONS; i++)
        kvg_buf_printf(page->out, "kvgate_spec_decode_num_accepted_tokens_per_pos_total{%s,position=\"%d\"} %llu\n",
                       page->label.bytes, i, (unsigned long long)m->spec_accepted_at[i]);
    gauge(page, "spec_decode_sequences", "Sequences with drafts in the last step; 0 = speculation is off or does not pay.",
          m->spec_sequences);
    gauge(page, "spec_decode_draft_limit", "Most drafts of the sequence that had some last (K).", m->spec_limit);
    gauge(page, "spec_decode_goodput_gain", "Expected tokens a second with the last step's drafts over those without.",
          m->spec_goodput_gain);
}

static void render_histograms(struct page *page, struct engine_metrics *m)
{
    histogram(page, "time_to_first_token_seconds", "From submission to the first token.", &m->ttft);
    histogram(page, "inter_token_latency_seconds", "Between consecutive tokens of a sequence.", &m->inter_token);
    histogram(page, "request_queue_time_seconds", "From submission to first admission.", &m->queue_time);
    histogram(page, "request_prefill_time_seconds", "From first admission to the first token.", &m->prefill_time);
    histogram(page, "request_decode_time_seconds", "From the first token to the last.", &m->decode_time);
    histogram(page, "e2e_request_latency_seconds", "From submission to the last token.", &m->e2e_time);
    histogram(page, "rows_per_forward", "Token rows in one forward.", &m->rows_per_forward);
    histogram(page, "sequences_per_forward", "Sequences in one forward.", &m->sequences_per_forward);
    histogram(page, "batch_utilization", "Rows of a forward over the most that one may have.", &m->batch_utilization);
}

void histogram_render(struct histogram *h, const char *name, const char *help, const char *model, struct kvg_buf *out)
{
    struct page page = {.out = out};

    write_label(&page.label, model);
    if (page.label.failed)
        out->failed = true;
    else
        histogram(&page, name, help, h);
    kvg_buf_free(&page.label);
}

void engine_metrics_render(struct engine_metrics *metrics, const char *model, struct kvg_buf *out)
{
    struct page page = {.out = out};

    write_label(&page.label, model);
    if (page.label.failed) {
        out->failed = true;
        return;
    }
    render_load(&page, metrics);
    render_totals(&page, metrics);
    render_step_parts(&page, metrics);
    render_speculation(&page, metrics);
    render_histograms(&page, metrics);
    kvg_buf_free(&page.label);
}
