/* A step's state: filled in pinned memory, copied to the device in one piece.
 *
 *   rows | outputs | seqs | decodes | tiles | split_keys | tables
 *
 * Sequences with one row go to `decodes`, the others are cut into `tiles`; in deterministic mode all are tiles.
 */
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/backend/cuda/cuda_internal.h"

enum { TILE_ROWS = 64, SPLIT_KEYS_MIN = 128, SPLIT_KEYS_STEP = 64, SPLITS_MAX = 32, FIRST_TABLES = 4096, OPS_OF_A_LAYER = 20 };

static void *take(uint8_t **at, size_t bytes)
{
    void *memory = *at;
    *at += (bytes + 15) / 16 * 16;
    return memory;
}

static uint32_t max_tiles(const struct cuda_backend *cuda)
{
    uint64_t group = cuda->kv.n_heads / cuda->kv.n_kv_heads;
    return (uint32_t)(cuda->options.max_rows * group / TILE_ROWS) + cuda->options.max_seqs + 1;
}

/* Places the arrays from `memory` on; what comes before the block tables, in bytes. */
static size_t place(struct step_view *view, uint8_t *memory, const struct cuda_backend *cuda)
{
    uint8_t *at = memory;
    view->rows = take(&at, cuda->options.max_rows * sizeof *view->rows);
    view->outputs = take(&at, cuda->options.max_outputs * sizeof *view->outputs);
    view->seqs = take(&at, cuda->options.max_seqs * sizeof *view->seqs);
    view->decodes = take(&at, cuda->options.max_seqs * sizeof *view->decodes);
    view->tiles = take(&at, max_tiles(cuda) * sizeof *view->tiles);
    view->split_keys = take(&at, sizeof *view->split_keys);
    view->tables = (uint32_t *)(void *)at;
    return (size_t)(at - memory);
}

/* Memory for the state with room for `tables` entries of block tables; replaces what was there. */
static int alloc_state(struct cuda_backend *cuda, uint32_t tables, struct kvg_error *err)
{
    struct step_view nowhere;
    cuda->state_bytes = place(&nowhere, NULL, cuda);
    size_t bytes = cuda->state_bytes + (size_t)tables * sizeof(uint32_t);
    cuda_close_step(cuda);
    int failed = cuda_failed(cudaMallocHost((void **)&cuda->pinned, bytes), err, "pinned memory for a step");
    if (failed || (failed = cuda_alloc((void **)&cuda->device_state, bytes, "a step's state", err)))
        return failed;
    cuda->max_tables = tables;
    memset(cuda->pinned, 0, bytes);
    place(&cuda->host_view, cuda->pinned, cuda);
    place(&cuda->view, cuda->device_state, cuda);
    return 0;
}

int cuda_open_step(struct cuda_backend *cuda, struct kvg_error *err)
{
    cuda->max_ops = OPS_OF_A_LAYER * (cuda->kv.n_layers + 4);
    cuda->ops = calloc(cuda->max_ops, sizeof *cuda->ops);
    if (!cuda->ops)
        return kvg_fail(err, KVG_NOMEM, "no memory for the ops of a step");
    return alloc_state(cuda, FIRST_TABLES, err);
}

void cuda_close_step(struct cuda_backend *cuda)
{
    cudaFreeHost(cuda->pinned);
    cudaFree(cuda->device_state);
    cuda->pinned = cuda->device_state = NULL;
    cuda->max_tables = 0;
}

/* ---- filling ---- */

