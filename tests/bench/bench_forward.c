/* Orientation for profiling: decode tokens/s at 1, 8 and 32 rows and prefill tokens/s of one model on the CPU backend.
 *
 *   bench_forward MODEL.gguf [isa] [threads] [context]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "gpu-worker/model/model.h"

enum { BLOCK = 32, MAX_SEQS = 32, PREFILL = 512, PREFILL_CHUNK = 512 };

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void fail(const char *what, const struct kvg_error *err)
{
    fprintf(stderr, "%s: %s\n", what, err->message);
    exit(1);
}

/* One step of n sequences with `rows` rows each at position `past`; returns its seconds. */
static double step(struct model *model, uint32_t n, uint32_t rows, uint32_t past, uint32_t blocks_each)
{
    static uint32_t ids[PREFILL_CHUNK], outputs[MAX_SEQS], blocks[1 << 16];
    struct model_seq seqs[MAX_SEQS];
    struct kvg_error err;
    for (uint32_t i = 0; i < n * rows; i++)
        ids[i] = (i * 7919 + past * 31 + 5) % model_info(model)->n_vocab;
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t b = 0; b < blocks_each; b++)
            blocks[i * blocks_each + b] = b * n + i;
        seqs[i] = (struct model_seq){i * rows, rows, past, blocks + i * blocks_each, blocks_each};
        outputs[i] = i * rows + rows - 1;
    }
    struct model_batch batch = {n * rows, ids, n, seqs, n, outputs};
    double start = seconds();
    if (model_forward(model, &batch, &err) != 0)
        fail("forward", &err);
    return seconds() - start;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median_step(struct model *model, uint32_t n, uint32_t rows, uint32_t past, uint32_t blocks_each, int tries)
{
    double times[64];
    for (int i = 0; i < tries; i++)
        times[i] = step(model, n, rows, past, blocks_each);
    qsort(times, (size_t)tries, sizeof *times, ascending);
    return times[tries / 2];
}

int main(int argc, char **argv)
{
    struct model_options options = {.max_rows = PREFILL_CHUNK, .max_seqs = MAX_SEQS, .max_outputs = MAX_SEQS};
    struct model *model;
    struct kvg_error err;
    if (argc < 2) {
        fprintf(stderr, "usage: bench_forward MODEL.gguf [isa] [threads] [context]\n");
        return 2;
    }
    options.path = argv[1];
    options.cpu_isa = argc > 2 ? argv[2] : "auto";
    options.cpu_arithmetic = getenv("ARITHMETIC");
    options.threads = argc > 3 ? (uint32_t)atoi(argv[3]) : 0;
    uint32_t context = argc > 4 ? (uint32_t)atoi(argv[4]) : 350, blocks_each = (context + PREFILL) / BLOCK + 1;
    double start = seconds();
    if (model_open(&model, &options, &err) != 0)
        fail("open", &err);
    printf("%s: loaded in %.0f ms, %s\n", argv[1], (seconds() - start) * 1e3, model_info(model)->backend);
    if (model_kv_alloc(model, blocks_each * MAX_SEQS, BLOCK, &err) != 0)
        fail("kv", &err);
    step(model, MAX_SEQS, 1, 0, blocks_each);
    double one = 0;
    for (uint32_t n = 1; n <= 32; n = n == 1 ? 8 : n * 4) {
        double t = median_step(model, n, 1, context, blocks_each, 15);
        one = n == 1 ? t : one;
        printf("decode %2u rows at %u: %7.2f ms, %7.1f tokens/s (%.2fx)\n", n, context, t * 1e3, n / t, n / t * one);
    }
    double t = median_step(model, 1, PREFILL, 0, blocks_each, 3);
    printf("prefill %d: %7.1f ms, %7.1f tokens/s (%.2fx of one row)\n", PREFILL, t * 1e3, PREFILL / t, PREFILL / t * one);
    model_close(model);
    return 0;
}
