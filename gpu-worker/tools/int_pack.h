/* Rows of f32 into the integer formats that Hugging Face checkpoints use. */
#pragma once
#include <stdint.h>

/* compressed-tensors, a scale for each row ("channel"): q = round(x / scale), scale = max|x| / 127 as BF16. Returns its bits. */
uint16_t int_pack_w8(const float *x, uint64_t n, int8_t *q);

/* GPTQ's symmetric 4 bits: w = scale (q - 8), scale = 2 max|x| / 15 rounded to f16. */
float int_pack_w4_scale(const float *x, uint32_t group);
float int_pack_w4_nearest(float x, float scale);

/* A matrix w [rows, cols] whose numbers lie on that grid, scales [rows, cols / group] -> GPTQ's tensors: qweight i32 [cols / 8,
 * rows], eight codes of a column of qweight from the low bits up, scales f16 [cols / group, rows], qzeros i32 [cols / group, rows
 * / 8] (7: the format stores a zero point less one), g_idx i32 [cols]. rows and cols are multiples of 8, group divides cols. */
void int_pack_gptq(const float *w, const float *scales, uint64_t rows, uint64_t cols, uint32_t group, uint32_t *qweight,
                   uint16_t *scales_out, uint32_t *qzeros, int32_t *g_idx);
