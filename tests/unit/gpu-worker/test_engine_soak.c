/* Requests with a long common prefix from several threads at once on a small pool, some of them cancelled at any point: every
 * answer equals the solo run's, and at quiet nothing is held. SOAK_SECONDS=n sets how long (default 4).
 */
#include "engine_world.h"

enum { PROMPTS = SANITIZED ? 8 : 32, SHARED = 1000, THREADS = 4, AT_ONCE = 8, TOKENS = 40 };

static struct world w;
static uint32_t ids[PROMPTS][SHARED + 64];
static struct call solo[2][PROMPTS];
static double until;
static _Atomic uint64_t n_done, n_cancelled, n_wrong;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static uint32_t prompt_len(uint32_t i)
{
    return SHARED + 1 + i * 2;
}

static struct engine_params params_of(uint32_t i, int warm)
{
    struct engine_params params = default_params(TOKENS);
    params.temperature = warm ? 0.8f : 0;
    params.seed = i;
    return params;
}

/* A cancelled answer is the beginning of the solo one; any other is the solo one. */
static bool is_right(const struct reply *reply, const struct reply *want)
{
    if (reply->bad || reply->n_ids > want->n_ids || memcmp(reply->ids, want->ids, reply->n_ids * sizeof *reply->ids) != 0)
        return false;
    if (reply->finish == FINISH_ABORT)
        return true;
    return reply->finish == want->finish && reply->n_ids == want->n_ids && strcmp(reply->text, want->text) == 0;
}

static void *submit_and_cancel(void *context)
{
    uint64_t random = (uintptr_t)context;
    struct call *calls = calloc(AT_ONCE, sizeof *calls);
    uint32_t which[AT_ONCE];
    struct kvg_error err;
#define DRAW(n) ((random = random * 6364136223846793005u + 1442695040888963407u), (uint32_t)(random >> 33) % (n))

    while (now() < until) {
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            which[i] = DRAW(2 * PROMPTS);
            struct engine_params params = params_of(which[i] / 2, which[i] % 2);
            if (try_start(&w, &calls[i], ids[which[i] / 2], prompt_len(which[i] / 2), &params, &err) < 0)
                n_wrong++;
        }
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            if (DRAW(3) == 0) {
                wait_tokens(&calls[i], DRAW(TOKENS));
                engine_cancel(w.engine, calls[i].id);
            }
        }
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            wait_tokens(&calls[i], SIZE_MAX);
            n_done++;
            n_cancelled += calls[i].choices[0].finish == FINISH_ABORT;
            n_wrong += !is_right(&calls[i].choices[0], &solo[which[i] % 2][which[i] / 2].choices[0]);
        }
    }
    free(calls);
    return NULL;
}

static void answers_under_load_equal_solo_runs(void **state)
{
    char toy[64];
    pthread_t threads[THREADS];
    const char *seconds = getenv("SOAK_SECONDS");

    write_toy(toy, "random --layers 2 --hidden 64 --heads 4 --kv-heads 2 --ffn 96 --context 2048");
    open_world(&w, toy, (struct engine_options){.num_kv_blocks = 400, .block_size = 16, .disable_prefix_caching = true});
    for (uint32_t i = 0; i < PROMPTS; i++) {
        make_ids(ids[i], SHARED + 64, SHARED, i, 256);
        for (int warm = 0; warm < 2; warm++) {
            struct engine_params params = params_of(i, warm);
            run_call(&w, &solo[warm][i], ids[i], prompt_len(i), &params);
        }
    }
    close_world(&w);
    open_world(&w, toy, (struct engine_options){.num_kv_blocks = 110, .block_size = 16, .max_num_batched_tokens = 300});
    until = now() + (seconds ? atof(seconds) : 4);
    for (uintptr_t i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, submit_and_cancel, (void *)(i + 1));
    for (uintptr_t i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    check_engine(&w);
    struct engine_metrics *m = engine_metrics(w.engine);
    print_message("%llu requests, %llu cancelled, %llu preemptions, %llu blocks evicted\n", (unsigned long long)n_done,
                  (unsigned long long)n_cancelled, (unsigned long long)m->preemptions, (unsigned long long)m->evicted_blocks);
    assert_int_equal(n_wrong, 0);
    assert_true(n_done > n_cancelled && n_cancelled > 0 && m->evicted_blocks > 0);
    assert_int_equal(m->blocks_used, 0);
    close_world(&w);
    unlink(toy);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(answers_under_load_equal_solo_runs)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
