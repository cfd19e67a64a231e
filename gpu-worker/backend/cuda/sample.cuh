/* The `sample` op: sampling.h has the rule, cpu/cpu_sample.c the plain form. One block a row.
 *
 * top-k and top-p keep a prefix of the candidates in the order (value descending, id ascending): the value at which their number,
 * or mass, reaches the goal is found digit by digit of its bits. Masses are added as integers (units of 2^-44, the largest
 * candidate has 2^44), so that sums do not depend on the order in which threads come.
 */
#pragma once
#include <float.h>
#include "gpu-worker/backend/cuda/device.cuh"
#include "gpu-worker/backend/cuda/sample_params.h"
#include "gpu-worker/backend/sample_noise.h"

static constexpr int SAMPLE_THREADS = 512, DIGITS = 2048;
static const float MASS_ONE = 17592186044416.0f; /* 2^44 */

struct candidate {
    float value;
    uint32_t id;
};
static const uint32_t NO_ID = 0xffffffffu;

/* Whether a comes before b: the larger value, the lower id. */
__device__ __forceinline__ bool before(struct candidate a, struct candidate b)
{
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

struct sample_shared {
    unsigned long long weight[DIGITS];
    unsigned long long totals[SAMPLE_THREADS / WARP];
    struct candidate best[SAMPLE_THREADS / WARP];
    unsigned long long below; /* weight above the chosen digit */
    uint32_t digit;
};

__device__ __forceinline__ float finite_or_low(float x)
{
    return x != x ? -INFINITY : x > FLT_MAX ? FLT_MAX : x;
}

__device__ __forceinline__ unsigned long long mass_of(float w)
{
    return (unsigned long long)(sample_exp(w) * MASS_ONE);
}

/* Orders like the float: larger value, larger key. */
__device__ __forceinline__ uint32_t key_of(float value)
{
    uint32_t bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* ---- over the block; every thread gets the result ---- */

__device__ __forceinline__ struct candidate first_candidate(struct sample_shared *shared, struct candidate mine)
{
#pragma unroll
    for (int step = 16; step; step >>= 1) {
        struct candidate other;
        other.value = __shfl_xor_sync(FULL_WARP, mine.value, step);
        other.id = __shfl_xor_sync(FULL_WARP, mine.id, step);
        if (before(other, mine))
            mine = other;
    }
    __syncthreads();
    if (threadIdx.x % WARP == 0)
        shared->best[threadIdx.x / WARP] = mine;
    __syncthreads();
    mine = shared->best[0];
    for (int i = 1; i < SAMPLE_THREADS / WARP; i++)
        if (before(shared->best[i], mine))
            mine = shared->best[i];
    return mine;
}

/* Sum of the threads' values up to and with this one; *total: of all. */
__device__ __forceinline__ unsigned long long running_sum(struct sample_shared *shared, unsigned long long mine,
                                                          unsigned long long *total)
{
    uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int step = 1; step < WARP; step <<= 1) {
        unsigned long long other = __shfl_up_sync(FULL_WARP, mine, step);
        if (lane >= (uint32_t)step)
            mine += other;
    }
    __syncthreads();
    if (lane == WARP - 1)
        shared->totals[warp] = mine;
    __syncthreads();
    *total = 0;
    for (uint32_t i = 0; i < SAMPLE_THREADS / WARP; i++) {
        if (i < warp)
            mine += shared->totals[i];
        *total += shared->totals[i];
    }
    return mine;
}

__device__ __forceinline__ struct candidate largest(struct sample_shared *shared, const float *w, uint32_t n)
{
    struct candidate mine = {-INFINITY, NO_ID};
    for (uint32_t id = threadIdx.x; id < n; id += SAMPLE_THREADS) {
        struct candidate here = {w[id], id};
        if (here.value != -INFINITY && before(here, mine))
            mine = here;
    }
    return first_candidate(shared, mine);
}

__device__ __forceinline__ unsigned long long total_mass(struct sample_shared *shared, const float *w, uint32_t n, float max)
{
    unsigned long long mine = 0, total;
    for (uint32_t id = threadIdx.x; id < n; id += SAMPLE_THREADS)
        mine += mass_of(finite_or_low(w[id]) - max);
    running_sum(shared, mine, &total);
    return total;
}

/* ---- parameters before temperature ---- */

__device__ __forceinline__ void adjust(const float *logits, uint32_t n, const struct sample_params &p,
                                       const struct sample_lists &lists, float *w)
{
    for (uint32_t id = threadIdx.x; id < n; id += SAMPLE_THREADS)
        w[id] = finite_or_low(logits[id]);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < p.n_biases; i += SAMPLE_THREADS) {
        const struct sample_bias bias = lists.biases[p.biases + i];
        if (bias.id < n)
            w[bias.id] = finite_or_low(w[bias.id] + bias.bias);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < p.n_banned; i += SAMPLE_THREADS)
        if (lists.banned[p.banned + i] < n)
            w[lists.banned[p.banned + i]] = -INFINITY;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < p.n_counts; i += SAMPLE_THREADS) {
        const struct sample_count count = lists.counts[p.counts + i];
        if (count.id >= n)
            continue;
        float x = w[count.id];
        if (count.prompt || count.output)
            x = x > 0 ? x / p.repetition_penalty : x * p.repetition_penalty;
        if (count.output)
            x = add_rn(add_rn(x, -mul_rn(p.frequency_penalty, (float)count.output)), -p.presence_penalty);
        w[count.id] = finite_or_low(x);
    }
    __syncthreads();
}

