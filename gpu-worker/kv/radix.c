#include "gpu-worker/kv/radix.h"
#include <string.h>
#include "gpu-worker/log.h"

/* A root has no blocks and no parent; its key is its salt. All links are indexes into tree->nodes, RADIX_NONE for none. */
struct radix_node {
    uint32_t parent;
    uint32_t child;          /* any one child */
    uint32_t older, younger; /* siblings under one parent, both ways; a root: unused */
    uint32_t chain;          /* next node of the same bucket */
    uint32_t first, last;    /* blocks of the run */
    uint32_t n_blocks;
    uint32_t locks;
    uint32_t heap; /* position in the heap */
    bool warm;     /* evicted last; so are its parents */
    uint64_t last_used;
    struct radix_salt salt; /* of a root */
};

int radix_init(struct radix *tree, struct block_pool *pool, struct kvg_arena *arena, uint32_t block_size)
{
    uint32_t n = pool->n_blocks, n_buckets = 16;

    while (n_buckets < 2 * (uint64_t)n && n_buckets < 1u << 30)
        n_buckets *= 2;
    *tree = (struct radix){.pool = pool, .block_size = block_size, .mask = n_buckets - 1};
    tree->nodes = kvg_arena_alloc(arena, 2 * (size_t)n * sizeof *tree->nodes);
    tree->buckets = kvg_arena_alloc(arena, (size_t)n_buckets * sizeof *tree->buckets);
    tree->heap = kvg_arena_alloc(arena, (size_t)n * sizeof *tree->heap);
    tree->ids = kvg_arena_alloc(arena, (size_t)n * block_size * sizeof *tree->ids);
    tree->hash = kvg_arena_alloc(arena, (size_t)n * sizeof *tree->hash);
    tree->next = kvg_arena_alloc(arena, (size_t)n * sizeof *tree->next);
    tree->prev = kvg_arena_alloc(arena, (size_t)n * sizeof *tree->prev);
    if (!tree->nodes || !tree->buckets || !tree->heap || !tree->ids || !tree->hash || !tree->next || !tree->prev)
        return KVG_NOMEM;
    memset(tree->buckets, 0xff, (size_t)n_buckets * sizeof *tree->buckets);
    for (uint32_t i = 0; i < 2 * n; i++)
        tree->nodes[i].parent = i + 1 < 2 * n ? i + 1 : RADIX_NONE;
    tree->free_node = n ? 0 : RADIX_NONE;
    return 0;
}

/* ---- finding a child: lists of nodes by (parent, first bytes of a hash) ------------------------------------------------ */

static uint32_t *bucket_of(const struct radix *tree, uint32_t parent, const uint8_t *bytes)
{
    uint64_t key;
    memcpy(&key, bytes, sizeof key);
    key = (key ^ parent) * 0x9e3779b97f4a7c15u;
    return &tree->buckets[(key >> 32) & tree->mask];
}

static uint32_t *bucket_of_node(const struct radix *tree, uint32_t node)
{
    const struct radix_node *n = &tree->nodes[node];
    if (n->parent == RADIX_NONE)
        return bucket_of(tree, RADIX_NONE, n->salt.digest);
    return bucket_of(tree, n->parent, tree->hash[n->first].bytes);
}

static void bucket_add(struct radix *tree, uint32_t node)
{
    uint32_t *head = bucket_of_node(tree, node);
    tree->nodes[node].chain = *head;
    *head = node;
}

static void bucket_remove(struct radix *tree, uint32_t node)
{
    uint32_t *link = bucket_of_node(tree, node);
    while (*link != node)
        link = &tree->nodes[*link].chain;
    *link = tree->nodes[node].chain;
}

static bool block_equals(const struct radix *tree, uint32_t block, const uint32_t *ids)
{
    return memcmp(tree->ids + (size_t)block * tree->block_size, ids, tree->block_size * sizeof *ids) == 0;
}

