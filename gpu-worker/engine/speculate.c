#include "gpu-worker/engine/speculate.h"
#include "gpu-worker/engine/clock.h"
#include <stdlib.h>
#include "gpu-worker/engine/chance.h"
#include "gpu-worker/engine/copied.h"
#include "gpu-worker/engine/step.h"
#include "gpu-worker/engine/step_cost.h"

enum {
    CATCH_UP_ALONE = 256, /* rows of missing KV in one step */
    CATCH_UP_BESIDE = 64, /* the same while other sequences wait for it */
    NEAR = 8,             /* tokens of missing KV that are always computed for drafts by the model */
    ONE_IN = 16,          /* sequences that try the model however badly it did before */
    MOVE_EVERY = 2,       /* verifications between two moves of a limit */
    PROBE_SOON = 2,       /* steps without drafts before one is tried: after a success, */
    PROBE_FIRST = 16,     /* at first and after a failure, */
    PROBE_LAST = 256,     /* and at most, after many */
    PLAIN_EVERY = 256,    /* steps before one without drafts is measured again */
    MOST_DRAFTS = 32,     /* of one sequence */
    LASTS = 64,           /* tokens that an answer is expected to have left at least, within its limit */
    USUAL_PROMPT = 16,    /* rows of a prompt that is not known yet */
    LONG_RUN = 2,         /* drafts accepted behind two tokens that matched: the copy goes on there */
    RECENT = 64,          /* tokens that tell whether brief drafts will do */
    COPIES = 15,          /* drafts at once in a copy: with the row that they follow, a tile of products on a CPU */
    UNPROVEN = 4,         /* drafts from the context, in one step, of sequences that have proven nothing */
};
static const double most_beyond = 0.1;                   /* share of recent tokens that a brief draft could not have been */
static const double window = 50;                         /* verifications that count */
static const double raise_over = 0.8, lower_under = 0.5; /* acceptance */
static const double least_gain = 1.04, worth_catching_up = 1.1;
static const double least_gain_beside = 1.15;    /* in a batch: those without drafts wait for what the drafts of others take */
static const double most_spare = 1;              /* steps: a burst of probes would be felt */
static const double at_first = 30, fades = 0.05; /* steps left for probes before anything is known; what is not used, fades */
static const double for_probes = 0.005;          /* share of all time that drafts may take that do not seem to pay */

/* What is known of the sequence in a slot. */
struct speculator {
    uint64_t number; /* of the sequence + 1 */
    uint32_t preemptions;
    uint32_t limit, since_move;
    uint32_t in_a_row;         /* drafts accepted since the last one that was not */
    double drafted, accepted;  /* of the window */
    uint32_t behind;           /* the last run of four tokens and more stood so far back; 0 = none yet */
    uint32_t level;            /* of the match that this step's drafts follow, or BY_MODEL */
    uint8_t sure[MOST_DRAFTS]; /* by the model: the level of each draft */
    struct chance chance;
    uint32_t n_drafted_kv;     /* ids whose KV the drafter has */
    uint32_t n_looked;         /* ids that `beyond` knows */
    double beyond;             /* how many of the last RECENT are not among the first DRAFTER_BRIEF; fades */
    uint32_t idle, probe_wait; /* steps that could have had drafts and did not; how many of them until one is tried */
    struct copied copy;        /* what drafts from the context follow */
    struct ngram ngram;
};

/* A sequence that could have drafts in this step. */
struct candidate {
    struct sequence *seq;
    struct speculator *slot;
    uint32_t at, most, n;      /* what follows ids[at] is the guess; most drafts; drafts chosen */
    double share;              /* probability of one more draft */
    double worth[MOST_DRAFTS]; /* probability that this draft and all before it are accepted */
    bool by_model;             /* the drafter makes them */
    struct draft_order *order; /* of it; NULL where it is not asked */
    bool trial;                /* the drafter lacks KV of it, which is computed in time that is spare */
    bool probe;                /* one is made though it does not seem to pay */
};

