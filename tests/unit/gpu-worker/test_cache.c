/* Block pool, radix tree and KV cache: the rules one by one, then random operations against a plain model.
 *
 * CACHE_OPS=n sets how many random operations (default 1,000,000).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "gpu-worker/kv/cache.h"

enum { SIZE = 4, MOST_BLOCKS = 256, TABLE = 64, SEQS = 12, SALTS = 3, VARIANTS = 3 };

/* ---- what every test has: a cache, a log of its events, sequences ------------------------------------------------------- */

struct event {
    bool stored;
    struct kvg_hash hash;
};
struct world {
    struct kv_cache *cache;
    struct event log[4 * MOST_BLOCKS];
    size_t n_log;
};

static void log_events(struct world *world, bool stored, const struct kvg_hash *hash, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        assert_true(world->n_log < sizeof world->log / sizeof *world->log);
        world->log[world->n_log++] = (struct event){stored, hash[i]};
    }
}

static void on_stored(void *context, const struct kvg_hash *hash, size_t n)
{
    log_events(context, true, hash, n);
}

static void on_evicted(void *context, const struct kvg_hash *hash, size_t n)
{
    log_events(context, false, hash, n);
}

static void open_world(struct world *world, uint32_t n_blocks, bool disable)
{
    struct kvg_error err;
    struct cache_options options = {
        .n_blocks = n_blocks, .block_size = SIZE, .disable_prefix_caching = disable, .events = {on_stored, on_evicted, world}};
    world->n_log = 0;
    assert_int_equal(cache_open(&world->cache, &options, &err), 0);
}

static void check(struct world *world)
{
    struct kvg_error err;
    if (cache_check(world->cache, &err) < 0)
        fail_msg("%s", err.message);
}

static const struct radix_salt salts[SALTS] = {{{1}}, {{2}}, {{3}}};

struct sequence {
    struct cache_seq held;
    uint32_t ids[TABLE * SIZE], blocks[TABLE];
    struct kvg_hash hash[TABLE];
    uint32_t n_computed;
};

/* ids: one digit a block, "012" = three blocks of different ids. */
static void begin(struct sequence *seq, int salt, const char *digits)
{
    memset(seq, 0, sizeof *seq);
    seq->held.salt = &salts[salt];
    seq->held.seed.bytes[0] = (uint8_t)(salt + 1);
    seq->held.hash = seq->hash;
    seq->held.blocks = seq->blocks;
    for (uint32_t i = 0; digits[i]; i++)
        for (uint32_t j = 0; j < SIZE; j++)
            seq->ids[i * SIZE + j] = (uint32_t)(digits[i] - '0') * 10 + j;
}

/* Runs tokens [n_computed, n) of the sequence, as an engine would. */
static int compute(struct world *world, struct sequence *seq, uint32_t n)
{
    if (cache_grow(world->cache, &seq->held, n) < 0)
        return -1;
    seq->n_computed = n;
    cache_store(world->cache, &seq->held, seq->ids, n);
    return 0;
}

/* A whole life: match, compute n tokens, release. Returns the tokens found in the cache. */
static uint32_t live(struct world *world, struct sequence *seq, int salt, const char *digits, uint32_t n)
{
    begin(seq, salt, digits);
    uint32_t found = cache_match(world->cache, &seq->held, seq->ids, n);
    assert_int_equal(compute(world, seq, n), 0);
    cache_release(world->cache, &seq->held);
    check(world);
    return found;
}

/* ---- rules -------------------------------------------------------------------------------------------------------------- */

static void pool_hands_out_each_block_once(void **state)
{
    struct kvg_arena arena;
    struct block_pool pool;
    bool seen[8] = {false};

    kvg_arena_init(&arena, 0);
    assert_int_equal(pool_init(&pool, &arena, 8), 0);
    for (int i = 0; i < 8; i++) {
        uint32_t block = pool_take(&pool);
        assert_true(block < 8 && !seen[block]);
        seen[block] = true;
    }
    assert_int_equal(pool_take(&pool), POOL_NONE);
    pool_ref(&pool, 3);
    assert_false(pool_unref(&pool, 3));
    assert_true(pool_unref(&pool, 3));
    assert_int_equal(pool_take(&pool), 3);
    kvg_arena_free(&arena);
}