static int check_step(const struct cuda_backend *cuda, const struct backend_step *step, struct kvg_error *err)
{
    const struct backend_options *most = &cuda->options;
    uint32_t next = 0;
    if (step->n_rows > most->max_rows || step->n_seqs > most->max_seqs || step->n_outputs > most->max_outputs)
        return kvg_fail(err, KVG_INVALID, "a step of %u rows, %u sequences, %u outputs exceeds %u, %u, %u", step->n_rows,
                        step->n_seqs, step->n_outputs, most->max_rows, most->max_seqs, most->max_outputs);
    for (uint32_t i = 0; i < step->n_seqs; i++) {
        if (step->seqs[i].first_row != next || step->seqs[i].n_rows > step->n_rows - next)
            return kvg_fail(err, KVG_INVALID, "sequence %u does not start at row %u or ends past row %u", i, next, step->n_rows);
        next += step->seqs[i].n_rows;
    }
    return next == step->n_rows ? 0 : kvg_fail(err, KVG_INVALID, "the sequences cover %u of %u rows", next, step->n_rows);
}

static uint32_t seq_blocks(const struct cuda_backend *cuda, const struct backend_seq *seq)
{
    return (seq->n_past + seq->n_rows + cuda->kv.block_size - 1) / cuda->kv.block_size;
}

/* Sequences that share blocks may need more entries than there are blocks: rarely, the state moves to a larger place. */
static int reserve_tables(struct cuda_backend *cuda, const struct backend_step *step, struct kvg_error *err)
{
    uint64_t need = 0;
    for (uint32_t i = 0; i < step->n_seqs; i++)
        need += seq_blocks(cuda, &step->seqs[i]);
    if (need <= cuda->max_tables)
        return 0;
    if (need > UINT32_MAX / 2)
        return kvg_fail(err, KVG_INVALID, "block tables of %llu entries", (unsigned long long)need);
    return alloc_state(cuda, (uint32_t)need * 2, err);
}

static int fill_table(struct cuda_backend *cuda, const struct backend_seq *seq, uint32_t *table, struct kvg_error *err)
{
    for (uint32_t b = 0, n = seq_blocks(cuda, seq); b < n; b++) {
        if (seq->blocks[b] >= cuda->kv.n_blocks)
            return kvg_fail(err, KVG_INVALID, "block %u of %u in a block table", seq->blocks[b], cuda->kv.n_blocks);
        table[b] = seq->blocks[b];
    }
    return 0;
}

static void fill_rows(struct cuda_backend *cuda, const struct backend_step *step, const struct backend_seq *seq)
{
    for (uint32_t i = 0; i < seq->n_rows; i++) {
        uint32_t row = seq->first_row + i, position = seq->n_past + i;
        cuda->host_view.rows[row] = (struct row_state){step->ids[row], position, seq->blocks[position / cuda->kv.block_size],
                                                       position % cuda->kv.block_size};
    }
}

static void fill_items(struct cuda_backend *cuda, uint32_t index, const struct backend_seq *seq)
{
    uint32_t pairs = seq->n_rows * (cuda->kv.n_heads / cuda->kv.n_kv_heads);
    if (seq->n_rows == 1 && !cuda->options.deterministic) {
        cuda->host_view.decodes[cuda->n_decodes++] = (struct attention_item){index, 0};
        return;
    }
    for (uint32_t first = 0; first < pairs; first += TILE_ROWS)
        cuda->host_view.tiles[cuda->n_tiles++] = (struct attention_item){index, first / TILE_ROWS};
}

/* Pads a step that a graph may run to its bucket. */
static void pad(struct cuda_backend *cuda, const struct backend_step *step)
{
    const struct backend_options *most = &cuda->options;
    uint32_t n = graph_bucket(step->n_rows);
    cuda->padded_rows = 0;
    if (!cuda->graphs || cuda->n_tiles || step->n_rows == 0 || step->n_outputs != step->n_rows || n > most->max_rows ||
        n > most->max_seqs || n > most->max_outputs)
        return;
    for (uint32_t i = step->n_rows; i < n; i++) {
        cuda->host_view.rows[i] = (struct row_state){0, 0, NO_BLOCK, 0};
        cuda->host_view.decodes[i] = (struct attention_item){NO_SEQ, 0};
        cuda->host_view.outputs[i] = 0;
    }
    cuda->padded_rows = cuda->n_decodes = n;
}

