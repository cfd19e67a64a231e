#include "libprompt/segment_memory.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

enum { MAX_SHARDS = 16, SHARD_BYTES = 4 << 20, BYTES_A_BUCKET = 512, MIN_BUCKETS = 16 };

/* One allocation: this, the text, the ids. */
struct entry {
    struct kvg_segment segment; /* first: what callers hold */
    struct entry *next;         /* in its bucket */
    struct entry *newer, *older;
    uint64_t hash;
    size_t len, bytes;           /* of the text; of the allocation */
    _Atomic uint32_t references; /* one of the shard, one of each holder */
    char text[];
};

struct shard {
    pthread_mutex_t lock;
    struct entry **buckets;
    struct entry *newest, *oldest;
    size_t mask, bytes, segments;
    uint64_t hits, misses, evictions;
};

struct kvg_segment_memory {
    uint64_t seed; /* random, so that no client can aim at one bucket */
    size_t n_shards, shard_bytes;
    struct shard shards[MAX_SHARDS];
};

static size_t power_of_two_up_to(size_t n)
{
    size_t p = 1;

    while (p * 2 <= n)
        p *= 2;
    return p;
}

struct kvg_segment_memory *kvg_segment_memory_open(size_t bytes)
{
    struct kvg_segment_memory *memory = calloc(1, sizeof *memory);
    size_t n_buckets;

    if (!memory)
        return NULL;
    if (getrandom(&memory->seed, sizeof memory->seed, 0) != sizeof memory->seed)
        memory->seed = (uint64_t)(uintptr_t)memory;
    memory->n_shards = power_of_two_up_to(bytes / SHARD_BYTES);
    if (memory->n_shards > MAX_SHARDS)
        memory->n_shards = MAX_SHARDS;
    memory->shard_bytes = bytes / memory->n_shards;
    n_buckets = power_of_two_up_to(memory->shard_bytes / BYTES_A_BUCKET);
    if (n_buckets < MIN_BUCKETS)
        n_buckets = MIN_BUCKETS;
    for (size_t i = 0; i < memory->n_shards; i++) {
        struct shard *shard = &memory->shards[i];
        pthread_mutex_init(&shard->lock, NULL);
        shard->mask = n_buckets - 1;
        shard->buckets = calloc(n_buckets, sizeof *shard->buckets);
        if (!shard->buckets) {
            memory->n_shards = i + 1;
            kvg_segment_memory_close(memory);
            return NULL;
        }
    }
    return memory;
}

void kvg_segment_release(const struct kvg_segment *segment)
{
    struct entry *entry = (struct entry *)segment;

    if (atomic_fetch_sub_explicit(&entry->references, 1, memory_order_acq_rel) == 1)
        free(entry);
}

void kvg_segment_memory_close(struct kvg_segment_memory *memory)
{
    if (!memory)
        return;
    for (size_t i = 0; i < memory->n_shards; i++) {
        for (struct entry *entry = memory->shards[i].newest, *older; entry; entry = older) {
            older = entry->older;
            kvg_segment_release(&entry->segment);
        }
        free(memory->shards[i].buckets);
        pthread_mutex_destroy(&memory->shards[i].lock);
    }
    free(memory);
}

static struct shard *shard_of(struct kvg_segment_memory *memory, uint64_t hash)
{
    return &memory->shards[hash >> 32 & (memory->n_shards - 1)];
}

static void unlink_use(struct shard *shard, struct entry *entry)
{
    *(entry->newer ? &entry->newer->older : &shard->newest) = entry->older;
    *(entry->older ? &entry->older->newer : &shard->oldest) = entry->newer;
}

static void link_newest(struct shard *shard, struct entry *entry)
{
    entry->newer = NULL;
    entry->older = shard->newest;
    *(shard->newest ? &shard->newest->newer : &shard->oldest) = entry;
    shard->newest = entry;
}

