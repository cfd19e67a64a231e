/* Small device functions that several kernels share. */
#pragma once
#include "gpu-worker/backend/cuda/cu_port.h"
#include "gpu-worker/backend/cuda/layout.h"

static constexpr int WARP = 32;
static const uint32_t FULL_WARP = 0xffffffffu;

/* Products and sums that must not become an FMA. */
__device__ __forceinline__ float mul_rn(float a, float b)
{
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

__device__ __forceinline__ float add_rn(float a, float b)
{
#ifdef __CUDA_ARCH__
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

__device__ __forceinline__ float half_bits(uint32_t bits)
{
    __half_raw raw;
    raw.x = (unsigned short)bits;
    return __half2float(__half(raw));
}

__device__ __forceinline__ float bf16_low(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float bf16_high(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000u);
}

/* Nearest, ties to even. */
__device__ __forceinline__ uint32_t bf16_pair(float low, float high)
{
    __nv_bfloat16_raw a = __nv_bfloat16_raw(__float2bfloat16_rn(low)), b = __nv_bfloat16_raw(__float2bfloat16_rn(high));
    return (uint32_t)a.x | (uint32_t)b.x << 16;
}

__device__ __forceinline__ uint32_t half_pair(float low, float high)
{
    __half_raw a = __half_raw(__float2half_rn(low)), b = __half_raw(__float2half_rn(high));
    return (uint32_t)a.x | (uint32_t)b.x << 16;
}

__device__ __forceinline__ float warp_sum(float v)
{
#pragma unroll
    for (int step = 16; step; step >>= 1)
        v += __shfl_xor_sync(FULL_WARP, v, step);
    return v;
}

__device__ __forceinline__ float warp_max(float v)
{
#pragma unroll
    for (int step = 16; step; step >>= 1)
        v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, step));
    return v;
}

/* Sum over a block of THREADS; every thread gets it. scratch: THREADS / 32 floats of shared memory, reusable after the next
 * barrier. */
template <int THREADS>
__device__ __forceinline__ float block_sum(float v, float *scratch)
{
    v = warp_sum(v);
    if (threadIdx.x % WARP == 0)
        scratch[threadIdx.x / WARP] = v;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < THREADS / WARP; i++)
        sum += scratch[i];
    return sum;
}

/* ---- a group of activations, held by 8 neighbouring lanes with 4 values each ---- */

/* Rounds the group as the CPU does and stores it; lane8 = lane % 8. All 8 lanes must call. */
__device__ __forceinline__ void store_group(const struct acts &acts, size_t row, uint32_t group, uint32_t lane8, const float v[4])
{
    uint32_t mask = 0xffu << (threadIdx.x & 24);
    float amax = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
#pragma unroll
    for (int step = 4; step; step >>= 1)
        amax = fmaxf(amax, __shfl_xor_sync(mask, amax, step));
    float inverse = amax > 0 ? 127.0f / amax : 0.0f;
    uint32_t word = 0;
    int32_t sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int32_t q = (int32_t)rintf(v[i] * inverse);
        word |= (uint32_t)(q & 255) << 8 * i;
        sum += q;
    }
    sum += __shfl_xor_sync(mask, sum, 1);
    sum += __shfl_xor_sync(mask, sum, 2);
    int32_t other = __shfl_xor_sync(mask, sum, 4);
    size_t at = row * acts.n_groups + group;
    *(uint32_t *)(acts.q + (lane8 < 4 ? 0 : acts.plane) + at * 16 + (lane8 & 3) * 4) = word;
    if (lane8 == 0) {
        uint4 raw;
        float d = amax / 127.0f;
        raw.x = __float_as_uint(d);
        raw.y = __float_as_uint(d * (float)(sum + other));
        raw.z = (uint32_t)(sum + other);
        raw.w = (uint32_t)sum;
        st128(&acts.groups[at], raw);
    }
}

/* The same with the row's scale d, 1 / inverse, as integers of 8 bits or, in two parts, of 16. */
__device__ __forceinline__ void store_row_group(const struct acts &acts, size_t row, uint32_t group, uint32_t lane8,
                                                const float v[4], bool wide, float inverse, float d)
{
    uint32_t mask = 0xffu << (threadIdx.x & 24), high = 0, low = 0;
    int32_t sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int32_t q = (int32_t)rintf(v[i] * inverse), top = wide ? (q + 128) >> 8 : q;
        high |= (uint32_t)(top & 255) << 8 * i;
        low |= (uint32_t)(q & 255) << 8 * i;
        sum += q;
    }
#pragma unroll
    for (int step = 4; step; step >>= 1)
        sum += __shfl_xor_sync(mask, sum, step);
    size_t at = row * acts.n_groups + group;
    int8_t *out = acts.q + (lane8 < 4 ? 0 : acts.plane) + at * 16 + (lane8 & 3) * 4;
    *(uint32_t *)out = high;
    if (wide)
        *(uint32_t *)(out + 2 * acts.plane) = low;
    if (lane8 == 0)
        st128(&acts.groups[at], make_uint4(__float_as_uint(d), 0, (uint32_t)sum, 0));
}

