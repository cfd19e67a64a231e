/* Products alone: GOP/s (2 per multiplication) of the CPU backend by shape, rows and arithmetic, the arithmetics taking turns.
 *
 *   bench_kernels [FORMAT] [isa] [threads] [tries]
 *
 * Weights rotate through enough matrices that none stays in L2; one row's GOP/s are the rate at which weights are read.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "gpu-worker/backend/backend.h"

enum { WEIGHT_BYTES = 48 << 20, MOST_ROWS = 512, MATRICES = 256 };
static const char *const arithmetics[] = {"int8", "int16"};
static const struct {
    uint32_t cols, rows;
} shapes[] = {{576, 576}, {576, 1536}, {1536, 576}, {896, 4864}, {4864, 896}};
static const uint32_t counts[] = {1, 2, 4, 8, 16, 32, 128, 512};

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Random codes with ordinary scales: random bits would be denormal or not finite. */
static uint8_t *random_weights(const struct quant_format *format, size_t n)
{
    uint8_t *data = malloc(n);
    for (size_t i = 0; data && i < n; i++)
        data[i] = (uint8_t)(i * 2654435761u >> 13);
    for (size_t b = 0; data && b + format->block_bytes <= n; b += format->block_bytes) {
        uint16_t scale = (uint16_t)(0x2400 + b % 509);
        size_t at = format->scales == QUANT_SUPER_16 ? format->block_bytes - 2 : 0;
        memcpy(data + b + at, &scale, 2);
        if (format->scales == QUANT_SCALE_MIN || format->scales == QUANT_SUPER_MIN)
            memcpy(data + b + 2, &scale, 2);
    }
    return data;
}

struct subject {
    struct backend *backend;
    struct tensor *weights[MATRICES], *x, *out;
    uint32_t n_weights, next;
};

static void die(const char *what, const struct kvg_error *err)
{
    fprintf(stderr, "bench_kernels: %s: %s\n", what, err->message);
    exit(1);
}

static void open_subject(struct subject *s, const struct quant_format *format, uint32_t rows, uint32_t cols, const char *isa,
                         const char *arithmetic, uint32_t threads)
{
    struct backend_options options = {isa, threads, MOST_ROWS, 1, 1, arithmetic};
    struct kvg_error err;
    size_t bytes = rows * quant_row_bytes(format, cols);
    uint8_t *data = random_weights(format, bytes);
    if (!data || cpu_backend_open(&s->backend, &options, &err) != 0)
        die("open", &err);
    struct backend_weight weight = {format, data, rows, cols};
    s->next = 0;
    s->n_weights = (uint32_t)(WEIGHT_BYTES / bytes + 1);
    s->n_weights = s->n_weights > MATRICES ? MATRICES : s->n_weights;
    for (uint32_t i = 0; i < s->n_weights; i++)
        if (s->backend->ops->weight(s->backend, &s->weights[i], &weight, WEIGHT_MATMUL, &err) != 0)
            die("weight", &err);
    if (s->backend->ops->activation(s->backend, &s->x, MOST_ROWS, cols, &err) != 0 ||
        s->backend->ops->activation(s->backend, &s->out, MOST_ROWS, rows, &err) != 0)
        die("activation", &err);
    float *x = (float *)s->backend->ops->host(s->backend, s->x);
    for (size_t i = 0; i < (size_t)MOST_ROWS * cols; i++)
        x[i] = (float)(int32_t)(i * 2654435761u) * 0x1p-31f;
    free(data);
}

static double time_rows(struct subject *s, uint32_t n)
{
    uint32_t repeats = n >= 128 ? 4 : n >= 16 ? 8 : 32;
    nanosleep(&(struct timespec){0, 2000000}, NULL); /* the other backend's threads spin a while before they sleep */
    struct backend_matmul first = {.count = 1, .weights = {s->weights[0]}, .outs = {s->out}};
    s->backend->ops->matmul(s->backend, 1, s->x, &first); /* and these wake */
    double start = seconds();
    for (uint32_t i = 0; i < repeats; i++) {
        struct backend_matmul args = {.count = 1, .weights = {s->weights[s->next]}, .outs = {s->out}};
        s->next = (s->next + 1) % s->n_weights;
        s->backend->ops->matmul(s->backend, n, s->x, &args);
    }
    return (seconds() - start) / repeats;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void bench_shape(const struct quant_format *format, uint32_t cols, uint32_t rows, const char *isa, uint32_t threads,
                        int tries)
{
    struct subject subjects[2];
    double times[2][64];
    for (int a = 0; a < 2; a++)
        open_subject(&subjects[a], format, rows, cols, isa, arithmetics[a], threads);
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        for (int i = 0; i < tries; i++)
            for (int a = 0; a < 2; a++)
                times[a][i] = time_rows(&subjects[a], counts[c]);
        printf("%s %5u x %5u, %3u rows:", format->name, cols, rows, counts[c]);
        for (int a = 0; a < 2; a++) {
            qsort(times[a], (size_t)tries, sizeof **times, ascending);
            printf("  %s %7.1f", arithmetics[a], 2e-9 * counts[c] * rows * cols / times[a][tries / 2]);
        }
        printf("\n");
    }
    for (int a = 0; a < 2; a++)
        subjects[a].backend->ops->close(subjects[a].backend);
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "Q4_1", *isa = argc > 2 ? argv[2] : "auto";
    uint32_t threads = argc > 3 ? (uint32_t)atoi(argv[3]) : 0;
    int tries = argc > 4 ? atoi(argv[4]) : 9;
    const struct quant_format *format = NULL;
    for (size_t i = 0; quant_at(i); i++)
        if (strcmp(quant_at(i)->name, name) == 0)
            format = quant_at(i);
    if (!format || tries < 1 || tries > 64) {
        fprintf(stderr, "usage: bench_kernels [FORMAT] [isa] [threads] [tries, to 64]\n");
        return 2;
    }
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        if (quant_row_bytes(format, shapes[i].cols))
            bench_shape(format, shapes[i].cols, shapes[i].rows, isa, threads, tries);
    return 0;
}
