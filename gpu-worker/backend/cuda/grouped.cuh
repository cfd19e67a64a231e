/* Products with grouped matrices (quant/grouped.h). Their integers are exact, so the results have the bits of the definition;
 * only the kernel for few rows adds the groups of a W4A16 row in another order.
 *
 *   W8A8    rows of x are int8; a row's sum runs in int32 to its end
 *   W4A16   rows of x are 16-bit integers, 256 high + low, both int8:
 *           a group's sum is 256 (high . q) + (low . q) - zero (sum of x)
 *
 *   block of the kernel for many rows: M rows of x times 64 rows of W, 4 warps;
 *   128 columns a stage, two stages, filled by cp.async
 *
 *   shared, one stage:  a       [M][planes][4] 16 bytes + 16       planes of activations (layout.h): 2, or 4
 *                       b       [64][4] 16 bytes + 16              codes; W8A8: [64][2][4]
 *                       sums    [M][4]                             W4A16: of 32 activations
 *                       scales  [64][2]                            W4A16: of one or two groups
 */
#pragma once
#include "gpu-worker/backend/cuda/gemm_quant.cuh"

template <int KIND>
struct grouped_traits {
    static constexpr bool is_w4 = KIND == MATRIX_W4A16;
    static constexpr int parts = is_w4 ? 2 : 1; /* int8 numbers of an activation, most significant first */
};

/* Scale in the low half, zero in the high one, of the group with a row's block of 32 columns `block`. */
__device__ __forceinline__ uint32_t load_group_scale(const struct matrix &w, size_t row, uint32_t block)
{
    return ((const uint32_t *)w.scales)[row * (w.ld >> w.group_shift) + (block >> w.group_shift)];
}

__device__ __forceinline__ float row_scale_of(const struct acts &acts, uint32_t row)
{
    return acts.groups[(size_t)row * acts.n_groups].d;
}

/* W8A8: the row's sum with its scales. */
__device__ __forceinline__ float scale_sum(const struct matrix &w, uint32_t row, int32_t sum, float d)
{
    return mul_rn((float)sum, mul_rn(((const float *)w.scales)[row], d));
}

/* W4A16: a group's sum, of which the parts and the activations' own sum are known. */
__device__ __forceinline__ float add_sum(float acc, int32_t high, int32_t low, uint32_t scale, int32_t sum)
{
    return fmaf((float)(256 * high + low - (int32_t)(scale >> 16) * sum), half_bits(scale & 0xffff), acc);
}

/* ---- few rows of x ---- */

__device__ __forceinline__ int32_t sum_lanes(int32_t v)
{
#pragma unroll
    for (int step = 16; step; step >>= 1)
        v += __shfl_xor_sync(FULL_WARP, v, step);
    return v;
}

/* A row of W's 32 codes times those of x, part by part. */
template <int KIND>
__device__ __forceinline__ void multiply_block(const struct group_words<KIND> &words, const uint4 x[][2], int32_t out[])
{
#pragma unroll
    for (int part = 0; part < grouped_traits<KIND>::parts; part++) {
        const uint4 low = x[part][0], high = x[part][1];
        const uint32_t xl[4] = {low.x, low.y, low.z, low.w}, xh[4] = {high.x, high.y, high.z, high.w};
        out[part] = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t a, b;
            unpack_words<KIND>(words.code[j], &words.extra[j], j, &a, &b);
            out[part] = __dp4a((int)a, (int)xl[j], out[part]);
            out[part] = __dp4a((int)b, (int)xh[j], out[part]);
        }
    }
}

