/* Row-wise kernels' common part: they apply a function to each column and also write the rounded form of their result that the
 * product which follows reads. One block a row. */
#pragma once
#include "gpu-worker/backend/cuda/cuda_internal.h"
#include "gpu-worker/backend/cuda/device.cuh"

static constexpr int ROW_THREADS = 256;

/* Four neighbouring values of a row; the caller's lanes hold neighbouring fours. All 8 lanes of a group call or none. */
__device__ __forceinline__ void store_form(const struct act_forms &forms, size_t row, uint32_t column, const float v[4])
{
    if (forms.form == FORM_GROUPS) {
        store_group(forms.acts, row, column / 32, column / 4 % 8, v);
    } else if (forms.form != FORM_NONE) {
        bool bf16 = forms.form == FORM_BF16;
        float c[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            c[i] = bf16 ? v[i] : fminf(fmaxf(v[i], -65504.0f), 65504.0f);
        uint32_t *out = (uint32_t *)(forms.halves + row * forms.ld + column);
        out[0] = bf16 ? bf16_pair(c[0], c[1]) : half_pair(c[0], c[1]);
        out[1] = bf16 ? bf16_pair(c[2], c[3]) : half_pair(c[2], c[3]);
    }
}

/* A row's form with one scale; `value` gives its columns, of which this thread has seen a part: `most` is the largest of it. The
 * whole block calls. */
template <class F>
__device__ __forceinline__ void store_row_form(const struct act_forms &forms, size_t row, uint32_t cols, float most, F value)
{
    CU_SHARED(float[ROW_THREADS / WARP], scratch);
    bool wide = forms.form == FORM_ROWS_16;
    float range = wide ? 32512.0f : 127.0f;
    most = warp_max(most);
    if (threadIdx.x % WARP == 0)
        scratch[threadIdx.x / WARP] = most;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROW_THREADS / WARP; i++)
        most = fmaxf(most, scratch[i]);
    float inverse = most > 0 ? range / most : 0.0f;
    for (uint32_t c = threadIdx.x * 4; c < cols; c += ROW_THREADS * 4) {
        float v[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            v[i] = value(c + i);
        store_row_group(forms.acts, row, c / 32, c / 4 % 8, v, wide, inverse, most / range);
    }
}

/* Applies `value` to each column, stores it and its form. Columns past the end count as zero: they fill the form's padding. The
 * whole block calls. */
template <class F>
__device__ __forceinline__ void for_columns(size_t row, uint32_t cols, float *out, const struct act_forms &forms, F value)
{
    bool by_row = forms.form == FORM_ROWS_8 || forms.form == FORM_ROWS_16;
    float most = 0;
    uint32_t end = forms.form == FORM_BF16 || forms.form == FORM_F16 ? forms.ld : (cols + 3) / 4 * 4;
    for (uint32_t c = threadIdx.x * 4; c < end; c += ROW_THREADS * 4) {
        float v[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            v[i] = c + i < cols ? value(c + i) : 0.0f;
            if (c + i < cols && out)
                out[c + i] = v[i];
            most = fmaxf(most, fabsf(v[i]));
        }
        if (!by_row)
            store_form(forms, row, c, v);
    }
    if (by_row)
        store_row_form(forms, row, cols, most, [&](uint32_t c) { return out ? out[c] : value(c); });
}
