/* Storing keys and values, and attention, on v16.h's types: part of kernels.inc.h, compiled once per instruction set.
 *
 *   k [block_size / 16][head_dim][16 keys]: a lane is a key      v [block_size][head_dim]: a lane is a dimension
 *
 * 64 keys are made f32 once for all rows of a tile; only that and storing depend on how they are kept.
 */
#pragma once
#include "gpu-worker/backend/cpu/attention.h"
#include "gpu-worker/backend/cpu/v16.h"

/* ---- storing ---- */

V_INLINE uint16_t *key_slot(const struct kv_layer *kv, struct kv_head_at at, uint32_t slot)
{
    return (uint16_t *)at.k + (size_t)(slot / KV_PAGE) * KV_PAGE * kv->head_dim + slot % KV_PAGE;
}

static void store_f16(const struct kv_layer *kv, uint32_t block, uint32_t slot, uint32_t kv_head, const float *k, const float *v)
{
    struct kv_head_at at = kv_head_at(kv, block, kv_head);
    uint16_t *keys = key_slot(kv, at, slot), *values = (uint16_t *)at.v + (size_t)slot * kv->head_dim, half[16];
    for (uint32_t d = 0; d < kv->head_dim; d += 16) {
        v16_to_f16(half, v16_load(k + d));
        for (uint32_t i = 0; i < 16; i++)
            keys[(d + i) * KV_PAGE] = half[i];
        v16_to_f16(values + d, v16_load(v + d));
    }
}

static void store_bf16(const struct kv_layer *kv, uint32_t block, uint32_t slot, uint32_t kv_head, const float *k, const float *v)
{
    struct kv_head_at at = kv_head_at(kv, block, kv_head);
    uint16_t *keys = key_slot(kv, at, slot), *values = (uint16_t *)at.v + (size_t)slot * kv->head_dim;
    for (uint32_t d = 0; d < kv->head_dim; d++) {
        keys[(size_t)d * KV_PAGE] = f32_to_bf16(k[d]);
        values[d] = f32_to_bf16(v[d]);
    }
}

/* q = rne(x * 127 / amax); returns amax / 127. */
V_INLINE float quantize_head(const float *x, uint32_t head_dim, int8_t *q)
{
    v16 high = v16_set1(0);
    for (uint32_t d = 0; d < head_dim; d += 16)
        high = v16_max(high, v16_abs(v16_load(x + d)));
    float amax = v16_hmax(high);
    v16 inverse = v16_set1(amax > 0 ? 127.0f / amax : 0);
    for (uint32_t d = 0; d < head_dim; d += 16)
        v16_to_i8(q + d, v16_mul(v16_load(x + d), inverse));
    return amax / 127.0f;
}

static void store_int8(const struct kv_layer *kv, uint32_t block, uint32_t slot, uint32_t kv_head, const float *k, const float *v)
{
    struct kv_head_at at = kv_head_at(kv, block, kv_head);
    int8_t *keys = (int8_t *)at.k + (size_t)(slot / KV_PAGE) * KV_PAGE * kv->head_dim + slot % KV_PAGE, q[MAX_HEAD_DIM];
    at.k_scales[slot] = quantize_head(k, kv->head_dim, q);
    for (uint32_t d = 0; d < kv->head_dim; d++)
        keys[(size_t)d * KV_PAGE] = q[d];
    at.v_scales[slot] = quantize_head(v, kv->head_dim, (int8_t *)at.v + (size_t)slot * kv->head_dim);
}

/* ---- reading ---- */

V_INLINE v16 load_kv(enum backend_kv_dtype dtype, const uint8_t *values, size_t i)
{
    if (dtype == KV_F16)
        return v16_from_f16((const uint16_t *)values + i);
    if (dtype == KV_BF16)
        return v16_from_bf16((const uint16_t *)values + i);
    return v16_from_i8((const int8_t *)values + i);
}

