/* The operations of a step: how each is cut into pieces for the thread pool. A piece owns whole outputs, so the cut never shows
 * in the results. */
#include "gpu-worker/backend/cpu/cpu.h"
#include <math.h>
#include <string.h>
#include "gpu-worker/backend/comm.h"
#include "gpu-worker/backend/sleep.h"

enum {
    INLINE_VALUES = 16384,  /* below this many values a region costs more than it saves */
    PASS_BYTES = 768 << 10, /* quantized activations of one pass over the weights: they must stay in L2 beside the results */
    VALUES_PER_PIECE = 1 << 13,
    AHEAD_OF_INPUT = 64 << 10, /* bytes of weights that a thread asks for while the input is made, a line for each look */
    INPUT_LOOKS = 4000,        /* at whether it is there; with no more lines to ask for it pauses; thereafter it sleeps */
};

/* Cuts n rows of `cols` values into pieces; small work runs on the caller alone. */
static void for_rows(struct cpu_backend *cpu, uint32_t n, uint32_t cols, thread_pool_item item, void *arg)
{
    uint32_t chunk = VALUES_PER_PIECE / cols + 1;
    if ((size_t)n * cols <= INLINE_VALUES)
        chunk = n;
    thread_pool_for(cpu->pool, n, chunk, item, arg);
}

/* ---- step ---- */

static int place_rows(struct cpu_backend *cpu, const struct backend_seq *seq, struct kvg_error *err)
{
    for (uint32_t i = 0; i < seq->n_rows; i++) {
        uint32_t position = seq->n_past + i, block = seq->blocks[position / cpu->kv.block_size];
        if (block >= cpu->kv.n_blocks)
            return kvg_fail(err, KVG_INVALID, "block %u of %u in a block table", block, cpu->kv.n_blocks);
        cpu->places[seq->first_row + i] = (struct row_place){position, block, position % cpu->kv.block_size};
    }
    return 0;
}

int cpu_begin_step(struct backend *backend, const struct backend_step *step, struct kvg_error *err)
{
    struct cpu_backend *cpu = cpu_of(backend);
    uint32_t next = 0;
    if (step->n_rows > cpu->options.max_rows || step->n_seqs > cpu->options.max_seqs ||
        step->n_outputs > cpu->options.max_outputs)
        return kvg_fail(err, KVG_INVALID, "a step of %u rows, %u sequences, %u outputs exceeds %u, %u, %u", step->n_rows,
                        step->n_seqs, step->n_outputs, cpu->options.max_rows, cpu->options.max_seqs, cpu->options.max_outputs);
    cpu->step = *step;
    for (uint32_t i = 0; i < step->n_seqs; i++) {
        const struct backend_seq *seq = &step->seqs[i];
        if (seq->first_row != next || seq->n_rows > step->n_rows - next)
            return kvg_fail(err, KVG_INVALID, "sequence %u does not start at row %u or ends past row %u", i, next, step->n_rows);
        next += seq->n_rows;
        int failed = place_rows(cpu, seq, err);
        if (failed)
            return failed;
    }
    if (next != step->n_rows)
        return kvg_fail(err, KVG_INVALID, "the sequences cover %u of %u rows", next, step->n_rows);
    cpu_attention_begin(cpu);
    return 0;
}

int cpu_end_step(struct backend *backend, struct kvg_error *err)
{
    const struct kvg_error *lost = &cpu_of(backend)->lost;
    return lost->code ? kvg_fail(err, lost->code, "%s", lost->message) : 0;
}

const float *cpu_host(struct backend *backend, const struct tensor *tensor)
{
    return tensor->data;
}

/* ---- row by row ---- */

struct row_job {
    struct cpu_backend *cpu;
    const struct tensor *x, *weight;
    struct tensor *out;
    float eps, factor;
    const struct backend_rope *rope;
    const struct sample_row *rows;
    struct sample_result *results;
};

static void embed_rows(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct row_job *job = arg;
    size_t cols = job->x->cols, row_bytes = quant_row_bytes(job->x->format, cols);
    for (uint32_t r = first; r < end; r++) {
        const uint8_t *row = (const uint8_t *)job->x->mapped + job->cpu->step.ids[r] * row_bytes;
        quant_decode(job->x->format, row, job->out->data + r * cols, cols);
    }
}

