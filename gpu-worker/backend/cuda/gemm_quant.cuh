/* Products of many rows of x with a quantized matrix, on int8 tensor cores.
 *
 * A group of 32 columns is the depth of one mma.m16n8k32, so each mma gives the exact integer sums of a group for 16 rows of x
 * and 8 rows of W; they are scaled and added in f32 in the order of the groups. That is the CPU's arithmetic operation for
 * operation: results have the CPU's bits, at any number of rows.
 *
 *   block: M rows of x times 64 rows of W, 4 warps; 4 groups (128 columns) a stage, two stages, filled by cp.async
 *
 *   shared, one stage:  a   [M][2][4] 16 bytes + 16      first halves of 4 groups, second halves
 *                       b   [64][4] 16 bytes + 16        codes;  8-bit: [64][2][4]
 *                       bh  [64][4] u32 or u32 x 2       5- and 6-bit: high plane
 *                       am  [M][4] act_group             bs [64][4] group_scale as float2
 *
 * 16 bytes of padding a row put the 8 rows that a warp reads at once into different banks.
 */
#pragma once
#include "gpu-worker/backend/cuda/gemv.cuh"

static constexpr int GEMM_N = 64, GEMM_GROUPS = 4, GEMM_THREADS = 128;

template <int KIND, int M>
struct gemm_stage {
    static constexpr int b_planes = kind_traits<KIND>::bits == 8 ? 2 : 1;
    static constexpr int high_words = kind_traits<KIND>::bits == 5 ? 1 : kind_traits<KIND>::bits == 6 ? 2 : 0;
    uint4 a[M][2 * GEMM_GROUPS + 1];
    uint4 b[GEMM_N][b_planes * GEMM_GROUPS + 1];
    uint32_t bh[high_words ? GEMM_N : 1][high_words ? high_words * GEMM_GROUPS : 1];
    struct act_group am[M][GEMM_GROUPS];
    float2 bs[GEMM_N][GEMM_GROUPS];
};

template <int KIND, int M>
constexpr size_t gemm_quant_shared()
{
    return 2 * sizeof(gemm_stage<KIND, M>);
}

/* The scales a thread carries from global memory to the next stage: one group of W's rows t / 2, two groups. */
struct carried_scales {
    float2 v[GEMM_N * GEMM_GROUPS / GEMM_THREADS];
};

template <int KIND, int M>
struct gemm_tile {
    typedef gemm_stage<KIND, M> stage_type;
    const struct matrix &w;
    const struct acts &acts;
    uint32_t n, m0, n0;

    /* Codes and activations of groups g0..g0+3; rows and groups past the end are zeros. */
    __device__ __forceinline__ void load(stage_type &stage, uint32_t g0) const
    {
        uint32_t groups = w.ld;
        for (uint32_t i = threadIdx.x; i < M * 2 * GEMM_GROUPS; i += GEMM_THREADS) {
            uint32_t r = i / (2 * GEMM_GROUPS), half = i / GEMM_GROUPS % 2, g = g0 + i % GEMM_GROUPS;
            bool ok = m0 + r < n && g < groups;
            size_t at = ok ? (size_t)(m0 + r) * groups + g : 0;
            cp_async<16>(&stage.a[r][i % (2 * GEMM_GROUPS)], acts.q + half * acts.plane + at * 16, ok);
        }
        for (uint32_t i = threadIdx.x; i < M * GEMM_GROUPS; i += GEMM_THREADS) {
            uint32_t r = i / GEMM_GROUPS, g = g0 + i % GEMM_GROUPS;
            bool ok = m0 + r < n && g < groups;
            cp_async<16>(&stage.am[r][i % GEMM_GROUPS], &acts.groups[ok ? (size_t)(m0 + r) * groups + g : 0], ok);
        }
        for (uint32_t i = threadIdx.x; i < GEMM_N * GEMM_GROUPS; i += GEMM_THREADS) {
            uint32_t r = i / GEMM_GROUPS, q = i % GEMM_GROUPS, g = g0 + q;
            bool ok = n0 + r < w.rows && g < groups;
            size_t at = ok ? (size_t)(n0 + r) * groups + g : 0;
            cp_async<16>(&stage.b[r][q], w.codes + at * 16, ok);
            if constexpr (stage_type::b_planes == 2)
                cp_async<16>(&stage.b[r][GEMM_GROUPS + q], w.high + at * 16, ok);
            if constexpr (stage_type::high_words == 1)
                cp_async<4>(&stage.bh[r][q], w.high + at * 4, ok);
            if constexpr (stage_type::high_words == 2)
                cp_async<8>(&stage.bh[r][2 * q], w.high + at * 8, ok);
        }
        cp_async_commit();
    }

    __device__ __forceinline__ void load_scales(struct carried_scales &out, uint32_t g0) const
    {
#pragma unroll
        for (uint32_t i = 0; i < GEMM_N * GEMM_GROUPS / GEMM_THREADS; i++) {
            uint32_t at = threadIdx.x + i * GEMM_THREADS, r = at / GEMM_GROUPS, g = g0 + at % GEMM_GROUPS;
            out.v[i] = make_float2(0, 0);
            if (n0 + r < w.rows && g < w.ld) {
                struct group_scale scale = load_scale<KIND>(w, n0 + r, g);
                out.v[i] = make_float2(scale.d0, kind_traits<KIND>::super_16 ? scale.d1 : scale.m);
            }
        }
    }

