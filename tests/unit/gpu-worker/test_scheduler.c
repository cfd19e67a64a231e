/* The scheduler's plans, step by step, without a model: what runs, in which order, and who pays when blocks run short. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "gpu-worker/engine/scheduler.h"

enum { SIZE = 16, MOST = 8, LONGEST = 1024 };

struct world {
    struct kv_cache *cache;
    struct scheduler sched;
    struct plan_entry entries[MOST];
    struct step_plan plan;
    struct request requests[MOST];
    struct sequence seqs[MOST];
    uint32_t ids[MOST][LONGEST], blocks[MOST][LONGEST / SIZE + 1];
    struct kvg_hash hash[MOST][LONGEST / SIZE + 1];
};

static struct world w;

static void open_world(uint32_t n_blocks, struct scheduler_options options)
{
    struct kvg_error err;
    struct cache_options cache = {.n_blocks = n_blocks, .block_size = SIZE};

    memset(&w, 0, sizeof w);
    options.max_num_seqs = MOST;
    options.block_size = SIZE;
    options.max_rows = 128;
    w.plan.entries = w.entries;
    assert_int_equal(cache_open(&w.cache, &cache, &err), 0);
    assert_int_equal(sched_init(&w.sched, &options, w.cache, &err), 0);
}

static void close_world(void)
{
    struct kvg_error err;

    for (int i = 0; i < MOST; i++)
        if (w.seqs[i].request)
            sched_remove(&w.sched, &w.seqs[i]);
    assert_int_equal(cache_check(w.cache, &err), 0);
    sched_free(&w.sched);
    cache_close(w.cache);
}

/* A prompt of n tokens, different from all others in every block. */
static struct sequence *add(int i, uint32_t n, int32_t priority, double now)
{
    struct sequence *seq = &w.seqs[i];

    for (uint32_t k = 0; k < LONGEST; k++)
        w.ids[i][k] = (uint32_t)i * LONGEST + k;
    w.requests[i].params.priority = priority;
    w.requests[i].choices = seq;
    *seq = (struct sequence){.request = &w.requests[i], .ids = w.ids[i], .n_prompt = n, .n_ids = n, .limit = LONGEST};
    seq->held.blocks = w.blocks[i];
    seq->held.hash = w.hash[i];
    seq->held.salt = &w.requests[i].salt;
    cache_hash(&seq->held, seq->ids, n, SIZE);
    sched_add(&w.sched, seq, now);
    return seq;
}

/* The counts are those of the waiting list. */
static void check_integrity(void)
{
    uint32_t n = 0, clients = 0;

    for (const struct sequence *seq = w.sched.oldest; seq; seq = seq->younger) {
        assert_int_equal(seq->state, SEQUENCE_WAITING);
        n++;
        clients += !seq->request->warm;
    }
    assert_int_equal(w.sched.n_waiting, n);
    assert_int_equal(sched_waiting(&w.sched), clients);
}

/* Plans a step and carries it out: rows are computed, and each sampling sequence gets one more token. */
static void step(double now)
{
    sched_plan(&w.sched, &w.plan, now);
    for (uint32_t i = 0; i < w.plan.n; i++) {
        struct sequence *seq = w.entries[i].seq;
        seq->n_computed += w.entries[i].n_rows - w.entries[i].n_drafts; /* no draft is accepted */
        cache_store(w.cache, &seq->held, seq->ids, seq->n_computed);
        seq->n_ids += w.entries[i].samples;
    }
    check_integrity();
}

static void decode_rows_go_before_prompt_rows(void **state)
{
    open_world(200, (struct scheduler_options){.fixed_chunk = 100});
    struct sequence *a = add(0, 30, 0, 0), *b = add(1, 40, 0, 0);
    step(0);
    assert_int_equal(w.plan.n_samples, 2);
    struct sequence *c = add(2, 250, 0, 1);
    step(1);
    assert_int_equal(w.plan.n, 3);
    assert_int_equal(w.plan.n_decodes, 2);
    assert_ptr_equal(w.entries[0].seq, a);
    assert_ptr_equal(w.entries[1].seq, b);
    assert_ptr_equal(w.entries[2].seq, c);
    assert_int_equal(w.entries[2].n_rows, 100);
    assert_false(w.entries[2].samples);
    step(2);
    step(3);
    assert_int_equal(w.entries[2].n_rows, 50);
    assert_true(w.entries[2].samples);
    close_world();
}

