/* One loaded model on one backend: what the engine runs each step.
 *
 *   batch rows (tokens)            sequences                       outputs
 *   0 1 2 3 4 5 6 7 8              {first 0, n 5}  prefill chunk   rows 4, 5, 8: the last row of each sequence whose
 *   A A A A A B C C C              {first 5, n 1}  decode           next token is wanted (several rows a sequence when
 *                                  {first 6, n 3}  prefill chunk    drafts are verified)
 *
 * Row-invariance: the logits of a token depend only on its own sequence's tokens, bit for bit, whatever the batch, chunking,
 * block placement or thread count (within one CPU instruction-set path).
 *
 * All calls but model_open/close come from the engine thread.
 *
 * A tensor-parallel group (backend/comm.h) has a model on each rank, opened with the same options but for the rank; model_open
 * returns the same code on all of them. Rank 0's is then used as any other; the others run model_follow, which does what rank 0's
 * calls need until its model_close.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "libprompt/error.h"
#include "libprompt/gguf.h"

struct comm;
struct model;
struct model_watch;
struct sample_row;
struct sample_result;

struct model_options {
    const char *path;
    const char *device;                            /* "auto", "cpu", "cuda" */
    const char *cpu_isa;                           /* "auto", "generic", "avx2", "avx512", "amx" */
    const char *cpu_arithmetic;                    /* "auto", "int8", "int16"; NULL = auto */
    const char *kv_cache_dtype;                    /* "auto", "f16", "bf16", "int8"; NULL = auto */
    uint32_t threads;                              /* 0 = all cores, divided among ranks */
    uint32_t max_rows;                             /* most rows in one batch (--max-num-batched-tokens) */
    uint32_t max_seqs;                             /* most sequences in one batch */
    uint32_t max_outputs;                          /* most output rows in one batch */
    bool deterministic;                            /* CUDA: row-invariance, at a price */
    bool enforce_eager;                            /* CUDA: no graphs */
    uint32_t scored;                               /* ids that a brief batch scores; 0 = there are no brief ones */
    void (*progress)(double share, void *context); /* 0..1 while the file loads; may be NULL */
    void *context;
    const struct model_watch *watch; /* see watch.h; NULL = none. Alive as long as the model */
    struct comm *comm;               /* the caller's, alive as long as the model; NULL = this process alone */
};

struct model_info {
    const char *family;                                                /* "llama", "qwen2" */
    uint32_t n_layers, n_heads, n_kv_heads, head_dim, hidden, n_vocab; /* n_vocab: rows of the output matrix */
    uint32_t max_position;                                             /* the file's context length */
    uint32_t scored;                                                   /* by a brief batch; n_vocab where that saves nothing */
    uint64_t weight_bytes;                                             /* of the file: of all ranks together */
    uint32_t ranks;                                                    /* that compute it together; 1 = this process alone */
    bool samples_ahead;                                                /* a call of model_sample costs more than the rows in it */
    char backend[128];          /* "cpu amx, 2 threads, int16 Q4_1, int8 Q8_0": how each format is multiplied */
    const char *kv_cache_dtype; /* of the KV pool: "f16", "bf16", "int8" */
};

int model_open(struct model **out, const struct model_options *options, struct kvg_error *err);
void model_close(struct model *model);
const struct model_info *model_info(const struct model *model);

/* Ranks other than 0, in place of all calls below: 0 when rank 0 has closed its model, or an error as model_forward's. */
int model_follow(struct model *model, struct kvg_error *err);

/* KV pool: n_blocks blocks of block_size tokens, all layers. Allocated once, before the first forward. On the CPU the bytes are
 * those of all ranks together, on devices with memory of their own those of one. */
size_t model_kv_block_bytes(const struct model *model, uint32_t block_size);
/* Bytes of the device's own memory, and what is free of it; 0 on the CPU. */
uint64_t model_device_memory(const struct model *model, uint64_t *free_bytes);
int model_kv_alloc(struct model *model, uint32_t n_blocks, uint32_t block_size, struct kvg_error *err);

struct model_seq {
    uint32_t first_row, n_rows; /* its rows are consecutive */
    uint32_t n_past;            /* tokens before first_row whose KV is in the blocks; row i has position n_past + i */
    const uint32_t *blocks;     /* block table: block of position p is blocks[p / block_size] */
    uint32_t n_blocks;
};

struct model_batch {
    uint32_t n_rows;
    const uint32_t *ids; /* [n_rows], all < n_vocab */
    uint32_t n_seqs;
    const struct model_seq *seqs;
    uint32_t n_outputs;
    const uint32_t *outputs; /* [n_outputs] rows, ascending */
    bool brief;              /* only the first model_info.scored ids are scored and can be drawn */
};

/* Computes KV for every row and logits for the output rows. 0, or -1 with err: the device failed, the process should exit. */
int model_forward(struct model *model, const struct model_batch *batch, struct kvg_error *err);
/* Logits of the last forward in host memory, [n_outputs, n_vocab] f32 (of a brief one, [n_outputs, scored]), valid until the next
 * forward. */
const float *model_logits(struct model *model);
/* Samples from the logits of the last forward: one result for each of n rows (see backend/sampling.h). */
int model_sample(struct model *model, const struct sample_row *rows, uint32_t n, struct sample_result *results,
                 struct kvg_error *err);
