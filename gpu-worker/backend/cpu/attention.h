/* What the attention kernels of all instruction sets share: how the KV pool is laid out and what a kernel is given.
 *
 *   keys of a row   0 ........ 255 | 256 ....... 511 | 512 ... position      segments, at fixed absolute positions
 *                   64  64  64  64 | 64  64  64  64  | 64  41                steps of the online softmax
 *
 * Each segment gives a state (m, l, o) of its own: o = sum 2^(score - m) v, l = sum 2^(score - m). The states of a row are folded
 * from the first to the last. So the segments of one long row may be computed by different threads, or by one thread after the
 * other, with the same bits (the splitting of Flash-Decoding, Dao et al. 2023, at positions that do not depend on the threads).
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "gpu-worker/backend/backend.h"

enum {
    KV_PAGE = 16,
    KEY_TILE = 64,
    PAGES = KEY_TILE / KV_PAGE,
    SEGMENT = 256,
    ATTENTION_TILE = 64,
    STORE_RUN = 32,
    MAX_HEAD_DIM = 256
};

/* KV of one layer in every block; how keys and values lie in their parts is the kernels' own affair. What attention reads
 * together lies together: memory gives long runs sooner than many short ones.
 *
 *   block:  ... | kv head 0 | kv head 1 | ...       head:  k [block_size * key_dim] | v [block_size * head_dim]
 *               ^ memory + block * block_bytes             | int8 only: scales f32 of k [block_size] | of v [block_size] */
struct kv_layer {
    uint8_t *memory;
    size_t block_bytes; /* from block to block: a block of all layers lies in one piece */
    size_t head_bytes;
    size_t values, k_scales, v_scales;                                            /* from a head's first byte */
    uint32_t n_kv_heads, head_dim, key_dim, block_size, block_shift, value_bytes; /* key_dim: head_dim, padded for AMX */
};

/* Where one kv head's part of one block lies. */
struct kv_head_at {
    uint8_t *k, *v;
    float *k_scales, *v_scales; /* [block_size] */
};
static inline struct kv_head_at kv_head_at(const struct kv_layer *kv, uint32_t block, uint32_t kv_head)
{
    uint8_t *at = kv->memory + block * kv->block_bytes + kv_head * kv->head_bytes;
    return (struct kv_head_at){at, at + kv->values, (float *)(at + kv->k_scales), (float *)(at + kv->v_scales)};
}

static const uint32_t WHOLE = UINT32_MAX; /* in place of a segment: all of them */

/* Keys of one kv head, positions begin..end. */
struct key_run {
    const uint32_t *blocks; /* of the sequence; NULL: no keys */
    uint32_t kv_head, begin, end;
};

/* Up to ATTENTION_TILE query rows of one sequence that share a kv head. */
struct attention_tile {
    const struct kv_layer *kv;
    const uint32_t *blocks;
    uint32_t kv_head, n_rows, last; /* last: the largest position */
    uint32_t segment, n_segments;   /* those to compute where the results are partial states; else WHOLE */
    struct key_run keys, next;      /* what the thread goes through in this call, call after call, and then: to fetch ahead */
    const float *q[ATTENTION_TILE]; /* [head_dim] each */
    float *out[ATTENTION_TILE];
    uint32_t position[ATTENTION_TILE]; /* row r attends positions 0..position[r] */
    float scale;
    uint32_t window; /* a row sees the last `window` positions, its own included; 0: all. Only in attention.inc.h's kernels */
};

/* The first position that row r sees. */
static inline uint32_t window_start(const struct attention_tile *tile, uint32_t r)
{
    return tile->window && tile->position[r] >= tile->window ? tile->position[r] + 1 - tile->window : 0;
}

/* The state of a tile's rows over one segment, or over the first segments. */
struct attention_state {
    float *o, *l, *m;
};
static inline size_t attention_state_floats(uint32_t n_rows, uint32_t head_dim)
{
    return (size_t)(n_rows + 15) / 16 * 16 * (head_dim + 17);
}
static inline struct attention_state attention_state_at(float *memory, uint32_t n_rows, uint32_t head_dim)
{
    size_t rows = (size_t)(n_rows + 15) / 16 * 16;
    return (struct attention_state){memory, memory + rows * head_dim, memory + rows * (head_dim + 16)};
}

