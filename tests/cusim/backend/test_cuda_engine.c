/* The engine on an emulated device, with drafts: where they are accepted as coupled, the device draws behind each of them in one
 * call and gives back tokens alone, and the answers are those without drafts, bit for bit. What comes back is counted in bytes.
 */
#include "gpu-worker/backend/cuda_plugin.h"
#include "gpu-worker/backend/sampling.h"
#include "tests/cusim/control.h"
#include "tests/unit/gpu-worker/engine_world.h"

kvgate_cuda_open_function kvgate_cuda_open; /* linked, not loaded */

/* Takes the place of the loader of kvgate-cuda.so. */
int cuda_backend_open(struct backend **out, const struct backend_options *options, struct kvg_error *err)
{
    return kvgate_cuda_open(out, options, err);
}

enum { PROMPT = 24, TOKENS = 14, KINDS = 6, CALLS = 3 };

static char ring[64], guesser[64];
static uint32_t ids[PROMPT];
static struct call want[CALLS], have[CALLS], gate;

/* After 97 + i most likely 97 + i + 1 of a ring of ten, else any of the ring, which prompt lookup finds; the guesser is wrong
 * after 97 + 5. */
static void write_models(void)
{
    const char *table = "{97 + i: {97 + j: (6.0 if j == (%s) %% 10 else 3.0) for j in range(10)} for i in range(10)}, history=%s";
    char text[256];
    snprintf(text, sizeof text, table, "i + 1", "0.05");
    write_script(ring, text);
    snprintf(text, sizeof text, table, "7 if i == 5 else i + 1", "0");
    write_script(guesser, text);
    for (uint32_t i = 0; i < PROMPT; i++)
        ids[i] = 97 + i % 10;
}

static const struct sample_bias bias = {99, 1.5f};

/* Kinds that the device may draw ahead. */
static struct engine_params params_of(uint32_t kind)
{
    struct engine_params params = default_params(TOKENS);
    params.seed = 77 + kind;
    params.temperature = kind ? 0.7f : 0;
    params.top_p = kind == 1 ? 0.9f : 1;
    params.top_k = kind == 2 ? 3 : 0;
    params.min_p = kind == 2 ? 0.01f : 0;
    params.want_logprobs = kind == 3;
    params.top_logprobs = kind == 3 ? 4 : 0;
    if (kind == 4) { /* the end is banned until the 9th token, in the middle of a run of drafts */
        params.ignore_eos = false;
        params.min_tokens = 9;
    }
    if (kind == 5) {
        params.biases = &bias;
        params.n_biases = 1;
    }
    return params;
}

/* What an engine did with the device. */
struct traffic {
    unsigned long copies;
    size_t bytes;
    uint64_t tokens, drafted, accepted, runs;
};

static void open_engine(struct world *w, uint32_t drafts)
{
    open_world(w, ring,
               (struct engine_options){.num_kv_blocks = 64,
                                       .block_size = 16,
                                       .max_num_seqs = 4,
                                       .max_num_batched_tokens = 64,
                                       .disable_prefix_caching = true,
                                       .speculate_ngram = drafts && !the_draft,
                                       .fixed_drafts = drafts});
}

static struct traffic traffic_of(struct world *w, const struct traffic *before)
{
    struct engine_metrics *m = engine_metrics(w->engine);
    struct traffic now = {
        .tokens = m->generation_tokens, .drafted = m->spec_drafted, .accepted = m->spec_accepted, .runs = m->spec_verifications};
    now.copies = cusim_copies_to_host(&now.bytes) - before->copies;
    now.bytes -= before->bytes;
    return now;
}

/* One request alone. */
static struct traffic ask(uint32_t drafts, const struct engine_params *params, struct call *call)
{
    struct world w;
    struct traffic before = {0};
    open_engine(&w, drafts);
    before.copies = cusim_copies_to_host(&before.bytes);
    run_call(&w, call, ids, PROMPT, params);
    struct traffic traffic = traffic_of(&w, &before);
    close_world(&w);
    return traffic;
}

static void expect_same(const struct reply *a, const struct reply *b)
{
    assert_same_reply(a, b);
    assert_memory_equal(a->logprobs, b->logprobs, a->n_ids * sizeof *a->logprobs);
    assert_memory_equal(a->n_top, b->n_top, a->n_ids * sizeof *a->n_top);
}

