/* Tensors, scratch and the KV pool: everything the CUDA backend allocates on the device, all before the first step. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/backend/cuda/comm_nccl.h"
#include "gpu-worker/backend/cuda/sample_host.h"

int cuda_alloc(void **out, size_t n, const char *what, struct kvg_error *err)
{
    size_t free_bytes = 0, total = 0;
    cudaError_t error = cudaMalloc(out, n ? n : 1);
    if (error == cudaSuccess)
        return 0;
    cudaGetLastError(); /* an allocation that failed is not a fault of later calls */
    *out = NULL;
    if (error != cudaErrorMemoryAllocation)
        return cuda_failed(error, err, what);
    cudaMemGetInfo(&free_bytes, &total);
    return kvg_fail(err, KVG_NOMEM, "cuda: no memory for %s: %.1f MiB wanted, %.1f of %.1f MiB free", what, (double)n / (1 << 20),
                    (double)free_bytes / (1 << 20), (double)total / (1 << 20));
}

int cuda_failed(cudaError_t error, struct kvg_error *err, const char *what)
{
    if (error == cudaSuccess)
        return 0;
    return kvg_fail(err, error == cudaErrorMemoryAllocation ? KVG_NOMEM : KVG_UNSUPPORTED, "cuda: %s: %s", what,
                    cudaGetErrorString(error));
}

static struct tensor *tensor_new(struct cuda_backend *cuda, uint32_t rows, uint32_t cols)
{
    struct tensor *tensor = calloc(1, sizeof *tensor);
    if (!tensor)
        return NULL;
    tensor->rows = rows;
    tensor->cols = cols;
    tensor->next = cuda->tensors;
    cuda->tensors = tensor;
    return tensor;
}

static uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

int cuda_activation(struct backend *backend, struct tensor **out, uint32_t rows, uint32_t cols, struct kvg_error *err)
{
    struct cuda_backend *cuda = cuda_of(backend);
    size_t bytes = (size_t)rows * cols * sizeof(float);
    struct tensor *tensor = tensor_new(cuda, rows, cols);
    if (!tensor)
        return kvg_fail(err, KVG_NOMEM, "no memory for a tensor");
    char what[112];
    snprintf(what, sizeof what, "activations of %u rows (--max-num-batched-tokens, --max-num-seqs) beside %.1f MiB of weights",
             rows, (double)cuda->weight_bytes / (1 << 20));
    int failed = cuda_alloc((void **)&tensor->data, bytes, what, err);
    if (failed)
        return failed;
    *out = tensor;
    cuda->widest_activation = larger(cols, cuda->widest_activation);
    return cuda_failed(cudaMemset(tensor->data, 0, bytes), err, "clearing activations"); /* rows of padding are read */
}

/* ---- scratch for rounded activations ---- */

/* planes: of q (layout.h). */
static int grow_groups(struct cuda_backend *cuda, uint32_t groups, uint32_t planes, struct kvg_error *err)
{
    if (groups <= cuda->widest_groups && planes <= cuda->act_planes)
        return 0;
    groups = larger(groups, cuda->widest_groups);
    planes = larger(planes, cuda->act_planes);
    size_t all = (size_t)cuda->most_rows * groups;
    cuda->widest_groups = cuda->act_planes = 0;
    for (int i = 0; i < 2; i++) {
        struct acts *acts = &cuda->acts[i];
        int failed;
        cudaFree(acts->q);
        cudaFree(acts->groups);
        *acts = (struct acts){.plane = all * 16};
        if ((failed = cuda_alloc((void **)&acts->q, planes * all * 16, "quantized activations", err)) ||
            (failed = cuda_alloc((void **)&acts->groups, all * sizeof *acts->groups, "scales of activations", err)))
            return failed;
    }
    cuda->widest_groups = groups;
    cuda->act_planes = planes;
    return 0;
}

