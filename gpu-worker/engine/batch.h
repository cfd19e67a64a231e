/* From the plan of a step to what the model takes: rows, sequences, output rows; and from outputs to sampling rows.
 *
 *   plan      A: 3 rows     B: 1 row, samples     C: 2 rows, samples     D: 1 row and 2 drafts, samples
 *   ids       a5 a6 a7      b9                    c0 c1                  d7 d8' d9'
 *   outputs                 3                        5                   6  7   8
 *   draws                   B: from output 0      C: from output 1       D: from output 2, with 2 drafts
 *
 * Tokens are drawn in rounds: first one for each draw; then the next one for each whose token was its draft, and so on. So a
 * token is drawn with penalties and bans that know all tokens before it, as without drafts.
 *
 * Where a round costs more than the rows in it (model_info.samples_ahead), the first one draws ahead: behind each draft as if it
 * were accepted. A token depends on its row's logits, its position and parameters alone, so later rounds find what they would
 * have drawn. Only penalties need to know the tokens before: their sequences are drawn round by round.
 */
#pragma once
#include "gpu-worker/backend/sampling.h"
#include "gpu-worker/engine/scheduler.h"
#include "gpu-worker/model/model.h"

struct accept_draft;

/* One sequence's tokens of this step, from `output` on. */
struct draw {
    struct sequence *seq;
    uint32_t output;                 /* of the next token */
    uint32_t n_drafts;               /* still to be verified; the next is seq->ids[seq->n_ids] */
    uint32_t n_proposed, n_accepted; /* of this step's drafts */
    uint32_t at, n_ahead;            /* its sample and result of this round; how many of later rounds lie behind */
};

struct batch {
    struct model_batch model;
    uint32_t *ids;                 /* [max_rows] */
    struct model_seq *seqs;        /* [max_seqs] */
    uint32_t *outputs;             /* [max_outputs] */
    struct draw *draws;            /* [n_draws], room for max_seqs */
    struct sample_row *samples;    /* [n_samples] of this step, room for max_outputs */
    struct sample_result *results; /* [n_samples] */
    uint32_t n_draws, n_samples;
};

int batch_init(struct batch *batch, uint32_t max_rows, uint32_t max_seqs, uint32_t max_outputs, struct kvg_error *err);
void batch_free(struct batch *batch);
void batch_fill(struct batch *batch, const struct step_plan *plan);
/* How the token behind the sequence's last id is drawn from the output row. */
struct sample_row batch_sample_row(const struct sequence *seq, uint32_t output, uint32_t n_vocab);
/* The draw's next draft, of which there is one. */
struct accept_draft batch_draft(const struct draw *draw, uint32_t n_vocab);
/* Appends the samples that the next round lacks; how many. Each draw's `at` is then its own. n_vocab: ids from it on are padding
 * of the output matrix and cannot be drawn; ahead: see above. */
uint32_t batch_sampling(struct batch *batch, uint32_t n_vocab, bool ahead);