static void match_leaves_a_token_to_compute(void **state)
{
    struct world world;
    struct sequence seq;

    open_world(&world, 16, false);
    assert_int_equal(live(&world, &seq, 0, "0123", 16), 0);
    assert_int_equal(live(&world, &seq, 0, "0123", 16), 12);
    assert_int_equal(live(&world, &seq, 0, "01234", 17), 16);
    assert_int_equal(live(&world, &seq, 0, "0123", 15), 12);
    assert_int_equal(live(&world, &seq, 0, "0", 4), 0);
    assert_int_equal(live(&world, &seq, 0, "0", 1), 0);
    cache_close(world.cache);
}

static void salts_share_nothing(void **state)
{
    struct world world;
    struct sequence seq;

    open_world(&world, 16, false);
    live(&world, &seq, 0, "012", 12);
    assert_int_equal(live(&world, &seq, 1, "012", 12), 0);
    assert_int_equal(live(&world, &seq, 0, "0129", 13), 12);
    assert_int_equal(live(&world, &seq, 1, "0129", 13), 12);
    cache_close(world.cache);
}

static void a_partial_match_keeps_only_what_it_uses(void **state)
{
    struct world world;
    struct sequence first, second, third;
    struct cache_counts counts;

    open_world(&world, 8, false);
    live(&world, &first, 0, "01234567", 32);
    begin(&second, 0, "018");
    assert_int_equal(cache_match(world.cache, &second.held, second.ids, 9), 8);
    cache_counts(world.cache, &counts);
    assert_int_equal(counts.cached, 6);
    assert_int_equal(counts.used, 2);
    begin(&third, 0, "9");
    assert_int_equal(compute(&world, &third, 6 * SIZE), 0); /* takes all that the match does not use */
    check(&world);
    assert_int_equal(compute(&world, &second, 9), -1);
    cache_release(world.cache, &third.held);
    assert_int_equal(compute(&world, &second, 9), 0);
    cache_release(world.cache, &second.held);
    check(&world);
    cache_close(world.cache);
}

/* Two sequences compute the same run at once: the later keeps its own blocks while its table points at them. */
static void a_duplicate_run_stays_private_until_it_ends(void **state)
{
    struct world world;
    struct sequence a, b;
    struct cache_counts counts;
    uint32_t own[3];

    open_world(&world, 8, false);
    begin(&a, 0, "012");
    begin(&b, 0, "013");
    compute(&world, &a, 12);
    compute(&world, &b, 12);
    memcpy(own, b.blocks, sizeof own);
    check(&world);
    assert_int_equal(world.n_log, 4); /* 0 1 2 of a, 3 of b */
    assert_true(own[0] != a.blocks[0] && own[1] != a.blocks[1]);
    cache_release(world.cache, &a.held);
    assert_memory_equal(own, b.blocks, sizeof own);
    cache_counts(world.cache, &counts);
    assert_int_equal(counts.free, 2);   /* 8 - 4 in the tree - 2 copies */
    assert_int_equal(counts.cached, 1); /* a's last; the path 0 1 3 is b's */
    cache_release(world.cache, &b.held);
    cache_counts(world.cache, &counts);
    assert_int_equal(counts.free, 4);
    assert_int_equal(counts.cached, 4);
    check(&world);
    cache_close(world.cache);
}

static void sharing_gives_duplicates_back_early(void **state)
{
    struct world world;
    struct sequence a, b;

    open_world(&world, 8, false);
    begin(&a, 0, "012");
    begin(&b, 0, "013");
    compute(&world, &a, 12);
    compute(&world, &b, 12);
    assert_int_equal(cache_share(world.cache, &a.held), 0);
    assert_int_equal(cache_share(world.cache, &b.held), 2);
    assert_int_equal(b.blocks[0], a.blocks[0]);
    assert_int_equal(b.blocks[1], a.blocks[1]);
    assert_int_not_equal(b.blocks[2], a.blocks[2]);
    check(&world);
    cache_release(world.cache, &a.held);
    cache_release(world.cache, &b.held);
    check(&world);
    cache_close(world.cache);
}

