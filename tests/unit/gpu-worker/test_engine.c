/* The engine on a small random model: limits, prefix cache, preemption, cancellation, ends of a generation. */
#include "engine_world.h"

static char toy[64];
static struct call gate;
enum { VOCAB = 256 };

static struct engine_options pool_of(uint32_t n_blocks, uint32_t block_size)
{
    return (struct engine_options){.num_kv_blocks = n_blocks, .block_size = block_size, .max_num_batched_tokens = 256};
}

/* ---- limits ---------------------------------------------------------------------------------------------------------------- */

static void a_prompt_over_the_pool_is_refused_with_both_numbers(void **state)
{
    static struct call call;
    static uint32_t ids[4096];
    struct world w;
    struct kvg_error err;
    struct engine_params params = default_params(400);

    open_world(&w, toy, pool_of(64, 16));
    make_ids(ids, 4096, 0, 1, VOCAB);
    assert_int_equal(try_start(&w, &call, ids, 1500, &params, &err), KVG_INVALID);
    assert_non_null(strstr(err.message, "1500"));
    assert_non_null(strstr(err.message, "1024"));
    assert_int_equal(try_start(&w, &call, ids, 1024, &params, &err), KVG_INVALID);
    params.max_tokens = 4;
    run_call(&w, &call, ids, 10, &params);
    assert_int_equal(call.choices[0].n_ids, 4);
    params.max_tokens = 400; /* 900 + 400 do not fit: it runs, and ends with what fits */
    run_call(&w, &call, ids, 900, &params);
    assert_int_equal(call.choices[0].finish, FINISH_LENGTH);
    assert_int_equal(call.choices[0].n_ids, 124);
    assert_int_equal(try_start(&w, &call, ids, 4096, &params, &err), KVG_INVALID);
    run_call(&w, &call, ids, 1023, &params);
    assert_int_equal(call.choices[0].n_ids, 1);
    close_world(&w);
}

static void a_prompt_over_the_context_is_refused_with_both_numbers(void **state)
{
    static struct call call;
    static uint32_t ids[512];
    struct world w;
    struct kvg_error err;
    struct engine_options options = pool_of(64, 16);
    struct engine_params params = default_params(UINT32_MAX);

    options.max_model_len = 256;
    open_world(&w, toy, options);
    make_ids(ids, 512, 0, 1, VOCAB);
    assert_int_equal(try_start(&w, &call, ids, 300, &params, &err), KVG_INVALID);
    assert_non_null(strstr(err.message, "300"));
    assert_non_null(strstr(err.message, "256"));
    run_call(&w, &call, ids, 200, &params);
    assert_int_equal(call.choices[0].n_ids, 56);
    assert_int_equal(call.choices[0].finish, FINISH_LENGTH);
    close_world(&w);
}

static void odd_requests_are_answered_or_refused(void **state)
{
    static struct call call;
    uint32_t ids[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    struct world w;
    struct kvg_error err;
    struct engine_params params = default_params(0);

    open_world(&w, toy, pool_of(64, 16));
    assert_int_equal(try_start(&w, &call, ids, 0, &params, &err), KVG_INVALID);
    run_call(&w, &call, ids, 8, &params);
    assert_int_equal(call.choices[0].n_ids, 0);
    assert_int_equal(call.choices[0].finish, FINISH_LENGTH);
    for (uint32_t n = 1; n <= 2; n++) {
        params.max_tokens = n;
        run_call(&w, &call, ids, 8, &params);
        assert_int_equal(call.choices[0].n_ids, n);
        assert_int_equal(call.choices[0].finish, FINISH_LENGTH);
    }
    params.n = 0;
    assert_int_equal(try_start(&w, &call, ids, 8, &params, &err), KVG_INVALID);
    params.n = 1000000000;
    assert_int_equal(try_start(&w, &call, ids, 8, &params, &err), KVG_INVALID);
    params.n = 1;
    ids[3] = 4000000000u;
    assert_int_equal(try_start(&w, &call, ids, 8, &params, &err), KVG_INVALID);
    assert_non_null(strstr(err.message, "4000000000"));
    close_world(&w);
}

static void bad_options_are_refused(void **state)
{
    static const struct engine_options bad[] = {{.block_size = 24},
                                                {.block_size = 8},
                                                {.block_size = 1024},
                                                {.max_model_len = 1},
                                                {.max_model_len = 1 << 30},
                                                {.kv_cache_bytes = 1},
                                                {.disable_chunked_prefill = true, .max_num_batched_tokens = 64}};
    struct kvg_error err;
    struct model *model;
    struct kvg_prompt_model *prompt_model;
    struct engine *engine;
    struct model_options options = {.path = toy, .threads = 1, .max_rows = 64, .max_seqs = 4, .max_outputs = 4};

    assert_int_equal(model_open(&model, &options, &err), 0);
    assert_int_equal(kvg_prompt_model_open(&prompt_model, toy, 0, &err), 0);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        err.message[0] = '\0';
        assert_int_equal(engine_open(&engine, &bad[i], model, prompt_model, NULL, &err), KVG_INVALID);
        assert_true(err.message[0] != '\0');
    }
    model_close(model);
    kvg_prompt_model_close(prompt_model);
}

