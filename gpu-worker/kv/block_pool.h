/* The KV blocks of the device by number: which are free, and how many hold each of the others.
 *
 *   free list (a stack)      7 3 9           refs 0
 *   private to a sequence    4               refs 1   its table
 *   cached                   0 1             refs 1   the radix tree
 *   cached and used          2 5             refs 1 + number of tables that hold it
 *
 * Knows numbers only, no device memory. Nothing allocates after pool_init. One thread.
 */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "libprompt/arena.h"

enum { POOL_NONE = 0xffffffffu };

struct block_pool {
    uint32_t *refs;  /* [n_blocks] */
    uint32_t *stack; /* [n_free] free blocks, the next to take last */
    uint32_t n_blocks, n_free;
};

/* All blocks free; 0 is taken first. Memory comes from the arena. 0, or KVG_NOMEM. */
int pool_init(struct block_pool *pool, struct kvg_arena *arena, uint32_t n_blocks);
/* A free block, now with one reference, or POOL_NONE. */
uint32_t pool_take(struct block_pool *pool);
void pool_ref(struct block_pool *pool, uint32_t block); /* the block must be held already */
/* Gives one reference back; with the last one the block is free. Whether it is. A reference too many ends the process. */
bool pool_unref(struct block_pool *pool, uint32_t block);