void cpu_embed(struct backend *backend, const struct tensor *table, struct tensor *out)
{
    struct row_job job = {.cpu = cpu_of(backend), .x = table, .out = out};
    for_rows(job.cpu, job.cpu->step.n_rows, table->cols, embed_rows, &job);
}

static void rmsnorm_rows(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct row_job *job = arg;
    size_t cols = job->x->cols;
    for (uint32_t r = first; r < end; r++)
        job->cpu->kernels.rmsnorm(job->x->data + r * cols, job->weight->data, (uint32_t)cols, job->eps,
                                  job->out->data + r * cols);
}

void cpu_rmsnorm(struct backend *backend, uint32_t n, const struct tensor *x, const struct tensor *weight, float eps,
                 struct tensor *out)
{
    struct row_job job = {.cpu = cpu_of(backend), .x = x, .weight = weight, .eps = eps, .out = out};
    for_rows(job.cpu, n, x->cols, rmsnorm_rows, &job);
}

static void head_rows(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct row_job *job = arg;
    uint32_t head_dim = job->weight->cols;
    for (size_t at = (size_t)first * job->out->cols; at < (size_t)end * job->out->cols; at += head_dim)
        job->cpu->kernels.rmsnorm(job->out->data + at, job->weight->data, head_dim, job->eps, job->out->data + at);
}

void cpu_head_rmsnorm(struct backend *backend, uint32_t n, struct tensor *x, const struct tensor *weight, float eps)
{
    struct row_job job = {.cpu = cpu_of(backend), .weight = weight, .eps = eps, .out = x};
    for_rows(job.cpu, n, x->cols, head_rows, &job);
}

static void scale_rows(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct row_job *job = arg;
    float *x = job->out->data, factor = job->factor;
    for (size_t i = (size_t)first * job->out->cols; i < (size_t)end * job->out->cols; i++)
        x[i] *= factor;
}

void cpu_scale(struct backend *backend, uint32_t n, struct tensor *x, float factor)
{
    struct row_job job = {.cpu = cpu_of(backend), .factor = factor, .out = x};
    for_rows(job.cpu, n, x->cols, scale_rows, &job);
}

static void add_rows(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct row_job *job = arg;
    float *x = job->out->data;
    const float *y = job->x->data;
    for (size_t i = (size_t)first * job->out->cols; i < (size_t)end * job->out->cols; i++)
        x[i] += y[i];
}

void cpu_add(struct backend *backend, uint32_t n, struct tensor *x, const struct tensor *y)
{
    struct row_job job = {.cpu = cpu_of(backend), .x = y, .out = x};
    for_rows(job.cpu, n, x->cols, add_rows, &job);
}

static void gelu_rows(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct row_job *job = arg;
    size_t cols = job->out->cols;
    job->cpu->kernels.gelu_mul(job->out->data + first * cols, job->x->data + first * cols, (end - first) * cols);
}

void cpu_gelu_mul(struct backend *backend, uint32_t n, struct tensor *gate, const struct tensor *up)
{
    struct row_job job = {.cpu = cpu_of(backend), .x = up, .out = gate};
    for_rows(job.cpu, n, gate->cols, gelu_rows, &job);
}

static void silu_rows(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct row_job *job = arg;
    size_t cols = job->out->cols;
    job->cpu->kernels.silu_mul(job->out->data + first * cols, job->x->data + first * cols, (end - first) * cols);
}

void cpu_silu_mul(struct backend *backend, uint32_t n, struct tensor *gate, const struct tensor *up)
{
    struct row_job job = {.cpu = cpu_of(backend), .x = up, .out = gate};
    for_rows(job.cpu, n, gate->cols, silu_rows, &job);
}

void cpu_gather(struct backend *backend, const struct tensor *x, struct tensor *out)
{
    const struct backend_step *step = &cpu_of(backend)->step;
    for (uint32_t i = 0; i < step->n_outputs; i++)
        memcpy(out->data + (size_t)i * x->cols, x->data + (size_t)step->outputs[i] * x->cols, x->cols * sizeof *x->data);
}

/* ---- the group ---- */

void cpu_all_reduce(struct backend *backend, uint32_t n, struct tensor *x)
{
    struct cpu_backend *cpu = cpu_of(backend);
    struct comm *comm = cpu->options.comm;
    if (!cpu->lost.code)
        comm->ops->all_reduce(comm, x->data, (size_t)n * x->cols, &cpu->lost);
}

