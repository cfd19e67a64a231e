/* The INT16 arithmetic (panels.h): what the kernels of all instruction sets share, on v16.h's types. */
#pragma once
#include "gpu-worker/backend/cpu/v16.h"

V_INLINE float row_amax(const float *x, size_t n)
{
    v16 most[4] = {v16_set1(0), v16_set1(0), v16_set1(0), v16_set1(0)};
    size_t k = 0;
    for (; k + 64 <= n; k += 64)
        for (size_t i = 0; i < 4; i++)
            most[i] = v16_max(v16_abs(v16_load(x + k + 16 * i)), most[i]);
    for (; k < n; k += 16)
        most[0] = v16_max(v16_abs(v16_load(x + k)), most[0]);
    return v16_hmax(v16_max(v16_max(most[0], most[1]), v16_max(most[2], most[3])));
}

/* Values that are no numbers become -32512: integers stay within their bounds whatever comes. */
V_INLINE v16 int16_scaled(const float *x, v16 inverse)
{
    v16 bound = v16_set1(INT16_ACTIVATION), least = v16_set1(-INT16_ACTIVATION);
    return v16_min(v16_max(v16_mul(v16_load(x), inverse), least), bound);
}

/* s and c of half a cell, as pairs of 16 bits that are alike; [1]: of columns 16..31 where they have their own (QUANT_SUPER_16).
 */
struct int16_scales {
    i32x16 s[2], c[2];
};

V_INLINE struct int16_scales int16_scales(uint32_t bits, enum quant_scales scales, const uint8_t *cell, const uint8_t *super,
                                          uint32_t h)
{
    struct int16_scales out;
    bool minimum = scales == QUANT_SCALE_MIN || scales == QUANT_SUPER_MIN;
    if (scales >= QUANT_SUPER_MIN)
        out.s[0] = i32x16_pairs_mulhrs(i32x16_byte_pairs(cell + 16 * h), i32x16_pairs(super + 32 * h));
    else
        out.s[0] = i32x16_pairs(cell + 32 * h);
    out.s[1] = out.s[0];
    if (scales == QUANT_SUPER_16)
        out.s[1] = i32x16_pairs_mulhrs(i32x16_byte_pairs(cell + PANEL_ROWS + 16 * h), i32x16_pairs(super + 32 * h));
    if (scales == QUANT_SUPER_MIN)
        out.c[0] = i32x16_pairs_mulhrs(i32x16_byte_pairs(cell + PANEL_ROWS + 16 * h), i32x16_pairs(super + LINE + 32 * h));
    if (scales == QUANT_SCALE_MIN)
        out.c[0] = i32x16_pairs(cell + LINE + 32 * h);
    for (int i = 0; i < 2; i++)
        out.c[i] = minimum ? out.c[0] : i32x16_pairs_times(out.s[i], (int16_t) - (1 << (bits - 1)));
    return out;
}

/* Where cell b of a panel lies, and the super header it belongs to. */
V_INLINE const uint8_t *int16_cell(uint32_t bits, enum quant_scales scales, const uint8_t *panel, size_t b)
{
    return panel + int16_cell_offset(bits, scales, b);
}
V_INLINE const uint8_t *int16_super(uint32_t bits, enum quant_scales scales, const uint8_t *panel, size_t b)
{
    size_t first = b & ~(size_t)(QUANT_SUPER_GROUPS - 1);
    return panel + int16_cell_offset(bits, scales, first) - panel_super_bytes(scales);
}
