/* What a device does for a model: one table of operations on tensors that only the device can read.
 *
 *   model (families)  --ops-->  backend: cpu/, cuda/
 *
 * A step runs  begin_step, ops in order, end_step.  Ops may be queued: results are valid after end_step. No op allocates.
 * A device may run neighbouring ops as one: a tensor that a later op of the step took as input holds no result after end_step,
 * unless the step wrote it again.
 * Activations are f32, row-major [rows, cols]. n is the number of rows an op works on: the step's rows before `gather`, its
 * outputs after. Unless said otherwise an output may not alias an input.
 *
 * Row-invariance: row i of every result is the same, bit for bit, whatever the other rows, n, the block tables' placement and the
 * thread count are. A kernel may be chosen by n only among kernels with equal bits.
 * The CUDA backend keeps this rule with `deterministic`; without it the number of rows also chooses among kernels that add in
 * another order, and how decode attention is split depends on the batch.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "gpu-worker/backend/sampling.h"
#include "gpu-worker/quant/grouped.h"
#include "gpu-worker/quant/quant.h"
#include "libprompt/error.h"

struct backend;
struct comm;
struct tensor;

struct backend_options {
    const char *isa;   /* "auto", or the instruction set to use; NULL = auto */
    uint32_t threads;  /* 0 = all cores, divided among the ranks of comm */
    uint32_t max_rows; /* most rows of a step */
    uint32_t max_seqs;
    uint32_t max_outputs;
    const char *arithmetic; /* "auto", or how quantized weights are multiplied: see matmul; NULL = auto */
    bool deterministic;     /* CUDA: row-invariance, see above */
    bool eager;             /* CUDA: no graphs */
    struct comm *comm;      /* the group that this device is a rank of (comm.h), open as long as the backend; NULL: none */
};

/* A matrix or vector as it lies in the (mapped) model file; the bytes must outlive the backend, but for a MATMUL with a source.
 */
struct backend_weight {
    const struct quant_format *format;
    const void *data;
    uint32_t rows, cols;
    const void *source; /* the file's bytes that data was made from: which matrix it is; NULL: data lies in the file */
    const uint32_t
        *order; /* [cols]: column i of data meets column order[i] of a product's input; NULL: i. Backends that gather */
    const struct quant_grouped *grouped; /* in place of format and data (MATMUL; backends that take grouped matrices) */
};
enum backend_weight_use { WEIGHT_MATMUL, WEIGHT_EMBEDDING, WEIGHT_VECTOR };

/* How the KV pool keeps keys and values. KV_AUTO: what backend.kv_auto says. */
enum backend_kv_dtype {
    KV_AUTO,
    KV_F16,
    KV_BF16,
    KV_INT8, /* rne(x / scale) with a scale of each token and kv head, for keys and for values: max|x| / 127 */
    KV_FP8,  /* CUDA: e4m3 without a scale, what is larger than 448 becomes 448 */
    KV_DTYPES
};

struct backend_kv {
    uint32_t n_layers, n_heads, n_kv_heads, head_dim, n_blocks, block_size;
    enum backend_kv_dtype dtype;
    /* [n_layers] how many positions a row of the layer sees, its own included; 0 = all. NULL: all layers see all. It outlives the
     * backend. */
    const uint32_t *windows;
};

struct backend_seq {
    uint32_t first_row, n_rows, n_past;
    const uint32_t *blocks; /* [ceil((n_past + n_rows) / block_size)] */
};

struct backend_step {
    uint32_t n_rows, n_seqs, n_outputs;
    const uint32_t *ids;     /* [n_rows] */
    const uint32_t *outputs; /* [n_outputs] */
    const struct backend_seq *seqs;
};

/* Up to four products that share their input: out[i] = x W[i]^T (+ bias[i]), x [n, cols], W [rows, cols], out [n, rows]. */
enum { MATMUL_MAX = 4 };
struct backend_matmul {
    uint32_t count;
    const struct tensor *weights[MATMUL_MAX];
    const struct tensor *biases[MATMUL_MAX]; /* NULL = none */
    struct tensor *outs[MATMUL_MAX];
    bool accumulate; /* out += x W^T instead */
};

