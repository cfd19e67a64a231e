#include "gpu-worker/tools/smooth.h"
#include <cblas.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/quant/f16.h"
#include "gpu-worker/tools/parallel.h"

enum { STEPS = 10, LEVELS = 127 };

/* Rows times (or divided by) the scales, rounded to 8 bits with a scale each. */
struct rounds {
    const float *source, *scales;
    float *out; /* as source */
    uint32_t cols;
    bool inputs; /* are divided; their scale is f32, where that of weights is BF16 */
};

static void round_rows(void *context, uint64_t first, uint64_t last)
{
    const struct rounds *rounds = context;
    for (uint64_t r = first; r < last; r++) {
        const float *source = rounds->source + r * rounds->cols;
        float *out = rounds->out + r * rounds->cols, low, high;
        for (uint32_t i = 0; i < rounds->cols; i++)
            out[i] = rounds->inputs ? source[i] / rounds->scales[i] : source[i] * rounds->scales[i];
        grid_extent(out, rounds->cols, &low, &high);
        float scale = fmaxf(high, -low) / LEVELS;
        scale = rounds->inputs ? scale : bf16_to_f32(f32_to_bf16(scale));
        float inverse = scale > 0 ? 1 / scale : 0;
        for (uint32_t i = 0; i < rounds->cols; i++)
            out[i] = scale * (float)rounding_nearest(out[i] * inverse, -LEVELS, LEVELS);
    }
}

/* What the search works in. */
struct search {
    const struct awq_matrix *matrices;
    const float *inputs;
    uint32_t n_matrices, cols, n_inputs, threads;
    float *weights, *rounded;   /* [most rows, cols], [n_inputs, cols] */
    float **expected, *product; /* of each matrix [n_inputs, rows]; [n_inputs, most rows] */
};

/* out [n_inputs, rows] = x w^T - share out */
static void multiply(const struct search *s, const float *x, const float *w, uint32_t rows, float share, float *out)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)s->n_inputs, (int)rows, (int)s->cols, 1, x, (int)s->cols, w,
                (int)s->cols, -share, out, (int)rows);
}

/* Squared error of the products under these scales. */
static double error_of(const struct search *s, const float *scales)
{
    struct rounds inputs = {s->inputs, scales, s->rounded, s->cols, true};
    double sum = 0;
    parallel_ranges(s->threads, s->n_inputs, round_rows, &inputs);
    for (uint32_t m = 0; m < s->n_matrices; m++) {
        uint32_t rows = s->matrices[m].rows;
        struct rounds weights = {s->matrices[m].weights, scales, s->weights, s->cols, false};
        parallel_ranges(s->threads, rows, round_rows, &weights);
        memcpy(s->product, s->expected[m], (size_t)s->n_inputs * rows * sizeof *s->product);
        multiply(s, s->rounded, s->weights, rows, 1, s->product);
        for (uint32_t i = 0; i < s->n_inputs; i++) {
            const float *row = s->product + (size_t)i * rows;
            sum += (double)cblas_sdot((int)rows, row, 1, row, 1);
        }
    }
    return sum;
}

static void raise_to_magnitudes(float *most, const float *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        float magnitude = fabsf(x[i]);
        most[i] = magnitude > most[i] ? magnitude : most[i];
    }
}

/* Geometric mean 1; columns without input or weights keep 1. */
static void fill_scales(float *scales, const float *inputs, const float *weights, uint32_t cols, double alpha)
{
    double logs = 0;
    uint32_t n = 0;
    for (uint32_t i = 0; i < cols; i++) {
        bool used = inputs[i] > 0 && weights[i] > 0;
        scales[i] = used ? (float)(alpha * log((double)inputs[i]) - (1 - alpha) * log((double)weights[i])) : 0;
        logs += (double)scales[i];
        n += used;
    }
    for (uint32_t i = 0; i < cols; i++) {
        double centred = inputs[i] > 0 && weights[i] > 0 ? (double)scales[i] - logs / n : 0;
        scales[i] = (float)exp(fmax(-6, fmin(6, centred)));
    }
}

/* peaks: [3, cols], worked in. */
static void try_all(const struct search *s, float *peaks, float *scales, double *kept)
{
    uint32_t cols = s->cols;
    float *of_inputs = peaks, *of_weights = peaks + cols, *tried = peaks + 2 * (size_t)cols;
    memset(peaks, 0, 2 * (size_t)cols * sizeof *peaks);
    for (uint32_t i = 0; i < s->n_inputs; i++)
        raise_to_magnitudes(of_inputs, s->inputs + (size_t)i * cols, cols);
    for (uint32_t m = 0; m < s->n_matrices; m++)
        for (uint32_t r = 0; r < s->matrices[m].rows; r++)
            raise_to_magnitudes(of_weights, s->matrices[m].weights + (size_t)r * cols, cols);
    for (uint32_t i = 0; i < cols; i++)
        scales[i] = 1;
    double plain = error_of(s, scales), best = plain;
    for (int step = 1; step <= STEPS; step++) {
        fill_scales(tried, of_inputs, of_weights, cols, (double)step / STEPS);
        double error = error_of(s, tried);
        if (error < best) {
            best = error;
            memcpy(scales, tried, cols * sizeof *scales);
        }
    }
    *kept = plain > 0 ? best / plain : 1;
}

int smooth_search(const struct awq_matrix *matrices, uint32_t n_matrices, uint32_t cols, const float *inputs, uint32_t n_inputs,
                  uint32_t threads, float *scales, double *kept, struct kvg_error *err)
{
    size_t most = 0, all = 0, at = 0;
    for (uint32_t m = 0; m < n_matrices; m++) {
        most = matrices[m].rows > most ? matrices[m].rows : most;
        all += matrices[m].rows;
    }
    float *expected[AWQ_MATRICES],
        *room = malloc((most * cols + (size_t)n_inputs * (cols + most + all) + 3 * (size_t)cols) * sizeof *room);
    if (!room || n_matrices > AWQ_MATRICES) {
        free(room);
        return kvg_fail(err, KVG_NOMEM, "no memory for %u inputs of %zu x %u weights", n_inputs, all, cols);
    }
    struct search s = {matrices, inputs, n_matrices, cols, n_inputs, threads, .expected = expected};
    s.weights = room;
    s.rounded = s.weights + most * cols;
    s.product = s.rounded + (size_t)n_inputs * cols;
    float *peaks = s.product + n_inputs * most, *products = peaks + 3 * (size_t)cols;
    for (uint32_t m = 0; m < n_matrices; at += matrices[m++].rows) {
        expected[m] = products + n_inputs * at;
        multiply(&s, inputs, matrices[m].weights, matrices[m].rows, 0, expected[m]);
    }
    try_all(&s, peaks, scales, kept);
    free(room);
    return 0;
}
