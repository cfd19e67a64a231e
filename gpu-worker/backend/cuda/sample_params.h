/* What a sampling kernel reads: the parameters of each row, and the rows' lists one after the other. */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
#include "gpu-worker/backend/sampling.h"
#ifdef __cplusplus
}
#endif

struct sample_params {
    uint64_t seed;
    uint32_t output, choice, position;
    float temperature, top_p, min_p, log_min_p;
    float repetition_penalty, presence_penalty, frequency_penalty;
    uint32_t top_k, n_vocab, top_logprobs;
    bool want_logprob;
    uint32_t counts, n_counts, biases, n_biases, banned, n_banned; /* where in the lists, and how many */
};

struct sample_lists {
    const struct sample_count *counts;
    const struct sample_bias *biases;
    const uint32_t *banned;
};
