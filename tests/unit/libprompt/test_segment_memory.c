#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "libprompt/segment_memory.h"

/* Text number k and its ids, so that any mix-up shows. */
static size_t make_text(unsigned k, char text[256])
{
    return (size_t)snprintf(text, 256, "segment %u %.*s", k, (int)(k % 200),
                            "................................................................"
                            "................................................................"
                            "........................................................................");
}

static size_t make_ids(unsigned k, uint32_t ids[64])
{
    size_t n = k % 64;

    for (size_t i = 0; i < n; i++)
        ids[i] = k * 2654435761u + (uint32_t)i;
    return n;
}

/* Looks text k up; adds it when it is not there. Returns whether it was. */
static bool touch(struct kvg_segment_memory *memory, unsigned k)
{
    char text[256];
    uint32_t ids[64];
    size_t len = make_text(k, text), n = make_ids(k, ids);
    uint64_t hash;
    const struct kvg_segment *segment = kvg_segment_find(memory, text, len, &hash);

    if (!segment) {
        kvg_segment_add(memory, text, len, hash, ids, n);
        return false;
    }
    assert_int_equal(segment->n, n);
    assert_true(n == 0 || memcmp(segment->ids, ids, n * sizeof *ids) == 0);
    kvg_segment_release(segment);
    return true;
}

static void what_was_added_is_found_with_its_ids(void **state)
{
    struct kvg_segment_memory *memory = kvg_segment_memory_open(1 << 20);
    struct kvg_segment_stats stats;

    for (unsigned k = 0; k < 500; k++)
        assert_false(touch(memory, k));
    for (unsigned k = 0; k < 500; k++)
        assert_true(touch(memory, k));
    kvg_segment_memory_stats(memory, &stats);
    assert_int_equal(stats.hits, 500);
    assert_int_equal(stats.misses, 500);
    assert_int_equal(stats.segments, 500);
    assert_int_equal(stats.evictions, 0);
    kvg_segment_memory_close(memory);
}

static void memory_stays_bounded_and_drops_the_least_recently_used(void **state)
{
    struct kvg_segment_memory *memory = kvg_segment_memory_open(64 << 10);
    struct kvg_segment_stats stats;

    for (unsigned k = 0; k < 20000; k++) {
        touch(memory, k);
        if (k % 10 == 0)
            assert_int_equal(touch(memory, 0), true);
        kvg_segment_memory_stats(memory, &stats);
        assert_true(stats.bytes <= 64 << 10);
    }
    assert_true(stats.segments > 50 && stats.evictions > 10000);
    assert_false(touch(memory, 1));
    kvg_segment_memory_close(memory);
}

static void a_held_segment_outlives_its_eviction(void **state)
{
    struct kvg_segment_memory *memory = kvg_segment_memory_open(16 << 10);
    char text[256];
    uint32_t ids[64];
    size_t len = make_text(63, text), n = make_ids(63, ids);
    uint64_t hash;
    const struct kvg_segment *held;

    touch(memory, 63);
    held = kvg_segment_find(memory, text, len, &hash);
    assert_non_null(held);
    for (unsigned k = 100; k < 1000; k++)
        touch(memory, k);
    assert_false(touch(memory, 63));
    assert_int_equal(held->n, n);
    assert_memory_equal(held->ids, ids, n * sizeof *ids);
    kvg_segment_release(held);
    kvg_segment_memory_close(memory);
}

static void a_segment_too_large_for_its_share_is_not_kept(void **state)
{
    struct kvg_segment_memory *memory = kvg_segment_memory_open(16 << 10);
    char *text = calloc(1, 8 << 10);
    struct kvg_segment_stats stats;
    uint64_t hash;

    assert_null(kvg_segment_find(memory, text, 8 << 10, &hash));
    kvg_segment_add(memory, text, 8 << 10, hash, NULL, 0);
    kvg_segment_memory_stats(memory, &stats);
    assert_int_equal(stats.segments, 0);
    free(text);
    kvg_segment_memory_close(memory);
}

static void *hammer(void *argument)
{
    struct kvg_segment_memory *memory = argument;
    unsigned state = (unsigned)(uintptr_t)&state;

    for (int i = 0; i < 20000; i++) {
        state = state * 1664525u + 1013904223u;
        touch(memory, state >> 22);
    }
    return NULL;
}

static void threads_share_one_memory(void **state)
{
    struct kvg_segment_memory *memory = kvg_segment_memory_open(128 << 10);
    pthread_t threads[4];
    struct kvg_segment_stats stats;

    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, hammer, memory), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    kvg_segment_memory_stats(memory, &stats);
    assert_int_equal(stats.hits + stats.misses, 4 * 20000);
    assert_true(stats.bytes <= 128 << 10);
    kvg_segment_memory_close(memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_added_is_found_with_its_ids),
        cmocka_unit_test(memory_stays_bounded_and_drops_the_least_recently_used),
        cmocka_unit_test(a_held_segment_outlives_its_eviction),
        cmocka_unit_test(a_segment_too_large_for_its_share_is_not_kept),
        cmocka_unit_test(threads_share_one_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
