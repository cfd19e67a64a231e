/* How far the next-token distributions of models lie from a base's, at one position, over the whole vocabulary. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

enum { DIVERGENCE_MODELS = 16 /* most at once */ };

struct divergence {
    double nll, base_nll; /* -log of the probability of the token that follows, in nats */
    double kl;            /* KL(base || model), in nats */
    bool same_top;        /* both hold the same token to be the most probable (of equals the first) */
};

/* models[0..n_models), base: logits [n] f32; target < n; out [n_models]. base may be NULL: only nll is set. What the base costs
 * is paid once for all models. |error| of each sum below 1e-5 nats for n <= 2^18. */
void divergence_measure(const float *const *models, uint32_t n_models, const float *base, uint32_t n, uint32_t target,
                        struct divergence *out);
