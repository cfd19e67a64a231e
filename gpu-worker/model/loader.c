#include "gpu-worker/model/loader.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "gpu-worker/log.h"
#include "gpu-worker/model/family.h"
#include "gpu-worker/model/watch.h"

enum { KEY_SIZE = 96, FREQUENCIES_MAX = 512 };

static size_t n_tensors(const struct loader *loader)
{
    return loader->folder ? loader->folder->n_tensors : loader->gguf->n_tensors;
}

int loader_open_files(const char *path, struct kvg_gguf **gguf, struct safetensors **folder, struct kvg_error *err)
{
    struct stat st;
    *folder = NULL;
    int failed = kvg_gguf_open(gguf, path, err);
    if (!failed && stat(path, &st) == 0 && S_ISDIR(st.st_mode))
        failed = safetensors_open(folder, path, err);
    return failed;
}

static int choose_family(struct loader *loader, struct kvg_error *err)
{
    char names[128];
    if ((loader->family = family_find(loader->arch)))
        return 0;
    family_names(names, sizeof names);
    return kvg_fail(err, KVG_UNSUPPORTED, "architecture \"%s\" is not supported (%s)", loader->arch, names);
}

int loader_init(struct loader *loader, const struct kvg_gguf *gguf, struct backend *backend, struct kvg_error *err)
{
    struct kvg_str arch;
    loader->gguf = gguf;
    loader->backend = backend;
    if (!kvg_gguf_str(gguf, "general.architecture", &arch) || arch.len == 0 || arch.len >= sizeof loader->arch)
        return kvg_fail(err, KVG_FILE, "general.architecture is missing or not a short string");
    memcpy(loader->arch, arch.bytes, arch.len);
    loader->arch[arch.len] = '\0';
    int failed = quantization_read(&loader->quantization, gguf, err);
    if (failed)
        return failed;
    size_t n = n_tensors(loader);
    if (n == 0)
        return kvg_fail(err, KVG_FILE, "the file has no tensors (a cut file serves the gateway only)");
    if ((failed = choose_family(loader, err)))
        return failed;
    loader->used = calloc(n, sizeof *loader->used);
    if (!loader->used)
        return kvg_fail(err, KVG_NOMEM, "no memory for %zu tensor marks", n);
    for (size_t i = 0; i < n; i++)
        loader->total_bytes += loader->folder ? loader->folder->tensors[i].n_bytes : gguf->tensors[i].n_bytes;
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

/* A number of rope scaling; the default where it is absent. */
static double scaling_number(const struct loader *loader, const char *name, double value)
{
    char key[48];
    snprintf(key, sizeof key, "rope.scaling.%s", name);
    arch_f64(loader, key, &value);
    return value;
}

static int read_scaling_type(const struct loader *loader, enum rope_scaling *out, bool *named, struct kvg_error *err)
{
    static const char *const names[] = {"none", "linear", "llama3", "yarn"};
    char key[KEY_SIZE];
    struct kvg_str type;
    arch_key(loader, "rope.scaling.type", key);
    *named = kvg_gguf_find(loader->gguf, key) != NULL;
    *out = ROPE_PLAIN;
    if (!*named)
        return 0;
    if (!kvg_gguf_str(loader->gguf, key, &type))
        return kvg_fail(err, KVG_FILE, "%s is not a string", key);
    for (int i = 0; i < (loader->folder ? 4 : 3); i++)
        if (kvg_str_eq(type, names[i])) {
            *out = (enum rope_scaling)i;
            return 0;
        }
    return kvg_fail(err, KVG_UNSUPPORTED, "%s \"%.*s\" is not supported (none, linear, llama3%s)", key,
                    (int)(type.len < 64 ? type.len : 64), type.bytes, loader->folder ? ", yarn" : "");
}

/* What yarn multiplies cosines and sines by: queries and keys alike, so scores by its square. */
static double yarn_attention(const struct loader *loader, double factor)
{
    double mscale = scaling_number(loader, "mscale", 0), all = scaling_number(loader, "mscale_all_dim", 0);
    double given = scaling_number(loader, "attn_factor", 0), log_factor = factor > 1 ? 0.1 * log(factor) : 0;
    if (given != 0)
        return given;
    return mscale != 0 && all != 0 ? (mscale * log_factor + 1) / (all * log_factor + 1) : log_factor + 1;
}

static int read_rope(const struct loader *loader, struct shape *shape, struct kvg_error *err)
{
    struct rope *rope = &shape->rope;
    bool named;
    int failed = read_scaling_type(loader, &rope->scaling, &named, err);
    if (failed)
        return failed;
    rope->base = 10000;
    arch_f64(loader, "rope.freq_base", &rope->base);
    rope->factor = 1;
    if (rope->scaling == ROPE_LINEAR || !named)
        arch_f64(loader, "rope.scale_linear", &rope->factor);
    if (rope->factor != 1)
        rope->scaling = ROPE_LINEAR;
    if (rope->scaling == ROPE_LLAMA3 && !loader->folder) { /* its factors are a tensor there */
        if (!kvg_gguf_tensor(loader->gguf, "rope_freqs.weight"))
            return kvg_fail(err, KVG_FILE, "%s.rope.scaling.type is llama3, but the tensor rope_freqs.weight is missing",
                            loader->arch);
        rope->scaling = ROPE_PLAIN;
    }
    if (rope->scaling != ROPE_PLAIN)
        rope->factor = scaling_number(loader, "factor", rope->factor);
    rope->low = scaling_number(loader, "low_freq_factor", 1);
    rope->high = scaling_number(loader, "high_freq_factor", 4);
    rope->original = scaling_number(loader, "original_context_length", shape->max_position);
    rope->beta_fast = scaling_number(loader, "yarn_beta_fast", 32);
    rope->beta_slow = scaling_number(loader, "yarn_beta_slow", 1);
    if (!(rope->base > 0 && rope->base < 1e12) || !(rope->factor > 0 && rope->factor < 1e6))
        return kvg_fail(err, KVG_FILE, "rope base %g or scaling factor %g is out of range", rope->base, rope->factor);
    if (!(rope->low > 0 && rope->low < rope->high && rope->high < 1e6) || !(rope->original >= 1 && rope->original < 1e9) ||
        !(rope->beta_slow > 0 && rope->beta_slow < rope->beta_fast && rope->beta_fast < 1e6))
        return kvg_fail(err, KVG_FILE,
                        "rope scaling: frequency factors %g and %g, original context %g or betas %g and %g are out of range",
                        rope->low, rope->high, rope->original, rope->beta_slow, rope->beta_fast);
    return 0;
}

/* Windows of layers: as a folder lists them, or as Gemma 3's GGUF files imply (every sixth layer sees all). */
static int read_windows(const struct loader *loader, struct shape *shape, struct kvg_error *err)
{
    bool gemma = strcmp(loader->arch, "gemma3") == 0;
    uint32_t window = 0;
    char key[KEY_SIZE];
    int failed = optional_u32(loader, "attention.sliding_window", 1 << 30, &window, err);
    if (failed || window == 0)
        return failed;
    arch_key(loader, "attention.sliding_layers", key);
    const struct kvg_gguf_value *list = kvg_gguf_find(loader->gguf, key);
    if (!list && !gemma)
        return 0;
    if (list && (list->type != KVG_GGUF_ARRAY || list->item_type != KVG_GGUF_I32 || list->n != shape->n_layers))
        return kvg_fail(err, KVG_FILE, "%s has no number for each of %u layers", key, shape->n_layers);
    for (uint32_t i = 0; i < shape->n_layers; i++) {
        bool slides = list ? list->bytes[4 * i] != 0 : i % 6 < 5;
        shape->windows[i] = slides && window < shape->max_position ? window : 0;
        shape->windowed |= shape->windows[i] != 0;
    }
    shape->window_base = gemma ? 10000 : 0;
    arch_f64(loader, "rope.freq_base_swa", &shape->window_base);
    if (!(shape->window_base >= 0 && shape->window_base < 1e12))
        return kvg_fail(err, KVG_FILE, "%s.rope.freq_base_swa %g is out of range", loader->arch, shape->window_base);
    return 0;
}

static void read_attention_scale(const struct loader *loader, struct shape *shape)
{
    bool gemma_27b = strcmp(loader->arch, "gemma3") == 0 && shape->n_layers == 62; /* GGUF files do not say it */
    double scale = 1 / sqrt(gemma_27b ? (double)shape->hidden / shape->n_heads : (double)shape->head_dim);
    if (loader->folder)
        arch_f64(loader, "attention.scale", &scale);
    double factor = shape->rope.scaling == ROPE_YARN ? yarn_attention(loader, shape->rope.factor) : 1;
    shape->attention_scale = (float)(scale * factor * factor);
}

int loader_shape(const struct loader *loader, struct shape *shape, struct kvg_error *err)
{
    uint64_t experts = 0;
    double eps;
    int failed;
    *shape = (struct shape){0};
    if ((failed = loader_u32(loader, "block_count", MAX_LAYERS, &shape->n_layers, err)) ||
        (failed = loader_u32(loader, "embedding_length", 1 << 17, &shape->hidden, err)) ||
        (failed = loader_u32(loader, "feed_forward_length", 1 << 20, &shape->ffn, err)) ||
        (failed = loader_u32(loader, "context_length", 1 << 28, &shape->max_position, err)) ||
        (failed = read_heads(loader, shape, err)) || (failed = read_rope(loader, shape, err)) ||
        (failed = read_windows(loader, shape, err)))
        return failed;
    read_attention_scale(loader, shape);
    if (!arch_f64(loader, "attention.layer_norm_rms_epsilon", &eps) || !(eps >= 0 && eps < 1))
        return kvg_fail(err, KVG_FILE, "%s.attention.layer_norm_rms_epsilon is missing or out of range", loader->arch);
    shape->eps = (float)eps;
    if (arch_u64(loader, "expert_count", &experts) && experts)
        return kvg_fail(err, KVG_UNSUPPORTED, "mixture-of-experts models are not supported (%llu experts)",
                        (unsigned long long)experts);
    return 0;
}

/* ---- tensors ---- */

/* A tensor of either kind of file. */
struct source {
    const struct quant_format *format; /* NULL: type says what it is */
    const char *type;
    const unsigned char *data;
    uint64_t dims[4]; /* dims[0] varies fastest */
    uint64_t n_bytes;
    size_t index; /* into loader->used */
};

/* Parts of "blk.N.<part>.weight" and what folders call them in "model.layers.N.". */
static const struct {
    const char *part, *folder, *post_norms; /* the latter where the family has post-norms and it differs */
} parts[] = {
    {"attn_norm", "input_layernorm", NULL},
    {"attn_q", "self_attn.q_proj", NULL},
    {"attn_k", "self_attn.k_proj", NULL},
    {"attn_v", "self_attn.v_proj", NULL},
    {"attn_output", "self_attn.o_proj", NULL},
    {"attn_q_norm", "self_attn.q_norm", NULL},
    {"attn_k_norm", "self_attn.k_norm", NULL},
    {"ffn_norm", "post_attention_layernorm", "pre_feedforward_layernorm"},
    {"post_attention_norm", "post_attention_layernorm", NULL},
    {"post_ffw_norm", "post_feedforward_layernorm", NULL},
    {"ffn_gate", "mlp.gate_proj", NULL},
    {"ffn_up", "mlp.up_proj", NULL},
    {"ffn_down", "mlp.down_proj", NULL},
};

enum { NAME_SIZE = 160 };

/* The name in this file of the tensor that GGUF files call `name`. */
static const char *file_name(const struct loader *loader, const char *name, char out[NAME_SIZE])
{
    unsigned layer;
    char part[64], kind[16];
    if (!loader->folder)
        return name;
    if (strcmp(name, "token_embd.weight") == 0)
        return "model.embed_tokens.weight";
    if (strcmp(name, "output_norm.weight") == 0)
        return "model.norm.weight";
    if (strcmp(name, "output.weight") == 0)
        return "lm_head.weight";
    if (sscanf(name, "blk.%u.%63[^.].%15s", &layer, part, kind) != 3)
        return name;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strcmp(parts[i].part, part) == 0) {
            bool post = parts[i].post_norms && loader->family->traits & FAMILY_POST_NORMS;
            snprintf(out, NAME_SIZE, "model.layers.%u.%s.%s", layer, post ? parts[i].post_norms : parts[i].folder, kind);
            return out;
        }
    return name;
}

