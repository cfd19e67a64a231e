/* Stands in for NCCL: one process a rank, over a segment of shared memory. Ranks that call different collectives, sizes or types,
 * and ranks that wait for one that never comes, are reported. Sums run in the order of ranks, in f32.
 */
#include <fcntl.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "tests/cusim/machine.h"

namespace
{
enum { MAX_RANKS = 8 };
enum kind { ALL_REDUCE, ALL_GATHER, BROADCAST };
const size_t SLOT = 1 << 20; /* bytes a rank shows at once */

struct call {
    int kind, type, root;
    size_t count;
};
struct segment {
    int arrived, generation;
    call calls[MAX_RANKS];
    char data[MAX_RANKS][SLOT];
};
} // namespace

struct ncclComm {
    int rank, ranks;
    segment *shared;
};

namespace
{
size_t size_of(ncclDataType_t type)
{
    switch (type) {
    case ncclInt8:
    case ncclUint8:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
        return 8;
    default:
        return 4;
    }
}

double get(const char *p, ncclDataType_t type, size_t i)
{
    switch (type) {
    case ncclFloat16:
        return __half2float(reinterpret_cast<const __half *>(p)[i]);
    case ncclBfloat16:
        return __bfloat162float(reinterpret_cast<const __nv_bfloat16 *>(p)[i]);
    case ncclInt32:
        return reinterpret_cast<const int32_t *>(p)[i];
    default:
        return reinterpret_cast<const float *>(p)[i];
    }
}

void put(char *p, ncclDataType_t type, size_t i, double v)
{
    switch (type) {
    case ncclFloat16:
        reinterpret_cast<__half *>(p)[i] = __float2half((float)v);
        break;
    case ncclBfloat16:
        reinterpret_cast<__nv_bfloat16 *>(p)[i] = __float2bfloat16((float)v);
        break;
    case ncclInt32:
        reinterpret_cast<int32_t *>(p)[i] = (int32_t)v;
        break;
    default:
        reinterpret_cast<float *>(p)[i] = (float)v;
    }
}

/* Waits for all ranks; CUSIM_PATIENCE (20000) sleeps of 1 ms, which do not pass while the process is stopped. */
void meet(ncclComm *c, const char *where_in)
{
    segment *s = c->shared;
    int generation = __atomic_load_n(&s->generation, __ATOMIC_SEQ_CST);
    if (__atomic_add_fetch(&s->arrived, 1, __ATOMIC_SEQ_CST) == c->ranks) {
        __atomic_store_n(&s->arrived, 0, __ATOMIC_SEQ_CST);
        __atomic_add_fetch(&s->generation, 1, __ATOMIC_SEQ_CST);
        return;
    }
    unsigned patience = cusim::env_number("CUSIM_PATIENCE", 20000);
    for (unsigned slept = 0; __atomic_load_n(&s->generation, __ATOMIC_SEQ_CST) == generation; slept++) {
        if (slept > patience)
            cusim::fatal("nccl: rank %d waits in %s for a rank that does not come", c->rank, where_in);
        timespec ms = {0, 1000000};
        nanosleep(&ms, nullptr);
    }
}

const char *name_of(int kind)
{
    static const char *const names[] = {"ncclAllReduce", "ncclAllGather", "ncclBroadcast"};
    return names[kind];
}

void compare(const ncclComm *c, const call &mine)
{
    for (int r = 0; r < c->ranks; r++) {
        const call &other = c->shared->calls[r];
        if (other.kind != mine.kind || other.count != mine.count || other.type != mine.type || other.root != mine.root)
            cusim::fatal("nccl: rank %d calls %s of %zu elements of type %d, rank %d %s of %zu of type %d", c->rank,
                         name_of(mine.kind), mine.count, mine.type, r, name_of(other.kind), other.count, other.type);
    }
}

void combine(const ncclComm *c, const call &mine, char *to, size_t from, size_t n)
{
    ncclDataType_t type = (ncclDataType_t)mine.type;
    size_t size = size_of(type);
    if (mine.kind == ALL_GATHER)
        for (int r = 0; r < c->ranks; r++)
            memcpy(to + ((size_t)r * mine.count + from) * size, c->shared->data[r], n * size);
    if (mine.kind == BROADCAST)
        memcpy(to + from * size, c->shared->data[mine.root], n * size);
    for (size_t i = 0; i < n && mine.kind == ALL_REDUCE; i++) {
        double sum = 0;
        for (int r = 0; r < c->ranks; r++)
            sum = (float)(sum + get(c->shared->data[r], type, i));
        put(to, type, from + i, sum);
    }
}

/* A slot at a time: all show theirs, all take what they need. */
void collective(ncclComm *c, const call &mine, const void *from, void *to)
{
    cusim::device_access access;
    size_t size = size_of((ncclDataType_t)mine.type), most = SLOT / size;
    bool gives = mine.kind != BROADCAST || c->rank == mine.root;
    if (gives)
        cusim::memory_read(from, mine.count * size, name_of(mine.kind));
    for (size_t at = 0; at == 0 || at < mine.count; at += most) {
        size_t n = mine.count - at < most ? mine.count - at : most;
        c->shared->calls[c->rank] = mine;
        if (gives)
            memcpy(c->shared->data[c->rank], static_cast<const char *>(from) + at * size, n * size);
        meet(c, name_of(mine.kind));
        compare(c, mine);
        combine(c, mine, static_cast<char *>(to), at, n);
        meet(c, name_of(mine.kind));
    }
    cusim::memory_written(to, mine.count * size * (mine.kind == ALL_GATHER ? (size_t)c->ranks : 1));
}

ncclResult_t enqueue(ncclComm *c, const call &mine, const void *from, void *to, cudaStream_t stream)
{
    size_t bytes = mine.count * size_of((ncclDataType_t)mine.type);
    size_t result = bytes * (mine.kind == ALL_GATHER ? (size_t)c->ranks : 1);
    if (!cusim::is_device(to, result) || !cusim::is_device(from, bytes)) {
        cusim::report("%s of %zu elements: a buffer is no device memory, or too short", name_of(mine.kind), mine.count);
        return ncclInvalidArgument;
    }
    cusim::push(stream, [=] { collective(c, mine, from, to); });
    return ncclSuccess;
}
} // namespace