/* Keys that no row sees may be anything; values of such keys are not read. What the next step needs is fetched meanwhile. */
V_INLINE void read_keys(enum backend_kv_dtype dtype, struct vector_scratch *s, const struct kv_layer *kv,
                        const struct key_pages *pages, const struct key_pages *next)
{
    uint32_t line = 64 / kv->value_bytes;
    float *k = s->k;
    for (uint32_t page = 0; page < pages->n_pages; page++) {
        const uint8_t *from = pages->page[page].k, *fetch = page < next->n_pages ? next->page[page].k : from;
        v16 scale = dtype == KV_INT8 ? v16_load(pages->page[page].k_scales) : v16_set1(0);
        for (uint32_t i = 0; i < kv->head_dim * KV_PAGE; i += KV_PAGE, k += KV_PAGE) {
            v16 x = load_kv(dtype, from, i);
            if (i % line == 0)
                v_prefetch(fetch + (size_t)i * kv->value_bytes);
            v16_store(k, dtype == KV_INT8 ? v16_mul(x, scale) : x);
        }
    }
}

V_INLINE void read_values(enum backend_kv_dtype dtype, struct vector_scratch *s, const struct kv_layer *kv,
                          const struct key_pages *pages, const struct key_pages *next)
{
    uint32_t line = 64 / kv->value_bytes, head_dim = kv->head_dim;
    float *v = s->v;
    for (uint32_t key = 0; key < pages->n_keys; key++, v += head_dim) {
        uint32_t page = key / KV_PAGE;
        size_t at = ((size_t)pages->page[page].slot + key % KV_PAGE) * head_dim * kv->value_bytes;
        const uint8_t *from = pages->page[page].v + at, *fetch = from;
        if (page < next->n_pages)
            fetch = next->page[page].v + ((size_t)next->page[page].slot + key % KV_PAGE) * head_dim * kv->value_bytes;
        v16 scale = dtype == KV_INT8 ? v16_set1(pages->page[page].v_scales[key % KV_PAGE]) : v16_set1(0);
        for (uint32_t d = 0; d < head_dim; d += 16) {
            v16 x = load_kv(dtype, from, d);
            if (d % line == 0)
                v_prefetch(fetch + (size_t)d * kv->value_bytes);
            v16_store(v + d, dtype == KV_INT8 ? v16_mul(x, scale) : x);
        }
    }
}

/* ---- scores, softmax, values ---- */

/* p[row][16 (page + j)..] = q[row] . k for n rows and m pages; each lane (a key) sums over head_dim in order. */
V_INLINE void score_pages(struct vector_scratch *s, uint32_t page, uint32_t head_dim, uint32_t row, int n, int m)
{
    v16 acc[V_ATTENTION_ROWS][4];
    const float *q = s->q + (size_t)row * head_dim, *k = s->k + (size_t)page * KV_PAGE * head_dim;
    for (int r = 0; r < n; r++)
        for (int j = 0; j < m; j++)
            acc[r][j] = v16_set1(0);
    for (uint32_t d = 0; d < head_dim; d++) {
        v16 keys[4];
        for (int j = 0; j < m; j++)
            keys[j] = v16_load(k + ((size_t)j * head_dim + d) * KV_PAGE);
        for (int r = 0; r < n; r++)
            for (int j = 0; j < m; j++)
                acc[r][j] = v16_fma(v16_set1(q[(size_t)r * head_dim + d]), keys[j], acc[r][j]);
    }
    for (int r = 0; r < n; r++)
        for (int j = 0; j < m; j++)
            v16_store(s->p[row + (uint32_t)r] + (page + (uint32_t)j) * KV_PAGE, acc[r][j]);
}

V_INLINE void scores(struct vector_scratch *s, uint32_t n_pages, uint32_t head_dim, uint32_t row, int n, int width)
{
    uint32_t page = 0;
    if (width >= 4)
        for (; page + 4 <= n_pages; page += 4)
            score_pages(s, page, head_dim, row, n, 4);
    if (width >= 2)
        for (; page + 2 <= n_pages; page += 2)
            score_pages(s, page, head_dim, row, n, 2);
    for (; page < n_pages; page++)
        score_pages(s, page, head_dim, row, n, 1);
}