static uint32_t find_root(const struct radix *tree, const struct radix_salt *salt)
{
    uint32_t node = *bucket_of(tree, RADIX_NONE, salt->digest);
    for (; node != RADIX_NONE; node = tree->nodes[node].chain)
        if (tree->nodes[node].parent == RADIX_NONE && memcmp(&tree->nodes[node].salt, salt, sizeof *salt) == 0)
            break;
    return node;
}

static uint32_t find_child(const struct radix *tree, uint32_t parent, const uint32_t *ids, const struct kvg_hash *hash)
{
    uint32_t node = *bucket_of(tree, parent, hash->bytes);
    for (; node != RADIX_NONE; node = tree->nodes[node].chain)
        if (tree->nodes[node].parent == parent && block_equals(tree, tree->nodes[node].first, ids))
            break;
    return node;
}

/* How many leading blocks of ids[n blocks] are the node's own, up to the end of its run; *last is the last of them. */
static uint32_t match_run(const struct radix *tree, uint32_t node, const uint32_t *ids, uint32_t n, uint32_t *last)
{
    const struct radix_node *run = &tree->nodes[node];
    uint32_t most = run->n_blocks < n ? run->n_blocks : n, k = 0;

    *last = run->first;
    for (uint32_t block = run->first; k < most && block_equals(tree, block, ids); k++) {
        *last = block;
        block = tree->next[block];
        ids += tree->block_size;
    }
    return k;
}

/* ---- the heap of unlocked leaves ---------------------------------------------------------------------------------------- */

static void heap_place(struct radix *tree, uint32_t at, uint32_t node)
{
    tree->heap[at] = node;
    tree->nodes[node].heap = at;
}

static bool heap_before(const struct radix *tree, uint32_t a, uint32_t b)
{
    const struct radix_node *x = &tree->nodes[a], *y = &tree->nodes[b];
    return x->warm != y->warm ? y->warm : x->last_used < y->last_used;
}

static void heap_up(struct radix *tree, uint32_t at)
{
    uint32_t node = tree->heap[at];
    for (; at && heap_before(tree, node, tree->heap[(at - 1) / 2]); at = (at - 1) / 2)
        heap_place(tree, at, tree->heap[(at - 1) / 2]);
    heap_place(tree, at, node);
}

static void heap_down(struct radix *tree, uint32_t at)
{
    uint32_t node = tree->heap[at], child;
    for (; (child = 2 * at + 1) < tree->n_heap; at = child) {
        if (child + 1 < tree->n_heap && heap_before(tree, tree->heap[child + 1], tree->heap[child]))
            child++;
        if (!heap_before(tree, tree->heap[child], node))
            break;
        heap_place(tree, at, tree->heap[child]);
    }
    heap_place(tree, at, node);
}

static void heap_remove(struct radix *tree, uint32_t node)
{
    uint32_t at = tree->nodes[node].heap, moved = tree->heap[--tree->n_heap];
    tree->nodes[node].heap = RADIX_NONE;
    if (moved == node)
        return;
    heap_place(tree, at, moved);
    heap_up(tree, at);
    heap_down(tree, tree->nodes[moved].heap);
}

/* Puts the node into the heap or takes it out, as its state now asks for. */
static void heap_update(struct radix *tree, uint32_t node)
{
    struct radix_node *n = &tree->nodes[node];
    bool belongs = n->n_blocks && n->locks == 0 && n->child == RADIX_NONE;

    if (belongs && n->heap == RADIX_NONE) {
        heap_place(tree, tree->n_heap++, node);
        heap_up(tree, tree->n_heap - 1);
    } else if (!belongs && n->heap != RADIX_NONE) {
        heap_remove(tree, node);
    }
}

/* ---- nodes -------------------------------------------------------------------------------------------------------------- */