/* ---- prefix cache -----------------------------------------------------------------------------------------------------------
 */

static void whole_block_prompts_leave_one_token_to_compute(void **state)
{
    static struct call cold, warm, other;
    static uint32_t ids[16 * 8 + 1];
    static const uint32_t blocks[] = {1, 2, 8};
    struct engine_params params = default_params(20);
    struct world w;

    for (size_t i = 0; i < 3; i++) {
        uint32_t n = blocks[i] * 16;
        open_world(&w, toy, pool_of(64, 16));
        make_ids(ids, n + 1, 0, i, VOCAB);
        run_call(&w, &cold, ids, n, &params);
        assert_int_equal(cold.choices[0].cached_tokens, 0);
        for (int again = 0; again < 2; again++) {
            run_call(&w, &warm, ids, n, &params);
            assert_same_reply(&warm.choices[0], &cold.choices[0]);
            assert_int_equal(warm.choices[0].cached_tokens, n - 16);
        }
        start_call(&w, &warm, ids, n, &params); /* two at once */
        start_call(&w, &other, ids, n, &params);
        wait_call(&warm);
        wait_call(&other);
        assert_same_reply(&warm.choices[0], &cold.choices[0]);
        assert_same_reply(&other.choices[0], &cold.choices[0]);
        run_call(&w, &warm, ids, n + 1, &params);
        assert_int_equal(warm.choices[0].cached_tokens, n);
        run_call(&w, &warm, ids, n - 1, &params);
        assert_int_equal(warm.choices[0].cached_tokens, n - 16);
        close_world(&w);
    }
}

static void turn_two_finds_prompt_and_reply(void **state)
{
    static struct call first, second;
    static uint32_t ids[512];
    struct engine_params params = default_params(50);
    struct world w;

    open_world(&w, toy, pool_of(64, 16));
    make_ids(ids, 100, 0, 3, VOCAB);
    run_call(&w, &first, ids, 100, &params);
    memcpy(ids + 100, first.choices[0].ids, 50 * sizeof *ids);
    make_ids(ids + 150, 30, 0, 4, VOCAB);
    run_call(&w, &second, ids, 180, &params);
    assert_int_equal(second.choices[0].cached_tokens, (100 + 50 - 1) / 16 * 16);
    close_world(&w);
}

static void salts_do_not_see_each_other(void **state)
{
    static struct call call;
    static uint32_t ids[100];
    struct engine_params params = default_params(4);
    struct world w;
    struct kvg_error err;

    open_world(&w, toy, pool_of(64, 16));
    make_ids(ids, 100, 0, 3, VOCAB);
    const char *salts[] = {"", "a", "b", "a"};
    const uint32_t found[] = {0, 0, 0, 96};
    for (int i = 0; i < 4; i++) {
        memset(&call, 0, sizeof call);
        pthread_mutex_init(&call.mutex, NULL);
        pthread_cond_init(&call.changed, NULL);
        struct engine_submit submit = {.ids = ids,
                                       .n_ids = 100,
                                       .salt = salts[i],
                                       .salt_len = strlen(salts[i]),
                                       .params = params,
                                       .sink = on_event,
                                       .context = &call};
        assert_int_equal(engine_submit(w.engine, &submit, &call.id, &err), 0);
        wait_call(&call);
        assert_int_equal(call.choices[0].cached_tokens, found[i]);
    }
    close_world(&w);
}

