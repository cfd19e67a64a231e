/* How many drafts a sequence gets, on invented sequences, acceptance and step times: no model, no clock. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "gpu-worker/engine/speculate.h"
#include "gpu-worker/engine/step_cost.h"

enum { MOST = 16, LONGEST = 8192 };

static struct engine_metrics metrics;
static struct request request;
static struct sequence seqs[MOST], *running[MOST];
static uint32_t ids[MOST][LONGEST];
static struct speculate *spec;
static uint64_t n_steps, n_drafts, n_tokens;
static double seconds;

/* Sequences whose ids go round, so that there is always a match. */
static void open_world(uint32_t n, struct speculate_options options)
{
    struct kvg_error err;

    srand(1);
    engine_metrics_init(&metrics);
    options.n_slots = MOST;
    options.most_drafts = 128;
    options.metrics = &metrics;
    options.ngram = true;
    assert_int_equal(speculate_open(&spec, &options, &err), 0);
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t k = 0; k < LONGEST; k++)
            ids[i][k] = k % 16;
        seqs[i] = (struct sequence){.request = &request,
                                    .number = i,
                                    .slot = i,
                                    .ids = ids[i],
                                    .n_prompt = 64,
                                    .n_ids = 64,
                                    .n_computed = 63,
                                    .limit = LONGEST};
        running[i] = &seqs[i];
    }
    n_steps = n_drafts = n_tokens = 0;
    seconds = 0;
}

/* One step in which a draft is accepted with the given chance, and r rows take fixed + price * r. */
static void step(uint32_t n, double chance, double fixed, double price)
{
    struct step_plan plan = {.n_decodes = n};

    speculate_propose(spec, running, n, 0);
    for (uint32_t i = 0; i < n; i++)
        plan.n_drafts += seqs[i].n_drafts;
    plan.n_rows = plan.n_decodes + plan.n_drafts;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t accepted = 0, proposed = seqs[i].n_drafts;
        while (accepted < proposed && rand() < chance * RAND_MAX)
            accepted++;
        seqs[i].n_ids += accepted + 1;
        seqs[i].n_computed = seqs[i].n_ids - 1;
        n_tokens += accepted + 1;
        if (proposed)
            speculate_verified(spec, &seqs[i], proposed, accepted, false);
    }
    speculate_timed(spec, &plan, fixed + price * plan.n_rows);
    n_steps++;
    n_drafts += plan.n_drafts;
    seconds += fixed + price * plan.n_rows;
}

static void steps(uint32_t n_seqs, uint32_t n, double chance, double fixed, double price)
{
    n_steps = n_drafts = n_tokens = 0;
    seconds = 0;
    while (n_steps < n)
        step(n_seqs, chance, fixed, price);
}

static void the_limit_follows_the_acceptance(void **state)
{
    open_world(1, (struct speculate_options){0});
    step(1, 1, 1, 0); /* measures a plain step */
    step(1, 1, 1, 0);
    assert_int_equal(metrics.spec_limit, 5);
    steps(1, 40, 1, 1, 0);
    while (metrics.spec_limit > 10) /* as for a copy */
        step(1, 0.6, 1, 0);
    assert_int_equal(metrics.spec_limit, 10);
    steps(1, 20, 0.6, 1, 0);
    steps(1, 2, 1, 1, 0); /* none of the last one failed */
    assert_int_equal(seqs[0].n_drafts, 10);
    steps(1, 200, 0.05, 1, 0);
    assert_int_equal(metrics.spec_limit, 2);
    steps(1, 300, 1, 1, 0);
    assert_int_equal(metrics.spec_limit, 32);
    speculate_close(spec);
}

/* A copy: nearly all is accepted, so the limit of the window would only be in the way, as long as further rows pay. */
static void copies_are_as_long_as_it_pays(void **state)
{
    open_world(1, (struct speculate_options){0});
    steps(1, 100, 1, 1, 0);
    assert_int_equal(metrics.spec_limit, 32);
    assert_int_equal(seqs[0].n_drafts, 32);
    steps(1, 400, 0.97, 1, 0.02);
    double each = (double)n_drafts / (double)n_steps;
    assert_true(each > 10 && each < 32);
    assert_true((double)n_tokens / seconds > 9); /* ten drafts would come to 7.8 */
    seqs[0].limit = seqs[0].n_ids + 8;
    steps(1, 1, 1, 1, 0);
    assert_in_range(seqs[0].n_drafts, 1, 7);
    speculate_close(spec);
    open_world(1, (struct speculate_options){0});
    steps(1, 400, 1, 0, 1); /* a row costs all that it gives */
    assert_true(n_drafts < 100);
    speculate_close(spec);
}

