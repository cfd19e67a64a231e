/* The merge table, and the merging of one word (Sennrich et al. 2016): again and again the pair of neighbours with the lowest
 * rank, the leftmost of equals, becomes one symbol. Short words by scanning an array; long ones by a heap over a linked list,
 * so that a hostile word of n bytes costs O(n log n). */
#include "libprompt/tokenizer_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FREE_SLOT UINT64_MAX

static uint32_t slot_of(const struct kvg_merges *merges, uint64_t key)
{
    return (uint32_t)(key * 0x9e3779b97f4a7c15u >> merges->shift);
}

uint32_t kvg_merges_rank(const struct kvg_merges *merges, uint32_t left, uint32_t right)
{
    uint64_t key = (uint64_t)left << 20 | right, slot;

    for (uint32_t at = slot_of(merges, key); (slot = merges->slots[at]) != FREE_SLOT; at = (at + 1) & merges->mask) {
        if (slot >> 24 == key)
            return (uint32_t)slot & 0xffffff;
    }
    return KVG_NO_RANK;
}

/* The first of two equal pairs keeps its rank: it is the lower one. */
static void add_pair(struct kvg_merges *merges, uint32_t left, uint32_t right, uint32_t rank)
{
    uint64_t key = (uint64_t)left << 20 | right;
    uint32_t at = slot_of(merges, key);

    while (merges->slots[at] != FREE_SLOT && merges->slots[at] >> 24 != key)
        at = (at + 1) & merges->mask;
    if (merges->slots[at] == FREE_SLOT)
        merges->slots[at] = key << 24 | rank;
}

static int allocate_slots(struct kvg_merges *merges, uint64_t n_pairs, uint32_t n_ranks, struct kvg_error *err)
{
    uint64_t n_slots = 1024;

    while (n_slots < n_pairs * 2)
        n_slots *= 2;
    merges->slots = malloc(n_slots * sizeof *merges->slots);
    merges->merged = malloc(((size_t)n_ranks + 1) * sizeof *merges->merged);
    if (!merges->slots || !merges->merged)
        return kvg_fail(err, KVG_NOMEM, "tokenizer: out of memory for %" PRIu64 " merges", n_pairs);
    memset(merges->slots, 0xff, n_slots * sizeof *merges->slots);
    merges->mask = (uint32_t)n_slots - 1;
    merges->shift = 64 - (uint32_t)__builtin_ctzll(n_slots);
    return 0;
}

/* One line "LEFT RIGHT": the texts of two tokens; the separator is the first space that is not the first byte. */
static int load_merge(struct kvg_merges *merges, const struct kvg_vocab *vocab, struct kvg_str line, struct kvg_error *err)
{
    const char *space = line.len > 1 ? memchr(line.bytes + 1, ' ', line.len - 1) : NULL;
    char joined[8192];
    size_t left, right;
    uint32_t ids[3];

    if (!space)
        return kvg_fail(err, KVG_FILE, "tokenizer.ggml.merges: entry %u has no space between two parts", merges->n);
    left = (size_t)(space - line.bytes);
    right = line.len - left - 1;
    if (left + right > sizeof joined)
        return kvg_fail(err, KVG_FILE, "tokenizer.ggml.merges: entry %u has %zu bytes, at most %zu are supported", merges->n,
                        line.len, sizeof joined);
    memcpy(joined, line.bytes, left);
    memcpy(joined + left, space + 1, right);
    ids[0] = kvg_vocab_find(vocab, joined, left);
    ids[1] = kvg_vocab_find(vocab, joined + left, right);
    ids[2] = kvg_vocab_find(vocab, joined, left + right);
    merges->merged[merges->n] = ids[2];
    if (ids[0] != KVG_NO_TOKEN && ids[1] != KVG_NO_TOKEN && ids[2] != KVG_NO_TOKEN)
        add_pair(merges, ids[0], ids[1], merges->n);
    merges->n++;
    return 0;
}

