#include "gpu-worker/model/loader.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/log.h"
#include "gpu-worker/model/watch.h"

enum { KEY_SIZE = 96, FREQUENCIES_MAX = 512 };

int loader_init(struct loader *loader, const struct kvg_gguf *gguf, struct backend *backend, struct kvg_error *err)
{
    struct kvg_str arch;
    loader->gguf = gguf;
    loader->backend = backend;
    if (!kvg_gguf_str(gguf, "general.architecture", &arch) || arch.len == 0 || arch.len >= sizeof loader->arch)
        return kvg_fail(err, KVG_FILE, "general.architecture is missing or not a short string");
    memcpy(loader->arch, arch.bytes, arch.len);
    loader->arch[arch.len] = '\0';
    if (gguf->n_tensors == 0)
        return kvg_fail(err, KVG_FILE, "the file has no tensors (a cut file serves the gateway only)");
    loader->used = calloc(gguf->n_tensors, sizeof *loader->used);
    if (!loader->used)
        return kvg_fail(err, KVG_NOMEM, "no memory for %zu tensor marks", gguf->n_tensors);
    for (size_t i = 0; i < gguf->n_tensors; i++)
        loader->total_bytes += gguf->tensors[i].n_bytes;
    return 0;
}

void loader_free(struct loader *loader)
{
    free(loader->used);
    loader->used = NULL;
}

static void arch_key(const struct loader *loader, const char *key, char out[KEY_SIZE])
{
    snprintf(out, KEY_SIZE, "%s.%s", loader->arch, key);
}

static bool arch_u64(const struct loader *loader, const char *key, uint64_t *out)
{
    char full[KEY_SIZE];
    arch_key(loader, key, full);
    return kvg_gguf_u64(loader->gguf, full, out);
}

static bool arch_f64(const struct loader *loader, const char *key, double *out)
{
    char full[KEY_SIZE];
    arch_key(loader, key, full);
    return kvg_gguf_f64(loader->gguf, full, out);
}

int loader_u32(const struct loader *loader, const char *key, uint32_t most, uint32_t *out, struct kvg_error *err)
{
    uint64_t value;
    if (!arch_u64(loader, key, &value))
        return kvg_fail(err, KVG_FILE, "%s.%s is missing or not a whole number", loader->arch, key);
    if (value < 1 || value > most)
        return kvg_fail(err, KVG_FILE, "%s.%s is %llu, outside 1..%u", loader->arch, key, (unsigned long long)value, most);
    *out = (uint32_t)value;
    return 0;
}

/* *out keeps its value where the key is absent. */
static int optional_u32(const struct loader *loader, const char *key, uint32_t most, uint32_t *out, struct kvg_error *err)
{
    char full[KEY_SIZE];
    arch_key(loader, key, full);
    return kvg_gguf_find(loader->gguf, full) ? loader_u32(loader, key, most, out, err) : 0;
}

static int read_heads(const struct loader *loader, struct shape *shape, struct kvg_error *err)
{
    int failed;
    if ((failed = loader_u32(loader, "attention.head_count", 4096, &shape->n_heads, err)))
        return failed;
    shape->n_kv_heads = shape->n_heads;
    if ((failed = optional_u32(loader, "attention.head_count_kv", 4096, &shape->n_kv_heads, err)))
        return failed;
    if (shape->n_heads % shape->n_kv_heads)
        return kvg_fail(err, KVG_FILE, "%u heads are not divisible by %u kv heads", shape->n_heads, shape->n_kv_heads);
    shape->head_dim = 0;
    if ((failed = optional_u32(loader, "attention.key_length", 1024, &shape->head_dim, err)))
        return failed;
    if (shape->head_dim == 0) {
        if (shape->hidden % shape->n_heads)
            return kvg_fail(err, KVG_FILE, "hidden size %u is not divisible by %u heads", shape->hidden, shape->n_heads);
        shape->head_dim = shape->hidden / shape->n_heads;
    }
    uint32_t value_dim = shape->head_dim;
    if ((failed = optional_u32(loader, "attention.value_length", 1024, &value_dim, err)))
        return failed;
    if (value_dim != shape->head_dim)
        return kvg_fail(err, KVG_UNSUPPORTED, "value length %u differs from key length %u", value_dim, shape->head_dim);
    shape->rotated = shape->head_dim;
    if ((failed = optional_u32(loader, "rope.dimension_count", 1024, &shape->rotated, err)))
        return failed;
    if (shape->rotated > shape->head_dim || shape->rotated % 2)
        return kvg_fail(err, KVG_FILE, "rope.dimension_count %u does not fit head dimension %u", shape->rotated, shape->head_dim);
    return 0;
}

