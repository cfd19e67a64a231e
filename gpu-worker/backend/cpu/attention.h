/* How keys and values lie in the KV pool, and what an attention kernel works on. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { KV_PAGE = 16, KEY_TILE = 64, ATTENTION_TILE = 64, MAX_HEAD_DIM = 256 };

/* KV of one layer. Keys are transposed within pages of 16 positions so that a lane is a key; values lie row by row so that a lane
 * is a dimension:  k [block][kv_head][block_size / 16][head_dim][16]   v [block][kv_head][block_size][head_dim]   (f16) */
struct kv_layer {
    uint16_t *k, *v;
    size_t block_values; /* from block to block: a block of all layers lies in one piece */
    uint32_t n_kv_heads, head_dim, block_size, block_shift;
};

/* Up to ATTENTION_TILE query rows of one sequence that share a kv head. */
struct attention_tile {
    const struct kv_layer *kv;
    const uint32_t *blocks;
    uint32_t kv_head, n_rows;
    const float *q[ATTENTION_TILE]; /* [head_dim] each */
    float *out[ATTENTION_TILE];
    uint32_t position[ATTENTION_TILE]; /* row r attends positions 0..position[r] */
    float scale;
};

/* BF16 pairs; see attention_amx.c for the shapes. */
struct amx_scratch {
    _Alignas(64) uint16_t q_high[ATTENTION_TILE * MAX_HEAD_DIM];
    uint16_t q_low[ATTENTION_TILE * MAX_HEAD_DIM];
    uint16_t p_high[ATTENTION_TILE][KEY_TILE], p_low[ATTENTION_TILE][KEY_TILE];
    uint32_t k_high[KEY_TILE * MAX_HEAD_DIM / 2], k_low[KEY_TILE * MAX_HEAD_DIM / 2];
    uint32_t v_high[KEY_TILE * MAX_HEAD_DIM / 2], v_low[KEY_TILE * MAX_HEAD_DIM / 2];
    float values[4][16 * 16];
};

struct attention_scratch {
    float q[ATTENTION_TILE][MAX_HEAD_DIM]; /* scaled, log2 units */
    float o[ATTENTION_TILE][MAX_HEAD_DIM];
    float p[ATTENTION_TILE][KEY_TILE];
    float l[ATTENTION_TILE][16]; /* sums of p by key mod 16 */
    float m[ATTENTION_TILE], f[ATTENTION_TILE];
    struct amx_scratch amx;
};

struct key_pages {
    const uint16_t *k[KEY_TILE / KV_PAGE], *v[KEY_TILE / KV_PAGE];
    uint32_t n_pages, n_keys; /* that the tile's last row sees */
};

/* The pages of the 64 keys from `first`; `last` is the last position that any row sees. */
static inline struct key_pages find_pages(const struct attention_tile *tile, uint32_t first, uint32_t last)
{
    const struct kv_layer *kv = tile->kv;
    struct key_pages pages = {.n_keys = last + 1 - first < KEY_TILE ? last + 1 - first : KEY_TILE};
    pages.n_pages = (pages.n_keys + KV_PAGE - 1) / KV_PAGE;
    for (uint32_t i = 0; i < pages.n_pages; i++) {
        uint32_t position = first + i * KV_PAGE, slot = position & (kv->block_size - 1);
        size_t at = tile->blocks[position >> kv->block_shift] * kv->block_values +
                    ((size_t)tile->kv_head * kv->block_size + slot) * kv->head_dim;
        pages.k[i] = kv->k + at;
        pages.v[i] = kv->v + at;
    }
    return pages;
}
