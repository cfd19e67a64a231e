/* A request's output is the same bits whatever happens around it: cold or cached, in any chunk size, alone or in a batch of
 * 32, preempted or not; at temperature 0 and at 0.8 with a seed. The full matrix on a small random model, and a part of it on
 * each way to keep keys and values, and on the real SmolLM2.
 */
#include "engine_world.h"

enum { MOST = 32 };

struct matrix {
    const char *path;
    uint32_t n_vocab, n, prompt, shared, max_tokens, few_blocks; /* few: not enough for all, but for one */
    const uint32_t *chunks;                                      /* ends with 0 */
};

static uint32_t ids[MOST][1024];
static struct call want[2][MOST], have[MOST], gate;

static struct engine_params params_of(const struct matrix *m, int warm, uint32_t i)
{
    struct engine_params params = default_params(m->max_tokens);

    params.temperature = warm ? 0.8f : 0;
    params.seed = 1000 + i;
    params.top_p = i % 3 ? 0.95f : 1;
    params.top_k = i % 4 ? 0 : 40;
    params.repetition_penalty = i % 5 ? 1 : 1.1f;
    return params;
}

/* Lengths differ, so that sequences are at different points of their blocks. */
static uint32_t prompt_len(const struct matrix *m, uint32_t i)
{
    return m->prompt - i % 7 * 3;
}

static void start(struct world *w, const struct matrix *m, struct call *call, int warm, uint32_t i)
{
    struct engine_params params = params_of(m, warm, i);
    start_call(w, call, ids[i], prompt_len(m, i), &params);
}

/* Cold, alone, in one chunk. */
static void compute_reference(const struct matrix *m)
{
    struct world w;

    for (uint32_t i = 0; i < m->n; i++)
        make_ids(ids[i], m->prompt, m->shared, i, m->n_vocab);
    open_world(&w, m->path, (struct engine_options){.num_kv_blocks = 400, .disable_prefix_caching = true, .fixed_chunk = 2048});
    for (int warm = 0; warm < 2; warm++)
        for (uint32_t i = 0; i < m->n; i++) {
            start(&w, m, &want[warm][i], warm, i);
            wait_call(&want[warm][i]);
            assert_int_equal(want[warm][i].choices[0].n_ids, m->max_tokens);
        }
    close_world(&w);
    uint32_t differ = 0;
    for (uint32_t i = 0; i < m->n; i++)
        differ += memcmp(want[0][i].choices[0].ids, want[1][i].choices[0].ids, m->max_tokens * sizeof **ids) != 0;
    assert_true(differ > m->n / 2); /* the seed matters */
}

static void expect_same(const struct matrix *m, int warm, uint32_t from, uint32_t to)
{
    for (uint32_t i = from; i < to; i++) {
        wait_call(&have[i]);
        assert_same_reply(&have[i].choices[0], &want[warm][i].choices[0]);
    }
}

static void one_by_one(struct world *w, const struct matrix *m, int warm, bool expect_cached)
{
    for (uint32_t i = 0; i < m->n; i++) {
        start(w, m, &have[i], warm, i);
        expect_same(m, warm, i, i + 1);
        if (expect_cached)
            assert_true(have[i].choices[0].cached_tokens >= (prompt_len(m, i) - 1) / 32 * 32);
    }
}

static void all_at_once(struct world *w, const struct matrix *m, int warm)
{
    close_gate(w, &gate);
    for (uint32_t i = 0; i < m->n; i++)
        start(w, m, &have[i], warm, i);
    open_gate(&gate);
    expect_same(m, warm, 0, m->n);
}

static void check_chunks(const struct matrix *m)
{
    for (const uint32_t *chunk = m->chunks; *chunk; chunk++) {
        struct world w;
        open_world(&w, m->path, (struct engine_options){.num_kv_blocks = 400, .fixed_chunk = *chunk});
        all_at_once(&w, m, 1);      /* cold, in a batch */
        one_by_one(&w, m, 1, true); /* cached, alone */
        all_at_once(&w, m, 0);      /* cached, in a batch */
        close_world(&w);
    }
}

static void check_preempted(const struct matrix *m)
{
    struct world w;

    for (int warm = 0; warm < 2; warm++) {
        uint32_t blocks = m->few_blocks + (uint32_t)warm; /* without a cache nothing is shared */
        open_world(&w, m->path, (struct engine_options){.num_kv_blocks = blocks, .disable_prefix_caching = warm});
        all_at_once(&w, m, warm);
        check_engine(&w);
        uint64_t preemptions = engine_metrics(w.engine)->preemptions;
        print_message("%u requests on %u blocks: %llu preemptions\n", m->n, blocks, (unsigned long long)preemptions);
        assert_true(preemptions >= 1);
        close_world(&w);
    }
}

static void check_own_pace(const struct matrix *m)
{
    struct world w;

    open_world(&w, m->path, (struct engine_options){.num_kv_blocks = 400, .max_num_batched_tokens = 512, .block_size = 16});
    all_at_once(&w, m, 1);
    all_at_once(&w, m, 0);
    close_world(&w);
}

static void toy_model_full_matrix(void **state)
{
    static const uint32_t chunks[] = {16, 64, 500, 2048, 17, 0};
    char path[64];
    struct matrix m = {.path = path,
                       .n_vocab = 256,
                       .n = SANITIZED ? 8 : 32,
                       .prompt = 200,
                       .shared = 100,
                       .max_tokens = 70,
                       .few_blocks = 22,
                       .chunks = SANITIZED ? chunks + 4 : chunks};

    write_toy(path, "random --layers 2 --hidden 64 --heads 4 --kv-heads 2 --ffn 96 --context 2048");
    compute_reference(&m);
    check_chunks(&m);
    check_own_pace(&m);
    check_preempted(&m);
    unlink(path);
}

/* Short of the full matrix; each dtype has kernels of its own. */
static void toy_model_in_each_kv_dtype(void **state)
{
    static const uint32_t chunks[] = {17, 0};
    static const char *const dtypes[] = {"f16", "bf16", "int8"};
    char path[64];
    struct matrix m = {.path = path,
                       .n_vocab = 256,
                       .n = 8,
                       .prompt = 290, /* past a segment of keys */
                       .shared = 100,
                       .max_tokens = 100,
                       .few_blocks = 20,
                       .chunks = chunks};

    write_toy(path, "random --layers 2 --hidden 64 --heads 4 --kv-heads 2 --ffn 96 --context 2048");
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        the_kv_dtype = dtypes[i];
        compute_reference(&m);
        check_chunks(&m);
        check_preempted(&m);
    }
    the_kv_dtype = NULL;
    unlink(path);
}

static void smollm2(void **state)
{
    static const uint32_t chunks[] = {16, 0};
    struct matrix m = {.path = SMOLLM2,
                       .n_vocab = 49152,
                       .n = 4,
                       .prompt = 90,
                       .shared = 64,
                       .max_tokens = 40,
                       .few_blocks = 6,
                       .chunks = chunks};

    if (SANITIZED || access(SMOLLM2, R_OK) != 0) {
        print_message("skipped: %s\n", SANITIZED ? "too slow under a sanitizer" : SMOLLM2 " is not there");
        skip();
    }
    compute_reference(&m);
    check_chunks(&m);
    check_own_pace(&m);
    m.n = 3;
    check_preempted(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(toy_model_full_matrix),
        cmocka_unit_test(toy_model_in_each_kv_dtype),
        cmocka_unit_test(smollm2),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
