#include "gpu-worker/tools/awq.h"
#include <cblas.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/tools/parallel.h"

enum { STEPS = 10, CLIPS = 11, BATCH = 64 /* rows whose groups are weighed in one product */ };

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

/* sums [cols, cols], upper triangle: e^T e of the rows is added, or put there. */
static void add_squares(float *sums, const float *errors, uint32_t rows, uint32_t cols, bool add)
{
    cblas_ssyrk(CblasRowMajor, CblasUpper, CblasTrans, (int)cols, (int)rows, 1, errors, (int)cols, add ? 1 : 0, sums, (int)cols);
}

/* Sum over rows of e H e^T, of the sums of their e^T e: half the work of multiplying each row with H. */
static double weigh(const float *sums, const float *hessian, uint32_t cols)
{
    double diagonal = 0, above = 0;
    for (uint32_t i = 0; i < cols; i++) {
        const float *s = sums + (size_t)i * cols, *h = hessian + (size_t)i * cols;
        diagonal += (double)s[i] * (double)h[i];
        above += (double)cblas_sdot((int)(cols - i - 1), s + i + 1, 1, h + i + 1, 1);
    }
    return diagonal + 2 * above;
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
    float *errors = malloc((size_t)most * cols * sizeof *errors), *sums = malloc((size_t)cols * cols * sizeof *sums);
    float *tried = malloc(cols * sizeof *tried);
    int failed = errors && sums && tried ? 0 : kvg_fail(err, KVG_NOMEM, "no memory for %u x %u errors", most, cols);
    for (uint32_t step = 0; step <= STEPS && !failed; step++) {
        fill_scales(tried, cols, hessian, (double)step / STEPS);
        for (uint32_t m = 0; m < n_matrices; m++) {
            struct trial trial = {matrices[m].weights, tried, errors, cols, grid};
            parallel_ranges(threads, matrices[m].rows, try_rows, &trial);
            add_squares(sums, errors, matrices[m].rows, cols, m > 0);
        }
        double lost = weigh(sums, hessian, cols);
        if (step == 0)
            rounded = lost;
        if (lost < best) {
            best = lost;
            memcpy(scales, tried, cols * sizeof *scales);
        }
    }
    *kept = rounded > 0 ? best / rounded : 1;
    free(errors);
    free(sums);
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

/* The same group of BATCH rows. */
struct batch {
    float errors[BATCH * GRID_GROUP], weighed[BATCH * GRID_GROUP]; /* e, e H */
    float tried[BATCH * GRID_GROUP], best[BATCH * GRID_GROUP];
    struct grid_range ranges[BATCH];
    float least[BATCH];
};

/* Rounds group `g` of rows first..first + n under a share of their extents. */
static void try_clip(const struct clipping *c, struct batch *b, uint64_t first, uint32_t n, uint32_t g, float share)
{
    uint32_t group = c->grid->group;
    for (uint32_t r = 0; r < n; r++) {
        const float *x = c->w + (first + r) * c->cols + g * group;
        float *tried = b->tried + r * group, *error = b->errors + r * group;
        struct grid_range range = b->ranges[r] = c->grid->fit(x, group, share);
        for (uint32_t i = 0; i < group; i++) {
            tried[i] = grid_nearest(x[i], range);
            error[i] = x[i] - tried[i];
        }
        for (uint32_t i = 0; c->scales && i < group; i++)
            error[i] /= c->scales[g * group + i];
    }
}

/* What the group's own part of H makes of the errors: e H e^T, where it is the least so far, is kept. */
static void keep_best(const struct clipping *c, struct batch *b, uint64_t first, uint32_t n, uint32_t g)
{
    uint32_t group = c->grid->group, groups = c->cols / group;
    cblas_ssymm(CblasRowMajor, CblasRight, CblasUpper, (int)n, (int)group, 1, c->hessian + (size_t)g * group * (c->cols + 1),
                (int)c->cols, b->errors, (int)group, 0, b->weighed, (int)group);
    for (uint32_t r = 0; r < n; r++) {
        float lost = cblas_sdot((int)group, b->errors + r * group, 1, b->weighed + r * group, 1);
        if (lost >= b->least[r])
            continue;
        b->least[r] = lost;
        c->ranges[(first + r) * groups + g] = b->ranges[r];
        memcpy(b->best + r * group, b->tried + r * group, group * sizeof *b->best);
    }
}

static void clip_rows(void *context, uint64_t first, uint64_t last)
{
    const struct clipping *c = context;
    uint32_t group = c->grid->group, groups = c->cols / group;
    struct batch b;
    for (uint64_t at = first; at < last; at += BATCH) {
        uint32_t n = last - at < BATCH ? (uint32_t)(last - at) : BATCH;
        for (uint32_t g = 0; g < groups; g++) {
            for (uint32_t r = 0; r < n; r++)
                b.least[r] = INFINITY;
            for (int clip = 0; clip < CLIPS; clip++) {
                try_clip(c, &b, at, n, g, 1 - 0.05f * (float)clip);
                keep_best(c, &b, at, n, g);
            }
            for (uint32_t r = 0; r < n; r++)
                memcpy(c->w + (at + r) * c->cols + g * group, b.best + r * group, group * sizeof *b.best);
        }
    }
}

void awq_round(float *w, struct grid_range *ranges, uint32_t rows, uint32_t cols, const float *hessian, const float *scales,
               const struct grid *grid, uint32_t threads)
{
    struct clipping c = {w, ranges, cols, hessian, scales, grid};
    int blas_threads = openblas_get_num_threads();
    openblas_set_num_threads(1); /* of each of ours */
    parallel_ranges(threads, rows, clip_rows, &c);
    openblas_set_num_threads(blas_threads);
}
