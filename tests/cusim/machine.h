/* The emulated device, as its own files see it.
 *
 *   runtime.cpp, stream.cpp   the CUDA API: queues of work, run when something waits for them
 *   block.cpp                 runs a launch: blocks one after another, threads as fibers; barriers, warp operations
 *   shared.cpp                a block's shared memory, cp.async
 *   arena.cpp                 device memory: allocation, poison, red zones, the lock against host code
 *   memcheck.cpp, profile.cpp what each access of a CHECK build means
 *   report.cpp                messages with kernel, block, thread and source line
 *
 * One lock (machine_lock) covers everything: kernels run on the host thread that waits for them.
 */
#pragma once
#include <functional>
#include <mutex>
#include <string>
#include <vector>
#include "tests/cusim/control.h"
#include "tests/cusim/cusim.h"

#if defined(__SANITIZE_ADDRESS__)
#define CUSIM_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define CUSIM_ASAN                           0
#define ASAN_POISON_MEMORY_REGION(p, size)   ((void)(p), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(p, size) ((void)(p), (void)(size))
#endif

namespace cusim
{
enum { MAX_THREADS = 1024, MAX_WARPS = 32, MAX_BARRIERS = 16, RED_ZONE = 256 };
constexpr size_t STATIC_SHARED_MAX = 48 << 10;

enum thread_state { RUNNABLE, AT_BARRIER, IN_WARP_OP, EXITED };

struct async_copy {
    void *smem;
    const void *gmem;
    int size;
    bool pred;
    const void *site;
};

/* One thread of the block that runs. */
struct thread {
    uint3 index;
    int number, lane, warp;
    thread_state state;
    const void *site; /* of the barrier or warp operation it waits in */
    int barrier;
    warp_op op;
    unsigned mask;
    const void *in;
    void *out;
    uint32_t warp_syncs; /* grows at each __syncwarp it takes part in */
    bool waited;         /* grid_wait was called, or the launch is an ordinary one */
    std::vector<async_copy> open;
    std::vector<std::vector<async_copy>> groups; /* committed, oldest first */

    void *stack_pointer;
    char *stack;
    void *asan_stack;
};

/* The launch that runs, one block of it at a time. */
struct running {
    const launch *what;          /* NULL: host code runs */
    uint32_t first_block, block; /* numbers over the whole run; launch.first_block..  */
    uint32_t ordered_after;      /* accesses of blocks before this one are done for threads that have not called grid_wait */
    int threads, live;
    uint32_t releases;                    /* of barriers in this block: the clock of memcheck */
    uint32_t known[MAX_WARPS][MAX_WARPS]; /* [w][v]: clock when w last learned, through barriers, what v had done */
};

extern running now;
extern thread *current;
extern thread threads[MAX_THREADS];
extern std::recursive_mutex machine_lock;

/* ---- fiber.cpp: a thread's own stack ---- */
void fiber_prepare(thread *t, void (*entry)());
void fiber_run(thread *t); /* until it calls fiber_leave */
void fiber_leave(bool for_good);

/* ---- block.cpp ---- */
void run_launch(const launch &l);

/* ---- shared.cpp ---- */
struct shared_info {
    char *base;
    size_t size;
};
shared_info shared_memory();
void shared_begin_block(size_t dynamic);
void shared_end_block();
void async_finish(thread *t); /* lands what is in flight */

/* ---- arena.cpp ---- */
struct allocation {
    char *base;
    size_t size;
    bool live;
};
void machine_init();
bool in_arena(const void *p);
size_t arena_size();
char *arena_base();
const allocation *allocation_near(const void *p); /* the last one that starts at or before p; NULL: none */
bool is_device(const void *p, size_t size);       /* one live allocation covers it */
bool is_pinned(const void *p, size_t size);
void arena_check_red_zones();
void give_back(void *p, size_t size); /* the whole pages of a range */

/* Device memory is readable for this process only while one of these lives. */
struct device_access {
    device_access();
    ~device_access();
};

/* ---- memcheck.cpp; no-ops in other builds ---- */
extern const bool checking;
void memory_allocated(const void *p, size_t size);
void memory_freed(const void *p, size_t size);
void memory_forgotten(const void *p, size_t size);                 /* outside of every allocation again */
void memory_written(const void *p, size_t size);                   /* by a copy or a library */
void memory_copied(const void *to, const void *from, size_t size); /* padding may be unwritten, all of it may not */
void memory_read(const void *p, size_t size, const char *reader);  /* reports what was never written */
void memcheck_shared_reset(size_t used);
void memcheck_shared_allocated(const void *p, size_t size);

/* ---- profile.cpp ---- */
extern bool profiling;
void profile_access(const void *p, size_t offset, int size, access kind, bool shared, const void *site);
void profile_end_block();
void profile_write();

/* ---- report.cpp ---- */
void report(const char *format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void fatal(const char *format, ...) __attribute__((format(printf, 1, 2)));
uint32_t program_offset(const void *site); /* of code and constants in the object that holds the kernels */
const void *program_site(uint32_t offset);
bool in_program(const void *p);
bool first_time(const void *site, const void *other, int what); /* one report for each pair of places */
std::string where(const void *site);                            /* "file.cu:12" of the call that returns to site */
void resolve_all(const std::vector<const void *> &sites);       /* all at once, for tables */

/* ---- stream.cpp: for the stand-ins of libraries ---- */
bool capturing();
void push(cudaStream_t stream, std::function<void()> work);
void drain_all();
unsigned env_number(const char *name, unsigned otherwise);
size_t shared_opt_in(); /* bytes of shared memory that a block may ask for */
} // namespace cusim