static void without_prefix_caching_nothing_is_cached(void **state)
{
    static struct call first, second;
    static uint32_t ids[100];
    struct engine_params params = default_params(10);
    struct engine_options options = pool_of(64, 16);
    struct world w;

    options.disable_prefix_caching = true;
    open_world(&w, toy, options);
    make_ids(ids, 100, 0, 3, VOCAB);
    run_call(&w, &first, ids, 100, &params);
    run_call(&w, &second, ids, 100, &params);
    assert_same_reply(&second.choices[0], &first.choices[0]);
    assert_int_equal(second.choices[0].cached_tokens, 0);
    check_engine(&w);
    assert_int_equal(engine_metrics(w.engine)->blocks_cached, 0);
    close_world(&w);
}

static void other_choices_find_the_prompt_of_the_first(void **state)
{
    static struct call call;
    static uint32_t ids[100];
    struct engine_params params = default_params(20);
    struct world w;
    int different = 0;

    open_world(&w, toy, pool_of(64, 16));
    make_ids(ids, 100, 0, 3, VOCAB);
    params.n = 6;
    params.temperature = 1;
    params.seed = 7;
    run_call(&w, &call, ids, 100, &params);
    assert_int_equal(call.choices[0].cached_tokens, 0);
    for (int i = 1; i < 6; i++) {
        assert_int_equal(call.choices[i].cached_tokens, 96);
        assert_int_equal(call.choices[i].n_ids, 20);
        different += memcmp(call.choices[i].ids, call.choices[0].ids, 20 * sizeof *ids) != 0;
    }
    assert_true(different >= 4);
    close_world(&w);
}

/* A burst behind one cold system prompt: it is computed once. */
static void a_prefix_that_is_being_computed_is_waited_for(void **state)
{
    static struct call solo[8], calls[8];
    static uint32_t ids[8][600];
    struct engine_params params = default_params(10);
    struct engine_options options = pool_of(512, 16);
    struct world w;

    options.fixed_chunk = 64; /* the prefix takes several steps */
    for (int round = 0; round < 2; round++) {
        options.disable_prefix_caching = round == 0;
        open_world(&w, toy, options);
        close_gate(&w, &gate);
        for (int i = 0; i < 8; i++) {
            make_ids(ids[i], 600, 512, (uint64_t)i, VOCAB);
            start_call(&w, round ? &calls[i] : &solo[i], ids[i], 600, &params);
        }
        open_gate(&gate);
        for (int i = 0; i < 8; i++)
            wait_call(round ? &calls[i] : &solo[i]);
        check_engine(&w);
        assert_int_equal(engine_metrics(w.engine)->computed_prompt_tokens, round ? 600 + 7 * 88 : 8 * 600);
        close_world(&w);
    }
    for (int i = 0; i < 8; i++) {
        assert_same_reply(&calls[i].choices[0], &solo[i].choices[0]);
        assert_int_equal(calls[i].choices[0].cached_tokens, i ? 512 : 0);
    }
}

