#include "gpu-worker/engine/engine.h"
#include "gpu-worker/engine/clock.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/engine/request.h"
#include "gpu-worker/engine/step.h"
#include "gpu-worker/log.h"
#include "gpu-worker/model/model.h"

/* Who touches what: `step` and all sequences belong to the engine thread; what stands under `mutex` is shared; the rest is
 * written before the thread starts, or atomic. */
struct engine {
    struct engine_info info;
    struct engine_metrics metrics;
    struct request_world world;
    char *model_name;
    struct stepper step;
    pthread_t thread;
    _Atomic double last_tick; /* clock_now() at the end of the last step or idle wait */

    pthread_mutex_t mutex;
    pthread_cond_t wake;    /* the engine thread waits here while it has nothing to do */
    pthread_cond_t checked; /* engine_check waits here */
    struct request *live;   /* all requests from submission to last event */
    struct request *first_new, **last_new;
    uint32_t n_live, n_choices, max_waiting; /* n_choices: of clients */
    uint64_t last_id;
    bool cancels, draining, drain_told, closing; /* cancels: some live request is marked */
    bool check_wanted, check_failed;
    struct kvg_error check_error;
};

/* ---- requests come and go -------------------------------------------------------------------------------------------------- */

/* Choices that max_waiting is about: what warms the cache is not refused for it, and no client is for that. */
static uint32_t counted(const struct request *request)
{
    return request->warm ? 0 : request->n_choices;
}

static void link_live(struct engine *engine, struct request *request)
{
    request->before = NULL;
    request->after = engine->live;
    if (engine->live)
        engine->live->before = request;
    engine->live = request;
    request->next_new = NULL;
    *engine->last_new = request;
    engine->last_new = &request->next_new;
    engine->n_live++;
    engine->n_choices += counted(request);
}

static void on_ended(void *context, struct request *request)
{
    struct engine *engine = context;

    pthread_mutex_lock(&engine->mutex);
    *(request->before ? &request->before->after : &engine->live) = request->after;
    if (request->after)
        request->after->before = request->before;
    engine->n_live--;
    engine->n_choices -= counted(request);
    pthread_mutex_unlock(&engine->mutex);
    request_free(request);
}

static int enqueue(struct engine *engine, struct request *request, uint64_t *request_id, struct kvg_error *err)
{
    int rc = 0;

    pthread_mutex_lock(&engine->mutex);
    if (engine->draining || engine->closing) {
        rc = kvg_fail(err, KVG_LIMIT, "this worker is shutting down");
    } else if (engine->n_choices + counted(request) > engine->max_waiting + engine->info.max_num_seqs) {
        rc = kvg_fail(err, KVG_LIMIT, "%u choices are running or waiting; this worker takes no more than %u", engine->n_choices,
                      engine->max_waiting + engine->info.max_num_seqs);
    } else {
        *request_id = request->id = ++engine->last_id;
        link_live(engine, request);
        pthread_cond_signal(&engine->wake);
    }
    pthread_mutex_unlock(&engine->mutex);
    return rc;
}

int engine_submit(struct engine *engine, const struct engine_submit *submit, uint64_t *request_id, struct kvg_error *err)
{
    struct request *request;
    double now = clock_now();
    int rc = request_create(&request, &engine->world, submit, err);

    if (rc < 0)
        return rc;
    request->t_submitted = now;
    rc = enqueue(engine, request, request_id, err);
    if (rc < 0)
        request_free(request);
    return rc;
}

void engine_cancel(struct engine *engine, uint64_t request_id)
{
    pthread_mutex_lock(&engine->mutex);
    for (struct request *request = engine->live; request; request = request->after)
        if (request->id == request_id) {
            request->cancelled = engine->cancels = true;
            pthread_cond_signal(&engine->wake);
            break;
        }
    pthread_mutex_unlock(&engine->mutex);
}

/* ---- the engine thread ----------------------------------------------------------------------------------------------------- */

static struct request *next_new(struct engine *engine)
{
    pthread_mutex_lock(&engine->mutex);
    struct request *request = engine->first_new;
    if (request && !(engine->first_new = request->next_new))
        engine->last_new = &engine->first_new;
    if (request)
        request->taken = true;
    pthread_mutex_unlock(&engine->mutex);
    return request;
}

/* A request that is marked, or any one when `all`; NULL when there is none, and then the mark is taken off. One that still
 * stands in the queue of new ones, cancelled as soon as it came, has to leave it first: the mark stays for the next round. */