extern "C" {
ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    static int count;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/cusim-nccl-%d-%d", (int)getpid(), count++);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *out, int ranks, ncclUniqueId id, int rank)
{
    int devices;
    if (cudaGetDeviceCount(&devices) != cudaSuccess)
        return ncclUnhandledCudaError;
    if (ranks < 1 || ranks > MAX_RANKS || rank < 0 || rank >= ranks)
        return ncclInvalidArgument;
    int fd = shm_open(id.internal, O_CREAT | O_RDWR, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(segment)) != 0)
        return ncclSystemError;
    void *p = mmap(nullptr, sizeof(segment), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (p == MAP_FAILED)
        return ncclSystemError;
    *out = new ncclComm{rank, ranks, static_cast<segment *>(p)};
    meet(*out, "ncclCommInitRank");
    shm_unlink(id.internal);
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t c)
{
    cusim::drain_all();
    munmap(c->shared, sizeof(segment));
    delete c;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t c, int *ranks)
{
    *ranks = c->ranks;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t c, int *rank)
{
    *rank = c->rank;
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t c,
                           cudaStream_t stream)
{
    bool known = type == ncclFloat16 || type == ncclBfloat16 || type == ncclInt32 || type == ncclFloat32;
    if (op != ncclSum || !known)
        return ncclInvalidArgument;
    return enqueue(c, {ALL_REDUCE, type, 0, count}, from, to, stream);
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t c, cudaStream_t stream)
{
    return enqueue(c, {ALL_GATHER, type, 0, count}, from, to, stream);
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t c,
                           cudaStream_t stream)
{
    if (root < 0 || root >= c->ranks)
        return ncclInvalidArgument;
    return enqueue(c, {BROADCAST, type, root, count}, from, to, stream);
}

ncclResult_t ncclGroupStart(void)
{
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t r)
{
    return r == ncclSuccess ? "no error" : r == ncclInvalidArgument ? "invalid argument" : "emulated error";
}
}
