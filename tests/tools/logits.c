/* Runs token sequences through a model and prints what a comparison with goldens needs.
 *
 *   logits MODEL IDS PICKS OUT SEQ_LEN FIRST [isa] [threads] [chunk] [kv dtype]
 *
 * IDS: u32 sequences of SEQ_LEN; PICKS: for each position FIRST..SEQ_LEN-1 of each sequence, 64 u32 ids. OUT: f32
 * [positions][66]: the log-probabilities of the 64 ids, the most probable id, the logsumexp of the logits.
 *
 *   logits MODEL IDS - OUT SEQ_LEN N [isa] [threads]
 *
 * isa "cuda": on the CUDA backend.
 *
 * Greedy: continues each sequence by N tokens. OUT: u32 [sequences][N] ids, then f32 [sequences][N] margins to the second best
 * logit.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/model/model.h"

enum { BLOCK = 32, CHUNK = 64, PICKS = 64 };

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "logits: %s: %s\n", what, why);
    exit(1);
}

static uint32_t *read_file(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    if (!f || fseek(f, 0, SEEK_END) != 0)
        fail(path, "cannot read");
    size_t size = (size_t)ftell(f);
    uint32_t *data = malloc(size + 4);
    rewind(f);
    if (!data || fread(data, 1, size, f) != size)
        fail(path, "cannot read");
    fclose(f);
    *n = size / 4;
    return data;
}

struct run {
    struct model *model;
    uint32_t *blocks, n_blocks;
};

/* Rows past..past+n of one sequence; logits of rows skip..n. */
static const float *forward(struct run *run, const uint32_t *ids, uint32_t n, uint32_t past, uint32_t skip)
{
    struct model_seq seq = {0, n, past, run->blocks, run->n_blocks};
    uint32_t outputs[CHUNK], n_outputs = 0;
    struct kvg_error err;
    for (uint32_t i = skip; i < n; i++)
        outputs[n_outputs++] = i;
    struct model_batch batch = {n, ids, 1, &seq, n_outputs, outputs};
    if (model_forward(run->model, &batch, &err) != 0)
        fail("forward", err.message);
    return model_logits(run->model);
}

static uint32_t best_of(const float *logits, uint32_t n, float *margin)
{
    uint32_t best = 0;
    float second = -INFINITY;
    for (uint32_t i = 1; i < n; i++) {
        if (logits[i] > logits[best]) {
            second = logits[best];
            best = i;
        } else if (logits[i] > second) {
            second = logits[i];
        }
    }
    *margin = logits[best] - second;
    return best;
}

static void write_position(FILE *out, const float *logits, uint32_t n, const uint32_t *picks)
{
    float values[PICKS + 2], margin;
    double sum = 0;
    uint32_t best = best_of(logits, n, &margin);
    for (uint32_t i = 0; i < n; i++)
        sum += exp((double)logits[i] - (double)logits[best]);
    double total = (double)logits[best] + log(sum);
    for (int i = 0; i < PICKS; i++)
        values[i] = picks[i] < n ? (float)((double)logits[picks[i]] - total) : NAN;
    values[PICKS] = (float)best;
    values[PICKS + 1] = (float)total;
    fwrite(values, sizeof *values, PICKS + 2, out);
}

static void score(struct run *run, const uint32_t *ids, uint32_t length, uint32_t first, uint32_t chunk, const uint32_t *picks,
                  FILE *out)
{
    uint32_t n_vocab = model_info(run->model)->n_vocab;
    for (uint32_t at = 0; at < length; at += chunk) {
        uint32_t n = length - at < chunk ? length - at : chunk;
        uint32_t skip = at >= first ? 0 : first - at < n ? first - at : n;
        const float *logits = forward(run, ids + at, n, at, skip);
        for (uint32_t i = skip; i < n; i++)
            write_position(out, logits + (size_t)(i - skip) * n_vocab, n_vocab, picks + (size_t)(at + i - first) * PICKS);
    }
}

static void greedy(struct run *run, const uint32_t *ids, uint32_t length, uint32_t n, uint32_t *next, float *margins)
{
    uint32_t n_vocab = model_info(run->model)->n_vocab, past = 0;
    const float *logits = NULL;
    for (uint32_t m; past < length; past += m) {
        m = length - past < CHUNK ? length - past : CHUNK;
        logits = forward(run, ids + past, m, past, m - 1);
    }
    for (uint32_t i = 0; i < n; i++) {
        next[i] = best_of(logits, n_vocab, &margins[i]);
        logits = forward(run, &next[i], 1, past++, 0);
    }
}

int main(int argc, char **argv)
{
    struct kvg_error err;
    struct run run = {0};
    bool cuda = argc > 7 && strcmp(argv[7], "cuda") == 0;
    if (argc < 7)
        fail("usage", "logits MODEL IDS PICKS|- OUT SEQ_LEN FIRST|N [isa] [threads] [chunk] [kv dtype]");
    uint32_t length = (uint32_t)atoi(argv[5]), first = (uint32_t)atoi(argv[6]),
             chunk = argc > 9 ? (uint32_t)atoi(argv[9]) : CHUNK;
    struct model_options options = {.path = argv[1],
                                    .device = cuda ? "cuda" : "cpu",
                                    .cpu_isa = argc > 7 && !cuda ? argv[7] : "auto",
                                    .kv_cache_dtype = argc > 10 ? argv[10] : NULL,
                                    .threads = argc > 8 ? (uint32_t)atoi(argv[8]) : 0,
                                    .max_rows = CHUNK,
                                    .max_seqs = 1,
                                    .max_outputs = CHUNK};
    size_t n_ids, n_picks = 0;
    uint32_t *ids = read_file(argv[2], &n_ids), *picks = strcmp(argv[3], "-") ? read_file(argv[3], &n_picks) : NULL;
    if (chunk == 0 || chunk > CHUNK || length == 0 || n_ids % length)
        fail("usage", "a chunk of 1..64 and whole sequences");
    size_t n_seqs = n_ids / length;
    if (picks && (first >= length || n_picks != n_seqs * (length - first) * PICKS))
        fail(argv[3], "not 64 ids a position");
    if (model_open(&run.model, &options, &err) != 0)
        fail(argv[1], err.message);
    run.n_blocks = (length + (picks ? 0 : first)) / BLOCK + 1;
    run.blocks = calloc(run.n_blocks, sizeof *run.blocks);
    for (uint32_t i = 0; i < run.n_blocks; i++)
        run.blocks[i] = run.n_blocks - 1 - i;
    if (model_kv_alloc(run.model, run.n_blocks, BLOCK, &err) != 0)
        fail("kv", err.message);
    FILE *out = fopen(argv[4], "wb");
    if (!out)
        fail(argv[4], "cannot write");
    if (picks) {
        for (size_t s = 0; s < n_seqs; s++)
            score(&run, ids + s * length, length, first, chunk, picks + s * (length - first) * PICKS, out);
    } else {
        uint32_t *next = calloc(n_seqs * first, sizeof *next);
        float *margins = calloc(n_seqs * first, sizeof *margins);
        for (size_t s = 0; s < n_seqs; s++)
            greedy(&run, ids + s * length, length, first, next + s * first, margins + s * first);
        fwrite(next, sizeof *next, n_seqs * first, out);
        fwrite(margins, sizeof *margins, n_seqs * first, out);
        free(next);
        free(margins);
    }
    if (fclose(out) != 0)
        fail(argv[4], "cannot write");
    free(ids);
    free(picks);
    free(run.blocks);
    model_close(run.model);
    return 0;
}
