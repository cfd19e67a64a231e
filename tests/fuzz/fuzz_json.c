/* Any bytes: the parser answers, its tree lies within the source, and what the writer makes of each string parses again. */
#include <stdlib.h>
#include <string.h>
#include "libprompt/json.h"

static void walk(const struct kvg_json *value, const char *text, size_t len, struct kvg_buf *out)
{
    if (value->start > value->end || value->end > len)
        abort();
    if (value->type == KVG_JSON_STRING)
        kvg_buf_json_string(out, value->str.bytes, value->str.len);
    if (value->type == KVG_JSON_ARRAY || value->type == KVG_JSON_OBJECT)
        for (uint32_t i = 0; i < value->n; i++)
            walk(&value->items[i], text, len, out);
}

static void strings_parse_again(struct kvg_buf *out)
{
    for (size_t at = 0; at < out->len;) {
        size_t end = at + 1;
        while (out->bytes[end] != '"')
            end += out->bytes[end] == '\\' ? 2 : 1;
        struct kvg_arena arena;
        struct kvg_json *again;
        kvg_arena_init(&arena, 0);
        if (kvg_json_parse(&arena, out->bytes + at, end + 1 - at, NULL, &again, NULL) != 0 || again->type != KVG_JSON_STRING)
            abort();
        kvg_arena_free(&arena);
        at = end + 1;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvg_arena arena;
    struct kvg_error err;
    struct kvg_json *root;
    struct kvg_buf out = {0};
    char *text = malloc(size ? size : 1);

    memcpy(text, data, size);
    kvg_arena_init(&arena, 64 << 20);
    if (kvg_json_parse(&arena, text, size, NULL, &root, &err) == 0) {
        walk(root, text, size, &out);
        strings_parse_again(&out);
    }
    kvg_buf_free(&out);
    kvg_arena_free(&arena);
    free(text);
    return 0;
}
