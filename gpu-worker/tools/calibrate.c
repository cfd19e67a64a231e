#include "gpu-worker/tools/calibrate.h"
#include <cblas.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/model/family.h"
#include "gpu-worker/model/model.h"
#include "gpu-worker/model/watch.h"
#include "gpu-worker/tools/gptq.h"
#include "gpu-worker/tools/progress.h"
#include "libprompt/prompt.h"

enum { BLOCK = 32, ROWS = 256, OUTPUT_STEP = 4, NO_LAYER = -1, MOST_LINE = 64 << 20 };

/* Matrices that are multiplied with the same input share one. */
struct sum {
    float *values; /* [n, n], upper triangle; with options.inputs [n_inputs, n] */
    uint32_t n, n_inputs;
    uint64_t rows;   /* of inputs added */
    uint32_t *order; /* [n], of a factor with act_order */
    bool factored;
};

struct matrix {
    char name[64];
    const struct tensor *tensor;
    uint32_t cols;
    int layer;
    struct sum *sum; /* NULL until its first product */
};

struct calibration {
    struct calibration_options options;
    struct model *model;
    struct model_watch watch;
    struct matrix *matrices;
    size_t n_matrices, room;
    uint32_t first, last; /* layers whose sums are at hand; none are below first */
    uint32_t *ids;
    size_t n_ids;
    bool failed; /* memory ran out inside a forward */
};

/* ---- the watch --------------------------------------------------------------------------------------------------------- */

static void on_weight(void *context, const char *name, const struct tensor *weight, uint32_t rows, uint32_t cols)
{
    struct calibration *c = context;
    struct matrix matrix = {.tensor = weight, .cols = cols, .layer = NO_LAYER};
    if (c->n_matrices == c->room) {
        size_t room = c->room ? 2 * c->room : 256;
        struct matrix *more = realloc(c->matrices, room * sizeof *more);
        if (!more) {
            c->failed = true;
            return;
        }
        c->matrices = more;
        c->room = room;
    }
    snprintf(matrix.name, sizeof matrix.name, "%s", name);
    if (sscanf(name, "blk.%d.", &matrix.layer) != 1)
        matrix.layer = NO_LAYER;
    c->matrices[c->n_matrices++] = matrix;
}

static struct matrix *find(struct calibration *c, const struct tensor *tensor)
{
    for (size_t i = 0; i < c->n_matrices; i++)
        if (c->matrices[i].tensor == tensor)
            return &c->matrices[i];
    return NULL;
}

static uint32_t sum_rows(const struct calibration *c, uint32_t cols)
{
    return c->options.inputs ? c->options.inputs : cols;
}

static struct sum *new_sum(uint32_t n, uint32_t rows)
{
    struct sum *sum = calloc(1, sizeof *sum);
    if (sum && !(sum->values = calloc((size_t)n * rows, sizeof *sum->values))) {
        free(sum);
        return NULL;
    }
    if (sum)
        sum->n = n;
    return sum;
}

/* Whole sequences. */
static uint32_t n_tokens(const struct calibration *c)
{
    return (uint32_t)(c->n_ids / c->options.context * c->options.context);
}

/* Every so many rows one is kept; an odd number, so that it is not always the same place of a sequence. Each has length 1: a few
 * tokens' inputs are a thousand times as large as all others', and would alone decide. */
static void keep_inputs(const struct calibration *c, struct sum *sum, const float *x, uint32_t n)
{
    uint64_t every = n_tokens(c) / c->options.inputs | 1;
    for (uint32_t i = 0; i < n && sum->n_inputs < c->options.inputs; i++)
        if ((sum->rows + i) % every == 0) {
            float *kept = sum->values + (size_t)sum->n_inputs++ * sum->n,
                  length = cblas_snrm2((int)sum->n, x + (size_t)i * sum->n, 1);
            memcpy(kept, x + (size_t)i * sum->n, sum->n * sizeof *x);
            cblas_sscal((int)sum->n, length > 0 ? 1 / length : 0, kept, 1);
        }
}

static void on_product(void *context, const struct tensor *const *weights, uint32_t count, const float *x, uint32_t n)
{
    struct calibration *c = context;
    struct matrix *first = find(c, weights[0]);
    if (!first || first->layer < (int)c->first || first->layer >= (int)c->last || c->failed)
        return;
    if (!first->sum && !(first->sum = new_sum(first->cols, sum_rows(c, first->cols)))) {
        c->failed = true;
        return;
    }
    for (uint32_t i = 1; i < count; i++) {
        struct matrix *other = find(c, weights[i]);
        if (other)
            other->sum = first->sum;
    }
    if (c->options.inputs)
        keep_inputs(c, first->sum, x, n);
    else
        cblas_ssyrk(CblasRowMajor, CblasUpper, CblasTrans, (int)first->cols, (int)n, 1, x, (int)first->cols, 1,
                    first->sum->values, (int)first->cols);
    first->sum->rows += n;
}

