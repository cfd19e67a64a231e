/* What the engine's tests share: a model, an engine on it, and calls that collect what the sinks get. */
#pragma once
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>
#include "gpu-worker/engine/engine.h"
#include "gpu-worker/log.h"
#include "gpu-worker/model/model.h"
#include "libprompt/prompt.h"
#include "tests/unit/gpu-worker/sanitized.h"

#define SMOLLM2 "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"

enum { MOST_IDS = 4096, MOST_CHOICES = 8 };

struct world {
    struct model *model;
    struct kvg_prompt_model *prompt_model;
    struct engine *engine;
    struct model *draft_model;
    struct kvg_prompt_model *draft_prompt_model;
};

static struct publisher *the_publisher; /* what open_world gives the engine; NULL in most tests */
static enum accept_rule the_rule;       /* which drafts the engine accepts; as drawn without them in most tests */
static const char *the_draft;           /* the file of its draft model; NULL in most tests */
static const char *the_device;          /* NULL in most tests; else deterministic */
static const char *the_kv_dtype;        /* how keys and values are kept; NULL (the backend's own choice) in most tests */

/* Writes a toy model by the shared tool; `what` are its arguments. The caller unlinks the file. */
static inline void write_toy(char path[64], const char *what)
{
    static int n;
    char command[512];

    snprintf(path, 64, "/tmp/kvgate-toy-%d-%d.gguf", (int)getpid(), n++);
    snprintf(command, sizeof command, "python3 tests/tools/toy_model.py %s %s", path, what);
    if (system(command) != 0)
        fail_msg("%s failed", command);
}

/* A scripted model over the toys' vocabulary (ids 0 to 255 are bytes, v.eos ends) with further tokens: `pieces` is what Python
 * gives Vocabulary(), `table` is Python: {id: next id}. */
static inline void write_script_with(char path[64], const char *pieces, const char *table)
{
    static int n;
    char command[1024];

    snprintf(path, 64, "/tmp/kvgate-script-%d-%d.gguf", (int)getpid(), n++);
    snprintf(command, sizeof command,
             "PYTHONPATH=tests/tools python3 -c \"import toy_model as t; v = t.Vocabulary(%s); t.scripted('%s', v, %s)\"", pieces,
             path, table);
    if (system(command) != 0)
        fail_msg("%s failed", command);
}

static inline void write_script(char path[64], const char *table)
{
    write_script_with(path, "", table);
}

static inline void open_draft(struct world *w, struct engine_options *options)
{
    struct model_options model = {.path = the_draft,
                                  .device = the_device,
                                  .deterministic = the_device != NULL,
                                  .threads = 1,
                                  .max_rows = 2048,
                                  .max_seqs = 64};
    struct kvg_error err;

    if (model_open(&w->draft_model, &model, &err) < 0 || kvg_prompt_model_open(&w->draft_prompt_model, the_draft, 0, &err) < 0)
        fail_msg("%s: %s", the_draft, err.message);
    options->draft_model = w->draft_model;
    options->draft_prompt_model = w->draft_prompt_model;
}

static inline void close_draft(struct world *w)
{
    if (!w->draft_model)
        return;
    model_close(w->draft_model);
    kvg_prompt_model_close(w->draft_prompt_model);
}

static inline void open_world(struct world *w, const char *path, struct engine_options options)
{
    struct kvg_error err;
    uint32_t max_seqs = options.max_num_seqs ? options.max_num_seqs : 64;

    w->draft_model = NULL;
    if (the_draft)
        open_draft(w, &options);
    struct model_options model = {.path = path,
                                  .device = the_device,
                                  .deterministic = the_device != NULL,
                                  .threads = 1, /* many programs share the machine while tests run */
                                  .max_rows = options.max_num_batched_tokens ? options.max_num_batched_tokens : 2048,
                                  .max_seqs = max_seqs,
                                  .kv_cache_dtype = the_kv_dtype,
                                  .max_outputs = engine_max_outputs(&options, max_seqs)};

    log_set_level(LOG_WARN);
    options.model_name = "toy";
    options.accept = the_rule;
    if (model_open(&w->model, &model, &err) < 0 || kvg_prompt_model_open(&w->prompt_model, path, 0, &err) < 0 ||
        engine_open(&w->engine, &options, w->model, w->prompt_model, the_publisher, &err) < 0)
        fail_msg("%s: %s", path, err.message);
}

static inline void check_engine(struct world *w)
{
    struct kvg_error err;
    if (engine_check(w->engine, &err) < 0)
        fail_msg("%s", err.message);
}

static inline void close_world(struct world *w)
{
    check_engine(w);
    engine_close(w->engine);
    model_close(w->model);
    kvg_prompt_model_close(w->prompt_model);
    close_draft(w);
}

/* ---- one request ----------------------------------------------------------------------------------------------------------- */

struct reply {
    uint32_t ids[MOST_IDS];
    size_t n_ids, text_len, n_events;
    char text[8 * MOST_IDS];
    float logprobs[MOST_IDS];
    uint32_t n_top[MOST_IDS];
    enum engine_finish finish;
    uint32_t matched, prompt_tokens, cached_tokens, completion_tokens;
    bool bad; /* an event after the last one, or one that contradicts another */
};
struct call {
    uint64_t id;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool ended;
    bool gate;  /* its sink waits: see close_gate */
    bool waits; /* the sink is at the gate */
    int rank;   /* how many calls of this program had ended before it */
    char error[128];
    struct reply choices[MOST_CHOICES];
};

