#include "gpu-worker/tools/grid.h"
#include <math.h>
#include "gpu-worker/quant/f16.h"
#include "gpu-worker/tools/parallel.h"

enum { LANES = 8 };

static float as_f16(float x)
{
    return f16_to_f32(f32_to_f16(x));
}

/* Lane by lane, as vectors. */
void grid_extent(const float *x, uint32_t n, float *low, float *high)
{
    float lows[LANES] = {0}, highs[LANES] = {0};
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (uint32_t j = 0; j < LANES; j++) {
            lows[j] = x[i + j] < lows[j] ? x[i + j] : lows[j];
            highs[j] = x[i + j] > highs[j] ? x[i + j] : highs[j];
        }
    for (; i < n; i++) {
        lows[0] = fminf(lows[0], x[i]);
        highs[0] = fmaxf(highs[0], x[i]);
    }
    *low = lows[0];
    *high = highs[0];
    for (uint32_t j = 1; j < LANES; j++) {
        *low = fminf(*low, lows[j]);
        *high = fmaxf(*high, highs[j]);
    }
}

/* Of equal magnitudes the first. */
struct grid_range grid_fit_extreme(const float *x, uint32_t group, float share)
{
    float low, high, extreme;
    grid_extent(x, group, &low, &high);
    extreme = high > -low ? high : low;
    for (uint32_t i = 0; high == -low && i < group; i++)
        if (fabsf(x[i]) == high) {
            extreme = x[i];
            break;
        }
    return (struct grid_range){as_f16(share * (extreme / -8)), 8};
}

struct grid_range grid_fit_symmetric(const float *x, uint32_t group, float share)
{
    float low, high;
    grid_extent(x, group, &low, &high);
    return (struct grid_range){as_f16(share * (2 * fmaxf(high, -low) / 15)), 8};
}

struct grid_range grid_fit_asymmetric(const float *x, uint32_t group, float share)
{
    float low, high;
    grid_extent(x, group, &low, &high);
    float scale = as_f16(share * ((high - low) / 15));
    return (struct grid_range){scale, scale > 0 ? (float)rounding_nearest(share * -low / scale, 0, 15) : 8};
}

struct rounds {
    float *w;
    struct grid_range *ranges;
    uint64_t groups; /* of a row */
    const struct grid *grid;
};

static void round_rows(void *context, uint64_t first, uint64_t last)
{
    const struct rounds *rounds = context;
    uint32_t group = rounds->grid->group;
    for (uint64_t g = first * rounds->groups; g < last * rounds->groups; g++) {
        float *x = rounds->w + g * group;
        struct grid_range range = rounds->ranges[g] = rounds->grid->fit(x, group, 1);
        for (uint32_t i = 0; i < group; i++)
            x[i] = grid_nearest(x[i], range);
    }
}

void grid_round(float *w, struct grid_range *ranges, uint64_t rows, uint64_t cols, const struct grid *grid, uint32_t threads)
{
    struct rounds rounds = {w, ranges, cols / grid->group, grid};
    parallel_ranges(threads, rows, round_rows, &rounds);
}
