/* How threads, or processes that share memory, sleep until a word of it changes, by a futex (futex(2)).
 *
 *   sleeper   sleepers + 1 | asleep while word == seen | sleepers - 1
 *   waker     word changes (sequentially consistent, as all here) | sleepers > 0: all wake
 *
 * Either the waker sees this sleeper, or the futex sees the changed word; and where nobody sleeps, a change costs no call of the
 * system. A sleeper may wake early: it looks at the word again. `within`: FUTEX_PRIVATE_FLAG where all are of one process, else
 * 0. */
#pragma once
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Between two looks at a word that will change soon. */
static inline void cpu_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline void sleep_while(_Atomic uint32_t *word, uint32_t seen, _Atomic uint32_t *sleepers, int within)
{
    atomic_fetch_add(sleepers, 1);
    syscall(SYS_futex, word, FUTEX_WAIT | within, seen, NULL, NULL, 0);
    atomic_fetch_sub(sleepers, 1);
}

/* After the word has changed. */
static inline void wake_sleepers(_Atomic uint32_t *word, _Atomic uint32_t *sleepers, int within)
{
    if (atomic_load(sleepers))
        syscall(SYS_futex, word, FUTEX_WAKE | within, INT_MAX, NULL, NULL, 0);
}
