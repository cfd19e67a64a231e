/* The device's limits for tests/device/bench_device.c. */
#pragma once
#include <cuda_runtime_api.h>
#ifdef __cplusplus
extern "C" {
#endif

enum ceiling { CEILING_BF16, CEILING_INT8 };

/* Queues a kernel that does nothing. */
void empty_queue(cudaStream_t stream);

/* Queues a kernel of mma instructions; scratch holds 4 * 256 * blocks bytes. Its operations, a multiply-add being two. */
double ceiling_queue(enum ceiling what, void *scratch, int blocks, int rounds, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
