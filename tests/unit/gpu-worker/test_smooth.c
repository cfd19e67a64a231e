/* SmoothQuant's search: what it says of the products' error holds, and large columns of the inputs no longer take the others'
 * bits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/quant/f16.h"
#include "gpu-worker/tools/smooth.h"

enum { TOKENS = 40, ROWS = 24, COLS = 64 };

static uint32_t state_of_random = 5;

static float random_number(void)
{
    state_of_random = state_of_random * 1664525 + 1013904223;
    return (float)(state_of_random >> 8) / (1 << 23) - 1;
}

/* [rows, COLS]; every 16th column is `large`. */
static float *random_rows(int rows, float large)
{
    float *x = malloc((size_t)rows * COLS * sizeof *x);
    for (int i = 0; i < rows * COLS; i++)
        x[i] = random_number() * (i % 16 == 3 ? large : 1);
    return x;
}

static void round_8(float *x, bool weights)
{
    float most = 0;
    for (int i = 0; i < COLS; i++)
        most = fmaxf(most, fabsf(x[i]));
    float scale = weights ? bf16_to_f32(f32_to_bf16(most / 127)) : most / 127;
    for (int i = 0; i < COLS && scale > 0; i++)
        x[i] = scale * fmaxf(-127, fminf(127, roundf(x[i] * (1 / scale))));
}

/* Squared error of the product of rounded inputs and weights, in f64. */
static double error_of(const float *x, const float *w, int rows, const float *scales)
{
    double sum = 0;
    for (int t = 0; t < TOKENS; t++)
        for (int r = 0; r < rows; r++) {
            float a[COLS], b[COLS];
            double product = 0;
            for (int i = 0; i < COLS; i++) {
                a[i] = x[t * COLS + i] / (scales ? scales[i] : 1);
                b[i] = w[r * COLS + i] * (scales ? scales[i] : 1);
            }
            round_8(a, false);
            round_8(b, true);
            for (int i = 0; i < COLS; i++)
                product += (double)x[t * COLS + i] * (double)w[r * COLS + i] - (double)a[i] * (double)b[i];
            sum += product * product;
        }
    return sum;
}

static void large_columns_are_divided(void **state)
{
    float *x = random_rows(TOKENS, 50), *a = random_rows(ROWS, 1), *b = random_rows(ROWS / 2, 1), scales[COLS];
    const struct awq_matrix matrices[] = {{a, ROWS}, {b, ROWS / 2}};
    struct kvg_error err;
    double kept;
    assert_int_equal(smooth_search(matrices, 2, COLS, x, TOKENS, 2, scales, &kept, &err), 0);
    assert_true(kept < 0.2 && scales[3] > 3 * scales[4]);
    double plain = error_of(x, a, ROWS, NULL) + error_of(x, b, ROWS / 2, NULL);
    double smooth = error_of(x, a, ROWS, scales) + error_of(x, b, ROWS / 2, scales);
    assert_true(fabs(smooth / plain - kept) < 0.01 * kept);
    free(x);
    free(a);
    free(b);
}

static void without_inputs_nothing_is_scaled(void **state)
{
    float *x = random_rows(TOKENS, 1), *w = random_rows(ROWS, 30), scales[COLS];
    struct awq_matrix matrix = {w, ROWS};
    struct kvg_error err;
    double kept;
    memset(x, 0, TOKENS * COLS * sizeof *x);
    assert_int_equal(smooth_search(&matrix, 1, COLS, x, TOKENS, 1, scales, &kept, &err), 0);
    for (int i = 0; i < COLS; i++)
        assert_true(scales[i] == 1);
    assert_true(kept == 1);
    free(x);
    free(w);
}

/* Columns without input or without weights have no magnitude to go by. */
static void unused_columns_keep_their_scale(void **state)
{
    float *x = random_rows(TOKENS, 50), *w = random_rows(ROWS, 1), scales[COLS];
    struct awq_matrix matrix = {w, ROWS};
    struct kvg_error err;
    double kept;
    for (int t = 0; t < TOKENS; t++)
        x[t * COLS + 7] = 0;
    for (int r = 0; r < ROWS; r++)
        w[r * COLS + 9] = 0;
    assert_int_equal(smooth_search(&matrix, 1, COLS, x, TOKENS, 1, scales, &kept, &err), 0);
    assert_true(kept < 0.2 && scales[7] == 1 && scales[9] == 1);
    for (int i = 0; i < COLS; i++)
        assert_true(isfinite(scales[i]) && scales[i] > 0);
    free(x);
    free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(large_columns_are_divided),
        cmocka_unit_test(without_inputs_nothing_is_scaled),
        cmocka_unit_test(unused_columns_keep_their_scale),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
