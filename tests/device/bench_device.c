/* The CUDA backend's kernels on a device, each as a share of what the device can do; for `make gpu-check`.
 *
 *   bench_device ceilings OUT.csv           copies, the mma instructions, and launches in a graph
 *   bench_device kernels OUT.csv            attention, sampling, what works row by row, products
 *   bench_device decode OUT.csv MODEL...    steps of models, by graphs and one kernel after another
 *
 * Operations run through the backend's table: a step holds many of the same, products over weights that together exceed the L2
 * cache, attention over the layers of a pool; the time of one is the median step's, less that of a step with one of them, over
 * the number of the others. Large products come last. SMALL=1: tiny shapes, to try the program itself; BENCH_SECONDS=N: what has
 * not begun by then is left out, and counted on stdout; BENCH_ONLY=TEXT: rows whose kernel and shape hold it.
 */
#include <cuda_runtime_api.h>
#include <stdarg.h>
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

enum { MOST_COPIES = 64, ROUNDS = 50, POOL_LAYERS = 8, EMPTY_KERNELS = 200 };
static bool small;
static uint32_t repeats = 32; /* ops of a step that is timed */
static FILE *csv;
static double deadline = 1e30;
static uint32_t n_left_out;

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

/* Kernels in a graph that do nothing: what a launch costs there. */
static void bench_launches(cudaStream_t stream)
{
    double seconds[ROUNDS];
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    must_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < EMPTY_KERNELS; i++)
        empty_queue(stream);
    must_cuda(cudaStreamEndCapture(stream, &graph));
    must_cuda(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = -1; i < ROUNDS; i++) { /* the first one loads it */
        double began = now();
        must_cuda(cudaGraphLaunch(exec, stream));
        must_cuda(cudaStreamSynchronize(stream));
        seconds[i < 0 ? 0 : i] = now() - began;
    }
    say_ceiling("launch", EMPTY_KERNELS, "kernels", seconds, ROUNDS);
    must_cuda(cudaGraphExecDestroy(exec));
    must_cuda(cudaGraphDestroy(graph));
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
    bench_launches(stream);
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

static double time_step(struct bench *bench, one_op op, uint32_t n)
{
    struct kvg_error err;
    struct backend_step step = {bench->n, bench->prefill ? 1 : bench->n, bench->n, bench->ids, bench->ids, bench->seqs};
    must(bench->b->ops->begin_step(bench->b, &step, &err), &err);
    bench->b->ops->embed(bench->b, bench->table, bench->x);
    for (uint32_t i = 0; i < n; i++)
        op(bench, i);
    double began = now();
    must(bench->b->ops->end_step(bench->b, &err), &err);
    return now() - began;
}

