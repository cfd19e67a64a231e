/* F32: IEEE single precision, little-endian. */
#include "gpu-worker/quant/quant.h"
#include <string.h>

static void decode(const void *src, float *dst, size_t n)
{
    memcpy(dst, src, n * 4);
}

const struct quant_format quant_f32 = {"F32", 0, 1, 4, 0, 0, QUANT_FLOAT, NULL, decode, 0, 0, 0x7f800000};
