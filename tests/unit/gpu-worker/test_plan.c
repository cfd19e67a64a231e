/* The roofline of --plan against numbers worked out by hand, and its edges. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <math.h>
#include <string.h>
#include "gpu-worker/plan.h"

/* 1000 numbers of a byte in layers, 200 in the output matrix; 2 layers, 4 heads of 8: L H D = 64. */
static const struct capacity toy = {.family = "toy",
                                    .n_layers = 2,
                                    .n_heads = 4,
                                    .n_kv_heads = 2,
                                    .head_dim = 8,
                                    .max_position = 4096,
                                    .weight_bytes = 1500,
                                    .layer_bytes = 1000,
                                    .output_bytes = 200,
                                    .layer_weights = 1000,
                                    .output_weights = 200};
/* 10 bytes of KV a token; a request of 100 + 20 tokens takes 4 blocks of 32. */
enum { BLOCK_BYTES = 320 };

static struct plan_machine machine(double bytes_per_s, double ops_per_s, uint64_t memory)
{
    return (struct plan_machine){
        .name = "toy", .bytes_per_s = bytes_per_s, .ops_per_s = ops_per_s, .memory = memory, .memory_share = 1};
}

static struct plan_load load(double qps)
{
    return (struct plan_load){.qps = qps, .in = 100, .out = 20, .share = 1, .max_seqs = 64, .block_size = 32};
}

static struct plan compute(const struct plan_machine *machine, const struct plan_load *load)
{
    struct plan plan;
    struct kvg_error err = {0};
    if (plan_compute(&toy, machine, load, BLOCK_BYTES, &plan, &err) != 0)
        fail_msg("%s", err.message);
    return plan;
}

static void blocks_fill_what_the_weights_leave(void **state)
{
    struct plan_machine m = machine(1e6, 1e12, 1500 + 10 * BLOCK_BYTES + 319);
    struct plan_load l = load(1);
    struct plan plan = compute(&m, &l);
    assert_int_equal(plan.blocks, 10);
    assert_int_equal(plan.blocks_a_request, 4);
    assert_int_equal(plan.concurrency, 2);
}

static void memory_bound_steps_cost_their_bytes(void **state)
{
    struct plan_machine m = machine(1e6, 1e15, 1500 + 8 * BLOCK_BYTES);
    struct plan_load l = load(1);
    struct plan plan = compute(&m, &l);
    assert_true(plan.decode_by_memory && plan.prompt_by_memory);
    /* 1200 bytes of weights, 2 requests of 110 tokens of 10 bytes */
    assert_true(fabs(plan.step_s - (1200 + 2 * 1100) / 1e6) < 1e-12);
    assert_true(fabs(plan.prompt_s - 1200 / 1e6) < 1e-12);
    assert_true(fabs(plan.worker_qps - 1 / (plan.prompt_s + 20 * plan.step_s / 2)) < 1e-9);
}

static void compute_bound_steps_cost_their_operations(void **state)
{
    struct plan_machine m = machine(1e15, 1e6, 1500 + 8 * BLOCK_BYTES);
    struct plan_load l = load(1);
    struct plan plan = compute(&m, &l);
    assert_false(plan.decode_by_memory || plan.prompt_by_memory);
    assert_true(fabs(plan.step_s - 2 * (2 * 1200 + 4 * 64 * 110) / 1e6) < 1e-9);
    assert_true(fabs(plan.prompt_s - (2 * 1000 * 100 + 2 * 64 * 100 * 100 + 2 * 200) / 1e6) < 1e-9);
}

static void a_cached_prefix_is_attended_to_but_not_computed(void **state)
{
    struct plan_machine m = machine(1e15, 1e6, 1 << 20);
    struct plan_load l = load(1);
    l.cached = 0.5;
    struct plan plan = compute(&m, &l);
    assert_true(fabs(plan.prompt_s - (2 * 1000 * 50 + 2 * 64 * (10000 - 2500) + 2 * 200) / 1e6) < 1e-9);
}

static void workers_carry_the_load_and_one_less_does_not(void **state)
{
    struct plan_machine m = machine(1e6, 1e9, 1 << 20);
    for (double qps = 0.5; qps < 5000; qps *= 1.7) {
        struct plan_load l = load(qps);
        l.share = 0.7;
        struct plan plan = compute(&m, &l);
        assert_true(plan.workers * plan.worker_qps >= qps * (1 - 1e-12));
        assert_true((plan.workers - 1) * plan.worker_qps < qps);
    }
}

/* Little's law at the settled point: requests at once = rate x time of a request's tokens. */
static void the_settled_point_obeys_littles_law(void **state)
{
    struct plan_machine m = machine(1e6, 1e9, 1 << 20);
    struct plan_load l = load(29);
    l.share = 0.7;
    struct plan plan = compute(&m, &l);
    assert_true(plan.running > 1 && plan.running < plan.concurrency);
    assert_true(fabs(plan.running - l.qps / plan.workers * l.out * plan.token_s) < 1e-6 * plan.running);
}

static void what_does_not_fit_is_refused_with_both_numbers(void **state)
{
    struct plan plan;
    struct kvg_error err = {0};
    struct plan_machine m = machine(1e6, 1e9, 1400);
    struct plan_load l = load(1);
    assert_int_equal(plan_compute(&toy, &m, &l, BLOCK_BYTES, &plan, &err), KVG_INVALID);
    assert_non_null(strstr(err.message, "weights take"));
    m.memory = 1 << 20;
    l.in = 4090;
    assert_int_equal(plan_compute(&toy, &m, &l, BLOCK_BYTES, &plan, &err), KVG_INVALID);
    assert_non_null(strstr(err.message, "4110"));
    assert_non_null(strstr(err.message, "4096"));
}

static void where_no_request_fits_no_number_of_workers_suffices(void **state)
{
    struct plan_machine m = machine(1e6, 1e9, 1500 + 3 * BLOCK_BYTES);
    struct plan_load l = load(1);
    struct plan plan = compute(&m, &l);
    assert_int_equal(plan.concurrency, 0);
    assert_int_equal(plan.workers, 0);
}

static void machines_are_known_by_name(void **state)
{
    struct plan_machine m;
    struct kvg_error err = {0};
    assert_int_equal(plan_machine_find("H100", &m, &err), 0);
    assert_true(m.cuda && m.bytes_per_s == 3.35e12 && m.memory == (uint64_t)80 << 30);
    assert_int_equal(plan_machine_find("h1000", &m, &err), KVG_INVALID);
    assert_non_null(strstr(err.message, "h1000"));
    assert_non_null(strstr(err.message, "rtx4090"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_fill_what_the_weights_leave),
        cmocka_unit_test(memory_bound_steps_cost_their_bytes),
        cmocka_unit_test(compute_bound_steps_cost_their_operations),
        cmocka_unit_test(a_cached_prefix_is_attended_to_but_not_computed),
        cmocka_unit_test(workers_carry_the_load_and_one_less_does_not),
        cmocka_unit_test(the_settled_point_obeys_littles_law),
        cmocka_unit_test(what_does_not_fit_is_refused_with_both_numbers),
        cmocka_unit_test(where_no_request_fits_no_number_of_workers_suffices),
        cmocka_unit_test(machines_are_known_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
