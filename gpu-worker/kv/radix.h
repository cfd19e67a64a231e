/* Which runs of token ids have their KV in which blocks: a radix tree over whole blocks, one root for each salt.
 *
 *   root(salt A) --- [b0 b1 b2] --+-- [b3 b4]          a node is a run of blocks; the block knows its ids and its chain hash
 *                                 +-- [b7]
 *   root(salt B) --- [b5]
 *
 * Ids are compared, never only hashes; hashes only find the child to compare with. Matching and inserting n blocks costs O(n).
 *
 * A lock on a node keeps the path from its root to its last block. A lock that ends inside a run splits it first, so that a
 * partial match keeps only what it uses:
 *
 *   [b0 b1 b2 b3]  --lock 2 blocks-->  [b0 b1]* --- [b2 b3]
 *
 * locks of a node = running sequences whose path goes through it, so a node without locks has none below it either, and all
 * its blocks can be evicted. Unlocked leaves wait in a heap, least recently used first; eviction takes a leaf's last block
 * first, so that what stays is always a prefix. Warm runs come behind all others: they go when nothing else can. Whatever leads
 * to a warm run is warm.
 *
 * Every block of the tree carries one reference of the pool. Nothing allocates after radix_init. One thread.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "gpu-worker/kv/block_pool.h"
#include "libprompt/block_chain.h"
#include "libprompt/error.h"

enum { RADIX_NONE = 0xffffffffu };

struct radix_salt {
    uint8_t digest[32]; /* of the salt's bytes; equal digests are taken for equal salts, so it must be a cryptographic one */
};

struct radix_node;

struct radix {
    struct block_pool *pool;
    uint32_t block_size;
    struct radix_node *nodes; /* [2 n_blocks]: each node holds a block or more, each root a node or more */
    uint32_t free_node;       /* free nodes, linked by `parent` */
    uint32_t *buckets;        /* [mask + 1] heads of the lists of nodes with equal key: (parent, hash of first block) */
    uint32_t mask;
    uint32_t *heap; /* [n_heap] unlocked leaves, least recently used first */
    uint32_t n_heap;
    uint64_t clock;        /* counts uses; a node's last use */
    uint32_t *ids;         /* [n_blocks, block_size] of the blocks in the tree */
    struct kvg_hash *hash; /* [n_blocks] */
    uint32_t *next, *prev; /* [n_blocks] links inside a run */
    uint32_t n_cached;     /* blocks in the tree */
    uint32_t n_evictable;  /* of these, blocks that no lock keeps */
    uint32_t n_warm;       /* blocks that are evicted last */
    uint32_t n_nodes;      /* roots included */
};

/* A prompt as the tree sees it: whole blocks only. */
struct radix_run {
    const uint32_t *ids;         /* [n_blocks * block_size] */
    const struct kvg_hash *hash; /* [n_blocks] chain hashes */
    uint32_t n_blocks;
};

/* Memory comes from the arena. 0, or KVG_NOMEM. */
int radix_init(struct radix *tree, struct block_pool *pool, struct kvg_arena *arena, uint32_t block_size);

/* How many leading blocks of the run are cached; changes nothing. */
uint32_t radix_peek(const struct radix *tree, const struct radix_salt *salt, const struct radix_run *run);
/* Locks the longest cached prefix of the run and writes its blocks to blocks[n_blocks]; returns their number. *node is the
 * locked node: pass it to radix_extend and radix_unlock. RADIX_NONE when nothing was found. */
uint32_t radix_lock(struct radix *tree, const struct radix_salt *salt, const struct radix_run *run, uint32_t *blocks,
                    uint32_t *node);
/* The caller holds `node` (RADIX_NONE: nothing yet) and has computed `run`, the blocks that follow it, into `blocks`.
 * Puts those that are not cached into the tree and moves the caller's lock to the last one; returns it. Where the tree already
 * has a block of the same ids, blocks[i] stays the caller's own copy. entered[i]: whether blocks[i] is in the tree now. */
uint32_t radix_extend(struct radix *tree, const struct radix_salt *salt, uint32_t node, const struct radix_run *run,
                      const uint32_t *blocks, bool *entered);
/* The caller holds `node` (RADIX_NONE: nothing): its path is evicted last from now on. */
void radix_warm(struct radix *tree, uint32_t node);
/* The blocks on the path to `node`, first to last, to blocks[n]; n must be the depth of its end. */
void radix_path(const struct radix *tree, uint32_t node, uint32_t *blocks, uint32_t n);
/* Ends a lock and counts as a use of the whole path. */
void radix_unlock(struct radix *tree, uint32_t node);
/* Takes the last block of the least recently used unlocked leaf out of the tree and gives the tree's reference back.
 * Writes its hash; returns the block, or POOL_NONE when nothing can be evicted. */
uint32_t radix_evict(struct radix *tree, struct kvg_hash *hash);

/* The hashes of all cached blocks, parents before children, to out[n_cached]; returns n_cached. */
size_t radix_hashes(const struct radix *tree, struct kvg_hash *out);
/* Every invariant above, by walking everything: 0, or -1 with err naming the broken one. */
int radix_check(const struct radix *tree, struct kvg_error *err);
