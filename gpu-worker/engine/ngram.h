/* Prompt lookup: where the last tokens of a sequence stood before, what followed them then is a good guess of what comes now.
 *
 *   ids    ... a b c d e ...  ... b c d           the latest earlier "b c d" ended before position p: the guess is e ...
 *                      ^p              ^n_ids
 *
 * Three direct-mapped tables, for runs of 8, 4 and 2 tokens, hold the latest position behind each run by its hash; a newer run
 * takes the place of an older one, and what is found is compared with the ids, so that a guess always follows a true match.
 * O(1) a token and a look-up, bounded memory, nothing allocates. (Prompt lookup: Saxena 2023; LLMA, arXiv 2304.04487.)
 */
#pragma once
#include <stdint.h>

enum { NGRAM_LEVELS = 3, NGRAM_SLOTS = 1 << 15 };

struct ngram {
    uint32_t last[NGRAM_LEVELS][NGRAM_SLOTS]; /* position behind the run; 0 = none */
    uint32_t n_slots;                         /* in use: a power of two */
    uint32_t n_known;                         /* runs that end at or before this position are in the tables */
};

/* Forgets everything; `longest` is how many ids the sequence may come to. */
void ngram_reset(struct ngram *ngram, uint32_t longest);
/* The position behind the latest earlier occurrence of the longest run that ends ids[n_ids], and in *level which of the three
 * runs it was (0 = the longest); 0: none. ids may only have grown since the last call. */
uint32_t ngram_find(struct ngram *ngram, const uint32_t *ids, uint32_t n_ids, uint32_t *level);
