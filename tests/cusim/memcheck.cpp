/* The checker of a CHECK build: kernels are compiled with -fsanitize=thread, but the callbacks that gcc plants at each access are
 * these, not libtsan's. Every byte of device and shared memory has a state (outside, fresh, written, a cp.async under way) and
 * the tags of its last write and last reads.
 *
 * Two accesses of one byte, one of them a write, race unless the first happened before the second:
 *   same thread
 *   same warp        a __syncwarp of both, or a barrier, came between
 *   other warps      barriers carried the news: known[w][v] is the barrier clock at which warp w last learned what v had done
 *   other blocks     never, unless the first belongs to an earlier launch; a launch that may start early (programmatic dependent
 *                    launch) comes after its predecessor only for threads that have called grid_wait
 * Atomics do not race with one another.
 */
#include "tests/cusim/machine.h"
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

namespace cusim
{
bool on_stack(const thread *t, const void *p);
static unsigned long accesses;
} // namespace cusim

unsigned long cusim_accesses(void)
{
    return cusim::accesses;
}

#ifndef CUSIM_CHECK
namespace cusim
{
const bool checking = false;
void note(const void *, int, access, const void *) {}
void memory_allocated(const void *, size_t) {}
void memory_freed(const void *, size_t) {}
void memory_forgotten(const void *, size_t) {}
void memory_written(const void *, size_t) {}
void memory_read(const void *, size_t, const char *) {}
void memory_copied(const void *, const void *, size_t) {}
void memcheck_shared_reset(size_t) {}
void memcheck_shared_allocated(const void *, size_t) {}

__attribute__((noinline)) void misaligned(const void *p, int size)
{
    const void *site = CUSIM_HERE;
    if (first_time(site, nullptr, 20))
        report("misaligned %d-byte access at %p, at %s", size, p, where(site).c_str());
}
} // namespace cusim
#else

namespace cusim
{
const bool checking = true;

enum state : uint8_t { OUTSIDE, FRESH, WRITTEN, IN_FLIGHT, FREED };

struct tag {
    uint32_t block; /* 0: none */
    uint32_t clock; /* barriers of the block so far */
    uint32_t warps; /* that made the access; reads: all unordered readers' */
    uint32_t site;  /* offset in the program */
    uint32_t syncs; /* __syncwarps of the thread so far */
    int16_t thread; /* -1: several */
    uint8_t kind;
};

/* State and tags of a range of bytes. */
struct shadow {
    uint8_t *states;
    tag *writes, *reads;
};
static shadow global_shadow, shared_shadow;

static void *reserve(size_t size)
{
    void *p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("cusim: the checker's memory");
        abort();
    }
    return p;
}

static shadow make_shadow(size_t bytes)
{
    return {static_cast<uint8_t *>(reserve(bytes)), static_cast<tag *>(reserve(bytes * sizeof(tag))),
            static_cast<tag *>(reserve(bytes * sizeof(tag)))};
}

static uint8_t *global_states(const void *p)
{
    if (!global_shadow.states)
        global_shadow = make_shadow(arena_size());
    return global_shadow.states + (static_cast<const char *>(p) - arena_base());
}

void memory_allocated(const void *p, size_t size)
{
    memset(global_states(p), FRESH, size);
}

void memory_freed(const void *p, size_t size)
{
    memset(global_states(p), FREED, size);
    size_t offset = (size_t)(static_cast<const char *>(p) - arena_base());
    give_back(global_shadow.writes + offset, size * sizeof(tag));
    give_back(global_shadow.reads + offset, size * sizeof(tag));
}

void memory_forgotten(const void *p, size_t size)
{
    memset(global_states(p), OUTSIDE, size);
}

void memory_written(const void *p, size_t size)
{
    memset(global_states(p), WRITTEN, size);
}

void memory_read(const void *p, size_t size, const char *reader)
{
    const uint8_t *states = global_states(p);
    for (size_t i = 0; i < size; i++)
        if (states[i] != WRITTEN) {
            if (first_time(p, reader, 21))
                report("%s reads %zu bytes of device memory, of which byte %zu was never written", reader, size, i);
            return;
        }
}

void memory_copied(const void *to, const void *from, size_t size)
{
    bool device = in_arena(from);
    if (device && !memchr(global_states(from), WRITTEN, size) && first_time(from, to, 28))
        report("a copy reads %zu bytes of device memory, none of which was ever written", size);
    if (in_arena(to) && device)
        memcpy(global_states(to), global_states(from), size);
    else if (in_arena(to))
        memory_written(to, size);
}