static uint32_t new_node(struct radix *tree)
{
    uint32_t node = tree->free_node;
    if (node == RADIX_NONE)
        log_fatal("kv: the radix tree is out of nodes (%u in use, %u blocks)", tree->n_nodes, tree->pool->n_blocks);
    tree->free_node = tree->nodes[node].parent;
    tree->nodes[node] = (struct radix_node){.parent = RADIX_NONE,
                                            .child = RADIX_NONE,
                                            .older = RADIX_NONE,
                                            .younger = RADIX_NONE,
                                            .first = RADIX_NONE,
                                            .last = RADIX_NONE,
                                            .heap = RADIX_NONE,
                                            .last_used = tree->clock};
    tree->n_nodes++;
    return node;
}

static void free_node(struct radix *tree, uint32_t node)
{
    tree->nodes[node].parent = tree->free_node;
    tree->free_node = node;
    tree->n_nodes--;
}

static void link_child(struct radix *tree, uint32_t parent, uint32_t node)
{
    struct radix_node *p = &tree->nodes[parent], *n = &tree->nodes[node];
    n->parent = parent;
    n->younger = RADIX_NONE;
    n->older = p->child;
    if (p->child != RADIX_NONE)
        tree->nodes[p->child].younger = node;
    p->child = node;
}

static void unlink_child(struct radix *tree, uint32_t node)
{
    struct radix_node *n = &tree->nodes[node];
    if (n->older != RADIX_NONE)
        tree->nodes[n->older].younger = n->younger;
    if (n->younger != RADIX_NONE)
        tree->nodes[n->younger].older = n->older;
    else
        tree->nodes[n->parent].child = n->older;
}

static uint32_t new_root(struct radix *tree, const struct radix_salt *salt)
{
    uint32_t node = new_node(tree);
    tree->nodes[node].salt = *salt;
    bucket_add(tree, node);
    return node;
}

/* A root lives as long as it has children. */
static void drop_empty_root(struct radix *tree, uint32_t node)
{
    const struct radix_node *n = &tree->nodes[node];
    if (n->parent != RADIX_NONE || n->child != RADIX_NONE || n->locks)
        return;
    bucket_remove(tree, node);
    free_node(tree, node);
}

/* The first k blocks of the run become a new node above; `node` keeps the rest, its children and whoever holds it. `last` is
 * block k - 1. Returns the new node. */
static uint32_t split(struct radix *tree, uint32_t node, uint32_t k, uint32_t last)
{
    uint32_t upper = new_node(tree);
    struct radix_node *u = &tree->nodes[upper], *n = &tree->nodes[node];

    bucket_remove(tree, node);
    unlink_child(tree, node);
    u->first = n->first;
    u->last = last;
    u->n_blocks = k;
    u->locks = n->locks;
    u->last_used = n->last_used;
    u->warm = n->warm;
    n->first = tree->next[last];
    n->n_blocks -= k;
    tree->next[last] = tree->prev[n->first] = RADIX_NONE;
    link_child(tree, n->parent, upper);
    bucket_add(tree, upper);
    link_child(tree, upper, node);
    bucket_add(tree, node);
    return upper;
}

static void lock_node(struct radix *tree, uint32_t node)
{
    struct radix_node *n = &tree->nodes[node];
    n->last_used = ++tree->clock;
    if (n->locks++ == 0)
        tree->n_evictable -= n->n_blocks;
    heap_update(tree, node);
}

/* ---- matching ----------------------------------------------------------------------------------------------------------- */

uint32_t radix_peek(const struct radix *tree, const struct radix_salt *salt, const struct radix_run *run)
{
    uint32_t node = find_root(tree, salt), depth = 0, last;

    while (node != RADIX_NONE && depth < run->n_blocks) {
        const uint32_t *ids = run->ids + (size_t)depth * tree->block_size;
        node = find_child(tree, node, ids, &run->hash[depth]);
        if (node == RADIX_NONE)
            break;
        uint32_t k = match_run(tree, node, ids, run->n_blocks - depth, &last);
        depth += k;
        if (k < tree->nodes[node].n_blocks)
            break;
    }
    return depth;
}

