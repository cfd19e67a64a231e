/* Segments of prompts that were tokenized before: text between template markers -> its ids, in a bounded number of bytes.
 *
 *   shard = hash % n_shards      each shard: its own lock, hash buckets, list in order of use; the least recently used goes
 *   segment                      reference-counted, immutable: compared and copied outside the lock
 *
 * Any number of threads may use one memory at once. A hit compares the whole text, never the hash alone.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

struct kvg_segment_memory;

struct kvg_segment {
    const uint32_t *ids;
    size_t n;
};

struct kvg_segment_stats {
    uint64_t hits, misses, evictions;
    size_t segments, bytes; /* remembered now; bytes include the book-keeping */
};

/* bytes: the most it may hold. NULL when memory is exhausted. */
struct kvg_segment_memory *kvg_segment_memory_open(size_t bytes);
void kvg_segment_memory_close(struct kvg_segment_memory *memory); /* no segment may be held any more */

/* The segment of text[0..len), held until kvg_segment_release, or NULL; *hash is what kvg_segment_add wants. */
const struct kvg_segment *kvg_segment_find(struct kvg_segment_memory *memory, const char *text, size_t len, uint64_t *hash);
void kvg_segment_release(const struct kvg_segment *segment);
/* Remembers copies; does nothing when they are too large (over half a shard: at 32 MB a segment of about 190,000 tokens), known already, or memory is exhausted. */
void kvg_segment_add(struct kvg_segment_memory *memory, const char *text, size_t len, uint64_t hash, const uint32_t *ids,
                     size_t n);

void kvg_segment_memory_stats(struct kvg_segment_memory *memory, struct kvg_segment_stats *stats);
