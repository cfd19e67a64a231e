/* kvgate-worker: loads a model, serves it, tells Redis what it holds. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>
#include "gpu-worker/engine/drafter.h"
#include "gpu-worker/engine/engine.h"
#include "gpu-worker/kv/publish.h"
#include "gpu-worker/log.h"
#include "gpu-worker/model/model.h"
#include "gpu-worker/model/ranks.h"
#include "gpu-worker/options.h"
#include "gpu-worker/plan.h"
#include "gpu-worker/server/server.h"
#include "gpu-worker/server/warm.h"
#include "libprompt/prompt.h"

enum { EXIT_START = 1, EXIT_USAGE = 2, EXIT_SUPERSEDED = 3, EXIT_FORCED = 143 };
enum { SEGMENT_MEMORY = 64 << 20, WARM_POLL_MS = 5, DRAIN_POLL_MS = 50, DRAIN_QUIET_POLLS = 4 };

struct worker {
    struct options options;
    struct ranks *ranks; /* with --tensor-parallel-size */
    struct kvg_prompt_model *prompt_model;
    struct model *model;
    struct kvg_prompt_model *draft_prompt_model; /* with --speculative-model FILE */
    struct model *draft_model;
    struct publisher *publisher;
    struct engine *engine;
    struct warm *warm; /* with --warm FILE */
    struct server *server;
};

static atomic_bool superseded;

static int64_t monotonic_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* ---- start ------------------------------------------------------------------------------------------------------------- */

/* On the publisher's thread: wakes the main thread, which drains. */
static void on_superseded(void *context)
{
    atomic_store(&superseded, true);
    kill(getpid(), SIGTERM);
}

struct progress {
    int64_t last_ms;
    const char *path;
};

/* A line a second while the file loads; a signal ends the process there, where nothing is served yet. */
static void on_progress(double share, void *context)
{
    struct progress *progress = context;
    int64_t now = monotonic_ms();
    sigset_t pending;

    sigpending(&pending);
    if (sigismember(&pending, SIGTERM) || sigismember(&pending, SIGINT) || sigismember(&pending, SIGHUP)) {
        log_info("told to end while loading: exiting");
        _exit(EXIT_FORCED);
    }
    if (now - progress->last_ms < 1000)
        return;
    progress->last_ms = now;
    log_info("loading %s: %.0f %%", progress->path, share * 100);
}

static enum log_level level_of(const char *name)
{
    return strcmp(name, "debug") == 0   ? LOG_DEBUG
           : strcmp(name, "warn") == 0  ? LOG_WARN
           : strcmp(name, "error") == 0 ? LOG_ERROR
                                        : LOG_INFO;
}

/* Signals that end the worker are taken by the main thread alone: every other thread inherits this mask. */
static void prepare_process(sigset_t *ending)
{
    struct rlimit files;

    signal(SIGPIPE, SIG_IGN);
    sigemptyset(ending);
    sigaddset(ending, SIGTERM);
    sigaddset(ending, SIGINT);
    sigaddset(ending, SIGHUP); /* the terminal is gone; under nohup it stays ignored */
    pthread_sigmask(SIG_BLOCK, ending, NULL);
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
}

/* The name is one that the flag takes. */
static enum accept_rule accept_rule(const char *name)
{
    return strcmp(name, "rejection") == 0 ? ACCEPT_REJECTION
           : strcmp(name, "argmax") == 0  ? ACCEPT_ARGMAX
           : strcmp(name, "top-p") == 0   ? ACCEPT_TOP_P
                                          : ACCEPT_COUPLED;
}

/* What the flags say to the engine. */
static struct engine_options engine_options(const struct worker *worker)
{
    const struct options *options = &worker->options;
    return (struct engine_options){
        .model_name = options->served_model_name,
        .max_model_len = options->max_model_len,
        .max_num_seqs = options->max_num_seqs,
        .max_num_batched_tokens = options->max_num_batched_tokens,
        .block_size = options->block_size,
        .num_kv_blocks = options->num_kv_blocks,
        .kv_cache_bytes = options->kv_cache_memory,
        .max_waiting = options->max_waiting,
        .disable_prefix_caching = options->disable_prefix_caching,
        .disable_chunked_prefill = options->disable_chunked_prefill,
        .priority_scheduling = strcmp(options->scheduling_policy, "priority") == 0,
        .draft_model = worker->draft_model,
        .draft_prompt_model = worker->draft_prompt_model,
        .speculate_ngram = options->speculative_model != NULL,
        .lookup = {.longest = options->prompt_lookup_max, .shortest = options->prompt_lookup_min},
        .num_speculative_tokens = options->num_speculative_tokens,
        .accept = accept_rule(options->spec_accept),
    };
}