bool loader_gguf_name(const char *name, bool post_norms, char out[64])
{
    int layer, used = 0;
    if (sscanf(name, "model.layers.%d.%n", &layer, &used) != 1 || used == 0 || layer < 0)
        return false;
    const char *kind = strrchr(name + used, '.');
    for (size_t i = 0; kind && i < sizeof parts / sizeof *parts; i++) {
        const char *part = post_norms && parts[i].post_norms ? parts[i].post_norms : parts[i].folder;
        bool here = post_norms || strncmp(parts[i].part, "post_", strlen("post_")) != 0;
        size_t n = strlen(part);
        if (here && name + used + n == kind && memcmp(name + used, part, n) == 0)
            return snprintf(out, 64, "blk.%d.%s%s", layer, parts[i].part, kind) < 64;
    }
    return false;
}

static bool find_folder(const struct loader *loader, const char *name, struct source *out)
{
    const struct safetensors_tensor *tensor = safetensors_find(loader->folder, name);
    if (!tensor)
        return false;
    *out = (struct source){.format = safetensors_format(tensor->dtype),
                           .type = safetensors_dtype_name(tensor->dtype),
                           .data = tensor->data,
                           .n_bytes = tensor->n_bytes,
                           .index = (size_t)(tensor - loader->folder->tensors)};
    for (uint32_t i = 0; i < 4; i++)
        out->dims[i] = i < tensor->n_dims ? tensor->shape[tensor->n_dims - 1 - i] : 1;
    if (tensor->n_dims > 4)
        out->dims[3] = 0; /* fits nothing */
    return true;
}

