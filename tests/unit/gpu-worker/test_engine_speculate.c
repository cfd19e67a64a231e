/* Drafts change the speed and never the output: with and without them every request gives the same bits, whatever its
 * parameters, the number of drafts, the batch around it and the blocks there are; and nothing of a rejected draft stays.
 */
#include <math.h>
#include "engine_world.h"
#include "gpu-worker/engine/drafter.h"

enum { MOST = 16, N_PARAMS = 8, MAX_TOKENS = 60 };

static bool with_ngram = true; /* what the engines of these tests draft from, beside the_draft */

/* After 97 + i most likely 97 + i + 1 of a ring of ten, else any of the ring; what came before shifts it a little. */
#define RING(five)                                                                                                               \
    "{97 + i: {97 + j: (6.0 if j == (" five " if i == 5 else i + 1) % 10 else 3.0) for j in range(10)} for i in range(10)}"

static char ring[64], plain_ring[64], toy[64]; /* plain_ring: without the history, and wrong after 97 + 5 */
static uint32_t ids[MOST][256];
static struct call want[MOST], have[MOST], gate;

static const struct sample_bias to_few[] = {{3, 9}, {5, 9}, {7, 9.5f}};

/* Each stands for one kind of parameter that a wrong count of tokens, position or row would show in. */
static struct engine_params params_of(uint32_t i)
{
    struct engine_params params = default_params(MAX_TOKENS - i);

    params.seed = 1000 + i;
    params.temperature = i % 2 ? 0.8f : 0;
    params.want_logprobs = true;
    params.top_logprobs = 3;
    switch (i % N_PARAMS) {
    case 1:
        params.top_p = 0.3f;
        break;
    case 2:
        params.repetition_penalty = 1.1f;
        params.frequency_penalty = 0.05f;
        break;
    case 3:
        params.presence_penalty = 0.4f;
        params.frequency_penalty = 0.1f;
        params.biases = to_few;
        params.n_biases = 3;
        break;
    case 4:
        params.biases = to_few;
        params.n_biases = 3;
        params.frequency_penalty = 0.02f;
        break;
    case 5:
        params.min_p = 0.2f;
        break;
    case 6:
        params.n = 3;
        params.temperature = 0.5f;
        params.top_k = 2;
        break;
    case 7:
        params.n = 2;
        params.temperature = 1;
        params.biases = to_few;
        params.n_biases = 3;
    }
    return params;
}

static uint32_t prompt_len(uint32_t i)
{
    return 70 - i % 7 * 3;
}

/* Prompts repeat themselves, and the first half is the same for all. */
static void make_prompts(bool of_ring)
{
    for (uint32_t i = 0; i < MOST; i++) {
        make_ids(ids[i], 40, 20, i, of_ring ? 10 : 256);
        for (uint32_t k = 0; k < 256; k++)
            ids[i][k] = (of_ring ? 97 : 0) + ids[i][k % 40] % (of_ring ? 10 : 256);
    }
}

static void start(struct world *w, struct call *call, uint32_t i)
{
    struct engine_params params = params_of(i);
    start_call(w, call, ids[i], prompt_len(i), &params);
}

static void expect_same(const struct call *a, const struct call *b)
{
    for (int c = 0; c < MOST_CHOICES; c++) {
        const struct reply *x = &a->choices[c], *y = &b->choices[c];
        assert_same_reply(x, y);
        assert_memory_equal(x->logprobs, y->logprobs, x->n_ids * sizeof *x->logprobs);
        assert_memory_equal(x->n_top, y->n_top, x->n_ids * sizeof *x->n_top);
        assert_int_equal(x->matched, y->matched);
        assert_int_equal(x->completion_tokens, y->completion_tokens);
    }
}

static void compute_reference(const char *path, uint32_t n)
{
    struct world w;

    open_world(&w, path, (struct engine_options){.num_kv_blocks = 400, .disable_prefix_caching = true, .fixed_chunk = 2048});
    for (uint32_t i = 0; i < n; i++) {
        start(&w, &want[i], i);
        wait_call(&want[i]);
    }
    close_world(&w);
}

