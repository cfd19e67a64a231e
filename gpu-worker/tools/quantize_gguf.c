/* GGUF to GGUF: the matrices in another format, metadata and other tensors as they are. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "gpu-worker/quant/f16.h"
#include "gpu-worker/quant/quant.h"
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
    struct progress_bar bar;
};

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

static void encode_rows(void *context, uint64_t first, uint64_t last)
{
    const struct rows *rows = context;
    size_t bytes = quant_row_bytes(rows->to, rows->cols);
    for (uint64_t r = first; r < last; r++)
        rounding_encode(rows->to, rows->decoded + r * rows->cols, rows->cols, rows->encoded + r * bytes);
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
        parallel_ranges(work->flags->threads, n, decode_rows, rows);
        parallel_ranges(work->flags->threads, n, encode_rows, rows);
        failed = gguf_write_bytes(&work->writer, rows->encoded, n * out, err);
        progress_advance(&work->bar, n * rows->cols);
    }
    return failed;
}

static float q4_0_scale(const float *x, uint32_t group)
{
    return f16_to_f32(rounding_q4_0_scale(x));
}

static float q4_0_nearest(float x, float scale)
{
    return scale * (float)((int)rounding_q4_0_code(x, scale) - 8);
}

/* Numbers of the grid and the groups' scales -> the format's bytes. */
static void pack_q4_0(const float *numbers, const float *scales, uint64_t n, uint8_t *out)
{
    for (uint64_t g = 0; g < n / QUANT_GROUP; g++, numbers += QUANT_GROUP, out += quant_q4_0.block_bytes) {
        uint16_t bits = f32_to_f16(scales[g]);
        memcpy(out, &bits, 2);
        for (int i = 0; i < 16; i++)
            out[2 + i] =
                (uint8_t)(rounding_q4_0_code(numbers[i], scales[g]) | rounding_q4_0_code(numbers[16 + i], scales[g]) << 4);
    }
}

static int write_gptq(struct work *work, const struct kvg_gguf_tensor *tensor, struct rows *rows, const float *factor,
                      struct kvg_error *err)
{
    const struct gptq_grid grid = {QUANT_GROUP, q4_0_scale, q4_0_nearest};
    uint64_t n = tensor->dims[1];
    float *scales = malloc(n * (rows->cols / QUANT_GROUP) * sizeof *scales);
    int failed = scales ? allocate(rows, n, err)
                        : kvg_fail(err, KVG_NOMEM, "no memory for the scales of %llu rows", (unsigned long long)n);
    if (!failed) {
        parallel_ranges(work->flags->threads, n, decode_rows, rows);
        failed =
            gptq_quantize(rows->decoded, scales, (uint32_t)n, (uint32_t)rows->cols, factor, &grid, work->flags->threads, err);
    }
    if (!failed) {
        pack_q4_0(rows->decoded, scales, n * rows->cols, rows->encoded);
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
    const float *factor = NULL;
    char name[64];
    uint32_t n = 0;
    int failed;

    if (!to) {
        progress_advance(&work->bar, tensor->dims[0] * tensor->dims[1]);
        return gguf_write_bytes(&work->writer, work->gguf->map + tensor->offset, tensor->n_bytes, err);
    }
    snprintf(name, sizeof name, "%.*s", (int)(tensor->name.len < 63 ? tensor->name.len : 63), tensor->name.bytes);
    if (work->calibration && to == &quant_q4_0) {
        factor = calibration_factor(work->calibration, name, work->flags->damping, &n, err);
        if (!factor && err->code != KVG_OK)
            return err->code;
        if (!factor || n != tensor->dims[0])
            return kvg_fail(err, KVG_UNSUPPORTED, "%s takes no part in the model's products: it cannot be calibrated", name);
    }
    failed = factor ? write_gptq(work, tensor, &rows, factor, err) : write_rounded(work, tensor, &rows, err);
    free(rows.decoded);
    free(rows.encoded);
    kvg_gguf_release(work->gguf, tensor);
    return failed;
}

/* ---- the whole --------------------------------------------------------------------------------------------------------- */

static void advance_calibration(void *context, uint64_t tokens)
{
    progress_advance(context, tokens);
}

/* Layers whose sums fit into memory together are calibrated in one pass. */
static uint32_t layers_a_pass(const struct work *work)
{
    uint64_t fit = ((uint64_t)work->flags->memory_mib << 20) / (calibration_layer_bytes(work->calibration) + 1);
    uint32_t all = calibration_layers(work->calibration);
    return fit < 1 ? 1 : fit < all ? (uint32_t)fit : all;
}

static int write_all(struct work *work, struct kvg_error *err)
{
    uint32_t a_pass = work->calibration ? layers_a_pass(work) : 0;
    int calibrated = 0; /* layers below it were */
    uint64_t numbers = 0;
    for (size_t i = 0; i < work->gguf->n_tensors; i++)
        numbers += work->plan[i].dims[0] * work->plan[i].dims[1];
    progress_begin(&work->bar, "quantizing", numbers);
    for (size_t i = 0; i < work->gguf->n_tensors; i++) {
        int layer = layer_of(work->plan[i].name), failed = 0;
        if (work->calibration && layer >= calibrated) {
            char title[48];
            struct progress_bar bar;
            uint32_t all = calibration_layers(work->calibration), end = (uint32_t)layer + a_pass;
            end = end < all ? end : all;
            snprintf(title, sizeof title, "calibrating layers %d to %u", layer, end - 1);
            progress_begin(&bar, title, calibration_tokens(work->calibration));
            failed = calibration_run(work->calibration, (uint32_t)layer, end, advance_calibration, &bar, err);
            progress_end(&bar);
            calibrated = (int)end;
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
        struct calibration_options options = {work->flags->in, work->flags->calibration, work->flags->tokens,
                                              work->flags->context, work->flags->threads};
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
    if (work.gguf)
        kvg_gguf_close(work.gguf);
    free(work.plan);
    free(work.sources);
    return failed;
}