int kvg_merges_load(struct kvg_merges *merges, const struct kvg_gguf *gguf, const struct kvg_vocab *vocab, struct kvg_error *err)
{
    const struct kvg_gguf_value *lines = kvg_gguf_find(gguf, "tokenizer.ggml.merges");
    const unsigned char *cursor;
    int rc;

    if (!lines || lines->type != KVG_GGUF_ARRAY || lines->item_type != KVG_GGUF_STRING)
        return kvg_fail(err, KVG_FILE, "tokenizer.ggml.merges is missing or no array of strings");
    if (lines->n > KVG_MAX_MERGES)
        return kvg_fail(err, KVG_FILE, "tokenizer.ggml.merges has %" PRIu64 " entries, at most %d are supported", lines->n,
                        KVG_MAX_MERGES);
    rc = allocate_slots(merges, lines->n, (uint32_t)lines->n, err);
    cursor = lines->bytes;
    for (uint64_t i = 0; !rc && i < lines->n; i++)
        rc = load_merge(merges, vocab, kvg_gguf_next_string(&cursor), err);
    return rc;
}

struct scored {
    float score;
    uint32_t id;
};

static int best_first(const void *a, const void *b)
{
    const struct scored *x = a, *y = b;

    if (x->score != y->score)
        return x->score > y->score ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

static int rank_by_score(struct kvg_merges *merges, const struct kvg_gguf *gguf, const struct kvg_vocab *vocab,
                         struct kvg_error *err)
{
    const struct kvg_gguf_value *scores = kvg_gguf_find(gguf, "tokenizer.ggml.scores");
    struct scored *order;

    if (!scores || scores->type != KVG_GGUF_ARRAY || scores->item_type != KVG_GGUF_F32 || scores->n != vocab->n)
        return kvg_fail(err, KVG_FILE, "tokenizer.ggml.scores must be an array of %u floats, one a token", vocab->n);
    order = malloc(vocab->n * sizeof *order);
    if (!order)
        return kvg_fail(err, KVG_NOMEM, "tokenizer: out of memory for %u scores", vocab->n);
    merges->n = 0;
    for (uint32_t id = 0; id < vocab->n; id++) {
        float score;
        memcpy(&score, scores->bytes + (size_t)id * 4, 4);
        if (vocab->kinds[id] == KVG_TOKEN_NORMAL)
            order[merges->n++] = (struct scored){isnan(score) ? -INFINITY : score, id};
    }
    qsort(order, merges->n, sizeof *order, best_first);
    for (uint32_t rank = 0; rank < merges->n; rank++)
        merges->merged[rank] = order[rank].id;
    free(order);
    return 0;
}

int kvg_merges_from_scores(struct kvg_merges *merges, const struct kvg_gguf *gguf, const struct kvg_vocab *vocab,
                           const struct kvg_words *words, struct kvg_error *err)
{
    uint64_t n_pairs = 0;
    int rc;

    for (uint32_t id = 0; id < vocab->n; id++)
        n_pairs += vocab->kinds[id] == KVG_TOKEN_NORMAL ? vocab->bytes[id].len / 2 + 1 : 0;
    if (n_pairs > KVG_MAX_MERGES)
        return kvg_fail(err, KVG_FILE, "tokenizer: %" PRIu64 " possible merges, at most %d are supported", n_pairs,
                        KVG_MAX_MERGES);
    if ((rc = allocate_slots(merges, n_pairs, vocab->n, err)) || (rc = rank_by_score(merges, gguf, vocab, err)))
        return rc;
    n_pairs = 0;
    for (uint32_t rank = 0; rank < merges->n; rank++) {
        const struct kvg_str token = vocab->bytes[merges->merged[rank]];
        const uint8_t *bytes = (const uint8_t *)token.bytes;
        for (size_t cut = 1; cut < token.len && n_pairs < merges->mask / 4 * 3u; cut++) {
            uint32_t left, right;
            if ((bytes[cut] & 0xc0) == 0x80 || (left = kvg_words_find(words, bytes, cut)) == KVG_NO_TOKEN ||
                (right = kvg_words_find(words, bytes + cut, token.len - cut)) == KVG_NO_TOKEN)
                continue;
            add_pair(merges, left, right, rank);
            n_pairs++;
        }
    }
    return 0;
}

void kvg_merges_free(struct kvg_merges *merges)
{
    free(merges->slots);
    free(merges->merged);
    free(merges->byte_ranks);
}

int kvg_id_list_reserve(struct kvg_id_list *list, size_t more)
{
    size_t cap = list->cap * 2 + 64;
    uint32_t *ids;

    if (list->cap - list->n >= more)
        return 0;
    if (cap < list->n + more)
        cap = list->n + more;
    ids = kvg_arena_grow(list->arena, list->ids, list->cap * sizeof *ids, cap * sizeof *ids);
    if (!ids)
        return KVG_NOMEM;
    list->ids = ids;
    list->cap = cap;
    return 0;
}

/* ---- one word ---- */

enum { SHORT_SYMBOLS = 48, UNKNOWN_SYMBOL = 0xfffff /* never in the merge table: the last id of the largest vocabulary */ };

static uint32_t pair_rank(const struct kvg_merges *merges, uint32_t left, uint32_t right)
{
    if (left >= UNKNOWN_SYMBOL || right >= UNKNOWN_SYMBOL)
        return KVG_NO_RANK;
    return kvg_merges_rank(merges, left, right);
}

/* Merges ids[0..n) in place; ranks[i] is the rank of (i, i + 1), n - 1 of them. spans (may be NULL) are the symbols' byte
 * lengths. Returns the symbols left. */
static size_t merge_short(const struct kvg_merges *merges, uint32_t *ids, uint32_t *ranks, uint32_t *spans, size_t n)
{
    while (n > 1) {
        uint32_t best = ranks[0];
        size_t at = 0;
        for (size_t i = 1; i + 1 < n; i++) {
            if (ranks[i] < best) {
                best = ranks[i];
                at = i;
            }
        }
        if (best == KVG_NO_RANK)
            break;
        ids[at] = merges->merged[best];
        memmove(ids + at + 1, ids + at + 2, (n - at - 2) * sizeof *ids);
        if (spans) {
            spans[at] += spans[at + 1];
            memmove(spans + at + 1, spans + at + 2, (n - at - 2) * sizeof *spans);
        }
        if (at + 2 < n)
            memmove(ranks + at, ranks + at + 1, (n - at - 2) * sizeof *ranks);
        n--;
        if (at + 1 < n)
            ranks[at] = pair_rank(merges, ids[at], ids[at + 1]);
        if (at > 0)
            ranks[at - 1] = pair_rank(merges, ids[at - 1], ids[at]);
    }
    return n;
}

/* A long word: symbols in a doubly linked list by index, candidate pairs in a binary heap ordered by (rank, position). An
 * entry is stale when the pair at its position has another rank now. */
struct long_word {
    uint32_t *ids, *spans, *next, *previous;
    uint64_t *heap; /* rank << 32 | position of the left symbol */
    size_t n_heap;
};

static void heap_push(struct long_word *word, uint32_t rank, uint32_t position)
{
    uint64_t entry = (uint64_t)rank << 32 | position;
    size_t i = word->n_heap++;

    for (; i && word->heap[(i - 1) / 2] > entry; i = (i - 1) / 2)
        word->heap[i] = word->heap[(i - 1) / 2];
    word->heap[i] = entry;
}

static uint64_t heap_pop(struct long_word *word)
{
    uint64_t top = word->heap[0], last = word->heap[--word->n_heap];
    size_t i = 0, child;

    while ((child = 2 * i + 1) < word->n_heap) {
        child += child + 1 < word->n_heap && word->heap[child + 1] < word->heap[child];
        if (word->heap[child] >= last)
            break;
        word->heap[i] = word->heap[child];
        i = child;
    }
    word->heap[i] = last;
    return top;
}

enum { NO_SYMBOL = 0xffffffffu };

static void push_pair(const struct kvg_merges *merges, struct long_word *word, uint32_t left)
{
    uint32_t rank;

    if (left == NO_SYMBOL || word->next[left] == NO_SYMBOL)
        return;
    rank = pair_rank(merges, word->ids[left], word->ids[word->next[left]]);
    if (rank != KVG_NO_RANK)
        heap_push(word, rank, left);
}

static void merge_long(const struct kvg_merges *merges, struct long_word *word, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        word->previous[i] = i ? (uint32_t)i - 1 : NO_SYMBOL;
        word->next[i] = i + 1 < n ? (uint32_t)i + 1 : NO_SYMBOL;
    }
    for (size_t i = 0; i + 1 < n; i++)
        push_pair(merges, word, (uint32_t)i);
    while (word->n_heap) {
        uint64_t entry = heap_pop(word);
        uint32_t left = (uint32_t)entry, rank = (uint32_t)(entry >> 32), right;
        if (word->spans[left] == 0 || (right = word->next[left]) == NO_SYMBOL ||
            pair_rank(merges, word->ids[left], word->ids[right]) != rank)
            continue;
        word->ids[left] = merges->merged[rank];
        word->spans[left] += word->spans[right];
        word->spans[right] = 0; /* dead */
        word->next[left] = word->next[right];
        if (word->next[right] != NO_SYMBOL)
            word->previous[word->next[right]] = left;
        push_pair(merges, word, left);
        push_pair(merges, word, word->previous[left]);
    }
}

