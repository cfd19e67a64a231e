/* The vocabulary: texts as the file has them, the bytes each token stands for, and the two ways to look one up. */
#include "libprompt/tokenizer_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

/* Byte-level vocabularies write each byte as one printable character: printable Latin-1 stands for itself, the other 68 bytes
 * are U+0100 upward in byte order (Radford et al., GPT-2). Returns the byte of a character, or -1. */
static int byte_of_character(uint32_t c)
{
    if ((c >= 0x21 && c <= 0x7e) || (c >= 0xa1 && c <= 0xac) || (c >= 0xae && c <= 0xff))
        return (int)c;
    if (c < 0x100 || c >= 0x100 + 68)
        return -1;
    c -= 0x100;
    if (c <= 0x20)
        return (int)c;
    if (c <= 0x20 + 34)
        return (int)(0x7f + c - 0x21);
    return 0xad;
}

/* Decodes a byte-level text; returns the length, or -1 when a character stands for no byte. */
static ptrdiff_t decode_byte_level(struct kvg_str text, char *out)
{
    const uint8_t *p = (const uint8_t *)text.bytes, *end = p + text.len;
    char *o = out;
    unsigned len;

    for (; p < end; p += len) {
        int byte = byte_of_character(kvg_decode(p, end, &len));
        if (byte < 0)
            return -1;
        *o++ = (char)byte;
    }
    return o - out;
}

/* "▁" to a space; everything else stays. */
static size_t decode_sentence_piece(struct kvg_str text, char *out)
{
    size_t n = 0;

    for (size_t i = 0; i < text.len;) {
        if (text.len - i >= 3 && memcmp(text.bytes + i, "\xe2\x96\x81", 3) == 0) {
            out[n++] = ' ';
            i += 3;
        } else {
            out[n++] = text.bytes[i++];
        }
    }
    return n;
}

