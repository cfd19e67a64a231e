/* A real model's forward pass: the logits of a token are the same bits in any chunk, batch, block placement, on any thread count
 * and instruction set (AMX has an attention, so bits, of its own); and bad batches and options are refused. Needs build/models
 * (make models). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>
#include "gpu-worker/backend/sampling.h"
#include "gpu-worker/model/model.h"
#include "tests/unit/gpu-worker/sanitized.h"

#define MODEL "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"
enum { TOKENS = 100, BLOCKS = 40, BLOCK = 16, CHECKED = 7 };

static uint32_t n_vocab;
static uint32_t prompts[3][TOKENS];
static const uint32_t checked[CHECKED] = {0, 15, 16, 32, 63, 64, 99}; /* positions whose logits are compared */

static struct model *open_model_with(const char *isa, uint32_t threads, const char *kv_cache_dtype)
{
    struct model *model;
    struct kvg_error err = {0};
    struct model_options options = {
        .path = MODEL, .device = "cpu", .cpu_isa = isa, .threads = threads, .max_rows = 256, .max_seqs = 8, .max_outputs = 16};
    options.kv_cache_dtype = kv_cache_dtype;
    int rc = model_open(&model, &options, &err);
    if (rc == KVG_UNSUPPORTED)
        return NULL;
    if (rc)
        fail_msg("%s", err.message);
    assert_int_equal(model_kv_alloc(model, BLOCKS, BLOCK, NULL), 0);
    n_vocab = model_info(model)->n_vocab;
    return model;
}

static struct model *open_model(const char *isa, uint32_t threads)
{
    return open_model_with(isa, threads, NULL);
}

/* One forward; copies the logits of positions in `checked` that belong to sequence 0 to out[CHECKED][n_vocab]. */
static void forward(struct model *model, struct model_seq *seqs, uint32_t n_seqs, const uint32_t *ids, uint32_t n_rows,
                    float *out)
{
    uint32_t outputs[CHECKED + 1], which[CHECKED], n = 0;
    struct kvg_error err;
    for (uint32_t i = 0; i < CHECKED; i++) {
        if (checked[i] >= seqs[0].n_past && checked[i] < seqs[0].n_past + seqs[0].n_rows) {
            which[n] = i;
            outputs[n++] = seqs[0].first_row + checked[i] - seqs[0].n_past;
        }
    }
    struct model_batch batch = {n_rows, ids, n_seqs, seqs, n, outputs};
    if (model_forward(model, &batch, &err) != 0)
        fail_msg("%s", err.message);
    for (uint32_t i = 0; i < n; i++)
        memcpy(out + (size_t)which[i] * n_vocab, model_logits(model) + (size_t)i * n_vocab, n_vocab * sizeof *out);
}

static void in_chunks(struct model *model, uint32_t chunk, const uint32_t *blocks, uint32_t tokens, float *out)
{
    for (uint32_t at = 0; at < tokens; at += chunk) {
        uint32_t n = tokens - at < chunk ? tokens - at : chunk;
        struct model_seq seq = {0, n, at, blocks, TOKENS / BLOCK + 1};
        forward(model, &seq, 1, prompts[0] + at, n, out);
    }
}

/* Two other sequences share every batch: a long prefill chunk before, a decoding one in front of both. */
static void in_company(struct model *model, float *out)
{
    uint32_t blocks[3][TOKENS / BLOCK + 1], ids[256], past = 0;
    for (uint32_t b = 0; b < TOKENS / BLOCK + 1; b++)
        for (uint32_t s = 0; s < 3; s++)
            blocks[s][b] = b * 5 + s;
    for (uint32_t at = 0; at < TOKENS; at += 20, past++) {
        struct model_seq seqs[3] = {{21, 20, at, blocks[0], TOKENS / BLOCK + 1},
                                    {1, 20, at, blocks[1], TOKENS / BLOCK + 1},
                                    {0, 1, past, blocks[2], TOKENS / BLOCK + 1}};
        struct model_seq ordered[3] = {seqs[2], seqs[1], seqs[0]};
        ids[0] = prompts[2][past];
        memcpy(ids + 1, prompts[1] + at, 20 * sizeof *ids);
        memcpy(ids + 21, prompts[0] + at, 20 * sizeof *ids);
        uint32_t outputs[CHECKED], which[CHECKED], n = 0;
        for (uint32_t i = 0; i < CHECKED; i++) {
            if (checked[i] >= at && checked[i] < at + 20) {
                which[n] = i;
                outputs[n++] = 21 + checked[i] - at;
            }
        }
        struct model_batch batch = {41, ids, 3, ordered, n, outputs};
        struct kvg_error err;
        if (model_forward(model, &batch, &err) != 0)
            fail_msg("%s", err.message);
        for (uint32_t i = 0; i < n; i++)
            memcpy(out + (size_t)which[i] * n_vocab, model_logits(model) + (size_t)i * n_vocab, n_vocab * sizeof *out);
    }
}

