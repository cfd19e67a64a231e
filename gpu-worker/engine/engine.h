/* The engine: one thread that owns the scheduler, the KV cache and the model. step() = schedule -> batch -> forward ->
 * sample -> emit.
 *
 * HTTP threads submit and cancel through queues; results come back through each request's sink.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "gpu-worker/backend/sampling.h"
#include "gpu-worker/engine/accept.h"
#include "gpu-worker/engine/ngram.h"
#include "gpu-worker/metrics.h"
#include "libprompt/error.h"
#include "libprompt/prompt.h"

struct engine;
struct model;
struct publisher;

struct engine_options {
    const char *model_name;          /* for the block chain */
    uint32_t max_model_len;          /* 0 = the file's context length */
    uint32_t max_num_seqs;           /* 0 = 64 */
    uint32_t max_num_batched_tokens; /* 0 = 2,048: most rows a step */
    uint32_t block_size;             /* 0 = 32; a power of two from 16 to 512 */
    uint32_t num_kv_blocks;          /* 0 = from kv_cache_bytes */
    uint64_t kv_cache_bytes;         /* 0 = a stated share of free memory */
    bool disable_prefix_caching, disable_chunked_prefill;
    bool priority_scheduling;  /* false: first come, first served */
    uint32_t fixed_chunk;      /* tests: prefill exactly this many rows a step; 0 = follows the measured rate */
    uint32_t max_waiting;      /* choices queued before KVG_LIMIT; 0 = 4,096 */
    struct model *draft_model; /* the caller's; drafts by a second model; NULL = none */
    const struct kvg_prompt_model *draft_prompt_model; /* its tokenizer, checked against the model's */
    bool speculate_ngram;                              /* drafts by prompt lookup */
    struct ngram_runs lookup;                          /* its runs; see ngram.h */
    uint32_t num_speculative_tokens;                   /* drafts of a sequence at first; 0 = 5 */
    enum accept_rule accept;                           /* which drafts are accepted; 0 = as drawn without drafts */
    uint32_t fixed_drafts;                             /* tests: always this many, whatever they cost; 0 = as it pays */
};

enum { ENGINE_MOST_DRAFTS = 128 }; /* in one step */
/* Output rows that a step can have: the model's max_outputs must be as many. */
static inline uint32_t engine_max_outputs(const struct engine_options *options, uint32_t max_num_seqs)
{
    return max_num_seqs + (options->speculate_ngram || options->draft_model ? ENGINE_MOST_DRAFTS : 0);
}

/* Bytes of memory that the machine can still give (MemAvailable); 0 where it does not say. */
uint64_t engine_available_memory(void);

/* What engine_open asks of options->draft_model, if there is one: ids that mean the same as the model's. KVG_INVALID names the
 * first that does not. For who wants to know it before the model's weights are loaded. */
int engine_check_draft(const struct engine_options *options, const struct kvg_prompt_model *prompt_model, struct kvg_error *err);
/* model, prompt_model and publisher (may be NULL) stay the caller's and must outlive the engine. Starts the thread. */
int engine_open(struct engine **out, const struct engine_options *options, struct model *model,
                const struct kvg_prompt_model *prompt_model, struct publisher *publisher, struct kvg_error *err);
void engine_drain(struct engine *engine); /* refuses new requests; running ones end as they would */
/* Ends running requests with an error event, joins the thread, frees. */
void engine_close(struct engine *engine);

struct engine_info {
    uint32_t max_model_len, block_size, num_blocks, max_num_seqs, max_num_batched_tokens;
};
void engine_info(const struct engine *engine, struct engine_info *out);
struct engine_metrics *engine_metrics(struct engine *engine);
bool engine_alive(const struct engine *engine); /* a step or an idle tick finished in the last 10 s */
bool engine_idle(const struct engine *engine);  /* nothing running or waiting */

enum engine_finish { FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR };

struct engine_token_logprob {
    uint32_t id;
    float logprob;
    uint32_t n_top;
    const uint32_t *top_ids;
    const float *top_logprobs;
};

/* What drafts did for one choice so far. */
struct engine_speculation {
    uint32_t runs, drafted, accepted;     /* verified runs of drafts, tokens in these, those of them that were accepted */
    uint32_t accepted_at[SPEC_POSITIONS]; /* by place in the run */
    uint32_t most;                        /* drafts that it may have now (K); 0 = it had none yet */
    bool active;                          /* its last step had drafts */
    double gain;                          /* expected tokens a second of the last step with drafts over those without */
};

/* What a step has for one choice of one request. Pointers are valid during the call only. */
struct engine_event {
    uint32_t choice;
    const char *text; /* whole UTF-8 characters; may be empty */
    size_t text_len;
    const uint32_t *ids; /* tokens that this event commits */
    size_t n_ids;
    const struct engine_token_logprob *logprobs;              /* [n_ids] when asked for, else NULL */
    enum engine_finish finish;                                /* not NONE: the last event of this choice */
    uint32_t matched_stop_token;                              /* with FINISH_STOP by a token, else KVG_NO_TOKEN */
    const char *error;                                        /* with FINISH_ERROR */
    uint32_t prompt_tokens, cached_tokens, completion_tokens; /* of this choice, so far */
    const struct engine_speculation *speculation;             /* NULL: this engine makes no drafts */
    bool last_choice;                                         /* after this event the request is gone */
};
/* On the engine thread; must not block or call the engine. */
typedef void (*engine_sink)(void *context, const struct engine_event *event);

struct engine_params {
    uint32_t max_tokens; /* 0: FINISH_LENGTH at once, nothing is computed; UINT32_MAX = up to the context */
    uint32_t min_tokens;
    uint32_t n; /* choices */
    float temperature, top_p, min_p;
    uint32_t top_k; /* 0 = all */
    float repetition_penalty, presence_penalty, frequency_penalty;
    uint64_t seed; /* the server draws one where the client gives none */
    bool want_logprobs;
    uint32_t top_logprobs; /* 0..20 */
    bool ignore_eos;
    bool include_stop;       /* include_stop_str_in_output; also the text of a stop token */
    bool drop_leading_space; /* SentencePiece: the space before the first generated token is dropped (a chat's reply) */
    int32_t priority;        /* lower runs first */
    const char *const *stop; /* [n_stop] strings, not empty */
    const size_t *stop_len;
    size_t n_stop;
    const uint32_t *stop_ids;
    size_t n_stop_ids;
    const struct sample_bias *biases; /* ascending by id, distinct */
    size_t n_biases;
};

struct engine_submit {
    const uint32_t *ids; /* copied */
    size_t n_ids;
    const char *salt; /* cache isolation; copied */
    size_t salt_len;
    struct engine_params params; /* arrays are copied */
    bool warm;                   /* the prompt's blocks are evicted last */
    engine_sink sink;
    void *context;
};

/* Any thread. 0 and *request_id, or KVG_INVALID (prompt over context or pool: both numbers in the message),
 * or KVG_LIMIT: overloaded or draining (HTTP 503). *request_id is written before the first event, which may come while this
 * call is about to return. */
int engine_submit(struct engine *engine, const struct engine_submit *submit, uint64_t *request_id, struct kvg_error *err);
/* Any thread. Frees the request's blocks within one step; each unfinished choice gets a FINISH_ABORT event. Unknown ids are
 * ignored. */
void engine_cancel(struct engine *engine, uint64_t request_id);

/* For tests, any thread: waits until nothing runs or waits, then checks that free + cached + in use = total, that nothing is in
 * use, and the tree's own invariants. 0, or -1 with err. */
int engine_check(struct engine *engine, struct kvg_error *err);