struct speculate {
    struct speculate_options options;
    uint32_t least, most;
    struct speculator *slots;            /* [n_slots] */
    struct candidate *candidates;        /* [n_slots] */
    uint32_t *order;                     /* [most_drafts] candidates by the worth of their next draft */
    struct chance_all chances;           /* of all sequences */
    struct draft_order *model_orders;    /* [n_slots] */
    struct step_cost costs[2];           /* of steps by rows: without prompt rows, which need no logits, and with some */
    struct step_cost *cost;              /* of the step to come: one of these */
    struct step_cost model_cost;         /* of the drafter's rounds, by rows */
    double model_gain;                   /* by drafts of the model in this step's batch; see gain_by_model */
    double spare, most_spare;            /* seconds that are left for probes; what they go up to */
    double charged, charged_rows;        /* of it, in this step, for what the drafter will take; for rows of probes */
    uint32_t n_probes;                   /* in this step */
    uint32_t last_prefill, last_waiting; /* prompt rows of the last step; sequences that waited before it */
    uint32_t n_decodes, base;            /* of the step to come: decode rows; all rows without drafts */
    double plain_tokens;                 /* of it without drafts: the tokens that its time is worth; see value_of_plain */
    bool brief;                          /* the drafter's rounds of this step */
};

int speculate_open(struct speculate **out, const struct speculate_options *options, struct kvg_error *err)
{
    uint32_t most = options->start > options->fixed ? options->start : options->fixed;
    struct speculate *spec;

    if (most > MOST_DRAFTS)
        return kvg_fail(err, KVG_INVALID, "%u drafts of a sequence at once; the most is %d", most, MOST_DRAFTS);
    if (!(spec = calloc(1, sizeof *spec)))
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
    chance_init(&spec->chances);
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
    slot->since_move = slot->idle = slot->in_a_row = 0;
    slot->drafted = slot->accepted = 0;
    slot->probe_wait = PROBE_FIRST;
    slot->chance = (struct chance){0};
    slot->behind = 0;
    slot->copy = (struct copied){0};
    slot->n_looked = seq->n_ids > RECENT ? seq->n_ids - RECENT : 0;
    slot->beyond = 0;
    slot->n_drafted_kv = spec->options.drafter ? drafter_covered(spec->options.drafter, seq) : 0;
    ngram_reset(&slot->ngram, seq->limit, spec->options.runs);
    return slot;
}

static double chance(const struct speculate *spec, const struct speculator *slot, uint32_t level)
{
    return chance_of(&spec->chances, &slot->chance, level);
}

/* A guess from the context, as good as the sequence's runs of that length were so far. Where none is found, or one elsewhere, the
 * text may go on beside the last long one, with a token changed: a copy with edits.
 *
 *   ... self . width = width ...  ...  this . width
 *            ^ this far behind              ^ the next token
 */
static bool guess_from_context(struct speculate *spec, struct candidate *c)
{
    struct speculator *slot = c->slot;
    uint32_t n_ids = c->seq->n_ids;

    if (!spec->options.ngram)
        return false;
    c->at = ngram_find(&slot->ngram, c->seq->ids, n_ids, &slot->level);
    bool long_run = c->at && slot->level < NGRAM_LEVELS - 1, goes_on = long_run && n_ids - c->at == slot->behind;
    if (slot->behind && !goes_on && (!c->at || chance(spec, slot, BESIDE) > chance(spec, slot, slot->level))) {
        c->at = n_ids - slot->behind;
        slot->level = BESIDE;
    } else if (long_run) {
        slot->behind = n_ids - c->at;
    }
    return c->at != 0;
}

/* What a round of the drafter takes; 0 until it was measured. */
static double round_cost(const struct speculate *spec, uint32_t rows)
{
    return spec->model_cost.now && rows ? step_cost_of(&spec->model_cost, rows) : 0;
}