/* rmsnorm of a product's input. `scratch` [n, cols] is the backend's for the time of the op. */
struct backend_norm {
    const struct tensor *weight;
    float eps;
    struct tensor *scratch;
};

/* out = silu(x gate^T) * (x up^T), gate and up [rows, cols], out [n, rows]. */
struct backend_gated {
    const struct tensor *gate, *up;
    struct tensor *out;
};

enum rope_style { ROPE_INTERLEAVED, ROPE_HALVES }; /* pairs (2i, 2i + 1), or (i, i + rotated / 2) */

struct backend_rope {
    uint32_t layer;
    struct tensor *q, *k;        /* [n_rows, heads * head_dim], rotated in place */
    const struct tensor *v;      /* [n_rows, kv_heads * head_dim] */
    const struct tensor *angles; /* of the `angles` op */
    enum rope_style style;
};

struct backend_attention {
    uint32_t layer;
    float scale;            /* of q k^T, usually 1 / sqrt(head_dim) */
    const struct tensor *q; /* [n_rows, n_heads * head_dim] */
    struct tensor *out;     /* same shape */
};

struct backend_ops {
    /* "cpu avx512-vnni, 2 threads" into out[size]. */
    void (*describe)(const struct backend *backend, char *out, size_t size);
    void (*close)(struct backend *backend);

    /* Life cycle, before the first step. Tensors belong to the backend and live until close. KVG_FILE names the first row of a
     * WEIGHT_MATMUL that holds an infinity or NaN. */
    int (*weight)(struct backend *backend, struct tensor **out, const struct backend_weight *weight, enum backend_weight_use use,
                  struct kvg_error *err);
    int (*activation)(struct backend *backend, struct tensor **out, uint32_t rows, uint32_t cols, struct kvg_error *err);
    size_t (*kv_block_bytes)(const struct backend *backend, const struct backend_kv *kv);
    int (*kv_alloc)(struct backend *backend, const struct backend_kv *kv, struct kvg_error *err);

    /* The step's arrays must stay valid until end_step. */
    int (*begin_step)(struct backend *backend, const struct backend_step *step, struct kvg_error *err);
    int (*end_step)(struct backend *backend, struct kvg_error *err);

