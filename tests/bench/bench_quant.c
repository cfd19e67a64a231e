/* What bench_quant.py asks of one model on the CPU backend: bytes in memory, and tokens a second of a decode step and of a
 * prompt, alone and of 16 sequences at once. One JSON object.
 *
 *   bench_quant MODEL [threads] [steps]
 */
#include <stdio.h>
#include <stdlib.h>
#include "gpu-worker/log.h"
#include "gpu-worker/model/capacity.h"
#include "tests/bench/steps.h"

enum { SEQS = 16, PROMPT = PREFILL, CONTEXT = 128, BLOCKS = PROMPT / BLOCK + 1 };

/* Tokens a second in the median step. */
static double rate(struct model *model, uint32_t n, uint32_t rows, uint32_t past, uint32_t steps)
{
    return n * rows / median_step(model, n, rows, past, BLOCKS, steps);
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
    steps = steps < 1 ? 1 : steps > MAX_TRIES ? MAX_TRIES : steps;
    if (capacity_read(&capacity, argv[1], &err) != 0)
        fail(argv[1], &err);
    double start = seconds();
    if (model_open(&model, &options, &err) != 0)
        fail(argv[1], &err);
    double loaded = seconds() - start;
    if (model_kv_alloc(model, SEQS * BLOCKS, BLOCK, &err) != 0)
        fail("kv", &err);
    step(model, SEQS, 1, 0, BLOCKS);
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
