/* Drafts from a second, smaller model with the same vocabulary.
 *
 * Its KV lies in a pool of its own with as many blocks as the target's, and a sequence's block table serves both: position p of a
 * sequence is at the same place in both pools. So a block that is found in the prefix cache brings the draft model's KV along,
 * if that was computed; a block's mark, the chain hash of its ids, says so. What is missing is computed before the first draft.
 *
 *   ids         | prompt, generated ............ | drafts being made |
 *                                        n_ids
 *   n_computed  |<- draft model's KV ->|
 *
 * A draft is drawn with the same parameters and the same noise as the target's token of its position, so that the two are equal
 * as often as they can be (arXiv 2408.07978). Marks and KV may be wrong after blocks changed hands: then drafts are bad guesses,
 * and nothing else. Engine thread only; nothing allocates after drafter_open.
 */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "gpu-worker/engine/request.h"
#include "gpu-worker/model/model.h"
#include "libprompt/error.h"
#include "libprompt/tokenizer.h"

struct drafter;

struct drafter_options {
    struct model *model; /* the caller's; its KV pool is allocated here */
    uint32_t n_blocks, block_size;
    uint32_t max_seqs, max_rows; /* at most what the model was opened for */
    uint32_t n_vocab;            /* ids that may be drawn: the target's */
    uint32_t keep_probs;         /* drafts of one run whose distributions are kept, for acceptance by rejection; 0 = none */
};

/* Drafts wanted of one sequence, whose table has blocks for them. */
struct draft_order {
    struct sequence *seq;
    uint32_t n_computed; /* whose KV the draft model has; moves on */
    uint32_t n;          /* how many; becomes 0 where too much KV is missing. The caller may lower it between rounds */
    double sure;         /* out: what the draft model gave its newest draft, from 0 to 1, at temperature 1 */
};

/* Whether drafts of one vocabulary are tokens of the other: KVG_INVALID names the first id that differs. Ids behind the target's
 * last are never drafted, and rows of the embedding beyond both vocabularies do not matter. */
int drafter_check_vocab(const struct kvg_tokenizer *target, const struct kvg_tokenizer *draft, uint32_t draft_rows,
                        struct kvg_error *err);

int drafter_open(struct drafter **out, const struct drafter_options *options, struct kvg_error *err);
void drafter_close(struct drafter *drafter);

/* How many of the sequence's ids the draft model's KV covers, by the marks of its blocks. */
uint32_t drafter_covered(const struct drafter *drafter, const struct sequence *seq);
/* Most ids that a sequence may come to with its drafts. */
uint32_t drafter_longest(const struct drafter *drafter);
/* The first ids that brief rounds draft from, in vocabulary order, which for merged pairs of bytes is that of frequency: the
 * output matrix is a third of the work of a small model. */
enum { DRAFTER_BRIEF = 32768 };

/* Before the first round of a step: with keep_probs, says where the distributions of each order's n drafts go (draft_probs of
 * its sequence), valid until the next call. */
void drafter_begin(struct drafter *drafter, const struct draft_order *orders, uint32_t n);
/* Round `made`, from 0: one more draft behind the ids of each sequence whose n is above `made`. A forward takes about `most`
 * rows: a sequence that lacks more KV gets some of it and no drafts. `brief`: from the first DRAFTER_BRIEF ids alone. Returns the
 * rows that were computed; 0: no order wants more. */
uint32_t drafter_round(struct drafter *drafter, struct draft_order *orders, uint32_t n, uint32_t made, uint32_t most, bool brief);