static void log_speculation(const struct options *options)
{
    static const char *const what[] = {
        [ACCEPT_COUPLED] = "answers are the same, bit for bit, as without drafts",
        [ACCEPT_REJECTION] = "answers follow the same distribution as without drafts",
        [ACCEPT_ARGMAX] = "LOSSY: likely tokens come more often than without drafts",
        [ACCEPT_TOP_P] = "LOSSY: drafts choose among the likely tokens",
    };
    const char *model = options->speculative_model;
    if (model)
        log_info("speculation: drafts by %s, --spec-accept %s: %s",
                 strcmp(model, "ngram") == 0 ? "prompt lookup" : "prompt lookup and a draft model", options->spec_accept,
                 what[accept_rule(options->spec_accept)]);
}

/* What the target and the draft model have in common. */
static struct model_options options_of_model(const struct options *options, const char *path)
{
    return (struct model_options){
        .path = path,
        .device = options->device,
        .cpu_isa = options->cpu_isa,
        .cpu_arithmetic = options->cpu_arithmetic,
        .kv_cache_dtype = options->kv_cache_dtype,
        .threads = options->threads,
        .deterministic = options->deterministic,
        .enforce_eager = options->enforce_eager,
        .max_rows = options->max_num_batched_tokens,
        .max_seqs = options->max_num_seqs,
    };
}

static int load_draft_model(struct worker *worker, struct kvg_error *err)
{
    const struct options *options = &worker->options;
    struct model_options model_options = options_of_model(options, options->speculative_model);
    if (!options->speculative_model || strcmp(options->speculative_model, "ngram") == 0)
        return 0;
    model_options.max_outputs = options->max_num_seqs;
    model_options.scored = DRAFTER_BRIEF;
    log_info("loading %s, which drafts", options->speculative_model);
    if (kvg_prompt_model_open(&worker->draft_prompt_model, options->speculative_model, 0, err) < 0)
        return -1;
    return model_open(&worker->draft_model, &model_options, err);
}

/* On a thread of its own, beside the weights, and after the draft model. A fault ends the process at once: nothing is served yet,
 * and weights may still take minutes. */
static void *load_prompt_model(void *arg)
{
    struct worker *worker = arg;
    struct engine_options engine = engine_options(worker);
    struct kvg_error err = {0};

    if (kvg_prompt_model_open(&worker->prompt_model, worker->options.model, SEGMENT_MEMORY, &err) < 0 ||
        engine_check_draft(&engine, worker->prompt_model, &err) < 0) {
        log_error("cannot start: %s", err.message);
        _exit(EXIT_START);
    }
    return NULL;
}

static int load_both(struct worker *worker, const struct model_options *model_options, struct kvg_error *err)
{
    pthread_t thread;
    bool beside = pthread_create(&thread, NULL, load_prompt_model, worker) == 0;

    if (!beside)
        load_prompt_model(worker);
    int failed = model_open(&worker->model, model_options, err);
    if (beside)
        pthread_join(thread, NULL);
    return failed;
}

/* The same on every rank. */
static struct model_options target_options(const struct worker *worker)
{
    const struct options *options = &worker->options;
    struct engine_options engine = engine_options(worker);
    struct model_options model = options_of_model(options, options->model);
    model.max_outputs = engine_max_outputs(&engine, options->max_num_seqs);
    model.comm = ranks_comm(worker->ranks);
    return model;
}

static int load_model(struct worker *worker, struct kvg_error *err)
{
    const struct options *options = &worker->options;
    int64_t started = monotonic_ms();
    struct progress progress = {started, options->model};
    if (load_draft_model(worker, err) < 0)
        return -1;
    struct model_options model_options = target_options(worker);
    model_options.progress = on_progress;
    model_options.context = &progress;
    log_info("loading %s", options->model);
    if (load_both(worker, &model_options, err) < 0)
        return -1;
    const struct model_info *info = model_info(worker->model);
    log_info("loaded in %.1f s: %s, %u layers, %.0f MiB of weights, on %s", (double)(monotonic_ms() - started) / 1000,
             info->family, info->n_layers, (double)info->weight_bytes / (1 << 20), info->backend);
    return 0;
}

