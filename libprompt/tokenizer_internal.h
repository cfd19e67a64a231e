/* What the tokenizer's files share. Nothing outside libprompt/tokenizer_*.c and pretokenize.c includes this.
 *
 *   text --added tokens (trie)--> plain segments --NFC--> --pretokenize / safe cuts--> words --merges--> ids
 *
 * A word that is a token by itself needs one lookup; others are merged. Everything here is written while the tokenizer opens
 * and read-only afterwards, except `whole`, a lazily computed fact per token in relaxed atomics.
 */
#pragma once
#include <stdatomic.h>
#include "libprompt/tokenizer.h"
#include "libprompt/unicode_classes.h"

enum kvg_family {
    KVG_BYTE_LEVEL,     /* vocabulary in the 256 printable stand-ins of bytes; a word's symbols start as bytes */
    KVG_SENTENCE_PIECE, /* vocabulary in text with "▁" for a space; symbols start as characters; byte fallback */
};

enum {
    KVG_MAX_VOCAB = 1 << 20,
    KVG_MAX_MERGES = (1 << 24) - 2,
    KVG_NO_RANK = 0xffffffffu,
};

/* ---- vocabulary ---- */

struct kvg_vocab {
    uint32_t n;
    struct kvg_str *texts; /* [n], into the GGUF */
    struct kvg_str *bytes; /* [n], what the token stands for: into `blob` or the GGUF */
    uint8_t *kinds;        /* [n] enum kvg_token_kind */
    char *blob;
    uint32_t *slots; /* text -> id: open addressing, KVG_NO_TOKEN = free */
    uint32_t mask;
};

int kvg_vocab_load(struct kvg_vocab *vocab, const struct kvg_gguf *gguf, enum kvg_family family, struct kvg_error *err);
void kvg_vocab_free(struct kvg_vocab *vocab);
uint32_t kvg_vocab_find(const struct kvg_vocab *vocab, const char *text, size_t len);

/* bytes -> id for the tokens that merging can make. Words of at most 8 bytes are compared inside the slot. */
struct kvg_short_word {
    uint64_t bytes; /* little-endian, zero-padded */
    uint32_t len;   /* 0 = free */
    uint32_t id;
};
struct kvg_long_word {
    uint32_t hash, id; /* id KVG_NO_TOKEN = free */
};
struct kvg_words {
    struct kvg_short_word *short_words;
    struct kvg_long_word *long_words;
    uint32_t short_shift, long_mask, max_len;
    const struct kvg_str *bytes; /* of the vocabulary */
};

int kvg_words_build(struct kvg_words *words, const struct kvg_vocab *vocab, struct kvg_error *err);
void kvg_words_free(struct kvg_words *words);
uint32_t kvg_words_find(const struct kvg_words *words, const uint8_t *word, size_t len);

/* ---- merges ---- */

/* (left id, right id) -> rank; the lowest rank merges first, the leftmost of equals. */
struct kvg_merges {
    uint64_t *slots; /* left:20 right:20 rank:24 from the top; all ones = free */
    uint32_t shift, mask;
    uint32_t *merged; /* [n]: rank -> id of the merged token */
    uint32_t n;
    uint32_t *byte_ranks; /* [65536]: rank of two bytes, or KVG_NO_RANK; NULL for SentencePiece */
};

int kvg_merges_load(struct kvg_merges *merges, const struct kvg_gguf *gguf, const struct kvg_vocab *vocab, struct kvg_error *err);
/* SentencePiece files have scores instead: every way to cut a token into two others is a merge, ranked by score, then id. */
int kvg_merges_from_scores(struct kvg_merges *merges, const struct kvg_gguf *gguf, const struct kvg_vocab *vocab,
                           const struct kvg_words *words, struct kvg_error *err);
void kvg_merges_free(struct kvg_merges *merges);
uint32_t kvg_merges_rank(const struct kvg_merges *merges, uint32_t left, uint32_t right);

/* ---- added tokens ---- */

struct kvg_added_node {
    uint32_t child, sibling; /* 0 = none (the root is nobody's child) */
    uint32_t id;             /* KVG_NO_TOKEN: no token ends here */
    uint8_t byte;
};
enum { KVG_LSTRIP = 1, KVG_RSTRIP = 2 };
struct kvg_added {
    struct kvg_added_node *nodes; /* nodes[0] is the root */
    uint32_t n_nodes, cap;
    uint32_t first[256]; /* the root's children by byte */
    uint8_t *strip;      /* [n_vocab], or NULL when no token strips white space */
    int only_first;      /* the byte that every added token starts with, or -1 */
};

struct kvg_added_match {
    size_t start, end; /* in the text; white space that the token strips included */
    uint32_t id;       /* KVG_NO_TOKEN: none left */
};

