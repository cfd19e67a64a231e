/* GGUF to GGUF: the matrices in another format, metadata and other tensors as they are. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "gpu-worker/quant/quant.h"
#include "gpu-worker/tools/awq.h"
#include "gpu-worker/tools/calibrate.h"
#include "gpu-worker/tools/gguf_write.h"
#include "gpu-worker/tools/gptq.h"
#include "gpu-worker/tools/parallel.h"
#include "gpu-worker/tools/progress.h"
#include "gpu-worker/tools/quantize.h"
#include "gpu-worker/tools/rounding.h"

enum { CHUNK_ROWS = 512, NO_LAYER = -1 };
enum { FILE_TYPE_Q4_0 = 2, FILE_TYPE_Q8_0 = 7, FILE_TYPE_BF16 = 32 }; /* llama.cpp's general.file_type */

struct work {
    const struct quantize_flags *flags;
    struct kvg_gguf *gguf;
    const struct quant_format *format;
    uint32_t file_type;
    struct gguf_tensor_plan *plan; /* [gguf->n_tensors]: those outside layers, then layer after layer */
    const struct kvg_gguf_tensor **sources;
    struct gguf_writer writer;
    struct calibration *calibration;
    float *scales[3]; /* AWQ, of the present layer: of the inputs of q, k and v; of gate and up; of down */
    struct progress_bar bar;
};

enum { SCALES_ATTN, SCALES_FFN, SCALES_DOWN };

/* ---- what becomes of each tensor --------------------------------------------------------------------------------------- */

static bool starts(struct kvg_str name, const char *prefix)
{
    return name.len >= strlen(prefix) && memcmp(name.bytes, prefix, strlen(prefix)) == 0;
}

static int layer_of(struct kvg_str name)
{
    char text[64];
    int layer;
    snprintf(text, sizeof text, "%.*s", (int)(name.len < 63 ? name.len : 63), name.bytes);
    return sscanf(text, "blk.%d.", &layer) == 1 ? layer : NO_LAYER;
}

static bool is_head(const struct work *work, struct kvg_str name)
{
    return kvg_str_eq(name, kvg_gguf_tensor(work->gguf, "output.weight") ? "output.weight" : "token_embd.weight");
}

/* NULL: its bytes are kept. */
static const struct quant_format *target(const struct work *work, const struct kvg_gguf_tensor *tensor)
{
    if (tensor->n_dims != 2)
        return NULL;
    if (work->flags->lm_head && is_head(work, tensor->name))
        return &quant_q8_0;
    if (work->format == &quant_bf16)
        return starts(tensor->name, "blk.") || tensor->dims[1] > 1 ? &quant_bf16 : NULL;
    return starts(tensor->name, "blk.") ? work->format : NULL;
}

static int plan_tensor(const struct work *work, const struct kvg_gguf_tensor *tensor, struct gguf_tensor_plan *plan,
                       struct kvg_error *err)
{
    const struct quant_format *to = target(work, tensor);
    *plan = (struct gguf_tensor_plan){.name = tensor->name,
                                      .n_dims = tensor->n_dims,
                                      .ggml_type = to ? to->ggml_type : tensor->ggml_type,
                                      .n_bytes = tensor->n_bytes};
    memcpy(plan->dims, tensor->dims, sizeof plan->dims);
    if (!to)
        return 0;
    int shown = (int)(tensor->name.len < 80 ? tensor->name.len : 80);
    if (!quant_find(tensor->ggml_type))
        return kvg_fail(err, KVG_UNSUPPORTED, "tensor %.*s has type id %u, which is not supported", shown, tensor->name.bytes,
                        tensor->ggml_type);
    size_t row = quant_row_bytes(to, tensor->dims[0]);
    if (row == 0)
        return kvg_fail(err, KVG_UNSUPPORTED, "tensor %.*s has rows of %llu, no whole number of groups of %u", shown,
                        tensor->name.bytes, (unsigned long long)tensor->dims[0], to->block_values);
    plan->n_bytes = row * tensor->dims[1];
    return 0;
}

