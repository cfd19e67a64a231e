/* Orientation for profiling: decode tokens/s at 1, 8 and 32 rows and prefill tokens/s of one model on the CPU backend.
 *
 *   bench_forward MODEL.gguf [isa] [threads] [context]
 */
#include "tests/bench/steps.h"

int main(int argc, char **argv)
{
    struct model_options options = {.max_rows = PREFILL, .max_seqs = MAX_SEQS, .max_outputs = MAX_SEQS};
    struct model *model;
    struct kvg_error err;
    if (argc < 2) {
        fprintf(stderr, "usage: bench_forward MODEL.gguf [isa] [threads] [context]\n");
        return 2;
    }
    options.path = argv[1];
    options.cpu_isa = argc > 2 ? argv[2] : "auto";
    options.cpu_arithmetic = getenv("ARITHMETIC");
    options.threads = argc > 3 ? (uint32_t)atoi(argv[3]) : 0;
    uint32_t context = argc > 4 ? (uint32_t)atoi(argv[4]) : 350, blocks_each = (context + PREFILL) / BLOCK + 1;
    double start = seconds();
    if (model_open(&model, &options, &err) != 0)
        fail("open", &err);
    printf("%s: loaded in %.0f ms, %s\n", argv[1], (seconds() - start) * 1e3, model_info(model)->backend);
    if (model_kv_alloc(model, blocks_each * MAX_SEQS, BLOCK, &err) != 0)
        fail("kv", &err);
    step(model, MAX_SEQS, 1, 0, blocks_each);
    double one = 0;
    for (uint32_t n = 1; n <= 32; n = n == 1 ? 8 : n * 4) {
        double t = median_step(model, n, 1, context, blocks_each, 15);
        one = n == 1 ? t : one;
        printf("decode %2u rows at %u: %7.2f ms, %7.1f tokens/s (%.2fx)\n", n, context, t * 1e3, n / t, n / t * one);
    }
    double t = median_step(model, 1, PREFILL, 0, blocks_each, 3);
    printf("prefill %d: %7.1f ms, %7.1f tokens/s (%.2fx of one row)\n", PREFILL, t * 1e3, PREFILL / t, PREFILL / t * one);
    model_close(model);
    return 0;
}
