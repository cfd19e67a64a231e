/* What bench_quant.py asks of one model on the CPU backend: bytes in memory, and tokens a second of a decode step and of a
 * prompt, alone and of 16 sequences at once. One JSON object.
 *
 *   bench_quant MODEL [threads] [steps]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "gpu-worker/log.h"
#include "gpu-worker/model/capacity.h"
#include "gpu-worker/model/model.h"

enum { BLOCK = 32, SEQS = 16, PROMPT = 512, CONTEXT = 128, MOST_STEPS = 256 };

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static _Noreturn void fail(const char *what, const struct kvg_error *err)
{
    fprintf(stderr, "bench_quant: %s: %s\n", what, err->message);
    exit(1);
}

/* Seconds of one step of n sequences with `rows` rows each behind `past` tokens. */
static double step(struct model *model, uint32_t n, uint32_t rows, uint32_t past)
{
    enum { BLOCKS = PROMPT / BLOCK + 1 };
    static uint32_t ids[PROMPT], outputs[SEQS], blocks[SEQS][BLOCKS];
    struct model_seq seqs[SEQS];
    struct kvg_error err;
    for (uint32_t i = 0; i < n * rows; i++)
        ids[i] = (i * 7919 + past * 31 + 5) % model_info(model)->n_vocab;
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t b = 0; b < BLOCKS; b++)
            blocks[i][b] = i * BLOCKS + b;
        seqs[i] = (struct model_seq){i * rows, rows, past, blocks[i], BLOCKS};
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

/* Tokens a second in the median step. */
static double rate(struct model *model, uint32_t n, uint32_t rows, uint32_t past, uint32_t steps)
{
    double times[MOST_STEPS];
    for (uint32_t i = 0; i < steps; i++)
        times[i] = step(model, n, rows, past);
    qsort(times, steps, sizeof *times, ascending);
    return n * rows / times[steps / 2];
}

/* This process's memory that no file gives again. */
static long anonymous_kb(void)
{
    char line[128];
    long kb = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "RssAnon: %ld kB", &kb) == 1)
            break;
    if (file)
        fclose(file);
    return kb;
}

int main(int argc, char **argv)
{
    struct model_options options = {.device = "cpu", .max_rows = PROMPT, .max_seqs = SEQS, .max_outputs = SEQS};
    struct capacity capacity;
    struct model *model;
    struct kvg_error err;
    if (argc < 2) {
        fprintf(stderr, "usage: bench_quant MODEL [threads] [steps]\n");
        return 2;
    }
    log_set_level(LOG_WARN);
    options.path = argv[1];
    options.threads = argc > 2 ? (uint32_t)atoi(argv[2]) : 0;
    int steps = argc > 3 ? atoi(argv[3]) : 15;
    steps = steps < 1 ? 1 : steps > MOST_STEPS ? MOST_STEPS : steps;
    if (capacity_read(&capacity, argv[1], &err) != 0)
        fail(argv[1], &err);
    double start = seconds();
    if (model_open(&model, &options, &err) != 0)
        fail(argv[1], &err);
    double loaded = seconds() - start;
    if (model_kv_alloc(model, SEQS * (PROMPT / BLOCK + 1), BLOCK, &err) != 0)
        fail("kv", &err);
    step(model, SEQS, 1, 0);
    double one = rate(model, 1, 1, CONTEXT, (uint32_t)steps), many = rate(model, SEQS, 1, CONTEXT, (uint32_t)steps);
    uint32_t prompts = (uint32_t)steps < 3 ? (uint32_t)steps : 3;
    double prompt = rate(model, 1, PROMPT, 0, prompts), prompts16 = rate(model, SEQS, PROMPT / SEQS, 0, prompts);
    printf("{\"backend\": \"%s\", \"layers\": %llu, \"layer_weights\": %llu, \"output\": %llu, \"output_weights\": %llu, "
           "\"weights\": %llu, \"resident\": %llu, \"load\": %.3f, \"decode1\": %.6g, \"decode16\": %.6g, \"prefill1\": %.6g, "
           "\"prefill16\": %.6g}\n",
           model_info(model)->backend, (unsigned long long)capacity.layer_bytes, (unsigned long long)capacity.layer_weights,
           (unsigned long long)capacity.output_bytes, (unsigned long long)capacity.output_weights,
           (unsigned long long)capacity.weight_bytes, (unsigned long long)anonymous_kb() * 1024, loaded, one, many, prompt,
           prompts16);
    model_close(model);
    return 0;
}
