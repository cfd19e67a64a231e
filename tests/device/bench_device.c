/* The CUDA backend's kernels on a device, each as a share of what the device can do; for `make gpu-check`.
 *
 *   bench_device ceilings OUT.csv           copies, and the mma instructions
 *   bench_device kernels OUT.csv            products, decode attention, prefill attention
 *   bench_device decode OUT.csv MODEL       steps of a model, by graphs and one kernel after another
 *
 * Operations run through the backend's table: a step holds many of the same, products over weights that together exceed the L2
 * cache, attention over the layers of a pool; the time of one is the median step's, less that of a step with one of them, over
 * the number of the others. SMALL=1: tiny shapes, to try the program itself.
 */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "gpu-worker/backend/cuda_plugin.h"
#include "gpu-worker/model/model.h"
#include "tests/device/ceilings.h"

kvgate_cuda_open_function kvgate_cuda_open; /* linked, not loaded */

/* Takes the place of the loader of kvgate-cuda.so. */
int cuda_backend_open(struct backend **out, const struct backend_options *options, struct kvg_error *err)
{
    return kvgate_cuda_open(out, options, err);
}

enum { MOST_COPIES = 64, REPEATS = 32, ROUNDS = 15, POOL_LAYERS = 8 };
static bool small;
static FILE *csv;

static void must(int rc, const struct kvg_error *err)
{
    if (rc) {
        fprintf(stderr, "bench_device: %s\n", err->message);
        exit(1);
    }
}

static void must_cuda(cudaError_t error)
{
    if (error != cudaSuccess) {
        fprintf(stderr, "bench_device: %s\n", cudaGetErrorString(error));
        exit(1);
    }
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int n)
{
    qsort(values, (size_t)n, sizeof *values, compare);
    return values[n / 2];
}

/* ---- ceilings ---- */

static void say_ceiling(const char *what, double amount, const char *unit, double *seconds, int n)
{
    fprintf(csv, "%s,%.6g,%s\n", what, amount / median(seconds, n), unit);
}

static void bench_ceilings(void)
{
    size_t bytes = small ? 1 << 20 : (size_t)1 << 30;
    int blocks = small ? 2 : 132 * 8, rounds = small ? 4 : 20000;
    double seconds[ROUNDS], work = 0;
    void *from, *to;
    cudaStream_t stream;
    fprintf(csv, "what,per second,unit\n");
    must_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    must_cuda(cudaMalloc(&from, bytes));
    must_cuda(cudaMalloc(&to, bytes));
    must_cuda(cudaMemset(from, 1, bytes));
    for (int i = 0; i < ROUNDS; i++) {
        double began = now();
        must_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
        must_cuda(cudaStreamSynchronize(stream));
        seconds[i] = now() - began;
    }
    say_ceiling("copy", 2 * (double)bytes, "bytes", seconds, ROUNDS);
    for (enum ceiling what = CEILING_BF16; what <= CEILING_INT8; what++) {
        for (int i = 0; i < ROUNDS; i++) {
            double began = now();
            work = ceiling_queue(what, to, blocks, rounds, stream);
            must_cuda(cudaStreamSynchronize(stream));
            seconds[i] = now() - began;
        }
        say_ceiling(what == CEILING_BF16 ? "mma bf16" : "mma int8", work, "operations", seconds, ROUNDS);
    }
    must_cuda(cudaFree(from));
    must_cuda(cudaFree(to));
    must_cuda(cudaStreamDestroy(stream));
}

/* ---- kernels ---- */

/* A backend with what one kind of operation needs. */
struct bench {
    struct backend *b;
    uint32_t n, past; /* rows, each a sequence of its own, or all in one (prefill) */
    bool prefill;
    struct backend_seq *seqs;
    uint32_t *ids, *blocks;
    struct tensor *table, *x, *y, *out, *weights[MOST_COPIES];
    uint32_t copies;
    struct backend_kv kv;
};

static struct tensor *activation(struct bench *bench, uint32_t cols)
{
    struct kvg_error err;
    struct tensor *tensor;
    must(bench->b->ops->activation(bench->b, &tensor, bench->n, cols, &err), &err);
    return tensor;
}

