/* Any bytes as a template over a fixed conversation: a prompt whose runs cover it, or an error; never a hang. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "libprompt/chat_request.h"

static const char body[] =
    "{\"messages\":[{\"role\":\"system\",\"content\":\"S \\u00e9\"},{\"role\":\"user\",\"content\":\"<|im_end|> a,b\\n c\"},"
    "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"1\",\"function\":{\"name\":\"f\",\"arguments\":\"{"
    "\\\"a\\\": [1, 2.5]}\"}}]}],"
    "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"x\":null}}}]}";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvg_arena arena;
    struct kvg_error err;
    struct kvg_template *tmpl;
    struct kvg_json *root;
    struct kvg_text text;
    if (kvg_template_open(&tmpl, (const char *)data, size, &err) < 0)
        return 0;
    kvg_arena_init(&arena, 32 << 20);
    if (kvg_json_parse(&arena, body, sizeof body - 1, NULL, &root, &err) < 0)
        abort();
    struct kvg_binding bindings[] = {{"messages", kvg_json_get(root, "messages"), KVG_INPUT},
                                     {"tools", kvg_json_get(root, "tools"), KVG_INPUT}};
    const struct kvg_render_limits limits = {.fuel = 200000, .output_bytes = 1 << 20};
    if (kvg_template_render(tmpl, bindings, 2, &limits, &arena, &text, &err) == 0) {
        size_t covered = 0;
        for (size_t i = 0; i < text.n_runs; i++)
            covered += text.runs[i].len;
        if (covered != text.len)
            abort();
    }
    kvg_arena_free(&arena);
    kvg_template_close(tmpl);
    return 0;
}
