/* Sums X^T X of the inputs of a model's matrices, over a text. */
#pragma once
#include <stdint.h>
#include "libprompt/error.h"

struct calibration;

struct calibration_options {
    const char *model; /* file that the engine can run */
    const char *text;  /* JSON lines with "text", "prompt" or "messages"; or plain text where the name ends in .txt */
    uint32_t tokens;   /* most that are used */
    uint32_t context;  /* tokens of a sequence */
    uint32_t threads;  /* 0 = all cores */
};

int calibration_open(struct calibration **out, const struct calibration_options *options, struct kvg_error *err);
void calibration_close(struct calibration *calibration);
uint32_t calibration_tokens(const struct calibration *calibration);
uint32_t calibration_layers(const struct calibration *calibration);

/* Bytes that the sums of one layer take. */
uint64_t calibration_layer_bytes(const struct calibration *calibration);
/* Runs the text through the model and keeps the sums of layers first..last - 1, dropping those of earlier calls. `advance` is
 * told how many tokens are done since it was called last. */
int calibration_run(struct calibration *calibration, uint32_t first, uint32_t last,
                    void (*advance)(void *context, uint64_t tokens), void *context, struct kvg_error *err);
/* The factor of gptq.h for the inputs of this matrix, [n, n], n to *n: computed once for the matrices that share their input. It
 * belongs to the calibration and lives until the next run. NULL with err->code KVG_OK where the matrix was not run, else an
 * error. */
const float *calibration_factor(struct calibration *calibration, const char *name, double damping, uint32_t *n,
                                struct kvg_error *err);
/* The sums themselves, upper triangle; NULL where the matrix was not run. Not after its factor was asked for. */
const float *calibration_sum(struct calibration *calibration, const char *name, uint32_t *n);
