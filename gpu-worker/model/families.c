#include <stdio.h>
#include <string.h>
#include "gpu-worker/model/family.h"

extern const struct family llama_family, qwen2_family;

static const struct family *const families[] = {
    &llama_family,
    &qwen2_family,
};

const struct family *family_find(const char *name)
{
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (strcmp(families[i]->name, name) == 0)
            return families[i];
    return NULL;
}

void family_names(char *out, size_t size)
{
    size_t at = 0;
    for (size_t i = 0; i < sizeof families / sizeof *families && at < size; i++)
        at += (size_t)snprintf(out + at, size - at, "%s%s", i ? ", " : "", families[i]->name);
}
