/* Grids of 4 bits: the numbers of a group share a scale and a zero point, w = scale (code - zero), codes 0 to 15. */
#pragma once
#include <stdint.h>
#include "gpu-worker/tools/rounding.h"

enum { GRID_GROUP = 128 /* most columns of a group */ };

struct grid_range {
    float scale; /* a number that f16 holds */
    float zero;  /* whole, 0 to 15 */
};

struct grid {
    uint32_t group; /* columns that share a range; divides cols */
    /* The range for x[0..group) that covers `share` (0 to 1] of its extent: numbers beyond become its ends. */
    struct grid_range (*fit)(const float *x, uint32_t group, float share);
};

/* The least and the largest of x[0..n) and 0. */
void grid_extent(const float *x, uint32_t n, float *low, float *high);

/* Zero point 8; scale = the number of largest magnitude / -8, which is represented exactly: Q4_0. */
struct grid_range grid_fit_extreme(const float *x, uint32_t group, float share);
/* Zero point 8; scale = 2 max|x| / 15: GPTQ. */
struct grid_range grid_fit_symmetric(const float *x, uint32_t group, float share);
/* From the least number to the largest, 0 among them: AWQ. */
struct grid_range grid_fit_asymmetric(const float *x, uint32_t group, float share);

static inline int grid_code(float x, struct grid_range range)
{
    int zero = (int)range.zero;
    return range.scale != 0 ? rounding_nearest(x / range.scale, -zero, 15 - zero) + zero : zero;
}

/* The number of the range that is nearest to x. */
static inline float grid_nearest(float x, struct grid_range range)
{
    return range.scale * ((float)grid_code(x, range) - range.zero);
}

/* Rounds each group of w [rows, cols] for itself; ranges [rows, cols / group]. */
void grid_round(float *w, struct grid_range *ranges, uint64_t rows, uint64_t cols, const struct grid *grid, uint32_t threads);