static void drop_sums(struct calibration *c)
{
    for (size_t i = 0; i < c->n_matrices; i++) {
        struct sum *sum = c->matrices[i].sum;
        if (!sum)
            continue;
        for (size_t j = i; j < c->n_matrices; j++)
            if (c->matrices[j].sum == sum)
                c->matrices[j].sum = NULL;
        free(sum->values);
        free(sum->order);
        free(sum);
    }
}

/* ---- the text ---------------------------------------------------------------------------------------------------------- */

static int keep_ids(struct calibration *c, const struct kvg_ids *ids, struct kvg_error *err)
{
    size_t n = ids->n < c->options.tokens - c->n_ids ? ids->n : c->options.tokens - c->n_ids;
    uint32_t *more = realloc(c->ids, (c->n_ids + n + 1) * sizeof *more);
    if (!more)
        return kvg_fail(err, KVG_NOMEM, "no memory for %zu token ids", c->n_ids + n);
    memcpy(more + c->n_ids, ids->ids, n * sizeof *more);
    c->ids = more;
    c->n_ids += n;
    return 0;
}

static int add_text(struct calibration *c, const struct kvg_prompt_model *prompt, const char *bytes, size_t n,
                    struct kvg_error *err)
{
    struct kvg_run run = {n, KVG_INPUT};
    struct kvg_text text = {bytes, n, &run, n ? 1 : 0};
    struct kvg_arena arena;
    struct kvg_ids ids;
    kvg_arena_init(&arena, 0);
    int failed = kvg_tokenize(kvg_prompt_model_tokenizer(prompt), &text, KVG_ADD_BOS, &arena, &ids, err);
    if (!failed)
        failed = keep_ids(c, &ids, err);
    kvg_arena_free(&arena);
    return failed;
}

static int add_line(struct calibration *c, const struct kvg_prompt_model *prompt, const char *line, size_t n,
                    struct kvg_error *err)
{
    struct kvg_arena arena;
    struct kvg_json *body;
    struct kvg_ids ids;
    kvg_arena_init(&arena, 0);
    int failed = kvg_json_parse(&arena, line, n, NULL, &body, err);
    const struct kvg_json *text = failed ? NULL : kvg_json_get(body, "text");
    if (!failed && (!text || text->type == KVG_JSON_NULL))
        text = kvg_json_get(body, "prompt");
    if (!failed && text && text->type == KVG_JSON_STRING)
        failed = add_text(c, prompt, text->str.bytes, text->str.len, err);
    else if (!failed && kvg_json_get(body, "messages")) {
        if (!(failed = kvg_prompt_ids(prompt, KVG_CHAT_COMPLETIONS, body, 0, 0, &arena, &ids, err)))
            failed = keep_ids(c, &ids, err);
    } else if (!failed)
        failed = kvg_fail(err, KVG_INVALID, "a line has neither \"text\" nor \"prompt\" nor \"messages\"");
    kvg_arena_free(&arena);
    return failed;
}

static bool plain(const char *path)
{
    size_t n = strlen(path);
    return n > 4 && strcmp(path + n - 4, ".txt") == 0;
}

static int read_lines(struct calibration *c, const struct kvg_prompt_model *prompt, FILE *file, struct kvg_error *err)
{
    struct kvg_error cause = {0};
    char *line = NULL;
    size_t room = 0;
    ssize_t n;
    int failed = 0;
    for (uint32_t number = 1; !failed && c->n_ids < c->options.tokens && (n = getline(&line, &room, file)) > 0; number++)
        if (strspn(line, " \t\r\n") < (size_t)n && (failed = add_line(c, prompt, line, (size_t)n, &cause)))
            kvg_fail(err, failed, "%.100s:%u: %.180s", c->options.text, number, cause.message);
    free(line);
    return failed;
}

/* As much as the tokens can need: none has more than 16 bytes on average. */
static int read_plain(struct calibration *c, const struct kvg_prompt_model *prompt, FILE *file, struct kvg_error *err)
{
    size_t most = (size_t)c->options.tokens * 16;
    most = most < MOST_LINE ? most : MOST_LINE;
    char *bytes = malloc(most);
    if (!bytes)
        return kvg_fail(err, KVG_NOMEM, "no memory for %zu bytes of text", most);
    size_t n = fread(bytes, 1, most, file);
    for (int back = 0; n == most && back < 4 && ((unsigned char)bytes[n - 1] & 0x80); back++)
        n--; /* no character is cut in two */
    int failed = add_text(c, prompt, bytes, n, err);
    free(bytes);
    return failed;
}

