#include "gpu-worker/kv/publish_queue.h"
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

int queue_init(struct publish_queue *queue, size_t events)
{
    memset(queue, 0, sizeof *queue);
    queue->capacity = 1;
    while (queue->capacity < events)
        queue->capacity *= 2;
    queue->hashes = calloc(queue->capacity, sizeof *queue->hashes);
    queue->evicted = calloc(queue->capacity, sizeof *queue->evicted);
    queue->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (queue->hashes && queue->evicted && queue->wake >= 0)
        return 0;
    queue_free(queue);
    return -1;
}

void queue_free(struct publish_queue *queue)
{
    free(queue->hashes);
    free(queue->evicted);
    free(queue->snapshot);
    if (queue->wake >= 0)
        close(queue->wake);
}

/* --- producer --- */

void queue_wake(const struct publish_queue *queue)
{
    uint64_t one = 1;
    /* It fails only when the counter is full, and then the consumer wakes anyway. */
    if (write(queue->wake, &one, sizeof one) < 0)
        return;
}

void queue_push(struct publish_queue *queue, const struct kvg_hash *hashes, size_t n, bool evicted)
{
    uint64_t head = atomic_load_explicit(&queue->head, memory_order_relaxed);
    uint64_t tail = atomic_load_explicit(&queue->tail, memory_order_acquire);
    if (n == 0)
        return;
    if (atomic_load_explicit(&queue->lost, memory_order_relaxed) || n > queue->capacity - (head - tail)) {
        atomic_fetch_add_explicit(&queue->dropped, n, memory_order_relaxed);
        if (!atomic_exchange(&queue->lost, true))
            queue_wake(queue);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint64_t at = (head + i) & (queue->capacity - 1);
        queue->hashes[at] = hashes[i];
        queue->evicted[at] = evicted;
    }
    atomic_store_explicit(&queue->head, head + n, memory_order_release);
    queue_wake(queue);
}

bool queue_wants_snapshot(const struct publish_queue *queue)
{
    return atomic_load_explicit(&queue->state, memory_order_acquire) == SNAPSHOT_WANTED;
}

void queue_snapshot(struct publish_queue *queue, const struct kvg_hash *hashes, size_t n)
{
    if (!queue_wants_snapshot(queue))
        return;
    queue->snapshot_n = n;
    if (n > queue->snapshot_capacity) {
        atomic_store_explicit(&queue->state, SNAPSHOT_TOO_SMALL, memory_order_release);
    } else {
        if (n)
            memcpy(queue->snapshot, hashes, n * sizeof *hashes);
        queue->snapshot_head = atomic_load_explicit(&queue->head, memory_order_relaxed);
        atomic_store(&queue->lost, false);
        atomic_store_explicit(&queue->state, SNAPSHOT_READY, memory_order_release);
    }
    queue_wake(queue);
}

/* --- consumer --- */

void queue_wait(const struct publish_queue *queue, int timeout_ms)
{
    struct pollfd ready = {.fd = queue->wake, .events = POLLIN};
    uint64_t count;
    if (poll(&ready, 1, timeout_ms) > 0 && read(queue->wake, &count, sizeof count) < 0)
        return;
}

uint64_t queue_pending(const struct publish_queue *queue)
{
    return atomic_load_explicit(&queue->head, memory_order_acquire) - atomic_load_explicit(&queue->tail, memory_order_relaxed);
}

bool queue_lost(const struct publish_queue *queue)
{
    return atomic_load(&queue->lost);
}

bool queue_complete(const struct publish_queue *queue)
{
    return !queue->asked && atomic_load_explicit(&queue->tail, memory_order_relaxed) == 0 && !queue_lost(queue);
}

void queue_format(const struct kvg_hash *hash, bool evicted, char out[QUEUE_EVENT_BYTES])
{
    static const char digits[] = "0123456789abcdef";
    out[0] = evicted ? '-' : '+';
    for (int i = 0; i < (QUEUE_EVENT_BYTES - 1) / 2; i++) {
        out[1 + 2 * i] = digits[hash->bytes[i] >> 4];
        out[2 + 2 * i] = digits[hash->bytes[i] & 15];
    }
}

size_t queue_pack(const struct publish_queue *queue, size_t n, bool evicted_only, char *out, size_t *n_stored, size_t *n_evicted)
{
    uint64_t tail = atomic_load_explicit(&queue->tail, memory_order_relaxed);
    size_t len = 0;
    *n_stored = *n_evicted = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t at = (tail + i) & (queue->capacity - 1);
        if (!queue->evicted[at] && evicted_only)
            continue;
        queue_format(&queue->hashes[at], queue->evicted[at], out + len);
        len += QUEUE_EVENT_BYTES;
        ++*(queue->evicted[at] ? n_evicted : n_stored);
    }
    return len;
}

void queue_pop(struct publish_queue *queue, size_t n)
{
    atomic_fetch_add_explicit(&queue->tail, n, memory_order_release);
}

static int make_room(struct publish_queue *queue, size_t blocks)
{
    if (blocks > queue->snapshot_capacity) {
        struct kvg_hash *room = realloc(queue->snapshot, blocks * sizeof *room);
        if (!room)
            return -1;
        queue->snapshot = room;
        queue->snapshot_capacity = blocks;
    }
    atomic_store_explicit(&queue->state, SNAPSHOT_WANTED, memory_order_release);
    return 0;
}

int queue_want(struct publish_queue *queue, size_t blocks)
{
    int state = atomic_load_explicit(&queue->state, memory_order_acquire);
    if (state == SNAPSHOT_WANTED)
        return 0; /* the producer may be filling it now */
    queue->asked = true;
    return make_room(queue, blocks ? blocks : 1);
}

int queue_take(struct publish_queue *queue)
{
    /* In this order: while the state is still WANTED after head was read, every event before that head is older than the
     * snapshot to come. The other way round, events after the snapshot could be dropped. */
    uint64_t head = atomic_load_explicit(&queue->head, memory_order_acquire);
    int state = atomic_load_explicit(&queue->state, memory_order_acquire);
    if (state == SNAPSHOT_TOO_SMALL)
        return make_room(queue, queue->snapshot_n + queue->snapshot_n / 8);
    if (state == SNAPSHOT_READY)
        head = queue->snapshot_head;
    atomic_store_explicit(&queue->tail, head, memory_order_release);
    return state == SNAPSHOT_READY;
}

void queue_release(struct publish_queue *queue)
{
    free(queue->snapshot);
    queue->snapshot = NULL;
    queue->snapshot_capacity = queue->snapshot_n = 0;
    atomic_store_explicit(&queue->state, SNAPSHOT_NONE, memory_order_release);
}