/* By layer, so that each layer's tensors are written when its calibration is at hand. */
static int make_plan(struct work *work, struct kvg_error *err)
{
    size_t n = work->gguf->n_tensors, at = 0;
    int most = NO_LAYER;
    if (n == 0)
        return kvg_fail(err, KVG_FILE, "%.200s has no tensors (a cut file serves the gateway only)", work->flags->in);
    work->plan = calloc(n, sizeof *work->plan);
    work->sources = calloc(n, sizeof *work->sources);
    if (!work->plan || !work->sources)
        return kvg_fail(err, KVG_NOMEM, "no memory for %zu tensors", n);
    for (size_t i = 0; i < n; i++)
        most = layer_of(work->gguf->tensors[i].name) > most ? layer_of(work->gguf->tensors[i].name) : most;
    for (int layer = NO_LAYER; layer <= most; layer++)
        for (size_t i = 0; i < n; i++) {
            const struct kvg_gguf_tensor *tensor = &work->gguf->tensors[i];
            if (layer_of(tensor->name) != layer)
                continue;
            int failed = plan_tensor(work, tensor, &work->plan[at], err);
            if (failed)
                return failed;
            work->sources[at++] = tensor;
        }
    return at == n ? 0 : kvg_fail(err, KVG_FILE, "%.200s: a tensor's layer cannot be told from its name", work->flags->in);
}

/* ---- writing ----------------------------------------------------------------------------------------------------------- */

/* Rows of one tensor, decoded and encoded on all threads. */
struct rows {
    const struct quant_format *from, *to;
    const uint8_t *source;
    float *decoded; /* [rows, cols] */
    uint8_t *encoded;
    uint64_t cols;
};

static void decode_rows(void *context, uint64_t first, uint64_t last)
{
    const struct rows *rows = context;
    size_t bytes = quant_row_bytes(rows->from, rows->cols);
    for (uint64_t r = first; r < last; r++)
        quant_decode(rows->from, rows->source + r * bytes, rows->decoded + r * rows->cols, rows->cols);
}

static void convert_rows(void *context, uint64_t first, uint64_t last)
{
    const struct rows *rows = context;
    size_t bytes = quant_row_bytes(rows->to, rows->cols);
    for (uint64_t r = first; r < last; r++) {
        decode_rows(context, r, r + 1);
        rounding_encode(rows->to, rows->decoded + r * rows->cols, rows->cols, rows->encoded + r * bytes);
    }
}

static int allocate(struct rows *rows, uint64_t n, struct kvg_error *err)
{
    rows->decoded = malloc(n * rows->cols * sizeof *rows->decoded);
    rows->encoded = malloc(n * quant_row_bytes(rows->to, rows->cols));
    if (rows->decoded && rows->encoded)
        return 0;
    return kvg_fail(err, KVG_NOMEM, "no memory for %llu rows of %llu", (unsigned long long)n, (unsigned long long)rows->cols);
}

static int write_rounded(struct work *work, const struct kvg_gguf_tensor *tensor, struct rows *rows, struct kvg_error *err)
{
    size_t in = quant_row_bytes(rows->from, rows->cols), out = quant_row_bytes(rows->to, rows->cols);
    int failed = allocate(rows, CHUNK_ROWS, err);
    for (uint64_t r = 0, n; r < tensor->dims[1] && !failed; r += n, rows->source += n * in) {
        n = tensor->dims[1] - r < CHUNK_ROWS ? tensor->dims[1] - r : CHUNK_ROWS;
        parallel_ranges(work->flags->threads, n, convert_rows, rows);
        failed = gguf_write_bytes(&work->writer, rows->encoded, n * out, err);
        progress_advance(&work->bar, n * rows->cols);
    }
    return failed;
}

/* ---- AWQ --------------------------------------------------------------------------------------------------------------- */

