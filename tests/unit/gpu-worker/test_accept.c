/* Acceptance of drafts: by `coupled` and by `rejection` a million tokens each follow the model's own distribution after every
 * parameter, and would not if drafts were verified by the wrong row or weighed by the wrong draft; the lossy rules take what they
 * say.
 *
 * The world is the engine's batch (batch.c, with its two mistakes to plant), the `sample` op and accept.c over two tables in
 * place of models: after token i the logits are target[i], and a draft is drawn from draft[i].
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <cmocka.h>
#include "tests/unit/gpu-worker/sanitized.h"

static unsigned off_by_row, off_by_draft;
static int late_counts; /* a third mistake: penalties know of a run's tokens only when the run is over */
#define BATCH_OFF_BY_ROW   off_by_row
#define BATCH_OFF_BY_DRAFT off_by_draft
#include "gpu-worker/engine/batch.c"

enum { VOCAB = 10, MOST_DRAFTS = 4, DRAWS = SANITIZED ? 50000 : 1000000, FEW_DRAWS = 50000 };

static float target[VOCAB][VOCAB], guess[VOCAB][VOCAB];
static const struct sample_bias biases[] = {{2, 1.5f}, {7, -1}};

/* Uneven, and another order for each token; the draft model has some of it wrong. */
static void make_tables(void)
{
    for (uint32_t i = 0; i < VOCAB; i++)
        for (uint32_t j = 0; j < VOCAB; j++) {
            target[i][j] = 0.4f * (float)((i * 3 + j * 7) % VOCAB) + 0.01f * (float)j - 1.5f;
            guess[i][j] = 0.4f * (float)((i * 3 + j * 7 + j % 3) % VOCAB) + 0.02f * (float)i;
        }
}

/* ---- one long sequence in steps ------------------------------------------------------------------------------------------- */

struct chain {
    struct request request;
    struct sequence seq;
    struct batch batch;
    float probs[MOST_DRAFTS][VOCAB];
    uint64_t seen[VOCAB][VOCAB], n_drafted, n_accepted;
};

static struct chain *open_chain(struct engine_params params, uint32_t n_draws)
{
    struct chain *chain = calloc(1, sizeof *chain);
    struct kvg_error err;

    chain->request.params = params;
    chain->seq = (struct sequence){.request = &chain->request, .n_prompt = 1, .n_ids = 1};
    chain->seq.ids = calloc(n_draws + 64, sizeof *chain->seq.ids);
    assert_int_equal(batch_init(&chain->batch, 16, 1, 16, &err), 0);
    return chain;
}

static void close_chain(struct chain *chain)
{
    batch_free(&chain->batch);
    free(chain->seq.ids);
    free(chain);
}

/* by_lookup: the same draft whatever chance says. */
static void draft(struct chain *chain, uint32_t n, bool by_lookup)
{
    struct sequence *seq = &chain->seq;
    struct sample_result result;
    float scratch[VOCAB];

    seq->n_drafts = n;
    seq->draft_probs = by_lookup ? NULL : chain->probs[0];
    for (uint32_t k = 0; k < n; k++) {
        uint32_t *id = &seq->ids[seq->n_ids + k];
        struct sample_row row = batch_sample_row(seq, 0, VOCAB);
        row.position += k;
        sample_row_cpu(guess[id[-1]], VOCAB, &row, scratch, &result);
        sample_distribution_cpu(guess[id[-1]], VOCAB, &row, chain->probs[k]);
        *id = by_lookup ? (id[-1] * 3 + 1) % VOCAB : result.id;
    }
}

static void commit(struct sequence *seq, uint32_t id)
{
    seq->ids[seq->n_ids++] = id;
    if (seq->counts && !late_counts)
        sequence_count(seq, id);
}

