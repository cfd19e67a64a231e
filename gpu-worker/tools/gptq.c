#include "gpu-worker/tools/gptq.h"
#include <cblas.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/tools/parallel.h"

enum { COLUMNS = 128, TRIES = 6 }; /* columns whose errors are carried on together */

/* LAPACK, column-major: its lower triangle is our upper one. */
void dpotrf_(const char *triangle, const int *n, double *a, const int *stride, int *info);
void dpotri_(const char *triangle, const int *n, double *a, const int *stride, int *info);

/* a = factor U of the inverse of hessian + damping; false where that is not positive definite. */
static int factor(double *a, const float *hessian, int n, double damping)
{
    int info;
    for (int i = 0; i < n; i++) {
        for (int j = i; j < n; j++)
            a[(size_t)i * (size_t)n + (size_t)j] = (double)hessian[(size_t)i * (size_t)n + (size_t)j];
        double *diagonal = &a[(size_t)i * (size_t)n + (size_t)i];
        *diagonal = (*diagonal > 0 ? *diagonal : 1) + damping; /* an input that is always 0 asks for nothing */
    }
    dpotrf_("L", &n, a, &n, &info);
    if (info == 0)
        dpotri_("L", &n, a, &n, &info);
    if (info == 0)
        dpotrf_("L", &n, a, &n, &info);
    return info;
}

int gptq_prepare(float *hessian, uint32_t n, double damping, struct kvg_error *err)
{
    double *a = malloc((size_t)n * n * sizeof *a), mean = 0;
    int info = 1;

    if (!a)
        return kvg_fail(err, KVG_NOMEM, "no memory for a matrix of %u x %u", n, n);
    for (uint32_t i = 0; i < n; i++)
        mean += (double)hessian[(size_t)i * n + i] / n;
    for (int try = 0; try < TRIES && info != 0; try++, damping *= 10)
        info = factor(a, hessian, (int)n, damping * (mean > 0 ? mean : 1));
    for (size_t i = 0; i < (size_t)n * n && info == 0; i++)
        hessian[i] = (float)a[i];
    free(a);
    return info == 0 ? 0 : kvg_fail(err, KVG_INVALID, "the calibration inputs give no positive definite matrix (%u x %u)", n, n);
}

struct job {
    float *weights, *errors; /* errors [rows, COLUMNS] */
    struct grid_range *ranges;
    uint32_t cols, first, last; /* columns of this turn */
    const float *upper;
    const struct grid *grid;
};

/* One row's columns first..last; its later columns are left to the caller. */
static void round_columns(const struct job *job, float *w, float *errors, struct grid_range *ranges)
{
    const struct grid *grid = job->grid;
    for (uint32_t i = job->first; i < job->last; i++) {
        const float *u = job->upper + (size_t)i * job->cols;
        if (i % grid->group == 0)
            ranges[i / grid->group] = grid->fit(w + i, grid->group, 1);
        float q = grid_nearest(w[i], ranges[i / grid->group]), error = (w[i] - q) / u[i];
        w[i] = q;
        errors[i - job->first] = error;
        for (uint32_t j = i + 1; j < job->last; j++)
            w[j] -= error * u[j];
    }
}

static void round_rows(void *context, uint64_t first, uint64_t last)
{
    const struct job *job = context;
    uint32_t groups = job->cols / job->grid->group;
    for (uint64_t r = first; r < last; r++)
        round_columns(job, job->weights + r * job->cols, job->errors + r * COLUMNS, job->ranges + r * groups);
}

int gptq_quantize(float *weights, struct grid_range *ranges, uint32_t rows, uint32_t cols, const float *upper,
                  const struct grid *grid, uint32_t threads, struct kvg_error *err)
{
    struct job job = {.weights = weights, .ranges = ranges, .cols = cols, .upper = upper, .grid = grid};
    if (grid->group == 0 || cols % grid->group || COLUMNS % grid->group)
        return kvg_fail(err, KVG_INVALID, "groups of %u do not divide %u columns", grid->group, cols);
    job.errors = malloc((size_t)rows * COLUMNS * sizeof *job.errors);
    if (!job.errors)
        return kvg_fail(err, KVG_NOMEM, "no memory for errors of %u rows", rows);
    for (job.first = 0; job.first < cols; job.first = job.last) {
        job.last = cols - job.first < COLUMNS ? cols : job.first + COLUMNS;
        parallel_ranges(threads, rows, round_rows, &job);
        if (job.last < cols) /* weights[:, last:] -= errors upper[first:last, last:] */
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)rows, (int)(cols - job.last), (int)(job.last - job.first),
                        -1, job.errors, COLUMNS, upper + (size_t)job.first * cols + job.last, (int)cols, 1, weights + job.last,
                        (int)cols);
    }
    free(job.errors);
    return 0;
}
