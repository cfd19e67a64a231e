/* What the files of the CUDA backend share. Host code is C; kernels and their launches are CUDA C++ (.cu, .cuh).
 *
 *   begin_step   checks the step, fills its state in pinned memory, queues one copy to the device
 *   ops          are recorded (record.c)
 *   end_step     queues the recorded ops' kernels on the one stream (run.c), waits, reports the first error
 */
#pragma once
#include <cuda_runtime_api.h>
#include <vector_types.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "gpu-worker/backend/cuda/layout.h"

#ifdef __cplusplus
extern "C" {
#endif
#include "gpu-worker/backend/backend.h"

/* Which column of a product's input each column of a matrix meets; matrices that share one point to the same. */
struct column_order {
    struct column_order *next; /* the backend's list */
    uint32_t cols;
    uint32_t *host, *device; /* [cols] */
};

struct tensor {
    struct tensor *next; /* the backend's list */
    uint32_t rows, cols;
    uint32_t n;                       /* rows that the latest op to write it gave it */
    float *data;                      /* device: activations and vectors [rows, cols] */
    struct matrix matrix;             /* matmul weights and embeddings */
    const struct column_order *order; /* of a matmul weight; NULL = as they are */
    const void *source;               /* the file's bytes, by which a matrix that serves twice is found */
    float *host;                      /* of the `host` op, as of this step */
    uint64_t host_step;
};

enum op_kind {
    OP_EMBED,
    OP_RMSNORM,
    OP_MATMUL,
    OP_ANGLES,
    OP_ROPE_STORE,
    OP_ATTENTION,
    OP_SILU_MUL,
    OP_GELU_MUL,
    OP_HEAD_RMSNORM,
    OP_SCALE,
    OP_ADD,
    OP_GATHER,
    OP_ALL_REDUCE,
    OP_GATHER_COLUMNS
};
struct op {
    enum op_kind kind;
    uint32_t n;
    /* EMBED: x = table; ANGLES: x = frequencies; SILU_MUL, GELU_MUL: x = up; ADD: x = what is added; GATHER_COLUMNS: x = part */
    const struct tensor *x, *weight;
    struct tensor *out; /* GATHER_COLUMNS: NULL on ranks other than 0 */
    float eps;          /* SCALE: the factor */
    struct backend_matmul matmul;
    struct backend_rope rope;
    struct backend_attention attention;
    uint32_t cols; /* GATHER_COLUMNS */
};

/* The rounded forms of an activation that a product may want, in scratch: 16-bit floats [rows][ld] with zeros past the columns,
 * or integers with scales of groups, or of rows (8 bits, or 16). */
enum act_form { FORM_NONE, FORM_BF16, FORM_F16, FORM_GROUPS, FORM_ROWS_8, FORM_ROWS_16 };
static inline bool form_is_integer(enum act_form form)
{
    return form >= FORM_GROUPS;
}
struct act_forms {
    enum act_form form;
    struct acts acts;
    uint16_t *halves;
    uint32_t ld;
};

/* Unnormalized sums and (largest score, sum of weights) of each split of decode attention: [item][head][split]. */
struct attention_parts {
    float *o;
    float2 *ml;
    uint32_t splits;
};

struct cuda_backend {
    struct backend base;
    struct backend_options options;
    cudaStream_t stream;
    char name[64]; /* "NVIDIA H200" */
    int sm_count;
    size_t shared_most; /* bytes of shared memory that a block may ask for */
    uint32_t most_rows; /* of an activation that meets a product */
    struct tensor *tensors;
    struct column_order *orders;
    size_t weight_bytes;
    uint32_t widest_output; /* most rows of a matmul weight */

    struct backend_kv kv;
    uint8_t *kv_memory;
    struct attention_parts parts; /* room for n_items * splits <= max_parts */
    uint32_t max_parts;

    /* Rounded activations: room for most_rows rows as wide as the widest weight. A product that writes the next one's int8 input
     * reads acts[acts_at] and writes the other. */
    struct acts acts[2];
    uint32_t acts_at;
    uint16_t *halves;
    uint32_t widest_groups, act_planes, widest_halves;
    const struct tensor *groups_of, *halves_of; /* whose rounded form the scratch holds; NULL = nobody's */
    enum act_form groups_form, halves_form;
    const struct column_order *groups_order;
    float *squares;                 /* of struct row_scale, for GEMV_ROWS_MAX rows */
    const struct tensor *scaled_of; /* whose values lack `scale`; NULL = nobody's */
    struct row_scale scale;

    /* The current step. */
    uint8_t *pinned, *device_state; /* [state_bytes + 4 * max_tables] */
    size_t state_bytes;
    uint32_t max_tables;
    struct step_view host_view, view; /* in pinned and in device memory */
    uint64_t n_steps;                 /* begun so far */
    uint32_t n_rows, n_outputs, n_decodes, n_tiles;
    uint32_t padded_rows; /* of a step that a graph may run; 0 = none */

    struct op *ops; /* [max_ops] */
    uint32_t n_ops, max_ops;
    struct kvg_error failure; /* the first one of the step; code 0 = none */

    struct sample_buffers *sampling;
    struct graph_cache *graphs; /* NULL: every kernel is launched by itself */

    struct comm *comm; /* of the group's devices; NULL: this one alone */
    uint32_t widest_activation;
};

static inline struct cuda_backend *cuda_of(struct backend *backend)
{
    return (struct cuda_backend *)backend;
}

/* KVG_OK, or err says "cuda: WHAT: the runtime's text". */
int cuda_failed(cudaError_t error, struct kvg_error *err, const char *what);

/* memory.c */
int cuda_weight(struct backend *backend, struct tensor **out, const struct backend_weight *weight, enum backend_weight_use use,
                struct kvg_error *err);
int cuda_activation(struct backend *backend, struct tensor **out, uint32_t rows, uint32_t cols, struct kvg_error *err);
size_t cuda_kv_block_bytes(const struct backend *backend, const struct backend_kv *kv);
int cuda_kv_alloc(struct backend *backend, const struct backend_kv *kv, struct kvg_error *err);
uint64_t cuda_memory(const struct backend *backend, uint64_t *free_bytes);
const float *cuda_host(struct backend *backend, const struct tensor *tensor);
void cuda_free_memory(struct cuda_backend *cuda);
/* n bytes of device memory; on failure err says what was wanted and what is free. */
int cuda_alloc(void **out, size_t n, const char *what, struct kvg_error *err);

/* repack.c: a matrix in the layout of layout.h, in host memory that the caller frees. */
struct repacked {
    uint8_t *data;
    size_t bytes;
    struct matrix matrix; /* pointers are offsets into data */
};
int repack(struct repacked *out, const struct backend_weight *weight, struct kvg_error *err);
int repack_grouped(struct repacked *out, const struct quant_grouped *from, struct kvg_error *err);
static inline bool matrix_is_float(const struct matrix *m)
{
    return m->kind <= MATRIX_BF16;
}
static inline bool matrix_is_grouped(const struct matrix *m)
{
    return m->kind >= MATRIX_W8A8;
}

/* How the pool keeps values, and the bytes of a block in one layer. */
static inline enum kv_store kv_store_of(const struct backend_kv *kv)
{
    return kv->dtype == KV_FP8 ? STORE_FP8 : kv->dtype == KV_INT8 ? STORE_INT8 : STORE_BF16;
}
static inline size_t kv_layer_bytes(const struct backend_kv *kv)
{
    size_t slots = (size_t)2 * kv->block_size * kv->n_kv_heads;
    enum kv_store store = kv_store_of(kv);
    return slots * kv->head_dim * (store == STORE_BF16 ? 2 : 1) + (store == STORE_INT8 ? slots * sizeof(float) : 0);
}

/* step.c */
int cuda_begin_step(struct backend *backend, const struct backend_step *step, struct kvg_error *err);
int cuda_end_step(struct backend *backend, struct kvg_error *err);
int cuda_open_step(struct cuda_backend *cuda, struct kvg_error *err);
void cuda_close_step(struct cuda_backend *cuda);

/* Keys of a split where so many keys take at most `splits`. */
uint32_t keys_of_split(uint32_t keys, uint32_t splits);

/* record.c: the ops. */
void cuda_embed(struct backend *backend, const struct tensor *table, struct tensor *out);
void cuda_rmsnorm(struct backend *backend, uint32_t n, const struct tensor *x, const struct tensor *weight, float eps,
                  struct tensor *out);
void cuda_matmul(struct backend *backend, uint32_t n, const struct tensor *x, const struct backend_matmul *args);
void cuda_angles(struct backend *backend, const struct tensor *frequencies, struct tensor *out);
void cuda_rope_store(struct backend *backend, const struct backend_rope *args);
void cuda_attention(struct backend *backend, const struct backend_attention *args);
void cuda_silu_mul(struct backend *backend, uint32_t n, struct tensor *gate, const struct tensor *up);
void cuda_gelu_mul(struct backend *backend, uint32_t n, struct tensor *gate, const struct tensor *up);
void cuda_head_rmsnorm(struct backend *backend, uint32_t n, struct tensor *x, const struct tensor *weight, float eps);
void cuda_scale(struct backend *backend, uint32_t n, struct tensor *x, float factor);
void cuda_add(struct backend *backend, uint32_t n, struct tensor *x, const struct tensor *y);
void cuda_gather(struct backend *backend, const struct tensor *x, struct tensor *out);
void cuda_all_reduce(struct backend *backend, uint32_t n, struct tensor *x);
void cuda_gather_columns(struct backend *backend, uint32_t n, const struct tensor *part, struct tensor *out, uint32_t cols);

/* run.c: queues the kernels of the recorded ops, by a graph where it can. */
void cuda_run(struct cuda_backend *cuda);
void queue_ops(struct cuda_backend *cuda);

/* graph.c: false where no graph ran. */
int cuda_open_graphs(struct cuda_backend *cuda, struct kvg_error *err);
void cuda_close_graphs(struct cuda_backend *cuda);
uint32_t graph_bucket(uint32_t n);
bool graph_run(struct cuda_backend *cuda);

/* launch.cu, matmul.cu, gemv.cu, grouped.cu, attention.cu: one op's kernels. `forms`: what else a kernel writes for the product
 * that follows. A launch that fails sets cuda->failure. */
int launch_prepare(struct kvg_error *err);
void launch_embed(struct cuda_backend *cuda, const struct op *op);
void launch_rmsnorm(struct cuda_backend *cuda, const struct op *op, const struct act_forms *forms);
void launch_form(struct cuda_backend *cuda, uint32_t n, const struct tensor *x, const struct column_order *order,
                 const struct act_forms *forms);
void launch_angles(struct cuda_backend *cuda, const struct op *op);
void launch_rope_store(struct cuda_backend *cuda, const struct op *op);
void launch_silu_mul(struct cuda_backend *cuda, const struct op *op, const struct act_forms *forms);
void launch_gelu_mul(struct cuda_backend *cuda, const struct op *op, const struct act_forms *forms);
void launch_head_rmsnorm(struct cuda_backend *cuda, const struct op *op);
void launch_add(struct cuda_backend *cuda, const struct op *op); /* OP_ADD, OP_SCALE */
void launch_gather(struct cuda_backend *cuda, const struct op *op);
int matmul_prepare(struct kvg_error *err);
/* Blocks of `rows` rows of all products, and where each one's begin; with THEN_GATE gate and up share theirs. */
uint32_t count_blocks(struct products *products, uint32_t rows);
/* Products whose matrices are of one kind, first_block unset. */
void launch_products(struct cuda_backend *cuda, struct products *products, const struct tensor *x);
/* Whether products of n rows with this matrix take the kernel for few rows. */
bool takes_gemv(const struct cuda_backend *cuda, const struct matrix *w, uint32_t n);
void launch_gemv(struct cuda_backend *cuda, struct products *products, const struct tensor *x);
void launch_grouped(struct cuda_backend *cuda, struct products *products, const struct tensor *x);
/* What products of n rows with a matrix of this kind read; FORM_NONE: x itself. */
enum act_form matmul_form(const struct cuda_backend *cuda, const struct matrix *w, uint32_t n);
/* For the KV pool's heads and type. */
int attention_prepare(const struct cuda_backend *cuda, struct kvg_error *err);
/* rope: what the decoding kernel does before it attends; NULL = nothing, it has been done. */
void launch_attention(struct cuda_backend *cuda, const struct op *op, const struct backend_rope *rope,
                      const struct act_forms *forms);

/* Notes a kernel's launch error, if any: "cuda: KERNEL of rows x cols, n rows: TEXT". */
void cuda_launched(struct cuda_backend *cuda, const char *kernel, uint32_t rows, uint32_t cols, uint32_t n);

/* sample_host.c, sample.cu */
int cuda_sample(struct backend *backend, const struct tensor *logits, const struct sample_row *rows, uint32_t n,
                struct sample_result *results, struct kvg_error *err);

#ifdef __cplusplus
}
#endif