/* Whose columns are scaled, and by which scales; what is divided by them stands in divided_by. */
static const struct {
    const char *part;
    int scales;
} scaled[] = {{"attn_q", SCALES_ATTN},  {"attn_k", SCALES_ATTN}, {"attn_v", SCALES_ATTN},
              {"ffn_gate", SCALES_FFN}, {"ffn_up", SCALES_FFN},  {"ffn_down", SCALES_DOWN}};

/* "blk.3.ffn_up.weight" is part "ffn_up". */
static bool is_part(struct kvg_str name, const char *part)
{
    char text[64], wanted[64];
    int layer = layer_of(name);
    snprintf(text, sizeof text, "%.*s", (int)(name.len < 63 ? name.len : 63), name.bytes);
    snprintf(wanted, sizeof wanted, "blk.%d.%s.weight", layer, part);
    return layer != NO_LAYER && strcmp(text, wanted) == 0;
}

/* NULL: its columns are not scaled. */
static const float *column_scales(const struct work *work, struct kvg_str name)
{
    for (size_t i = 0; i < sizeof scaled / sizeof *scaled; i++)
        if (work->flags->awq && is_part(name, scaled[i].part))
            return work->scales[scaled[i].scales];
    return NULL;
}

/* What produces the inputs that are scaled: a norm's numbers, or the rows of ffn_up. NULL: nothing is divided. */
static const float *divided_by(const struct work *work, struct kvg_str name)
{
    return !work->flags->awq            ? NULL
           : is_part(name, "attn_norm") ? work->scales[SCALES_ATTN]
           : is_part(name, "ffn_norm")  ? work->scales[SCALES_FFN]
           : is_part(name, "ffn_up")    ? work->scales[SCALES_DOWN]
                                        : NULL;
}

static const struct gptq_grid q4_0_grid = {QUANT_GROUP, rounding_q4_0_scale, rounding_q4_0_nearest};

/* One set of scales of a layer: the matrices that share it are decoded, searched and dropped. */
static int search_scales(struct work *work, int layer, int which, struct kvg_error *err)
{
    struct awq_matrix matrices[3];
    struct rows rows[3] = {0};
    const float *sum = NULL;
    uint32_t n = 0, cols = 0;
    char name[64] = "";
    double kept;
    int failed = 0;
    for (size_t i = 0; i < sizeof scaled / sizeof *scaled && !failed; i++) {
        if (scaled[i].scales != which)
            continue;
        snprintf(name, sizeof name, "blk.%d.%s.weight", layer, scaled[i].part);
        const struct kvg_gguf_tensor *tensor = kvg_gguf_tensor(work->gguf, name);
        if (!tensor || !(sum = calibration_sum(work->calibration, name, &cols)) || tensor->dims[0] != cols ||
            tensor->n_dims != 2) {
            failed = kvg_fail(err, KVG_UNSUPPORTED, "%s takes no part in the model's products: it cannot be calibrated", name);
            break;
        }
        rows[n] = (struct rows){quant_find(tensor->ggml_type), &quant_q4_0, work->gguf->map + tensor->offset, NULL, NULL, cols};
        rows[n].decoded = malloc(tensor->dims[1] * cols * sizeof(float));
        if (!rows[n].decoded)
            failed = kvg_fail(err, KVG_NOMEM, "no memory for %s", name);
        else
            parallel_ranges(work->flags->threads, tensor->dims[1], decode_rows, &rows[n]);
        matrices[n] = (struct awq_matrix){rows[n].decoded, (uint32_t)tensor->dims[1]};
        n++;
    }
    free(work->scales[which]);
    work->scales[which] = malloc((cols + 1) * sizeof(float));
    if (!failed && !work->scales[which])
        failed = kvg_fail(err, KVG_NOMEM, "no memory for %u scales", cols);
    if (!failed)
        failed = awq_search(matrices, n, cols, sum, &q4_0_grid, work->flags->threads, work->scales[which], &kept, err);
    for (uint32_t i = 0; i < n; i++)
        free(rows[i].decoded);
    return failed;
}

