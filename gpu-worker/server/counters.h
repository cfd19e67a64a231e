/* What the HTTP side counts, and its page of /metrics. */
#pragma once
#include <stdatomic.h>
#include <stdint.h>
#include "gpu-worker/kv/publish.h"
#include "gpu-worker/metrics.h"
#include "libprompt/json.h"

enum route {
    ROUTE_CHAT,
    ROUTE_COMPLETIONS,
    ROUTE_TOKENIZE,
    ROUTE_DETOKENIZE,
    ROUTE_MODELS,
    ROUTE_MODEL,
    ROUTE_HEALTH,
    ROUTE_READY,
    ROUTE_METRICS,
    ROUTE_VERSION,
    ROUTE_OTHER,
    ROUTE_COUNT
};

struct counters {
    _Atomic uint64_t replies[ROUTE_COUNT][6]; /* by status / 100 */
    _Atomic uint64_t unknown_fields;          /* members of request bodies that nobody knows */
    _Atomic uint64_t ids_used;                /* prompts whose ids came with the request */
    _Atomic uint64_t fingerprint_mismatches;  /* ids that came under another fingerprint: tokenized here instead */
    _Atomic uint64_t predicted_hit_tokens;    /* by the gateway, where it said so … */
    _Atomic uint64_t found_hit_tokens;        /* … and what the cache of this worker held of the same prompts */
    struct histogram hit_error;               /* tokens between the two, of one prompt */
    _Atomic uint64_t clients_left;            /* before their answer was complete */
    _Atomic uint64_t clients_dropped;         /* too slow in reading a stream */
    _Atomic uint64_t stream_errors;           /* streams that ended in an error frame */
    _Atomic uint32_t connections;
};

void counters_init(struct counters *counters);
/* A prompt was admitted, of which the gateway expected to find `predicted` tokens cached. */
void counters_hit(struct counters *counters, int64_t predicted, uint32_t found);
void counters_reply(struct counters *counters, int route, int status);
/* Appends all series with # HELP and # TYPE, labelled model_name; publisher may be NULL. */
void counters_render(struct counters *counters, const char *model, struct publisher *publisher, struct kvg_buf *out);
