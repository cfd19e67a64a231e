/* The kernels, on v16.h's types; compiled once per instruction set by a file that defines KERNELS_SYMBOL and KERNELS_NAME.
 *
 * Every sum runs in an order that depends on nothing but the operands of one output, and v16.h's operations are the same IEEE
 * operations everywhere, so all instruction sets give the same bits.
 */
#include "gpu-worker/backend/cpu/attention.inc.h"
#include "gpu-worker/backend/cpu/grouped_panels.h"
#include "gpu-worker/backend/cpu/int16.h"
#include "gpu-worker/backend/cpu/kernels.h"
#include "gpu-worker/backend/cpu/v16.h"

/* Weights stream through once. They are asked for into L2, line after line between the products and somewhat further ahead than a
 * core has lines under way from memory; into L1, and a cell at once, the same bytes came 5 to 20 % slower. Past a page the rate
 * falls again, while a model that lies in the last level cache gains up to 6 KB. Bytes. */
enum { STREAM_AHEAD = 3904 };

V_INLINE void v_prefetch_l2(const void *p)
{
    __builtin_prefetch(p, 0, 2);
}

/* ---- activations ---- */

V_INLINE void quantize_group(const struct acts *a, const float *x, size_t at)
{
    v16 x0 = v16_load(x), x1 = v16_load(x + 16);
    float amax = v16_hmax(v16_max(v16_abs(x0), v16_abs(x1)));
    v16 inverse = v16_set1(amax > 0 ? 127.0f / amax : 0);
    int32_t low = v16_to_i8(a->q + at * QUANT_GROUP, v16_mul(x0, inverse));
    int32_t sum = low + v16_to_i8(a->q + at * QUANT_GROUP + 16, v16_mul(x1, inverse));
    a->d[at] = amax / 127.0f;
    a->s[at] = a->d[at] * (float)sum;
    a->sum[at] = sum;
    a->low[at] = low;
}

/* A group of all rows of a tile, then the next group: as they are stored, so that lines are written whole. */
static void quantize(const struct acts *a, uint32_t first, uint32_t end)
{
    size_t groups = a->cols / QUANT_GROUP;
    for (uint32_t tile = first / ACTS_TILE * ACTS_TILE; tile < end; tile += ACTS_TILE) {
        uint32_t height = a->rows - tile < ACTS_TILE ? a->rows - tile : ACTS_TILE;
        uint32_t from = first > tile ? first : tile, stop = end < tile + ACTS_TILE ? end : tile + ACTS_TILE;
        for (size_t g = 0; g < groups; g++)
            for (uint32_t row = from; row < stop; row++)
                quantize_group(a, a->x + (size_t)row * a->cols + g * QUANT_GROUP, tile * groups + g * height + (row - tile));
    }
}

/* ---- products ---- */

V_INLINE void store_half(const struct panel_store *store, uint32_t row, uint32_t p, uint32_t n_valid, uint32_t h, v16 value)
{
    int n = (int)n_valid - (int)(16 * h);
    if (n <= 0)
        return;
    size_t column = (size_t)p * PANEL_ROWS + 16 * h;
    float *out = store->out + row * store->ld + column;
    if (store->bias)
        value = v16_add(value, v16_load_n(store->bias + column, n));
    if (store->accumulate)
        value = v16_add(v16_load_n(out, n), value);
    v16_store_n(out, value, n);
}

V_INLINE void store_panel(const struct panel_store *store, uint32_t row, uint32_t p, uint32_t n_valid, const v16 acc[2])
{
    store_half(store, row, p, n_valid, 0, acc[0]);
    store_half(store, row, p, n_valid, 1, acc[1]);
}

V_INLINE i32x16 dot_line(uint32_t bits, i32x16 sum, u8x64 line, const int8_t *q)
{
    return bits == 8 ? i32x16_dot8(sum, line, q) : i32x16_dot(sum, line, q);
}

