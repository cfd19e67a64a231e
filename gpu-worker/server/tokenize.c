#include "gpu-worker/server/tokenize.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/server/prompt_job.h"
#include "gpu-worker/server/reply.h"
#include "gpu-worker/server/server_internal.h"

struct tokenize_job {
    struct job job; /* first, so that a job is its tokenize_job */
    struct server *server;
    struct prompt_source source;
    struct prompt_fault fault;
    struct kvg_arena arena;
    struct kvg_buf reply;
};

static struct tokenize_job *of(struct job *job)
{
    return (struct tokenize_job *)job;
}

static bool invalid(struct tokenize_job *t, const char *param, const char *message)
{
    kvg_fail(&t->fault.err, KVG_INVALID, "%s", message);
    snprintf(t->fault.err.param, sizeof t->fault.err.param, "%s", param);
    return prompt_fail(&t->fault, 400, NULL);
}

static bool no_memory(struct tokenize_job *t)
{
    kvg_fail(&t->fault.err, KVG_NOMEM, "out of memory");
    return prompt_fail(&t->fault, 500, NULL);
}

/* A member that is true, false, null or absent. */
static bool read_switch(struct tokenize_job *t, const struct kvg_json *body, const char *name, bool *value)
{
    const struct kvg_json *member = kvg_json_get(body, name);
    if (!member || member->type == KVG_JSON_NULL)
        return true;
    if (member->type != KVG_JSON_TRUE && member->type != KVG_JSON_FALSE)
        return invalid(t, name, "must be true or false");
    *value = member->type == KVG_JSON_TRUE;
    return true;
}

/* An optional string member; len 0 where it is absent. */
static bool read_string(struct tokenize_job *t, const struct kvg_json *body, const char *name, struct kvg_str *value)
{
    const struct kvg_json *member = kvg_json_get(body, name);
    *value = (struct kvg_str){"", 0};
    if (!member || member->type == KVG_JSON_NULL)
        return true;
    if (member->type != KVG_JSON_STRING)
        return invalid(t, name, "must be a string");
    *value = member->str;
    return true;
}

static bool check_model(struct tokenize_job *t, const struct kvg_json *body)
{
    struct kvg_str model;
    return read_string(t, body, "model", &model) && prompt_check_model(&t->source, model, &t->fault);
}

static bool plain_ids(struct tokenize_job *t, struct kvg_str text, struct kvg_ids *ids)
{
    struct kvg_run run = {text.len, KVG_TEMPLATE};
    struct kvg_text whole = {text.bytes, text.len, &run, text.len ? 1 : 0};
    int code = kvg_tokenize(kvg_prompt_model_tokenizer(t->server->prompt_model), &whole, 0, &t->arena, ids, &t->fault.err);
    return code == KVG_OK || prompt_fail(&t->fault, error_status(code), NULL);
}

/* messages as for chat, else one prompt as for completions. */
static bool read_ids(struct tokenize_job *t, const struct kvg_json *body, struct kvg_ids *ids)
{
    const struct kvg_json *messages = kvg_json_get(body, "messages"), *prompt = kvg_json_get(body, "prompt");
    bool chat = messages && messages->type != KVG_JSON_NULL, special = !chat;

    if (!chat && (!prompt || prompt->type != KVG_JSON_STRING))
        return invalid(t, "prompt", "give a string as prompt, or messages");
    if (!read_switch(t, body, "add_special_tokens", &special))
        return false;
    if (chat && special)
        return invalid(t, "add_special_tokens", "a chat template adds its own special tokens: it can only be false");
    if (!chat && (!special || prompt->str.len == 0))
        return plain_ids(t, prompt->str, ids);
    return prompt_ids(&t->source, chat ? KVG_CHAT_COMPLETIONS : KVG_COMPLETIONS, body, &(struct kvg_ids){0}, 0, &t->arena, ids,
                      &t->fault);
}

static bool add_chain(struct tokenize_job *t, const struct kvg_json *body, const struct kvg_ids *ids)
{
    struct server *server = t->server;
    struct kvg_str cache_salt, salt;
    struct kvg_hash seed, *chain = kvg_arena_alloc(&t->arena, (ids->n / server->info.block_size + 1) * sizeof *chain);
    char hex[KVG_HASH_HEX + 1];

    if (!chain)
        return no_memory(t);
    if (!read_string(t, body, "cache_salt", &cache_salt) || !prompt_salt(&t->source, cache_salt, &t->arena, &salt, &t->fault))
        return false;
    struct kvg_chain_identity identity = {
        .model = server->options.model_name,
        .fingerprint = *kvg_prompt_model_fingerprint(server->prompt_model),
        .block_size = server->info.block_size,
        .salt = salt.bytes,
        .salt_len = salt.len,
    };
    kvg_chain_seed(&identity, &seed);
    size_t n = kvg_chain_extend(&seed, ids->ids, ids->n, server->info.block_size, chain);
    kvg_buf_printf(&t->reply, ",\"kvgate\":{\"block_size\":%u,\"fingerprint\":\"%s\",\"chain\":[", server->info.block_size,
                   server->fingerprint);
    for (size_t i = 0; i < n; i++) {
        kvg_hash_hex(&chain[i], hex);
        kvg_buf_printf(&t->reply, "%s\"%s\"", i ? "," : "", hex);
    }
    kvg_buf_puts(&t->reply, "]}");
    return true;
}

