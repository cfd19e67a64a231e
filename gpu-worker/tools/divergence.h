/* How far the next-token distribution of one model lies from another's, at one position, over the whole vocabulary. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

struct divergence {
    double nll, base_nll; /* -log of the probability of the token that follows, in nats */
    double kl;            /* KL(base || model), in nats */
    bool same_top;        /* both hold the same token to be the most probable (of equals the first) */
};

/* logits, base: [n] f32; target < n. base may be NULL: only nll is set. |error| of each sum below 1e-5 nats for n <= 2^18. */
void divergence_measure(const float *logits, const float *base, uint32_t n, uint32_t target, struct divergence *out);