static void without_chunked_prefill_a_prompt_takes_one_step(void **state)
{
    static struct call solo[4], calls[4];
    static uint32_t ids[4][200];
    struct engine_params params = default_params(20);
    struct engine_options options = pool_of(64, 16);
    struct world w;

    options.max_model_len = 256;
    for (int round = 0; round < 2; round++) {
        options.disable_chunked_prefill = round == 1;
        open_world(&w, toy, options);
        close_gate(&w, &gate);
        for (int i = 0; i < 4; i++) {
            make_ids(ids[i], 200, 0, (uint64_t)i, VOCAB);
            start_call(&w, round ? &calls[i] : &solo[i], ids[i], 200, &params);
        }
        open_gate(&gate);
        for (int i = 0; i < 4; i++)
            wait_call(round ? &calls[i] : &solo[i]);
        check_engine(&w);
        struct histogram *rows = &engine_metrics(w.engine)->rows_per_forward;
        for (int i = 0; round && i < rows->n_bounds; i++) /* whole prompts, or decode rows only */
            assert_true(rows->counts[i] == 0 || rows->bounds[i] <= 4 || rows->bounds[i] >= 200);
        close_world(&w);
    }
    for (int i = 0; i < 4; i++)
        assert_same_reply(&calls[i].choices[0], &solo[i].choices[0]);
}

/* ---- out of blocks ----------------------------------------------------------------------------------------------------------
 */

/* Runs n requests at once on a pool; all answers must be those of a large pool, one at a time. */
static void expect_solo_answers(uint32_t n_blocks, uint32_t n, uint32_t prompt, uint32_t max_tokens, bool disable_cache)
{
    static struct call solo[8], calls[8];
    static uint32_t ids[8][512];
    struct engine_params params = default_params(max_tokens);
    struct engine_options options = pool_of(512, 16);
    struct world w;

    open_world(&w, toy, options);
    for (uint32_t i = 0; i < n; i++) {
        make_ids(ids[i], prompt, 0, 50 + i, VOCAB);
        run_call(&w, &solo[i], ids[i], prompt, &params);
    }
    close_world(&w);
    options = pool_of(n_blocks, 16);
    options.disable_prefix_caching = disable_cache;
    open_world(&w, toy, options);
    close_gate(&w, &gate);
    for (uint32_t i = 0; i < n; i++)
        start_call(&w, &calls[i], ids[i], prompt, &params);
    open_gate(&gate);
    for (uint32_t i = 0; i < n; i++) {
        wait_call(&calls[i]);
        assert_same_reply(&calls[i].choices[0], &solo[i].choices[0]);
        assert_int_equal(calls[i].choices[0].prompt_tokens, prompt);
        assert_int_equal(calls[i].choices[0].completion_tokens, max_tokens);
    }
    check_engine(&w);
    uint64_t preemptions = engine_metrics(w.engine)->preemptions;
    print_message("%u requests on %u blocks: %llu preemptions\n", n, n_blocks, (unsigned long long)preemptions);
    assert_true(preemptions >= 1 && preemptions <= n * 8);
    close_world(&w);
}

static void requests_that_outgrow_the_pool_end_with_their_solo_answers(void **state)
{
    for (int disable_cache = 0; disable_cache < 2; disable_cache++) {
        expect_solo_answers(10, 2, 40, 101, disable_cache);
        expect_solo_answers(20, 8, 60, 120, disable_cache); /* each needs 60 % */
    }
}

/* ---- clients that leave ------------------------------------------------------------------------------------------------------
 */

static void wait_idle(struct world *w)
{
    check_engine(w); /* waits, and fails on a leaked block */
    assert_true(engine_idle(w->engine));
    assert_int_equal(engine_metrics(w->engine)->blocks_used, 0);
}

static void a_cancelled_request_frees_its_blocks(void **state)
{
    static struct call decode, prefill, queued, stay;
    static uint32_t ids[3000];
    struct engine_params params = default_params(3000);
    struct engine_options options = pool_of(400, 16);
    struct world w;

    options.max_num_seqs = 3;
    options.fixed_chunk = 16;
    open_world(&w, toy, options);
    make_ids(ids, 3000, 0, 3, VOCAB);
    start_call(&w, &decode, ids, 10, &params);
    wait_tokens(&decode, 3);
    params.max_tokens = 60;
    start_call(&w, &stay, ids, 20, &params);
    wait_tokens(&stay, 1);
    start_call(&w, &prefill, ids, 2900, &params);
    start_call(&w, &queued, ids, 10, &params);
    engine_cancel(w.engine, queued.id);
    engine_cancel(w.engine, prefill.id);
    engine_cancel(w.engine, decode.id);
    engine_cancel(w.engine, 123456); /* nobody */
    wait_call(&queued);
    wait_call(&prefill);
    wait_call(&decode);
    wait_call(&stay);
    assert_int_equal(queued.choices[0].finish, FINISH_ABORT);
    assert_int_equal(prefill.choices[0].finish, FINISH_ABORT);
    assert_int_equal(prefill.choices[0].n_ids, 0);
    assert_int_equal(decode.choices[0].finish, FINISH_ABORT);
    assert_true(decode.choices[0].n_ids < 3000);
    assert_int_equal(stay.choices[0].finish, FINISH_LENGTH);
    assert_int_equal(stay.choices[0].n_ids, 60);
    wait_idle(&w);
    assert_int_equal(engine_metrics(w.engine)->cancelled, 3);
    close_world(&w);
}

