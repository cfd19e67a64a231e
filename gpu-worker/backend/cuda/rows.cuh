/* Kernels that work row by row: embedding, RMS norm, SwiGLU, rotary angles, gather, and the roundings of activations for
 * products. One block a row; rows of a step's padding compute on whatever they hold. */
#pragma once
#include "gpu-worker/backend/cuda/forms.cuh"

/* x -> its form; column c is that of x's column order[c], or with NULL of c. */
__global__ void __launch_bounds__(ROW_THREADS)
    form_kernel(const float *__restrict__ x, const uint32_t *__restrict__ order, uint32_t cols, struct act_forms forms)
{
    const float *row = x + (size_t)blockIdx.x * cols;
    for_columns(blockIdx.x, cols, nullptr, forms, [&](uint32_t c) { return row[order ? order[c] : c]; });
}

__global__ void __launch_bounds__(ROW_THREADS)
    rmsnorm_kernel(const float *__restrict__ x, const float *__restrict__ weight, float *__restrict__ out, uint32_t cols,
                   float eps, struct act_forms forms)
{
    CU_SHARED(float[ROW_THREADS / WARP], scratch);
    const float *row = x + (size_t)blockIdx.x * cols;
    float sum = 0;
    for (uint32_t c = threadIdx.x; c < cols; c += ROW_THREADS)
        sum = fmaf(row[c], row[c], sum);
    float scale = 1.0f / sqrtf(block_sum<ROW_THREADS>(sum, scratch) / (float)cols + eps);
    for_columns(blockIdx.x, cols, out + (size_t)blockIdx.x * cols, forms,
                [&](uint32_t c) { return mul_rn(mul_rn(row[c], scale), weight[c]); });
}

/* gate = silu(gate) * up */
__global__ void __launch_bounds__(ROW_THREADS)
    silu_mul_kernel(float *gate, const float *__restrict__ up, uint32_t cols, struct act_forms forms)
{
    float *g = gate + (size_t)blockIdx.x * cols;
    const float *u = up + (size_t)blockIdx.x * cols;
    for_columns(blockIdx.x, cols, g, forms, [&](uint32_t c) { return g[c] / (1.0f + expf(-g[c])) * u[c]; });
}

/* gate = gelu(gate) * up, gelu by its tanh form: x / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3). */
__global__ void __launch_bounds__(ROW_THREADS)
    gelu_mul_kernel(float *gate, const float *__restrict__ up, uint32_t cols, struct act_forms forms)
{
    constexpr float LINEAR = -0x1.26aec2p+1f, CUBIC = -0x1.a5a7dp-4f; /* times -2 log2(e) */
    float *g = gate + (size_t)blockIdx.x * cols;
    const float *u = up + (size_t)blockIdx.x * cols;
    for_columns(blockIdx.x, cols, g, forms,
                [&](uint32_t c) { return g[c] / (1.0f + exp2f(g[c] * fmaf(g[c] * g[c], CUBIC, LINEAR))) * u[c]; });
}

/* Each run of `width` columns by itself, in place; a warp a run. */
__global__ void __launch_bounds__(ROW_THREADS)
    head_rmsnorm_kernel(float *x, const float *__restrict__ weight, uint32_t cols, uint32_t width, float eps)
{
    uint32_t lane = threadIdx.x % WARP;
    for (uint32_t first = threadIdx.x / WARP * width; first < cols; first += ROW_THREADS / WARP * width) {
        float *run = x + (size_t)blockIdx.x * cols + first, sum = 0;
        for (uint32_t c = lane; c < width; c += WARP)
            sum = fmaf(run[c], run[c], sum);
        float scale = 1.0f / sqrtf(warp_sum(sum) / (float)width + eps);
        for (uint32_t c = lane; c < width; c += WARP)
            run[c] = mul_rn(mul_rn(run[c], scale), weight[c]);
    }
}

