/* Hugging Face folders: weights into integers, config.json with a quantization_config, everything else copied.
 *
 * The folder is written beside OUT and gets its name when it is whole. Tensors are written in two goes: the header needs all
 * ranges first, so a plan is made from names and shapes alone.
 */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "gpu-worker/model/safetensors.h"
#include "gpu-worker/quant/quant.h"
#include "gpu-worker/tools/calibrate.h"
#include "gpu-worker/tools/gptq.h"
#include "gpu-worker/tools/int_pack.h"
#include "gpu-worker/tools/parallel.h"
#include "gpu-worker/tools/progress.h"
#include "gpu-worker/tools/quantize.h"

enum { PATH_SIZE = 4200, COPY_BYTES = 1 << 20, MOST_CONFIG = 1 << 20 };
enum kind { KEPT, W8A8, GPTQ };

struct hf {
    const struct quantize_flags *flags;
    struct safetensors *source;
    const struct safetensors_tensor **order; /* [n_tensors], layer after layer */
    enum kind format;
    char folder[PATH_SIZE]; /* OUT.PID.part */
    FILE *file;
    struct calibration *calibration;
    struct progress_bar bar;
};

/* ---- names ------------------------------------------------------------------------------------------------------------- */

/* "model.layers.3.mlp.down_proj.weight" -> 3 and "blk.3.ffn_down.weight"; false for what is no linear layer of a decoder. */
static bool linear_name(struct kvg_str name, int *layer, char out[64])
{
    static const struct {
        const char *theirs, *ours;
    } parts[] = {{"self_attn.q_proj.weight", "attn_q"}, {"self_attn.k_proj.weight", "attn_k"},
                 {"self_attn.v_proj.weight", "attn_v"}, {"self_attn.o_proj.weight", "attn_output"},
                 {"mlp.gate_proj.weight", "ffn_gate"},  {"mlp.up_proj.weight", "ffn_up"},
                 {"mlp.down_proj.weight", "ffn_down"}};
    char text[160];
    int used = 0;
    *layer = -1;
    if (name.len >= sizeof text)
        return false;
    memcpy(text, name.bytes, name.len);
    text[name.len] = '\0';
    if (sscanf(text, "model.layers.%d.%n", layer, &used) != 1 || used == 0 || *layer < 0) {
        *layer = -1;
        return false;
    }
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strcmp(text + used, parts[i].theirs) == 0) {
            snprintf(out, 64, "blk.%d.%s.weight", *layer, parts[i].ours);
            return true;
        }
    return false;
}

static enum kind kind_of(const struct hf *hf, const struct safetensors_tensor *tensor)
{
    char name[64];
    int layer;
    if (kvg_str_eq(tensor->name, "lm_head.weight") && hf->flags->lm_head)
        return hf->format;
    return linear_name(tensor->name, &layer, name) ? hf->format : KEPT;
}

/* ---- the header -------------------------------------------------------------------------------------------------------- */

struct part {
    const char *suffix, *dtype;
    uint64_t shape[2];
    uint32_t n_dims;
    uint64_t bytes;
};

/* What replaces ".weight" of a linear layer, in the order it is written; returns how many. */
static uint32_t parts_of(const struct hf *hf, const struct safetensors_tensor *t, struct part out[4])
{
    uint64_t rows = t->shape[0], cols = t->shape[1], groups = cols / hf->flags->group;
    if (hf->format == W8A8) {
        out[0] = (struct part){".weight", "I8", {rows, cols}, 2, rows * cols};
        out[1] = (struct part){".weight_scale", "BF16", {rows, 1}, 2, rows * 2};
        return 2;
    }
    out[0] = (struct part){".qweight", "I32", {cols / 8, rows}, 2, cols / 8 * rows * 4};
    out[1] = (struct part){".qzeros", "I32", {groups, rows / 8}, 2, groups * (rows / 8) * 4};
    out[2] = (struct part){".scales", "F16", {groups, rows}, 2, groups * rows * 2};
    out[3] = (struct part){".g_idx", "I32", {cols}, 1, cols * 4};
    return 4;
}