/* 128, or more where that would be too many splits. */
uint32_t keys_of_split(uint32_t keys, uint32_t splits)
{
    uint32_t each = ((keys + splits - 1) / splits + SPLIT_KEYS_STEP - 1) / SPLIT_KEYS_STEP * SPLIT_KEYS_STEP;
    return each > SPLIT_KEYS_MIN ? each : SPLIT_KEYS_MIN;
}

/* As many splits as the longest context needs and there is room for. A graph has room for a power of two. */
static void choose_splits(struct cuda_backend *cuda, uint32_t longest)
{
    uint32_t room = cuda->n_decodes ? cuda->max_parts / cuda->n_decodes : 1, most = room < SPLITS_MAX ? room : SPLITS_MAX;
    uint32_t keys = cuda->host_view.split_keys[0] = keys_of_split(longest, most), splits = 1;
    uint32_t need = longest ? (longest + keys - 1) / keys : 1;
    while (splits < need)
        splits *= 2;
    cuda->parts.splits = !cuda->padded_rows ? need : splits < most ? splits : most;
}

static int fill_state(struct cuda_backend *cuda, const struct backend_step *step, uint32_t *n_tables, struct kvg_error *err)
{
    struct step_view *view = &cuda->host_view;
    uint32_t longest = 0;
    *n_tables = cuda->n_decodes = cuda->n_tiles = 0;
    for (uint32_t i = 0; i < step->n_seqs; i++) {
        const struct backend_seq *seq = &step->seqs[i];
        int failed = fill_table(cuda, seq, view->tables + *n_tables, err);
        if (failed)
            return failed;
        view->seqs[i] = (struct seq_state){seq->first_row, seq->n_rows, seq->n_past, *n_tables};
        *n_tables += seq_blocks(cuda, seq);
        fill_rows(cuda, step, seq);
        fill_items(cuda, i, seq);
        if (seq->n_rows == 1 && seq->n_past + 1 > longest)
            longest = seq->n_past + 1;
    }
    memcpy(view->outputs, step->outputs, step->n_outputs * sizeof *view->outputs);
    pad(cuda, step);
    choose_splits(cuda, longest);
    return 0;
}

int cuda_begin_step(struct backend *backend, const struct backend_step *step, struct kvg_error *err)
{
    struct cuda_backend *cuda = cuda_of(backend);
    uint32_t n_tables;
    int failed;
    if ((failed = check_step(cuda, step, err)) || (failed = reserve_tables(cuda, step, err)) ||
        (failed = fill_state(cuda, step, &n_tables, err)))
        return failed;
    cuda->n_steps++;
    cuda->n_rows = step->n_rows;
    cuda->n_outputs = step->n_outputs;
    cuda->n_ops = 0;
    cuda->failure.code = 0;
    return cuda_failed(cudaMemcpyAsync(cuda->device_state, cuda->pinned, cuda->state_bytes + n_tables * sizeof(uint32_t),
                                       cudaMemcpyHostToDevice, cuda->stream),
                       err, "copying a step's state");
}

int cuda_end_step(struct backend *backend, struct kvg_error *err)
{
    struct cuda_backend *cuda = cuda_of(backend);
    cuda_run(cuda);
    cudaError_t error = cudaStreamSynchronize(cuda->stream);
    if (cuda->failure.code)
        return kvg_fail(err, cuda->failure.code, "%s", cuda->failure.message);
    if (error == cudaSuccess)
        return 0;
    return kvg_fail(err, KVG_UNSUPPORTED, "cuda: a step of %u rows, %u outputs, %u decode and %u tile items: %s: %s",
                    cuda->n_rows, cuda->n_outputs, cuda->n_decodes, cuda->n_tiles, cudaGetErrorName(error),
                    cudaGetErrorString(error));
}
