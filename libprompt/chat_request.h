/* The body of POST /v1/chat/completions -> the rendered prompt.
 *
 * Normalizes what clients send before the template sees it: text-only content parts are joined by "\n"; a null or missing
 * assistant content becomes ""; a JSON string in a tool call's `arguments` is parsed; `role` is checked against
 * system, developer, user, assistant, tool, function and then counts as template text. Everything else is KVG_INPUT.
 */
#pragma once
#include <stdbool.h>
#include "libprompt/jinja.h"

struct kvg_chat_context {
    const struct kvg_template *tmpl;
    struct kvg_str bos_token, eos_token; /* template variables; len 0 where the model has none */
    int64_t now;                         /* for strftime_now */
};

/* Template variables: messages, tools, documents, add_generation_prompt (body member, default true), bos_token, eos_token,
 * and the members of chat_template_kwargs. *out lives in the arena.
 * KVG_INVALID / KVG_UNSUPPORTED with err->param for a malformed body, KVG_RENDER where the template raises. */
int kvg_chat_render(const struct kvg_chat_context *context, const struct kvg_json *body, struct kvg_arena *arena, struct kvg_text *out,
                    struct kvg_error *err);