struct vector_scratch {
    _Alignas(64) float q[ATTENTION_TILE * MAX_HEAD_DIM]; /* [row][head_dim], scaled, log2 units */
    float p[ATTENTION_TILE][KEY_TILE];
    float f[ATTENTION_TILE];
    float k[KEY_TILE * MAX_HEAD_DIM]; /* [page][head_dim][16 keys] */
    float v[KEY_TILE * MAX_HEAD_DIM]; /* [key][head_dim] */
};

/* See attention_amx.c for the shapes. [2]: high and low parts of values that one BF16 value does not hold. */
struct amx_scratch {
    _Alignas(64) uint32_t q[2][ATTENTION_TILE * MAX_HEAD_DIM / 2];
    uint16_t k[2][KEY_TILE * MAX_HEAD_DIM], v[2][KEY_TILE * MAX_HEAD_DIM];
    uint32_t p[2][KEY_TILE / 2 * 16];
    float s[2][KEY_TILE * 16];
    float minus_m[ATTENTION_TILE];
};

struct attention_scratch {
    union {
        struct vector_scratch vector;
        struct amx_scratch amx;
    };
    _Alignas(64) float states[2][ATTENTION_TILE * (MAX_HEAD_DIM + 17)];
};

/* The keys of one step of the softmax: pages of 16, those past the last row's position left out. */
struct key_pages {
    struct {
        const uint8_t *k, *v; /* v: of slot 0 */
        const float *k_scales, *v_scales;
        uint32_t slot; /* of the page's first key in its block */
    } page[PAGES];
    uint32_t n_pages, n_keys;
};

static inline struct key_pages pages_of(const struct kv_layer *kv, const struct key_run *keys, uint32_t first)
{
    struct key_pages pages = {.n_keys = keys->end + 1 - first < KEY_TILE ? keys->end + 1 - first : KEY_TILE};
    pages.n_pages = (pages.n_keys + KV_PAGE - 1) / KV_PAGE;
    for (uint32_t i = 0; i < pages.n_pages; i++) {
        uint32_t position = first + i * KV_PAGE, slot = position & (kv->block_size - 1);
        struct kv_head_at at = kv_head_at(kv, keys->blocks[position >> kv->block_shift], keys->kv_head);
        pages.page[i].k = at.k + (size_t)slot * kv->key_dim * kv->value_bytes;
        pages.page[i].v = at.v;
        pages.page[i].slot = slot;
        pages.page[i].k_scales = at.k_scales + slot;
        pages.page[i].v_scales = at.v_scales + slot;
    }
    return pages;
}

static inline struct key_pages find_pages(const struct attention_tile *tile, uint32_t first)
{
    struct key_run all = {tile->blocks, tile->kv_head, 0, tile->last};
    return pages_of(tile->kv, &all, first);
}

/* One way to keep keys and values on one instruction set. */
struct attention_kernels {
    /* One head's row of k and v in the block `block` at `slot`. */
    void (*store)(const struct kv_layer *kv, uint32_t block, uint32_t slot, uint32_t kv_head, const float *k, const float *v);
    /* NULL, or the same bits sooner: STORE_RUN rows from a slot that is a multiple of it, `k_stride` and `v_stride` values from
     * row to row. */
    void (*store_run)(const struct kv_layer *kv, uint32_t block, uint32_t slot, uint32_t kv_head, const float *k, size_t k_stride,
                      const float *v, size_t v_stride);
    /* partial NULL: the rows' results to tile->out. Else tile->n_segments states, each over one segment alone. */
    void (*attend)(const struct attention_tile *tile, struct attention_scratch *s, const struct attention_state *partial);
    /* The results from the n states of all segments, which it overwrites. */
    void (*combine)(const struct attention_tile *tile, const struct attention_state *states, uint32_t n);
    /* The state of the segments so far and of the next one, to the first of them. */
    void (*fold)(const struct attention_tile *tile, const struct attention_state *total, const struct attention_state *state);
    /* Rows first .. first + tile->n_rows of a state of any tile with such heads, as the tile's own. */
    void (*take)(const struct attention_tile *tile, const struct attention_state *to, const struct attention_state *from,
                 uint32_t first);
};
