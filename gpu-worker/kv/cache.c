#include "gpu-worker/kv/cache.h"
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/log.h"

struct kv_cache {
    struct kvg_arena arena; /* every table below */
    struct block_pool pool;
    struct radix tree;
    struct cache_events events;
    bool disabled;
    uint64_t n_held;           /* table entries of all sequences */
    uint64_t n_evicted;        /* ever */
    struct kvg_hash *hash;     /* [n_blocks] scratch of evictions and stores */
    struct kvg_hash *snapshot; /* [n_blocks]; its own, because an event's receiver may ask for one */
    uint32_t *path;            /* [n_blocks] scratch of cache_share */
    bool *entered;             /* [n_blocks] scratch of cache_store */
};

static int init_tables(struct kv_cache *cache, const struct cache_options *options)
{
    size_t n = options->n_blocks;

    if (pool_init(&cache->pool, &cache->arena, options->n_blocks) < 0 ||
        radix_init(&cache->tree, &cache->pool, &cache->arena, options->block_size) < 0)
        return -1;
    cache->hash = kvg_arena_alloc(&cache->arena, n * sizeof *cache->hash);
    cache->snapshot = kvg_arena_alloc(&cache->arena, n * sizeof *cache->snapshot);
    cache->path = kvg_arena_alloc(&cache->arena, n * sizeof *cache->path);
    cache->entered = kvg_arena_alloc(&cache->arena, n * sizeof *cache->entered);
    return cache->hash && cache->snapshot && cache->path && cache->entered ? 0 : -1;
}

int cache_open(struct kv_cache **out, const struct cache_options *options, struct kvg_error *err)
{
    if (options->n_blocks == 0 || options->n_blocks > 1u << 30 || options->block_size == 0)
        return kvg_fail(err, KVG_INVALID, "a KV cache of %u blocks of %u tokens", options->n_blocks, options->block_size);
    struct kv_cache *cache = calloc(1, sizeof *cache);
    if (!cache)
        return kvg_fail(err, KVG_NOMEM, "no memory for a KV cache");
    cache->events = options->events;
    cache->disabled = options->disable_prefix_caching;
    kvg_arena_init(&cache->arena, options->memory_limit);
    if (init_tables(cache, options) < 0) {
        cache_close(cache);
        return kvg_fail(err, KVG_NOMEM, "no memory for the tables of %u KV blocks", options->n_blocks);
    }
    *out = cache;
    return 0;
}

void cache_close(struct kv_cache *cache)
{
    if (!cache)
        return;
    kvg_arena_free(&cache->arena);
    free(cache);
}

void cache_hash(struct cache_seq *seq, const uint32_t *ids, uint32_t n, uint32_t block_size)
{
    uint32_t whole = n / block_size;

    if (whole <= seq->n_hashed)
        return;
    const struct kvg_hash *previous = seq->n_hashed ? &seq->hash[seq->n_hashed - 1] : &seq->seed;
    const uint32_t *rest = ids + (size_t)seq->n_hashed * block_size;
    kvg_chain_extend(previous, rest, (size_t)(whole - seq->n_hashed) * block_size, block_size, seq->hash + seq->n_hashed);
    seq->n_hashed = whole;
}

/* What of ids[n] can come from the cache: whole blocks, and one token at least left to compute. */
static struct radix_run reusable(const struct kv_cache *cache, struct cache_seq *seq, const uint32_t *ids, uint32_t n)
{
    uint32_t size = cache->tree.block_size;

    if (cache->disabled || n == 0)
        return (struct radix_run){0};
    cache_hash(seq, ids, n, size);
    return (struct radix_run){.ids = ids, .hash = seq->hash, .n_blocks = (n - 1) / size};
}

uint32_t cache_peek(const struct kv_cache *cache, struct cache_seq *seq, const uint32_t *ids, uint32_t n)
{
    struct radix_run run = reusable(cache, seq, ids, n);
    return radix_peek(&cache->tree, seq->salt, &run) * cache->tree.block_size;
}

uint32_t cache_match(struct kv_cache *cache, struct cache_seq *seq, const uint32_t *ids, uint32_t n)
{
    struct radix_run run = reusable(cache, seq, ids, n);

    seq->n_blocks = seq->n_stored = radix_lock(&cache->tree, seq->salt, &run, seq->blocks, &seq->node);
    for (uint32_t i = 0; i < seq->n_blocks; i++)
        pool_ref(&cache->pool, seq->blocks[i]);
    cache->n_held += seq->n_blocks;
    return seq->n_blocks * cache->tree.block_size;
}

/* Evicts n blocks, which must be evictable, and tells. */
static void evict(struct kv_cache *cache, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (radix_evict(&cache->tree, &cache->hash[i]) == POOL_NONE)
            log_fatal("kv: %u blocks were to be evicted, only %u could be", n, i);
    cache->n_evicted += n;
    if (n && cache->events.evicted)
        cache->events.evicted(cache->events.context, cache->hash, n);
}

