/* Opening a tokenizer from GGUF metadata, and text -> ids. */
#define _GNU_SOURCE /* memmem */
#include "libprompt/tokenizer_internal.h"
#include "libprompt/segment_memory.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Models by tokenizer.ggml.model. */
static const struct {
    const char *name;
    enum kvg_family family;
    bool scores;                    /* merges are derived from scores, else listed in the file */
    bool add_bos, add_space_prefix; /* where the file says nothing */
} KINDS[] = {
    {"gpt2", KVG_BYTE_LEVEL, false, false, false},
    {"llama", KVG_SENTENCE_PIECE, true, true, true},
    {"gemma4", KVG_SENTENCE_PIECE, false, true, false},
    {"bpe-fallback", KVG_SENTENCE_PIECE, false, false, false}, /* of a folder (hf_tokenizer.c) */
};

/* Texts of tokens that end a turn or a generation in some family; those that a vocabulary has count. */
static const char *const END_TEXTS[] = {
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|EOT|>",
    "<EOT>",
    "<eos>",
    "</s>",
    "<|return|>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "<|end▁of▁sentence|>",
};
static const char *const EOT_TEXTS[] = {"<|im_end|>", "<|eot_id|>", "<end_of_turn>",        "<turn|>",
                                        "<|end|>",    "<|EOT|>",    "<|END_OF_TURN_TOKEN|>"};

enum { LISTED_ENDS = 16, MAX_END_IDS = sizeof END_TEXTS / sizeof *END_TEXTS + 3 + LISTED_ENDS };

static bool is_special(const struct kvg_tokenizer *tokenizer, uint32_t id)
{
    uint8_t kind = tokenizer->vocab.kinds[id];

    return kind == KVG_TOKEN_CONTROL || kind == KVG_TOKEN_USER_DEFINED;
}

static void add_end_id(struct kvg_tokenizer *tokenizer, uint32_t id)
{
    for (size_t i = 0; i < tokenizer->info.n_end_ids; i++) {
        if (tokenizer->end_ids[i] == id)
            return;
    }
    if (id != KVG_NO_TOKEN)
        tokenizer->end_ids[tokenizer->info.n_end_ids++] = id;
}

/* kvgate.end_token_ids: the ends that a folder's generation_config.json lists. */
static void add_listed_ends(struct kvg_tokenizer *tokenizer, const struct kvg_gguf *gguf)
{
    const struct kvg_gguf_value *list = kvg_gguf_find(gguf, "kvgate.end_token_ids");
    uint32_t id;

    if (!list || list->type != KVG_GGUF_ARRAY || list->item_type != KVG_GGUF_I32)
        return;
    for (uint64_t i = 0; i < list->n && i < LISTED_ENDS; i++) {
        memcpy(&id, list->bytes + 4 * i, 4);
        if (id < tokenizer->info.n_vocab)
            add_end_id(tokenizer, id);
    }
}

/* A token id of the metadata: absent is KVG_NO_TOKEN, out of range is an error. */
static int load_id(const struct kvg_gguf *gguf, const char *key, uint32_t n_vocab, uint32_t *out, struct kvg_error *err)
{
    uint64_t id;

    *out = KVG_NO_TOKEN;
    if (!kvg_gguf_find(gguf, key))
        return 0;
    if (!kvg_gguf_u64(gguf, key, &id))
        return kvg_fail(err, KVG_FILE, "%s is no non-negative integer", key);
    if (id == UINT32_MAX) /* how some writers say "none" */
        return 0;
    if (id >= n_vocab)
        return kvg_fail(err, KVG_FILE, "%s is %" PRIu64 ", the vocabulary has %u tokens", key, id, n_vocab);
    *out = (uint32_t)id;
    return 0;
}

