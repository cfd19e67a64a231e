/* divergence_measure against sums in f64. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include "gpu-worker/tools/divergence.h"

enum { MOST = 152064 };

static float *random_logits(uint32_t n, float spread, uint32_t seed)
{
    float *x = malloc(n * sizeof *x);
    for (uint32_t i = 0; i < n; i++) {
        seed = seed * 1664525 + 1013904223;
        x[i] = ((float)(seed >> 8) / (1 << 24) - 0.5f) * spread;
    }
    return x;
}

static void measure(const float *x, const float *base, uint32_t n, uint32_t target, struct divergence *out)
{
    divergence_measure(&x, 1, base, n, target, out);
}

static double log_sum(const float *x, uint32_t n)
{
    double most = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < n; i++)
        most = fmax(most, (double)x[i]);
    for (uint32_t i = 0; i < n; i++)
        sum += exp((double)x[i] - most);
    return most + log(sum);
}

static void sums_equal_those_in_f64(void **state)
{
    const uint32_t sizes[] = {1, 2, 511, 512, 513, 1025, 49152, MOST};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        uint32_t n = sizes[s], target = n / 3;
        float *x = random_logits(n, 20, 1 + n), *base = random_logits(n, 20, 77 + n);
        double lse = log_sum(x, n), base_lse = log_sum(base, n), kl = 0;
        for (uint32_t i = 0; i < n; i++) {
            double p = (double)base[i] - base_lse;
            kl += exp(p) * (p - ((double)x[i] - lse));
        }
        struct divergence d;
        measure(x, base, n, target, &d);
        assert_true(fabs(d.nll - (lse - (double)x[target])) < 1e-5);
        assert_true(fabs(d.base_nll - (base_lse - (double)base[target])) < 1e-5);
        assert_true(fabs(d.kl - kl) < 2e-5);
        free(x);
        free(base);
    }
}

static void equal_models_have_no_divergence(void **state)
{
    float *x = random_logits(MOST, 30, 5);
    struct divergence d;
    measure(x, x, MOST, 7, &d);
    assert_true(fabs(d.kl) < 1e-9 && d.same_top && d.nll == d.base_nll);
    free(x);
}

static void a_shift_of_all_logits_changes_nothing(void **state)
{
    float *x = random_logits(4096, 8, 5), *shifted = random_logits(4096, 8, 5);
    struct divergence d;
    for (uint32_t i = 0; i < 4096; i++)
        shifted[i] += 64;
    measure(shifted, x, 4096, 9, &d);
    assert_true(fabs(d.kl) < 1e-5 && d.same_top);
    free(x);
    free(shifted);
}

/* Logits that underflow beside the most probable one. */
static void far_apart_logits_stay_finite(void **state)
{
    float x[600] = {[0] = 500}, base[600] = {[599] = 500};
    struct divergence d;
    measure(x, base, 600, 3, &d);
    assert_true(fabs(d.nll - 500) < 1e-3 && fabs(d.kl - 500) < 1e-3 && !d.same_top);
}

static void several_models_are_measured_as_each_alone(void **state)
{
    const uint32_t sizes[] = {5, 512, 700, 4099};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        uint32_t n = sizes[s];
        float *base = random_logits(n, 20, 3);
        const float *models[DIVERGENCE_MODELS];
        struct divergence all[DIVERGENCE_MODELS], alone;
        for (uint32_t m = 0; m < DIVERGENCE_MODELS; m++)
            models[m] = random_logits(n, 15, 100 + m);
        divergence_measure(models, DIVERGENCE_MODELS, base, n, 4, all);
        for (uint32_t m = 0; m < DIVERGENCE_MODELS; m++) {
            measure(models[m], base, n, 4, &alone);
            assert_true(alone.kl == all[m].kl && alone.nll == all[m].nll && alone.base_nll == all[m].base_nll);
            assert_int_equal(alone.same_top, all[m].same_top);
            free((void *)models[m]);
        }
        free(base);
    }
}

static void without_a_base_only_the_models_own_loss_is_said(void **state)
{
    float *x = random_logits(1000, 20, 8);
    struct divergence d;
    measure(x, NULL, 1000, 7, &d);
    assert_true(fabs(d.nll - (log_sum(x, 1000) - (double)x[7])) < 1e-5 && d.base_nll == 0 && d.kl == 0 && !d.same_top);
    free(x);
}

static void of_equal_logits_the_first_is_on_top(void **state)
{
    float x[1200] = {[700] = 9, [1100] = 9}, same[1200] = {[700] = 5}, other[1200] = {[1100] = 5};
    struct divergence d;
    measure(x, same, 1200, 0, &d);
    assert_true(d.same_top);
    measure(x, other, 1200, 0, &d);
    assert_false(d.same_top);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_equal_those_in_f64),
        cmocka_unit_test(equal_models_have_no_divergence),
        cmocka_unit_test(a_shift_of_all_logits_changes_nothing),
        cmocka_unit_test(far_apart_logits_stay_finite),
        cmocka_unit_test(several_models_are_measured_as_each_alone),
        cmocka_unit_test(without_a_base_only_the_models_own_loss_is_said),
        cmocka_unit_test(of_equal_logits_the_first_is_on_top),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
