/* Orientation for profiling: attention alone on the CPU backend, in the shapes of three models.
 *
 *   bench_attention [isa] [dtype] [threads] [smollm2|qwen05|qwen15]
 *
 * Prefill: 512 tokens in one step, and 2,048 in steps of 512, GFLOP/s of the causal half. Decode: one row at 2,047 for 1 and 16
 * sequences, GB/s of keys and values. Layers follow one another as in a model, so that keys and values come from memory.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "gpu-worker/backend/backend.h"

enum { BLOCK = 32, CONTEXT = 2048, CHUNK = 512, SEQS = 16, LAYERS = 12, SEQ_BLOCKS = CONTEXT / BLOCK };

static const struct {
    const char *name;
    uint32_t head_dim, n_kv_heads, group;
} shapes[] = {{"smollm2", 64, 3, 3}, {"qwen05", 64, 2, 7}, {"qwen15", 128, 2, 6}};

struct bench {
    struct backend *backend;
    struct tensor *q, *k, *v, *out, *angles;
    uint32_t head_dim, n_kv_heads, group;
    uint32_t blocks[SEQS][SEQ_BLOCKS];
};

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void check(int failed, const struct kvg_error *err)
{
    if (failed) {
        fprintf(stderr, "bench_attention: %s\n", err->message);
        exit(1);
    }
}

static void fill(struct bench *b, struct tensor *tensor, uint32_t cols)
{
    static uint32_t state = 1;
    float *data = (float *)b->backend->ops->host(b->backend, tensor);
    for (size_t i = 0; i < (size_t)CHUNK * cols; i++) {
        state = state * 1664525 + 1013904223;
        data[i] = (float)(int32_t)state * 0x1p-31f;
    }
}

/* Rows of n sequences at `past`; runs the attention of every layer, or stores keys and values. Seconds. */
static double step(struct bench *b, uint32_t first_seq, uint32_t n, uint32_t rows, uint32_t past, bool store)
{
    static uint32_t ids[CHUNK];
    struct backend_seq seqs[SEQS];
    struct kvg_error err;
    const struct backend_ops *ops = b->backend->ops;
    for (uint32_t i = 0; i < n; i++)
        seqs[i] = (struct backend_seq){i * rows, rows, past, b->blocks[first_seq + i]};
    struct backend_step step = {.n_rows = n * rows, .n_seqs = n, .ids = ids, .seqs = seqs};
    check(ops->begin_step(b->backend, &step, &err), &err);
    double start = seconds();
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        struct backend_rope rope = {layer, b->q, b->k, b->v, b->angles, ROPE_HALVES};
        struct backend_attention attention = {layer, 0.125f, b->q, b->out};
        if (store)
            ops->rope_store(b->backend, &rope);
        else
            ops->attention(b->backend, &attention);
    }
    double time = seconds() - start;
    check(ops->end_step(b->backend, &err), &err);
    return time;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double prefill(struct bench *b, uint32_t tokens)
{
    double times[5];
    for (int i = 0; i < 5; i++) {
        times[i] = 0;
        for (uint32_t past = 0; past < tokens; past += CHUNK)
            times[i] += step(b, 0, 1, CHUNK, past, false);
    }
    qsort(times, 5, sizeof *times, ascending);
    return times[2] / LAYERS;
}

static double decode(struct bench *b, uint32_t n)
{
    double times[16];
    for (uint32_t i = 0; i < 16; i++)
        times[i] = step(b, n == 1 ? i : 0, n, 1, CONTEXT - 1, false);
    qsort(times, 16, sizeof *times, ascending);
    return times[8] / LAYERS;
}

static void run(struct bench *b, const char *name, const char *isa, const char *dtype, uint32_t threads)
{
    struct backend_options options = {isa, threads, CHUNK, SEQS, 1};
    struct kvg_error err;
    uint32_t n_heads = b->n_kv_heads * b->group;
    check(cpu_backend_open(&b->backend, &options, &err), &err);
    const struct backend_ops *ops = b->backend->ops;
    struct backend_kv kv = {LAYERS, n_heads, b->n_kv_heads, b->head_dim, SEQS * SEQ_BLOCKS, BLOCK};
    check(backend_kv_dtype(dtype, &kv.dtype, &err), &err);
    check(ops->kv_alloc(b->backend, &kv, &err), &err);
    for (uint32_t i = 0; i < SEQS * SEQ_BLOCKS; i++)
        b->blocks[i % SEQS][i / SEQS] = i * 7919 % (SEQS * SEQ_BLOCKS);
    check(ops->activation(b->backend, &b->q, CHUNK, n_heads * b->head_dim, &err), &err);
    check(ops->activation(b->backend, &b->k, CHUNK, b->n_kv_heads * b->head_dim, &err), &err);
    check(ops->activation(b->backend, &b->v, CHUNK, b->n_kv_heads * b->head_dim, &err), &err);
    check(ops->activation(b->backend, &b->out, CHUNK, n_heads * b->head_dim, &err), &err);
    check(ops->activation(b->backend, &b->angles, CHUNK, b->head_dim, &err), &err);
    fill(b, b->q, n_heads * b->head_dim), fill(b, b->k, b->n_kv_heads * b->head_dim), fill(b, b->v, b->n_kv_heads * b->head_dim);
    fill(b, b->angles, b->head_dim);
    double store = 0;
    for (uint32_t seq = 0; seq < SEQS; seq++)
        for (uint32_t past = 0; past < CONTEXT; past += CHUNK)
            store = step(b, seq, 1, CHUNK, past, true) / LAYERS;
    fill(b, b->q, n_heads * b->head_dim);
    double pre512 = prefill(b, 512), pre2048 = prefill(b, 2048), one = decode(b, 1), sixteen = decode(b, SEQS);
    double flop = 4.0 * b->head_dim * n_heads, bytes = (double)ops->kv_block_bytes(b->backend, &kv) / LAYERS * SEQ_BLOCKS;
    printf(
        "%-8s %-7s %-5s %u: prefill 512 %6.2f ms %5.0f GFLOP/s, 2048 %6.2f ms %5.0f GFLOP/s | decode 1 %6.1f us %5.1f GB/s, 16 "
        "%7.1f us %5.1f GB/s | store 512 %5.2f ms\n",
        name, isa, backend_kv_dtype_name(kv.dtype ? kv.dtype : b->backend->kv_auto), threads, pre512 * 1e3,
        flop * 512 * 513 / 2 / pre512 * 1e-9, pre2048 * 1e3, flop * CONTEXT * (CONTEXT + 1) / 2 / pre2048 * 1e-9, one * 1e6,
        bytes / one * 1e-9, sixteen * 1e6, bytes * SEQS / sixteen * 1e-9, store * 1e3);
    ops->close(b->backend);
}

int main(int argc, char **argv)
{
    static struct bench bench;
    const char *isa = argc > 1 ? argv[1] : "auto", *dtype = argc > 2 ? argv[2] : "auto";
    uint32_t threads = argc > 3 ? (uint32_t)atoi(argv[3]) : 2;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        if (argc > 4 && strcmp(argv[4], shapes[i].name) != 0)
            continue;
        bench.head_dim = shapes[i].head_dim, bench.n_kv_heads = shapes[i].n_kv_heads, bench.group = shapes[i].group;
        run(&bench, shapes[i].name, isa, dtype, threads);
    }
    return 0;
}