/* Adds one group's contribution for one row and half: an exact integer sum, then one FMA (two with a minimum, or per 16). */
V_INLINE v16 add_group(enum quant_scales scales, v16 acc, const i32x16 sums[2], v16 d0, v16 d1, v16 m, float d, float s)
{
    acc = v16_fma(v16_from_i32(sums[0]), v16_mul(d0, v16_set1(d)), acc);
    if (scales == QUANT_SUPER_16)
        acc = v16_fma(v16_from_i32(sums[1]), v16_mul(d1, v16_set1(d)), acc);
    if (scales == QUANT_SCALE_MIN || scales == QUANT_SUPER_MIN)
        acc = v16_fma(m, v16_set1(s), acc);
    return acc;
}

struct half_scales {
    v16 d0, d1, m;
};
V_INLINE struct half_scales load_scales(enum quant_scales scales, const uint8_t *cell, const uint8_t *super, uint32_t h)
{
    struct half_scales out = {v16_set1(0), v16_set1(0), v16_set1(0)};
    const uint16_t *d = (const uint16_t *)(scales >= QUANT_SUPER_MIN ? super : cell) + 16 * h;
    out.d0 = v16_from_f16(d);
    if (scales == QUANT_SCALE_MIN)
        out.m = v16_from_f16(d + 32);
    if (scales == QUANT_SUPER_MIN) {
        out.d0 = v16_mul(out.d0, v16_from_u8(cell + 16 * h));
        out.m = v16_sub(v16_set1(0), v16_mul(v16_from_f16(d + 32), v16_from_u8(cell + PANEL_ROWS + 16 * h)));
    }
    if (scales == QUANT_SUPER_16) {
        out.d1 = v16_mul(out.d0, v16_from_i8((const int8_t *)cell + PANEL_ROWS + 16 * h));
        out.d0 = v16_mul(out.d0, v16_from_i8((const int8_t *)cell + 16 * h));
    }
    return out;
}

/* n rows (n <= V_ROWS, a constant) of one tile against one panel. */
V_INLINE void quant_rows(uint32_t bits, enum quant_scales scales, int32_t offset, const uint8_t *panel, size_t groups,
                         const struct acts *a, size_t at, uint32_t height, int n, v16 acc[][2])
{
    for (int r = 0; r < n; r++)
        acc[r][0] = acc[r][1] = v16_set1(0);
    size_t lines = panel_cell_bytes(bits, scales) / LINE;
    if (bits == 8 && V_DOT8_SIGNED)
        offset = 0;
    for (size_t b = 0; b < groups; b++, at += height) {
        const uint8_t *cell = panel + panel_cell_offset(bits, scales, b);
        const uint8_t *super = panel + panel_cell_offset(bits, scales, b & ~(size_t)7) - panel_super_bytes(scales);
        const uint8_t *codes = cell + panel_head_bytes(scales);
        i32x16 sums[V_ROWS][2][2]; /* [row][half][first and second 16 columns] */
        for (size_t i = 0; i < panel_super_bytes(scales) && b % QUANT_SUPER_GROUPS == 0; i += LINE)
            v_prefetch_l2(super + STREAM_AHEAD + i);
        for (int r = 0; r < n; r++) {
            int32_t low = scales == QUANT_SUPER_16 ? a->low[at + r] : a->sum[at + r], high = a->sum[at + r] - low;
            sums[r][0][0] = sums[r][1][0] = i32x16_set1(-offset * low);
            sums[r][0][1] = sums[r][1][1] = i32x16_set1(-offset * high);
        }
        V_UNROLL
        for (int g = 0; g < 8; g++) {
            u8x64 line0 = cell_line(codes, bits, g), line1 = cell_line(codes + panel_half_bytes(bits), bits, g);
            int part = scales == QUANT_SUPER_16 && g >= 4;
            for (size_t i = lines * (size_t)g / 8; i < lines * (size_t)(g + 1) / 8; i++)
                v_prefetch_l2(cell + STREAM_AHEAD + i * LINE);
            for (int r = 0; r < n; r++) {
                const int8_t *q = a->q + (at + r) * QUANT_GROUP + 4 * g;
                sums[r][0][part] = dot_line(bits, sums[r][0][part], line0, q);
                sums[r][1][part] = dot_line(bits, sums[r][1][part], line1, q);
            }
        }
        V_UNROLL
        for (uint32_t h = 0; h < 2; h++) {
            struct half_scales w = load_scales(scales, cell, super, h);
            for (int r = 0; r < n; r++)
                acc[r][h] = add_group(scales, acc[r][h], sums[r][h], w.d0, w.d1, w.m, a->d[at + r], a->s[at + r]);
        }
    }
}