static void step(struct chain *chain, enum accept_rule rule)
{
    struct sequence *seq = &chain->seq;
    struct batch *batch = &chain->batch;
    struct plan_entry entry = {.seq = seq, .n_rows = 1 + seq->n_drafts, .n_drafts = seq->n_drafts, .samples = true};
    struct draw *draw = batch->draws;
    float scratch[VOCAB];
    uint32_t from = seq->n_ids;
    bool accepted = true;

    seq->n_computed = seq->n_ids - 1;
    batch_fill(batch, &(struct step_plan){.entries = &entry, .n = 1});
    chain->n_drafted += seq->n_drafts;
    while (accepted) {
        batch->n_samples = 0;
        batch_sampling(batch, VOCAB, false);
        const float *logits = target[batch->ids[batch->outputs[draw->output]]];
        sample_row_cpu(logits, VOCAB, batch->samples, scratch, batch->results);
        accepted = draw->n_drafts > 0;
        if (accepted) {
            struct accept_draft next = batch_draft(draw, VOCAB);
            accepted = accept_draft(rule, logits, VOCAB, batch->samples, &next, scratch, batch->results);
            assert_int_equal(accepted, batch->results->id == next.id);
            draw->n_drafts--;
        }
        chain->n_accepted += accepted;
        chain->seen[seq->ids[seq->n_ids - 1]][batch->results->id]++;
        commit(seq, batch->results->id);
        draw->output++;
    }
    for (; late_counts && from < seq->n_ids; from++)
        sequence_count(seq, seq->ids[from]);
}

static struct chain *draw_chain(struct engine_params params, enum accept_rule rule, bool by_lookup, uint32_t n_draws)
{
    struct chain *chain = open_chain(params, n_draws);

    while (chain->seq.n_ids <= n_draws) {
        draft(chain, chain->seq.n_ids % 7 ? 1 + chain->seq.n_ids % MOST_DRAFTS : 0, by_lookup);
        step(chain, rule);
    }
    return chain;
}

/* ---- the distribution ----------------------------------------------------------------------------------------------------- */

/* What follows a token, by sorting, in doubles. */
static void expected(const float *logits, const struct engine_params *params, double *p)
{
    uint32_t order[VOCAB];
    double z[VOCAB], sum = 0, kept = 0, taken = 0;

    for (uint32_t j = 0; j < VOCAB; j++) {
        z[j] = logits[j];
        for (uint32_t i = 0; i < params->n_biases; i++)
            z[j] += params->biases[i].id == j ? params->biases[i].bias : 0;
        uint32_t at = j;
        for (; at && z[order[at - 1]] < z[j]; at--)
            order[at] = order[at - 1];
        order[at] = j;
    }
    for (uint32_t j = 0; j < VOCAB; j++)
        p[j] = 0;
    uint32_t most = params->top_k ? params->top_k : VOCAB;
    for (uint32_t k = 0; k < most; k++)
        sum += p[order[k]] = exp((z[order[k]] - z[order[0]]) / params->temperature);
    for (uint32_t k = 0; k < most; k++) {
        double mass = p[order[k]];
        if (taken >= params->top_p * sum || mass < params->min_p)
            p[order[k]] = 0;
        taken += mass;
        kept += p[order[k]];
    }
    for (uint32_t j = 0; j < VOCAB; j++)
        p[j] /= kept;
}

/* In standard deviations of a chi-square over all pairs of neighbours; huge where a token came that cannot. */
static double surprise(const struct chain *chain)
{
    double chi = 0, freedom = 0;

    for (uint32_t i = 0; i < VOCAB; i++) {
        double p[VOCAB], n = 0;
        expected(target[i], &chain->request.params, p);
        for (uint32_t j = 0; j < VOCAB; j++)
            n += (double)chain->seen[i][j];
        for (uint32_t j = 0; j < VOCAB && n > 0; j++) {
            double seen = (double)chain->seen[i][j];
            if (p[j] == 0 && seen > 0)
                return 1e9;
            chi += p[j] > 0 ? (seen - n * p[j]) * (seen - n * p[j]) / (n * p[j]) : 0;
            freedom += p[j] > 0;
        }
        freedom -= n > 0;
    }
    return (chi - freedom) / sqrt(2 * freedom);
}

