/* A fixed set of threads that share the items of one loop at a time with the caller.
 *
 * A loop ends when its items are done, not when every thread has shown up: a thread that the scheduler keeps from running delays
 * nothing unless it holds an item; and if it does, the caller, who waits for it, soon goes to sleep as well, so that its core is
 * idle and the system moves that thread, or another that waits in the same queue, there. Between loops a worker spins for about
 * 20,000 pauses (some 0.2 to 0.5 ms), then sleeps on a futex, so loops inside a step start in well under a microsecond and an
 * idle process costs nothing.
 */
#pragma once
#include <stdint.h>

struct thread_pool;

/* thread: 0 (the caller) .. size - 1, never the same for two calls at once. */
typedef void (*thread_pool_item)(void *arg, uint32_t thread, uint32_t first, uint32_t end);

/* n_threads counts the caller. NULL if threads or memory cannot be had. */
struct thread_pool *thread_pool_open(uint32_t n_threads);
void thread_pool_close(struct thread_pool *pool);
uint32_t thread_pool_size(const struct thread_pool *pool);
/* In place of a chunk: thread t has the items n t / size to n (t + 1) / size and takes half of what is left of them at a time, at
 * least one; who has no more takes half of what is left of another's. Nearly all that a thread takes lies together, as memory
 * that is fetched ahead likes it, and the last pieces are small enough that no thread waits long. */
enum { THREAD_POOL_SHRINKING = 0 };

/* item(arg, thread, first, end) over all of 0..n in pieces of at most `chunk`, handed out as threads come free. What the
 * caller wrote before is visible to items, and what items wrote is visible after. One caller at a time; items must not call it.
 */
void thread_pool_for(struct thread_pool *pool, uint32_t n, uint32_t chunk, thread_pool_item item, void *arg);
/* The same, but the caller runs before(arg) first, while others may be at their items already: they wait for what they need. */
void thread_pool_for_behind(struct thread_pool *pool, uint32_t n, uint32_t chunk, thread_pool_item item,
                            void (*before)(void *arg), void *arg);
