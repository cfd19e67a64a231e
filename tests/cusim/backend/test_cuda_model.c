/* A two-layer model on both backends: logits of prompts in chunks, of decode steps in a batch of eight (graphs, and their
 * padding), and of mixed steps stay within a bound of the CPU's; in deterministic mode the bits do not depend on the batch. */
#include <unistd.h>
#include "gpu-worker/model/model.h"
#include "tests/cusim/backend/twin.h"

enum { SEQS = 8, PROMPT = 21, STEPS = 4, BLOCK = 16, BLOCKS_A_SEQ = 3, VOCAB_MOST = 512 };

/* Takes the place of the loader of kvgate-cuda.so. */
int cuda_backend_open(struct backend **out, const struct backend_options *options, struct kvg_error *err)
{
    return kvgate_cuda_open(out, options, err);
}

static char path[64];
static uint32_t ids[SEQS][PROMPT + STEPS];

static void write_layers(const char *type, const char *arch, int layers)
{
    char command[400];
    snprintf(path, sizeof path, "/tmp/kvgate-cuda-model-%d.gguf", (int)getpid());
    snprintf(command, sizeof command,
             "python3 tests/tools/toy_model.py %s random --type %s --arch %s --hidden 256 --layers %d --heads 4 --kv-heads 2 "
             "--head-dim 64 --ffn 512 --tied",
             path, type, arch, layers);
    assert_int_equal(system(command), 0);
}

static void write_model(const char *type, const char *arch)
{
    write_layers(type, arch, 2);
}

static struct model *open_model(const char *device, bool deterministic, bool eager)
{
    struct model *model;
    struct kvg_error err = {0};
    struct model_options options = {.path = path,
                                    .device = device,
                                    .cpu_isa = "auto",
                                    .cpu_arithmetic = "int8",
                                    .threads = 1,
                                    .deterministic = deterministic,
                                    .enforce_eager = eager,
                                    .max_rows = SEQS * PROMPT,
                                    .max_seqs = SEQS,
                                    .max_outputs = SEQS};
    must(model_open(&model, &options, &err), &err);
    must(model_kv_alloc(model, SEQS * BLOCKS_A_SEQ, BLOCK, &err), &err);
    return model;
}

/* One step: n_rows[s] tokens of each sequence from past[s]; the logits of each one's last row to out[s]. */
static void step(struct model *model, uint32_t n_seqs, const uint32_t *past, const uint32_t *n_rows, float out[][VOCAB_MOST])
{
    static uint32_t rows[SEQS * PROMPT], tables[SEQS][BLOCKS_A_SEQ], outputs[SEQS];
    struct model_seq seqs[SEQS];
    struct kvg_error err = {0};
    uint32_t n = 0, n_vocab = model_info(model)->n_vocab;
    assert_true(n_vocab <= VOCAB_MOST);
    for (uint32_t s = 0; s < n_seqs; s++) {
        for (uint32_t b = 0; b < BLOCKS_A_SEQ; b++)
            tables[s][b] = b * SEQS + (s * 3 + 1) % SEQS;
        seqs[s] = (struct model_seq){n, n_rows[s], past[s], tables[s], BLOCKS_A_SEQ};
        memcpy(rows + n, ids[s] + past[s], n_rows[s] * sizeof *rows);
        n += n_rows[s];
        outputs[s] = n - 1;
    }
    struct model_batch batch = {n, rows, n_seqs, seqs, n_seqs, outputs};
    size_t before = bytes_to_host();
    must(model_forward(model, &batch, &err), &err);
    for (uint32_t s = 0; s < n_seqs; s++)
        memcpy(out[s], model_logits(model) + (size_t)s * n_vocab, n_vocab * sizeof **out);
    size_t copied = bytes_to_host() - before; /* by a device: once, and of this step's outputs alone */
    assert_true(copied == 0 || copied == n_seqs * n_vocab * sizeof **out);
}

/* A mixed step of prompts of different lengths, the rest of the prompts, then decode steps of all and of five sequences. */
static void run(struct model *model, float out[][SEQS][VOCAB_MOST])
{
    uint32_t past[SEQS], n_rows[SEQS];
    for (uint32_t s = 0; s < SEQS; s++) {
        past[s] = 0;
        n_rows[s] = s == 1 ? 1 : PROMPT - 2 * s;
    }
    step(model, SEQS, past, n_rows, *out++);
    for (uint32_t s = 0; s < SEQS; s++) {
        past[s] = n_rows[s];
        n_rows[s] = PROMPT - past[s] ? PROMPT - past[s] : 1;
    }
    step(model, SEQS, past, n_rows, *out++);
    for (uint32_t s = 0; s < SEQS; s++)
        past[s] += n_rows[s];
    for (int i = 0; i < 3; i++) {
        uint32_t n = i == 1 ? 5 : SEQS;
        for (uint32_t s = 0; s < SEQS; s++)
            n_rows[s] = 1;
        step(model, n, past, n_rows, *out++);
        for (uint32_t s = 0; s < n; s++)
            past[s]++;
    }
}

enum { RUN_STEPS = 5 };
static float logits[2][RUN_STEPS][SEQS][VOCAB_MOST];

