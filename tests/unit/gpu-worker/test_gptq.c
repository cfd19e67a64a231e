/* GPTQ against its definition, and roundings against their bounds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/tools/gptq.h"
#include "gpu-worker/tools/rounding.h"

static uint32_t state_of_random = 1;

static float random_number(void)
{
    state_of_random = state_of_random * 1664525 + 1013904223;
    return (float)(state_of_random >> 8) / (1 << 23) - 1;
}

static float *random_matrix(uint32_t rows, uint32_t cols)
{
    float *m = malloc((size_t)rows * cols * sizeof *m);
    for (size_t i = 0; i < (size_t)rows * cols; i++)
        m[i] = random_number();
    return m;
}

/* Inputs whose columns depend on each other: each is a mixture of a few hidden ones, and noise. */
static float *correlated_inputs(uint32_t tokens, uint32_t cols)
{
    enum { HIDDEN = 8 };
    float *mix = random_matrix(HIDDEN, cols), *x = malloc((size_t)tokens * cols * sizeof *x);
    for (uint32_t t = 0; t < tokens; t++) {
        float hidden[HIDDEN];
        for (int h = 0; h < HIDDEN; h++)
            hidden[h] = random_number();
        for (uint32_t c = 0; c < cols; c++) {
            float sum = 0.1f * random_number();
            for (int h = 0; h < HIDDEN; h++)
                sum += hidden[h] * mix[(uint32_t)h * cols + c];
            x[(size_t)t * cols + c] = sum;
        }
    }
    free(mix);
    return x;
}

static float *gram(const float *x, uint32_t tokens, uint32_t cols)
{
    float *h = calloc((size_t)cols * cols, sizeof *h);
    for (uint32_t i = 0; i < cols; i++)
        for (uint32_t j = 0; j < cols; j++) {
            double sum = 0;
            for (uint32_t t = 0; t < tokens; t++)
                sum += (double)x[(size_t)t * cols + i] * (double)x[(size_t)t * cols + j];
            h[(size_t)i * cols + j] = (float)sum;
        }
    return h;
}

static const struct grid q4_0 = {QUANT_GROUP, grid_fit_extreme};

static void round_each(float *w, uint32_t rows, uint32_t cols)
{
    struct grid_range *ranges = malloc((size_t)rows * cols / QUANT_GROUP * sizeof *ranges);
    grid_round(w, ranges, rows, cols, &q4_0, 1);
    free(ranges);
}

/* Mean square of X (W - Q)^T. */
static double output_error(const float *x, uint32_t tokens, const float *w, const float *q, uint32_t rows, uint32_t cols)
{
    double total = 0;
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t r = 0; r < rows; r++) {
            double sum = 0;
            for (uint32_t c = 0; c < cols; c++)
                sum += (double)x[(size_t)t * cols + c] * (double)(w[(size_t)r * cols + c] - q[(size_t)r * cols + c]);
            total += sum * sum;
        }
    return total / tokens / rows;
}

static void the_factor_is_that_of_the_damped_inverse(void **state)
{
    enum { N = 40 };
    float *x = correlated_inputs(100, N), *h = gram(x, 100, N), *u = malloc(N * N * sizeof *u);
    struct kvg_error err;
    double mean = 0;
    memcpy(u, h, N * N * sizeof *u);
    for (int i = 0; i < N; i++)
        mean += (double)h[i * N + i] / N;
    assert_int_equal(gptq_prepare(u, N, 0.01, &err), 0);
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++) { /* (U^T U) (H + 0.01 mean I) = I */
            double sum = 0;
            for (int k = 0; k < N; k++) {
                double inverse = 0;
                for (int m = 0; m <= (i < k ? i : k); m++)
                    inverse += (double)u[m * N + i] * (double)u[m * N + k];
                sum += inverse * ((double)h[k * N + j] + (k == j ? 0.01 * mean : 0));
            }
            assert_true(fabs(sum - (i == j)) < 1e-3);
        }
    free(x);
    free(h);
    free(u);
}

static void independent_inputs_leave_nothing_to_make_up_for(void **state)
{
    enum { ROWS = 5, COLS = 256 };
    float *w = random_matrix(ROWS, COLS), *q = malloc(ROWS * COLS * sizeof *q), *h = calloc(COLS * COLS, sizeof *h);
    struct grid_range ranges[ROWS * COLS / 32];
    struct kvg_error err;
    for (int i = 0; i < COLS; i++)
        h[i * COLS + i] = 1 + (float)i;
    memcpy(q, w, ROWS * COLS * sizeof *q);
    assert_int_equal(gptq_prepare(h, COLS, 0.01, &err), 0);
    assert_int_equal(gptq_quantize(q, ranges, ROWS, COLS, h, &q4_0, 2, &err), 0);
    round_each(w, ROWS, COLS);
    for (int i = 0; i < ROWS * COLS; i++)
        assert_true(w[i] == q[i]);
    free(w);
    free(q);
    free(h);
}

