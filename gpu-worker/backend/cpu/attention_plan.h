/* How a step's attention is cut for the threads, between cpu_attention_plan.c, which decides it, and cpu_attention.c, which
 * computes it.
 *
 * A tile is up to ATTENTION_TILE rows, (token, head of the group) pairs of one sequence, times one kv head; a piece is a tile, or
 * behind a long context several of them. Where few pieces, or one much longer than the others, would leave threads idle, runs of
 * the segments of some pieces' keys are pieces of their own: the states of what follows the first run are written to `partials`,
 * and the thread that ends the last run combines them in order.
 *
 * Sequences that decode behind the same blocks (a system prompt, a conversation's fork) share the segments that lie in them:
 * these are computed first, with the rows of all of them in one tile, so that keys and values are read once, and full tiles
 * (Hydragen, Juravsky et al. 2024). Each sequence then goes on from its rows of that state. A row's arithmetic is the same either
 * way.
 *
 *   sequence 1   | shared segments | own ...          common tile: rows of 1 | rows of 2 | rows of 3     -> common state
 *   sequence 2   | the same blocks | own ...                                     |
 *   sequence 3   | the same blocks | own ...                                     +-> taken, then own segments folded in
 */
#pragma once
#include <stdatomic.h>
#include "gpu-worker/backend/cpu/cpu.h"

enum {
    COMMON_ROWS = 32, /* of a common tile */
    MOST_GROUP = 8,   /* tiles of a piece */
    STRETCH = 4,      /* segments that they go through together */
    MOST_SEGMENTS = 1024
};

struct attention_piece {
    uint32_t seq, tile, n_tiles, kv_head; /* tiles of the sequence, from `tile` on */
    uint32_t segment, run;                /* the first of its segments and how many; or WHOLE */
    uint32_t n_segments;                  /* of the last tile */
    uint32_t index;                       /* among split pieces */
    uint32_t before;                      /* states of split pieces before it */
};

/* Rows of several sequences over the segments that they share. */
struct common_tile {
    uint32_t first, n_seqs; /* of plan->members */
    uint32_t n_rows, n_segments;
};

/* Where a sequence's rows lie in its common tile. */
struct common_place {
    uint32_t tile; /* or NO_TILE */
    uint32_t row;
};
static const uint32_t NO_TILE = UINT32_MAX;

struct attention_plan {
    uint32_t tile_rows, n_pieces;
    uint32_t chunk;                 /* pieces that a thread takes at once: 1, or THREAD_POOL_SHRINKING */
    struct attention_piece *pieces; /* [n_pieces] */
    struct attention_piece *tiles;  /* while pieces are put together */
    size_t partial_floats;          /* of one state */
    float *partials;                /* [n_partials] states of split pieces */
    uint32_t n_partials, run;       /* run: segments of a split piece's runs but the last */
    _Atomic uint32_t *left;         /* [split pieces] segments that are not done */
    float *totals;                  /* [threads][MOST_GROUP + STRETCH] states */
    size_t total_floats;            /* of one of them */

    struct common_tile *commons; /* [n_commons], room for max_seqs */
    struct common_place *places; /* [n_seqs] */
    uint32_t *members;           /* [n_members] sequences in common tiles, tile after tile */
    uint32_t n_commons, n_members;
    size_t common_floats; /* of one state */
    float *common_states; /* [common tile][kv head] */
};

/* Query rows of a sequence for each kv head. */
static inline uint32_t attention_rows_of(const struct cpu_backend *cpu, uint32_t s)
{
    return cpu->step.seqs[s].n_rows * (cpu->kv.n_heads / cpu->kv.n_kv_heads);
}

/* The largest position of the rows of a tile. */
static inline uint32_t attention_last(const struct cpu_backend *cpu, const struct attention_piece *piece, uint32_t tile)
{
    uint32_t rows = attention_rows_of(cpu, piece->seq), end = (tile + 1) * cpu->plan->tile_rows;
    return cpu->step.seqs[piece->seq].n_past + ((end < rows ? end : rows) - 1) / (cpu->kv.n_heads / cpu->kv.n_kv_heads);
}

/* States of each tile of a split piece: of its first run, and of every later segment. */
static inline uint32_t attention_states_of(const struct attention_piece *piece, uint32_t run)
{
    return 1 + piece->n_segments - run;
}
