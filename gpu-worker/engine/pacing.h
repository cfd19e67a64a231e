/* How many prompt rows a step may take, so that it lasts about as long as it should.
 *
 * While a stream decodes, a step is cut to 2.5 steps of decode rows alone, because the stream's next token waits for it: the
 * prompt then keeps about 60 % of the rate that it has by itself, and the streams' slowest tokens take about twice as long as
 * without it. Not below 20 ms: tiny chunks would pay the fixed cost of a step again and again. Otherwise a step takes 500 ms:
 * heartbeats and cancellations wait for it. The rate is measured apart for both, because decode rows cost more than prompt rows.
 */
#pragma once
#include <stdbool.h>
#include <stdint.h>

struct pacing {
    uint32_t most;         /* --max-num-batched-tokens */
    uint32_t fixed;        /* tests: exactly this many; 0 = follow the rate */
    double rate[2];        /* rows a second; [1] while a stream decodes */
    double decode_seconds; /* a step of decode rows alone; 0 = not seen yet */
};

void pacing_init(struct pacing *pacing, uint32_t most, uint32_t fixed);
/* Prompt rows for a step that has n_decodes decode rows. */
uint32_t pacing_rows(const struct pacing *pacing, uint32_t n_decodes);
/* A step of so many rows took so long. */
void pacing_observe(struct pacing *pacing, uint32_t prompt_rows, uint32_t n_decodes, double seconds);