static void all_choices_of_a_cancelled_request_end(void **state)
{
    static struct call call;
    static uint32_t ids[40];
    struct engine_params params = default_params(2000);
    struct world w;

    open_world(&w, toy, pool_of(400, 16));
    make_ids(ids, 40, 0, 3, VOCAB);
    params.n = 5;
    start_call(&w, &call, ids, 40, &params);
    wait_tokens(&call, 2);
    engine_cancel(w.engine, call.id);
    wait_call(&call);
    for (int i = 0; i < 5; i++)
        assert_int_equal(call.choices[i].finish, FINISH_ABORT);
    wait_idle(&w);
    close_world(&w);
}

/* Submitted and cancelled while the engine thread is busy with another cancellation: the request is marked before the thread
 * has seen it as a new one. */
static void a_request_may_be_cancelled_before_it_is_seen(void **state)
{
    static struct call first = {.gate = true}, second[4], after;
    static uint32_t ids[40];
    struct engine_params params = default_params(20);
    struct world w;

    open_world(&w, toy, pool_of(400, 16));
    make_ids(ids, 40, 0, 3, VOCAB);
    close_gate(&w, &gate);
    start_call(&w, &first, ids, 40, &params);
    engine_cancel(w.engine, first.id);
    open_gate(&gate);
    wait_at_gate(&first);
    for (int i = 0; i < 4; i++) {
        start_call(&w, &second[i], ids, 40, &params);
        engine_cancel(w.engine, second[i].id);
    }
    start_call(&w, &after, ids, 40, &params);
    open_gate(&first);
    for (int i = 0; i < 4; i++) {
        wait_call(&second[i]);
        assert_int_equal(second[i].choices[0].finish, FINISH_ABORT);
    }
    wait_call(&after);
    assert_int_equal(after.choices[0].n_ids, 20);
    wait_idle(&w);
    for (int i = 0; i < 4; i++)
        assert_int_equal(second[i].choices[0].n_events, 1);
    close_world(&w);
}

static void closing_ends_running_requests_with_an_error(void **state)
{
    static struct call running, queued;
    static uint32_t ids[40];
    struct engine_params params = default_params(3000);
    struct engine_options options = pool_of(400, 16);
    struct world w;

    options.max_num_seqs = 1;
    open_world(&w, toy, options);
    make_ids(ids, 40, 0, 3, VOCAB);
    start_call(&w, &running, ids, 40, &params);
    start_call(&w, &queued, ids, 30, &params);
    wait_tokens(&running, 1);
    engine_close(w.engine);
    wait_call(&running);
    wait_call(&queued);
    assert_int_equal(running.choices[0].finish, FINISH_ERROR);
    assert_int_equal(queued.choices[0].finish, FINISH_ERROR);
    assert_true(running.error[0] != '\0');
    model_close(w.model);
    kvg_prompt_model_close(w.prompt_model);
}