/* The case of a recycled block: its old hash must find nothing, and its eviction is told before the new block is. */
static void an_evicted_prefix_is_gone_before_its_block_is_used_again(void **state)
{
    struct world world;
    struct sequence a, other;
    uint32_t at = 0;

    open_world(&world, 4, false);
    live(&world, &a, 0, "01", 8);
    assert_int_equal(a.held.n_blocks, 0);
    assert_int_equal(world.n_log, 2);
    live(&world, &other, 0, "23", 8);
    live(&world, &other, 0, "45", 8); /* the pool is full: 0 1 go */
    while (at < world.n_log && world.log[at].stored)
        at++;
    assert_int_equal(at, 4);
    assert_memory_equal(&world.log[4].hash, &a.hash[1], sizeof a.hash[1]); /* leaf first */
    assert_memory_equal(&world.log[5].hash, &a.hash[0], sizeof a.hash[0]);
    assert_false(world.log[5].stored);
    assert_true(world.log[6].stored && world.log[7].stored);
    begin(&a, 0, "012");
    assert_int_equal(cache_peek(world.cache, &a.held, a.ids, 12), 0);
    cache_close(world.cache);
}

static void eviction_takes_the_least_recently_used_first(void **state)
{
    struct world world;
    struct sequence a, b, c, d;

    open_world(&world, 6, false);
    live(&world, &a, 0, "01", 8);
    live(&world, &b, 0, "23", 8);
    live(&world, &c, 0, "45", 8);
    live(&world, &a, 0, "016", 8); /* a is used again */
    live(&world, &d, 0, "78", 8);
    begin(&d, 0, "239");
    assert_int_equal(cache_peek(world.cache, &d.held, d.ids, 12), 0);
    begin(&d, 0, "019");
    assert_int_equal(cache_peek(world.cache, &d.held, d.ids, 12), 8);
    begin(&d, 0, "459");
    assert_int_equal(cache_peek(world.cache, &d.held, d.ids, 12), 8);
    cache_close(world.cache);
}

static void warm_blocks_outlive_others_and_yield_at_last(void **state)
{
    struct world world;
    struct sequence warm, other;
    struct cache_counts counts;

    open_world(&world, 6, false);
    begin(&warm, 0, "01");
    assert_int_equal(compute(&world, &warm, 8), 0);
    cache_warm(world.cache, &warm.held);
    cache_release(world.cache, &warm.held);
    for (char round = 0; round < 3; round++) /* each time all other blocks are younger, and go first */
        live(&world, &other, 0, (char[]){(char)('2' + round), '5', '6', '7', 0}, 16);
    begin(&warm, 0, "019");
    assert_int_equal(cache_peek(world.cache, &warm.held, warm.ids, 12), 8);
    live(&world, &other, 0, "0189", 16); /* what follows a warm run is not warm itself */
    cache_counts(world.cache, &counts);
    assert_int_equal(counts.warm, 2);
    live(&world, &other, 1, "23456", 20); /* five of six blocks: the last of the warm run has to go */
    cache_counts(world.cache, &counts);
    assert_int_equal(counts.warm, 1);
    begin(&other, 1, "234567");
    assert_int_equal(compute(&world, &other, 24), 0);
    cache_counts(world.cache, &counts);
    assert_int_equal(counts.warm, 0);
    cache_release(world.cache, &other.held);
    check(&world);
    live(&world, &warm, 0, "01", 8); /* once gone, it comes back as any other */
    cache_counts(world.cache, &counts);
    assert_int_equal(counts.warm, 0);
    cache_close(world.cache);
}

static void a_warm_prefix_that_is_cached_already_becomes_warm(void **state)
{
    struct world world;
    struct sequence a, b;
    struct cache_counts counts;

    open_world(&world, 8, false);
    live(&world, &a, 0, "0123", 16);
    begin(&b, 0, "01");
    assert_int_equal(cache_match(world.cache, &b.held, b.ids, 7), 4); /* a token is left to compute */
    cache_store(world.cache, &b.held, b.ids, 4);
    cache_warm(world.cache, &b.held);
    check(&world);
    cache_release(world.cache, &b.held);
    cache_counts(world.cache, &counts);
    assert_int_equal(counts.warm, 1);
    check(&world);
    cache_close(world.cache);
}