static void all_at_once(struct world *w, uint32_t n)
{
    close_gate(w, &gate);
    for (uint32_t i = 0; i < n; i++)
        start(w, &have[i], i);
    open_gate(&gate);
    for (uint32_t i = 0; i < n; i++) {
        wait_call(&have[i]);
        expect_same(&have[i], &want[i]);
    }
}

static void expect_drafts(struct world *w)
{
    uint64_t drafted = engine_metrics(w->engine)->spec_drafted, accepted = engine_metrics(w->engine)->spec_accepted;
    assert_true(drafted > 0);
    assert_true(accepted > 0 || the_draft == toy);
    assert_true(accepted < drafted);
}

static void check_numbers_of_drafts(const char *path)
{
    for (uint32_t k = 0; k <= 8; k++) { /* 0: as it pays */
        struct world w;
        open_world(
            &w, path,
            (struct engine_options){.num_kv_blocks = 400, .block_size = 16, .speculate_ngram = with_ngram, .fixed_drafts = k});
        for (uint32_t i = 0; i < N_PARAMS; i++) {
            start(&w, &have[i], i);
            wait_call(&have[i]);
            expect_same(&have[i], &want[i]);
        }
        if (k)
            expect_drafts(&w);
        close_world(&w);
    }
}

static void check_batches(const char *path)
{
    static const uint32_t chunks[] = {16, 40, 0};

    for (uint32_t i = 0; i < 3; i++)
        for (uint32_t k = 0; k <= 6; k += 3) {
            struct world w;
            open_world(&w, path,
                       (struct engine_options){.num_kv_blocks = 400,
                                               .fixed_chunk = chunks[i],
                                               .max_num_batched_tokens = i ? 2048 : 48,
                                               .max_num_seqs = 24,
                                               .speculate_ngram = with_ngram,
                                               .fixed_drafts = k});
            all_at_once(&w, N_PARAMS); /* cold */
            all_at_once(&w, MOST);     /* half of them cached */
            if (k)
                expect_drafts(&w);
            close_world(&w);
        }
}

static void check_preempted(const char *path)
{
    for (uint32_t k = 1; k <= 9; k += 4) {
        struct world w;
        open_world(&w, path,
                   (struct engine_options){.num_kv_blocks = 16,
                                           .block_size = 16,
                                           .disable_prefix_caching = k == 5,
                                           .speculate_ngram = with_ngram,
                                           .fixed_drafts = k});
        all_at_once(&w, N_PARAMS);
        assert_true(engine_metrics(w.engine)->preemptions > 0);
        expect_drafts(&w);
        close_world(&w);
    }
}

static void drafts_change_no_bit(void **state)
{
    for (int i = 0; i < 2; i++) {
        const char *path = i ? ring : toy;
        make_prompts(i);
        compute_reference(path, MOST);
        check_numbers_of_drafts(path);
        check_batches(path);
        check_preempted(path);
    }
}

/* A draft model that mostly guesses right, and one that knows nothing, both beside prompt lookup and without it. */
static void a_draft_model_changes_no_bit(void **state)
{
    make_prompts(true);
    compute_reference(ring, MOST);
    for (int i = 0; i < 3; i++) {
        the_draft = i ? plain_ring : toy;
        with_ngram = i == 2;
        check_numbers_of_drafts(ring);
        check_batches(ring);
        check_preempted(ring);
    }
    the_draft = NULL;
    with_ngram = true;
}