static void dependent_inputs_lose_far_less_than_by_rounding(void **state)
{
    enum { TOKENS = 300, ROWS = 20, COLS = 320 };
    float *x = correlated_inputs(TOKENS, COLS), *h = gram(x, TOKENS, COLS), *w = random_matrix(ROWS, COLS);
    float *q = malloc(ROWS * COLS * sizeof *q), *r = malloc(ROWS * COLS * sizeof *r);
    struct grid_range ranges[ROWS * COLS / 32];
    struct kvg_error err;
    memcpy(q, w, ROWS * COLS * sizeof *q);
    memcpy(r, w, ROWS * COLS * sizeof *r);
    assert_int_equal(gptq_prepare(h, COLS, 0.01, &err), 0);
    assert_int_equal(gptq_quantize(q, ranges, ROWS, COLS, h, &q4_0, 2, &err), 0);
    round_each(r, ROWS, COLS);
    assert_true(output_error(x, TOKENS, w, q, ROWS, COLS) < 0.3 * output_error(x, TOKENS, w, r, ROWS, COLS));
    for (int row = 0; row < ROWS; row++) /* every number lies on the grid of its group */
        for (int c = 0; c < COLS; c++) {
            struct grid_range range = ranges[row * (COLS / 32) + c / 32];
            assert_true(grid_nearest(q[row * COLS + c], range) == q[row * COLS + c]);
        }
    free(x);
    free(h);
    free(w);
    free(q);
    free(r);
}

/* The turns of 128 columns, and threads, change nothing but the order of sums. */
static void turns_of_columns_equal_one_column_after_the_other(void **state)
{
    enum { ROWS = 7, COLS = 384 };
    float *x = correlated_inputs(500, COLS), *u = gram(x, 500, COLS), *w = random_matrix(ROWS, COLS);
    float *q = malloc(ROWS * COLS * sizeof *q);
    struct grid_range ranges[ROWS * COLS / 32];
    struct kvg_error err;
    uint32_t differ = 0;
    memcpy(q, w, ROWS * COLS * sizeof *q);
    assert_int_equal(gptq_prepare(u, COLS, 0.05, &err), 0);
    assert_int_equal(gptq_quantize(q, ranges, ROWS, COLS, u, &q4_0, 3, &err), 0);
    for (int r = 0; r < ROWS; r++) {
        double row[COLS];
        struct grid_range range = {0};
        float now[32];
        for (int c = 0; c < COLS; c++)
            row[c] = (double)w[r * COLS + c];
        for (int i = 0; i < COLS; i++) {
            if (i % 32 == 0) {
                for (int j = 0; j < 32; j++)
                    now[j] = (float)row[i + j];
                range = grid_fit_extreme(now, 32, 1);
            }
            double value = (double)grid_nearest((float)row[i], range), error = (row[i] - value) / (double)u[i * COLS + i];
            for (int j = i + 1; j < COLS; j++)
                row[j] -= error * (double)u[i * COLS + j];
            differ += fabs(value - (double)q[r * COLS + i]) > 1e-3 * fabs((double)range.scale);
        }
    }
    assert_true(differ < ROWS * COLS / 50); /* a near tie of f32 and f64 carries on through its row */
    free(x);
    free(u);
    free(w);
    free(q);
}

static void inputs_that_are_always_zero_are_rounded(void **state)
{
    enum { COLS = 64 };
    float h[COLS * COLS] = {0}, w[COLS], q[COLS];
    struct grid_range ranges[2];
    struct kvg_error err;
    for (int i = 0; i < COLS; i++)
        q[i] = w[i] = random_number();
    assert_int_equal(gptq_prepare(h, COLS, 0.01, &err), 0);
    assert_int_equal(gptq_quantize(q, ranges, 1, COLS, h, &q4_0, 1, &err), 0);
    round_each(w, 1, COLS);
    assert_memory_equal(w, q, sizeof w);
}

static void groups_that_do_not_divide_are_refused(void **state)
{
    float w[48] = {0}, u[48 * 48] = {0};
    struct grid_range ranges[2];
    struct kvg_error err;
    assert_int_equal(gptq_quantize(w, ranges, 1, 48, u, &q4_0, 1, &err), KVG_INVALID);
    assert_non_null(strstr(err.message, "groups of 32 do not divide 48"));
}