void cpu_gather_columns(struct backend *backend, uint32_t n, const struct tensor *part, struct tensor *out, uint32_t cols)
{
    struct cpu_backend *cpu = cpu_of(backend);
    struct comm *comm = cpu->options.comm;
    if (!cpu->lost.code)
        comm->ops->gather(comm, part->data, out ? out->data : NULL, n, cols, &cpu->lost);
}

/* ---- positions ---- */

static void angle_rows(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct row_job *job = arg;
    for (uint32_t r = first; r < end; r++) {
        float *out = job->out->data + (size_t)r * job->out->cols;
        for (uint32_t i = 0, n = job->x->cols; i < n; i++) {
            double angle = (double)job->cpu->places[r].position * (double)job->x->data[i];
            out[i] = (float)cos(angle);
            out[n + i] = (float)sin(angle);
        }
    }
}

void cpu_angles(struct backend *backend, const struct tensor *frequencies, struct tensor *out)
{
    struct row_job job = {.cpu = cpu_of(backend), .x = frequencies, .out = out};
    for_rows(job.cpu, job.cpu->step.n_rows, 16 * out->cols, angle_rows, &job);
}

static void rotate_row(const struct cpu_backend *cpu, const struct backend_rope *rope, uint32_t r)
{
    uint32_t head_dim = cpu->kv.head_dim, rotated = rope->angles->cols;
    const float *angles = rope->angles->data + (size_t)r * rotated;
    float *q = rope->q->data + (size_t)r * rope->q->cols, *k = rope->k->data + (size_t)r * rope->k->cols;
    for (uint32_t h = 0; h < cpu->kv.n_heads; h++)
        cpu->kernels.rotate(q + h * head_dim, angles, rotated, rope->style);
    for (uint32_t h = 0; h < cpu->kv.n_kv_heads; h++)
        cpu->kernels.rotate(k + h * head_dim, angles, rotated, rope->style);
}

/* Stores rows from r, of which n follow each other; returns how many. */
static uint32_t store_rows(const struct cpu_backend *cpu, const struct backend_rope *rope, uint32_t r, uint32_t n)
{
    const struct attention_kernels *kernels = cpu_attention_kernels(cpu, rope->layer);
    const struct kv_layer *kv = &cpu->layers[rope->layer];
    const struct row_place *place = &cpu->places[r];
    size_t k_cols = rope->k->cols, v_cols = rope->v->cols;
    const float *k = rope->k->data + r * k_cols, *v = rope->v->data + r * v_cols;
    bool run = kernels->store_run && n >= STORE_RUN && place->slot % STORE_RUN == 0 &&
               place->slot + STORE_RUN <= cpu->kv.block_size && place[STORE_RUN - 1].block == place->block &&
               place[STORE_RUN - 1].slot == place->slot + STORE_RUN - 1;
    for (uint32_t h = 0; h < cpu->kv.n_kv_heads; h++, k += cpu->kv.head_dim, v += cpu->kv.head_dim) {
        if (run)
            kernels->store_run(kv, place->block, place->slot, h, k, k_cols, v, v_cols);
        else
            kernels->store(kv, place->block, place->slot, h, k, v);
    }
    return run ? STORE_RUN : 1;
}

static void rope_rows(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct row_job *job = arg;
    for (uint32_t r = first; r < end; r++)
        rotate_row(job->cpu, job->rope, r);
    for (uint32_t r = first; r < end;)
        r += store_rows(job->cpu, job->rope, r, end - r);
}

/* Keys and values of neighbouring rows share cache lines, so a thread takes as many rows as fill them. */
void cpu_rope_store(struct backend *backend, const struct backend_rope *args)
{
    struct cpu_backend *cpu = cpu_of(backend);
    struct row_job job = {.cpu = cpu, .rope = args};
    if (cpu->step.n_rows >= 2 * STORE_RUN)
        thread_pool_for(cpu->pool, cpu->step.n_rows, STORE_RUN, rope_rows, &job);
    else
        for_rows(cpu, cpu->step.n_rows, 4 * args->q->cols, rope_rows, &job);
}

static void sample_rows(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct row_job *job = arg;
    uint32_t n_vocab = job->x->cols;
    for (uint32_t i = first; i < end; i++)
        sample_row_cpu(job->x->data + (size_t)job->rows[i].output * n_vocab, n_vocab, &job->rows[i],
                       job->cpu->sampling + (size_t)thread * job->cpu->most_cols, &job->results[i]);
}

