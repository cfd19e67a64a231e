/* The chunk finds the step's target on machines of any speed: a step costs a fixed part, a part a row, and one
 * for each key that a row sees. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "gpu-worker/engine/pacing.h"

struct machine {
    double fixed, a_row, a_pair; /* seconds */
    double a_decode;             /* of a decode row beyond a_row */
};

static double step_behind(struct pacing *pacing, const struct machine *machine, uint32_t rows, uint32_t n_decodes, uint32_t past)
{
    struct pacing_step done = {rows, n_decodes, past + rows / 2.0};
    double seconds =
        machine->fixed + machine->a_row * (rows + n_decodes) + machine->a_pair * rows * done.keys + machine->a_decode * n_decodes;
    pacing_observe(pacing, &done, seconds);
    return seconds;
}

static double step(struct pacing *pacing, const struct machine *machine, uint32_t rows, uint32_t n_decodes)
{
    return step_behind(pacing, machine, rows, n_decodes, 0);
}

/* Seconds of a step with a chunk after `steps` of them. */
static double settle_beside(const struct machine *machine, uint32_t n_decodes, uint32_t n_prompts, int steps)
{
    struct pacing pacing;
    double seconds = 0;

    pacing_init(&pacing, 8192, 0);
    for (int i = 0; i < 5 && n_decodes; i++)
        step(&pacing, machine, 0, n_decodes);
    for (int i = 0; i < steps; i++)
        seconds = step(&pacing, machine, pacing_rows(&pacing, n_decodes, n_prompts, 0), n_decodes);
    return seconds;
}

static double settle(const struct machine *machine, uint32_t n_decodes, int steps)
{
    return settle_beside(machine, n_decodes, 1, steps);
}

static void many_prompts_beside_few_streams_lengthen_a_step(void **state)
{
    const struct machine usual = {0.008, 0.0002}, slow = {0.2, 0.004};

    assert_true(settle_beside(&usual, 1, 31, 60) > 0.22 && settle_beside(&usual, 1, 31, 60) < 0.28); /* the most */
    assert_true(settle_beside(&usual, 8, 5, 60) > 0.04 && settle_beside(&usual, 8, 5, 60) < 0.055);  /* twice the step */
    assert_true(settle_beside(&usual, 28, 2, 60) > 0.03 &&
                settle_beside(&usual, 28, 2, 60) < 0.041); /* 2.5 decode steps, hardly more */
    assert_true(settle_beside(&slow, 2, 31, 60) > 0.3 && settle_beside(&slow, 2, 31, 60) < 0.55); /* long enough already */
}

/* Many clients come at once: all that is known of decoding is a step of one row, and no step without prompt rows follows. */
static void what_more_streams_take_is_not_laid_on_the_prompts(void **state)
{
    const struct machine usual = {.fixed = 0.004, .a_row = 0.0003, .a_decode = 0.0006};
    struct pacing pacing;

    pacing_init(&pacing, 8192, 0);
    for (int i = 0; i < 5; i++)
        step(&pacing, &usual, 0, 1);
    for (uint32_t n_decodes = 1; n_decodes <= 28; n_decodes++) {
        uint32_t rows = pacing_rows(&pacing, n_decodes, 4, 0);
        double seconds = step(&pacing, &usual, rows, n_decodes);
        assert_true(rows >= 40);
        assert_true(seconds < 0.26);
    }
    assert_true(pacing_rows(&pacing, 28, 4, 0) >= 80);
}

/* A worker's first burst: one prompt was computed alone, then many come. */
static void the_first_rows_beside_streams_are_taken_to_cost_what_they_cost_alone(void **state)
{
    const struct machine quick = {.fixed = 0.004, .a_row = 0.0003};
    struct pacing pacing;

    pacing_init(&pacing, 8192, 0);
    step(&pacing, &quick, 320, 0);
    step(&pacing, &quick, 0, 1);
    assert_true(pacing_rows(&pacing, 14, 60, 0) > 400); /* in a quarter of a second */
}

static void steps_settle_near_their_target(void **state)
{
    const struct machine usual = {0.008, 0.0002}, quick = {0.001, 0.00001}, slow = {0.2, 0.004}, slowest = {2, 0.1};

    assert_true(settle(&usual, 4, 60) > 0.017 && settle(&usual, 4, 60) < 0.027); /* 2.5 decode steps */
    assert_true(settle(&usual, 0, 60) > 0.4 && settle(&usual, 0, 60) < 0.6);
    assert_true(settle(&quick, 4, 60) > 0.014 && settle(&quick, 4, 60) < 0.025); /* the least */
    assert_true(settle(&slow, 2, 60) > 0.3 && settle(&slow, 2, 60) < 0.55);      /* the most, which is less */
    assert_true(settle(&slow, 0, 60) > 0.35 && settle(&slow, 0, 60) < 0.6);
    assert_true(settle(&slowest, 1, 60) < 5); /* the least chunk */
}