/* Random bytes, but scales (the first two bytes of a block, or the last of Q6_K) of about 2^-6. */
static uint8_t *random_bytes(const struct quant_format *format, size_t n)
{
    uint8_t *data = malloc(n);
    uint32_t state = 1;
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525 + 1013904223;
        data[i] = (uint8_t)(state >> 24);
    }
    for (size_t at = 0; at + format->block_bytes <= n; at += format->block_bytes) {
        if (format->scales == QUANT_FLOAT)
            data[at + format->block_bytes - 1] = (uint8_t)(0x38 + (data[at] & 3)); /* about one */
        else
            memcpy(data + at + (format->block_bytes == 210 ? 208 : 0), "\0\x24\0\x24", format->block_bytes == 210 ? 2 : 4);
    }
    return data;
}

static void open_bench(struct bench *bench, uint32_t n, uint32_t past, bool prefill, const struct backend_kv *kv)
{
    struct kvg_error err;
    struct backend_options options = {.max_rows = n, .max_seqs = n, .max_outputs = n};
    *bench = (struct bench){.n = n, .past = past, .prefill = prefill, .kv = *kv};
    must(kvgate_cuda_open(&bench->b, &options, &err), &err);
    uint32_t rows = prefill ? past + n : past + 1, each = (rows + kv->block_size - 1) / kv->block_size, seqs = prefill ? 1 : n;
    bench->kv.n_blocks = each * seqs;
    bench->seqs = calloc(n, sizeof *bench->seqs);
    bench->ids = calloc(n, sizeof *bench->ids);
    bench->blocks = calloc((size_t)each * seqs, sizeof *bench->blocks);
    bool scattered = each * seqs % 7919 != 0;
    for (uint32_t i = 0; i < each * seqs; i++)
        bench->blocks[i] = scattered ? (uint32_t)((uint64_t)i * 7919 % (each * seqs)) : i;
    for (uint32_t i = 0; i < n; i++) {
        bench->ids[i] = i;
        bench->seqs[i] = (struct backend_seq){i, prefill ? n : 1, past, bench->blocks + (prefill ? 0 : (size_t)i * each)};
    }
}

static void open_pool(struct bench *bench)
{
    struct kvg_error err;
    must(bench->b->ops->kv_alloc(bench->b, &bench->kv, &err), &err);
}

static void close_bench(struct bench *bench)
{
    bench->b->ops->close(bench->b);
    free(bench->seqs);
    free(bench->ids);
    free(bench->blocks);
}

typedef void (*one_op)(struct bench *bench, uint32_t i);

static double time_step(struct bench *bench, one_op op, uint32_t repeats)
{
    struct kvg_error err;
    struct backend_step step = {bench->n, bench->prefill ? 1 : bench->n, bench->n, bench->ids, bench->ids, bench->seqs};
    must(bench->b->ops->begin_step(bench->b, &step, &err), &err);
    bench->b->ops->embed(bench->b, bench->table, bench->x);
    for (uint32_t i = 0; i < repeats; i++)
        op(bench, i);
    double began = now();
    must(bench->b->ops->end_step(bench->b, &err), &err);
    return now() - began;
}

/* Seconds of one op. */
static double time_op(struct bench *bench, one_op op, uint32_t repeats)
{
    double many[ROUNDS], one[ROUNDS];
    int rounds = small ? 2 : ROUNDS;
    for (int i = -2; i < rounds; i++) { /* the first ones capture graphs */
        double a = time_step(bench, op, 1), b = time_step(bench, op, repeats + 1);
        if (i >= 0)
            one[i] = a, many[i] = b;
    }
    double seconds = (median(many, rounds) - median(one, rounds)) / repeats;
    return seconds > 1e-9 ? seconds : 1e-9;
}

static void say(const char *kernel, const char *shape, double bytes, double operations, const char *ceiling, double seconds)
{
    fprintf(csv, "%s,%s,%.3f,%.6g,%.6g,%s\n", kernel, shape, 1e6 * seconds, bytes / seconds, operations / seconds, ceiling);
    fflush(csv);
}

static void op_matmul(struct bench *bench, uint32_t i)
{
    struct backend_matmul args = {.count = 1, .weights = {bench->weights[i % bench->copies]}, .outs = {bench->out}};
    bench->b->ops->matmul(bench->b, bench->n, bench->x, &args);
}