static void add_header(struct kvg_buf *header, const char *name, size_t len, const char *suffix, const char *dtype,
                       const uint64_t *shape, uint32_t n_dims, uint64_t begin, uint64_t bytes)
{
    char full[SAFETENSORS_NAME + 16];
    int n = snprintf(full, sizeof full, "%.*s%s", (int)len, name, suffix);
    kvg_buf_puts(header, ", ");
    kvg_buf_json_string(header, full, (size_t)n);
    kvg_buf_printf(header, ": {\"dtype\": \"%s\", \"shape\": [", dtype);
    for (uint32_t i = 0; i < n_dims; i++)
        kvg_buf_printf(header, "%s%llu", i ? ", " : "", (unsigned long long)shape[i]);
    unsigned long long end = begin + bytes;
    kvg_buf_printf(header, "], \"data_offsets\": [%llu, %llu]}", (unsigned long long)begin, end);
}

static int check_tensor(const struct hf *hf, const struct safetensors_tensor *t, struct kvg_error *err)
{
    int shown = (int)(t->name.len < 100 ? t->name.len : 100);
    if (!safetensors_format(t->dtype) || t->n_dims != 2)
        return kvg_fail(err, KVG_UNSUPPORTED, "%.*s is %s of %u dimensions: only matrices of F32, F16 and BF16 are quantized",
                        shown, t->name.bytes, safetensors_dtype_name(t->dtype), t->n_dims);
    if (hf->format == GPTQ && (t->shape[1] % hf->flags->group || t->shape[0] % 8))
        return kvg_fail(err, KVG_UNSUPPORTED, "%.*s is [%llu, %llu]: rows must come in 8s, columns in groups of %u", shown,
                        t->name.bytes, (unsigned long long)t->shape[0], (unsigned long long)t->shape[1], hf->flags->group);
    return 0;
}

static int write_header(struct hf *hf, struct kvg_error *err)
{
    struct kvg_buf header = {0};
    uint64_t at = 0;
    int failed = 0;
    kvg_buf_puts(&header, "{\"__metadata__\": {\"format\": \"pt\"}");
    for (size_t i = 0; i < hf->source->n_tensors && !failed; i++) {
        const struct safetensors_tensor *t = hf->order[i];
        struct part parts[4];
        if (kind_of(hf, t) == KEPT) {
            add_header(&header, t->name.bytes, t->name.len, "", safetensors_dtype_name(t->dtype), t->shape, t->n_dims, at,
                       t->n_bytes);
            at += t->n_bytes;
            continue;
        }
        if ((failed = check_tensor(hf, t, err)))
            break;
        uint32_t n = parts_of(hf, t, parts);
        for (uint32_t p = 0; p < n; at += parts[p++].bytes)
            add_header(&header, t->name.bytes, t->name.len - strlen(".weight"), parts[p].suffix, parts[p].dtype, parts[p].shape,
                       parts[p].n_dims, at, parts[p].bytes);
    }
    kvg_buf_puts(&header, "}");
    while (header.len % 8)
        kvg_buf_puts(&header, " ");
    uint64_t n = header.len;
    if (!failed && header.failed)
        failed = kvg_fail(err, KVG_NOMEM, "no memory for the header of %zu tensors", hf->source->n_tensors);
    else if (!failed && (fwrite(&n, 8, 1, hf->file) != 1 || fwrite(header.bytes, 1, n, hf->file) != n))
        failed = kvg_fail(err, KVG_FILE, "cannot write to %.200s: %s", hf->folder, strerror(errno));
    kvg_buf_free(&header);
    return failed;
}

/* ---- the tensors ------------------------------------------------------------------------------------------------------- */

struct matrix {
    const struct quant_format *from;
    const uint8_t *source;
    float *values; /* [rows, cols] */
    float *scales; /* [rows, cols / group] */
    int8_t *codes;
    uint16_t *row_scales;
    uint64_t rows, cols;
    uint32_t group;
};

