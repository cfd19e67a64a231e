#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/kv/publish_queue.h"

enum { BLOCKS = 200 };

static struct kvg_hash block(unsigned number)
{
    struct kvg_hash hash = {{(uint8_t)(number >> 8), (uint8_t)number, 0xab}};
    return hash;
}

static void events_come_out_as_text_in_order(void **state)
{
    struct publish_queue queue;
    struct kvg_hash two[] = {block(1), block(0x1ff)};
    char text[4 * QUEUE_EVENT_BYTES];
    size_t stored, evicted;
    assert_int_equal(queue_init(&queue, 5), 0);
    assert_int_equal(queue.capacity, 8);
    queue_push(&queue, two, 2, false);
    queue_push(&queue, &two[1], 1, true);
    assert_int_equal(queue_pending(&queue), 3);
    assert_int_equal(queue_pack(&queue, 3, false, text, &stored, &evicted), 3 * QUEUE_EVENT_BYTES);
    assert_memory_equal(text, "+0001ab00000000000000+01ffab00000000000000-01ffab00000000000000", 63);
    assert_true(stored == 2 && evicted == 1);
    assert_int_equal(queue_pack(&queue, 3, true, text, &stored, &evicted), QUEUE_EVENT_BYTES);
    assert_memory_equal(text, "-01ffab00000000000000", 21);
    assert_true(stored == 0 && evicted == 1);
    assert_true(queue_complete(&queue));
    queue_pop(&queue, 3);
    assert_false(queue_complete(&queue));
    queue_free(&queue);
}

static void a_full_queue_drops_whole_calls_until_the_next_snapshot(void **state)
{
    struct publish_queue queue;
    struct kvg_hash held[] = {block(1), block(2), block(3)};
    assert_int_equal(queue_init(&queue, 4), 0);
    queue_push(&queue, held, 3, false);
    queue_push(&queue, held, 2, true);
    assert_true(queue_lost(&queue));
    queue_push(&queue, held, 1, true);
    assert_int_equal(queue_pending(&queue), 3);
    assert_int_equal(atomic_load(&queue.dropped), 3);

    assert_false(queue_wants_snapshot(&queue));
    assert_int_equal(queue_want(&queue, 2), 0);
    assert_true(queue_wants_snapshot(&queue));
    queue_snapshot(&queue, held, 3);
    assert_false(queue_wants_snapshot(&queue));
    assert_true(queue_lost(&queue));
    assert_int_equal(queue_take(&queue), 0); /* makes room for three */
    assert_true(queue_wants_snapshot(&queue));
    queue_snapshot(&queue, held, 3);
    assert_false(queue_lost(&queue));
    assert_int_equal(queue_take(&queue), 1);
    assert_int_equal(queue.snapshot_n, 3);
    assert_int_equal(queue_pending(&queue), 0);
    queue_release(&queue);
    queue_push(&queue, held, 4 - 1, false);
    assert_int_equal(queue_pending(&queue), 3);
    assert_false(queue_complete(&queue));
    queue_free(&queue);
}

static void a_snapshot_that_nobody_wants_changes_nothing(void **state)
{
    struct publish_queue queue;
    struct kvg_hash held[] = {block(1)};
    assert_int_equal(queue_init(&queue, 4), 0);
    queue_snapshot(&queue, held, 1);
    assert_true(queue_complete(&queue));
    queue_free(&queue);
}

/* --- two threads: what the consumer makes of it equals what the producer holds --- */

struct race {
    struct publish_queue queue;
    bool held[BLOCKS]; /* the producer's */
    _Atomic bool done;
};

static unsigned next(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(*seed >> 33);
}

static void answer_snapshot(struct race *race)
{
    struct kvg_hash all[BLOCKS];
    size_t n = 0;
    if (!queue_wants_snapshot(&race->queue))
        return;
    for (unsigned b = 0; b < BLOCKS; b++)
        if (race->held[b])
            all[n++] = block(b);
    queue_snapshot(&race->queue, all, n);
}

static void read_snapshot(struct race *race, bool *seen)
{
    memset(seen, 0, BLOCKS * sizeof *seen);
    for (size_t i = 0; i < race->queue.snapshot_n; i++)
        seen[race->queue.snapshot[i].bytes[0] << 8 | race->queue.snapshot[i].bytes[1]] = true;
    queue_release(&race->queue);
}

/* One call with more events than the queue can hold. */
static void overflow(struct race *race)
{
    struct kvg_hash all[BLOCKS];
    for (unsigned b = 0; b < BLOCKS; b++) {
        all[b] = block(b);
        race->held[b] = true;
    }
    queue_push(&race->queue, all, BLOCKS, false);
}

static void *produce(void *arg)
{
    struct race *race = arg;
    uint64_t seed = 3;
    for (int i = 0; i < 200000; i++) {
        answer_snapshot(race);
        unsigned b = next(&seed) % BLOCKS;
        struct kvg_hash hash = block(b);
        race->held[b] = !race->held[b];
        queue_push(&race->queue, &hash, 1, !race->held[b]);
        if (i % 5000 == 0)
            overflow(race);
        if (i % 64 == 0)
            sched_yield();
    }
    atomic_store(&race->done, true);
    return NULL;
}

static void apply(bool *seen, const char *text, size_t len)
{
    for (size_t at = 0; at < len; at += QUEUE_EVENT_BYTES) {
        char number[5] = {0};
        memcpy(number, text + at + 1, 4);
        seen[strtoul(number, NULL, 16)] = text[at] == '+';
    }
}

static void no_event_is_lost_or_reordered_between_threads(void **state)
{
    struct race *race = calloc(1, sizeof *race);
    bool seen[BLOCKS] = {false};
    bool waiting = false;
    uint64_t snapshots = 0;
    pthread_t producer;
    assert_int_equal(queue_init(&race->queue, 64), 0);
    assert_int_equal(pthread_create(&producer, NULL, produce, race), 0);
    for (int round = 0;; round++) {
        bool ended = atomic_load(&race->done);
        if (waiting && queue_take(&race->queue) == 1) {
            read_snapshot(race, seen);
            waiting = false;
            snapshots++;
        }
        if (!waiting && queue_lost(&race->queue))
            waiting = queue_want(&race->queue, BLOCKS) == 0;
        uint64_t pending = waiting ? 0 : queue_pending(&race->queue);
        char text[64 * QUEUE_EVENT_BYTES];
        size_t stored, evicted;
        if (pending) {
            size_t n = pending < 16 ? (size_t)pending : 16;
            apply(seen, text, queue_pack(&race->queue, n, false, text, &stored, &evicted));
            queue_pop(&race->queue, n);
        } else if (ended) {
            break;
        } else {
            queue_wait(&race->queue, 1);
        }
        if (round % 512 == 0)
            sched_yield();
    }
    pthread_join(producer, NULL);
    if (waiting || queue_lost(&race->queue)) { /* the producer ended before it could answer: answer in its place */
        assert_int_equal(queue_want(&race->queue, BLOCKS), 0);
        answer_snapshot(race);
        assert_int_equal(queue_take(&race->queue), 1);
        read_snapshot(race, seen);
    }
    assert_memory_equal(seen, race->held, sizeof seen);
    assert_true(snapshots > 0);
    queue_free(&race->queue);
    free(race);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(events_come_out_as_text_in_order),
        cmocka_unit_test(a_full_queue_drops_whole_calls_until_the_next_snapshot),
        cmocka_unit_test(a_snapshot_that_nobody_wants_changes_nothing),
        cmocka_unit_test(no_event_is_lost_or_reordered_between_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