static void bench_matmul(const struct quant_format *format, uint32_t rows, uint32_t cols, uint32_t n)
{
    static const struct backend_kv kv = {POOL_LAYERS, 1, 1, 64, 0, 16, KV_AUTO};
    struct bench bench;
    struct kvg_error err;
    char shape[80];
    size_t row_bytes = quant_row_bytes(format, cols), bytes = row_bytes * rows;
    uint8_t *data = random_bytes(format, row_bytes * (rows + MOST_COPIES));
    float *x = calloc((size_t)n * cols, sizeof *x);
    for (size_t i = 0; i < (size_t)n * cols; i++)
        x[i] = (float)(int)(i * 2654435761u % 255) / 127 - 1;
    open_bench(&bench, n, 0, false, &kv);
    bench.copies = small ? 2 : (uint32_t)((160u << 20) / bytes + 1);
    bench.copies = bench.copies < MOST_COPIES ? bench.copies : MOST_COPIES;
    for (uint32_t i = 0; i < bench.copies; i++) {
        struct backend_weight weight = {format, data + i * row_bytes, rows, cols};
        must(bench.b->ops->weight(bench.b, &bench.weights[i], &weight, WEIGHT_MATMUL, &err), &err);
    }
    struct backend_weight table = {&quant_f32, x, n, cols};
    must(bench.b->ops->weight(bench.b, &bench.table, &table, WEIGHT_EMBEDDING, &err), &err);
    bench.x = activation(&bench, cols);
    bench.out = activation(&bench, rows);
    open_pool(&bench);
    snprintf(shape, sizeof shape, "%s %ux%u n=%u", format->name, rows, cols, n);
    double seconds = time_op(&bench, op_matmul, REPEATS);
    say("matmul", shape, (double)bytes, 2.0 * rows * cols * n,
        n <= 16                         ? "copy"
        : format->scales == QUANT_FLOAT ? "mma bf16"
                                        : "mma int8",
        seconds);
    close_bench(&bench);
    free(data);
    free(x);
}

static void op_attention(struct bench *bench, uint32_t i)
{
    struct backend_attention args = {i % POOL_LAYERS, 0.088f, bench->x, bench->out};
    bench->b->ops->attention(bench->b, &args);
}

static void bench_attention(enum backend_kv_dtype dtype, uint32_t heads, uint32_t kv_heads, uint32_t dim, uint32_t n,
                            uint32_t past, bool prefill)
{
    struct backend_kv kv = {POOL_LAYERS, heads, kv_heads, dim, 0, 32, dtype};
    struct bench bench;
    struct kvg_error err;
    char shape[80];
    uint32_t cols = heads * dim;
    float *x = calloc(cols, sizeof *x);
    for (uint32_t i = 0; i < cols; i++)
        x[i] = (float)(i * 2654435761u % 255) / 127 - 1;
    open_bench(&bench, n, past, prefill, &kv);
    memset(bench.ids, 0, n * sizeof *bench.ids);
    struct backend_weight table = {&quant_f32, x, 1, cols};
    must(bench.b->ops->weight(bench.b, &bench.table, &table, WEIGHT_EMBEDDING, &err), &err);
    bench.x = activation(&bench, cols);
    bench.out = activation(&bench, cols);
    open_pool(&bench);
    double keys = prefill ? past + n / 2.0 : past + 1;
    double bytes = (double)bench.b->ops->kv_block_bytes(bench.b, &bench.kv) / POOL_LAYERS / 32 * keys * (prefill ? 1 : n);
    snprintf(shape, sizeof shape, "%s %u/%u heads of %u n=%u past=%u", backend_kv_dtype_name(dtype), heads, kv_heads, dim, n,
             past);
    double seconds = time_op(&bench, op_attention, prefill ? 4 : REPEATS);
    say(prefill ? "attention, prefill" : "attention, decode", shape, bytes, 4.0 * heads * dim * keys * n,
        prefill ? "mma bf16" : "copy", seconds);
    close_bench(&bench);
    free(x);
}

