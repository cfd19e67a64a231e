/* Sampling on the CUDA backend draws the CPU's tokens, with every parameter, and reports its log-probabilities. */
#include "gpu-worker/backend/cuda/cuda_internal.h"
#include "tests/cusim/backend/twin.h"

enum { ROWS = 24, VOCAB = 1500 };
static float logits[ROWS * VOCAB];
static struct sample_row rows[ROWS];
static struct sample_count counts[ROWS][8];
static struct sample_bias biases[ROWS][3];
static uint32_t banned[ROWS][2];
static struct sample_result results[ROWS];

/* A backend whose output rows hold `logits`; *out: the tensor. */
static struct backend *open_logits(struct tensor **out)
{
    struct backend *b = open_twin(true, false);
    uint8_t *weights = random_rows(&quant_q8_0, VOCAB, 32);
    static float none[ROWS * VOCAB];
    struct tensor *table = new_table(b, none, ROWS, VOCAB);
    *out = new_activation(b, TWIN_ROWS, VOCAB);
    new_weight(b, &quant_q8_0, weights, VOCAB, 32, WEIGHT_MATMUL); /* says how wide an output gets */
    free(weights);
    new_pool(b, 1, 1, 16, 16);
    begin_rows(b, ROWS);
    b->ops->embed(b, table, *out);
    end_rows(b);
    /* straight into the output: weights with infinities or NaNs are refused */
    assert_int_equal(cudaMemcpy((*out)->data, logits, sizeof logits, cudaMemcpyHostToDevice), cudaSuccess);
    return b;
}

static void check(const char *what)
{
    static float scratch[VOCAB];
    struct tensor *tensor;
    struct backend *b = open_logits(&tensor);
    struct kvg_error err;
    must(b->ops->sample(b, tensor, rows, ROWS, results, &err), &err);
    for (uint32_t i = 0; i < ROWS; i++) {
        struct sample_result wanted, *got = &results[i];
        sample_row_cpu(logits + (size_t)rows[i].output * VOCAB, VOCAB, &rows[i], scratch, &wanted);
        if (got->id != wanted.id)
            fail_msg("%s, row %u: token %u, the CPU draws %u", what, i, got->id, wanted.id);
        assert_int_equal(got->n_top, wanted.n_top);
        assert_memory_equal(got->top_ids, wanted.top_ids, wanted.n_top * sizeof *got->top_ids);
        assert_near("log-probability", &got->logprob, &wanted.logprob, 1, 1e-6, 1e-6);
        assert_near("alternatives", got->top_logprobs, wanted.top_logprobs, wanted.n_top, 1e-6, 1e-6);
    }
    close_twin(b);
}

static void plain_rows(float spread)
{
    for (size_t i = 0; i < ROWS * VOCAB; i++)
        logits[i] = spread * random_float();
    memset(rows, 0, sizeof rows);
    for (uint32_t i = 0; i < ROWS; i++)
        rows[i] = (struct sample_row){.output = (i * 5) % ROWS,
                                      .seed = next_random() * 0x100000001ull,
                                      .choice = i % 3,
                                      .position = next_random() % 5000,
                                      .temperature = 0.3f + 0.1f * (float)(i % 12),
                                      .top_p = 1,
                                      .repetition_penalty = 1};
}

static void test_greedy_takes_the_lowest_of_the_best(void **unused)
{
    plain_rows(4);
    for (uint32_t i = 0; i < ROWS; i++) {
        rows[i].temperature = 0;
        for (uint32_t k = 3; k > 0; k--)
            logits[i * VOCAB + (i * 131 + k * 400) % VOCAB] = 9;
    }
    check("greedy");
}

static void test_draws_by_temperature(void **unused)
{
    plain_rows(6);
    check("temperature");
}

static void test_draws_within_top_k_top_p_and_min_p(void **unused)
{
    static const float top_p[] = {1, 0.9f, 0.5f, 0.05f, 0}, min_p[] = {0, 0.02f, 0.5f, 1};
    static const uint32_t top_k[] = {0, 1, 7, 40, VOCAB - 1, VOCAB};
    for (float spread = 0.5f; spread < 20; spread *= 6) {
        plain_rows(spread);
        for (uint32_t i = 0; i < ROWS; i++) {
            rows[i].top_k = top_k[i % 6];
            rows[i].top_p = top_p[i % 5];
            rows[i].min_p = min_p[i % 4];
            for (uint32_t k = 0; i % 2 && k < VOCAB; k++) /* many ties */
                logits[rows[i].output * VOCAB + k] = rintf(logits[rows[i].output * VOCAB + k]);
        }
        check("filters");
    }
}

static void test_penalties_biases_bans_and_padding(void **unused)
{
    plain_rows(5);
    for (uint32_t i = 0; i < ROWS; i++) {
        struct sample_row *row = &rows[i];
        for (uint32_t k = 0; k < 8; k++)
            counts[i][k] = (struct sample_count){i + k * 97, k % 2, k % 3};
        for (uint32_t k = 0; k < 3; k++)
            biases[i][k] = (struct sample_bias){i * 3 + k * 200, (float)k * 3 - 2};
        banned[i][0] = i;
        banned[i][1] = 700 + i;
        row->counts = counts[i], row->n_counts = i % 4 == 3 ? 0 : 8;
        row->biases = biases[i], row->n_biases = i % 5 == 4 ? 0 : 3;
        row->banned = banned[i], row->n_banned = i % 3;
        row->repetition_penalty = 1.3f;
        row->presence_penalty = 0.4f;
        row->frequency_penalty = 0.2f;
        row->temperature = i % 2 ? 0.9f : 0;
        row->n_vocab = i % 2 ? VOCAB - 100 : 0;
        row->want_logprob = true;
        row->top_logprobs = i;
    }
    check("penalties");
}

static void test_rows_without_a_token_and_strange_values(void **unused)
{
    plain_rows(3);
    for (uint32_t i = 0; i < ROWS; i++) {
        float *row = logits + (size_t)rows[i].output * VOCAB;
        for (uint32_t k = 0; k < VOCAB; k++)
            row[k] = i % 3 == 0 ? -INFINITY : i % 3 == 1 && k % 2 ? NAN : row[k];
        row[17] = i % 3 == 2 ? INFINITY : row[17];
        for (uint32_t k = 0; k < 2; k++)
            banned[i][k] = k;
        rows[i].banned = banned[i], rows[i].n_banned = i % 2 ? 2 : 0;
        rows[i].temperature = i % 4 ? 1 : 0;
        rows[i].want_logprob = i % 3 != 0;
        rows[i].top_logprobs = 3;
    }
    check("strange values");
}

static void test_a_bad_output_row_is_refused(void **unused)
{
    struct tensor *tensor;
    plain_rows(3);
    struct backend *b = open_logits(&tensor);
    struct kvg_error err;
    rows[1].output = ROWS;
    assert_int_equal(b->ops->sample(b, tensor, rows, ROWS, results, &err), KVG_INVALID);
    assert_string_equal(err.message, "sampling output 24 of 24");
    close_twin(b);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greedy_takes_the_lowest_of_the_best),     cmocka_unit_test(test_draws_by_temperature),
        cmocka_unit_test(test_draws_within_top_k_top_p_and_min_p),      cmocka_unit_test(test_penalties_biases_bans_and_padding),
        cmocka_unit_test(test_rows_without_a_token_and_strange_values), cmocka_unit_test(test_a_bad_output_row_is_refused),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