static struct request *next_to_abort(struct engine *engine, bool all)
{
    pthread_mutex_lock(&engine->mutex);
    struct request *request = engine->cancels || all ? engine->live : NULL;
    bool left = false;
    while (request && !all && !(request->cancelled && request->taken)) {
        left |= request->cancelled;
        request = request->after;
    }
    if (!request)
        engine->cancels = left;
    pthread_mutex_unlock(&engine->mutex);
    return request;
}

static void take_news(struct engine *engine)
{
    struct request *request;

    while ((request = next_new(engine)))
        step_add(&engine->step, request);
    while ((request = next_to_abort(engine, false))) {
        engine->metrics.cancelled++;
        step_abort(&engine->step, request, FINISH_ABORT, NULL);
    }
}

/* Everything is idle: the invariants must hold, and no sequence may hold a block. */
static void answer_check(struct engine *engine)
{
    struct cache_counts counts;

    cache_counts(engine->step.cache, &counts);
    engine->check_failed = cache_check(engine->step.cache, &engine->check_error) < 0;
    if (!engine->check_failed && counts.used) {
        kvg_fail(&engine->check_error, -1, "%u blocks of %u are in use though nothing runs", counts.used, counts.total);
        engine->check_failed = true;
    }
    engine->check_wanted = false;
    pthread_cond_broadcast(&engine->checked);
}

/* Up to half a second, or until there is news. */
static void wait_for_news(struct engine *engine)
{
    struct timespec until;

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += 500000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&engine->mutex);
    if (engine->check_wanted && !engine->first_new && !engine->cancels)
        answer_check(engine);
    while (!engine->first_new && !engine->cancels && !engine->closing && !engine->check_wanted &&
           engine->draining == engine->drain_told)
        if (pthread_cond_timedwait(&engine->wake, &engine->mutex, &until) != 0)
            break;
    pthread_mutex_unlock(&engine->mutex);
}

/* Whether to go on. Tells the publisher of a drain once. */
static bool goes_on(struct engine *engine)
{
    pthread_mutex_lock(&engine->mutex);
    bool drain = engine->draining && !engine->drain_told, closing = engine->closing;
    engine->drain_told |= drain;
    pthread_mutex_unlock(&engine->mutex);
    if (drain && engine->step.publisher)
        publisher_drain(engine->step.publisher);
    return !closing;
}

static void *run(void *context)
{
    struct engine *engine = context;
    struct request *request;

    while (goes_on(engine)) {
        engine->step.lap = clock_now();
        take_news(engine);
        bool work = step_has_work(&engine->step);
        if (work) {
            step_lap(&engine->step, STEP_INTAKE);
            step_run(&engine->step);
        }
        step_report(&engine->step);
        if (work)
            step_lap(&engine->step, STEP_REPORT);
        engine->last_tick = clock_now();
        if (!work)
            wait_for_news(engine);
    }
    while ((request = next_new(engine)))
        step_add(&engine->step, request);
    while ((request = next_to_abort(engine, true)))
        step_abort(&engine->step, request, FINISH_ERROR, "the worker is shutting down");
    return NULL;
}

/* ---- sizes ------------------------------------------------------------------------------------------------------------------
 */

uint64_t engine_available_memory(void)
{
    unsigned long long kib = 0;
    char line[128];
    FILE *f = fopen("/proc/meminfo", "re");

    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %llu", &kib) == 1)
            break;
    if (f)
        fclose(f);
    return (uint64_t)kib * 1024;
}

/* Fills engine->info from the options; the pool takes a quarter of the free memory, 8 GiB at most, where nothing is said. */
static int choose_sizes(struct engine *engine, const struct engine_options *options, const struct model_info *model,
                        struct kvg_error *err)
{
    struct engine_info *info = &engine->info;
    uint64_t budget = options->kv_cache_bytes, quarter = engine_available_memory() / 4, most = (uint64_t)8 << 30;

