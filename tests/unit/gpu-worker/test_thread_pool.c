#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>
#include "gpu-worker/backend/cpu/thread_pool.h"

enum { ITEMS = 1000 };

struct counts {
    _Atomic uint32_t done[ITEMS];
    _Atomic uint32_t largest;
    _Atomic uint32_t bad_thread, bad_piece;
    uint32_t n_threads, in_ranges; /* in_ranges: items of a loop whose pieces shrink, else 0 */
};

/* The thread whose range item i is in. */
static uint32_t owner_of(const struct counts *counts, uint32_t i)
{
    uint32_t owner = 0;
    while (i >= (uint64_t)counts->in_ranges * (owner + 1) / counts->n_threads)
        owner++;
    return owner;
}

static void count_items(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct counts *counts = arg;
    if (thread >= counts->n_threads)
        counts->bad_thread++;
    if (end - first > counts->largest)
        counts->largest = end - first;
    if (counts->n_threads > 1 && counts->in_ranges && owner_of(counts, first) != owner_of(counts, end - 1))
        counts->bad_piece++;
    for (uint32_t i = first; i < end; i++)
        counts->done[i]++;
}

static void test_every_item_runs_once(void **unused)
{
    for (uint32_t threads = 1; threads <= 4; threads++) {
        struct thread_pool *pool = thread_pool_open(threads);
        assert_non_null(pool);
        assert_int_equal(thread_pool_size(pool), threads);
        for (uint32_t n = 0; n < 200; n += n < 20 ? 1 : 17) {
            for (uint32_t chunk = THREAD_POOL_SHRINKING; chunk < 40; chunk += chunk ? 6 : 1) {
                static struct counts counts;
                uint32_t range = (n + threads - 1) / threads, largest = chunk ? chunk : range > 1 ? range / 2 : 1;
                memset(&counts, 0, sizeof counts);
                counts.n_threads = threads;
                counts.in_ranges = chunk == THREAD_POOL_SHRINKING ? n : 0;
                thread_pool_for(pool, n, chunk, count_items, &counts);
                assert_int_equal(counts.bad_thread, 0);
                assert_true(n == 1 || counts.bad_piece == 0);
                assert_true(threads == 1 || counts.largest <= largest);
                for (uint32_t i = 0; i < ITEMS; i++)
                    assert_int_equal(counts.done[i], i < n);
            }
        }
        thread_pool_close(pool);
    }
}

struct first_pieces {
    _Atomic uint32_t n;
    _Atomic bool bad;
};

/* Holds each of two threads until both have begun. */
static void begin_together(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct first_pieces *pieces = arg;
    if (pieces->n >= 2)
        return;
    if (first != (thread ? ITEMS / 2 : 0) || end - first != ITEMS / 4)
        pieces->bad = true;
    pieces->n++;
    while (pieces->n < 2)
        usleep(100);
}

static void test_threads_begin_at_ranges_of_their_own(void **unused)
{
    struct thread_pool *pool = thread_pool_open(2);
    for (int i = 0; i < 100; i++) {
        struct first_pieces pieces = {0};
        thread_pool_for(pool, ITEMS, THREAD_POOL_SHRINKING, begin_together, &pieces);
        assert_false(pieces.bad);
    }
    thread_pool_close(pool);
}

struct behind {
    _Atomic uint32_t made, items;
    _Atomic bool early;
};

static void make_late(void *arg)
{
    struct behind *behind = arg;
    usleep(2000); /* the others have begun */
    behind->made++;
}

static void need_what_is_made(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct behind *behind = arg;
    if (thread == 0 && !behind->made)
        behind->early = true;
    while (!behind->made)
        usleep(50);
    behind->items += end - first;
}

static void test_the_caller_does_what_comes_first_once_and_its_items_behind_it(void **unused)
{
    static const uint32_t sizes[] = {0, 1, 2, 3, 64};
    for (uint32_t threads = 1; threads <= 3; threads++) {
        struct thread_pool *pool = thread_pool_open(threads);
        for (uint32_t i = 0; i < 2 * sizeof sizes / sizeof *sizes; i++) {
            struct behind behind = {0};
            thread_pool_for_behind(pool, sizes[i / 2], i % 2, need_what_is_made, make_late, &behind);
            assert_int_equal(behind.made, 1);
            assert_int_equal(behind.items, sizes[i / 2]);
            assert_false(behind.early);
        }
        thread_pool_close(pool);
    }
}

/* Short loops of changing size, one after the other: a worker that comes late must never run an item of a loop that has ended. */
static void test_loops_follow_each_other_without_mixing(void **unused)
{
    struct thread_pool *pool = thread_pool_open(4);
    static struct counts counts[2];
    for (uint32_t i = 0; i < 20000; i++) {
        struct counts *now = &counts[i % 2];
        uint32_t n = 2 + i % 7;
        memset(now, 0, 16 * sizeof *now->done);
        now->n_threads = 4;
        thread_pool_for(pool, n, i % 3, count_items, now);
        for (uint32_t j = 0; j < 16; j++)
            assert_int_equal(now->done[j], j < n);
    }
    thread_pool_close(pool);
}