/* What this lane's blocks of rows row0.. of W add to the sums: of W8A8 integers, of W4A16 f32. */
template <int KIND, int ROWS, int COLS>
__device__ __forceinline__ void multiply_blocks(const struct matrix &w, uint32_t row0, const struct acts &acts, uint32_t n,
                                                int32_t sums[ROWS][COLS], float acc[ROWS][COLS])
{
    constexpr int PARTS = grouped_traits<KIND>::parts;
    uint32_t blocks = w.ld;
    for (uint32_t g = threadIdx.x % WARP; g < blocks; g += WARP) {
        struct group_words<KIND> words[ROWS];
        uint32_t scale[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            size_t row = min(row0 + r, w.rows - 1);
            load_group<KIND>(w, row * blocks + g, &words[r]);
            if constexpr (grouped_traits<KIND>::is_w4)
                scale[r] = load_group_scale(w, row, g);
        }
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            size_t at = (size_t)min((uint32_t)c, n - 1) * blocks + g;
            uint4 x[PARTS][2];
#pragma unroll
            for (int part = 0; part < PARTS; part++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    x[part][half] = ld128(acts.q + (2 * part + half) * acts.plane + at * 16);
            int32_t sum = grouped_traits<KIND>::is_w4 ? acts.groups[at].sum : 0;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                int32_t part[PARTS];
                multiply_block<KIND>(words[r], x, part);
                if constexpr (grouped_traits<KIND>::is_w4)
                    acc[r][c] = add_sum(acc[r][c], part[0], part[1], scale[r], sum);
                else
                    sums[r][c] += part[0];
            }
        }
    }
}

/* Lane c * ROWS + r finishes column c of row r. */
template <int KIND, int COLS>
__global__ void __launch_bounds__(GEMV_THREADS, gemv_blocks(COLS)) gemv_grouped_kernel(struct products args, struct acts acts)
{
    constexpr int ROWS = gemv_rows(COLS);
    const struct product &p = product_of(args, blockIdx.x);
    uint32_t block_row = (blockIdx.x - p.first_block) * GEMV_BLOCK_ROWS, lane = threadIdx.x % WARP;
    for (uint32_t row = threadIdx.x / WARP * ROWS; row < GEMV_BLOCK_ROWS; row += GEMV_WARPS * ROWS) {
        uint32_t row0 = block_row + row;
        float acc[ROWS][COLS] = {}, mine = 0;
        int32_t sums[ROWS][COLS] = {}, my_sum = 0;
        if (row0 >= p.w.rows)
            break;
        multiply_blocks<KIND, ROWS, COLS>(p.w, row0, acts, args.n, sums, acc);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                bool here = lane == (uint32_t)(c * ROWS + r);
                if constexpr (grouped_traits<KIND>::is_w4) {
                    float sum = warp_sum(acc[r][c]);
                    mine = here ? sum : mine;
                } else {
                    int32_t sum = sum_lanes(sums[r][c]);
                    my_sum = here ? sum : my_sum;
                }
            }
        uint32_t c = lane / ROWS, r = row0 + lane % ROWS;
        if (c >= COLS || c >= args.n || r >= p.w.rows)
            continue;
        float d = row_scale_of(acts, c);
        if constexpr (grouped_traits<KIND>::is_w4)
            store_product(args, p, c, r, mul_rn(mine, d));
        else
            store_product(args, p, c, r, scale_sum(p.w, r, my_sum, d));
    }
}

/* ---- many ---- */

template <int KIND, int M>
struct grouped_stage {
    static constexpr int a_planes = 2 * grouped_traits<KIND>::parts, b_planes = grouped_traits<KIND>::is_w4 ? 1 : 2;
    static constexpr int scaled = grouped_traits<KIND>::is_w4;
    uint4 a[M][a_planes * GEMM_GROUPS + 1];
    uint4 b[GEMM_N][b_planes * GEMM_GROUPS + 1];
    int32_t sums[scaled ? M : 1][GEMM_GROUPS];
    uint32_t scales[scaled ? GEMM_N : 1][2];
};