static int load_specials(struct kvg_tokenizer *tokenizer, const struct kvg_gguf *gguf, struct kvg_error *err)
{
    struct kvg_vocab_info *info = &tokenizer->info;
    uint32_t eom;

    if (load_id(gguf, "tokenizer.ggml.bos_token_id", info->n_vocab, &info->bos, err) ||
        load_id(gguf, "tokenizer.ggml.eos_token_id", info->n_vocab, &info->eos, err) ||
        load_id(gguf, "tokenizer.ggml.eot_token_id", info->n_vocab, &info->eot, err) ||
        load_id(gguf, "tokenizer.ggml.eom_token_id", info->n_vocab, &eom, err) ||
        load_id(gguf, "tokenizer.ggml.unknown_token_id", info->n_vocab, &tokenizer->unk, err))
        return KVG_FILE;
    kvg_gguf_bool(gguf, "tokenizer.ggml.add_bos_token", &info->add_bos);
    kvg_gguf_bool(gguf, "tokenizer.ggml.add_eos_token", &info->add_eos);
    kvg_gguf_bool(gguf, "tokenizer.ggml.add_space_prefix", &tokenizer->add_space_prefix);
    info->add_bos = info->add_bos && info->bos != KVG_NO_TOKEN;
    info->add_eos = info->add_eos && info->eos != KVG_NO_TOKEN;
    tokenizer->end_ids = malloc(MAX_END_IDS * sizeof *tokenizer->end_ids);
    if (!tokenizer->end_ids)
        return kvg_fail(err, KVG_NOMEM, "tokenizer: out of memory");
    info->end_ids = tokenizer->end_ids;
    for (size_t i = 0; i < sizeof EOT_TEXTS / sizeof *EOT_TEXTS && info->eot == KVG_NO_TOKEN; i++) {
        uint32_t id = kvg_vocab_find(&tokenizer->vocab, EOT_TEXTS[i], strlen(EOT_TEXTS[i]));
        if (id != KVG_NO_TOKEN && is_special(tokenizer, id))
            info->eot = id;
    }
    add_end_id(tokenizer, info->eos);
    add_end_id(tokenizer, info->eot);
    add_end_id(tokenizer, eom);
    add_listed_ends(tokenizer, gguf);
    for (size_t i = 0; i < sizeof END_TEXTS / sizeof *END_TEXTS; i++) {
        uint32_t id = kvg_vocab_find(&tokenizer->vocab, END_TEXTS[i], strlen(END_TEXTS[i]));
        if (id != KVG_NO_TOKEN && is_special(tokenizer, id))
            add_end_id(tokenizer, id);
    }
    return 0;
}

/* What a folder's tokenizer.json states and GGUF files leave to the pre-tokenizer's name. */
static void load_overrides(struct kvg_tokenizer *tokenizer, const struct kvg_gguf *gguf)
{
    if (tokenizer->pre) {
        tokenizer->nfc = tokenizer->pre->nfc;
        tokenizer->ignore_merges = tokenizer->pre->ignore_merges;
    }
    kvg_gguf_bool(gguf, "kvgate.nfc", &tokenizer->nfc);
    kvg_gguf_bool(gguf, "kvgate.ignore_merges", &tokenizer->ignore_merges);
    kvg_gguf_bool(gguf, "kvgate.space_prefix_once", &tokenizer->space_prefix_once);
    kvg_gguf_bool(gguf, "kvgate.space_prefix_first", &tokenizer->space_prefix_first);
}

/* tokenizer.ggml.pre, or for old files without it what their architecture's tokenizer is known to use. */
static int choose_pre(struct kvg_tokenizer *tokenizer, const struct kvg_gguf *gguf, struct kvg_error *err)
{
    struct kvg_str name = {"default", 7}, architecture = {"", 0};

    kvg_gguf_str(gguf, "general.architecture", &architecture);
    if (kvg_str_eq(architecture, "gptneox"))
        name = (struct kvg_str){"gpt-neox", 8};
    kvg_gguf_str(gguf, "tokenizer.ggml.pre", &name);
    tokenizer->pre = kvg_pre_find(name);
    if (!tokenizer->pre)
        return kvg_fail(err, KVG_UNSUPPORTED,
                        "tokenizer.ggml.pre is \"%.*s\": this pre-tokenizer is not known, ids would be wrong",
                        (int)(name.len < 60 ? name.len : 60), name.bytes);
    for (size_t k = 0; tokenizer->pre->names[k]; k++) {
        if (kvg_str_eq(name, tokenizer->pre->names[k]))
            tokenizer->info.pre = tokenizer->pre->names[k];
    }
    return 0;
}