void memcheck_shared_reset(size_t used)
{
    if (!shared_shadow.states)
        shared_shadow = make_shadow(shared_memory().size);
    memset(shared_shadow.states, OUTSIDE, used);
}

void memcheck_shared_allocated(const void *p, size_t size)
{
    memset(shared_shadow.states + (static_cast<const char *>(p) - shared_memory().base), FRESH, size);
}

/* ---- happened-before ---- */

static bool before(const tag &a, const tag &b, const thread *t)
{
    if (a.thread == t->number)
        return true;
    for (unsigned rest = a.warps; rest; rest &= rest - 1) {
        int warp = __builtin_ctz(rest);
        if (now.known[t->warp][warp] > a.clock)
            continue;
        if (warp != t->warp || a.thread < 0 || a.syncs >= b.syncs)
            return false;
    }
    return true;
}

/* Is `a`, left by an earlier access, unordered with `b`, the present one? */
static bool races(const tag &a, const tag &b, const thread *t)
{
    if (!a.block || (a.kind == ATOMIC && b.kind == ATOMIC))
        return false;
    if (a.block == b.block)
        return !before(a, b, t);
    return a.block >= (t->waited ? now.first_block : now.ordered_after);
}

static const char *verb(uint8_t kind)
{
    static const char *const verbs[] = {"read", "write", "atomic", "cp.async", "cp.async"};
    return verbs[kind];
}

static void report_race(const tag &a, const tag &b, const char *memory)
{
    if (!first_time(program_site(a.site), program_site(b.site), 22))
        return;
    char who[64] = "several threads";
    if (a.thread >= 0)
        snprintf(who, sizeof who, "thread %d", a.thread);
    const char *block = a.block == b.block           ? "of this block"
                        : a.block >= now.first_block ? "of another block"
                                                     : "of the launch before";
    report("race on %s memory: %s at %s, %s by %s %s at %s", memory, verb(b.kind), where(program_site(b.site)).c_str(),
           verb(a.kind), who, block, where(program_site(a.site)).c_str());
}

/* A read joins the readers before it unless it comes after them all. */
static void add_reader(tag &readers, const tag &b, const thread *t)
{
    if (readers.block != b.block || before(readers, b, t)) {
        readers = b;
        return;
    }
    readers.warps |= b.warps;
    readers.clock = b.clock;
    readers.site = b.site;
    readers.thread = -1;
    if (b.kind != ATOMIC)
        readers.kind = b.kind;
}

/* ---- one access ---- */

static void report_outside(const void *p, int size, access kind, uint8_t s, const void *site, bool shared)
{
    if (!first_time(site, nullptr, 23))
        return;
    std::string line = where(site);
    if (shared) {
        report("out of bounds: %d-byte %s of shared memory outside of every array, at %s", size, verb(kind), line.c_str());
        return;
    }
    const allocation *a = allocation_near(p);
    if (!a)
        report("out of bounds: %d-byte %s before all device memory, at %s", size, verb(kind), line.c_str());
    else if (s == FREED)
        report("%d-byte %s of freed device memory, at %s", size, verb(kind), line.c_str());
    else
        report("out of bounds: %d-byte %s at byte %ld of an allocation of %zu bytes, at %s", size, verb(kind),
               (long)(static_cast<const char *>(p) - a->base), a->size, line.c_str());
}

static bool states_allow(uint8_t *states, const void *p, int size, access kind, const void *site, bool shared)
{
    const char *memory = shared ? "shared" : "global";
    for (int i = 0; i < size; i++) {
        uint8_t &s = states[i];
        if (s == OUTSIDE || s == FREED) {
            report_outside(p, size, kind, s, site, shared);
            return false;
        }
        if (s == FRESH && (kind == READ || kind == ATOMIC) && first_time(site, nullptr, 24))
            report("%s of %s memory that was never written, at %s", verb(kind), memory, where(site).c_str());
        if (s == IN_FLIGHT && kind != COPIED && first_time(site, nullptr, 25))
            report("%s of shared memory that an unfinished cp.async is writing, at %s", verb(kind), where(site).c_str());
        if (kind != READ)
            s = kind == ASYNC ? IN_FLIGHT : WRITTEN;
    }
    return true;
}

static void check_races(const shadow &memory, size_t offset, int size, const tag &b, bool shared)
{
    const thread *t = current;
    for (size_t i = offset; i < offset + (size_t)size; i++) {
        tag &w = memory.writes[i], &r = memory.reads[i];
        if (shared && w.block != b.block)
            w = tag{};
        if (shared && r.block != b.block)
            r = tag{};
        if (races(w, b, t))
            report_race(w, b, shared ? "shared" : "global");
        else if (b.kind != READ && races(r, b, t))
            report_race(r, b, shared ? "shared" : "global");
        if (b.kind == READ)
            add_reader(r, b, t);
        else
            w = b;
    }
}

