/* When a second model is asked for drafts, and what that may take: on an invented model, acceptance, clock and step times. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>
#include "gpu-worker/engine/speculate.h"

enum { MOST = 16, LONGEST = 8192, PROMPT = 64 };

static struct engine_metrics metrics;
static struct request request;
static struct sequence seqs[MOST], *running[MOST];
static uint32_t ids[MOST][LONGEST];
static struct speculate *spec;
static uint32_t verified[MOST]; /* times that drafts of a sequence were */
static uint64_t n_steps, n_drafts, n_tokens;

/* ---- the model: its rounds take what the test says ---- */

struct drafter {
    double fixed, a_row;       /* seconds of a round */
    double seconds;            /* all that its rounds took */
    uint32_t n_rounds, widest; /* most sequences in a round */
};

static double now = 1000;

int clock_gettime(clockid_t clock, struct timespec *out)
{
    out->tv_sec = (time_t)now;
    out->tv_nsec = (long)((now - (double)out->tv_sec) * 1e9);
    return 0;
}

uint32_t drafter_longest(const struct drafter *drafter)
{
    return LONGEST;
}

uint32_t drafter_covered(const struct drafter *drafter, const struct sequence *seq)
{
    return 0;
}

void drafter_begin(struct drafter *drafter, const struct draft_order *orders, uint32_t n) {}

void drafter_close(struct drafter *drafter) {}

uint32_t drafter_round(struct drafter *drafter, struct draft_order *orders, uint32_t n, uint32_t made, uint32_t most, bool brief)
{
    uint32_t rows = 0, sequences = 0;

    for (uint32_t i = 0; i < n; i++) {
        struct draft_order *order = &orders[i];
        if (order->n <= made)
            continue;
        uint32_t missing = order->seq->n_ids + made - order->n_computed, left = rows < most ? most - rows : 1;
        if (missing > left) {
            missing = left;
            order->n = 0;
        }
        order->n_computed += missing;
        order->sure = 0.9;
        rows += missing;
        sequences++;
    }
    if (rows) {
        double seconds = drafter->fixed + drafter->a_row * rows;
        now += seconds;
        drafter->seconds += seconds;
        drafter->n_rounds++;
        drafter->widest = sequences > drafter->widest ? sequences : drafter->widest;
    }
    return rows;
}

uint32_t cache_available(const struct kv_cache *cache)
{
    return 1 << 20;
}

int cache_grow(struct kv_cache *cache, struct cache_seq *seq, uint32_t n_tokens)
{
    return 0;
}

/* ---- the batch ---- */

/* Sequences whose ids never repeat, so that there is nothing to copy, or go round. */
static void open_world(uint32_t n, struct drafter *drafter, uint32_t n_round)
{
    struct speculate_options options = {
        .n_slots = MOST, .most_drafts = 128, .metrics = &metrics, .drafter = drafter, .ngram = true};
    struct kvg_error err;

    srand(1);
    engine_metrics_init(&metrics);
    assert_int_equal(speculate_open(&spec, &options, &err), 0);
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t k = 0; k < LONGEST; k++)
            ids[i][k] = i < n_round ? k % 16 : 100 + k;
        seqs[i] = (struct sequence){.request = &request,
                                    .number = i,
                                    .slot = i,
                                    .ids = ids[i],
                                    .n_prompt = PROMPT,
                                    .n_ids = PROMPT,
                                    .n_computed = PROMPT - 1,
                                    .limit = LONGEST};
        running[i] = &seqs[i];
    }
    memset(verified, 0, sizeof verified);
    n_steps = n_drafts = n_tokens = 0;
}

/* One step in which r rows take 1 + price (r - n) seconds; a draft of sequence i is accepted with chance[i]. */
static void step(uint32_t n, const double *chance, double price)
{
    struct step_plan plan = {.n_decodes = n};

    speculate_propose(spec, running, n, 0);
    for (uint32_t i = 0; i < n; i++)
        plan.n_drafts += seqs[i].n_drafts;
    plan.n_rows = plan.n_decodes + plan.n_drafts;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t accepted = 0, proposed = seqs[i].n_drafts;
        while (accepted < proposed && rand() < chance[i] * RAND_MAX)
            accepted++;
        seqs[i].n_ids += accepted + 1;
        seqs[i].n_computed = seqs[i].n_ids - 1;
        n_tokens += accepted + 1;
        verified[i] += proposed > 0;
        if (proposed)
            speculate_verified(spec, &seqs[i], proposed, accepted, false);
    }
    speculate_timed(spec, &plan, 1 + price * plan.n_drafts);
    now += 1 + price * plan.n_drafts;
    n_steps++;
    n_drafts += plan.n_drafts;
}

static void steps(uint32_t n_seqs, uint32_t n, double chance, double price)
{
    double all[MOST];

    for (uint32_t i = 0; i < MOST; i++)
        all[i] = chance;
    for (uint32_t i = 0; i < n; i++)
        step(n_seqs, all, price);
}

/* Before anything is known of it, seven of ten drafts are expected to be accepted: worth it for one sequence, not for sixteen. */
static void the_model_is_tried_at_once_where_one_sequence_decodes_alone(void **state)
{
    struct drafter drafter = {.fixed = 0.1};

    open_world(1, &drafter, 0);
    steps(1, 3, 1, 0.01); /* the first one measures what a plain step takes */
    assert_true(drafter.n_rounds >= 2 && n_drafts >= 2);
    speculate_close(spec);

    drafter = (struct drafter){.fixed = 0.1};
    open_world(MOST, &drafter, 0);
    steps(MOST, 40, 1, 0.1);
    assert_int_equal(drafter.widest, 1); /* of sixteen one tries it */
    for (uint32_t i = 1; i < MOST; i++)
        assert_int_equal(verified[i], 0);
    speculate_close(spec);
}

/* Drafts that are never accepted, and a model that lacks the KV of the prompts, which takes four steps for each: all sixteen try
 * it one after the other within what thirty steps take, and then within half a percent of the time, but for the last one. */
static void a_useless_model_takes_thirty_steps_and_then_little(void **state)
{
    struct drafter drafter = {.fixed = 0.5, .a_row = 0.05};

    open_world(MOST, &drafter, 0);
    for (uint32_t i = 0; i < MOST; i++)
        seqs[i].number *= 16; /* of sixteen one tries it */
    steps(MOST, 300, 0, 0);
    assert_true(drafter.seconds > 6 && drafter.seconds < 30);
    drafter.seconds = 0;
    steps(MOST, 4000, 0, 0);
    assert_true(drafter.seconds < 4000 * 0.005 + 4);
    speculate_close(spec);
}

/* Eight that have copied nothing yet try it, all in the step in which one of them asks the model: nobody's turn is lost, though
 * no more than four drafts of such sequences would be chosen. */
static void who_tries_to_copy_beside_the_model_is_verified(void **state)
{
    struct drafter drafter = {.fixed = 0.01};

    open_world(8, &drafter, 8);
    steps(8, 20, 0, 0.3);
    assert_true(drafter.n_rounds > 0);
    for (uint32_t i = 1; i < 8; i++)
        assert_int_equal(verified[i], 1);
    speculate_close(spec);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_model_is_tried_at_once_where_one_sequence_decodes_alone),
        cmocka_unit_test(a_useless_model_takes_thirty_steps_and_then_little),
        cmocka_unit_test(who_tries_to_copy_beside_the_model_is_verified),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
