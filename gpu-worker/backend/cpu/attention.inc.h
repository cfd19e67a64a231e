/* Storing keys and values, and attention, on v16.h's types: part of kernels.inc.h, compiled once per instruction set. */
#pragma once
#include "gpu-worker/backend/cpu/attention.h"
#include "gpu-worker/backend/cpu/v16.h"

static void store_kv(const struct kv_layer *kv, uint32_t block, uint32_t slot, uint32_t kv_head, const float *k, const float *v)
{
    size_t head = block * kv->block_values + (size_t)kv_head * kv->block_size * kv->head_dim;
    uint16_t *keys = kv->k + head + (size_t)(slot / KV_PAGE) * KV_PAGE * kv->head_dim + slot % KV_PAGE;
    uint16_t *values = kv->v + head + (size_t)slot * kv->head_dim;
    uint16_t half[16];
    for (uint32_t d = 0; d < kv->head_dim; d += 16) {
        v16_to_f16(half, v16_load(k + d));
        for (uint32_t i = 0; i < 16; i++)
            keys[(d + i) * KV_PAGE] = half[i];
        v16_to_f16(values + d, v16_load(v + d));
    }
}

/* p[row][16 (page + j)..] = q[row] . k for n rows and m pages; each lane (a key) sums over head_dim in order. */
V_INLINE void score_pages(struct attention_scratch *s, const uint16_t *const *k, uint32_t page, uint32_t head_dim, uint32_t row,
                          int n, int m)
{
    v16 acc[V_ATTENTION_ROWS][4];
    for (int r = 0; r < n; r++)
        for (int j = 0; j < m; j++)
            acc[r][j] = v16_set1(0);
    for (uint32_t d = 0; d < head_dim; d++) {
        v16 keys[4];
        for (int j = 0; j < m; j++)
            keys[j] = v16_from_f16(k[page + (uint32_t)j] + (size_t)d * KV_PAGE);
        for (int r = 0; r < n; r++)
            for (int j = 0; j < m; j++)
                acc[r][j] = v16_fma(v16_set1(s->q[row + (uint32_t)r][d]), keys[j], acc[r][j]);
    }
    for (int r = 0; r < n; r++)
        for (int j = 0; j < m; j++)
            v16_store(s->p[row + (uint32_t)r] + (page + (uint32_t)j) * KV_PAGE, acc[r][j]);
}

V_INLINE void scores(struct attention_scratch *s, const struct key_pages *pages, uint32_t head_dim, uint32_t row, int n,
                     int width)
{
    uint32_t page = 0;
    if (width >= 4)
        for (; page + 4 <= pages->n_pages; page += 4)
            score_pages(s, pages->k, page, head_dim, row, n, 4);
    if (width >= 2)
        for (; page + 2 <= pages->n_pages; page += 2)
            score_pages(s, pages->k, page, head_dim, row, n, 2);
    for (; page < pages->n_pages; page++)
        score_pages(s, pages->k, page, head_dim, row, n, 1);
}

/* o[row] = o[row] * f[row] + sum over keys p[row][key] v[key], for n rows and m vectors of 16 dimensions from dimension d. */
V_INLINE void add_values(struct attention_scratch *s, const struct key_pages *pages, uint32_t head_dim, uint32_t row, int n,
                         uint32_t d, int m)
{
    v16 acc[V_ATTENTION_ROWS][4];
    for (int r = 0; r < n; r++)
        for (int j = 0; j < m; j++)
            acc[r][j] = v16_mul(v16_load(s->o[row + (uint32_t)r] + d + 16 * j), v16_set1(s->f[row + (uint32_t)r]));
    for (uint32_t page = 0, key = 0; page < pages->n_pages; page++) {
        const uint16_t *v = pages->v[page] + d;
        for (uint32_t i = 0; i < KV_PAGE && key < pages->n_keys; i++, key++, v += head_dim) {
            v16 values[4];
            for (int j = 0; j < m; j++)
                values[j] = v16_from_f16(v + 16 * j);
            for (int r = 0; r < n; r++)
                for (int j = 0; j < m; j++)
                    acc[r][j] = v16_fma(v16_set1(s->p[row + (uint32_t)r][key]), values[j], acc[r][j]);
        }
    }
    for (int r = 0; r < n; r++)
        for (int j = 0; j < m; j++)
            v16_store(s->o[row + (uint32_t)r] + d + 16 * j, acc[r][j]);
}