/* Tokens a second with drafts by the model for n sequences that all decode, over those without; at best. */
static double gain_by_model(const struct speculate *spec, uint32_t n)
{
    double share = spec->chances.rates[BY_MODEL].accepted / spec->chances.rates[BY_MODEL].tried, reach = 1, tokens = 1, best = 0;
    double plain = step_cost_of(&spec->costs[0], n), round = round_cost(spec, n);

    for (uint32_t k = 1; k <= spec->options.start; k++) {
        tokens += reach *= share;
        double gain = tokens * plain / (step_cost_of(&spec->costs[0], n + k * n) + k * round);
        best = gain > best ? gain : best;
    }
    return best;
}

/* Whether the time that the missing KV takes is saved again: drafts pay well in a batch like this one, and the answer goes on
 * for as long as it is now, or for LASTS. */
static bool worth_its_kv(const struct speculate *spec, const struct sequence *seq, uint32_t missing)
{
    uint32_t answered = seq->n_ids - seq->n_prompt, left = seq->limit - seq->n_ids, ahead = answered > LASTS ? answered : LASTS;
    double saved = step_cost_of(&spec->costs[0], spec->n_decodes) / spec->n_decodes * (1 - 1 / spec->model_gain);

    return spec->model_gain > worth_catching_up && round_cost(spec, missing) <= saved * (ahead < left ? ahead : left);
}

/* Whether there is time for a probe, or for once, since more is never saved, for a part of it: the rest is saved afterwards. */
static bool affords(const struct speculate *spec, double price)
{
    return spec->spare >= (price < spec->most_spare ? price : spec->most_spare);
}

/* Whether the model may be asked. Where it lacks KV, as at first or after a time of doing without it, only if that is worth it,
 * or if there is time to spare and the sequence is one of those that try. */
static bool guess_from_model(const struct speculate *spec, struct candidate *c)
{
    uint32_t missing = c->seq->n_ids - c->slot->n_drafted_kv;

    if (!spec->options.drafter || c->seq->n_ids + c->most > drafter_longest(spec->options.drafter))
        return false;
    if (spec->options.fixed || missing <= NEAR || worth_its_kv(spec, c->seq, missing))
        return true;
    c->trial = c->seq->number % ONE_IN == 0 && affords(spec, round_cost(spec, missing));
    return c->trial;
}

/* Where the sequence's guess of this step comes from; false: there is none. */
static bool find_guess(struct speculate *spec, struct candidate *c)
{
    struct speculator *slot = c->slot;
    bool from_context = guess_from_context(spec, c);

    if (from_context)
        c->share = chance(spec, slot, slot->level);
    if (!guess_from_model(spec, c))
        return from_context;
    double share = chance(spec, slot, BY_MODEL);
    c->by_model = !from_context || share > c->share;
    if (c->by_model) {
        c->share = share;
        slot->level = BY_MODEL;
    }
    return true;
}

/* Whether the drafter's short list of ids will do for the sequence: its tokens are on it. */
static void look_beyond(struct speculator *slot, const struct sequence *seq)
{
    for (; slot->n_looked < seq->n_ids; slot->n_looked++)
        slot->beyond += (seq->ids[slot->n_looked] >= DRAFTER_BRIEF) - slot->beyond / RECENT;
}

/* Drafts from the context of a sequence that has proven nothing yet: nearly always they are all accepted or none is. */
static bool unproven(const struct speculate *spec, const struct candidate *c)
{
    return !c->by_model && !c->slot->chance.proven && !spec->options.fixed;
}

/* Drafts that the sequence may have. In a copy a further draft from the context costs a row and no time of a drafter: there it
 * may have COPIES at once, and as many as were accepted since the last that was not. */
static uint32_t most_of(const struct speculate *spec, const struct candidate *c, uint32_t room)
{
    bool copies = !c->by_model && !spec->options.fixed && c->share > raise_over;
    uint32_t most = c->slot->limit;

    if (copies) {
        most = most > COPIES ? most : COPIES;
        most = most > c->slot->in_a_row ? most : c->slot->in_a_row;
    }
    if (unproven(spec, c)) {
        uint32_t share = UNPROVEN > spec->n_decodes ? UNPROVEN / spec->n_decodes : 1;
        most = most < share ? most : share;
    }
    most = most < MOST_DRAFTS ? most : MOST_DRAFTS;
    return most < room ? most : room;
}