/* The ids of a symbol: its own, or for an unknown one those of its bytes, or one unknown token for a whole run of them. */
static void emit_symbol(const struct kvg_tokenizer *tokenizer, uint32_t id, const uint8_t *bytes, uint32_t span,
                        struct kvg_id_list *out)
{
    bool known = true;

    if (id != UNKNOWN_SYMBOL) {
        out->ids[out->n++] = id;
        return;
    }
    for (uint32_t i = 0; i < span; i++)
        known = known && tokenizer->byte_ids[bytes[i]] != KVG_NO_TOKEN;
    if (known) {
        for (uint32_t i = 0; i < span; i++)
            out->ids[out->n++] = tokenizer->byte_ids[bytes[i]];
    } else if (tokenizer->unk != KVG_NO_TOKEN && (out->n == out->segment_start || out->ids[out->n - 1] != tokenizer->unk)) {
        out->ids[out->n++] = tokenizer->unk;
    }
}

/* Splits the word into its first symbols: bytes, or characters. Returns how many. A byte that a byte-level vocabulary lacks
 * vanishes and its neighbours meet, as in the reference. */
static size_t first_symbols(const struct kvg_tokenizer *tokenizer, const uint8_t *word, size_t n, uint32_t *ids, uint32_t *spans)
{
    size_t count = 0;

    for (size_t i = 0; i < n;) {
        unsigned len = 1;
        uint32_t id = tokenizer->byte_ids[word[i]];
        if (tokenizer->family == KVG_SENTENCE_PIECE) {
            kvg_decode(word + i, word + n, &len);
            id = kvg_words_find(&tokenizer->words, word + i, len);
        }
        i += len;
        if (id == KVG_NO_TOKEN && tokenizer->family == KVG_BYTE_LEVEL)
            continue;
        ids[count] = id == KVG_NO_TOKEN ? UNKNOWN_SYMBOL : id;
        spans[count++] = len;
    }
    return count;
}

