/* Rows of f32 into the formats of gpu-worker/quant, by rounding each number to the nearest. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include "gpu-worker/quant/quant.h"

/* dst = the row x[0..n) in `format` (Q8_0, Q4_0, BF16, F32); n a whole number of its blocks. Scales: Q8_0 max|x| / 127; Q4_0 the
 * number of largest magnitude / -8, so that it is represented exactly. Returns 0, or -1 where the format has no encoder. */
int rounding_encode(const struct quant_format *format, const float *x, size_t n, void *dst);

/* One group of 32 of Q4_0: the scale that `x` gets, as f16 bits, and the code of a number under it. */
uint16_t rounding_q4_0_scale(const float *x);
uint8_t rounding_q4_0_code(float x, float scale);
