/* The `sample` op: one next token a row, as a pure function of (logits, parameters, seed, choice, position).
 *
 * Order (vLLM's): logit_bias, min-tokens ban, repetition / presence / frequency penalties, temperature, top-k, top-p, min-p;
 * then the token is the argmax of log-probability + Gumbel noise from Philox4x32-10 with key = seed and counter =
 * (choice, absolute position, token id), -log(-log(u)) by one polynomial in f32 that every backend shares (sample_noise.h).
 * A temperature up to SAMPLE_GREEDY_BELOW takes the argmax of the penalized logits, ties to the lowest id. So a request's text
 * does not depend on its batch.
 *
 * top-k and top-p keep a prefix of the candidates in the order (value descending, id ascending): k of them, or the shortest
 * whose mass reaches top_p; the first always stays. min-p drops what has less than min_p of the first one's probability.
 * A NaN logit cannot be drawn.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SAMPLE_GREEDY_BELOW 1e-5f

struct sample_bias {
    uint32_t id;
    float bias;
};
struct sample_count {
    uint32_t id;
    uint32_t prompt, output; /* occurrences in the prompt and in the output so far */
};

struct sample_row {
    uint32_t output;      /* which output row of the batch */
    uint64_t seed;
    uint32_t choice;      /* index of the choice within n */
    uint32_t position;    /* absolute position of the token to be sampled */
    float temperature, top_p, min_p;
    uint32_t top_k;       /* 0 = all */
    float repetition_penalty, presence_penalty, frequency_penalty; /* 1, 0, 0 = off */
    const struct sample_count *counts; /* [n_counts] distinct ids, ascending; only read where a penalty is on */
    uint32_t n_counts;
    const struct sample_bias *biases;  /* [n_biases] distinct ids, ascending */
    uint32_t n_biases;
    const uint32_t *banned;            /* [n_banned] ids that cannot be drawn (end ids before min_tokens) */
    uint32_t n_banned;
    uint32_t n_vocab;                  /* ids >= n_vocab (padding rows) cannot be drawn; 0 = the model's */
    uint32_t top_logprobs;             /* how many alternatives to return; the drawn token's is always computed if want_logprob */
    bool want_logprob;
};

enum { SAMPLE_TOP_MAX = 20 };
struct sample_result {
    uint32_t id;
    float logprob; /* of the drawn token under the raw logits (log-softmax before any parameter, as OpenAI and vLLM report) */
    uint32_t n_top;
    uint32_t top_ids[SAMPLE_TOP_MAX]; /* descending log-probability */
    float top_logprobs[SAMPLE_TOP_MAX];
};

/* The CPU's implementation over one row of logits, also the reference. scratch: n_vocab floats. Row-independent. */
void sample_row_cpu(const float *logits, uint32_t n_vocab, const struct sample_row *row, float *scratch, struct sample_result *result);
/* The distribution that a row's token is drawn from, after every parameter: p [n_vocab of the row]. Where there is no choice, as at
 * temperature 0, all of it is one id's. */
void sample_distribution_cpu(const float *logits, uint32_t n_vocab, const struct sample_row *row, float *p);
/* For a token that came about otherwise: the log-probabilities that the row asks for, of result->id. scratch: n_vocab floats. */
void sample_logprobs_cpu(const float *logits, uint32_t n_vocab, const struct sample_row *row, float *scratch,
                         struct sample_result *result);
