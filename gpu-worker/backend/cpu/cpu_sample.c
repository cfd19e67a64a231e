/* The `sample` op on the CPU: see backend/sampling.h for the rule, backend/sample_noise.h for the noise.
 *
 *   logits --bias, ban, penalties--> z --(z - max) / temperature--> w <= 0 --top-k, top-p, min-p: others -inf--> argmax(w +
 * noise)
 *
 * Candidates are ordered by (w descending, id ascending); top-k and top-p keep a prefix of that order, found by selection on
 * the bits of w instead of sorting.
 */
#ifndef __clang__
#pragma GCC optimize("no-trapping-math") /* values stay as they are; gcc may turn `?:` into masks and vectorize */
#endif
#include "gpu-worker/backend/sampling.h"
#include <float.h>
#include <math.h>
#include <string.h>
#include "gpu-worker/backend/sample_noise.h"

enum { LANES = 16, STRETCH = 256, NEAR_MAX = 4096, PASSED = 128 };

/* A NaN logit can never be drawn; +inf stays finite, so that differences do. */
static inline float finite_or_low(float x)
{
    return x != x ? -INFINITY : x > FLT_MAX ? FLT_MAX : x;
}

/* Largest of x[n]; lanes, so that it vectorizes. NaN is skipped. */
static float largest(const float *x, uint32_t n)
{
    float best[LANES];
    uint32_t i = 0;

    for (int lane = 0; lane < LANES; lane++)
        best[lane] = -INFINITY;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            best[lane] = x[i + lane] > best[lane] ? x[i + lane] : best[lane];
    for (; i < n; i++)
        best[0] = x[i] > best[0] ? x[i] : best[0];
    for (int lane = 1; lane < LANES; lane++)
        best[0] = best[lane] > best[0] ? best[lane] : best[0];
    return best[0];
}

/* The lowest id whose value is `value`; n when there is none. */
static uint32_t first_equal(const float *x, uint32_t n, float value)
{
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        int found = 0;
        for (int lane = 0; lane < LANES; lane++)
            found |= x[i + lane] == value;
        if (found)
            break;
    }
    while (i < n && x[i] != value)
        i++;
    return i;
}

/* ---- log-probabilities under the raw logits ------------------------------------------------------------------------------- */

/* Sum of e^w, in short stretches, so that the exponentials vectorize. */
static double total_mass(const float *w, uint32_t n)
{
    double sum[4] = {0};
    float mass[STRETCH];

    for (uint32_t i = 0; i < n; i += STRETCH) {
        uint32_t m = n - i < STRETCH ? n - i : STRETCH;
        for (uint32_t k = 0; k < m; k++)
            mass[k] = sample_exp(w[i + k]);
        while (m % 4)
            mass[m++] = 0;
        for (uint32_t k = 0; k < m; k += 4)
            for (int lane = 0; lane < 4; lane++)
                sum[lane] += mass[k + lane];
    }
    return sum[0] + sum[1] + sum[2] + sum[3];
}

static float log_sum_exp(const float *logits, uint32_t n, float *scratch)
{
    float max = finite_or_low(largest(logits, n));

    if (max == -INFINITY)
        return max;
    for (uint32_t i = 0; i < n; i++)
        scratch[i] = finite_or_low(logits[i]) - max;
    return max + (float)log(total_mass(scratch, n));
}

/* JSON has no infinity: what cannot be drawn reads -9999, as in vLLM. */
static float raw_logprob(const float *logits, uint32_t id, float lse)
{
    float value = finite_or_low(logits[id]) - lse;
    return value > -9999.0f ? value : -9999.0f;
}

/* The k largest of logits[n], largest first, ties to the lowest id, by insertion. */
static void top_ids(const float *logits, uint32_t n, uint32_t k, struct sample_result *result)
{
    uint32_t have = 0;

    for (uint32_t id = 0; id < n; id++) {
        float x = logits[id];
        if (x != x || (have == k && !(x > logits[result->top_ids[k - 1]])))
            continue;
        uint32_t at = have < k ? have++ : k - 1;
        for (; at > 0 && x > logits[result->top_ids[at - 1]]; at--)
            result->top_ids[at] = result->top_ids[at - 1];
        result->top_ids[at] = id;
    }
    result->n_top = have;
}

static void report_logprobs(const float *logits, uint32_t n, const struct sample_row *row, float *scratch,
                            struct sample_result *result)
{
    float lse = log_sum_exp(logits, n, scratch);

