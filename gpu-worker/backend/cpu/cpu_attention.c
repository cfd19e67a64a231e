/* The operation `attention`: how a step's rows become tiles for the thread pool. */
#include "gpu-worker/backend/cpu/cpu.h"

/* Large tiles read keys and values less often; small ones keep every thread busy. */
static void choose_tile_rows(struct cpu_backend *cpu)
{
    uint32_t rows = cpu->step.n_rows * (cpu->kv.n_heads / cpu->kv.n_kv_heads), threads = thread_pool_size(cpu->pool);
    uint32_t tile = cpu->kernels.attention_rows;
    if (threads > 1)
        while (tile > 16 && (rows + tile - 1) / tile * cpu->kv.n_kv_heads < 4 * threads)
            tile /= 2;
    cpu->tile_rows = tile;
}

void cpu_attention_begin(struct cpu_backend *cpu)
{
    uint32_t group = cpu->kv.n_heads / cpu->kv.n_kv_heads;
    choose_tile_rows(cpu);
    cpu->tiles[0] = 0;
    for (uint32_t i = 0; i < cpu->step.n_seqs; i++)
        cpu->tiles[i + 1] = cpu->tiles[i] + (cpu->step.seqs[i].n_rows * group + cpu->tile_rows - 1) / cpu->tile_rows;
}

struct attention_job {
    struct cpu_backend *cpu;
    const struct backend_attention *args;
};

/* Rows of a tile: (token, head of the group) pairs of one sequence and kv head, token by token. */
static void attend_tile(struct attention_job *job, uint32_t seq_index, uint32_t tile_index, uint32_t kv_head,
                        struct attention_scratch *scratch)
{
    struct cpu_backend *cpu = job->cpu;
    const struct backend_seq *seq = &cpu->step.seqs[seq_index];
    uint32_t group = cpu->kv.n_heads / cpu->kv.n_kv_heads, first = tile_index * cpu->tile_rows;
    uint32_t n = seq->n_rows * group - first;
    struct attention_tile tile = {.kv = &cpu->layers[job->args->layer],
                                  .blocks = seq->blocks,
                                  .kv_head = kv_head,
                                  .n_rows = n < cpu->tile_rows ? n : cpu->tile_rows,
                                  .scale = job->args->scale};
    for (uint32_t i = 0; i < tile.n_rows; i++) {
        uint32_t token = (first + i) / group, head = kv_head * group + (first + i) % group;
        size_t at = (size_t)(seq->first_row + token) * job->args->q->cols + (size_t)head * cpu->kv.head_dim;
        tile.q[i] = job->args->q->data + at;
        tile.out[i] = job->args->out->data + at;
        tile.position[i] = seq->n_past + token;
    }
    cpu->kernels.attention(&tile, scratch);
}

/* Items run from the last tile to the first: later tiles of a prompt are longer, and the longest should not start last. */
static void attend(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct attention_job *job = arg;
    struct cpu_backend *cpu = job->cpu;
    uint32_t n_kv = cpu->kv.n_kv_heads, n_seqs = cpu->step.n_seqs, n_tiles = cpu->tiles[n_seqs];
    for (uint32_t i = first; i < end; i++) {
        uint32_t tile = n_tiles - 1 - i / n_kv, low = 0, high = n_seqs;
        while (high - low > 1) { /* the last sequence that starts at or before the tile */
            uint32_t middle = (low + high) / 2;
            if (cpu->tiles[middle] <= tile)
                low = middle;
            else
                high = middle;
        }
        attend_tile(job, low, tile - cpu->tiles[low], i % n_kv, &cpu->attention[thread]);
    }
}

void cpu_attention(struct backend *backend, const struct backend_attention *args)
{
    struct attention_job job = {cpu_of(backend), args};
    thread_pool_for(job.cpu->pool, job.cpu->tiles[job.cpu->step.n_seqs] * job.cpu->kv.n_kv_heads, 1, attend, &job);
}