static void decode_rows(void *context, uint64_t first, uint64_t last)
{
    struct matrix *m = context;
    size_t bytes = quant_row_bytes(m->from, m->cols);
    for (uint64_t r = first; r < last; r++)
        quant_decode(m->from, m->source + r * bytes, m->values + r * m->cols, m->cols);
}

static void pack_w8_rows(void *context, uint64_t first, uint64_t last)
{
    struct matrix *m = context;
    for (uint64_t r = first; r < last; r++)
        m->row_scales[r] = int_pack_w8(m->values + r * m->cols, m->cols, m->codes + r * m->cols);
}

static void round_w4_rows(void *context, uint64_t first, uint64_t last)
{
    struct matrix *m = context;
    uint64_t groups = m->cols / m->group;
    for (uint64_t g = first * groups; g < last * groups; g++) {
        float *x = m->values + g * m->group;
        m->scales[g] = int_pack_w4_scale(x, m->group);
        for (uint32_t i = 0; i < m->group; i++)
            x[i] = int_pack_w4_nearest(x[i], m->scales[g]);
    }
}

static int put(struct hf *hf, const void *bytes, size_t n, struct kvg_error *err)
{
    return fwrite(bytes, 1, n, hf->file) == n
               ? 0
               : kvg_fail(err, KVG_FILE, "cannot write to %.200s: %s", hf->folder, strerror(errno));
}

static int write_w8(struct hf *hf, struct matrix *m, struct kvg_error *err)
{
    m->codes = malloc(m->rows * m->cols);
    m->row_scales = malloc(m->rows * sizeof *m->row_scales);
    if (!m->codes || !m->row_scales)
        return kvg_fail(err, KVG_NOMEM, "no memory for %llu x %llu codes", (unsigned long long)m->rows,
                        (unsigned long long)m->cols);
    parallel_ranges(hf->flags->threads, m->rows, pack_w8_rows, m);
    int failed = put(hf, m->codes, m->rows * m->cols, err);
    return failed ? failed : put(hf, m->row_scales, m->rows * sizeof *m->row_scales, err);
}

static int write_packed_w4(struct hf *hf, const struct matrix *m, struct kvg_error *err)
{
    uint64_t groups = m->cols / m->group;
    uint32_t *qweight = malloc(m->cols / 8 * m->rows * 4), *qzeros = malloc(groups * (m->rows / 8) * 4);
    uint16_t *scales = malloc(groups * m->rows * 2);
    int32_t *g_idx = malloc(m->cols * 4);
    int failed = qweight && qzeros && scales && g_idx ? 0 : kvg_fail(err, KVG_NOMEM, "no memory to pack a matrix");
    if (!failed) {
        int_pack_gptq(m->values, m->scales, m->rows, m->cols, m->group, qweight, scales, qzeros, g_idx);
        failed = put(hf, qweight, m->cols / 8 * m->rows * 4, err);
        failed = failed ? failed : put(hf, qzeros, groups * (m->rows / 8) * 4, err);
        failed = failed ? failed : put(hf, scales, groups * m->rows * 2, err);
        failed = failed ? failed : put(hf, g_idx, m->cols * 4, err);
    }
    free(qweight);
    free(qzeros);
    free(scales);
    free(g_idx);
    return failed;
}

/* name: of a matrix that is calibrated where there is a calibration; NULL: it is rounded (lm_head, which is outside layers). */
static int write_w4(struct hf *hf, struct matrix *m, const char *name, struct kvg_error *err)
{
    const struct gptq_grid grid = {m->group, int_pack_w4_scale, int_pack_w4_nearest};
    uint32_t n = 0;
    int failed = 0;
    m->scales = malloc(m->rows * (m->cols / m->group) * sizeof *m->scales);
    if (!m->scales)
        return kvg_fail(err, KVG_NOMEM, "no memory for the scales of %llu rows", (unsigned long long)m->rows);
    if (hf->calibration && name) {
        const float *factor = calibration_factor(hf->calibration, name, &n, err);
        if (!factor && err->code != KVG_OK)
            return err->code;
        if (!factor || n != m->cols)
            return kvg_fail(err, KVG_UNSUPPORTED, "%s takes no part in the model's products: it cannot be calibrated", name);
        failed =
            gptq_quantize(m->values, m->scales, (uint32_t)m->rows, (uint32_t)m->cols, factor, &grid, hf->flags->threads, err);
    } else {
        parallel_ranges(hf->flags->threads, m->rows, round_w4_rows, m);
    }
    return failed ? failed : write_packed_w4(hf, m, err);
}

