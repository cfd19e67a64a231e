/* Any bytes as a safetensors file: refused, or every tensor lies within the file and none overlaps another. */
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/model/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvg_error err;
    struct safetensors *st;
    uint64_t total = 0;
    unsigned char *bytes = malloc(size ? size : 1);

    memcpy(bytes, data, size);
    if (safetensors_parse(&st, bytes, size, &err) == 0) {
        for (size_t i = 0; i < st->n_tensors; i++) {
            const struct safetensors_tensor *t = &st->tensors[i];
            if (t->data < bytes || (size_t)(t->data - bytes) > size || t->n_bytes > size - (size_t)(t->data - bytes))
                abort();
            total += t->n_bytes;
        }
        if (total != size - st->files[0].data_offset)
            abort();
        safetensors_close(st);
    }
    free(bytes);
    return 0;
}
