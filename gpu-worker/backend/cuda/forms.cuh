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

/* Applies `value` to each column, stores it and its form. Columns past the end count as zero: they fill the form's padding. */
template <class F>
__device__ __forceinline__ void for_columns(size_t row, uint32_t cols, float *out, const struct act_forms &forms, F value)
{
    uint32_t end = forms.form == FORM_BF16 || forms.form == FORM_F16 ? forms.ld : (cols + 3) / 4 * 4;
    for (uint32_t c = threadIdx.x * 4; c < end; c += ROW_THREADS * 4) {
        float v[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            v[i] = c + i < cols ? value(c + i) : 0.0f;
            if (c + i < cols && out)
                out[c + i] = v[i];
        }
        store_form(forms, row, c, v);
    }
}
