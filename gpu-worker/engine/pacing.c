#include "gpu-worker/engine/pacing.h"

enum { LEAST = 16, FIRST_RATE = 400 };
static const double alone = 0.5, beside_streams = 0.02; /* seconds */
static const double decode_steps = 2.5;

void pacing_init(struct pacing *pacing, uint32_t most, uint32_t fixed)
{
    *pacing = (struct pacing){.most = most, .fixed = fixed, .rate = {FIRST_RATE, FIRST_RATE}};
}

static double target_seconds(const struct pacing *pacing, uint32_t n_decodes)
{
    if (n_decodes == 0)
        return alone;
    double longer = decode_steps * pacing->decode_seconds;
    return longer < beside_streams ? beside_streams : longer < alone ? longer : alone;
}

uint32_t pacing_rows(const struct pacing *pacing, uint32_t n_decodes)
{
    uint32_t room = pacing->most > n_decodes ? pacing->most - n_decodes : 0;
    double rows = pacing->rate[n_decodes > 0] * target_seconds(pacing, n_decodes) - n_decodes;

    if (pacing->fixed)
        return pacing->fixed < room ? pacing->fixed : room;
    if (rows < LEAST)
        rows = LEAST;
    if (rows >= room)
        return room;
    return (uint32_t)rows / LEAST * LEAST;
}

/* Slower is believed at once, faster by and by: a step that is too long hurts more than one that is too short. */
static void learn_rate(double *rate, double now)
{
    *rate = now < *rate ? 0.3 * *rate + 0.7 * now : 0.7 * *rate + 0.3 * now;
}

void pacing_observe(struct pacing *pacing, uint32_t prompt_rows, uint32_t n_decodes, double seconds)
{
    if (seconds <= 0)
        return;
    if (prompt_rows >= LEAST)
        learn_rate(&pacing->rate[n_decodes > 0], (prompt_rows + n_decodes) / seconds);
    else if (prompt_rows == 0)
        pacing->decode_seconds = pacing->decode_seconds ? 0.8 * pacing->decode_seconds + 0.2 * seconds : seconds;
}