/* name: the file's own. */
static bool find_source(const struct loader *loader, const char *name, struct source *out)
{
    if (loader->folder)
        return find_folder(loader, name, out);
    const struct kvg_gguf_tensor *tensor = kvg_gguf_tensor(loader->gguf, name);
    if (!tensor)
        return false;
    const struct kvg_gguf_layout *layout = kvg_gguf_layout(tensor->ggml_type);
    *out = (struct source){.format = quant_find(tensor->ggml_type),
                           .type = layout ? layout->name : "?",
                           .data = loader->gguf->map + tensor->offset,
                           .n_bytes = tensor->n_bytes,
                           .index = (size_t)(tensor - loader->gguf->tensors)};
    memcpy(out->dims, tensor->dims, sizeof out->dims);
    return true;
}

uint32_t loader_rows(const struct loader *loader, const char *name)
{
    char full[NAME_SIZE];
    struct source source;
    return find_source(loader, file_name(loader, name, full), &source) && source.dims[1] <= UINT32_MAX ? (uint32_t)source.dims[1]
                                                                                                       : 0;
}

uint32_t loader_block(const struct loader *loader, const char *name)
{
    char full[NAME_SIZE];
    struct source source;
    const char *file = file_name(loader, name, full);
    if (loader->folder && quantized_has(&loader->quantization, loader->folder, file))
        return QUANT_GROUP;
    return find_source(loader, file, &source) && source.format ? source.format->block_values : 1;
}

