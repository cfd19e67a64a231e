/* Device memory: one range of addresses, allocated upwards and reused only when nothing is live, so that a stale pointer stays
 * stale. New memory is NaN; between allocations lie red zones; host code that touches any of it is stopped (the range has no
 * access rights outside of kernels and copies).
 */
#include "tests/cusim/machine.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <map>

namespace cusim
{
static const size_t ADDRESSES = (size_t)16 << 30; /* only what is touched takes memory */
static const size_t BIG = 256 << 10;              /* a freed allocation of this size is no longer poisoned, but given back */
static const int POISON = 0xff;

static char *arena;
static size_t top, live_bytes;
static std::map<uintptr_t, allocation> allocations;
static std::map<uintptr_t, size_t> pinned;
static int accesses; /* device_access objects alive */

const thread *guard_of(const void *p);

static size_t capacity()
{
    return (size_t)env_number("CUSIM_MEMORY", 1024) << 20;
}

/* ---- the lock against host code ---- */

static void protect_range(char *from, char *to, bool allow)
{
    char *page = reinterpret_cast<char *>(reinterpret_cast<uintptr_t>(from) & ~(uintptr_t)4095);
    size_t size = (size_t)(to - page + 4095) & ~(size_t)4095;
    if (size && mprotect(page, size, allow ? PROT_READ | PROT_WRITE : PROT_NONE) != 0) {
        perror("cusim: mprotect");
        abort();
    }
}

static void protect(bool allow)
{
    protect_range(arena, arena + top, allow);
}

device_access::device_access()
{
    machine_init();
    if (accesses++ == 0)
        protect(true);
}

device_access::~device_access()
{
    if (--accesses == 0)
        protect(false);
}

static const void *fault_site(void *context)
{
#if defined(__x86_64__)
    return reinterpret_cast<const void *>(static_cast<ucontext_t *>(context)->uc_mcontext.gregs[REG_RIP] + 1);
#elif defined(__aarch64__)
    return reinterpret_cast<const void *>(static_cast<ucontext_t *>(context)->uc_mcontext.pc + 1);
#endif
}

static struct sigaction previous_action;

static void on_fault(int signal, siginfo_t *info, void *context)
{
    const void *at = info->si_addr;
    if (guard_of(at))
        fatal("the stack of a thread overflows at %s", where(fault_site(context)).c_str());
    if (in_arena(at) && !accesses)
        fatal("host code touches device memory (%p) at %s", at, where(fault_site(context)).c_str());
    if (now.what)
        fatal("invalid address %p at %s", at, where(fault_site(context)).c_str());
    sigaction(signal, &previous_action, nullptr); /* not ours: the instruction runs again under the handler before us */
}

static void catch_faults()
{
    static char stack[64 << 10];
    stack_t alternate = {};
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof stack;
    sigaltstack(&alternate, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &previous_action);
    sigaction(SIGBUS, &action, nullptr);
}

void machine_init()
{
    if (arena)
        return;
    void *p = mmap(nullptr, ADDRESSES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("cusim: addresses for device memory");
        abort();
    }
    arena = static_cast<char *>(p);
    catch_faults();
    const char *order = getenv("CUSIM_ORDER");
    if (order)
        cusim_set_order(order);
}

/* ---- queries ---- */

bool in_arena(const void *p)
{
    const char *c = static_cast<const char *>(p);
    return arena && c >= arena && c < arena + ADDRESSES;
}

size_t arena_size()
{
    return ADDRESSES;
}

char *arena_base()
{
    return arena;
}

const allocation *allocation_near(const void *p)
{
    auto after = allocations.upper_bound(reinterpret_cast<uintptr_t>(p));
    return after == allocations.begin() ? nullptr : &std::prev(after)->second;
}

bool is_device(const void *p, size_t size)
{
    const allocation *a = allocation_near(p);
    const char *c = static_cast<const char *>(p);
    return a && a->live && c + size <= a->base + a->size;
}

bool is_pinned(const void *p, size_t size)
{
    auto after = pinned.upper_bound(reinterpret_cast<uintptr_t>(p));
    if (after == pinned.begin())
        return false;
    --after;
    return reinterpret_cast<uintptr_t>(p) + size <= after->first + after->second;
}

/* Without a checker, a write past an allocation is seen in the red zone behind it. */
void arena_check_red_zones()
{
    if (CUSIM_ASAN || checking)
        return;
    for (const auto &entry : allocations) {
        const allocation &a = entry.second;
        for (size_t i = 0; a.live && i < RED_ZONE; i++)
            if (static_cast<unsigned char>(a.base[a.size + i]) != POISON) {
                report("write past the end of an allocation of %zu bytes, at its byte %zu", a.size, a.size + i);
                memset(a.base + a.size, POISON, RED_ZONE);
                break;
            }
    }
}

/* ---- allocation ---- */

/* With nothing live the addresses begin anew: a program that opens one device after another stays small. */
static void begin_anew()
{
    for (const auto &entry : allocations)
        memory_forgotten(entry.second.base, entry.second.size);
    allocations.clear();
    top = 0;
}

static void *allocate(size_t size)
{
    if (!live_bytes && !accesses && top > BIG)
        begin_anew();
    size_t offset = (top + RED_ZONE + 255) & ~(size_t)255, end = offset + size + RED_ZONE;
    if (size > capacity() || live_bytes + size > capacity() || end > ADDRESSES)
        return nullptr;
    top = end;
    live_bytes += size;
    char *p = arena + offset;
    protect_range(p - RED_ZONE, p + size + RED_ZONE, true);
    ASAN_UNPOISON_MEMORY_REGION(p - RED_ZONE, size + 2 * RED_ZONE);
    memset(p - RED_ZONE, POISON, size + 2 * RED_ZONE);
    ASAN_POISON_MEMORY_REGION(p - RED_ZONE, RED_ZONE);
    ASAN_POISON_MEMORY_REGION(p + size, RED_ZONE);
    if (!accesses)
        protect_range(p - RED_ZONE, p + size + RED_ZONE, false);
    allocations[reinterpret_cast<uintptr_t>(p)] = {p, size, true};
    memory_allocated(p, size);
    return p;
}

/* The addresses stay taken, the memory goes. */
void give_back(void *p, size_t size)
{
    uintptr_t from = (reinterpret_cast<uintptr_t>(p) + 4095) & ~(uintptr_t)4095,
              to = (reinterpret_cast<uintptr_t>(p) + size) & ~(uintptr_t)4095;
    if (to > from)
        madvise(reinterpret_cast<void *>(from), to - from, MADV_DONTNEED);
}

static bool release(void *p)
{
    auto found = allocations.find(reinterpret_cast<uintptr_t>(p));
    if (found == allocations.end() || !found->second.live) {
        report("cudaFree of %p: %s", p, found == allocations.end() ? "not the start of an allocation" : "freed before");
        return false;
    }
    allocation &a = found->second;
    a.live = false;
    live_bytes -= a.size;
    memory_freed(p, a.size);
    ASAN_POISON_MEMORY_REGION(p, a.size);
#if !CUSIM_ASAN
    device_access access;
    if (a.size < BIG)
        memset(p, POISON, a.size);
    else
        give_back(a.base, a.size);
#endif
    return true;
}
} // namespace cusim