static void same(const float *a, const float *b, uint32_t n, const char *what, const char *isa)
{
    for (uint32_t i = 0; i < n; i++)
        if (memcmp(a + (size_t)i * n_vocab, b + (size_t)i * n_vocab, n_vocab * sizeof *a))
            fail_msg("%s, %s: the logits of position %u differ", isa, what, checked[i]);
}

static void test_logits_do_not_depend_on_chunks_batch_blocks_threads_or_isa(void **unused)
{
    static const char *const isas[] = {"amx", "avx512", "avx2", "generic"};
    uint32_t straight[TOKENS / BLOCK + 1], scattered[TOKENS / BLOCK + 1];
    float *whole = NULL, *first = NULL, *part = NULL;
    for (uint32_t b = 0; b < TOKENS / BLOCK + 1; b++) {
        straight[b] = b;
        scattered[b] = (b * 17 + 23) % BLOCKS;
    }
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        bool slow = SANITIZED || strcmp(isas[i], "generic") == 0;
        uint32_t tokens = SANITIZED ? 17 : slow ? 33 : TOKENS, n = SANITIZED ? 3 : slow ? 4 : CHECKED;
        struct model *model = open_model(isas[i], 2);
        if (!model) {
            print_message("skipped: %s, which this CPU lacks\n", isas[i]);
            continue;
        }
        if (!whole) {
            whole = calloc(CHECKED * (size_t)n_vocab, sizeof *whole);
            first = calloc(CHECKED * (size_t)n_vocab, sizeof *first);
            part = calloc(CHECKED * (size_t)n_vocab, sizeof *part);
        }
        in_chunks(model, tokens, straight, tokens, whole);
        if (first[0] != 0)
            same(whole, first, n, "the set before it", isas[i]);
        else if (strcmp(isas[i], "amx") != 0)
            memcpy(first, whole, CHECKED * (size_t)n_vocab * sizeof *first);
        in_chunks(model, 16, scattered, tokens, part);
        same(part, whole, n, "chunks of 16, scattered", isas[i]);
        if (!slow) {
            in_chunks(model, 33, straight, tokens, part);
            same(part, whole, n, "chunks of 33", isas[i]);
            in_chunks(model, 1, scattered, tokens, part);
            same(part, whole, n, "one by one", isas[i]);
            in_company(model, part);
            same(part, whole, n, "with two other sequences", isas[i]);
            model_close(model);
            model = open_model(isas[i], 1);
            in_chunks(model, 33, scattered, tokens, part);
            same(part, whole, n, "one thread", isas[i]);
        }
        model_close(model);
    }
    free(whole), free(first), free(part);
}

static void test_logits_do_not_depend_on_chunks_or_batch_with_any_kv_dtype(void **unused)
{
    static const struct {
        const char *dtype;
        size_t head_bytes; /* of a token's key, or value, in one head */
    } kinds[] = {{"f16", 128}, {"bf16", 128}, {"int8", 68}};
    uint32_t straight[TOKENS / BLOCK + 1], scattered[TOKENS / BLOCK + 1], tokens = SANITIZED ? 17 : TOKENS,
                                                                          n = SANITIZED ? 3 : CHECKED;
    for (uint32_t b = 0; b < TOKENS / BLOCK + 1; b++)
        straight[b] = b, scattered[b] = (b * 17 + 23) % BLOCKS;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        struct model *model = open_model_with("auto", 2, kinds[i].dtype);
        float *whole = calloc(CHECKED * (size_t)n_vocab, sizeof *whole), *part = calloc(CHECKED * (size_t)n_vocab, sizeof *part);
        assert_string_equal(model_info(model)->kv_cache_dtype, kinds[i].dtype);
        assert_int_equal(model_kv_block_bytes(model, 32), 30 * 2 * 3 * 32 * kinds[i].head_bytes);
        in_chunks(model, tokens, straight, tokens, whole);
        in_chunks(model, 16, scattered, tokens, part);
        same(part, whole, n, "chunks of 16, scattered", kinds[i].dtype);
        if (!SANITIZED) {
            in_chunks(model, 1, scattered, tokens, part);
            same(part, whole, n, "one by one", kinds[i].dtype);
            in_company(model, part);
            same(part, whole, n, "with two other sequences", kinds[i].dtype);
        }
        model_close(model);
        free(whole), free(part);
    }
    struct model *model;
    struct model_options options = {.path = MODEL, .threads = 1, .max_rows = 8, .kv_cache_dtype = "fp4"};
    struct kvg_error err;
    assert_int_equal(model_open(&model, &options, &err), KVG_INVALID);
    assert_non_null(strstr(err.message, "fp4"));
}

