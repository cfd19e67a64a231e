/* From an open GGUF file to a model's shape and its backend tensors; what families share. Every fault names the key or tensor. */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "gpu-worker/backend/backend.h"
#include "libprompt/error.h"
#include "libprompt/gguf.h"

struct model_watch;

enum { MAX_LAYERS = 1024 };

/* The numbers of a decoder-only transformer, as the file's metadata gives them, checked against each other. */
struct shape {
    uint32_t n_layers, hidden, ffn, n_heads, n_kv_heads, head_dim, rotated, max_position;
    float eps;
    double rope_base;
    double rope_linear; /* positions are divided by it; 1 = none */
};

struct loader {
    const struct kvg_gguf *gguf;
    struct backend *backend;
    char arch[32]; /* "llama", the prefix of the file's keys */
    bool *used;    /* [gguf->n_tensors] */
    uint64_t loaded_bytes, total_bytes;
    void (*progress)(double share, void *context);
    void *context;
    const struct model_watch *watch; /* is told of every matrix; NULL = none */
};

int loader_init(struct loader *loader, const struct kvg_gguf *gguf, struct backend *backend, struct kvg_error *err);
void loader_free(struct loader *loader);

/* Metadata "<arch>.<key>"; the number must be in 1..most. */
int loader_u32(const struct loader *loader, const char *key, uint32_t most, uint32_t *out, struct kvg_error *err);
int loader_shape(const struct loader *loader, struct shape *shape, struct kvg_error *err);

enum loader_need { LOADER_OPTIONAL, LOADER_REQUIRED };

/* The tensor `name` with exactly [rows, cols] (rows = 1: a vector). An absent optional tensor gives *out = NULL. */
int loader_tensor(struct loader *loader, struct tensor **out, const char *name, uint32_t rows, uint32_t cols,
                  enum backend_weight_use use, enum loader_need need, struct kvg_error *err);
/* The first rows of a matrix that was loaded already, as a matrix of its own. */
int loader_first_rows(struct loader *loader, struct tensor **out, const char *name, uint32_t rows, uint32_t cols,
                      struct kvg_error *err);
/* Rows of a matrix by name, 0 if absent. */
uint32_t loader_rows(const struct loader *loader, const char *name);
/* Rotary frequencies base^(-2i / rotated), divided by the linear factor and, where the file has rope_freqs.weight (Llama 3's
 * scaling), by its factors. */
int loader_frequencies(struct loader *loader, const struct shape *shape, struct tensor **out, struct kvg_error *err);
/* After loading. A tensor inside a layer (blk.*) that nobody asked for would change the result: refused. Others are warned about.
 */
int loader_finish(const struct loader *loader, struct kvg_error *err);