static void a_draining_engine_finishes_and_takes_nothing_new(void **state)
{
    static struct call running, late;
    static uint32_t ids[40];
    struct engine_params params = default_params(100);
    struct kvg_error err;
    struct world w;

    open_world(&w, toy, pool_of(64, 16));
    make_ids(ids, 40, 0, 3, VOCAB);
    start_call(&w, &running, ids, 40, &params);
    engine_drain(w.engine);
    assert_int_equal(try_start(&w, &late, ids, 30, &params, &err), KVG_LIMIT);
    wait_call(&running);
    assert_int_equal(running.choices[0].finish, FINISH_LENGTH);
    assert_int_equal(running.choices[0].n_ids, 100);
    assert_true(engine_alive(w.engine));
    close_world(&w);
}

static void an_overloaded_engine_refuses(void **state)
{
    static struct call calls[6];
    static uint32_t ids[40];
    struct engine_params params = default_params(500);
    struct engine_options options = pool_of(64, 16);
    struct kvg_error err;
    struct world w;

    options.max_num_seqs = 2;
    options.max_waiting = 2;
    open_world(&w, toy, options);
    make_ids(ids, 40, 0, 3, VOCAB);
    close_gate(&w, &gate);
    for (int i = 0; i < 3; i++)
        start_call(&w, &calls[i], ids, 20, &params);
    assert_int_equal(try_start(&w, &calls[4], ids, 20, &params, &err), KVG_LIMIT);
    open_gate(&gate);
    for (int i = 0; i < 3; i++)
        wait_call(&calls[i]);
    run_call(&w, &calls[5], ids, 20, &params);
    close_world(&w);
}

/* ---- order -------------------------------------------------------------------------------------------------------------------
 */

/* Four requests meet and run one at a time; the order of their ends is the order of their start. */
static void expect_order(bool priority, const int *want)
{
    static struct call calls[4];
    static uint32_t ids[40];
    static const int32_t priorities[] = {5, 0, -1, 5};
    struct engine_params params = default_params(40);
    struct engine_options options = pool_of(64, 16);
    struct world w;

    options.max_num_seqs = 1;
    options.priority_scheduling = priority;
    open_world(&w, toy, options);
    make_ids(ids, 40, 0, 3, VOCAB);
    close_gate(&w, &gate);
    for (int i = 0; i < 4; i++) {
        params.priority = priorities[i];
        start_call(&w, &calls[i], ids, 20, &params);
    }
    open_gate(&gate);
    for (int i = 0; i < 4; i++)
        wait_call(&calls[i]);
    for (int i = 0; i < 3; i++)
        assert_true(calls[want[i]].rank < calls[want[i + 1]].rank);
    close_world(&w);
}

static void first_come_first_served(void **state)
{
    expect_order(false, (const int[]){0, 1, 2, 3});
}

static void a_lower_priority_number_runs_first(void **state)
{
    expect_order(true, (const int[]){2, 1, 0, 3});
}

/* ---- ends of a generation ----------------------------------------------------------------------------------------------------
 */

static void stop_ids_end_and_min_tokens_forbids_them(void **state)
{
    static struct call plain, stopped;
    static uint32_t ids[40];
    struct engine_params params = default_params(30);
    struct world w;

    open_world(&w, toy, pool_of(64, 16));
    make_ids(ids, 40, 0, 3, VOCAB);
    params.temperature = 1;
    run_call(&w, &plain, ids, 40, &params);
    uint32_t stop = plain.choices[0].ids[5], at = 0;
    while (plain.choices[0].ids[at] != stop)
        at++;
    params.stop_ids = &stop;
    params.n_stop_ids = 1;
    run_call(&w, &stopped, ids, 40, &params);
    assert_int_equal(stopped.choices[0].finish, FINISH_STOP);
    assert_int_equal(stopped.choices[0].matched, stop);
    assert_int_equal(stopped.choices[0].n_ids, at + 1);
    assert_memory_equal(stopped.choices[0].text, plain.choices[0].text, stopped.choices[0].text_len);
    params.min_tokens = 20;
    run_call(&w, &stopped, ids, 40, &params);
    assert_true(stopped.choices[0].n_ids >= 20);
    for (size_t i = 0; i < 20; i++)
        assert_int_not_equal(stopped.choices[0].ids[i], stop);
    close_world(&w);
}

