#include "gpu-worker/engine/speculate.h"
#include "gpu-worker/engine/clock.h"
#include <stdlib.h>
#include "gpu-worker/engine/ngram.h"
#include "gpu-worker/engine/step.h"
#include "gpu-worker/engine/step_cost.h"

enum { BY_MODEL = NGRAM_LEVELS, LEVELS }; /* where a guess comes from: one of the runs of ngram.h, or the model */
enum {
    CATCH_UP_ALONE = 256, /* rows of missing KV in one step */
    CATCH_UP_BESIDE = 64, /* the same while other sequences wait for it */
    NEAR = 64,            /* tokens of missing KV that are always computed for drafts by the model */
    ONE_IN = 16,          /* sequences that try the model however badly it did before */
    TRIED = 8,            /* drafts after which a sequence's own acceptance counts */
    MOVE_EVERY = 5,       /* verifications between two moves of a limit */
    PROBE_SOON = 2,       /* steps without drafts before one is tried: after a success, */
    PROBE_FIRST = 16,     /* at first and after a failure, */
    PROBE_LAST = 256,     /* and at most, after many */
    PLAIN_EVERY = 256,    /* steps before one without drafts is measured again */
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
    struct rate rates[LEVELS];
    uint32_t n_drafted_kv;     /* ids whose KV the drafter has */
    uint32_t idle, probe_wait; /* steps that could have had drafts and did not; how many of them until one is tried */
    struct ngram ngram;
};

/* A sequence that could have drafts in this step. */
struct candidate {
    struct sequence *seq;
    struct speculator *slot;
    uint32_t at, most, n; /* what follows ids[at] is the guess; most drafts; drafts chosen */
    double share, reach;  /* probability of one more draft; of all up to the next one */
    bool by_model;        /* the drafter makes them */
};

