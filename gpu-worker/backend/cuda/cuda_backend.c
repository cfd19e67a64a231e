/* The CUDA backend: which device, and the table of its operations. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/backend/cuda/comm_nccl.h"
#include "gpu-worker/backend/cuda/sample_host.h"
#include "gpu-worker/backend/cuda_plugin.h"

enum { PARTS_MIN = 1024, COMPUTE_MAJOR_MIN = 8 };

static void cuda_describe(const struct backend *backend, char *out, size_t size)
{
    const struct cuda_backend *cuda = (const struct cuda_backend *)backend;
    snprintf(out, size, "cuda %s%s", cuda->name, cuda->options.deterministic ? ", deterministic" : "");
}

static void cuda_close(struct backend *backend)
{
    struct cuda_backend *cuda = cuda_of(backend);
    if (!cuda)
        return;
    if (cuda->stream)
        cudaStreamSynchronize(cuda->stream);
    cuda_close_graphs(cuda);
    cuda_close_sampling(cuda);
    cuda_close_step(cuda);
    cuda_free_memory(cuda);
    if (cuda->comm)
        cuda->comm->ops->close(cuda->comm);
    if (cuda->stream)
        cudaStreamDestroy(cuda->stream);
    free(cuda->ops);
    free(cuda);
}

static const struct backend_ops cuda_ops = {
    .describe = cuda_describe,
    .close = cuda_close,
    .weight = cuda_weight,
    .activation = cuda_activation,
    .kv_block_bytes = cuda_kv_block_bytes,
    .kv_alloc = cuda_kv_alloc,
    .memory = cuda_memory,
    .begin_step = cuda_begin_step,
    .end_step = cuda_end_step,
    .embed = cuda_embed,
    .rmsnorm = cuda_rmsnorm,
    .matmul = cuda_matmul,
    .angles = cuda_angles,
    .rope_store = cuda_rope_store,
    .attention = cuda_attention,
    .silu_mul = cuda_silu_mul,
    .head_rmsnorm = cuda_head_rmsnorm,
    .scale = cuda_scale,
    .add = cuda_add,
    .gelu_mul = cuda_gelu_mul,
    .gather = cuda_gather,
    .all_reduce = cuda_all_reduce,
    .gather_columns = cuda_gather_columns,
    .sample = cuda_sample,
    .host = cuda_host,
};

/* The first device, or of a group the rank's, if it is new enough. */
static int choose_device(struct cuda_backend *cuda, struct kvg_error *err)
{
    struct cudaDeviceProp properties;
    const struct comm *group = cuda->options.comm;
    int n = 0, device = group ? (int)group->rank : 0;
    cudaError_t error = cudaGetDeviceCount(&n);
    if (error != cudaSuccess || n == 0) {
        cudaGetLastError();
        return kvg_fail(err, KVG_UNSUPPORTED, "cuda: no GPU here: %s", error ? cudaGetErrorString(error) : "no device");
    }
    if (group && group->size > (uint32_t)n)
        return kvg_fail(err, KVG_UNSUPPORTED, "cuda: --tensor-parallel-size %u needs as many GPUs, and there %s %d", group->size,
                        n == 1 ? "is" : "are", n);
    if (group && group->size > 2 && cuda->options.deterministic)
        return kvg_fail(err, KVG_INVALID,
                        "cuda: --deterministic with %u ranks: NCCL's sums of more than 2 depend on the batch's size",
                        group->size);
    if ((error = cudaSetDevice(device)) != cudaSuccess || (error = cudaGetDeviceProperties(&properties, device)) != cudaSuccess)
        return cuda_failed(error, err, "the device");
    if (properties.major < COMPUTE_MAJOR_MIN)
        return kvg_fail(err, KVG_UNSUPPORTED, "cuda: %s has compute capability %d.%d, this build needs %d.0", properties.name,
                        properties.major, properties.minor, COMPUTE_MAJOR_MIN);
    snprintf(cuda->name, sizeof cuda->name, "%.*s", (int)sizeof cuda->name - 1, properties.name);
    cuda->sm_count = properties.multiProcessorCount;
    cuda->shared_most = properties.sharedMemPerBlockOptin;
    return cuda_failed(cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking), err, "a stream");
}

KVGATE_EXPORT const char *kvgate_cuda_version = KVGATE_VERSION;
KVGATE_EXPORT kvgate_cuda_open_function kvgate_cuda_open;

int kvgate_cuda_open(struct backend **out, const struct backend_options *options, struct kvg_error *err)
{
    struct cuda_backend *cuda = calloc(1, sizeof *cuda);
    int failed;
    if (!cuda)
        return kvg_fail(err, KVG_NOMEM, "no memory for the CUDA backend");
    cuda->base.ops = &cuda_ops;
    cuda->base.kv_auto = KV_BF16;
    cuda->base.gathers = true;
    cuda->base.grouped = true;
    cuda->options = *options;
    cuda->most_rows = options->max_rows > options->max_outputs ? options->max_rows : options->max_outputs;
    cuda->max_parts = options->max_seqs > PARTS_MIN ? options->max_seqs : PARTS_MIN;
    failed = comm_agree(options->comm, choose_device(cuda, err), err);
    if (!failed && options->comm)
        failed = comm_nccl_open(&cuda->comm, options->comm, cuda->stream, err);
    if (failed || (failed = matmul_prepare(err)) ||
        (!options->deterministic && !options->eager && (failed = cuda_open_graphs(cuda, err)))) {
        cuda_close(&cuda->base);
        return failed;
    }
    *out = &cuda->base;
    return 0;
}
