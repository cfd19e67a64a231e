/* The same ops on two backends, the CPU's as the reference: what tests of the CUDA backend share. Values enter by embedding rows
 * of an F32 table and leave by the `host` op, so that only the ops table is used. */
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "gpu-worker/backend/backend.h"
#include "gpu-worker/backend/cuda_plugin.h"
#include "gpu-worker/quant/f16.h"

#ifdef ON_DEVICE /* a real one: nobody counts launches, and memory is what others left, so it is made to be no numbers */
#include <cuda_runtime_api.h>
static inline void poison_memory(void)
{
    enum { PIECES = 64, PIECE = 4 << 20 };
    void *pieces[PIECES] = {0};
    for (int i = 0; i < PIECES; i++)
        if (cudaMalloc(&pieces[i], PIECE) == cudaSuccess)
            cudaMemset(pieces[i], 0xff, PIECE);
    cudaDeviceSynchronize();
    for (int i = 0; i < PIECES; i++)
        cudaFree(pieces[i]);
}
static inline unsigned long launches(void)
{
    return 0;
}
static inline void assert_launches(unsigned long n, unsigned long wanted) {}
static inline size_t bytes_to_host(void)
{
    return 0;
}
#else
#include "tests/cusim/control.h"
static inline void poison_memory(void) {}
static inline unsigned long launches(void)
{
    return cusim_launches();
}
static inline void assert_launches(unsigned long n, unsigned long wanted)
{
    assert_int_equal(n, wanted);
}
static inline size_t bytes_to_host(void)
{
    size_t bytes;
    cusim_copies_to_host(&bytes);
    return bytes;
}
#endif

kvgate_cuda_open_function kvgate_cuda_open; /* linked, not loaded */

enum { TWIN_ROWS = 192, TWIN_SEQS = 16, TWIN_BLOCKS = 64 };

static inline struct backend *open_twin(bool cuda, bool deterministic)
{
    struct backend *backend;
    struct kvg_error err = {0};
    struct backend_options options = {.isa = "avx2",
                                      .arithmetic = "int8",
                                      .threads = 1,
                                      .max_rows = TWIN_ROWS,
                                      .max_seqs = TWIN_SEQS,
                                      .max_outputs = TWIN_ROWS,
                                      .deterministic = deterministic};
    if (cuda)
        poison_memory();
    int rc = cuda ? kvgate_cuda_open(&backend, &options, &err) : cpu_backend_open(&backend, &options, &err);
    if (rc == KVG_UNSUPPORTED && !cuda) { /* a CPU without AVX2 */
        options.isa = "generic";
        rc = cpu_backend_open(&backend, &options, &err);
    }
    if (rc)
        fail_msg("%s", err.message);
    return backend;
}

static inline void close_twin(struct backend *backend)
{
    backend->ops->close(backend);
}

static inline void must(int rc, const struct kvg_error *err)
{
    if (rc)
        fail_msg("%s", err->message);
}

static inline struct tensor *new_weight(struct backend *backend, const struct quant_format *format, const void *data,
                                        uint32_t rows, uint32_t cols, enum backend_weight_use use)
{
    struct tensor *tensor;
    struct kvg_error err;
    struct backend_weight weight = {format, data, rows, cols};
    must(backend->ops->weight(backend, &tensor, &weight, use, &err), &err);
    return tensor;
}

static inline struct tensor *new_activation(struct backend *backend, uint32_t rows, uint32_t cols)
{
    struct tensor *tensor;
    struct kvg_error err;
    must(backend->ops->activation(backend, &tensor, rows, cols, &err), &err);
    return tensor;
}

/* windows: of both layers, NULL: none has one. */
static inline void new_kv_pool(struct backend *backend, uint32_t n_heads, uint32_t n_kv_heads, uint32_t head_dim,
                               uint32_t block_size, enum backend_kv_dtype dtype, const uint32_t *windows)
{
    struct kvg_error err;
    struct backend_kv kv = {2, n_heads, n_kv_heads, head_dim, TWIN_BLOCKS, block_size, dtype, windows};
    must(backend->ops->kv_alloc(backend, &kv, &err), &err);
}

static inline void new_pool(struct backend *backend, uint32_t n_heads, uint32_t n_kv_heads, uint32_t head_dim,
                            uint32_t block_size)
{
    new_kv_pool(backend, n_heads, n_kv_heads, head_dim, block_size, KV_AUTO, NULL);
}

