/* Hugging Face folders: weights into integers, config.json with a quantization_config, everything else copied.
 *
 * The folder is written beside OUT and gets its name when it is whole. Tensors are written in two goes: the header needs all
 * ranges first, so a plan is made from names and shapes alone.
 */
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "gpu-worker/model/family.h"
#include "gpu-worker/model/safetensors.h"
#include "gpu-worker/quant/f16.h"
#include "gpu-worker/quant/quant.h"
#include "gpu-worker/tools/awq_layer.h"
#include "gpu-worker/tools/calibrate.h"
#include "gpu-worker/tools/gptq.h"
#include "gpu-worker/tools/hf_files.h"
#include "gpu-worker/tools/int_pack.h"
#include "gpu-worker/tools/parallel.h"
#include "gpu-worker/tools/progress.h"
#include "gpu-worker/tools/quantize.h"
#include "gpu-worker/tools/temporary.h"

enum { NO_LAYER = -1, MOST_LAYER = 4095, SMOOTH_INPUTS = 256 };
enum kind { KEPT, W8A8, GPTQ, AWQ, EIGHT /* GPTQ's tensors with 8 bits: q8_0, and lm_head beside GPTQ */ };

struct entry {
    const struct safetensors_tensor *tensor;
    char name[64]; /* in GGUF files; "" outside layers */
    int layer;
    bool linear; /* a matrix of a layer */
};

struct hf {
    const struct quantize_flags *flags;
    struct safetensors *source;
    struct entry *entries; /* [n_tensors], layer after layer */
    enum kind format;
    struct grid grid;
    char out[HF_PATH];    /* OUT without slashes at its end */
    char folder[HF_PATH]; /* OUT.PID.part */
    FILE *file;
    struct calibration *calibration;
    struct awq_layer awq; /* with AWQ or W8A8 and a calibration */
    struct progress_bar bar;
};

/* ---- names ------------------------------------------------------------------------------------------------------------- */

static void name_entry(struct entry *entry, bool post_norms)
{
    char full[SAFETENSORS_NAME + 1];
    snprintf(full, sizeof full, "%.*s", (int)entry->tensor->name.len, entry->tensor->name.bytes);
    if (!loader_gguf_name(full, post_norms, entry->name) || sscanf(entry->name, "blk.%d.", &entry->layer) != 1) {
        entry->name[0] = '\0';
        entry->layer = NO_LAYER;
    }
    size_t n = strlen(entry->name), end = strlen(".weight");
    entry->linear = n > end && strcmp(entry->name + n - end, ".weight") == 0 && !strstr(entry->name, "norm");
}

static enum kind kind_of(const struct hf *hf, const struct entry *entry)
{
    if (hf->flags->lm_head && kvg_str_eq(entry->tensor->name, "lm_head.weight"))
        return hf->format == GPTQ ? EIGHT : hf->format;
    return entry->linear ? hf->format : KEPT;
}

static const struct entry *find_entry(const struct hf *hf, const char *name)
{
    for (size_t i = 0; i < hf->source->n_tensors; i++)
        if (strcmp(hf->entries[i].name, name) == 0)
            return &hf->entries[i];
    return NULL;
}

/* ---- the header -------------------------------------------------------------------------------------------------------- */

struct part {
    const char *suffix, *dtype;
    uint64_t shape[2];
    uint32_t n_dims;
    uint64_t bytes;
};

/* What replaces ".weight" of a linear layer, in the order it is written; returns how many. */
static uint32_t parts_of(const struct hf *hf, enum kind kind, const struct safetensors_tensor *t, struct part out[4])
{
    uint64_t rows = t->shape[0], cols = t->shape[1], groups = cols / hf->grid.group, per = kind == EIGHT ? 4 : 8;
    uint64_t qweight[2] = {kind == AWQ ? cols : cols / per, kind == AWQ ? rows / per : rows};
    if (kind == W8A8) {
        out[0] = (struct part){".weight", "I8", {rows, cols}, 2, rows * cols};
        out[1] = (struct part){".weight_scale", "BF16", {rows, 1}, 2, rows * 2};
        return 2;
    }
    out[0] = (struct part){".qweight", "I32", {qweight[0], qweight[1]}, 2, cols / per * rows * 4};
    out[1] = (struct part){".qzeros", "I32", {groups, rows / per}, 2, groups * (rows / per) * 4};
    out[2] = (struct part){".scales", "F16", {groups, rows}, 2, groups * rows * 2};
    out[3] = (struct part){".g_idx", "I32", {cols}, 1, cols * 4};
    return kind == AWQ ? 3 : 4;
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
    if (hf->format != W8A8 && (t->shape[1] % hf->grid.group || t->shape[0] % 8))
        return kvg_fail(err, KVG_UNSUPPORTED, "%.*s is [%llu, %llu]: rows must come in 8s, columns in groups of %u", shown,
                        t->name.bytes, (unsigned long long)t->shape[0], (unsigned long long)t->shape[1], hf->grid.group);
    return 0;
}