/* The model itself as its draft model: whatever is drafted is right, so KV, positions and noise of the drafts are. */
static void a_model_guesses_itself(void **state)
{
    struct world w;

    the_draft = toy;
    with_ngram = false;
    make_prompts(false);
    for (uint32_t k = 1; k <= 7; k += 3) {
        open_world(&w, toy, (struct engine_options){.num_kv_blocks = 40, .block_size = 16, .fixed_chunk = 40, .fixed_drafts = k});
        struct engine_metrics *m = engine_metrics(w.engine);
        for (uint32_t i = 0; i < 4; i++) {
            struct engine_params params = default_params(60);
            params.temperature = i % 2 ? 0.8f : 0;
            params.seed = i;
            run_call(&w, &have[0], ids[i % 2], 200 - 60 * (i / 2), &params); /* the third and fourth are cached */
        }
        print_message("%u drafts at once: %llu of %llu accepted\n", k, (unsigned long long)m->spec_accepted,
                      (unsigned long long)m->spec_drafted);
        assert_true(m->spec_drafted >= 4 * 60 * k / (k + 1) - 16);
        assert_int_equal(m->spec_accepted, m->spec_drafted);
        close_world(&w);
    }
    the_draft = NULL;
    with_ngram = true;
}

static int try_draft(const char *path, struct kvg_error *err)
{
    struct kvg_prompt_model *target, *draft;

    assert_int_equal(kvg_prompt_model_open(&target, toy, 0, err), 0);
    assert_int_equal(kvg_prompt_model_open(&draft, path, 0, err), 0);
    uint32_t n = kvg_tokenizer_info(kvg_prompt_model_tokenizer(draft))->n_vocab;
    int rc = drafter_check_vocab(kvg_prompt_model_tokenizer(target), kvg_prompt_model_tokenizer(draft), n, err);
    kvg_prompt_model_close(target);
    kvg_prompt_model_close(draft);
    return rc;
}

static void another_vocabulary_is_refused(void **state)
{
    struct kvg_error err;
    char path[64];

    write_script_with(path, "pieces=['zzz']", "{}"); /* the control tokens come one id later */
    assert_int_equal(try_draft(path, &err), KVG_INVALID);
    assert_non_null(strstr(err.message, "id 256 is \"zzz\", the model's is \"<|endoftext|>\""));
    unlink(path);
    write_script_with(path, "control=('<|endoftext|>', '<|im_end|>')", "{}");
    assert_int_equal(try_draft(path, &err), KVG_INVALID);
    assert_non_null(strstr(err.message, "id 257"));
    unlink(path);
    assert_int_equal(try_draft(ring, &err), 0);
    write_script_with(path, "user_defined=['<more>']", "{}"); /* further ids of the draft model do no harm */
    assert_int_equal(try_draft(path, &err), 0);
    unlink(path);
}

/* The draft model's most probable token is one that the model does not have, in rows that the model does not have. */
static void drafts_are_ids_of_the_model(void **state)
{
    struct engine_params params = default_params(30);
    struct world w;
    char path[64];

    write_script_with(path, "user_defined=['<more>']",
                      "{97 + i: {v.id('<more>'): 9.0, 97 + (i + 1) % 10: 8.0} for i in range(10)}, rows=1152, pad_logit=20.0");
    make_prompts(true);
    compute_reference(plain_ring, 1);
    the_draft = path;
    with_ngram = false;
    open_world(&w, plain_ring, (struct engine_options){.num_kv_blocks = 100, .fixed_drafts = 4});
    start(&w, &have[0], 0);
    wait_call(&have[0]);
    expect_same(&have[0], &want[0]);
    run_call(&w, &have[0], ids[0], 40, &params);
    assert_true(engine_metrics(w.engine)->spec_accepted > 10);
    close_world(&w);
    the_draft = NULL;
    with_ngram = true;
    unlink(path);
}

/* 8193 ids, which fill no tile, in matrices of 8320 rows; temperature 4 makes all of them about as likely. */
static void write_odd_vocabulary(char path[64], int seed)
{
    char command[512];

    snprintf(path, 64, "/tmp/kvgate-odd-%d-%d.gguf", (int)getpid(), seed);
    snprintf(command, sizeof command,
             "PYTHONPATH=tests/tools python3 -c \"import toy_model as t; "
             "t.random_model('%s', t.Vocabulary(pieces=['p%%d' %% i for i in range(7934)]), "
             "t.Shape(layers=1, hidden=64, heads=2, kv_heads=1, rows=8320), seed=%d)\"",
             path, seed);
    if (system(command) != 0)
        fail_msg("%s failed", command);
}