static void a_start_beyond_the_range_widens_it(void **state)
{
    open_world(1, (struct speculate_options){.start = 14});
    steps(1, 100, 1, 1, 0);
    while (metrics.spec_limit > 14)
        step(1, 0.6, 1, 0);
    assert_int_equal(metrics.spec_limit, 14);
    speculate_close(spec);
    open_world(1, (struct speculate_options){.start = 1});
    steps(1, 100, 0.05, 1, 0);
    assert_int_equal(metrics.spec_limit, 1);
    speculate_close(spec);
}

static void drafts_that_do_not_pay_are_rare(void **state)
{
    open_world(1, (struct speculate_options){0});
    steps(1, 100, 0.1, 0.2, 0.8);
    steps(1, 2000, 0.1, 0.2, 0.8);
    assert_true(n_drafts < 2000 / 100);
    assert_true((double)n_tokens / seconds > 0.985);
    steps(1, 1000, 1, 1, 0.01); /* both change: found again */
    assert_true(n_drafts > 5000);
    speculate_close(spec);
}

/* Four sequences that copy, then four whose drafts all fail, while a row is dear: the good record of the first costs little. */
static void the_record_of_others_is_tried_with_few_drafts(void **state)
{
    open_world(4, (struct speculate_options){0});
    steps(4, 100, 1, 0.6, 0.1);
    assert_true(n_drafts > 400);
    for (uint32_t i = 0; i < 4; i++) {
        seqs[i].number += 4;
        seqs[i].n_ids = 64;
        seqs[i].n_computed = 63;
    }
    steps(4, 64, 0, 0.6, 0.1);
    assert_in_range(n_drafts, 1, 12);
    assert_true(seconds < 64 * 1.02);
    speculate_close(spec);
}

/* Rows are dear when many sequences share a step: the same acceptance that pays alone does not pay there. */
static void a_large_batch_drafts_less(void **state)
{
    open_world(MOST, (struct speculate_options){0});
    steps(1, 300, 0.5, 1, 0.1);
    double alone = (double)n_drafts / (double)n_steps;
    assert_true(alone > 0.9);
    assert_true((double)n_tokens / seconds * 1.1 > 1.3);
    steps(MOST, 300, 0.5, 0, 1); /* a row costs all that it gives */
    assert_true((double)n_drafts / (double)n_steps / MOST < 0.1);
    speculate_close(spec);
}

/* Of ten drafts nine are accepted, and a step with one for each sequence takes 1.75 times as long: a gain of 9 percent, which one
 * sequence alone takes and four do not, whose drafts keep each other waiting. */
static void a_small_gain_is_for_one_sequence_alone(void **state)
{
    open_world(1, (struct speculate_options){0});
    steps(1, 400, 0.9, 0.25, 0.75);
    assert_true(n_drafts > 400 / 2);
    speculate_close(spec);
    open_world(4, (struct speculate_options){0});
    steps(4, 400, 0.9, 0.25, 0.75 / 4);
    assert_true(n_drafts < 4 * 400 / 8);
    speculate_close(spec);
}

/* Every step has prompt rows beside the decode row: its cost is learnt from such steps, and drafts pay there, too. */
static void prompt_rows_in_every_step_keep_no_drafts_away(void **state)
{
    static uint32_t prompt[LONGEST];
    struct sequence other = {.request = &request, .number = 99, .slot = 9, .ids = prompt, .n_ids = 8000, .limit = LONGEST};

    open_world(1, (struct speculate_options){0});
    running[1] = &other;
    n_drafts = 0;
    for (uint32_t i = 0; i < 200; i++) {
        speculate_propose(spec, running, 2, 0);
        struct step_plan plan = {.n_decodes = 1, .n_drafts = seqs[0].n_drafts, .n_rows = 33 + seqs[0].n_drafts};
        if (seqs[0].n_drafts)
            speculate_verified(spec, &seqs[0], seqs[0].n_drafts, seqs[0].n_drafts, false);
        seqs[0].n_ids += seqs[0].n_drafts + 1;
        seqs[0].n_computed = seqs[0].n_ids - 1;
        other.n_computed += 32;
        n_drafts += seqs[0].n_drafts;
        speculate_timed(spec, &plan, 1 + 0.01 * plan.n_rows);
    }
    assert_true(n_drafts > 200 * 5);
    running[1] = &seqs[1];
    speculate_close(spec);
}