static int read_text(struct calibration *c, struct kvg_error *err)
{
    struct kvg_prompt_model *prompt;
    FILE *file = fopen(c->options.text, "rb");
    if (!file)
        return kvg_fail(err, KVG_FILE, "cannot open %.200s: %s", c->options.text, strerror(errno));
    int failed = kvg_prompt_model_open(&prompt, c->options.model, 0, err);
    if (!failed) {
        failed = (plain(c->options.text) ? read_plain : read_lines)(c, prompt, file, err);
        kvg_prompt_model_close(prompt);
    }
    fclose(file);
    if (!failed && c->n_ids < c->options.context)
        return kvg_fail(err, KVG_INVALID, "%.200s has %zu tokens, fewer than a sequence of %u", c->options.text, c->n_ids,
                        c->options.context);
    return failed;
}

/* ---- runs -------------------------------------------------------------------------------------------------------------- */

int calibration_open(struct calibration **out, const struct calibration_options *options, struct kvg_error *err)
{
    struct calibration *c = calloc(1, sizeof *c);
    int failed;
    if (!c)
        return kvg_fail(err, KVG_NOMEM, "no memory for a calibration");
    c->options = *options;
    c->watch = (struct model_watch){on_weight, on_product, c};
    struct model_options model = {.path = options->model,
                                  .device = "cpu",
                                  .threads = options->threads,
                                  .max_rows = ROWS,
                                  .max_seqs = 1,
                                  .max_outputs = ROWS / OUTPUT_STEP,
                                  .watch = &c->watch};
    if ((failed = read_text(c, err)) || (failed = model_open(&c->model, &model, err)) ||
        (failed = model_kv_alloc(c->model, (options->context + BLOCK - 1) / BLOCK, BLOCK, err))) {
        calibration_close(c);
        return failed;
    }
    *out = c;
    return 0;
}

void calibration_close(struct calibration *c)
{
    if (!c)
        return;
    drop_sums(c);
    model_close(c->model);
    free(c->matrices);
    free(c->ids);
    free(c);
}

const struct family *calibration_family(const struct calibration *c)
{
    return family_find(model_info(c->model)->family);
}

/* Three distinct inputs of the hidden size and one of the feed-forward's, more or less by family: an upper bound of what is kept.
 */
static uint64_t layer_bytes(const struct calibration *c)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < c->n_matrices; i++)
        if (c->matrices[i].layer == 0)
            bytes += (uint64_t)c->matrices[i].cols * sum_rows(c, c->matrices[i].cols) * sizeof(float);
    return bytes;
}

/* The last layer computes its second half for output rows alone: every fourth row is one. */
static int forward(struct calibration *c, const uint32_t *ids, uint32_t n, uint32_t past, const uint32_t *blocks,
                   uint32_t n_blocks, struct kvg_error *err)
{
    struct model_seq seq = {0, n, past, blocks, n_blocks};
    uint32_t outputs[ROWS / OUTPUT_STEP], n_outputs = 0;
    for (uint32_t i = OUTPUT_STEP - 1; i < n && c->last == model_info(c->model)->n_layers; i += OUTPUT_STEP)
        outputs[n_outputs++] = i;
    struct model_batch batch = {n, ids, 1, &seq, n_outputs, outputs};
    return model_forward(c->model, &batch, err);
}

/* The text once through the model, for the sums of layers first..last - 1. */
static int run_text(struct calibration *c, uint32_t first, uint32_t last, struct progress_bar *bar, struct kvg_error *err)
{
    uint32_t n_blocks = (c->options.context + BLOCK - 1) / BLOCK, *blocks = calloc(n_blocks, sizeof *blocks);
    int failed = blocks ? 0 : kvg_fail(err, KVG_NOMEM, "no memory for a block table");
    for (uint32_t i = 0; blocks && i < n_blocks; i++)
        blocks[i] = i;
    int blas_threads = openblas_get_num_threads();
    openblas_set_num_threads(1); /* its waiting threads would spin beside the engine's */
    drop_sums(c);
    c->first = first;
    c->last = last;
    for (uint32_t at = 0; at < n_tokens(c) && !failed; at += c->options.context)
        for (uint32_t past = 0, n; past < c->options.context && !failed; past += n) {
            n = c->options.context - past < ROWS ? c->options.context - past : ROWS;
            failed = forward(c, c->ids + at + past, n, past, blocks, n_blocks, err);
            if (!failed && c->failed)
                failed = kvg_fail(err, KVG_NOMEM, "no memory for the sums of layers %u to %u", first, last - 1);
            progress_advance(bar, n);
        }
    openblas_set_num_threads(blas_threads);
    free(blocks);
    return failed;
}

