#include "gpu-worker/engine/accept.h"
#include <math.h>
#include "gpu-worker/backend/sample_noise.h"

enum { STREAM_ACCEPT = 1, STREAM_REST }; /* the last word of the noise's counter; tokens and drafts have 0 */
static const float usual_top_p = 0.9f;   /* where the request asks for all tokens */

static uint32_t word_of(const struct sample_row *row, uint32_t id, uint32_t stream)
{
    uint32_t counter[4] = {id, row->position, row->choice, stream};
    sample_philox(counter, row->seed);
    return counter[0];
}

/* u q < p for u uniform in (0, 1). */
static bool accepts(const struct sample_row *row, float p, float q)
{
    float u = ((float)(word_of(row, 0, STREAM_ACCEPT) >> 9) + 0.5f) * 0x1p-23f;
    return u * q < p;
}

/* p becomes max(0, p - q); false where nothing is left, which only rounding can do. */
static bool take_draft_off(float *p, uint32_t n, const struct accept_draft *draft)
{
    bool any = false;

    if (!draft->q)
        p[draft->id] = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (draft->q)
            p[i] = p[i] > draft->q[i] ? p[i] - draft->q[i] : 0;
        any |= p[i] > 0;
    }
    return any;
}

/* argmax of log r + noise over weights r[n]. What cannot win by the largest noise is not looked at: r below `least`. */
static uint32_t draw_rest(const float *r, uint32_t n, const struct sample_row *row)
{
    uint32_t best = 0;
    float score = -INFINITY, least = 0;

    for (uint32_t id = 0; id < n; id++) {
        if (!(r[id] > least))
            continue;
        float s = logf(r[id]) + sample_gumbel(word_of(row, id, STREAM_REST));
        if (s > score) {
            score = s;
            best = id;
            least = expf(score - SAMPLE_NOISE_MAX);
        }
    }
    return best;
}

static uint32_t reject_or_accept(float *p, uint32_t n, const struct sample_row *row, const struct accept_draft *draft,
                                 uint32_t drawn)
{
    if (accepts(row, p[draft->id], draft->q ? draft->q[draft->id] : 1))
        return draft->id;
    return take_draft_off(p, n, draft) ? draw_rest(p, n, row) : drawn;
}

/* The draft, where it belongs to the likely tokens: the most likely one, or those that hold top_p of the probability, of which
 * the first is always one. */
static uint32_t take_likely(const float *logits, uint32_t n_vocab, struct sample_row row, bool argmax,
                            const struct accept_draft *draft, float *p, uint32_t drawn)
{
    if (argmax)
        row.temperature = 0;
    else if (row.top_p >= 1)
        row.top_p = usual_top_p;
    sample_distribution_cpu(logits, n_vocab, &row, p);
    return p[draft->id] > 0 ? draft->id : drawn;
}

bool accept_draft(enum accept_rule rule, const float *logits, uint32_t n_vocab, const struct sample_row *row,
                  const struct accept_draft *draft, float *scratch, struct sample_result *result)
{
    uint32_t n = row->n_vocab && row->n_vocab < n_vocab ? row->n_vocab : n_vocab, id = result->id;

    if (rule == ACCEPT_REJECTION) {
        sample_distribution_cpu(logits, n_vocab, row, scratch);
        id = reject_or_accept(scratch, n, row, draft, result->id);
    } else if (rule != ACCEPT_COUPLED && id != draft->id) {
        id = take_likely(logits, n_vocab, *row, rule == ACCEPT_ARGMAX, draft, scratch, id);
    }
    if (id != result->id) {
        result->id = id;
        sample_logprobs_cpu(logits, n_vocab, row, scratch, result);
    }
    return id == draft->id;
}
