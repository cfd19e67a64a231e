/* Any bytes as a model file: refused, or every described tensor and value lies within the file. */
#include <stdlib.h>
#include <string.h>
#include "libprompt/gguf.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvg_error err;
    struct kvg_gguf *gguf;
    uint64_t n;
    unsigned char *bytes = malloc(size ? size : 1);

    memcpy(bytes, data, size);
    if (kvg_gguf_parse(&gguf, bytes, size, &err) == 0) {
        for (size_t i = 0; i < gguf->n_tensors; i++)
            if (gguf->tensors[i].offset > size || gguf->tensors[i].n_bytes > size - gguf->tensors[i].offset)
                abort();
        for (size_t i = 0; i < gguf->n_values; i++)
            if (gguf->values[i].n_bytes > size)
                abort();
        kvg_gguf_u64(gguf, "llama.block_count", &n);
        kvg_gguf_close(gguf);
    }
    free(bytes);
    return 0;
}
