#ifndef __clang__
#pragma GCC optimize("no-trapping-math") /* else it makes no vectors of sample_exp, whose branches it keeps */
#endif
#include "gpu-worker/tools/divergence.h"
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <string.h>
#include "gpu-worker/backend/sample_noise.h"

/* Sums are taken in LANES f32 over STRIPE numbers, then in f64: the compiler makes vectors of the inner loops, and the error of a
 * sum stays that of STRIPE / LANES additions. */
enum { LANES = 16, STRIPE = 512 };

static float largest(const float *x, uint32_t n)
{
    float lanes[LANES], most = x[0];
    uint32_t i = 0;
    for (uint32_t j = 0; j < LANES; j++)
        lanes[j] = x[0];
    for (; i + LANES <= n; i += LANES)
        for (uint32_t j = 0; j < LANES; j++)
            lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    for (; i < n; i++)
        most = x[i] > most ? x[i] : most;
    for (uint32_t j = 0; j < LANES; j++)
        most = lanes[j] > most ? lanes[j] : most;
    return most;
}

/* Where x holds `value` first; n where it does not. */
static uint32_t first_of(const float *x, uint32_t n, float value)
{
    uint32_t at = 0;
    for (; at + STRIPE <= n; at += STRIPE) {
        int found = 0;
        for (uint32_t i = 0; i < STRIPE; i++)
            found |= x[at + i] == value;
        if (found)
            break;
    }
    while (at < n && x[at] != value)
        at++;
    return at;
}

/* A stripe of x, made whole by numbers whose exponential is 0. */
static const float *stripe_of(const float *x, uint32_t at, uint32_t n, float *room)
{
    if (at + STRIPE <= n)
        return x + at;
    memcpy(room, x + at, (n - at) * sizeof *room);
    for (uint32_t i = n - at; i < STRIPE; i++)
        room[i] = -FLT_MAX / 4;
    return room;
}

static double sum_exp(const float *x, float shift, float *exps)
{
    float lanes[LANES] = {0};
    double sum = 0;
    for (uint32_t i = 0; i < STRIPE; i++)
        exps[i] = sample_exp(x[i] - shift);
    for (uint32_t i = 0; i < STRIPE; i += LANES)
        for (uint32_t j = 0; j < LANES; j++)
            lanes[j] += exps[i + j];
    for (uint32_t j = 0; j < LANES; j++)
        sum += (double)lanes[j];
    return sum;
}

/* sum_i weights[i] (x[i] - y[i]) */
static double sum_products(const float *weights, const float *x, const float *y)
{
    float lanes[LANES] = {0};
    double sum = 0;
    for (uint32_t i = 0; i < STRIPE; i += LANES)
        for (uint32_t j = 0; j < LANES; j++)
            lanes[j] += weights[i + j] * (x[i + j] - y[i + j]);
    for (uint32_t j = 0; j < LANES; j++)
        sum += (double)lanes[j];
    return sum;
}

void divergence_measure(const float *const *models, uint32_t n_models, const float *base, uint32_t n, uint32_t target,
                        struct divergence *out)
{
    float room[STRIPE], base_room[STRIPE], exps[STRIPE], weights[STRIPE];
    float tops[DIVERGENCE_MODELS], base_top = base ? largest(base, n) : 0;
    double sums[DIVERGENCE_MODELS] = {0}, crossed[DIVERGENCE_MODELS] = {0}, base_sum = 0;

    for (uint32_t m = 0; m < n_models; m++)
        tops[m] = largest(models[m], n);
    for (uint32_t at = 0; at < n; at += STRIPE) {
        const float *y = base ? stripe_of(base, at, n, base_room) : NULL;
        base_sum += base ? sum_exp(y, base_top, weights) : 0;
        for (uint32_t m = 0; m < n_models; m++) {
            const float *x = stripe_of(models[m], at, n, room);
            sums[m] += sum_exp(x, tops[m], exps);
            crossed[m] += base ? sum_products(weights, y, x) : 0;
        }
    }
    double base_total = base ? (double)base_top + log(base_sum) : 0;
    for (uint32_t m = 0; m < n_models; m++) {
        double total = (double)tops[m] + log(sums[m]);
        out[m] = (struct divergence){.nll = total - (double)models[m][target]};
        if (!base)
            continue;
        out[m].base_nll = base_total - (double)base[target];
        out[m].kl = crossed[m] / base_sum + total - base_total;
        out[m].same_top = first_of(models[m], n, tops[m]) == first_of(base, n, base_top);
    }
}
