/* Sampling: the noise against its definitions, the parameters against a plain sorted reference, and extremes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <float.h>
#include <math.h>
#include <cmocka.h>
#include "gpu-worker/backend/sample_noise.h"
#include "gpu-worker/backend/sampling.h"

/* ---- noise ---------------------------------------------------------------------------------------------------------------- */

/* Known answers published with Random123. */
static void philox_gives_the_published_words(void **state)
{
    static const struct {
        uint32_t counter[4], key[2], words[4];
    } cases[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < 3; i++) {
        uint32_t counter[4];
        memcpy(counter, cases[i].counter, sizeof counter);
        sample_philox(counter, cases[i].key[0] | (uint64_t)cases[i].key[1] << 32);
        assert_memory_equal(counter, cases[i].words, sizeof counter);
    }
}

static double ulps(float got, double want)
{
    return fabs(got - want) / (ldexp(1, ilogb(want == 0 ? FLT_MIN : want) - 23));
}

static void log_and_exp_are_within_two_ulps(void **state)
{
    for (uint32_t bits = 0x00800000; bits < 0x7f800000; bits += 40009) {
        float x;
        memcpy(&x, &bits, sizeof x);
        if (fabs(log(x)) > 1e-3)
            assert_true(ulps(sample_log(x), log(x)) <= 2);
    }
    for (float x = 0; x > -87; x -= 0.000931f)
        assert_true(ulps(sample_exp(x), exp(x)) <= 2);
    assert_true(sample_exp(-87.5f) == 0 && sample_exp(-INFINITY) == 0 && sample_exp(-FLT_MAX) == 0 && sample_exp(0) == 1);
}

/* All 2^23 uniform numbers: finite, monotonic, bounded, and the moments of Gumbel's distribution. */
static void noise_is_bounded_monotonic_and_gumbel(void **state)
{
    double sum = 0, square = 0;
    float before = -INFINITY;

    for (uint32_t k = 0; k < 1u << 23; k++) {
        float g = sample_gumbel(k << 9);
        if (!(g >= before - 1e-6f && g <= SAMPLE_NOISE_MAX))
            fail_msg("noise %g after %g at %u", g, before, k);
        before = g;
        sum += g;
        square += (double)g * g;
    }
    double mean = sum / (1 << 23), variance = square / (1 << 23) - mean * mean;
    assert_true(fabs(mean - 0.5772156649) < 1e-4);
    assert_true(fabs(variance - M_PI * M_PI / 6) < 1e-3);
}

/* ---- against a plain reference ------------------------------------------------------------------------------------------- */

enum { VOCAB = 48, DRAWS = 100000 };

static struct sample_row plain_row(float temperature)
{
    return (struct sample_row){.temperature = temperature, .top_p = 1, .repetition_penalty = 1, .seed = 42};
}

static uint32_t sample(const float *logits, uint32_t n, const struct sample_row *row)
{
    struct sample_result result;
    float *scratch = malloc(n * sizeof *scratch);
    sample_row_cpu(logits, n, row, scratch, &result);
    free(scratch);
    return result.id;
}

/* Uneven, with ties. */
static void fill_logits(float *logits, uint32_t n, uint64_t seed)
{
    for (uint32_t i = 0; i < n; i++)
        logits[i] = roundf(4 * sample_noise(seed, 0, 0, i)) / 4;
}

static double adjusted(const float *logits, uint32_t id, const struct sample_row *row)
{
    double z = logits[id];
    for (uint32_t i = 0; i < row->n_biases; i++)
        z += row->biases[i].id == id ? row->biases[i].bias : 0;
    for (uint32_t i = 0; i < row->n_banned; i++)
        z = row->banned[i] == id ? -INFINITY : z;
    for (uint32_t i = 0; i < row->n_counts; i++) {
        const struct sample_count *c = &row->counts[i];
        if (c->id != id)
            continue;
        z = z > 0 ? z / row->repetition_penalty : z * row->repetition_penalty;
        z -= row->frequency_penalty * c->output + (c->output ? row->presence_penalty : 0);
    }
    return z / row->temperature;
}

struct ranked {
    uint32_t id;
    double z, p;
};