/* The tokens that a step without drafts counts as. Prompt rows are work, too, and what drafts take they wait for: a step with
 * some counts as what its time would give if all n sequences decoded, as they soon will. */
static double value_of_plain(const struct speculate *spec, uint32_t n)
{
    if (spec->cost == &spec->costs[0] || spec->costs[0].now == 0)
        return spec->n_decodes;
    double worth = step_cost_of(spec->cost, spec->base) * n / step_cost_of(&spec->costs[0], n);
    return worth > spec->n_decodes ? worth : spec->n_decodes;
}

/* Those that wait begin in the step to come, unless the last step had no room for any. */
static uint32_t count_coming(struct speculate *spec, uint32_t n_running, uint32_t n_waiting)
{
    bool blocked = spec->last_waiting && !spec->last_prefill;
    uint32_t slots = spec->options.n_slots - n_running;

    spec->last_waiting = n_waiting;
    return blocked ? 0 : n_waiting < slots ? n_waiting : slots;
}

/* The step to come without drafts. */
static void look_at_batch(struct speculate *spec, struct sequence *const *running, uint32_t n_running, uint32_t n_waiting)
{
    uint32_t coming = count_coming(spec, n_running, n_waiting), pending = coming * USUAL_PROMPT;

    spec->n_decodes = spec->n_probes = 0;
    spec->charged_rows = 0;
    for (uint32_t i = 0; i < n_running; i++) {
        uint32_t rows = sequence_pending(running[i]);
        running[i]->n_drafts = 0;
        running[i]->draft_probs = NULL;
        spec->n_decodes += rows == 1;
        pending += rows == 1 ? 0 : rows;
    }
    bool as_before = spec->last_prefill && pending > spec->last_prefill;
    spec->base = spec->n_decodes + (as_before ? spec->last_prefill : pending);
    spec->cost = &spec->costs[pending > 0];
    if (spec->options.drafter && spec->n_decodes)
        spec->model_gain = gain_by_model(spec, n_running + coming);
    spec->plain_tokens = value_of_plain(spec, n_running + coming);
}

static uint32_t find_candidates(struct speculate *spec, struct sequence *const *running, uint32_t n_running)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < n_running; i++) {
        struct sequence *seq = running[i];
        if (sequence_pending(seq) != 1)
            continue;
        struct speculator *slot = slot_of(spec, seq);
        uint32_t room = seq->limit - seq->n_ids - 1;
        struct candidate c = {.seq = seq, .slot = slot, .most = slot->limit < room ? slot->limit : room};
        if (slot->n_drafted_kv >= seq->n_ids)
            slot->n_drafted_kv = seq->n_ids - 1; /* drafts behind it were rejected */
        if (c.most == 0 || !find_guess(spec, &c))
            continue;
        c.most = most_of(spec, &c, room);
        spec->candidates[n++] = c;
    }
    return n;
}

/* ---- how many ---- */

static struct candidate *most_promising(struct speculate *spec, uint32_t n)
{
    struct candidate *best = NULL;

    for (uint32_t i = 0; i < n; i++) {
        struct candidate *c = &spec->candidates[i];
        if (c->n < c->most && (!best || c->worth[c->n] > best->worth[best->n]))
            best = c;
    }
    return best;
}

/* The number of drafts with the most expected tokens a second, of those that have a worth. Within a sequence each further draft
 * is worth less than the one before, so any beginning of the order by worth is a choice that can be made. `spent`: seconds that
 * the drafts took already, or negative: those of the model are still to be made, one after the other. */
