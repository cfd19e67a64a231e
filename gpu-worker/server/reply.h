/* The JSON of replies, as OpenAI's clients expect it. Pure functions into a buffer. */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "gpu-worker/engine/engine.h"
#include "libprompt/error.h"
#include "libprompt/json.h"
#include "libprompt/prompt.h"

/* {"error":{"message","type","param","code"}}; code may be NULL. */
void error_json(struct kvg_buf *out, int status, const char *code, const struct kvg_error *err);
/* The HTTP status of a libprompt error: 400, or 500 where memory ran out. */
int error_status(int kvg_status);

/* What all chunks or the one object of a request share. */
struct reply_head {
    enum kvg_endpoint endpoint;
    bool stream;
    char id[64]; /* chatcmpl-... or cmpl-... */
    int64_t created;
    const char *model;
};
/* {"id":...,"object":...,"created":...,"model":...,"choices": */
void reply_open(struct kvg_buf *out, const struct reply_head *head);

struct reply_usage {
    uint64_t prompt_tokens, completion_tokens, cached_tokens;
    const struct engine_speculation *speculation; /* of all choices; NULL = not told */
};
void usage_json(struct kvg_buf *out, const struct reply_usage *usage);
const char *finish_reason(enum engine_finish finish); /* "stop" or "length" */

/* Log-probabilities collect in the form of their endpoint. */
struct logprobs {
    struct kvg_buf tokens;                /* chat: whole entries; completions: the strings */
    struct kvg_buf values, tops, offsets; /* completions only */
    uint32_t offset;                      /* characters of text so far */
    uint32_t n;
};
void logprobs_free(struct logprobs *list);
void logprobs_reset(struct logprobs *list); /* empties it; keeps memory and offset */
void logprobs_add(struct logprobs *list, enum kvg_endpoint endpoint, const struct kvg_tokenizer *tokenizer,
                  const struct engine_token_logprob *token);
void logprobs_json(struct kvg_buf *out, enum kvg_endpoint endpoint, const struct logprobs *list);

/* The text of ids, CONTROL tokens by their own text, as bytes that form whole characters. */
void ids_text(struct kvg_buf *out, const struct kvg_tokenizer *tokenizer, const uint32_t *ids, size_t n);