static struct engine_params params_of(int i)
{
    struct engine_params params = {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .seed = 11 + (uint64_t)i};

    params.temperature = i == 0 ? 0.7f : 1;
    params.top_p = i == 1 ? 0.8f : 1;
    params.top_k = i == 2 ? 4 : 0;
    params.min_p = i == 3 ? 0.2f : 0;
    if (i == 4) {
        params.biases = biases;
        params.n_biases = 2;
        params.temperature = 1.3f;
    }
    return params;
}

static const char *const names[] = {"temperature", "top-p", "top-k", "min-p", "logit_bias"};

static void check(enum accept_rule rule, int i, bool by_lookup, bool planted)
{
    struct chain *chain = draw_chain(params_of(i), rule, by_lookup, planted ? FEW_DRAWS : DRAWS);
    double far = surprise(chain);

    print_message("%s, %s, drafts by %s%s: %u draws, %llu of %llu drafts accepted, %.1f sigma\n",
                  rule == ACCEPT_COUPLED ? "coupled" : "rejection", names[i], by_lookup ? "lookup" : "a model",
                  planted ? ", off by one" : "", chain->seq.n_ids - 1, (unsigned long long)chain->n_accepted,
                  (unsigned long long)chain->n_drafted, far);
    assert_true(planted || (chain->n_accepted > chain->n_drafted / 20 && chain->n_accepted < chain->n_drafted));
    if (planted)
        assert_true(far > 50);
    else
        assert_true(far < 4);
    close_chain(chain);
}

static void tokens_follow_the_models_distribution(void **state)
{
    for (int i = 0; i < 5; i++)
        check(ACCEPT_REJECTION, i, false, false);
    check(ACCEPT_REJECTION, 0, true, false);
    check(ACCEPT_COUPLED, 0, false, false);
    check(ACCEPT_COUPLED, 1, false, false);
}

static void drafts_verified_by_their_own_row_are_found_out(void **state)
{
    off_by_row = 1;
    for (int i = 0; i < 5; i++) {
        check(ACCEPT_REJECTION, i, false, true);
        check(ACCEPT_COUPLED, i, false, true);
    }
    check(ACCEPT_REJECTION, 0, true, true);
    check(ACCEPT_COUPLED, 0, true, true);
    off_by_row = 0;
}

static void drafts_weighed_by_the_next_ones_chances_are_found_out(void **state)
{
    off_by_draft = 1;
    for (int i = 0; i < 5; i++)
        check(ACCEPT_REJECTION, i, false, true);
    off_by_draft = 0;
}

/* ---- penalties: answers of three tokens, whose chances depend on those before -----------------------------------------------
 */

enum { ANSWER = 3, N_ANSWERS = VOCAB * VOCAB * VOCAB };

static struct engine_params penalties_of(int i)
{
    struct engine_params params = params_of(9);

    params.presence_penalty = i == 0 || i == 3 ? 1.5f : 0;
    params.frequency_penalty = i == 1 || i == 3 ? 1.2f : 0;
    params.repetition_penalty = i == 2 || i == 3 ? 2 : 1;
    return params;
}

static const char *const penalty_names[] = {"presence", "frequency", "repetition", "all three penalties"};

/* The chance of each answer after token 0. */
static void expected_answers(const struct engine_params *params, double *chances)
{
    for (uint32_t answer = 0; answer < N_ANSWERS; answer++) {
        uint32_t ids[1 + ANSWER] = {0, answer / (VOCAB * VOCAB), answer / VOCAB % VOCAB, answer % VOCAB};
        chances[answer] = 1;
        for (uint32_t n = 1; n <= ANSWER; n++) {
            float z[VOCAB];
            double p[VOCAB];
            memcpy(z, target[ids[n - 1]], sizeof z);
            for (uint32_t j = 0; j < VOCAB; j++) {
                uint32_t times = 0;
                for (uint32_t k = 1; k < n; k++)
                    times += ids[k] == j;
                if (times || j == 0)
                    z[j] = z[j] > 0 ? z[j] / params->repetition_penalty : z[j] * params->repetition_penalty;
                if (times)
                    z[j] -= params->presence_penalty + params->frequency_penalty * (float)times;
            }
            expected(z, params, p);
            chances[answer] *= p[ids[n]];
        }
    }
}