/* The token of each byte: byte-level vocabularies by their one-byte words, SentencePiece by its BYTE tokens. */
static void map_bytes(struct kvg_tokenizer *tokenizer)
{
    for (int byte = 0; byte < 256; byte++) {
        uint8_t b = (uint8_t)byte;
        tokenizer->byte_ids[byte] = tokenizer->family == KVG_BYTE_LEVEL ? kvg_words_find(&tokenizer->words, &b, 1) : KVG_NO_TOKEN;
    }
    for (uint32_t id = 0; tokenizer->family == KVG_SENTENCE_PIECE && id < tokenizer->vocab.n; id++) {
        struct kvg_str bytes = tokenizer->vocab.bytes[id];
        if (tokenizer->vocab.kinds[id] == KVG_TOKEN_BYTE && bytes.len == 1)
            tokenizer->byte_ids[(uint8_t)bytes.bytes[0]] = id;
    }
}

static int rank_byte_pairs(struct kvg_tokenizer *tokenizer, struct kvg_error *err)
{
    uint32_t *ranks = malloc(65536 * sizeof *ranks);

    if (!ranks)
        return kvg_fail(err, KVG_NOMEM, "tokenizer: out of memory");
    tokenizer->merges.byte_ranks = ranks;
    for (int pair = 0; pair < 65536; pair++) {
        uint32_t left = tokenizer->byte_ids[pair >> 8], right = tokenizer->byte_ids[pair & 255];
        bool known = left != KVG_NO_TOKEN && right != KVG_NO_TOKEN;
        ranks[pair] = known ? kvg_merges_rank(&tokenizer->merges, left, right) : KVG_NO_RANK;
        tokenizer->lacks_bytes = tokenizer->lacks_bytes || !known;
    }
    return 0;
}

static int note_adjacent_bytes(struct kvg_tokenizer *tokenizer, struct kvg_error *err)
{
    uint32_t *bits = calloc(65536 / 32, sizeof *bits);

    if (!bits)
        return kvg_fail(err, KVG_NOMEM, "tokenizer: out of memory");
    for (uint32_t id = 0; id < tokenizer->vocab.n; id++) {
        const uint8_t *p = (const uint8_t *)tokenizer->vocab.bytes[id].bytes;
        if (tokenizer->vocab.kinds[id] != KVG_TOKEN_NORMAL)
            continue;
        for (size_t i = 0; i + 1 < tokenizer->vocab.bytes[id].len; i++)
            bits[p[i] << 3 | p[i + 1] >> 5] |= 1u << (p[i + 1] & 31);
    }
    tokenizer->adjacent = bits;
    return 0;
}

static int load_merges(struct kvg_tokenizer *tokenizer, const struct kvg_gguf *gguf, bool scores, struct kvg_error *err)
{
    if (scores)
        return kvg_merges_from_scores(&tokenizer->merges, gguf, &tokenizer->vocab, &tokenizer->words, err);
    return kvg_merges_load(&tokenizer->merges, gguf, &tokenizer->vocab, err);
}

