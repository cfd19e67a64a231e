/* Tells Redis what this worker holds: registration, heartbeat, stored and evicted blocks, resync.
 *
 * One thread of its own; the engine thread talks to it through a bounded queue and never waits for it. Redis being away
 * costs nothing but hits: the queue overflows, and on reconnect a snapshot under a new lease replaces all.
 * Every function takes a NULL publisher (a worker without Redis) and then does nothing.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "libprompt/block_chain.h"
#include "libprompt/error.h"

struct publisher;

struct publisher_options {
    const char *redis;  /* redis://[user:password@]host[:port][/db] or unix:/path */
    const char *prefix; /* "kvgate:" */
    const char *model;
    const char *worker_id;
    const char *addr; /* advertised: numeric IP:port or unix:/path */
    const char *version;
    struct kvg_hash fingerprint;
    uint32_t block_size;
    size_t queue_blocks; /* events the queue can hold; 0 = 65,536 */
    uint32_t stall_ms;   /* no publisher_report for so long: heartbeats stop; 0 = 10,000 */
    bool held;           /* registers only after publisher_release */
    /* Called on the publisher's thread when another process has taken this worker id: the worker must exit. */
    void (*superseded)(void *context);
    void *context;
};

int publisher_open(struct publisher **out, const struct publisher_options *options, struct kvg_error *err);
/* The worker is ready: it registers, tells what it holds, and heartbeats begin. Any thread. */
void publisher_release(struct publisher *publisher);
/* Marks the worker as leaving (its lease ends at once) where Redis answers within a second, and joins the thread. */
void publisher_close(struct publisher *publisher);

/* --- engine thread --- */
void publisher_stored(struct publisher *publisher, const struct kvg_hash *hashes, size_t n);
void publisher_evicted(struct publisher *publisher, const struct kvg_hash *hashes, size_t n); /* leaf first, before reuse */
/* When true, the engine answers with publisher_snapshot before its next stored/evicted event. */
bool publisher_wants_snapshot(struct publisher *publisher);
void publisher_snapshot(struct publisher *publisher, const struct kvg_hash *hashes, size_t n); /* all blocks held now */

struct publisher_load {
    uint32_t running, waiting;
    uint32_t blocks_used, blocks_total;
    uint64_t backlog; /* prompt tokens admitted or queued and not yet computed + 16 per running decode */
};
/* Once a step, and at least each second while idle: the heartbeat goes out only while these keep coming (stall_ms). */
void publisher_report(struct publisher *publisher, const struct publisher_load *load);
void publisher_drain(struct publisher *publisher); /* state "draining" from the next heartbeat, sent at once */

struct publisher_stats {
    bool connected, registered, mismatch;
    uint64_t lease, batches, stored, evicted, resyncs, dropped, errors;
};
void publisher_stats(struct publisher *publisher, struct publisher_stats *out); /* any thread */