int kvg_added_build(struct kvg_added *added, const struct kvg_vocab *vocab, bool rstrip_all, struct kvg_error *err);
void kvg_added_free(struct kvg_added *added);

/* Where the text's runs are being read: position of the current run. */
struct kvg_run_cursor {
    const struct kvg_text *text;
    size_t run, run_start;
};
/* The leftmost, longest added token at or after `from`; CONTROL only where every byte is TEMPLATE. */
struct kvg_added_match kvg_added_next(const struct kvg_tokenizer *tokenizer, struct kvg_run_cursor *cursor, size_t from);

/* ---- pre-tokenizers ---- */

struct kvg_pre {
    const char *names[12]; /* of tokenizer.ggml.pre, NULL-terminated */
    uint8_t stages[8];     /* enum in pretokenize.c, 0-terminated */
    bool nfc, ignore_merges, add_bos;
};

const struct kvg_pre *kvg_pre_find(struct kvg_str name); /* NULL: unknown */
/* Calls word() for each word of bytes[0..n), in order; stops and returns its result when that is not 0. */
typedef int kvg_word_fn(void *context, const uint8_t *word, size_t n);
int kvg_pre_split(const struct kvg_tokenizer *tokenizer, const uint8_t *bytes, size_t n, kvg_word_fn *word, void *context);

/* NFC of `in`: `in` itself when nothing in it can change, else in the arena. 0 or KVG_NOMEM. */
int kvg_nfc(const struct kvg_tokenizer *tokenizer, struct kvg_str in, struct kvg_arena *arena, struct kvg_str *out);

/* ---- the tokenizer ---- */

struct kvg_tokenizer {
    struct kvg_vocab_info info;
    enum kvg_family family;
    const struct kvg_pre *pre; /* NULL for SentencePiece */
    bool add_space_prefix;
    bool space_prefix_once, space_prefix_first; /* not before a space; only where the text begins */
    bool nfc, ignore_merges;
    bool lacks_bytes; /* a byte-level vocabulary without a token for some byte */
    uint32_t unk;
    struct kvg_vocab vocab;
    struct kvg_words words;
    struct kvg_merges merges;
    struct kvg_added added;
    uint32_t byte_ids[256]; /* the token of each byte (byte-level symbol, or <0xNN>); KVG_NO_TOKEN where there is none */
    _Atomic uint8_t *whole; /* [n_vocab]: 0 not asked yet, 1 its bytes merge to itself, 2 they do not */
    uint32_t *adjacent;     /* [65536 bits]: two bytes that stand side by side in some mergeable token (SentencePiece) */
    uint16_t *classes;      /* [KVG_CODE_POINTS] */
    uint32_t *end_ids;
};

/* Ids under construction, in an arena. */
struct kvg_id_list {
    struct kvg_arena *arena;
    uint32_t *ids;
    size_t n, cap;
    size_t segment_start; /* ids before it belong to other segments: a run of unknown characters ends there */
};
int kvg_id_list_reserve(struct kvg_id_list *list, size_t more); /* 0 or KVG_NOMEM */

/* Appends the ids of one word (bytes that merge only among themselves). 0 or KVG_NOMEM. */
int kvg_word_encode(const struct kvg_tokenizer *tokenizer, const uint8_t *word, size_t n, struct kvg_id_list *out);

/* The code point at p (< end) and its length; malformed bytes count as one U+FFFF-like unit of length 1 without a class. */
static inline uint32_t kvg_decode(const uint8_t *p, const uint8_t *end, unsigned *len)
{
    if (*p < 0x80) {
        *len = 1;
        return *p;
    }
    if (*p >= 0xc2 && *p < 0xe0 && end - p >= 2) {
        *len = 2;
        return (uint32_t)(p[0] & 31) << 6 | (p[1] & 63);
    }
    if ((*p & 0xf0) == 0xe0 && end - p >= 3) {
        *len = 3;
        return (uint32_t)(p[0] & 15) << 12 | (uint32_t)(p[1] & 63) << 6 | (p[2] & 63);
    }
    if (*p >= 0xf0 && *p < 0xf5 && end - p >= 4) {
        uint32_t c = (uint32_t)(p[0] & 7) << 18 | (uint32_t)(p[1] & 63) << 12 | (uint32_t)(p[2] & 63) << 6 | (p[3] & 63);
        *len = 4;
        return c < KVG_CODE_POINTS ? c : 0xffff;
    }
    *len = 1;
    return 0xffff;
}

/* Hash of a short key; the top bits are the good ones. */
static inline uint64_t kvg_mix(uint64_t x)
{
    x *= 0x9e3779b97f4a7c15u;
    return x ^ x >> 32;
}