static void a_step_never_holds_more_rows_than_it_may(void **state)
{
    open_world(200, (struct scheduler_options){.fixed_chunk = 1000});
    for (int i = 0; i < 4; i++)
        add(i, 90, 0, 0);
    for (int i = 0; i < 10; i++) {
        step(i);
        assert_true(w.plan.n_rows <= 128 && w.plan.n > 0);
    }
    close_world();
}

static void the_youngest_is_preempted_and_the_oldest_advances(void **state)
{
    open_world(6, (struct scheduler_options){.fixed_chunk = 100});
    struct sequence *old = add(0, 32, 0, 0), *young = add(1, 32, 0, 1);

    for (int i = 0; i < 40; i++) {
        uint32_t before = old->n_ids;
        step(i);
        assert_int_equal(old->n_ids, before + 1);
    }
    assert_int_equal(old->preemptions, 0);
    assert_int_equal(young->preemptions, 1);
    assert_int_equal(young->state, SEQUENCE_WAITING);
    assert_true(young->n_ids > 33); /* what it generated is kept */
    uint32_t had = young->n_ids;
    sched_remove(&w.sched, old);
    for (int i = 0; i < 3; i++)
        step(100 + i);
    assert_int_equal(young->n_ids, had + 3);
    close_world();
}

static void drafts_take_blocks_from_nobody(void **state)
{
    open_world(5, (struct scheduler_options){.fixed_chunk = 100});
    struct sequence *old = add(0, 30, 0, 0), *young = add(1, 30, 0, 1);

    step(0); /* 31 ids each, on two blocks each; one is free */
    old->n_drafts = 9;
    young->n_drafts = 9;
    step(1);
    assert_int_equal(w.plan.n_drafts, 9 + 1); /* the free block's, and what the young one's last block still holds */
    assert_int_equal(w.entries[0].n_drafts, 9);
    assert_int_equal(w.entries[0].n_rows, 10);
    assert_int_equal(w.entries[1].n_drafts, 1);
    assert_int_equal(w.sched.n_preemptions, 0);
    close_world();
}

static void drafts_leave_half_of_the_rows_to_prompts(void **state)
{
    open_world(200, (struct scheduler_options){.fixed_chunk = 1000});
    struct sequence *seqs[3];

    for (int i = 0; i < 3; i++)
        seqs[i] = add(i, 30, 0, 0);
    step(0);
    add(3, 500, 0, 1);
    for (int i = 0; i < 3; i++)
        seqs[i]->n_drafts = 40;
    step(1);
    assert_int_equal(w.plan.n_drafts, (128 - 3) / 2);
    assert_int_equal(w.plan.n_rows, 128);
    assert_int_equal(w.entries[3].n_rows, 128 - 3 - (128 - 3) / 2);
    assert_int_equal(w.entries[3].n_drafts, 0);
    close_world();
}

static void a_level_of_priority_counts_as_ten_seconds_of_waiting(void **state)
{
    open_world(200, (struct scheduler_options){.fixed_chunk = 16, .priority_scheduling = true});
    struct sequence *low = add(0, 16, 1, 0), *before = add(1, 16, 0, 9), *after = add(2, 16, 0, 11);
    struct sequence *want[] = {before, low, after};

    for (int i = 0; i < 3; i++) {
        sched_plan(&w.sched, &w.plan, 60);
        assert_int_equal(w.plan.n, 1);
        assert_ptr_equal(w.entries[0].seq, want[i]);
        sched_remove(&w.sched, want[i]);
    }
    close_world();
}

