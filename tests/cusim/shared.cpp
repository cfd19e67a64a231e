/* A block's shared memory: NaN at the block's start, arrays apart by red zones; cp.async, whose bytes land at the wait. */
#include "tests/cusim/machine.h"
#include <stdlib.h>
#include <map>

namespace cusim
{
/* All of it, for any architecture; whether a launch may have that much is checked where it is enqueued. */
static const size_t SHARED_SIZE = 256 << 10, GAP = 64;
static const int POISON = 0xff;

struct array {
    size_t offset, size;
};
static char *shared;
static std::map<const void *, array> arrays; /* of this block, by the key of its declaration */
static size_t used, static_bytes, dynamic_bytes;

shared_info shared_memory()
{
    return {shared, SHARED_SIZE};
}

static size_t round_up(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}

void shared_begin_block(size_t dynamic)
{
    if (!shared)
        shared = static_cast<char *>(aligned_alloc(1024, SHARED_SIZE));
    size_t dirty = used ? used : SHARED_SIZE; /* what the block before may have written, with its red zones */
    ASAN_UNPOISON_MEMORY_REGION(shared, SHARED_SIZE);
    memset(shared, POISON, dirty < SHARED_SIZE ? dirty : SHARED_SIZE);
    memcheck_shared_reset(dirty);
    arrays.clear();
    static_bytes = 0;
    dynamic_bytes = dynamic;
    used = round_up(dynamic, 16) + GAP;
    ASAN_POISON_MEMORY_REGION(shared + dynamic, SHARED_SIZE - dynamic);
    memcheck_shared_allocated(shared, dynamic);
}

void *dynamic_shared()
{
    if (!dynamic_bytes)
        fatal("dynamic shared memory is used, but the launch asks for 0 bytes");
    return shared;
}

void *static_shared(const void *key, size_t size)
{
    auto found = arrays.find(key);
    if (found != arrays.end())
        return shared + found->second.offset;
    static_bytes += size;
    if (static_bytes > STATIC_SHARED_MAX && first_time(key, nullptr, 10))
        report("%zu bytes of static shared memory: at most %zu compile", static_bytes, STATIC_SHARED_MAX);
    size_t offset = round_up(used, GAP);
    used = offset + size + GAP;
    if (used > SHARED_SIZE)
        fatal("%zu bytes of shared memory do not fit in %zu", used, SHARED_SIZE);
    arrays[key] = {offset, size};
    ASAN_UNPOISON_MEMORY_REGION(shared + offset, size);
    memcheck_shared_allocated(shared + offset, size);
    return shared + offset;
}

/* Without a checker, a write past an array is seen in the gap behind it. */
static void check_gap(size_t from, size_t to, size_t size)
{
    for (size_t i = from; i < to; i++)
        if (static_cast<unsigned char>(shared[i]) != POISON) {
            if (first_time(now.what->kernel, shared + from, 11))
                report("write past the end of a shared array of %zu bytes, at its byte %zu", size, i - (from - size));
            return;
        }
}

void shared_end_block()
{
    if (CUSIM_ASAN || checking)
        return;
    if (dynamic_bytes)
        check_gap(dynamic_bytes, round_up(dynamic_bytes, 16) + GAP, dynamic_bytes);
    for (const auto &a : arrays)
        check_gap(a.second.offset + a.second.size, a.second.offset + a.second.size + GAP - 16, a.second.size);
}

/* ---- cp.async ---- */

void cp_async(void *smem, const void *gmem, int size, bool pred, const void *site)
{
    if (((uintptr_t)smem % size || (pred && (uintptr_t)gmem % size)) && first_time(site, nullptr, 12))
        report("cp.async of %d bytes: addresses %p and %p are not aligned to it, at %s", size, smem, gmem, where(site).c_str());
    note(smem, size, ASYNC, site);
    if (pred)
        note(gmem, size, READ, site);
    current->open.push_back({smem, gmem, size, pred, site});
}

void cp_async_commit()
{
    current->groups.push_back(std::move(current->open));
    current->open.clear();
}

static void land(thread *t, size_t groups)
{
    for (size_t g = 0; g < groups; g++)
        for (const async_copy &c : t->groups[g]) {
            note(c.smem, c.size, COPIED, c.site);
            if (c.pred)
                memcpy(c.smem, c.gmem, (size_t)c.size);
            else
                memset(c.smem, 0, (size_t)c.size);
        }
    t->groups.erase(t->groups.begin(), t->groups.begin() + (long)groups);
}

void cp_async_wait(int groups_left)
{
    size_t have = current->groups.size(), keep = (size_t)groups_left;
    if (have > keep)
        land(current, have - keep);
}

void async_finish(thread *t)
{
    bool never_committed = false;
    for (const async_copy &c : t->open)
        never_committed |= c.pred;
    if (never_committed && first_time(t->open[0].site, nullptr, 13))
        report("cp.async at %s is never committed", where(t->open[0].site).c_str());
    t->groups.push_back(std::move(t->open));
    t->open.clear();
    land(t, t->groups.size());
}
} // namespace cusim