bool loader_has_output(const struct loader *loader)
{
    bool tied = false;
    struct source source;
    if (!loader->folder)
        return find_source(loader, "output.weight", &source);
    kvg_gguf_bool(loader->gguf, "kvgate.tie_word_embeddings", &tied);
    return !tied;
}

static int check_source(const struct source *source, const char *name, uint32_t rows, uint32_t cols, struct kvg_error *err)
{
    if (source->dims[0] != cols || source->dims[1] != rows || source->dims[2] != 1 || source->dims[3] != 1)
        return kvg_fail(err, KVG_FILE, "tensor %s is [%llu, %llu, %llu, %llu], expected [%u, %u]", name,
                        (unsigned long long)source->dims[0], (unsigned long long)source->dims[1],
                        (unsigned long long)source->dims[2], (unsigned long long)source->dims[3], cols, rows);
    if (!source->format)
        return kvg_fail(err, KVG_UNSUPPORTED, "tensor %s has type %s, which is not supported", name, source->type);
    size_t row_bytes = quant_row_bytes(source->format, cols);
    if (row_bytes == 0 || source->n_bytes / row_bytes < rows)
        return kvg_fail(err, KVG_FILE, "tensor %s: %llu bytes do not hold %u rows of %u %s values", name,
                        (unsigned long long)source->n_bytes, rows, cols, source->format->name);
    return 0;
}