static int encode_long(const struct kvg_tokenizer *tokenizer, const uint8_t *word, size_t n, struct kvg_id_list *out)
{
    struct long_word w = {0};
    uint32_t *block = malloc(n * 4 * sizeof *block);
    size_t count;

    /* Each merge pushes at most two pairs, and there are fewer than n merges. */
    w.heap = malloc(n * 3 * sizeof *w.heap);
    if (!block || !w.heap) {
        free(block);
        free(w.heap);
        return KVG_NOMEM;
    }
    w.ids = block;
    w.spans = block + n;
    w.next = block + 2 * n;
    w.previous = block + 3 * n;
    count = first_symbols(tokenizer, word, n, w.ids, w.spans);
    merge_long(&tokenizer->merges, &w, count);
    for (uint32_t i = count ? 0 : NO_SYMBOL; i != NO_SYMBOL; i = w.next[i]) {
        emit_symbol(tokenizer, w.ids[i], word, w.spans[i], out);
        word += w.spans[i];
    }
    free(block);
    free(w.heap);
    return 0;
}

static bool lacks_bytes(const struct kvg_tokenizer *tokenizer, const uint8_t *word, size_t n)
{
    for (size_t i = 0; tokenizer->lacks_bytes && i < n; i++) {
        if (tokenizer->byte_ids[word[i]] == KVG_NO_TOKEN)
            return true;
    }
    return false;
}

