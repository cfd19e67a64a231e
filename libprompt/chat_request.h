/* The body of POST /v1/chat/completions -> the rendered prompt.
 *
 * Normalizes what clients send before the template sees it:
 *   content        text-only parts are joined by "\n"; of an assistant, tool or function message null or missing becomes ""
 *   arguments      of a tool call: text that is a JSON object becomes that object, "" an empty one; other text stays text
 *   reasoning      `reasoning_content`, `thinking` or `reasoning`: found under the first two names, as in `transformers`
 *   role           one of system, developer, user, assistant, tool, function; it then counts as template text
 * Everything else that a client sent is KVG_INPUT, containers and their punctuation included.
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