    result->logprob = raw_logprob(logits, result->id, lse);
    uint32_t k = row->top_logprobs < SAMPLE_TOP_MAX ? row->top_logprobs : SAMPLE_TOP_MAX;
    if (k == 0)
        return;
    top_ids(logits, n, k, result);
    for (uint32_t i = 0; i < result->n_top; i++)
        result->top_logprobs[i] = raw_logprob(logits, result->top_ids[i], lse);
}

/* ---- parameters before temperature --------------------------------------------------------------------------------------- */

static void penalize(float *z, uint32_t n, const struct sample_row *row)
{
    for (uint32_t i = 0; i < row->n_counts; i++) {
        const struct sample_count *count = &row->counts[i];
        if (count->id >= n)
            continue;
        float x = z[count->id];
        if (count->prompt || count->output)
            x = x > 0 ? x / row->repetition_penalty : x * row->repetition_penalty;
        if (count->output)
            x = x - row->frequency_penalty * (float)count->output - row->presence_penalty;
        z[count->id] = finite_or_low(x);
    }
}

static bool is_plain(const struct sample_row *row)
{
    return row->n_biases == 0 && row->n_banned == 0 && row->n_counts == 0;
}

static void adjust(const float *logits, uint32_t n, const struct sample_row *row, float *z)
{
    for (uint32_t i = 0; i < n; i++)
        z[i] = finite_or_low(logits[i]);
    for (uint32_t i = 0; i < row->n_biases; i++)
        if (row->biases[i].id < n)
            z[row->biases[i].id] = finite_or_low(z[row->biases[i].id] + row->biases[i].bias);
    for (uint32_t i = 0; i < row->n_banned; i++)
        if (row->banned[i] < n)
            z[row->banned[i]] = -INFINITY;
    penalize(z, n, row);
}

/* ---- top-k and top-p by selection ---------------------------------------------------------------------------------------- */

/* Orders like the float: larger value, larger key. */
static inline uint32_t key_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* What is kept: values above `value`, and of those equal to it the `ties` lowest ids. */
struct cut {
    float value;
    double ties;
};

/* Weight of the candidates by one digit of their keys, of those whose key agrees with `prefix` above the digit: their mass, or
 * their number. */
static void weigh(const float *w, uint32_t n, uint32_t prefix, int shift, int width, bool by_mass, double *weight)
{
    uint32_t above = shift + width == 32 ? 0 : ~0u << (shift + width), mask = (1u << width) - 1;

    memset(weight, 0, sizeof *weight << width);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t key = key_of(w[i]);
        if (w[i] != -INFINITY && (key & above) == prefix)
            weight[key >> shift & mask] += by_mass ? (double)sample_exp(w[i]) : 1.0;
    }
}

/* The value of the digit where the weight, added from the largest down, reaches `goal`; what lies above is taken off the goal.
 * Where rounding leaves the goal just out of reach it is the smallest that has any. */
static uint32_t select_digit(const double *weight, int width, double *goal)
{
    uint32_t last = 0;
    double above_last = 0, taken = 0;

    for (uint32_t digit = 1u << width; digit-- > 0;) {
        if (weight[digit] == 0)
            continue;
        last = digit;
        above_last = taken;
        taken += weight[digit];
        if (taken >= *goal)
            break;
    }
    *goal -= above_last;
    return last;
}

/* The values from `least` up, to out[NEAR_MAX + STRETCH]; their number, or more than NEAR_MAX when there are too many. */
static uint32_t gather(const float *w, uint32_t n, float least, float *out)
{
    uint32_t m = 0;

    for (uint32_t i = 0; i < n && m <= NEAR_MAX;) {
        uint32_t end = n - i < STRETCH ? n : i + STRETCH;
        for (; i < end; i++) {
            out[m] = w[i];
            m += w[i] >= least;
        }
    }
    return m;
}

/* By digits over w[n]: the point where the weight reaches `goal`. */
static struct cut select_cut(const float *w, uint32_t n, bool by_mass, double goal)
{
    static const int shift[] = {21, 10, 0}, width[] = {11, 11, 10};
    double weight[2048];
    uint32_t key = 0, bits;
    float value;

    for (int i = 0; i < 3; i++) {
        weigh(w, n, key, shift[i], width[i], by_mass, weight);
        key |= select_digit(weight, width[i], &goal) << shift[i];
    }
    bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
    memcpy(&value, &bits, sizeof value);
    double each = by_mass ? (double)sample_exp(value) : 1.0, ties = each > 0 ? ceil(goal / each) : 1;
    return (struct cut){value, ties > 1 ? ties : 1};
}

