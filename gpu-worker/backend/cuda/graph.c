/* CUDA graphs of decode steps. Launches cost more than small kernels, so a step in which every sequence has one row, and all rows
 * are outputs, is captured once for each bucket of rows and of splits, then replayed: all that changes lies in the step's state.
 *
 * The rows are padded to the bucket: rows of padding embed token 0, store no KV and attend to nothing, and no output refers to
 * them. Where a family queues other ops than those captured, the graph is captured anew.
 */
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/backend/cuda/cuda_internal.h"

enum { GRAPHS_MAX = 64, BUCKET_STEP = 64 };

struct graph {
    uint32_t rows, splits;
    const void *state; /* where the state lay */
    struct op *ops;    /* [n_ops] what was captured */
    uint32_t n_ops;
    cudaGraphExec_t exec;
};

struct graph_cache {
    struct graph graphs[GRAPHS_MAX];
    uint32_t n, next; /* next: the one to give up when all are taken */
};

int cuda_open_graphs(struct cuda_backend *cuda, struct kvg_error *err)
{
    cuda->graphs = calloc(1, sizeof *cuda->graphs);
    return cuda->graphs ? 0 : kvg_fail(err, KVG_NOMEM, "no memory for graphs");
}

static void drop(struct graph *graph)
{
    if (graph->exec)
        cudaGraphExecDestroy(graph->exec);
    free(graph->ops);
    memset(graph, 0, sizeof *graph);
}

void cuda_close_graphs(struct cuda_backend *cuda)
{
    for (uint32_t i = 0; cuda->graphs && i < cuda->graphs->n; i++)
        drop(&cuda->graphs->graphs[i]);
    free(cuda->graphs);
    cuda->graphs = NULL;
}

/* 1, 2, 4, .. 64, 128, 192, ..: the widths at which kernels change. */
uint32_t graph_bucket(uint32_t n)
{
    uint32_t bucket = 1;
    while (bucket < n && bucket < BUCKET_STEP)
        bucket *= 2;
    return bucket >= n ? bucket : (n + BUCKET_STEP - 1) / BUCKET_STEP * BUCKET_STEP;
}

/* Compares what the kernels of an op are launched with. */
static bool same_op(const struct op *a, const struct op *b)
{
    if (a->kind != b->kind || a->x != b->x || a->weight != b->weight || a->out != b->out || a->eps != b->eps ||
        a->cols != b->cols)
        return false;
    if (a->kind == OP_MATMUL) {
        const struct backend_matmul *m = &a->matmul, *n = &b->matmul;
        if (m->count != n->count || m->accumulate != n->accumulate)
            return false;
        for (uint32_t i = 0; i < m->count; i++)
            if (m->weights[i] != n->weights[i] || m->biases[i] != n->biases[i] || m->outs[i] != n->outs[i])
                return false;
    }
    if (a->kind == OP_ROPE_STORE)
        return a->rope.layer == b->rope.layer && a->rope.q == b->rope.q && a->rope.k == b->rope.k && a->rope.v == b->rope.v &&
               a->rope.angles == b->rope.angles && a->rope.style == b->rope.style;
    if (a->kind == OP_ATTENTION)
        return a->attention.layer == b->attention.layer && a->attention.q == b->attention.q &&
               a->attention.scale == b->attention.scale;
    return true;
}

static bool same_ops(const struct graph *graph, const struct cuda_backend *cuda)
{
    if (graph->n_ops != cuda->n_ops)
        return false;
    for (uint32_t i = 0; i < cuda->n_ops; i++)
        if (!same_op(&graph->ops[i], &cuda->ops[i]))
            return false;
    return true;
}

static struct graph *find(struct cuda_backend *cuda)
{
    struct graph_cache *cache = cuda->graphs;
    for (uint32_t i = 0; i < cache->n; i++) {
        struct graph *graph = &cache->graphs[i];
        if (graph->rows != cuda->padded_rows || graph->splits != cuda->parts.splits)
            continue;
        if (graph->state != cuda->device_state || !same_ops(graph, cuda))
            drop(graph);
        return graph;
    }
    if (cache->n < GRAPHS_MAX)
        return &cache->graphs[cache->n++];
    struct graph *graph = &cache->graphs[cache->next++ % GRAPHS_MAX];
    drop(graph);
    return graph;
}

/* On failure the graph stays empty, and the caller queues the kernels one by one: the error is not that of their first. */
static bool capture(struct cuda_backend *cuda, struct graph *graph)
{
    cudaGraph_t captured = NULL;
    graph->ops = malloc(cuda->n_ops * sizeof *graph->ops);
    if (!graph->ops || cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess) {
        cudaGetLastError();
        drop(graph);
        return false;
    }
    queue_ops(cuda);
    bool good = cudaStreamEndCapture(cuda->stream, &captured) == cudaSuccess && !cuda->failure.code &&
                cudaGraphInstantiate(&graph->exec, captured, 0) == cudaSuccess;
    if (captured)
        cudaGraphDestroy(captured);
    if (!good) {
        cudaGetLastError();
        graph->exec = NULL;
        drop(graph);
        return false;
    }
    graph->rows = cuda->padded_rows;
    graph->splits = cuda->parts.splits;
    graph->state = cuda->device_state;
    graph->n_ops = cuda->n_ops;
    memcpy(graph->ops, cuda->ops, cuda->n_ops * sizeof *graph->ops);
    return true;
}

bool graph_run(struct cuda_backend *cuda)
{
    if (!cuda->padded_rows || cuda->n_ops == 0)
        return false;
    struct graph *graph = find(cuda);
    if (!graph->exec && !capture(cuda, graph))
        return false;
    if (cudaGraphLaunch(graph->exec, cuda->stream) == cudaSuccess)
        return true;
    cudaGetLastError();
    return false;
}
