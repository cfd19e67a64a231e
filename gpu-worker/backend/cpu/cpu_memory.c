/* Memory, tensors and scratch: what the CPU backend allocates, all before the first step. */
#include "gpu-worker/backend/cpu/cpu.h"
#include "gpu-worker/backend/cpu/grouped_panels.h"
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- memory on huge pages: with small ones a core that streams through weights or KV blocks waits for the TLB ---- */

enum { HUGE_PAGE = 2 << 20 };

static size_t huge_size(size_t n)
{
    return (n + HUGE_PAGE - 1) & ~(size_t)(HUGE_PAGE - 1);
}

void *cpu_alloc(size_t n)
{
    size_t alignment = n >= HUGE_PAGE ? HUGE_PAGE : 64;
    void *memory = aligned_alloc(alignment, (n + alignment - 1) & ~(alignment - 1));
    if (memory && n >= HUGE_PAGE)
        madvise(memory, n, MADV_HUGEPAGE);
    return memory;
}

void *cpu_map(size_t n)
{
    size_t size = huge_size(n);
    uint8_t *memory = mmap(NULL, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return NULL;
    size_t before = huge_size((uintptr_t)memory) - (uintptr_t)memory;
    if (before)
        munmap(memory, before);
    munmap(memory + before + size, HUGE_PAGE - before);
    madvise(memory + before, size, MADV_HUGEPAGE); /* refused: slower, not wrong */
    return memory + before;
}

void cpu_unmap(void *memory, size_t n)
{
    if (memory)
        munmap(memory, huge_size(n));
}

/* Tensors live until the backend is closed, so they are cut from chunks one after the other. */
struct arena_chunk {
    struct arena_chunk *next;
    size_t size, used;
};
enum { ARENA_CHUNK = 32 << 20 };

/* 64-byte aligned and zeroed. */
static void *arena_alloc(struct cpu_backend *cpu, size_t n)
{
    struct arena_chunk *chunk = cpu->arena;
    n = (n + 63) & ~(size_t)63;
    if (!chunk || chunk->size - chunk->used < n) {
        size_t size = n + LINE > ARENA_CHUNK ? huge_size(n + LINE) : ARENA_CHUNK;
        if (size < n || !(chunk = cpu_map(size)))
            return NULL;
        *chunk = (struct arena_chunk){cpu->arena, size, LINE};
        cpu->arena = chunk;
    }
    void *memory = (uint8_t *)chunk + chunk->used;
    chunk->used += n;
    return memory;
}

static struct tensor *tensor_new(struct cpu_backend *cpu, uint32_t rows, uint32_t cols)
{
    struct tensor *tensor = calloc(1, sizeof *tensor);
    if (!tensor)
        return NULL;
    tensor->rows = rows;
    tensor->cols = cols;
    tensor->next = cpu->tensors;
    cpu->tensors = tensor;
    return tensor;
}

static int grow_sampling(struct cpu_backend *cpu, uint32_t cols, struct kvg_error *err)
{
    if (cols <= cpu->most_cols)
        return 0;
    free(cpu->sampling);
    cpu->sampling = cpu_alloc((size_t)thread_pool_size(cpu->pool) * cols * sizeof *cpu->sampling);
    cpu->most_cols = cpu->sampling ? cols : 0;
    return cpu->sampling ? 0 : kvg_fail(err, KVG_NOMEM, "no memory for sampling scratch");
}

int cpu_activation(struct backend *backend, struct tensor **out, uint32_t rows, uint32_t cols, struct kvg_error *err)
{
    struct cpu_backend *cpu = cpu_of(backend);
    struct tensor *tensor = tensor_new(cpu, rows, cols);
    if (tensor)
        tensor->data = arena_alloc(cpu, (size_t)rows * cols * sizeof *tensor->data);
    if (!tensor || !tensor->data)
        return kvg_fail(err, KVG_NOMEM, "no memory for activations of %u x %u values", rows, cols);
    *out = tensor;
    return grow_sampling(cpu, cols, err); /* it may be to hold logits */
}

struct pack_job {
    const struct panels *panels;
    const struct backend_weight *weight;
    _Atomic uint32_t not_finite; /* the first such row so far; weight->rows: none */
};

static void pack_panels(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct pack_job *job = arg;
    for (uint32_t p = first; p < end; p++) {
        uint32_t row = panels_pack(job->panels, job->weight->format, job->weight->data, p), known = job->not_finite;
        while (row < known && !atomic_compare_exchange_weak(&job->not_finite, &known, row))
            continue;
    }
}

static void free_int16_acts(struct acts *a)
{
    free(a->high_plane), free(a->low_plane), free(a->high_sum), free(a->low_sum), free(a->row_scale);
    free(a->words), free(a->row_sum);
}

static int grow_int16_acts(struct cpu_backend *cpu, uint32_t most, uint32_t cols, struct kvg_error *err)
{
    struct acts *a = &cpu->acts;
    size_t values = (size_t)most * int16_units(cols) * INT16_UNIT, groups = values / QUANT_GROUP;
    if (values <= cpu->int16_values)
        return 0;
    free_int16_acts(a);
    cpu->int16_values = 0;
    /* AMX reads 16 rows of a last tile that has fewer. */
    a->high_plane = cpu_alloc(values + ACTS_TILE * INT16_UNIT);
    a->low_plane = cpu_alloc(values + ACTS_TILE * INT16_UNIT);
    a->high_sum = cpu_alloc(groups * sizeof *a->high_sum);
    a->low_sum = cpu_alloc(groups * sizeof *a->low_sum);
    a->row_scale = cpu_alloc((most + ACTS_TILE) * sizeof *a->row_scale);
    a->words = cpu_alloc(ACTS_TILE * int16_units(cols) * INT16_UNIT * 6);
    a->row_sum = cpu_alloc(ACTS_TILE * sizeof *a->row_sum);
    if (!a->high_plane || !a->low_plane || !a->high_sum || !a->low_sum || !a->row_scale || !a->words || !a->row_sum)
        return kvg_fail(err, KVG_NOMEM, "no memory for %zu 16-bit activations", values);
    cpu->int16_values = values;
    return 0;
}

/* AMX reads 16 rows of a last tile that has fewer. */
static void *units_of_rows(size_t *capacity, void *old, uint32_t most, size_t units)
{
    size_t bytes = ((size_t)most * units + ACTS_TILE) * UNIT_BYTES;
    if (bytes <= *capacity)
        return old;
    free(old);
    *capacity = bytes;
    return cpu_alloc(bytes);
}

static int grow_rows8(struct cpu_backend *cpu, uint32_t most, uint32_t cols, struct kvg_error *err)
{
    struct acts *a = &cpu->acts;
    a->rows8 = units_of_rows(&cpu->rows8_bytes, a->rows8, most, w8a8_units(cols));
    if (a->rows8 && !a->row8_scale)
        a->row8_scale = cpu_alloc((most + ACTS_TILE) * sizeof *a->row8_scale);
    return a->rows8 && a->row8_scale ? 0 : kvg_fail(err, KVG_NOMEM, "no memory for %u rows of %u 8-bit activations", most, cols);
}

static int grow_rows16(struct cpu_backend *cpu, uint32_t most, uint32_t cols, struct kvg_error *err)
{
    struct acts *a = &cpu->acts;
    a->rows16 = units_of_rows(&cpu->rows16_bytes, a->rows16, most, bf16_units(cols));
    return a->rows16 ? 0 : kvg_fail(err, KVG_NOMEM, "no memory for %u rows of %u BF16 activations", most, cols);
}

static int grow_int8_acts(struct cpu_backend *cpu, uint32_t most, uint32_t cols, struct kvg_error *err)
{
    struct acts *a = &cpu->acts;
    size_t values = (size_t)most * cols, groups = values / QUANT_GROUP;
    if (values <= cpu->acts_values)
        return 0;
    free(a->q), free(a->d), free(a->s), free(a->sum), free(a->low);
    cpu->acts_values = 0;
    /* AMX reads 16 rows of a last tile that has fewer. */
    a->q = cpu_alloc(values + ACTS_TILE * QUANT_GROUP);
    a->d = cpu_alloc((groups + ACTS_TILE) * sizeof *a->d);
    a->s = cpu_alloc((groups + ACTS_TILE) * sizeof *a->s);
    a->sum = cpu_alloc(groups * sizeof *a->sum);
    a->low = cpu_alloc(groups * sizeof *a->low);
    if (!a->q || !a->d || !a->s || !a->sum || !a->low)
        return kvg_fail(err, KVG_NOMEM, "no memory for %zu quantized activations", values);
    cpu->acts_values = values;
    return 0;
}

/* Room for max_rows rows of activations as wide as the widest weight of their form. */
static int grow_acts(struct cpu_backend *cpu, const struct panels *panels, struct kvg_error *err)
{
    uint32_t most = cpu->options.max_rows > cpu->options.max_outputs ? cpu->options.max_rows : cpu->options.max_outputs;
    switch (cpu_acts_form(cpu, panels)) {
    case ACTS_FLOATS:
        return 0;
    case ACTS_INT8:
        return grow_int8_acts(cpu, most, panels->cols, err);
    case ACTS_INT16:
    case ACTS_W4A16:
        return grow_int16_acts(cpu, most, panels->cols, err);
    case ACTS_ROWS8:
        return grow_rows8(cpu, most, panels->cols, err);
    case ACTS_ROWS16:
        return grow_rows16(cpu, most, panels->cols, err);
    }
    return 0;
}

static int grow_scratch(struct cpu_backend *cpu, uint32_t cols, struct kvg_error *err)
{
    size_t panels = 2 * GATED_ROWS * PANEL_ROWS, floats = ((cols > panels ? cols : panels) + 15) & ~(size_t)15;
    size_t bytes = thread_pool_size(cpu->pool) * floats * sizeof *cpu->scratch;
    if (floats <= cpu->scratch_floats)
        return 0;
    free(cpu->scratch);
    cpu->scratch = cpu_alloc(bytes);
    cpu->scratch_floats = cpu->scratch ? floats : 0;
    if (!cpu->scratch)
        return kvg_fail(err, KVG_NOMEM, "no memory for rows of %u values", cols);
    memset(cpu->scratch, 0, bytes); /* what a panel leaves out of it is computed with, not used */
    return 0;
}

/* INT16 is the faster one for Q4_0 and Q4_1. Other formats have less to do in int8 where vectors multiply; tiles gain a sixth to
 * a half in prompts and in batches of more than 16 rows, and lose as much as a seventh with two to four. */
static bool use_int16(const struct cpu_backend *cpu, const struct quant_format *format)
{
    bool tiles = cpu->kernels.quantize_words != NULL;
    bool fast = tiles || (format->bits == 4 && format->scales != QUANT_SUPER_MIN);
    return cpu->arithmetic == ARITHMETIC_INT16 || (cpu->arithmetic == ARITHMETIC_AUTO && fast);
}

static void note_format(struct cpu_backend *cpu, const struct quant_format *format, bool int16)
{
    for (uint32_t i = 0; quant_at(i); i++)
        if (quant_at(i) == format)
            *(int16 ? &cpu->int16_formats : &cpu->int8_formats) |= 1u << i;
}

/* The weight's order, in memory of its own or of a matrix with the same one. */
static int keep_order(struct cpu_backend *cpu, struct tensor *tensor, const struct backend_weight *weight, struct kvg_error *err)
{
    size_t bytes = weight->cols * sizeof *weight->order;
    if (weight->format && weight->format->scales == QUANT_FLOAT)
        return kvg_fail(err, KVG_UNSUPPORTED, "%s weights have no order of columns", weight->format->name);
    for (uint32_t i = 0; i < weight->cols; i++)
        if (weight->order[i] >= weight->cols)
            return kvg_fail(err, KVG_INVALID, "column %u is column %u of %u", i, weight->order[i], weight->cols);
    for (const struct tensor *t = cpu->tensors; t; t = t->next)
        if (t->order && t->cols == weight->cols && memcmp(t->order, weight->order, bytes) == 0) {
            tensor->order = t->order;
            return 0;
        }
    uint32_t *order = arena_alloc(cpu, bytes);
    if (!order)
        return kvg_fail(err, KVG_NOMEM, "no memory for the order of %u columns", weight->cols);
    memcpy(order, weight->order, bytes);
    tensor->order = order;
    return 0;
}

/* Memory for the panels whose layout is set. */
static int alloc_panels(struct cpu_backend *cpu, struct panels *panels, struct kvg_error *err)
{
    panels->data = arena_alloc(cpu, panels->n_panels * panels->panel_bytes);
    return panels->data ? 0
                        : kvg_fail(err, KVG_NOMEM, "no memory for %zu bytes of weights", panels->n_panels * panels->panel_bytes);
}

/* What a packed matrix needs beside itself. */
static int finish_weight(struct cpu_backend *cpu, struct tensor *tensor, const struct backend_weight *weight,
                         struct kvg_error *err)
{
    int failed = grow_acts(cpu, &tensor->panels, err);
    if (failed || (weight->order && (failed = keep_order(cpu, tensor, weight, err))))
        return failed;
    return grow_scratch(cpu, weight->order ? 2 * weight->cols : weight->cols, err);
}

struct pack_grouped_job {
    const struct panels *panels;
    const struct quant_grouped *matrix;
    uint8_t *scratch;
    size_t scratch_bytes;
};

static void pack_grouped_panels(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct pack_grouped_job *job = arg;
    for (uint32_t p = first; p < end; p++)
        grouped_pack(job->panels, job->matrix, job->scratch + thread * job->scratch_bytes, p);
}

static int grouped_weight(struct cpu_backend *cpu, struct tensor *tensor, const struct backend_weight *weight,
                          struct kvg_error *err)
{
    const struct quant_grouped *matrix = weight->grouped;
    if (!grouped_valid(matrix) || matrix->rows != weight->rows || matrix->cols != weight->cols)
        return kvg_fail(err, KVG_UNSUPPORTED, "a %s matrix [%u, %u] in groups of %u for one of [%u, %u]",
                        grouped_name(matrix->kind), matrix->rows, matrix->cols, matrix->group, weight->rows, weight->cols);
    grouped_layout(&tensor->panels, matrix);
    int failed = alloc_panels(cpu, &tensor->panels, err);
    if (failed)
        return failed;
    struct pack_grouped_job job = {&tensor->panels, matrix, NULL, (grouped_scratch_bytes(matrix) + LINE - 1) / LINE * LINE};
    job.scratch = cpu_alloc(thread_pool_size(cpu->pool) * job.scratch_bytes);
    if (!job.scratch)
        return kvg_fail(err, KVG_NOMEM, "no memory for rows of %u codes", matrix->cols);
    thread_pool_for(cpu->pool, tensor->panels.n_panels, 1, pack_grouped_panels, &job);
    free(job.scratch);
    cpu->grouped_kinds |= 1u << matrix->kind;
    return finish_weight(cpu, tensor, weight, err);
}

static int matmul_weight(struct cpu_backend *cpu, struct tensor *tensor, const struct backend_weight *weight,
                         struct kvg_error *err)
{
    struct panels *panels = &tensor->panels;
    if (!panels_layout(panels, weight->format, use_int16(cpu, weight->format), weight->rows, weight->cols))
        return kvg_fail(err, KVG_UNSUPPORTED, "%u columns are not a whole number of %s blocks of %u", weight->cols,
                        weight->format->name, weight->format->block_values);
    int failed = alloc_panels(cpu, panels, err);
    if (failed)
        return failed;
    struct pack_job job = {panels, weight, weight->rows};
    thread_pool_for(cpu->pool, panels->n_panels, 1, pack_panels, &job);
    if (job.not_finite < weight->rows)
        return kvg_fail(err, KVG_FILE, "row %u holds an infinity or NaN", job.not_finite);
    if (weight->format->scales != QUANT_FLOAT)
        note_format(cpu, weight->format, panels_int16(panels));
    return finish_weight(cpu, tensor, weight, err);
}

int cpu_weight(struct backend *backend, struct tensor **out, const struct backend_weight *weight, enum backend_weight_use use,
               struct kvg_error *err)
{
    struct cpu_backend *cpu = cpu_of(backend);
    struct tensor *tensor = tensor_new(cpu, weight->rows, weight->cols);
    if (!tensor)
        return kvg_fail(err, KVG_NOMEM, "no memory for a tensor");
    *out = tensor;
    if (use == WEIGHT_MATMUL)
        return weight->grouped ? grouped_weight(cpu, tensor, weight, err) : matmul_weight(cpu, tensor, weight, err);
    if (quant_row_bytes(weight->format, weight->cols) == 0)
        return kvg_fail(err, KVG_UNSUPPORTED, "%u columns are not a whole number of %s blocks of %u", weight->cols,
                        weight->format->name, weight->format->block_values);
    if (use == WEIGHT_EMBEDDING) {
        tensor->format = weight->format;
        tensor->mapped = weight->data;
        return 0;
    }
    tensor->data = arena_alloc(cpu, (size_t)weight->rows * weight->cols * sizeof *tensor->data);
    if (!tensor->data)
        return kvg_fail(err, KVG_NOMEM, "no memory for a vector of %u values", weight->cols);
    quant_decode(weight->format, weight->data, tensor->data, (size_t)weight->rows * weight->cols);
    return 0;
}

void cpu_free_memory(struct cpu_backend *cpu)
{
    for (struct tensor *next, *tensor = cpu->tensors; tensor; tensor = next) {
        next = tensor->next;
        free(tensor);
    }
    struct acts *a = &cpu->acts;
    free(a->q), free(a->d), free(a->s), free(a->sum), free(a->low);
    free(a->rows8), free(a->row8_scale), free(a->rows16);
    free_int16_acts(a);
    free(cpu->attention);
    free(cpu->sampling);
    free(cpu->scratch);
    free(cpu->places);
    cpu_attention_free(cpu);
    cpu_kv_free(cpu);
    for (struct arena_chunk *next, *chunk = cpu->arena; chunk; chunk = next) {
        next = chunk->next;
        cpu_unmap(chunk, chunk->size);
    }
}
