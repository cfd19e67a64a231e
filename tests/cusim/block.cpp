/* Runs a launch: blocks one after another, each block's threads as fibers in a chosen order. Barriers and warp operations are
 * where a fiber waits; the last to arrive releases the others. Whatever a GPU would hang or diverge on is reported with the state
 * of the threads.
 */
#include "tests/cusim/machine.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <unistd.h>
#include <algorithm>
#include <numeric>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace cusim
{
running now;
std::recursive_mutex machine_lock;

static unsigned arrived[MAX_WARPS], alive[MAX_WARPS]; /* lanes in a warp operation; lanes that have not exited */
static int waiting[MAX_BARRIERS], expected[MAX_BARRIERS];
static int votes;
static int vote_threads, vote_trues; /* of the last barrier that counted */
static uint32_t block_count;
static unsigned long launch_count;
static uint32_t previous_ordered_after = 1;

enum order { FORWARD, REVERSE, RANDOM };
static order how = FORWARD;
static unsigned order_seed;

int lane_index()
{
    return current->lane;
}

void grid_wait()
{
    current->waited = true;
}

/* ---- barriers ---- */

/* What every thread in the barrier did before is known to each of them after it. */
static void learn(int id)
{
    bool in[MAX_WARPS] = {};
    for (int i = 0; i < now.threads; i++)
        if (threads[i].state == AT_BARRIER && threads[i].barrier == id)
            in[threads[i].warp] = true;
    uint32_t joined[MAX_WARPS] = {};
    now.releases++;
    for (int w = 0; w < MAX_WARPS; w++)
        for (int v = 0; v < MAX_WARPS && in[w]; v++)
            joined[v] = std::max(joined[v], in[v] ? now.releases : now.known[w][v]);
    for (int w = 0; w < MAX_WARPS; w++)
        if (in[w])
            std::copy(joined, joined + MAX_WARPS, now.known[w]);
}

/* The compiler may have copied the call onto several paths: places are compared by source line. */
static void report_divergence(int id)
{
    for (int i = 1; i < now.threads; i++) {
        const thread &a = threads[i - 1], &b = threads[i];
        if (a.warp != b.warp || a.state != AT_BARRIER || b.state != AT_BARRIER || a.barrier != id || b.barrier != id ||
            a.site == b.site)
            continue;
        if (first_time(a.site, b.site, 1) && where(a.site) != where(b.site))
            report("divergent barrier: lanes %d and %d of warp %d wait at %s and at %s", a.lane, b.lane, a.warp,
                   where(a.site).c_str(), where(b.site).c_str());
    }
}

static void release(int id)
{
    report_divergence(id);
    learn(id);
    waiting[id] = expected[id] = 0;
    if (id == 0)
        vote_threads = now.live, vote_trues = votes, votes = 0;
    for (int i = 0; i < now.threads; i++)
        if (threads[i].state == AT_BARRIER && threads[i].barrier == id)
            threads[i].state = RUNNABLE;
}

/* Barrier 0 with all threads waits only for those that have not exited. */
static void release_if_complete(int id)
{
    if (waiting[id] && waiting[id] == (expected[id] > 0 ? expected[id] : now.live))
        release(id);
}

void barrier(int id, int count, const void *site)
{
    if (id < 0 || id >= MAX_BARRIERS)
        fatal("barrier %d: there are %d", id, MAX_BARRIERS);
    if (count > 0 && (count % 32 || count > now.threads) && first_time(site, nullptr, 2))
        report("barrier %d of %d threads: not a multiple of 32, or more than the block's %d, at %s", id, count, now.threads,
               where(site).c_str());
    if (waiting[id] && expected[id] != count && first_time(site, nullptr, 3))
        report("barrier %d: threads expect %d and %d others, at %s", id, expected[id], count, where(site).c_str());
    current->state = AT_BARRIER;
    current->barrier = id;
    current->site = site;
    expected[id] = count;
    waiting[id]++;
    release_if_complete(id);
    if (current->state != RUNNABLE)
        fiber_leave(false);
}

int barrier_vote(int predicate, int *trues, const void *site)
{
    votes += predicate != 0;
    barrier(0, 0, site);
    *trues = vote_trues;
    return vote_threads;
}

/* ---- warp operations ---- */

static const char *name_of(warp_op op)
{
    static const char *const names[] = {"__syncwarp",      "vote",         "__shfl_sync",   "__shfl_up_sync", "__shfl_down_sync",
                                        "__shfl_xor_sync", "__match_sync", "__reduce_sync", "mma bf16",       "mma f16",
                                        "mma s8",          "ldmatrix"};
    return names[op];
}

/* Lanes that can never arrive are reported and left out, so that the others go on. */
static unsigned reachable(unsigned mask, warp_op op, const void *site)
{
    thread *me = current;
    if (!(mask >> me->lane & 1) && first_time(site, nullptr, 4))
        report("%s: calling lane %d is not in the mask %08x, at %s", name_of(op), me->lane, mask, where(site).c_str());
    unsigned gone = mask & ~alive[me->warp];
    if (gone && first_time(site, nullptr, 5))
        report("%s: the mask %08x names lanes %08x, which do not exist or have exited, at %s", name_of(op), mask, gone,
               where(site).c_str());
    return (mask & ~gone) | 1u << me->lane;
}

/* Lanes that meet must have made the same call. The compiler may have copied it onto several paths: source lines count. */
static bool alike(const thread *a, const thread *b)
{
    return a->op == b->op && a->mask == b->mask && (a->site == b->site || where(a->site) == where(b->site));
}

static void report_mismatch(const thread *a, const thread *b)
{
    if (first_time(a->site, b->site, 6))
        report("lanes %d and %d of warp %d meet in different calls: %s with mask %08x at %s, %s with mask %08x at %s", a->lane,
               b->lane, a->warp, name_of(a->op), a->mask, where(a->site).c_str(), name_of(b->op), b->mask,
               where(b->site).c_str());
}

static void complete(unsigned mask, warp_fn fn)
{
    thread *warp = threads + current->warp * 32;
    const void *ins[32] = {};
    void *outs[32] = {};
    bool all_alike = true;
    uint32_t syncs = 0;
    for (unsigned rest = mask; rest; rest &= rest - 1) {
        thread *t = warp + __builtin_ctz(rest);
        if (!alike(current, t))
            report_mismatch(current, t), all_alike = false;
        ins[t->lane] = t->in;
        outs[t->lane] = t->out;
        syncs = std::max(syncs, t->warp_syncs + 1);
    }
    arrived[current->warp] &= ~mask;
    if (fn && all_alike)
        fn(mask, ins, outs);
    for (unsigned rest = mask; rest; rest &= rest - 1) {
        thread *t = warp + __builtin_ctz(rest);
        t->state = RUNNABLE;
        if (current->op == SYNCWARP)
            t->warp_syncs = syncs;
    }
}

void warp_call(unsigned mask, warp_op op, const void *in, void *out, warp_fn fn, const void *site)
{
    thread *me = current;
    me->in = in, me->out = out, me->op = op, me->mask = mask, me->site = site;
    if (op >= MMA_BF16 && alive[me->warp] != 0xffffffffu)
        fatal("%s needs the 32 lanes of the warp, %08x are alive, at %s", name_of(op), alive[me->warp], where(site).c_str());
    unsigned needed = reachable(mask, op, site);
    me->state = IN_WARP_OP;
    arrived[me->warp] |= 1u << me->lane;
    if ((arrived[me->warp] & needed) == needed)
        complete(needed, fn);
    else
        fiber_leave(false);
}

/* ---- the block ---- */

static void thread_main()
{
    now.what->call(now.what->args.get());
    thread *me = current;
    async_finish(me);
    me->state = EXITED;
    alive[me->warp] &= ~(1u << me->lane);
    now.live--;
    for (int id = 0; id < MAX_BARRIERS; id++)
        release_if_complete(id);
}

static void start_threads()
{
    int n = 0;
    std::fill(arrived, arrived + MAX_WARPS, 0);
    std::fill(alive, alive + MAX_WARPS, 0);
    for (unsigned z = 0; z < blockDim.z; z++)
        for (unsigned y = 0; y < blockDim.y; y++)
            for (unsigned x = 0; x < blockDim.x; x++, n++) {
                thread *t = threads + n;
                t->index = {x, y, z};
                t->number = n, t->lane = n % 32, t->warp = n / 32;
                t->state = RUNNABLE;
                t->warp_syncs = 0;
                t->waited = !now.what->early;
                t->open.clear();
                t->groups.clear();
                alive[t->warp] |= 1u << t->lane;
                fiber_prepare(t, thread_main);
            }
    now.live = n;
}

static void report_deadlock()
{
    std::string state;
    int shown = 0;
    for (int i = 0; i < now.threads && shown < 6; i++) {
        const thread &t = threads[i];
        bool same_as_previous = i && threads[i - 1].state == t.state && threads[i - 1].site == t.site;
        if (t.state == EXITED || same_as_previous)
            continue;
        char line[160];
        if (t.state == AT_BARRIER)
            snprintf(line, sizeof line, "\n    thread %d.. waits at barrier %d (%d of %d threads came) at ", i, t.barrier,
                     waiting[t.barrier], expected[t.barrier] > 0 ? expected[t.barrier] : now.live);
        else
            snprintf(line, sizeof line, "\n    thread %d.. waits in %s with mask %08x (lanes %08x came) at ", i, name_of(t.op),
                     t.mask, arrived[t.warp]);
        state += line + where(t.site);
        shown++;
    }
    fatal("deadlock: none of %d live threads can go on%s", now.live, state.c_str());
}

static unsigned next_random()
{
    order_seed = order_seed * 1664525u + 1013904223u;
    return order_seed >> 8;
}

static void arrange(std::vector<int> &ids)
{
    if (how == REVERSE)
        std::reverse(ids.begin(), ids.end());
    else if (how == RANDOM)
        for (size_t i = ids.size(); i > 1; i--)
            std::swap(ids[i - 1], ids[next_random() % i]);
}

static std::vector<int> arranged(int n)
{
    std::vector<int> ids(n);
    std::iota(ids.begin(), ids.end(), 0);
    arrange(ids);
    return ids;
}

/* Runs each lane of a warp to its next wait, again and again, until all wait for other warps. */
static bool run_warp(int warp, const std::vector<int> &lanes)
{
    bool any = false;
    for (bool again = true; again;) {
        again = false;
        for (int lane : lanes) {
            int i = warp * 32 + lane;
            if (i >= now.threads || threads[i].state != RUNNABLE)
                continue;
            fiber_run(threads + i);
            again = any = true;
        }
    }
    return any;
}

static void run_block()
{
    now.block = ++block_count;
    now.releases = 1;
    memset(now.known, 0, sizeof now.known);
    std::fill(waiting, waiting + MAX_BARRIERS, 0);
    std::fill(expected, expected + MAX_BARRIERS, 0);
    votes = 0;
    shared_begin_block(now.what->dynamic_smem);
    start_threads();
    std::vector<int> warps = arranged((now.threads + 31) / 32), lanes = arranged(32);
    while (now.live) {
        bool progress = false;
        if (how == RANDOM)
            arrange(warps), arrange(lanes);
        for (int warp : warps)
            progress |= run_warp(warp, lanes);
        if (!progress)
            report_deadlock();
    }
    shared_end_block();
    profile_end_block();
}

/* ---- the launch ---- */

static void on_timeout(int)
{
    char text[256];
    const char *name = now.what ? now.what->name : "-";
    int n = snprintf(text, sizeof text, "cusim: kernel %s, block (%u,%u,%u), thread (%u,%u,%u) has run for too long\n", name,
                     blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
    if (write(2, text, (size_t)n) >= 0)
        _exit(CUSIM_EXIT);
    _exit(CUSIM_EXIT);
}

/* A kernel that waits for another block would wait for ever: it gets CUSIM_SECONDS (120) of this process's time. */
static void watch(unsigned seconds)
{
    itimerval limit = {};
    limit.it_value.tv_sec = seconds;
    signal(SIGVTALRM, on_timeout);
    setitimer(ITIMER_VIRTUAL, &limit, nullptr);
}

void run_launch(const launch &l)
{
    device_access access;
    now.what = &l;
    now.threads = (int)(l.block.x * l.block.y * l.block.z);
    now.first_block = block_count + 1;
    now.ordered_after = l.early ? previous_ordered_after : now.first_block;
    previous_ordered_after = now.ordered_after;
    gridDim = l.grid;
    blockDim = l.block;
    launch_count++;
    watch(env_number("CUSIM_SECONDS", 120));
    int n = (int)(l.grid.x * l.grid.y * l.grid.z);
    for (int i : arranged(n)) {
        unsigned u = (unsigned)i;
        blockIdx = {u % l.grid.x, u / l.grid.x % l.grid.y, u / l.grid.x / l.grid.y};
        run_block();
    }
    watch(0);
    arena_check_red_zones();
    now.what = nullptr;
    current = nullptr;
}

static void set_order(const char *text)
{
    how = strcmp(text, "rev") == 0 ? REVERSE : strncmp(text, "rand", 4) == 0 ? RANDOM : FORWARD;
    order_seed = how == RANDOM ? (unsigned)atoi(text + 4) : 0;
}
} // namespace cusim

void cusim_set_order(const char *order)
{
    cusim::set_order(order);
}

unsigned long cusim_launches(void)
{
    cusim::drain_all();
    return cusim::launch_count;
}