    info->max_model_len = options->max_model_len ? options->max_model_len : model->max_position;
    info->block_size = options->block_size ? options->block_size : 32;
    info->max_num_batched_tokens = options->max_num_batched_tokens ? options->max_num_batched_tokens : 2048;
    info->max_num_seqs = options->max_num_seqs ? options->max_num_seqs : 64;
    if (info->max_num_seqs > info->max_num_batched_tokens)
        info->max_num_seqs = info->max_num_batched_tokens;
    if (info->max_model_len < 2 || info->max_model_len > model->max_position)
        return kvg_fail(err, KVG_INVALID, "a context of %u tokens; the model's has %u", info->max_model_len, model->max_position);
    if (info->block_size < 16 || info->block_size > 512 || (info->block_size & (info->block_size - 1)))
        return kvg_fail(err, KVG_INVALID, "a block of %u tokens; it must be a power of two from 16 to 512", info->block_size);
    if (options->disable_chunked_prefill && info->max_num_batched_tokens < info->max_model_len)
        return kvg_fail(err, KVG_INVALID, "without chunked prefill a step of %u tokens must hold a context of %u",
                        info->max_num_batched_tokens, info->max_model_len);
    if (budget == 0)
        budget = quarter < most ? quarter : most;
    uint64_t bytes = model_kv_block_bytes(engine->step.model, info->block_size);
    if (options->draft_model)
        bytes += model_kv_block_bytes(options->draft_model, info->block_size);
    uint64_t blocks = budget / bytes;
    info->num_blocks = options->num_kv_blocks ? options->num_kv_blocks : (uint32_t)(blocks < 1u << 24 ? blocks : 1u << 24);
    if (info->num_blocks == 0)
        return kvg_fail(err, KVG_INVALID, "a KV cache of %llu bytes holds no block of %llu bytes", (unsigned long long)budget,
                        (unsigned long long)bytes);
    return 0;
}

/* Bytes that one token's text can come to. */
static size_t longest_piece(const struct kvg_tokenizer *tokenizer)
{
    size_t longest = 0;
    for (uint32_t id = 0; id < kvg_tokenizer_info(tokenizer)->n_vocab; id++) {
        size_t n = kvg_token_bytes(tokenizer, id, false).len;
        longest = n > longest ? n : longest;
    }
    return KVG_DETOKENIZE_ROOM(longest);
}

static void fill_world(struct engine *engine, const struct kvg_prompt_model *prompt_model, const struct model_info *model)
{
    const struct kvg_tokenizer *tokenizer = kvg_prompt_model_tokenizer(prompt_model);
    struct request_world *world = &engine->world;

    world->model_name = engine->model_name;
    world->prompt_model = prompt_model;
    world->vocab = kvg_tokenizer_info(tokenizer);
    world->n_vocab = world->vocab->n_vocab < model->n_vocab ? world->vocab->n_vocab : model->n_vocab;
    world->max_len = engine->info.max_model_len;
    world->block_size = engine->info.block_size;
    uint64_t tokens = (uint64_t)engine->info.num_blocks * engine->info.block_size;
    world->pool_tokens = tokens < 1u << 31 ? (uint32_t)tokens : 1u << 31;
    world->longest_piece = longest_piece(tokenizer);
}

/* ---- life -------------------------------------------------------------------------------------------------------------------
 */

static void free_engine(struct engine *engine)
{
    step_free(&engine->step);
    pthread_cond_destroy(&engine->wake);
    pthread_cond_destroy(&engine->checked);
    pthread_mutex_destroy(&engine->mutex);
    free(engine->model_name);
    free(engine);
}

static struct engine *new_engine(const struct engine_options *options)
{
    struct engine *engine = calloc(1, sizeof *engine);
    pthread_condattr_t monotonic;

    if (!engine)
        return NULL;
    engine->model_name = strdup(options->model_name ? options->model_name : "");
    if (!engine->model_name) {
        free(engine);
        return NULL;
    }
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&engine->wake, &monotonic);
    pthread_cond_init(&engine->checked, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&engine->mutex, NULL);
    engine->last_new = &engine->first_new;
    engine->max_waiting = options->max_waiting ? options->max_waiting : 4096;
    engine->last_tick = clock_now();
    engine_metrics_init(&engine->metrics);
    return engine;
}

/* Tokens whose query rows fill a tile of attention, or two of kernels that have smaller ones; at most 32. */
static uint32_t chunk_unit(const struct model_info *model)
{
    enum { ROWS_OF_A_PASS = 64, MOST_UNIT = 32 };
    uint32_t unit = ROWS_OF_A_PASS / (model->n_heads / model->n_kv_heads);

    return unit <= MOST_UNIT ? unit : MOST_UNIT;
}