static int load_tables(struct kvg_tokenizer *tokenizer, const struct kvg_gguf *gguf, bool scores, struct kvg_error *err)
{
    struct kvg_str architecture = {"", 0};
    int rc;

    kvg_gguf_str(gguf, "general.architecture", &architecture);
    if ((rc = kvg_vocab_load(&tokenizer->vocab, gguf, tokenizer->family, err)) ||
        (rc = kvg_words_build(&tokenizer->words, &tokenizer->vocab, err)) || (rc = load_merges(tokenizer, gguf, scores, err)))
        return rc;
    tokenizer->info.n_vocab = tokenizer->vocab.n;
    map_bytes(tokenizer);
    rc = tokenizer->family == KVG_BYTE_LEVEL ? rank_byte_pairs(tokenizer, err) : note_adjacent_bytes(tokenizer, err);
    if (rc)
        return rc;
    tokenizer->whole = calloc(tokenizer->vocab.n, 1);
    tokenizer->classes = malloc(KVG_CODE_POINTS * sizeof *tokenizer->classes);
    if (!tokenizer->whole || !tokenizer->classes)
        return kvg_fail(err, KVG_NOMEM, "tokenizer: out of memory");
    kvg_classes_expand(tokenizer->classes);
    if (tokenizer->ignore_merges)
        memset((void *)tokenizer->whole, 1, tokenizer->vocab.n);
    return kvg_added_build(&tokenizer->added, &tokenizer->vocab,
                           kvg_str_eq(architecture, "phi3") && tokenizer->family == KVG_SENTENCE_PIECE, err);
}

static int open_kind(struct kvg_tokenizer *tokenizer, const struct kvg_gguf *gguf, struct kvg_error *err)
{
    struct kvg_str name;
    int rc;

    if (!kvg_gguf_str(gguf, "tokenizer.ggml.model", &name))
        return kvg_fail(err, KVG_FILE, "tokenizer.ggml.model is missing or no string");
    for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++) {
        if (!kvg_str_eq(name, KINDS[i].name))
            continue;
        tokenizer->info.kind = KINDS[i].name;
        tokenizer->info.pre = "";
        tokenizer->info.add_bos = KINDS[i].add_bos;
        tokenizer->family = KINDS[i].family;
        tokenizer->add_space_prefix = KINDS[i].add_space_prefix;
        if (tokenizer->family == KVG_BYTE_LEVEL) {
            if ((rc = choose_pre(tokenizer, gguf, err)))
                return rc;
            tokenizer->info.add_bos = tokenizer->pre->add_bos;
        }
        load_overrides(tokenizer, gguf);
        if ((rc = load_tables(tokenizer, gguf, KINDS[i].scores, err)))
            return rc;
        return load_specials(tokenizer, gguf, err);
    }
    return kvg_fail(err, KVG_UNSUPPORTED, "tokenizer.ggml.model is \"%.*s\": supported are gpt2, llama and gemma4",
                    (int)(name.len < 60 ? name.len : 60), name.bytes);
}

int kvg_tokenizer_open(struct kvg_tokenizer **out, const struct kvg_gguf *gguf, struct kvg_error *err)
{
    struct kvg_tokenizer *tokenizer = calloc(1, sizeof *tokenizer);
    int rc;

    *out = NULL;
    if (!tokenizer)
        return kvg_fail(err, KVG_NOMEM, "tokenizer: out of memory");
    rc = open_kind(tokenizer, gguf, err);
    if (rc) {
        kvg_tokenizer_close(tokenizer);
        return rc;
    }
    *out = tokenizer;
    return 0;
}

void kvg_tokenizer_close(struct kvg_tokenizer *tokenizer)
{
    if (!tokenizer)
        return;
    kvg_vocab_free(&tokenizer->vocab);
    kvg_words_free(&tokenizer->words);
    kvg_merges_free(&tokenizer->merges);
    kvg_added_free(&tokenizer->added);
    free((void *)tokenizer->whole);
    free(tokenizer->adjacent);
    free(tokenizer->classes);
    free(tokenizer->end_ids);
    free(tokenizer);
}

/* ---- text -> ids ---- */

enum { REMEMBERED_BYTES = 48 }; /* shorter segments cost less to encode than to look up */

struct encoding {
    const struct kvg_tokenizer *tokenizer;
    struct kvg_segment_memory *memory;
    struct kvg_id_list list;
    bool at_start; /* the segment begins the text */
};

static int encode_word(void *context, const uint8_t *word, size_t n)
{
    struct encoding *encoding = context;

    return kvg_word_encode(encoding->tokenizer, word, n, &encoding->list);
}