static void a_grow_that_cannot_be_served_changes_nothing(void **state)
{
    struct world world;
    struct sequence a, b;
    struct cache_counts before, after;

    open_world(&world, 4, false);
    live(&world, &a, 0, "01", 8);
    begin(&b, 0, "23");
    assert_int_equal(compute(&world, &b, 8), 0);
    cache_counts(world.cache, &before);
    size_t n_log = world.n_log;
    assert_int_equal(cache_grow(world.cache, &b.held, 4 * SIZE + 1), -1);
    cache_counts(world.cache, &after);
    assert_int_equal(before.free, after.free);
    assert_int_equal(before.cached, after.cached);
    assert_int_equal(before.used, after.used);
    assert_int_equal(before.evicted, after.evicted);
    assert_int_equal(world.n_log, n_log);
    assert_int_equal(cache_grow(world.cache, &b.held, 4 * SIZE), 0);
    cache_release(world.cache, &b.held);
    check(&world);
    cache_close(world.cache);
}

static void a_trim_gives_back_what_lies_behind(void **state)
{
    struct cache_counts before, after;
    struct world world;
    struct sequence seq;

    open_world(&world, 6, false);
    begin(&seq, 0, "012345");
    assert_int_equal(compute(&world, &seq, 2 * SIZE), 0);
    cache_counts(world.cache, &before);
    assert_int_equal(cache_grow(world.cache, &seq.held, 5 * SIZE), 0);
    cache_trim(world.cache, &seq.held, 2 * SIZE + 1);
    cache_counts(world.cache, &after);
    assert_int_equal(after.used, before.used + 1);
    assert_int_equal(seq.held.n_blocks, 3);
    check(&world);
    cache_trim(world.cache, &seq.held, 2 * SIZE);
    cache_trim(world.cache, &seq.held, 3 * SIZE); /* it holds no more than that */
    cache_counts(world.cache, &after);
    assert_int_equal(after.used, before.used);
    cache_release(world.cache, &seq.held);
    check(&world);
    cache_close(world.cache);
}

static void without_prefix_caching_nothing_is_found_or_told(void **state)
{
    struct world world;
    struct sequence seq;
    struct cache_counts counts;

    open_world(&world, 8, true);
    live(&world, &seq, 0, "01", 8);
    assert_int_equal(live(&world, &seq, 0, "012", 9), 0);
    cache_counts(world.cache, &counts);
    assert_int_equal(counts.free, 8);
    assert_int_equal(world.n_log, 0);
    cache_close(world.cache);
}

/* Ids decide: runs of equal hashes and different ids live side by side. */
static void equal_hashes_of_different_ids_are_told_apart(void **state)
{
    struct kvg_arena arena;
    struct block_pool pool;
    struct radix tree;
    struct kvg_error err;
    struct kvg_hash hash[2] = {{{7}}, {{7}}};
    uint32_t ids[2][2 * SIZE], blocks[2][2], found[2], node[2];
    bool entered[2];

    kvg_arena_init(&arena, 0);
    pool_init(&pool, &arena, 8);
    radix_init(&tree, &pool, &arena, SIZE);
    for (uint32_t s = 0; s < 2; s++) {
        for (uint32_t i = 0; i < 2 * SIZE; i++)
            ids[s][i] = s * 100 + i;
        for (uint32_t i = 0; i < 2; i++)
            blocks[s][i] = pool_take(&pool);
        const struct radix_run run = {ids[s], hash, 2};
        node[s] = radix_extend(&tree, &salts[0], RADIX_NONE, &run, blocks[s], entered);
        assert_true(entered[0] && entered[1]);
    }
    for (uint32_t s = 0; s < 2; s++) {
        const struct radix_run run = {ids[s], hash, 2};
        uint32_t locked;
        assert_int_equal(radix_lock(&tree, &salts[0], &run, found, &locked), 2);
        assert_memory_equal(found, blocks[s], sizeof found);
        radix_unlock(&tree, locked);
        radix_unlock(&tree, node[s]);
        pool_unref(&pool, blocks[s][0]);
        pool_unref(&pool, blocks[s][1]);
    }
    assert_int_equal(radix_check(&tree, &err), 0);
    kvg_arena_free(&arena);
}