/* Blocks g0..g0+3 of 32 columns; rows and blocks past the end are zeros. */
template <int KIND, int M>
__device__ __forceinline__ void load_grouped_stage(grouped_stage<KIND, M> &stage, const struct matrix &w, const struct acts &acts,
                                                   uint32_t n, uint32_t m0, uint32_t n0, uint32_t g0)
{
    typedef grouped_stage<KIND, M> stage_type;
    constexpr uint32_t A = stage_type::a_planes * GEMM_GROUPS, B = stage_type::b_planes * GEMM_GROUPS;
    for (uint32_t i = threadIdx.x; i < M * A; i += GEMM_THREADS) {
        uint32_t r = i / A, plane = i % A / GEMM_GROUPS, g = g0 + i % GEMM_GROUPS;
        bool ok = m0 + r < n && g < w.ld;
        size_t at = ok ? (size_t)(m0 + r) * w.ld + g : 0;
        cp_async<16>(&stage.a[r][i % A], acts.q + plane * acts.plane + at * 16, ok);
    }
    for (uint32_t i = threadIdx.x; i < GEMM_N * B; i += GEMM_THREADS) {
        uint32_t r = i / B, g = g0 + i % GEMM_GROUPS;
        bool ok = n0 + r < w.rows && g < w.ld;
        const uint8_t *from = i % B < GEMM_GROUPS ? w.codes : w.high;
        cp_async<16>(&stage.b[r][i % B], from + (ok ? (size_t)(n0 + r) * w.ld + g : 0) * 16, ok);
    }
    for (uint32_t i = threadIdx.x; stage_type::scaled && i < M * GEMM_GROUPS; i += GEMM_THREADS) {
        uint32_t r = i / GEMM_GROUPS, g = g0 + i % GEMM_GROUPS;
        bool ok = m0 + r < n && g < w.ld;
        cp_async<4>(&stage.sums[r][i % GEMM_GROUPS], &acts.groups[ok ? (size_t)(m0 + r) * w.ld + g : 0].sum, ok);
    }
    for (uint32_t i = threadIdx.x; stage_type::scaled && i < GEMM_N * 2; i += GEMM_THREADS) {
        uint32_t r = i / 2, group = (g0 >> w.group_shift) + i % 2, groups = w.ld >> w.group_shift;
        bool ok = n0 + r < w.rows && group < groups && i % 2 < (uint32_t)GEMM_GROUPS >> w.group_shift;
        cp_async<4>(&stage.scales[r][i % 2], (const uint32_t *)w.scales + (ok ? (size_t)(n0 + r) * groups + group : 0), ok);
    }
    cp_async_commit();
}

/* A warp's tile of 16 MT x 8 NT outputs. */
template <int KIND, int MT, int NT>
struct grouped_tile {
    int sums[MT][NT][grouped_traits<KIND>::parts][4];
    float acc[grouped_traits<KIND>::is_w4 ? MT : 1][grouped_traits<KIND>::is_w4 ? NT : 1][4];
};

/* The group that ends with block g of the stage: its sums become f32. */
template <int KIND, int M, int MT, int NT>
__device__ __forceinline__ void finish_group(const grouped_stage<KIND, M> &stage, uint32_t wm, uint32_t wn, int g, uint32_t shift,
                                             struct grouped_tile<KIND, MT, NT> &tile)
{
    uint32_t lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < MT; i++) {
        int32_t sum[2] = {0, 0};
        for (int b = g + 1 - (1 << shift); b <= g; b++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                sum[half] += stage.sums[wm + i * 16 + lane / 4 + 8 * half][b];
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                uint32_t scale = stage.scales[wn + j * 8 + lane % 4 * 2 + e % 2][g >> shift];
                int *high = &tile.sums[i][j][0][e], *low = &tile.sums[i][j][1][e];
                tile.acc[i][j][e] = add_sum(tile.acc[i][j][e], *high, *low, scale, sum[e / 2]);
                *high = *low = 0;
            }
    }
}