/* A step of n rows in one sequence, the ids being 0, 1, ... */
static inline void begin_rows(struct backend *backend, uint32_t n)
{
    static uint32_t ids[TWIN_ROWS], blocks[TWIN_BLOCKS];
    static struct backend_seq seq;
    struct kvg_error err;
    for (uint32_t i = 0; i < TWIN_ROWS; i++)
        ids[i] = i;
    for (uint32_t i = 0; i < TWIN_BLOCKS; i++)
        blocks[i] = i;
    seq = (struct backend_seq){0, n, 0, blocks};
    struct backend_step step = {n, 1, n, ids, ids, &seq};
    must(backend->ops->begin_step(backend, &step, &err), &err);
}

static inline void end_rows(struct backend *backend)
{
    struct kvg_error err;
    must(backend->ops->end_step(backend, &err), &err);
}

/* A table whose embedding gives these values. */
static inline struct tensor *new_table(struct backend *backend, const float *values, uint32_t rows, uint32_t cols)
{
    return new_weight(backend, &quant_f32, values, rows, cols, WEIGHT_EMBEDDING);
}

/* ---- random data ---- */

static uint32_t twin_state;

/* TWIN_SEED=N: other numbers. */
static inline uint32_t next_random(void)
{
    if (twin_state == 0)
        twin_state = getenv("TWIN_SEED") ? (uint32_t)atoi(getenv("TWIN_SEED")) : 1;
    twin_state ^= twin_state << 13;
    twin_state ^= twin_state >> 17;
    twin_state ^= twin_state << 5;
    return twin_state;
}

static inline float random_float(void)
{
    return (float)(int32_t)next_random() * 0x1p-31f;
}

static inline void random_floats(float *out, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] = random_float();
}

/* Rows of a format with scales near 2^-6; the caller frees them. */
static inline uint8_t *random_rows(const struct quant_format *format, uint32_t rows, uint32_t cols)
{
    size_t n = rows * quant_row_bytes(format, cols);
    uint8_t *data = malloc(n);
    for (size_t i = 0; i < n; i++)
        data[i] = (uint8_t)(next_random() >> 7);
    for (size_t b = 0; b < n; b += format->block_bytes) {
        uint16_t d = (uint16_t)(0x2400 + next_random() % 512), m = (uint16_t)(0xa000 + next_random() % 512);
        float value = random_float();
        uint16_t half = format == &quant_f16 ? f32_to_f16(value) : (uint16_t)(f32_bits(value) >> 16);
        if (format == &quant_f32)
            memcpy(data + b, &value, 4);
        else if (format->scales == QUANT_FLOAT)
            memcpy(data + b, &half, 2);
        else
            memcpy(data + b + (format == &quant_q6_k ? 208 : 0), &d, 2);
        if (format->scales == QUANT_SCALE_MIN || format->scales == QUANT_SUPER_MIN)
            memcpy(data + b + 2, &m, 2);
    }
    return data;
}

/* KVGATE_GOLDENS=FILE: results are written there; KVGATE_GOLDENS_FROM=FILE: they must be those, but for the roundings of exp2. */
static inline void check_golden(const char *what, const float *a, size_t n)
{
    static FILE *golden;
    const char *to = getenv("KVGATE_GOLDENS"), *from = getenv("KVGATE_GOLDENS_FROM");
    if (!golden && (to || from) && !(golden = fopen(to ? to : from, to ? "wb" : "rb")))
        fail_msg("cannot open %s", to ? to : from);
    for (size_t i = 0; golden && i < n; i++) {
        float value = a[i];
        if ((to ? fwrite(&value, sizeof value, 1, golden) : fread(&value, sizeof value, 1, golden)) != 1)
            fail_msg("%s: the goldens end", what);
        if (!(fabsf(a[i] - value) <= 1e-4f * fabsf(value) + 1e-4f))
            fail_msg("%s, value %zu: %.9g, the golden is %.9g", what, i, (double)a[i], (double)value);
    }
}

/* Fails where |a - b| > relative * max(|a|, |b|) + absolute, or either is no number; a: the device's. */
static inline void assert_near(const char *what, const float *a, const float *b, size_t n, double relative, double absolute)
{
    for (size_t i = 0; i < n; i++) {
        double x = (double)a[i], y = (double)b[i], bound = relative * fmax(fabs(x), fabs(y)) + absolute;
        if (!(fabs(x - y) <= bound))
            fail_msg("%s, value %zu: %.9g, the reference has %.9g (bound %.3g)", what, i, x, y, bound);
    }
    check_golden(what, a, n);
}