/* The entry of that hash and length in the shard, which is locked. Two texts that share both are told apart by the caller. */
static struct entry *lookup(const struct shard *shard, uint64_t hash, size_t len)
{
    struct entry *entry = shard->buckets[hash & shard->mask];

    while (entry && (entry->hash != hash || entry->len != len))
        entry = entry->next;
    return entry;
}

const struct kvg_segment *kvg_segment_find(struct kvg_segment_memory *memory, const char *text, size_t len, uint64_t *hash)
{
    struct shard *shard;
    struct entry *entry;

    *hash = XXH3_64bits_withSeed(text, len, memory->seed);
    shard = shard_of(memory, *hash);
    pthread_mutex_lock(&shard->lock);
    entry = lookup(shard, *hash, len);
    if (entry) {
        atomic_fetch_add_explicit(&entry->references, 1, memory_order_relaxed);
        unlink_use(shard, entry);
        link_newest(shard, entry);
        shard->hits++;
    } else {
        shard->misses++;
    }
    pthread_mutex_unlock(&shard->lock);
    if (entry && memcmp(entry->text, text, len) == 0)
        return &entry->segment;
    if (entry)
        kvg_segment_release(&entry->segment);
    return NULL;
}

/* Takes the least recently used entry out of the locked shard. */
static void evict(struct shard *shard)
{
    struct entry *entry = shard->oldest, **link = &shard->buckets[entry->hash & shard->mask];

    while (*link != entry)
        link = &(*link)->next;
    *link = entry->next;
    unlink_use(shard, entry);
    shard->bytes -= entry->bytes;
    shard->segments--;
    shard->evictions++;
    kvg_segment_release(&entry->segment);
}

static struct entry *new_entry(const char *text, size_t len, uint64_t hash, const uint32_t *ids, size_t n, size_t ids_at,
                               size_t bytes)
{
    struct entry *entry = malloc(bytes);
    uint32_t *copy;

    if (!entry)
        return NULL;
    copy = (uint32_t *)((char *)entry + ids_at);
    memcpy(entry->text, text, len);
    if (n)
        memcpy(copy, ids, n * sizeof *ids);
    entry->segment = (struct kvg_segment){copy, n};
    entry->hash = hash;
    entry->len = len;
    entry->bytes = bytes;
    atomic_init(&entry->references, 1);
    return entry;
}

void kvg_segment_add(struct kvg_segment_memory *memory, const char *text, size_t len, uint64_t hash, const uint32_t *ids,
                     size_t n)
{
    size_t ids_at = (offsetof(struct entry, text) + len + 7) & ~(size_t)7, bytes = ids_at + n * sizeof *ids;
    struct shard *shard = shard_of(memory, hash);
    struct entry *entry;

    if (bytes > memory->shard_bytes / 2)
        return;
    entry = new_entry(text, len, hash, ids, n, ids_at, bytes);
    if (!entry)
        return;
    pthread_mutex_lock(&shard->lock);
    if (lookup(shard, hash, len)) { /* another thread was faster */
        pthread_mutex_unlock(&shard->lock);
        free(entry);
        return;
    }
    while (shard->bytes + bytes > memory->shard_bytes)
        evict(shard);
    entry->next = shard->buckets[hash & shard->mask];
    shard->buckets[hash & shard->mask] = entry;
    link_newest(shard, entry);
    shard->bytes += bytes;
    shard->segments++;
    pthread_mutex_unlock(&shard->lock);
}

void kvg_segment_memory_stats(struct kvg_segment_memory *memory, struct kvg_segment_stats *stats)
{
    *stats = (struct kvg_segment_stats){0};
    for (size_t i = 0; i < memory->n_shards; i++) {
        struct shard *shard = &memory->shards[i];
        pthread_mutex_lock(&shard->lock);
        stats->hits += shard->hits;
        stats->misses += shard->misses;
        stats->evictions += shard->evictions;
        stats->segments += shard->segments;
        stats->bytes += shard->bytes;
        pthread_mutex_unlock(&shard->lock);
    }
}
