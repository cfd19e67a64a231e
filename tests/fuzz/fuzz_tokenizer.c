/* Any bytes as text under any cutting into template and input, for each family of splits: the ids stand for those very bytes
 * (families that normalize apart), streaming and remembered segments agree with the plain way, and no CONTROL token is made
 * of input bytes.
 *
 * The first byte chooses the family, the second the lengths of the runs.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include "libprompt/segment_memory.h"
#include "libprompt/tokenizer.h"
#include "tests/tools/toy_vocab.h"

enum { BOS = 256, END, MAX_RUNS = 64 };

static const struct toy_token tokens[] = {
    {"<s>", 3, 0},  {"<|e|>", 3, 0},   {"<u>", 4, 0},      {"ab", 1, -1}, {"abc", 1, -2}, {"aa", 1, -3},
    {"aaa", 1, -4}, {"\u2581", 1, -5}, {"\u2581a", 1, -6}, {"a", 1, -9},  {"b", 1, -9},   {"c", 1, -9},
};
static const char *const merges[] = {"a b", "a a", "ab c", "aa a", NULL};
static const struct toy_vocab VOCABS[] = {
    {"gpt2", "gpt-2", tokens, 7, merges, BOS, -1, -1, 1, -1, -1, NULL},
    {"gpt2", "llama-bpe", tokens, 7, merges, BOS, -1, -1, 1, -1, -1, NULL},
    {"gpt2", "qwen35", tokens, 7, merges, BOS, -1, -1, 1, -1, -1, NULL},
    {"gpt2", "smollm", tokens, 7, merges, BOS, -1, -1, 1, -1, -1, NULL},
    {"gpt2", "falcon", tokens, 7, merges, BOS, -1, -1, 1, -1, -1, NULL},
    {"gpt2", "deepseek-llm", tokens, 7, merges, BOS, -1, -1, 1, -1, -1, NULL},
    {"gpt2", "deepseek-coder", tokens, 7, merges, BOS, -1, -1, 1, -1, -1, NULL},
    {"gpt2", "deepseek-v3", tokens, 7, merges, BOS, -1, -1, 1, -1, -1, NULL},
    {"gpt2", "qwen2", tokens, 7, merges, BOS, -1, -1, 1, -1, -1, NULL},
    {"llama", NULL, tokens, 12, NULL, BOS, -1, -1, 1, -1, 0, NULL},
};
enum { N_VOCABS = sizeof VOCABS / sizeof *VOCABS, NORMALIZES = 8 };

static struct kvg_gguf *files[N_VOCABS]; /* opened once for the life of the process */
static struct kvg_tokenizer *tokenizers[N_VOCABS];
static struct kvg_segment_memory *memories[N_VOCABS];

static void open_all(void)
{
    for (int i = 0; i < N_VOCABS; i++) {
        struct toy_bytes file = toy_vocab_bytes(&VOCABS[i]);
        if (kvg_gguf_parse(&files[i], file.bytes, file.n, NULL) || kvg_tokenizer_open(&tokenizers[i], files[i], NULL))
            abort();
        memories[i] = kvg_segment_memory_open(1 << 16);
    }
}

/* Runs of alternating origin, their lengths from a small generator. */
static size_t cut_runs(struct kvg_run *runs, size_t len, unsigned seed)
{
    size_t n = 0;

    while (len) {
        size_t run = n + 1 == MAX_RUNS ? len : 1 + (seed >> 8) % 9;
        if (run > len)
            run = len;
        runs[n] = (struct kvg_run){run, (uint8_t)((n + seed) & 1)};
        len -= run;
        n++;
        seed = seed * 1664525u + 1013904223u;
    }
    return n;
}

/* The bytes that the ids stand for are the text's, and each CONTROL token lies on template bytes. */
static void check_bytes(const struct kvg_tokenizer *tokenizer, const struct kvg_text *text, const struct kvg_ids *ids)
{
    size_t at = 0;

    for (size_t i = 0; i < ids->n; i++) {
        struct kvg_str bytes = kvg_token_bytes(tokenizer, ids->ids[i], true);
        if (bytes.len > text->len - at || memcmp(text->bytes + at, bytes.bytes, bytes.len))
            abort();
        if (kvg_token_kind(tokenizer, ids->ids[i]) == KVG_TOKEN_CONTROL) {
            size_t start = 0;
            for (size_t r = 0; r < text->n_runs; start += text->runs[r++].len)
                if (text->runs[r].origin == KVG_INPUT && start < at + bytes.len && at < start + text->runs[r].len)
                    abort();
        }
        at += bytes.len;
    }
    if (at != text->len)
        abort();
}

static void stream(const struct kvg_tokenizer *tokenizer, const struct kvg_ids *ids)
{
    struct kvg_detokenizer state = {.tokenizer = tokenizer};

    for (size_t i = 0; i < ids->n; i++) {
        size_t room = KVG_DETOKENIZE_ROOM(kvg_token_bytes(tokenizer, ids->ids[i], false).len);
        char *step = malloc(room);
        if (kvg_detokenize_step(&state, ids->ids[i], step) > room)
            abort();
        free(step);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvg_run runs[MAX_RUNS];
    struct kvg_arena arena;
    struct kvg_ids ids, again;
    int which;

    if (!tokenizers[0])
        open_all();
    if (size < 2)
        return 0;
    which = data[0] % N_VOCABS;
    char *bytes = malloc(size - 2 ? size - 2 : 1);
    memcpy(bytes, data + 2, size - 2);
    struct kvg_text text = {bytes, size - 2, runs, cut_runs(runs, size - 2, data[1] * 2654435761u)};
    kvg_arena_init(&arena, 0);
    if (kvg_tokenize(tokenizers[which], &text, 0, &arena, &ids, NULL) ||
        kvg_tokenize_remembering(tokenizers[which], memories[which], &text, 0, &arena, &again, NULL))
        abort();
    if (ids.n != again.n || (ids.n && memcmp(ids.ids, again.ids, ids.n * sizeof *ids.ids)))
        abort();
    if (which != NORMALIZES && !(VOCABS[which].pre == NULL && memmem(bytes, size - 2, "\u2581", 3)))
        check_bytes(tokenizers[which], &text, &ids);
    stream(tokenizers[which], &ids);
    kvg_arena_free(&arena);
    free(bytes);
    return 0;
}