    /* out[r] = table[ids[r]] for all rows of the step. Exact: decoded to f32. */
    void (*embed)(struct backend *backend, const struct tensor *table, struct tensor *out);
    /* out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight. Relative error 1e-6. */
    void (*rmsnorm)(struct backend *backend, uint32_t n, const struct tensor *x, const struct tensor *weight, float eps,
                    struct tensor *out);
    /* Quantized weights, one arithmetic a weight at every n:
     * int8: x is rounded to int8 per row and group of 32 (d = max|x| / 127), group sums are exact integers, and the sum over
     * groups runs in f32 in the order of the row, so |error| <= sum_g (d_g / 2) sum|w_g| + f32 rounding.
     * int16 (4 to 6 bits): x is rounded to a multiple of a = max|x| / 32512, w to one of d = max|w| over the row's groups and
     * codes / 32600 through its scales, the sum is exact and rounded once to a multiple of 2^16 a d, so |error| <= (a / 2) sum|w|
     * + 8 d sum|x| + 4 a d cols + 2^15 a d + f32 rounding of the result.
     * Grouped matrices: quant/grouped.h. Float weights: f32 FMA in the order of the row; BF16 on AMX: x is rounded to BF16,
     * |error| <= 2^-8 sum|w x|. */
    void (*matmul)(struct backend *backend, uint32_t n, const struct tensor *x, const struct backend_matmul *args);
    /* The bits of rmsnorm, matmul and silu_mul one after the other, without what they would keep in between; x' = rmsnorm(x).
     * NULL where a device has no such thing. */
    void (*normed_matmul)(struct backend *backend, uint32_t n, const struct tensor *x, const struct backend_norm *norm,
                          const struct backend_matmul *args);
    void (*normed_gated)(struct backend *backend, uint32_t n, const struct tensor *x, const struct backend_norm *norm,
                         const struct backend_gated *args);
    /* out[r] = cosines and sines of position of row r * frequency[i], in an order of the backend's own, for rope_store;
     * frequencies [rotated / 2], out [n_rows, rotated]. The angle is exact to f64 rounding. */
    void (*angles)(struct backend *backend, const struct tensor *frequencies, struct tensor *out);
    /* Rotates the first `rotated` dimensions of each head of q and k, and stores k and v of each row in the KV blocks (see
     * backend_kv_dtype).
     */
    void (*rope_store)(struct backend *backend, const struct backend_rope *args);
    /* Causal attention of each row over its sequence's positions 0..its own, or the last ones where the layer has a window, K/V
     * read through the block table. Error against exact attention over the stored values: 1e-5 of max|v|; on AMX 5e-5 with f16,
     * and with bf16 and int8, where queries and probabilities are rounded to BF16, 2^-8 (1 + the largest sum of |q k| scale of a
     * score). */
    void (*attention)(struct backend *backend, const struct backend_attention *args);
    /* gate = silu(gate) * up, element by element. Relative error 1e-6. */
    void (*silu_mul)(struct backend *backend, uint32_t n, struct tensor *gate, const struct tensor *up);
    /* What only some families need; NULL where a backend lacks it. In place: each run of weight's width in x[r] by itself, as
     * rmsnorm; x *= factor; x += y; gate = gelu(gate) * up with gelu by its tanh form, error 1e-6 of |gate up|. */
    void (*head_rmsnorm)(struct backend *backend, uint32_t n, struct tensor *x, const struct tensor *weight, float eps);
    void (*scale)(struct backend *backend, uint32_t n, struct tensor *x, float factor);
    void (*add)(struct backend *backend, uint32_t n, struct tensor *x, const struct tensor *y);
    void (*gelu_mul)(struct backend *backend, uint32_t n, struct tensor *gate, const struct tensor *up);
    /* out[i] = x[outputs[i]]. Exact. */
    void (*gather)(struct backend *backend, const struct tensor *x, struct tensor *out);
    /* After end_step: samples rows of logits [n_outputs, n_vocab]; see sampling.h. */
    int (*sample)(struct backend *backend, const struct tensor *logits, const struct sample_row *rows, uint32_t n,
                  struct sample_result *results, struct kvg_error *err);
    /* After end_step: the tensor's values in host memory, valid until the next begin_step. */
    const float *(*host)(struct backend *backend, const struct tensor *tensor);
    /* With options.comm, by every rank alike; see comm.h. NULL where a device cannot be one of a group.
     * x[r] = its sum over the ranks. */
    void (*all_reduce)(struct backend *backend, uint32_t n, struct tensor *x);
    /* Rank 0's out[r] = the ranks' part[r] side by side, `cols` columns in all; out is NULL on others. */
    void (*gather_columns)(struct backend *backend, uint32_t n, const struct tensor *part, struct tensor *out, uint32_t cols);
    /* Bytes of the device's own memory, what is free of it to *free_bytes; NULL where the device works in host memory. */
    uint64_t (*memory)(const struct backend *backend, uint64_t *free_bytes);
};

struct backend {
    const struct backend_ops *ops;
    enum backend_kv_dtype kv_auto; /* set when it is opened */
    bool gathers;                  /* weights may have an order; set when it is opened */
    bool grouped;                  /* weights may be grouped matrices; set when it is opened */
};

/* "auto", "f16" or "float16", "bf16" or "bfloat16", "int8", "fp8" or "fp8_e4m3"; NULL = auto. KVG_INVALID names an unknown one.
 */
int backend_kv_dtype(const char *name, enum backend_kv_dtype *out, struct kvg_error *err);
/* "f16", "bf16", "int8", "fp8". */
const char *backend_kv_dtype_name(enum backend_kv_dtype dtype);

/* err: an unknown instruction set, or one that this CPU lacks, is named. */
int cpu_backend_open(struct backend **out, const struct backend_options *options, struct kvg_error *err);