/* Leaves of the weight, as it lies in the file, what the part is. Columns that lie apart are copied to *copy, which the caller
 * frees when the backend has its own. */
static int cut(const struct loader *loader, struct backend_weight *weight, const char *name, const struct loader_part *part,
               void **copy, struct kvg_error *err)
{
    const struct quant_format *format = weight->format;
    size_t row_bytes = quant_row_bytes(format, weight->cols), bytes = quant_row_bytes(format, part->cols);
    size_t skipped = (size_t)part->first_col / format->block_values * format->block_bytes;
    const uint8_t *from = (const uint8_t *)weight->data + part->first_row * row_bytes + skipped;
    bool whole_rows = part->cols == weight->cols;
    *copy = NULL;
    if (part->first_col % format->block_values || bytes == 0)
        return kvg_fail(err, KVG_INVALID,
                        "tensor %s: columns %u to %u, the part of rank %u of %u, do not begin and end on borders of %s blocks "
                        "of %u columns: another --tensor-parallel-size is needed",
                        name, part->first_col, part->first_col + part->cols - 1, loader->rank, loader->ranks, format->name,
                        format->block_values);
    weight->rows = part->rows;
    weight->cols = part->cols;
    weight->data = from;
    if (whole_rows || part->rows == 1)
        return 0;
    uint8_t *to = *copy = malloc(part->rows * bytes);
    if (!to)
        return kvg_fail(err, KVG_NOMEM, "no memory for %u rows of a part of tensor %s", part->rows, name);
    for (size_t r = 0; r < part->rows; r++)
        memcpy(to + r * bytes, from + r * row_bytes, bytes);
    weight->data = to;
    weight->source = weight->source ? weight->source : from;
    return 0;
}

static struct loader_part whole_of(uint32_t rows, uint32_t cols)
{
    return (struct loader_part){0, rows, 0, cols};
}

/* What the backend has against a tensor, or a part of it. */
static int name_fault(int failed, const char *name, const struct loader_part *part, struct kvg_error *err)
{
    struct kvg_error cause = err ? *err : (struct kvg_error){0};
    if (part->first_row || part->first_col)
        return kvg_fail(err, failed, "tensor %s, from row %u and column %u on: %.160s", name, part->first_row, part->first_col,
                        cause.message);
    return kvg_fail(err, failed, "tensor %s: %.200s", name, cause.message);
}

/* What tells the parts of a quantized matrix apart: as far into its codes as the part begins in the matrix. */
static const void *part_of_codes(const struct safetensors_tensor *codes, uint32_t rows, uint32_t cols,
                                 const struct loader_part *part)
{
    double before = ((double)part->first_row * cols + part->first_col) / ((double)rows * cols);
    return codes->data + (size_t)(before * (double)codes->n_bytes);
}

/* A matrix [rows, cols] of a quantized folder, of which the part becomes the tensor. Where columns are cut they must lie in their
 * own order. */
static int load_quantized(struct loader *loader, struct tensor **out, const char *name, uint32_t rows, uint32_t cols,
                          const struct loader_part *part, struct quantized_matrix *matrix, struct kvg_error *err)
{
    bool whole_rows = part->cols == cols;
    void *copy = NULL;
    int failed = quantized_read(matrix, &loader->quantization, loader->folder, name, rows, cols,
                                loader->backend->gathers && whole_rows, loader->backend->grouped && whole_rows, err);
    if (failed)
        return failed;
    matrix->grouped.first = part->first_row;
    matrix->grouped.rows = part->rows;
    struct backend_weight weight = {.format = matrix->format,
                                    .data = matrix->data,
                                    .rows = matrix->format ? rows : part->rows,
                                    .cols = cols,
                                    .source = part_of_codes(matrix->parts[0], rows, cols, part),
                                    .order = matrix->order,
                                    .grouped = matrix->format ? NULL : &matrix->grouped};
    if (matrix->format)
        failed = cut(loader, &weight, name, part, &copy, err);
    if (!failed && (failed = loader->backend->ops->weight(loader->backend, out, &weight, WEIGHT_MATMUL, err)))
        failed = name_fault(failed, name, part, err);
    free(copy);
    quantized_free_data(matrix);
    return failed;
}

