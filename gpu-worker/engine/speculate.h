/* Speculative decoding: guesses of a sequence's next tokens (drafts), which one forward of the model verifies at once.
 *
 *   step      rows  t d1 d2 d3      the logits of t give the token that d1 guessed, those of d1 the one that d2 guessed …
 *   drawn           x1 x2 x3 x4     x1 = d1: accepted; x2 != d2: x2 is committed and the rest of the row is forgotten
 *   next step rows  x2 …
 *
 * Acceptance is by coupling (arXiv 2408.07978), unless another rule is asked for (accept.h): each token is drawn as without
 * drafts, with the noise of its position, and a draft is accepted exactly where it equals it. So drafts, and how many there are,
 * change the speed and never the output.
 *
 * How many are worth it is measured. Each sequence has a limit of drafts that starts at 5 and moves between 2 and 10 with the
 * acceptance of its last 50 verifications. Where those from the context of that kind are mostly accepted, as in a copy, it is 15
 * at once, and as many as were accepted in a row, up to 32; until one of them was accepted, it is 4 at most. Below the limit,
 * each step takes the number of drafts, over all sequences, with the most expected tokens a second: a draft counts with the
 * probability that it and those before it are accepted, and a row with what steps of that many rows take. No drafts may well be
 * best; then one is tried now and then, ever more rarely while it fails. (Goodput as in SmartSpec, arXiv 2406.14066.)
 *
 * Guesses come from the context (ngram.h) or from a second model (drafter.h); with both, the one with the better chance.
 *
 * Engine thread only; nothing allocates after speculate_open.
 */
#pragma once
#include "gpu-worker/engine/drafter.h"
#include "gpu-worker/engine/ngram.h"
#include "gpu-worker/engine/scheduler.h"
#include "gpu-worker/metrics.h"
#include "libprompt/error.h"

struct speculate;

enum { SPECULATE_START = 5, SPECULATE_LEAST = 2, SPECULATE_MOST = 10 };

struct speculate_options {
    uint32_t n_slots;        /* max_num_seqs */
    uint32_t most_drafts;    /* in one step, of all sequences */
    uint32_t start;          /* a sequence's first limit of drafts; beyond 2 to 10 it widens that range. 0 = 5 */
    uint32_t fixed;          /* tests: always this many, whatever it costs; 0 = as described */
    bool ngram;              /* guesses from the context */
    struct ngram_runs runs;  /* that must have stood there before */
    bool keep_all;           /* drafts by the model are verified whatever it thinks of them: for acceptance by rejection */
    struct drafter *drafter; /* guesses from a model; may be NULL. Then closed by speculate_close */
    struct kv_cache *cache;  /* only with a drafter: it needs blocks for drafts before the step is planned */
    struct engine_metrics *metrics;
};

/* 0 or KVG_NOMEM. */
int speculate_open(struct speculate **out, const struct speculate_options *options, struct kvg_error *err);
void speculate_close(struct speculate *spec);

/* Before a step is planned: writes drafts behind the ids of the running sequences that decode, and sets n_drafts of all. Others
 * wait to be admitted. */
void speculate_propose(struct speculate *spec, struct sequence *const *running, uint32_t n_running, uint32_t n_waiting);
/* A sequence's drafts were verified: of n_proposed the first n_accepted were its tokens. `ended`: its generation ended there, so
 * that the next draft was not looked at. */
void speculate_verified(struct speculate *spec, const struct sequence *seq, uint32_t n_proposed, uint32_t n_accepted, bool ended);
/* The step of this plan took so long. */
void speculate_timed(struct speculate *spec, const struct step_plan *plan, double seconds);