static int start_publisher(struct worker *worker, struct kvg_error *err)
{
    const struct options *options = &worker->options;
    struct publisher_options publisher_options = {
        .redis = options->redis,
        .prefix = options->redis_prefix,
        .model = options->served_model_name,
        .worker_id = options->worker_id,
        .addr = options->advertise,
        .version = KVGATE_VERSION,
        .fingerprint = *kvg_prompt_model_fingerprint(worker->prompt_model),
        .block_size = options->block_size,
        .held = true, /* until the listeners are open and the prompts of --warm computed */
        .superseded = on_superseded,
    };
    return options->redis ? publisher_open(&worker->publisher, &publisher_options, err) : 0;
}

static void log_cache(const struct worker *worker)
{
    struct engine_info info;
    engine_info(worker->engine, &info);
    size_t block_bytes = model_kv_block_bytes(worker->model, info.block_size);
    if (worker->draft_model)
        block_bytes += model_kv_block_bytes(worker->draft_model, info.block_size);
    uint32_t blocks_a_request = (info.max_model_len + info.block_size - 1) / info.block_size;
    log_info("KV cache: %s, %zu bytes a block of %u tokens, %u blocks (%.0f MiB); %.2f requests of %u tokens fit",
             model_info(worker->model)->kv_cache_dtype, block_bytes, info.block_size, info.num_blocks,
             (double)block_bytes * info.num_blocks / (1 << 20), (double)info.num_blocks / blocks_a_request, info.max_model_len);
}

/* What the KV cache may take by --gpu-memory-utilization: of a device's memory that share less what is in use, of a host's that
 * share of what is free. A device gives nine tenths where nothing is said; 0: the engine decides. */
static int budget_cache(const struct worker *worker, uint64_t *out, struct kvg_error *err)
{
    const struct options *options = &worker->options;
    uint64_t free_bytes, total = model_device_memory(worker->model, &free_bytes);
    double share = options->gpu_memory_utilization;

    if (options->kv_cache_memory || options->num_kv_blocks || (total == 0 && share <= 0))
        return 0;
    if (total == 0) {
        *out = (uint64_t)(share * (double)engine_available_memory());
        return 0;
    }
    share = share > 0 ? share : 0.9;
    double used = (double)(total - free_bytes), left = share * (double)total - used;
    if (left <= 0)
        return kvg_fail(err, KVG_NOMEM,
                        "--gpu-memory-utilization %.2f of %.0f MiB leaves nothing for the KV cache: %.0f MiB are in use", share,
                        (double)total / (1 << 20), used / (1 << 20));
    *out = (uint64_t)left;
    return 0;
}

static int start_engine(struct worker *worker, struct kvg_error *err)
{
    const struct options *options = &worker->options;
    struct engine_options engine = engine_options(worker);

    if (budget_cache(worker, &engine.kv_cache_bytes, err) < 0 ||
        engine_open(&worker->engine, &engine, worker->model, worker->prompt_model, worker->publisher, err) < 0)
        return -1;
    log_cache(worker);
    log_speculation(options);
    return 0;
}

/* Nothing listens before the file was read: a fault in it ends the start. */
static int start_server(struct worker *worker, struct kvg_error *err)
{
    const struct options *options = &worker->options;
    struct server_options server_options = {
        .host = options->host,
        .port = (uint16_t)options->port,
        .gateway_listen = options->gateway_listen,
        .model_name = options->served_model_name,
        .aliases = options->aliases,
        .n_aliases = options->n_aliases,
        .priority_scheduling = strcmp(options->scheduling_policy, "priority") == 0,
        .warming = true,
        .api_key = options->api_key,
        .version = KVGATE_VERSION,
        .max_waiting = options->max_waiting,
    };
    if (options->warm && warm_open(&worker->warm, options->warm, &server_options, worker->engine, worker->prompt_model, err) < 0)
        return -1;
    return server_open(&worker->server, &server_options, worker->engine, worker->prompt_model, worker->publisher, err);
}

/* Computes what --warm names. 0, -1 with err, or the signal that ends the worker before. */
static int warm_up(struct worker *worker, const sigset_t *ending, struct kvg_error *err)
{
    const struct timespec poll = {.tv_nsec = WARM_POLL_MS * 1000000};
    int rc, signal_number;

    if (!worker->warm)
        return 0;
    while ((rc = warm_advance(worker->warm, err)) == 0)
        if ((signal_number = sigtimedwait(ending, NULL, &poll)) > 0) {
            warm_cancel(worker->warm);
            return signal_number;
        }
    return rc < 0 ? -1 : 0;
}

