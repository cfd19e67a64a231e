#include "libprompt/prompt.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>
#include "libprompt/chat_request.h"
#include "libprompt/segment_memory.h"

/* Part of the fingerprint: raise it whenever the prompt or the ids of any model change. */
enum { PROMPT_VERSION = 1 };

struct kvg_prompt_model {
    struct kvg_gguf *gguf;
    struct kvg_tokenizer *tokenizer;
    struct kvg_template *tmpl;
    struct kvg_segment_memory *memory; /* NULL: off */
    struct kvg_hash fingerprint;
    struct kvg_str bos_text, eos_text;
};

static void hash_field(XXH3_state_t *state, const void *bytes, size_t n)
{
    uint8_t len[8];

    for (int i = 0; i < 8; i++)
        len[i] = (uint8_t)((uint64_t)n >> 8 * i);
    XXH3_128bits_update(state, len, 8);
    if (n)
        XXH3_128bits_update(state, bytes, n);
}

/* Everything that ids depend on, each part as it lies in the file; an absent one counts as empty. */
static int compute_fingerprint(const struct kvg_gguf *gguf, struct kvg_hash *out)
{
    static const char *const keys[] = {
        "general.architecture",
        "tokenizer.ggml.model",
        "tokenizer.ggml.pre",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.scores",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.unknown_token_id",
        "tokenizer.ggml.add_bos_token",
        "tokenizer.ggml.add_eos_token",
        "tokenizer.ggml.add_space_prefix",
        "tokenizer.chat_template",
    };
    /* Of folders alone; GGUF files have the fingerprint that they had before these existed. */
    static const char *const folder_keys[] = {"kvgate.nfc", "kvgate.ignore_merges", "kvgate.space_prefix_once",
                                              "kvgate.space_prefix_first"};
    XXH3_state_t *state = XXH3_createState();
    XXH128_canonical_t canonical;
    uint8_t version = PROMPT_VERSION;

    if (!state)
        return KVG_NOMEM;
    XXH3_128bits_reset(state);
    hash_field(state, &version, 1);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const struct kvg_gguf_value *value = kvg_gguf_find(gguf, keys[i]);
        hash_field(state, value ? value->bytes : NULL, value ? value->n_bytes : 0);
    }
    for (size_t i = 0; i < sizeof folder_keys / sizeof *folder_keys; i++) {
        const struct kvg_gguf_value *value = kvg_gguf_find(gguf, folder_keys[i]);
        if (value)
            hash_field(state, value->bytes, value->n_bytes);
    }
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state));
    XXH3_freeState(state);
    memcpy(out->bytes, canonical.digest, sizeof out->bytes);
    return 0;
}

static int open_parts(struct kvg_prompt_model *model, const char *path, struct kvg_error *err)
{
    const struct kvg_vocab_info *info;
    struct kvg_str source;
    int rc;

    if ((rc = kvg_gguf_open(&model->gguf, path, err)) || (rc = kvg_tokenizer_open(&model->tokenizer, model->gguf, err)))
        return rc;
    if (kvg_gguf_str(model->gguf, "tokenizer.chat_template", &source) &&
        (rc = kvg_template_open(&model->tmpl, source.bytes, source.len, err)))
        return rc;
    info = kvg_tokenizer_info(model->tokenizer);
    if (info->bos != KVG_NO_TOKEN)
        model->bos_text = kvg_token_text(model->tokenizer, info->bos);
    if (info->eos != KVG_NO_TOKEN)
        model->eos_text = kvg_token_text(model->tokenizer, info->eos);
    if (compute_fingerprint(model->gguf, &model->fingerprint))
        return kvg_fail(err, KVG_NOMEM, "out of memory for the fingerprint");
    return 0;
}

/* Puts the path in front of what went wrong inside the file. */
static void name_file(struct kvg_error *err, const char *path)
{
    char message[sizeof err->message];

    if (!err || strstr(err->message, path))
        return;
    snprintf(message, sizeof message, "%.150s: %.160s", path, err->message);
    memcpy(err->message, message, sizeof message);
}

