/* Finds stop strings in text that comes in pieces, and holds back only what may be the beginning of one.
 *
 * One Knuth-Morris-Pratt automaton a string: its state is the length of the longest end of the text that begins the string.
 *
 *   stop "own fox"   text "The quick br" "own f" "ox jumps"
 *   state            0                   5       7: found; the text before it was already passed on
 *
 * The largest state is how many bytes are held. The string that ends first wins; of those ending together the longest.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "libprompt/arena.h"

enum { STOP_NONE = -1 };

/* The strings of one request; immutable, shared by its choices. */
struct stop_set {
    size_t n;
    const char **strings;
    uint32_t *lens;
    uint32_t **failure; /* [lens[i]]: where to go on after a mismatch behind i bytes */
    uint32_t longest;
};

/* Copies strings[n], none empty, into the arena. 0 or KVG_NOMEM. */
int stop_set_init(struct stop_set *set, struct kvg_arena *arena, const char *const *strings, const size_t *lens, size_t n);

/* One choice's place in its text. */
struct stop_match {
    const struct stop_set *set;
    uint32_t *state; /* [set->n] */
    char *held;      /* [longest]: text that may begin a stop string */
    uint32_t n_held;
};

int stop_match_init(struct stop_match *match, struct kvg_arena *arena, const struct stop_set *set);
/* Adds text[n]; writes what can be passed on to out (n_held + n bytes at most, the match's own bytes behind `include`) and
 * returns its length. *found becomes the index of the string that was completed, or STOP_NONE; nothing behind it is read. */
size_t stop_feed(struct stop_match *match, const char *text, size_t n, bool include, char *out, int *found);
/* The text ends: what is still held goes to out. Returns its length. */
size_t stop_flush(struct stop_match *match, char *out);
