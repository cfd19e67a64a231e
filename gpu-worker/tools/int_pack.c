#include "gpu-worker/tools/int_pack.h"
#include <math.h>
#include "gpu-worker/quant/f16.h"
#include "gpu-worker/tools/rounding.h"

static float most_of(const float *x, uint64_t n)
{
    float most = 0;
    for (uint64_t i = 0; i < n; i++)
        most = fmaxf(most, fabsf(x[i]));
    return most;
}

uint16_t int_pack_w8(const float *x, uint64_t n, int8_t *q)
{
    uint16_t bits = f32_to_bf16(most_of(x, n) / 127);
    float scale = bf16_to_f32(bits), inverse = scale > 0 ? 1 / scale : 0;
    for (uint64_t i = 0; i < n; i++)
        q[i] = (int8_t)rounding_nearest(x[i] * inverse, -127, 127);
    return bits;
}

float int_pack_w4_scale(const float *x, uint32_t group)
{
    return f16_to_f32(f32_to_f16(2 * most_of(x, group) / 15));
}

/* The code, 0 to 15. */
static uint32_t code(float x, float scale)
{
    return (uint32_t)(scale > 0 ? rounding_nearest(x / scale, -8, 7) + 8 : 8);
}

float int_pack_w4_nearest(float x, float scale)
{
    return scale * (float)((int)code(x, scale) - 8);
}

void int_pack_gptq(const float *w, const float *scales, uint64_t rows, uint64_t cols, uint32_t group, uint32_t *qweight,
                   uint16_t *scales_out, uint32_t *qzeros, int32_t *g_idx)
{
    uint64_t groups = cols / group;
    for (uint64_t at = 0; at < cols; at += 8)
        for (uint64_t r = 0; r < rows; r++) {
            uint32_t word = 0;
            for (uint32_t i = 0; i < 8; i++)
                word |= code(w[r * cols + at + i], scales[r * groups + (at + i) / group]) << 4 * i;
            qweight[at / 8 * rows + r] = word;
        }
    for (uint64_t g = 0; g < groups; g++)
        for (uint64_t r = 0; r < rows; r++)
            scales_out[g * rows + r] = f32_to_f16(scales[r * groups + g]);
    for (uint64_t i = 0; i < groups * (rows / 8); i++)
        qzeros[i] = 0x77777777u;
    for (uint64_t c = 0; c < cols; c++)
        g_idx[c] = (int32_t)(c / group);
}
