/* Sampling, between sample_host.c and sample.cu. */
#pragma once
#include "gpu-worker/backend/cuda/cuda_internal.h"
#include "gpu-worker/backend/cuda/sample_params.h"

#ifdef __cplusplus
extern "C" {
#endif

int cuda_open_sampling(struct cuda_backend *cuda, uint32_t n_vocab, struct kvg_error *err);
void cuda_close_sampling(struct cuda_backend *cuda);
/* One result for each of n rows; all pointers are the device's, scratch [n][n_vocab]. */
void launch_sample(struct cuda_backend *cuda, const struct tensor *logits, const struct sample_params *params,
                   const struct sample_lists *lists, float *scratch, struct sample_result *results, uint32_t n);

#ifdef __cplusplus
}
#endif