static void a_machine_that_slows_down_is_followed_in_a_few_steps(void **state)
{
    const struct machine before = {0.008, 0.0002}, after = {0.016, 0.0008};
    struct pacing pacing;
    double seconds = 0;

    pacing_init(&pacing, 8192, 0);
    for (int i = 0; i < 60; i++)
        step(&pacing, &before, pacing_rows(&pacing, 4, 1, 0), 4);
    for (int i = 0; i < 5; i++)
        seconds = step(&pacing, &after, pacing_rows(&pacing, 4, 1, 0), 4);
    assert_true(seconds < 0.07);
}

/* Two long prompts one after the other: the chunk shrinks as the first one grows, and at the start of the second it is known at
 * once how much a shallow row costs. */
static void a_chunk_follows_the_depth_of_its_prompt(void **state)
{
    const struct machine deep = {0.006, 0.0002, 6e-8};
    struct pacing pacing;
    uint32_t shallow = 0, rows = 0;
    int n_long = 0;

    pacing_init(&pacing, 8192, 0);
    for (int i = 0; i < 5; i++)
        step(&pacing, &deep, 0, 4);
    for (int prompt = 0; prompt < 2; prompt++)
        for (uint32_t past = 0; past < 8000; past += rows) {
            rows = pacing_rows(&pacing, 4, 1, past);
            shallow = past ? shallow : rows;
            double seconds = step_behind(&pacing, &deep, rows, 4, past);
            n_long += seconds > 0.024;
        }
    assert_true(shallow >= 40); /* 66 take 20 ms */
    assert_true(rows >= 16 && rows < 30);
    assert_true(n_long <= 2);
}

/* Its client and the tokenizer take processor time from the last steps before a long prompt. */
static void what_an_arriving_prompt_disturbs_is_not_the_price_of_decoding(void **state)
{
    const struct machine usual = {0.006, 0.0002}, disturbed = {0.02, 0.0002}, slower = {0.012, 0.0002};
    struct pacing pacing;

    pacing_init(&pacing, 8192, 0);
    for (int i = 0; i < 200; i++)
        step(&pacing, &usual, 0, 4);
    for (int i = 0; i < 8; i++)
        step(&pacing, &disturbed, 0, 4);
    assert_true(step_cost_of(&pacing.decode, 4) < 1.25 * 0.0068);
    for (int i = 0; i < 100; i++) /* but a machine that has become slower is */
        step(&pacing, &slower, 0, 4);
    assert_true(step_cost_of(&pacing.decode, 4) > 0.95 * 0.0128);
}

/* Where rows read the keys by the unit, few are whole units, never less than the least chunk, and many are as many as fit. */
static void few_rows_are_whole_units(void **state)
{
    static const uint32_t units[] = {4, 9, 10, 16, 21, 32};
    const struct machine deep = {0.006, 0.0002, 6e-8};

    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        struct pacing pacing;
        uint32_t unit = units[i], rows = 0;
        pacing_init(&pacing, 8192, 0);
        pacing.unit = unit;
        for (int j = 0; j < 5; j++)
            step(&pacing, &deep, 0, 4);
        for (uint32_t past = 0; past < 16000; past += rows) {
            rows = pacing_rows(&pacing, 4, 1, past);
            assert_true(rows % unit == 0 || rows >= 4 * unit);
            assert_true(rows >= 16);
            step_behind(&pacing, &deep, rows, 4, past);
        }
        assert_int_equal(rows, (16 + unit - 1) / unit * unit); /* keys alone take longer than the step should */
    }
}

static void a_chunk_is_never_over_what_a_step_may_hold(void **state)
{
    struct pacing pacing;

    pacing_init(&pacing, 64, 0);
    for (int i = 0; i < 50; i++)
        pacing_observe(&pacing, &(struct pacing_step){64, 0, 32}, 0.0001);
    assert_int_equal(pacing_rows(&pacing, 0, 1, 0), 64);
    assert_int_equal(pacing_rows(&pacing, 60, 1, 0), 4);
    assert_int_equal(pacing_rows(&pacing, 64, 1, 0), 0);
    pacing_init(&pacing, 64, 17);
    assert_int_equal(pacing_rows(&pacing, 0, 1, 0), 17);
    assert_int_equal(pacing_rows(&pacing, 60, 1, 0), 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_settle_near_their_target),
        cmocka_unit_test(what_more_streams_take_is_not_laid_on_the_prompts),
        cmocka_unit_test(the_first_rows_beside_streams_are_taken_to_cost_what_they_cost_alone),
        cmocka_unit_test(many_prompts_beside_few_streams_lengthen_a_step),
        cmocka_unit_test(a_machine_that_slows_down_is_followed_in_a_few_steps),
        cmocka_unit_test(a_chunk_follows_the_depth_of_its_prompt),
        cmocka_unit_test(what_an_arriving_prompt_disturbs_is_not_the_price_of_decoding),
        cmocka_unit_test(few_rows_are_whole_units),
        cmocka_unit_test(a_chunk_is_never_over_what_a_step_may_hold),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
