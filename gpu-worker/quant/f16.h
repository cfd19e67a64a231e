/* Half-precision conversions in plain C, exact (to f32) and correctly rounded (from f32), for code without hardware ones. */
#pragma once
#include <stdint.h>
#include <string.h>

/* Neither infinity nor NaN. */
static inline int f16_finite(uint16_t h)
{
    return (h & 0x7c00) != 0x7c00;
}

static inline float bits_f32(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint32_t f32_bits(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

static inline float bf16_to_f32(uint16_t h)
{
    return bits_f32((uint32_t)h << 16);
}

/* Exponent and mantissa are moved up as they are; the multiplication by 2^112 then sets the exponent right. It would of
 * subnormals as well, but an operation on those takes a hundred cycles, and scales often are.
 */
static inline float f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    if (rest >= 0x0f800000u) /* infinity or NaN */
        return bits_f32(sign | 0x7f800000u | (rest & 0x7fffffu));
    if (rest < 0x00800000u)
        return bits_f32(sign | f32_bits((float)(h & 0x3ff) * 0x1p-24f));
    return bits_f32(sign | f32_bits(bits_f32(rest) * 0x1p112f));
}

/* Nearest, ties to even. */
static inline uint16_t f32_to_f16(float f)
{
    uint32_t bits = f32_bits(f), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000u) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000u) { /* subnormal: adding 0.5 lets the FPU round at 2^-24 */
        uint32_t sum = f32_bits(bits_f32(magnitude) + 0.5f);
        return (uint16_t)(sign | (sum - 0x3f000000u));
    }
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | ((magnitude - 0x38000000u) >> 13));
}

/* Nearest, ties to even. */
static inline uint16_t f32_to_bf16(float f)
{
    uint32_t bits = f32_bits(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
