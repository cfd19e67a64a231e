/* The CUDA backend is a shared object of its own, kvgate-cuda.so, so that the worker starts without any CUDA library. It lies
 * beside the worker's program or in /usr/lib/kvgate; the variable KVGATE_CUDA names another file (the tests' emulated one).
 */
#pragma once
#include "gpu-worker/backend/backend.h"

#define KVGATE_EXPORT __attribute__((visibility("default")))

/* What the shared object has: the version it was built with, and the backend. */
typedef int kvgate_cuda_open_function(struct backend **out, const struct backend_options *options, struct kvg_error *err);
#define KVGATE_CUDA_VERSION_SYMBOL "kvgate_cuda_version"
#define KVGATE_CUDA_OPEN_SYMBOL    "kvgate_cuda_open"

/* KVG_UNSUPPORTED, with a line that says why, where there is no shared object, another version's, or no GPU. */
int cuda_backend_open(struct backend **out, const struct backend_options *options, struct kvg_error *err);
