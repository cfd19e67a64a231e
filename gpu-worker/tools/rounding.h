/* Rows of f32 into the formats of gpu-worker/quant, by rounding each number to the nearest. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include "gpu-worker/quant/quant.h"

/* dst = the row x[0..n) in `format` (Q8_0, Q4_0, BF16, F16, F32); n a whole number of its blocks. Scales: Q8_0 max|x| / 127; Q4_0
 * the number of largest magnitude / -8, so that it is represented exactly. Returns 0, or -1 where the format has no encoder. */
int rounding_encode(const struct quant_format *format, const float *x, size_t n, void *dst);

struct grid_range;
/* x[0..n) under the ranges [n / 32] of its groups, whose zero points are 8 (grid.h) -> Q4_0's bytes. */
void rounding_q4_0_pack(const float *x, const struct grid_range *ranges, uint64_t n, uint8_t *out);

/* To the nearest whole number, halves away from zero, inside low..high. Without branches: loops over it become vectors. */
static inline int rounding_nearest(float x, int low, int high)
{
    float inside = x > (float)low ? x : (float)low; /* what is no number: low */
    inside = inside < (float)high ? inside : (float)high;
    int whole = (int)inside;
    float rest = inside - (float)whole; /* exact */
    return whole + (rest >= 0.5f) - (rest <= -0.5f);
}
