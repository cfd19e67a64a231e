/* What of a decoder one rank of a tensor-parallel group computes:
 *
 *   rows of      q            k, v          gate, up      output
 *   columns of   attn_output                down
 *
 *   rank 0       heads 0..    kv heads 0..  ffn 0..       ids 0..
 *   rank 1       the next     the next      the next      the next
 *
 * Heads are divided evenly. Where there are more ranks than kv heads, several ranks hold the same one. Columns of `down` are cut
 * on borders of its format's blocks, so feed-forward parts may differ by a block. Norms, embeddings and the residual are whole on
 * every rank. */
#pragma once
#include <stdint.h>
#include "gpu-worker/model/loader.h"

struct share {
    uint32_t rank, size;
    uint32_t first_head, n_heads, first_kv_head, n_kv_heads;
    uint32_t first_ffn, ffn;
    uint32_t first_id, n_ids; /* of the output matrix */
};

/* The whole for rank 0 of 1. ffn_block: the largest block of a `down`. KVG_INVALID, with both numbers, where the shape cannot be
 * divided so. */
int share_of(struct share *out, const struct shape *shape, uint32_t ffn_block, uint32_t n_vocab, uint32_t rank, uint32_t size,
             struct kvg_error *err);