static int search_layer(struct work *work, int layer, struct kvg_error *err)
{
    int failed = 0;
    for (int which = 0; which < 3 && !failed; which++)
        failed = search_scales(work, layer, which, err);
    return failed;
}

static void scale_matrix(const struct work *work, struct kvg_str name, struct rows *rows, uint64_t n)
{
    const float *by = column_scales(work, name), *divisor = divided_by(work, name);
    for (uint64_t r = 0; r < n; r++)
        for (uint64_t c = 0; c < rows->cols; c++)
            rows->decoded[r * rows->cols + c] *= (by ? by[c] : 1) / (divisor ? divisor[r] : 1);
}

/* A norm whose output is to be smaller. */
static int write_divided(struct work *work, const struct kvg_gguf_tensor *tensor, const float *divisor, struct kvg_error *err)
{
    uint64_t n = tensor->dims[0];
    float *values = malloc(n * sizeof *values);
    int failed = values ? 0 : kvg_fail(err, KVG_NOMEM, "no memory for a norm of %llu", (unsigned long long)n);
    if (!failed && (tensor->ggml_type != quant_f32.ggml_type || tensor->n_dims != 1))
        failed = kvg_fail(err, KVG_UNSUPPORTED, "%.*s is no vector of F32", (int)(tensor->name.len < 80 ? tensor->name.len : 80),
                          tensor->name.bytes);
    if (!failed) {
        memcpy(values, work->gguf->map + tensor->offset, n * sizeof *values);
        for (uint64_t i = 0; i < n; i++)
            values[i] /= divisor[i];
        failed = gguf_write_bytes(&work->writer, values, n * sizeof *values, err);
    }
    free(values);
    return failed;
}

/* ---- calibrated matrices ----------------------------------------------------------------------------------------------- */

static int round_matrix(struct work *work, const struct kvg_gguf_tensor *tensor, struct rows *rows, float *scales,
                        struct kvg_error *err)
{
    char name[64];
    uint32_t n = 0, n_rows = (uint32_t)tensor->dims[1], cols = (uint32_t)rows->cols, threads = work->flags->threads;
    snprintf(name, sizeof name, "%.*s", (int)(tensor->name.len < 63 ? tensor->name.len : 63), tensor->name.bytes);
    err->code = KVG_OK;
    const float *sums =
        work->flags->awq ? calibration_sum(work->calibration, name, &n) : calibration_factor(work->calibration, name, &n, err);
    if (!sums && err->code != KVG_OK)
        return err->code;
    if (!sums || n != cols)
        return kvg_fail(err, KVG_UNSUPPORTED, "%s takes no part in the model's products: it cannot be calibrated", name);
    if (!work->flags->awq)
        return gptq_quantize(rows->decoded, scales, n_rows, cols, sums, &q4_0_grid, threads, err);
    scale_matrix(work, tensor->name, rows, n_rows);
    awq_round(rows->decoded, scales, n_rows, cols, sums, column_scales(work, tensor->name), &q4_0_grid, threads);
    return 0;
}

static int write_calibrated(struct work *work, const struct kvg_gguf_tensor *tensor, struct rows *rows, struct kvg_error *err)
{
    uint64_t n = tensor->dims[1];
    float *scales = malloc(n * (rows->cols / QUANT_GROUP) * sizeof *scales);
    int failed = scales ? allocate(rows, n, err)
                        : kvg_fail(err, KVG_NOMEM, "no memory for the scales of %llu rows", (unsigned long long)n);
    if (!failed) {
        parallel_ranges(work->flags->threads, n, decode_rows, rows);
        failed = round_matrix(work, tensor, rows, scales, err);
    }
    if (!failed) {
        rounding_q4_0_pack(rows->decoded, scales, n * rows->cols, rows->encoded);
        failed = gguf_write_bytes(&work->writer, rows->encoded, n * quant_row_bytes(rows->to, rows->cols), err);
        progress_advance(&work->bar, n * rows->cols);
    }
    free(scales);
    return failed;
}