static void logprobs_come_with_every_token_and_alternatives_in_order(void **state)
{
    static struct call call;
    static uint32_t ids[40];
    struct engine_params params = default_params(12);
    struct world w;

    open_world(&w, toy, pool_of(64, 16));
    make_ids(ids, 40, 0, 3, VOCAB);
    params.want_logprobs = true;
    params.top_logprobs = 5;
    run_call(&w, &call, ids, 40, &params);
    for (int i = 0; i < 12; i++) {
        assert_true(call.choices[0].logprobs[i] <= 0);
        assert_int_equal(call.choices[0].n_top[i], 5);
    }
    close_world(&w);
}

static void many_requests_share_their_forwards(void **state)
{
    static struct call calls[16];
    static uint32_t ids[16][40];
    struct engine_params params = default_params(64);
    struct engine_options options = pool_of(400, 16);
    struct world w;

    options.fixed_chunk = 640; /* all prompts in one step, however slow the machine */
    open_world(&w, toy, options);
    close_gate(&w, &gate);
    for (int i = 0; i < 16; i++) {
        make_ids(ids[i], 40, 0, (uint64_t)i, VOCAB);
        start_call(&w, &calls[i], ids[i], 40, &params);
    }
    open_gate(&gate);
    for (int i = 0; i < 16; i++)
        wait_call(&calls[i]);
    check_engine(&w);
    struct engine_metrics *m = engine_metrics(w.engine);
    assert_int_equal(m->generation_tokens, 16 * 64);
    assert_int_equal(m->prompt_tokens, 16 * 40);
    assert_true(m->steps < 80);
    assert_int_equal(m->rows_per_forward.n, m->steps);
    assert_int_equal(m->rows_per_forward.sum_micro / 1000000, 16 * 40 + 16 * 63);
    assert_int_equal(m->ttft.n, 16);
    assert_int_equal(m->inter_token.n, 16 * 63);
    assert_int_equal(m->finished_length, 17); /* with the gate */
    assert_int_equal(m->running + m->waiting, 0);
    close_world(&w);
}

static int write_model(void **state)
{
    write_toy(toy, "random --layers 2 --hidden 64 --heads 4 --kv-heads 2 --ffn 96 --context 4096");
    return 0;
}

static int remove_model(void **state)
{
    return unlink(toy);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_prompt_over_the_pool_is_refused_with_both_numbers),
        cmocka_unit_test(a_prompt_over_the_context_is_refused_with_both_numbers),
        cmocka_unit_test(odd_requests_are_answered_or_refused),
        cmocka_unit_test(bad_options_are_refused),
        cmocka_unit_test(whole_block_prompts_leave_one_token_to_compute),
        cmocka_unit_test(turn_two_finds_prompt_and_reply),
        cmocka_unit_test(salts_do_not_see_each_other),
        cmocka_unit_test(without_prefix_caching_nothing_is_cached),
        cmocka_unit_test(other_choices_find_the_prompt_of_the_first),
        cmocka_unit_test(a_prefix_that_is_being_computed_is_waited_for),
        cmocka_unit_test(without_chunked_prefill_a_prompt_takes_one_step),
        cmocka_unit_test(requests_that_outgrow_the_pool_end_with_their_solo_answers),
        cmocka_unit_test(a_cancelled_request_frees_its_blocks),
        cmocka_unit_test(all_choices_of_a_cancelled_request_end),
        cmocka_unit_test(a_request_may_be_cancelled_before_it_is_seen),
        cmocka_unit_test(closing_ends_running_requests_with_an_error),
        cmocka_unit_test(a_draining_engine_finishes_and_takes_nothing_new),
        cmocka_unit_test(an_overloaded_engine_refuses),
        cmocka_unit_test(first_come_first_served),
        cmocka_unit_test(a_lower_priority_number_runs_first),
        cmocka_unit_test(stop_ids_end_and_min_tokens_forbids_them),
        cmocka_unit_test(logprobs_come_with_every_token_and_alternatives_in_order),
        cmocka_unit_test(many_requests_share_their_forwards),
    };
    return cmocka_run_group_tests(tests, write_model, remove_model);
}
