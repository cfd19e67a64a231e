/* How grouped matrices (quant/grouped.h) and BF16 ones lie in panels of 32 output rows, and the activations that they meet. Lines
 * of codes are those of panels.h; units are 64 bytes of a row's columns, so that a half of one is 16 lines: a tile of AMX.
 *
 *   W8A8    [scale f32 x32] [sum of codes i32 x32]  then a unit per 64 columns:  [rows 0..15: 16 lines] [rows 16..31: 16 lines]
 *   W4A16   [zero u8 [groups][32], if zeros]        then a cell per group:       [scale f16 x32]
 *           and for each 32 columns [rows 0..15: 4 lines] [rows 16..31: 4 lines]: low halves are columns 0..15, high ones 16..31
 *   BF16    a unit per 32 columns: [rows 0..15: 16 lines] [rows 16..31: 16 lines], line i: row 0: columns 2i, 2i + 1 | row 1 ...
 *
 * Columns of a last unit past the matrix are zero. Activations lie in tiles of up to 16 rows as panels.h's, [tile][units][T][64]:
 *
 *   W8A8    rows8      a + 128                          row8_scale    d
 *   W4A16   high_plane, low_plane, high_sum, low_sum    row_scale     2^16 d
 *   BF16    rows16     BF16, where the instruction set multiplies it; others read x
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "gpu-worker/backend/cpu/panels.h"
#include "gpu-worker/quant/grouped.h"

enum { UNIT_BYTES = 64, UNIT_LINES = 16, UNIT_HALF = UNIT_LINES * LINE, W8A8_HEAD = 4 * LINE, BF16_UNIT = 32 };

static inline size_t w8a8_units(size_t cols)
{
    return (cols + UNIT_BYTES - 1) / UNIT_BYTES;
}
static inline size_t bf16_units(size_t cols)
{
    return (cols + BF16_UNIT - 1) / BF16_UNIT;
}
static inline size_t w4a16_cell_bytes(uint32_t group)
{
    return LINE + (size_t)group * PANEL_ROWS / 2;
}
static inline size_t w4a16_head_bytes(uint32_t groups, bool zeros)
{
    return zeros ? ((size_t)groups * PANEL_ROWS + LINE - 1) / LINE * LINE : 0;
}

/* Sets everything but data; the matrix is a valid one. */
void grouped_layout(struct panels *panels, const struct quant_grouped *matrix);
/* Bytes that a thread needs for the rows of a panel. */
size_t grouped_scratch_bytes(const struct quant_grouped *matrix);
/* Fills panel p. */
void grouped_pack(const struct panels *panels, const struct quant_grouped *matrix, void *scratch, uint32_t p);
