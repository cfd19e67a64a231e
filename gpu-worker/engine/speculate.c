#include "gpu-worker/engine/speculate.h"
#include <stdlib.h>
#include "gpu-worker/engine/ngram.h"
#include "gpu-worker/engine/step_cost.h"

enum {
    MOVE_EVERY = 5, /* verifications between two moves of a limit */
    PROBE_SOON = 2,
    PROBE_FIRST = 16,
    PROBE_LAST = 256,  /* steps without drafts before one is tried */
    PLAIN_EVERY = 256, /* steps before one without drafts is measured again */
};
static const double window = 50, window_all = 1000;      /* verifications, drafts that count */
static const double raise_over = 0.8, lower_under = 0.5; /* acceptance */
static const double prior_weight = 6, least_gain = 1.02;

/* Drafts that were looked at, and accepted ones; both fade. */
struct rate {
    double tried, accepted;
};

/* What is known of the sequence in a slot. */
struct speculator {
    uint64_t number; /* of the sequence + 1 */
    uint32_t preemptions;
    uint32_t limit, since_move;
    double drafted, accepted; /* of the window */
    uint32_t level;           /* of the match that this step's drafts follow */
    struct rate rates[NGRAM_LEVELS];
    uint32_t idle, probe_wait; /* steps that could have had drafts and did not; how many of them until one is tried */
    struct ngram ngram;
};

/* A sequence that could have drafts in this step. */
struct candidate {
    struct sequence *seq;
    struct speculator *slot;
    uint32_t at, most, n; /* what follows ids[at] is the guess; most drafts; drafts chosen */
    double share, reach;  /* probability of one more draft; of all up to the next one */
};

struct speculate {
    struct speculate_options options;
    uint32_t least, most;
    struct speculator *slots;        /* [n_slots] */
    struct candidate *candidates;    /* [n_slots] */
    uint32_t *order;                 /* [most_drafts] candidates by the worth of their next draft */
    struct rate rates[NGRAM_LEVELS]; /* of all sequences */
    struct step_cost cost;
};

int speculate_open(struct speculate **out, const struct speculate_options *options, struct kvg_error *err)
{
    struct speculate *spec = calloc(1, sizeof *spec);

    if (!spec)
        return kvg_fail(err, KVG_NOMEM, "no memory for speculation");
    spec->options = *options;
    if (!spec->options.start)
        spec->options.start = SPECULATE_START;
    spec->least = spec->options.start < SPECULATE_LEAST ? spec->options.start : SPECULATE_LEAST;
    spec->most = spec->options.start > SPECULATE_MOST ? spec->options.start : SPECULATE_MOST;
    spec->slots = calloc(options->n_slots, sizeof *spec->slots);
    spec->candidates = calloc(options->n_slots, sizeof *spec->candidates);
    spec->order = calloc(options->most_drafts, sizeof *spec->order);
    for (int i = 0; i < NGRAM_LEVELS; i++)
        spec->rates[i] = (struct rate){4, 2};
    if (!spec->slots || !spec->candidates || !spec->order) {
        speculate_close(spec);
        return kvg_fail(err, KVG_NOMEM, "no memory for the drafts of %u sequences", options->n_slots);
    }
    *out = spec;
    return 0;
}

void speculate_close(struct speculate *spec)
{
    if (!spec)
        return;
    free(spec->slots);
    free(spec->candidates);
    free(spec->order);
    free(spec);
}

/* ---- drafts ---------------------------------------------------------------------------------------------------------------- */

static struct speculator *slot_of(struct speculate *spec, const struct sequence *seq)
{
    struct speculator *slot = &spec->slots[seq->slot];

    if (slot->number == seq->number + 1 && slot->preemptions == seq->preemptions)
        return slot;
    slot->number = seq->number + 1;
    slot->preemptions = seq->preemptions;
    slot->limit = spec->options.fixed ? spec->options.fixed : spec->options.start;
    slot->since_move = slot->idle = 0;
    slot->drafted = slot->accepted = 0;
    slot->probe_wait = PROBE_FIRST;
    for (int i = 0; i < NGRAM_LEVELS; i++)
        slot->rates[i] = (struct rate){0};
    ngram_reset(&slot->ngram, seq->limit);
    return slot;
}

/* The chance that a draft is accepted where those before it were: the sequence's own, beginning with what is known of all. */
static double chance(const struct speculate *spec, const struct speculator *slot)
{
    const struct rate *own = &slot->rates[slot->level], *all = &spec->rates[slot->level];
    return (own->accepted + prior_weight * all->accepted / all->tried) / (own->tried + prior_weight);
}

static uint32_t find_candidates(struct speculate *spec, struct sequence *const *running, uint32_t n_running, uint32_t *n_decodes)
{
    uint32_t n = 0;

    *n_decodes = 0;
    for (uint32_t i = 0; i < n_running; i++) {
        struct sequence *seq = running[i];
        seq->n_drafts = 0;
        if (sequence_pending(seq) != 1)
            continue;
        ++*n_decodes;
        struct speculator *slot = slot_of(spec, seq);
        uint32_t at = ngram_find(&slot->ngram, seq->ids, seq->n_ids, &slot->level), room = seq->limit - seq->n_ids - 1;
        if (!at || !room)
            continue;
        double share = chance(spec, slot);
        spec->candidates[n++] = (struct candidate){
            .seq = seq, .slot = slot, .at = at, .most = slot->limit < room ? slot->limit : room, .share = share, .reach = share};
    }
    return n;
}