/* The child of `node` that starts with the run's block `at`, cut to what it shares with the run, and how much that is. */
static uint32_t descend(struct radix *tree, uint32_t node, const struct radix_run *run, uint32_t at, uint32_t *n)
{
    const uint32_t *ids = run->ids + (size_t)at * tree->block_size;
    uint32_t last, child = find_child(tree, node, ids, &run->hash[at]);

    if (child == RADIX_NONE)
        return RADIX_NONE;
    *n = match_run(tree, child, ids, run->n_blocks - at, &last);
    return *n < tree->nodes[child].n_blocks ? split(tree, child, *n, last) : child;
}

uint32_t radix_lock(struct radix *tree, const struct radix_salt *salt, const struct radix_run *run, uint32_t *blocks,
                    uint32_t *node)
{
    uint32_t at = 0, n, next, here = find_root(tree, salt);

    *node = RADIX_NONE;
    if (here == RADIX_NONE || run->n_blocks == 0 || (next = descend(tree, here, run, 0, &n)) == RADIX_NONE)
        return 0;
    lock_node(tree, here);
    for (; next != RADIX_NONE; next = at < run->n_blocks ? descend(tree, here, run, at, &n) : RADIX_NONE) {
        here = next;
        lock_node(tree, here);
        for (uint32_t block = tree->nodes[here].first; block != RADIX_NONE; block = tree->next[block])
            blocks[at++] = block;
    }
    *node = here;
    return at;
}

void radix_path(const struct radix *tree, uint32_t node, uint32_t *blocks, uint32_t n)
{
    for (; node != RADIX_NONE; node = tree->nodes[node].parent)
        for (uint32_t block = tree->nodes[node].last; block != RADIX_NONE; block = tree->prev[block]) {
            if (n == 0)
                log_fatal("kv: a path in the radix tree is longer than its holder says");
            blocks[--n] = block;
        }
    if (n)
        log_fatal("kv: a path in the radix tree is %u blocks shorter than its holder says", n);
}

/* ---- inserting ---------------------------------------------------------------------------------------------------------- */

/* Adds block i of the run at the end of the node's own. */
static void append(struct radix *tree, uint32_t node, const struct radix_run *run, uint32_t i, uint32_t block)
{
    struct radix_node *n = &tree->nodes[node];

    memcpy(tree->ids + (size_t)block * tree->block_size, run->ids + (size_t)i * tree->block_size,
           tree->block_size * sizeof *tree->ids);
    tree->hash[block] = run->hash[i];
    tree->prev[block] = n->last;
    tree->next[block] = RADIX_NONE;
    if (n->last == RADIX_NONE)
        n->first = block;
    else
        tree->next[n->last] = block;
    n->last = block;
    n->n_blocks++;
    tree->n_cached++;
    pool_ref(tree->pool, block);
}

/* The node that the caller's new blocks go into: `node` itself where it is a leaf that nobody else holds and is not warm, else
 * a new child, so that nobody else's lock grows and nothing becomes warm unasked. Held by the caller either way. */
static uint32_t node_to_grow(struct radix *tree, uint32_t node)
{
    struct radix_node *n = &tree->nodes[node];
    if (n->n_blocks && n->locks == 1 && n->child == RADIX_NONE && !n->warm)
        return node;
    uint32_t child = new_node(tree);
    tree->nodes[child].locks = 1;
    link_child(tree, node, child);
    return child;
}

uint32_t radix_extend(struct radix *tree, const struct radix_salt *salt, uint32_t node, const struct radix_run *run,
                      const uint32_t *blocks, bool *entered)
{
    uint32_t at = 0, n, next;

    if (run->n_blocks == 0)
        return node;
    if (node == RADIX_NONE) {
        node = find_root(tree, salt);
        node = node != RADIX_NONE ? node : new_root(tree, salt);
        lock_node(tree, node);
    }
    while (at < run->n_blocks && (next = descend(tree, node, run, at, &n)) != RADIX_NONE) {
        node = next;
        lock_node(tree, node);
        memset(entered + at, 0, n * sizeof *entered);
        at += n;
    }
    if (at == run->n_blocks)
        return node;
    uint32_t grown = node_to_grow(tree, node);
    for (; at < run->n_blocks; at++) {
        append(tree, grown, run, at, blocks[at]);
        entered[at] = true;
    }
    if (grown != node)
        bucket_add(tree, grown);
    tree->nodes[grown].last_used = ++tree->clock;
    return grown;
}

