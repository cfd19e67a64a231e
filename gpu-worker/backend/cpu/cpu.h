/* What the files of the CPU backend share. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "gpu-worker/backend/backend.h"
#include "gpu-worker/backend/cpu/kernels.h"
#include "gpu-worker/backend/cpu/panels.h"
#include "gpu-worker/backend/cpu/thread_pool.h"

struct tensor {
    struct tensor *next; /* the backend's list */
    uint32_t rows, cols;
    float *data;                       /* activations and vectors [rows, cols] */
    const struct quant_format *format; /* embeddings: the file's bytes, not owned */
    const void *mapped;
    struct panels panels;  /* matmul weights */
    const uint32_t *order; /* [cols] of their columns in the input, or NULL; equal orders are one pointer */
};

enum { GATED_ROWS = 512 }; /* most of a pass over two weights that are one's gate */

enum cpu_arithmetic { ARITHMETIC_AUTO, ARITHMETIC_INT8, ARITHMETIC_INT16 };

struct row_place {
    uint32_t position, block, slot;
};

/* Forms of its input that a matrix may read, as bits. */
enum acts_form { ACTS_FLOATS = 1, ACTS_INT8 = 2, ACTS_INT16 = 4, ACTS_ROWS8 = 8, ACTS_ROWS16 = 16, ACTS_W4A16 = 32 };

struct cpu_backend {
    struct backend base;
    struct kernels kernels;
    struct thread_pool *pool;
    struct backend_options options;
    enum cpu_arithmetic arithmetic;
    uint32_t int8_formats, int16_formats; /* of the loaded matrices: bit i is quant_at(i) */
    uint32_t grouped_kinds;               /* bit k: a grouped_kind */
    struct tensor *tensors;
    struct arena_chunk *arena; /* the tensors' values */

    struct backend_kv kv;
    struct kv_layer *layers; /* [kv.n_layers] */
    uint8_t *kv_memory;
    size_t kv_bytes;
    struct attention_kernels attention_kernels, window_kernels; /* of the pool's dtype */

    /* Scratch, grown while weights load. */
    struct acts acts;
    size_t acts_values, int16_values; /* capacity: rows * cols */
    size_t rows8_bytes, rows16_bytes;
    struct attention_scratch *attention; /* [threads] */
    float *sampling;                     /* [threads][most_cols] */
    float *scratch; /* [threads][scratch_floats]: an input row (two where it is reordered), or two panels' results of GATED_ROWS
                       rows */
    size_t scratch_floats;
    uint32_t most_cols; /* of an activation */

    /* The current step. */
    struct backend_step step;
    struct row_place *places; /* [max_rows] */
    struct attention_plan *plan;
    struct kvg_error lost; /* why the group is of no use any more; code 0: it is */
};

static inline struct cpu_backend *cpu_of(struct backend *backend)
{
    return (struct cpu_backend *)backend;
}

static inline enum acts_form cpu_acts_form(const struct cpu_backend *cpu, const struct panels *panels)
{
    if (panels->kind == PANEL_W8A8)
        return ACTS_ROWS8;
    if (panels->kind == PANEL_BF16 && cpu->kernels.round_rows16)
        return ACTS_ROWS16;
    if (panels->scales == QUANT_FLOAT)
        return ACTS_FLOATS;
    if (panels_w4a16(panels))
        return ACTS_W4A16;
    return panels_int16(panels) ? ACTS_INT16 : ACTS_INT8;
}

/* 64-byte aligned, n bytes rounded up; NULL when memory is out. */
void *cpu_alloc(size_t n);
/* Zeroed memory on huge pages, n bytes rounded up; NULL when there is none. Pages are taken when they are touched. */
void *cpu_map(size_t n);
void cpu_unmap(void *memory, size_t n);

int cpu_weight(struct backend *backend, struct tensor **out, const struct backend_weight *weight, enum backend_weight_use use,
               struct kvg_error *err);
int cpu_activation(struct backend *backend, struct tensor **out, uint32_t rows, uint32_t cols, struct kvg_error *err);
size_t cpu_kv_block_bytes(const struct backend *backend, const struct backend_kv *kv);
int cpu_kv_alloc(struct backend *backend, const struct backend_kv *kv, struct kvg_error *err);
void cpu_kv_free(struct cpu_backend *cpu);
void cpu_free_memory(struct cpu_backend *cpu);
int cpu_attention_alloc(struct cpu_backend *cpu, struct kvg_error *err);
void cpu_attention_free(struct cpu_backend *cpu);
/* Cuts the rows of cpu->step into pieces. */
void cpu_attention_begin(struct cpu_backend *cpu);
/* Sequences of the step whose first segments are computed together, because they lie in the same blocks. */
uint32_t cpu_attention_sharing(const struct cpu_backend *cpu);

/* The kernels of a layer: of its window, if it has one. */
static inline const struct attention_kernels *cpu_attention_kernels(const struct cpu_backend *cpu, uint32_t layer)
{
    return cpu->kv.windows && cpu->kv.windows[layer] ? &cpu->window_kernels : &cpu->attention_kernels;
}

int cpu_begin_step(struct backend *backend, const struct backend_step *step, struct kvg_error *err);
int cpu_end_step(struct backend *backend, struct kvg_error *err);
void cpu_embed(struct backend *backend, const struct tensor *table, struct tensor *out);
void cpu_rmsnorm(struct backend *backend, uint32_t n, const struct tensor *x, const struct tensor *weight, float eps,
                 struct tensor *out);
void cpu_matmul(struct backend *backend, uint32_t n, const struct tensor *x, const struct backend_matmul *args);
void cpu_normed_matmul(struct backend *backend, uint32_t n, const struct tensor *x, const struct backend_norm *norm,
                       const struct backend_matmul *args);
void cpu_normed_gated(struct backend *backend, uint32_t n, const struct tensor *x, const struct backend_norm *norm,
                      const struct backend_gated *args);
void cpu_angles(struct backend *backend, const struct tensor *frequencies, struct tensor *out);
void cpu_rope_store(struct backend *backend, const struct backend_rope *args);
void cpu_attention(struct backend *backend, const struct backend_attention *args);
void cpu_head_rmsnorm(struct backend *backend, uint32_t n, struct tensor *x, const struct tensor *weight, float eps);
void cpu_scale(struct backend *backend, uint32_t n, struct tensor *x, float factor);
void cpu_add(struct backend *backend, uint32_t n, struct tensor *x, const struct tensor *y);
void cpu_gelu_mul(struct backend *backend, uint32_t n, struct tensor *gate, const struct tensor *up);
void cpu_silu_mul(struct backend *backend, uint32_t n, struct tensor *gate, const struct tensor *up);
void cpu_gather(struct backend *backend, const struct tensor *x, struct tensor *out);
void cpu_all_reduce(struct backend *backend, uint32_t n, struct tensor *x);
void cpu_gather_columns(struct backend *backend, uint32_t n, const struct tensor *part, struct tensor *out, uint32_t cols);
int cpu_sample(struct backend *backend, const struct tensor *logits, const struct sample_row *rows, uint32_t n,
               struct sample_result *results, struct kvg_error *err);
const float *cpu_host(struct backend *backend, const struct tensor *tensor);
