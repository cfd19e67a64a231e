/* What a model family provides, and what model.c gives it. A family that is a decoder with the traits below is one row in
 * families.c; another is one file and one row. */
#pragma once
#include <stdint.h>
#include "gpu-worker/backend/backend.h"
#include "gpu-worker/model/loader.h"
#include "gpu-worker/model/share.h"

struct family;

/* Filled by the family's load. */
struct family_model {
    const struct family *family; /* set before load */
    struct shape shape;
    struct share share; /* of a tensor-parallel group, or the whole */
    uint32_t n_vocab;
    struct tensor *logits; /* [max_outputs, n_vocab], written by forward; NULL on ranks other than 0 */
    /* Where scored > 0, forward may be told to score the first ids alone: `brief`. It writes brief_logits instead. */
    uint32_t scored;
    struct tensor *brief_logits; /* [max_outputs, scored] */
    bool brief;
    void *state; /* the family's own, freed by its free */
};

enum family_trait {
    FAMILY_INTERLEAVED = 1,  /* GGUF files of it keep q and k in pairs (2i, 2i + 1); folders never do */
    FAMILY_QKV_BIAS = 2,     /* q, k and v have biases; else they may */
    FAMILY_QK_NORM = 4,      /* RMS norms of each head of q and k before they are rotated */
    FAMILY_POST_NORMS = 8,   /* RMS norms of what attention and feed-forward add to the residual */
    FAMILY_EMBED_SCALE = 16, /* embeddings times sqrt(hidden) */
    FAMILY_GELU = 32,        /* the gate's activation is gelu (tanh form) instead of silu */
    FAMILY_NORM_PLUS_1 = 64, /* folders keep norm weights less 1 */
};

struct family {
    const char *name; /* general.architecture */
    uint32_t traits;
    int (*load)(struct family_model *model, struct loader *loader, uint32_t max_rows, uint32_t max_outputs,
                struct kvg_error *err);
    /* Between begin_step and end_step: KV of n_rows rows, logits of n_outputs (may be 0). */
    void (*forward)(const struct family_model *model, struct backend *backend, uint32_t n_rows, uint32_t n_outputs);
    void (*free)(struct family_model *model);
};

const struct family *family_find(const char *name);
/* "llama, qwen2", for messages. */
void family_names(char *out, size_t size);

/* llama.c: the decoder that all rows share today. */
int decoder_load(struct family_model *model, struct loader *loader, uint32_t max_rows, uint32_t max_outputs,
                 struct kvg_error *err);
void decoder_forward(const struct family_model *model, struct backend *backend, uint32_t n_rows, uint32_t n_outputs);
void decoder_free(struct family_model *model);