static void bench_kernels(void)
{
    static const struct quant_format *const formats[] = {&quant_bf16, &quant_q8_0, &quant_q6_k,
                                                         &quant_q5_k, &quant_q4_k, &quant_q4_0};
    static const uint32_t counts[] = {1, 8, 16, 64, 256};
    static const uint32_t shapes[][2] = {{4096, 4096}, {14336, 4096}, {4096, 14336}};
    fprintf(csv, "kernel,shape,microseconds,bytes per second,operations per second,ceiling\n");
    for (size_t f = 0; f < (small ? 2 : sizeof formats / sizeof *formats); f++)
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
            for (size_t s = 0; s < (small ? 1 : sizeof shapes / sizeof *shapes); s++)
                if (s == 1 || c == 0 || c == 3) /* the large shape at every width */
                    bench_matmul(formats[f], small ? 64 : shapes[s][0], small ? 256 : shapes[s][1],
                                 small ? counts[c] / 8 + 1 : counts[c]);
    for (enum backend_kv_dtype dtype = KV_BF16; dtype < KV_DTYPES; dtype++) {
        bench_attention(dtype, 32, 8, small ? 16 : 128, small ? 2 : 16, small ? 40 : 8191, false);
        bench_attention(dtype, 28, 4, small ? 16 : 128, 1, small ? 300 : 32767, false);
        bench_attention(dtype, 9, 3, small ? 16 : 64, small ? 2 : 64, small ? 20 : 1023, false);
        bench_attention(dtype, small ? 2 : 32, small ? 1 : 8, small ? 16 : 128, small ? 40 : 8192, 0, true);
    }
}

/* ---- a model ---- */

static double time_decode(const char *path, uint32_t n, bool eager)
{
    enum { BLOCK = 32, BLOCKS = 8, STEPS = 40 };
    struct kvg_error err = {0};
    struct model *model;
    struct model_options options = {.path = path,
                                    .device = "cuda",
                                    .cpu_isa = "auto",
                                    .threads = 1,
                                    .enforce_eager = eager,
                                    .max_rows = n,
                                    .max_seqs = n,
                                    .max_outputs = n};
    uint32_t ids[64], outputs[64], tables[64][BLOCKS];
    struct model_seq seqs[64];
    double seconds[STEPS];
    int steps = small ? 3 : STEPS;
    must(model_open(&model, &options, &err), &err);
    must(model_kv_alloc(model, n * BLOCKS, BLOCK, &err), &err);
    for (int i = 0; i < steps; i++) {
        for (uint32_t s = 0; s < n; s++) {
            ids[s] = (s * 31 + (uint32_t)i) % 97;
            outputs[s] = s;
            for (uint32_t b = 0; b < BLOCKS; b++)
                tables[s][b] = s * BLOCKS + b;
            seqs[s] = (struct model_seq){s, 1, (uint32_t)i, tables[s], BLOCKS};
        }
        struct model_batch batch = {n, ids, n, seqs, n, outputs};
        double began = now();
        must(model_forward(model, &batch, &err), &err);
        seconds[i] = now() - began;
    }
    model_close(model);
    return median(seconds, steps);
}

static void bench_decode(const char *path)
{
    static const uint32_t counts[] = {1, 8, 64};
    fprintf(csv, "model,sequences,graphs,milliseconds a step\n");
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (int eager = 0; eager < 2; eager++) {
            uint32_t n = small ? counts[i] / 8 + 1 : counts[i];
            fprintf(csv, "%s,%u,%s,%.4f\n", path, n, eager ? "no" : "yes", 1e3 * time_decode(path, n, eager));
            fflush(csv);
        }
}

int main(int argc, char **argv)
{
    small = getenv("SMALL") != NULL;
    if (argc < 3 || !(csv = fopen(argv[2], "w"))) {
        fprintf(stderr, "usage: bench_device ceilings|kernels|decode OUT.csv [MODEL]\n");
        return 2;
    }
    if (strcmp(argv[1], "ceilings") == 0)
        bench_ceilings();
    else if (strcmp(argv[1], "kernels") == 0)
        bench_kernels();
    else if (argc > 3 && strcmp(argv[1], "decode") == 0)
        bench_decode(argv[3]);
    else
        return 2;
    return fclose(csv) ? 1 : 0;
}
