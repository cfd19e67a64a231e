/* AWQ and SmoothQuant in a decoder's layer: which matrices' columns are scaled, and what is divided for it.
 *
 *   divided                scaled
 *   attn_norm              columns of attn_q, attn_k, attn_v
 *   ffn_norm               columns of ffn_gate, ffn_up
 *   rows of ffn_up         columns of ffn_down (AWQ alone: with inputs in 8 bits it costs more than it gives)
 *
 * Names are those of GGUF files: "blk.3.ffn_up.weight".
 */
#pragma once
#include "gpu-worker/tools/awq.h"
#include "gpu-worker/tools/calibrate.h"

enum { AWQ_ATTN, AWQ_FFN, AWQ_DOWN, AWQ_SETS };

struct awq_layer {
    /* Set by the caller. read: the matrix `name` as f32, malloc'd; it is freed here, NULL after an error. */
    int (*read)(void *context, const char *name, float **weights, uint32_t *rows, uint32_t *cols, struct kvg_error *err);
    void *context;
    struct calibration *calibration;
    const struct grid *grid; /* NULL: SmoothQuant, by the calibration's inputs instead of its sums */
    uint32_t threads;
    /* The scales of `layer`, of the inputs of each set. */
    int layer;
    float *scales[AWQ_SETS];
    uint32_t n[AWQ_SETS];
};

/* Chooses the scales of a layer whose sums are at hand; those of another are dropped. KVG_UNSUPPORTED names a matrix that is no
 * part of the model. */
int awq_layer_search(struct awq_layer *awq, int layer, struct kvg_error *err);
void awq_layer_free(struct awq_layer *awq);

/* What the numbers of the norm `name` of this layer are divided by; *n of them. NULL: nothing. The caller may change them (to
 * what the norm's type can hold) before matrices are rounded. */
float *awq_layer_divisors(const struct awq_layer *awq, const char *name, uint32_t *n);
/* Scales columns and rows of w [rows, cols], the matrix `name` of this layer. KVG_UNSUPPORTED where rows are not what it feeds.
 */
int awq_layer_scale(const struct awq_layer *awq, const char *name, float *w, uint32_t rows, uint32_t cols, struct kvg_error *err);
/* The same, then rounds it to the grid (awq_round). */
int awq_layer_round(const struct awq_layer *awq, const char *name, float *w, struct grid_range *ranges, uint32_t rows,
                    uint32_t cols, struct kvg_error *err);
