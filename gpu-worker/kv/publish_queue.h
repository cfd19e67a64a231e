/* From the engine thread to the publisher's thread: a bounded ring of events, and a snapshot handed over on demand.
 *
 *        engine                                          publisher
 *   queue_push ──► [ + + - + … ] ring ────────────────► queue_pack, queue_pop
 *        full: `lost`; events are dropped until the next snapshot
 *
 *   queue_wants_snapshot ◄── WANTED ◄────────────────── queue_want
 *   queue_snapshot ── copies all blocks, notes head ──► READY ──► queue_take: events before that head are dropped
 *
 * One producer, one consumer. The producer never blocks, never allocates; only the consumer does.
 */
#pragma once
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "libprompt/block_chain.h"

enum queue_snapshot_state { SNAPSHOT_NONE, SNAPSHOT_WANTED, SNAPSHOT_TOO_SMALL, SNAPSHOT_READY };

/* An event in text, as publish.lua reads it: '+' or '-' and 20 hex digits. */
enum { QUEUE_EVENT_BYTES = 21 };

struct publish_queue {
    struct kvg_hash *hashes; /* [capacity] */
    bool *evicted;           /* [capacity] */
    uint64_t capacity;       /* a power of two */
    int wake;                /* eventfd: readable after the producer did something */
    _Atomic uint64_t head;   /* events ever pushed; written by the producer */
    _Atomic uint64_t tail;   /* events ever popped; written by the consumer */
    _Atomic bool lost;       /* events were dropped since the last snapshot; written by the producer */
    _Atomic uint64_t dropped;

    _Atomic int state;         /* enum queue_snapshot_state; whose turn it is with the fields below */
    bool asked;                /* consumer alone: a snapshot was wanted before */
    struct kvg_hash *snapshot; /* [snapshot_capacity] */
    size_t snapshot_capacity;
    size_t snapshot_n;      /* READY: blocks; TOO_SMALL: blocks that there must be room for */
    uint64_t snapshot_head; /* events before it are part of the snapshot */
};

/* At least `events` of capacity. 0, or -1 when memory or file descriptors are exhausted. */
int queue_init(struct publish_queue *queue, size_t events);
void queue_free(struct publish_queue *queue);

/* --- producer --- */
void queue_push(struct publish_queue *queue, const struct kvg_hash *hashes, size_t n, bool evicted);
bool queue_wants_snapshot(const struct publish_queue *queue);
void queue_snapshot(struct publish_queue *queue, const struct kvg_hash *hashes, size_t n);
void queue_wake(const struct publish_queue *queue); /* any thread */

/* --- consumer --- */
void queue_wait(const struct publish_queue *queue, int timeout_ms); /* until woken */
uint64_t queue_pending(const struct publish_queue *queue);
bool queue_lost(const struct publish_queue *queue);
/* Whether the ring still holds every event since the start, so that an empty snapshot and the ring tell everything. */
bool queue_complete(const struct publish_queue *queue);
/* The oldest n events (n <= pending) as text to out[n * QUEUE_EVENT_BYTES], without the stored ones when evicted_only;
 * counts both kinds written. Returns the bytes written. */
size_t queue_pack(const struct publish_queue *queue, size_t n, bool evicted_only, char *out, size_t *n_stored, size_t *n_evicted);
void queue_pop(struct publish_queue *queue, size_t n);
/* Asks for a snapshot with room for at least `blocks`. 0, or -1 when out of memory (ask again later). */
int queue_want(struct publish_queue *queue, size_t blocks);
/* Call while waiting for the snapshot: drops events that it will cover, makes room when it was too small. 1 when READY: the
 * snapshot is the consumer's and the ring continues where it ends; 0 not yet; -1 out of memory. */
int queue_take(struct publish_queue *queue);
void queue_release(struct publish_queue *queue); /* frees a READY snapshot */

/* One event as text. */
void queue_format(const struct kvg_hash *hash, bool evicted, char out[QUEUE_EVENT_BYTES]);