/* Seconds of one op, of n in a step. */
static double time_op(struct bench *bench, one_op op, uint32_t n)
{
    double many[ROUNDS], one[ROUNDS];
    int rounds = small ? 1 : ROUNDS;
    for (int i = -2; i < rounds; i++) { /* the first ones capture graphs */
        double a = time_step(bench, op, 1), b = time_step(bench, op, n + 1);
        if (i >= 0)
            one[i] = a, many[i] = b;
    }
    double seconds = (median(many, rounds) - median(one, rounds)) / n;
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

/* Whether this row is wanted and there is time for it; its shape to out. */
static bool begins(const char *kernel, char out[80], const char *format, ...)
{
    const char *only = getenv("BENCH_ONLY");
    char both[160];
    va_list args;
    va_start(args, format);
    vsnprintf(out, 80, format, args);
    va_end(args);
    snprintf(both, sizeof both, "%s %s", kernel, out);
    if (only && !strstr(both, only))
        return false;
    if (now() < deadline)
        return true;
    n_left_out++;
    return false;
}

/* One of a grouped matrix's rows, the same for all. */
static void read_any(const void *context, uint32_t first, uint32_t n, const struct grouped_rows *out)
{
    const struct quant_grouped *matrix = context;
    size_t groups = matrix->cols / matrix->group;
    for (size_t i = 0; i < (size_t)n * matrix->cols; i++)
        out->q[i] = (uint8_t)((first + i) * 2654435761u >> 24) & (matrix->kind == GROUPED_W8A8 ? 255 : 15);
    for (size_t i = 0; i < n * groups; i++)
        out->scale[i] = 0.015625f;
}

/* An input of n rows that are not all alike, and its tensor. */
static void open_input(struct bench *bench, uint32_t n, uint32_t cols)
{
    struct kvg_error err;
    float *x = calloc((size_t)n * cols, sizeof *x);
    for (size_t i = 0; i < (size_t)n * cols; i++)
        x[i] = (float)(int)(i * 2654435761u % 255) / 127 - 1;
    struct backend_weight table = {&quant_f32, x, n, cols};
    must(bench->b->ops->weight(bench->b, &bench->table, &table, WEIGHT_EMBEDDING, &err), &err);
    bench->x = activation(bench, cols);
    free(x);
}

/* Matrices that together exceed the L2 cache. */
static uint32_t copies_of(double bytes)
{
    uint32_t copies = small ? 2 : (uint32_t)((160u << 20) / bytes + 1);
    return copies < MOST_COPIES ? copies : MOST_COPIES;
}

static const char *product_ceiling(uint32_t n, bool is_float)
{
    return n <= 16 ? "copy" : is_float ? "mma bf16" : "mma int8";
}

static void bench_matmul(const struct quant_format *format, uint32_t rows, uint32_t cols, uint32_t n)
{
    static const struct backend_kv kv = {POOL_LAYERS, 1, 1, 64, 0, 16, KV_AUTO};
    struct bench bench;
    struct kvg_error err;
    char shape[80];
    size_t row_bytes = quant_row_bytes(format, cols), bytes = row_bytes * rows;
    if (!begins("matmul", shape, "%s %ux%u n=%u", format->name, rows, cols, n))
        return;
    uint8_t *data = random_bytes(format, row_bytes * (rows + MOST_COPIES));
    open_bench(&bench, n, 0, false, &kv);
    bench.copies = copies_of((double)bytes);
    for (uint32_t i = 0; i < bench.copies; i++) {
        struct backend_weight weight = {format, data + i * row_bytes, rows, cols};
        must(bench.b->ops->weight(bench.b, &bench.weights[i], &weight, WEIGHT_MATMUL, &err), &err);
    }
    open_input(&bench, n, cols);
    bench.out = activation(&bench, rows);
    open_pool(&bench);
    double seconds = time_op(&bench, op_matmul, repeats);
    say("matmul", shape, (double)bytes, 2.0 * rows * cols * n, product_ceiling(n, format->scales == QUANT_FLOAT), seconds);
    close_bench(&bench);
    free(data);
}

static void bench_grouped(enum grouped_kind kind, uint32_t rows, uint32_t cols, uint32_t n)
{
    static const struct backend_kv kv = {POOL_LAYERS, 1, 1, 64, 0, 16, KV_AUTO};
    struct quant_grouped matrix[MOST_COPIES];
    struct bench bench;
    struct kvg_error err;
    char shape[80];
    uint32_t group = kind == GROUPED_W8A8 ? cols : GROUPED_LARGE;
    double bytes = (double)grouped_bytes(kind, cols, group, true, (uint64_t)rows * cols);
    if (!begins("matmul", shape, "%s %ux%u n=%u", grouped_name(kind), rows, cols, n))
        return;
    open_bench(&bench, n, 0, false, &kv);
    bench.copies = copies_of(bytes);
    for (uint32_t i = 0; i < bench.copies; i++) {
        matrix[i] = (struct quant_grouped){
            .kind = kind, .rows = rows, .cols = cols, .group = group, .first = i, .context = &matrix[i], .read = read_any};
        struct backend_weight weight = {.rows = rows, .cols = cols, .grouped = &matrix[i]};
        must(bench.b->ops->weight(bench.b, &bench.weights[i], &weight, WEIGHT_MATMUL, &err), &err);
    }
    open_input(&bench, n, cols);
    bench.out = activation(&bench, rows);
    open_pool(&bench);
    double seconds = time_op(&bench, op_matmul, repeats);
    say("matmul", shape, bytes, 2.0 * rows * cols * n, product_ceiling(n, false), seconds);
    close_bench(&bench);
}

/* ---- row by row, and sampling ---- */

static void op_rmsnorm(struct bench *bench, uint32_t i)
{
    bench->b->ops->rmsnorm(bench->b, bench->n, bench->x, bench->weights[0], 1e-5f, bench->out);
}

static void op_silu_mul(struct bench *bench, uint32_t i)
{
    bench->b->ops->silu_mul(bench->b, bench->n, bench->out, bench->x);
}

static void op_head_rmsnorm(struct bench *bench, uint32_t i)
{
    bench->b->ops->head_rmsnorm(bench->b, bench->n, bench->out, bench->weights[1], 1e-5f);
}

/* `rows` of the tensors' rows are read or written by each. */
static void bench_rows(const char *kernel, one_op op, uint32_t rows, uint32_t cols, uint32_t n)
{
    static const struct backend_kv kv = {POOL_LAYERS, 1, 1, 64, 0, 16, KV_AUTO};
    struct bench bench;
    struct kvg_error err;
    char shape[80];
    uint32_t head = cols < 128 ? cols : 128;
    if (!begins(kernel, shape, "%u columns n=%u", cols, n))
        return;
    float *ones = malloc(cols * sizeof *ones);
    for (uint32_t i = 0; i < cols; i++)
        ones[i] = 1;
    open_bench(&bench, n, 0, false, &kv);
    struct backend_weight norm = {&quant_f32, ones, 1, cols}, head_norm = {&quant_f32, ones, 1, head};
    must(bench.b->ops->weight(bench.b, &bench.weights[0], &norm, WEIGHT_VECTOR, &err), &err);
    must(bench.b->ops->weight(bench.b, &bench.weights[1], &head_norm, WEIGHT_VECTOR, &err), &err);
    open_input(&bench, n, cols);
    bench.out = activation(&bench, cols);
    open_pool(&bench);
    say(kernel, shape, 4.0 * rows * cols * n, 0, "copy", time_op(&bench, op, repeats));
    close_bench(&bench);
    free(ones);
}

/* With the copies of parameters and results, and the wait: what the engine pays. */
static void bench_sampling(uint32_t n_vocab, uint32_t n, float top_p)
{
    enum { COLS = 64 };
    static const struct backend_kv kv = {POOL_LAYERS, 1, 1, 64, 0, 16, KV_AUTO};
    struct bench bench;
    struct kvg_error err;
    char shape[80];
    double seconds[ROUNDS];
    int rounds = small ? 1 : ROUNDS;
    if (!begins("sampling", shape, "%u ids top_p=%.2f n=%u", n_vocab, (double)top_p, n))
        return;
    size_t bytes = quant_row_bytes(&quant_q8_0, COLS) * n_vocab;
    uint8_t *data = random_bytes(&quant_q8_0, bytes);
    struct backend_weight weight = {&quant_q8_0, data, n_vocab, COLS};
    struct sample_row *rows = calloc(n, sizeof *rows);
    struct sample_result *results = calloc(n, sizeof *results);
    open_bench(&bench, n, 0, false, &kv);
    bench.copies = 1;
    must(bench.b->ops->weight(bench.b, &bench.weights[0], &weight, WEIGHT_MATMUL, &err), &err);
    open_input(&bench, n, COLS);
    bench.out = activation(&bench, n_vocab);
    open_pool(&bench);
    time_step(&bench, op_matmul, 1);
    for (uint32_t i = 0; i < n; i++)
        rows[i] = (struct sample_row){
            .output = i, .seed = i, .temperature = 0.8f, .top_p = top_p, .repetition_penalty = 1, .want_logprob = true};
    for (int i = 0; i < rounds; i++) {
        double began = now();
        must(bench.b->ops->sample(bench.b, bench.out, rows, n, results, &err), &err);
        seconds[i] = now() - began;
    }
    say("sampling", shape, 4.0 * n_vocab * n, 0, "copy", median(seconds, rounds));
    close_bench(&bench);
    free(data);
    free(rows);
    free(results);
}

/* ---- attention ---- */

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
    const char *kernel = prefill ? "prefill attention" : "decode attention";
    if (!begins(kernel, shape, "%s %u/%u heads of %u n=%u past=%u", backend_kv_dtype_name(dtype), heads, kv_heads, dim, n, past))
        return;
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
    double seconds = time_op(&bench, op_attention, prefill && !small ? 4 : repeats);
    say(kernel, shape, bytes, 4.0 * heads * dim * keys * n, prefill ? "mma bf16" : "copy", seconds);
    close_bench(&bench);
    free(x);
}

