#include "gpu-worker/backend/cpu/thread_pool.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include "gpu-worker/backend/sleep.h"

enum {
    SPIN_PAUSES = 20000, /* of a worker between loops */
    DONE_PAUSES = 1000,  /* of the caller for the last items; then the thread that holds them may need this core */
    DONE_YIELDS = 1000,  /* and then may stand in another core's queue: only an idle core fetches it from there */
    CACHE_LINE = 64
};

/* `claim` is (loop number << 32 | first item that nobody has taken). Taking items is one compare-and-swap, so it can only succeed
 * in the loop whose fields were read:
 *
 *   caller   claim = (n + 1, CLOSED)    from here no late worker can take anything of loop n
 *            item, arg, n, chunk        stored with release, loaded with acquire: who reads a new one also sees the closed claim
 *            claim = (n + 1, 0)         open
 *   worker   claim -> fields -> compare-and-swap of claim -> items -> done += taken
 *
 * The fields of a loop cannot change while somebody holds items of it, because the caller waits for done == n.
 *
 * In a loop of shrinking pieces every thread has a range of its own, claimed in the same way, and `claim` stays open:
 *
 *   ranges[t] = (loop number << 32 | first item that nobody has taken)    of an earlier loop: nobody has taken any
 *
 * All items of a loop have been taken when it ends, so a thread that comes late finds each range at its end, or in a later loop.
 */
static const uint64_t CLOSED = UINT32_MAX;

struct range {
    _Alignas(CACHE_LINE) _Atomic uint64_t claim;
};

struct thread_pool {
    uint32_t n_threads;
    pthread_t *threads;   /* [n_threads - 1] */
    struct range *ranges; /* [n_threads] */
    _Atomic bool stopping;
    _Atomic(thread_pool_item) item;
    _Atomic(void *) arg;
    _Atomic uint32_t n, chunk;
    _Alignas(CACHE_LINE) _Atomic uint64_t claim;
    _Alignas(CACHE_LINE) _Atomic uint32_t done;  /* items finished in this loop; the futex of the caller */
    _Atomic uint32_t callers;                    /* asleep on it */
    _Alignas(CACHE_LINE) _Atomic uint32_t epoch; /* the futex: counts loops */
    _Alignas(CACHE_LINE) _Atomic uint32_t sleepers;
};

struct worker_start {
    struct thread_pool *pool;
    uint32_t index;
};

static void finish(struct thread_pool *pool, uint32_t taken, uint32_t n)
{
    if (atomic_fetch_add(&pool->done, taken) + taken == n)
        wake_sleepers(&pool->done, &pool->callers, FUTEX_PRIVATE_FLAG);
}

struct loop {
    uint32_t number, n;
    thread_pool_item item;
    void *arg;
};

/* Takes half of what is left in thread `owner`'s range, at least one item; returns how many, 0 where nothing is. */
static uint32_t take_of_range(struct thread_pool *pool, const struct loop *loop, uint32_t owner, uint32_t *first)
{
    uint32_t start = (uint32_t)((uint64_t)loop->n * owner / pool->n_threads);
    uint32_t end = (uint32_t)((uint64_t)loop->n * (owner + 1) / pool->n_threads);
    uint64_t claim = atomic_load_explicit(&pool->ranges[owner].claim, memory_order_acquire);
    for (;;) {
        uint32_t number = (uint32_t)(claim >> 32);
        *first = number == loop->number ? (uint32_t)claim : start;
        if ((int32_t)(number - loop->number) > 0 || *first >= end)
            return 0;
        uint32_t taken = end - *first > 1 ? (end - *first) / 2 : 1;
        if (atomic_compare_exchange_weak_explicit(&pool->ranges[owner].claim, &claim,
                                                  (uint64_t)loop->number << 32 | (*first + taken), memory_order_acq_rel,
                                                  memory_order_acquire))
            return taken;
    }
}

/* The thread's own range, then what is left of the others'. */
static void run_ranges(struct thread_pool *pool, uint32_t thread, const struct loop *loop)
{
    for (uint32_t i = 0, first, taken; i < pool->n_threads; i++) {
        while ((taken = take_of_range(pool, loop, (thread + i) % pool->n_threads, &first)) > 0) {
            loop->item(loop->arg, thread, first, first + taken);
            finish(pool, taken, loop->n);
        }
    }
}

/* Takes and runs pieces until none is left. */
static void run_items(struct thread_pool *pool, uint32_t thread)
{
    uint64_t claim = atomic_load_explicit(&pool->claim, memory_order_acquire);
    for (;;) {
        struct loop loop = {.number = (uint32_t)(claim >> 32)};
        loop.item = atomic_load_explicit(&pool->item, memory_order_acquire);
        loop.arg = atomic_load_explicit(&pool->arg, memory_order_acquire);
        loop.n = atomic_load_explicit(&pool->n, memory_order_acquire);
        uint32_t chunk = atomic_load_explicit(&pool->chunk, memory_order_acquire);
        uint32_t first = (uint32_t)claim;
        if (first >= loop.n || first == CLOSED)
            return;
        if (chunk == THREAD_POOL_SHRINKING) {
            uint64_t now = atomic_load_explicit(&pool->claim, memory_order_acquire);
            if (now == claim) { /* so these are this loop's fields */
                run_ranges(pool, thread, &loop);
                return;
            }
            claim = now;
            continue;
        }
        uint32_t taken = loop.n - first < chunk ? loop.n - first : chunk;
        if (!atomic_compare_exchange_weak_explicit(&pool->claim, &claim, claim + taken, memory_order_acq_rel,
                                                   memory_order_acquire))
            continue;
        loop.item(loop.arg, thread, first, first + taken);
        finish(pool, taken, loop.n);
        claim = atomic_load_explicit(&pool->claim, memory_order_acquire);
    }
}

