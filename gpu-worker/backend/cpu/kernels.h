/* The inner loops, once per instruction set. kernels.inc.h is the source of all of them; kernels_<isa>.c compiles it. */
#pragma once
#include <stdint.h>
#include "gpu-worker/backend/backend.h"
#include "gpu-worker/backend/cpu/panels.h"

enum { KV_PAGE = 16, KEY_TILE = 64, ATTENTION_TILE = 16, MAX_HEAD_DIM = 256 };

/* KV of one layer. Keys are transposed within pages of 16 positions so that a lane is a key; values lie row by row so that a lane
 * is a dimension:  k [block][kv_head][block_size / 16][head_dim][16]   v [block][kv_head][block_size][head_dim]   (f16) */
struct kv_layer {
    uint16_t *k, *v;
    uint32_t n_kv_heads, head_dim, block_size, block_shift;
};

/* Up to ATTENTION_TILE query rows of one sequence that share a kv head. */
struct attention_tile {
    const struct kv_layer *kv;
    const uint32_t *blocks;
    uint32_t kv_head, n_rows;
    const float *q[ATTENTION_TILE];  /* [head_dim] each */
    float *out[ATTENTION_TILE];
    uint32_t position[ATTENTION_TILE]; /* row r attends positions 0..position[r] */
    float scale;
};

struct attention_scratch {
    float q[ATTENTION_TILE][MAX_HEAD_DIM]; /* scaled, log2 units */
    float o[ATTENTION_TILE][MAX_HEAD_DIM];
    float p[ATTENTION_TILE][KEY_TILE];
    float l[ATTENTION_TILE][16]; /* sums of p by key mod 16 */
    float m[ATTENTION_TILE], f[ATTENTION_TILE];
};

struct kernels {
    const char *name; /* "avx512-vnni" */
    /* Rows first..end of a->x into a's integers. */
    void (*quantize)(const struct acts *a, uint32_t first, uint32_t end);
    /* Panel p times rows first..end (first a multiple of ACTS_TILE). */
    void (*panel[PANEL_KINDS])(const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                               const struct panel_store *store);
    void (*rmsnorm)(const float *x, const float *weight, uint32_t n, float eps, float *out);
    void (*silu_mul)(float *gate, const float *up, size_t n);
    /* angles: (cos, sin) pairs [rotated]. */
    void (*rotate)(float *head, const float *angles, uint32_t rotated, enum rope_style style);
    /* One head's row of k or v in the block `block` at `slot`. */
    void (*store_kv)(const struct kv_layer *kv, uint32_t block, uint32_t slot, uint32_t kv_head, const float *k, const float *v);
    void (*attention)(const struct attention_tile *tile, struct attention_scratch *scratch);
};

extern const struct kernels kernels_generic, kernels_avx2, kernels_avx512;