static struct candidate *most_promising(struct speculate *spec, uint32_t n)
{
    struct candidate *best = NULL;

    for (uint32_t i = 0; i < n; i++) {
        struct candidate *c = &spec->candidates[i];
        if (c->n < c->most && (!best || c->reach > best->reach))
            best = c;
    }
    return best;
}

/* The number of drafts with the most expected tokens a second. Within a sequence each further draft is worth less than the one
 * before, so any beginning of the order by worth is a choice that can be made. */
static void choose_by_goodput(struct speculate *spec, uint32_t n, uint32_t n_decodes)
{
    double tokens = n_decodes, plain = tokens / step_cost_of(&spec->cost, n_decodes), best = least_gain * plain;
    uint32_t n_best = 0, n_order = 0;
    struct candidate *next;

    while (n_order < spec->options.most_drafts && (next = most_promising(spec, n))) {
        tokens += next->reach;
        next->reach *= next->share;
        next->n++;
        spec->order[n_order++] = (uint32_t)(next - spec->candidates);
        double goodput = tokens / step_cost_of(&spec->cost, n_decodes + n_order);
        if (goodput > best) {
            best = goodput;
            n_best = n_order;
        }
    }
    while (n_order > n_best)
        spec->candidates[spec->order[--n_order]].n--;
    spec->options.metrics->spec_goodput_gain = n_best ? best / plain : 1;
}

/* Those that have had none for a while try one. */
static void add_probes(struct speculate *spec, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        struct candidate *c = &spec->candidates[i];
        if (c->n == 0 && ++c->slot->idle >= c->slot->probe_wait)
            c->n = 1;
        if (c->n)
            c->slot->idle = 0;
    }
}

/* What followed the match, and, where that runs into the drafts, the drafts themselves: a period goes on. */
static void write_drafts(struct candidate *c)
{
    struct sequence *seq = c->seq;

    for (uint32_t i = 0; i < c->n; i++)
        seq->ids[seq->n_ids + i] = seq->ids[c->at + i];
    seq->n_drafts = c->n;
}

void speculate_propose(struct speculate *spec, struct sequence *const *running, uint32_t n_running)
{
    uint32_t n_decodes, n = find_candidates(spec, running, n_running, &n_decodes), total = 0, n_drafting = 0;

    if (spec->options.fixed) {
        for (uint32_t i = 0; i < n; i++)
            spec->candidates[i].n = spec->candidates[i].most;
    } else if (n && (n_decodes > STEP_COST_ROWS || step_cost_fresh(&spec->cost, n_decodes, PLAIN_EVERY))) {
        choose_by_goodput(spec, n, n_decodes);
        add_probes(spec, n);
    } /* else the cost of a plain step is to be measured */
    for (uint32_t i = 0; i < n; i++) {
        struct candidate *c = &spec->candidates[i];
        if (c->n > spec->options.most_drafts - total)
            c->n = spec->options.most_drafts - total;
        total += c->n;
        write_drafts(c);
        if (c->n) {
            n_drafting++;
            spec->options.metrics->spec_limit = c->slot->limit;
        }
    }
    spec->options.metrics->spec_sequences = n_drafting;
}

/* ---- what came of them ----------------------------------------------------------------------------------------------------- */

static void learn(struct rate *rate, double length, uint32_t tried, uint32_t accepted)
{
    for (uint32_t i = 0; i < tried; i++) {
        rate->tried += 1 - rate->tried / length;
        rate->accepted += (i < accepted) - rate->accepted / length;
    }
}

static void move_limit(struct speculate *spec, struct speculator *slot, uint32_t n_proposed, uint32_t n_accepted)
{
    slot->drafted += n_proposed - slot->drafted / window;
    slot->accepted += n_accepted - slot->accepted / window;
    if (++slot->since_move < MOVE_EVERY || spec->options.fixed)
        return;
    double share = slot->accepted / slot->drafted;
    slot->since_move = 0;
    if (share > raise_over && slot->limit < spec->most)
        slot->limit++;
    else if (share < lower_under && slot->limit > spec->least)
        slot->limit--;
}

void speculate_verified(struct speculate *spec, const struct sequence *seq, uint32_t n_proposed, uint32_t n_accepted, bool ended)
{
    struct speculator *slot = &spec->slots[seq->slot];
    struct engine_metrics *m = spec->options.metrics;
    uint32_t tried = n_accepted + (n_accepted < n_proposed && !ended);

    learn(&slot->rates[slot->level], window, tried, n_accepted);
    learn(&spec->rates[slot->level], window_all, tried, n_accepted);
    move_limit(spec, slot, n_proposed, n_accepted);
    if (n_accepted == n_proposed)
        slot->probe_wait = PROBE_SOON;
    else if (n_accepted == 0)
        slot->probe_wait = slot->probe_wait < PROBE_FIRST      ? PROBE_FIRST
                           : slot->probe_wait < PROBE_LAST / 2 ? 2 * slot->probe_wait
                                                               : PROBE_LAST;
    m->spec_verifications++;
    m->spec_drafted += n_proposed;
    m->spec_accepted += n_accepted;
    for (uint32_t i = 0; i < n_accepted && i < SPEC_POSITIONS; i++)
        m->spec_accepted_at[i]++;
}

void speculate_timed(struct speculate *spec, const struct step_plan *plan, double seconds)
{
    if (plan->n_rows == plan->n_decodes + plan->n_drafts)
        step_cost_add(&spec->cost, plan->n_rows, seconds);
}