/* In standard deviations of a chi-square over all answers, the rare ones together. */
static double surprise_of_answers(const uint32_t *seen, uint32_t n, const struct engine_params *params)
{
    static double chances[N_ANSWERS];
    double chi = 0, freedom = -1, rare = 0, rare_seen = 0;

    expected_answers(params, chances);
    for (uint32_t i = 0; i < N_ANSWERS; i++) {
        double want = n * chances[i];
        if (want < 10) {
            rare += want;
            rare_seen += seen[i];
            continue;
        }
        chi += (seen[i] - want) * (seen[i] - want) / want;
        freedom++;
    }
    if (rare > 10) {
        chi += (rare_seen - rare) * (rare_seen - rare) / rare;
        freedom++;
    }
    return (chi - freedom) / sqrt(2 * freedom);
}

static uint32_t draw_answer(struct chain *chain, enum accept_rule rule, bool by_lookup)
{
    struct sequence *seq = &chain->seq;

    chain->request.params.seed++;
    seq->n_ids = seq->n_counts = 1;
    seq->counts[0] = (struct sample_count){.id = 0, .prompt = 1};
    while (seq->n_ids <= ANSWER) {
        uint32_t left = ANSWER - seq->n_ids;
        draft(chain, left < 2 || chain->request.params.seed % 3 == 0 ? left : 2, by_lookup);
        step(chain, rule);
    }
    return (seq->ids[1] * VOCAB + seq->ids[2]) * VOCAB + seq->ids[3];
}

static void check_penalties(enum accept_rule rule, int i, bool by_lookup, bool planted)
{
    static uint32_t seen[N_ANSWERS];
    uint32_t n = planted ? FEW_DRAWS : DRAWS / (i == 3 && !by_lookup ? 1 : 4) / ANSWER;
    struct chain *chain = open_chain(penalties_of(i), ANSWER);
    struct sample_count counts[VOCAB];

    memset(seen, 0, sizeof seen);
    chain->seq.counts = counts;
    for (uint32_t k = 0; k < n; k++)
        seen[draw_answer(chain, rule, by_lookup)]++;
    double far = surprise_of_answers(seen, n, &chain->request.params);
    print_message("%s, %s, drafts by %s%s: %u answers, %llu of %llu drafts accepted, %.1f sigma\n",
                  rule == ACCEPT_COUPLED ? "coupled" : "rejection", penalty_names[i], by_lookup ? "lookup" : "a model",
                  planted ? ", with a mistake" : "", n, (unsigned long long)chain->n_accepted,
                  (unsigned long long)chain->n_drafted, far);
    assert_true(chain->n_accepted > 0);
    if (planted)
        assert_true(far > 10);
    else
        assert_true(far < 4);
    close_chain(chain);
}

static void penalties_know_the_tokens_before_in_the_run(void **state)
{
    for (int i = 0; i < 4; i++)
        check_penalties(ACCEPT_REJECTION, i, false, false);
    check_penalties(ACCEPT_REJECTION, 3, true, false);
    check_penalties(ACCEPT_COUPLED, 3, false, false);
}

static void penalties_that_come_late_are_found_out(void **state)
{
    late_counts = 1;
    for (int i = 0; i < 4; i++)
        check_penalties(ACCEPT_REJECTION, i, false, true);
    check_penalties(ACCEPT_COUPLED, 3, false, true);
    late_counts = 0;
    off_by_draft = 1;
    check_penalties(ACCEPT_REJECTION, 3, false, true);
    off_by_draft = 0;
}

