/* Encodes many texts with one tokenizer, for tests that compare ids.
 *
 * usage: encode MODEL.gguf < REQUESTS > REPLIES
 *
 * A request is u32 flags, u32 length, bytes; flags: 1 = the bytes are template text (CONTROL tokens match), 2 = add BOS/EOS,
 * 4 = the bytes are u32 ids to decode. A reply is u32 count and as many u32 ids, or u32 length and bytes. All little-endian.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "libprompt/tokenizer.h"

enum { TEMPLATE = 1, SPECIAL = 2, DECODE = 4, MAX_REQUEST = 1 << 30 };

static void die(const char *what, const char *why)
{
    fprintf(stderr, "encode: %s: %s\n", what, why);
    exit(1);
}

static void reply(const void *bytes, size_t size, uint32_t count)
{
    fwrite(&count, 4, 1, stdout);
    fwrite(bytes, 1, size, stdout);
    fflush(stdout);
}

static void encode(const struct kvg_tokenizer *tokenizer, const char *bytes, uint32_t len, uint32_t flags)
{
    struct kvg_run run = {len, flags & TEMPLATE ? KVG_TEMPLATE : KVG_INPUT};
    struct kvg_text text = {bytes, len, &run, len ? 1 : 0};
    struct kvg_arena arena;
    struct kvg_error err;
    struct kvg_ids ids;

    kvg_arena_init(&arena, 0);
    if (kvg_tokenize(tokenizer, &text, flags & SPECIAL ? KVG_ADD_SPECIAL : 0, &arena, &ids, &err))
        die("tokenize", err.message);
    reply(ids.ids, ids.n * 4, (uint32_t)ids.n);
    kvg_arena_free(&arena);
}

static void decode(const struct kvg_tokenizer *tokenizer, const char *bytes, uint32_t len)
{
    struct kvg_detokenizer state = {.tokenizer = tokenizer};
    struct kvg_buf out = {0};
    char *step = NULL;
    size_t room = 0;

    for (uint32_t i = 0; i + 4 <= len; i += 4) {
        uint32_t id;
        memcpy(&id, bytes + i, 4);
        size_t need = KVG_DETOKENIZE_ROOM(kvg_token_bytes(tokenizer, id, false).len);
        if (need > room && !(step = realloc(step, room = need)))
            die("decode", "out of memory");
        kvg_buf_add(&out, step, kvg_detokenize_step(&state, id, step));
    }
    char tail[3];
    kvg_buf_add(&out, tail, kvg_detokenize_end(&state, tail));
    reply(out.bytes, out.len, (uint32_t)out.len);
    kvg_buf_free(&out);
    free(step);
}

int main(int argc, char **argv)
{
    struct kvg_tokenizer *tokenizer;
    struct kvg_gguf *gguf;
    struct kvg_error err;
    uint32_t head[2];
    char *bytes = NULL;

    if (argc < 2)
        die("usage", "encode MODEL.gguf < REQUESTS > REPLIES");
    if (kvg_gguf_open(&gguf, argv[1], &err) || kvg_tokenizer_open(&tokenizer, gguf, &err))
        die(argv[1], err.message);
    while (fread(head, 4, 2, stdin) == 2) {
        if (head[1] > MAX_REQUEST || !(bytes = realloc(bytes, head[1] + 1)) || fread(bytes, 1, head[1], stdin) != head[1])
            die("request", "too long or cut short");
        if (head[0] & DECODE)
            decode(tokenizer, bytes, head[1]);
        else
            encode(tokenizer, bytes, head[1], head[0]);
    }
    free(bytes);
    kvg_tokenizer_close(tokenizer);
    kvg_gguf_close(gguf);
    return 0;
}
