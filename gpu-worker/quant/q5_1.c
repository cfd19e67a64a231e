/* Q5_1: 5-bit codes, a scale and a minimum a group. */
#include "gpu-worker/quant/quant.h"
#include "gpu-worker/quant/fifth_bits.h"
#include <string.h>

struct q5_1_block {
    uint16_t d, m;  /* f16 */
    uint8_t qh[4];  /* bit i of these 32: the fifth bit of value i */
    uint8_t qs[16]; /* value i in the low, value 16 + i in the high half of byte i */
};

static void unpack(const void *block, uint32_t group, struct quant_group *out)
{
    struct q5_1_block b;
    memcpy(&b, block, sizeof b);
    memset(out, 0, sizeof *out);
    out->d = b.d;
    out->m = b.m;
    unpack_5_bits(b.qs, b.qh, out->q);
}

enum { D = offsetof(struct q5_1_block, d), M = offsetof(struct q5_1_block, m) };
const struct quant_format quant_q5_1 = {"Q5_1", 7, 32, sizeof(struct q5_1_block), 5, 0, QUANT_SCALE_MIN, unpack, NULL, D, M, 0};
