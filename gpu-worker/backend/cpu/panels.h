/* How matmul weights lie in memory on the CPU: repacked once, so that a SIMD lane is an output row.
 *
 * A panel holds 32 output rows x all columns; missing rows of the last panel are zero. A quantized panel is a run of cells, one
 * per group of 32 columns, each 64-byte aligned:
 *
 *   [super: d f16 x32 (, dmin f16 x32)]     every 8 cells, QUANT_SUPER_* only
 *   [head]  QUANT_SCALE      d f16 x32
 *           QUANT_SCALE_MIN  d f16 x32, m f16 x32
 *           QUANT_SUPER_MIN  sc u8 x32, mn u8 x32
 *           QUANT_SUPER_16   sc i8 x32 of columns 0..15, then of columns 16..31
 *   [codes of rows 0..15] [codes of rows 16..31], each:
 *           8-bit   8 lines of 64 bytes
 *           4-6-bit 4 lines: low halves are lines 0..3, high halves lines 4..7; then a plane of 8 x 64 bits for each bit above
 * the fourth
 *
 *   line g:  row 0: columns 4g..4g+3 | row 1: columns 4g..4g+3 | ... | row 15      (bit i of a plane's g-th 64: byte i of line g)
 *
 * A float panel is [columns][32] values of the file's type; BF16's is in grouped_panels.h.
 *
 * Activations are quantized to match: q = rne(x * 127 / amax), d = amax / 127 per row and group, in tiles of up to 16 rows. A
 * tile of T rows is contiguous: q[groups][T][32], d, s, sum[groups][T].
 *
 * A second arithmetic, INT16, is exact in integers over all of a row's columns: weights are w = s q + c with s and c rounded once
 * to 16 bits on one scale D per output row, activations a = rne(x * 32512 / amax) on one scale per row.
 *
 *   [D f32 x32]  then super headers and cells as above, with other numbers in them:
 *     QUANT_SCALE      s i16 x32                  c = -offset s
 *     QUANT_SCALE_MIN  s i16 x32, c i16 x32
 *     QUANT_SUPER_*    d, dmin i16 x32 of 1/128 D; s = floor((sc d + 64) / 128), c likewise of mn, dmin (< 0), or -offset s
 *
 * Activations are a = 256 high + low in two planes of signed bytes, [tile][columns / 64, rounded up][T][64] (zero past the last
 * column). What else of them is kept depends on the kernels: the sums of groups as above, or for few rows the planes in words
 * (see int16_words_amx.c).
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "gpu-worker/quant/quant.h"

enum { PANEL_ROWS = 32, ACTS_TILE = 16, LINE = 64 };

enum panel_kind {
    PANEL_F32,
    PANEL_F16,
    PANEL_BF16,
    PANEL_SCALE_4,
    PANEL_SCALE_5,
    PANEL_SCALE_8,
    PANEL_MIN_4,
    PANEL_MIN_5,
    PANEL_SUPER_MIN_4,
    PANEL_SUPER_MIN_5,
    PANEL_SUPER16_6,
    PANEL_INT16_SCALE_4,
    PANEL_INT16_SCALE_5,
    PANEL_INT16_MIN_4,
    PANEL_INT16_MIN_5,
    PANEL_INT16_SUPER_MIN_4,
    PANEL_INT16_SUPER_MIN_5,
    PANEL_INT16_SUPER16_6,
    PANEL_W8A8, /* grouped_panels.h */
    PANEL_W4A16,
    PANEL_W4A16_ZEROS,
    PANEL_KINDS
};

/* INT16: |w| <= 32767 and -128 <= high, low <= 127 keep every int32 sum of byte products below 2^31 up to here. */
enum { INT16_MOST_COLS = 32768, INT16_UNIT = 64 };
#define INT16_WEIGHT     32600.0f /* the largest weight of a row; rounding s and c adds up to 32 */
#define INT16_ACTIVATION 32512.0f

