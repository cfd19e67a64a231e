/* Any bytes as a chat template, rendered over a fixed conversation: it compiles or is refused, renders or raises, within
 * its fuel. */
#include <stdlib.h>
#include <string.h>
#include "libprompt/jinja.h"

static const char messages_json[] =
    "[{\"role\":\"system\",\"content\":\"\xc3\xa9 <|im_end|>\"},{\"role\":\"user\",\"content\":\"a\\nb  \",\"n\":[1,2.5,null,true]},"
    "{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":{\"x\":1}}}]}]";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvg_arena arena;
    struct kvg_error err;
    struct kvg_template *tmpl;
    struct kvg_json *messages;
    struct kvg_text out;
    const struct kvg_render_limits limits = {.fuel = 20000, .output_bytes = 1 << 20, .now = 1700000000};
    char *source = malloc(size ? size : 1);

    memcpy(source, data, size);
    if (kvg_template_open(&tmpl, source, size, &err) == 0) {
        kvg_arena_init(&arena, 256 << 20);
        if (kvg_json_parse(&arena, messages_json, sizeof messages_json - 1, NULL, &messages, &err) != 0)
            abort();
        const struct kvg_binding bindings[] = {{"messages", messages, KVG_INPUT}, {"tools", NULL, KVG_INPUT}};
        kvg_template_render(tmpl, bindings, 2, &limits, &arena, &out, &err);
        kvg_arena_free(&arena);
        kvg_template_close(tmpl);
    }
    free(source);
    return 0;
}
