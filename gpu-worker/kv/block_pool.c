#include "gpu-worker/kv/block_pool.h"
#include "gpu-worker/log.h"
#include "libprompt/error.h"

int pool_init(struct block_pool *pool, struct kvg_arena *arena, uint32_t n_blocks)
{
    pool->refs = kvg_arena_zalloc(arena, (size_t)n_blocks * sizeof *pool->refs);
    pool->stack = kvg_arena_alloc(arena, (size_t)n_blocks * sizeof *pool->stack);
    if (!pool->refs || !pool->stack)
        return KVG_NOMEM;
    for (uint32_t i = 0; i < n_blocks; i++)
        pool->stack[i] = n_blocks - 1 - i;
    pool->n_blocks = pool->n_free = n_blocks;
    return 0;
}

uint32_t pool_take(struct block_pool *pool)
{
    if (pool->n_free == 0)
        return POOL_NONE;
    uint32_t block = pool->stack[--pool->n_free];
    pool->refs[block] = 1;
    return block;
}

void pool_ref(struct block_pool *pool, uint32_t block)
{
    if (block >= pool->n_blocks || pool->refs[block] == 0)
        log_fatal("kv: block %u of %u is shared but nobody holds it", block, pool->n_blocks);
    pool->refs[block]++;
}

bool pool_unref(struct block_pool *pool, uint32_t block)
{
    if (block >= pool->n_blocks || pool->refs[block] == 0)
        log_fatal("kv: block %u of %u is given back more often than taken", block, pool->n_blocks);
    if (--pool->refs[block])
        return false;
    pool->stack[pool->n_free++] = block;
    return true;
}
