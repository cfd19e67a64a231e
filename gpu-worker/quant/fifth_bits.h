/* 32 codes of 5 bits as the formats Q5_0 and Q5_1 keep them. */
#pragma once
#include <stdint.h>
#include <string.h>

/* qs: value i in the low, value 16 + i in the high half of byte i; qh: bit i of its 32 is the fifth bit of value i. */
static inline void unpack_5_bits(const uint8_t qs[16], const uint8_t qh[4], uint8_t q[32])
{
    for (int i = 0; i < 16; i++) {
        q[i] = qs[i] & 15;
        q[16 + i] = qs[i] >> 4;
    }
    /* Eight at a time: byte j of x is 0 or 1 << j, and 0x7f more carries either into bit 7 or not. */
    for (int i = 0; i < 4; i++) {
        uint64_t x = qh[i] * UINT64_C(0x0101010101010101) & UINT64_C(0x8040201008040201), codes;
        memcpy(&codes, q + 8 * i, sizeof codes);
        codes |= (x + UINT64_C(0x7f7f7f7f7f7f7f7f)) >> 3 & UINT64_C(0x1010101010101010);
        memcpy(q + 8 * i, &codes, sizeof codes);
    }
}