void radix_warm(struct radix *tree, uint32_t node)
{
    for (; node != RADIX_NONE && !tree->nodes[node].warm; node = tree->nodes[node].parent) {
        tree->nodes[node].warm = true;
        tree->n_warm += tree->nodes[node].n_blocks;
    }
}

/* ---- releasing ---------------------------------------------------------------------------------------------------------- */

void radix_unlock(struct radix *tree, uint32_t node)
{
    uint64_t now = ++tree->clock;

    while (node != RADIX_NONE) {
        struct radix_node *n = &tree->nodes[node];
        uint32_t parent = n->parent;
        if (n->locks == 0)
            log_fatal("kv: a run of %u blocks is unlocked more often than locked", n->n_blocks);
        n->last_used = now;
        if (--n->locks == 0)
            tree->n_evictable += n->n_blocks;
        heap_update(tree, node);
        drop_empty_root(tree, node);
        node = parent;
    }
}

/* A leaf without blocks leaves the tree; its parent may be a leaf now, or a root without use. */
static void remove_leaf(struct radix *tree, uint32_t node)
{
    uint32_t parent = tree->nodes[node].parent;

    heap_remove(tree, node);
    unlink_child(tree, node);
    free_node(tree, node);
    heap_update(tree, parent);
    drop_empty_root(tree, parent);
}

uint32_t radix_evict(struct radix *tree, struct kvg_hash *hash)
{
    if (tree->n_heap == 0)
        return POOL_NONE;
    uint32_t node = tree->heap[0], block = tree->nodes[node].last;
    struct radix_node *n = &tree->nodes[node];

    *hash = tree->hash[block];
    if (n->n_blocks == 1)
        bucket_remove(tree, node); /* while its key is still there */
    n->last = tree->prev[block];
    n->n_blocks--;
    tree->n_cached--;
    tree->n_evictable--;
    tree->n_warm -= n->warm;
    if (n->n_blocks)
        tree->next[n->last] = RADIX_NONE;
    else
        remove_leaf(tree, node);
    if (!pool_unref(tree->pool, block))
        log_fatal("kv: evicted block %u is still in use", block);
    return block;
}

/* ---- walking ------------------------------------------------------------------------------------------------------------ */

/* The node after `node`, parents before children, in the subtree of `top`; RADIX_NONE at its end. */
static uint32_t walk(const struct radix *tree, uint32_t top, uint32_t node)
{
    if (tree->nodes[node].child != RADIX_NONE)
        return tree->nodes[node].child;
    for (; node != top; node = tree->nodes[node].parent)
        if (tree->nodes[node].older != RADIX_NONE)
            return tree->nodes[node].older;
    return RADIX_NONE;
}

/* Calls visit for every node, whole trees one after another. Roots are found through the buckets. */
static int for_each_node(const struct radix *tree, int (*visit)(const struct radix *tree, uint32_t node, void *context),
                         void *context)
{
    for (uint32_t bucket = 0; bucket <= tree->mask; bucket++)
        for (uint32_t root = tree->buckets[bucket]; root != RADIX_NONE; root = tree->nodes[root].chain) {
            if (tree->nodes[root].parent != RADIX_NONE)
                continue;
            for (uint32_t node = root; node != RADIX_NONE; node = walk(tree, root, node))
                if (visit(tree, node, context) < 0)
                    return -1;
        }
    return 0;
}