static inline void on_event(void *context, const struct engine_event *event)
{
    struct call *call = context;
    struct reply *reply = &call->choices[event->choice];
    static int n_ended; /* sinks run on one thread, one engine after another */

    pthread_mutex_lock(&call->mutex);
    while (call->gate) {
        call->waits = true;
        pthread_cond_broadcast(&call->changed);
        pthread_cond_wait(&call->changed, &call->mutex);
    }
    reply->bad |= reply->finish != FINISH_NONE || call->ended || reply->n_ids + event->n_ids > MOST_IDS;
    for (size_t i = 0; i < event->n_ids && !reply->bad; i++) {
        reply->logprobs[reply->n_ids] = event->logprobs ? event->logprobs[i].logprob : 1;
        reply->n_top[reply->n_ids] = event->logprobs ? event->logprobs[i].n_top : 0;
        reply->ids[reply->n_ids++] = event->ids[i];
    }
    reply->bad |= event->text_len && ((unsigned char)event->text[0] & 0xc0) == 0x80; /* the rest of a character */
    memcpy(reply->text + reply->text_len, event->text, event->text_len);
    reply->text_len += event->text_len;
    reply->text[reply->text_len] = '\0';
    reply->n_events++;
    reply->finish = event->finish;
    reply->matched = event->matched_stop_token;
    reply->prompt_tokens = event->prompt_tokens;
    reply->cached_tokens = event->cached_tokens;
    reply->completion_tokens = event->completion_tokens;
    reply->bad |= event->completion_tokens != reply->n_ids;
    snprintf(call->error, sizeof call->error, "%s", event->error ? event->error : "");
    if (event->last_choice) {
        call->ended = true;
        call->rank = n_ended++;
    }
    pthread_cond_broadcast(&call->changed);
    pthread_mutex_unlock(&call->mutex);
}

static inline struct engine_params default_params(uint32_t max_tokens)
{
    return (struct engine_params){.max_tokens = max_tokens, .n = 1, .top_p = 1, .repetition_penalty = 1, .ignore_eos = true};
}

static inline int try_start(struct world *w, struct call *call, const uint32_t *ids, size_t n, const struct engine_params *params,
                            struct kvg_error *err)
{
    struct engine_submit submit = {.ids = ids, .n_ids = n, .params = *params, .sink = on_event, .context = call};

    bool gate = call->gate;
    memset(call, 0, sizeof *call);
    call->gate = gate;
    pthread_mutex_init(&call->mutex, NULL);
    pthread_cond_init(&call->changed, NULL);
    return engine_submit(w->engine, &submit, &call->id, err);
}

static inline void start_call(struct world *w, struct call *call, const uint32_t *ids, size_t n,
                              const struct engine_params *params)
{
    struct kvg_error err;
    if (try_start(w, call, ids, n, params, &err) < 0)
        fail_msg("%s", err.message);
}

/* Until the first choice has `tokens` tokens, or the call has ended. Fails after a minute and more. */
static inline void wait_tokens(struct call *call, size_t tokens)
{
    struct timespec until;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 120;
    pthread_mutex_lock(&call->mutex);
    while (!call->ended && call->choices[0].n_ids < tokens)
        if (pthread_cond_timedwait(&call->changed, &call->mutex, &until) != 0)
            break;
    bool enough = call->ended || call->choices[0].n_ids >= tokens;
    pthread_mutex_unlock(&call->mutex);
    if (!enough)
        fail_msg("no answer in two minutes");
}

static inline void wait_call(struct call *call)
{
    wait_tokens(call, SIZE_MAX);
    for (int i = 0; i < MOST_CHOICES; i++)
        assert_false(call->choices[i].bad);
}

static inline void run_call(struct world *w, struct call *call, const uint32_t *ids, size_t n, const struct engine_params *params)
{
    start_call(w, call, ids, n, params);
    wait_call(call);
}

static inline void assert_same_reply(const struct reply *a, const struct reply *b)
{
    assert_int_equal(a->n_ids, b->n_ids);
    assert_memory_equal(a->ids, b->ids, a->n_ids * sizeof *a->ids);
    assert_int_equal(a->text_len, b->text_len);
    assert_memory_equal(a->text, b->text, a->text_len);
    assert_int_equal(a->finish, b->finish);
}

/* Between these two the engine thread stands still inside a sink, so that all that is submitted meanwhile meets in one step. */
static inline void close_gate(struct world *w, struct call *call)
{
    struct engine_params params = default_params(0);
    uint32_t id = 1;

    call->gate = true;
    start_call(w, call, &id, 1, &params);
}

/* Until the engine thread stands in the call's sink. */
static inline void wait_at_gate(struct call *call)
{
    pthread_mutex_lock(&call->mutex);
    while (!call->waits)
        pthread_cond_wait(&call->changed, &call->mutex);
    pthread_mutex_unlock(&call->mutex);
}

static inline void open_gate(struct call *call)
{
    pthread_mutex_lock(&call->mutex);
    call->gate = false;
    pthread_cond_broadcast(&call->changed);
    pthread_mutex_unlock(&call->mutex);
    wait_call(call);
}

/* n ids of a stream of its own for each seed; the first `shared` are the same for all. */
static inline void make_ids(uint32_t *ids, size_t n, size_t shared, uint64_t seed, uint32_t n_vocab)
{
    uint64_t x = 12345;
    for (size_t i = 0; i < n; i++) {
        if (i == shared)
            x = seed * 0x9e3779b97f4a7c15u + 1;
        x = x * 6364136223846793005u + 1442695040888963407u;
        ids[i] = (uint32_t)(x >> 33) % n_vocab;
    }
}