/* Rows are for nothing up to eight, and dear beyond. */
static double crowded(uint32_t rows)
{
    return rows < 8 ? 1 : rows / 8.0;
}

/* Steps of one sequence that decodes beside 32 prompt rows of others, which run or wait to; the drafts. */
static uint32_t drafts_beside_prompts(uint32_t n_running, uint32_t n_waiting)
{
    static uint32_t prompt[LONGEST];
    struct sequence other[MOST];
    uint32_t drafted = 0;

    for (uint32_t i = 1; i < n_running; i++) {
        other[i] =
            (struct sequence){.request = &request, .number = 99, .slot = 9, .ids = prompt, .n_ids = 8000, .limit = LONGEST};
        running[i] = &other[i];
    }
    for (uint32_t i = 0; i < 100; i++) {
        speculate_propose(spec, running, n_running, n_waiting);
        struct step_plan plan = {.n_decodes = 1, .n_drafts = seqs[0].n_drafts, .n_rows = 33 + seqs[0].n_drafts};
        if (seqs[0].n_drafts)
            speculate_verified(spec, &seqs[0], seqs[0].n_drafts, seqs[0].n_drafts, false);
        seqs[0].n_ids += seqs[0].n_drafts + 1;
        seqs[0].n_computed = seqs[0].n_ids - 1;
        drafted += seqs[0].n_drafts;
        speculate_timed(spec, &plan, crowded(plan.n_rows));
    }
    for (uint32_t i = 1; i < n_running; i++)
        running[i] = &seqs[i];
    return drafted;
}

/* A draft beside prompt rows looks cheap, but the prompts wait for it: where many sequences will soon decode, their tokens are
 * cheaper still. So it is with those that are about to be admitted. */
static void drafts_do_not_keep_a_batch_from_starting(void **state)
{
    open_world(8, (struct speculate_options){0});
    for (uint32_t i = 0; i < 20; i++)
        for (uint32_t n = 1; n <= 8; n += n == 2 ? 6 : 1)
            step(n, 1, crowded(n), 0);
    assert_true(drafts_beside_prompts(2, 0) > 100 * 2);
    assert_true(drafts_beside_prompts(8, 0) < 100);
    assert_true(drafts_beside_prompts(1, 7) < 100);
    speculate_close(spec);
}

/* The answer is truth[0, n), of which the first two tokens are there; eight drafts a step. Returns the steps that it took. */
static uint32_t answer(const uint32_t *truth, uint32_t n)
{
    struct sequence *seq = &seqs[0];
    uint32_t at = 2, taken = 0;

    memcpy(seq->ids + 64, truth, 2 * sizeof *truth);
    seq->n_ids = 66;
    for (; at < n; taken++) {
        seq->n_computed = seq->n_ids - 1;
        speculate_propose(spec, running, 1, 0);
        uint32_t proposed = seq->n_drafts, accepted = 0;
        while (accepted < proposed && at + accepted + 1 < n && seq->ids[seq->n_ids + accepted] == truth[at + accepted])
            accepted++;
        memcpy(seq->ids + seq->n_ids, truth + at, (accepted + 1) * sizeof *truth);
        seq->n_ids += accepted + 1;
        at += accepted + 1;
        if (proposed)
            speculate_verified(spec, seq, proposed, accepted, at >= n);
    }
    return taken;
}

enum { NAME = 500, NEW_NAME, INSERTED };

/* Ten names in the prompt have another one in the answer: the second time it is known. A token that was put in is no new name. */
static void a_changed_name_is_changed_again(void **state)
{
    uint32_t renamed[64], longer[64];

    open_world(1, (struct speculate_options){.fixed = 8});
    for (uint32_t k = 0; k < 64; k++) {
        ids[0][k] = k % 6 == 3 ? NAME : 1000 + k;
        renamed[k] = k % 6 == 3 ? NEW_NAME : 1000 + k;
        longer[k] = k < 20 ? ids[0][k] : k == 20 ? INSERTED : ids[0][k - 1];
    }
    assert_in_range(answer(renamed, 60), 7, 10);
    seqs[0].number++;
    assert_in_range(answer(longer, 60), 7, 11);
    speculate_close(spec);
}

static void never_behind_the_limit_of_the_answer(void **state)
{
    open_world(1, (struct speculate_options){.fixed = 8});
    for (uint32_t left = 1; left < 12; left++) {
        seqs[0].limit = seqs[0].n_ids + left;
        speculate_propose(spec, running, 1, 0);
        assert_int_equal(seqs[0].n_drafts, left - 1 < 8 ? left - 1 : 8);
    }
    speculate_close(spec);
}