static int hex_value(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The byte that "<0xNN>" stands for, or -1. */
static int byte_of_fallback(struct kvg_str text)
{
    if (text.len != 6 || memcmp(text.bytes, "<0x", 3) || text.bytes[5] != '>' || hex_value(text.bytes[3]) < 0 ||
        hex_value(text.bytes[4]) < 0)
        return -1;
    return hex_value(text.bytes[3]) << 4 | hex_value(text.bytes[4]);
}

static void decode_token(struct kvg_vocab *vocab, uint32_t id, enum kvg_family family, char **free_bytes)
{
    struct kvg_str text = vocab->texts[id];
    uint8_t kind = vocab->kinds[id];
    ptrdiff_t n = -1;
    int byte;

    vocab->bytes[id] = text;
    if (kind == KVG_TOKEN_BYTE && (byte = byte_of_fallback(text)) >= 0) {
        **free_bytes = (char)byte;
        n = 1;
    } else if (family == KVG_SENTENCE_PIECE && kind != KVG_TOKEN_CONTROL) {
        n = (ptrdiff_t)decode_sentence_piece(text, *free_bytes);
    } else if (family == KVG_BYTE_LEVEL && kind == KVG_TOKEN_NORMAL) {
        n = decode_byte_level(text, *free_bytes);
    }
    if (n < 0)
        return;
    vocab->bytes[id] = (struct kvg_str){*free_bytes, (size_t)n};
    *free_bytes += n;
}

static uint32_t slots_for(uint32_t n)
{
    uint32_t slots = 16;

    while (slots < n * 2)
        slots *= 2;
    return slots;
}

/* Of two tokens with the same text the one with the lower id is found. */
static int index_texts(struct kvg_vocab *vocab, struct kvg_error *err)
{
    uint32_t n_slots = slots_for(vocab->n);

    vocab->slots = malloc(n_slots * sizeof *vocab->slots);
    if (!vocab->slots)
        return kvg_fail(err, KVG_NOMEM, "tokenizer: out of memory for %u slots", n_slots);
    memset(vocab->slots, 0xff, n_slots * sizeof *vocab->slots);
    vocab->mask = n_slots - 1;
    for (uint32_t id = 0; id < vocab->n; id++) {
        struct kvg_str text = vocab->texts[id];
        uint32_t at = (uint32_t)XXH3_64bits(text.bytes, text.len) & vocab->mask;
        while (vocab->slots[at] != KVG_NO_TOKEN && (vocab->texts[vocab->slots[at]].len != text.len ||
                                                    memcmp(vocab->texts[vocab->slots[at]].bytes, text.bytes, text.len)))
            at = (at + 1) & vocab->mask;
        if (vocab->slots[at] == KVG_NO_TOKEN)
            vocab->slots[at] = id;
    }
    return 0;
}

uint32_t kvg_vocab_find(const struct kvg_vocab *vocab, const char *text, size_t len)
{
    uint32_t at = (uint32_t)XXH3_64bits(text, len) & vocab->mask;

    for (; vocab->slots[at] != KVG_NO_TOKEN; at = (at + 1) & vocab->mask) {
        const struct kvg_str *candidate = &vocab->texts[vocab->slots[at]];
        if (candidate->len == len && memcmp(candidate->bytes, text, len) == 0)
            return vocab->slots[at];
    }
    return KVG_NO_TOKEN;
}

/* token_type of the file: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte; absent = all normal */
static int load_kinds(struct kvg_vocab *vocab, const struct kvg_gguf *gguf, struct kvg_error *err)
{
    static const uint8_t kinds[] = {KVG_TOKEN_NORMAL,       KVG_TOKEN_NORMAL, KVG_TOKEN_UNKNOWN, KVG_TOKEN_CONTROL,
                                    KVG_TOKEN_USER_DEFINED, KVG_TOKEN_UNUSED, KVG_TOKEN_BYTE};
    const struct kvg_gguf_value *types = kvg_gguf_find(gguf, "tokenizer.ggml.token_type");

    if (!types)
        return 0;
    if (types->type != KVG_GGUF_ARRAY || (types->item_type != KVG_GGUF_I32 && types->item_type != KVG_GGUF_U32) ||
        types->n != vocab->n)
        return kvg_fail(err, KVG_FILE, "tokenizer.ggml.token_type must be an array of %u integers, one a token", vocab->n);
    for (uint32_t id = 0; id < vocab->n; id++) {
        uint32_t type;
        memcpy(&type, types->bytes + (size_t)id * 4, 4);
        if (type > 6)
            return kvg_fail(err, KVG_FILE, "tokenizer.ggml.token_type of token %u is %u, known are 0 to 6", id, type);
        vocab->kinds[id] = kinds[type];
    }
    return 0;
}

int kvg_vocab_load(struct kvg_vocab *vocab, const struct kvg_gguf *gguf, enum kvg_family family, struct kvg_error *err)
{
    const struct kvg_gguf_value *tokens = kvg_gguf_find(gguf, "tokenizer.ggml.tokens");
    const unsigned char *cursor;
    char *free_bytes;
    int rc;

    if (!tokens || tokens->type != KVG_GGUF_ARRAY || tokens->item_type != KVG_GGUF_STRING || tokens->n == 0)
        return kvg_fail(err, KVG_FILE, "tokenizer.ggml.tokens is missing, empty or no array of strings");
    if (tokens->n > KVG_MAX_VOCAB)
        return kvg_fail(err, KVG_FILE, "tokenizer.ggml.tokens has %" PRIu64 " tokens, at most %d are supported", tokens->n,
                        KVG_MAX_VOCAB);
    vocab->n = (uint32_t)tokens->n;
    vocab->texts = malloc(vocab->n * sizeof *vocab->texts);
    vocab->bytes = malloc(vocab->n * sizeof *vocab->bytes);
    vocab->kinds = calloc(vocab->n, 1);
    vocab->blob = free_bytes = malloc(tokens->n_bytes);
    if (!vocab->texts || !vocab->bytes || !vocab->kinds || !vocab->blob)
        return kvg_fail(err, KVG_NOMEM, "tokenizer: out of memory for %u tokens", vocab->n);
    rc = load_kinds(vocab, gguf, err);
    if (rc)
        return rc;
    cursor = tokens->bytes;
    for (uint32_t id = 0; id < vocab->n; id++) {
        vocab->texts[id] = kvg_gguf_next_string(&cursor);
        decode_token(vocab, id, family, &free_bytes);
    }
    return index_texts(vocab, err);
}

void kvg_vocab_free(struct kvg_vocab *vocab)
{
    free(vocab->texts);
    free(vocab->bytes);
    free(vocab->kinds);
    free(vocab->blob);
    free(vocab->slots);
}

static uint64_t load_word(const uint8_t *word, size_t len)
{
    uint64_t key = 0;

    memcpy(&key, word, len);
    return key;
}

static uint32_t short_slot(const struct kvg_words *words, uint64_t key, size_t len)
{
    return (uint32_t)((key + len) * 0x9e3779b97f4a7c15u >> words->short_shift);
}

static void add_word(struct kvg_words *words, uint32_t id, uint32_t short_mask)
{
    const struct kvg_str word = words->bytes[id];

    if (word.len <= 8) {
        uint64_t key = load_word((const uint8_t *)word.bytes, word.len);
        uint32_t at = short_slot(words, key, word.len);
        while (words->short_words[at].len && (words->short_words[at].bytes != key || words->short_words[at].len != word.len))
            at = (at + 1) & short_mask;
        if (!words->short_words[at].len)
            words->short_words[at] = (struct kvg_short_word){key, (uint32_t)word.len, id};
    } else {
        uint32_t hash = (uint32_t)XXH3_64bits(word.bytes, word.len), at = hash & words->long_mask;
        while (words->long_words[at].id != KVG_NO_TOKEN)
            at = (at + 1) & words->long_mask;
        words->long_words[at] = (struct kvg_long_word){hash, id};
    }
    if (word.len > words->max_len)
        words->max_len = (uint32_t)word.len;
}

int kvg_words_build(struct kvg_words *words, const struct kvg_vocab *vocab, struct kvg_error *err)
{
    uint32_t n_short = 0, n_long = 0, short_slots, long_slots;

    for (uint32_t id = 0; id < vocab->n; id++) {
        if (vocab->kinds[id] == KVG_TOKEN_NORMAL)
            *(vocab->bytes[id].len <= 8 ? &n_short : &n_long) += 1;
    }
    short_slots = slots_for(n_short);
    long_slots = slots_for(n_long);
    words->bytes = vocab->bytes;
    words->short_words = calloc(short_slots, sizeof *words->short_words);
    words->long_words = malloc(long_slots * sizeof *words->long_words);
    if (!words->short_words || !words->long_words)
        return kvg_fail(err, KVG_NOMEM, "tokenizer: out of memory for %u words", n_short + n_long);
    memset(words->long_words, 0xff, long_slots * sizeof *words->long_words);
    words->short_shift = 64 - (uint32_t)__builtin_ctz(short_slots);
    words->long_mask = long_slots - 1;
    for (uint32_t id = 0; id < vocab->n; id++) {
        if (vocab->kinds[id] == KVG_TOKEN_NORMAL && vocab->bytes[id].len)
            add_word(words, id, short_slots - 1);
    }
    return 0;
}

void kvg_words_free(struct kvg_words *words)
{
    free(words->short_words);
    free(words->long_words);
}

uint32_t kvg_words_find(const struct kvg_words *words, const uint8_t *word, size_t len)
{
    if (len <= 8) {
        uint64_t key = load_word(word, len);
        uint32_t mask = (uint32_t)(1ull << (64 - words->short_shift)) - 1, at = short_slot(words, key, len);
        for (; words->short_words[at].len; at = (at + 1) & mask) {
            if (words->short_words[at].bytes == key && words->short_words[at].len == len)
                return words->short_words[at].id;
        }
        return KVG_NO_TOKEN;
    }
    if (len > words->max_len)
        return KVG_NO_TOKEN;
    uint32_t hash = (uint32_t)XXH3_64bits(word, len);
    for (uint32_t at = hash & words->long_mask; words->long_words[at].id != KVG_NO_TOKEN; at = (at + 1) & words->long_mask) {
        const struct kvg_long_word *slot = &words->long_words[at];
        if (slot->hash == hash && words->bytes[slot->id].len == len && memcmp(words->bytes[slot->id].bytes, word, len) == 0)
            return slot->id;
    }
    return KVG_NO_TOKEN;
}
