/* Products of many rows of x with an F16 or BF16 matrix, on tensor cores: x is rounded to the matrix's type, sums run in f32.
 * The result of a row depends on nothing but the row: the order over the columns is fixed.
 *
 *   block: M rows of x times 64 rows of W, 4 warps; 64 columns a stage, two stages filled by cp.async; rows of shared memory are
 *   padded by 16 bytes, so that ldmatrix meets no bank twice
 */
#pragma once
#include "gpu-worker/backend/cuda/gemm_quant.cuh"

static constexpr int GEMM_K = 64;

template <int M>
struct float_stage {
    uint16_t a[M][GEMM_K + 8], b[GEMM_N][GEMM_K + 8];
};

template <int M>
constexpr size_t gemm_float_shared()
{
    return 2 * sizeof(float_stage<M>);
}

template <int M>
__device__ __forceinline__ void load_float_stage(float_stage<M> &stage, const struct matrix &w, const uint16_t *x, uint32_t n,
                                                 uint32_t m0, uint32_t n0, uint32_t k0)
{
    constexpr uint32_t PIECES = GEMM_K / 8;
    for (uint32_t i = threadIdx.x; i < M * PIECES; i += GEMM_THREADS) {
        uint32_t r = i / PIECES, c = i % PIECES * 8;
        bool ok = m0 + r < n;
        cp_async<16>(&stage.a[r][c], x + (size_t)(ok ? m0 + r : 0) * w.ld + k0 + c, ok);
    }
    for (uint32_t i = threadIdx.x; i < GEMM_N * PIECES; i += GEMM_THREADS) {
        uint32_t r = i / PIECES, c = i % PIECES * 8;
        bool ok = n0 + r < w.rows;
        cp_async<16>(&stage.b[r][c], (const uint16_t *)w.codes + (size_t)(ok ? n0 + r : 0) * w.ld + k0 + c, ok);
    }
    cp_async_commit();
}

template <int KIND, int M, int MT, int NT>
__device__ __forceinline__ void multiply_float_stage(const float_stage<M> &stage, uint32_t wm, uint32_t wn, float acc[MT][NT][4])
{
    uint32_t lane = threadIdx.x % WARP;
#pragma unroll
    for (int k = 0; k < GEMM_K; k += 16) {
        uint32_t a[MT][4], b[NT / 2][4];
#pragma unroll
        for (int i = 0; i < MT; i++)
            ldmatrix_x4(a[i], &stage.a[wm + i * 16 + lane % 16][k + lane / 16 * 8]);
#pragma unroll
        for (int j = 0; j < NT / 2; j++)
            ldmatrix_x4(b[j], &stage.b[wn + j * 16 + lane % 8 + lane / 16 * 8][k + lane / 8 % 2 * 8]);
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int j = 0; j < NT; j++) {
                const uint32_t pair[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
                if constexpr (KIND == MATRIX_BF16)
                    mma_bf16_16816(acc[i][j], a[i], pair);
                else
                    mma_f16_16816(acc[i][j], a[i], pair);
            }
    }
}

/* x [n][ld] in the matrix's type; grid (blocks of 64 rows of W, blocks of M rows of x) */
template <int KIND, int M>
__global__ void __launch_bounds__(GEMM_THREADS) gemm_float_kernel(struct products args, const uint16_t *__restrict__ x)
{
    constexpr int WARPS_M = M >= 64 ? 2 : 1, WARPS_N = 4 / WARPS_M, MT = M / WARPS_M / 16, NT = GEMM_N / WARPS_N / 8;
    CU_DYN_SMEM(uint4, memory);
    float_stage<M> *stages = (float_stage<M> *)memory;
    const struct product &p = product_of(args, blockIdx.x);
    uint32_t m0 = blockIdx.y * M, n0 = (blockIdx.x - p.first_block) * GEMM_N;
    uint32_t warp = threadIdx.x / WARP, wm = warp / WARPS_N * (M / WARPS_M), wn = warp % WARPS_N * (GEMM_N / WARPS_N);
    float acc[MT][NT][4] = {};

    load_float_stage<M>(stages[0], p.w, x, args.n, m0, n0, 0);
    for (uint32_t k0 = 0, s = 0; k0 < p.w.ld; k0 += GEMM_K, s ^= 1) {
        if (k0 + GEMM_K < p.w.ld) {
            load_float_stage<M>(stages[s ^ 1], p.w, x, args.n, m0, n0, k0 + GEMM_K);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        multiply_float_stage<KIND, M, MT, NT>(stages[s], wm, wn, acc);
        __syncthreads();
    }
    uint32_t lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                store_product(args, p, m0 + wm + i * 16 + lane / 4 + e / 2 * 8, n0 + wn + j * 8 + lane % 4 * 2 + e % 2,
                              acc[i][j][e]);
}