static bool program_data(const void *p)
{
    const char *c = static_cast<const char *>(p), *args = static_cast<const char *>(now.what->args.get());
    return in_program(p) || (c >= args && c < args + now.what->args_size);
}

static void check_elsewhere(const void *p, int size, access kind, const void *site)
{
    if (on_stack(current, p) || is_pinned(p, (size_t)size))
        return;
    if (program_data(p) && kind == READ)
        return;
    if (first_time(site, nullptr, 26))
        report("invalid address: %d-byte %s at %p, which is no device memory, at %s", size, verb(kind), p, where(site).c_str());
}

void note(const void *p, int size, access kind, const void *site)
{
    if (!current || on_stack(current, p))
        return;
    accesses++;
    shared_info shared = shared_memory();
    const char *c = static_cast<const char *>(p);
    bool in_shared = c >= shared.base && c < shared.base + shared.size;
    if (!in_shared && !in_arena(p)) {
        check_elsewhere(p, size, kind, site);
        return;
    }
    if (!(size & (size - 1)) && (uintptr_t)p % (unsigned)size && first_time(site, nullptr, 27))
        report("misaligned %d-byte %s at %p, at %s", size, verb(kind), p, where(site).c_str());
    const shadow &memory = in_shared ? shared_shadow : global_shadow;
    size_t offset = (size_t)(c - (in_shared ? shared.base : arena_base()));
    if (profiling && kind != COPIED)
        profile_access(p, offset, size, kind, in_shared, site);
    if (!states_allow(memory.states + offset, p, size, kind, site, in_shared))
        return;
    tag b = {now.block,    now.releases, 1u << current->warp, program_offset(site), current->warp_syncs, (int16_t)current->number,
             (uint8_t)kind};
    check_races(memory, offset, size, b, in_shared);
}

void misaligned(const void *, int) {}
} // namespace cusim

/* ---- what gcc calls ---- */
using cusim::note;

#define CUSIM_ACCESS(size)                                                                                                       \
    void __tsan_read##size(void *p)                                                                                              \
    {                                                                                                                            \
        note(p, size, cusim::READ, CUSIM_HERE);                                                                                  \
    }                                                                                                                            \
    void __tsan_write##size(void *p)                                                                                             \
    {                                                                                                                            \
        note(p, size, cusim::WRITE, CUSIM_HERE);                                                                                 \
    }                                                                                                                            \
    void __tsan_unaligned_read##size(void *p)                                                                                    \
    {                                                                                                                            \
        note(p, size, cusim::READ, CUSIM_HERE);                                                                                  \
    }                                                                                                                            \
    void __tsan_unaligned_write##size(void *p)                                                                                   \
    {                                                                                                                            \
        note(p, size, cusim::WRITE, CUSIM_HERE);                                                                                 \
    }

extern "C" {
CUSIM_ACCESS(1)
CUSIM_ACCESS(2)
CUSIM_ACCESS(4)
CUSIM_ACCESS(8)
CUSIM_ACCESS(16)

void __tsan_read_range(void *p, unsigned long size)
{
    note(p, (int)size, cusim::READ, CUSIM_HERE);
}
void __tsan_write_range(void *p, unsigned long size)
{
    note(p, (int)size, cusim::WRITE, CUSIM_HERE);
}
void __tsan_init(void) {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit(void) {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}

/* Host code in kernel sources (static initialization, shared_ptr) uses these. */
#define CUSIM_HOST_ATOMICS(bits, type)                                                                                           \
    type __tsan_atomic##bits##_load(const volatile type *p, int)                                                                 \
    {                                                                                                                            \
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                                             \
    }                                                                                                                            \
    void __tsan_atomic##bits##_store(volatile type *p, type v, int)                                                              \
    {                                                                                                                            \
        __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                                                \
    }                                                                                                                            \
    type __tsan_atomic##bits##_exchange(volatile type *p, type v, int)                                                           \
    {                                                                                                                            \
        return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                                                      \
    }                                                                                                                            \
    type __tsan_atomic##bits##_fetch_add(volatile type *p, type v, int)                                                          \
    {                                                                                                                            \
        return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                                                       \
    }                                                                                                                            \
    type __tsan_atomic##bits##_fetch_sub(volatile type *p, type v, int)                                                          \
    {                                                                                                                            \
        return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST);                                                                       \
    }
CUSIM_HOST_ATOMICS(8, char)
CUSIM_HOST_ATOMICS(32, int)
CUSIM_HOST_ATOMICS(64, long)
}
#endif
