/* Matrices of f32 into the integer formats that Hugging Face checkpoints use. */
#pragma once
#include <stdint.h>
#include "gpu-worker/tools/grid.h"

/* compressed-tensors, a scale for each row ("channel"): q = round(x / scale), scale = max|x| / 127 as BF16. Returns its bits. */
uint16_t int_pack_w8(const float *x, uint64_t n, int8_t *q);

/* A matrix [rows, cols] whose numbers lie on the ranges of their groups; rows and cols are multiples of 8, group divides cols. */
struct int_pack_matrix {
    const float *w;                  /* [rows, cols] */
    const struct grid_range *ranges; /* [rows, cols / group] */
    const uint32_t *order;           /* [cols]: column i of w is the matrix' column order[i]; NULL: i itself */
    uint64_t rows, cols;
    uint32_t group;
};

/* GPTQ's tensors: qweight i32 [cols / 8, rows], eight codes of a column of qweight from the low bits up; scales f16 [cols /
 * group, rows]; qzeros i32 [cols / group, rows / 8], zero points less one; g_idx i32 [cols], the group of each column. */
void int_pack_gptq(const struct int_pack_matrix *m, uint32_t *qweight, uint16_t *scales, uint32_t *qzeros, int32_t *g_idx);
/* AWQ's: qweight i32 [cols, rows / 8], scales f16 [cols / group, rows], qzeros i32 [cols / group, rows / 8]; a word holds eight
 * rows, 0 2 4 6 1 3 5 7 from the low bits up. order is NULL. */
void int_pack_awq(const struct int_pack_matrix *m, uint32_t *qweight, uint16_t *scales, uint32_t *qzeros);

/* A matrix [rows, cols] in GPTQ's tensors of 8 bits, rounded here: q = round(w / scale) + 128, scale = max|w| of the group / 127
 * as F16. qweight i32 [cols / 4, rows], four codes of a column from the low bits up; scales f16 [cols / group, rows]; qzeros i32
 * [cols / group, rows / 4], all 128 less one; g_idx i32 [cols]. */
struct int_pack_eight {
    const float *w; /* [rows, cols] */
    uint64_t rows, cols;
    uint32_t group, *qweight, *qzeros;
    uint16_t *scales;
    int32_t *g_idx;
};
/* Its rows 4 first..4 last, and with row 0 g_idx, as a body of parallel_ranges; context: a struct int_pack_eight. */
void int_pack_eight_rows(void *context, uint64_t first, uint64_t last);