int cpu_sample(struct backend *backend, const struct tensor *logits, const struct sample_row *rows, uint32_t n,
               struct sample_result *results, struct kvg_error *err)
{
    struct row_job job = {.cpu = cpu_of(backend), .x = logits, .rows = rows, .results = results};
    for (uint32_t i = 0; i < n; i++)
        if (rows[i].output >= job.cpu->step.n_outputs)
            return kvg_fail(err, KVG_INVALID, "sampling output %u of %u", rows[i].output, job.cpu->step.n_outputs);
    thread_pool_for(job.cpu->pool, n, 1, sample_rows, &job);
    return 0;
}

/* ---- products ---- */

/* The acts_forms of its input that the weights of a product read. */
static uint32_t forms_of(const struct cpu_backend *cpu, const struct tensor *const weights[], uint32_t n)
{
    uint32_t forms = 0;
    for (uint32_t i = 0; i < n; i++)
        forms |= cpu_acts_form(cpu, &weights[i]->panels);
    return forms;
}

struct input_job {
    struct cpu_backend *cpu;
    uint32_t forms;
    const struct tensor *x;
    const struct backend_norm *norm; /* or NULL */
    const uint32_t *order;           /* of the columns, or NULL */
};

static void quantize_rows(const struct cpu_backend *cpu, uint32_t forms, const struct acts *acts, uint32_t first, uint32_t end)
{
    bool words = cpu->kernels.quantize_words && acts->rows >= cpu->kernels.words_from && acts->rows <= ACTS_TILE;
    if (forms & ACTS_INT8)
        cpu->kernels.quantize(acts, first, end);
    if (forms & ACTS_INT16 && words)
        cpu->kernels.quantize_words(acts, first, end);
    if (forms & ACTS_W4A16 || (forms & ACTS_INT16 && !words))
        cpu->kernels.quantize_int16(acts, first, end);
    if (forms & ACTS_ROWS8)
        cpu->kernels.quantize_rows8(acts, first, end);
    if (forms & ACTS_ROWS16)
        cpu->kernels.round_rows16(acts, first, end);
}

/* Row r of the input, normed and in the weights' order, to out; an ordered row is normed in `normed` first. */
static void input_row(const struct input_job *job, uint32_t r, float *out, float *normed)
{
    uint32_t cols = job->x->cols;
    const float *x = job->x->data + (size_t)r * cols;
    if (job->norm) {
        job->cpu->kernels.rmsnorm(x, job->norm->weight->data, cols, job->norm->eps, job->order ? normed : out);
        x = normed;
    }
    for (uint32_t i = 0; i < cols && job->order; i++)
        out[i] = x[job->order[i]];
}

static void input_rows(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct input_job *job = arg;
    const struct cpu_backend *cpu = job->cpu;
    size_t cols = cpu->acts.cols;
    if (!job->norm && !job->order) {
        quantize_rows(cpu, job->forms, &cpu->acts, first, end);
        return;
    }
    float *rows = cpu->scratch + thread * cpu->scratch_floats;
    uint32_t most = (uint32_t)(cpu->scratch_floats / cols) - (job->order ? 1 : 0), n;
    for (uint32_t r = first; r < end; r += n) {
        struct acts acts = cpu->acts;
        acts.x = rows - r * cols; /* so that its row r is the first of these */
        n = end - r < most ? end - r : most;
        for (uint32_t i = 0; i < n; i++)
            input_row(job, r + i, rows + i * cols, rows + most * cols);
        quantize_rows(cpu, job->forms, &acts, r, r + n);
    }
}

struct product_job {
    struct cpu_backend *cpu;
    const struct backend_matmul *args;
    const struct backend_gated *gated;
    bool gate_done;      /* the gate's product is in gated->out */
    uint32_t first, end; /* rows of this pass */
    struct input_job input;
    _Atomic uint32_t ready;    /* 0: finish_input has yet to run; items sleep on it */
    _Atomic uint32_t sleepers; /* how many */
};

static void finish_input(void *arg)
{
    struct product_job *job = arg;
    input_rows(&job->input, 0, 0, job->cpu->acts.rows);
    atomic_store(&job->ready, 1);
    wake_sleepers(&job->ready, &job->sleepers, FUTEX_PRIVATE_FLAG);
}

