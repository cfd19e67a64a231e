/* Products for few rows of x: every weight is read once, for all of them. A warp owns ROWS rows of W; lanes take neighbouring
 * groups (or 16-byte pieces of a float row), so a load of a warp is 512 contiguous bytes. Row r of x meets the same operations in
 * the same order whatever n is.
 */
#pragma once
#include "gpu-worker/backend/cuda/device.cuh"

static constexpr int GEMV_WARPS = 4, GEMV_MAX_COLS = 8;

/* Rows of W a warp takes: more when there are few columns, so that enough loads are in flight. */
__host__ __device__ constexpr int gemv_rows(int cols)
{
    return cols == 1 ? 4 : 2;
}
__host__ __device__ constexpr int gemv_block_rows(int cols)
{
    return GEMV_WARPS * gemv_rows(cols);
}

/* Which product a block works on. */
__device__ __forceinline__ const struct product &product_of(const struct products &args, uint32_t block)
{
    uint32_t i = 0;
    while (i + 1 < args.count && block >= args.p[i + 1].first_block)
        i++;
    return args.p[i];
}

__device__ __forceinline__ void store_product(const struct products &args, const struct product &p, uint32_t column, uint32_t row,
                                              float value)
{
    if (column >= args.n || row >= p.w.rows)
        return;
    float *out = p.out + (size_t)column * p.w.rows + row;
    if (p.bias)
        value = add_rn(value, p.bias[row]);
    *out = args.accumulate ? add_rn(*out, value) : value;
}

/* Sums the lanes' parts and stores them: lane c * ROWS + r has column c of row r. */
template <int ROWS, int COLS>
__device__ __forceinline__ void store_sums(const struct products &args, const struct product &p, uint32_t row0,
                                           float acc[ROWS][COLS])
{
    uint32_t lane = threadIdx.x % WARP;
    float mine = 0;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            float sum = warp_sum(acc[r][c]);
            if (lane == (uint32_t)(c * ROWS + r))
                mine = sum;
        }
    if (lane < ROWS * COLS)
        store_product(args, p, lane / ROWS, row0 + lane % ROWS, mine);
}

template <int KIND>
struct group_words {
    uint32_t code[4], extra[4];
};

template <int KIND>
__device__ __forceinline__ void load_group(const struct matrix &w, size_t at, struct group_words<KIND> *out)
{
    uint4 code = ldg_stream((const uint4 *)(w.codes + at * 16));
    out->code[0] = code.x, out->code[1] = code.y, out->code[2] = code.z, out->code[3] = code.w;
    if constexpr (kind_traits<KIND>::bits == 8) {
        uint4 high = ldg_stream((const uint4 *)(w.high + at * 16));
        out->extra[0] = high.x, out->extra[1] = high.y, out->extra[2] = high.z, out->extra[3] = high.w;
    }
    if constexpr (kind_traits<KIND>::bits == 5)
        out->extra[0] = ((const uint32_t *)w.high)[at];
    if constexpr (kind_traits<KIND>::bits == 6) {
        uint2 high = ld64(w.high + at * 8);
        out->extra[0] = high.x, out->extra[1] = high.y;
    }
}

