#include "gpu-worker/model/capacity.h"
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "gpu-worker/backend/backend.h"
#include "gpu-worker/backend/cpu/thread_pool.h"
#include "gpu-worker/model/loader.h"
#include "gpu-worker/model/share.h"

enum { ROUNDS = 4, PROBE_ROWS = 512, PROBE_COLS = 1024, PROBE_WIDTH = 4096, MOST_THREADS = 256, TYPES = 256 };
enum { PIECES = 512 };
static const size_t PIECE_WORDS = (1 << 20) / sizeof(uint64_t);

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* ---- the model --------------------------------------------------------------------------------------------------------- */

static bool starts(struct kvg_str name, const char *prefix)
{
    return name.len >= strlen(prefix) && memcmp(name.bytes, prefix, strlen(prefix)) == 0;
}

/* A layer's vectors (norms, biases) cost nothing beside its matrices. */
static void add_layers(struct capacity *out, const struct kvg_gguf *gguf)
{
    uint64_t by_type[TYPES] = {0};
    for (size_t i = 0; i < gguf->n_tensors; i++) {
        const struct kvg_gguf_tensor *tensor = &gguf->tensors[i];
        out->weight_bytes += tensor->n_bytes;
        if (!starts(tensor->name, "blk.") || tensor->n_dims < 2)
            continue;
        out->layer_bytes += tensor->n_bytes;
        out->layer_weights += tensor->dims[0] * tensor->dims[1];
        if (tensor->ggml_type < TYPES)
            by_type[tensor->ggml_type] += tensor->n_bytes;
    }
    for (uint32_t type = 0; type < TYPES; type++)
        if (by_type[type] > by_type[out->ggml_type])
            out->ggml_type = type;
}

/* In which format the folder's matrix `name` is multiplied. */
static int folder_format(const struct loader *loader, const char *name, const struct quant_format **out, struct kvg_error *err)
{
    const struct safetensors_tensor *tensor = safetensors_find(loader->folder, name);
    bool quantized = quantized_has(&loader->quantization, loader->folder, name);
    if (!quantized && !tensor)
        return kvg_fail(err, KVG_FILE, "tensor %s is missing", name);
    struct quantization own = quantization_of(&loader->quantization, name);
    *out = quantized ? quantized_format(&own) : safetensors_format(tensor->dtype);
    return *out ? 0
                : kvg_fail(err, KVG_UNSUPPORTED, "tensor %s has type %s, which is not supported", name,
                           safetensors_dtype_name(tensor->dtype));
}

static uint64_t format_bytes(const struct quant_format *format, uint64_t values)
{
    return (values * format->block_bytes + format->block_values - 1) / format->block_values;
}

/* A matrix [rows, cols] that the folder keeps as it keeps `name`, on the CPU, which takes grouped matrices. */
static int folder_bytes(const struct loader *loader, const char *name, uint64_t rows, uint32_t cols, uint64_t *out,
                        struct kvg_error *err)
{
    struct quant_grouped form;
    const struct quant_format *format;
    bool quantized = quantized_has(&loader->quantization, loader->folder, name);
    struct quantization own = quantization_of(&loader->quantization, name);
    int failed = folder_format(loader, name, &format, err);
    if (!failed)
        *out = quantized && quantized_grouped(&own, cols, &form)
                   ? grouped_bytes(form.kind, cols, form.group, form.zeros, rows * cols)
                   : format_bytes(format, rows * cols);
    return failed;
}

/* All matrices of the layers, which are kept as the first layer's. */
static int layers_bytes(struct capacity *out, const struct loader *loader, const struct shape *shape, struct kvg_error *err)
{
    uint32_t q = shape->n_heads * shape->head_dim, kv = shape->n_kv_heads * shape->head_dim;
    const struct {
        const char *name;
        uint64_t rows;
        uint32_t cols;
    } parts[] = {
        {"self_attn.q_proj", (uint64_t)q + 2 * (uint64_t)kv, shape->hidden},
        {"self_attn.o_proj", shape->hidden, q},
        {"mlp.up_proj", 2 * (uint64_t)shape->ffn, shape->hidden},
        {"mlp.down_proj", shape->hidden, shape->ffn},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        char name[96];
        uint64_t bytes;
        snprintf(name, sizeof name, "model.layers.0.%s.weight", parts[i].name);
        int failed = folder_bytes(loader, name, parts[i].rows, parts[i].cols, &bytes, err);
        if (failed)
            return failed;
        out->layer_bytes += shape->n_layers * bytes;
        out->layer_weights += shape->n_layers * parts[i].rows * parts[i].cols;
    }
    return 0;
}

