/* Any bytes as a request body under a ChatML template: whatever the client sends, no byte of a message counts as the
 * template's, so the marker `<|im_end|>` is written by the template exactly once a message.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "libprompt/chat_request.h"

static const char source[] =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}{% for c in m.tool_calls or [] %}"
    "{{ c | tojson }}{% endfor %}<|im_end|>\n{% endfor %}{{ tools | tojson if tools }}{{ documents }}{{ x | default('') }}";

static size_t count_template_ends(const struct kvg_text *text)
{
    size_t n = 0, at = 0;
    for (size_t i = 0; i < text->n_runs; at += text->runs[i++].len) {
        const char *run = text->bytes + at, *end = run + text->runs[i].len;
        while (text->runs[i].origin == KVG_TEMPLATE && (run = memmem(run, (size_t)(end - run), "<|im_end|>", 10))) {
            n++;
            run += 10;
        }
    }
    return n;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct kvg_template *tmpl;
    struct kvg_arena arena;
    struct kvg_error err;
    struct kvg_json *root;
    struct kvg_text text;
    if (!tmpl && kvg_template_open(&tmpl, source, sizeof source - 1, &err) < 0)
        abort();
    kvg_arena_init(&arena, 64 << 20);
    if (kvg_json_parse(&arena, (const char *)data, size, NULL, &root, &err) == 0) {
        const struct kvg_chat_context context = {.tmpl = tmpl};
        if (kvg_chat_render(&context, root, &arena, &text, &err) == 0 &&
            count_template_ends(&text) != kvg_json_get(root, "messages")->n)
            abort();
    }
    kvg_arena_free(&arena);
    return 0;
}
