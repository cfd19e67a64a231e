#include "gpu-worker/engine/scheduler.h"
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/log.h"

enum { DECODE_BACKLOG = 16, MOST_PASSED = 64, SHORT_PROMPT = 512, SHORT_WEIGHT = 4 };

int sched_init(struct scheduler *sched, const struct scheduler_options *options, struct kv_cache *cache, struct kvg_error *err)
{
    *sched = (struct scheduler){.options = *options, .cache = cache};
    sched->running = calloc(options->max_num_seqs, sizeof *sched->running);
    sched->free_slots = calloc(options->max_num_seqs, sizeof *sched->free_slots);
    if (!sched->running || !sched->free_slots)
        return kvg_fail(err, KVG_NOMEM, "no memory for %u running sequences", options->max_num_seqs);
    for (uint32_t i = 0; i < options->max_num_seqs; i++)
        sched->free_slots[i] = options->max_num_seqs - 1 - i;
    pacing_init(&sched->pacing, options->max_rows, options->fixed_chunk);
    sched->pacing.unit = options->chunk_unit;
    return 0;
}

void sched_free(struct scheduler *sched)
{
    free(sched->running);
    free(sched->free_slots);
    sched->running = NULL;
    sched->free_slots = NULL;
}

/* ---- the order, the waiting list, the running array ----------------------------------------------------------------------- */

static bool goes_before(const struct sequence *a, const struct sequence *b)
{
    return a->key != b->key ? a->key < b->key : a->number < b->number;
}

/* From the young end: new arrivals land there. */
static void wait_in_order(struct scheduler *sched, struct sequence *seq)
{
    struct sequence *older = sched->youngest;
    while (older && goes_before(seq, older))
        older = older->older;
    seq->older = older;
    seq->younger = older ? older->younger : sched->oldest;
    *(older ? &older->younger : &sched->oldest) = seq;
    *(seq->younger ? &seq->younger->older : &sched->youngest) = seq;
    seq->state = SEQUENCE_WAITING;
    sched->n_waiting++;
    sched->n_waiting_warm += seq->request->warm;
}

static void leave_waiting(struct scheduler *sched, struct sequence *seq)
{
    *(seq->older ? &seq->older->younger : &sched->oldest) = seq->younger;
    *(seq->younger ? &seq->younger->older : &sched->youngest) = seq->older;
    sched->n_waiting--;
    sched->n_waiting_warm -= seq->request->warm;
}

static void run_in_order(struct scheduler *sched, struct sequence *seq)
{
    seq->slot = sched->free_slots[sched->options.max_num_seqs - sched->n_running - 1];
    uint32_t at = sched->n_running++;
    for (; at && goes_before(seq, sched->running[at - 1]); at--)
        sched->running[at] = sched->running[at - 1];
    sched->running[at] = seq;
    seq->state = SEQUENCE_RUNNING;
}

static void leave_running(struct scheduler *sched, struct sequence *seq)
{
    uint32_t at = 0;
    while (sched->running[at] != seq)
        at++;
    sched->n_running--;
    sched->free_slots[sched->options.max_num_seqs - sched->n_running - 1] = seq->slot;
    memmove(sched->running + at, sched->running + at + 1, (sched->n_running - at) * sizeof *sched->running);
    cache_release(sched->cache, &seq->held);
}

/* Waiting that a priority is worth: 10 s for level 1, and below two minutes whatever the number, so that the last of all is the
 * oldest after four minutes. Grows with the number throughout. */
static double seconds_of(int32_t priority)
{
    double level = priority;
    return 120 * level / ((level < 0 ? -level : level) + 11);
}

void sched_add(struct scheduler *sched, struct sequence *seq, double now)
{
    seq->key = sched->options.priority_scheduling ? now + seconds_of(seq->request->params.priority) : 0;
    seq->number = sched->n_added++;
    wait_in_order(sched, seq);
}

void sched_remove(struct scheduler *sched, struct sequence *seq)
{
    if (seq->state == SEQUENCE_WAITING)
        leave_waiting(sched, seq);
    else if (seq->state == SEQUENCE_RUNNING)
        leave_running(sched, seq);
    seq->state = SEQUENCE_DONE;
}

/* ---- out of blocks -------------------------------------------------------------------------------------------------------- */

static void preempt(struct scheduler *sched, struct sequence *seq)
{
    leave_running(sched, seq);
    seq->n_computed = 0;
    seq->preemptions++;
    sched->n_preemptions++;
    wait_in_order(sched, seq);
}

static uint32_t share_duplicates(struct scheduler *sched)
{
    uint32_t freed = 0;
    for (uint32_t i = 0; i < sched->n_running; i++)
        freed += cache_share(sched->cache, &sched->running[i]->held);
    return freed;
}