/* The shortest prefix of the order whose weight reaches `goal`: a number, or with by_mass a share of the mass. It has one
 * candidate at least. Mostly the few values near the largest hold it, and only they are looked at closely. */
static struct cut select_prefix(const float *w, uint32_t n, bool by_mass, double goal)
{
    static const float least[] = {-4, -10, -20};
    float near[NEAR_MAX + STRETCH + 1];

    if (by_mass)
        goal *= total_mass(w, n);
    for (int i = 0; i < 3; i++) {
        uint32_t m = gather(w, n, least[i], near);
        if (m > NEAR_MAX)
            break;
        if ((by_mass ? total_mass(near, m) : m) > goal)
            return select_cut(near, m, by_mass, goal);
    }
    return select_cut(w, n, by_mass, goal);
}

static void drop_below(float *w, uint32_t n, struct cut cut)
{
    for (uint32_t i = 0; i < n; i++)
        w[i] = w[i] < cut.value ? -INFINITY : w[i];
    for (uint32_t i = 0; i < n; i++)
        if (w[i] == cut.value && cut.ties-- < 1)
            w[i] = -INFINITY;
}

static void filter(float *w, uint32_t n, const struct sample_row *row)
{
    if (row->top_k && row->top_k < n)
        drop_below(w, n, select_prefix(w, n, false, row->top_k));
    if (row->top_p < 1)
        drop_below(w, n, select_prefix(w, n, true, row->top_p > 0 ? row->top_p : 0));
    if (row->min_p > 0) {
        float least = logf(row->min_p < 1 ? row->min_p : 1);
        for (uint32_t i = 0; i < n; i++)
            if (w[i] < least)
                w[i] = -INFINITY;
    }
}

/* ---- drawing -------------------------------------------------------------------------------------------------------------- */

/* argmax of w + noise, ties to the lowest id. `likely` has w = 0: its score spares most others their noise. */
static uint32_t draw(const float *w, uint32_t n, const struct sample_row *row, uint32_t likely)
{
    uint32_t best = likely;
    float score = w[likely] + sample_noise(row->seed, row->choice, row->position, likely);

    for (uint32_t id = 0; id < n; id++) {
        if (w[id] + SAMPLE_NOISE_MAX < score || id == likely)
            continue;
        float s = w[id] + sample_noise(row->seed, row->choice, row->position, id);
        if (s > score || (s == score && id < best)) {
            score = s;
            best = id;
        }
    }
    return best;
}

/* Every logit is -inf or NaN: the lowest id that is not banned. */
static uint32_t first_allowed(uint32_t n, const struct sample_row *row)
{
    for (uint32_t id = 0; id < n; id++) {
        uint32_t i = 0;
        while (i < row->n_banned && row->banned[i] != id)
            i++;
        if (i == row->n_banned)
            return id;
    }
    return 0;
}

/* It grows with z. No -0: keys and comparisons must agree. */
static inline float weight_of(float z, float max, const struct sample_row *row)
{
    return (z - max) / row->temperature + 0.0f;
}

/* Log-probabilities after every parameter, up to a constant: w[n], 0 for the most likely id. False: there is no choice, *likely
 * is the token, and w is not filled. */
static bool weigh_row(const float *logits, uint32_t n, const struct sample_row *row, float *w, uint32_t *likely)
{
    bool greedy = !(row->temperature > SAMPLE_GREEDY_BELOW);
    const float *z = logits;

    if (!greedy || !is_plain(row)) {
        adjust(logits, n, row, w);
        z = w;
    }
    float max = largest(z, n);
    *likely = first_equal(z, n, max);
    if (*likely == n || max == -INFINITY)
        *likely = first_allowed(n, row);
    else if (!greedy) {
        for (uint32_t i = 0; i < n; i++)
            w[i] = weight_of(w[i], max, row);
        filter(w, n, row);
        return true;
    }
    return false;
}

static bool is_unfiltered(uint32_t n, const struct sample_row *row)
{
    return !(row->top_k && row->top_k < n) && !(row->top_p < 1) && !(row->min_p > 0);
}

/* Ids of a stretch that can win by their weight. A NaN cannot. */
struct candidates {
    float w[PASSED], noise[PASSED];
    uint32_t ids[PASSED + 1], n;
};

