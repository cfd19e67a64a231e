/* Stands in for engine, tokenizer and publisher in a test of the server: the test itself plays the engine's part.
 * Included by one test program; a token is a byte. */
#pragma once
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "gpu-worker/engine/engine.h"
#include "gpu-worker/kv/publish.h"

enum { SCRIPTED_MAX = 64 };
#define SCRIPTED_FINGERPRINT "0102030405060708090a0b0c0d0e0f10"

struct scripted {
    uint64_t id; /* index + 1; 0: not submitted */
    struct engine_params params;
    uint32_t ids[256];
    size_t n_ids;
    char salt[128];
    size_t salt_len;
    engine_sink sink;
    void *context;
    uint32_t n_tokens[8]; /* of each choice */
    bool finished[8];
    bool cancelled, gone;
};

static pthread_mutex_t scripted_lock = PTHREAD_MUTEX_INITIALIZER;
static struct scripted scripted_requests[SCRIPTED_MAX];
static unsigned scripted_n;
static int scripted_code;
static const char *scripted_message;
static struct engine_metrics scripted_metrics;

static void scripted_reset(void)
{
    memset(scripted_requests, 0, sizeof scripted_requests);
    scripted_n = 0;
    scripted_code = KVG_OK;
    engine_metrics_init(&scripted_metrics);
}

static void scripted_refuse(int code, const char *message)
{
    scripted_code = code;
    scripted_message = message;
}

static unsigned scripted_open(void)
{
    unsigned n = 0;
    pthread_mutex_lock(&scripted_lock);
    for (unsigned i = 0; i < scripted_n; i++)
        n += !scripted_requests[i].gone;
    pthread_mutex_unlock(&scripted_lock);
    return n;
}

/* The request that was submitted as number index; waits for it. */
static struct scripted *scripted_wait(unsigned index)
{
    for (int i = 0; i < 1000; i++) {
        pthread_mutex_lock(&scripted_lock);
        bool there = scripted_n > index;
        pthread_mutex_unlock(&scripted_lock);
        if (there)
            return &scripted_requests[index];
        usleep(10000);
    }
    fail_msg("request %u was not submitted within 10 s", index);
    return NULL;
}

static bool scripted_cancelled(struct scripted *r)
{
    pthread_mutex_lock(&scripted_lock);
    bool cancelled = r->cancelled;
    pthread_mutex_unlock(&scripted_lock);
    return cancelled;
}

static void scripted_wait_cancelled(struct scripted *r)
{
    for (int i = 0; i < 1000 && !scripted_cancelled(r); i++)
        usleep(10000);
    if (!scripted_cancelled(r))
        fail_msg("the request was not cancelled within 10 s");
}

/* Called with the lock held: events of one request come in order, as from an engine thread. */
static void scripted_send(struct scripted *r, struct engine_event *event)
{
    if (r->finished[event->choice])
        return;
    event->prompt_tokens = (uint32_t)r->n_ids;
    event->cached_tokens = 1;
    event->completion_tokens = r->n_tokens[event->choice];
    event->matched_stop_token = KVG_NO_TOKEN;
    if (event->finish != FINISH_NONE) {
        r->finished[event->choice] = true;
        event->last_choice = true;
        for (uint32_t i = 0; i < r->params.n; i++)
            event->last_choice &= r->finished[i];
        r->gone |= event->last_choice;
    }
    r->sink(r->context, event);
}

static void scripted_event(struct scripted *r, struct engine_event event)
{
    pthread_mutex_lock(&scripted_lock);
    scripted_send(r, &event);
    pthread_mutex_unlock(&scripted_lock);
}

static void scripted_text(struct scripted *r, uint32_t choice, const char *text)
{
    uint32_t id = 'x';
    pthread_mutex_lock(&scripted_lock);
    r->n_tokens[choice]++;
    pthread_mutex_unlock(&scripted_lock);
    scripted_event(r, (struct engine_event){.choice = choice, .text = text, .text_len = strlen(text), .ids = &id, .n_ids = 1});
}

/* One token of choice 0 with two alternatives: itself, and the next byte at minus infinity. */
static void scripted_logprob(struct scripted *r, const char *text, uint32_t id)
{
    uint32_t top_ids[2] = {id, id + 1};
    float top[2] = {-0.5f, -__builtin_inff()};
    struct engine_token_logprob logprob = {.id = id, .logprob = -0.5f, .n_top = 2, .top_ids = top_ids, .top_logprobs = top};
    r->n_tokens[0]++;
    scripted_event(r,
                   (struct engine_event){.text = text, .text_len = strlen(text), .ids = &id, .n_ids = 1, .logprobs = &logprob});
}

static void scripted_finish(struct scripted *r, uint32_t choice, enum engine_finish finish)
{
    scripted_event(r, (struct engine_event){.choice = choice, .text = "", .finish = finish});
}

static void scripted_error(struct scripted *r, uint32_t choice, const char *message)
{
    scripted_event(r, (struct engine_event){.choice = choice, .text = "", .finish = FINISH_ERROR, .error = message});
}

/* ---- engine.h ---------------------------------------------------------------------------------------------------------- */

