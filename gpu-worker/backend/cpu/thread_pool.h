/* A fixed set of threads that run one job at a time together with the caller.
 *
 * Between jobs a worker spins for about 20,000 pauses (some 0.5 ms), then sleeps on a futex: regions inside a step start in well
 * under a microsecond, and an idle process costs nothing.
 */
#pragma once
#include <stdint.h>

struct thread_pool;

typedef void (*thread_pool_job)(void *arg, uint32_t thread, uint32_t n_threads);
typedef void (*thread_pool_item)(void *arg, uint32_t thread, uint32_t first, uint32_t end);

/* n_threads counts the caller. NULL if threads or memory cannot be had. */
struct thread_pool *thread_pool_open(uint32_t n_threads);
void thread_pool_close(struct thread_pool *pool);
uint32_t thread_pool_size(const struct thread_pool *pool);
/* job(arg, t, n) once on each thread, the caller included; returns when all are done. One caller at a time. */
void thread_pool_run(struct thread_pool *pool, thread_pool_job job, void *arg);
/* item(arg, thread, first, end) over all of 0..n in pieces of at most `chunk`, handed out as threads come free. */
void thread_pool_for(struct thread_pool *pool, uint32_t n, uint32_t chunk, thread_pool_item item, void *arg);