/* The backend has a copy of its own. */
static void release(const struct loader *loader, const struct source *source)
{
    if (loader->folder)
        safetensors_release(loader->folder, &loader->folder->tensors[source->index]);
    else
        kvg_gguf_release(loader->gguf, &loader->gguf->tensors[source->index]);
}

static void mark_used(struct loader *loader, const struct source *source)
{
    bool *used = &loader->used[source->index];
    loader->loaded_bytes += *used ? 0 : source->n_bytes; /* a tied embedding is loaded twice */
    *used = true;
    if (loader->progress && loader->total_bytes)
        loader->progress((double)loader->loaded_bytes / (double)loader->total_bytes, loader->context);
}

/* A norm of a folder whose family keeps them less 1. */
static int load_norm(struct loader *loader, struct tensor **out, const char *name, const struct source *source, uint32_t cols,
                     struct kvg_error *err)
{
    struct loader_part whole = whole_of(1, cols);
    float *values = malloc(cols * sizeof *values);
    if (!values)
        return kvg_fail(err, KVG_NOMEM, "no memory for %u values", cols);
    quant_decode(source->format, source->data, values, cols);
    for (uint32_t i = 0; i < cols; i++)
        values[i] += 1;
    struct backend_weight weight = {.format = &quant_f32, .data = values, .rows = 1, .cols = cols};
    int failed = loader->backend->ops->weight(loader->backend, out, &weight, WEIGHT_VECTOR, err);
    free(values);
    return failed ? name_fault(failed, name, &whole, err) : 0;
}

static int quantized_tensor(struct loader *loader, struct tensor **out, const char *name, uint32_t rows, uint32_t cols,
                            const struct loader_part *part, struct kvg_error *err)
{
    struct quantized_matrix matrix;
    int failed = load_quantized(loader, out, name, rows, cols, part, &matrix, err);
    for (uint32_t i = 0; i < QUANTIZED_PARTS && !failed && matrix.parts[i]; i++) {
        struct source source = {.n_bytes = matrix.parts[i]->n_bytes,
                                .index = (size_t)(matrix.parts[i] - loader->folder->tensors)};
        release(loader, &source);
        mark_used(loader, &source);
    }
    return failed;
}

/* Infinities and NaN: where the backend looks for none, as in matrices that it packs (a tied embedding is one of them). */
static int check_values(const struct loader *loader, const struct source *source, const char *name, uint32_t rows, uint32_t cols,
                        struct kvg_error *err)
{
    size_t row_bytes = quant_row_bytes(source->format, cols);
    for (uint32_t row = 0; row < rows; row++)
        if (!quant_row_finite(source->format, source->data + row * row_bytes, cols))
            return kvg_fail(err, KVG_FILE, "tensor %s: row %u holds an infinity or NaN", name, row);
    release(loader, source); /* what is needed of it comes back by itself */
    return 0;
}

int loader_tensor(struct loader *loader, struct tensor **out, const char *name, uint32_t rows, uint32_t cols,
                  enum backend_weight_use use, enum loader_need need, struct kvg_error *err)
{
    struct loader_part whole = whole_of(rows, cols);
    return loader_tensor_part(loader, out, name, rows, cols, &whole, use, need, err);
}

