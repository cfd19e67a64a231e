#include "gpu-worker/tools/awq_layer.h"
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/tools/smooth.h"

static const struct {
    const char *part;
    int set;
} scaled[] = {{"attn_q", AWQ_ATTN},  {"attn_k", AWQ_ATTN}, {"attn_v", AWQ_ATTN},
              {"ffn_gate", AWQ_FFN}, {"ffn_up", AWQ_FFN},  {"ffn_down", AWQ_DOWN}},
  divided[] = {{"attn_norm", AWQ_ATTN}, {"ffn_norm", AWQ_FFN}, {"ffn_up", AWQ_DOWN}};

static bool is_part(const struct awq_layer *awq, const char *name, const char *part)
{
    char wanted[64];
    snprintf(wanted, sizeof wanted, "blk.%d.%s.weight", awq->layer, part);
    return strcmp(name, wanted) == 0;
}

static const float *column_scales(const struct awq_layer *awq, const char *name)
{
    for (size_t i = 0; i < sizeof scaled / sizeof *scaled; i++)
        if (is_part(awq, name, scaled[i].part))
            return awq->scales[scaled[i].set];
    return NULL;
}

float *awq_layer_divisors(const struct awq_layer *awq, const char *name, uint32_t *n)
{
    for (size_t i = 0; i < sizeof divided / sizeof *divided; i++)
        if (is_part(awq, name, divided[i].part)) {
            *n = awq->n[divided[i].set];
            return awq->scales[divided[i].set];
        }
    return NULL;
}

/* The set's scales, by what the calibration knows of the input of the matrix `name` in it. */
static int search_scales(struct awq_layer *awq, int set, const char *name, const struct awq_matrix *matrices, uint32_t n,
                         struct kvg_error *err)
{
    uint32_t cols = awq->n[set], n_inputs;
    double kept;
    const float *known = awq->grid ? calibration_sum(awq->calibration, name, cols, err)
                                   : calibration_inputs(awq->calibration, name, cols, &n_inputs, err);
    if (!known)
        return err->code;
    return awq->grid ? awq_search(matrices, n, cols, known, awq->grid, awq->threads, awq->scales[set], &kept, err)
                     : smooth_search(matrices, n, cols, known, n_inputs, awq->threads, awq->scales[set], &kept, err);
}

/* The matrices that share an input are read, searched together and dropped. */
static int search_set(struct awq_layer *awq, int set, struct kvg_error *err)
{
    struct awq_matrix matrices[AWQ_MATRICES];
    float *weights[AWQ_MATRICES] = {NULL};
    uint32_t n = 0, cols = 0, rows;
    char name[64];
    int failed = 0;
    for (size_t i = 0; i < sizeof scaled / sizeof *scaled && !failed; i++) {
        if (scaled[i].set != set)
            continue;
        snprintf(name, sizeof name, "blk.%d.%s.weight", awq->layer, scaled[i].part);
        if (!(failed = awq->read(awq->context, name, &weights[n], &rows, &cols, err))) {
            matrices[n] = (struct awq_matrix){weights[n], rows};
            n++;
        }
    }
    awq->n[set] = cols;
    awq->scales[set] = malloc((cols + 1) * sizeof(float));
    if (!failed && !awq->scales[set])
        failed = kvg_fail(err, KVG_NOMEM, "no memory for %u scales", cols);
    if (!failed)
        failed = search_scales(awq, set, name, matrices, n, err);
    for (uint32_t i = 0; i < AWQ_MATRICES; i++)
        free(weights[i]);
    return failed;
}

int awq_layer_search(struct awq_layer *awq, int layer, struct kvg_error *err)
{
    int failed = 0;
    awq_layer_free(awq);
    awq->layer = layer;
    for (int set = 0; set < (awq->grid ? AWQ_SETS : AWQ_DOWN) && !failed; set++)
        failed = search_set(awq, set, err);
    return failed;
}

void awq_layer_free(struct awq_layer *awq)
{
    for (int set = 0; set < AWQ_SETS; set++) {
        free(awq->scales[set]);
        awq->scales[set] = NULL;
    }
}

int awq_layer_scale(const struct awq_layer *awq, const char *name, float *w, uint32_t rows, uint32_t cols, struct kvg_error *err)
{
    uint32_t n = 0;
    const float *columns = column_scales(awq, name), *divisors = awq_layer_divisors(awq, name, &n);
    if (divisors && n != rows)
        return kvg_fail(err, KVG_UNSUPPORTED, "%s has %u rows, what it feeds %u columns", name, rows, n);
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t c = 0; c < cols; c++)
            w[(size_t)r * cols + c] *= (columns ? columns[c] : 1) / (divisors ? divisors[r] : 1);
    return 0;
}

int awq_layer_round(const struct awq_layer *awq, const char *name, float *w, struct grid_range *ranges, uint32_t rows,
                    uint32_t cols, struct kvg_error *err)
{
    const float *sums = calibration_sum(awq->calibration, name, cols, err);
    if (!sums || awq_layer_scale(awq, name, w, rows, cols, err) != 0)
        return err->code;
    awq_round(w, ranges, rows, cols, sums, column_scales(awq, name), awq->grid, awq->threads);
    return 0;
}