static void the_seed_decides(void **state)
{
    struct engine_params params = params_of(1);
    struct chain *a = draw_chain(params, ACCEPT_REJECTION, false, FEW_DRAWS),
                 *b = draw_chain(params, ACCEPT_REJECTION, false, FEW_DRAWS);

    assert_int_equal(a->seq.n_ids, b->seq.n_ids);
    assert_memory_equal(a->seq.ids, b->seq.ids, a->seq.n_ids * sizeof *a->seq.ids);
    close_chain(b);
    params.seed++;
    b = draw_chain(params, ACCEPT_REJECTION, false, FEW_DRAWS);
    assert_memory_not_equal(a->seq.ids, b->seq.ids, 1000 * sizeof *a->seq.ids);
    close_chain(a);
    close_chain(b);
}

/* ---- single drafts -------------------------------------------------------------------------------------------------------- */

static const float steep[VOCAB] = {0, 5, 1, 0, 4.5f, 0, 0, 3, 0, 0};

static bool try_draft(enum accept_rule rule, struct sample_row row, uint32_t id, struct sample_result *result)
{
    float scratch[VOCAB];

    sample_row_cpu(steep, VOCAB, &row, scratch, result);
    return accept_draft(rule, steep, VOCAB, &row, &(struct accept_draft){.id = id}, scratch, result);
}

static const struct sample_row plain = {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .want_logprob = true};

static void at_temperature_0_every_rule_takes_the_most_likely_alone(void **state)
{
    struct sample_row row = plain;
    struct sample_result result;

    row.temperature = 0;
    for (int rule = ACCEPT_COUPLED; rule <= ACCEPT_TOP_P; rule++)
        for (uint32_t id = 0; id < VOCAB; id++) {
            assert_int_equal(try_draft(rule, row, id, &result), id == 1);
            assert_int_equal(result.id, 1);
        }
}

static void argmax_takes_the_most_likely_token_and_the_drawn_one(void **state)
{
    struct sample_result result, drawn;
    float scratch[VOCAB];

    for (uint32_t seed = 0; seed < 200; seed++) {
        struct sample_row row = plain;
        row.seed = seed;
        sample_row_cpu(steep, VOCAB, &row, scratch, &drawn);
        assert_true(try_draft(ACCEPT_ARGMAX, row, 1, &result));
        assert_int_equal(result.id, 1);
        assert_int_equal(try_draft(ACCEPT_ARGMAX, row, 4, &result), drawn.id == 4);
        assert_int_equal(result.id, drawn.id); /* the replacement is no accepted draft */
        assert_true(result.logprob == drawn.logprob);
    }
}

static void top_p_takes_the_tokens_that_hold_it_and_the_first_always(void **state)
{
    struct sample_result result;

    for (uint32_t seed = 0; seed < 200; seed++) {
        struct sample_row row = plain;
        row.seed = seed;
        row.top_p = 0.1f; /* the first alone has more */
        assert_true(try_draft(ACCEPT_TOP_P, row, 1, &result));
        assert_false(try_draft(ACCEPT_TOP_P, row, 4, &result));
        assert_int_equal(result.id, 1);
        row.top_p = 0.8f; /* the first two */
        assert_true(try_draft(ACCEPT_TOP_P, row, 4, &result));
        assert_int_equal(result.id, 4);
        assert_false(try_draft(ACCEPT_TOP_P, row, 7, &result));
        row.top_p = 1; /* means 0.9 here: 7 is in, 2 is not unless it is drawn */
        assert_true(try_draft(ACCEPT_TOP_P, row, 7, &result));
        assert_true(!try_draft(ACCEPT_TOP_P, row, 2, &result) || result.id == 2);
    }
}