/* o[row] = o[row] * f[row] + sum over keys p[row][key] v[key], for n rows and m vectors of 16 dimensions from dimension d. */
V_INLINE void add_values(const struct vector_scratch *s, float *o, uint32_t n_keys, uint32_t head_dim, uint32_t row, int n,
                         uint32_t d, int m)
{
    v16 acc[V_ATTENTION_ROWS][4];
    const float *v = s->v + d;
    o += (size_t)row * head_dim + d;
    for (int r = 0; r < n; r++)
        for (int j = 0; j < m; j++)
            acc[r][j] = v16_mul(v16_load(o + (size_t)r * head_dim + 16 * j), v16_set1(s->f[row + (uint32_t)r]));
    for (uint32_t key = 0; key < n_keys; key++, v += head_dim) {
        v16 values[4];
        for (int j = 0; j < m; j++)
            values[j] = v16_load(v + 16 * j);
        for (int r = 0; r < n; r++)
            for (int j = 0; j < m; j++)
                acc[r][j] = v16_fma(v16_set1(s->p[row + (uint32_t)r][key]), values[j], acc[r][j]);
    }
    for (int r = 0; r < n; r++)
        for (int j = 0; j < m; j++)
            v16_store(o + (size_t)r * head_dim + 16 * j, acc[r][j]);
}

V_INLINE void values(const struct vector_scratch *s, float *o, uint32_t n_keys, uint32_t head_dim, uint32_t row, int n, int width)
{
    uint32_t d = 0;
    if (width >= 4)
        for (; d + 64 <= head_dim; d += 64)
            add_values(s, o, n_keys, head_dim, row, n, d, 4);
    if (width >= 2)
        for (; d + 32 <= head_dim; d += 32)
            add_values(s, o, n_keys, head_dim, row, n, d, 2);
    for (; d < head_dim; d += 16)
        add_values(s, o, n_keys, head_dim, row, n, d, 1);
}

/* One row of online softmax (Milakov and Gimelshein 2018) over a tile of 64 keys of which it sees low..n - 1. A row that sees
 * none stays as it is. */
V_INLINE void softmax_row(struct vector_scratch *s, const struct attention_state *state, uint32_t row, int low, int n)
{
    v16 x[KEY_TILE / 16], lowest = v16_set1(-1e30f), zero = v16_set1(0);
    for (int j = 0; j < KEY_TILE / 16; j++)
        x[j] = v16_first(low - 16 * j, lowest, v16_first(n - 16 * j, v16_load(s->p[row] + 16 * j), lowest));
    float high = v16_hmax(v16_max(v16_max(x[0], x[1]), v16_max(x[2], x[3]))), old = state->m[row];
    float m = high > old ? high : old, *l = state->l + (size_t)row * 16;
    for (int j = 0; j < KEY_TILE / 16; j++) {
        x[j] = v16_first(low - 16 * j, zero, v16_first(n - 16 * j, v16_exp2(v16_sub(x[j], v16_set1(m))), zero));
        v16_store(s->p[row] + 16 * j, x[j]);
    }
    v16 f = m == old ? v16_set1(1) : v16_exp2(v16_set1(old - m));
    state->m[row] = m;
    v16_store_n(&s->f[row], f, 1);
    v16_store(l, v16_fma(v16_load(l), f, v16_add(v16_add(x[0], x[1]), v16_add(x[2], x[3]))));
}

V_INLINE int page_width(int rows)
{
    int registers = V_ATTENTION_ROWS >= 8 ? 16 : V_ATTENTION_ROWS >= 4 ? 5 : 1;
    return registers / rows >= 4 ? 4 : registers / rows >= 2 ? 2 : 1;
}

/* One copy of the code for each number of rows up to the most. */
#define ROW_CASE(n, call)                                                                                                        \
    case n:                                                                                                                      \
        if (V_ATTENTION_ROWS >= n)                                                                                               \
            call(n);                                                                                                             \
        break;