V_INLINE void quant_panel(uint32_t bits, enum quant_scales scales, const struct panels *w, uint32_t p, const struct acts *a,
                          uint32_t first, uint32_t end, const struct panel_store *store)
{
    const uint8_t *panel = w->data + (size_t)p * w->panel_bytes;
    size_t groups = w->cols / QUANT_GROUP;
    int32_t offset = scales == QUANT_SCALE || scales == QUANT_SUPER_16 ? 1 << (bits - 1) : 0;
    uint32_t n_valid = w->rows - p * PANEL_ROWS;
    v16 acc[V_ROWS][2];
    for (uint32_t tile = first; tile < end; tile += ACTS_TILE) {
        uint32_t height = a->rows - tile < ACTS_TILE ? a->rows - tile : ACTS_TILE, r = 0;
        uint32_t stop = end - tile < height ? end - tile : height;
#define QUANT_ROWS(n)                                                                                                            \
    for (; r + (n) <= stop; r += (n)) {                                                                                          \
        quant_rows(bits, scales, offset, panel, groups, a, tile *groups + r, height, (n), acc);                                  \
        for (uint32_t i = 0; i < (n); i++)                                                                                       \
            store_panel(store, tile + r + i, p, n_valid, acc[i]);                                                                \
    }
        if (V_ROWS >= 4)
            QUANT_ROWS(V_ROWS < 4 ? 1 : 4)
        if (V_ROWS >= 4)
            QUANT_ROWS(V_ROWS < 4 ? 1 : 3)
        if (V_ROWS >= 2)
            QUANT_ROWS(V_ROWS < 2 ? 1 : 2)
        QUANT_ROWS(1)
    }
}

#include "gpu-worker/backend/cpu/int16.inc.h"
#include "gpu-worker/backend/cpu/grouped.inc.h"
#if defined(V_UNPACK_FROM)
#include "gpu-worker/backend/cpu/unpacked.inc.h"
#define UNPACKED(name, ...)                                                                                                      \
    if (end - first >= V_UNPACK_FROM) {                                                                                          \
        name(__VA_ARGS__);                                                                                                       \
        return;                                                                                                                  \
    }
#else
#define UNPACKED(name, ...)
#endif

V_INLINE v16 load_float(enum panel_kind kind, const uint8_t *panel, size_t i)
{
    if (kind == PANEL_F32)
        return v16_load((const float *)panel + i);
    return v16_from_f16((const uint16_t *)panel + i);
}

V_INLINE void float_rows(enum panel_kind kind, const uint8_t *panel, const struct acts *a, uint32_t row, int n, v16 acc[][2])
{
    const float *x = a->x + (size_t)row * a->cols;
    for (int r = 0; r < n; r++)
        acc[r][0] = acc[r][1] = v16_set1(0);
    for (size_t k = 0; k < a->cols; k++) {
        v16 w0 = load_float(kind, panel, k * PANEL_ROWS), w1 = load_float(kind, panel, k * PANEL_ROWS + 16);
        for (int r = 0; r < n; r++) {
            v16 xr = v16_set1(x[(size_t)r * a->cols + k]);
            acc[r][0] = v16_fma(xr, w0, acc[r][0]);
            acc[r][1] = v16_fma(xr, w1, acc[r][1]);
        }
    }
}

