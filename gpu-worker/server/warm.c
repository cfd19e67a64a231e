#include "gpu-worker/server/warm.h"
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "gpu-worker/log.h"
#include "gpu-worker/server/api_params.h"
#include "libprompt/arena.h"
#include "libprompt/block_chain.h"
#include "libprompt/json.h"

enum { AT_A_TIME = 8, NAME_SHOWN = 120 };

struct warm_prompt {
    struct warm_prompt *next;
    struct warm *warm;
    struct kvg_ids ids;
    struct kvg_str salt;
    uint64_t request_id;
    atomic_bool done; /* the engine's last event has come */
};

struct warm {
    struct engine *engine;
    struct kvg_arena arena; /* prompts, their ids and salts */
    struct warm_prompt *first, **last;
    struct warm_prompt *due;  /* the first that was not submitted */
    struct warm_prompt *open; /* the first that was not seen done */
    size_t n_prompts, n_tokens;
    size_t n_short, n_again; /* left out: without a whole block; with the blocks of another */
    size_t n_submitted, n_done, tokens_done;
    atomic_size_t n_failed;
    int64_t started_ms, told_ms;
};

/* One line being read. */
struct line_reader {
    struct warm *warm;
    const struct server_options *server;
    const struct kvg_prompt_model *prompt_model;
    struct engine_info info;
    char key_salt[SERVER_SALT_SIZE];
    struct kvg_arena arena; /* of this line */
    struct kvg_error cause;
};

static int64_t monotonic_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* ---- reading ----------------------------------------------------------------------------------------------------------- */

static int blame(struct kvg_error *cause, const char *param, const char *message)
{
    kvg_fail(cause, KVG_INVALID, "%s", message);
    snprintf(cause->param, sizeof cause->param, "%s", param);
    return -1;
}

/* Chat or completions, by the member that holds the prompt. */
static int find_endpoint(const struct kvg_json *body, enum kvg_endpoint *endpoint, struct kvg_error *cause)
{
    const struct kvg_json *messages = kvg_json_get(body, "messages"), *prompt = kvg_json_get(body, "prompt");
    bool chat = messages && messages->type != KVG_JSON_NULL, text = prompt && prompt->type != KVG_JSON_NULL;

    if (chat && text)
        return blame(cause, "prompt", "messages and prompt exclude each other");
    if (!chat && !text)
        return blame(cause, "messages", "neither messages nor a prompt is there");
    *endpoint = chat ? KVG_CHAT_COMPLETIONS : KVG_COMPLETIONS;
    return 0;
}

static int check_model(const struct line_reader *reader, struct kvg_str model, struct kvg_error *cause)
{
    char message[256];

    if (server_serves(reader->server, model))
        return 0;
    snprintf(message, sizeof message, "the model \"%.*s\" does not exist: this worker serves \"%s\"",
             (int)(model.len > 64 ? 64 : model.len), model.bytes, reader->server->model_name);
    return blame(cause, "model", message);
}

static int check_length(const struct line_reader *reader, size_t n_ids, struct kvg_error *cause)
{
    uint64_t pool = (uint64_t)reader->info.num_blocks * reader->info.block_size;
    char message[160];

    if (n_ids < reader->info.max_model_len && n_ids < pool)
        return 0;
    snprintf(message, sizeof message,
             "the prompt has %zu tokens; with one more it exceeds the context of %u or the KV cache of %llu tokens", n_ids,
             reader->info.max_model_len, (unsigned long long)pool);
    return blame(cause, "", message);
}

static int keep_prompt(struct warm *warm, struct kvg_ids ids, struct kvg_str salt)
{
    struct warm_prompt *prompt = kvg_arena_zalloc(&warm->arena, sizeof *prompt);
    uint32_t *own = kvg_arena_alloc(&warm->arena, ids.n * sizeof *own);
    char *own_salt = kvg_arena_copy(&warm->arena, salt.bytes, salt.len);

    if (!prompt || !own || !own_salt)
        return -1;
    memcpy(own, ids.ids, ids.n * sizeof *own);
    prompt->warm = warm;
    prompt->ids = (struct kvg_ids){own, ids.n};
    prompt->salt = (struct kvg_str){own_salt, salt.len};
    *warm->last = prompt;
    warm->last = &prompt->next;
    warm->n_prompts++;
    warm->n_tokens += ids.n;
    return 0;
}

