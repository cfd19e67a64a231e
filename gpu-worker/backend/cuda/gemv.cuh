/* Products for few rows of x: every weight is read once, for all of them. A block takes 32 rows of W, a warp ROWS of them; lanes
 * take neighbouring groups (or 16-byte pieces of a float row), so a load of a warp is 512 contiguous bytes. Row r of x meets the
 * same operations in the same order whatever n is.
 *
 * 32 rows of W are a whole group of the next product's input, so a block can also do what follows (enum product_then): add to the
 * residual stream and prepare its norm, or take gate and up together, and round the result for the next product.
 */
#pragma once
#include "gpu-worker/backend/cuda/device.cuh"

static constexpr int GEMV_BLOCK_ROWS = 32, GEMV_WARPS = 8, GEMV_THREADS = GEMV_WARPS * WARP;
static constexpr int COL_BUCKETS = 4; /* kernels for 1, 2, 4, 8 rows of x */

/* Which of them takes n rows. */
static inline int col_bucket(uint32_t n)
{
    return n <= 1 ? 0 : n <= 2 ? 1 : n <= 4 ? 2 : 3;
}

/* Rows of W a warp takes at a time: more when there are few columns, so that enough loads are in flight. */
__host__ __device__ constexpr int gemv_rows(int cols)
{
    return cols == 1 ? 4 : 2;
}

/* Blocks of a multiprocessor: without this bound the compiler aims at more, and some variants spill. */
__host__ __device__ constexpr int gemv_blocks(int cols)
{
    return cols == 1 ? 2 : 1;
}

/* Which product a block works on. */
__device__ __forceinline__ const struct product &product_of(const struct products &args, uint32_t block)
{
    uint32_t i = 0;
    while (i + 1 < args.count && block >= args.p[i + 1].first_block)
        i++;
    return args.p[i];
}

__device__ __forceinline__ float finish_value(const struct products &args, const struct product &p, float *out, uint32_t row,
                                              float value)
{
    if (p.bias)
        value = add_rn(value, p.bias[row]);
    return args.accumulate ? add_rn(*out, value) : value;
}

__device__ __forceinline__ void store_product(const struct products &args, const struct product &p, uint32_t column, uint32_t row,
                                              float value)
{
    if (column >= args.n || row >= p.w.rows)
        return;
    float *out = p.out + (size_t)column * p.w.rows + row;
    *out = finish_value(args, p, out, row, value);
}

/* A block's sums, of a second product where gate and up go together, and the scale that each row of x still lacks. Rows are
 * padded so that the lanes of a warp meet no bank twice. */
template <int COLS>
struct gemv_results {
    float sums[2][COLS][GEMV_BLOCK_ROWS + 4], scale[COLS];
};

/* Sums the lanes' parts of rows row.. of the block: lane c * ROWS + r keeps column c of row r. */
template <int ROWS, int COLS>
__device__ __forceinline__ void keep_sums(float sums[COLS][GEMV_BLOCK_ROWS + 4], uint32_t row, const float acc[ROWS][COLS])
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
        sums[lane / ROWS][row + lane % ROWS] = mine;
}

/* 1 / sqrt(mean x^2 + eps) of each row, from the parts of the sums of squares. */
template <int COLS>
__device__ __forceinline__ void load_row_scales(const struct products &args, float scale[COLS])
{
    const struct row_scale &from = args.scale;
    if (!from.squares)
        return;
    for (uint32_t c = threadIdx.x / WARP; c < min((uint32_t)COLS, args.n); c += GEMV_WARPS) {
        float sum = 0;
        for (uint32_t i = threadIdx.x % WARP; i < from.parts; i += WARP)
            sum += from.squares[c * from.parts + i];
        sum = warp_sum(sum);
        if (threadIdx.x % WARP == 0)
            scale[c] = 1.0f / sqrtf(sum / (float)(from.parts * GEMV_BLOCK_ROWS) + from.eps);
    }
}

/* Four values of the next product's input; all 8 lanes of a group call. */
__device__ __forceinline__ void store_next(const struct next_input &next, uint32_t column, uint32_t row, uint32_t cols,
                                           const float v[4])
{
    if (next.rounded)
        store_group(next.acts, column, row / 32, row / 4 % 8, v);
    else
        stf4(next.out + (size_t)column * cols + row, make_float4(v[0], v[1], v[2], v[3]));
}

/* Four neighbouring sums of a column. */
__device__ __forceinline__ void load_sums(const float *sums, float scale, float out[4])
{
    float4 four = ldf4(sums);
    out[0] = four.x * scale, out[1] = four.y * scale, out[2] = four.z * scale, out[3] = four.w * scale;
}

/* After a barrier: 8 neighbouring threads finish a column's 32 values. */
template <int COLS>
__device__ __forceinline__ void finish_products(const struct products &args, const struct product &p, uint32_t block_row,
                                                const struct gemv_results<COLS> &results)
{
    uint32_t c = threadIdx.x / 8, r = threadIdx.x % 8 * 4, row = block_row + r;
    if (c >= COLS || c >= args.n)
        return;
    float scale = args.scale.squares ? results.scale[c] : 1.0f, v[4];
    load_sums(&results.sums[0][c][r], scale, v);
    if (args.then == THEN_GATE) {
        float up[4];
        load_sums(&results.sums[1][c][r], scale, up);
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = v[i] / (1.0f + expf(-v[i])) * up[i];
        store_next(args.next, c, row, p.w.rows, v);
        return;
    }
    float *out = p.out + (size_t)c * p.w.rows + row, squares = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        if (row + i < p.w.rows)
            out[i] = v[i] = finish_value(args, p, out + i, row + i, v[i]);
    if (args.then != THEN_NORM)
        return;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        squares = fmaf(v[i], v[i], squares);
        v[i] = mul_rn(v[i], args.next.norm[row + i]);
    }