/* ---- a group of weights ---- */

template <int KIND>
struct kind_traits {
    static constexpr bool is_float = KIND <= MATRIX_BF16;
    static constexpr int bits = KIND == MATRIX_SCALE_8 || KIND == MATRIX_W8A8                                  ? 8
                                : KIND == MATRIX_SUPER16_6                                                     ? 6
                                : KIND == MATRIX_SCALE_5 || KIND == MATRIX_MIN_5 || KIND == MATRIX_SUPER_MIN_5 ? 5
                                                                                                               : 4;
    static constexpr bool has_min =
        KIND == MATRIX_MIN_4 || KIND == MATRIX_MIN_5 || KIND == MATRIX_SUPER_MIN_4 || KIND == MATRIX_SUPER_MIN_5;
    static constexpr bool super_min = KIND == MATRIX_SUPER_MIN_4 || KIND == MATRIX_SUPER_MIN_5;
    static constexpr bool super_16 = KIND == MATRIX_SUPER16_6;
    /* Codes are unsigned around it; 8-bit codes are stored signed. */
    static constexpr int offset = KIND == MATRIX_SCALE_4 ? 8 : KIND == MATRIX_SCALE_5 ? 16 : KIND == MATRIX_SUPER16_6 ? 32 : 0;
    static constexpr int high_bytes = bits == 8 ? 16 : bits == 6 ? 8 : bits == 5 ? 4 : 0; /* of a group */
};

/* Values 4j..4j+3 of a group as four bytes (low), and values 16+4j.. (high); `code` is word j of the codes. `extra`: the group's
 * word (5-bit) or the two words (6-bit) of the high plane; 8-bit: extra[0] is word j of the high plane. */
template <int KIND>
__device__ __forceinline__ void unpack_words(uint32_t code, const uint32_t *extra, int j, uint32_t *low, uint32_t *high)
{
    constexpr int bits = kind_traits<KIND>::bits;
    if constexpr (bits == 8) {
        *low = code;
        *high = extra[0];
        return;
    }
    *low = code & 0x0f0f0f0fu;
    *high = code >> 4 & 0x0f0f0f0fu;
    if constexpr (bits == 5) {
        *low |= (extra[0] >> j & 0x01010101u) << 4;
        *high |= (extra[0] >> (4 + j) & 0x01010101u) << 4;
    }
    if constexpr (bits == 6) {
        *low |= (extra[0] >> 2 * j & 0x03030303u) << 4;
        *high |= (extra[1] >> 2 * j & 0x03030303u) << 4;
    }
}

/* w = d0 * (q - offset) (d1 for values 16..31 of SUPER_16) + m. */
struct group_scale {
    float d0, d1, m;
};

template <int KIND>
__device__ __forceinline__ struct group_scale load_scale(const struct matrix &w, size_t row, uint32_t group)
{
    typedef kind_traits<KIND> traits;
    struct group_scale out = {0, 0, 0};
    size_t at = row * w.ld + group;
    if constexpr (traits::super_min) {
        uint32_t super = ((const uint32_t *)w.supers)[row * (w.ld / 8) + group / 8];
        uint32_t pair = ((const uint16_t *)w.scales)[at];
        out.d0 = mul_rn(half_bits(super & 0xffff), (float)(pair & 255));
        out.m = -mul_rn(half_bits(super >> 16), (float)(pair >> 8));
    } else if constexpr (traits::super_16) {
        float d = half_bits(((const uint16_t *)w.supers)[row * (w.ld / 8) + group / 8]);
        uint32_t pair = ((const uint16_t *)w.scales)[at];
        out.d0 = mul_rn(d, (float)(int8_t)(pair & 255));
        out.d1 = mul_rn(d, (float)(int8_t)(pair >> 8));
    } else if constexpr (traits::has_min) {
        uint32_t pair = ((const uint32_t *)w.scales)[at];
        out.d0 = half_bits(pair & 0xffff);
        out.m = half_bits(pair >> 16);
    } else {
        out.d0 = half_bits(((const uint16_t *)w.scales)[at]);
    }
    return out;
}

/* One group's share of a product: exact integers, then one FMA (two with a minimum, or per 16), as on the CPU. low and high are
 * the integer sums of values 0..15 and 16..31 without the offset. */
template <int KIND>
__device__ __forceinline__ float add_group(float acc, int32_t low, int32_t high, const struct group_scale &w, float d, float s)
{
    if constexpr (kind_traits<KIND>::super_16) {
        acc = fmaf((float)low, mul_rn(w.d0, d), acc);
        return fmaf((float)high, mul_rn(w.d1, d), acc);
    }
    acc = fmaf((float)(low + high), mul_rn(w.d0, d), acc);
    if constexpr (kind_traits<KIND>::has_min)
        acc = fmaf(w.m, s, acc);
    return acc;
}