static int write_tensor(struct work *work, size_t i, struct kvg_error *err)
{
    const struct kvg_gguf_tensor *tensor = work->sources[i];
    const struct quant_format *to = target(work, tensor);
    struct rows rows = {quant_find(tensor->ggml_type), to, work->gguf->map + tensor->offset, NULL, NULL, tensor->dims[0]};
    const float *divisor = divided_by(work, tensor->name);

    if (!to) {
        progress_advance(&work->bar, tensor->dims[0] * tensor->dims[1]);
        return divisor ? write_divided(work, tensor, divisor, err)
                       : gguf_write_bytes(&work->writer, work->gguf->map + tensor->offset, tensor->n_bytes, err);
    }
    int failed = (work->calibration && to == &quant_q4_0 ? write_calibrated : write_rounded)(work, tensor, &rows, err);
    free(rows.decoded);
    free(rows.encoded);
    kvg_gguf_release(work->gguf, tensor);
    return failed;
}

/* ---- the whole --------------------------------------------------------------------------------------------------------- */

static int write_all(struct work *work, struct kvg_error *err)
{
    int searched = NO_LAYER;
    uint64_t numbers = 0;
    for (size_t i = 0; i < work->gguf->n_tensors; i++)
        numbers += work->plan[i].dims[0] * work->plan[i].dims[1];
    progress_begin(&work->bar, "quantizing", numbers);
    for (size_t i = 0; i < work->gguf->n_tensors; i++) {
        int layer = layer_of(work->plan[i].name), failed = 0;
        if (work->calibration && layer != NO_LAYER)
            failed = calibration_reach(work->calibration, (uint32_t)layer, err);
        if (!failed && work->flags->awq && layer > searched) {
            failed = search_layer(work, layer, err);
            searched = layer;
        }
        if (failed || (failed = write_tensor(work, i, err)))
            return failed;
    }
    progress_end(&work->bar);
    return 0;
}

static int run(struct work *work, struct kvg_error *err)
{
    struct stat in, out;
    int failed;
    if (stat(work->flags->in, &in) == 0 && stat(work->flags->out, &out) == 0 && in.st_dev == out.st_dev &&
        in.st_ino == out.st_ino)
        return kvg_fail(err, KVG_INVALID, "%.200s is the file that is read", work->flags->out);
    if ((failed = kvg_gguf_open(&work->gguf, work->flags->in, err)) || (failed = make_plan(work, err)))
        return failed;
    if (work->flags->calibration) {
        struct calibration_options options = {work->flags->in,      work->flags->calibration, work->flags->tokens,
                                              work->flags->context, work->flags->threads,     work->flags->memory_mib};
        if ((failed = calibration_open(&work->calibration, &options, err)))
            return failed;
    }
    if ((failed = gguf_write_begin(&work->writer, work->flags->out, work->gguf, work->file_type, work->plan,
                                   work->gguf->n_tensors, err)))
        return failed;
    if ((failed = write_all(work, err))) {
        gguf_write_abort(&work->writer);
        return failed;
    }
    return gguf_write_end(&work->writer, err);
}

int quantize_gguf(const struct quantize_flags *flags, struct kvg_error *err)
{
    struct work work = {.flags = flags};
    bool q8 = strcmp(flags->format, "q8_0") == 0, q4 = strcmp(flags->format, "q4_0") == 0;
    work.format = q8 ? &quant_q8_0 : q4 ? &quant_q4_0 : &quant_bf16;
    work.file_type = q8 ? FILE_TYPE_Q8_0 : q4 ? FILE_TYPE_Q4_0 : FILE_TYPE_BF16;
    int failed = run(&work, err);
    calibration_close(work.calibration);
    for (int i = 0; i < 3; i++)
        free(work.scales[i]);
    if (work.gguf)
        kvg_gguf_close(work.gguf);
    free(work.plan);
    free(work.sources);
    return failed;
}