static void test_loops_run_after_the_workers_have_gone_to_sleep(void **unused)
{
    struct thread_pool *pool = thread_pool_open(2);
    static struct counts counts;
    counts.n_threads = 2;
    for (uint32_t i = 0; i < 5; i++) {
        usleep(30000); /* far past the spin */
        thread_pool_for(pool, 100, 1, count_items, &counts);
        for (uint32_t j = 0; j < 100; j++)
            assert_int_equal(counts.done[j], i + 1);
    }
    thread_pool_close(pool);
}

static void do_nothing(void *arg, uint32_t thread, uint32_t first, uint32_t end) {}

/* A worker that has just seen the last loop may meet the end of the pool at any point of its way. */
static void test_a_pool_closes_right_behind_a_loop(void **unused)
{
    alarm(600); /* a worker that sleeps through it would be waited for without end */
    for (uint32_t i = 0; i < 2000; i++) {
        struct thread_pool *pool = thread_pool_open(8);
        usleep(20); /* until they wait */
        thread_pool_for(pool, 2, 1, do_nothing, NULL);
        for (volatile uint32_t spin = 0; spin < i % 200; spin++)
            ;
        thread_pool_close(pool);
    }
    alarm(0);
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Spinning on would burn the whole second on three threads. */
static void test_an_idle_pool_uses_no_cpu(void **unused)
{
    struct thread_pool *pool = thread_pool_open(4);
    static struct counts counts;
    counts.n_threads = 4;
    thread_pool_for(pool, 100, 1, count_items, &counts);
    usleep(200000);
    double start = cpu_seconds();
    usleep(1000000);
    assert_true(cpu_seconds() - start < 0.3);
    thread_pool_close(pool);
}

/* The caller's item ends when the worker has the other one, which takes long. */
static void hold(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    _Atomic bool *held = arg;
    if (thread) {
        *held = true;
        usleep(400000);
    }
    while (!*held)
        usleep(100);
}

/* Else the caller's core would never be idle, and who waits in another core's queue stays there. */
static void test_a_caller_that_waits_long_uses_no_cpu(void **unused)
{
    struct thread_pool *pool = thread_pool_open(2);
    for (int i = 0; i < 3; i++) {
        _Atomic bool held = false;
        double start = cpu_seconds();
        thread_pool_for(pool, 2, 1, hold, &held);
        assert_true(cpu_seconds() - start < 0.2);
    }
    thread_pool_close(pool);
}

static void add_up(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    volatile uint32_t *sums = arg;
    for (uint32_t i = first; i < end; i++)
        for (uint32_t k = 0; k < 1000; k++)
            sums[i] += k;
}

/* Seconds of a few hundred short loops, the least of some tries: a try may be held up by anything. */
static double seconds_of_loops(uint32_t threads)
{
    static uint32_t sums[64];
    struct thread_pool *pool = thread_pool_open(threads);
    double least = 1e9;

    for (int try = 0; try < 7; try++) {
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        for (int i = 0; i < 300; i++)
            thread_pool_for(pool, 64, 1, add_up, sums);
        clock_gettime(CLOCK_MONOTONIC, &b);
        double seconds = (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) * 1e-9;
        least = seconds < least ? seconds : least;
    }
    thread_pool_close(pool);
    return least;
}

/* Waiting for a thread that the neighbour has displaced would cost a time slice a loop, some hundred times what the loop takes.
 */
static void test_a_busy_neighbour_does_not_hold_up_every_loop(void **unused)
{
    pid_t neighbour = fork();
    if (neighbour == 0)
        for (;;)
            ;
    assert_true(neighbour > 0);
    double alone = seconds_of_loops(1), shared = seconds_of_loops(2);
    kill(neighbour, SIGKILL);
    waitpid(neighbour, NULL, 0);
    assert_true(shared < 20 * alone);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_item_runs_once),
        cmocka_unit_test(test_threads_begin_at_ranges_of_their_own),
        cmocka_unit_test(test_the_caller_does_what_comes_first_once_and_its_items_behind_it),
        cmocka_unit_test(test_loops_follow_each_other_without_mixing),
        cmocka_unit_test(test_loops_run_after_the_workers_have_gone_to_sleep),
        cmocka_unit_test(test_a_pool_closes_right_behind_a_loop),
        cmocka_unit_test(test_an_idle_pool_uses_no_cpu),
        cmocka_unit_test(test_a_caller_that_waits_long_uses_no_cpu),
        cmocka_unit_test(test_a_busy_neighbour_does_not_hold_up_every_loop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