/* Every logit is -inf or NaN: the lowest id that is not banned. */
__device__ __forceinline__ uint32_t first_allowed(struct sample_shared *shared, uint32_t n, const struct sample_params &p,
                                                  const struct sample_lists &lists)
{
    struct candidate mine = {0, NO_ID};
    for (uint32_t id = threadIdx.x; id < n && id <= p.n_banned && mine.id == NO_ID; id += SAMPLE_THREADS) {
        uint32_t i = 0;
        while (i < p.n_banned && lists.banned[p.banned + i] != id)
            i++;
        if (i == p.n_banned)
            mine.id = id;
    }
    uint32_t id = first_candidate(shared, mine).id;
    return id == NO_ID ? 0 : id;
}

/* ---- top-k and top-p ---- */

/* Weight of the candidates by one digit of their keys, of those whose key agrees with `prefix` above the digit. */
__device__ __forceinline__ void weigh(struct sample_shared *shared, const float *w, uint32_t n, uint32_t prefix, int shift,
                                      int width, bool by_mass)
{
    uint32_t above = shift + width == 32 ? 0 : ~0u << (shift + width), mask = (1u << width) - 1;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < DIGITS; i += SAMPLE_THREADS)
        shared->weight[i] = 0;
    __syncthreads();
    for (uint32_t id = threadIdx.x; id < n; id += SAMPLE_THREADS) {
        uint32_t key = key_of(w[id]);
        if (w[id] != -INFINITY && (key & above) == prefix)
            atomicAdd(&shared->weight[key >> shift & mask], by_mass ? mass_of(w[id]) : 1ull);
    }
    __syncthreads();
}

/* The digit where the weight, added from the largest down, reaches the goal (at most their sum); what lies above it is taken off
 * the goal. */
__device__ __forceinline__ uint32_t select_digit(struct sample_shared *shared, unsigned long long *goal)
{
    constexpr uint32_t EACH = DIGITS / SAMPLE_THREADS;
    unsigned long long mine = 0, total;
    uint32_t first = DIGITS - 1 - threadIdx.x * EACH;
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++)
        mine += shared->weight[first - i];
    unsigned long long end = running_sum(shared, mine, &total), start = end - mine;
    if (threadIdx.x == 0)
        shared->digit = 0, shared->below = 0; /* nothing has weight */
    __syncthreads();
    if (*goal > total)
        *goal = total;
    if (start < *goal && *goal <= end) {
        uint32_t i = 0;
        for (; i + 1 < EACH && start + shared->weight[first - i] < *goal; i++)
            start += shared->weight[first - i];
        shared->digit = first - i;
        shared->below = start;
    }
    __syncthreads();
    *goal -= shared->below;
    return shared->digit;
}

/* Drops all but the values above `cut` and the `ties` lowest ids of those equal to it. */
__device__ __forceinline__ void drop_below(struct sample_shared *shared, float *w, uint32_t n, float cut, unsigned long long ties)
{
    unsigned long long seen = 0, equal;
    for (uint32_t first = 0; first < n; first += SAMPLE_THREADS) {
        uint32_t id = first + threadIdx.x;
        bool tie = id < n && w[id] == cut;
        if (id < n && w[id] < cut)
            w[id] = -INFINITY;
        unsigned long long rank = seen + running_sum(shared, tie, &equal);
        if (tie && rank > ties)
            w[id] = -INFINITY;
        seen += equal;
    }
    __syncthreads();
}

/* Keeps the shortest prefix of the order whose number, or mass, reaches the goal; at least one candidate. */
__device__ __forceinline__ void keep_prefix(struct sample_shared *shared, float *w, uint32_t n, bool by_mass,
                                            unsigned long long goal)
{
    const int shift[3] = {21, 10, 0}, width[3] = {11, 11, 10};
    uint32_t key = 0;
    for (int i = 0; i < 3; i++) {
        weigh(shared, w, n, key, shift[i], width[i], by_mass);
        key |= select_digit(shared, &goal) << shift[i];
    }
    float cut = __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
    unsigned long long each = by_mass ? mass_of(cut) : 1, ties = each ? (goal + each - 1) / each : 1;
    drop_below(shared, w, n, cut, ties ? ties : 1);
}

