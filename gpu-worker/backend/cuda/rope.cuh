/* Rotation of queries and keys, with the append of keys and values to the KV pool. One block a row. */
#pragma once
#include "gpu-worker/backend/cuda/forms.cuh"

struct rope_args {
    float *q, *k;
    const float *v, *angles;
    uint32_t q_cols, kv_cols, rotated;
    bool interleaved;
};

__device__ __forceinline__ uint16_t bf16_bits(float x)
{
    return __nv_bfloat16_raw(__float2bfloat16_rn(x)).x;
}

/* Rotates q and k in place, and appends k and v to the row's block. */
__global__ void __launch_bounds__(ROW_THREADS) rope_store_kernel(struct rope_args args, struct kv_view kv, struct step_view step)
{
    size_t row = blockIdx.x;
    uint32_t half = args.rotated / 2, rest = kv.head_dim - args.rotated;
    const struct row_state place = step.rows[row];
    bool stored = place.block != NO_BLOCK;
    size_t base = stored ? (size_t)place.block * kv.block_values + (size_t)place.slot * kv.head_dim : 0;
    size_t head_values = (size_t)kv.block_size * kv.head_dim;
    const float *angles = args.angles + row * args.rotated;

    for (uint32_t i = threadIdx.x; i < (kv.n_heads + kv.n_kv_heads) * half; i += ROW_THREADS) {
        uint32_t h = i / half, pair = i % half, kv_head = h - kv.n_heads;
        uint32_t a = args.interleaved ? 2 * pair : pair, b = args.interleaved ? 2 * pair + 1 : pair + half;
        float *head =
            h < kv.n_heads ? args.q + row * args.q_cols + h * kv.head_dim : args.k + row * args.kv_cols + kv_head * kv.head_dim;
        float c = angles[2 * pair], s = angles[2 * pair + 1], x = head[a], y = head[b];
        float rx = fmaf(x, c, -mul_rn(y, s)), ry = fmaf(x, s, mul_rn(y, c));
        head[a] = rx;
        head[b] = ry;
        if (h >= kv.n_heads && stored) {
            kv.k[base + kv_head * head_values + a] = bf16_bits(rx);
            kv.k[base + kv_head * head_values + b] = bf16_bits(ry);
        }
    }
    if (!stored)
        return;
    for (uint32_t i = threadIdx.x; i < kv.n_kv_heads * rest; i += ROW_THREADS) {
        uint32_t h = i / rest, d = args.rotated + i % rest;
        kv.k[base + h * head_values + d] = bf16_bits(args.k[row * args.kv_cols + h * kv.head_dim + d]);
    }
    for (uint32_t i = threadIdx.x; i < args.kv_cols; i += ROW_THREADS)
        kv.v[base + i / kv.head_dim * head_values + i % kv.head_dim] = bf16_bits(args.v[row * args.kv_cols + i]);
}