static void a_failed_allocation_is_reported_and_leaks_nothing(void **state)
{
    struct kv_cache *cache = NULL;
    struct kvg_error err;
    struct cache_options options = {.n_blocks = 64, .block_size = SIZE};
    int failures = 0;

    for (size_t limit = 16;; limit += 64, failures++) {
        options.memory_limit = limit;
        int rc = cache_open(&cache, &options, &err);
        if (rc == 0)
            break;
        assert_int_equal(rc, KVG_NOMEM);
        assert_null(cache);
    }
    assert_true(failures > 100);
    cache_close(cache);
    options.n_blocks = 0;
    assert_int_equal(cache_open(&cache, &options, &err), KVG_INVALID);
}

/* ---- the plain model ---------------------------------------------------------------------------------------------------- */

/* One cached block: a plain tree with one entry a block, found by looking at all of them. */
struct entry {
    bool live, warm;
    int parent; /* entry, or -1 - salt */
    uint32_t variant, block, locks, children;
    uint64_t used;
    struct kvg_hash hash;
};
struct user {
    bool live, warm;
    int salt;
    struct sequence seq;
    uint32_t n_table, table[TABLE];
    uint32_t n_stored;
    int path[TABLE];
};
struct model {
    struct world world;
    uint32_t n_blocks, n_entries, n_private;
    struct entry entries[MOST_BLOCKS];
    struct user users[SEQS];
    uint64_t clock, random;
    uint64_t hits, evictions, warm_evictions, shortages, duplicates, shared;
};

static uint32_t draw(struct model *m, uint32_t below)
{
    m->random = m->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(m->random >> 33) % below;
}

static int find_entry(const struct model *m, int parent, uint32_t variant)
{
    for (uint32_t i = 0; i < m->n_blocks; i++)
        if (m->entries[i].live && m->entries[i].parent == parent && m->entries[i].variant == variant)
            return (int)i;
    return -1;
}

static int path_end(const struct user *user)
{
    return user->n_stored ? user->path[user->n_stored - 1] : -1 - user->salt;
}

static uint32_t variant_of(const struct user *user, uint32_t block)
{
    return user->seq.ids[block * SIZE] / 10;
}

static bool model_goes_before(const struct entry *a, const struct entry *b)
{
    return a->warm != b->warm ? b->warm : a->used < b->used;
}

/* The least recently used unlocked leaf, of the warm ones only where there is no other, leaves the model; its hash must be the
 * next event. */
static void model_evict(struct model *m, const struct event *event)
{
    struct entry *least = NULL;

    for (uint32_t i = 0; i < m->n_blocks; i++) {
        struct entry *e = &m->entries[i];
        if (e->live && e->locks == 0 && e->children == 0 && (!least || model_goes_before(e, least)))
            least = e;
    }
    assert_non_null(least);
    assert_false(event->stored);
    assert_memory_equal(&event->hash, &least->hash, sizeof least->hash);
    least->live = false;
    m->n_entries--;
    m->warm_evictions += least->warm;
    if (least->parent >= 0)
        m->entries[least->parent].children--;
    m->evictions++;
}

static uint32_t model_evictable(const struct model *m)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < m->n_blocks; i++)
        n += m->entries[i].live && m->entries[i].locks == 0;
    return n;
}

static void start(struct model *m, struct user *user)
{
    char digits[TABLE + 1];
    uint32_t n_tokens = 1 + draw(m, TABLE * SIZE);

    for (uint32_t i = 0; i < TABLE; i++)
        digits[i] = (char)('0' + (draw(m, 4) ? 0 : draw(m, VARIANTS)));
    digits[TABLE] = '\0';
    user->live = true;
    user->salt = (int)draw(m, SALTS);
    user->warm = draw(m, 16) == 0;
    user->n_stored = 0;
    begin(&user->seq, user->salt, digits);
    while (user->n_stored < (n_tokens - 1) / SIZE) {
        int next = find_entry(m, path_end(user), variant_of(user, user->n_stored));
        if (next < 0)
            break;
        m->entries[next].locks++;
        user->path[user->n_stored] = next;
        user->table[user->n_stored++] = m->entries[next].block;
    }
    user->n_table = user->n_stored;
    assert_int_equal(cache_peek(m->world.cache, &user->seq.held, user->seq.ids, n_tokens), user->n_stored * SIZE);
    uint32_t found = cache_match(m->world.cache, &user->seq.held, user->seq.ids, n_tokens);
    assert_int_equal(found, user->n_stored * SIZE);
    user->seq.n_computed = found;
    m->hits += found;
}