#define ROW_CASES(call)                                                                                                          \
    switch (n) {                                                                                                                 \
        ROW_CASE(1, call)                                                                                                        \
        ROW_CASE(2, call)                                                                                                        \
        ROW_CASE(3, call)                                                                                                        \
        ROW_CASE(4, call)                                                                                                        \
        ROW_CASE(5, call)                                                                                                        \
        ROW_CASE(6, call)                                                                                                        \
        ROW_CASE(7, call)                                                                                                        \
        ROW_CASE(8, call)                                                                                                        \
    }

static void score_rows(struct vector_scratch *s, uint32_t n_pages, uint32_t head_dim, uint32_t row, int n)
{
#define SCORES(rows) scores(s, n_pages, head_dim, row, rows, page_width(rows))
    ROW_CASES(SCORES)
}

static void value_rows(const struct vector_scratch *s, float *o, uint32_t n_keys, uint32_t head_dim, uint32_t row, int n)
{
#define VALUES(rows) values(s, o, n_keys, head_dim, row, rows, page_width(rows))
    ROW_CASES(VALUES)
}

/* 64 keys from `first` that lie in s->k and s->v as f32. */
static void attend_keys(const struct attention_tile *tile, struct vector_scratch *s, const struct attention_state *state,
                        uint32_t first, const struct key_pages *pages)
{
    uint32_t head_dim = tile->kv->head_dim;
    for (uint32_t r = 0; r < tile->n_rows; r += V_ATTENTION_ROWS) {
        int n = (int)(tile->n_rows - r < V_ATTENTION_ROWS ? tile->n_rows - r : V_ATTENTION_ROWS);
        score_rows(s, pages->n_pages, head_dim, r, n);
    }
    for (uint32_t r = 0; r < tile->n_rows; r++) {
        int64_t n = (int64_t)tile->position[r] + 1 - first;
        int64_t low = (int64_t)window_start(tile, r) - first;
        softmax_row(s, state, r, low > KEY_TILE ? KEY_TILE : low < 0 ? 0 : (int)low, n > KEY_TILE ? KEY_TILE : n < 0 ? 0 : (int)n);
    }
    for (uint32_t r = 0; r < tile->n_rows; r += V_ATTENTION_ROWS) {
        int n = (int)(tile->n_rows - r < V_ATTENTION_ROWS ? tile->n_rows - r : V_ATTENTION_ROWS);
        value_rows(s, state->o, pages->n_keys, head_dim, r, n);
    }
}

/* ---- segments ---- */

/* FlashAttention-2's loop (Dao 2023) over steps of 64 keys. */
V_INLINE void attend_segment(enum backend_kv_dtype dtype, const struct attention_tile *tile, struct vector_scratch *s,
                             uint32_t segment, const struct attention_state *state)
{
    uint32_t begin = segment * SEGMENT, end = tile->last < begin + SEGMENT - 1 ? tile->last : begin + SEGMENT - 1;
    for (uint32_t r = 0; r < tile->n_rows; r++) {
        for (uint32_t d = 0; d < tile->kv->head_dim; d += 16)
            v16_store(state->o + (size_t)r * tile->kv->head_dim + d, v16_set1(0));
        v16_store(state->l + (size_t)r * 16, v16_set1(0));
        state->m[r] = -1e30f;
    }
    uint32_t low = window_start(tile, 0); /* rows ascend: none sees a step before it */
    if (low > end)
        return;
    if (low > begin)
        begin += (low - begin) / KEY_TILE * KEY_TILE;
    struct key_pages pages = find_pages(tile, begin), next = pages;
    for (uint32_t first = begin; first <= end; first += KEY_TILE, pages = next) {
        if (tile->last - first >= KEY_TILE)
            next = find_pages(tile, first + KEY_TILE);
        read_keys(dtype, s, tile->kv, &pages, &next);
        read_values(dtype, s, tile->kv, &pages, &next);
        attend_keys(tile, s, state, first, &pages);
    }
}