int kvg_prompt_model_open(struct kvg_prompt_model **out, const char *path, size_t segment_memory, struct kvg_error *err)
{
    struct kvg_prompt_model *model = calloc(1, sizeof *model);
    int rc;

    *out = NULL;
    if (!model)
        return kvg_fail(err, KVG_NOMEM, "out of memory");
    rc = open_parts(model, path, err);
    if (!rc && segment_memory && !(model->memory = kvg_segment_memory_open(segment_memory)))
        rc = kvg_fail(err, KVG_NOMEM, "out of memory for remembered segments");
    if (rc) {
        name_file(err, path);
        kvg_prompt_model_close(model);
        return rc;
    }
    *out = model;
    return 0;
}

void kvg_prompt_model_close(struct kvg_prompt_model *model)
{
    if (!model)
        return;
    kvg_segment_memory_close(model->memory);
    kvg_template_close(model->tmpl);
    kvg_tokenizer_close(model->tokenizer);
    kvg_gguf_close(model->gguf);
    free(model);
}

const struct kvg_tokenizer *kvg_prompt_model_tokenizer(const struct kvg_prompt_model *model)
{
    return model->tokenizer;
}

const struct kvg_template *kvg_prompt_model_template(const struct kvg_prompt_model *model)
{
    return model->tmpl;
}

const struct kvg_hash *kvg_prompt_model_fingerprint(const struct kvg_prompt_model *model)
{
    return &model->fingerprint;
}

/* Fills err->param with "prompt" or "prompt[i]" and returns code. */
static int fail_prompt(struct kvg_error *err, int code, ptrdiff_t i, const char *message)
{
    kvg_fail(err, code, "%s", message);
    if (!err)
        return code;
    if (i < 0)
        snprintf(err->param, sizeof err->param, "prompt");
    else
        snprintf(err->param, sizeof err->param, "prompt[%td]", i);
    return code;
}

/* The prompts of an array are all strings, all arrays, or the array itself is one prompt of numbers. */
static int check_array(const struct kvg_json *prompt, size_t *count, struct kvg_error *err)
{
    enum kvg_json_type type;

    if (prompt->n == 0)
        return fail_prompt(err, KVG_INVALID, -1, "'prompt' is an empty array");
    type = prompt->items[0].type;
    if (type != KVG_JSON_STRING && type != KVG_JSON_ARRAY && type != KVG_JSON_NUMBER)
        return fail_prompt(err, KVG_INVALID, 0,
                           "'prompt' must be a string, an array of strings, of token ids, or of arrays of token ids");
    for (uint32_t i = 1; i < prompt->n; i++) {
        if (prompt->items[i].type != type)
            return fail_prompt(err, KVG_INVALID, i, "the entries of 'prompt' must all have one type");
    }
    *count = type == KVG_JSON_NUMBER ? 1 : prompt->n;
    return 0;
}

int kvg_prompt_count(enum kvg_endpoint endpoint, const struct kvg_json *body, size_t *count, struct kvg_error *err)
{
    const struct kvg_json *prompt = kvg_json_get(body, "prompt");

    *count = 1;
    if (endpoint == KVG_CHAT_COMPLETIONS)
        return 0;
    if (!prompt || prompt->type == KVG_JSON_NULL)
        return fail_prompt(err, KVG_INVALID, -1, "'prompt' is missing");
    if (prompt->type == KVG_JSON_STRING)
        return 0;
    if (prompt->type != KVG_JSON_ARRAY)
        return fail_prompt(err, KVG_INVALID, -1, "'prompt' must be a string or an array");
    return check_array(prompt, count, err);
}