/* The next whole block enters the model, or is a duplicate of one that is there. */
static void model_store(struct model *m, struct user *user, size_t *at)
{
    uint32_t i = user->n_stored, variant = variant_of(user, i);
    int parent = path_end(user), found = find_entry(m, parent, variant);

    if (found < 0) {
        for (found = 0; m->entries[found].live; found++)
            ;
        m->entries[found] = (struct entry){
            .live = true, .parent = parent, .variant = variant, .block = user->table[i], .hash = user->seq.hash[i]};
        if (parent >= 0)
            m->entries[parent].children++;
        m->n_entries++;
        m->n_private--;
        assert_true(m->world.log[*at].stored);
        assert_memory_equal(&m->world.log[(*at)++].hash, &user->seq.hash[i], sizeof(struct kvg_hash));
    } else {
        m->duplicates++;
    }
    m->entries[found].locks++;
    user->path[user->n_stored++] = found;
}

static void advance(struct model *m, struct user *user)
{
    uint32_t n = user->seq.n_computed + 1 + draw(m, draw(m, 8) ? 6 : 60), need, free = m->n_blocks - m->n_entries - m->n_private;
    size_t at = 0;

    n = n < TABLE * SIZE ? n : TABLE * SIZE;
    need = (n + SIZE - 1) / SIZE - user->n_table;
    if (need > free + model_evictable(m)) {
        assert_int_equal(compute(&m->world, &user->seq, n), -1);
        m->shortages++;
        return;
    }
    assert_int_equal(compute(&m->world, &user->seq, n), 0);
    for (; need > free; free++)
        model_evict(m, &m->world.log[at++]);
    for (; user->n_table < (n + SIZE - 1) / SIZE; user->n_table++, m->n_private++)
        user->table[user->n_table] = user->seq.blocks[user->n_table];
    while (user->n_stored < n / SIZE)
        model_store(m, user, &at);
    assert_int_equal(at, m->world.n_log);
}

/* A warm sequence's blocks are evicted last, whoever stored them. */
static void warm(struct model *m, struct user *user)
{
    cache_warm(m->world.cache, &user->seq.held);
    for (uint32_t i = 0; i < user->n_stored; i++)
        m->entries[user->path[i]].warm = true;
}

static uint32_t model_warm(const struct model *m)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < m->n_blocks; i++)
        n += m->entries[i].live && m->entries[i].warm;
    return n;
}

static void share(struct model *m, struct user *user)
{
    uint32_t freed = 0;

    for (uint32_t i = 0; i < user->n_stored; i++) {
        uint32_t block = m->entries[user->path[i]].block;
        freed += user->table[i] != block;
        user->table[i] = block;
    }
    m->n_private -= freed;
    m->shared += freed;
    assert_int_equal(cache_share(m->world.cache, &user->seq.held), freed);
}

static void end(struct model *m, struct user *user)
{
    m->clock++;
    for (uint32_t i = 0; i < user->n_table; i++)
        m->n_private -= i >= user->n_stored || m->entries[user->path[i]].block != user->table[i];
    for (uint32_t i = 0; i < user->n_stored; i++) {
        m->entries[user->path[i]].locks--;
        m->entries[user->path[i]].used = m->clock;
    }
    cache_release(m->world.cache, &user->seq.held);
    user->live = false;
}

static int by_bytes(const void *a, const void *b)
{
    return memcmp(a, b, sizeof(struct kvg_hash));
}