static int init_step(struct engine *engine, const struct engine_options *options, struct kvg_error *err)
{
    const struct engine_info *info = &engine->info;
    struct step_options step = {.n_blocks = info->num_blocks,
                                .n_vocab = engine->world.n_vocab,
                                .longest_piece = engine->world.longest_piece,
                                .accept = options->accept,
                                .spec = {.n_slots = info->max_num_seqs,
                                         .most_drafts = engine_max_outputs(options, 0),
                                         .ngram = options->speculate_ngram,
                                         .runs = options->lookup,
                                         .keep_all = options->accept == ACCEPT_REJECTION,
                                         .start = options->num_speculative_tokens,
                                         .fixed = options->fixed_drafts,
                                         .metrics = &engine->metrics},
                                .drafter = {.model = options->draft_model,
                                            .n_blocks = info->num_blocks,
                                            .block_size = info->block_size,
                                            .max_seqs = info->max_num_seqs,
                                            .max_rows = info->max_num_batched_tokens,
                                            .n_vocab = engine->world.n_vocab,
                                            .keep_probs = options->accept == ACCEPT_REJECTION ? ENGINE_MOST_DRAFTS : 0},
                                .sched = {.max_num_seqs = info->max_num_seqs,
                                          .max_rows = info->max_num_batched_tokens,
                                          .block_size = info->block_size,
                                          .fixed_chunk = options->fixed_chunk,
                                          .chunk_unit = chunk_unit(model_info(engine->step.model)),
                                          .disable_chunked_prefill = options->disable_chunked_prefill,
                                          .disable_prefix_caching = options->disable_prefix_caching,
                                          .priority_scheduling = options->priority_scheduling}};
    int rc = model_kv_alloc(engine->step.model, info->num_blocks, info->block_size, err);

    engine->step.metrics = &engine->metrics;
    engine->step.ended = on_ended;
    engine->step.context = engine;
    engine->step.output.vocab = engine->world.vocab;
    return rc < 0 ? rc : step_init(&engine->step, &step, err);
}

int engine_check_draft(const struct engine_options *options, const struct kvg_prompt_model *prompt_model, struct kvg_error *err)
{
    if (!options->draft_model)
        return 0;
    return drafter_check_vocab(kvg_prompt_model_tokenizer(prompt_model), kvg_prompt_model_tokenizer(options->draft_prompt_model),
                               model_info(options->draft_model)->n_vocab, err);
}

int engine_open(struct engine **out, const struct engine_options *options, struct model *model,
                const struct kvg_prompt_model *prompt_model, struct publisher *publisher, struct kvg_error *err)
{
    struct engine *engine = new_engine(options);
    int rc;

    if (!engine)
        return kvg_fail(err, KVG_NOMEM, "no memory for the engine");
    engine->step.model = model;
    engine->step.publisher = publisher;
    engine->metrics.tensor_parallel_size = model_info(model)->ranks;
    if ((rc = choose_sizes(engine, options, model_info(model), err)) < 0)
        goto fail;
    fill_world(engine, prompt_model, model_info(model));
    if ((rc = engine_check_draft(options, prompt_model, err)) < 0 || (rc = init_step(engine, options, err)) < 0)
        goto fail;
    step_report(&engine->step);
    if (pthread_create(&engine->thread, NULL, run, engine) != 0) {
        rc = kvg_fail(err, KVG_NOMEM, "the engine thread cannot be started");
        goto fail;
    }
    *out = engine;
    return 0;
fail:
    free_engine(engine);
    return rc;
}

void engine_drain(struct engine *engine)
{
    pthread_mutex_lock(&engine->mutex);
    engine->draining = true;
    pthread_cond_signal(&engine->wake);
    pthread_mutex_unlock(&engine->mutex);
}

void engine_close(struct engine *engine)
{
    if (!engine)
        return;
    pthread_mutex_lock(&engine->mutex);
    engine->closing = true;
    pthread_cond_signal(&engine->wake);
    pthread_mutex_unlock(&engine->mutex);
    pthread_join(engine->thread, NULL);
    free_engine(engine);
}

/* ---- questions --------------------------------------------------------------------------------------------------------------
 */

void engine_info(const struct engine *engine, struct engine_info *out)
{
    *out = engine->info;
}

struct engine_metrics *engine_metrics(struct engine *engine)
{
    return &engine->metrics;
}

bool engine_alive(const struct engine *engine)
{
    return clock_now() - engine->last_tick < 10;
}

bool engine_idle(const struct engine *engine)
{
    struct engine *shared = (struct engine *)engine; /* only its mutex is touched */

    pthread_mutex_lock(&shared->mutex);
    bool idle = engine->n_live == 0;
    pthread_mutex_unlock(&shared->mutex);
    return idle;
}

int engine_check(struct engine *engine, struct kvg_error *err)
{
    pthread_mutex_lock(&engine->mutex);
    engine->check_wanted = true;
    pthread_cond_signal(&engine->wake);
    while (engine->check_wanted)
        pthread_cond_wait(&engine->checked, &engine->mutex);
    int rc = engine->check_failed ? -1 : 0;
    if (rc < 0 && err)
        *err = engine->check_error;
    pthread_mutex_unlock(&engine->mutex);
    return rc;
}
