/* From the plan of a step to what the model takes: rows, sequences, output rows, and one sampling row an output.
 *
 *   plan      A: 3 rows     B: 1 row, samples     C: 2 rows, samples
 *   ids       a5 a6 a7      b9                    c0 c1
 *   outputs                 3                        5
 *
 * A sequence may have several output rows: that is how drafted tokens will be verified.
 */
#pragma once
#include "gpu-worker/backend/sampling.h"
#include "gpu-worker/engine/scheduler.h"
#include "gpu-worker/model/model.h"

struct batch {
    struct model_batch model;
    uint32_t *ids;                 /* [max_rows] */
    struct model_seq *seqs;        /* [max_seqs] */
    uint32_t *outputs;             /* [max_seqs] */
    struct sample_row *samples;    /* [n_outputs], room for max_seqs */
    struct sample_result *results; /* [n_outputs], room for max_seqs */
    struct sequence **sampled;     /* [n_outputs], room for max_seqs: whose token each output gives */
};

int batch_init(struct batch *batch, uint32_t max_rows, uint32_t max_seqs, struct kvg_error *err);
void batch_free(struct batch *batch);
/* n_vocab: ids from it on are padding of the output matrix and cannot be drawn. */
void batch_fill(struct batch *batch, const struct step_plan *plan, uint32_t n_vocab);
