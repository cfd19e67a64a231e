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
 * A float panel is [columns][32] values of the file's type.
 *
 * Activations are quantized to match: q = rne(x * 127 / amax), d = amax / 127 per row and group, in tiles of up to 16 rows. A
 * tile of T rows is contiguous: q[groups][T][32], d, s, sum[groups][T].
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
    PANEL_KINDS
};

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

struct panels {
    enum panel_kind kind;
    uint32_t bits, offset;
    enum quant_scales scales;
    uint32_t rows, cols;
    uint32_t n_panels;
    size_t panel_bytes;
    uint8_t *data; /* [n_panels][panel_bytes], 64-byte aligned */
};

/* False if no panel layout fits the format. Sets everything but data. */
bool panels_layout(struct panels *panels, const struct quant_format *format, uint32_t rows, uint32_t cols);
/* Fills panel p from the file's rows. */
void panels_pack(const struct panels *panels, const struct quant_format *format, const void *file_rows, uint32_t p);

struct acts {
    uint32_t rows, cols;
    const float *x; /* [rows][cols], what float panels read */
    int8_t *q;
    float *d, *s;       /* scale; s = d * sum */
    int32_t *sum, *low; /* sum of q over the group, and over its first 16 */
};

/* One product's destination: out[row * ld + n] = value (+ bias[n]), or += value. */
struct panel_store {
    float *out;
    size_t ld;
    const float *bias; /* NULL = none */
    bool accumulate;
};
