/* F16: IEEE half precision, little-endian. */
#include "gpu-worker/quant/quant.h"
#include "gpu-worker/quant/f16.h"

static void decode(const void *src, float *dst, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, (const char *)src + 2 * i, 2);
        dst[i] = f16_to_f32(h);
    }
}

const struct quant_format quant_f16 = {"F16", 1, 1, 2, 0, 0, QUANT_FLOAT, NULL, decode, 0, 0, 0x7c00};