static void choose_by_goodput(struct speculate *spec, uint32_t n, double spent)
{
    double tokens = spec->plain_tokens, plain = tokens / step_cost_of(spec->cost, spec->base),
           best = spent < 0 ? (spec->base > 1 ? least_gain_beside : least_gain) * plain : 0;
    uint32_t n_best = 0, n_order = 0, n_unproven = 0, depth = 0, drafting = 0;
    struct candidate *next;

    for (uint32_t i = 0; i < n; i++)
        spec->candidates[i].n = 0;
    if (spent >= 0)
        best = tokens / (step_cost_of(spec->cost, spec->base) + spent);
    while (n_order < spec->options.most_drafts && (next = most_promising(spec, n))) {
        if (unproven(spec, next) && n_unproven++ >= UNPROVEN) {
            next->most = next->n;
            continue;
        }
        tokens += next->worth[next->n++];
        spec->order[n_order++] = (uint32_t)(next - spec->candidates);
        if (next->by_model) {
            drafting += next->n == 1;
            depth = next->n > depth ? next->n : depth;
        }
        double cost = step_cost_of(spec->cost, spec->base + n_order) + (spent < 0 ? depth * round_cost(spec, drafting) : spent);
        if (tokens / cost > best) {
            best = tokens / cost;
            n_best = n_order;
        }
    }
    while (n_order > n_best)
        spec->candidates[spec->order[--n_order]].n--;
    spec->options.metrics->spec_goodput_gain = n_best ? best / plain : 1;
}

static void plan_by_goodput(struct speculate *spec, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        struct candidate *c = &spec->candidates[i];
        double reach = 1;
        for (uint32_t k = 0; k < c->most; k++)
            c->worth[k] = reach *= c->share;
    }
    choose_by_goodput(spec, n, -1);
}

/* Those that have had none for a while try one, as far as there is time to spare: in a large batch somebody's turn comes in
 * nearly every step. */
static void add_probes(struct speculate *spec, uint32_t n)
{
    double row = step_cost_of_row(spec->cost, spec->base);

    for (uint32_t i = 0; i < n; i++) {
        struct candidate *c = &spec->candidates[i];
        double round = c->by_model ? round_cost(spec, c->seq->n_ids - c->slot->n_drafted_kv) : 0, price = row + round;
        if (c->n == 0 && ++c->slot->idle >= c->slot->probe_wait && affords(spec, price)) {
            spec->spare -= price;
            spec->charged_rows += row;
            spec->n_probes++;
            spec->charged += round;
            c->n = 1;
            c->probe = true;
        }
        if (c->n)
            c->slot->idle = 0;
    }
}

/* ---- making them ---- */

/* Blocks for drafts by the model, as far as every running sequence can still get one. */
static bool has_blocks(struct speculate *spec, struct candidate *c, uint32_t n_running)
{
    struct kv_cache *cache = spec->options.cache;
    return cache_available(cache) > n_running + 1 && cache_grow(cache, &c->seq->held, c->seq->n_ids + c->n) == 0;
}

/* What the model is asked for: as many drafts as may turn out to pay, within what a step may have. */
static uint32_t place_orders(struct speculate *spec, uint32_t n, uint32_t n_running)
{
    uint32_t n_orders = 0, left = spec->options.most_drafts;

    spec->brief = true;
    for (uint32_t i = 0; i < n; i++) {
        struct candidate *c = &spec->candidates[i];
        if (!c->by_model || c->n == 0)
            continue;
        if (!c->probe)
            c->n = c->most;
        c->n = c->n < left ? c->n : left;
        if (c->n == 0 || !has_blocks(spec, c, n_running)) {
            c->n = 0;
            continue;
        }
        left -= c->n;
        look_beyond(c->slot, c->seq);
        spec->brief &= c->slot->beyond < most_beyond * RECENT;
        c->order = &spec->model_orders[n_orders++];
        *c->order = (struct draft_order){.seq = c->seq, .n_computed = c->slot->n_drafted_kv, .n = c->n};
    }
    return n_orders;
}

/* What the step comes to with the drafts made so far. */
struct outlook {
    double tokens, spent; /* expected; seconds that the drafts took */
    uint32_t rows, drafting;
};

static struct outlook look_out(const struct speculate *spec, uint32_t n, uint32_t made, double spent)
{
    struct outlook out = {.tokens = spec->plain_tokens, .spent = spent, .rows = spec->base};

