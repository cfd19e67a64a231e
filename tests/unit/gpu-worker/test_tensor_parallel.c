/* A model on several ranks (processes) beside the same model on one: logits within a stated bound, the same bits in any chunk,
 * batch and run; shapes and files that cannot be divided are refused on every rank; planted mistakes are found.
 *
 * The bound: ranks add what one process adds in another order, which moves a sum by f32 rounding and so, now and then, a key or
 * value to its neighbour in BF16 and an activation to the next 8-bit value; int16 activations get their scale from a rank's own
 * columns. As a share of the largest logit 0.001 with float weights, 0.02 with quantized toys, 0.05 with a real model of 24
 * layers; measured a fifth of the first and half of the others. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "gpu-worker/model/model.h"
#include "gpu-worker/model/ranks.h"
#include "tests/unit/gpu-worker/rank_group.h"
#include "tests/unit/gpu-worker/sanitized.h"

#define QWEN "build/models/Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"
enum { TOKENS = 48, BLOCK = 16, BLOCKS = 24, TABLE = TOKENS / BLOCK + 1, MOST_VOCAB = 200000 };

#define FLOAT_BOUND 0.001f

struct world {
    char path[64];
    const char *isa, *arithmetic;
    float *alone, *out; /* [TOKENS][n_vocab]: of one process; of rank 0 */
    uint32_t n_vocab, tokens;
    int mistake;
};

static char toys[8][64];
static uint32_t n_toys;

static void write_toy(char path[64], const char *what)
{
    char command[512];
    snprintf(path, 64, "/tmp/kvgate-tp-%d-%u.gguf", (int)getpid(), n_toys);
    snprintf(toys[n_toys++ % 8], 64, "%s", path);
    snprintf(command, sizeof command, "python3 tests/tools/toy_model.py %s random %s", path, what);
    if (system(command) != 0)
        fail_msg("%s failed", command);
}

static int remove_toys(void **unused)
{
    for (uint32_t i = 0; i < n_toys && i < 8; i++)
        unlink(toys[i]);
    n_toys = 0;
    return 0;
}

static uint32_t id_at(uint32_t sequence, uint32_t position)
{
    return (position * 37 + sequence * 101 + 11) % 250;
}

static int open_rank(const struct world *w, struct comm *comm, struct model **out, struct kvg_error *err)
{
    struct model_options options = {.path = w->path,
                                    .device = "cpu",
                                    .cpu_isa = w->isa,
                                    .cpu_arithmetic = w->arithmetic,
                                    .threads = 1,
                                    .max_rows = 128,
                                    .max_seqs = 4,
                                    .max_outputs = TOKENS,
                                    .comm = comm};
    return model_open(out, &options, err);
}

/* A chunk of sequence 0, all of its rows outputs, to out[position]; with company: a row each of two others before it. */
static int forward(struct model *model, uint32_t at, uint32_t n, const uint32_t *blocks, bool company, float *out)
{
    static const uint32_t others[2][TABLE] = {{20, 21, 22, 23}, {16, 17, 18, 19}};
    uint32_t ids[TOKENS + 2], outputs[TOKENS], before = company ? 2 : 0, n_vocab = model_info(model)->n_vocab;
    struct model_seq seqs[3];
    struct kvg_error err = {0};
    for (uint32_t i = 0; i < before; i++) {
        seqs[i] = (struct model_seq){i, 1, at / 16, others[i], TABLE};
        ids[i] = id_at(i + 1, at / 16);
    }
    seqs[before] = (struct model_seq){before, n, at, blocks, TABLE};
    for (uint32_t i = 0; i < n; i++) {
        ids[before + i] = id_at(0, at + i);
        outputs[i] = before + i;
    }
    struct model_batch batch = {before + n, ids, before + 1, seqs, n, outputs};
    if (model_forward(model, &batch, &err)) {
        fprintf(stderr, "forward: %s\n", err.message);
        return -1;
    }
    memcpy(out + (size_t)at * n_vocab, model_logits(model), (size_t)n * n_vocab * sizeof *out);
    return 0;
}

