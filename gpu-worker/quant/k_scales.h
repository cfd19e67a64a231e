/* The 12 bytes that hold eight 6-bit scales and eight 6-bit minimums in Q4_K and Q5_K:
 *
 *   bytes 0-3   scale g (g = 0..3) in bits 0-5, bits 4-5 of scale 4 + g in bits 6-7
 *   bytes 4-7   minimum g          in bits 0-5, bits 4-5 of minimum 4 + g in bits 6-7
 *   bytes 8-11  bits 0-3 of scale 4 + g in the low, of minimum 4 + g in the high half
 */
#pragma once
#include <stdint.h>

static inline void k_scales(const uint8_t bytes[12], uint32_t group, int8_t *scale, uint8_t *minimum)
{
    uint32_t g = group & 3;
    if (group < 4) {
        *scale = (int8_t)(bytes[g] & 63);
        *minimum = bytes[4 + g] & 63;
    } else {
        *scale = (int8_t)((bytes[8 + g] & 15) | bytes[g] >> 6 << 4);
        *minimum = (uint8_t)(bytes[8 + g] >> 4 | bytes[4 + g] >> 6 << 4);
    }
}