static void test_bad_batches_are_refused(void **unused)
{
    struct model *model = open_model("auto", 1);
    uint32_t blocks[] = {0, 1}, ids[40] = {0}, outputs[] = {40};
    struct model_seq seq = {0, 40, 0, blocks, 2};
    struct model_batch batch = {40, ids, 1, &seq, 0, outputs};
    struct kvg_error err = {0};
    assert_int_equal(model_forward(model, &batch, &err), KVG_INVALID); /* 40 tokens in two blocks of 16 */
    assert_non_null(strstr(err.message, "40 tokens and blocks for 32"));
    seq.n_rows = batch.n_rows = 20;
    batch.n_outputs = 1;
    assert_int_equal(model_forward(model, &batch, &err), KVG_INVALID); /* output row 40 */
    batch.n_outputs = 0;
    ids[3] = n_vocab;
    assert_int_equal(model_forward(model, &batch, &err), KVG_INVALID);
    ids[3] = 0;
    assert_int_equal(model_forward(model, &batch, &err), 0);
    batch.n_rows = 0;
    assert_int_equal(model_forward(model, &batch, &err), KVG_INVALID);
    assert_int_equal(model_kv_alloc(model, 4, 16, &err), KVG_INVALID); /* twice */
    model_close(model);
}

static void count_progress(double share, void *context)
{
    double *last = context;
    assert_true(share >= *last && share <= 1);
    *last = share;
}

static void test_open_reports_the_model_and_its_progress(void **unused)
{
    struct model *model;
    double last = 0;
    struct model_options options = {.path = MODEL, .threads = 1, .max_rows = 8, .progress = count_progress, .context = &last};
    assert_int_equal(model_open(&model, &options, NULL), 0);
    const struct model_info *info = model_info(model);
    assert_string_equal(info->family, "llama");
    assert_int_equal(info->n_layers, 30);
    assert_int_equal(info->n_heads, 9);
    assert_int_equal(info->n_kv_heads, 3);
    assert_int_equal(info->head_dim, 64);
    assert_int_equal(info->hidden, 576);
    assert_int_equal(info->n_vocab, 49152);
    assert_int_equal(info->max_position, 8192);
    assert_non_null(strstr(info->backend, "1 thread"));
    assert_int_equal(model_kv_block_bytes(model, 32), 30 * 2 * 3 * 64 * 32 * 2);
    assert_true(last == 1);
    model_close(model);
}

static void test_bad_options_are_refused_by_name(void **unused)
{
    struct model *model;
    struct kvg_error err = {0};
    struct model_options options = {.path = MODEL, .cpu_isa = "mmx"};
    assert_true(model_open(&model, &options, &err) != 0);
    assert_non_null(strstr(err.message, "mmx"));
    options = (struct model_options){.path = MODEL, .device = "tpu"};
    assert_true(model_open(&model, &options, &err) != 0);
    assert_non_null(strstr(err.message, "tpu"));
    options = (struct model_options){.path = "/nonexistent.gguf"};
    assert_true(model_open(&model, &options, &err) != 0);
}

/* A brief batch scores the first ids alone, with the same bits, and draws among them. */
static void test_a_brief_batch_scores_the_first_ids(void **unused)
{
    struct model_options options = {
        .path = MODEL, .threads = 1, .max_rows = 64, .max_seqs = 8, .max_outputs = 16, .scored = 1000};
    struct sample_row row = {.temperature = 0, .top_p = 1, .repetition_penalty = 1};
    uint32_t blocks[2] = {0, 1}, outputs[2] = {8, 19};
    struct model_seq seq = {0, 20, 0, blocks, 2};
    struct model_batch batch = {20, prompts[0], 1, &seq, 2, outputs};
    struct sample_result result;
    float whole[2][1000];
    struct kvg_error err;
    struct model *model;

    assert_int_equal(model_open(&model, &options, &err), 0);
    assert_int_equal(model_kv_alloc(model, 4, BLOCK, NULL), 0);
    assert_int_equal(model_info(model)->scored, 1000);
    assert_int_equal(model_forward(model, &batch, &err), 0);
    for (uint32_t i = 0; i < 2; i++)
        memcpy(whole[i], model_logits(model) + (size_t)i * model_info(model)->n_vocab, sizeof whole[i]);
    batch.brief = true;
    assert_int_equal(model_forward(model, &batch, &err), 0);
    assert_memory_equal(model_logits(model), whole, sizeof whole);
    row.output = 1;
    assert_int_equal(model_sample(model, &row, 1, &result, &err), 0);
    assert_true(result.id < 1000);
    for (uint32_t id = 0; id < 1000; id++)
        assert_true(whole[1][id] <= whole[1][result.id]);
    model_close(model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_logits_do_not_depend_on_chunks_batch_blocks_threads_or_isa),
        cmocka_unit_test(test_logits_do_not_depend_on_chunks_or_batch_with_any_kv_dtype),
        cmocka_unit_test(test_bad_batches_are_refused),
        cmocka_unit_test(test_open_reports_the_model_and_its_progress),
        cmocka_unit_test(test_bad_options_are_refused_by_name),
        cmocka_unit_test(test_a_brief_batch_scores_the_first_ids),
    };
    if (access(MODEL, R_OK) != 0) {
        print_message("skipped: %s is not there (make models)\n", MODEL);
        return 0;
    }
    for (uint32_t i = 0; i < 3 * TOKENS; i++)
        prompts[i / TOKENS][i % TOKENS] = (i * 7919 + i / TOKENS * 101 + 13) % 49000;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
