/* Request parsing: the first byte says into which pieces the rest is cut; the outcome may not depend on them. What comes out
 * as a body goes through the parameter parser, too. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/server/api_params.h"
#include "gpu-worker/server/http.h"

enum { MAX_BODY = 4096 };

/* The first request of the text, fed in pieces; returns how many bytes it took. */
static size_t read_first(struct http_reader *reader, const uint8_t *data, size_t n, size_t piece)
{
    size_t used = 0;
    http_reader_init(reader, MAX_BODY);
    while (used < n && !reader->request.complete && !reader->request.status) {
        size_t len = n - used < piece ? n - used : piece;
        char *copy = malloc(len); /* of exact size: a read past it is seen */
        memcpy(copy, data + used, len);
        used += http_reader_feed(reader, copy, len);
        free(copy);
    }
    return used;
}

static void parse_body(const struct kvg_buf *body)
{
    struct kvg_arena arena;
    struct kvg_json *json;
    struct kvg_error err;

    kvg_arena_init(&arena, 64 << 20);
    for (int endpoint = KVG_CHAT_COMPLETIONS; endpoint <= KVG_COMPLETIONS; endpoint++) {
        struct api_context context = {
            .endpoint = (enum kvg_endpoint)endpoint, .gateway = true, .priority_scheduling = true, .n_vocab = 1000};
        struct api_params params;
        if (kvg_json_parse(&arena, body->bytes ? body->bytes : "", body->len, NULL, &json, &err) == KVG_OK)
            api_params_parse(&context, json, &arena, &params, &err);
    }
    kvg_arena_free(&arena);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct http_reader whole, cut;
    if (n < 2)
        return 0;
    size_t piece = data[0] % 32 + 1;
    size_t used_whole = read_first(&whole, data + 1, n - 1, SIZE_MAX), used_cut = read_first(&cut, data + 1, n - 1, piece);

    if (whole.request.complete != cut.request.complete || whole.request.body.len != cut.request.body.len)
        if (!whole.request.status && !cut.request.status)
            abort();
    if (whole.request.complete && used_whole != used_cut)
        abort();
    http_path(&whole.request);
    http_header(&whole.request, "content-length");
    if (whole.request.complete)
        parse_body(&whole.request.body);
    http_reader_free(&whole);
    http_reader_free(&cut);
    return 0;
}