static void tokens_are_ids_of_an_odd_vocabulary(void **state)
{
    char model[64], draft[64];

    write_odd_vocabulary(model, 1);
    write_odd_vocabulary(draft, 2);
    the_draft = draft;
    for (the_rule = ACCEPT_COUPLED; the_rule <= ACCEPT_TOP_P; the_rule++) {
        struct world w;
        open_world(&w, model, (struct engine_options){.num_kv_blocks = 100, .fixed_drafts = 4});
        uint32_t n_vocab = kvg_tokenizer_info(kvg_prompt_model_tokenizer(w.prompt_model))->n_vocab;
        assert_int_equal(n_vocab, 8193);
        for (uint32_t i = 0; i < 4; i++) {
            struct engine_params params = default_params(SANITIZED ? 30 : 150);
            uint32_t last = n_vocab - 1;
            params.temperature = 4;
            params.seed = i;
            params.top_p = i == 3 ? 0.95f : 1;
            run_call(&w, &have[0], &last, 1, &params);
            assert_int_equal(have[0].choices[0].n_ids, params.max_tokens);
            for (uint32_t k = 0; k < params.max_tokens; k++)
                assert_true(have[0].choices[0].ids[k] < n_vocab);
        }
        assert_true(engine_metrics(w.engine)->spec_drafted > 100);
        close_world(&w);
    }
    the_rule = ACCEPT_COUPLED;
    the_draft = NULL;
    unlink(model);
    unlink(draft);
}

/* The shortest drafts of all: one token, from the shortest prompt that has one. */
static void a_single_draft_is_verified(void **state)
{
    static uint32_t same[64][3];
    struct engine_params params = default_params(40);
    struct world plain, w;

    open_world(&plain, toy, (struct engine_options){.num_kv_blocks = 100});
    open_world(&w, toy, (struct engine_options){.num_kv_blocks = 100, .speculate_ngram = with_ngram, .fixed_drafts = 1});
    for (uint32_t i = 0; i < 64; i++) {
        for (int k = 0; k < 3; k++)
            same[i][k] = i;
        run_call(&plain, &want[0], same[i], 3, &params);
        run_call(&w, &have[0], same[i], 3, &params);
        expect_same(&have[0], &want[0]);
    }
    expect_drafts(&w);
    close_world(&plain);
    close_world(&w);
}

/* Before each event the blocks in use, as the step before left them, are those of the ids so far. */
struct watch {
    struct engine_metrics *metrics;
    uint32_t n_events, too_many;
    _Atomic bool ended;
};

static void watch_blocks(void *context, const struct engine_event *event)
{
    struct watch *watch = context;
    uint32_t n_ids = event->prompt_tokens + event->completion_tokens - 1;

    watch->n_events++;
    watch->too_many += event->completion_tokens > 1 && watch->metrics->blocks_used > (n_ids + 15) / 16;
    watch->ended = event->last_choice;
}

static void rejected_drafts_hold_no_block(void **state)
{
    struct kvg_error err;
    struct world w;

    make_prompts(true);
    open_world(&w, ring,
               (struct engine_options){.num_kv_blocks = 100, .block_size = 16, .speculate_ngram = with_ngram, .fixed_drafts = 8});
    for (uint32_t i = 0; i < 4; i++) {
        struct watch watch = {.metrics = engine_metrics(w.engine)};
        struct engine_params params = default_params(100);
        uint64_t id;
        params.temperature = 1;
        params.seed = i;
        struct engine_submit submit = {.ids = ids[i], .n_ids = 40 + i, .params = params, .sink = watch_blocks, .context = &watch};
        assert_int_equal(engine_submit(w.engine, &submit, &id, &err), 0);
        check_engine(&w); /* waits for it */
        assert_true(watch.ended);
        assert_int_equal(watch.n_events, 100);
        assert_int_equal(watch.too_many, 0);
    }
    expect_drafts(&w);
    close_world(&w);
}