/* Whether a prompt before this one has all its blocks. */
static bool is_known(const struct warm *warm, const uint32_t *ids, size_t n_whole, struct kvg_str salt)
{
    for (const struct warm_prompt *one = warm->first; one; one = one->next)
        if (one->ids.n >= n_whole && memcmp(one->ids.ids, ids, n_whole * sizeof *ids) == 0 && one->salt.len == salt.len &&
            memcmp(one->salt.bytes, salt.bytes, salt.len) == 0)
            return true;
    return false;
}

/* Only whole blocks are cached. */
static int keep_useful(struct line_reader *reader, struct kvg_ids ids, struct kvg_str salt)
{
    struct warm *warm = reader->warm;
    size_t n_whole = ids.n - ids.n % reader->info.block_size;

    if (n_whole == 0)
        warm->n_short++;
    else if (is_known(warm, ids.ids, n_whole, salt))
        warm->n_again++;
    else
        return keep_prompt(warm, ids, salt);
    return 0;
}

/* Every prompt of the body, judged as the HTTP interface judges it; sampling parameters are checked and not needed. */
static int read_body(struct line_reader *reader, const struct kvg_json *body)
{
    struct kvg_error *cause = &reader->cause;
    struct api_context context = {.no_priority = true,
                                  .n_vocab = kvg_tokenizer_info(kvg_prompt_model_tokenizer(reader->prompt_model))->n_vocab};
    struct api_params params;
    struct kvg_str salt;
    size_t n;

    if (find_endpoint(body, &context.endpoint, cause) < 0 ||
        api_params_parse(&context, body, &reader->arena, &params, cause) < 0 || check_model(reader, params.model, cause) < 0 ||
        kvg_prompt_count(context.endpoint, body, &n, cause) < 0)
        return -1;
    struct kvg_str own = {reader->key_salt, reader->server->gateway_listen ? 0 : strlen(reader->key_salt)};
    if (kvg_salt_join(own, params.cache_salt, &reader->arena, &salt) < 0)
        return kvg_fail(cause, KVG_NOMEM, "out of memory");
    for (size_t i = 0; i < n; i++) {
        struct kvg_ids ids;
        if (kvg_prompt_ids(reader->prompt_model, context.endpoint, body, i, (int64_t)time(NULL), &reader->arena, &ids, cause) <
                0 ||
            check_length(reader, ids.n, cause) < 0)
            return -1;
        if (keep_useful(reader, ids, salt) < 0)
            return kvg_fail(cause, KVG_NOMEM, "out of memory");
    }
    return 0;
}

static int read_line(struct line_reader *reader, const char *text, size_t len)
{
    struct kvg_json *body;
    int rc;

    if (strspn(text, " \t\r\n") == len)
        return 0;
    memset(&reader->cause, 0, sizeof reader->cause);
    kvg_arena_init(&reader->arena, 0);
    if (kvg_json_parse(&reader->arena, text, len, NULL, &body, &reader->cause) < 0)
        rc = -1;
    else if (body->type != KVG_JSON_OBJECT)
        rc = kvg_fail(&reader->cause, KVG_INVALID, "a request body is a JSON object");
    else
        rc = read_body(reader, body);
    kvg_arena_free(&reader->arena);
    return rc;
}

static int read_file(struct line_reader *reader, FILE *file, const char *path, struct kvg_error *err)
{
    char *text = NULL;
    size_t room = 0, number = 0;
    ssize_t len;
    int rc = 0;

    errno = 0;
    while (rc >= 0 && (len = getline(&text, &room, file)) >= 0) {
        const struct kvg_error *cause = &reader->cause;
        number++;
        if (read_line(reader, text, (size_t)len) == 0)
            continue;
        bool named = !cause->param[0] || strstr(cause->message, cause->param);
        rc = kvg_fail(err, KVG_INVALID, "--warm %.*s, line %zu%s%s: %s", NAME_SHOWN, path, number, named ? "" : ", ",
                      named ? "" : cause->param, cause->message);
    }
    if (rc >= 0 && ferror(file))
        rc = kvg_fail(err, KVG_FILE, "--warm %.*s: %s", NAME_SHOWN, path, strerror(errno));
    free(text);
    if (rc >= 0 && reader->warm->n_prompts + reader->warm->n_short == 0)
        rc = kvg_fail(err, KVG_INVALID, "--warm %.*s: it holds no request", NAME_SHOWN, path);
    return rc;
}