    __device__ __forceinline__ void store_scales(stage_type &stage, const struct carried_scales &in) const
    {
#pragma unroll
        for (uint32_t i = 0; i < GEMM_N * GEMM_GROUPS / GEMM_THREADS; i++) {
            uint32_t at = threadIdx.x + i * GEMM_THREADS;
            stage.bs[at / GEMM_GROUPS][at % GEMM_GROUPS] = in.v[i];
        }
    }
};

/* The mma operand of W's row: bytes of values 4t..4t+3 and 16+4t... */
template <int KIND, int M>
__device__ __forceinline__ void load_b(const gemm_stage<KIND, M> &stage, uint32_t row, int g, int t, uint32_t b[2])
{
    const uint32_t *codes = (const uint32_t *)stage.b[row];
    if constexpr (kind_traits<KIND>::bits == 8)
        unpack_words<KIND>(codes[4 * g + t], &codes[4 * (GEMM_GROUPS + g) + t], t, &b[0], &b[1]);
    else
        unpack_words<KIND>(codes[4 * g + t], &stage.bh[stage.high_words ? row : 0][stage.high_words * g], t, &b[0], &b[1]);
}

/* One group for a warp's tile of 16 MT x 8 NT outputs. */
template <int KIND, int M, int MT, int NT>
__device__ __forceinline__ void multiply_group(const gemm_stage<KIND, M> &stage, uint32_t wm, uint32_t wn, int g,
                                               float acc[MT][NT][4])
{
    typedef kind_traits<KIND> traits;
    int lane = threadIdx.x % WARP, quad = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < MT; i++) {
        uint32_t a[4];
        uint32_t r0 = wm + i * 16 + quad;
        a[0] = ((const uint32_t *)stage.a[r0])[4 * g + t];
        a[1] = ((const uint32_t *)stage.a[r0 + 8])[4 * g + t];
        a[2] = ((const uint32_t *)stage.a[r0])[4 * (GEMM_GROUPS + g) + t];
        a[3] = ((const uint32_t *)stage.a[r0 + 8])[4 * (GEMM_GROUPS + g) + t];
        const struct act_group am[2] = {stage.am[r0][g], stage.am[r0 + 8][g]};
#pragma unroll
        for (int j = 0; j < NT; j++) {
            uint32_t b[2];
            load_b<KIND, M>(stage, wn + j * 8 + quad, g, t, b);
            int low[4], high[4] = {0, 0, 0, 0};
#pragma unroll
            for (int e = 0; e < 4; e++)
                low[e] = -traits::offset * (traits::super_16 ? am[e / 2].low : am[e / 2].sum);
            if constexpr (traits::super_16) {
                const uint32_t first[2] = {b[0], 0}, second[2] = {0, b[1]};
#pragma unroll
                for (int e = 0; e < 4; e++)
                    high[e] = -traits::offset * (am[e / 2].sum - am[e / 2].low);
                mma_s8_16832(low, a, first);
                mma_s8_16832(high, a, second);
            } else {
                mma_s8_16832(low, a, b);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float2 s = stage.bs[wn + j * 8 + 2 * t + e % 2][g];
                const struct group_scale scale = {s.x, s.y, s.y};
                acc[i][j][e] = add_group<KIND>(acc[i][j][e], low[e], high[e], scale, am[e / 2].d, am[e / 2].s);
            }
        }
    }
}

/* grid (blocks of 64 rows of W, blocks of M rows of x) */
template <int KIND, int M>
__global__ void __launch_bounds__(GEMM_THREADS) gemm_quant_kernel(struct products args, struct acts acts)
{
    constexpr int WARPS_M = M >= 64 ? 2 : 1, WARPS_N = 4 / WARPS_M, MT = M / WARPS_M / 16, NT = GEMM_N / WARPS_N / 8;
    CU_DYN_SMEM(uint4, memory);
    typedef gemm_stage<KIND, M> stage_type;
    stage_type *stages = (stage_type *)memory;
    const struct product &p = product_of(args, blockIdx.x);
    const gemm_tile<KIND, M> tile = {p.w, acts, args.n, blockIdx.y * M, (blockIdx.x - p.first_block) * GEMM_N};
    uint32_t warp = threadIdx.x / WARP, wm = warp / WARPS_N * (M / WARPS_M), wn = warp % WARPS_N * (GEMM_N / WARPS_N);
    uint32_t groups = p.w.ld;
    float acc[MT][NT][4] = {};
    struct carried_scales scales;

    tile.load(stages[0], 0);
    tile.load_scales(scales, 0);
    tile.store_scales(stages[0], scales);
    for (uint32_t g0 = 0, s = 0; g0 < groups; g0 += GEMM_GROUPS, s ^= 1) {
        bool more = g0 + GEMM_GROUPS < groups;
        if (more) {
            tile.load(stages[s ^ 1], g0 + GEMM_GROUPS);
            tile.load_scales(scales, g0 + GEMM_GROUPS);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
#pragma unroll
        for (int g = 0; g < GEMM_GROUPS; g++)
            multiply_group<KIND, M, MT, NT>(stages[s], wm, wn, g, acc);
        if (more)
            tile.store_scales(stages[s ^ 1], scales);
        __syncthreads();
    }
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                store_product(args, p, tile.m0 + wm + i * 16 + lane / 4 + e / 2 * 8, tile.n0 + wn + j * 8 + lane % 4 * 2 + e % 2,
                              acc[i][j][e]);
}
