/* AWQ's search and clipping: never worse than rounding on what they weigh, far better where few inputs are large. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/quant/f16.h"
#include "gpu-worker/tools/awq.h"
#include "gpu-worker/tools/rounding.h"

enum { ROWS = 24, COLS = 128 };

static uint32_t state_of_random = 9;

static float random_number(void)
{
    state_of_random = state_of_random * 1664525 + 1013904223;
    return (float)(state_of_random >> 8) / (1 << 23) - 1;
}

static const struct grid q4_0 = {QUANT_GROUP, grid_fit_extreme}, awq = {QUANT_GROUP, grid_fit_asymmetric};

/* Independent inputs of mean square 1; every 16th one of `large`. */
static float *inputs(float large)
{
    float *h = calloc(COLS * COLS, sizeof *h);
    for (int i = 0; i < COLS; i++)
        h[i * COLS + i] = i % 16 == 5 ? large : 1;
    return h;
}

static float *weights(void)
{
    float *w = malloc(ROWS * COLS * sizeof *w);
    for (int i = 0; i < ROWS * COLS; i++)
        w[i] = random_number();
    return w;
}

/* Sum of e H e^T of q / s against w, H diagonal. */
static double error_of(const float *w, const float *q, const float *s, const float *h)
{
    double sum = 0;
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLS; c++) {
            double e = (double)w[r * COLS + c] - (double)q[r * COLS + c] / (s ? (double)s[c] : 1);
            sum += e * e * (double)h[c * COLS + c];
        }
    return sum;
}

static void round_each(float *w, const struct grid *grid)
{
    struct grid_range ranges[ROWS * COLS / QUANT_GROUP];
    grid_round(w, ranges, ROWS, COLS, grid, 1);
}

static void columns_with_large_inputs_are_scaled_up(void **state)
{
    float *w = weights(), *h = inputs(400), *q = malloc(ROWS * COLS * sizeof *q), scales[COLS];
    struct awq_matrix matrix = {w, ROWS};
    struct kvg_error err;
    double kept;
    assert_int_equal(awq_search(&matrix, 1, COLS, h, &q4_0, 2, scales, &kept, &err), 0);
    assert_true(kept < 0.6);
    assert_true(scales[5] > 1.5f * scales[4]);
    for (int i = 0; i < ROWS * COLS; i++)
        q[i] = w[i] * scales[i % COLS];
    round_each(q, &q4_0);
    double scaled = error_of(w, q, scales, h);
    memcpy(q, w, ROWS * COLS * sizeof *q);
    round_each(q, &q4_0);
    assert_true(fabs(scaled / error_of(w, q, NULL, h) - kept) < 1e-3); /* what the search said */
    free(w);
    free(h);
    free(q);
}

static void equal_inputs_are_left_alone(void **state)
{
    float *w = weights(), *h = inputs(1), scales[COLS];
    struct awq_matrix matrix = {w, ROWS};
    struct kvg_error err;
    double kept;
    assert_int_equal(awq_search(&matrix, 1, COLS, h, &q4_0, 1, scales, &kept, &err), 0);
    for (int i = 0; i < COLS; i++)
        assert_true(fabsf(scales[i] - 1) < 1e-6f);
    assert_true(fabs(kept - 1) < 1e-9);
    free(w);
    free(h);
}

static void inputs_that_are_always_zero_change_nothing(void **state)
{
    float *w = weights(), *h = calloc(COLS * COLS, sizeof *h), scales[COLS];
    struct awq_matrix matrix = {w, ROWS};
    struct kvg_error err;
    double kept;
    assert_int_equal(awq_search(&matrix, 1, COLS, h, &q4_0, 1, scales, &kept, &err), 0);
    for (int i = 0; i < COLS; i++)
        assert_true(scales[i] == 1);
    free(w);
    free(h);
}

static void clipping_is_never_worse_than_rounding(void **state)
{
    const struct grid *const grids[] = {&q4_0, &awq};
    float *w = weights(), *h = inputs(30), *clipped = malloc(ROWS * COLS * sizeof *w), *rounded = malloc(ROWS * COLS * sizeof *w);
    struct grid_range ranges[ROWS * COLS / QUANT_GROUP];
    for (int g = 0; g < 2; g++) {
        memcpy(clipped, w, ROWS * COLS * sizeof *w);
        memcpy(rounded, w, ROWS * COLS * sizeof *w);
        awq_round(clipped, ranges, ROWS, COLS, h, NULL, grids[g], 2);
        round_each(rounded, grids[g]);
        assert_true(error_of(w, clipped, NULL, h) < error_of(w, rounded, NULL, h));
        for (int i = 0; i < ROWS * COLS; i++) { /* on the grid, with a scale that f16 holds */
            struct grid_range range = ranges[i / QUANT_GROUP];
            assert_true(grid_nearest(clipped[i], range) == clipped[i]);
            assert_true(f16_to_f32(f32_to_f16(range.scale)) == range.scale);
        }
    }
    free(w);
    free(h);
    free(clipped);
    free(rounded);
}

