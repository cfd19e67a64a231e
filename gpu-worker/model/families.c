#include <stdio.h>
#include <string.h>
#include "gpu-worker/model/family.h"

#define DECODER decoder_load, decoder_forward, decoder_free

/* What config.json calls them is in libprompt/hf_config.c. */
static const struct family families[] = {
    {"llama", FAMILY_INTERLEAVED, DECODER},
    {"mistral", 0, DECODER},
    {"qwen2", FAMILY_QKV_BIAS, DECODER},
    {"qwen3", FAMILY_QK_NORM, DECODER},
    {"gemma3", FAMILY_QK_NORM | FAMILY_POST_NORMS | FAMILY_EMBED_SCALE | FAMILY_GELU | FAMILY_NORM_PLUS_1, DECODER},
};

const struct family *family_find(const char *name)
{
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (strcmp(families[i].name, name) == 0)
            return &families[i];
    return NULL;
}

void family_names(char *out, size_t size)
{
    size_t at = 0;
    for (size_t i = 0; i < sizeof families / sizeof *families && at < size; i++)
        at += (size_t)snprintf(out + at, size - at, "%s%s", i ? ", " : "", families[i].name);
}