static void be_ready(struct worker *worker)
{
    const struct options *options = &worker->options;
    char plain[300] = "";

    server_ready(worker->server);
    publisher_release(worker->publisher);
    if (options->port)
        snprintf(plain, sizeof plain, strchr(options->host, ':') ? " at http://[%s]:%u" : " at http://%s:%u", options->host,
                 options->port);
    log_info("ready: %s%s%s%s%s%s", options->served_model_name, plain, options->gateway_listen ? ", gateway at " : "",
             options->gateway_listen ? options->gateway_listen : "", options->redis ? ", worker id " : "",
             options->redis ? options->worker_id : "");
}

/* ---- end --------------------------------------------------------------------------------------------------------------- */

/* Waits until every answer was sent. A second signal ends the process at once. */
static void drain(struct worker *worker, const sigset_t *ending)
{
    const struct timespec poll = {.tv_nsec = DRAIN_POLL_MS * 1000000};
    int quiet = 0;

    if (worker->publisher)
        publisher_drain(worker->publisher);
    server_drain(worker->server);
    while (quiet < DRAIN_QUIET_POLLS) {
        if (sigtimedwait(ending, NULL, &poll) > 0) {
            log_warn("second signal: exiting with answers unfinished");
            _exit(EXIT_FORCED);
        }
        quiet = server_idle(worker->server) && engine_idle(worker->engine) ? quiet + 1 : 0;
    }
}

/* From the outside in: nobody submits to a closed engine, and the last evictions reach a publisher that is open. */
static void stop(struct worker *worker)
{
    if (worker->server)
        server_close(worker->server);
    if (worker->engine)
        engine_close(worker->engine);
    warm_close(worker->warm);
    if (worker->publisher)
        publisher_close(worker->publisher);
    if (worker->model)
        model_close(worker->model);
    if (worker->prompt_model)
        kvg_prompt_model_close(worker->prompt_model);
    if (worker->draft_model)
        model_close(worker->draft_model);
    if (worker->draft_prompt_model)
        kvg_prompt_model_close(worker->draft_prompt_model);
    ranks_end(worker->ranks, worker->model != NULL);
}

/* A rank other than 0. Where it cannot start, rank 0 cannot either: it says why, and its end is this one's. */
static int follow(struct worker *worker)
{
    struct model_options options = target_options(worker);
    struct kvg_error err = {0};

    if (level_of(worker->options.log_level) != LOG_DEBUG)
        log_set_level(LOG_ERROR); /* the rest rank 0 says, too */
    if (model_open(&worker->model, &options, &err) < 0)
        for (;;)
            pause();
    if (model_follow(worker->model, &err) < 0)
        log_fatal("%s", err.message);
    model_close(worker->model);
    return 0;
}

int main(int argc, char **argv)
{
    static struct worker worker;
    struct kvg_error err = {0};
    sigset_t ending;
    int signal_number;

    if (options_parse(&worker.options, argc, argv, &err) < 0) {
        fprintf(stderr, "kvgate-worker: %s\n", err.message);
        return EXIT_USAGE;
    }
    if (worker.options.help) {
        options_help();
        return 0;
    }
    if (worker.options.version) {
        printf("kvgate-worker %s\n", KVGATE_VERSION);
        return 0;
    }
    log_set_level(level_of(worker.options.log_level));
    if (worker.options.plan) {
        if (plan_run(&worker.options, &err) == 0)
            return 0;
        fprintf(stderr, "kvgate-worker: %s\n", err.message);
        return EXIT_START;
    }
    prepare_process(&ending);
    if (ranks_start(&worker.ranks, worker.options.tensor_parallel_size, &err) < 0) {
        log_error("cannot start: %s", err.message);
        return EXIT_START;
    }
    if (!ranks_lead(worker.ranks))
        return follow(&worker);
    if (load_model(&worker, &err) < 0 || start_publisher(&worker, &err) < 0 || start_engine(&worker, &err) < 0 ||
        start_server(&worker, &err) < 0 || (signal_number = warm_up(&worker, &ending, &err)) < 0) {
        log_error("cannot start: %s", err.message);
        stop(&worker);
        return EXIT_START;
    }
    if (signal_number == 0) {
        be_ready(&worker);
        while (sigwait(&ending, &signal_number) != 0)
            ;
    }
    if (atomic_load(&superseded))
        log_error("another process runs under the worker id \"%s\": draining, then exiting", worker.options.worker_id);
    else
        log_info("%s: draining; once more exits at once", signal_number == SIGINT   ? "SIGINT"
                                                          : signal_number == SIGHUP ? "SIGHUP"
                                                                                    : "SIGTERM");
    drain(&worker, &ending);
    stop(&worker);
    log_info("exiting");
    return atomic_load(&superseded) ? EXIT_SUPERSEDED : 0;
}