static int write_tensor(struct hf *hf, const struct safetensors_tensor *t, struct kvg_error *err)
{
    char name[64];
    int layer, failed = 0;
    progress_advance(&hf->bar, t->n_bytes);
    if (kind_of(hf, t) == KEPT)
        return put(hf, t->data, t->n_bytes, err);
    bool linear = linear_name(t->name, &layer, name);
    if (hf->calibration && linear && (failed = calibration_reach(hf->calibration, (uint32_t)layer, err)))
        return failed;
    struct matrix m = {.from = safetensors_format(t->dtype),
                       .source = t->data,
                       .rows = t->shape[0],
                       .cols = t->shape[1],
                       .group = hf->flags->group};
    m.values = malloc(m.rows * m.cols * sizeof *m.values);
    if (!m.values)
        return kvg_fail(err, KVG_NOMEM, "no memory for %llu x %llu numbers", (unsigned long long)m.rows,
                        (unsigned long long)m.cols);
    parallel_ranges(hf->flags->threads, m.rows, decode_rows, &m);
    failed = hf->format == W8A8 ? write_w8(hf, &m, err) : write_w4(hf, &m, linear ? name : NULL, err);
    free(m.values);
    free(m.scales);
    free(m.codes);
    free(m.row_scales);
    safetensors_release(hf->source, t);
    return failed;
}

/* Tensors by layer, so that each layer's calibration is at hand when they are written. */
static int order_tensors(struct hf *hf, struct kvg_error *err)
{
    size_t n = hf->source->n_tensors, at = 0;
    int most = -1, layer;
    char name[64];
    hf->order = calloc(n + 1, sizeof *hf->order);
    if (!hf->order)
        return kvg_fail(err, KVG_NOMEM, "no memory for %zu tensors", n);
    for (size_t i = 0; i < n; i++) {
        linear_name(hf->source->tensors[i].name, &layer, name);
        most = layer > most ? layer : most;
    }
    if (most > 4095)
        return kvg_fail(err, KVG_FILE, "%.200s: a tensor of layer %d", hf->flags->in, most);
    for (int wanted = -1; wanted <= most; wanted++)
        for (size_t i = 0; i < n; i++) {
            linear_name(hf->source->tensors[i].name, &layer, name);
            if (layer == wanted)
                hf->order[at++] = &hf->source->tensors[i];
        }
    return 0;
}

static int write_weights(struct hf *hf, struct kvg_error *err)
{
    char path[PATH_SIZE + 32];
    snprintf(path, sizeof path, "%s/model.safetensors", hf->folder);
    if (!(hf->file = fopen(path, "wbx")))
        return kvg_fail(err, KVG_FILE, "cannot create %.200s: %s", path, strerror(errno));
    int failed = write_header(hf, err);
    progress_begin(&hf->bar, "quantizing", hf->source->total_bytes);
    for (size_t i = 0; i < hf->source->n_tensors && !failed; i++)
        failed = write_tensor(hf, hf->order[i], err);
    if (!failed)
        progress_end(&hf->bar);
    bool good = fflush(hf->file) == 0 && fsync(fileno(hf->file)) == 0;
    good = fclose(hf->file) == 0 && good;
    return failed || good ? failed : kvg_fail(err, KVG_FILE, "cannot write %.200s: %s", path, strerror(errno));
}

/* ---- the other files --------------------------------------------------------------------------------------------------- */

