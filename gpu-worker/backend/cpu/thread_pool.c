#include "gpu-worker/backend/cpu/thread_pool.h"
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SPIN_PAUSES = 20000, CACHE_LINE = 64 };

struct thread_pool {
    uint32_t n_threads;
    pthread_t *threads; /* [n_threads - 1] */
    bool stopping;      /* written before an epoch change, read after */
    thread_pool_job job;
    void *arg;
    _Alignas(CACHE_LINE) _Atomic uint32_t epoch; /* counts jobs; workers wait for it to change */
    _Alignas(CACHE_LINE) _Atomic uint32_t sleepers;
    _Alignas(CACHE_LINE) _Atomic uint32_t running; /* workers that have not finished the current job */
};

struct worker_start {
    struct thread_pool *pool;
    uint32_t index;
};

static inline void cpu_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void wait_for_epoch(struct thread_pool *pool, uint32_t seen)
{
    for (uint32_t spin = 0; atomic_load_explicit(&pool->epoch, memory_order_acquire) == seen; spin++) {
        if (spin < SPIN_PAUSES) {
            cpu_pause();
            continue;
        }
        /* Sequentially consistent with `kick`: either it sees this sleeper, or the futex sees its epoch. */
        atomic_fetch_add(&pool->sleepers, 1);
        syscall(SYS_futex, &pool->epoch, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
        atomic_fetch_sub(&pool->sleepers, 1);
    }
}

static void kick(struct thread_pool *pool)
{
    atomic_fetch_add(&pool->epoch, 1);
    if (atomic_load(&pool->sleepers))
        syscall(SYS_futex, &pool->epoch, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void *worker_main(void *arg)
{
    struct worker_start start = *(struct worker_start *)arg;
    struct thread_pool *pool = start.pool;
    free(arg);
    for (uint32_t seen = 0;; seen++) {
        wait_for_epoch(pool, seen);
        if (pool->stopping)
            return NULL;
        pool->job(pool->arg, start.index, pool->n_threads);
        atomic_fetch_sub_explicit(&pool->running, 1, memory_order_release);
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
    *pool = (struct thread_pool){.n_threads = 1};
    pool->threads = calloc(n_threads, sizeof *pool->threads);
    if (!pool->threads) {
        free(pool);
        return NULL;
    }
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
    pool->stopping = true;
    kick(pool);
    for (uint32_t i = 1; i < pool->n_threads; i++)
        pthread_join(pool->threads[i - 1], NULL);
    free(pool->threads);
    free(pool);
}

uint32_t thread_pool_size(const struct thread_pool *pool)
{
    return pool->n_threads;
}

void thread_pool_run(struct thread_pool *pool, thread_pool_job job, void *arg)
{
    if (pool->n_threads == 1) {
        job(arg, 0, 1);
        return;
    }
    pool->job = job;
    pool->arg = arg;
    atomic_store_explicit(&pool->running, pool->n_threads - 1, memory_order_relaxed);
    kick(pool);
    job(arg, 0, pool->n_threads);
    for (uint32_t spin = 0; atomic_load_explicit(&pool->running, memory_order_acquire); spin++) {
        if (spin < SPIN_PAUSES)
            cpu_pause();
        else
            sched_yield();
    }
}

struct item_loop {
    thread_pool_item item;
    void *arg;
    uint32_t n, chunk;
    _Atomic uint32_t next;
};

static void run_items(void *arg, uint32_t thread, uint32_t n_threads)
{
    struct item_loop *loop = arg;
    (void)n_threads;
    for (;;) {
        uint32_t first = atomic_fetch_add_explicit(&loop->next, loop->chunk, memory_order_relaxed);
        if (first >= loop->n)
            return;
        uint32_t left = loop->n - first;
        loop->item(loop->arg, thread, first, first + (left < loop->chunk ? left : loop->chunk));
    }
}

void thread_pool_for(struct thread_pool *pool, uint32_t n, uint32_t chunk, thread_pool_item item, void *arg)
{
    if (n == 0)
        return;
    if (n <= chunk || pool->n_threads == 1) {
        item(arg, 0, 0, n);
        return;
    }
    struct item_loop loop = {.item = item, .arg = arg, .n = n, .chunk = chunk};
    thread_pool_run(pool, run_items, &loop);
}