int calibration_reach(struct calibration *c, uint32_t layer, struct kvg_error *err)
{
    uint64_t fit = ((uint64_t)c->options.memory_mib << 20) / (layer_bytes(c) + 1);
    uint32_t all = model_info(c->model)->n_layers, end = layer + (fit < 1 ? 1 : fit < all ? (uint32_t)fit : all);
    struct progress_bar bar;
    char title[48];
    if (layer < c->last || layer >= all)
        return 0;
    end = end < all ? end : all;
    snprintf(title, sizeof title, "calibrating layers %u to %u", layer, end - 1);
    progress_begin(&bar, title, n_tokens(c));
    int failed = run_text(c, layer, end, &bar, err);
    progress_end(&bar);
    return failed;
}

static struct sum *find_sum(const struct calibration *c, const char *name)
{
    for (size_t i = 0; i < c->n_matrices; i++)
        if (strcmp(c->matrices[i].name, name) == 0 && c->matrices[i].sum)
            return c->matrices[i].sum;
    return NULL;
}

/* That of a matrix with so many columns. */
static struct sum *sum_of(const struct calibration *c, const char *name, uint32_t cols, struct kvg_error *err)
{
    struct sum *sum = find_sum(c, name);
    if (sum && sum->n == cols)
        return sum;
    kvg_fail(err, KVG_UNSUPPORTED, "%s takes no part in the model's products: it cannot be calibrated", name);
    return NULL;
}

const float *calibration_sum(const struct calibration *c, const char *name, uint32_t cols, struct kvg_error *err)
{
    const struct sum *sum = sum_of(c, name, cols, err);
    return sum ? sum->values : NULL;
}

const float *calibration_inputs(const struct calibration *c, const char *name, uint32_t cols, uint32_t *n, struct kvg_error *err)
{
    const struct sum *sum = sum_of(c, name, cols, err);
    *n = sum ? sum->n_inputs : 0;
    return sum ? sum->values : NULL;
}

struct column {
    float square; /* of its inputs */
    uint32_t index;
};

static int descending(const void *a, const void *b)
{
    const struct column *x = a, *y = b;
    return x->square != y->square ? (x->square < y->square ? 1 : -1) : (x->index > y->index) - (x->index < y->index);
}

/* The sum's rows and columns in descending order of its diagonal. */
static int order_columns(struct sum *sum, struct kvg_error *err)
{
    size_t n = sum->n;
    struct column *columns = malloc(n * sizeof *columns);
    float *values = malloc(n * n * sizeof *values);
    sum->order = malloc(n * sizeof *sum->order);
    bool good = columns && values && sum->order;
    for (size_t i = 0; good && i < n; i++)
        columns[i] = (struct column){sum->values[i * n + i], (uint32_t)i};
    if (good)
        qsort(columns, n, sizeof *columns, descending);
    for (size_t i = 0; good && i < n; i++) {
        sum->order[i] = columns[i].index;
        for (size_t j = i; j < n; j++) {
            size_t row = columns[i].index, column = columns[j].index;
            values[i * n + j] = sum->values[row < column ? row * n + column : column * n + row];
        }
    }
    free(columns);
    free(good ? sum->values : values);
    if (!good)
        return kvg_fail(err, KVG_NOMEM, "no memory to order %zu columns", n);
    sum->values = values;
    return 0;
}

const uint32_t *calibration_order(const struct calibration *c, const char *name)
{
    const struct sum *sum = find_sum(c, name);
    return sum ? sum->order : NULL;
}

const float *calibration_factor(struct calibration *c, const char *name, uint32_t cols, struct kvg_error *err)
{
    struct kvg_error cause = {0};
    struct sum *sum = sum_of(c, name, cols, err);
    if (!sum)
        return NULL;
    if (!sum->factored) {
        int failed = c->options.act_order ? order_columns(sum, &cause) : 0;
        failed = failed ? failed : gptq_prepare(sum->values, sum->n, CALIBRATION_DAMPING, &cause);
        if (failed) {
            kvg_fail(err, failed, "%.60s: %.200s", name, cause.message);
            return NULL;
        }
        sum->factored = true;
    }
    return sum->values;
}