static const char w8a8_config[] =
    "{\"quant_method\": \"compressed-tensors\", \"format\": \"int-quantized\", \"quantization_status\": \"compressed\", "
    "\"ignore\": [%s], "
    "\"kv_cache_scheme\": null, \"config_groups\": {\"group_0\": {\"targets\": [\"Linear\"], \"weights\": {\"num_bits\": 8, "
    "\"type\": \"int\", "
    "\"symmetric\": true, \"strategy\": \"channel\", \"dynamic\": false, \"group_size\": null, \"actorder\": null, \"observer\": "
    "\"minmax\"}, "
    "\"input_activations\": {\"num_bits\": 8, \"type\": \"int\", \"symmetric\": true, \"strategy\": \"token\", \"dynamic\": "
    "true, "
    "\"group_size\": null, \"actorder\": null, \"observer\": null}, \"output_activations\": null}}}";
static const char gptq_config[] =
    "{\"quant_method\": \"gptq\", \"bits\": 4, \"group_size\": %u, \"desc_act\": false, \"sym\": true, "
    "\"damp_percent\": %g, \"lm_head\": %s, \"checkpoint_format\": \"gptq\"}";

/* config.json of IN with a quantization_config: every other member as its text stands there. */
static int write_config(const struct hf *hf, const char *text, size_t n, struct kvg_error *err)
{
    struct kvg_arena arena;
    struct kvg_json *config;
    struct kvg_buf out = {0};
    char path[PATH_SIZE + 32];
    kvg_arena_init(&arena, 0);
    int failed = kvg_json_parse(&arena, text, n, NULL, &config, err);
    if (!failed && config->type != KVG_JSON_OBJECT)
        failed = kvg_fail(err, KVG_FILE, "%.200s/config.json is no object", hf->flags->in);
    if (!failed && kvg_json_get(config, "quantization_config"))
        failed =
            kvg_fail(err, KVG_UNSUPPORTED, "%.200s is quantized already (quantization_config in its config.json)", hf->flags->in);
    if (!failed) {
        kvg_buf_puts(&out, "{\n");
        for (uint32_t i = 0; i < config->n; i++) {
            kvg_buf_puts(&out, "  ");
            kvg_buf_json_string(&out, config->items[i].key.bytes, config->items[i].key.len);
            kvg_buf_puts(&out, ": ");
            kvg_buf_add(&out, text + config->items[i].start, config->items[i].end - config->items[i].start);
            kvg_buf_puts(&out, ",\n");
        }
        kvg_buf_puts(&out, "  \"quantization_config\": ");
        if (hf->format == W8A8)
            kvg_buf_printf(&out, w8a8_config, hf->flags->lm_head ? "" : "\"lm_head\"");
        else
            kvg_buf_printf(&out, gptq_config, hf->flags->group, CALIBRATION_DAMPING, hf->flags->lm_head ? "true" : "false");
        kvg_buf_puts(&out, "\n}\n");
        snprintf(path, sizeof path, "%s/config.json", hf->folder);
        FILE *file = fopen(path, "wbx");
        bool good = file && !out.failed && fwrite(out.bytes, 1, out.len, file) == out.len;
        good = file && fclose(file) == 0 && good;
        failed = good ? 0 : kvg_fail(err, KVG_FILE, "cannot write %.200s: %s", path, strerror(errno));
    }
    kvg_buf_free(&out);
    kvg_arena_free(&arena);
    return failed;
}

static int read_config(const struct hf *hf, struct kvg_error *err)
{
    char path[PATH_SIZE + 32];
    snprintf(path, sizeof path, "%s/config.json", hf->flags->in);
    FILE *file = fopen(path, "rb");
    char *text = malloc(MOST_CONFIG);
    size_t n = file && text ? fread(text, 1, MOST_CONFIG, file) : 0;
    int failed = n > 0 && n < MOST_CONFIG ? write_config(hf, text, n, err)
                                          : kvg_fail(err, KVG_FILE, "%.200s cannot be read, is empty or over 1 MiB", path);
    if (file)
        fclose(file);
    free(text);
    return failed;
}

