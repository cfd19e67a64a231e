#include "gpu-worker/engine/stop_match.h"
#include <string.h>
#include "libprompt/error.h"

/* The state after byte c, from state k of string i. */
static uint32_t follow(const struct stop_set *set, size_t i, uint32_t k, char c)
{
    while (k && (k == set->lens[i] || set->strings[i][k] != c))
        k = set->failure[i][k - 1];
    return set->strings[i][k] == c ? k + 1 : 0;
}

static void fill_failure(struct stop_set *set, size_t i)
{
    set->failure[i][0] = 0;
    for (uint32_t k = 1; k < set->lens[i]; k++)
        set->failure[i][k] = follow(set, i, set->failure[i][k - 1], set->strings[i][k]);
}

int stop_set_init(struct stop_set *set, struct kvg_arena *arena, const char *const *strings, const size_t *lens, size_t n)
{
    *set = (struct stop_set){.n = n};
    set->strings = kvg_arena_alloc(arena, n * sizeof *set->strings);
    set->lens = kvg_arena_alloc(arena, n * sizeof *set->lens);
    set->failure = kvg_arena_alloc(arena, n * sizeof *set->failure);
    if (!set->strings || !set->lens || !set->failure)
        return KVG_NOMEM;
    for (size_t i = 0; i < n; i++) {
        set->lens[i] = (uint32_t)lens[i];
        set->strings[i] = kvg_arena_copy(arena, strings[i], lens[i]);
        set->failure[i] = kvg_arena_alloc(arena, lens[i] * sizeof **set->failure);
        if (!set->strings[i] || !set->failure[i])
            return KVG_NOMEM;
        fill_failure(set, i);
        if (set->lens[i] > set->longest)
            set->longest = set->lens[i];
    }
    return 0;
}

int stop_match_init(struct stop_match *match, struct kvg_arena *arena, const struct stop_set *set)
{
    match->set = set;
    match->n_held = 0;
    match->state = kvg_arena_zalloc(arena, set->n * sizeof *match->state);
    match->held = kvg_arena_alloc(arena, set->longest + 1);
    return match->state && match->held ? 0 : KVG_NOMEM;
}

/* Moves every automaton by one byte. Returns the longest state; *found: the longest string that is complete. */
static uint32_t advance(struct stop_match *match, char c, int *found)
{
    const struct stop_set *set = match->set;
    uint32_t longest = 0;

    *found = STOP_NONE;
    for (size_t i = 0; i < set->n; i++) {
        match->state[i] = follow(set, i, match->state[i], c);
        if (match->state[i] == set->lens[i] && (*found == STOP_NONE || set->lens[i] > set->lens[*found]))
            *found = (int)i;
        if (match->state[i] > longest)
            longest = match->state[i];
    }
    return longest;
}

size_t stop_feed(struct stop_match *match, const char *text, size_t n, bool include, char *out, int *found)
{
    size_t n_out = 0;

    *found = STOP_NONE;
    if (match->set->n == 0) {
        memcpy(out, text, n);
        return n;
    }
    for (size_t i = 0; i < n; i++) {
        match->held[match->n_held++] = text[i];
        uint32_t keep = advance(match, text[i], found);
        if (*found != STOP_NONE)
            keep = include ? 0 : match->set->lens[*found];
        uint32_t pass = match->n_held - keep;
        memcpy(out + n_out, match->held, pass);
        n_out += pass;
        match->n_held = keep;
        if (*found != STOP_NONE)
            return n_out;
        memmove(match->held, match->held + pass, keep);
    }
    return n_out;
}

size_t stop_flush(struct stop_match *match, char *out)
{
    size_t n = match->n_held;
    memcpy(out, match->held, n);
    match->n_held = 0;
    return n;
}