static int grow_halves(struct cuda_backend *cuda, uint32_t ld, struct kvg_error *err)
{
    if (ld <= cuda->widest_halves)
        return 0;
    cudaFree(cuda->halves);
    cuda->widest_halves = 0;
    int failed =
        cuda_alloc((void **)&cuda->halves, (size_t)cuda->most_rows * ld * sizeof *cuda->halves, "rounded activations", err);
    cuda->widest_halves = failed ? 0 : ld;
    return failed;
}

/* ---- weights ---- */

/* The bytes that a matrix is made from. */
static const void *source_of(const struct backend_weight *weight)
{
    return weight->source ? weight->source : weight->grouped ? weight->grouped->context : weight->data;
}

/* A matrix of the same bytes that is already on the device: a tied embedding. */
static bool find_matrix(const struct cuda_backend *cuda, const struct backend_weight *weight, struct matrix *out)
{
    const void *source = source_of(weight);
    for (const struct tensor *t = cuda->tensors; t; t = t->next) {
        if (t->source != source || t->matrix.rows != weight->rows || t->matrix.cols != weight->cols)
            continue;
        *out = t->matrix;
        return true;
    }
    return false;
}

static int upload_matrix(struct cuda_backend *cuda, struct matrix *out, const struct backend_weight *weight,
                         struct kvg_error *err)
{
    struct repacked host;
    uint8_t *device = NULL;
    int failed = weight->grouped ? repack_grouped(&host, weight->grouped, err) : repack(&host, weight, err);
    if (failed)
        return failed;
    char what[64];
    snprintf(what, sizeof what, "weights, beside %.1f MiB of the model's", (double)cuda->weight_bytes / (1 << 20));
    if (!(failed = cuda_alloc((void **)&device, host.bytes, what, err)))
        failed = cuda_failed(cudaMemcpy(device, host.data, host.bytes, cudaMemcpyHostToDevice), err, "copying weights");
    free(host.data);
    *out = host.matrix;
    out->codes = device + (size_t)out->codes;
    out->high = device + (size_t)out->high;
    out->scales = device + (size_t)out->scales;
    out->supers = device + (size_t)out->supers;
    cuda->weight_bytes += host.bytes;
    return failed;
}

static int upload_vector(struct tensor *tensor, const struct backend_weight *weight, struct kvg_error *err)
{
    size_t n = (size_t)weight->rows * weight->cols;
    if (quant_row_bytes(weight->format, weight->cols) == 0)
        return kvg_fail(err, KVG_UNSUPPORTED, "%u columns are not a whole number of %s blocks of %u", weight->cols,
                        weight->format->name, weight->format->block_values);
    float *values = malloc(n * sizeof *values);
    if (!values)
        return kvg_fail(err, KVG_NOMEM, "no memory for a vector of %zu values", n);
    quant_decode(weight->format, weight->data, values, n);
    int failed = cuda_alloc((void **)&tensor->data, n * sizeof *values, "a vector", err);
    if (!failed)
        failed =
            cuda_failed(cudaMemcpy(tensor->data, values, n * sizeof *values, cudaMemcpyHostToDevice), err, "copying a vector");
    free(values);
    return failed;
}

/* ---- orders of columns ---- */

static int upload_order(struct column_order *order, const uint32_t *from, struct kvg_error *err)
{
    size_t bytes = order->cols * sizeof *from;
    int failed;
    if (!(order->host = malloc(bytes)))
        return kvg_fail(err, KVG_NOMEM, "no memory for the order of %u columns", order->cols);
    memcpy(order->host, from, bytes);
    if ((failed = cuda_alloc((void **)&order->device, bytes, "an order of columns", err)))
        return failed;
    return cuda_failed(cudaMemcpy(order->device, from, bytes, cudaMemcpyHostToDevice), err, "copying an order of columns");
}