template <int KIND, int M, int MT, int NT>
__device__ __forceinline__ void multiply_grouped_stage(const grouped_stage<KIND, M> &stage, uint32_t wm, uint32_t wn,
                                                       uint32_t shift, struct grouped_tile<KIND, MT, NT> &tile)
{
    int lane = threadIdx.x % WARP, quad = lane / 4, t = lane % 4;
#pragma unroll
    for (int g = 0; g < GEMM_GROUPS; g++) {
        uint32_t b[NT][2];
#pragma unroll
        for (int j = 0; j < NT; j++) {
            const uint32_t *codes = (const uint32_t *)stage.b[wn + j * 8 + quad];
            const uint32_t *second = &codes[grouped_traits<KIND>::is_w4 ? 0 : 4 * (GEMM_GROUPS + g) + t];
            unpack_words<KIND>(codes[4 * g + t], second, t, &b[j][0], &b[j][1]);
        }
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int part = 0; part < grouped_traits<KIND>::parts; part++) {
                const uint32_t *above = (const uint32_t *)stage.a[wm + i * 16 + quad];
                const uint32_t *below = (const uint32_t *)stage.a[wm + i * 16 + quad + 8];
                int first = 4 * (2 * part * GEMM_GROUPS + g) + t, second = first + 4 * GEMM_GROUPS;
                const uint32_t a[4] = {above[first], below[first], above[second], below[second]};
#pragma unroll
                for (int j = 0; j < NT; j++)
                    mma_s8_16832(tile.sums[i][j][part], a, b[j]);
            }
        if constexpr (grouped_traits<KIND>::is_w4)
            if (((g + 1) & ((1 << shift) - 1)) == 0)
                finish_group<KIND, M, MT, NT>(stage, wm, wn, g, shift, tile);
    }
}

/* grid (blocks of 64 rows of W, blocks of M rows of x) */
template <int KIND, int M>
__global__ void __launch_bounds__(GEMM_THREADS) gemm_grouped_kernel(struct products args, struct acts acts)
{
    constexpr int WARPS_M = M >= 64 ? 2 : 1, WARPS_N = 4 / WARPS_M, MT = M / WARPS_M / 16, NT = GEMM_N / WARPS_N / 8;
    typedef grouped_stage<KIND, M> stage_type;
    CU_DYN_SMEM(uint4, memory);
    stage_type *stages = (stage_type *)memory;
    const struct product &p = product_of(args, blockIdx.x);
    uint32_t m0 = blockIdx.y * M, n0 = (blockIdx.x - p.first_block) * GEMM_N, lane = threadIdx.x % WARP;
    uint32_t warp = threadIdx.x / WARP, wm = warp / WARPS_N * (M / WARPS_M), wn = warp % WARPS_N * (GEMM_N / WARPS_N);
    struct grouped_tile<KIND, MT, NT> tile = {
    };

    load_grouped_stage<KIND, M>(stages[0], p.w, acts, args.n, m0, n0, 0);
    for (uint32_t g0 = 0, s = 0; g0 < p.w.ld; g0 += GEMM_GROUPS, s ^= 1) {
        if (g0 + GEMM_GROUPS < p.w.ld) {
            load_grouped_stage<KIND, M>(stages[s ^ 1], p.w, acts, args.n, m0, n0, g0 + GEMM_GROUPS);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        multiply_grouped_stage<KIND, M, MT, NT>(stages[s], wm, wn, p.w.group_shift, tile);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                uint32_t column = m0 + wm + i * 16 + lane / 4 + e / 2 * 8, row = n0 + wn + j * 8 + lane % 4 * 2 + e % 2;
                if (column >= args.n || row >= p.w.rows)
                    continue;
                float d = row_scale_of(acts, column);
                if constexpr (grouped_traits<KIND>::is_w4)
                    store_product(args, p, column, row, mul_rn(tile.acc[i][j][e], d));
                else
                    store_product(args, p, column, row, scale_sum(p.w, row, tile.sums[i][j][0][e], d));
            }
}
