/* Stacks of the emulated threads and the switch between them and the scheduler. */
#include "tests/cusim/machine.h"
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

namespace cusim
{
static const size_t STACK = 256 << 10, GUARD = 4096;

thread threads[MAX_THREADS];
thread *current;
static void *scheduler_pointer, *scheduler_asan;
static const void *scheduler_stack;
static size_t scheduler_stack_size;

#if defined(__x86_64__)
/* Saves the callee-saved registers on the stack it leaves, its pointer in *save, and goes on where `load` was left. */
extern "C" void cusim_switch(void **save, void *load);
asm(".text\n"
    ".globl cusim_switch\n"
    ".type cusim_switch,@function\n"
    "cusim_switch:\n"
    "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    "mov %rsp,(%rdi)\n"
    "mov %rsi,%rsp\n"
    "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n"
    "ret\n");

static void *first_frame(char *stack, void (*entry)())
{
    void **top = reinterpret_cast<void **>(stack + STACK);
    *--top = nullptr; /* the entry's return address: it never returns, and the stack is aligned as after a call */
    *--top = reinterpret_cast<void *>(entry);
    for (int saved = 0; saved < 6; saved++)
        *--top = nullptr;
    return top;
}
#elif defined(__aarch64__)
extern "C" void cusim_switch(void **save, void *load);
asm(".text\n"
    ".globl cusim_switch\n"
    ".type cusim_switch,%function\n"
    "cusim_switch:\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp, #0]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n stp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n"
    "stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
    "mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
    "ldp x19, x20, [sp, #0]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n ldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n"
    "ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\n"
    "ret\n");

static void *first_frame(char *stack, void (*entry)())
{
    void **top = reinterpret_cast<void **>(stack + STACK) - 20;
    memset(top, 0, 160);
    top[11] = reinterpret_cast<void *>(entry);
    return top;
}
#else
#error "cusim_switch is written for x86-64 and aarch64"
#endif

static char *new_stack()
{
    void *stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, GUARD, PROT_NONE) != 0) {
        perror("cusim: the stack of a thread");
        abort();
    }
    return static_cast<char *>(stack);
}

static void (*thread_entry)();

static void fiber_start()
{
#if CUSIM_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
#endif
    thread_entry();
    fiber_leave(true);
    abort();
}

void fiber_prepare(thread *t, void (*entry)())
{
    if (!t->stack)
        t->stack = new_stack();
    ASAN_UNPOISON_MEMORY_REGION(t->stack + GUARD, STACK - GUARD);
    thread_entry = entry;
    t->asan_stack = nullptr;
    t->stack_pointer = first_frame(t->stack, fiber_start);
}

void fiber_run(thread *t)
{
    current = t;
    threadIdx = t->index;
#if CUSIM_ASAN
    __sanitizer_start_switch_fiber(&scheduler_asan, t->stack, STACK);
#endif
    cusim_switch(&scheduler_pointer, t->stack_pointer);
#if CUSIM_ASAN
    __sanitizer_finish_switch_fiber(scheduler_asan, nullptr, nullptr);
#endif
    (void)scheduler_asan;
}

void fiber_leave(bool for_good)
{
    thread *me = current;
#if CUSIM_ASAN
    __sanitizer_start_switch_fiber(for_good ? nullptr : &me->asan_stack, scheduler_stack, scheduler_stack_size);
#endif
    (void)for_good, (void)scheduler_stack, (void)scheduler_stack_size;
    cusim_switch(&me->stack_pointer, scheduler_pointer);
#if CUSIM_ASAN
    __sanitizer_finish_switch_fiber(me->asan_stack, &scheduler_stack, &scheduler_stack_size);
#endif
}

bool on_stack(const thread *t, const void *p)
{
    const char *c = static_cast<const char *>(p);
    return t->stack && c >= t->stack + GUARD && c < t->stack + STACK;
}

/* The thread whose guard page p lies in: its stack overflowed. */
const thread *guard_of(const void *p)
{
    const char *c = static_cast<const char *>(p);
    for (const thread &t : threads)
        if (t.stack && c >= t.stack && c < t.stack + GUARD)
            return &t;
    return nullptr;
}
} // namespace cusim