/* ---- ends inside an accepted run ------------------------------------------------------------------------------------------- */

/* A fixed order a b c d e f g h a …, which the prompt shows once; its `e` may be the model's end token. */
#define LETTERS                                                                                                                  \
    "{97: 98, 98: 99, 99: 100, 100: {v.eos: 20.0, 122: 10.0}, v.eos: 102, 102: 103, 103: 104, 104: 97, 122: 102}, history=0.02"

static char letters[64];
static struct world plain_world, spec_world;
static uint32_t n_letters, eos;
static uint32_t letter_ids[128];

/* A prompt of n ids that ends with "a": the first token is b, then come drafts. */
static void make_letters(uint32_t n)
{
    static const char order[] = "abcd?fgh";

    for (uint32_t i = 0; i < n; i++) {
        char c = order[(i + 8 - (n - 1) % 8) % 8];
        letter_ids[i] = c == '?' ? eos : (uint32_t)c;
    }
    n_letters = n;
}

static void expect_same_end(const struct engine_params *params, uint32_t n_tokens)
{
    run_call(&plain_world, &want[0], letter_ids, n_letters, params);
    run_call(&spec_world, &have[0], letter_ids, n_letters, params);
    expect_same(&have[0], &want[0]);
    assert_int_equal(have[0].choices[0].n_ids, n_tokens);
    assert_int_equal(have[0].choices[0].completion_tokens, n_tokens);
    check_engine(&plain_world);
    check_engine(&spec_world);
    assert_int_equal(engine_metrics(spec_world.engine)->blocks_cached, engine_metrics(plain_world.engine)->blocks_cached);
}

/* How much of what the drafts would have gone on with is cached: as much as without drafts. */
static void expect_same_cache(void)
{
    struct engine_params params = default_params(1);

    make_letters(n_letters + 24);
    run_call(&plain_world, &want[0], letter_ids, n_letters, &params);
    run_call(&spec_world, &have[0], letter_ids, n_letters, &params);
    assert_int_equal(have[0].choices[0].cached_tokens, want[0].choices[0].cached_tokens);
}

static void open_letters(void)
{
    open_world(&plain_world, letters, (struct engine_options){.num_kv_blocks = 200, .block_size = 16});
    open_world(&spec_world, letters,
               (struct engine_options){.num_kv_blocks = 200, .block_size = 16, .speculate_ngram = with_ngram, .fixed_drafts = 5});
    eos = kvg_tokenizer_info(kvg_prompt_model_tokenizer(plain_world.prompt_model))->end_ids[0];
}

static void close_letters(void)
{
    close_world(&plain_world);
    close_world(&spec_world);
}

static void the_end_token_in_a_run_ends_it(void **state)
{
    struct engine_params params = default_params(100);

    open_letters();
    params.ignore_eos = false;
    params.seed = 3;
    make_letters(17);
    expect_same_end(&params, 4); /* b c d end: three drafts of five */
    assert_int_equal(have[0].choices[0].matched, eos);
    assert_string_equal(have[0].choices[0].text, "bcd");
    assert_int_equal(engine_metrics(spec_world.engine)->spec_drafted, 5);
    assert_int_equal(engine_metrics(spec_world.engine)->spec_accepted, 3);
    params.ignore_eos = true;
    params.max_tokens = 9;
    expect_same_end(&params, 9);
    params.ignore_eos = false;
    params.max_tokens = 40;
    params.min_tokens = 10; /* the drafted end is banned there, and another token takes its place */
    run_call(&plain_world, &want[0], letter_ids, n_letters, &params);
    run_call(&spec_world, &have[0], letter_ids, n_letters, &params);
    expect_same(&have[0], &want[0]);
    assert_true(have[0].choices[0].n_ids > 10);
    close_letters();
}