/* x = factor x + y; y NULL: nothing is added. */
__global__ void __launch_bounds__(ROW_THREADS) add_kernel(float *x, const float *__restrict__ y, uint32_t cols, float factor)
{
    for (uint32_t c = threadIdx.x; c < cols; c += ROW_THREADS) {
        size_t at = (size_t)blockIdx.x * cols + c;
        float value = mul_rn(x[at], factor);
        x[at] = y ? add_rn(value, y[at]) : value;
    }
}

/* out[i] = x[outputs[i]] */
__global__ void __launch_bounds__(ROW_THREADS)
    gather_kernel(const float *__restrict__ x, float *__restrict__ out, uint32_t cols, struct step_view step)
{
    const float *row = x + (size_t)step.outputs[blockIdx.x] * cols;
    for (uint32_t c = threadIdx.x; c < cols; c += ROW_THREADS)
        out[(size_t)blockIdx.x * cols + c] = row[c];
}

/* ---- embedding ---- */

/* One value of a repacked matrix, by the format's definition (quant.h): each product and sum rounded on its own. */
template <int KIND>
__device__ __forceinline__ float matrix_value(const struct matrix &w, size_t row, uint32_t c)
{
    typedef kind_traits<KIND> traits;
    if constexpr (KIND == MATRIX_F32) {
        return ((const float *)w.codes)[row * w.ld + c];
    } else if constexpr (KIND == MATRIX_F16) {
        return half_bits(((const uint16_t *)w.codes)[row * w.ld + c]);
    } else if constexpr (KIND == MATRIX_BF16) {
        return bf16_low(((const uint16_t *)w.codes)[row * w.ld + c]);
    } else {
        size_t at = row * w.ld + c / 32;
        uint32_t i = c % 32, j = i % 16 / 4, shift = i % 4 * 8, low, high, extra[2] = {0, 0};
        if constexpr (traits::bits == 8)
            extra[0] = ((const uint32_t *)w.high)[at * 4 + j];
        if constexpr (traits::bits == 5)
            extra[0] = ((const uint32_t *)w.high)[at];
        if constexpr (traits::bits == 6) {
            extra[0] = ((const uint32_t *)w.high)[at * 2];
            extra[1] = ((const uint32_t *)w.high)[at * 2 + 1];
        }
        unpack_words<KIND>(((const uint32_t *)w.codes)[at * 4 + j], extra, (int)j, &low, &high);
        uint32_t byte = (i < 16 ? low : high) >> shift & 255;
        float q = traits::bits == 8 ? (float)(int8_t)byte : (float)((int)byte - traits::offset);
        struct group_scale scale = load_scale<KIND>(w, row, c / 32);
        float value = mul_rn(traits::super_16 && i >= 16 ? scale.d1 : scale.d0, q);
        return traits::has_min ? add_rn(value, scale.m) : value;
    }
}

template <int KIND>
__global__ void __launch_bounds__(ROW_THREADS) embed_kernel(struct matrix table, float *__restrict__ out, struct step_view step)
{
    size_t row = step.rows[blockIdx.x].id;
    for (uint32_t c = threadIdx.x; c < table.cols; c += ROW_THREADS)
        out[(size_t)blockIdx.x * table.cols + c] = matrix_value<KIND>(table, row, c);
}

/* ---- rotary embedding ---- */

/* out[r] = (cos, sin) of position * frequency, interleaved. */
__global__ void __launch_bounds__(ROW_THREADS)
    angles_kernel(const float *__restrict__ frequencies, uint32_t n, float *__restrict__ out, struct step_view step)
{
    double position = (double)step.rows[blockIdx.x].position;
    for (uint32_t i = threadIdx.x; i < n; i += ROW_THREADS) {
        double angle = position * (double)frequencies[i];
        out[((size_t)blockIdx.x * n + i) * 2] = (float)cos(angle);
        out[((size_t)blockIdx.x * n + i) * 2 + 1] = (float)sin(angle);
    }
}
