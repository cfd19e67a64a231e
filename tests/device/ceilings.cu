/* What the device can do at most: multiply-adds per second of its mma instructions, with nothing else in the way. */
#include "gpu-worker/backend/cuda/cu_port.h"
#include "tests/device/ceilings.h"

static constexpr int CHAINS = 8, WARPS = 8;

/* Chains of independent mma; `out` keeps the compiler from dropping them. */
__global__ void __launch_bounds__(WARPS * 32) bf16_kernel(float *out, int rounds)
{
    float sums[CHAINS][4] = {};
    const uint32_t a[4] = {threadIdx.x, 1, 2, 3}, b[2] = {threadIdx.x, 5};
    for (int i = 0; i < rounds; i++)
#pragma unroll
        for (int c = 0; c < CHAINS; c++)
            mma_bf16_16816(sums[c], a, b);
    float all = 0;
    for (int c = 0; c < CHAINS; c++)
        all += sums[c][0] + sums[c][1] + sums[c][2] + sums[c][3];
    out[blockIdx.x * blockDim.x + threadIdx.x] = all;
}

__global__ void __launch_bounds__(WARPS * 32) int8_kernel(int *out, int rounds)
{
    int sums[CHAINS][4] = {};
    const uint32_t a[4] = {threadIdx.x, 1, 2, 3}, b[2] = {threadIdx.x, 5};
    for (int i = 0; i < rounds; i++)
#pragma unroll
        for (int c = 0; c < CHAINS; c++)
            mma_s8_16832(sums[c], a, b);
    int all = 0;
    for (int c = 0; c < CHAINS; c++)
        all += sums[c][0] + sums[c][1] + sums[c][2] + sums[c][3];
    out[blockIdx.x * blockDim.x + threadIdx.x] = all;
}

__global__ void empty_kernel(int) {}

void empty_queue(cudaStream_t stream)
{
    CU_LAUNCH(empty_kernel, 1, 32, 0, stream, 0);
}

double ceiling_queue(enum ceiling what, void *scratch, int blocks, int rounds, cudaStream_t stream)
{
    double depth = what == CEILING_BF16 ? 16 : 32;
    if (what == CEILING_BF16)
        CU_LAUNCH(bf16_kernel, blocks, WARPS * 32, 0, stream, (float *)scratch, rounds);
    else
        CU_LAUNCH(int8_kernel, blocks, WARPS * 32, 0, stream, (int *)scratch, rounds);
    return 2.0 * 16 * 8 * depth * CHAINS * WARPS * (double)blocks * (double)rounds;
}