static void nothing_behind_the_end_is_cached(void **state)
{
    struct engine_params params = default_params(100);

    params.ignore_eos = false;
    for (uint32_t n = 20; n < 44; n++) { /* the end falls before, on and behind a block's last token */
        open_letters();
        make_letters(n);
        expect_same_end(&params, 4);
        expect_same_cache();
        close_letters();
    }
}

static void a_stop_string_in_a_run_ends_it(void **state)
{
    const char *stop[] = {"cd"};
    size_t len = 2;
    struct engine_params params = default_params(100);

    open_letters();
    params.stop = stop;
    params.stop_len = &len;
    params.n_stop = 1;
    make_letters(25);
    expect_same_end(&params, 3);
    assert_string_equal(have[0].choices[0].text, "b");
    params.include_stop = true;
    expect_same_end(&params, 3);
    params.min_tokens = 5; /* the second "cd" stops */
    expect_same_end(&params, 11);
    uint32_t id = 'd';
    params = default_params(100);
    params.stop_ids = &id;
    params.n_stop_ids = 1;
    expect_same_end(&params, 3);
    close_letters();
}

static void no_more_than_max_tokens(void **state)
{
    open_letters();
    make_letters(25);
    for (uint32_t n = 1; n <= 20; n++) {
        struct engine_params params = default_params(n);
        expect_same_end(&params, n);
        assert_int_equal(have[0].choices[0].finish, FINISH_LENGTH);
    }
    close_letters();
}

/* ---- other rules ------------------------------------------------------------------------------------------------------------
 */

/* At temperature 0 there is one token to draw, so every rule gives what plain decoding gives, with all that ends a request or
 * must leave nothing behind. */
static void at_temperature_0_no_rule_changes_a_bit(void **state)
{
    make_prompts(true);
    compute_reference(ring, N_PARAMS);
    for (the_rule = ACCEPT_REJECTION; the_rule <= ACCEPT_TOP_P; the_rule++) {
        the_draft = the_rule == ACCEPT_TOP_P ? NULL : plain_ring;
        for (uint32_t k = 0; k <= 4; k += 2) {
            struct world w;
            open_world(&w, ring,
                       (struct engine_options){
                           .num_kv_blocks = k == 2 ? 16 : 400, .block_size = 16, .speculate_ngram = true, .fixed_drafts = k});
            for (uint32_t i = 0; i < N_PARAMS; i += 2)
                if (params_of(i).temperature == 0)
                    start(&w, &have[i], i);
            for (uint32_t i = 0; i < N_PARAMS; i += 2)
                if (params_of(i).temperature == 0) {
                    wait_call(&have[i]);
                    expect_same(&have[i], &want[i]);
                }
            if (k)
                expect_drafts(&w);
            close_world(&w);
        }
    }
    the_rule = ACCEPT_COUPLED;
    the_draft = NULL;
}

static void ends_are_ends_by_every_rule(void **state)
{
    for (the_rule = ACCEPT_REJECTION; the_rule <= ACCEPT_TOP_P; the_rule++) {
        the_end_token_in_a_run_ends_it(state);
        a_stop_string_in_a_run_ends_it(state);
        no_more_than_max_tokens(state);
    }
    the_rule = ACCEPT_COUPLED;
}

/* ---- the distribution ------------------------------------------------------------------------------------------------------ */

/* After any of ten tokens the same ten, with known chances: draws are independent, and pairs come again by chance. */
#define DICE "{97 + i: {97 + j: 10 + 0.2 * j for j in range(10)} for i in range(10)}"

#define LOADED_DICE "{97 + i: {97 + j: 10 + 0.5 * abs(j - 5) for j in range(10)} for i in range(10)}"

static double chi_square(const uint64_t *seen, uint64_t n, uint32_t top_k)
{
    double sum = 0, chi = 0;

    for (uint32_t j = 10 - top_k; j < 10; j++)
        sum += exp(0.2 * j);
    for (uint32_t j = 10 - top_k; j < 10; j++) {
        double expected = (double)n * exp(0.2 * j) / sum;
        chi += ((double)seen[j] - expected) * ((double)seen[j] - expected) / expected;
    }
    return chi;
}