static void test_drafts_are_verified_in_one_call_that_returns_tokens(void **unused)
{
    uint64_t accepted = 0, rejected = 0;
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        struct engine_params params = params_of(kind);
        struct traffic plain = ask(0, &params, &want[0]);
        assert_int_equal(plain.bytes, plain.tokens * sizeof(struct sample_result));
        for (uint32_t drafts = 1; drafts <= 5; drafts += 4) {
            struct traffic t = ask(drafts, &params, &have[0]);
            expect_same(&have[0].choices[0], &want[0].choices[0]);
            assert_true(t.drafted > 0);
            assert_int_equal(t.copies, t.tokens - t.accepted); /* one a step */
            assert_int_equal(t.bytes, (t.tokens - t.accepted + t.drafted) * sizeof(struct sample_result));
            accepted += t.accepted;
            rejected += t.drafted - t.accepted;
        }
    }
    assert_true(accepted > 0 && rejected > 0);
}

static void test_drafts_of_a_batch_and_of_a_model_change_no_bit(void **unused)
{
    for (int with_model = 0; with_model < 2; with_model++)
        for (uint32_t drafts = 0; drafts <= 4; drafts += 4) {
            struct world w;
            the_draft = with_model ? guesser : NULL;
            open_engine(&w, drafts);
            struct call *calls = drafts ? have : want;
            close_gate(&w, &gate);
            for (uint32_t i = 0; i < CALLS; i++) {
                struct engine_params params = params_of(i);
                start_call(&w, &calls[i], ids, PROMPT - 3 * i, &params);
            }
            open_gate(&gate);
            for (uint32_t i = 0; i < CALLS; i++)
                wait_call(&calls[i]);
            assert_true(!drafts || engine_metrics(w.engine)->spec_accepted > 0);
            close_world(&w);
            for (uint32_t i = 0; i < CALLS && drafts; i++)
                expect_same(&have[i].choices[0], &want[i].choices[0]);
        }
    the_draft = NULL;
}

/* A penalty changes what is drawn behind a token, so nothing is drawn before the token is known. */
static void test_penalties_are_drawn_token_by_token(void **unused)
{
    struct engine_params params = params_of(1);
    params.frequency_penalty = 0.3f;
    params.repetition_penalty = 1.1f;
    ask(0, &params, &want[0]);
    struct traffic t = ask(4, &params, &have[0]);
    expect_same(&have[0].choices[0], &want[0].choices[0]);
    assert_true(t.accepted > 0);
    assert_int_equal(t.copies, t.tokens);
    assert_int_equal(t.bytes, t.tokens * sizeof(struct sample_result));
}

/* The other rules weigh probabilities on the host: it copies the verified rows, once a step, and no other logits. */
static void test_other_rules_copy_the_verified_rows_once(void **unused)
{
    uint64_t rows = 0;
    for (the_rule = ACCEPT_REJECTION; the_rule <= ACCEPT_TOP_P; the_rule++)
        for (uint32_t kind = 0; kind < 2; kind++) {
            struct engine_params params = params_of(kind);
            struct traffic t = ask(4, &params, &have[0]);
            size_t row = sizeof(float) * 259; /* bytes, and three of control */
            assert_int_equal(t.bytes, t.tokens * sizeof(struct sample_result) + (t.runs + t.drafted) * row);
            assert_int_equal(have[0].choices[0].n_ids, TOKENS);
            rows += t.runs + t.drafted;
        }
    assert_true(rows > 0);
    the_rule = ACCEPT_COUPLED;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_drafts_are_verified_in_one_call_that_returns_tokens),
        cmocka_unit_test(test_drafts_of_a_batch_and_of_a_model_change_no_bit),
        cmocka_unit_test(test_penalties_are_drawn_token_by_token),
        cmocka_unit_test(test_other_rules_copy_the_verified_rows_once),
    };
#ifdef ON_DEVICE
    printf("skipped: nobody counts what a real device copies\n");
    return 0;
#endif
    the_device = "cuda";
    write_models();
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(ring);
    unlink(guesser);
    return failed;
}