/* Cuts between two characters whose touching bytes stand side by side in no token: no merge crosses such a place. */
static int encode_pieces(struct encoding *encoding, const uint8_t *p, size_t n)
{
    const uint32_t *adjacent = encoding->tokenizer->adjacent;
    size_t start = 0;
    int rc;

    for (size_t i = 1; i < n; i++) {
        if ((p[i] & 0xc0) == 0x80 || (adjacent[p[i - 1] << 3 | p[i] >> 5] >> (p[i] & 31) & 1))
            continue;
        if ((rc = encode_word(encoding, p + start, i - start)))
            return rc;
        start = i;
    }
    return start < n ? encode_word(encoding, p + start, n - start) : 0;
}

/* Whether a space is put in front of a segment: always, or not before one that is there, or only where the text begins. */
static bool wants_space(const struct encoding *encoding, struct kvg_str text)
{
    const struct kvg_tokenizer *tokenizer = encoding->tokenizer;
    bool spaced = text.bytes[0] == ' ' || (text.len >= 3 && memcmp(text.bytes, "\xe2\x96\x81", 3) == 0);

    return tokenizer->add_space_prefix && !(tokenizer->space_prefix_once && spaced) &&
           !(tokenizer->space_prefix_first && !encoding->at_start);
}

/* A segment without added tokens, as SentencePiece reads it: "▁" is a space, and one space is put in front. */
static int encode_sentence_piece(struct encoding *encoding, struct kvg_str text)
{
    bool prefix = wants_space(encoding, text), escaped = memmem(text.bytes, text.len, "\xe2\x96\x81", 3) != NULL;
    size_t n = 0;
    char *bytes;

    if (!prefix && !escaped)
        return encode_pieces(encoding, (const uint8_t *)text.bytes, text.len);
    bytes = kvg_arena_alloc(encoding->list.arena, text.len + 1);
    if (!bytes)
        return KVG_NOMEM;
    if (prefix)
        bytes[n++] = ' ';
    for (size_t i = 0; escaped && i < text.len;) {
        bool space = text.len - i >= 3 && memcmp(text.bytes + i, "\xe2\x96\x81", 3) == 0;
        bytes[n++] = space ? ' ' : text.bytes[i];
        i += space ? 3 : 1;
    }
    if (!escaped) {
        memcpy(bytes + n, text.bytes, text.len);
        n += text.len;
    }
    return encode_pieces(encoding, (const uint8_t *)bytes, n);
}

static int encode_plain(struct encoding *encoding, struct kvg_str text)
{
    const struct kvg_tokenizer *tokenizer = encoding->tokenizer;

    encoding->list.segment_start = encoding->list.n;
    if (text.len == 0)
        return 0;
    if (tokenizer->family == KVG_SENTENCE_PIECE)
        return encode_sentence_piece(encoding, text);
    if (tokenizer->nfc && kvg_nfc(tokenizer, text, encoding->list.arena, &text))
        return KVG_NOMEM;
    return kvg_pre_split(tokenizer, (const uint8_t *)text.bytes, text.len, encode_word, encoding);
}

/* encode_plain, or what it gave for the same bytes before: its result depends on nothing else but, for some, `at_start`. */
static int encode_segment(struct encoding *encoding, const char *bytes, size_t n)
{
    struct kvg_id_list *list = &encoding->list;
    const struct kvg_segment *segment;
    size_t before = list->n;
    uint64_t hash;
    int rc;

    if (!encoding->memory || n < REMEMBERED_BYTES || (encoding->at_start && encoding->tokenizer->space_prefix_first))
        return encode_plain(encoding, (struct kvg_str){bytes, n});
    segment = kvg_segment_find(encoding->memory, bytes, n, &hash);
    if (!segment) {
        rc = encode_plain(encoding, (struct kvg_str){bytes, n});
        if (!rc)
            kvg_segment_add(encoding->memory, bytes, n, hash, list->ids + before, list->n - before);
        return rc;
    }
    rc = kvg_id_list_reserve(list, segment->n);
    if (!rc && segment->n) {
        memcpy(list->ids + list->n, segment->ids, segment->n * sizeof *segment->ids);
        list->n += segment->n;
    }
    kvg_segment_release(segment);
    return rc;
}