static void check_draws(bool by_model)
{
    static const uint32_t top_k[] = {10, 4};
    static const double limit[] = {27.9, 16.3}; /* 0.1 % with 9 and 3 degrees of freedom */
    char dice[64], loaded[64];
    struct world w;

    write_script(dice, DICE ", floor=-20.0");
    write_script(loaded, LOADED_DICE ", floor=-20.0");
    the_draft = by_model ? loaded : NULL;
    open_world(&w, dice, (struct engine_options){.num_kv_blocks = 300, .speculate_ngram = !by_model, .fixed_drafts = 4});
    for (int i = 0; i < 2; i++) {
        uint64_t seen[10] = {0}, n = 0;
        for (uint64_t seed = 0; seed < 40; seed++) {
            struct engine_params params = default_params(500);
            uint32_t a = 97;
            params.temperature = 1;
            params.seed = seed * 7919 + 1;
            params.top_k = top_k[i];
            run_call(&w, &have[0], &a, 1, &params);
            for (size_t k = 0; k < have[0].choices[0].n_ids; k++, n++) {
                assert_in_range(have[0].choices[0].ids[k], 97 + 10 - top_k[i], 106);
                seen[have[0].choices[0].ids[k] - 97]++;
            }
        }
        double chi = chi_square(seen, n, top_k[i]);
        print_message("%llu draws from %u: chi-square %.1f\n", (unsigned long long)n, top_k[i], chi);
        assert_true(chi < limit[i]);
    }
    expect_drafts(&w);
    close_world(&w);
    the_draft = NULL;
    unlink(dice);
    unlink(loaded);
}

static void draws_follow_the_distribution(void **state)
{
    check_draws(false);
    the_rule = ACCEPT_REJECTION;
    check_draws(false);
    check_draws(true);
    the_rule = ACCEPT_COUPLED;
}

/* ---- a real model ---------------------------------------------------------------------------------------------------------- */

static void smollm2(void **state)
{
    struct world w;

    if (access(SMOLLM2, R_OK) != 0) {
        print_message("skipped: %s is not there\n", SMOLLM2);
        skip();
    }
    make_prompts(false);
    compute_reference(SMOLLM2, 4);
    open_world(&w, SMOLLM2,
               (struct engine_options){
                   .num_kv_blocks = 100, .max_num_seqs = 8, .fixed_chunk = 32, .speculate_ngram = with_ngram, .fixed_drafts = 5});
    all_at_once(&w, 4);
    expect_drafts(&w);
    close_world(&w);
}

static int set_up(void **state)
{
    write_toy(toy, "random --layers 2 --hidden 64 --heads 4 --kv-heads 2 --ffn 96 --context 2048");
    write_script(ring, RING("6") ", history=0.05");
    write_script(plain_ring, RING("2"));
    write_script(letters, LETTERS);
    return 0;
}

static int tear_down(void **state)
{
    unlink(toy);
    unlink(ring);
    unlink(plain_ring);
    return unlink(letters);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(drafts_change_no_bit),
        cmocka_unit_test(a_draft_model_changes_no_bit),
        cmocka_unit_test(a_model_guesses_itself),
        cmocka_unit_test(another_vocabulary_is_refused),
        cmocka_unit_test(drafts_are_ids_of_the_model),
        cmocka_unit_test(tokens_are_ids_of_an_odd_vocabulary),
        cmocka_unit_test(a_single_draft_is_verified),
        cmocka_unit_test(rejected_drafts_hold_no_block),
        cmocka_unit_test(the_end_token_in_a_run_ends_it),
        cmocka_unit_test(nothing_behind_the_end_is_cached),
        cmocka_unit_test(a_stop_string_in_a_run_ends_it),
        cmocka_unit_test(no_more_than_max_tokens),
        cmocka_unit_test(at_temperature_0_no_rule_changes_a_bit),
        cmocka_unit_test(ends_are_ends_by_every_rule),
        cmocka_unit_test(draws_follow_the_distribution),
        cmocka_unit_test(smollm2),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
