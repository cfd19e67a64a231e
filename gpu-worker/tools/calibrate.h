/* Sums X^T X of the inputs of a model's matrices, over a text, or a sample of the inputs themselves. */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "libprompt/error.h"

struct calibration;
struct family;

/* Added to the diagonal, as a share of its mean (gptq.h). */
#define CALIBRATION_DAMPING 0.01

struct calibration_options {
    const char *model;   /* file that the engine can run */
    const char *text;    /* JSON lines with "text", "prompt" or "messages"; or plain text where the name ends in .txt */
    uint32_t tokens;     /* most that are used */
    uint32_t context;    /* tokens of a sequence */
    uint32_t threads;    /* 0 = all cores */
    uint32_t memory_mib; /* for the sums of the layers that go through the model in one pass, of one at least */
    uint32_t inputs;     /* rows of each input that are kept, evenly over the text, instead of sums; 0: sums */
    bool act_order;      /* factors are of columns in descending order of their inputs' squares */
};

int calibration_open(struct calibration **out, const struct calibration_options *options, struct kvg_error *err);
void calibration_close(struct calibration *calibration);
/* Of its model. */
const struct family *calibration_family(const struct calibration *calibration);

/* The sums of `layer` are at hand: where they are not yet, the text runs through the model, under a bar of its own, for this
 * layer and as many after it as fit into the memory; those of earlier passes are dropped. Layers are asked for in ascending
 * order. */
int calibration_reach(struct calibration *calibration, uint32_t layer, struct kvg_error *err);
/* The factor of gptq.h for the inputs of this matrix, [cols, cols]: computed once for the matrices that share their input. It
 * belongs to the calibration and lives until the next pass. NULL: an error, KVG_UNSUPPORTED where the matrix was not run with
 * that many columns. */
const float *calibration_factor(struct calibration *calibration, const char *name, uint32_t cols, struct kvg_error *err);
/* With act_order, after calibration_factor: row and column i of the factor are of the matrix' column order[i]. It lives as long
 * as the factor. NULL: i itself. */
const uint32_t *calibration_order(const struct calibration *calibration, const char *name);
/* The sums themselves, [cols, cols], upper triangle; NULL: as above. Not after its factor was asked for. */
const float *calibration_sum(const struct calibration *calibration, const char *name, uint32_t cols, struct kvg_error *err);
/* With `inputs`: rows [*n, cols] of what this matrix is multiplied with; NULL: as above. */
const float *calibration_inputs(const struct calibration *calibration, const char *name, uint32_t cols, uint32_t *n,
                                struct kvg_error *err);
