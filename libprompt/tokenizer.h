/* Text <-> token ids, from a model's own vocabulary: byte-level BPE (with each family's pre-tokenizer), SentencePiece BPE
 * with byte fallback. Ids equal the reference tokenizer's.
 *
 * A tokenizer is immutable after it is opened and may be used by any number of threads at once.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "libprompt/arena.h"
#include "libprompt/error.h"
#include "libprompt/gguf.h"
#include "libprompt/text.h"

struct kvg_tokenizer;

struct kvg_ids {
    uint32_t *ids;
    size_t n;
};

enum kvg_token_kind {
    KVG_TOKEN_NORMAL,
    KVG_TOKEN_UNKNOWN,
    KVG_TOKEN_CONTROL,
    KVG_TOKEN_USER_DEFINED,
    KVG_TOKEN_UNUSED,
    KVG_TOKEN_BYTE
};

enum { KVG_NO_TOKEN = 0xffffffffu };

struct kvg_vocab_info {
    uint32_t n_vocab;
    uint32_t bos, eos, eot; /* KVG_NO_TOKEN where there is none */
    bool add_bos, add_eos;
    const uint32_t *end_ids; /* every id that ends a generation (eos, eot, eom, <|im_end|>, <end_of_turn> …) */
    size_t n_end_ids;
    const char *kind; /* "gpt2", "llama", … as the file names it */
    const char *pre;  /* pre-tokenizer name, "" for SentencePiece */
};

int kvg_tokenizer_open(struct kvg_tokenizer **out, const struct kvg_gguf *gguf, struct kvg_error *err); /* gguf must outlive it */
void kvg_tokenizer_close(struct kvg_tokenizer *tokenizer);
const struct kvg_vocab_info *kvg_tokenizer_info(const struct kvg_tokenizer *tokenizer);

enum {
    KVG_ADD_BOS = 1, /* BOS where the file says so; no second one before text that already starts with it */
    KVG_ADD_EOS = 2, /* EOS where the file says so */
    KVG_ADD_SPECIAL = KVG_ADD_BOS | KVG_ADD_EOS,
};

/* ids of `text` in the arena. CONTROL tokens match in TEMPLATE bytes only, USER_DEFINED ones anywhere. */
int kvg_tokenize(const struct kvg_tokenizer *tokenizer, const struct kvg_text *text, int flags, struct kvg_arena *arena,
                 struct kvg_ids *out, struct kvg_error *err);

/* The same, remembering segments between added tokens in `memory` (may be NULL), which belongs to this tokenizer alone. */
struct kvg_segment_memory;
int kvg_tokenize_remembering(const struct kvg_tokenizer *tokenizer, struct kvg_segment_memory *memory,
                             const struct kvg_text *text, int flags, struct kvg_arena *arena, struct kvg_ids *out,
                             struct kvg_error *err);

/* The bytes that token `id` stands for when generated (byte-level decoded, "▁" to a space, <0xNN> to its byte); they may be
 * part of a character. len 0 for CONTROL and out-of-range ids unless `special`, which gives a CONTROL token its own text. */
struct kvg_str kvg_token_bytes(const struct kvg_tokenizer *tokenizer, uint32_t id, bool special);
enum kvg_token_kind kvg_token_kind(const struct kvg_tokenizer *tokenizer, uint32_t id);
/* The vocabulary's own text of the token (for logprobs and error messages); NULL bytes when out of range. */
struct kvg_str kvg_token_text(const struct kvg_tokenizer *tokenizer, uint32_t id);
/* The id whose vocabulary text is exactly `text`, or KVG_NO_TOKEN. */
uint32_t kvg_token_find(const struct kvg_tokenizer *tokenizer, const char *text, size_t len);

/* Whether decoding drops one space before the first token, because encoding puts one there. */
bool kvg_tokenizer_drops_first_space(const struct kvg_tokenizer *tokenizer);

/* Streaming: holds back bytes until they form whole characters. Zero-initialize, then set tokenizer. */
struct kvg_detokenizer {
    const struct kvg_tokenizer *tokenizer;
    unsigned char held[4]; /* an incomplete UTF-8 character */
    uint8_t n_held;
    bool started;            /* SentencePiece drops the space before the first token */
    bool keep_leading_space; /* set when the output continues a prompt: nothing is dropped */
};
/* Room that a step needs for a token of n bytes: each held or new byte may come out as a U+FFFD of three. */
#define KVG_DETOKENIZE_ROOM(n) (3 * ((n) + 3))
/* Appends to `buf` (KVG_DETOKENIZE_ROOM(kvg_token_bytes(...).len) bytes free) the bytes that are now complete; returns how
 * many. Bytes that can never become a character come out as one U+FFFD for each longest broken sequence. */
size_t kvg_detokenize_step(struct kvg_detokenizer *state, uint32_t id, char *buf);
/* What is still held, as one U+FFFD; at most 3 bytes. */
size_t kvg_detokenize_end(struct kvg_detokenizer *state, char *buf);