#pragma unroll
    for (int step = 4; step; step >>= 1)
        squares += __shfl_xor_sync(0xffu << (threadIdx.x & 24), squares, step);
    if (r == 0)
        args.next.squares[c * (p.w.rows / GEMV_BLOCK_ROWS) + block_row / GEMV_BLOCK_ROWS] = squares;
    store_next(args.next, c, row, p.w.rows, v);
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

/* acc[r][c] += rows row0.. of W times the rows of x, this lane's groups. */
template <int KIND, int ROWS, int COLS>
__device__ __forceinline__ void multiply_groups(const struct matrix &w, uint32_t row0, const struct acts &acts, uint32_t n,
                                                float acc[ROWS][COLS])
{
    typedef kind_traits<KIND> traits;
    uint32_t groups = w.ld;
    for (uint32_t g = threadIdx.x % WARP; g < groups; g += WARP) {
        struct group_words<KIND> words[ROWS];
        struct group_scale scale[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            size_t row = min(row0 + r, w.rows - 1);
            load_group<KIND>(w, row * groups + g, &words[r]);
            scale[r] = load_scale<KIND>(w, row, g);
        }
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            size_t at = (size_t)min((uint32_t)c, n - 1) * groups + g;
            uint4 x0 = ld128(acts.q + at * 16), x1 = ld128(acts.q + acts.plane + at * 16), raw = ld128(&acts.groups[at]);
            const uint32_t xl[4] = {x0.x, x0.y, x0.z, x0.w}, xh[4] = {x1.x, x1.y, x1.z, x1.w};
            float d = __uint_as_float(raw.x), s = __uint_as_float(raw.y);
            int32_t sum = (int32_t)raw.z, below = (int32_t)raw.w;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                int32_t low = -traits::offset * (traits::super_16 ? below : sum);
                int32_t high = traits::super_16 ? -traits::offset * (sum - below) : 0;
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
}

template <int KIND, int COLS>
__global__ void __launch_bounds__(GEMV_THREADS, gemv_blocks(COLS)) gemv_quant_kernel(struct products args, struct acts acts)
{
    constexpr int ROWS = gemv_rows(COLS);
    CU_SHARED(gemv_results<COLS>, results);
    const struct product &p = product_of(args, blockIdx.x);
    uint32_t block_row = (blockIdx.x - p.first_block) * GEMV_BLOCK_ROWS;
    load_row_scales<COLS>(args, results.scale);
    for (int pass = 0; pass < (args.then == THEN_GATE ? 2 : 1); pass++)
        for (uint32_t row = threadIdx.x / WARP * ROWS; row < GEMV_BLOCK_ROWS; row += GEMV_WARPS * ROWS) {
            float acc[ROWS][COLS] = {};
            if (block_row + row < p.w.rows)
                multiply_groups<KIND, ROWS, COLS>(pass ? args.p[1].w : p.w, block_row + row, acts, args.n, acc);
            keep_sums<ROWS, COLS>(results.sums[pass], row, acc);
        }
    __syncthreads();
    finish_products<COLS>(args, p, block_row, results);
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

/* acc[r][c] += rows row0.. of W times the rows of x, this lane's columns; a multiple of 4 columns is read 16 bytes at a time. */
template <int KIND, int ROWS, int COLS>
__device__ __forceinline__ void multiply_floats(const struct matrix &w, uint32_t row0, const float *__restrict__ x, uint32_t n,
                                                float acc[ROWS][COLS])
{
    constexpr int STEP = KIND == MATRIX_F32 ? 4 : 8, BYTES = KIND == MATRIX_F32 ? 4 : 2;
    uint32_t cols = w.cols;
    for (uint32_t k = threadIdx.x % WARP * STEP; k < cols; k += WARP * STEP) {
        float values[ROWS][STEP];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            size_t row = min(row0 + r, w.rows - 1);
            unpack_floats<KIND>(ldg_stream((const uint4 *)(w.codes + (row * w.ld + k) * BYTES)), values[r]);
        }
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            const float *xc = x + (size_t)min((uint32_t)c, n - 1) * cols + k;
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
                    acc[r][c] = fmaf(v[i], values[r][i], acc[r][c]);
        }
    }
}

/* x [n][cols] f32. */
template <int KIND, int COLS>
__global__ void __launch_bounds__(GEMV_THREADS, gemv_blocks(COLS)) gemv_float_kernel(struct products args, const float *x)
{
    constexpr int ROWS = gemv_rows(COLS);
    CU_SHARED(gemv_results<COLS>, results);
    const struct product &p = product_of(args, blockIdx.x);
    uint32_t block_row = (blockIdx.x - p.first_block) * GEMV_BLOCK_ROWS;
    load_row_scales<COLS>(args, results.scale);
    for (int pass = 0; pass < (args.then == THEN_GATE ? 2 : 1); pass++)
        for (uint32_t row = threadIdx.x / WARP * ROWS; row < GEMV_BLOCK_ROWS; row += GEMV_WARPS * ROWS) {
            float acc[ROWS][COLS] = {};
            if (block_row + row < p.w.rows)
                multiply_floats<KIND, ROWS, COLS>(pass ? args.p[1].w : p.w, block_row + row, x, args.n, acc);
            keep_sums<ROWS, COLS>(results.sums[pass], row, acc);
        }
    __syncthreads();
    finish_products<COLS>(args, p, block_row, results);
}