static void random_ids(uint32_t n_vocab)
{
    for (uint32_t s = 0; s < SEQS; s++)
        for (uint32_t i = 0; i < PROMPT + STEPS; i++)
            ids[s][i] = next_random() % n_vocab;
}

/* KV, and in tiles q and p, are bf16 here, which moves attended values by 2^-8; where that moves an activation past the middle of
 * two int8 steps, by 1/254 of its group's largest. A mistake in any kernel moves logits by as much as they are wide; the mean
 * shows those that the bound would hide. */
static void compare(const char *what, uint32_t n_vocab)
{
    double most = 0, sum = 0, squares = 0, n = 0;
    for (uint32_t i = 0; i < RUN_STEPS; i++)
        for (uint32_t s = 0; s < (i == 3 ? 5 : SEQS); s++)
            for (uint32_t v = 0; v < n_vocab; v++) {
                double wanted = (double)logits[0][i][s][v], d = fabs((double)logits[1][i][s][v] - wanted);
                most = d <= most ? most : d; /* a NaN stays */
                sum += d;
                squares += wanted * wanted;
                n++;
            }
    double width = sqrt(squares / n);
    print_message("%s: logits of width %.2f, largest difference %.4f, mean %.5f\n", what, width, most, sum / n);
    if (!(most < 0.08 * width) || !(sum / n < 0.02 * width))
        fail_msg("%s: logits of width %g differ by %g, %g on average", what, width, most, sum / n);
}

/* Modes: graphs, deterministic, eager. */
static void check_type(const char *type, const char *arch, int n_modes)
{
    struct model *cpu, *cuda;
    write_model(type, arch);
    cpu = open_model("cpu", false, false);
    uint32_t n_vocab = model_info(cpu)->n_vocab;
    random_ids(n_vocab);
    run(cpu, logits[0]);
    model_close(cpu);
    for (int mode = 0; mode < n_modes; mode++) {
        char what[64];
        snprintf(what, sizeof what, "%s %s%s", arch, type, mode == 0 ? "" : mode == 1 ? ", deterministic" : ", eager");
        cuda = open_model("cuda", mode == 1, mode == 2);
        run(cuda, logits[1]);
        if (mode == 0)
            run(cuda, logits[1]); /* by graphs that are there */
        model_close(cuda);
        compare(what, n_vocab);
    }
    unlink(path);
}

static void test_logits_of_q4_k_are_the_cpus_within_a_bound(void **unused)
{
    check_type("Q4_K", "llama", 3);
}

static void test_logits_of_q8_0_are_the_cpus_within_a_bound(void **unused)
{
    check_type("Q8_0", "qwen2", 2);
}

static void test_logits_of_bf16_are_the_cpus_within_a_bound(void **unused)
{
    check_type("BF16", "llama", 2);
}

static void test_deterministic_mode_does_not_see_the_batch(void **unused)
{
    static float whole[1][SEQS][VOCAB_MOST], part[SEQS][VOCAB_MOST];
    static const char *const types[] = {"Q4_0", "F16"};
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        uint32_t past[SEQS] = {0}, all[SEQS], first[SEQS] = {7}, rest[SEQS] = {PROMPT - 7}, seven[SEQS] = {7};
        write_model(types[t], "llama");
        struct model *model = open_model("cuda", true, false);
        uint32_t n_vocab = model_info(model)->n_vocab;
        random_ids(n_vocab);
        for (uint32_t s = 0; s < SEQS; s++)
            all[s] = PROMPT - s;
        all[0] = PROMPT;
        step(model, SEQS, past, all, whole[0]);
        step(model, 1, past, first, part);
        step(model, 1, seven, rest, part);
        if (memcmp(part[0], whole[0][0], n_vocab * sizeof(float)))
            fail_msg("%s: the bits of a sequence alone and in chunks differ from those in a batch", types[t]);
        model_close(model);
        unlink(path);
    }
}

/* Kernels of an eager decode step of n sequences; the model has so many layers. */
static unsigned long decode_launches(const char *type, int layers, uint32_t n)
{
    static float out[SEQS][VOCAB_MOST];
    uint32_t past[SEQS] = {0}, one[SEQS];
    write_layers(type, "llama", layers);
    struct model *model = open_model("cuda", false, true);
    random_ids(model_info(model)->n_vocab);
    for (uint32_t s = 0; s < SEQS; s++)
        one[s] = 1;
    unsigned long before = launches();
    step(model, n, past, one, out);
    unsigned long n_launches = launches() - before;
    model_close(model);
    unlink(path);
    return n_launches;
}

static void test_a_layer_of_a_decode_step_is_six_kernels(void **unused)
{
    static const char *const types[] = {"Q4_0", "BF16"};
    for (size_t t = 0; t < sizeof types / sizeof *types; t++)
        for (uint32_t n = 1; n <= SEQS; n += SEQS - 1)
            assert_launches(decode_launches(types[t], 4, n) - decode_launches(types[t], 2, n), 2 * 6);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_logits_of_q4_k_are_the_cpus_within_a_bound),
        cmocka_unit_test(test_logits_of_q8_0_are_the_cpus_within_a_bound),
        cmocka_unit_test(test_logits_of_bf16_are_the_cpus_within_a_bound),
        cmocka_unit_test(test_deterministic_mode_does_not_see_the_batch),
        cmocka_unit_test(test_a_layer_of_a_decode_step_is_six_kernels),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