/* The weight's order: that of another matrix where it is the same. */
static int keep_order(struct cuda_backend *cuda, struct tensor *tensor, const struct backend_weight *weight,
                      struct kvg_error *err)
{
    struct column_order *order;
    if (weight->format && weight->format->scales == QUANT_FLOAT)
        return kvg_fail(err, KVG_UNSUPPORTED, "%s weights have no order of columns", weight->format->name);
    for (uint32_t i = 0; i < weight->cols; i++)
        if (weight->order[i] >= weight->cols)
            return kvg_fail(err, KVG_INVALID, "column %u is column %u of %u", i, weight->order[i], weight->cols);
    for (order = cuda->orders; order; order = order->next)
        if (order->cols == weight->cols && memcmp(order->host, weight->order, weight->cols * sizeof *weight->order) == 0)
            break;
    if (!order) {
        if (!(order = calloc(1, sizeof *order)))
            return kvg_fail(err, KVG_NOMEM, "no memory for the order of %u columns", weight->cols);
        order->cols = weight->cols;
        order->next = cuda->orders;
        cuda->orders = order;
        int failed = upload_order(order, weight->order, err);
        if (failed)
            return failed;
    }
    tensor->order = order;
    return 0;
}

static void free_orders(struct cuda_backend *cuda)
{
    for (struct column_order *next, *order = cuda->orders; order; order = next) {
        next = order->next;
        cudaFree(order->device);
        free(order->host);
        free(order);
    }
}

int cuda_weight(struct backend *backend, struct tensor **out, const struct backend_weight *weight, enum backend_weight_use use,
                struct kvg_error *err)
{
    struct cuda_backend *cuda = cuda_of(backend);
    struct matrix matrix = {0};
    int failed;
    bool shared = use != WEIGHT_VECTOR && find_matrix(cuda, weight, &matrix);
    struct tensor *tensor = tensor_new(cuda, weight->rows, weight->cols);
    if (!tensor)
        return kvg_fail(err, KVG_NOMEM, "no memory for a tensor");
    *out = tensor;
    if (use == WEIGHT_VECTOR)
        return upload_vector(tensor, weight, err);
    if (weight->order && (failed = keep_order(cuda, tensor, weight, err)))
        return failed;
    if (!shared && (failed = upload_matrix(cuda, &matrix, weight, err)))
        return failed;
    tensor->matrix = matrix;
    tensor->source = shared ? NULL : source_of(weight); /* who has a source owns the memory */
    if (use == WEIGHT_EMBEDDING)
        return 0;
    cuda->widest_output = larger(weight->rows, cuda->widest_output);
    return matrix_is_float(&matrix) ? grow_halves(cuda, matrix.ld, err)
                                    : grow_groups(cuda, matrix.ld, matrix.kind == MATRIX_W4A16 ? 4 : 2, err);
}

/* ---- KV pool ---- */

size_t cuda_kv_block_bytes(const struct backend *backend, const struct backend_kv *kv)
{
    return kv->n_layers * kv_layer_bytes(kv);
}

static int check_kv(const struct backend_kv *kv, struct kvg_error *err)
{
    if (kv->block_size < 16 || kv->block_size > 512 || (kv->block_size & (kv->block_size - 1)))
        return kvg_fail(err, KVG_INVALID, "block size %u is not a power of two from 16 to 512", kv->block_size);
    if (kv->head_dim == 0 || kv->head_dim % 16 || kv->head_dim > 256)
        return kvg_fail(err, KVG_UNSUPPORTED, "head dimension %u is not a multiple of 16 up to 256", kv->head_dim);
    if (kv->dtype == KV_F16)
        return kvg_fail(err, KVG_UNSUPPORTED, "--kv-cache-dtype f16: the CUDA backend keeps KV as bf16, fp8 or int8");
    if (kv->n_kv_heads == 0 || kv->n_heads % kv->n_kv_heads)
        return kvg_fail(err, KVG_UNSUPPORTED, "%u heads are not divisible by %u kv heads", kv->n_heads, kv->n_kv_heads);
    return 0;
}

static int alloc_parts(struct cuda_backend *cuda, struct kvg_error *err)
{
    size_t n = (size_t)cuda->max_parts * cuda->kv.n_heads;
    int failed = cuda_alloc((void **)&cuda->parts.o, n * cuda->kv.head_dim * sizeof(float), "splits of attention", err);
    return failed ? failed : cuda_alloc((void **)&cuda->parts.ml, n * sizeof(float2), "splits of attention", err);
}

