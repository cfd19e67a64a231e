/* Keys and values of rows into the pool, as the attention on AMX reads them. */
#include "gpu-worker/backend/cpu/kv_amx.h"
#include <string.h>

V_INLINE uint8_t *key_at(const struct kv_layer *kv, struct kv_head_at at, uint32_t slot, uint32_t d)
{
    size_t page = (size_t)(slot / KV_PAGE) * kv->key_dim * KV_PAGE;
    return at.k + (page + (size_t)d * KV_PAGE + slot % KV_PAGE * 32) * kv->value_bytes;
}

V_INLINE __m256i as_halves(enum backend_kv_dtype dtype, v16 x)
{
    return dtype == KV_F16 ? _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) : (__m256i)_mm512_cvtneps_pbh(x);
}

V_INLINE void store_key(enum backend_kv_dtype dtype, const struct kv_layer *kv, struct kv_head_at at, uint32_t slot,
                        const float *k)
{
    for (uint32_t d = 0; d < kv->key_dim; d += 16)
        _mm256_storeu_si256((__m256i *)(key_at(kv, at, slot, d / 32 * 32) + d % 32 * 2),
                            as_halves(dtype, padded(k, d, kv->head_dim)));
}

V_INLINE void store_16_bits(enum backend_kv_dtype dtype, const struct kv_layer *kv, struct kv_head_at at, uint32_t slot,
                            const float *k, const float *v)
{
    uint16_t *values = (uint16_t *)at.v + value_at(kv, slot);
    size_t stride = value_stride(kv);
    store_key(dtype, kv, at, slot, k);
    for (uint32_t d = 0; d < kv->head_dim; d += 16) {
        uint16_t x[16];
        _mm256_storeu_si256((__m256i *)x, as_halves(dtype, v16_load(v + d)));
        for (uint32_t i = 0; i < 16; i++)
            values[(d + i) * stride] = x[i];
    }
}

static void store_f16(const struct kv_layer *kv, uint32_t block, uint32_t slot, uint32_t kv_head, const float *k, const float *v)
{
    store_16_bits(KV_F16, kv, kv_head_at(kv, block, kv_head), slot, k, v);
}

static void store_bf16(const struct kv_layer *kv, uint32_t block, uint32_t slot, uint32_t kv_head, const float *k, const float *v)
{
    store_16_bits(KV_BF16, kv, kv_head_at(kv, block, kv_head), slot, k, v);
}

/* 32 rows fill the lines of their values: row by row each line would be written 32 times, 2 bytes at a time. */
V_INLINE void store_run_16_bits(enum backend_kv_dtype dtype, const struct kv_layer *kv, struct kv_head_at at, uint32_t slot,
                                const float *k, size_t k_stride, const float *v, size_t v_stride)
{
    uint16_t *values = (uint16_t *)at.v + value_at(kv, slot);
    for (uint32_t i = 0; i < STORE_RUN; i++)
        store_key(dtype, kv, at, slot + i, k + i * k_stride);
    for (uint32_t d = 0; d < kv->head_dim; d += 16) {
        __m512i x[16]; /* pairs of keys */
        for (uint32_t i = 0; i < 16; i++) {
            __m256i a = as_halves(dtype, v16_load(v + 2 * i * v_stride + d));
            __m256i b = as_halves(dtype, v16_load(v + (2 * i + 1) * v_stride + d));
            x[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
        }
        transpose_16(x);
        for (uint32_t i = 0; i < 16; i++)
            _mm512_storeu_si512(values + (d + i) * VALUE_KEYS, x[i]);
    }
}

#define STORE_RUN_16_BITS(name, dtype)                                                                                           \
    static void name(const struct kv_layer *kv, uint32_t block, uint32_t slot, uint32_t kv_head, const float *k,                 \
                     size_t k_stride, const float *v, size_t v_stride)                                                           \
    {                                                                                                                            \
        store_run_16_bits(dtype, kv, kv_head_at(kv, block, kv_head), slot, k, k_stride, v, v_stride);                            \
    }
STORE_RUN_16_BITS(store_run_f16, KV_F16)
STORE_RUN_16_BITS(store_run_bf16, KV_BF16)

/* Returns the scale. */
V_INLINE float quantize_head(const float *x, uint32_t head_dim, uint32_t padded_dim, int8_t *q)
{
    v16 high = v16_set1(0);
    for (uint32_t d = 0; d < head_dim; d += 16)
        high = v16_max(high, v16_abs(v16_load(x + d)));
    float amax = _mm512_reduce_max_ps(high);
    v16 inverse = v16_set1(amax > 0 ? 127.0f / amax : 0);
    for (uint32_t d = 0; d < padded_dim; d += 16)
        _mm_storeu_si128((__m128i *)(q + d), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v16_mul(padded(x, d, head_dim), inverse))));
    return amax / 127.0f;
}

static void store_int8(const struct kv_layer *kv, uint32_t block, uint32_t slot, uint32_t kv_head, const float *k, const float *v)
{
    struct kv_head_at at = kv_head_at(kv, block, kv_head);
    int8_t q[MAX_HEAD_DIM], *values = (int8_t *)at.v + value_at(kv, slot);
    size_t stride = value_stride(kv);
    at.k_scales[slot] = quantize_head(k, kv->head_dim, kv->key_dim, q);
    for (uint32_t d = 0; d < kv->key_dim; d += 32)
        memcpy(key_at(kv, at, slot, d), q + d, 32);
    at.v_scales[slot] = quantize_head(v, kv->head_dim, kv->head_dim, q);
    for (uint32_t d = 0; d < kv->head_dim; d++)
        values[d * stride] = q[d];
}

void kv_store_amx(struct attention_kernels kernels[KV_DTYPES])
{
    kernels[KV_F16].store = store_f16, kernels[KV_F16].store_run = store_run_f16;
    kernels[KV_BF16].store = store_bf16, kernels[KV_BF16].store_run = store_run_bf16;
    kernels[KV_INT8].store = store_int8, kernels[KV_INT8].store_run = NULL;
}
