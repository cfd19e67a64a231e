#include "gpu-worker/tools/awq.h"
#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/tools/parallel.h"

enum { STEPS = 10, CLIPS = 11 };

/* ---- scales ------------------------------------------------------------------------------------------------------------ */

struct trial {
    const float *weights, *scales;
    float *errors; /* [rows, cols] */
    uint32_t cols;
    const struct grid *grid;
};

/* errors = w - Q(w s) / s, as the inputs meet it. */
static void try_rows(void *context, uint64_t first, uint64_t last)
{
    const struct trial *trial = context;
    uint32_t group = trial->grid->group;
    for (uint64_t r = first; r < last; r++)
        for (uint32_t g = 0; g < trial->cols; g += group) {
            const float *w = trial->weights + r * trial->cols + g, *s = trial->scales + g;
            float scaled[GRID_GROUP], *error = trial->errors + r * trial->cols + g;
            for (uint32_t i = 0; i < group; i++)
                scaled[i] = w[i] * s[i];
            struct grid_range range = trial->grid->fit(scaled, group, 1);
            for (uint32_t i = 0; i < group; i++)
                error[i] = w[i] - grid_nearest(scaled[i], range) / s[i];
        }
}

/* Sum over rows of e H e^T. */
static double weigh(const float *errors, float *product, uint32_t rows, uint32_t cols, const float *hessian)
{
    double sum = 0;
    cblas_ssymm(CblasRowMajor, CblasRight, CblasUpper, (int)rows, (int)cols, 1, hessian, (int)cols, errors, (int)cols, 0, product,
                (int)cols);
    for (uint32_t r = 0; r < rows; r++)
        sum += (double)cblas_sdot((int)cols, errors + (size_t)r * cols, 1, product + (size_t)r * cols, 1);
    return sum;
}

/* a^alpha with geometric mean 1; columns without input keep 1. */
static void fill_scales(float *scales, uint32_t cols, const float *hessian, double alpha)
{
    double logs = 0;
    uint32_t n = 0;
    for (uint32_t i = 0; i < cols; i++) {
        float diagonal = hessian[(size_t)i * cols + i];
        scales[i] = diagonal > 0 ? (float)(alpha * 0.5 * log((double)diagonal)) : 0;
        logs += (double)scales[i];
        n += diagonal > 0;
    }
    for (uint32_t i = 0; i < cols; i++) {
        double centred = hessian[(size_t)i * cols + i] > 0 ? (double)scales[i] - logs / n : 0;
        scales[i] = (float)exp(fmax(-6, fmin(6, centred)));
    }
}

int awq_search(const struct awq_matrix *matrices, uint32_t n_matrices, uint32_t cols, const float *hessian,
               const struct grid *grid, uint32_t threads, float *scales, double *kept, struct kvg_error *err)
{
    uint32_t most = 0;
    double best = INFINITY, rounded = 0;
    for (uint32_t m = 0; m < n_matrices; m++)
        most = matrices[m].rows > most ? matrices[m].rows : most;
    if (grid->group > GRID_GROUP || grid->group == 0 || cols % grid->group)
        return kvg_fail(err, KVG_INVALID, "groups of %u do not divide %u columns", grid->group, cols);
    float *errors = malloc((size_t)most * cols * sizeof *errors), *product = malloc((size_t)most * cols * sizeof *product);
    float *tried = malloc(cols * sizeof *tried);
    int failed = errors && product && tried ? 0 : kvg_fail(err, KVG_NOMEM, "no memory for %u x %u errors", most, cols);
    for (uint32_t step = 0; step <= STEPS && !failed; step++) {
        double sum = 0;
        fill_scales(tried, cols, hessian, (double)step / STEPS);
        for (uint32_t m = 0; m < n_matrices; m++) {
            struct trial trial = {matrices[m].weights, tried, errors, cols, grid};
            parallel_ranges(threads, matrices[m].rows, try_rows, &trial);
            sum += weigh(errors, product, matrices[m].rows, cols, hessian);
        }
        if (step == 0)
            rounded = sum;
        if (sum < best) {
            best = sum;
            memcpy(scales, tried, cols * sizeof *scales);
        }
    }
    *kept = rounded > 0 ? best / rounded : 1;
    free(errors);
    free(product);
    free(tried);
    return failed;
}

/* ---- clipping ---------------------------------------------------------------------------------------------------------- */

struct clipping {
    float *w;
    struct grid_range *ranges;
    uint32_t cols;
    const float *hessian, *scales;
    const struct grid *grid;
};

/* Rounds the group x to the range in out; what it costs: e H e^T of the group's own part of H. */
static double round_group(const struct clipping *c, const float *x, uint32_t at, struct grid_range range, float *out)
{
    float errors[GRID_GROUP];
    double cost = 0;
    for (uint32_t i = 0; i < c->grid->group; i++) {
        out[i] = grid_nearest(x[i], range);
        errors[i] = (x[i] - out[i]) / (c->scales ? c->scales[at + i] : 1);
    }
    for (uint32_t i = 0; i < c->grid->group; i++) {
        const float *h = c->hessian + (size_t)(at + i) * c->cols + at;
        float later = 0;
        for (uint32_t j = i + 1; j < c->grid->group; j++)
            later += h[j] * errors[j];
        cost += (double)errors[i] * ((double)h[i] * (double)errors[i] + 2 * (double)later);
    }
    return cost;
}

static void clip_rows(void *context, uint64_t first, uint64_t last)
{
    const struct clipping *c = context;
    uint32_t group = c->grid->group, groups = c->cols / group;
    for (uint64_t r = first; r < last; r++)
        for (uint32_t g = 0; g < groups; g++) {
            float *x = c->w + r * c->cols + g * group, best[GRID_GROUP], out[GRID_GROUP];
            double least = INFINITY;
            for (int clip = 0; clip < CLIPS; clip++) {
                struct grid_range range = c->grid->fit(x, group, 1 - 0.05f * (float)clip);
                double cost = round_group(c, x, g * group, range, out);
                if (cost >= least)
                    continue;
                least = cost;
                c->ranges[r * groups + g] = range;
                memcpy(best, out, group * sizeof *best);
            }
            memcpy(x, best, group * sizeof *x);
        }
}

void awq_round(float *w, struct grid_range *ranges, uint32_t rows, uint32_t cols, const float *hessian, const float *scales,
               const struct grid *grid, uint32_t threads)
{
    struct clipping c = {w, ranges, cols, hessian, scales, grid};
    parallel_ranges(threads, rows, clip_rows, &c);
}
