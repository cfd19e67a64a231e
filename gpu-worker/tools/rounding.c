#include "gpu-worker/tools/rounding.h"
#include <math.h>
#include <string.h>
#include "gpu-worker/quant/f16.h"
#include "gpu-worker/tools/grid.h"

static void encode_q8_0(const float *x, uint8_t *dst)
{
    float most = 0;
    for (int i = 0; i < QUANT_GROUP; i++)
        most = fmaxf(most, fabsf(x[i]));
    uint16_t bits = f32_to_f16(most / 127);
    float d = f16_to_f32(bits), inverse = d > 0 ? 1 / d : 0;
    memcpy(dst, &bits, 2);
    for (int i = 0; i < QUANT_GROUP; i++)
        dst[2 + i] = (uint8_t)(int8_t)rounding_nearest(x[i] * inverse, -127, 127);
}

void rounding_q4_0_pack(const float *x, const struct grid_range *ranges, uint64_t n, uint8_t *out)
{
    for (uint64_t g = 0; g < n / QUANT_GROUP; g++, x += QUANT_GROUP, out += quant_q4_0.block_bytes) {
        uint16_t bits = f32_to_f16(ranges[g].scale);
        memcpy(out, &bits, 2);
        for (int i = 0; i < 16; i++)
            out[2 + i] = (uint8_t)(grid_code(x[i], ranges[g]) | grid_code(x[16 + i], ranges[g]) << 4);
    }
}

static void encode_q4_0(const float *x, uint8_t *dst)
{
    struct grid_range range = grid_fit_extreme(x, QUANT_GROUP, 1);
    rounding_q4_0_pack(x, &range, QUANT_GROUP, dst);
}

int rounding_encode(const struct quant_format *format, const float *x, size_t n, void *dst)
{
    uint8_t *out = dst;
    if (format == &quant_f32) {
        memcpy(dst, x, n * sizeof *x);
    } else if (format == &quant_bf16 || format == &quant_f16) {
        for (size_t i = 0; i < n; i++) {
            uint16_t bits = format == &quant_bf16 ? f32_to_bf16(x[i]) : f32_to_f16(x[i]);
            memcpy(out + 2 * i, &bits, 2);
        }
    } else if (format == &quant_q8_0 || format == &quant_q4_0) {
        for (size_t g = 0; g < n / QUANT_GROUP; g++)
            (format == &quant_q8_0 ? encode_q8_0 : encode_q4_0)(x + g * QUANT_GROUP, out + g * format->block_bytes);
    } else {
        return -1;
    }
    return 0;
}