struct speculate {
    struct speculate_options options;
    uint32_t least, most;
    struct speculator *slots;         /* [n_slots] */
    struct candidate *candidates;     /* [n_slots] */
    uint32_t *order;                  /* [most_drafts] candidates by the worth of their next draft */
    struct rate rates[LEVELS];        /* of all sequences */
    struct draft_order *model_orders; /* [n_slots] */
    struct step_cost cost;
    double model_seconds; /* of one draft by the model, for all sequences at once; 0 = not measured yet */
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
    spec->model_orders = calloc(options->n_slots, sizeof *spec->model_orders);
    for (int i = 0; i < LEVELS; i++)
        spec->rates[i] = (struct rate){4, 2};
    if (!spec->slots || !spec->candidates || !spec->order || !spec->model_orders) {
        spec->options.drafter = NULL;
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
    free(spec->model_orders);
    drafter_close(spec->options.drafter);
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
    for (int i = 0; i < LEVELS; i++)
        slot->rates[i] = (struct rate){0};
    slot->n_drafted_kv = spec->options.drafter ? drafter_covered(spec->options.drafter, seq) : 0;
    ngram_reset(&slot->ngram, seq->limit);
    return slot;
}

/* The chance that a draft is accepted where those before it were: the sequence's own, beginning with what is known of all. */
static double chance(const struct speculate *spec, const struct speculator *slot)
{
    const struct rate *own = &slot->rates[slot->level], *all = &spec->rates[slot->level];
    return (own->accepted + prior_weight * all->accepted / all->tried) / (own->tried + prior_weight);
}

/* A guess from the context, as good as the sequence's runs of that length were so far. */
static bool guess_from_context(struct speculate *spec, struct candidate *c)
{
    if (!spec->options.ngram)
        return false;
    c->at = ngram_find(&c->slot->ngram, c->seq->ids, c->seq->n_ids, &c->slot->level);
    return c->at != 0;
}

/* Whether the model may be asked. Where it lacks much KV, as at first or after a long time of doing without it, only for a
 * sequence that does not know yet how well the model does, if it did well for others or one of them is to try again. */
static bool guess_from_model(const struct speculate *spec, const struct candidate *c)
{
    const struct rate *own = &c->slot->rates[BY_MODEL], *all = &spec->rates[BY_MODEL];

    if (!spec->options.drafter || c->seq->n_ids + c->most > drafter_longest(spec->options.drafter))
        return false;
    return spec->options.fixed || c->seq->n_ids - c->slot->n_drafted_kv <= NEAR ||
           (own->tried < TRIED && (all->accepted > 0.3 * all->tried || c->seq->number % ONE_IN == 0));
}

/* Where the sequence's guess of this step comes from; false: there is none. */
static bool find_guess(struct speculate *spec, struct candidate *c)
{
    struct speculator *slot = c->slot;
    bool from_context = guess_from_context(spec, c);

    if (from_context)
        c->share = chance(spec, slot);
    if (!guess_from_model(spec, c))
        return from_context;
    uint32_t level = slot->level;
    slot->level = BY_MODEL;
    double share = chance(spec, slot);
    c->by_model = !from_context || share > c->share;
    if (c->by_model)
        c->share = share;
    else
        slot->level = level;
    return true;
}

static uint32_t find_candidates(struct speculate *spec, struct sequence *const *running, uint32_t n_running, uint32_t *n_decodes)
{
    uint32_t n = 0;

    *n_decodes = 0;
    for (uint32_t i = 0; i < n_running; i++) {
        struct sequence *seq = running[i];
        seq->n_drafts = 0;
        seq->draft_probs = NULL;
        if (sequence_pending(seq) != 1)
            continue;
        ++*n_decodes;
        struct speculator *slot = slot_of(spec, seq);
        uint32_t room = seq->limit - seq->n_ids - 1;
        struct candidate c = {.seq = seq, .slot = slot, .most = slot->limit < room ? slot->limit : room};
        if (slot->n_drafted_kv >= seq->n_ids)
            slot->n_drafted_kv = seq->n_ids - 1; /* drafts behind it were rejected */
        if (c.most == 0 || !find_guess(spec, &c))
            continue;
        c.reach = c.share;
        spec->candidates[n++] = c;
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
    uint32_t n_best = 0, n_order = 0, depth = 0; /* depth: drafts by the model, one after the other */
    struct candidate *next;

    while (n_order < spec->options.most_drafts && (next = most_promising(spec, n))) {
        tokens += next->reach;
        next->reach *= next->share;
        next->n++;
        spec->order[n_order++] = (uint32_t)(next - spec->candidates);
        if (next->by_model && next->n > depth)
            depth = next->n;
        double cost = step_cost_of(&spec->cost, n_decodes + n_order) + depth * spec->model_seconds, goodput = tokens / cost;
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
static void copy_drafts(struct candidate *c)
{
    struct sequence *seq = c->seq;

    for (uint32_t i = 0; i < c->n; i++)
        seq->ids[seq->n_ids + i] = seq->ids[c->at + i];
}

/* Blocks for drafts by the model, as far as every running sequence can still get one. */
static bool has_blocks(struct speculate *spec, struct candidate *c, uint32_t n_running)
{
    struct kv_cache *cache = spec->options.cache;
    return cache_available(cache) > n_running + 1 && cache_grow(cache, &c->seq->held, c->seq->n_ids + c->n) == 0;
}

static void ask_model(struct speculate *spec, uint32_t n, uint32_t n_running)
{
    uint32_t n_orders = 0, at = 0;
    bool near = true; /* no more than a token or two of KV are missing: what it takes can be told of others */

    for (uint32_t i = 0; i < n; i++) {
        struct candidate *c = &spec->candidates[i];
        if (!c->by_model || c->n == 0)
            continue;
        if (!has_blocks(spec, c, n_running))
            c->n = 0;
        else
            spec->model_orders[n_orders++] = (struct draft_order){.seq = c->seq, .n_computed = c->slot->n_drafted_kv, .n = c->n};
        near &= c->seq->n_ids - c->slot->n_drafted_kv <= 2;
    }
    if (n_orders == 0)
        return;
    double start = clock_now();
    uint32_t made =
        drafter_run(spec->options.drafter, spec->model_orders, n_orders, n_running > 1 ? CATCH_UP_BESIDE : CATCH_UP_ALONE);
    double seconds = (clock_now() - start) / made;
    if (near)
        spec->model_seconds += spec->model_seconds > 0 ? 0.2 * (seconds - spec->model_seconds) : seconds;
    for (uint32_t i = 0; i < n; i++) {
        struct candidate *c = &spec->candidates[i];
        if (!c->by_model || c->n == 0)
            continue;
        c->n = spec->model_orders[at].n;
        c->slot->n_drafted_kv = spec->model_orders[at++].n_computed;
    }
}

/* What was chosen is written, within the most that a step may have. */
static void write_drafts(struct speculate *spec, uint32_t n, uint32_t n_running)
{
    struct engine_metrics *m = spec->options.metrics;
    uint32_t left = spec->options.most_drafts, n_drafting = 0;

    for (uint32_t i = 0; i < n; i++) {
        struct candidate *c = &spec->candidates[i];
        c->n = c->n < left ? c->n : left;
        left -= c->n;
        if (!c->by_model)
            copy_drafts(c);
    }
    ask_model(spec, n, n_running);
    for (uint32_t i = 0; i < n; i++) {
        struct candidate *c = &spec->candidates[i];
        c->seq->n_drafts = c->n;
        if (c->n) {
            n_drafting++;
            m->spec_limit = c->slot->limit;
        }
    }
    m->spec_sequences = n_drafting;
}

void speculate_propose(struct speculate *spec, struct sequence *const *running, uint32_t n_running)
{
    uint32_t n_decodes, n = find_candidates(spec, running, n_running, &n_decodes);

    if (spec->options.fixed) {
        for (uint32_t i = 0; i < n; i++)
            spec->candidates[i].n = spec->candidates[i].most;
    } else if (n && step_cost_fresh(&spec->cost, n_decodes, PLAIN_EVERY)) {
        choose_by_goodput(spec, n, n_decodes);
        add_probes(spec, n);
    } /* else the cost of a plain step is to be measured, or the batch is so large that none is */
    write_drafts(spec, n, n_running);
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
