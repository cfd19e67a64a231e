/* GGUF to GGUF: the matrices in another format, metadata and other tensors as they are. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "gpu-worker/quant/quant.h"
#include "gpu-worker/tools/awq_layer.h"
#include "gpu-worker/tools/calibrate.h"
#include "gpu-worker/tools/gguf_write.h"
#include "gpu-worker/tools/gptq.h"
#include "gpu-worker/tools/parallel.h"
#include "gpu-worker/tools/progress.h"
#include "gpu-worker/tools/quantize.h"
#include "gpu-worker/tools/rounding.h"

enum { CHUNK_ROWS = 512, NO_LAYER = -1, MOST_LAYER = 4095 };
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
    struct awq_layer awq;
    struct progress_bar bar;
};

/* ---- what becomes of each tensor --------------------------------------------------------------------------------------- */

static bool starts(struct kvg_str name, const char *prefix)
{
    return name.len >= strlen(prefix) && memcmp(name.bytes, prefix, strlen(prefix)) == 0;
}

static void short_name(struct kvg_str name, char out[64])
{
    snprintf(out, 64, "%.*s", (int)(name.len < 63 ? name.len : 63), name.bytes);
}

static int layer_of(struct kvg_str name)
{
    char text[64];
    int layer;
    short_name(name, text);
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
    if (most > MOST_LAYER)
        return kvg_fail(err, KVG_FILE, "%.200s: a tensor of layer %d", work->flags->in, most);
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
    _Atomic bool unreadable, too_large; /* some number is infinite or none, of the source or of what became of it */
};

static void decode_rows(void *context, uint64_t first, uint64_t last)
{
    struct rows *rows = context;
    size_t bytes = quant_row_bytes(rows->from, rows->cols);
    for (uint64_t r = first; r < last; r++) {
        if (!quant_row_finite(rows->from, rows->source + r * bytes, rows->cols))
            rows->unreadable = true;
        quant_decode(rows->from, rows->source + r * bytes, rows->decoded + r * rows->cols, rows->cols);
    }
}

static void check_rows(void *context, uint64_t first, uint64_t last)
{
    struct rows *rows = context;
    size_t bytes = quant_row_bytes(rows->to, rows->cols);
    for (uint64_t r = first; r < last; r++)
        if (!quant_row_finite(rows->to, rows->encoded + r * bytes, rows->cols))
            rows->too_large = true;
}

static void convert_rows(void *context, uint64_t first, uint64_t last)
{
    struct rows *rows = context;
    size_t bytes = quant_row_bytes(rows->to, rows->cols);
    for (uint64_t r = first; r < last; r++) {
        decode_rows(context, r, r + 1);
        rounding_encode(rows->to, rows->decoded + r * rows->cols, rows->cols, rows->encoded + r * bytes);
    }
    check_rows(context, first, last);
}

/* What no other format can hold is said here: written, it would be numbers again, and the model would look whole. */
static int check_numbers(const struct rows *rows, const struct kvg_gguf_tensor *tensor, struct kvg_error *err)
{
    int shown = (int)(tensor->name.len < 80 ? tensor->name.len : 80);
    if (rows->unreadable)
        return kvg_fail(err, KVG_FILE, "tensor %.*s holds an infinity or NaN", shown, tensor->name.bytes);
    if (rows->too_large)
        return kvg_fail(err, KVG_UNSUPPORTED, "tensor %.*s holds numbers that are too large for %s", shown, tensor->name.bytes,
                        rows->to->name);
    return 0;
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
        if ((failed = check_numbers(rows, tensor, err)))
            break;
        failed = gguf_write_bytes(&work->writer, rows->encoded, n * out, err);
        progress_advance(&work->bar, n * rows->cols);
    }
    return failed;
}

/* ---- AWQ --------------------------------------------------------------------------------------------------------------- */

static const struct grid q4_0_grid = {QUANT_GROUP, grid_fit_extreme};

static int read_matrix(void *context, const char *name, float **weights, uint32_t *n_rows, uint32_t *cols, struct kvg_error *err)
{
    const struct work *work = context;
    const struct kvg_gguf_tensor *tensor = kvg_gguf_tensor(work->gguf, name);
    if (!tensor || tensor->n_dims != 2)
        return kvg_fail(err, KVG_UNSUPPORTED, "%s is no matrix of the file", name);
    struct rows rows = {
        .from = quant_find(tensor->ggml_type), .source = work->gguf->map + tensor->offset, .cols = tensor->dims[0]};
    rows.decoded = *weights = malloc(tensor->dims[1] * rows.cols * sizeof(float));
    if (!*weights)
        return kvg_fail(err, KVG_NOMEM, "no memory for %s", name);
    parallel_ranges(work->flags->threads, tensor->dims[1], decode_rows, &rows);
    *n_rows = (uint32_t)tensor->dims[1];
    *cols = (uint32_t)tensor->dims[0];
    return 0;
}

