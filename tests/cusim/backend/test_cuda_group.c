/* A two-layer model on two emulated devices, a process each, with NCCL's stand-in between them: logits of prompts and of decode
 * steps, by graphs and not, stay within a bound of one CPU's; in deterministic mode the bits do not depend on the batch; a group
 * larger than the machine is refused on every rank. */
#include <sys/mman.h>
#include <unistd.h>
#include "gpu-worker/model/model.h"
#include "tests/cusim/backend/twin.h"
#include "tests/unit/gpu-worker/rank_group.h"

enum { SEQS = 3, PROMPT = 19, STEPS = 3, ROWS = PROMPT + STEPS, BLOCK = 16, TABLE = 2, VOCAB_MOST = 512 };

/* Takes the place of the loader of kvgate-cuda.so. */
int cuda_backend_open(struct backend **out, const struct backend_options *options, struct kvg_error *err)
{
    return kvgate_cuda_open(out, options, err);
}

typedef float seq_logits[SEQS][VOCAB_MOST];

struct world {
    char path[64];
    bool deterministic, eager;
    const char *message; /* of a refusal */
    uint32_t n_vocab, size;
    uint32_t ids[SEQS][ROWS];
    seq_logits cpu[1 + STEPS], cuda[1 + STEPS]; /* of the prompts' last rows, then of each step */
};

static struct world *w; /* shared by all processes */

static int open_on(const char *device, struct comm *comm, struct model **out, struct kvg_error *err)
{
    struct model_options options = {.path = w->path,
                                    .device = device,
                                    .cpu_isa = "auto",
                                    .cpu_arithmetic = "int8",
                                    .threads = 1,
                                    .deterministic = w->deterministic,
                                    .enforce_eager = w->eager,
                                    .max_rows = SEQS * PROMPT,
                                    .max_seqs = SEQS,
                                    .max_outputs = SEQS,
                                    .comm = comm};
    int failed = model_open(out, &options, err);
    return failed || (comm && comm->rank) ? failed : model_kv_alloc(*out, SEQS * TABLE, BLOCK, err);
}

/* n rows of each of the first n_seqs sequences from `past` on; the logits of their last rows. */
static int step(struct model *model, uint32_t n_seqs, uint32_t past, uint32_t n, seq_logits out)
{
    static const uint32_t tables[SEQS][TABLE] = {{0, 3}, {4, 1}, {2, 5}};
    uint32_t rows[SEQS * PROMPT], outputs[SEQS];
    struct model_seq seqs[SEQS];
    struct kvg_error err;
    for (uint32_t s = 0; s < n_seqs; s++) {
        seqs[s] = (struct model_seq){s * n, n, past, tables[s], TABLE};
        memcpy(rows + s * n, w->ids[s] + past, n * sizeof *rows);
        outputs[s] = s * n + n - 1;
    }
    struct model_batch batch = {n_seqs * n, rows, n_seqs, seqs, n_seqs, outputs};
    if (model_forward(model, &batch, &err)) {
        fprintf(stderr, "forward: %s\n", err.message);
        return -1;
    }
    for (uint32_t s = 0; s < n_seqs; s++)
        memcpy(out[s], model_logits(model) + (size_t)s * w->n_vocab, w->n_vocab * sizeof **out);
    return 0;
}

static int run(struct model *model, seq_logits *out)
{
    int failed = step(model, SEQS, 0, PROMPT, out[0]);
    for (uint32_t i = 0; i < STEPS && !failed; i++)
        failed = step(model, SEQS, PROMPT + i, 1, out[1 + i]);
    return failed;
}

static int run_rank_on_cuda(struct comm *comm, void *unused)
{
    struct kvg_error err = {0};
    struct model *model;
    int failed = open_on("cuda", comm, &model, &err);
    if (failed)
        fprintf(stderr, "rank %u: %s\n", comm->rank, err.message);
    rank_check(failed == 0);
    if (comm->rank) {
        rank_check(model_follow(model, &err) == 0);
        model_close(model);
        return 0;
    }
    rank_check(run(model, w->cuda) == 0);
    rank_check(w->deterministic || run(model, w->cuda) == 0); /* by graphs that are there */
    if (w->deterministic) {                                   /* alone and in chunks */
        static seq_logits part;
        rank_check(step(model, 1, 0, 7, part) == 0 && step(model, 1, 7, PROMPT - 7, part) == 0);
        rank_check(memcmp(part[0], w->cuda[0][0], w->n_vocab * sizeof(float)) == 0);
    }
    model_close(model);
    return 0;
}