static int in_chunks(struct model *model, uint32_t tokens, uint32_t chunk, const uint32_t *blocks, bool company, float *out)
{
    for (uint32_t at = 0; at < tokens; at += chunk)
        if (forward(model, at, tokens - at < chunk ? tokens - at : chunk, blocks, company, out))
            return -1;
    return 0;
}

static const uint32_t straight[TABLE] = {0, 1, 2, 3}, scattered[TABLE] = {11, 5, 8, 2};

static void open_world(struct world *w)
{
    struct model *model;
    struct kvg_error err = {0};
    if (open_rank(w, NULL, &model, &err) || model_kv_alloc(model, BLOCKS, BLOCK, &err))
        fail_msg("%s", err.message);
    w->n_vocab = model_info(model)->n_vocab;
    w->tokens = w->tokens ? w->tokens : TOKENS;
    w->alone = calloc((size_t)TOKENS * w->n_vocab, sizeof *w->alone);
    w->out = calloc((size_t)TOKENS * w->n_vocab, sizeof *w->out);
    assert_int_equal(in_chunks(model, w->tokens, w->tokens, straight, false, w->alone), 0);
    assert_int_equal(model_info(model)->ranks, 1);
    model_close(model);
}

static void close_world(struct world *w)
{
    free(w->alone);
    free(w->out);
}

/* As every rank of a group: computes sequence 0 whole into w->out, then in other ways that must give the same bits. */
static int run_model(struct comm *comm, void *context)
{
    struct world *w = context;
    struct model *model;
    struct kvg_error err = {0};
    if (open_rank(w, comm, &model, &err))
        fprintf(stderr, "rank %u: %s\n", comm->rank, err.message);
    rank_check(err.message[0] == '\0');
    rank_check(model_info(model)->ranks == comm->size);
    if (comm->rank) {
        rank_check(model_follow(model, &err) == 0);
        model_close(model);
        return 0;
    }
    float *again = calloc((size_t)TOKENS * w->n_vocab, sizeof *again);
    size_t bytes = (size_t)w->tokens * w->n_vocab * sizeof *again;
    rank_check(model_kv_alloc(model, BLOCKS, BLOCK, &err) == 0);
    rank_check(in_chunks(model, w->tokens, w->tokens, straight, false, w->out) == 0);
    rank_check(in_chunks(model, w->tokens, 16, scattered, true, again) == 0);
    rank_check(memcmp(again, w->out, bytes) == 0); /* in chunks, in company, in other blocks */
    rank_check(in_chunks(model, 5, 1, straight, false, again) == 0);
    rank_check(memcmp(again, w->out, bytes) == 0); /* token by token */
    memset(again + (size_t)32 * w->n_vocab, 0, (size_t)(TOKENS - 32) * w->n_vocab * sizeof *again);
    rank_check(w->tokens <= 32 || forward(model, 32, w->tokens - 32, scattered, false, again) == 0);
    rank_check(memcmp(again, w->out, bytes) == 0); /* behind cached blocks */
    model_close(model);
    free(again);
    return 0;
}

/* The largest difference, as a share of the largest logit; the most likely token must be the same where its margin is larger. */
static float compare(const struct world *w, float bound)
{
    float largest = 0, difference = 0;
    for (size_t i = 0; i < (size_t)w->tokens * w->n_vocab; i++) {
        largest = fmaxf(largest, fabsf(w->alone[i]));
        difference = fmaxf(difference, fabsf(w->alone[i] - w->out[i]));
    }
    for (uint32_t r = 0; r < w->tokens; r++) {
        const float *a = w->alone + (size_t)r * w->n_vocab, *b = w->out + (size_t)r * w->n_vocab;
        uint32_t first = 0, second = 1, other = 0;
        for (uint32_t i = 1; i < w->n_vocab; i++) {
            second = a[i] > a[first] ? first : second == first || (i != first && a[i] > a[second]) ? i : second;
            first = a[i] > a[first] ? i : first;
            other = b[i] > b[other] ? i : other;
        }
        if (other != first && a[first] - a[second] > 2 * bound * largest)
            fail_msg("row %u: token %u instead of %u, whose logit leads by %g of %g", r, other, first,
                     (double)(a[first] - a[second]), (double)largest);
    }
    return difference / largest;
}