/* Room for all of the sequence's ids; the youngest pay for it. False: it was the youngest itself, and waits now. */
static bool make_room(struct scheduler *sched, struct sequence *seq)
{
    while (cache_grow(sched->cache, &seq->held, seq->n_ids) < 0) {
        if (share_duplicates(sched))
            continue;
        if (sched->n_running == 1)
            log_fatal("scheduler: %u tokens do not fit the KV cache though nothing else runs", seq->n_ids);
        struct sequence *youngest = sched->running[sched->n_running - 1];
        preempt(sched, youngest);
        if (youngest == seq)
            return false;
    }
    return true;
}

/* ---- admission ------------------------------------------------------------------------------------------------------------ */

/* How many leading blocks two sequences share. A chain hash names all ids before it, so the first difference can be bisected. */
static uint32_t common_blocks(const struct sequence *a, const struct sequence *b)
{
    uint32_t low = 0, high = a->held.n_hashed < b->held.n_hashed ? a->held.n_hashed : b->held.n_hashed;

    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (memcmp(&a->held.hash[middle], &b->held.hash[middle], sizeof *a->held.hash) == 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Whether a running sequence is computing blocks that this one needs and the cache lacks: it waits and finds them there,
 * instead of computing them twice. So do the other choices of a request, and a burst behind one cold system prompt. */
static bool prefix_is_coming(const struct scheduler *sched, struct sequence *seq)
{
    uint32_t size = sched->options.block_size, most = (seq->n_ids - 1) / size, coming = 0;

    if (sched->options.disable_prefix_caching)
        return false;
    for (uint32_t i = 0; i < sched->n_running; i++) {
        const struct sequence *other = sched->running[i];
        if (sequence_pending(other) <= 1)
            continue;
        uint32_t common = common_blocks(seq, other);
        common = common < most ? common : most;
        if (other->n_computed < common * size && common > coming)
            coming = common;
    }
    return coming && cache_peek(sched->cache, &seq->held, seq->ids, seq->n_ids) < coming * size;
}

/* Blocks that have to stay over for those that run, so that the newcomer is not preempted at once. */
static uint64_t margin(const struct scheduler *sched, const struct sequence *seq)
{
    return (uint64_t)sched->n_running << (seq->preemptions < 31 ? seq->preemptions : 31);
}

/* Takes the cached prefix and blocks for the rest of its ids; false and nothing held when they are short. */
static bool admit(struct scheduler *sched, struct sequence *seq, double now)
{
    uint32_t size = sched->options.block_size, found = cache_match(sched->cache, &seq->held, seq->ids, seq->n_ids);
    uint32_t need = (seq->n_ids + size - 1) / size - seq->held.n_blocks;

    if (need + margin(sched, seq) > cache_available(sched->cache)) {
        cache_release(sched->cache, &seq->held);
        return false;
    }
    if (cache_grow(sched->cache, &seq->held, seq->n_ids) < 0)
        log_fatal("scheduler: %u blocks are available but cannot be taken", cache_available(sched->cache));
    leave_waiting(sched, seq);
    run_in_order(sched, seq);
    seq->n_computed = found;
    if (!seq->admitted) {
        seq->admitted = true;
        seq->cached_tokens = found;
        seq->t_admitted = now;
    }
    return true;
}

/* ---- the plan of a step --------------------------------------------------------------------------------------------------- */

static void plan_rows(struct step_plan *plan, struct sequence *seq, uint32_t n_rows)
{
    bool samples = n_rows == sequence_pending(seq);
    plan->entries[plan->n++] = (struct plan_entry){.seq = seq, .n_rows = n_rows, .samples = samples};
    plan->n_rows += n_rows;
    plan->n_samples += samples;
}

/* One row for each sequence that decodes. Those preempted on the way are younger, so not in the plan yet. */
static void plan_decodes(struct scheduler *sched, struct step_plan *plan)
{
    for (uint32_t i = 0; i < sched->n_running; i++) {
        struct sequence *seq = sched->running[i];
        if (sequence_pending(seq) != 1)
            continue;
        if (!make_room(sched, seq))
            break;
        plan_rows(plan, seq, 1);
        plan->n_decodes++;
    }
}

/* Drafts get what is left: rows, and blocks without preemption. */
static void plan_drafts(struct scheduler *sched, struct step_plan *plan)
{
    uint32_t room = (sched->options.max_rows - plan->n_rows) / 2;

    for (uint32_t i = 0; i < plan->n; i++) {
        struct plan_entry *entry = &plan->entries[i];
        struct sequence *seq = entry->seq;
        uint32_t n = seq->n_drafts < room ? seq->n_drafts : room;
        if (n && cache_grow(sched->cache, &seq->held, seq->n_ids + n) < 0) {
            uint32_t held = seq->held.n_blocks * sched->options.block_size - seq->n_ids;
            n = n < held ? n : held;
        }
        entry->n_drafts = n;
        entry->n_rows += n;
        plan->n_rows += n;
        plan->n_drafts += n;
        room -= n;
    }
}

/* The sequence's next prompt rows, as far as the step has room. False: the step is full. */
static bool plan_prefill(struct scheduler *sched, struct step_plan *plan, struct sequence *seq, uint32_t *room)
{
    uint32_t pending = sequence_pending(seq), rows = pending < *room ? pending : *room;

    if (sched->options.disable_chunked_prefill) {
        if (pending > sched->options.max_rows - plan->n_rows)
            return false;
        rows = pending;
    }
    if (rows == 0)
        return false;
    plan_rows(plan, seq, rows);
    *room -= rows < *room ? rows : *room;
    return true;
}

/* Sequences that run and are not in the plan have prompt rows to compute. Their blocks are there since admission. */
static bool plan_prefills(struct scheduler *sched, struct step_plan *plan, uint32_t *room)
{
    for (uint32_t i = 0; i < sched->n_running; i++)
        if (sequence_pending(sched->running[i]) > 1 && !plan_prefill(sched, plan, sched->running[i], room))
            return false;
    return true;
}

/* In order and without overtaking, except of those that wait for a prefix; a step looks at MOST_PASSED of them. */
static void plan_admissions(struct scheduler *sched, struct step_plan *plan, uint32_t *room, double now)
{
    uint32_t passed = 0;

    for (struct sequence *seq = sched->oldest, *next; seq && passed < MOST_PASSED; seq = next) {
        next = seq->younger;
        if (sched->n_running == sched->options.max_num_seqs || *room == 0)
            break;
        if (prefix_is_coming(sched, seq)) {
            passed++;
            continue;
        }
        if (!admit(sched, seq, now) || !plan_prefill(sched, plan, seq, room))
            break;
    }
}

/* Tokens before the next prompt row; of one that still waits: none. */
static uint32_t next_past(const struct scheduler *sched)
{
    for (uint32_t i = 0; i < sched->n_running; i++)
        if (sequence_pending(sched->running[i]) > 1)
            return sched->running[i]->n_computed;
    return 0;
}

/* Sequences that want prompt rows and may run. One that needs few stands for several: it streams soon, and with more rows to a
 * step all the others decode in fewer steps. */
static uint32_t count_prompts(const struct scheduler *sched)
{
    uint32_t slots = sched->options.max_num_seqs - sched->n_running, n = 0, n_short = 0;

    for (uint32_t i = 0; i < sched->n_running; i++) {
        uint32_t pending = sequence_pending(sched->running[i]);
        n += pending > 1;
        n_short += pending > 1 && pending <= SHORT_PROMPT;
    }
    for (struct sequence *seq = sched->oldest; seq && slots; seq = seq->younger, slots--) {
        n++;
        n_short +=
            seq->n_ids <= SHORT_PROMPT || seq->n_ids - cache_peek(sched->cache, &seq->held, seq->ids, seq->n_ids) <= SHORT_PROMPT;
    }
    return n_short > 1 ? n + (SHORT_WEIGHT - 1) * (n_short - 1) : n;
}

void sched_plan(struct scheduler *sched, struct step_plan *plan, double now)
{
    plan->n = plan->n_rows = plan->n_samples = plan->n_decodes = plan->n_drafts = 0;
    plan_decodes(sched, plan);
    plan_drafts(sched, plan);
    uint32_t n_prompts = plan->n_decodes ? count_prompts(sched) : 1;
    uint32_t room = pacing_rows(&sched->pacing, plan->n_decodes + plan->n_drafts, n_prompts, next_past(sched));
    if (plan_prefills(sched, plan, &room))
        plan_admissions(sched, plan, &room, now);
}

uint32_t sched_waiting(const struct scheduler *sched)
{
    return sched->n_waiting - sched->n_waiting_warm;
}

uint64_t sched_backlog(const struct scheduler *sched)
{
    uint64_t tokens = 0;

    for (uint32_t i = 0; i < sched->n_running; i++) {
        uint32_t pending = sequence_pending(sched->running[i]);
        tokens += pending > 1 ? pending : DECODE_BACKLOG;
    }
    for (const struct sequence *seq = sched->oldest; seq; seq = seq->younger)
        tokens += seq == &seq->request->choices[0] || seq->admitted ? seq->n_ids : 1; /* other choices find the prompt cached */
    return tokens;
}
