/* Products alone: GOP/s (2 per multiplication) of the CPU backend by shape, rows, instruction set and arithmetic, taking turns.
 *
 *   bench_kernels [FORMAT] [isa,isa,...] [threads] [tries] [rows,rows,...] [megabytes]
 *
 * FORMAT: a GGUF type, or W8A8, W4A16. Weights rotate through matrices of so many megabytes (48: none stays in L2; 400: a last
 * level cache is of no use either); one row's GB/s are the rate at which they are read.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "gpu-worker/backend/backend.h"
#include "gpu-worker/quant/grouped.h"

enum { MOST_ROWS = 512, MATRICES = 256, GROUP = 128 };
static const char *const arithmetics[] = {"int8", "int16"};
enum { MOST_SUBJECTS = 6, MOST_COUNTS = 32, MOST_TRIES = 64 };
static const struct {
    uint32_t cols, rows;
} shapes[] = {{576, 576}, {576, 1536}, {1536, 576}, {896, 4864}, {4864, 896}, {1536, 8960}};

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
    char isa[16];
    const char *arithmetic;
};
struct plan {
    const struct quant_format *format; /* NULL: grouped */
    enum grouped_kind kind;
    const char *name;
    char isas[64];
    uint32_t threads, counts[MOST_COUNTS], n_counts, megabytes;
    int tries;
};

static void die(const char *what, const struct kvg_error *err)
{
    fprintf(stderr, "bench_kernels: %s: %s\n", what, err->message);
    exit(1);
}

static void random_rows(const void *context, uint32_t first, uint32_t n, const struct grouped_rows *out)
{
    const struct quant_grouped *matrix = context;
    uint32_t groups = matrix->cols / matrix->group, codes = matrix->kind == GROUPED_W8A8 ? 256 : 16;
    for (size_t i = 0; i < (size_t)n * matrix->cols; i++)
        out->q[i] = (uint8_t)((first + i) * 2654435761u >> 13) % codes;
    for (size_t i = 0; i < (size_t)n * groups; i++)
        out->scale[i] = 0x1p-8f * (float)(1 + i % 7);
}

static size_t matrix_bytes(const struct plan *plan, uint32_t rows, uint32_t cols)
{
    return plan->format ? rows * quant_row_bytes(plan->format, cols)
                        : grouped_bytes(plan->kind, cols, GROUP, false, (uint64_t)rows * cols);
}