/* The log-probability reported is that of the token that stands there. */
static void a_replaced_token_brings_its_own_logprob(void **state)
{
    double sum = 0;
    struct sample_result result;

    for (uint32_t j = 0; j < VOCAB; j++)
        sum += exp(steep[j]);
    for (uint32_t seed = 0; seed < 100; seed++) {
        struct sample_row row = plain;
        row.seed = seed;
        row.top_logprobs = 2;
        for (int rule = ACCEPT_COUPLED; rule <= ACCEPT_TOP_P; rule++) {
            try_draft(rule, row, seed % VOCAB, &result);
            assert_float_equal(result.logprob, steep[result.id] - log(sum), 1e-5);
            assert_int_equal(result.n_top, 2);
            assert_int_equal(result.top_ids[0], 1);
        }
    }
}

/* Drafts beyond what may be drawn do not come; those that a filter or a ban excludes do, and are rejected. */
static void excluded_drafts_are_rejected(void **state)
{
    static const uint32_t banned[] = {1};
    struct sample_result result;

    for (uint32_t seed = 0; seed < 100; seed++) {
        struct sample_row row = plain;
        row.seed = seed;
        row.top_k = 2;
        row.banned = banned;
        row.n_banned = 1;
        for (int rule = ACCEPT_COUPLED; rule <= ACCEPT_TOP_P; rule++) {
            assert_false(try_draft(rule, row, 1, &result));
            assert_false(try_draft(rule, row, 2, &result));
            assert_true(result.id == 4 || result.id == 7);
        }
    }
}

/* 8193 ids in an output matrix of 8320 rows, those beyond being the likeliest: neither a draft's replacement nor what is left of
 * the distribution is ever one of them. */
static void no_token_is_beyond_the_vocabulary(void **state)
{
    enum { IDS = 8193, ROWS = 8320 };
    float *logits = malloc(ROWS * sizeof *logits), *q = malloc(IDS * sizeof *q), *scratch = malloc(ROWS * sizeof *scratch);
    struct sample_result result;
    uint32_t n_last = 0, n_replaced = 0;

    for (uint32_t id = 0; id < ROWS; id++) {
        logits[id] = id < IDS ? 0.01f * (float)(id % 7) : 9;
        if (id < IDS)
            q[id] = id % 2 ? 2.0f / (IDS - 1) : 0;
    }
    logits[IDS - 1] = 8; /* a quarter of the probability */
    for (uint32_t seed = 0; seed < 2000; seed++)
        for (int rule = ACCEPT_COUPLED; rule <= ACCEPT_TOP_P; rule++) {
            struct sample_row row = plain;
            struct accept_draft draft = {.id = seed % (IDS / 2) * 2 + 1, .q = q};
            row.seed = seed;
            row.n_vocab = IDS;
            row.top_p = seed % 4 == 1 ? 0.95f : 1;
            row.top_k = seed % 4 == 2 ? 6000 : 0;
            sample_row_cpu(logits, ROWS, &row, scratch, &result);
            assert_true(result.id < IDS);
            n_replaced += !accept_draft(rule, logits, ROWS, &row, &draft, scratch, &result);
            assert_true(result.id < IDS);
            n_last += result.id == IDS - 1;
        }
    assert_true(n_replaced > 4000 && n_last > 500);
    free(logits);
    free(q);
    free(scratch);
}

static int set_up(void **state)
{
    make_tables();
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tokens_follow_the_models_distribution),
        cmocka_unit_test(drafts_verified_by_their_own_row_are_found_out),
        cmocka_unit_test(drafts_weighed_by_the_next_ones_chances_are_found_out),
        cmocka_unit_test(penalties_know_the_tokens_before_in_the_run),
        cmocka_unit_test(penalties_that_come_late_are_found_out),
        cmocka_unit_test(the_seed_decides),
        cmocka_unit_test(at_temperature_0_every_rule_takes_the_most_likely_alone),
        cmocka_unit_test(argmax_takes_the_most_likely_token_and_the_drawn_one),
        cmocka_unit_test(top_p_takes_the_tokens_that_hold_it_and_the_first_always),
        cmocka_unit_test(a_replaced_token_brings_its_own_logprob),
        cmocka_unit_test(excluded_drafts_are_rejected),
        cmocka_unit_test(no_token_is_beyond_the_vocabulary),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