static int read_rope(const struct loader *loader, struct shape *shape, struct kvg_error *err)
{
    char key[KEY_SIZE];
    struct kvg_str type = {0};
    double factor = 1;

    shape->rope_base = 10000;
    arch_f64(loader, "rope.freq_base", &shape->rope_base);
    arch_key(loader, "rope.scaling.type", key);
    const struct kvg_gguf_value *value = kvg_gguf_find(loader->gguf, key);
    if (value && !kvg_gguf_str(loader->gguf, key, &type))
        return kvg_fail(err, KVG_FILE, "%s is not a string", key);
    bool linear = type.len == 6 && memcmp(type.bytes, "linear", 6) == 0;
    bool llama3 = type.len == 6 && memcmp(type.bytes, "llama3", 6) == 0;
    if (type.len && !linear && !llama3 && !(type.len == 4 && memcmp(type.bytes, "none", 4) == 0))
        return kvg_fail(err, KVG_UNSUPPORTED, "%s \"%.*s\" is not supported (none, linear, llama3)", key,
                        (int)(type.len < 64 ? type.len : 64), type.bytes);
    if (llama3 && !kvg_gguf_tensor(loader->gguf, "rope_freqs.weight"))
        return kvg_fail(err, KVG_FILE, "%s is llama3, but the tensor rope_freqs.weight is missing", key);
    if (linear || !type.len)
        arch_f64(loader, "rope.scale_linear", &factor);
    if (linear)
        arch_f64(loader, "rope.scaling.factor", &factor);
    shape->rope_linear = factor;
    if (!(shape->rope_base > 0 && shape->rope_base < 1e12) || !(factor > 0 && factor < 1e6))
        return kvg_fail(err, KVG_FILE, "rope base %g or scaling factor %g is out of range", shape->rope_base, factor);
    return 0;
}

int loader_shape(const struct loader *loader, struct shape *shape, struct kvg_error *err)
{
    uint64_t experts = 0;
    double eps;
    int failed;
    if ((failed = loader_u32(loader, "block_count", MAX_LAYERS, &shape->n_layers, err)) ||
        (failed = loader_u32(loader, "embedding_length", 1 << 17, &shape->hidden, err)) ||
        (failed = loader_u32(loader, "feed_forward_length", 1 << 20, &shape->ffn, err)) ||
        (failed = loader_u32(loader, "context_length", 1 << 28, &shape->max_position, err)) ||
        (failed = read_heads(loader, shape, err)) || (failed = read_rope(loader, shape, err)))
        return failed;
    if (!arch_f64(loader, "attention.layer_norm_rms_epsilon", &eps) || !(eps >= 0 && eps < 1))
        return kvg_fail(err, KVG_FILE, "%s.attention.layer_norm_rms_epsilon is missing or out of range", loader->arch);
    shape->eps = (float)eps;
    if (arch_u64(loader, "expert_count", &experts) && experts)
        return kvg_fail(err, KVG_UNSUPPORTED, "mixture-of-experts models are not supported (%llu experts)",
                        (unsigned long long)experts);
    return 0;
}

uint32_t loader_rows(const struct loader *loader, const char *name)
{
    const struct kvg_gguf_tensor *tensor = kvg_gguf_tensor(loader->gguf, name);
    return tensor && tensor->dims[1] <= UINT32_MAX ? (uint32_t)tensor->dims[1] : 0;
}

static int check_tensor(const struct kvg_gguf_tensor *tensor, const char *name, uint32_t rows, uint32_t cols,
                        struct kvg_error *err)
{
    if (tensor->dims[0] != cols || tensor->dims[1] != rows || tensor->dims[2] != 1 || tensor->dims[3] != 1)
        return kvg_fail(err, KVG_FILE, "tensor %s is [%llu, %llu, %llu, %llu], expected [%u, %u]", name,
                        (unsigned long long)tensor->dims[0], (unsigned long long)tensor->dims[1],
                        (unsigned long long)tensor->dims[2], (unsigned long long)tensor->dims[3], cols, rows);
    const struct quant_format *format = quant_find(tensor->ggml_type);
    if (!format)
        return kvg_fail(err, KVG_UNSUPPORTED, "tensor %s has type id %u, which is not supported", name, tensor->ggml_type);
    size_t row_bytes = quant_row_bytes(format, cols);
    if (row_bytes == 0 || tensor->n_bytes / row_bytes < rows)
        return kvg_fail(err, KVG_FILE, "tensor %s: %llu bytes do not hold %u rows of %u %s values", name,
                        (unsigned long long)tensor->n_bytes, rows, cols, format->name);
    return 0;
}