static void open_subject(struct subject *s, const struct plan *plan, uint32_t rows, uint32_t cols, const char *isa,
                         const char *arithmetic)
{
    struct backend_options options = {isa, plan->threads, MOST_ROWS, 1, 1, arithmetic};
    struct kvg_error err;
    struct quant_grouped grouped = {
        .kind = plan->kind, .rows = rows, .cols = cols, .group = plan->kind == GROUPED_W8A8 ? cols : GROUP};
    size_t bytes = matrix_bytes(plan, rows, cols);
    uint8_t *data = plan->format ? random_weights(plan->format, bytes) : NULL;
    grouped.context = &grouped;
    grouped.read = random_rows;
    if (plan->format && !data)
        die("open", &(struct kvg_error){.message = "no memory for a matrix"});
    if (cpu_backend_open(&s->backend, &options, &err) != 0)
        die("open", &err);
    struct backend_weight weight = {
        .format = plan->format, .data = data, .rows = rows, .cols = cols, .grouped = plan->format ? NULL : &grouped};
    s->next = 0;
    s->n_weights = (uint32_t)(((size_t)plan->megabytes << 20) / bytes + 1);
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

/* One subject for each instruction set and arithmetic that the format has; returns how many. */
static int open_subjects(struct subject *subjects, const struct plan *plan, uint32_t rows, uint32_t cols)
{
    char isas[sizeof plan->isas], *rest = NULL;
    const struct quant_format *format = plan->format;
    int n = 0, n_arithmetics = format && format->bits >= 4 && format->bits <= 6 ? 2 : 1;
    memcpy(isas, plan->isas, sizeof isas);
    for (char *isa = strtok_r(isas, ",", &rest); isa; isa = strtok_r(NULL, ",", &rest))
        for (int a = 0; a < n_arithmetics && n < MOST_SUBJECTS; a++, n++) {
            open_subject(&subjects[n], plan, rows, cols, isa, arithmetics[a]);
            snprintf(subjects[n].isa, sizeof subjects[n].isa, "%s", isa);
            subjects[n].arithmetic = arithmetics[a];
        }
    return n;
}

static void bench_shape(const struct plan *plan, uint32_t cols, uint32_t rows)
{
    struct subject subjects[MOST_SUBJECTS];
    double times[MOST_SUBJECTS][MOST_TRIES];
    int n = open_subjects(subjects, plan, rows, cols), tries = plan->tries;
    for (uint32_t c = 0; c < plan->n_counts; c++) {
        uint32_t count = plan->counts[c];
        for (int i = 0; i < tries; i++)
            for (int j = 0; j < n; j++)
                times[j][i] = time_rows(&subjects[j], count);
        printf("%s %5u x %5u, %3u rows:", plan->name, cols, rows, count);
        for (int j = 0; j < n; j++) {
            qsort(times[j], (size_t)tries, sizeof **times, ascending);
            double time = times[j][tries / 2];
            printf("  %s %s %7.1f GOP/s %6.2f GB/s", subjects[j].isa, plan->format ? subjects[j].arithmetic : "",
                   2e-9 * count * rows * cols / time, 1e-9 * (double)matrix_bytes(plan, rows, cols) / time);
        }
        printf("\n");
    }
    for (int j = 0; j < n; j++)
        subjects[j].backend->ops->close(subjects[j].backend);
}

static bool read_counts(struct plan *plan, const char *text)
{
    for (char *end; *text; text = *end ? end + 1 : end) {
        unsigned long count = strtoul(text, &end, 10);
        if (end == text || count < 1 || count > MOST_ROWS || plan->n_counts == MOST_COUNTS)
            return false;
        plan->counts[plan->n_counts++] = (uint32_t)count;
    }
    return plan->n_counts > 0;
}

int main(int argc, char **argv)
{
    struct plan plan = {.name = argc > 1 ? argv[1] : "Q4_1",
                        .tries = argc > 4 ? atoi(argv[4]) : 9,
                        .threads = argc > 3 ? (uint32_t)atoi(argv[3]) : 0,
                        .megabytes = argc > 6 ? (uint32_t)atoi(argv[6]) : 48};
    bool grouped = false;
    snprintf(plan.isas, sizeof plan.isas, "%s", argc > 2 ? argv[2] : "auto");
    for (size_t i = 0; quant_at(i); i++)
        if (strcmp(quant_at(i)->name, plan.name) == 0)
            plan.format = quant_at(i);
    for (int kind = 0; kind < GROUPED_KINDS && !grouped; kind++)
        if ((grouped = strcmp(grouped_name((enum grouped_kind)kind), plan.name) == 0))
            plan.kind = (enum grouped_kind)kind;
    if ((!plan.format && !grouped) || plan.megabytes < 1 || plan.megabytes > 4096 || plan.tries < 1 || plan.tries > MOST_TRIES ||
        !read_counts(&plan, argc > 5 ? argv[5] : "1,2,4,8,16,32,128,512")) {
        fprintf(stderr,
                "usage: bench_kernels [FORMAT] [isa,...] [threads] [tries, to 64] [rows,... to 512] [megabytes, to 4096]\n");
        return 2;
    }
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        if (plan.format ? quant_row_bytes(plan.format, shapes[i].cols) != 0 : shapes[i].cols % GROUP == 0)
            bench_shape(&plan, shapes[i].cols, shapes[i].rows);
    return 0;
}