/* Numbers by the shape, bytes as in the worker's memory: a quantized matrix is not there as the folder packs it. */
static int read_folder(struct capacity *out, const struct loader *loader, const struct shape *shape, struct kvg_error *err)
{
    static const char embedding[] = "model.embed_tokens.weight", down[] = "model.layers.0.mlp.down_proj.weight";
    const struct safetensors_tensor *table = safetensors_find(loader->folder, embedding);
    const struct quant_format *layers;
    bool own = loader_has_output(loader);
    int failed;
    if (!table || table->n_dims != 2 || table->shape[0] > UINT32_MAX || table->shape[1] != shape->hidden)
        return kvg_fail(err, KVG_FILE, "tensor %s is missing or no matrix of %u columns", embedding, shape->hidden);
    if ((failed = folder_format(loader, down, &layers, err)) || (failed = layers_bytes(out, loader, shape, err)) ||
        (failed =
             folder_bytes(loader, own ? "lm_head.weight" : embedding, table->shape[0], shape->hidden, &out->output_bytes, err)))
        return failed;
    out->n_vocab = (uint32_t)table->shape[0];
    out->output_weights = table->shape[0] * table->shape[1];
    out->weight_bytes = out->layer_bytes + table->n_bytes + (own ? out->output_bytes : 0);
    out->ggml_type = layers->ggml_type;
    out->grouped = quantized_has(&loader->quantization, loader->folder, down) &&
                   quantized_grouped(&loader->quantization, shape->ffn, &out->form);
    return 0;
}

static int read_header(struct capacity *out, const struct loader *loader, struct kvg_error *err)
{
    struct shape shape = {0};
    int failed = loader_shape(loader, &shape, err);
    if (failed)
        return failed;
    snprintf(out->family, sizeof out->family, "%s", loader->arch);
    out->n_layers = shape.n_layers;
    out->n_heads = shape.n_heads;
    out->n_kv_heads = shape.n_kv_heads;
    out->head_dim = shape.head_dim;
    out->ffn = shape.ffn;
    out->max_position = shape.max_position;
    if (loader->folder)
        return read_folder(out, loader, &shape, err);
    const struct kvg_gguf_tensor *output = kvg_gguf_tensor(loader->gguf, "output.weight");
    if (!output)
        output = kvg_gguf_tensor(loader->gguf, "token_embd.weight");
    if (!output)
        return kvg_fail(err, KVG_FILE, "tensor token_embd.weight is missing");
    out->n_vocab = (uint32_t)output->dims[1];
    out->output_bytes = output->n_bytes;
    out->output_weights = output->dims[0] * output->dims[1];
    add_layers(out, loader->gguf);
    return 0;
}

int capacity_read(struct capacity *out, const char *path, struct kvg_error *err)
{
    struct kvg_gguf *gguf;
    struct safetensors *folder;
    struct loader loader = {0};
    int failed = loader_open_files(path, &gguf, &folder, err);
    *out = (struct capacity){0};
    loader.folder = folder;
    if (!failed && !(failed = loader_init(&loader, gguf, NULL, err)))
        failed = read_header(out, &loader, err);
    loader_free(&loader);
    safetensors_close(folder);
    kvg_gguf_close(gguf);
    return failed;
}

int capacity_divide(struct capacity *model, uint32_t ranks, struct kvg_error *err)
{
    struct shape shape = {.n_heads = model->n_heads, .n_kv_heads = model->n_kv_heads, .ffn = model->ffn};
    struct share share;
    int failed = share_of(&share, &shape, 1, model->n_vocab, 0, ranks, err);
    if (!failed)
        model->n_kv_heads = share.n_kv_heads * ranks;
    return failed;
}

