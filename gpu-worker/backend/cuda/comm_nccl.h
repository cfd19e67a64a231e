/* The GPUs of a tensor-parallel group. */
#pragma once
#include "gpu-worker/backend/comm.h"
#include "gpu-worker/backend/cuda/cuda_internal.h"

/* By every rank of the host's group, each on its own device. The table (all_reduce, gather) takes device memory and is queued on
 * the stream. On failure all ranks get the same code; KVG_UNSUPPORTED where there is no NCCL. */
int comm_nccl_open(struct comm **out, struct comm *host, cudaStream_t stream, struct kvg_error *err);
/* Once, before the first gather: room for parts of so many numbers. */
int comm_nccl_reserve(struct comm *comm, size_t part, struct kvg_error *err);