    for (uint32_t i = 0; i < n; i++) {
        const struct candidate *c = &spec->candidates[i];
        uint32_t count = c->order && c->order->n > made ? made : c->order ? c->order->n : c->n;
        for (uint32_t k = 0; k < count; k++)
            out.tokens += c->worth[k];
        out.rows += count;
        out.drafting += c->order && c->order->n >= made;
    }
    return out;
}

/* Whether some number of further drafts of the sequence would raise the tokens a second. */
static bool more_pays(const struct speculate *spec, const struct candidate *c, uint32_t made, const struct outlook *now)
{
    double goodput = now->tokens / (step_cost_of(spec->cost, now->rows) + now->spent), tokens = now->tokens;
    double reach = c->worth[made - 1], round = round_cost(spec, now->drafting) / now->drafting;

    for (uint32_t more = 1; made + more <= c->order->n; more++) {
        reach *= c->share;
        tokens += reach;
        if (tokens / (step_cost_of(spec->cost, now->rows + more) + now->spent + more * round) > goodput)
            return true;
    }
    return false;
}

/* After a round: what its drafts are worth, by how sure the model was of each, and which sequences go on. */
static void weigh_round(struct speculate *spec, uint32_t n, uint32_t made, double spent)
{
    for (uint32_t i = 0; i < n; i++) {
        struct candidate *c = &spec->candidates[i];
        if (!c->order || c->order->n < made)
            continue;
        uint32_t level = chance_level(c->order->sure);
        c->slot->sure[made - 1] = (uint8_t)level;
        c->worth[made - 1] = (made > 1 ? c->worth[made - 2] : 1) * chance(spec, c->slot, level);
    }
    if (spec->options.fixed)
        return;
    struct outlook out = look_out(spec, n, made, spent);
    for (uint32_t i = 0; i < n; i++) {
        struct candidate *c = &spec->candidates[i];
        if (c->order && c->order->n > made && !more_pays(spec, c, made, &out))
            c->order->n = made;
    }
}

/* Returns the seconds it took; 0: nobody asked. */
static double ask_model(struct speculate *spec, uint32_t n, uint32_t n_running)
{
    uint32_t n_orders = place_orders(spec, n, n_running), most = n_running > 1 ? CATCH_UP_BESIDE : CATCH_UP_ALONE, rows;
    double spent = 0;

    if (n_orders == 0)
        return 0;
    drafter_begin(spec->options.drafter, spec->model_orders, n_orders);
    for (uint32_t made = 0;; made++) {
        double start = clock_now();
        rows = drafter_round(spec->options.drafter, spec->model_orders, n_orders, made, most, spec->brief);
        if (rows == 0)
            break;
        double seconds = clock_now() - start;
        step_cost_add(&spec->model_cost, rows, seconds);
        weigh_round(spec, n, made + 1, spent += seconds);
    }
    for (uint32_t i = 0; i < n; i++) {
        struct candidate *c = &spec->candidates[i];
        if (!c->order)
            continue;
        c->n = c->order->n;
        c->slot->n_drafted_kv = c->order->n_computed;
    }
    return spent;
}

/* Now that the model's drafts are known, only those that are worth their row are verified. By rejection they all are: a draft
 * that is thrown away for what it is would change the distribution. */
static void drop_poor_drafts(struct speculate *spec, uint32_t n, double spent)
{
    if (spec->options.keep_all || spec->options.fixed)
        return;
    for (uint32_t i = 0; i < n; i++) {
        struct candidate *c = &spec->candidates[i];
        if (c->by_model)
            c->most = c->order ? c->n : 0;
    }
    choose_by_goodput(spec, n, spent);
    for (uint32_t i = 0; i < n; i++) {
        struct candidate *c = &spec->candidates[i];
        if (c->probe && c->n == 0 && (!c->by_model || (c->order && c->order->n)))
            c->n = 1; /* it was paid for */
    }
}