static int encode_text(struct encoding *encoding, const struct kvg_text *text)
{
    struct kvg_run_cursor cursor = {text, 0, 0};
    size_t from = 0;

    while (from < text->len) {
        struct kvg_added_match match = kvg_added_next(encoding->tokenizer, &cursor, from);
        encoding->at_start = from == 0;
        if (encode_segment(encoding, text->bytes + from, match.start - from))
            return KVG_NOMEM;
        if (match.id == KVG_NO_TOKEN)
            break;
        if (kvg_id_list_reserve(&encoding->list, 1))
            return KVG_NOMEM;
        encoding->list.ids[encoding->list.n++] = match.id;
        from = match.end;
    }
    return 0;
}

int kvg_tokenize(const struct kvg_tokenizer *tokenizer, const struct kvg_text *text, int flags, struct kvg_arena *arena,
                 struct kvg_ids *out, struct kvg_error *err)
{
    return kvg_tokenize_remembering(tokenizer, NULL, text, flags, arena, out, err);
}

int kvg_tokenize_remembering(const struct kvg_tokenizer *tokenizer, struct kvg_segment_memory *memory,
                             const struct kvg_text *text, int flags, struct kvg_arena *arena, struct kvg_ids *out,
                             struct kvg_error *err)
{
    struct encoding encoding = {tokenizer, memory, {.arena = arena}};
    struct kvg_id_list *list = &encoding.list;
    bool bos = (flags & KVG_ADD_BOS) && tokenizer->info.add_bos;

    if (kvg_id_list_reserve(list, text->len / 3 + 16))
        return kvg_fail(err, KVG_NOMEM, "out of memory for the ids of %zu bytes", text->len);
    if (bos)
        list->ids[list->n++] = tokenizer->info.bos;
    if (encode_text(&encoding, text) || kvg_id_list_reserve(list, 1))
        return kvg_fail(err, KVG_NOMEM, "out of memory for the ids of %zu bytes", text->len);
    if ((flags & KVG_ADD_EOS) && tokenizer->info.add_eos)
        list->ids[list->n++] = tokenizer->info.eos;
    if (bos && list->n > 1 && list->ids[1] == tokenizer->info.bos)
        list->ids++, list->n--;
    *out = (struct kvg_ids){list->ids, list->n};
    return 0;
}

/* ---- asking ---- */

const struct kvg_vocab_info *kvg_tokenizer_info(const struct kvg_tokenizer *tokenizer)
{
    return &tokenizer->info;
}

bool kvg_tokenizer_drops_first_space(const struct kvg_tokenizer *tokenizer)
{
    return tokenizer->family == KVG_SENTENCE_PIECE && tokenizer->add_space_prefix;
}

struct kvg_str kvg_token_bytes(const struct kvg_tokenizer *tokenizer, uint32_t id, bool special)
{
    struct kvg_str none = {"", 0};
    uint8_t kind;

    if (id >= tokenizer->vocab.n)
        return none;
    kind = tokenizer->vocab.kinds[id];
    if (!special && (kind == KVG_TOKEN_CONTROL || kind == KVG_TOKEN_UNKNOWN))
        return none;
    return tokenizer->vocab.bytes[id];
}

enum kvg_token_kind kvg_token_kind(const struct kvg_tokenizer *tokenizer, uint32_t id)
{
    return id < tokenizer->vocab.n ? (enum kvg_token_kind)tokenizer->vocab.kinds[id] : KVG_TOKEN_UNUSED;
}

struct kvg_str kvg_token_text(const struct kvg_tokenizer *tokenizer, uint32_t id)
{
    return id < tokenizer->vocab.n ? tokenizer->vocab.texts[id] : (struct kvg_str){NULL, 0};
}

uint32_t kvg_token_find(const struct kvg_tokenizer *tokenizer, const char *text, size_t len)
{
    return kvg_vocab_find(&tokenizer->vocab, text, len);
}