static int write_header(struct hf *hf, struct kvg_error *err)
{
    struct kvg_buf header = {0};
    uint64_t at = 0;
    int failed = 0;
    kvg_buf_puts(&header, "{\"__metadata__\": {\"format\": \"pt\"}");
    for (size_t i = 0; i < hf->source->n_tensors && !failed; i++) {
        const struct safetensors_tensor *t = hf->entries[i].tensor;
        enum kind kind = kind_of(hf, &hf->entries[i]);
        struct part parts[4];
        if (kind == KEPT) {
            add_header(&header, t->name.bytes, t->name.len, "", safetensors_dtype_name(t->dtype), t->shape, t->n_dims, at,
                       t->n_bytes);
            at += t->n_bytes;
            continue;
        }
        if ((failed = check_tensor(hf, t, err)))
            break;
        uint32_t n = parts_of(hf, kind, t, parts);
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

/* ---- matrices ---------------------------------------------------------------------------------------------------------- */

struct matrix {
    const struct quant_format *from;
    const uint8_t *source;
    float *values;             /* [rows, cols] */
    struct grid_range *ranges; /* [rows, cols / group] */
    int8_t *codes;
    uint16_t *row_scales;
    uint64_t rows, cols;
    _Atomic bool unreadable; /* some number is infinite or none */
};

static void decode_rows(void *context, uint64_t first, uint64_t last)
{
    struct matrix *m = context;
    size_t bytes = quant_row_bytes(m->from, m->cols);
    for (uint64_t r = first; r < last; r++) {
        if (!quant_row_finite(m->from, m->source + r * bytes, m->cols))
            m->unreadable = true;
        quant_decode(m->from, m->source + r * bytes, m->values + r * m->cols, m->cols);
    }
}

static int decode(const struct hf *hf, const struct safetensors_tensor *t, struct matrix *m, struct kvg_error *err)
{
    *m = (struct matrix){.from = safetensors_format(t->dtype), .source = t->data, .rows = t->shape[0], .cols = t->shape[1]};
    m->values = malloc(m->rows * m->cols * sizeof *m->values);
    if (!m->values)
        return kvg_fail(err, KVG_NOMEM, "no memory for %llu x %llu numbers", (unsigned long long)m->rows,
                        (unsigned long long)m->cols);
    parallel_ranges(hf->flags->threads, m->rows, decode_rows, m);
    if (m->unreadable)
        return kvg_fail(err, KVG_FILE, "%.*s holds an infinity or NaN", (int)(t->name.len < 100 ? t->name.len : 100),
                        t->name.bytes);
    return 0;
}

static void pack_w8_rows(void *context, uint64_t first, uint64_t last)
{
    struct matrix *m = context;
    for (uint64_t r = first; r < last; r++)
        m->row_scales[r] = int_pack_w8(m->values + r * m->cols, m->cols, m->codes + r * m->cols);
}

static int put(struct hf *hf, const void *bytes, size_t n, struct kvg_error *err)
{
    return fwrite(bytes, 1, n, hf->file) == n
               ? 0
               : kvg_fail(err, KVG_FILE, "cannot write to %.200s: %s", hf->folder, strerror(errno));
}

static int write_w8(struct hf *hf, struct matrix *m, const struct entry *entry, struct kvg_error *err)
{
    int failed = hf->calibration && entry->linear
                     ? awq_layer_scale(&hf->awq, entry->name, m->values, (uint32_t)m->rows, (uint32_t)m->cols, err)
                     : 0;
    if (failed)
        return failed;
    m->codes = malloc(m->rows * m->cols);
    m->row_scales = malloc(m->rows * sizeof *m->row_scales);
    if (!m->codes || !m->row_scales)
        return kvg_fail(err, KVG_NOMEM, "no memory for %llu x %llu codes", (unsigned long long)m->rows,
                        (unsigned long long)m->cols);
    parallel_ranges(hf->flags->threads, m->rows, pack_w8_rows, m);
    failed = put(hf, m->codes, m->rows * m->cols, err);
    return failed ? failed : put(hf, m->row_scales, m->rows * sizeof *m->row_scales, err);
}

static int check_scales(const uint16_t *scales, uint64_t n, const struct safetensors_tensor *t, struct kvg_error *err)
{
    for (uint64_t i = 0; i < n; i++)
        if (!f16_finite(scales[i]))
            return kvg_fail(err, KVG_UNSUPPORTED, "%.*s holds numbers that are too large for scales of F16",
                            (int)(t->name.len < 100 ? t->name.len : 100), t->name.bytes);
    return 0;
}

/* Packs a matrix of the tensor t as its kind is and writes it. m: of EIGHT w, rows, cols and group alone. */
static int write_packed(struct hf *hf, enum kind kind, const struct int_pack_matrix *m, const struct safetensors_tensor *t,
                        struct kvg_error *err)
{
    uint64_t per = kind == EIGHT ? 4 : 8, groups = m->cols / m->group, words = m->cols / per * m->rows;
    uint64_t zeros = groups * (m->rows / per);
    uint32_t *qweight = malloc(words * 4), *qzeros = malloc(zeros * 4);
    uint16_t *scales = malloc(groups * m->rows * 2);
    int32_t *g_idx = malloc(m->cols * 4);
    int failed = qweight && qzeros && scales && g_idx ? 0 : kvg_fail(err, KVG_NOMEM, "no memory to pack a matrix");
    struct int_pack_eight eight = {m->w, m->rows, m->cols, m->group, qweight, qzeros, scales, g_idx};
    if (!failed) {
        if (kind == AWQ)
            int_pack_awq(m, qweight, scales, qzeros);
        else if (kind == GPTQ)
            int_pack_gptq(m, qweight, scales, qzeros, g_idx);
        else
            parallel_ranges(hf->flags->threads, m->rows / 4, int_pack_eight_rows, &eight);
        failed = check_scales(scales, groups * m->rows, t, err);
        failed = failed ? failed : put(hf, qweight, words * 4, err);
        failed = failed ? failed : put(hf, qzeros, zeros * 4, err);
        failed = failed ? failed : put(hf, scales, groups * m->rows * 2, err);
        failed = failed || kind == AWQ ? failed : put(hf, g_idx, m->cols * 4, err);
    }
    free(qweight);
    free(qzeros);
    free(scales);
    free(g_idx);
    return failed;
}

/* Columns in this order; new memory. */
static int reorder(struct matrix *m, const uint32_t *order, struct kvg_error *err)
{
    float *values = malloc(m->rows * m->cols * sizeof *values);
    if (!values)
        return kvg_fail(err, KVG_NOMEM, "no memory to order %llu columns", (unsigned long long)m->cols);
    for (uint64_t r = 0; r < m->rows; r++)
        for (uint64_t c = 0; c < m->cols; c++)
            values[r * m->cols + c] = m->values[r * m->cols + order[c]];
    free(m->values);
    m->values = values;
    return 0;
}

/* GPTQ; *order: the columns' afterwards, NULL: as they were. */
static int round_gptq(struct hf *hf, struct matrix *m, const char *name, const uint32_t **order, struct kvg_error *err)
{
    int failed;
    const float *factor = calibration_factor(hf->calibration, name, (uint32_t)m->cols, err);
    if (!factor)
        return err->code;
    if ((*order = calibration_order(hf->calibration, name)) && (failed = reorder(m, *order, err)))
        return failed;
    return gptq_quantize(m->values, m->ranges, (uint32_t)m->rows, (uint32_t)m->cols, factor, &hf->grid, hf->flags->threads, err);
}

/* lm_head, which is outside layers, is rounded, calibration or not. */
static int write_w4(struct hf *hf, struct matrix *m, const struct entry *entry, struct kvg_error *err)
{
    const uint32_t *order = NULL;
    int failed = 0;
    if (kind_of(hf, entry) == EIGHT)
        return write_packed(hf, EIGHT, &(struct int_pack_matrix){m->values, NULL, NULL, m->rows, m->cols, hf->grid.group},
                            entry->tensor, err);
    m->ranges = malloc(m->rows * (m->cols / hf->grid.group) * sizeof *m->ranges);
    if (!m->ranges)
        return kvg_fail(err, KVG_NOMEM, "no memory for the scales of %llu rows", (unsigned long long)m->rows);
    if (!hf->calibration || !entry->linear)
        grid_round(m->values, m->ranges, m->rows, m->cols, &hf->grid, hf->flags->threads);
    else if (hf->format == AWQ)
        failed = awq_layer_round(&hf->awq, entry->name, m->values, m->ranges, (uint32_t)m->rows, (uint32_t)m->cols, err);
    else
        failed = round_gptq(hf, m, entry->name, &order, err);
    const struct int_pack_matrix packed = {m->values, m->ranges, order, m->rows, m->cols, hf->grid.group};
    return failed ? failed : write_packed(hf, hf->format, &packed, entry->tensor, err);
}

/* ---- AWQ --------------------------------------------------------------------------------------------------------------- */

static int read_matrix(void *context, const char *name, float **weights, uint32_t *rows, uint32_t *cols, struct kvg_error *err)
{
    const struct hf *hf = context;
    const struct entry *entry = find_entry(hf, name);
    struct matrix m;
    if (!entry)
        return kvg_fail(err, KVG_UNSUPPORTED, "%s is no matrix of the folder", name);
    int failed = decode(hf, entry->tensor, &m, err);
    *weights = m.values;
    *rows = (uint32_t)m.rows;
    *cols = (uint32_t)m.cols;
    return failed;
}

/* The norm divided by the scales, in its type's bytes. fit: the scales become what the rounded norm divides by, so that nothing
 * is lost by its rounding. */
static int divide_norm(const struct hf *hf, const struct entry *entry, float *scales, uint32_t n, bool fit, uint8_t *out,
                       struct kvg_error *err)
{
    const struct safetensors_tensor *t = entry->tensor;
    const struct quant_format *format = safetensors_format(t->dtype);
    float one = calibration_family(hf->calibration)->traits & FAMILY_NORM_PLUS_1 ? 1 : 0, back;
    if (!format || t->n_dims != 1 || t->shape[0] != n)
        return kvg_fail(err, KVG_UNSUPPORTED, "%s is no vector of %u F32, F16 or BF16", entry->name, n);
    for (uint32_t i = 0; i < n; i++, out += format->block_bytes) {
        float value, divided;
        quant_decode(format, t->data + (size_t)i * format->block_bytes, &value, 1);
        divided = (value + one) / scales[i] - one;
        rounding_encode(format, &divided, 1, out);
        quant_decode(format, out, &back, 1);
        float now = (value + one) / (back + one);
        if (fit)
            scales[i] = isfinite(now) && now > 0 ? now : 1;
    }
    return 0;
}

static int search_layer(struct hf *hf, int layer, struct kvg_error *err)
{
    int failed = awq_layer_search(&hf->awq, layer, err);
    for (size_t i = 0; i < hf->source->n_tensors && !failed; i++) {
        const struct entry *entry = &hf->entries[i];
        uint32_t n;
        float *scales = entry->linear ? NULL : awq_layer_divisors(&hf->awq, entry->name, &n);
        uint8_t *bytes = scales ? malloc((size_t)n * sizeof(float)) : NULL;
        if (scales)
            failed = bytes ? divide_norm(hf, entry, scales, n, true, bytes, err)
                           : kvg_fail(err, KVG_NOMEM, "no memory for a norm of %u", n);
        free(bytes);
    }
    return failed;
}

/* Norms whose outputs are scaled, else bytes as they are. */
static int write_kept(struct hf *hf, const struct entry *entry, struct kvg_error *err)
{
    uint32_t n;
    float *scales = hf->awq.calibration ? awq_layer_divisors(&hf->awq, entry->name, &n) : NULL;
    if (!scales)
        return put(hf, entry->tensor->data, entry->tensor->n_bytes, err);
    uint8_t *bytes = malloc((size_t)n * sizeof(float));
    int failed =
        bytes ? divide_norm(hf, entry, scales, n, false, bytes, err) : kvg_fail(err, KVG_NOMEM, "no memory for a norm of %u", n);
    failed = failed ? failed : put(hf, bytes, entry->tensor->n_bytes, err);
    free(bytes);
    return failed;
}

/* ---- the tensors ------------------------------------------------------------------------------------------------------- */

static int write_tensor(struct hf *hf, const struct entry *entry, struct kvg_error *err)
{
    struct matrix m;
    int failed = 0;
    progress_advance(&hf->bar, entry->tensor->n_bytes);
    if (hf->calibration && entry->layer != NO_LAYER)
        failed = calibration_reach(hf->calibration, (uint32_t)entry->layer, err);
    if (!failed && hf->awq.calibration && entry->layer > hf->awq.layer)
        failed = search_layer(hf, entry->layer, err);
    if (failed)
        return failed;
    if (kind_of(hf, entry) == KEPT)
        return write_kept(hf, entry, err);
    if (!(failed = decode(hf, entry->tensor, &m, err)))
        failed = hf->format == W8A8 ? write_w8(hf, &m, entry, err) : write_w4(hf, &m, entry, err);
    free(m.values);
    free(m.ranges);
    free(m.codes);
    free(m.row_scales);
    safetensors_release(hf->source, entry->tensor);
    return failed;
}

/* Tensors by layer, so that each layer's calibration is at hand when they are written. */
static int list_tensors(struct hf *hf, struct kvg_error *err)
{
    size_t n = hf->source->n_tensors, at = 0;
    int most = NO_LAYER;
    bool post_norms = hf->calibration && calibration_family(hf->calibration)->traits & FAMILY_POST_NORMS;
    struct entry *found = calloc(n + 1, sizeof *found);
    hf->entries = calloc(n + 1, sizeof *hf->entries);
    if (!found || !hf->entries) {
        free(found);
        return kvg_fail(err, KVG_NOMEM, "no memory for %zu tensors", n);
    }
    for (size_t i = 0; i < n; i++) {
        found[i].tensor = &hf->source->tensors[i];
        name_entry(&found[i], post_norms);
        most = found[i].layer > most ? found[i].layer : most;
    }
    for (int layer = NO_LAYER; layer <= most && most <= MOST_LAYER; layer++)
        for (size_t i = 0; i < n; i++)
            if (found[i].layer == layer)
                hf->entries[at++] = found[i];
    free(found);
    return most <= MOST_LAYER ? 0 : kvg_fail(err, KVG_FILE, "%.200s: a tensor of layer %d", hf->flags->in, most);
}

static int write_weights(struct hf *hf, struct kvg_error *err)
{
    char path[HF_PATH + 32];
    snprintf(path, sizeof path, "%s/model.safetensors", hf->folder);
    if (!(hf->file = fopen(path, "wbx")))
        return kvg_fail(err, KVG_FILE, "cannot create %.200s: %s", path, strerror(errno));
    int failed = write_header(hf, err);
    progress_begin(&hf->bar, "quantizing", hf->source->total_bytes);
    for (size_t i = 0; i < hf->source->n_tensors && !failed; i++)
        failed = write_tensor(hf, &hf->entries[i], err);
    if (!failed)
        progress_end(&hf->bar);
    bool good = fflush(hf->file) == 0 && fsync(fileno(hf->file)) == 0;
    good = fclose(hf->file) == 0 && good;
    return failed || good ? failed : kvg_fail(err, KVG_FILE, "cannot write %.200s: %s", path, strerror(errno));
}

/* ---- the whole --------------------------------------------------------------------------------------------------------- */

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
    "{\"quant_method\": \"gptq\", \"bits\": %d, \"group_size\": %u, \"desc_act\": %s, \"sym\": true, "
    "\"damp_percent\": %g, %s, \"checkpoint_format\": \"gptq\"}";
static const char gptq_head[] = "\"lm_head\": true, \"dynamic\": {\"+:^lm_head$\": {\"bits\": 8}}";
static const char awq_config[] =
    "{\"quant_method\": \"awq\", \"bits\": 4, \"group_size\": %u, \"zero_point\": true, \"version\": \"gemm\", "
    "\"modules_to_not_convert\": null, \"lm_head\": %s}";

/* The quantization_config, as Hugging Face' libraries and vLLM read it. */
static void add_config(struct kvg_buf *out, const struct hf *hf)
{
    const struct quantize_flags *flags = hf->flags;
    const char *head = flags->lm_head ? "true" : "false";
    if (hf->format == W8A8)
        kvg_buf_printf(out, w8a8_config, flags->lm_head ? "" : "\"lm_head\"");
    else if (hf->format == GPTQ)
        kvg_buf_printf(out, gptq_config, 4, hf->grid.group, flags->act_order ? "true" : "false", CALIBRATION_DAMPING,
                       flags->lm_head ? gptq_head : "\"lm_head\": false");
    else if (hf->format == EIGHT)
        kvg_buf_printf(out, gptq_config, 8, hf->grid.group, "false", CALIBRATION_DAMPING,
                       flags->lm_head ? "\"lm_head\": true" : "\"lm_head\": false");
    else
        kvg_buf_printf(out, awq_config, hf->grid.group, head);
}

static int write_folder(struct hf *hf, struct kvg_error *err)
{
    struct kvg_buf config = {0};
    int failed;
    temporary_hold(hf->folder, hf_files_remove);
    if (mkdir(hf->folder, 0777) != 0) {
        temporary_hold(NULL, NULL);
        return kvg_fail(err, KVG_FILE, "cannot create %.200s: %s", hf->folder, strerror(errno));
    }
    add_config(&config, hf);
    if (!(failed = hf_files_config(hf->flags->in, hf->folder, &config, err)) &&
        !(failed = hf_files_copy(hf->flags->in, hf->folder, err)) && !(failed = write_weights(hf, err)) &&
        temporary_finish(hf->out) != 0)
        failed = kvg_fail(err, KVG_FILE, "cannot rename %.150s to %.150s: %s", hf->folder, hf->out, strerror(errno));
    temporary_drop();
    kvg_buf_free(&config);
    return failed;
}

static int calibrate(struct hf *hf, struct kvg_error *err)
{
    const struct quantize_flags *flags = hf->flags;
    struct calibration_options options = {.model = flags->in,
                                          .text = flags->calibration,
                                          .tokens = flags->tokens,
                                          .context = flags->context,
                                          .threads = flags->threads,
                                          .memory_mib = flags->memory_mib,
                                          .inputs = hf->format == W8A8 ? SMOOTH_INPUTS : 0,
                                          .act_order = flags->act_order};
    int failed = calibration_open(&hf->calibration, &options, err);
    if (!failed && hf->format != GPTQ)
        hf->awq = (struct awq_layer){.read = read_matrix,
                                     .context = hf,
                                     .calibration = hf->calibration,
                                     .grid = hf->format == AWQ ? &hf->grid : NULL,
                                     .threads = flags->threads,
                                     .layer = NO_LAYER};
    return failed;
}

/* -1: the path is too long. */
static int name_folder(struct hf *hf)
{
    size_t n = strlen(hf->flags->out);
    while (n > 1 && hf->flags->out[n - 1] == '/')
        n--;
    if (n >= sizeof hf->out)
        return -1;
    snprintf(hf->out, sizeof hf->out, "%.*s", (int)n, hf->flags->out);
    return snprintf(hf->folder, sizeof hf->folder, "%s.%ld.part", hf->out, (long)getpid()) < 4096 ? 0 : -1;
}

static enum kind format_of(const struct quantize_flags *flags)
{
    static const struct {
        const char *name;
        enum kind kind;
    } known[] = {{"w8a8", W8A8}, {"gptq-int4", GPTQ}, {"awq-int4", AWQ}, {"q8_0", EIGHT}};
    size_t i = 0;
    while (strcmp(known[i].name, flags->format) != 0)
        i++;
    return known[i].kind;
}

int quantize_hf(const struct quantize_flags *flags, struct kvg_error *err)
{
    struct hf hf = {.flags = flags, .format = format_of(flags)};
    struct stat there;
    int failed;
    hf.grid = (struct grid){hf.format == EIGHT ? QUANT_GROUP : flags->group,
                            hf.format == AWQ ? grid_fit_asymmetric : grid_fit_symmetric};
    if (name_folder(&hf) != 0)
        return kvg_fail(err, KVG_INVALID, "the path %.200s is too long", flags->out);
    if (lstat(hf.out, &there) == 0)
        return kvg_fail(err, KVG_FILE, "%.200s exists already", hf.out);
    if ((failed = safetensors_open(&hf.source, flags->in, err)))
        return failed;
    if (flags->lm_head && !safetensors_find(hf.source, "lm_head.weight"))
        failed =
            kvg_fail(err, KVG_UNSUPPORTED, "--lm-head: %.200s has no lm_head.weight (it is tied to the embedding)", flags->in);
    if (!failed && flags->calibration)
        failed = calibrate(&hf, err);
    if (!failed && !(failed = list_tensors(&hf, err)))
        failed = write_folder(&hf, err);
    awq_layer_free(&hf.awq);
    calibration_close(hf.calibration);
    free(hf.entries);
    safetensors_close(hf.source);
    return failed;
}
