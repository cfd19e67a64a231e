#include "gpu-worker/tools/divergence.h"
#include <math.h>
#include <stddef.h>
#include "gpu-worker/backend/sample_noise.h"

/* Sums are taken in LANES f32 over RUN numbers a lane, then in f64: the compiler vectorizes the inner loop, and the error of a
 * sum stays that of RUN additions. */
enum { LANES = 16, RUN = 32, STRIDE = LANES * RUN };

static uint32_t top(const float *logits, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

/* sum_i exp(x[i] - shift); with y also *cross = sum_i exp(x[i] - shift) (x[i] - y[i]). */
static double sum_exp(const float *x, const float *y, uint32_t n, float shift, double *cross)
{
    double sum = 0, crossed = 0;
    uint32_t at = 0;
    for (; at + STRIDE <= n; at += STRIDE) {
        float lanes[LANES] = {0}, products[LANES] = {0};
        for (uint32_t i = 0; i < STRIDE; i += LANES)
            for (uint32_t j = 0; j < LANES; j++) {
                float e = sample_exp(x[at + i + j] - shift);
                lanes[j] += e;
                if (y)
                    products[j] += e * (x[at + i + j] - y[at + i + j]);
            }
        for (uint32_t j = 0; j < LANES; j++) {
            sum += (double)lanes[j];
            crossed += (double)products[j];
        }
    }
    for (; at < n; at++) {
        double e = exp((double)x[at] - (double)shift);
        sum += e;
        crossed += y ? e * ((double)x[at] - (double)y[at]) : 0;
    }
    if (cross)
        *cross = crossed;
    return sum;
}

void divergence_measure(const float *logits, const float *base, uint32_t n, uint32_t target, struct divergence *out)
{
    uint32_t best = top(logits, n);
    double total = (double)logits[best] + log(sum_exp(logits, NULL, n, logits[best], NULL));

    *out = (struct divergence){.nll = total - (double)logits[target]};
    if (!base)
        return;
    uint32_t base_best = top(base, n);
    double cross, sum = sum_exp(base, logits, n, base[base_best], &cross);
    double base_total = (double)base[base_best] + log(sum);
    out->base_nll = base_total - (double)base[target];
    out->kl = cross / sum + total - base_total;
    out->same_top = best == base_best;
}