/* Byte counts that follow from bits and scales; inline so that kernels fold them. */
static inline size_t panel_half_bytes(uint32_t bits)
{
    return bits == 8 ? 8 * LINE : 4 * LINE + (bits - 4) * LINE;
}
static inline size_t panel_head_bytes(enum quant_scales scales)
{
    return scales == QUANT_SCALE_MIN ? 2 * LINE : LINE;
}
static inline size_t panel_cell_bytes(uint32_t bits, enum quant_scales scales)
{
    return panel_head_bytes(scales) + 2 * panel_half_bytes(bits);
}
static inline size_t panel_super_bytes(enum quant_scales scales)
{
    return scales == QUANT_SUPER_MIN ? 2 * LINE : scales == QUANT_SUPER_16 ? LINE : 0;
}
/* Offset of cell b in its panel; the super header of cells 8j..8j+7 lies right before cell 8j. */
static inline size_t panel_cell_offset(uint32_t bits, enum quant_scales scales, size_t b)
{
    return b * panel_cell_bytes(bits, scales) + (b / QUANT_SUPER_GROUPS + 1) * panel_super_bytes(scales);
}

/* Of an INT16 panel. */
static inline size_t int16_cell_offset(uint32_t bits, enum quant_scales scales, size_t b)
{
    return 2 * LINE + panel_cell_offset(bits, scales, b);
}
static inline size_t int16_units(size_t cols)
{
    return (cols + INT16_UNIT - 1) / INT16_UNIT;
}

struct panels {
    enum panel_kind kind;
    uint32_t bits, offset;
    enum quant_scales scales;
    uint32_t rows, cols;
    uint32_t group; /* W8A8, W4A16 */
    uint32_t n_panels;
    size_t panel_bytes;
    uint8_t *data; /* [n_panels][panel_bytes], 64-byte aligned */
};

static inline bool panels_int16(const struct panels *panels)
{
    return panels->kind >= PANEL_INT16_SCALE_4 && panels->kind <= PANEL_INT16_SUPER16_6;
}

static inline bool panels_w4a16(const struct panels *panels)
{
    return panels->kind == PANEL_W4A16 || panels->kind == PANEL_W4A16_ZEROS;
}

/* False if no panel layout fits the format. int16: that arithmetic where it covers the format. Sets everything but data. */
bool panels_layout(struct panels *panels, const struct quant_format *format, bool int16, uint32_t rows, uint32_t cols);
/* The codes of a group of one row at lane `lane` of a half of its panel; upper bits are added to what is there. */
void panel_pack_codes(uint32_t bits, const uint8_t q[QUANT_GROUP], uint32_t lane, uint8_t *half);
/* Fills panel p from the file's rows. Returns the first of them with a scale, or a weight that is a float, which is infinite or
 * NaN; panels->rows where there is none. */
uint32_t panels_pack(const struct panels *panels, const struct quant_format *format, const void *file_rows, uint32_t p);

struct acts {
    uint32_t rows, cols;
    const float *x; /* [rows][cols], what float panels read */
    int8_t *q;
    float *d, *s;       /* scale; s = d * sum */
    int32_t *sum, *low; /* sum of q over the group, and over its first 16 */

    /* INT16 */
    int8_t *high_plane, *low_plane;
    int32_t *high_sum, *low_sum; /* of a group's first 16 columns as the low 16 bits, of the others as the upper; if `sums` */
    bool sums;
    int8_t *words;    /* few rows on AMX: [columns / 32][3][rows][64] */
    int32_t *row_sum; /* with `words`: [rows] of a */
    float *row_scale; /* [rows] 2^16 amax / 32512 */

    /* grouped_panels.h */
    uint8_t *rows8;
    float *row8_scale; /* [rows] */
    uint16_t *rows16;
};

/* One product's destination: out[row * ld + n] = value (+ bias[n]), or += value. */
struct panel_store {
    float *out;
    size_t ld;
    const float *bias; /* NULL = none */
    bool accumulate;
};