static void find_candidates(const float *z, uint32_t first, uint32_t end, const struct sample_row *row, float max, float least,
                            struct candidates *out)
{
    float w[PASSED];
    uint32_t n = 0;

    for (uint32_t id = first; id < end; id++)
        w[id - first] = weight_of(z[id], max, row);
    for (uint32_t id = first; id < end; id++) {
        out->ids[n] = id;
        n += w[id - first] >= least;
    }
    for (uint32_t i = 0; i < n; i++)
        out->w[i] = w[out->ids[i] - first];
    out->n = n;
}

/* Apart from the comparisons, so that it vectorizes. */
static void add_noise(const struct sample_row *row, struct candidates *some)
{
    uint32_t choice = row->choice, position = row->position, n = (some->n + LANES - 1) / LANES * LANES;
    uint64_t seed = row->seed;

    for (uint32_t i = some->n; i < n; i++)
        some->ids[i] = 0;
    for (uint32_t i = 0; i < n; i++)
        some->noise[i] = sample_noise(seed, choice, position, some->ids[i]);
}

/* draw() where every id is a candidate, without weights in memory: a stretch whose largest value cannot win is passed over. */
static uint32_t draw_from_all(const float *z, uint32_t n, const struct sample_row *row, float max, uint32_t likely)
{
    struct candidates some;
    uint32_t best = likely;
    float score = weight_of(z[likely], max, row) + sample_noise(row->seed, row->choice, row->position, likely);

    for (uint32_t first = 0; first < n; first += PASSED) {
        uint32_t end = n - first < PASSED ? n : first + PASSED;
        float least = score - SAMPLE_NOISE_MAX; /* a tenth below what could win: more than the rounding of the difference */
        if (!(weight_of(largest(z + first, end - first), max, row) >= least))
            continue;
        find_candidates(z, first, end, row, max, least, &some);
        add_noise(row, &some);
        for (uint32_t i = 0; i < some.n; i++) {
            float s = some.w[i] + some.noise[i];
            if (s > score || (s == score && some.ids[i] < best)) {
                score = s;
                best = some.ids[i];
            }
        }
    }
    return best;
}

/* At a temperature, without top-k, top-p and min-p: the logits are read twice and, mostly, not written. */
static uint32_t sample_unfiltered(const float *logits, uint32_t n, const struct sample_row *row, float *scratch)
{
    const float *z = logits;
    float max = largest(z, n);

    if (!is_plain(row) || max > FLT_MAX) {
        adjust(logits, n, row, scratch);
        z = scratch;
        max = largest(z, n);
    }
    uint32_t likely = first_equal(z, n, max);
    if (likely == n || max == -INFINITY)
        return first_allowed(n, row);
    return draw_from_all(z, n, row, max, likely);
}

static uint32_t row_vocab(uint32_t n_vocab, const struct sample_row *row)
{
    return row->n_vocab && row->n_vocab < n_vocab ? row->n_vocab : n_vocab;
}

void sample_row_cpu(const float *logits, uint32_t n_vocab, const struct sample_row *row, float *scratch,
                    struct sample_result *result)
{
    uint32_t n = row_vocab(n_vocab, row), likely;

    if (row->temperature > SAMPLE_GREEDY_BELOW && is_unfiltered(n, row))
        result->id = sample_unfiltered(logits, n, row, scratch);
    else
        result->id = weigh_row(logits, n, row, scratch, &likely) ? draw(scratch, n, row, likely) : likely;
    sample_logprobs_cpu(logits, n_vocab, row, scratch, result);
}

void sample_distribution_cpu(const float *logits, uint32_t n_vocab, const struct sample_row *row, float *p)
{
    uint32_t n = row_vocab(n_vocab, row), likely;

    if (!weigh_row(logits, n, row, p, &likely)) {
        memset(p, 0, n * sizeof *p);
        p[likely] = 1;
        return;
    }
    float scale = (float)(1 / total_mass(p, n));
    for (uint32_t i = 0; i < n; i++)
        p[i] = sample_exp(p[i]) * scale;
}

void sample_logprobs_cpu(const float *logits, uint32_t n_vocab, const struct sample_row *row, float *scratch,
                         struct sample_result *result)
{
    result->n_top = 0;
    result->logprob = 0;
    if (row->want_logprob)
        report_logprobs(logits, row_vocab(n_vocab, row), row, scratch, result);
}