/* The same of BF16, whose columns come in pairs. */
V_INLINE void bf16_rows(const uint8_t *panel, const struct acts *a, uint32_t row, int n, v16 acc[][2])
{
    const float *x = a->x + (size_t)row * a->cols;
    for (int r = 0; r < n; r++)
        acc[r][0] = acc[r][1] = v16_set1(0);
    for (size_t k = 0; k < a->cols; k += 2) {
        const uint8_t *line = panel + k / BF16_UNIT * 2 * UNIT_HALF + k % BF16_UNIT / 2 * LINE;
        v16 even[2], odd[2];
        v_prefetch(line + 2 * UNIT_HALF);
        v_prefetch(line + 3 * UNIT_HALF);
        v16_bf16_pairs(line, &even[0], &odd[0]);
        v16_bf16_pairs(line + UNIT_HALF, &even[1], &odd[1]);
        for (int r = 0; r < n; r++) {
            v16 x0 = v16_set1(x[(size_t)r * a->cols + k]);
            acc[r][0] = v16_fma(x0, even[0], acc[r][0]);
            acc[r][1] = v16_fma(x0, even[1], acc[r][1]);
            if (k + 1 == a->cols)
                continue;
            v16 x1 = v16_set1(x[(size_t)r * a->cols + k + 1]);
            acc[r][0] = v16_fma(x1, odd[0], acc[r][0]);
            acc[r][1] = v16_fma(x1, odd[1], acc[r][1]);
        }
    }
}

V_INLINE void float_panel(enum panel_kind kind, const struct panels *w, uint32_t p, const struct acts *a, uint32_t first,
                          uint32_t end, const struct panel_store *store)
{
    const uint8_t *panel = w->data + (size_t)p * w->panel_bytes;
    uint32_t n_valid = w->rows - p * PANEL_ROWS, row = first;
    v16 acc[V_ROWS][2];
#define FLOAT_ROWS(n)                                                                                                            \
    for (; row + (n) <= end; row += (n)) {                                                                                       \
        if (kind == PANEL_BF16)                                                                                                  \
            bf16_rows(panel, a, row, (n), acc);                                                                                  \
        else                                                                                                                     \
            float_rows(kind, panel, a, row, (n), acc);                                                                           \
        for (uint32_t i = 0; i < (n); i++)                                                                                       \
            store_panel(store, row + i, p, n_valid, acc[i]);                                                                     \
    }
    FLOAT_ROWS(V_ROWS)
    FLOAT_ROWS(1)
}

#define PANEL_ARGS                                                                                                               \
    const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end, const struct panel_store *store
#define QUANT_PANEL(name, bits, scales)                                                                                          \
    static void name(PANEL_ARGS)                                                                                                 \
    {                                                                                                                            \
        UNPACKED(unpacked_quant_panel, bits, scales, w, p, a, first, end, store)                                                 \
        quant_panel(bits, scales, w, p, a, first, end, store);                                                                   \
    }
#define INT16_PANEL(name, bits, scales)                                                                                          \
    static void name(PANEL_ARGS)                                                                                                 \
    {                                                                                                                            \
        int16_panel(bits, scales, w, p, a, first, end, store);                                                                   \
    }
#define INT16_PANEL_4(name, scales)                                                                                              \
    static void name(PANEL_ARGS)                                                                                                 \
    {                                                                                                                            \
        UNPACKED(unpacked_int16_panel, scales, w, p, a, first, end, store)                                                       \
        int16_panel(4, scales, w, p, a, first, end, store);                                                                      \
    }
#define FLOAT_PANEL(name, kind)                                                                                                  \
    static void name(PANEL_ARGS)                                                                                                 \
    {                                                                                                                            \
        float_panel(kind, w, p, a, first, end, store);                                                                           \
    }