/* Before a thread's panels, which begin with `panel`: it asks for them until the input is there. */
static void await_input(struct product_job *job, const struct panels *weights, uint32_t panel)
{
    const uint8_t *at = weights->data + panel * weights->panel_bytes;
    size_t most = (weights->n_panels - panel) * weights->panel_bytes;
    most = most < AHEAD_OF_INPUT ? most : AHEAD_OF_INPUT;
    for (size_t i = 0; !atomic_load_explicit(&job->ready, memory_order_acquire); i += LINE) {
        if (i < most)
            __builtin_prefetch(at + i, 0, 2);
        else if (i < INPUT_LOOKS * LINE)
            cpu_pause();
        else
            sleep_while(&job->ready, 0, &job->sleepers, FUTEX_PRIVATE_FLAG);
    }
}

/* Brings n rows of x into the forms that a product reads, normed where `norm`. Normed rows are kept only for float weights, which
 * have no order. The rows of a tile share cache lines, so a thread takes whole tiles where there are several. Little work is left
 * to the caller in the product's loop. */
static void prepare_input(struct product_job *job, uint32_t n, const struct tensor *x, const struct backend_norm *norm,
                          uint32_t forms, const uint32_t *order)
{
    struct cpu_backend *cpu = job->cpu;
    if (norm && forms & ACTS_FLOATS) {
        cpu_rmsnorm(&cpu->base, n, x, norm->weight, norm->eps, norm->scratch);
        x = norm->scratch;
        norm = NULL;
    }
    cpu->acts.rows = n;
    cpu->acts.cols = x->cols;
    cpu->acts.x = x->data;
    cpu->acts.sums = n < cpu->kernels.int16_sums_below;
    job->input = (struct input_job){cpu, forms, x, norm, order};
    job->ready = 1;
    if (forms & ~ACTS_FLOATS && n >= 2 * ACTS_TILE)
        thread_pool_for(cpu->pool, n, ACTS_TILE, input_rows, &job->input);
    else if (forms & ~ACTS_FLOATS && (size_t)n * x->cols > INLINE_VALUES)
        for_rows(cpu, n, x->cols, input_rows, &job->input);
    else if (forms & ~ACTS_FLOATS)
        job->ready = 0;
}

/* Runs `item` over n_panels panels for every pass over at most `most` rows. */
static void for_passes(struct product_job *job, uint32_t n, uint32_t most, uint32_t n_panels, uint32_t forms,
                       thread_pool_item item)
{
    struct thread_pool *pool = job->cpu->pool;
    uint32_t wide = ACTS_INT16 | ACTS_W4A16 | ACTS_ROWS16;
    uint32_t row_bytes = job->cpu->acts.cols * (forms & ACTS_FLOATS ? 4 : forms & wide ? 2 : 1);
    uint32_t pass = PASS_BYTES / row_bytes / ACTS_TILE * ACTS_TILE;
    pass = pass > most ? most : pass < ACTS_TILE ? ACTS_TILE : pass;
    uint32_t passes = (n + pass - 1) / pass;
    pass = ((n + passes - 1) / passes + ACTS_TILE - 1) / ACTS_TILE * ACTS_TILE;
    for (uint32_t first = 0; first < n; first += pass) {
        job->first = first;
        job->end = n - first < pass ? n : first + pass;
        if (job->ready)
            thread_pool_for(pool, n_panels, THREAD_POOL_SHRINKING, item, job);
        else
            thread_pool_for_behind(pool, n_panels, THREAD_POOL_SHRINKING, item, finish_input, job);
    }
}

/* Items are the panels of all weights, one weight after the other. */
static void multiply_panels(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct product_job *job = arg;
    const struct cpu_backend *cpu = job->cpu;
    for (uint32_t i = first, w = 0, before = 0; i < end; i++) {
        while (i - before >= job->args->weights[w]->panels.n_panels)
            before += job->args->weights[w++]->panels.n_panels;
        const struct panels *panels = &job->args->weights[w]->panels;
        await_input(job, panels, i - before);
        const struct tensor *bias = job->args->biases[w];
        struct tensor *out = job->args->outs[w];
        struct panel_store store = {out->data, out->cols, bias ? bias->data : NULL, job->args->accumulate};
        cpu->kernels.panel[panels->kind](panels, i - before, &cpu->acts, job->first, job->end, &store);
    }
}

