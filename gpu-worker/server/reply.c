#include "gpu-worker/server/reply.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "libprompt/utf8.h"

/* OpenAI's two; what exactly is wrong is in `code`. The gateway's own errors use the same. */
static const char *error_type(int status)
{
    return status >= 500 ? "server_error" : "invalid_request_error";
}

void error_json(struct kvg_buf *out, int status, const char *code, const struct kvg_error *err)
{
    kvg_buf_puts(out, "{\"error\":{\"message\":");
    kvg_buf_json_string(out, err->message, strlen(err->message));
    kvg_buf_printf(out, ",\"type\":\"%s\",\"param\":", error_type(status));
    if (err->param[0])
        kvg_buf_json_string(out, err->param, strlen(err->param));
    else
        kvg_buf_puts(out, "null");
    kvg_buf_puts(out, ",\"code\":");
    if (code)
        kvg_buf_json_string(out, code, strlen(code));
    else
        kvg_buf_puts(out, "null");
    kvg_buf_puts(out, "}}");
}

int error_status(int kvg_status)
{
    return kvg_status == KVG_NOMEM || kvg_status == KVG_FILE ? 500 : 400;
}

void reply_open(struct kvg_buf *out, const struct reply_head *head)
{
    const char *object = head->endpoint == KVG_COMPLETIONS ? "text_completion"
                         : head->stream                    ? "chat.completion.chunk"
                                                           : "chat.completion";
    kvg_buf_printf(out, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":", head->id, object,
                   (long long)head->created);
    kvg_buf_json_string(out, head->model, strlen(head->model));
    kvg_buf_puts(out, ",\"choices\":");
}

/* OpenAI's names for predicted tokens, and the rest as a member of its own, which clients pass over. */
static void speculation_json(struct kvg_buf *out, const struct engine_speculation *s)
{
    uint32_t n = SPEC_POSITIONS;

    while (n && s->accepted_at[n - 1] == 0)
        n--;
    kvg_buf_printf(out,
                   ",\"completion_tokens_details\":{\"accepted_prediction_tokens\":%u,\"rejected_prediction_tokens\":%u},"
                   "\"speculation\":{\"runs\":%u,\"drafted\":%u,\"accepted\":%u,\"accepted_per_position\":[",
                   s->accepted, s->drafted - s->accepted, s->runs, s->drafted, s->accepted);
    for (uint32_t i = 0; i < n; i++)
        kvg_buf_printf(out, "%s%u", i ? "," : "", s->accepted_at[i]);
    kvg_buf_printf(out, "],\"k\":%u,\"active\":%s,\"goodput_gain\":%.3f}", s->most, s->active ? "true" : "false", s->gain);
}

void usage_json(struct kvg_buf *out, const struct reply_usage *usage)
{
    kvg_buf_printf(out,
                   "{\"prompt_tokens\":%llu,\"completion_tokens\":%llu,\"total_tokens\":%llu,"
                   "\"prompt_tokens_details\":{\"cached_tokens\":%llu}",
                   (unsigned long long)usage->prompt_tokens, (unsigned long long)usage->completion_tokens,
                   (unsigned long long)usage->prompt_tokens + usage->completion_tokens, (unsigned long long)usage->cached_tokens);
    if (usage->speculation)
        speculation_json(out, usage->speculation);
    kvg_buf_puts(out, "}");
}

const char *finish_reason(enum engine_finish finish)
{
    return finish == FINISH_STOP ? "stop" : "length";
}

/* ---- log-probabilities ------------------------------------------------------------------------------------------------- */

void logprobs_free(struct logprobs *list)
{
    kvg_buf_free(&list->tokens);
    kvg_buf_free(&list->values);
    kvg_buf_free(&list->tops);
    kvg_buf_free(&list->offsets);
}

void logprobs_reset(struct logprobs *list)
{
    list->tokens.len = list->values.len = list->tops.len = list->offsets.len = 0;
    list->n = 0;
}

/* JSON has no infinity: -9999 stands for it, as in vLLM. */
static void add_value(struct kvg_buf *out, float logprob)
{
    kvg_buf_printf(out, "%.6g", isfinite(logprob) ? (double)logprob : -9999.0);
}

/* {"token":"...","logprob":...,"bytes":[...] -- left open for top_logprobs */
static void add_chat_token(struct kvg_buf *out, struct kvg_str bytes, float logprob)
{
    kvg_buf_puts(out, "{\"token\":");
    kvg_buf_json_string(out, bytes.bytes, bytes.len);
    kvg_buf_puts(out, ",\"logprob\":");
    add_value(out, logprob);
    kvg_buf_puts(out, ",\"bytes\":[");
    for (size_t i = 0; i < bytes.len; i++)
        kvg_buf_printf(out, i ? ",%u" : "%u", (unsigned char)bytes.bytes[i]);
    kvg_buf_puts(out, "]");
}

static void add_chat(struct logprobs *list, const struct kvg_tokenizer *tokenizer, const struct engine_token_logprob *token)
{
    struct kvg_buf *out = &list->tokens;
    add_chat_token(out, kvg_token_bytes(tokenizer, token->id, true), token->logprob);
    kvg_buf_puts(out, ",\"top_logprobs\":[");
    for (uint32_t i = 0; i < token->n_top; i++) {
        if (i)
            kvg_buf_puts(out, ",");
        add_chat_token(out, kvg_token_bytes(tokenizer, token->top_ids[i], true), token->top_logprobs[i]);
        kvg_buf_puts(out, "}");
    }
    kvg_buf_puts(out, "]}");
}

