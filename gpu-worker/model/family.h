/* What a model family provides, and what model.c gives it. A new family is one file and one row in families.c. */
#pragma once
#include <stdint.h>
#include "gpu-worker/backend/backend.h"
#include "gpu-worker/model/loader.h"

/* Filled by the family's load. */
struct family_model {
    struct shape shape;
    uint32_t n_vocab;
    struct tensor *logits; /* [max_outputs, n_vocab], written by forward */
    /* Where scored > 0, forward may be told to score the first ids alone: `brief`. It writes brief_logits instead. */
    uint32_t scored;
    struct tensor *brief_logits; /* [max_outputs, scored] */
    bool brief;
    void *state; /* the family's own, freed by its free */
};

struct family {
    const char *name; /* general.architecture */
    int (*load)(struct family_model *model, struct loader *loader, uint32_t max_rows, uint32_t max_outputs,
                struct kvg_error *err);
    /* Between begin_step and end_step: KV of n_rows rows, logits of n_outputs (may be 0). */
    void (*forward)(const struct family_model *model, struct backend *backend, uint32_t n_rows, uint32_t n_outputs);
    void (*free)(struct family_model *model);
};

const struct family *family_find(const char *name);
/* "llama, qwen2", for messages. */
void family_names(char *out, size_t size);