static int be_refused(struct comm *comm, void *unused)
{
    struct kvg_error err = {0};
    struct model *model;
    rank_check(open_on("cuda", comm, &model, &err) != 0);
    if (!strstr(err.message, w->message))
        fprintf(stderr, "rank %u: %s\n", comm->rank, err.message);
    rank_check(strstr(err.message, w->message));
    return 0;
}

/* Runs the ranks in processes of their own, so that none has used its device before. */
static void run_group(uint32_t size, rank_function *function)
{
    int status = -1;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        uint32_t wrong = run_ranks(size, function, NULL);
        fflush(NULL);
        _exit(wrong ? 1 : 0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

static void write_model(const char *type, const char *arch)
{
    char command[400];
    snprintf(w->path, sizeof w->path, "/tmp/kvgate-cuda-group-%d.gguf", (int)getpid());
    snprintf(command, sizeof command,
             "python3 tests/tools/toy_model.py %s random --type %s --arch %s --hidden 128 --layers 2 --heads 4 --kv-heads 2 "
             "--head-dim 64 --ffn 192 --tied",
             w->path, type, arch);
    assert_int_equal(system(command), 0);
}

/* The bound is test_cuda_model's: one rank keeps it beside the CPU, and adding in two parts moves less than that. */
static void compare(const char *what)
{
    double most = 0, squares = 0, n = 0;
    for (uint32_t i = 0; i < 1 + STEPS; i++)
        for (uint32_t s = 0; s < SEQS; s++)
            for (uint32_t v = 0; v < w->n_vocab; v++, n++) {
                double wanted = (double)w->cpu[i][s][v], d = fabs((double)w->cuda[i][s][v] - wanted);
                most = d <= most ? most : d; /* a NaN stays */
                squares += wanted * wanted;
            }
    double width = sqrt(squares / n);
    print_message("%s: logits of width %.2f, largest difference %.4f\n", what, width, most);
    if (!(most < 0.08 * width))
        fail_msg("%s: logits of width %g differ by %g", what, width, most);
}

static void test_two_devices_say_what_one_cpu_says(void **unused)
{
    static const struct {
        const char *type, *arch;
        bool deterministic, eager;
    } cases[] = {{"Q8_0", "qwen2", false, false}, {"BF16", "llama", false, true}, {"Q4_0", "llama", true, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct kvg_error err = {0};
        struct model *model;
        write_model(cases[i].type, cases[i].arch);
        must(open_on("cpu", NULL, &model, &err), &err);
        w->n_vocab = model_info(model)->n_vocab;
        assert_int_equal(w->n_vocab % 2, 1); /* parts of the logits differ in width */
        for (uint32_t s = 0; s < SEQS; s++)
            for (uint32_t r = 0; r < ROWS; r++)
                w->ids[s][r] = (s * 71 + r * 31 + 5) % w->n_vocab;
        assert_int_equal(run(model, w->cpu), 0);
        model_close(model);
        w->deterministic = cases[i].deterministic;
        w->eager = cases[i].eager;
        run_group(2, run_rank_on_cuda);
        compare(cases[i].type);
        unlink(w->path);
    }
}

static void test_groups_that_cannot_be_are_refused_on_every_rank(void **unused)
{
    write_model("Q8_0", "llama");
    w->deterministic = true;
    w->message = "cuda: --deterministic with 4 ranks";
    run_group(4, be_refused);
    w->deterministic = false;
    w->message = "cuda: --tensor-parallel-size 5 needs as many GPUs, and there are 4";
    run_group(5, be_refused);
    w->message = "4 attention heads cannot be divided among 3 ranks";
    run_group(3, be_refused);
    unlink(w->path);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two_devices_say_what_one_cpu_says),
        cmocka_unit_test(test_groups_that_cannot_be_are_refused_on_every_rank),
    };
#ifdef ON_DEVICE
    printf("skipped: a group needs several GPUs\n");
    return 0;
#endif
    setenv("CUSIM_DEVICES", "4", 1);
    w = mmap(NULL, sizeof *w, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (w == MAP_FAILED)
        return 1;
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