static int by_rank(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;
    if (x->z != y->z)
        return x->z > y->z ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

/* The distribution by sorting, in doubles. */
static void reference(const float *logits, const struct sample_row *row, double *p)
{
    struct ranked order[VOCAB];
    double sum = 0, cumulated = 0, kept = 0;
    uint32_t n = VOCAB;

    for (uint32_t i = 0; i < VOCAB; i++)
        order[i] = (struct ranked){i, adjusted(logits, i, row), 0};
    qsort(order, VOCAB, sizeof *order, by_rank);
    if (row->top_k && row->top_k < n)
        n = row->top_k;
    for (uint32_t i = 0; i < n; i++)
        sum += order[i].p = exp(order[i].z - order[0].z);
    for (uint32_t i = 0; i < n; i++) {
        if ((i && row->top_p < 1 && cumulated >= row->top_p * sum) || order[i].p < row->min_p)
            n = i;
        cumulated += order[i].p;
    }
    memset(p, 0, VOCAB * sizeof *p);
    for (uint32_t i = 0; i < n; i++)
        kept += order[i].p;
    for (uint32_t i = 0; i < n; i++)
        p[order[i].id] = order[i].p / kept;
}

/* Chi-square of DRAWS positions; cells of less than 5 expected draws are joined. */
static void expect_distribution(const float *logits, struct sample_row row)
{
    double p[VOCAB], chi = 0, rare = 0;
    uint32_t seen[VOCAB] = {0}, cells = 0, rare_seen = 0;

    reference(logits, &row, p);
    for (row.position = 0; row.position < DRAWS; row.position++)
        seen[sample(logits, VOCAB, &row)]++;
    for (uint32_t i = 0; i < VOCAB; i++) {
        double expected = p[i] * DRAWS;
        if (p[i] == 0 && seen[i])
            fail_msg("id %u cannot be drawn but was, %u times", i, seen[i]);
        if (expected < 5) {
            rare += expected;
            rare_seen += seen[i];
            continue;
        }
        chi += (seen[i] - expected) * (seen[i] - expected) / expected;
        cells++;
    }
    if (rare >= 5) {
        chi += (rare_seen - rare) * (rare_seen - rare) / rare;
        cells++;
    }
    double freedom = cells > 1 ? cells - 1 : 1, limit = freedom + 5 * sqrt(2 * freedom) + 5;
    if (chi > limit)
        fail_msg("chi-square %.1f over %.1f with %u cells", chi, limit, cells);
}

static void draws_follow_the_distribution(void **state)
{
    float logits[VOCAB];
    struct sample_count counts[] = {{1, 2, 0}, {3, 0, 1}, {5, 1, 4}, {40, 0, 9}};
    struct sample_bias biases[] = {{2, 1.5f}, {7, -3}, {47, 100}};
    uint32_t banned[] = {47, 4};
    struct sample_row row;

    fill_logits(logits, VOCAB, 1);
    expect_distribution(logits, plain_row(1));
    expect_distribution(logits, plain_row(0.7f));
    expect_distribution(logits, plain_row(3));
    for (uint32_t k = 1; k <= VOCAB + 1; k += 12) {
        row = plain_row(1);
        row.top_k = k;
        expect_distribution(logits, row);
        row.top_p = 0.8f;
        expect_distribution(logits, row);
    }
    row = plain_row(1.3f);
    row.top_p = 0.5f;
    row.min_p = 0.1f;
    expect_distribution(logits, row);
    row = plain_row(1);
    row.counts = counts, row.n_counts = 4;
    row.repetition_penalty = 1.3f, row.presence_penalty = 0.4f, row.frequency_penalty = 0.3f;
    row.biases = biases, row.n_biases = 3;
    row.banned = banned, row.n_banned = 2;
    expect_distribution(logits, row);
    row.top_k = 20, row.top_p = 0.9f, row.min_p = 0.02f;
    expect_distribution(logits, row);
}

/* Every set of a large vocabulary with many ties: nothing outside the reference's prefix is drawn, its ends can be. */
static void top_k_and_top_p_keep_exact_prefixes(void **state)
{
    enum { N = 5000 };
    static float logits[N];
    struct sample_row row = plain_row(1);

    for (uint32_t i = 0; i < N; i++)
        logits[i] = (float)(i % 7);
    row.top_k = 3; /* ids 6, 13, 20: the lowest of the largest */
    uint32_t seen = 0;
    for (row.position = 0; row.position < 200; row.position++) {
        uint32_t id = sample(logits, N, &row);
        assert_true(id == 6 || id == 13 || id == 20);
        seen |= 1u << id;
    }
    assert_int_equal(seen, 1u << 6 | 1u << 13 | 1u << 20);
    for (uint32_t i = 0; i < N; i++)
        logits[i] = 0;
    row.top_k = 0;
    row.top_p = 0.001f; /* five of five thousand equals */
    seen = 0;
    for (row.position = 0; row.position < 400; row.position++) {
        uint32_t id = sample(logits, N, &row);
        assert_true(id < 6);
        seen |= 1u << id;
    }
    assert_true((seen & 31) == 31);
}

static void top_p_keeps_its_first_token(void **state)
{
    float logits[VOCAB];
    struct sample_row row = plain_row(1);

    for (uint64_t seed = 0; seed < 50; seed++) {
        fill_logits(logits, VOCAB, seed);
        row.top_p = 1;
        row.temperature = 0;
        uint32_t first = sample(logits, VOCAB, &row);
        row.temperature = 5;
        for (row.position = 0; row.position < 20; row.position++) {
            row.top_p = 0;
            assert_int_equal(sample(logits, VOCAB, &row), first);
            row.top_p = FLT_MIN;
            assert_int_equal(sample(logits, VOCAB, &row), first);
            row.top_p = -1;
            assert_int_equal(sample(logits, VOCAB, &row), first);
        }
    }
}

/* ---- extremes ------------------------------------------------------------------------------------------------------------- */

static void tiny_temperatures_are_greedy(void **state)
{
    static const float tiny[] = {0, -0.0f, 1e-5f, 1e-20f, 1e-38f, 1e-45f};
    float logits[VOCAB];

    for (uint64_t seed = 0; seed < 20; seed++) {
        fill_logits(logits, VOCAB, seed);
        struct sample_row row = plain_row(0);
        row.seed = seed;
        uint32_t want = sample(logits, VOCAB, &row);
        for (uint32_t i = 0; i < VOCAB; i++)
            assert_true(logits[i] < logits[want] || (logits[i] == logits[want] && i >= want));
        for (size_t i = 0; i < sizeof tiny / sizeof *tiny; i++) {
            row.temperature = tiny[i];
            assert_int_equal(sample(logits, VOCAB, &row), want);
        }
    }
}

static void no_input_gives_an_id_out_of_range_or_a_nan(void **state)
{
    static const float odd[] = {0, 1, -1, 1e-45f, -1e-45f, FLT_MAX, -FLT_MAX, INFINITY, -INFINITY, NAN, 1e30f, -1e30f};
    static const float temperatures[] = {0, 1.1e-5f, 1, 2, 100, FLT_MAX};
    enum { N_ODD = sizeof odd / sizeof *odd };
    float logits[40], scratch[40];
    struct sample_result result;

    for (uint64_t trial = 0; trial < 20000; trial++) {
        uint32_t n = 1 + (uint32_t)(trial % 40), words[4] = {(uint32_t)trial, 1, 2, 3};
        for (uint32_t i = 0; i < n; i++) {
            sample_philox(words, trial);
            logits[i] = words[1] & 3 ? odd[words[0] % N_ODD] : (float)(words[0] % 9);
        }
        struct sample_row row = plain_row(temperatures[trial % 6]);
        struct sample_bias bias = {words[2] % 50, odd[words[3] % N_ODD]};
        struct sample_count count = {words[3] % 50, 1, 1};
        uint32_t banned = words[1] % 50;
        row.biases = &bias, row.n_biases = words[2] & 1;
        row.counts = &count, row.n_counts = words[2] >> 1 & 1;
        row.banned = &banned, row.n_banned = words[2] >> 2 & 1;
        row.repetition_penalty = 1.5f, row.frequency_penalty = 2;
        row.top_k = words[2] >> 3 & 7;
        row.top_p = (float)(words[2] >> 6 & 15) / 14;
        row.min_p = (float)(words[2] >> 10 & 3) / 3;
        row.n_vocab = words[2] >> 12 & 1 ? n : 0;
        row.want_logprob = true;
        row.top_logprobs = 5;
        sample_row_cpu(logits, n, &row, scratch, &result);
        assert_true(result.id < n);
        if (n > 1 && row.n_banned)
            assert_int_not_equal(result.id, banned);
        assert_true(result.logprob == result.logprob && result.logprob >= -9999 && result.logprob < INFINITY);
        for (uint32_t i = 0; i < result.n_top; i++)
            assert_true(result.top_ids[i] < n && result.top_logprobs[i] == result.top_logprobs[i]);
    }
}

/* A min-p that keeps whatever could win takes the long way: weights in memory and a filter. */
static void rows_without_a_filter_draw_what_a_filter_that_drops_nothing_draws(void **state)
{
    static const float temperatures[] = {1.1e-5f, 0.3f, 0.7f, 1, 5, FLT_MAX}, odd[] = {INFINITY, -INFINITY, NAN, FLT_MAX};
    static float logits[3000];

    for (uint32_t trial = 0; trial < 1500; trial++) {
        uint32_t n = 1 + trial * 7919 % 3000;
        for (uint32_t i = 0; i < n; i++)
            logits[i] = (float)(1 + trial % 3) * sample_noise(trial, 1, 0, i);
        if (trial % 4 == 0)
            logits[trial % n] = odd[trial / 4 % 4];
        struct sample_bias bias = {trial % 97, 3};
        struct sample_row row = plain_row(temperatures[trial % 6]), filtered;
        row.seed = trial;
        row.biases = &bias, row.n_biases = trial % 5 == 0;
        filtered = row;
        filtered.min_p = 1e-37f;
        assert_int_equal(sample(logits, n, &row), sample(logits, n, &filtered));
    }
}

static void padding_rows_are_never_drawn(void **state)
{
    float logits[VOCAB];
    struct sample_row row = plain_row(100);

    fill_logits(logits, VOCAB, 3);
    logits[VOCAB - 1] = 50;
    row.n_vocab = VOCAB - 8;
    row.want_logprob = true;
    row.top_logprobs = 20;
    for (row.position = 0; row.position < 2000; row.position++) {
        struct sample_result result;
        float scratch[VOCAB];
        sample_row_cpu(logits, VOCAB, &row, scratch, &result);
        assert_true(result.id < VOCAB - 8);
        for (uint32_t i = 0; i < result.n_top; i++)
            assert_true(result.top_ids[i] < VOCAB - 8);
    }
}

static void logprobs_are_of_the_raw_logits_and_sorted(void **state)
{
    float logits[VOCAB], scratch[VOCAB];
    struct sample_row row = plain_row(0.5f);
    struct sample_bias bias = {9, 100};
    struct sample_result result;
    double sum = 0;

    fill_logits(logits, VOCAB, 5);
    for (uint32_t i = 0; i < VOCAB; i++)
        sum += exp(logits[i]);
    row.biases = &bias, row.n_biases = 1;
    row.want_logprob = true;
    row.top_logprobs = 20;
    sample_row_cpu(logits, VOCAB, &row, scratch, &result);
    assert_int_equal(result.id, 9);
    assert_true(fabs(result.logprob - (logits[9] - log(sum))) < 1e-5);
    assert_int_equal(result.n_top, 20);
    for (uint32_t i = 0; i < 20; i++) {
        assert_true(fabs(result.top_logprobs[i] - (logits[result.top_ids[i]] - log(sum))) < 1e-5);
        if (i)
            assert_true(result.top_logprobs[i] <= result.top_logprobs[i - 1]);
    }
}

static void the_token_depends_on_seed_choice_and_position_alone(void **state)
{
    float logits[VOCAB];
    uint32_t same = 0, changed[3] = {0};

    fill_logits(logits, VOCAB, 8);
    for (uint32_t i = 0; i < 500; i++) {
        struct sample_row row = plain_row(2), other;
        row.position = i;
        row.output = 0;
        uint32_t id = sample(logits, VOCAB, &row);
        row.output = 17; /* another place in another batch */
        same += sample(logits, VOCAB, &row) == id;
        other = row, other.seed++;
        changed[0] += sample(logits, VOCAB, &other) != id;
        other = row, other.choice++;
        changed[1] += sample(logits, VOCAB, &other) != id;
        other = row, other.position += 1000;
        changed[2] += sample(logits, VOCAB, &other) != id;
    }
    assert_int_equal(same, 500);
    for (int i = 0; i < 3; i++)
        assert_true(changed[i] > 250);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_gives_the_published_words),
        cmocka_unit_test(log_and_exp_are_within_two_ulps),
        cmocka_unit_test(noise_is_bounded_monotonic_and_gumbel),
        cmocka_unit_test(draws_follow_the_distribution),
        cmocka_unit_test(top_k_and_top_p_keep_exact_prefixes),
        cmocka_unit_test(top_p_keeps_its_first_token),
        cmocka_unit_test(tiny_temperatures_are_greedy),
        cmocka_unit_test(rows_without_a_filter_draw_what_a_filter_that_drops_nothing_draws),
        cmocka_unit_test(no_input_gives_an_id_out_of_range_or_a_nan),
        cmocka_unit_test(padding_rows_are_never_drawn),
        cmocka_unit_test(logprobs_are_of_the_raw_logits_and_sorted),
        cmocka_unit_test(the_token_depends_on_seed_choice_and_position_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