/* Hands the part of a checked tensor to the backend. */
static int load_source(struct loader *loader, struct tensor **out, const char *name, const struct source *source, uint32_t rows,
                       uint32_t cols, const struct loader_part *part, enum backend_weight_use use, struct kvg_error *err)
{
    struct backend_weight weight = {.format = source->format, .data = source->data, .rows = rows, .cols = cols};
    void *copy;
    int failed = cut(loader, &weight, name, part, &copy, err);
    if (failed)
        return failed;
    if ((failed = loader->backend->ops->weight(loader->backend, out, &weight, use, err)))
        failed = name_fault(failed, name, part, err);
    free(copy);
    return failed;
}

int loader_tensor_part(struct loader *loader, struct tensor **out, const char *name, uint32_t rows, uint32_t cols,
                       const struct loader_part *part, enum backend_weight_use use, enum loader_need need, struct kvg_error *err)
{
    char full[NAME_SIZE];
    struct source source;
    const char *asked = name;
    size_t length = strlen(name);
    bool norm = use == WEIGHT_VECTOR && length > 12 && strcmp(name + length - 12, "_norm.weight") == 0;
    *out = NULL;
    name = file_name(loader, name, full);
    if (use == WEIGHT_MATMUL && loader->folder && quantized_has(&loader->quantization, loader->folder, name)) {
        int failed = quantized_tensor(loader, out, name, rows, cols, part, err);
        if (!failed && loader->watch)
            loader->watch->weight(loader->watch->context, asked, *out, rows, cols);
        return failed;
    }
    if (!find_source(loader, name, &source))
        return need == LOADER_OPTIONAL ? 0 : kvg_fail(err, KVG_FILE, "tensor %s is missing", name);
    int failed = check_source(&source, name, rows, cols, err);
    if (!failed && (use == WEIGHT_VECTOR || (use == WEIGHT_EMBEDDING && loader_has_output(loader))))
        failed = check_values(loader, &source, name, rows, cols, err);
    if (failed)
        return failed;
    if (norm && loader->folder && loader->family->traits & FAMILY_NORM_PLUS_1)
        failed = load_norm(loader, out, name, &source, cols, err);
    else
        failed = load_source(loader, out, name, &source, rows, cols, part, use, err);
    if (failed)
        return failed;
    if (use == WEIGHT_MATMUL && loader->watch)
        loader->watch->weight(loader->watch->context, asked, *out, rows, cols);
    if (use == WEIGHT_MATMUL)
        release(loader, &source);
    mark_used(loader, &source);
    return 0;
}

int loader_first_rows(struct loader *loader, struct tensor **out, const char *name, uint32_t rows, uint32_t cols,
                      struct kvg_error *err)
{
    char full[NAME_SIZE];
    struct source source;
    const char *file = file_name(loader, name, full);
    if (loader->folder && quantized_has(&loader->quantization, loader->folder, file)) {
        struct quantized_matrix matrix;
        struct loader_part part = whole_of(rows, cols);
        return load_quantized(loader, out, file, loader_rows(loader, "token_embd.weight"), cols, &part, &matrix, err);
    }
    if (!find_source(loader, file, &source))
        return kvg_fail(err, KVG_FILE, "tensor %s is missing", name);
    struct backend_weight weight = {.format = source.format, .data = source.data, .rows = rows, .cols = cols};
    return loader->backend->ops->weight(loader->backend, out, &weight, WEIGHT_MATMUL, err);
}

/* ---- rotary frequencies ---- */

/* Frequency `plain`, as Llama 3.1's model card scales it. */
static double llama3_frequency(const struct rope *rope, double plain)
{
    double wave = 2 * M_PI / plain, smooth = (rope->original / wave - rope->low) / (rope->high - rope->low);
    if (wave < rope->original / rope->high)
        return plain;
    if (wave > rope->original / rope->low)
        return plain / rope->factor;
    return (1 - smooth) * plain / rope->factor + smooth * plain;
}

/* The pair that turns `rotations` times over the context of training. */
static double yarn_pair(const struct rope *rope, double rotations, double rotated)
{
    return rotated * log(rope->original / (rotations * 2 * M_PI)) / (2 * log(rope->base));
}

