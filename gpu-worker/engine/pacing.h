/* How many prompt rows a step may take, so that it lasts about as long as it should.
 *
 * While a stream decodes, a step is cut to 2.5 steps of decode rows alone, because the stream's next token waits for it; not
 * below 20 ms: tiny chunks would pay the fixed cost of a step again and again. Where several prompts wait, more clients gain from
 * a longer step than lose: it grows by twice the share of prompts to streams, up to 250 ms. (All in all the streams wait for the
 * prompts' rows in any case; short steps only spread that.) Without streams a step takes 500 ms: heartbeats and cancellations
 * wait for it.
 *
 *   seconds = decode rows alone + row n + pair (n + KEYS_ROWS) keys        n prompt rows that see so many keys each, on average
 *
 * `row` and `pair` are fitted to the steps as they come (least squares of relative errors, older steps count less and less),
 * apart for steps with and without decode rows; until there was one with both, rows are taken to cost there what they cost
 * alone. KEYS_ROWS: reading the keys costs as much as that many rows, which is why a small chunk behind a long context is dear.
 * `drift` follows what the fit is too slow for. What decode rows take is known by their number: else, when one stream has become
 * thirty, all that they take would seem the price of the prompt rows beside them.
 */
#pragma once
#include <stdint.h>
#include "gpu-worker/engine/step_cost.h"

struct pacing_fit {
    double xx[3], xy[2]; /* weighted sums of the normal equations: row row, row pair, pair pair; row, pair */
    double row, pair;    /* seconds */
    double drift;        /* what a step takes / what the fit says */
};

struct pacing {
    uint32_t most;            /* --max-num-batched-tokens */
    uint32_t fixed;           /* tests: exactly this many; 0 = follow the fit */
    uint32_t unit;            /* rows of a prompt that read its keys together; 0: any number is as good */
    struct pacing_fit fit[2]; /* [1] while a stream decodes */
    struct step_cost decode;  /* steps of so many decode rows alone */
};

/* What a step computed. */
struct pacing_step {
    uint32_t prompt_rows, n_decodes;
    double keys; /* that a prompt row sees, on average */
};

void pacing_init(struct pacing *pacing, uint32_t most, uint32_t fixed);
/* Prompt rows for a step that has n_decodes decode rows while n_prompts prompts want rows (a short one may stand for several);
 * `past` tokens lie before the first. */
uint32_t pacing_rows(const struct pacing *pacing, uint32_t n_decodes, uint32_t n_prompts, uint32_t past);
void pacing_observe(struct pacing *pacing, const struct pacing_step *step, double seconds);