FLOAT_PANEL(panel_f32, PANEL_F32)
FLOAT_PANEL(panel_f16, PANEL_F16)
FLOAT_PANEL(panel_bf16, PANEL_BF16)
QUANT_PANEL(panel_scale_4, 4, QUANT_SCALE)
QUANT_PANEL(panel_scale_5, 5, QUANT_SCALE)
QUANT_PANEL(panel_scale_8, 8, QUANT_SCALE)
QUANT_PANEL(panel_min_4, 4, QUANT_SCALE_MIN)
QUANT_PANEL(panel_min_5, 5, QUANT_SCALE_MIN)
QUANT_PANEL(panel_super_min_4, 4, QUANT_SUPER_MIN)
QUANT_PANEL(panel_super_min_5, 5, QUANT_SUPER_MIN)
QUANT_PANEL(panel_super16_6, 6, QUANT_SUPER_16)
INT16_PANEL_4(panel_int16_scale_4, QUANT_SCALE)
INT16_PANEL_4(panel_int16_min_4, QUANT_SCALE_MIN)
INT16_PANEL_4(panel_int16_super_min_4, QUANT_SUPER_MIN)
INT16_PANEL(panel_int16_scale_5, 5, QUANT_SCALE)
INT16_PANEL(panel_int16_min_5, 5, QUANT_SCALE_MIN)
INT16_PANEL(panel_int16_super_min_5, 5, QUANT_SUPER_MIN)
INT16_PANEL(panel_int16_super16_6, 6, QUANT_SUPER_16)

/* ---- element-wise ---- */

static void rmsnorm(const float *x, const float *weight, uint32_t n, float eps, float *out)
{
    v16 sum = v16_set1(0);
    for (uint32_t i = 0; i < n; i += 16) {
        v16 v = v16_load_n(x + i, (int)(n - i));
        sum = v16_fma(v, v, sum);
    }
    v16 scale = v16_set1(1.0f / sqrtf(v16_sum(sum) / (float)n + eps));
    for (uint32_t i = 0; i < n; i += 16) {
        int m = (int)(n - i);
        v16_store_n(out + i, v16_mul(v16_mul(v16_load_n(x + i, m), scale), v16_load_n(weight + i, m)), m);
    }
}

V_INLINE v16 silu(v16 g)
{
    v16 e = v16_exp2(v16_mul(g, v16_set1(-0x1.715476p+0f))); /* exp(-g) */
    return v16_div(g, v16_add(v16_set1(1), e));
}

static void silu_mul(float *gate, const float *up, size_t n)
{
    for (size_t i = 0; i < n; i += 16) {
        int m = n - i < 16 ? (int)(n - i) : 16;
        v16_store_n(gate + i, v16_mul(silu(v16_load_n(gate + i, m)), v16_load_n(up + i, m)), m);
    }
}

/* The lines of a row lie far from those of the next, so they are asked for some rows ahead. */
static void silu_mul_panel(const float *gate, const float *up, uint32_t n_rows, uint32_t n_cols, float *out, size_t ld)
{
    enum { AHEAD = 16 };
    for (uint32_t r = 0; r < n_rows; r++, gate += PANEL_ROWS, up += PANEL_ROWS, out += ld) {
        if (n_rows - r > AHEAD) {
            __builtin_prefetch(out + AHEAD * ld, 1);
            __builtin_prefetch(out + AHEAD * ld + 16, 1);
        }
        if (n_cols == PANEL_ROWS) {
            v16_store(out, v16_mul(silu(v16_load(gate)), v16_load(up)));
            v16_store(out + 16, v16_mul(silu(v16_load(gate + 16)), v16_load(up + 16)));
            continue;
        }
        for (uint32_t i = 0; i < n_cols; i += 16)
            v16_store_n(out + i, v16_mul(silu(v16_load(gate + i)), v16_load(up + i)), (int)(n_cols - i));
    }
}

/* gelu by its tanh: x (1 + tanh u) / 2 = x / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3). */
static void gelu_mul(float *gate, const float *up, size_t n)
{
    v16 linear = v16_set1(-0x1.26aec2p+1f), cubic = v16_set1(-0x1.a5a7dp-4f); /* times -2 log2(e) */
    for (size_t i = 0; i < n; i += 16) {
        int m = n - i < 16 ? (int)(n - i) : 16;
        v16 g = v16_load_n(gate + i, m);
        v16 e = v16_exp2(v16_mul(g, v16_fma(v16_mul(g, g), cubic, linear)));
        v16_store_n(gate + i, v16_mul(v16_div(g, v16_add(v16_set1(1), e)), v16_load_n(up + i, m)), m);
    }
}