static bool is_utf8(struct kvg_str s)
{
    size_t i = 0;
    for (unsigned len; i < s.len; i += len)
        if (!(len = kvg_utf8_len((const unsigned char *)s.bytes + i, s.len - i)))
            return false;
    return true;
}

/* A token as a string of the completions form; part of a character as OpenAI writes it: "bytes:\xe2\x80". */
static void add_token_string(struct kvg_buf *out, struct kvg_str bytes)
{
    if (is_utf8(bytes)) {
        kvg_buf_json_string(out, bytes.bytes, bytes.len);
        return;
    }
    kvg_buf_puts(out, "\"bytes:");
    for (size_t i = 0; i < bytes.len; i++)
        kvg_buf_printf(out, "\\\\x%02x", (unsigned char)bytes.bytes[i]);
    kvg_buf_puts(out, "\"");
}

static void add_top(struct kvg_buf *out, const struct kvg_tokenizer *tokenizer, const struct engine_token_logprob *token)
{
    bool drawn = false;
    kvg_buf_puts(out, "{");
    for (uint32_t i = 0; i < token->n_top; i++) {
        drawn |= token->top_ids[i] == token->id;
        if (i)
            kvg_buf_puts(out, ",");
        add_token_string(out, kvg_token_bytes(tokenizer, token->top_ids[i], true));
        kvg_buf_puts(out, ":");
        add_value(out, token->top_logprobs[i]);
    }
    if (!drawn) { /* the drawn token is always among them */
        if (token->n_top)
            kvg_buf_puts(out, ",");
        add_token_string(out, kvg_token_bytes(tokenizer, token->id, true));
        kvg_buf_puts(out, ":");
        add_value(out, token->logprob);
    }
    kvg_buf_puts(out, "}");
}

static void add_text(struct logprobs *list, const struct kvg_tokenizer *tokenizer, const struct engine_token_logprob *token)
{
    struct kvg_str bytes = kvg_token_bytes(tokenizer, token->id, true);
    add_token_string(&list->tokens, bytes);
    add_value(&list->values, token->logprob);
    add_top(&list->tops, tokenizer, token);
    kvg_buf_printf(&list->offsets, "%u", list->offset);
    for (size_t i = 0; i < bytes.len; i++)
        list->offset += ((unsigned char)bytes.bytes[i] & 0xc0) != 0x80; /* first bytes of characters */
}

void logprobs_add(struct logprobs *list, enum kvg_endpoint endpoint, const struct kvg_tokenizer *tokenizer,
                  const struct engine_token_logprob *token)
{
    bool chat = endpoint == KVG_CHAT_COMPLETIONS;
    if (list->n++) {
        kvg_buf_puts(&list->tokens, ",");
        if (!chat) {
            kvg_buf_puts(&list->values, ",");
            kvg_buf_puts(&list->tops, ",");
            kvg_buf_puts(&list->offsets, ",");
        }
    }
    if (chat)
        add_chat(list, tokenizer, token);
    else
        add_text(list, tokenizer, token);
}

void logprobs_json(struct kvg_buf *out, enum kvg_endpoint endpoint, const struct logprobs *list)
{
    kvg_buf_puts(out, endpoint == KVG_CHAT_COMPLETIONS ? "{\"content\":[" : "{\"tokens\":[");
    kvg_buf_add(out, list->tokens.bytes, list->tokens.len);
    if (endpoint == KVG_CHAT_COMPLETIONS) {
        kvg_buf_puts(out, "],\"refusal\":null}");
        return;
    }
    kvg_buf_puts(out, "],\"token_logprobs\":[");
    kvg_buf_add(out, list->values.bytes, list->values.len);
    kvg_buf_puts(out, "],\"top_logprobs\":[");
    kvg_buf_add(out, list->tops.bytes, list->tops.len);
    kvg_buf_puts(out, "],\"text_offset\":[");
    kvg_buf_add(out, list->offsets.bytes, list->offsets.len);
    kvg_buf_puts(out, "]}");
}

void ids_text(struct kvg_buf *out, const struct kvg_tokenizer *tokenizer, const uint32_t *ids, size_t n)
{
    struct kvg_detokenizer state = {.tokenizer = tokenizer};
    char small[512];

    for (size_t i = 0; i < n; i++) {
        if (kvg_token_kind(tokenizer, ids[i]) == KVG_TOKEN_CONTROL) {
            kvg_buf_add(out, small, kvg_detokenize_end(&state, small));
            struct kvg_str text = kvg_token_bytes(tokenizer, ids[i], true);
            kvg_buf_add(out, text.bytes, text.len);
            continue;
        }
        size_t room = KVG_DETOKENIZE_ROOM(kvg_token_bytes(tokenizer, ids[i], false).len);
        char *chars = room <= sizeof small ? small : malloc(room);
        if (!chars) {
            out->failed = true;
            return;
        }
        kvg_buf_add(out, chars, kvg_detokenize_step(&state, ids[i], chars));
        if (chars != small)
            free(chars);
    }
    kvg_buf_add(out, small, kvg_detokenize_end(&state, small));
}