static void roundings_stay_within_half_a_step(void **state)
{
    const struct quant_format *const formats[] = {&quant_q8_0, &quant_q4_0};
    for (int f = 0; f < 2; f++)
        for (int trial = 0; trial < 200; trial++) {
            float x[64], back[64], most[2] = {0};
            uint8_t bytes[2 * 34];
            for (int i = 0; i < 64; i++)
                most[i / 32] = fmaxf(most[i / 32], fabsf(x[i] = random_number() * powf(10, (float)(trial % 9 - 4))));
            assert_int_equal(rounding_encode(formats[f], x, 64, bytes), 0);
            quant_decode(formats[f], bytes, back, 64);
            for (int i = 0; i < 64; i++) {
                /* Q4_0 has no +8: what lies opposite to the number of largest magnitude is off by up to a whole step. */
                float step = most[i / 32] / (f ? 8 : 127),
                      bound = step * (f ? 1.0f : 0.5f) + most[i / 32] * 1e-3f + 4e-6f /* f16 subnormals */;
                assert_true(fabsf(x[i] - back[i]) <= bound);
            }
        }
}

static void a_group_of_zeros_stays_zero(void **state)
{
    float x[32] = {0}, back[32];
    uint8_t bytes[34];
    const struct quant_format *const formats[] = {&quant_q8_0, &quant_q4_0};
    for (int f = 0; f < 2; f++) {
        rounding_encode(formats[f], x, 32, bytes);
        quant_decode(formats[f], bytes, back, 32);
        for (int i = 0; i < 32; i++)
            assert_true(back[i] == 0);
    }
}

static void what_is_on_the_grid_is_kept(void **state)
{
    float x[32], back[32];
    uint8_t bytes[34];
    for (int i = 0; i < 32; i++)
        x[i] = 0.25f * (float)(i % 16 - 8);
    rounding_encode(&quant_q4_0, x, 32, bytes);
    quant_decode(&quant_q4_0, bytes, back, 32);
    assert_memory_equal(x, back, sizeof x);
    for (int i = 0; i < 32; i++)
        x[i] = 0.5f * (float)(i * 8 - 121);
    x[31] = 63.5f;
    rounding_encode(&quant_q8_0, x, 32, bytes);
    quant_decode(&quant_q8_0, bytes, back, 32);
    assert_memory_equal(x, back, sizeof x);
}

static void formats_without_an_encoder_are_refused(void **state)
{
    float x[256] = {0};
    uint8_t bytes[256];
    assert_int_equal(rounding_encode(&quant_q4_k, x, 256, bytes), -1);
}

static void numbers_round_as_roundf_does_inside_their_bounds(void **state)
{
    assert_int_equal(rounding_nearest(NAN, -8, 7), -8);
    assert_int_equal(rounding_nearest(INFINITY, -8, 7), 7);
    assert_int_equal(rounding_nearest(-1e30f, -8, 7), -8);
    assert_int_equal(rounding_nearest(0.49999997f, -8, 7), 0);
    for (int i = -40000; i <= 40000; i++) { /* halves, what is next to them, and all between */
        const float near[] = {(float)i / 4096, nextafterf((float)i / 2, 1e9f), nextafterf((float)i / 2, -1e9f), (float)i / 2};
        for (int k = 0; k < 4; k++) {
            int want = (int)fmaxf(-127, fminf(126, roundf(near[k])));
            assert_int_equal(rounding_nearest(near[k], -127, 126), want);
        }
    }
}

static void of_equal_magnitudes_the_first_is_kept_exactly(void **state)
{
    float up[32] = {[3] = 4, [9] = -4, [20] = 1}, down[32] = {[3] = -4, [9] = 4, [20] = 1};
    assert_true(grid_fit_extreme(up, 32, 1).scale == -0.5f && grid_fit_extreme(down, 32, 1).scale == 0.5f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_factor_is_that_of_the_damped_inverse),
        cmocka_unit_test(independent_inputs_leave_nothing_to_make_up_for),
        cmocka_unit_test(dependent_inputs_lose_far_less_than_by_rounding),
        cmocka_unit_test(turns_of_columns_equal_one_column_after_the_other),
        cmocka_unit_test(inputs_that_are_always_zero_are_rounded),
        cmocka_unit_test(groups_that_do_not_divide_are_refused),
        cmocka_unit_test(roundings_stay_within_half_a_step),
        cmocka_unit_test(a_group_of_zeros_stays_zero),
        cmocka_unit_test(what_is_on_the_grid_is_kept),
        cmocka_unit_test(formats_without_an_encoder_are_refused),
        cmocka_unit_test(numbers_round_as_roundf_does_inside_their_bounds),
        cmocka_unit_test(of_equal_magnitudes_the_first_is_kept_exactly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
