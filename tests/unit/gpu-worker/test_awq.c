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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(columns_with_large_inputs_are_scaled_up),
        cmocka_unit_test(equal_inputs_are_left_alone),
        cmocka_unit_test(inputs_that_are_always_zero_change_nothing),
        cmocka_unit_test(clipping_is_never_worse_than_rounding),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