static void claims_equal_the_model(struct model *m)
{
    const struct kvg_hash *snapshot;
    struct kvg_hash have[MOST_BLOCKS], want[MOST_BLOCKS];
    size_t n = cache_snapshot(m->world.cache, &snapshot), k = 0;

    assert_int_equal(n, m->n_entries);
    memcpy(have, snapshot, n * sizeof *have);
    for (uint32_t i = 0; i < m->n_blocks; i++)
        if (m->entries[i].live)
            want[k++] = m->entries[i].hash;
    qsort(have, n, sizeof *have, by_bytes);
    qsort(want, n, sizeof *want, by_bytes);
    assert_memory_equal(have, want, n * sizeof *want);
}

static void step(struct model *m)
{
    struct user *user = &m->users[draw(m, SEQS)];
    uint32_t what = draw(m, 16);

    m->world.n_log = 0;
    if (!user->live)
        start(m, user);
    else if (what < 12)
        advance(m, user);
    else if (what < 14)
        share(m, user);
    else
        end(m, user);
    if (user->live && user->warm)
        warm(m, user);
    if (user->live)
        assert_memory_equal(user->table, user->seq.blocks, user->n_table * sizeof *user->table);
    struct cache_counts counts;
    cache_counts(m->world.cache, &counts);
    assert_int_equal(counts.free, m->n_blocks - m->n_entries - m->n_private);
    assert_int_equal(counts.cached, model_evictable(m));
    assert_int_equal(counts.warm, model_warm(m));
    assert_int_equal(counts.free + counts.cached + counts.used, m->n_blocks);
    check(&m->world);
}

static void random_operations_agree_with_a_plain_model(void **state)
{
    static struct model m;
    const char *ops = getenv("CACHE_OPS");
    uint64_t n = ops ? strtoull(ops, NULL, 10) : 1000000;
    static const uint32_t pools[] = {8, 24, 64, 256};
    uint64_t total_evictions = 0, total_warm = 0, total_shared = 0, total_shortages = 0;

    for (size_t p = 0; p < 4; p++) {
        memset(&m, 0, sizeof m);
        m.n_blocks = pools[p];
        m.random = 88172645463325252u + p;
        open_world(&m.world, m.n_blocks, false);
        for (uint64_t i = 0; i < n / 4; i++) {
            step(&m);
            if (i % 256 == 0)
                claims_equal_the_model(&m);
        }
        for (int i = 0; i < SEQS; i++)
            if (m.users[i].live)
                end(&m, &m.users[i]);
        claims_equal_the_model(&m);
        struct cache_counts counts;
        cache_counts(m.world.cache, &counts);
        assert_int_equal(counts.used, 0);
        assert_true(m.hits > 0);
        total_evictions += m.evictions;
        total_warm += m.warm_evictions;
        total_shared += m.shared;
        total_shortages += m.shortages;
        cache_close(m.world.cache);
    }
    print_message("%llu operations: %llu evictions, %llu of warm blocks, %llu shared, %llu shortages\n", (unsigned long long)n,
                  (unsigned long long)total_evictions, (unsigned long long)total_warm, (unsigned long long)total_shared,
                  (unsigned long long)total_shortages);
    assert_true(total_evictions > 0 && total_warm > 0 && total_shared > 0 && total_shortages > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pool_hands_out_each_block_once),
        cmocka_unit_test(match_leaves_a_token_to_compute),
        cmocka_unit_test(salts_share_nothing),
        cmocka_unit_test(a_partial_match_keeps_only_what_it_uses),
        cmocka_unit_test(a_duplicate_run_stays_private_until_it_ends),
        cmocka_unit_test(sharing_gives_duplicates_back_early),
        cmocka_unit_test(an_evicted_prefix_is_gone_before_its_block_is_used_again),
        cmocka_unit_test(eviction_takes_the_least_recently_used_first),
        cmocka_unit_test(warm_blocks_outlive_others_and_yield_at_last),
        cmocka_unit_test(a_warm_prefix_that_is_cached_already_becomes_warm),
        cmocka_unit_test(a_grow_that_cannot_be_served_changes_nothing),
        cmocka_unit_test(a_trim_gives_back_what_lies_behind),
        cmocka_unit_test(without_prefix_caching_nothing_is_found_or_told),
        cmocka_unit_test(equal_hashes_of_different_ids_are_told_apart),
        cmocka_unit_test(a_failed_allocation_is_reported_and_leaks_nothing),
        cmocka_unit_test(random_operations_agree_with_a_plain_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
