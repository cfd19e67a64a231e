#include "gpu-worker/engine/pacing.h"
#include <math.h>
#include <stdbool.h>

enum { LEAST = 16, FIRST_RATE = 400, KEYS_ROWS = 16, FEW_UNITS = 4, KNOWN_STEPS = 1000 };
static const double alone = 0.5, beside_streams = 0.02, beside_few = 0.25; /* seconds */
static const double decode_steps = 2.5, a_prompt_more = 2;                 /* streams that one more prompt outweighs */
static const double memory = 0.98, ridge = 1e-3, least_own_share = 0.2;
static const double most_longer = 1.1; /* than known, of a step of decode rows */

void pacing_init(struct pacing *pacing, uint32_t most, uint32_t fixed)
{
    const struct pacing_fit fit = {.row = 1.0 / FIRST_RATE, .drift = 1};
    *pacing = (struct pacing){.most = most, .fixed = fixed, .fit = {fit, fit}};
}

/* Decode rows alone; 0 before any were seen. */
static double decode_seconds(const struct pacing *pacing, uint32_t n_decodes)
{
    return n_decodes && pacing->decode.now ? step_cost_of(&pacing->decode, n_decodes) : 0;
}

static double target_seconds(const struct pacing *pacing, uint32_t n_decodes, uint32_t n_prompts)
{
    if (n_decodes == 0)
        return alone;
    double target = fmin(fmax(decode_steps * decode_seconds(pacing, n_decodes), beside_streams), alone);
    if (n_prompts < 2)
        return target;
    return fmax(target, fmin(target * (1 + a_prompt_more * (n_prompts - 1.0) / n_decodes), beside_few));
}

/* The n of  row n + pair (n + KEYS_ROWS) (past + n / 2) = seconds;  0 where the keys alone take longer. */
static double rows_within(const struct pacing_fit *fit, double seconds, double past)
{
    double left = seconds - fit->pair * KEYS_ROWS * past;
    double a_row = fit->row + fit->pair * (past + KEYS_ROWS / 2.0);

    return left > 0 ? 2 * left / (a_row + sqrt(a_row * a_row + 2 * fit->pair * left)) : 0;
}

/* Few rows cost what whole units cost, so that what a third more or two thirds less would spare is small. */
static uint32_t in_units(uint32_t unit, double wanted)
{
    uint32_t rows = wanted < LEAST ? LEAST : (uint32_t)wanted;

    if (unit == 0 || rows >= FEW_UNITS * unit)
        return rows / 4 * 4;
    uint32_t least = (LEAST + unit - 1) / unit * unit;
    rows = (rows + unit / 3) / unit * unit;
    return rows > least ? rows : least;
}

uint32_t pacing_rows(const struct pacing *pacing, uint32_t n_decodes, uint32_t n_prompts, uint32_t past)
{
    const struct pacing_fit *fit = &pacing->fit[n_decodes > 0];
    uint32_t room = pacing->most > n_decodes ? pacing->most - n_decodes : 0;

    if (pacing->fixed)
        return pacing->fixed < room ? pacing->fixed : room;
    double seconds = target_seconds(pacing, n_decodes, n_prompts) / fit->drift - decode_seconds(pacing, n_decodes);
    double wanted = rows_within(fit, seconds, past);
    uint32_t rows = wanted < room ? in_units(pacing->unit, wanted) : room;
    return rows < room ? rows : room;
}

/* The pair may take nothing, and the row never all of what a row takes. */
static void solve(struct pacing_fit *fit)
{
    double a = fit->xx[0] * (1 + ridge), b = fit->xx[1], c = fit->xx[2] * (1 + ridge);
    double x = fit->xy[0] + ridge * fit->xx[0] * fit->row, y = fit->xy[1] + ridge * fit->xx[2] * fit->pair;
    double together = fit->xy[0] / fit->xx[0];

    fit->row = (x * c - y * b) / (a * c - b * b);
    fit->pair = (y * a - x * b) / (a * c - b * b);
    if (!(fit->pair > 0)) {
        fit->pair = 0;
        fit->row = together;
    } else if (fit->row < least_own_share * together) {
        fit->row = least_own_share * together;
        fit->pair = (fit->xy[1] - fit->row * b) / fit->xx[2];
    }
}

/* Slower is believed at once, faster by and by: a step that is too long hurts more than one that is too short. */
static void follow(double *drift, double now)
{
    *drift = now > *drift ? 0.3 * *drift + 0.7 * now : 0.7 * *drift + 0.3 * now;
}

static void learn(struct pacing_fit *fit, double rows, double pairs, double seconds)
{
    double row = rows / seconds, pair = pairs / seconds;

    fit->xx[0] = memory * fit->xx[0] + row * row;
    fit->xx[1] = memory * fit->xx[1] + row * pair;
    fit->xx[2] = memory * fit->xx[2] + pair * pair;
    fit->xy[0] = memory * fit->xy[0] + row;
    fit->xy[1] = memory * fit->xy[1] + pair;
    solve(fit);
}

/* A prompt that arrives takes processor time from the last steps before its own, and while it is computed no step without prompt
 * rows comes that would say what they really take. So a step that took longer counts little, until many did. */
static void learn_decode(struct pacing *pacing, uint32_t n_decodes, double seconds)
{
    if (step_cost_fresh(&pacing->decode, n_decodes, KNOWN_STEPS))
        seconds = fmin(seconds, most_longer * step_cost_of(&pacing->decode, n_decodes));
    step_cost_add(&pacing->decode, n_decodes, seconds);
}

void pacing_observe(struct pacing *pacing, const struct pacing_step *step, double seconds)
{
    double base = decode_seconds(pacing, step->n_decodes), rows = step->prompt_rows;

    if (seconds <= 0)
        return;
    if (step->prompt_rows == 0) {
        learn_decode(pacing, step->n_decodes, seconds);
        return;
    }
    if (step->prompt_rows < LEAST)
        return;
    struct pacing_fit *fit = &pacing->fit[step->n_decodes > 0];
    double pairs = (rows + KEYS_ROWS) * (step->keys > 1 ? step->keys : 1);
    bool known = fit->xx[0] > 0;
    double expected = base + fit->row * rows + fit->pair * pairs;
    learn(fit, rows, pairs, seconds - base > 0.1 * seconds ? seconds - base : 0.1 * seconds);
    /* Beside streams rows are taken to cost as much, until they were seen. */
    if (step->n_decodes == 0 && pacing->fit[1].xx[0] == 0) {
        pacing->fit[1].row = fit->row;
        pacing->fit[1].pair = fit->pair;
    }
    if (known)
        follow(&fit->drift, seconds / expected);
}