static void backlog_counts_prompt_tokens_and_sixteen_a_decode(void **state)
{
    open_world(200, (struct scheduler_options){.fixed_chunk = 64});
    add(0, 30, 0, 0);
    assert_int_equal(sched_backlog(&w.sched), 30);
    step(0);
    assert_int_equal(sched_backlog(&w.sched), 16);
    add(1, 100, 0, 0);
    add(2, 200, 0, 0);
    assert_int_equal(sched_backlog(&w.sched), 316);
    step(1);
    assert_int_equal(sched_backlog(&w.sched), 16 + 36 + 200);
    close_world();
}

/* The highest priority there is arrives all the time, and the lowest runs all the same. */
static void whatever_waits_runs_at_last(void **state)
{
    int n = 0;

    open_world(200, (struct scheduler_options){.fixed_chunk = 16, .priority_scheduling = true});
    struct sequence *low = add(0, 16, INT32_MAX, 0);
    for (; n < 100 && low->state == SEQUENCE_WAITING; n++) {
        struct sequence *high = add(1, 16, INT32_MIN, 5.0 * n);
        step(5.0 * n); /* room for one of them */
        sched_remove(&w.sched, high);
    }
    assert_true(n * 5 >= 200 && n * 5 <= 250);
    close_world();
}

/* Blocks for a few of eight at a time, every second of which warms the cache: they wait, run, are preempted and end. */
static void what_warms_the_cache_is_not_counted_as_waiting(void **state)
{
    uint32_t most = 0;

    open_world(14, (struct scheduler_options){.fixed_chunk = 128});
    for (int i = 0; i < MOST; i++) {
        w.requests[i].warm = i % 2;
        add(i, 40, 0, 0);
        check_integrity();
    }
    assert_int_equal(sched_waiting(&w.sched), MOST / 2);
    for (int n = 0; n < 60; n++) {
        step(n);
        most = sched_waiting(&w.sched) > most ? sched_waiting(&w.sched) : most;
        if (n % 20 == 19)
            sched_remove(&w.sched, w.sched.n_waiting ? w.sched.youngest : w.sched.running[0]);
        check_integrity();
    }
    assert_true(w.sched.n_preemptions > 0 && most > 0 && most < MOST / 2);
    close_world();
    assert_int_equal(sched_waiting(&w.sched), 0);
}

/* Prompt rows of a step beside a stream, while n prompts of so many tokens wait, on a machine that takes 4 ms a row. */
static uint32_t rows_beside_a_stream(int n, uint32_t length)
{
    open_world(400, (struct scheduler_options){0});
    add(0, 20, 0, 0);
    step(0);
    for (int i = 0; i < 20; i++) {
        pacing_observe(&w.sched.pacing, &(struct pacing_step){.n_decodes = 1}, 0.008);
        pacing_observe(&w.sched.pacing, &(struct pacing_step){32, 1, 16}, 0.008 + 32 * 0.004);
    }
    for (int i = 1; i <= n; i++)
        add(i, length, 0, 1);
    step(1);
    uint32_t rows = w.plan.n_rows - 1;
    close_world();
    return rows;
}

static void several_short_prompts_lengthen_a_step_more_than_long_ones(void **state)
{
    uint32_t one_long = rows_beside_a_stream(1, 600), one_short = rows_beside_a_stream(1, 100);
    uint32_t longs = rows_beside_a_stream(4, 600), shorts = rows_beside_a_stream(4, 100);

    assert_int_equal(one_long, one_short);
    assert_true(longs > one_long);
    assert_true(2 * shorts > 3 * longs);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode_rows_go_before_prompt_rows),
        cmocka_unit_test(a_step_never_holds_more_rows_than_it_may),
        cmocka_unit_test(the_youngest_is_preempted_and_the_oldest_advances),
        cmocka_unit_test(drafts_take_blocks_from_nobody),
        cmocka_unit_test(drafts_leave_half_of_the_rows_to_prompts),
        cmocka_unit_test(a_level_of_priority_counts_as_ten_seconds_of_waiting),
        cmocka_unit_test(whatever_waits_runs_at_last),
        cmocka_unit_test(what_warms_the_cache_is_not_counted_as_waiting),
        cmocka_unit_test(several_short_prompts_lengthen_a_step_more_than_long_ones),
        cmocka_unit_test(backlog_counts_prompt_tokens_and_sixteen_a_decode),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
