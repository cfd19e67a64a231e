/* What a model costs in bytes and operations, from the headers of its file or folder alone, and what this CPU gives in a second:
 * the two halves of a roofline (Williams et al., 2009).
 */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "gpu-worker/quant/grouped.h"
#include "libprompt/error.h"

struct capacity {
    char family[32];
    uint32_t n_layers, n_heads, n_kv_heads, head_dim, ffn, n_vocab, max_position;
    uint64_t weight_bytes;                  /* of all tensors; of a folder: as they lie in memory */
    uint64_t layer_bytes, output_bytes;     /* of the matrices that every step reads: those in layers, and the output matrix */
    uint64_t layer_weights, output_weights; /* numbers in them */
    uint32_t ggml_type;                     /* in which most bytes of the layers' matrices are kept */
    bool grouped;                           /* they are grouped matrices, of this kind, instead */
    struct quant_grouped form;
};

/* No weight is read. Faults of the file as model_open reports them. */
int capacity_read(struct capacity *out, const char *path, struct kvg_error *err);

/* As the ranks of a tensor-parallel group hold it together: kv heads count as often as they are held. KVG_INVALID as
 * model_open's, where heads or the feed-forward cannot be divided so. */
int capacity_divide(struct capacity *model, uint32_t ranks, struct kvg_error *err);

/* Bytes of a KV block of all layers. device "cpu": as that backend lays it out (kv_cache_dtype as in model_options; isa may be
 * NULL); "cuda": likewise, without that backend being there. KVG_UNSUPPORTED: the backend has no KV of that type. */
int capacity_kv_block_bytes(const struct capacity *model, const char *device, const char *isa, const char *kv_cache_dtype,
                            uint32_t block_size, uint64_t *out, struct kvg_error *err);

struct machine_rates {
    double bytes_per_s; /* read from memory by all threads together */
    double ops_per_s;   /* multiplications and additions of large products with weights of the model's format */
};

/* Measures this CPU for about a second: reading 512 MiB, and products of 512 rows by a 4096 x 1024 matrix through the backend.
 * threads: 0 = all cores. */
int capacity_measure_cpu(const struct capacity *model, uint32_t threads, const char *isa, struct machine_rates *out,
                         struct kvg_error *err);
