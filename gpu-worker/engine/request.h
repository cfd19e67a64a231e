/* One client's request and its choices, which the scheduler knows as sequences.
 *
 *   ids of a sequence:   | prompt ................ | generated ... | drafts, during a step |
 *                        0                         n_prompt        n_ids                        limit
 *                        |<---- n_computed: KV is in its blocks ---->|
 *
 * A sequence with n_ids - n_computed == 1 decodes; with more it prefills, be it for the first time or after a preemption.
 * Everything that a request will ever need is allocated when it is created, on the submitter's thread.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "gpu-worker/engine/engine.h"
#include "gpu-worker/engine/stop_match.h"
#include "gpu-worker/kv/cache.h"
#include "libprompt/arena.h"
#include "libprompt/tokenizer.h"

struct request;

enum sequence_state { SEQUENCE_NEW, SEQUENCE_WAITING, SEQUENCE_RUNNING, SEQUENCE_DONE };

struct sequence {
    struct request *request;
    uint32_t choice;
    enum sequence_state state;

    /* Order of service: smaller first. See sched_add. */
    double key;
    uint64_t number;
    struct sequence *older, *younger; /* neighbours in the waiting list */

    uint32_t *ids; /* [limit] */
    uint32_t n_prompt, n_ids, n_computed;
    uint32_t limit; /* n_ids where generation ends with FINISH_LENGTH */
    struct cache_seq held;

    uint32_t slot;            /* while it runs: its number among the running, from 0 */
    uint32_t n_drafts;        /* proposed behind ids[n_ids] for the next step; n_ids + n_drafts < limit */
    const float *draft_probs; /* [n_drafts, n_vocab] what each was drawn from, where that is kept; NULL: there was no choice */

    struct engine_speculation speculation;

    uint32_t cached_tokens; /* of the first admission */
    uint32_t preemptions;
    bool admitted; /* once at least */
    bool counted;  /* in the metrics of admissions */

    struct sample_count *counts; /* ascending ids; NULL unless a penalty is on */
    uint32_t n_counts;
    struct kvg_detokenizer detokenizer;
    struct stop_match stop;

    double t_admitted, t_first, t_last; /* seconds, monotonic; 0 = not yet */
};

struct request {
    uint64_t id;
    struct request *before, *after; /* the engine's list of live requests; its mutex */
    struct request *next_new;       /* the engine's queue of new ones; its mutex */
    bool cancelled, taken;          /* taken: no longer queued as new; the engine's mutex */
    bool warm;                      /* what it stores is evicted last */
    engine_sink sink;
    void *context;
    struct engine_params params; /* arrays in the arena */
    struct radix_salt salt;
    struct stop_set stops;
    const uint32_t *banned; /* [n_banned] what min_tokens forbids: end ids (unless ignored) and stop ids */
    uint32_t n_banned;
    double t_submitted;
    char *text;      /* scratch of one event: longest piece and longest stop string */
    uint32_t n_open; /* choices without their last event */
    uint32_t n_choices;
    struct sequence *choices; /* [n_choices] */
    struct kvg_arena arena;
};

/* What a new request has to fit, and what it needs from the model. */
struct request_world {
    const char *model_name;
    const struct kvg_prompt_model *prompt_model;
    const struct kvg_vocab_info *vocab;
    uint32_t n_vocab;     /* ids that may be drawn or sent */
    uint32_t max_len;     /* --max-model-len */
    uint32_t pool_tokens; /* what the KV pool holds */
    uint32_t block_size;
    size_t longest_piece; /* bytes that one token's text can come to */
};

/* 0, KVG_INVALID (both numbers in the message), or KVG_NOMEM. *out is the caller's until request_free. */
int request_create(struct request **out, const struct request_world *world, const struct engine_submit *submit,
                   struct kvg_error *err);
void request_free(struct request *request);

static inline uint32_t sequence_pending(const struct sequence *seq)
{
    return seq->n_ids - seq->n_computed;
}
static inline uint32_t sequence_generated(const struct sequence *seq)
{
    return seq->n_ids - seq->n_prompt;
}
/* Counts id in the sequence's penalties. */
void sequence_count(struct sequence *seq, uint32_t id);