/* total = total and then state, of each row. */
static void fold(const struct attention_tile *tile, const struct attention_state *total, const struct attention_state *state)
{
    uint32_t head_dim = tile->kv->head_dim;
    for (uint32_t r = 0; r < tile->n_rows; r++) {
        float a = total->m[r], b = state->m[r], m = a > b ? a : b;
        v16 x = m == a ? v16_set1(1) : v16_exp2(v16_set1(a - m)), y = m == b ? v16_set1(1) : v16_exp2(v16_set1(b - m));
        if (b == -1e30f) /* the row ends before this segment */
            continue;
        total->m[r] = m;
        float *l = total->l + (size_t)r * 16, *o = total->o + (size_t)r * head_dim, *p = state->o + (size_t)r * head_dim;
        v16_store(l, v16_fma(v16_load(l), x, v16_mul(v16_load(state->l + (size_t)r * 16), y)));
        for (uint32_t d = 0; d < head_dim; d += 16)
            v16_store(o + d, v16_fma(v16_load(o + d), x, v16_mul(v16_load(p + d), y)));
    }
}

static void finish(const struct attention_tile *tile, const struct attention_state *total)
{
    uint32_t head_dim = tile->kv->head_dim;
    for (uint32_t r = 0; r < tile->n_rows; r++) {
        v16 sum = v16_set1(v16_sum(v16_load(total->l + (size_t)r * 16)));
        for (uint32_t d = 0; d < head_dim; d += 16)
            v16_store(tile->out[r] + d, v16_div(v16_load(total->o + (size_t)r * head_dim + d), sum));
    }
}

static void take(const struct attention_tile *tile, const struct attention_state *to, const struct attention_state *from,
                 uint32_t first)
{
    size_t n = tile->n_rows, head_dim = tile->kv->head_dim;
    memcpy(to->o, from->o + first * head_dim, n * head_dim * sizeof *to->o);
    memcpy(to->l, from->l + first * 16, n * 16 * sizeof *to->l);
    memcpy(to->m, from->m + first, n * sizeof *to->m);
}

static void combine(const struct attention_tile *tile, const struct attention_state *states, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++)
        fold(tile, &states[0], &states[i]);
    finish(tile, &states[0]);
}

V_INLINE void attend(enum backend_kv_dtype dtype, const struct attention_tile *tile, struct attention_scratch *scratch,
                     const struct attention_state *partial)
{
    struct vector_scratch *s = &scratch->vector;
    uint32_t head_dim = tile->kv->head_dim;
    v16 scale = v16_set1(tile->scale * 0x1.715476p+0f); /* log2(e): exponentials are powers of 2 */
    for (uint32_t r = 0; r < tile->n_rows; r++)
        for (uint32_t d = 0; d < head_dim; d += 16)
            v16_store(s->q + (size_t)r * head_dim + d, v16_mul(v16_load(tile->q[r] + d), scale));
    if (partial) {
        for (uint32_t i = 0; i < tile->n_segments; i++)
            attend_segment(dtype, tile, s, tile->segment + i, &partial[i]);
        return;
    }
    struct attention_state total = attention_state_at(scratch->states[0], tile->n_rows, head_dim);
    struct attention_state state = attention_state_at(scratch->states[1], tile->n_rows, head_dim);
    uint32_t first = window_start(tile, 0) / SEGMENT;
    attend_segment(dtype, tile, s, first, &total);
    for (uint32_t segment = first + 1; segment <= tile->last / SEGMENT; segment++) {
        attend_segment(dtype, tile, s, segment, &state);
        fold(tile, &total, &state);
    }
    finish(tile, &total);
}

#define ATTEND(name, dtype)                                                                                                      \
    static void name(const struct attention_tile *tile, struct attention_scratch *s, const struct attention_state *partial)      \
    {                                                                                                                            \
        attend(dtype, tile, s, partial);                                                                                         \
    }
ATTEND(attend_f16, KV_F16)
ATTEND(attend_bf16, KV_BF16)
ATTEND(attend_int8, KV_INT8)
