/* Vocabularies of a few tokens as GGUF bytes, for unit tests and fuzzers: every id and merge stands in the test's view. */
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "libprompt/gguf.h"

struct toy_token {
    const char *text;
    int32_t type; /* as in the file: 1 normal, 2 unknown, 3 control, 4 user-defined, 6 byte */
    float score;
};

struct toy_vocab {
    const char *model, *pre;        /* pre NULL: absent */
    const struct toy_token *tokens; /* after the 256 byte tokens, which get ids 0 to 255 */
    size_t n_tokens;
    const char *const *merges;              /* "LEFT RIGHT", NULL-terminated; NULL: absent, scores instead */
    int bos, eos, unk;                      /* -1: absent */
    int add_bos, add_eos, add_space_prefix; /* -1: absent */
    const char *chat_template;              /* NULL: absent */
};

struct toy_bytes {
    unsigned char *bytes; /* the caller frees */
    size_t n, cap;
    uint64_t n_values;
};

static inline void toy_put(struct toy_bytes *f, const void *bytes, size_t n)
{
    if (f->n + n > f->cap) {
        f->cap = (f->n + n) * 2;
        f->bytes = realloc(f->bytes, f->cap);
        if (!f->bytes)
            abort();
    }
    if (n)
        memcpy(f->bytes + f->n, bytes, n);
    f->n += n;
}

static inline void toy_u32(struct toy_bytes *f, uint32_t v)
{
    toy_put(f, &v, 4);
}

static inline void toy_u64(struct toy_bytes *f, uint64_t v)
{
    toy_put(f, &v, 8);
}

static inline void toy_text(struct toy_bytes *f, const char *text)
{
    toy_u64(f, strlen(text));
    toy_put(f, text, strlen(text));
}

static inline void toy_key(struct toy_bytes *f, const char *key, enum kvg_gguf_type type)
{
    toy_text(f, key);
    toy_u32(f, type);
    f->n_values++;
}

static inline void toy_string_value(struct toy_bytes *f, const char *key, const char *value)
{
    if (!value)
        return;
    toy_key(f, key, KVG_GGUF_STRING);
    toy_text(f, value);
}

static inline void toy_id_value(struct toy_bytes *f, const char *key, int id)
{
    if (id < 0)
        return;
    toy_key(f, key, KVG_GGUF_U32);
    toy_u32(f, (uint32_t)id);
}

static inline void toy_flag_value(struct toy_bytes *f, const char *key, int flag)
{
    unsigned char byte = flag > 0;

    if (flag < 0)
        return;
    toy_key(f, key, KVG_GGUF_BOOL);
    toy_put(f, &byte, 1);
}

/* The printable character that stands for a byte in byte-level vocabularies; in SentencePiece ones "<0xNN>". */
static inline void toy_byte_token(struct toy_bytes *f, int byte, int sentence_piece)
{
    static const char digits[] = "0123456789ABCDEF";
    char text[8] = {'<', '0', 'x', digits[byte >> 4], digits[byte & 15], '>', 0};
    int c = byte, next = 256;

    if (!sentence_piece) {
        for (int b = 0; b <= byte; b++) {
            int printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
            c = printable ? b : next++;
        }
        memset(text, 0, sizeof text);
        text[0] = (char)(c < 0x80 ? c : 0xc0 | c >> 6);
        text[1] = (char)(c < 0x80 ? 0 : 0x80 | (c & 63));
    }
    toy_text(f, text);
}

static inline void toy_array(struct toy_bytes *f, const char *key, enum kvg_gguf_type item, uint64_t n)
{
    toy_key(f, key, KVG_GGUF_ARRAY);
    toy_u32(f, item);
    toy_u64(f, n);
}

static inline struct toy_bytes toy_vocab_bytes(const struct toy_vocab *vocab)
{
    struct toy_bytes f = {0};
    int sentence_piece = strcmp(vocab->model, "gpt2") != 0;
    uint64_t n = 256 + vocab->n_tokens, n_merges = 0;

    toy_put(&f, "GGUF\3\0\0\0", 8);
    toy_u64(&f, 0);
    toy_u64(&f, 0); /* the number of values, set below */
    toy_string_value(&f, "tokenizer.ggml.model", vocab->model);
    toy_string_value(&f, "tokenizer.ggml.pre", vocab->pre);
    toy_array(&f, "tokenizer.ggml.tokens", KVG_GGUF_STRING, n);
    for (int byte = 0; byte < 256; byte++)
        toy_byte_token(&f, byte, sentence_piece);
    for (size_t i = 0; i < vocab->n_tokens; i++)
        toy_text(&f, vocab->tokens[i].text);
    toy_array(&f, "tokenizer.ggml.token_type", KVG_GGUF_I32, n);
    for (uint64_t i = 0; i < n; i++)
        toy_u32(&f, i >= 256 ? (uint32_t)vocab->tokens[i - 256].type : sentence_piece ? 6 : 1);
    toy_array(&f, "tokenizer.ggml.scores", KVG_GGUF_F32, n);
    for (uint64_t i = 0; i < n; i++)
        toy_put(&f, i < 256 ? &(float){0} : &vocab->tokens[i - 256].score, 4);
    while (vocab->merges && vocab->merges[n_merges])
        n_merges++;
    if (vocab->merges)
        toy_array(&f, "tokenizer.ggml.merges", KVG_GGUF_STRING, n_merges);
    for (uint64_t i = 0; i < n_merges; i++)
        toy_text(&f, vocab->merges[i]);
    toy_id_value(&f, "tokenizer.ggml.bos_token_id", vocab->bos);
    toy_id_value(&f, "tokenizer.ggml.eos_token_id", vocab->eos);
    toy_id_value(&f, "tokenizer.ggml.unknown_token_id", vocab->unk);
    toy_flag_value(&f, "tokenizer.ggml.add_bos_token", vocab->add_bos);
    toy_flag_value(&f, "tokenizer.ggml.add_eos_token", vocab->add_eos);
    toy_flag_value(&f, "tokenizer.ggml.add_space_prefix", vocab->add_space_prefix);
    toy_string_value(&f, "tokenizer.chat_template", vocab->chat_template);
    memcpy(f.bytes + 16, &f.n_values, 8);
    return f;
}