static void bench_kernels(void)
{
    static const struct quant_format *const formats[] = {&quant_bf16, &quant_q8_0, &quant_q6_k,
                                                         &quant_q5_k, &quant_q4_k, &quant_q4_0};
    static const uint32_t counts[] = {1, 8, 16, 64, 256};
    static const uint32_t shapes[][2] = {{4096, 4096}, {4096, 14336}, {14336, 4096}};
    fprintf(csv, "kernel,shape,microseconds,bytes per second,operations per second,ceiling\n");
    for (enum backend_kv_dtype dtype = KV_BF16; dtype < KV_DTYPES; dtype++) {
        if (small) {
            bench_attention(dtype, 4, 2, 16, 2, 40, false);
            bench_attention(dtype, 2, 1, 16, 20, 0, true);
            continue;
        }
        bench_attention(dtype, 32, 8, 128, 16, 8191, false);
        bench_attention(dtype, 28, 4, 128, 1, 32767, false);
        bench_attention(dtype, 9, 3, 64, 64, 1023, false);
        bench_attention(dtype, 32, 8, 128, 8192, 0, true);
    }
    for (uint32_t n = small ? 1 : 32; n <= (small ? 1 : 2048); n *= 64) {
        bench_rows("rmsnorm", op_rmsnorm, 2, small ? 64 : 4096, n);
        bench_rows("silu_mul", op_silu_mul, 3, small ? 64 : 14336, n);
        bench_rows("head_rmsnorm", op_head_rmsnorm, 2, small ? 64 : 4096, n);
    }
    bench_sampling(small ? 512 : 128256, small ? 2 : 32, 1);
    bench_sampling(small ? 512 : 128256, small ? 2 : 32, 0.9f);
    for (size_t s = 0; s < (small ? 1 : sizeof shapes / sizeof *shapes); s++) {
        uint32_t rows = small ? 64 : shapes[s][0], cols = small ? 256 : shapes[s][1];
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            uint32_t n = small ? counts[c] / 8 + 1 : counts[c];
            if (s < 2 && c != 0 && c != 3) /* the largest at every width */
                continue;
            for (size_t f = 0; f < (small ? 2 : sizeof formats / sizeof *formats); f++)
                bench_matmul(formats[f], rows, cols, n);
            for (enum grouped_kind kind = GROUPED_W8A8; kind < GROUPED_KINDS; kind++)
                bench_grouped(kind, rows, cols, n);
        }
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
    const char *name = strrchr(path, '/');
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (int eager = 0; eager < 2; eager++) {
            uint32_t n = small ? counts[i] / 8 + 1 : counts[i];
            if (now() >= deadline) {
                n_left_out++;
                continue;
            }
            double seconds = time_decode(path, n, eager);
            fprintf(csv, "%s,%u,%s,%.4f\n", name ? name + 1 : path, n, eager ? "no" : "yes", 1e3 * seconds);
            fflush(csv);
        }
}

static void bench_models(char **paths, int n)
{
    fprintf(csv, "model,sequences,graphs,milliseconds a step\n");
    for (int i = 0; i < n; i++)
        bench_decode(paths[i]);
}

int main(int argc, char **argv)
{
    small = getenv("SMALL") != NULL;
    repeats = small ? 2 : repeats;
    if (getenv("BENCH_SECONDS"))
        deadline = now() + atof(getenv("BENCH_SECONDS"));
    if (argc < 3 || !(csv = fopen(argv[2], "w"))) {
        fprintf(stderr, "usage: bench_device ceilings|kernels|decode OUT.csv [MODEL...]\n");
        return 2;
    }
    if (strcmp(argv[1], "ceilings") == 0)
        bench_ceilings();
    else if (strcmp(argv[1], "kernels") == 0)
        bench_kernels();
    else if (argc > 3 && strcmp(argv[1], "decode") == 0)
        bench_models(argv + 3, argc - 3);
    else
        return 2;
    printf("left out: %u rows, for which there was no time\n", n_left_out);
    return fclose(csv) ? 1 : 0;
}