int capacity_kv_block_bytes(const struct capacity *model, const char *device, const char *isa, const char *kv_cache_dtype,
                            uint32_t block_size, uint64_t *out, struct kvg_error *err)
{
    struct backend_options options = {.isa = isa, .threads = 1, .max_rows = 1, .max_seqs = 1, .max_outputs = 1};
    struct backend_kv kv = {.n_layers = model->n_layers,
                            .n_heads = model->n_heads,
                            .n_kv_heads = model->n_kv_heads,
                            .head_dim = model->head_dim,
                            .block_size = block_size};
    struct backend *backend;
    int failed = backend_kv_dtype(kv_cache_dtype, &kv.dtype, err);
    if (failed)
        return failed;
    if (strcmp(device, "cuda") == 0) {
        uint64_t keys_and_values = (uint64_t)2 * model->n_layers * model->n_kv_heads * block_size;
        bool bytes = kv.dtype == KV_FP8 || kv.dtype == KV_INT8;
        if (kv.dtype == KV_F16)
            return kvg_fail(err, KVG_UNSUPPORTED, "--kv-cache-dtype f16: the CUDA backend keeps KV as bf16, fp8 or int8");
        *out = keys_and_values * (model->head_dim * (bytes ? 1 : sizeof(uint16_t)) + (kv.dtype == KV_INT8 ? sizeof(float) : 0));
        return 0;
    }
    if (kv.dtype == KV_FP8)
        return kvg_fail(err, KVG_UNSUPPORTED, "--kv-cache-dtype fp8: the CPU backend keeps KV as f16, bf16 or int8");
    if ((failed = cpu_backend_open(&backend, &options, err)))
        return failed;
    *out = backend->ops->kv_block_bytes(backend, &kv);
    backend->ops->close(backend);
    return 0;
}

/* ---- this CPU ---------------------------------------------------------------------------------------------------------- */

/* Memory in pieces, written first by the threads that read it, so that it lies near all of them. */
struct reading {
    uint64_t *words, sums[PIECES];
};

static void fill_pieces(void *context, uint32_t thread, uint32_t first, uint32_t end)
{
    struct reading *reading = context;
    for (size_t i = first * PIECE_WORDS; i < end * PIECE_WORDS; i++) /* pages of their own, not the one of zeros */
        reading->words[i] = i;
}

/* Sums that the compiler vectorizes: many loads in flight, so that memory is the limit. */
static void read_pieces(void *context, uint32_t thread, uint32_t first, uint32_t end)
{
    struct reading *reading = context;
    for (uint32_t piece = first; piece < end; piece++) {
        uint64_t sum = 0;
        for (size_t i = piece * PIECE_WORDS; i < (piece + 1) * PIECE_WORDS; i++)
            sum += reading->words[i];
        reading->sums[piece] = sum;
    }
}

/* The best of the rounds, in bytes a second; 0 where memory or threads are missing. */
static double measure_reading(uint32_t threads)
{
    struct reading reading = {.words = malloc(PIECES * PIECE_WORDS * sizeof(uint64_t))};
    struct thread_pool *pool = reading.words ? thread_pool_open(threads) : NULL;
    double best = 0;

    if (pool)
        thread_pool_for(pool, PIECES, THREAD_POOL_SHRINKING, fill_pieces, &reading);
    for (int round = 0; pool && round < ROUNDS; round++) {
        double began = seconds();
        thread_pool_for(pool, PIECES, THREAD_POOL_SHRINKING, read_pieces, &reading);
        double rate = (double)(PIECES * PIECE_WORDS * sizeof(uint64_t)) / (seconds() - began);
        best = rate > best ? rate : best;
    }
    thread_pool_close(pool);
    free(reading.words);
    return best;
}