/* A norm whose output is to be smaller. */
static int write_divided(struct work *work, const struct kvg_gguf_tensor *tensor, const float *divisors, uint32_t n,
                         struct kvg_error *err)
{
    float *values = malloc(n * sizeof *values);
    int failed = values ? 0 : kvg_fail(err, KVG_NOMEM, "no memory for a norm of %u", n);
    if (!failed && (tensor->ggml_type != quant_f32.ggml_type || tensor->n_dims != 1 || tensor->dims[0] != n))
        failed = kvg_fail(err, KVG_UNSUPPORTED, "%.*s is no vector of %u F32",
                          (int)(tensor->name.len < 80 ? tensor->name.len : 80), tensor->name.bytes, n);
    if (!failed) {
        memcpy(values, work->gguf->map + tensor->offset, n * sizeof *values);
        for (uint32_t i = 0; i < n; i++)
            values[i] /= divisors[i];
        failed = gguf_write_bytes(&work->writer, values, n * sizeof *values, err);
    }
    free(values);
    return failed;
}

/* ---- calibrated matrices ----------------------------------------------------------------------------------------------- */

static int round_matrix(struct work *work, const struct kvg_gguf_tensor *tensor, struct rows *rows, struct grid_range *ranges,
                        struct kvg_error *err)
{
    char name[64];
    uint32_t n_rows = (uint32_t)tensor->dims[1], cols = (uint32_t)rows->cols, threads = work->flags->threads;
    short_name(tensor->name, name);
    if (work->flags->awq)
        return awq_layer_round(&work->awq, name, rows->decoded, ranges, n_rows, cols, err);
    const float *factor = calibration_factor(work->calibration, name, cols, err);
    return factor ? gptq_quantize(rows->decoded, ranges, n_rows, cols, factor, &q4_0_grid, threads, err) : (int)err->code;
}

static int write_calibrated(struct work *work, const struct kvg_gguf_tensor *tensor, struct rows *rows, struct kvg_error *err)
{
    uint64_t n = tensor->dims[1];
    struct grid_range *ranges = malloc(n * (rows->cols / QUANT_GROUP) * sizeof *ranges);
    int failed = ranges ? allocate(rows, n, err)
                        : kvg_fail(err, KVG_NOMEM, "no memory for the scales of %llu rows", (unsigned long long)n);
    if (!failed) {
        parallel_ranges(work->flags->threads, n, decode_rows, rows);
        failed = round_matrix(work, tensor, rows, ranges, err);
    }
    if (!failed) {
        rounding_q4_0_pack(rows->decoded, ranges, n * rows->cols, rows->encoded);
        parallel_ranges(work->flags->threads, n, check_rows, rows);
        failed = check_numbers(rows, tensor, err);
    }
    if (!failed) {
        failed = gguf_write_bytes(&work->writer, rows->encoded, n * quant_row_bytes(rows->to, rows->cols), err);
        progress_advance(&work->bar, n * rows->cols);
    }
    free(ranges);
    return failed;
}

static int write_tensor(struct work *work, size_t i, struct kvg_error *err)
{
    const struct kvg_gguf_tensor *tensor = work->sources[i];
    const struct quant_format *to = target(work, tensor);
    struct rows rows = {
        .from = quant_find(tensor->ggml_type), .to = to, .source = work->gguf->map + tensor->offset, .cols = tensor->dims[0]};
    char name[64];
    uint32_t n = 0;

    if (!to) {
        short_name(tensor->name, name);
        const float *divisors = work->flags->awq ? awq_layer_divisors(&work->awq, name, &n) : NULL;
        progress_advance(&work->bar, tensor->dims[0] * tensor->dims[1]);
        return divisors ? write_divided(work, tensor, divisors, n, err)
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
    uint64_t numbers = 0;
    for (size_t i = 0; i < work->gguf->n_tensors; i++)
        numbers += work->plan[i].dims[0] * work->plan[i].dims[1];
    progress_begin(&work->bar, "quantizing", numbers);
    for (size_t i = 0; i < work->gguf->n_tensors; i++) {
        int layer = layer_of(work->plan[i].name), failed = 0;
        if (work->calibration && layer != NO_LAYER)
            failed = calibration_reach(work->calibration, (uint32_t)layer, err);
        if (!failed && work->flags->awq && layer > work->awq.layer)
            failed = awq_layer_search(&work->awq, layer, err);
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
    if (lstat(work->flags->out, &out) == 0 && S_ISREG(out.st_mode))
        return kvg_fail(err, KVG_FILE, "%.200s exists already", work->flags->out);
    if ((failed = kvg_gguf_open(&work->gguf, work->flags->in, err)) || (failed = make_plan(work, err)))
        return failed;
    if (work->flags->calibration) {
        struct calibration_options options = {work->flags->in,      work->flags->calibration, work->flags->tokens,
                                              work->flags->context, work->flags->threads,     work->flags->memory_mib};
        if ((failed = calibration_open(&work->calibration, &options, err)))
            return failed;
        work->awq = (struct awq_layer){.read = read_matrix,
                                       .context = work,
                                       .calibration = work->calibration,
                                       .grid = &q4_0_grid,
                                       .threads = work->flags->threads,
                                       .layer = NO_LAYER};
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
    awq_layer_free(&work.awq);
    if (work.gguf)
        kvg_gguf_close(work.gguf);
    free(work.plan);
    free(work.sources);
    return failed;
}