/* A byte-level word whose bytes all have tokens: the ranks of the first pairs come from a table. */
static size_t merge_bytes(const struct kvg_tokenizer *tokenizer, const uint8_t *word, size_t n, uint32_t *ids)
{
    uint32_t ranks[SHORT_SYMBOLS];

    for (size_t i = 0; i < n; i++)
        ids[i] = tokenizer->byte_ids[word[i]];
    for (size_t i = 0; i + 1 < n; i++)
        ranks[i] = tokenizer->merges.byte_ranks[word[i] << 8 | word[i + 1]];
    return merge_short(&tokenizer->merges, ids, ranks, NULL, n);
}

static int encode_short(const struct kvg_tokenizer *tokenizer, const uint8_t *word, size_t n, struct kvg_id_list *out)
{
    uint32_t ids[SHORT_SYMBOLS], spans[SHORT_SYMBOLS], ranks[SHORT_SYMBOLS];
    size_t count;

    if (tokenizer->merges.byte_ranks && !lacks_bytes(tokenizer, word, n)) {
        out->n += merge_bytes(tokenizer, word, n, out->ids + out->n);
        return 0;
    }
    count = first_symbols(tokenizer, word, n, ids, spans);
    for (size_t i = 0; i + 1 < count; i++)
        ranks[i] = pair_rank(&tokenizer->merges, ids[i], ids[i + 1]);
    count = merge_short(&tokenizer->merges, ids, ranks, spans, count);
    for (size_t i = 0; i < count; i++) {
        emit_symbol(tokenizer, ids[i], word, spans[i], out);
        word += spans[i];
    }
    return 0;
}

static int encode_merged(const struct kvg_tokenizer *tokenizer, const uint8_t *word, size_t n, struct kvg_id_list *out)
{
    return n <= SHORT_SYMBOLS ? encode_short(tokenizer, word, n, out) : encode_long(tokenizer, word, n, out);
}

int kvg_word_encode(const struct kvg_tokenizer *tokenizer, const uint8_t *word, size_t n, struct kvg_id_list *out)
{
    uint32_t id = kvg_words_find(&tokenizer->words, word, n);
    size_t before = out->n;
    uint8_t whole;
    int rc;

    if (kvg_id_list_reserve(out, n + 1))
        return KVG_NOMEM;
    whole = id == KVG_NO_TOKEN ? 2 : atomic_load_explicit(&tokenizer->whole[id], memory_order_relaxed);
    if (whole == 1) {
        out->ids[out->n++] = id;
        return 0;
    }
    rc = encode_merged(tokenizer, word, n, out);
    if (whole == 0 && !rc)
        atomic_store_explicit(&tokenizer->whole[id], out->n == before + 1 && out->ids[before] == id ? 1 : 2,
                              memory_order_relaxed);
    return rc;
}