static int collect(const struct radix *tree, uint32_t node, void *context)
{
    struct kvg_hash **out = context;
    for (uint32_t block = tree->nodes[node].first; block != RADIX_NONE; block = tree->next[block])
        *(*out)++ = tree->hash[block];
    return 0;
}

size_t radix_hashes(const struct radix *tree, struct kvg_hash *out)
{
    for_each_node(tree, collect, &(struct kvg_hash *){out});
    return tree->n_cached;
}

struct tally {
    uint32_t nodes, blocks, evictable, leaves, warm;
    struct kvg_error *err;
};

static int check_node(const struct radix *tree, uint32_t node, void *context)
{
    struct tally *tally = context;
    const struct radix_node *n = &tree->nodes[node];
    bool root = n->parent == RADIX_NONE, leaf = n->child == RADIX_NONE;
    uint32_t k = 0, last = RADIX_NONE;

    for (uint32_t block = n->first; block != RADIX_NONE; block = tree->next[block], k++) {
        if (k >= n->n_blocks || tree->prev[block] != last)
            return kvg_fail(tally->err, -1, "the links of a run of %u blocks are broken at its block %u", n->n_blocks, k);
        if (tree->pool->refs[block] == 0 || tree->pool->refs[block] > 1 + n->locks)
            return kvg_fail(tally->err, -1, "cached block %u has %u references, and %u locks", block, tree->pool->refs[block],
                            n->locks);
        last = block;
    }
    if (k != n->n_blocks || n->last != last || root != (k == 0) || (root && leaf && n->locks == 0))
        return kvg_fail(tally->err, -1, "a %s of %u blocks holds %u", root ? "root" : "run", n->n_blocks, k);
    uint32_t below = 0;
    for (uint32_t child = n->child; child != RADIX_NONE; child = tree->nodes[child].older) {
        if (tree->nodes[child].parent != node)
            return kvg_fail(tally->err, -1, "a child does not know its parent");
        below += tree->nodes[child].locks;
    }
    if (n->locks < below)
        return kvg_fail(tally->err, -1, "a run has %u locks, its children %u", n->locks, below);
    if (n->warm && !root && !tree->nodes[n->parent].warm)
        return kvg_fail(tally->err, -1, "a warm run of %u blocks lies below one that is not", k);
    uint32_t found = *bucket_of_node(tree, node);
    while (found != RADIX_NONE && found != node)
        found = tree->nodes[found].chain;
    if (found != node)
        return kvg_fail(tally->err, -1, "a node is not in its bucket");
    bool evictable = !root && leaf && n->locks == 0;
    if (evictable != (n->heap < tree->n_heap && tree->heap[n->heap] == node))
        return kvg_fail(tally->err, -1, "an unlocked leaf and the heap disagree");
    tally->nodes++;
    tally->blocks += k;
    tally->evictable += n->locks == 0 ? k : 0;
    tally->leaves += evictable;
    tally->warm += n->warm ? k : 0;
    return 0;
}

int radix_check(const struct radix *tree, struct kvg_error *err)
{
    struct tally tally = {.err = err};

    if (for_each_node(tree, check_node, &tally) < 0)
        return -1;
    if (tally.nodes != tree->n_nodes || tally.blocks != tree->n_cached || tally.evictable != tree->n_evictable ||
        tally.leaves != tree->n_heap || tally.warm != tree->n_warm)
        return kvg_fail(err, -1,
                        "the tree holds %u nodes, %u blocks, %u evictable, %u leaves, %u warm; counted as %u, %u, %u, %u, %u",
                        tally.nodes, tally.blocks, tally.evictable, tally.leaves, tally.warm, tree->n_nodes, tree->n_cached,
                        tree->n_evictable, tree->n_heap, tree->n_warm);
    for (uint32_t i = 1; i < tree->n_heap; i++)
        if (heap_before(tree, tree->heap[i], tree->heap[(i - 1) / 2]))
            return kvg_fail(err, -1, "the heap of leaves is out of order at %u", i);
    return 0;
}