/* Whether nobody would have asked the model in this step but for those that only try it. */
static bool only_trials(const struct speculate *spec, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        const struct candidate *c = &spec->candidates[i];
        if (c->order && !c->probe && !c->trial)
            return false;
    }
    return true;
}

/* What was chosen is written, within the most that a step may have. */
static void write_drafts(struct speculate *spec, uint32_t n, uint32_t n_running)
{
    struct engine_metrics *m = spec->options.metrics;
    uint32_t left = spec->options.most_drafts, n_drafting = 0;
    double spent = ask_model(spec, n, n_running);

    if (only_trials(spec, n))
        spec->spare -= spent - spec->charged;
    spec->charged = 0;
    if (spent > 0)
        drop_poor_drafts(spec, n, spent);
    for (uint32_t i = 0; i < n; i++) {
        struct candidate *c = &spec->candidates[i];
        c->n = c->n < left ? c->n : left;
        left -= c->n;
        if (!c->by_model)
            copied_draft(&c->slot->copy, c->seq->ids, c->seq->n_ids, c->at, c->n);
        c->seq->n_drafts = c->n;
        if (c->n) {
            n_drafting++;
            m->spec_limit = c->seq->speculation.most = c->most > c->slot->limit ? c->most : c->slot->limit;
            c->seq->speculation.gain = m->spec_goodput_gain;
        }
    }
    m->spec_sequences = n_drafting;
}

void speculate_propose(struct speculate *spec, struct sequence *const *running, uint32_t n_running, uint32_t n_waiting)
{
    look_at_batch(spec, running, n_running, n_waiting);
    uint32_t n = find_candidates(spec, running, n_running);

    if (spec->options.fixed) {
        for (uint32_t i = 0; i < n; i++)
            spec->candidates[i].n = spec->candidates[i].most;
    } else if (n && step_cost_fresh(spec->cost, spec->base, PLAIN_EVERY)) {
        plan_by_goodput(spec, n);
        add_probes(spec, n);
    } /* else the cost of a plain step is to be measured */
    write_drafts(spec, n, n_running);
}

/* ---- what came of them ----------------------------------------------------------------------------------------------------- */

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

    if (slot->level == BY_MODEL)
        chance_learn_model(&spec->chances, &slot->chance, slot->sure, tried, n_accepted);
    else
        chance_learn_context(&spec->chances, &slot->chance, slot->level, tried, n_accepted);
    move_limit(spec, slot, n_proposed, n_accepted);
    if (slot->level != BY_MODEL)
        copied_verified(&slot->copy, seq->ids, seq->n_ids, n_accepted);
    if (slot->level != BY_MODEL && n_accepted >= LONG_RUN)
        slot->behind = slot->copy.offset;
    slot->in_a_row = n_accepted < n_proposed ? 0 : slot->in_a_row + n_accepted;
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

/* A step whose drafts are all probes tells what they took: the price was an estimate. One step's time is chance, too, so the
 * correction is at most the price. */
static void settle_probes(struct speculate *spec, const struct step_plan *plan, double seconds)
{
    double paid = spec->charged_rows, more = seconds - step_cost_of(spec->cost, spec->base) - paid;

    if (plan->n_drafts && plan->n_drafts == spec->n_probes && plan->n_rows == spec->base + plan->n_drafts)
        spec->spare -= more < -paid ? -paid : more < paid ? more : paid;
}

void speculate_timed(struct speculate *spec, const struct step_plan *plan, double seconds)
{
    settle_probes(spec, plan, seconds);
    spec->last_prefill = plan->n_rows - plan->n_decodes - plan->n_drafts;
    spec->spare += for_probes * seconds;
    if (!spec->last_prefill) {
        spec->spare += spec->most_spare > 0 ? 0 : at_first * seconds;
        spec->most_spare = most_spare * seconds;
    }
    if (spec->spare > spec->most_spare)
        spec->spare += fades * (spec->most_spare - spec->spare);
    step_cost_add(&spec->costs[spec->last_prefill > 0], plan->n_rows, seconds);
}
