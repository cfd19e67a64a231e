#include "gpu-worker/tools/rounding.h"
#include <math.h>
#include <string.h>
#include "gpu-worker/quant/f16.h"

/* To the nearest whole number, halves away from zero, inside low..high. */
static int nearest(float x, int low, int high)
{
    float rounded = roundf(x);
    return rounded < (float)low ? low : rounded > (float)high ? high : (int)rounded;
}

static void encode_q8_0(const float *x, uint8_t *dst)
{
    float most = 0;
    for (int i = 0; i < QUANT_GROUP; i++)
        most = fmaxf(most, fabsf(x[i]));
    uint16_t bits = f32_to_f16(most / 127);
    float d = f16_to_f32(bits), inverse = d > 0 ? 1 / d : 0;
    memcpy(dst, &bits, 2);
    for (int i = 0; i < QUANT_GROUP; i++)
        dst[2 + i] = (uint8_t)(int8_t)nearest(x[i] * inverse, -127, 127);
}

uint16_t rounding_q4_0_scale(const float *x)
{
    float extreme = 0;
    for (int i = 0; i < QUANT_GROUP; i++)
        if (fabsf(x[i]) > fabsf(extreme))
            extreme = x[i];
    return f32_to_f16(extreme / -8);
}

uint8_t rounding_q4_0_code(float x, float scale)
{
    return (uint8_t)(scale != 0 ? nearest(x / scale, -8, 7) + 8 : 8);
}

static void encode_q4_0(const float *x, uint8_t *dst)
{
    uint16_t bits = rounding_q4_0_scale(x);
    float d = f16_to_f32(bits);
    memcpy(dst, &bits, 2);
    for (int i = 0; i < 16; i++)
        dst[2 + i] = (uint8_t)(rounding_q4_0_code(x[i], d) | rounding_q4_0_code(x[16 + i], d) << 4);
}

int rounding_encode(const struct quant_format *format, const float *x, size_t n, void *dst)
{
    uint8_t *out = dst;
    if (format == &quant_f32) {
        memcpy(dst, x, n * sizeof *x);
    } else if (format == &quant_bf16) {
        for (size_t i = 0; i < n; i++) {
            uint16_t bits = f32_to_bf16(x[i]);
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
