#include <string.h>
#include "gpu-worker/backend/backend.h"

static const char *const names[KV_DTYPES] = {"auto", "f16", "bf16", "int8", "fp8"};
static const char *const long_names[KV_DTYPES] = {"auto", "float16", "bfloat16", "int8", "fp8_e4m3"};

int backend_kv_dtype(const char *name, enum backend_kv_dtype *out, struct kvg_error *err)
{
    for (int i = 0; i < KV_DTYPES; i++)
        if (!name || strcmp(name, names[i]) == 0 || strcmp(name, long_names[i]) == 0) {
            *out = (enum backend_kv_dtype)i;
            return 0;
        }
    return kvg_fail(err, KVG_INVALID, "unknown KV cache dtype \"%s\" (auto, f16, bf16, int8, fp8)", name);
}

const char *backend_kv_dtype_name(enum backend_kv_dtype dtype)
{
    return names[dtype];
}
