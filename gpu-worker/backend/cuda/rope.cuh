/* Rotation of queries and keys, with the append of keys and values to the KV pool. */
#pragma once
#include "gpu-worker/backend/cuda/forms.cuh"
#include "gpu-worker/backend/cuda/kv.cuh"

struct rope_args {
    float *q, *k;
    const float *v, *angles; /* angles NULL: it has been done */
    uint32_t q_cols, kv_cols, rotated;
    bool interleaved;
};

/* N floats, a multiple of four, from a 16-byte boundary on. */
template <int N>
__device__ __forceinline__ void load_floats(const float *from, float out[N])
{
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        float4 four = ldf4(from + i); /* half sectors, the others by the next load */
        out[i] = four.x, out[i + 1] = four.y, out[i + 2] = four.z, out[i + 3] = four.w;
    }
}

/* Values d..d+7 of a head, zeros past its end; d and head_dim are multiples of 8. */
__device__ __forceinline__ void load_eight(const float *head, uint32_t head_dim, uint32_t d, float out[8])
{
    if (d < head_dim)
        load_floats<8>(head + d, out);
    else
        for (int i = 0; i < 8; i++)
            out[i] = 0;
}

/* What becomes of `value`, the first or second of a pair. */
__device__ __forceinline__ float rotate_one(float value, float other, bool first, float cosine, float sine)
{
    return first ? fmaf(value, cosine, -mul_rn(other, sine)) : fmaf(other, sine, mul_rn(value, cosine));
}

/* Values d..d+7 of a head, rotated; zeros past its end. */
__device__ __forceinline__ void rotate_eight(const struct rope_args &args, const float *head, uint32_t head_dim, uint32_t d,
                                             const float *angles, float out[8])
{
    uint32_t half = args.rotated / 2;
    load_eight(head, head_dim, d, out);
    if (d >= args.rotated || d >= head_dim)
        return;
    if (args.rotated % 16) { /* the eight may lie on both sides of the middle, or of the end */
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            uint32_t c = d + i, pair = args.interleaved ? c / 2 : c % half;
            bool first = args.interleaved ? c % 2 == 0 : c < half;
            if (c < args.rotated)
                out[i] = rotate_one(out[i],
                                    head[args.interleaved ? c ^ 1
                                         : first          ? c + half
                                                          : c - half],
                                    first, angles[2 * pair], angles[2 * pair + 1]);
        }
        return;
    }
    if (args.interleaved) {
        float turn[8];
        load_floats<8>(angles + d, turn);
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            float x = out[i], y = out[i + 1];
            out[i] = rotate_one(x, y, true, turn[i], turn[i + 1]);
            out[i + 1] = rotate_one(y, x, false, turn[i], turn[i + 1]);
        }
        return;
    }
    bool first = d < half;
    float turn[16], others[8];
    load_floats<16>(angles + 2 * (first ? d : d - half), turn);
    load_floats<8>(head + (first ? d + half : d - half), others);
#pragma unroll
    for (int i = 0; i < 8; i++)
        out[i] = rotate_one(out[i], others[i], first, turn[2 * i], turn[2 * i + 1]);
}

/* Rotates q and k in place, a thread a pair, then appends k and v to the row's block, a warp a head. One block a row. */
template <int STORE>
__global__ void __launch_bounds__(ROW_THREADS) rope_store_kernel(struct rope_args args, struct kv_view kv, struct step_view step)
{
    size_t row = blockIdx.x;
    uint32_t half = args.rotated / 2, d = threadIdx.x % WARP * 8;
    const struct row_state place = step.rows[row];
    const float *angles = args.angles + row * args.rotated, *v_row = args.v + row * args.kv_cols;
    float *q_row = args.q + row * args.q_cols, *k_row = args.k + row * args.kv_cols;
    for (uint32_t i = threadIdx.x; i < (kv.n_heads + kv.n_kv_heads) * half; i += ROW_THREADS) {
        uint32_t h = i / half, pair = i % half;
        uint32_t a = args.interleaved ? 2 * pair : pair, b = args.interleaved ? 2 * pair + 1 : pair + half;
        float *head = h < kv.n_heads ? q_row + h * kv.head_dim : k_row + (h - kv.n_heads) * kv.head_dim;
        float c = angles[2 * pair], s = angles[2 * pair + 1], x = head[a], y = head[b];
        head[a] = fmaf(x, c, -mul_rn(y, s));
        head[b] = fmaf(x, s, mul_rn(y, c));
    }
    __syncthreads();
    if (place.block == NO_BLOCK)
        return;
    for (uint32_t h = threadIdx.x / WARP; h < 2 * kv.n_kv_heads; h += ROW_THREADS / WARP) {
        bool is_k = h < kv.n_kv_heads;
        uint32_t kv_head = h % kv.n_kv_heads;
        float v[8], scale;
        load_eight((is_k ? k_row : v_row) + kv_head * kv.head_dim, kv.head_dim, d, v);
        uint4 packed = pack_head<STORE, WARP>(v, &scale);
        if (d < kv.head_dim)
            store_head<STORE>(is_k ? kv.k : kv.v, is_k ? kv.k_scales : kv.v_scales,
                              kv_at<STORE>(kv, place.block, place.slot, kv_head), d, packed, scale);
    }
}
