/* Steps of a model under the clock, for the benchmarks that ask it directly. */
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "gpu-worker/model/model.h"

enum { BLOCK = 32, MAX_SEQS = 32, PREFILL = 512, MAX_TRIES = 256 };

static inline double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static _Noreturn void fail(const char *what, const struct kvg_error *err)
{
    fprintf(stderr, "%s: %s\n", what, err->message);
    exit(1);
}

/* Seconds of one step of n sequences with `rows` rows each, PREFILL together at most, behind `past` tokens. */
static inline double step(struct model *model, uint32_t n, uint32_t rows, uint32_t past, uint32_t blocks_each)
{
    static uint32_t ids[PREFILL], outputs[MAX_SEQS], blocks[1 << 16];
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

static inline int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* tries: 1 to MAX_TRIES. */
static inline double median_step(struct model *model, uint32_t n, uint32_t rows, uint32_t past, uint32_t blocks_each,
                                 uint32_t tries)
{
    double times[MAX_TRIES];
    for (uint32_t i = 0; i < tries; i++)
        times[i] = step(model, n, rows, past, blocks_each);
    qsort(times, tries, sizeof *times, ascending);
    return times[tries / 2];
}