static int alloc_squares(struct cuda_backend *cuda, struct kvg_error *err)
{
    return cuda_alloc((void **)&cuda->squares, (size_t)GEMV_ROWS_MAX * (cuda->widest_output / QUANT_GROUP + 1) * sizeof(float),
                      "sums of squares", err);
}

/* A rank's part of the logits is narrower than they are, and its neighbour's may be a column wider. */
static int alloc_outputs(struct cuda_backend *cuda, struct kvg_error *err)
{
    uint32_t part = cuda->widest_output;
    int failed = cuda_open_sampling(cuda, cuda->comm ? larger(part, cuda->widest_activation) : part, err);
    if (failed || !cuda->comm)
        return failed;
    return comm_nccl_reserve(cuda->comm, (size_t)cuda->options.max_outputs * (part + 1), err);
}

int cuda_kv_alloc(struct backend *backend, const struct backend_kv *kv, struct kvg_error *err)
{
    struct cuda_backend *cuda = cuda_of(backend);
    size_t block = cuda_kv_block_bytes(backend, kv), bytes = block * kv->n_blocks, free_bytes = 0, total = 0;
    int failed = check_kv(kv, err);
    if (failed)
        return failed;
    cuda->kv = *kv;
    if ((failed = attention_prepare(cuda, err)) || (failed = alloc_parts(cuda, err)) || (failed = alloc_squares(cuda, err)) ||
        (failed = cuda_open_step(cuda, err)) || (failed = alloc_outputs(cuda, err)))
        return failed;
    cudaMemGetInfo(&free_bytes, &total);
    if (cuda_alloc((void **)&cuda->kv_memory, bytes, "KV blocks", err))
        return kvg_fail(err, KVG_NOMEM, "cuda: no memory for %u KV blocks of %zu bytes: %.1f MiB wanted, %.1f MiB free: %zu fit",
                        kv->n_blocks, block, (double)bytes / (1 << 20), (double)free_bytes / (1 << 20), free_bytes / block);
    return cuda_failed(cudaMemset(cuda->kv_memory, 0, bytes), err, "clearing KV blocks");
}

uint64_t cuda_memory(const struct backend *backend, uint64_t *free_bytes)
{
    size_t available = 0, total = 0;
    if (cudaMemGetInfo(&available, &total) != cudaSuccess)
        available = total = 0;
    *free_bytes = available;
    return total;
}

/* Copied once a step, and only the rows that were written. */
const float *cuda_host(struct backend *backend, const struct tensor *tensor)
{
    struct cuda_backend *cuda = cuda_of(backend);
    struct tensor *mine = (struct tensor *)tensor;
    size_t row = tensor->cols * sizeof(float);
    if (mine->host && mine->host_step == cuda->n_steps)
        return mine->host;
    if (!mine->host && !(mine->host = malloc(tensor->rows * row)))
        return NULL;
    if (cudaMemcpyAsync(mine->host, tensor->data, tensor->n * row, cudaMemcpyDeviceToHost, cuda->stream) != cudaSuccess ||
        cudaStreamSynchronize(cuda->stream) != cudaSuccess)
        return NULL;
    mine->host_step = cuda->n_steps;
    return mine->host;
}

void cuda_free_memory(struct cuda_backend *cuda)
{
    free_orders(cuda);
    for (struct tensor *next, *tensor = cuda->tensors; tensor; tensor = next) {
        next = tensor->next;
        cudaFree(tensor->data);
        if (tensor->source)
            cudaFree((void *)tensor->matrix.codes); /* the first plane */
        free(tensor->host);
        free(tensor);
    }
    for (int i = 0; i < 2; i++) {
        cudaFree(cuda->acts[i].q);
        cudaFree(cuda->acts[i].groups);
    }
    cudaFree(cuda->halves);
    cudaFree(cuda->squares);
    cudaFree(cuda->parts.o);
    cudaFree(cuda->parts.ml);
    cudaFree(cuda->kv_memory);
}