static void wait_for_epoch(struct thread_pool *pool, uint32_t seen)
{
    for (uint32_t spin = 0; atomic_load_explicit(&pool->epoch, memory_order_acquire) == seen; spin++) {
        if (spin < SPIN_PAUSES) {
            cpu_pause();
            continue;
        }
        sleep_while(&pool->epoch, seen, &pool->sleepers, FUTEX_PRIVATE_FLAG);
    }
}

static void kick(struct thread_pool *pool)
{
    atomic_fetch_add(&pool->epoch, 1);
    wake_sleepers(&pool->epoch, &pool->sleepers, FUTEX_PRIVATE_FLAG);
}

static void *worker_main(void *arg)
{
    struct worker_start start = *(struct worker_start *)arg;
    uint32_t seen = 0;
    free(arg);
    for (;;) {
        wait_for_epoch(start.pool, seen);
        /* In this order: who has seen the epoch of the end sees the end, too, and never waits for another. */
        seen = atomic_load_explicit(&start.pool->epoch, memory_order_acquire);
        if (atomic_load_explicit(&start.pool->stopping, memory_order_acquire))
            return NULL;
        run_items(start.pool, start.index);
    }
}

static bool start_worker(struct thread_pool *pool, uint32_t index)
{
    struct worker_start *start = malloc(sizeof *start);
    if (!start)
        return false;
    *start = (struct worker_start){pool, index};
    if (pthread_create(&pool->threads[index - 1], NULL, worker_main, start) != 0) {
        free(start);
        return false;
    }
    return true;
}

struct thread_pool *thread_pool_open(uint32_t n_threads)
{
    struct thread_pool *pool = aligned_alloc(CACHE_LINE, sizeof *pool);
    if (!pool)
        return NULL;
    *pool = (struct thread_pool){.n_threads = 1, .claim = CLOSED};
    pool->threads = calloc(n_threads, sizeof *pool->threads);
    pool->ranges = aligned_alloc(CACHE_LINE, n_threads * sizeof *pool->ranges);
    if (!pool->threads || !pool->ranges) {
        free(pool->threads), free(pool->ranges), free(pool);
        return NULL;
    }
    for (uint32_t i = 0; i < n_threads; i++)
        pool->ranges[i] = (struct range){0};
    for (uint32_t i = 1; i < n_threads; i++) {
        if (!start_worker(pool, i)) {
            thread_pool_close(pool);
            return NULL;
        }
        pool->n_threads = i + 1;
    }
    return pool;
}

void thread_pool_close(struct thread_pool *pool)
{
    if (!pool)
        return;
    atomic_store(&pool->stopping, true);
    kick(pool);
    for (uint32_t i = 1; i < pool->n_threads; i++)
        pthread_join(pool->threads[i - 1], NULL);
    free(pool->threads), free(pool->ranges);
    free(pool);
}

uint32_t thread_pool_size(const struct thread_pool *pool)
{
    return pool->n_threads;
}

static void wait_for_done(struct thread_pool *pool, uint32_t n)
{
    uint32_t done;
    for (uint32_t spin = 0; (done = atomic_load_explicit(&pool->done, memory_order_acquire)) != n; spin++) {
        if (spin < DONE_PAUSES)
            cpu_pause();
        else if (spin < DONE_PAUSES + DONE_YIELDS)
            sched_yield();
        else
            sleep_while(&pool->done, done, &pool->callers, FUTEX_PRIVATE_FLAG);
    }
}

static void nothing_before(void *arg) {}

void thread_pool_for(struct thread_pool *pool, uint32_t n, uint32_t chunk, thread_pool_item item, void *arg)
{
    if (n > 0)
        thread_pool_for_behind(pool, n, chunk, item, nothing_before, arg);
}

void thread_pool_for_behind(struct thread_pool *pool, uint32_t n, uint32_t chunk, thread_pool_item item,
                            void (*before)(void *arg), void *arg)
{
    if (n <= 1 || n <= chunk || pool->n_threads == 1) {
        before(arg);
        if (n > 0)
            item(arg, 0, 0, n);
        return;
    }
    uint64_t loop = (atomic_load_explicit(&pool->claim, memory_order_relaxed) >> 32) + 1;
    atomic_store(&pool->claim, loop << 32 | CLOSED);
    atomic_store_explicit(&pool->item, item, memory_order_release);
    atomic_store_explicit(&pool->arg, arg, memory_order_release);
    atomic_store_explicit(&pool->n, n, memory_order_release);
    atomic_store_explicit(&pool->chunk, chunk, memory_order_release);
    atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->claim, loop << 32, memory_order_release);
    kick(pool);
    before(arg);
    run_items(pool, 0);
    wait_for_done(pool, n);
}