/* FMAs are written out: gcc 12 makes vfmaddsub of x * c - y * s, x * s + y * c even under -ffp-contract=off. */
static void rotate(float *head, const float *angles, uint32_t rotated, enum rope_style style)
{
    uint32_t half = rotated / 2, i = 0;
    for (; i + 16 <= half; i += 16) {
        v16 c = v16_load(angles + i), s = v16_load(angles + half + i), x, y;
        if (style == ROPE_INTERLEAVED)
            v16_unzip(head + 2 * i, &x, &y);
        else
            x = v16_load(head + i), y = v16_load(head + half + i);
        v16 a = v16_fma(x, c, v16_sub(v16_set1(0), v16_mul(y, s))), b = v16_fma(x, s, v16_mul(y, c));
        if (style == ROPE_INTERLEAVED)
            v16_zip(head + 2 * i, a, b);
        else
            v16_store(head + i, a), v16_store(head + half + i, b);
    }
    for (; i < half; i++) {
        float *a = head + (style == ROPE_INTERLEAVED ? 2 * i : i), *b = style == ROPE_INTERLEAVED ? a + 1 : a + half;
        float c = angles[i], s = angles[half + i], x = *a, y = *b;
        *a = fmaf(x, c, -(y * s));
        *b = fmaf(x, s, y * c);
    }
}

#define VECTOR_ATTENTION                                                                                                         \
    {                                                                                                                            \
        [KV_F16] = {.store = store_f16, .attend = attend_f16, .combine = combine, .fold = fold, .take = take},                   \
        [KV_BF16] = {.store = store_bf16, .attend = attend_bf16, .combine = combine, .fold = fold, .take = take},                \
        [KV_INT8] = {.store = store_int8, .attend = attend_int8, .combine = combine, .fold = fold, .take = take},                \
    }

const struct kernels KERNELS_SYMBOL = {
    .name = KERNELS_NAME,
    .quantize = quantize,
    .quantize_int16 = quantize_int16,
    .quantize_rows8 = quantize_rows8,
    .int16_sums_below = UINT32_MAX,
    .panel =
        {
            [PANEL_F32] = panel_f32,
            [PANEL_F16] = panel_f16,
            [PANEL_BF16] = panel_bf16,
            [PANEL_SCALE_4] = panel_scale_4,
            [PANEL_SCALE_5] = panel_scale_5,
            [PANEL_SCALE_8] = panel_scale_8,
            [PANEL_MIN_4] = panel_min_4,
            [PANEL_MIN_5] = panel_min_5,
            [PANEL_SUPER_MIN_4] = panel_super_min_4,
            [PANEL_SUPER_MIN_5] = panel_super_min_5,
            [PANEL_SUPER16_6] = panel_super16_6,
            [PANEL_INT16_SCALE_4] = panel_int16_scale_4,
            [PANEL_INT16_MIN_4] = panel_int16_min_4,
            [PANEL_INT16_SUPER_MIN_4] = panel_int16_super_min_4,
            [PANEL_INT16_SCALE_5] = panel_int16_scale_5,
            [PANEL_INT16_MIN_5] = panel_int16_min_5,
            [PANEL_INT16_SUPER_MIN_5] = panel_int16_super_min_5,
            [PANEL_INT16_SUPER16_6] = panel_int16_super16_6,
            [PANEL_W8A8] = panel_w8a8,
            [PANEL_W4A16] = panel_w4a16,
            [PANEL_W4A16_ZEROS] = panel_w4a16_zeros,
        },
    .rmsnorm = rmsnorm,
    .silu_mul = silu_mul,
    .silu_mul_panel = silu_mul_panel,
    .gelu_mul = gelu_mul,
    .rotate = rotate,
    .attention = VECTOR_ATTENTION,
    .window_attention = VECTOR_ATTENTION,
    .attention_rows = 32,
    .key_padding = 16,
    .kv_auto = KV_F16,
};
