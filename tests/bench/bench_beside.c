/* Orientation for pacing: how long a step takes that holds a prompt's rows beside decode rows, by their number and by what lies
 * before them.
 *
 *   bench_beside MODEL.gguf [isa] [threads] [streams]
 */
#include "tests/bench/steps.h"

enum { STREAM_CONTEXT = 300, STREAM_BLOCKS = STREAM_CONTEXT / BLOCK + 1, MOST_PAST = 8128, TRIES = 9 };

/* Seconds of one step of n_streams decode rows and `rows` of a prompt behind `past` tokens; rows 0: the decode rows alone. */
static double mixed_step(struct model *model, uint32_t n_streams, uint32_t rows, uint32_t past)
{
    static uint32_t ids[PREFILL + MAX_SEQS], outputs[MAX_SEQS + 1],
        blocks[MAX_SEQS * STREAM_BLOCKS + MOST_PAST / BLOCK + PREFILL];
    struct model_seq seqs[MAX_SEQS + 1];
    uint32_t n_blocks = (past + rows) / BLOCK + 1, n = n_streams + (rows > 0);
    struct kvg_error err;

    for (uint32_t i = 0; i < n_streams * STREAM_BLOCKS + n_blocks; i++)
        blocks[i] = i;
    for (uint32_t i = 0; i < n_streams + rows; i++)
        ids[i] = (i * 7919 + past * 31 + 5) % model_info(model)->n_vocab;
    for (uint32_t i = 0; i < n; i++) {
        seqs[i] = i < n_streams ? (struct model_seq){i, 1, STREAM_CONTEXT, blocks + i * STREAM_BLOCKS, STREAM_BLOCKS}
                                : (struct model_seq){n_streams, rows, past, blocks + n_streams * STREAM_BLOCKS, n_blocks};
        outputs[i] = seqs[i].first_row + seqs[i].n_rows - 1;
    }
    struct model_batch batch = {n_streams + rows, ids, n, seqs, n_streams, outputs};
    double start = seconds();
    if (model_forward(model, &batch, &err) != 0)
        fail("forward", &err);
    return seconds() - start;
}

static double median(struct model *model, uint32_t n_streams, uint32_t rows, uint32_t past)
{
    double times[TRIES];
    for (uint32_t i = 0; i < TRIES; i++)
        times[i] = mixed_step(model, n_streams, rows, past);
    qsort(times, TRIES, sizeof *times, ascending);
    return times[TRIES / 2];
}

int main(int argc, char **argv)
{
    static const uint32_t counts[] = {8, 16, 24, 32, 48, 64, 96, 128, 256, 512}, pasts[] = {0, 1024, 2048, 4096, 7616};
    struct model_options options = {.max_rows = PREFILL + MAX_SEQS, .max_seqs = MAX_SEQS + 1, .max_outputs = MAX_SEQS + 1};
    struct model *model;
    struct kvg_error err;
    if (argc < 2) {
        fprintf(stderr, "usage: bench_beside MODEL.gguf [isa] [threads] [streams]\n");
        return 2;
    }
    options.path = argv[1];
    options.cpu_isa = argc > 2 ? argv[2] : "auto";
    options.cpu_arithmetic = getenv("ARITHMETIC");
    options.threads = argc > 3 ? (uint32_t)atoi(argv[3]) : 0;
    uint32_t n_streams = argc > 4 ? (uint32_t)atoi(argv[4]) : 4;
    if (model_open(&model, &options, &err) != 0)
        fail("open", &err);
    if (model_kv_alloc(model, MAX_SEQS * STREAM_BLOCKS + (MOST_PAST + PREFILL) / BLOCK + 1, BLOCK, &err) != 0)
        fail("kv", &err);
    printf("%s; %u streams alone: %.2f ms\n%-8s", model_info(model)->backend, n_streams, median(model, n_streams, 0, 0) * 1e3,
           "ms");
    for (size_t p = 0; p < sizeof pasts / sizeof *pasts; p++)
        printf("  behind %-5u", pasts[p]);
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        printf("\n%3u rows", counts[c]);
        for (size_t p = 0; p < sizeof pasts / sizeof *pasts; p++)
            printf("  %6.1f      ", median(model, n_streams, counts[c], pasts[p]) * 1e3);
        fflush(stdout);
    }
    printf("\n");
    model_close(model);
    return 0;
}