__device__ __forceinline__ void filter(struct sample_shared *shared, float *w, uint32_t n, const struct sample_params &p)
{
    if (p.top_k && p.top_k < n)
        keep_prefix(shared, w, n, false, p.top_k);
    if (p.top_p < 1) {
        double goal = ceil((double)(p.top_p > 0 ? p.top_p : 0) * (double)total_mass(shared, w, n, 0));
        keep_prefix(shared, w, n, true, goal < 1 ? 1 : (unsigned long long)goal);
    }
    if (p.min_p > 0)
        for (uint32_t id = threadIdx.x; id < n; id += SAMPLE_THREADS)
            if (w[id] < p.log_min_p)
                w[id] = -INFINITY;
    __syncthreads();
}

/* ---- drawing ---- */

/* argmax of w + noise, ties to the lowest id. `likely` has w = 0: its score spares most others their noise. */
__device__ __forceinline__ uint32_t draw(struct sample_shared *shared, const float *w, uint32_t n, const struct sample_params &p,
                                         uint32_t likely)
{
    float least = w[likely] + sample_noise(p.seed, p.choice, p.position, likely);
    struct candidate mine = {least, likely};
    for (uint32_t id = threadIdx.x; id < n; id += SAMPLE_THREADS) {
        if (w[id] + SAMPLE_NOISE_MAX < mine.value || id == likely)
            continue;
        struct candidate here = {w[id] + sample_noise(p.seed, p.choice, p.position, id), id};
        if (before(here, mine))
            mine = here;
    }
    return first_candidate(shared, mine).id;
}

__device__ __forceinline__ uint32_t choose(struct sample_shared *shared, const float *logits, uint32_t n,
                                           const struct sample_params &p, const struct sample_lists &lists, float *w)
{
    adjust(logits, n, p, lists, w);
    struct candidate most = largest(shared, w, n);
    if (most.id == NO_ID)
        return first_allowed(shared, n, p, lists);
    if (!(p.temperature > SAMPLE_GREEDY_BELOW))
        return most.id;
    for (uint32_t id = threadIdx.x; id < n; id += SAMPLE_THREADS)
        w[id] = (w[id] - most.value) / p.temperature + 0.0f; /* no -0: keys and comparisons must agree */
    __syncthreads();
    filter(shared, w, n, p);
    return draw(shared, w, n, p, most.id);
}

/* ---- log-probabilities under the raw logits ---- */

/* JSON has no infinity: what cannot be drawn reads -9999, as in vLLM. */
__device__ __forceinline__ float raw_logprob(const float *logits, uint32_t id, float lse)
{
    float value = finite_or_low(logits[id]) - lse;
    return value > -9999.0f ? value : -9999.0f;
}

__device__ __forceinline__ void report_logprobs(struct sample_shared *shared, const float *logits, uint32_t n,
                                                const struct sample_params &p, struct sample_result *result)
{
    struct candidate last = {INFINITY, 0}, mine = {-INFINITY, NO_ID};
    for (uint32_t id = threadIdx.x; id < n; id += SAMPLE_THREADS) {
        struct candidate here = {finite_or_low(logits[id]), id};
        if (here.value != -INFINITY && before(here, mine))
            mine = here;
    }
    float max = first_candidate(shared, mine).value, lse = max;
    if (max != -INFINITY)
        lse = max + (float)log((double)total_mass(shared, logits, n, max) * (1.0 / (double)MASS_ONE));
    if (threadIdx.x == 0)
        result->logprob = raw_logprob(logits, result->id, lse);
    uint32_t k = p.top_logprobs < SAMPLE_TOP_MAX ? p.top_logprobs : (uint32_t)SAMPLE_TOP_MAX;
    for (uint32_t i = 0; i < k; i++) {
        mine = {-INFINITY, NO_ID};
        for (uint32_t id = threadIdx.x; id < n; id += SAMPLE_THREADS) { /* the first one after the last one */
            struct candidate here = {logits[id], id};
            if (here.value == here.value && (i == 0 || before(last, here)) && before(here, mine))
                mine = here;
        }
        last = first_candidate(shared, mine);
        if (last.id == NO_ID)
            break;
        if (threadIdx.x == 0) {
            result->top_ids[i] = last.id;
            result->top_logprobs[i] = raw_logprob(logits, last.id, lse);
            result->n_top = i + 1;
        }
    }
}

/* logits [., n_vocab]; scratch [gridDim.x][n_vocab]. */
__global__ void __launch_bounds__(SAMPLE_THREADS, 2)
    sample_kernel(const float *__restrict__ logits, uint32_t n_vocab, const struct sample_params *__restrict__ params,
                  struct sample_lists lists, float *__restrict__ scratch, struct sample_result *__restrict__ results)
{
    CU_SHARED(struct sample_shared, shared);
    const struct sample_params &p = params[blockIdx.x];
    struct sample_result *result = &results[blockIdx.x];
    const float *row = logits + (size_t)p.output * n_vocab;
    uint32_t n = p.n_vocab && p.n_vocab < n_vocab ? p.n_vocab : n_vocab;
    uint32_t id = choose(&shared, row, n, p, lists, scratch + (size_t)blockIdx.x * n_vocab);
    if (threadIdx.x == 0) {
        result->id = id;
        result->logprob = 0;
        result->n_top = 0;
    }
    if (p.want_logprob)
        report_logprobs(&shared, row, n, p, result);
}
