/* Counters, gauges and histograms that any thread may write and /metrics reads (Prometheus text format). */
#pragma once
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include "libprompt/json.h"

enum { HISTOGRAM_BUCKETS = 24, SPEC_POSITIONS = 32 };

struct histogram {
    const double *bounds; /* ascending upper bounds; the last bucket is +Inf */
    int n_bounds;         /* <= HISTOGRAM_BUCKETS - 1 */
    _Atomic uint64_t counts[HISTOGRAM_BUCKETS];
    _Atomic uint64_t n;
    _Atomic uint64_t sum_micro; /* sum of observations in millionths */
};

void histogram_init(struct histogram *h, const double *bounds, int n_bounds);
void histogram_add(struct histogram *h, double value);

/* What a step's time goes to. */
enum step_part {
    STEP_INTAKE,   /* new requests and cancellations */
    STEP_SCHEDULE, /* drafting, the plan, the batch's tables */
    STEP_FORWARD,
    STEP_SAMPLE,
    STEP_EMIT,   /* blocks to the cache, text, stop strings, events to the HTTP threads */
    STEP_REPORT, /* gauges, what the publisher is told */
    STEP_PARTS
};

/* Everything the engine counts; read by the server's /metrics. Times in seconds. */
struct engine_metrics {
    _Atomic uint32_t tensor_parallel_size; /* ranks that compute the model together */
    _Atomic uint32_t running, waiting;
    _Atomic uint32_t blocks_total, blocks_used, blocks_cached; /* used: not free and not evictable */
    _Atomic uint32_t blocks_warm;                              /* in the prefix cache and evicted last */
    _Atomic uint64_t backlog_tokens;
    _Atomic uint64_t prefix_query_tokens, prefix_hit_tokens; /* vLLM: prefix_cache_queries, prefix_cache_hits */
    _Atomic uint64_t prompt_tokens, generation_tokens, computed_prompt_tokens;
    _Atomic uint64_t preemptions, evicted_blocks, steps, cancelled;
    _Atomic uint64_t finished_stop, finished_length, finished_abort;
    /* Drafts: verified runs of them, tokens in these, tokens that were accepted, and those by place in the run, from 0. */
    _Atomic uint64_t spec_verifications, spec_drafted, spec_accepted, spec_accepted_at[SPEC_POSITIONS];
    _Atomic uint32_t spec_sequences, spec_limit; /* sequences with drafts in the last step, and the most that one may have now */
    _Atomic double spec_goodput_gain;            /* expected tokens a second of the last step's choice over no drafts */
    _Atomic uint64_t step_nanos[STEP_PARTS];     /* of all steps */
    struct histogram ttft, inter_token, queue_time, prefill_time, decode_time, e2e_time;
    struct histogram rows_per_forward, sequences_per_forward;
    struct histogram batch_utilization; /* rows of a step / max_num_batched_tokens */
};
/* Appends kvgate_<name> with # HELP and # TYPE, labelled model_name="<model>". */
void histogram_render(struct histogram *h, const char *name, const char *help, const char *model, struct kvg_buf *out);

void engine_metrics_init(struct engine_metrics *metrics);
/* Appends all series, each with # HELP and # TYPE, labelled model_name="<model>". */
void engine_metrics_render(struct engine_metrics *metrics, const char *model, struct kvg_buf *out);