static void check(struct world *w, uint32_t size, float bound, const char *what)
{
    float *first = malloc((size_t)TOKENS * w->n_vocab * sizeof *first);
    assert_int_equal(run_ranks(size, run_model, w), 0);
    float difference = compare(w, bound);
    print_message("%s, %u ranks: %.5f of the largest logit\n", what, size, (double)difference);
    if (!(difference <= bound))
        fail_msg("%s, %u ranks: logits differ by %g of the largest, the bound is %g", what, size, (double)difference,
                 (double)bound);
    memcpy(first, w->out, (size_t)TOKENS * w->n_vocab * sizeof *first);
    assert_int_equal(run_ranks(size, run_model, w), 0);
    assert_memory_equal(first, w->out, (size_t)TOKENS * w->n_vocab * sizeof *first); /* another run, the same bits */
    free(first);
}

static void test_toys_on_two_and_four_ranks(void **unused)
{
    static const struct {
        const char *what, *arithmetic;
        float bound;
    } cases[] = {
        {"--type F32 --hidden 128 --heads 8 --kv-heads 4 --ffn 160 --rows 307", NULL, FLOAT_BOUND},
        {"--type BF16 --arch qwen2 --hidden 128 --heads 8 --kv-heads 2 --ffn 192 --tied", NULL, FLOAT_BOUND},
        {"--type Q8_0 --arch qwen2 --hidden 256 --heads 8 --kv-heads 8 --ffn 224", NULL, 0.02f},
        {"--type Q4_0 --hidden 256 --heads 8 --kv-heads 4 --ffn 256", "int8", 0.02f},
        {"--type Q4_1 --hidden 256 --heads 8 --kv-heads 4 --ffn 256", "int16", 0.02f},
        {"--type Q6_K --hidden 256 --heads 4 --head-dim 256 --kv-heads 2 --ffn 1280 --layers 1", NULL, 0.02f},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct world w = {.arithmetic = cases[i].arithmetic, .tokens = SANITIZED ? 17 : TOKENS};
        write_toy(w.path, cases[i].what);
        open_world(&w);
        check(&w, 2, cases[i].bound, cases[i].what);
        check(&w, 4, cases[i].bound, cases[i].what);
        close_world(&w);
    }
}

static void test_qwen_on_two_ranks(void **unused)
{
    struct world w = {.path = QWEN, .tokens = SANITIZED ? 17 : 33};
    if (access(QWEN, R_OK) != 0)
        fail_msg("%s is missing (make models-test)", QWEN);
    open_world(&w);
    check(&w, 2, 0.05f, "Qwen2.5 0.5B");
    close_world(&w);
}

/* ---- what cannot be divided -------------------------------------------------------------------------------------------- */

struct refusal {
    struct world w;
    const char *message; /* as rank 0 says it; others prefix it */
};

static int be_refused(struct comm *comm, void *context)
{
    struct refusal *refusal = context;
    struct kvg_error err = {0};
    struct model *model;
    int failed = open_rank(&refusal->w, comm, &model, &err);
    if (!failed || !strstr(err.message, refusal->message))
        fprintf(stderr, "rank %u: %s\n", comm->rank, err.message);
    rank_check(failed == KVG_INVALID);
    rank_check(strstr(err.message, refusal->message));
    return 0;
}

