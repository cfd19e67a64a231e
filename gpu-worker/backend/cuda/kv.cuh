/* Values of the KV pool, eight neighbouring ones of a head at a time. What is stored:
 *
 *   STORE_BF16   rounded to nearest
 *   STORE_FP8    e4m3, rounded to nearest, what is larger than 448 becomes 448
 *   STORE_INT8   rne(x / scale), a scale for each token and kv head: max|x| / 127, as on the CPU
 */
#pragma once
#include "gpu-worker/backend/cuda/device.cuh"

template <int STORE>
struct kv_traits {
    static constexpr uint32_t bytes = STORE == STORE_BF16 ? 2 : 1; /* of a value */
    static constexpr uint32_t loaded = 16 / bytes;                 /* values of a 16-byte load */
};

/* Of the value at dimension 0. */
template <int STORE>
__device__ __forceinline__ struct kv_place kv_at(const struct kv_view &kv, uint32_t block, uint32_t slot, uint32_t kv_head)
{
    size_t token = (size_t)kv_head * kv.block_size + slot;
    struct kv_place place = {block * kv.block_bytes + token * kv.head_dim * kv_traits<STORE>::bytes, 0};
    if constexpr (STORE == STORE_INT8)
        place.scale = block * (kv.block_bytes / sizeof(float)) + token;
    return place;
}

template <int STORE>
__device__ __forceinline__ struct kv_place kv_find(const struct kv_view &kv, const uint32_t *table, uint32_t kv_head,
                                                   uint32_t position)
{
    return kv_at<STORE>(kv, table[position >> kv.block_shift], position & (kv.block_size - 1), kv_head);
}

/* The first position that a row at `position` sees. */
__device__ __forceinline__ uint32_t window_start(const struct kv_view &kv, uint32_t position)
{
    return kv.window && position >= kv.window ? position + 1 - kv.window : 0;
}

/* Eight values as pack_eight leaves them, in the low words. */
template <int STORE>
__device__ __forceinline__ void store_packed(uint8_t *p, uint4 raw)
{
    if constexpr (STORE == STORE_BF16)
        st128(p, raw);
    else
        st64(p, make_uint2(raw.x, raw.y));
}

/* Without the scale. */
template <int STORE>
__device__ __forceinline__ void unpack_eight(uint4 raw, float out[8])
{
    const uint32_t u[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t byte = u[i / 4] >> i % 4 * 8 & 255;
        if constexpr (STORE == STORE_BF16)
            out[i] = i % 2 ? bf16_high(u[i / 2]) : bf16_low(u[i / 2]);
        else if constexpr (STORE == STORE_FP8)
            out[i] = __half2float(__half(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)byte, __NV_E4M3)));
        else
            out[i] = (float)(int8_t)byte;
    }
}

template <int STORE>
__device__ __forceinline__ uint4 pack_eight(const float v[8], float inverse)
{
    uint32_t u[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if constexpr (STORE == STORE_BF16)
            u[i / 2] |= i % 2 ? bf16_pair(0, v[i]) : bf16_pair(v[i], 0);
        else if constexpr (STORE == STORE_FP8)
            u[i / 4] |= (uint32_t)__nv_cvt_float_to_fp8(v[i], __NV_SATFINITE, __NV_E4M3) << i % 4 * 8;
        else
            u[i / 4] |= ((uint32_t)(int32_t)rintf(v[i] * inverse) & 255) << i % 4 * 8;
    }
    return make_uint4(u[0], u[1], u[2], u[3]);
}

/* A head of LANES lanes with eight values each: their packed form, and its scale (1 where there is none). All lanes of the warp
 * call. */
template <int STORE, int LANES>
__device__ __forceinline__ uint4 pack_head(const float v[8], float *scale)
{
    float inverse = 1;
    *scale = 1;
    if constexpr (STORE == STORE_INT8) {
        float most = 0;
#pragma unroll
        for (int i = 0; i < 8; i++)
            most = fmaxf(most, fabsf(v[i]));
#pragma unroll
        for (int step = LANES / 2; step; step /= 2)
            most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, step));
        *scale = most / 127.0f;
        inverse = most > 0 ? 127.0f / most : 0.0f;
    }
    return pack_eight<STORE>(v, inverse);
}

/* Values d.. of a head; lane d = 0 stores the scale. */
template <int STORE>
__device__ __forceinline__ void store_head(uint8_t *values, float *scales, struct kv_place place, uint32_t d, uint4 packed,
                                           float scale)
{
    store_packed<STORE>(values + place.values + d * kv_traits<STORE>::bytes, packed);
    if (STORE == STORE_INT8 && d == 0)
        scales[place.scale] = scale;
}
