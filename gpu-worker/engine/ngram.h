/* Prompt lookup: where the last tokens of a sequence stood before, what followed them then is a good guess of what comes now.
 *
 *   ids    ... a b c d e ...  ... b c d           the latest earlier "b c d" ended before position p: the guess is e ...
 *                      ^p              ^n_ids
 *
 * Three direct-mapped tables, for runs of 8, 4 and 2 tokens or as ngram_runs says, hold the latest position behind each run by
 * its hash; a newer run takes the place of an older one, and what is found is compared with the ids, so that a guess always
 * follows a true match. O(1) a token and a look-up, bounded memory, nothing allocates. (Prompt lookup: Saxena 2023; LLMA, arXiv
 * 2304.04487.)
 */
#pragma once
#include <stdint.h>

enum { NGRAM_LEVELS = 3, NGRAM_SLOTS = 1 << 15, NGRAM_LONGEST = 8, NGRAM_SHORTEST = 2, NGRAM_MOST = 64 };

/* How many tokens must stand there again: at best and at least, up to NGRAM_MOST; both 0 = 8 and 2. Between them lies one more
 * length, their geometric mean. */
struct ngram_runs {
    uint32_t longest, shortest;
};

struct ngram {
    uint32_t last[NGRAM_LEVELS][NGRAM_SLOTS]; /* position behind the run; 0 = none */
    uint32_t len[NGRAM_LEVELS];               /* tokens of a run, descending; equal ones are one level, the first of them */
    uint32_t n_slots;                         /* in use: a power of two */
    uint32_t n_known;                         /* runs that end at or before this position are in the tables */
};

/* Forgets everything; `longest` is how many ids the sequence may come to. */
void ngram_reset(struct ngram *ngram, uint32_t longest, struct ngram_runs runs);
/* The position behind the latest earlier occurrence of the longest run that ends ids[n_ids], and in *level which of the three
 * runs it was (0 = the longest); 0: none. ids may only have grown since the last call. */
uint32_t ngram_find(struct ngram *ngram, const uint32_t *ids, uint32_t n_ids, uint32_t *level);