static void test_shapes_that_cannot_be_divided_are_refused_with_both_numbers(void **unused)
{
    static const struct {
        const char *toy, *message;
        uint32_t size;
    } cases[] = {
        {"--heads 4 --kv-heads 2", "4 attention heads cannot be divided among 3 ranks", 3},
        {"--heads 12 --kv-heads 3 --hidden 96", "3 kv heads cannot be divided among 2 ranks", 2},
        {"--type Q4_K --hidden 256 --heads 4 --kv-heads 2 --head-dim 64 --ffn 512",
         "tensor blk.0.attn_output.weight: columns 0 to 127, the part of rank 0 of 2, do not begin and end on borders of Q4_K "
         "blocks of 256 columns",
         2},
        {"--type Q4_K --hidden 256 --heads 4 --kv-heads 2 --head-dim 128 --ffn 256",
         "a feed-forward of 256 in blocks of 256, or 259 ids, cannot be divided among 2 ranks", 2},
        {"--type Q8_0 --hidden 64 --heads 4 --kv-heads 4 --head-dim 16 --ffn 128", "columns 0 to 15, the part of rank 0 of 4", 4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct refusal refusal = {.message = cases[i].message};
        write_toy(refusal.w.path, cases[i].toy);
        assert_int_equal(run_ranks(cases[i].size, be_refused, &refusal), 0);
    }
}

/* Rank 1 alone has no file: nobody waits for it. */
static int lack_the_file(struct comm *comm, void *context)
{
    struct world w = *(struct world *)context;
    struct kvg_error err = {0};
    struct model *model;
    if (comm->rank == 1)
        snprintf(w.path, sizeof w.path, "/nowhere/model.gguf");
    rank_check(open_rank(&w, comm, &model, &err) == KVG_FILE);
    rank_check(strstr(err.message, "/nowhere/model.gguf"));
    rank_check((strncmp(err.message, "rank 1: ", 8) == 0) == (comm->rank != 1));
    return 0;
}

static void test_a_rank_that_fails_ends_the_start_of_all(void **unused)
{
    struct world w = {0};
    write_toy(w.path, "--heads 4 --kv-heads 2");
    assert_int_equal(run_ranks(2, lack_the_file, &w), 0);
    assert_int_equal(run_ranks(3, lack_the_file, &w), 0);
}

/* ---- planted mistakes -------------------------------------------------------------------------------------------------- */

enum { SKIPS_A_REDUCE = 1, KEEPS_ITS_OWN, GIVES_NOTHING };

/* A group whose rank 1 does its third sum wrong. */
struct wrong_comm {
    struct comm base;
    struct comm *inner;
    int mistake, sums;
};

static int wrong_reduce(struct comm *comm, float *data, size_t n, struct kvg_error *err)
{
    struct wrong_comm *wrong = (struct wrong_comm *)comm;
    float *own;
    int failed;
    if (comm->rank != 1 || ++wrong->sums % 4 != 3)
        return wrong->inner->ops->all_reduce(wrong->inner, data, n, err);
    if (wrong->mistake == SKIPS_A_REDUCE)
        return 0;
    if (wrong->mistake == GIVES_NOTHING)
        memset(data, 0, n * sizeof *data);
    own = malloc(n * sizeof *own);
    memcpy(own, data, n * sizeof *own);
    failed = wrong->inner->ops->all_reduce(wrong->inner, data, n, err);
    if (wrong->mistake == KEEPS_ITS_OWN)
        memcpy(data, own, n * sizeof *own);
    free(own);
    return failed;
}

static int wrong_gather(struct comm *comm, const float *part, float *out, size_t rows, uint32_t cols, struct kvg_error *err)
{
    struct comm *inner = ((struct wrong_comm *)comm)->inner;
    return inner->ops->gather(inner, part, out, rows, cols, err);
}

static int wrong_broadcast(struct comm *comm, void *data, size_t bytes, struct kvg_error *err)
{
    struct comm *inner = ((struct wrong_comm *)comm)->inner;
    return inner->ops->broadcast(inner, data, bytes, err);
}

static int wrong_exchange(struct comm *comm, const void *mine, void *all, size_t bytes, struct kvg_error *err)
{
    struct comm *inner = ((struct wrong_comm *)comm)->inner;
    return inner->ops->exchange(inner, mine, all, bytes, err);
}

static const struct comm_ops wrong_ops = {wrong_reduce, wrong_gather, wrong_broadcast, wrong_exchange, NULL};

static int run_with_a_mistake(struct comm *comm, void *context)
{
    struct world *w = context;
    struct wrong_comm wrong = {{&wrong_ops, comm->rank, comm->size, NULL, NULL}, comm, w->mistake, 0};
    struct model *model;
    struct kvg_error err = {0};
    rank_check(open_rank(w, &wrong.base, &model, &err) == 0);
    if (comm->rank) {
        int failed = model_follow(model, &err);
        rank_check((failed != 0) == (w->mistake == SKIPS_A_REDUCE));
        model_close(model);
        return 0;
    }
    rank_check(model_kv_alloc(model, BLOCKS, BLOCK, &err) == 0);
    int failed = in_chunks(model, w->tokens, w->tokens, straight, false, w->out);
    rank_check((failed != 0) == (w->mistake == SKIPS_A_REDUCE));
    model_close(model);
    return 0;
}

static void test_a_rank_that_sums_wrong_is_found(void **unused)
{
    struct world w = {.tokens = TOKENS};
    write_toy(w.path, "--type F32 --hidden 128 --heads 8 --kv-heads 4 --ffn 160");
    open_world(&w);
    w.mistake = SKIPS_A_REDUCE; /* ends in an error on every rank, not in wrong logits */
    assert_int_equal(run_ranks(2, run_with_a_mistake, &w), 0);
    for (w.mistake = 0; w.mistake <= GIVES_NOTHING; w.mistake++) {
        if (w.mistake == SKIPS_A_REDUCE)
            continue;
        assert_int_equal(run_ranks(2, run_with_a_mistake, &w), 0);
        float largest = 0, difference = 0;
        for (size_t i = 0; i < (size_t)w.tokens * w.n_vocab; i++) {
            largest = fmaxf(largest, fabsf(w.alone[i]));
            difference = fmaxf(difference, fabsf(w.alone[i] - w.out[i]));
        }
        if (w.mistake)
            assert_true(difference > 20 * FLOAT_BOUND * largest);
        else
            assert_true(difference <= FLOAT_BOUND * largest);
    }
    close_world(&w);
}

/* ---- a rank that ends unasked ------------------------------------------------------------------------------------------ */

/* The status with which rank 0, a child of the test, ends when its rank 1 does. */
static int end_beside(int status_of_rank_1)
{
    static struct ranks *ranks;
    int status;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(RANK_LIMIT_SECONDS);
        if (ranks_start(&ranks, 2, NULL))
            _exit(1);
        if (!ranks_lead(ranks))
            _exit(status_of_rank_1);
        for (;;)
            pause();
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void test_a_rank_that_ends_unasked_ends_rank_0(void **unused)
{
    assert_int_equal(end_beside(1), 70);
    assert_int_equal(end_beside(99), 70);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_toys_on_two_and_four_ranks, remove_toys),
        cmocka_unit_test_teardown(test_shapes_that_cannot_be_divided_are_refused_with_both_numbers, remove_toys),
        cmocka_unit_test_teardown(test_a_rank_that_fails_ends_the_start_of_all, remove_toys),
        cmocka_unit_test_teardown(test_a_rank_that_sums_wrong_is_found, remove_toys),
        cmocka_unit_test(test_a_rank_that_ends_unasked_ends_rank_0),
        cmocka_unit_test(test_qwen_on_two_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
