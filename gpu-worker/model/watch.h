/* Lets a caller see the input of every product of a forward: how calibration learns what a matrix is multiplied with. */
#pragma once
#include <stdint.h>
#include "gpu-worker/backend/backend.h"

/* Both may be called at any time between model_open and model_close, on the thread that called; tensors are the backend's own and
 * serve as keys. */
struct model_watch {
    /* A matrix was loaded under this name of the file. */
    void (*weight)(void *context, const char *name, const struct tensor *weight, uint32_t rows, uint32_t cols);
    /* n rows of x [n, cols] are about to be multiplied with each of the matrices. x is valid during the call. */
    void (*product)(void *context, const struct tensor *const *weights, uint32_t count, const float *x, uint32_t n);
    void *context;
};

struct watched; /* a backend's ops with another matmul */

/* From here on the backend's products are told to the watch. The CPU backend only: its products are computed at once, on host
 * memory. The result lives until watch_free, which comes after the backend was closed. */
int watch_install(struct watched **out, struct backend *backend, const struct model_watch *watch, struct kvg_error *err);
void watch_free(struct watched *watched);
