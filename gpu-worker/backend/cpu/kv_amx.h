/* How the AMX kernels keep keys and values in the pool, for the file that stores them and the one that reads them. Include it
 * only from files that are compiled for AMX.
 *
 *   K   [block_size / 16] pages [key_dim / 32][16 keys][32 dims]
 *   V   [block_size / 32][head_dim][32 keys], [head_dim][16 keys] in blocks of 16
 */
#pragma once
#include "gpu-worker/backend/cpu/attention.h"
#include "gpu-worker/backend/cpu/kernels.h"
#include "gpu-worker/backend/cpu/v16.h"

enum { VALUE_KEYS = STORE_RUN };

/* Of dimension 0; the next dimension is value_stride() further. */
V_INLINE size_t value_stride(const struct kv_layer *kv)
{
    return kv->block_size < VALUE_KEYS ? kv->block_size : VALUE_KEYS;
}
V_INLINE size_t value_at(const struct kv_layer *kv, uint32_t slot)
{
    return (size_t)(slot / VALUE_KEYS) * VALUE_KEYS * kv->head_dim + slot % VALUE_KEYS;
}

/* 16 values from d, 0 past the head dimension. */
V_INLINE v16 padded(const float *x, uint32_t d, uint32_t head_dim)
{
    return d < head_dim ? v16_load(x + d) : v16_set1(0);
}

V_INLINE void transpose_16(__m512i x[16])
{
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    /* x[4 g + c]: column 4 l + c of rows 4 g..4 g + 3 in 128-bit lane l */
    for (int c = 0; c < 4; c++) {
        __m512i a = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x88), b = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xdd);
        __m512i d = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0x88), e = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0xdd);
        t[c] = _mm512_shuffle_i32x4(a, d, 0x88);
        t[8 + c] = _mm512_shuffle_i32x4(a, d, 0xdd);
        t[4 + c] = _mm512_shuffle_i32x4(b, e, 0x88);
        t[12 + c] = _mm512_shuffle_i32x4(b, e, 0xdd);
    }
    for (int i = 0; i < 16; i++)
        x[i] = t[i];
}

/* Sets store and store_run of each dtype; store_run stays NULL where rows gain nothing by it. */
void kv_store_amx(struct attention_kernels kernels[KV_DTYPES]);