static void read_nothing(const void *context, uint32_t first, uint32_t n, const struct grouped_rows *out)
{
    const struct quant_grouped *form = context;
    size_t groups = form->cols / form->group;
    memset(out->q, 0, (size_t)n * form->cols);
    memset(out->scale, 0, n * groups * sizeof *out->scale);
    memset(out->zero, 0, n * groups);
}

/* A large product in the model's own format. Codes are arbitrary bits: no product takes longer for its values. */
static int measure_products(struct backend *backend, const struct capacity *model, double *ops, struct kvg_error *err)
{
    struct tensor *weight = NULL, *x = NULL, *out = NULL;
    const struct quant_format *format = quant_find(model->ggml_type);
    size_t bytes = model->grouped ? 1 : quant_row_bytes(format, PROBE_COLS) * PROBE_WIDTH;
    uint8_t *data = calloc(1, bytes);
    struct quant_grouped form = model->form;
    struct backend_weight source = {
        .format = format, .data = data, .rows = PROBE_WIDTH, .cols = PROBE_COLS, .grouped = model->grouped ? &form : NULL};
    uint32_t ids[PROBE_ROWS] = {0}, block = 0;
    struct backend_kv kv = {1, 1, 1, 16, 1, PROBE_ROWS, KV_AUTO}; /* a step has a KV pool; this one writes nothing there */
    struct backend_seq seq = {.n_rows = PROBE_ROWS, .blocks = &block};
    struct backend_step step = {.n_rows = PROBE_ROWS, .n_seqs = 1, .ids = ids, .seqs = &seq};
    int failed;

    form.rows = PROBE_WIDTH;
    form.cols = PROBE_COLS;
    form.group = form.kind == GROUPED_W8A8 ? PROBE_COLS : form.group;
    form.context = &form;
    form.read = read_nothing;
    if (!data)
        return kvg_fail(err, KVG_NOMEM, "no memory for a matrix of %zu bytes", bytes);
    if ((failed = backend->ops->kv_alloc(backend, &kv, err)) ||
        (failed = backend->ops->weight(backend, &weight, &source, WEIGHT_MATMUL, err)) ||
        (failed = backend->ops->activation(backend, &x, PROBE_ROWS, PROBE_COLS, err)) ||
        (failed = backend->ops->activation(backend, &out, PROBE_ROWS, PROBE_WIDTH, err)))
        goto done;
    struct backend_matmul args = {.count = 1, .weights = {weight}, .outs = {out}};
    for (int round = 0; round < ROUNDS && !failed; round++) {
        double began = seconds();
        if ((failed = backend->ops->begin_step(backend, &step, err)))
            break;
        backend->ops->matmul(backend, PROBE_ROWS, x, &args);
        failed = backend->ops->end_step(backend, err);
        double rate = 2.0 * PROBE_ROWS * PROBE_COLS * PROBE_WIDTH / (seconds() - began);
        *ops = rate > *ops ? rate : *ops;
    }
done:
    free(data);
    return failed;
}

int capacity_measure_cpu(const struct capacity *model, uint32_t threads, const char *isa, struct machine_rates *out,
                         struct kvg_error *err)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    struct backend_options options = {.isa = isa, .threads = threads, .max_rows = PROBE_ROWS, .max_seqs = 1, .max_outputs = 1};
    const struct quant_format *format = quant_find(model->ggml_type);
    struct backend *backend;

    if (!format && !model->grouped)
        return kvg_fail(err, KVG_UNSUPPORTED, "type id %u is not supported", model->ggml_type);
    if (threads == 0)
        threads = cores > 0 ? (uint32_t)cores : 1;
    if (threads > MOST_THREADS)
        threads = MOST_THREADS;
    *out = (struct machine_rates){.bytes_per_s = measure_reading(threads)};
    if (out->bytes_per_s <= 0)
        return kvg_fail(err, KVG_NOMEM, "no memory or threads to measure how fast memory is read");
    int failed = cpu_backend_open(&backend, &options, err);
    if (failed)
        return failed;
    failed = measure_products(backend, model, &out->ops_per_s, err);
    backend->ops->close(backend);
    return failed;
}