static int read_ids(const struct kvg_prompt_model *model, const struct kvg_json *array, ptrdiff_t index, struct kvg_arena *arena,
                    struct kvg_ids *out, struct kvg_error *err)
{
    uint32_t n_vocab = kvg_tokenizer_info(model->tokenizer)->n_vocab;
    uint32_t *ids = kvg_arena_alloc(arena, (size_t)array->n * sizeof *ids);
    char message[160];
    int64_t id;

    if (!ids)
        return fail_prompt(err, KVG_NOMEM, index, "out of memory for the token ids");
    for (uint32_t i = 0; i < array->n; i++) {
        if (!kvg_json_int(&array->items[i], &id) || id < 0 || id >= n_vocab) {
            snprintf(message, sizeof message, "entry %u is no token id: ids are integers from 0 to %u", i, n_vocab - 1);
            return fail_prompt(err, KVG_INVALID, index, message);
        }
        ids[i] = (uint32_t)id;
    }
    *out = (struct kvg_ids){ids, array->n};
    return 0;
}

/* Completion text is the caller's own prompt: its special tokens count, as in the reference tokenizer. */
static int read_text(const struct kvg_prompt_model *model, struct kvg_str str, struct kvg_arena *arena, struct kvg_ids *out,
                     struct kvg_error *err)
{
    struct kvg_run run = {str.len, KVG_TEMPLATE};
    struct kvg_text text = {str.bytes, str.len, &run, str.len ? 1 : 0};

    return kvg_tokenize_remembering(model->tokenizer, model->memory, &text, KVG_ADD_SPECIAL, arena, out, err);
}

static int completion_ids(const struct kvg_prompt_model *model, const struct kvg_json *body, size_t index,
                          struct kvg_arena *arena, struct kvg_ids *out, struct kvg_error *err)
{
    const struct kvg_json *prompt = kvg_json_get(body, "prompt");
    ptrdiff_t shown = -1;
    size_t count;
    int rc = kvg_prompt_count(KVG_COMPLETIONS, body, &count, err);

    if (rc)
        return rc;
    if (index >= count)
        return fail_prompt(err, KVG_INVALID, -1, "there is no prompt of that number");
    if (prompt->type == KVG_JSON_ARRAY && prompt->items[0].type != KVG_JSON_NUMBER) {
        prompt = &prompt->items[index];
        shown = (ptrdiff_t)index;
    }
    rc = prompt->type == KVG_JSON_STRING ? read_text(model, prompt->str, arena, out, err)
                                         : read_ids(model, prompt, shown, arena, out, err);
    if (!rc && out->n == 0)
        return fail_prompt(err, KVG_INVALID, shown, "the prompt is empty and this model's tokenizer adds no token to it");
    return rc;
}

int kvg_prompt_text(const struct kvg_prompt_model *model, const struct kvg_json *body, int64_t now, struct kvg_arena *arena,
                    struct kvg_text *out, struct kvg_error *err)
{
    struct kvg_chat_context context = {model->tmpl, model->bos_text, model->eos_text, now};

    if (!model->tmpl)
        return kvg_fail(err, KVG_UNSUPPORTED, "this model has no chat template: use /v1/completions");
    return kvg_chat_render(&context, body, arena, out, err);
}

int kvg_prompt_ids(const struct kvg_prompt_model *model, enum kvg_endpoint endpoint, const struct kvg_json *body, size_t index,
                   int64_t now, struct kvg_arena *arena, struct kvg_ids *out, struct kvg_error *err)
{
    struct kvg_text text;
    int rc;

    if (endpoint == KVG_COMPLETIONS)
        return completion_ids(model, body, index, arena, out, err);
    if ((rc = kvg_prompt_text(model, body, now, arena, &text, err)) ||
        (rc = kvg_tokenize_remembering(model->tokenizer, model->memory, &text, KVG_ADD_BOS, arena, out, err)))
        return rc;
    if (out->n == 0)
        return kvg_fail(err, KVG_RENDER, "the chat template rendered an empty prompt");
    return 0;
}