template <int KIND, int COLS>
__global__ void __launch_bounds__(GEMV_WARPS *WARP, 2) gemv_quant_kernel(struct products args, struct acts acts)
{
    constexpr int ROWS = gemv_rows(COLS);
    typedef kind_traits<KIND> traits;
    const struct product &p = product_of(args, blockIdx.x);
    uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, groups = p.w.ld;
    uint32_t row0 = ((blockIdx.x - p.first_block) * GEMV_WARPS + warp) * ROWS;
    if (row0 >= p.w.rows)
        return;
    float acc[ROWS][COLS] = {};
    for (uint32_t g = lane; g < groups; g += WARP) {
        struct group_words<KIND> words[ROWS];
        struct group_scale scale[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            size_t row = min(row0 + r, p.w.rows - 1);
            load_group<KIND>(p.w, row * groups + g, &words[r]);
            scale[r] = load_scale<KIND>(p.w, row, g);
        }
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            size_t at = (size_t)min((uint32_t)c, args.n - 1) * groups + g;
            uint4 x0 = ld128(acts.q + at * 16), x1 = ld128(acts.q + acts.plane + at * 16), raw = ld128(&acts.groups[at]);
            const uint32_t xl[4] = {x0.x, x0.y, x0.z, x0.w}, xh[4] = {x1.x, x1.y, x1.z, x1.w};
            float d = __uint_as_float(raw.x), s = __uint_as_float(raw.y);
            int32_t sum = (int32_t)raw.z, below = (int32_t)raw.w;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                int32_t low = -traits::offset * below, high = -traits::offset * (sum - below);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    uint32_t a, b;
                    unpack_words<KIND>(words[r].code[j], traits::bits == 8 ? &words[r].extra[j] : words[r].extra, j, &a, &b);
                    low = __dp4a((int)a, (int)xl[j], low);
                    high = __dp4a((int)b, (int)xh[j], high);
                }
                acc[r][c] = add_group<KIND>(acc[r][c], low, high, scale[r], d, s);
            }
        }
    }
    store_sums<ROWS, COLS>(args, p, row0, acc);
}

/* ---- float weights ---- */

/* 16 bytes of a float row: 4 or 8 values. */
template <int KIND>
__device__ __forceinline__ void unpack_floats(uint4 raw, float out[])
{
    const uint32_t u[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (KIND == MATRIX_F32) {
            out[i] = __uint_as_float(u[i]);
        } else {
            out[2 * i] = KIND == MATRIX_BF16 ? bf16_low(u[i]) : half_bits(u[i] & 0xffff);
            out[2 * i + 1] = KIND == MATRIX_BF16 ? bf16_high(u[i]) : half_bits(u[i] >> 16);
        }
    }
}

/* x [n][cols] f32; a multiple of 4 columns is read 16 bytes at a time. */
template <int KIND, int COLS>
__global__ void __launch_bounds__(GEMV_WARPS *WARP, 2) gemv_float_kernel(struct products args, const float *__restrict__ x)
{
    constexpr int ROWS = gemv_rows(COLS), STEP = KIND == MATRIX_F32 ? 4 : 8, BYTES = KIND == MATRIX_F32 ? 4 : 2;
    const struct product &p = product_of(args, blockIdx.x);
    uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, cols = p.w.cols;
    uint32_t row0 = ((blockIdx.x - p.first_block) * GEMV_WARPS + warp) * ROWS;
    if (row0 >= p.w.rows)
        return;
    float acc[ROWS][COLS] = {};
    for (uint32_t k = lane * STEP; k < cols; k += WARP * STEP) {
        float w[ROWS][STEP];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            size_t row = min(row0 + r, p.w.rows - 1);
            unpack_floats<KIND>(ldg_stream((const uint4 *)(p.w.codes + (row * p.w.ld + k) * BYTES)), w[r]);
        }
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            const float *xc = x + (size_t)min((uint32_t)c, args.n - 1) * cols + k;
            float v[STEP];
            if (cols % 4 == 0) {
#pragma unroll
                for (int i = 0; i < STEP; i += 4) {
                    uint4 raw = k + i < cols ? ld128(xc + i) : make_uint4(0, 0, 0, 0); /* half sectors, read in turn */
                    unpack_floats<MATRIX_F32>(raw, v + i);
                }
            } else {
#pragma unroll
                for (int i = 0; i < STEP; i++)
                    v[i] = k + i < cols ? xc[i] : 0.0f;
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int i = 0; i < STEP; i++)
                    acc[r][c] = fmaf(v[i], w[r][i], acc[r][c]);
        }
    }
    store_sums<ROWS, COLS>(args, p, row0, acc);
}