uint32_t cache_available(const struct kv_cache *cache)
{
    return cache->pool.n_free + cache->tree.n_evictable;
}

int cache_grow(struct kv_cache *cache, struct cache_seq *seq, uint32_t n_tokens)
{
    uint32_t size = cache->tree.block_size, need = n_tokens / size + (n_tokens % size != 0);

    if (need <= seq->n_blocks)
        return 0;
    uint32_t more = need - seq->n_blocks;
    if (more > cache_available(cache))
        return -1;
    if (more > cache->pool.n_free)
        evict(cache, more - cache->pool.n_free);
    while (seq->n_blocks < need)
        seq->blocks[seq->n_blocks++] = pool_take(&cache->pool);
    cache->n_held += more;
    return 0;
}

void cache_trim(struct kv_cache *cache, struct cache_seq *seq, uint32_t n_tokens)
{
    uint32_t size = cache->tree.block_size, need = n_tokens / size + (n_tokens % size != 0);

    for (; seq->n_blocks > need; cache->n_held--)
        pool_unref(&cache->pool, seq->blocks[--seq->n_blocks]);
}

void cache_store(struct kv_cache *cache, struct cache_seq *seq, const uint32_t *ids, uint32_t n_computed)
{
    uint32_t size = cache->tree.block_size, whole = n_computed / size, at = seq->n_stored, n = whole - at, stored = 0;

    if (cache->disabled || whole <= at)
        return;
    cache_hash(seq, ids, n_computed, size);
    const struct radix_run run = {.ids = ids + (size_t)at * size, .hash = seq->hash + at, .n_blocks = n};
    seq->node = radix_extend(&cache->tree, seq->salt, at ? seq->node : RADIX_NONE, &run, seq->blocks + at, cache->entered);
    seq->n_stored = whole;
    for (uint32_t i = 0; i < n; i++)
        if (cache->entered[i])
            cache->hash[stored++] = run.hash[i];
    if (stored && cache->events.stored)
        cache->events.stored(cache->events.context, cache->hash, stored);
}

uint32_t cache_share(struct kv_cache *cache, struct cache_seq *seq)
{
    uint32_t freed = 0;

    if (seq->n_stored == 0)
        return 0;
    radix_path(&cache->tree, seq->node, cache->path, seq->n_stored);
    for (uint32_t i = 0; i < seq->n_stored; i++) {
        if (seq->blocks[i] == cache->path[i])
            continue;
        pool_ref(&cache->pool, cache->path[i]);
        freed += pool_unref(&cache->pool, seq->blocks[i]);
        seq->blocks[i] = cache->path[i];
    }
    return freed;
}

void cache_warm(struct kv_cache *cache, const struct cache_seq *seq)
{
    if (seq->n_stored)
        radix_warm(&cache->tree, seq->node);
}

void cache_release(struct kv_cache *cache, struct cache_seq *seq)
{
    /* Last block first, so that the free list hands them out in the order of the table again. */
    cache->n_held -= seq->n_blocks;
    while (seq->n_blocks)
        pool_unref(&cache->pool, seq->blocks[--seq->n_blocks]);
    if (seq->n_stored)
        radix_unlock(&cache->tree, seq->node);
    seq->n_stored = 0;
}

void cache_counts(const struct kv_cache *cache, struct cache_counts *out)
{
    out->total = cache->pool.n_blocks;
    out->free = cache->pool.n_free;
    out->cached = cache->tree.n_evictable;
    out->used = out->total - out->free - out->cached;
    out->warm = cache->tree.n_warm;
    out->evicted = cache->n_evicted;
}

size_t cache_snapshot(struct kv_cache *cache, const struct kvg_hash **hashes)
{
    *hashes = cache->snapshot;
    return radix_hashes(&cache->tree, cache->snapshot);
}

int cache_check(const struct kv_cache *cache, struct kvg_error *err)
{
    const struct block_pool *pool = &cache->pool;
    uint64_t references = 0, held_blocks = 0;

    if (radix_check(&cache->tree, err) < 0)
        return -1;
    for (uint32_t i = 0; i < pool->n_blocks; i++) {
        references += pool->refs[i];
        held_blocks += pool->refs[i] != 0;
    }
    for (uint32_t i = 0; i < pool->n_free; i++)
        if (pool->refs[pool->stack[i]])
            return kvg_fail(err, -1, "free block %u has %u references", pool->stack[i], pool->refs[pool->stack[i]]);
    if (held_blocks + pool->n_free != pool->n_blocks)
        return kvg_fail(err, -1, "%u blocks are free and %llu held, of %u", pool->n_free, (unsigned long long)held_blocks,
                        pool->n_blocks);
    if (references != cache->tree.n_cached + cache->n_held)
        return kvg_fail(err, -1, "%llu references, but the tree has %u and the tables %llu", (unsigned long long)references,
                        cache->tree.n_cached, (unsigned long long)cache->n_held);
    return 0;
}
