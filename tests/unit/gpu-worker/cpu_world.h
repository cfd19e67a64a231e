/* What the tests of the CPU backend's operations share: backends on every instruction set, tensors, random numbers. */
#pragma once
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "gpu-worker/backend/cpu/cpu.h"

enum { MOST_ROWS = 128 }; /* of a product */

static const char *const isas[] = {"generic", "avx2", "avx512", "amx"};
static uint32_t state = 1;

static inline uint32_t next_random(void)
{
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
}

static inline float random_float(void)
{
    return (float)(int32_t)next_random() * 0x1p-31f;
}

/* NULL where the CPU lacks the set. */
static inline struct cpu_backend *open_arithmetic(const char *isa, const char *arithmetic, uint32_t threads)
{
    struct backend *backend;
    struct backend_options options = {isa, threads, 2 * MOST_ROWS, MOST_ROWS, MOST_ROWS, arithmetic};
    struct kvg_error err;
    int rc = cpu_backend_open(&backend, &options, &err);
    if (rc == KVG_UNSUPPORTED)
        return NULL;
    assert_int_equal(rc, 0);
    return cpu_of(backend);
}

static inline struct cpu_backend *open_backend(const char *isa, uint32_t threads)
{
    return open_arithmetic(isa, "auto", threads);
}

static inline void close_backend(struct cpu_backend *cpu)
{
    cpu->base.ops->close(&cpu->base);
}

static inline struct tensor *activation(struct cpu_backend *cpu, uint32_t rows, uint32_t cols)
{
    struct tensor *tensor;
    assert_int_equal(cpu->base.ops->activation(&cpu->base, &tensor, rows, cols, NULL), 0);
    return tensor;
}

static inline struct tensor *vector_of(struct cpu_backend *cpu, const float *values, uint32_t n)
{
    struct tensor *tensor;
    struct backend_weight weight = {&quant_f32, values, 1, n};
    assert_int_equal(cpu->base.ops->weight(&cpu->base, &tensor, &weight, WEIGHT_VECTOR, NULL), 0);
    return tensor;
}

static inline void name_skipped_isas(void)
{
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        struct cpu_backend *cpu = open_backend(isas[i], 1);
        if (cpu)
            close_backend(cpu);
        else
            print_message("skipped: %s, which this CPU lacks\n", isas[i]);
    }
}