static void a_slot_forgets_its_last_sequence(void **state)
{
    open_world(2, (struct speculate_options){.fixed = 4});
    speculate_propose(spec, running, 1, 0);
    assert_int_equal(seqs[0].n_drafts, 4);
    for (uint32_t k = 0; k < 64; k++)
        ids[1][k] = 100 + k;
    seqs[1].slot = 0;
    speculate_propose(spec, running + 1, 1, 0);
    assert_int_equal(seqs[1].n_drafts, 0);
    speculate_close(spec);
}

static void costs_between_measured_ones_are_interpolated(void **state)
{
    static struct step_cost cost;

    assert_true(step_cost_of(&cost, 2) > step_cost_of(&cost, 1));
    step_cost_add(&cost, 2, 1);
    step_cost_add(&cost, 6, 3);
    assert_float_equal(step_cost_of(&cost, 2), 1, 1e-9);
    assert_float_equal(step_cost_of(&cost, 4), 2, 1e-9);
    assert_true(step_cost_of(&cost, 1) < 1);
    assert_true(step_cost_of(&cost, 20) > 3);
    for (int i = 0; i < 5000; i++)
        step_cost_add(&cost, 1, 1);
    assert_false(step_cost_fresh(&cost, 6, 1000));
    assert_true(step_cost_of(&cost, 6) < 2); /* long ago: no longer believed */
    step_cost_add(&cost, 1, 1000);
    assert_true(step_cost_of(&cost, 1) < 1.5); /* an interruption */
}

/* The first step of seven rows was interrupted: that is not what all such steps take, and not for a thousand steps. */
static void a_first_measurement_far_above_the_others_is_soon_doubted(void **state)
{
    static struct step_cost cost;

    for (int i = 0; i < 8; i++)
        step_cost_add(&cost, i % 2 ? 6 : 8, 1);
    step_cost_add(&cost, 7, 50);
    assert_true(step_cost_of(&cost, 7) <= 4);
    for (int i = 0; i < 150; i++)
        step_cost_add(&cost, i % 2 ? 6 : 8, 1);
    assert_float_equal(step_cost_of(&cost, 7), 1, 1e-9);

    step_cost_add(&cost, 12, 4); /* really so dear: the second one says so, too */
    for (int i = 0; i < 150; i++)
        step_cost_add(&cost, 8, 1);
    step_cost_add(&cost, 12, 4);
    for (int i = 0; i < 500; i++)
        step_cost_add(&cost, 8, 1);
    assert_true(step_cost_of(&cost, 12) > 3);
}

static void the_first_measurements_count_alike_and_a_row_is_never_free(void **state)
{
    static struct step_cost cost;

    for (int i = 0; i < 4; i++)
        step_cost_add(&cost, 16, i % 2 ? 110 : 90);
    assert_float_equal(step_cost_of(&cost, 16), 100, 1e-9);
    step_cost_add(&cost, 17, 80); /* that it was faster is chance */
    assert_true(step_cost_of_row(&cost, 16) > 1);
    for (int i = 0; i < 100; i++)
        step_cost_add(&cost, 17, 120);
    assert_float_equal(step_cost_of_row(&cost, 16), 20, 0.1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_limit_follows_the_acceptance),
        cmocka_unit_test(copies_are_as_long_as_it_pays),
        cmocka_unit_test(a_start_beyond_the_range_widens_it),
        cmocka_unit_test(drafts_that_do_not_pay_are_rare),
        cmocka_unit_test(the_record_of_others_is_tried_with_few_drafts),
        cmocka_unit_test(a_large_batch_drafts_less),
        cmocka_unit_test(a_small_gain_is_for_one_sequence_alone),
        cmocka_unit_test(prompt_rows_in_every_step_keep_no_drafts_away),
        cmocka_unit_test(drafts_do_not_keep_a_batch_from_starting),
        cmocka_unit_test(a_changed_name_is_changed_again),
        cmocka_unit_test(never_behind_the_limit_of_the_answer),
        cmocka_unit_test(a_slot_forgets_its_last_sequence),
        cmocka_unit_test(costs_between_measured_ones_are_interpolated),
        cmocka_unit_test(a_first_measurement_far_above_the_others_is_soon_doubted),
        cmocka_unit_test(the_first_measurements_count_alike_and_a_row_is_never_free),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