static int copy_file(const struct hf *hf, const char *name, struct kvg_error *err)
{
    char from[PATH_SIZE + 300], to[PATH_SIZE + 300];
    snprintf(from, sizeof from, "%s/%s", hf->flags->in, name);
    snprintf(to, sizeof to, "%s/%s", hf->folder, name);
    FILE *in = fopen(from, "rb"), *out = in ? fopen(to, "wbx") : NULL;
    char *piece = malloc(COPY_BYTES);
    bool good = out && piece;
    for (size_t n; good && (n = fread(piece, 1, COPY_BYTES, in)) > 0;)
        good = fwrite(piece, 1, n, out) == n;
    good = good && !ferror(in);
    if (in)
        fclose(in);
    good = (!out || fclose(out) == 0) && good;
    free(piece);
    return good ? 0 : kvg_fail(err, KVG_FILE, "cannot copy %.200s: %s", from, strerror(errno));
}

/* Tokenizer, templates, licence: all plain files but the weights and config.json. */
static int copy_files(const struct hf *hf, struct kvg_error *err)
{
    DIR *folder = opendir(hf->flags->in);
    struct dirent *entry;
    struct stat found;
    char path[PATH_SIZE + 300];
    int failed = folder ? 0 : kvg_fail(err, KVG_FILE, "%.200s is no folder that can be read: %s", hf->flags->in, strerror(errno));
    while (!failed && (entry = readdir(folder))) {
        const char *name = entry->d_name;
        snprintf(path, sizeof path, "%s/%s", hf->flags->in, name);
        if (stat(path, &found) != 0 || !S_ISREG(found.st_mode) || strcmp(name, "config.json") == 0 ||
            strstr(name, ".safetensors") || strstr(name, ".bin") || strstr(name, ".gguf"))
            continue;
        failed = copy_file(hf, name, err);
    }
    if (folder)
        closedir(folder);
    return failed;
}

/* ---- the whole --------------------------------------------------------------------------------------------------------- */

static void remove_folder(const char *path)
{
    DIR *folder = opendir(path);
    struct dirent *entry;
    char file[PATH_SIZE + 300];
    while (folder && (entry = readdir(folder))) {
        snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            unlink(file);
    }
    if (folder)
        closedir(folder);
    rmdir(path);
}

static int write_folder(struct hf *hf, struct kvg_error *err)
{
    int failed;
    if (mkdir(hf->folder, 0777) != 0)
        return kvg_fail(err, KVG_FILE, "cannot create %.200s: %s", hf->folder, strerror(errno));
    if ((failed = read_config(hf, err)) || (failed = copy_files(hf, err)) || (failed = write_weights(hf, err))) {
        remove_folder(hf->folder);
        return failed;
    }
    if (rename(hf->folder, hf->flags->out) == 0)
        return 0;
    failed = kvg_fail(err, KVG_FILE, "cannot rename %.150s to %.150s: %s", hf->folder, hf->flags->out, strerror(errno));
    remove_folder(hf->folder);
    return failed;
}

int quantize_hf(const struct quantize_flags *flags, struct kvg_error *err)
{
    struct hf hf = {.flags = flags, .format = strcmp(flags->format, "w8a8") == 0 ? W8A8 : GPTQ};
    struct stat there;
    int failed;
    if (lstat(flags->out, &there) == 0)
        return kvg_fail(err, KVG_FILE, "%.200s exists already", flags->out);
    if (snprintf(hf.folder, sizeof hf.folder, "%s.%ld.part", flags->out, (long)getpid()) >= 4096)
        return kvg_fail(err, KVG_INVALID, "the path %.200s is too long", flags->out);
    if ((failed = safetensors_open(&hf.source, flags->in, err)))
        return failed;
    if (flags->lm_head && !safetensors_find(hf.source, "lm_head.weight"))
        failed =
            kvg_fail(err, KVG_UNSUPPORTED, "--lm-head: %.200s has no lm_head.weight (it is tied to the embedding)", flags->in);
    if (!failed && flags->calibration) {
        struct calibration_options options = {flags->in,      flags->calibration, flags->tokens,
                                              flags->context, flags->threads,     flags->memory_mib};
        failed = calibration_open(&hf.calibration, &options, err);
    }
    if (!failed && !(failed = order_tensors(&hf, err)))
        failed = write_folder(&hf, err);
    calibration_close(hf.calibration);
    free(hf.order);
    safetensors_close(hf.source);
    return failed;
}