int loader_tensor(struct loader *loader, struct tensor **out, const char *name, uint32_t rows, uint32_t cols,
                  enum backend_weight_use use, enum loader_need need, struct kvg_error *err)
{
    const struct kvg_gguf_tensor *tensor = kvg_gguf_tensor(loader->gguf, name);
    *out = NULL;
    if (!tensor)
        return need == LOADER_OPTIONAL ? 0 : kvg_fail(err, KVG_FILE, "tensor %s is missing", name);
    int failed = check_tensor(tensor, name, rows, cols, err);
    if (failed)
        return failed;
    struct backend_weight weight = {quant_find(tensor->ggml_type), loader->gguf->map + tensor->offset, rows, cols};
    failed = loader->backend->ops->weight(loader->backend, out, &weight, use, err);
    if (failed) {
        struct kvg_error cause = err ? *err : (struct kvg_error){0};
        return kvg_fail(err, failed, "tensor %s: %.200s", name, cause.message);
    }
    if (use == WEIGHT_MATMUL && loader->watch)
        loader->watch->weight(loader->watch->context, name, *out, rows, cols);
    if (use == WEIGHT_MATMUL) /* the backend has a copy of its own */
        kvg_gguf_release(loader->gguf, tensor);
    bool *used = &loader->used[tensor - loader->gguf->tensors];
    loader->loaded_bytes += *used ? 0 : tensor->n_bytes; /* a tied embedding is loaded twice */
    *used = true;
    if (loader->progress && loader->total_bytes)
        loader->progress((double)loader->loaded_bytes / (double)loader->total_bytes, loader->context);
    return 0;
}

int loader_first_rows(struct loader *loader, struct tensor **out, const char *name, uint32_t rows, uint32_t cols,
                      struct kvg_error *err)
{
    const struct kvg_gguf_tensor *tensor = kvg_gguf_tensor(loader->gguf, name);
    struct backend_weight weight = {quant_find(tensor->ggml_type), loader->gguf->map + tensor->offset, rows, cols};

    return loader->backend->ops->weight(loader->backend, out, &weight, WEIGHT_MATMUL, err);
}

int loader_frequencies(struct loader *loader, const struct shape *shape, struct tensor **out, struct kvg_error *err)
{
    float frequencies[FREQUENCIES_MAX], factors[FREQUENCIES_MAX];
    uint32_t n = shape->rotated / 2;
    const struct kvg_gguf_tensor *tensor = kvg_gguf_tensor(loader->gguf, "rope_freqs.weight");
    if (n > FREQUENCIES_MAX)
        return kvg_fail(err, KVG_UNSUPPORTED, "%u rotated dimensions", shape->rotated);
    if (tensor) {
        int failed = check_tensor(tensor, "rope_freqs.weight", 1, n, err);
        if (failed)
            return failed;
        quant_decode(quant_find(tensor->ggml_type), loader->gguf->map + tensor->offset, factors, n);
        loader->used[tensor - loader->gguf->tensors] = true;
    }
    for (uint32_t i = 0; i < n; i++) {
        double frequency = pow(shape->rope_base, -2.0 * i / shape->rotated) / shape->rope_linear;
        frequencies[i] = (float)(tensor ? frequency / (double)factors[i] : frequency);
        if (!isfinite(frequencies[i]))
            return kvg_fail(err, KVG_FILE, "rope_freqs.weight[%u] is %g", i, (double)factors[i]);
    }
    struct backend_weight weight = {&quant_f32, frequencies, 1, n};
    return loader->backend->ops->weight(loader->backend, out, &weight, WEIGHT_VECTOR, err);
}

int loader_finish(const struct loader *loader, struct kvg_error *err)
{
    for (size_t i = 0; i < loader->gguf->n_tensors; i++) {
        struct kvg_str name = loader->gguf->tensors[i].name;
        int shown = (int)(name.len < 100 ? name.len : 100);
        if (loader->used[i])
            continue;
        if (name.len > 4 && memcmp(name.bytes, "blk.", 4) == 0)
            return kvg_fail(err, KVG_UNSUPPORTED, "tensor %.*s is not part of a %s model of this shape", shown, name.bytes,
                            loader->arch);
        log_warn("tensor %.*s is not used by a %s model: ignored", shown, name.bytes, loader->arch);
    }
    return 0;
}
