/* Whether a draft is accepted, by one of four rules.
 *
 *   coupled    exactly where it equals what is drawn without drafts (arXiv 2408.07978): the same output, bit for bit
 *   rejection  with probability min(1, p / q) of the model's distribution p and the draft's own q; else the token is drawn from
 *              max(0, p - q) (Leviathan et al., arXiv 2211.17192): the same distribution, but not the same tokens
 *   argmax     where it is the most likely token, or as coupled: LOSSY, likely tokens come more often than they should
 *   top-p      where it is among the likeliest tokens that hold top_p of the probability, or as coupled: LOSSY, the draft model
 *              chooses among these
 *
 * p and q are distributions after every parameter (temperature, penalties, biases, bans, top-k, top-p, min-p). Chance is the
 * noise of the token's position, in streams of their own for acceptance and for the rest, so that a draft, which is drawn with
 * the noise that the token would have had, tells nothing about either.
 */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "gpu-worker/backend/sampling.h"

enum accept_rule { ACCEPT_COUPLED, ACCEPT_REJECTION, ACCEPT_ARGMAX, ACCEPT_TOP_P };

struct accept_draft {
    uint32_t id;
    const float *q; /* [n_vocab of the row] what it was drawn from; NULL: there was no choice, q(id) = 1 */
};

/* logits [n_vocab], the row's; *result comes as what is drawn without the draft, and goes as the token. Whether that is the
 * draft. scratch: n_vocab floats. */
bool accept_draft(enum accept_rule rule, const float *logits, uint32_t n_vocab, const struct sample_row *row,
                  const struct accept_draft *draft, float *scratch, struct sample_result *result);