/* Inputs that depend on each other: H = X^T X, of which the upper triangle alone is there. */
static float *dependent_inputs(uint32_t cols)
{
    float *h = calloc((size_t)cols * cols, sizeof *h), x[COLS];
    for (int token = 0; token < 60; token++) {
        for (uint32_t i = 0; i < cols; i++)
            x[i] = random_number() + (i ? 0.7f * x[i - 1] : 0);
        for (uint32_t i = 0; i < cols; i++)
            for (uint32_t j = i; j < cols; j++)
                h[i * cols + j] += x[i] * x[j];
    }
    return h;
}

/* e H e^T in f64, of columns first..last. */
static double weighed(const float *e, const float *h, uint32_t first, uint32_t last)
{
    double sum = 0;
    for (uint32_t i = first; i < last; i++)
        for (uint32_t j = first; j < last; j++)
            sum += (double)e[i] * (double)e[j] * (double)h[i < j ? i * COLS + j : j * COLS + i];
    return sum;
}

static void the_search_weighs_errors_by_all_of_h(void **state)
{
    float *a = weights(), *b = weights(), *h = dependent_inputs(COLS), scales[COLS], e[COLS];
    const struct awq_matrix matrices[] = {{a, ROWS}, {b, ROWS / 2}};
    struct kvg_error err;
    double kept, rounded = 0, scaled = 0;
    assert_int_equal(awq_search(matrices, 2, COLS, h, &q4_0, 2, scales, &kept, &err), 0);
    for (int r = 0; r < ROWS + ROWS / 2; r++)
        for (int by_scales = 0; by_scales < 2; by_scales++) {
            const float *w = r < ROWS ? a + r * COLS : b + (r - ROWS) * COLS;
            for (uint32_t g = 0; g < COLS; g += QUANT_GROUP) {
                float x[QUANT_GROUP];
                for (int i = 0; i < QUANT_GROUP; i++)
                    x[i] = w[g + i] * (by_scales ? scales[g + i] : 1);
                struct grid_range range = grid_fit_extreme(x, QUANT_GROUP, 1);
                for (int i = 0; i < QUANT_GROUP; i++)
                    e[g + i] = w[g + i] - grid_nearest(x[i], range) / (by_scales ? scales[g + i] : 1);
            }
            *(by_scales ? &scaled : &rounded) += weighed(e, h, 0, COLS);
        }
    assert_true(kept <= 1 && fabs(scaled / rounded - kept) < 1e-4);
    free(a);
    free(b);
    free(h);
}

/* More rows than are weighed in one product, inputs that depend on each other, and scales: each group has the share of its range
 * that loses least. */
static void every_group_is_clipped_where_it_loses_least(void **state)
{
    enum { MANY = 150, GROUPS = COLS / QUANT_GROUP };
    float *w = malloc(MANY * COLS * sizeof *w), *q = malloc(MANY * COLS * sizeof *q), *h = dependent_inputs(COLS), scales[COLS],
          e[COLS];
    struct grid_range *ranges = malloc(MANY * GROUPS * sizeof *ranges);
    uint32_t clipped = 0;
    for (int i = 0; i < MANY * COLS; i++)
        q[i] = w[i] = random_number() * random_number();
    for (int i = 0; i < COLS; i++)
        scales[i] = 1.5f + random_number();
    awq_round(q, ranges, MANY, COLS, h, scales, &awq, 3);
    for (int r = 0; r < MANY; r++)
        for (uint32_t g = 0; g < COLS; g += QUANT_GROUP) {
            double least = INFINITY, got;
            for (int clip = 0; clip <= 10; clip++) {
                struct grid_range range = awq.fit(w + r * COLS + g, QUANT_GROUP, 1 - 0.05f * (float)clip);
                for (uint32_t i = g; i < g + QUANT_GROUP; i++)
                    e[i] = (w[r * COLS + i] - grid_nearest(w[r * COLS + i], range)) / scales[i];
                least = fmin(least, weighed(e, h, g, g + QUANT_GROUP));
                clipped += clip == 0 && range.scale > ranges[r * GROUPS + (int)g / QUANT_GROUP].scale;
            }
            for (uint32_t i = g; i < g + QUANT_GROUP; i++)
                e[i] = (w[r * COLS + i] - q[r * COLS + i]) / scales[i];
            got = weighed(e, h, g, g + QUANT_GROUP);
            assert_true(got <= least * 1.0001 && got >= least * 0.9999);
        }
    assert_true(clipped > MANY); /* of 4 times as many */
    free(w);
    free(q);
    free(h);
    free(ranges);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(columns_with_large_inputs_are_scaled_up),
        cmocka_unit_test(equal_inputs_are_left_alone),
        cmocka_unit_test(inputs_that_are_always_zero_change_nothing),
        cmocka_unit_test(clipping_is_never_worse_than_rounding),
        cmocka_unit_test(the_search_weighs_errors_by_all_of_h),
        cmocka_unit_test(every_group_is_clipped_where_it_loses_least),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
