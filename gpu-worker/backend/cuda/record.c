/* The ops table's functions: each notes what is to be done; run.c does it. */
#include "gpu-worker/backend/cuda/cuda_internal.h"

static void record(struct backend *backend, const struct op *op)
{
    struct cuda_backend *cuda = cuda_of(backend);
    if (op->out)
        op->out->n = op->n;
    for (uint32_t i = 0; i < op->matmul.count; i++)
        op->matmul.outs[i]->n = op->n;
    if (cuda->n_ops < cuda->max_ops) {
        cuda->ops[cuda->n_ops] = *op;
        if (cuda->padded_rows)
            cuda->ops[cuda->n_ops].n = cuda->padded_rows;
        cuda->n_ops++;
    } else if (!cuda->failure.code) {
        kvg_fail(&cuda->failure, KVG_LIMIT, "cuda: a step of more than %u ops", cuda->max_ops);
    }
}

void cuda_embed(struct backend *backend, const struct tensor *table, struct tensor *out)
{
    struct op op = {.kind = OP_EMBED, .n = cuda_of(backend)->n_rows, .x = table, .out = out};
    record(backend, &op);
}

void cuda_rmsnorm(struct backend *backend, uint32_t n, const struct tensor *x, const struct tensor *weight, float eps,
                  struct tensor *out)
{
    struct op op = {.kind = OP_RMSNORM, .n = n, .x = x, .weight = weight, .eps = eps, .out = out};
    record(backend, &op);
}

void cuda_matmul(struct backend *backend, uint32_t n, const struct tensor *x, const struct backend_matmul *args)
{
    struct op op = {.kind = OP_MATMUL, .n = n, .x = x, .matmul = *args};
    record(backend, &op);
}

void cuda_angles(struct backend *backend, const struct tensor *frequencies, struct tensor *out)
{
    struct op op = {.kind = OP_ANGLES, .n = cuda_of(backend)->n_rows, .x = frequencies, .out = out};
    record(backend, &op);
}

void cuda_rope_store(struct backend *backend, const struct backend_rope *args)
{
    struct op op = {.kind = OP_ROPE_STORE, .n = cuda_of(backend)->n_rows, .rope = *args};
    record(backend, &op);
}

void cuda_attention(struct backend *backend, const struct backend_attention *args)
{
    struct op op = {.kind = OP_ATTENTION, .n = cuda_of(backend)->n_rows, .attention = *args, .out = args->out};
    record(backend, &op);
}

void cuda_silu_mul(struct backend *backend, uint32_t n, struct tensor *gate, const struct tensor *up)
{
    struct op op = {.kind = OP_SILU_MUL, .n = n, .x = up, .out = gate};
    record(backend, &op);
}

void cuda_gelu_mul(struct backend *backend, uint32_t n, struct tensor *gate, const struct tensor *up)
{
    struct op op = {.kind = OP_GELU_MUL, .n = n, .x = up, .out = gate};
    record(backend, &op);
}

void cuda_head_rmsnorm(struct backend *backend, uint32_t n, struct tensor *x, const struct tensor *weight, float eps)
{
    struct op op = {.kind = OP_HEAD_RMSNORM, .n = n, .x = x, .weight = weight, .eps = eps, .out = x};
    record(backend, &op);
}

void cuda_scale(struct backend *backend, uint32_t n, struct tensor *x, float factor)
{
    struct op op = {.kind = OP_SCALE, .n = n, .x = x, .eps = factor, .out = x};
    record(backend, &op);
}

void cuda_add(struct backend *backend, uint32_t n, struct tensor *x, const struct tensor *y)
{
    struct op op = {.kind = OP_ADD, .n = n, .x = y, .out = x};
    record(backend, &op);
}

void cuda_all_reduce(struct backend *backend, uint32_t n, struct tensor *x)
{
    struct op op = {.kind = OP_ALL_REDUCE, .n = n, .x = x, .out = x};
    record(backend, &op);
}

void cuda_gather_columns(struct backend *backend, uint32_t n, const struct tensor *part, struct tensor *out, uint32_t cols)
{
    struct op op = {.kind = OP_GATHER_COLUMNS, .n = n, .x = part, .out = out, .cols = cols};
    record(backend, &op);
}

void cuda_gather(struct backend *backend, const struct tensor *x, struct tensor *out)
{
    struct op op = {.kind = OP_GATHER, .n = cuda_of(backend)->n_outputs, .x = x, .out = out};
    record(backend, &op);
}
