/* BF16: the upper half of an IEEE single, little-endian. */
#include "gpu-worker/quant/quant.h"
#include "gpu-worker/quant/f16.h"

static void decode(const void *src, float *dst, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, (const char *)src + 2 * i, 2);
        dst[i] = bf16_to_f32(h);
    }
}

const struct quant_format quant_bf16 = {"BF16", 30, 1, 2, 0, 0, QUANT_FLOAT, NULL, decode, 0, 0, 0x7f80};
