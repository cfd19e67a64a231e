/* A copy of earlier text, and what is changed in it: drafts from the context follow the ids that stand `offset` back, with tokens
 * changed as they were before.
 *
 *   ids   ... self . width = self . height ...  ...  this . width = | this . height      once "this" has come for "self" and the
 *             ^ offset back                                          ^ drafts            text went on beside it, it is expected
 */
#pragma once
#include <stdint.h>

enum { COPIED_SWAPS = 8 };

/* A token of what is copied, and the one that came in its place. */
struct copied_swap {
    uint32_t from, to;
};

struct copied {
    uint32_t offset;                        /* the last drafts were what stands so far back */
    struct copied_swap swaps[COPIED_SWAPS]; /* believed, each of another token; from = to: none */
    uint32_t n_swaps;                       /* made so far; the next one takes the place of the oldest */
    struct copied_swap seen;                /* at the end of the last verification; believed if the copy goes on behind it */
    uint32_t seen_at;                       /* its position */
};

/* Writes n drafts behind ids[n_ids], beginning with what stands at ids[at]. Where that runs into the drafts, they are the source:
 * a period goes on. */
void copied_draft(struct copied *copy, uint32_t *ids, uint32_t n_ids, uint32_t at, uint32_t n);
/* Of those drafts the first n_accepted were right; the last of the n_ids ids is the one behind them. */
void copied_verified(struct copied *copy, const uint32_t *ids, uint32_t n_ids, uint32_t n_accepted);
