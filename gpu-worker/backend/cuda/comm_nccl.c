/* Collectives between GPUs by NCCL: comm.h's table on device memory, queued on the backend's stream. The library is loaded when a
 * group is opened, so that a backend without one needs none. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/backend/cuda/comm_nccl.h"

#if __has_include(<nccl.h>)
#include <nccl.h>

struct nccl {
    ncclResult_t (*get_unique_id)(ncclUniqueId *id);
    ncclResult_t (*comm_init_rank)(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank);
    ncclResult_t (*comm_destroy)(ncclComm_t comm);
    ncclResult_t (*all_reduce)(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream);
    ncclResult_t (*all_gather)(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                               cudaStream_t stream);
    const char *(*error_string)(ncclResult_t result);
};

struct comm_nccl {
    struct comm base;
    struct nccl nccl;
    ncclComm_t comm;
    cudaStream_t stream;
    float *parts; /* device: [ranks][room] what all_gather brings */
    size_t room;
};

/* ---- the library ------------------------------------------------------------------------------------------------------- */

#ifdef CUSIM
static int load_library(struct nccl *out, struct kvg_error *err)
{
    *out = (struct nccl){ncclGetUniqueId, ncclCommInitRank, ncclCommDestroy, ncclAllReduce, ncclAllGather, ncclGetErrorString};
    return 0;
}
#else
static int load_library(struct nccl *out, struct kvg_error *err)
{
    static const char *const names[] = {"ncclGetUniqueId", "ncclCommInitRank", "ncclCommDestroy",
                                        "ncclAllReduce",   "ncclAllGather",    "ncclGetErrorString"};
    void *symbols[sizeof names / sizeof *names];
    void *object = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL); /* stays for the life of the process, as the backend does */
    if (!object)
        return kvg_fail(err, KVG_UNSUPPORTED, "cuda: --tensor-parallel-size needs NCCL: %s", dlerror());
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(symbols[i] = dlsym(object, names[i])))
            return kvg_fail(err, KVG_UNSUPPORTED, "cuda: libnccl.so.2 has no %s", names[i]);
    _Static_assert(sizeof *out == sizeof symbols, "one function a name");
    memcpy(out, symbols, sizeof *out);
    return 0;
}
#endif

/* ---- the table --------------------------------------------------------------------------------------------------------- */

static struct comm_nccl *nccl_of(struct comm *comm)
{
    return (struct comm_nccl *)comm;
}

static int nccl_failed(const struct comm_nccl *c, ncclResult_t result, const char *call, size_t n, struct kvg_error *err)
{
    if (result == ncclSuccess)
        return 0;
    return kvg_fail(err, KVG_UNSUPPORTED, "cuda: %s of %zu numbers on rank %u of %u: %s", call, n, c->base.rank, c->base.size,
                    c->nccl.error_string(result));
}

static int nccl_all_reduce(struct comm *comm, float *data, size_t n, struct kvg_error *err)
{
    struct comm_nccl *c = nccl_of(comm);
    return nccl_failed(c, c->nccl.all_reduce(data, data, n, ncclFloat32, ncclSum, c->comm, c->stream), "ncclAllReduce", n, err);
}

/* All parts have room for the widest; rank 0 then takes each rank's columns out. */
static int nccl_gather(struct comm *comm, const float *part, float *out, size_t rows, uint32_t cols, struct kvg_error *err)
{
    struct comm_nccl *c = nccl_of(comm);
    size_t n = rows * ((cols + comm->size - 1) / comm->size);
    float *mine = c->parts + comm->rank * n;
    uint32_t first, width;
    if (n > c->room)
        return kvg_fail(err, KVG_INVALID, "cuda: gathering parts of %zu numbers, there is room for %zu", n, c->room);
    comm_share(cols, 1, comm->size, comm->rank, &first, &width);
    int failed = cuda_failed(cudaMemcpyAsync(mine, part, rows * width * sizeof *part, cudaMemcpyDeviceToDevice, c->stream), err,
                             "a part of the logits");
    if (failed || (failed = nccl_failed(c, c->nccl.all_gather(mine, c->parts, n, ncclFloat32, c->comm, c->stream),
                                        "ncclAllGather", n, err)))
        return failed;
    for (uint32_t r = 0; r < comm->size && comm->rank == 0 && !failed; r++) {
        comm_share(cols, 1, comm->size, r, &first, &width);
        failed = cuda_failed(cudaMemcpy2DAsync(out + first, cols * sizeof *out, c->parts + r * n, width * sizeof *out,
                                               width * sizeof *out, rows, cudaMemcpyDeviceToDevice, c->stream),
                             err, "logits side by side");
    }
    return failed;
}

static void nccl_close(struct comm *comm)
{
    struct comm_nccl *c = nccl_of(comm);
    if (c->comm)
        c->nccl.comm_destroy(c->comm);
    cudaFree(c->parts);
    free(c);
}

static const struct comm_ops nccl_ops = {.all_reduce = nccl_all_reduce, .gather = nccl_gather, .close = nccl_close};

/* ---- life -------------------------------------------------------------------------------------------------------------- */

static int join(struct comm_nccl *c, struct comm *host, struct kvg_error *err)
{
    ncclUniqueId id = {0};
    int failed = host->rank ? 0 : nccl_failed(c, c->nccl.get_unique_id(&id), "ncclGetUniqueId", 0, err);
    if ((failed = comm_agree(host, failed, err)) || (failed = host->ops->broadcast(host, &id, sizeof id, err)))
        return failed;
    return nccl_failed(c, c->nccl.comm_init_rank(&c->comm, (int)host->size, id, (int)host->rank), "ncclCommInitRank", 0, err);
}

int comm_nccl_open(struct comm **out, struct comm *host, cudaStream_t stream, struct kvg_error *err)
{
    struct comm_nccl *c = calloc(1, sizeof *c);
    int failed = c ? load_library(&c->nccl, err) : kvg_fail(err, KVG_NOMEM, "no memory for a group");
    if ((failed = comm_agree(host, failed, err))) {
        free(c);
        return failed;
    }
    c->base = (struct comm){.ops = &nccl_ops, .rank = host->rank, .size = host->size};
    c->stream = stream;
    if ((failed = comm_agree(host, join(c, host, err), err))) {
        nccl_close(&c->base);
        return failed;
    }
    *out = &c->base;
    return 0;
}

int comm_nccl_reserve(struct comm *comm, size_t part, struct kvg_error *err)
{
    struct comm_nccl *c = nccl_of(comm);
    size_t bytes = comm->size * part * sizeof *c->parts;
    int failed = cuda_alloc((void **)&c->parts, bytes, "gathered logits", err);
    if (failed)
        return failed;
    c->room = part;
    return cuda_failed(cudaMemset(c->parts, 0, bytes), err, "clearing gathered logits"); /* the ends of narrow parts are sent */
}

#else

int comm_nccl_open(struct comm **out, struct comm *host, cudaStream_t stream, struct kvg_error *err)
{
    return comm_agree(host, kvg_fail(err, KVG_UNSUPPORTED, "cuda: built without NCCL, which --tensor-parallel-size needs"), err);
}

int comm_nccl_reserve(struct comm *comm, size_t part, struct kvg_error *err)
{
    return KVG_UNSUPPORTED;
}

#endif