int warm_open(struct warm **out, const char *path, const struct server_options *server, struct engine *engine,
              const struct kvg_prompt_model *prompt_model, struct kvg_error *err)
{
    struct warm *warm = calloc(1, sizeof *warm);
    if (!warm)
        return kvg_fail(err, KVG_NOMEM, "no memory for --warm");
    struct line_reader reader = {.warm = warm, .server = server, .prompt_model = prompt_model};
    FILE *file = fopen(path, "re");

    warm->engine = engine;
    warm->last = &warm->first;
    kvg_arena_init(&warm->arena, 0);
    engine_info(engine, &reader.info);
    server_key_salt(server->api_key, reader.key_salt);
    int rc = file ? read_file(&reader, file, path, err)
                  : kvg_fail(err, KVG_FILE, "--warm %.*s: %s", NAME_SHOWN, path, strerror(errno));
    if (file)
        fclose(file);
    if (rc < 0) {
        warm_close(warm);
        return -1;
    }
    if (warm->n_short + warm->n_again)
        log_info("warm: left out: %zu prompts shorter than a block of %u tokens, %zu whose blocks another has", warm->n_short,
                 reader.info.block_size, warm->n_again);
    warm->due = warm->open = warm->first;
    *out = warm;
    return 0;
}

/* ---- computing --------------------------------------------------------------------------------------------------------- */

static void on_event(void *context, const struct engine_event *event)
{
    struct warm_prompt *prompt = context;

    if (event->finish == FINISH_ERROR || event->finish == FINISH_ABORT)
        atomic_fetch_add(&prompt->warm->n_failed, 1);
    if (event->last_choice)
        atomic_store(&prompt->done, true);
}

/* The whole prompt is computed with the one token that follows it, which nobody reads. */
static int submit(struct warm_prompt *prompt, struct kvg_error *err)
{
    struct engine_submit request = {
        .ids = prompt->ids.ids,
        .n_ids = prompt->ids.n,
        .salt = prompt->salt.bytes,
        .salt_len = prompt->salt.len,
        .params = {.max_tokens = 1, .n = 1, .top_p = 1, .repetition_penalty = 1},
        .warm = true,
        .sink = on_event,
        .context = prompt,
    };
    return engine_submit(prompt->warm->engine, &request, &prompt->request_id, err);
}

static void take_done(struct warm *warm)
{
    for (; warm->open != warm->due && atomic_load(&warm->open->done); warm->open = warm->open->next) {
        warm->n_done++;
        warm->tokens_done += warm->open->ids.n;
    }
}

static void tell_progress(struct warm *warm)
{
    int64_t now = monotonic_ms();

    if (now - warm->told_ms < 1000)
        return;
    warm->told_ms = now;
    log_info("warming: %zu of %zu prompts, %zu of %zu tokens", warm->n_done, warm->n_prompts, warm->tokens_done, warm->n_tokens);
}

static void tell_end(struct warm *warm)
{
    size_t failed = atomic_load(&warm->n_failed);
    struct engine_metrics *m = engine_metrics(warm->engine);

    log_info("warm: %zu prompts of %zu tokens in %.1f s; %u blocks of %u are evicted last", warm->n_prompts - failed,
             warm->n_tokens, (double)(monotonic_ms() - warm->started_ms) / 1000, m->blocks_warm, m->blocks_total);
    if (failed)
        log_warn("warm: %zu prompts of %zu were not computed", failed, warm->n_prompts);
    if (m->evicted_blocks)
        log_warn("warm: the prompts of --warm do not all fit the KV cache: %llu blocks were evicted again",
                 (unsigned long long)m->evicted_blocks);
}

int warm_advance(struct warm *warm, struct kvg_error *err)
{
    if (!warm->started_ms)
        warm->started_ms = warm->told_ms = monotonic_ms();
    take_done(warm);
    for (; warm->due && warm->n_submitted - warm->n_done < AT_A_TIME; warm->due = warm->due->next, warm->n_submitted++) {
        int rc = submit(warm->due, err);
        if (rc == KVG_LIMIT) /* the worker is shutting down */
            break;
        if (rc < 0)
            return -1;
    }
    tell_progress(warm);
    if (warm->n_done < warm->n_prompts)
        return 0;
    tell_end(warm);
    return 1;
}

void warm_cancel(struct warm *warm)
{
    for (struct warm_prompt *prompt = warm->open; prompt != warm->due; prompt = prompt->next)
        engine_cancel(warm->engine, prompt->request_id);
}

void warm_close(struct warm *warm)
{
    if (!warm)
        return;
    kvg_arena_free(&warm->arena);
    free(warm);
}
