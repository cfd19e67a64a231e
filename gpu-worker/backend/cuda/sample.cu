/* Launch of the sampling kernel. */
#include "gpu-worker/backend/cuda/sample.cuh"
#include "gpu-worker/backend/cuda/sample_host.h"

void launch_sample(struct cuda_backend *cuda, const struct tensor *logits, const struct sample_params *params,
                   const struct sample_lists *lists, float *scratch, struct sample_result *results, uint32_t n)
{
    CU_LAUNCH(sample_kernel, n, SAMPLE_THREADS, 0, cuda->stream, logits->data, logits->cols, params, *lists, scratch, results);
    cuda_launched(cuda, "sample", logits->rows, logits->cols, n);
}