static void add_token_strings(struct tokenize_job *t, const struct kvg_ids *ids)
{
    const struct kvg_tokenizer *tokenizer = kvg_prompt_model_tokenizer(t->server->prompt_model);
    kvg_buf_puts(&t->reply, "[");
    for (size_t i = 0; i < ids->n; i++) {
        struct kvg_str text = kvg_token_text(tokenizer, ids->ids[i]);
        if (i)
            kvg_buf_puts(&t->reply, ",");
        kvg_buf_json_string(&t->reply, text.bytes, text.len);
    }
    kvg_buf_puts(&t->reply, "]");
}

static void run_tokenize(struct job *job)
{
    struct tokenize_job *t = of(job);
    struct kvg_json *body;
    struct kvg_ids ids = {0};
    bool strings = false;

    if (!prompt_parse(&job->body, &t->arena, &body, &t->fault) || !check_model(t, body) || !read_ids(t, body, &ids) ||
        !read_switch(t, body, "return_token_strs", &strings))
        return;
    kvg_buf_printf(&t->reply, "{\"count\":%zu,\"max_model_len\":%u,\"tokens\":[", ids.n, t->server->info.max_model_len);
    for (size_t i = 0; i < ids.n; i++)
        kvg_buf_printf(&t->reply, i ? ",%u" : "%u", ids.ids[i]);
    kvg_buf_puts(&t->reply, "],\"token_strs\":");
    if (strings)
        add_token_strings(t, &ids);
    else
        kvg_buf_puts(&t->reply, "null");
    if (add_chain(t, body, &ids))
        kvg_buf_puts(&t->reply, "}");
}

static void run_detokenize(struct job *job)
{
    struct tokenize_job *t = of(job);
    const struct kvg_tokenizer *tokenizer = kvg_prompt_model_tokenizer(t->server->prompt_model);
    struct kvg_json *body;
    struct kvg_ids ids = {0};
    struct kvg_buf text = {0};

    if (!prompt_parse(&job->body, &t->arena, &body, &t->fault) || !check_model(t, body))
        return;
    const struct kvg_json *tokens = kvg_json_get(body, "tokens");
    bool empty = tokens && tokens->type == KVG_JSON_ARRAY && tokens->n == 0;
    if (!empty &&
        api_token_ids(tokens, "tokens", kvg_tokenizer_info(tokenizer)->n_vocab, &t->arena, &ids, &t->fault.err) != KVG_OK) {
        prompt_fail(&t->fault, error_status(t->fault.err.code), NULL);
        return;
    }
    ids_text(&text, tokenizer, ids.ids, ids.n);
    kvg_buf_puts(&t->reply, "{\"prompt\":");
    kvg_buf_json_string(&t->reply, text.bytes, text.len);
    kvg_buf_puts(&t->reply, "}");
    t->reply.failed |= text.failed;
    kvg_buf_free(&text);
}

static void answer(struct job *job)
{
    struct tokenize_job *t = of(job);
    if (job->conn) {
        if (t->reply.failed)
            no_memory(t);
        if (t->fault.status)
            conn_error(job->conn, t->fault.status, t->fault.code, &t->fault.err);
        else
            conn_reply(job->conn, &(struct reply){.status = 200}, t->reply.bytes, t->reply.len);
    }
    job_end(job);
    kvg_buf_free(&t->reply);
    kvg_arena_free(&t->arena);
    prompt_source_free(&t->source);
    free(t);
}

static void client_left(struct job *job) {}

static const struct job_ops tokenize_ops = {.run = run_tokenize, .done = answer, .client_left = client_left};
static const struct job_ops detokenize_ops = {.run = run_detokenize, .done = answer, .client_left = client_left};

static void start(struct conn *conn, const struct job_ops *ops)
{
    struct tokenize_job *t = calloc(1, sizeof *t);
    if (!t) {
        conn_errorf(conn, 500, NULL, "out of memory");
        return;
    }
    t->server = conn->loop->server;
    kvg_arena_init(&t->arena, 0);
    if (!prompt_source_init(&t->source, conn)) {
        free(t);
        return;
    }
    job_start(&t->job, ops, conn);
}

void tokenize_start(struct conn *conn)
{
    start(conn, &tokenize_ops);
}

void detokenize_start(struct conn *conn)
{
    start(conn, &detokenize_ops);
}
