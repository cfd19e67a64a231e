/* The KV cache as the scheduler sees it: each running sequence has a table of blocks; what is full is shared through the
 * radix tree; what nobody uses is evicted when blocks run short, and every change of the tree is told.
 *
 *   table of a sequence:   | cached, shared | own, in the tree | own, a duplicate | own, being filled |
 *                          |<----------------- n_stored blocks ----------------->|
 *                          its lock keeps the tree's path of n_stored blocks
 *
 * A run that another sequence stored first stays the sequence's own copy until it ends or blocks run short (cache_share).
 *
 * Order of events: a block is stored in the step that fills it; evictions go out leaf first, before a block is taken again.
 * Engine thread only. Nothing allocates after cache_open.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "gpu-worker/kv/radix.h"
#include "libprompt/block_chain.h"
#include "libprompt/error.h"

struct kv_cache;

/* Who is told. Both calls come after the tree changed; evicted before any of the blocks is used again. May be NULL. */
struct cache_events {
    void (*stored)(void *context, const struct kvg_hash *hash, size_t n);
    void (*evicted)(void *context, const struct kvg_hash *hash, size_t n);
    void *context;
};

struct cache_options {
    uint32_t n_blocks, block_size;
    bool disable_prefix_caching; /* nothing is found and nothing stored */
    size_t memory_limit;         /* bytes for the tables; 0 = none */
    struct cache_events events;
};

/* One sequence's hold on the cache. The caller owns the arrays, sized for the longest it may become, and zeroes the rest. */
struct cache_seq {
    const struct radix_salt *salt;
    struct kvg_hash seed;  /* of the chain: model, fingerprint, block size, salt */
    struct kvg_hash *hash; /* [n_hashed] chain of the sequence's whole blocks, as far as it is known */
    uint32_t n_hashed;
    uint32_t *blocks; /* [n_blocks] the block table */
    uint32_t n_blocks;
    uint32_t n_stored;
    uint32_t node; /* the tree's, only with n_stored */
};

/* 0, KVG_INVALID (no blocks, or a block size of 0) or KVG_NOMEM. */
int cache_open(struct kv_cache **out, const struct cache_options *options, struct kvg_error *err);
void cache_close(struct kv_cache *cache);

/* Fills seq->hash for the whole blocks of ids[n]. Needs no cache, so that another thread can do it before the sequence runs. */
void cache_hash(struct cache_seq *seq, const uint32_t *ids, uint32_t n, uint32_t block_size);
/* For a sequence that holds nothing: its table becomes the longest cached prefix of ids[n]; never all of it, because the last
 * token has to be computed to get logits. Returns the tokens found. */
uint32_t cache_match(struct kv_cache *cache, struct cache_seq *seq, const uint32_t *ids, uint32_t n);
/* What cache_match would find, without taking it. */
uint32_t cache_peek(const struct kv_cache *cache, struct cache_seq *seq, const uint32_t *ids, uint32_t n);
/* Makes room in the table for n_tokens, evicting where needed. 0, or -1 and nothing changed when blocks are short. */
int cache_grow(struct kv_cache *cache, struct cache_seq *seq, uint32_t n_tokens);
/* Gives back the table's blocks behind those of n_tokens; none of them is stored: drafts were rejected. */
void cache_trim(struct kv_cache *cache, struct cache_seq *seq, uint32_t n_tokens);
/* The KV of ids[n_computed] is in the table's blocks: what is full and new enters the tree. */
void cache_store(struct kv_cache *cache, struct cache_seq *seq, const uint32_t *ids, uint32_t n_computed);
/* Between steps: replaces the sequence's duplicates by the tree's blocks of the same ids; returns the blocks that became free. */
uint32_t cache_share(struct kv_cache *cache, struct cache_seq *seq);
/* What the sequence has stored so far is warm: evicted last, when no other block can be. */
void cache_warm(struct kv_cache *cache, const struct cache_seq *seq);
/* The sequence holds nothing any more; full blocks stay cached. */
void cache_release(struct kv_cache *cache, struct cache_seq *seq);

struct cache_counts {
    uint32_t total, free;
    uint32_t cached;  /* only the tree holds them: evictable */
    uint32_t used;    /* a sequence holds them */
    uint32_t warm;    /* in the tree and evicted last, held or not */
    uint64_t evicted; /* ever */
};
void cache_counts(const struct kv_cache *cache, struct cache_counts *out);
/* Blocks that a sequence could get now: free or evictable. */
uint32_t cache_available(const struct kv_cache *cache);
/* Hashes of all blocks in the tree, parents first. *hashes is the cache's own buffer, valid until the next call. */
size_t cache_snapshot(struct kv_cache *cache, const struct kvg_hash **hashes);
/* free + cached + in use = total, references = tree + tables, and the tree's own invariants. 0, or -1 with err. */
int cache_check(const struct kv_cache *cache, struct kvg_error *err);