V_INLINE void values(struct attention_scratch *s, const struct key_pages *pages, uint32_t head_dim, uint32_t row, int n,
                     int width)
{
    uint32_t d = 0;
    if (width >= 4)
        for (; d + 64 <= head_dim; d += 64)
            add_values(s, pages, head_dim, row, n, d, 4);
    if (width >= 2)
        for (; d + 32 <= head_dim; d += 32)
            add_values(s, pages, head_dim, row, n, d, 2);
    for (; d < head_dim; d += 16)
        add_values(s, pages, head_dim, row, n, d, 1);
}

/* One row of online softmax (Milakov and Gimelshein 2018) over a tile of 64 keys of which it sees the first n. A row that sees
 * none stays as it is. */
V_INLINE void softmax_row(struct attention_scratch *s, uint32_t row, int n)
{
    v16 x[KEY_TILE / 16], lowest = v16_set1(-1e30f), zero = v16_set1(0);
    for (int j = 0; j < KEY_TILE / 16; j++)
        x[j] = v16_first(n - 16 * j, v16_load(s->p[row] + 16 * j), lowest);
    float high = v16_hmax(v16_max(v16_max(x[0], x[1]), v16_max(x[2], x[3]))), old = s->m[row];
    float m = high > old ? high : old;
    for (int j = 0; j < KEY_TILE / 16; j++) {
        x[j] = v16_first(n - 16 * j, v16_exp2(v16_sub(x[j], v16_set1(m))), zero);
        v16_store(s->p[row] + 16 * j, x[j]);
    }
    v16 f = m == old ? v16_set1(1) : v16_exp2(v16_set1(old - m));
    s->m[row] = m;
    v16_store_n(&s->f[row], f, 1);
    v16_store(s->l[row], v16_fma(v16_load(s->l[row]), f, v16_add(v16_add(x[0], x[1]), v16_add(x[2], x[3]))));
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

static void score_rows(struct attention_scratch *s, const struct key_pages *pages, uint32_t head_dim, uint32_t row, int n)
{
#define SCORES(rows) scores(s, pages, head_dim, row, rows, page_width(rows))
    ROW_CASES(SCORES)
}

static void value_rows(struct attention_scratch *s, const struct key_pages *pages, uint32_t head_dim, uint32_t row, int n)
{
#define VALUES(rows) values(s, pages, head_dim, row, rows, page_width(rows))
    ROW_CASES(VALUES)
}

static void attention_begin(const struct attention_tile *tile, struct attention_scratch *s, uint32_t head_dim)
{
    v16 scale = v16_set1(tile->scale * 0x1.715476p+0f); /* log2(e): exponentials are powers of 2 below */
    for (uint32_t r = 0; r < tile->n_rows; r++) {
        for (uint32_t d = 0; d < head_dim; d += 16) {
            v16_store(s->q[r] + d, v16_mul(v16_load(tile->q[r] + d), scale));
            v16_store(s->o[r] + d, v16_set1(0));
        }
        v16_store(s->l[r], v16_set1(0));
        s->m[r] = -1e30f;
    }
}

/* FlashAttention-2's loop (Dao 2023) over tiles of 64 keys at fixed absolute positions. */
static void attention(const struct attention_tile *tile, struct attention_scratch *s)
{
    uint32_t head_dim = tile->kv->head_dim, last = 0;
    for (uint32_t r = 0; r < tile->n_rows; r++)
        last = tile->position[r] > last ? tile->position[r] : last;
    attention_begin(tile, s, head_dim);
    for (uint32_t first = 0; first <= last; first += KEY_TILE) {
        struct key_pages pages = find_pages(tile, first, last);
        for (uint32_t r = 0; r < tile->n_rows; r += V_ATTENTION_ROWS) {
            int n = (int)(tile->n_rows - r < V_ATTENTION_ROWS ? tile->n_rows - r : V_ATTENTION_ROWS);
            score_rows(s, &pages, head_dim, r, n);
        }
        for (uint32_t r = 0; r < tile->n_rows; r++) {
            int64_t n = (int64_t)tile->position[r] + 1 - first;
            softmax_row(s, r, n > KEY_TILE ? KEY_TILE : n < 0 ? 0 : (int)n);
        }
        for (uint32_t r = 0; r < tile->n_rows; r += V_ATTENTION_ROWS) {
            int n = (int)(tile->n_rows - r < V_ATTENTION_ROWS ? tile->n_rows - r : V_ATTENTION_ROWS);
            value_rows(s, &pages, head_dim, r, n);
        }
    }
    for (uint32_t r = 0; r < tile->n_rows; r++) {
        v16 sum = v16_set1(v16_sum(v16_load(s->l[r])));
        for (uint32_t d = 0; d < head_dim; d += 16)
            v16_store(tile->out[r] + d, v16_div(v16_load(s->o[r] + d), sum));
    }
}
