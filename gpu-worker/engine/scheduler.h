/* Which sequences run, and what each computes in the next step.
 *
 *   waiting --admit: blocks for all its ids--> running: prefill chunks, then one decode row a step --> done
 *      ^                                          |
 *      +------------- preempt: out of blocks -----+   keeps its ids; computes them again, mostly from the cache
 *
 * One order decides everything: sequences are served oldest first, and the youngest loses its blocks first. A decode row goes
 * before prompt rows. The oldest running sequence always gets its block, so something always advances. A sequence that was
 * preempted k times comes back only with 2^k blocks to spare for each running one, so preemptions are bounded by the
 * logarithm of the pool.
 *
 * A sequence whose prefix a running one is just computing waits for it and finds it cached: so a burst behind one cold prompt,
 * and the choices of a request, compute it once.
 *
 * Nothing is reserved for tokens to come. Drafts (seq->n_drafts) get rows and blocks where some are left: they preempt nobody,
 * and half of a step's other rows stay for prompts. Engine thread only.
 */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "gpu-worker/engine/pacing.h"
#include "gpu-worker/engine/request.h"
#include "gpu-worker/kv/cache.h"
#include "libprompt/error.h"

struct scheduler_options {
    uint32_t max_num_seqs, max_rows, block_size, fixed_chunk, chunk_unit; /* chunk_unit: pacing.unit */
    bool disable_chunked_prefill, disable_prefix_caching, priority_scheduling;
};

struct scheduler {
    struct scheduler_options options;
    struct kv_cache *cache;
    struct pacing pacing;
    struct sequence *oldest, *youngest; /* waiting list, in order */
    uint32_t n_waiting, n_waiting_warm; /* of it those that only warm the cache */
    struct sequence **running;          /* [n_running], in order */
    uint32_t n_running;
    uint32_t *free_slots; /* [max_num_seqs - n_running], a stack */
    uint64_t n_added, n_preemptions;
};

/* One sequence's part of a step: its next n_rows ids, the last n_drafts of which are drafts; with `samples` the logits of the
 * last id that is no draft are wanted, and those of each draft. */
struct plan_entry {
    struct sequence *seq;
    uint32_t n_rows, n_drafts;
    bool samples;
};
struct step_plan {
    struct plan_entry *entries; /* [n], room for max_num_seqs */
    uint32_t n, n_rows, n_samples, n_decodes, n_drafts;
};

int sched_init(struct scheduler *sched, const struct scheduler_options *options, struct kv_cache *cache, struct kvg_error *err);
void sched_free(struct scheduler *sched);
/* A new sequence waits. First come, first served; with priority_scheduling the first levels of priority count as 10 s of
 * waiting each, later ones as less, and all together as less than two minutes: whatever waits runs at last. `now` in seconds. */
void sched_add(struct scheduler *sched, struct sequence *seq, double now);
/* Ends a sequence in any state: its blocks are free or cached when this returns. */
void sched_remove(struct scheduler *sched, struct sequence *seq);
/* Admits, preempts, grows block tables, and fills the plan of the next step. plan->n is 0 only when nothing runs or waits. */
void sched_plan(struct scheduler *sched, struct step_plan *plan, double now);
/* Sequences of clients that wait: those that warm the cache are left out. */
uint32_t sched_waiting(const struct scheduler *sched);
/* Prompt tokens queued or admitted and not yet computed, plus 16 a running decode. */
uint64_t sched_backlog(const struct scheduler *sched);