/* Weights of one order. */
static void multiply_alike(struct cpu_backend *cpu, uint32_t n, const struct tensor *x, const struct backend_norm *norm,
                           const struct backend_matmul *args)
{
    struct product_job job = {.cpu = cpu, .args = args};
    uint32_t forms = forms_of(cpu, args->weights, args->count);
    uint32_t n_panels = 0;
    for (uint32_t i = 0; i < args->count; i++)
        n_panels += args->weights[i]->panels.n_panels;
    prepare_input(&job, n, x, norm, forms, args->weights[0]->order);
    for_passes(&job, n, UINT32_MAX, n_panels, forms, multiply_panels);
}

static void multiply(struct cpu_backend *cpu, uint32_t n, const struct tensor *x, const struct backend_norm *norm,
                     const struct backend_matmul *args)
{
    for (uint32_t first = 0, end; first < args->count; first = end) {
        struct backend_matmul alike = {.accumulate = args->accumulate};
        for (end = first; end < args->count && args->weights[end]->order == args->weights[first]->order; end++) {
            alike.weights[end - first] = args->weights[end];
            alike.biases[end - first] = args->biases[end];
            alike.outs[end - first] = args->outs[end];
            alike.count++;
        }
        multiply_alike(cpu, n, x, norm, &alike);
    }
}

void cpu_matmul(struct backend *backend, uint32_t n, const struct tensor *x, const struct backend_matmul *args)
{
    multiply(cpu_of(backend), n, x, NULL, args);
}

void cpu_normed_matmul(struct backend *backend, uint32_t n, const struct tensor *x, const struct backend_norm *norm,
                       const struct backend_matmul *args)
{
    multiply(cpu_of(backend), n, x, norm, args);
}

static void multiply_gated(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct product_job *job = arg;
    const struct cpu_backend *cpu = job->cpu;
    const struct panels *gate = &job->gated->gate->panels, *up = &job->gated->up->panels;
    float *gate_out = cpu->scratch + thread * cpu->scratch_floats, *up_out = gate_out + GATED_ROWS * PANEL_ROWS;
    const struct tensor *out = job->gated->out;
    await_input(job, job->gate_done ? up : gate, first);
    for (uint32_t p = first; p < end; p++) {
        uint32_t left = out->cols - p * PANEL_ROWS;
        size_t at = (size_t)(job->first + p) * PANEL_ROWS; /* of the pass's first row and the panel's first column */
        struct panel_store to_gate = {gate_out - at, PANEL_ROWS, NULL, false}, to_up = {up_out - at, PANEL_ROWS, NULL, false};
        for (uint32_t r = job->first; r < job->end && job->gate_done; r++)
            memcpy(gate_out + (size_t)(r - job->first) * PANEL_ROWS, out->data + r * (size_t)out->cols + (size_t)p * PANEL_ROWS,
                   (left < PANEL_ROWS ? left : PANEL_ROWS) * sizeof *gate_out);
        if (!job->gate_done)
            cpu->kernels.panel[gate->kind](gate, p, &cpu->acts, job->first, job->end, &to_gate);
        cpu->kernels.panel[up->kind](up, p, &cpu->acts, job->first, job->end, &to_up);
        cpu->kernels.silu_mul_panel(gate_out, up_out, job->end - job->first, left < PANEL_ROWS ? left : PANEL_ROWS,
                                    out->data + job->first * (size_t)out->cols + (size_t)p * PANEL_ROWS, out->cols);
    }
}

void cpu_normed_gated(struct backend *backend, uint32_t n, const struct tensor *x, const struct backend_norm *norm,
                      const struct backend_gated *args)
{
    struct cpu_backend *cpu = cpu_of(backend);
    struct product_job job = {.cpu = cpu, .gated = args, .gate_done = args->gate->order != args->up->order};
    uint32_t forms = forms_of(cpu, (const struct tensor *const[]){args->up, args->gate}, job.gate_done ? 1 : 2);
    struct backend_matmul gate = {.count = 1, .weights = {args->gate}, .outs = {args->out}};
    if (job.gate_done)
        multiply(cpu, n, x, norm, &gate);
    prepare_input(&job, n, x, norm, forms, args->up->order);
    for_passes(&job, n, GATED_ROWS, args->gate->panels.n_panels, forms, multiply_gated);
}