static double yarn_frequency(const struct rope *rope, double plain, uint32_t i, uint32_t rotated)
{
    double low = floor(yarn_pair(rope, rope->beta_fast, rotated)), high = ceil(yarn_pair(rope, rope->beta_slow, rotated));
    low = low < 0 ? 0 : low;
    high = high > rotated - 1 ? rotated - 1 : high;
    high = high == low ? high + 0.001 : high;
    double ramp = (i - low) / (high - low), stretched = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
    return plain / rope->factor * stretched + plain * (1 - stretched);
}

static double scaled_frequency(const struct rope *rope, uint32_t i, uint32_t rotated)
{
    double plain = pow(rope->base, -2.0 * i / rotated);
    switch (rope->scaling) {
    case ROPE_LINEAR:
        return plain / rope->factor;
    case ROPE_LLAMA3:
        return llama3_frequency(rope, plain);
    case ROPE_YARN:
        return yarn_frequency(rope, plain, i, rotated);
    default:
        return plain;
    }
}

/* factors: NULL, or one divisor for each pair. */
static int load_frequencies(struct loader *loader, const struct rope *rope, uint32_t rotated, const float *factors,
                            struct tensor **out, struct kvg_error *err)
{
    float frequencies[FREQUENCIES_MAX];
    uint32_t n = rotated / 2;
    for (uint32_t i = 0; i < n; i++) {
        double frequency = scaled_frequency(rope, i, rotated);
        frequencies[i] = (float)(factors ? frequency / (double)factors[i] : frequency);
        if (!isfinite(frequencies[i]))
            return kvg_fail(err, KVG_FILE, "rotary frequency %u of base %g is not finite%s", i, rope->base,
                            factors ? " (rope_freqs.weight)" : "");
    }
    struct backend_weight weight = {.format = &quant_f32, .data = frequencies, .rows = 1, .cols = n};
    return loader->backend->ops->weight(loader->backend, out, &weight, WEIGHT_VECTOR, err);
}

int loader_frequencies(struct loader *loader, const struct shape *shape, struct tensor **out, struct kvg_error *err)
{
    float factors[FREQUENCIES_MAX];
    uint32_t n = shape->rotated / 2;
    struct source source;
    bool listed = !loader->folder && find_source(loader, "rope_freqs.weight", &source);
    if (n > FREQUENCIES_MAX)
        return kvg_fail(err, KVG_UNSUPPORTED, "%u rotated dimensions", shape->rotated);
    if (listed) {
        int failed = check_source(&source, "rope_freqs.weight", 1, n, err);
        if (failed)
            return failed;
        quant_decode(source.format, source.data, factors, n);
        loader->used[source.index] = true;
    }
    return load_frequencies(loader, &shape->rope, shape->rotated, listed ? factors : NULL, out, err);
}

int loader_window_frequencies(struct loader *loader, const struct shape *shape, struct tensor **out, struct kvg_error *err)
{
    struct rope rope = {.scaling = ROPE_PLAIN, .base = shape->window_base, .factor = 1};
    if (shape->rotated / 2 > FREQUENCIES_MAX)
        return kvg_fail(err, KVG_UNSUPPORTED, "%u rotated dimensions", shape->rotated);
    return load_frequencies(loader, &rope, shape->rotated, NULL, out, err);
}

int loader_finish(const struct loader *loader, struct kvg_error *err)
{
    const char *prefix = loader->folder ? "model.layers." : "blk.";
    for (size_t i = 0; i < n_tensors(loader); i++) {
        struct kvg_str name = loader->folder ? loader->folder->tensors[i].name : loader->gguf->tensors[i].name;
        int shown = (int)(name.len < 100 ? name.len : 100);
        /* Old checkpoints keep what is computed from the base. */
        bool computed = loader->folder && name.len > 20 && memcmp(name.bytes + name.len - 20, ".rotary_emb.inv_freq", 20) == 0;
        if (loader->used[i])
            continue;
        if (!computed && name.len > strlen(prefix) && memcmp(name.bytes, prefix, strlen(prefix)) == 0)
            return kvg_fail(err, KVG_UNSUPPORTED, "tensor %.*s is not part of a %s model of this shape", shown, name.bytes,
                            loader->arch);
        log_warn("tensor %.*s is not used by a %s model: ignored", shown, name.bytes, loader->arch);
    }
    return 0;
}