int engine_submit(struct engine *engine, const struct engine_submit *submit, uint64_t *request_id, struct kvg_error *err)
{
    if (scripted_code != KVG_OK)
        return kvg_fail(err, scripted_code, "%s", scripted_message);
    pthread_mutex_lock(&scripted_lock);
    struct scripted *r = &scripted_requests[scripted_n];
    r->params = submit->params;
    r->n_ids = submit->n_ids;
    memcpy(r->ids, submit->ids, submit->n_ids * sizeof *r->ids);
    r->salt_len = submit->salt_len;
    if (submit->salt_len)
        memcpy(r->salt, submit->salt, submit->salt_len);
    r->sink = submit->sink;
    r->context = submit->context;
    *request_id = r->id = ++scripted_n;
    pthread_mutex_unlock(&scripted_lock);
    return KVG_OK;
}

void engine_cancel(struct engine *engine, uint64_t request_id)
{
    pthread_mutex_lock(&scripted_lock);
    struct scripted *r = &scripted_requests[request_id - 1];
    r->cancelled = true;
    for (uint32_t i = 0; i < r->params.n; i++)
        scripted_send(r, &(struct engine_event){.choice = i, .text = "", .finish = FINISH_ABORT});
    pthread_mutex_unlock(&scripted_lock);
}

void engine_info(const struct engine *engine, struct engine_info *out)
{
    *out = (struct engine_info){
        .max_model_len = 100, .block_size = 16, .num_blocks = 10, .max_num_seqs = 4, .max_num_batched_tokens = 64};
}

struct engine_metrics *engine_metrics(struct engine *engine)
{
    return &scripted_metrics;
}

bool engine_alive(const struct engine *engine)
{
    return true;
}

void publisher_stats(struct publisher *publisher, struct publisher_stats *out)
{
    memset(out, 0, sizeof *out);
}

/* ---- prompt.h, tokenizer.h --------------------------------------------------------------------------------------------- */

const struct kvg_tokenizer *kvg_prompt_model_tokenizer(const struct kvg_prompt_model *model)
{
    return NULL;
}

const struct kvg_hash *kvg_prompt_model_fingerprint(const struct kvg_prompt_model *model)
{
    static const struct kvg_hash fingerprint = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}};
    return &fingerprint;
}

const struct kvg_vocab_info *kvg_tokenizer_info(const struct kvg_tokenizer *tokenizer)
{
    static const struct kvg_vocab_info info = {.n_vocab = 256};
    return &info;
}

static const struct kvg_json *scripted_prompt(const struct kvg_json *body)
{
    const struct kvg_json *messages = kvg_json_get(body, "messages");
    return messages ? messages : kvg_json_get(body, "prompt");
}

int kvg_prompt_count(enum kvg_endpoint endpoint, const struct kvg_json *body, size_t *count, struct kvg_error *err)
{
    const struct kvg_json *prompt = scripted_prompt(body);
    if (!prompt)
        return kvg_fail(err, KVG_INVALID, "no prompt");
    *count = prompt->type == KVG_JSON_ARRAY ? prompt->n : 1;
    return KVG_OK;
}

static int scripted_ids(struct kvg_str text, struct kvg_arena *arena, struct kvg_ids *out)
{
    out->n = text.len;
    out->ids = kvg_arena_alloc(arena, text.len * sizeof *out->ids);
    for (size_t i = 0; i < text.len; i++)
        out->ids[i] = (unsigned char)text.bytes[i];
    return KVG_OK;
}

int kvg_prompt_ids(const struct kvg_prompt_model *model, enum kvg_endpoint endpoint, const struct kvg_json *body, size_t index,
                   int64_t now, struct kvg_arena *arena, struct kvg_ids *out, struct kvg_error *err)
{
    const struct kvg_json *prompt = scripted_prompt(body);
    return scripted_ids(prompt->type == KVG_JSON_ARRAY ? prompt->items[index].str : prompt->str, arena, out);
}

int kvg_tokenize(const struct kvg_tokenizer *tokenizer, const struct kvg_text *text, int flags, struct kvg_arena *arena,
                 struct kvg_ids *out, struct kvg_error *err)
{
    return scripted_ids((struct kvg_str){text->bytes, text->len}, arena, out);
}

struct kvg_str kvg_token_bytes(const struct kvg_tokenizer *tokenizer, uint32_t id, bool special)
{
    static char bytes[256];
    bytes[id] = (char)id;
    return (struct kvg_str){&bytes[id], 1};
}

struct kvg_str kvg_token_text(const struct kvg_tokenizer *tokenizer, uint32_t id)
{
    return kvg_token_bytes(tokenizer, id, true);
}

enum kvg_token_kind kvg_token_kind(const struct kvg_tokenizer *tokenizer, uint32_t id)
{
    return KVG_TOKEN_NORMAL;
}

size_t kvg_detokenize_step(struct kvg_detokenizer *state, uint32_t id, char *buf)
{
    *buf = (char)id;
    return 1;
}

size_t kvg_detokenize_end(struct kvg_detokenizer *state, char *buf)
{
    return 0;
}