using namespace cusim;

extern "C" {
cudaError_t cusim_malloc(void **p, size_t size)
{
    machine_init();
    *p = size ? allocate(size) : nullptr;
    return size && !*p ? cudaErrorMemoryAllocation : cudaSuccess;
}

cudaError_t cusim_free(void *p)
{
    return !p || release(p) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cusim_host_alloc(void **p, size_t size)
{
    *p = aligned_alloc(4096, (size + 4095) & ~(size_t)4095);
    if (!*p)
        return cudaErrorMemoryAllocation;
    memset(*p, POISON, size);
    pinned[reinterpret_cast<uintptr_t>(*p)] = size;
    return cudaSuccess;
}

cudaError_t cusim_host_free(void *p)
{
    if (p && !pinned.erase(reinterpret_cast<uintptr_t>(p))) {
        report("cudaFreeHost of %p: not from cudaHostAlloc", p);
        return cudaErrorInvalidValue;
    }
    free(p);
    return cudaSuccess;
}

cudaError_t cusim_host_register(void *p, size_t size)
{
    pinned[reinterpret_cast<uintptr_t>(p)] = size;
    return cudaSuccess;
}

cudaError_t cusim_host_unregister(void *p)
{
    return pinned.erase(reinterpret_cast<uintptr_t>(p)) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    machine_init();
    *total = capacity();
    *free_bytes = *total - live_bytes;
    return cudaSuccess;
}
}
