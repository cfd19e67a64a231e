/* Pages of the KV pool that will be needed next are taken by a thread of their own while a core is idle.
 *
 *   pool   | blocks in use ... highest | AHEAD_BYTES, taken | not taken ...
 *
 * Blocks of a new pool are handed out in ascending order, and the kernel clears a page when it is first written: within a step
 * that is time of the step, on virtual machines as much as a tenth of a prompt's. The thread asks the kernel for pages and
 * touches no byte itself, so that it may run beside steps.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include "gpu-worker/backend/cpu/cpu.h"
#include "gpu-worker/backend/sleep.h"

enum { PIECE_BYTES = 2 << 20, AHEAD_BYTES = 128 << 20 };

struct cpu_ahead {
    pthread_t thread;
    uint8_t *memory;
    size_t n_bytes;
    _Atomic size_t wanted; /* bytes from the pool's first; only ever grows */
    _Atomic bool stopping;
    _Atomic uint32_t changes, sleepers;
};

static bool take_pages(const struct cpu_ahead *ahead, size_t at)
{
#ifdef MADV_POPULATE_WRITE
    size_t left = ahead->n_bytes - at;
    return madvise(ahead->memory + at, left < PIECE_BYTES ? left : PIECE_BYTES, MADV_POPULATE_WRITE) == 0;
#else
    return false;
#endif
}

static void *run(void *arg)
{
    struct cpu_ahead *ahead = arg;
    size_t at = 0;

    sched_setscheduler(0, SCHED_IDLE, &(struct sched_param){0}); /* refused: it runs like any thread */
    for (;;) {
        uint32_t seen = atomic_load(&ahead->changes);
        if (atomic_load(&ahead->stopping))
            return NULL;
        if (at >= atomic_load(&ahead->wanted)) {
            sleep_while(&ahead->changes, seen, &ahead->sleepers, FUTEX_PRIVATE_FLAG);
            continue;
        }
        if (!take_pages(ahead, at)) /* an older kernel, or memory is short: whoever writes the page takes it */
            return NULL;
        at += PIECE_BYTES;
    }
}

static void tell(struct cpu_ahead *ahead)
{
    atomic_fetch_add(&ahead->changes, 1);
    wake_sleepers(&ahead->changes, &ahead->sleepers, FUTEX_PRIVATE_FLAG);
}

void cpu_ahead_of(struct cpu_backend *cpu, uint32_t n_blocks)
{
    struct cpu_ahead *ahead = cpu->ahead;
    size_t wanted = (size_t)n_blocks * cpu->layers[0].block_bytes + AHEAD_BYTES;

    if (!ahead)
        return;
    wanted = wanted < ahead->n_bytes ? wanted : ahead->n_bytes;
    if (wanted < atomic_load_explicit(&ahead->wanted, memory_order_relaxed) + PIECE_BYTES)
        return;
    atomic_store(&ahead->wanted, wanted);
    tell(ahead);
}

void cpu_ahead_start(struct cpu_backend *cpu)
{
    cpu_ahead_stop(cpu);
    struct cpu_ahead *ahead = calloc(1, sizeof *ahead);
    if (!ahead)
        return;
    ahead->memory = cpu->kv_memory;
    ahead->n_bytes = cpu->kv_bytes;
    if (pthread_create(&ahead->thread, NULL, run, ahead) != 0) {
        free(ahead);
        return;
    }
    cpu->ahead = ahead;
}

void cpu_ahead_stop(struct cpu_backend *cpu)
{
    struct cpu_ahead *ahead = cpu->ahead;
    if (!ahead)
        return;
    atomic_store(&ahead->stopping, true);
    tell(ahead);
    pthread_join(ahead->thread, NULL);
    free(ahead);
    cpu->ahead = NULL;
}
