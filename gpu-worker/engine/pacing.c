#include "gpu-worker/engine/pacing.h"

enum { LEAST = 16, FIRST_RATE = 400 };
static const double target[2] = {0.5, 0.05};

void pacing_init(struct pacing *pacing, uint32_t most, uint32_t fixed)
{
    *pacing = (struct pacing){.most = most, .fixed = fixed, .rate = {FIRST_RATE, FIRST_RATE}};
}

uint32_t pacing_rows(const struct pacing *pacing, uint32_t n_decodes)
{
    uint32_t room = pacing->most > n_decodes ? pacing->most - n_decodes : 0;
    double rows = pacing->rate[n_decodes > 0] * target[n_decodes > 0] - n_decodes;

    if (pacing->fixed)
        return pacing->fixed < room ? pacing->fixed : room;
    if (rows < LEAST)
        rows = LEAST;
    if (rows >= room)
        return room;
    return (uint32_t)rows / LEAST * LEAST;
}

/* Slower is believed at once, faster by and by: a step that is too long hurts more than one that is too short. */
void pacing_observe(struct pacing *pacing, uint32_t prompt_rows, uint32_t n_decodes, double seconds)
{
    double *rate = &pacing->rate[n_decodes > 0];

    if (prompt_rows < LEAST || seconds <= 0)
        return;
    double now = (prompt_rows + n_decodes) / seconds;
    *rate = now < *rate ? 0.3 * *rate + 0.7 * now : 0.7 * *rate + 0.3 * now;
}
