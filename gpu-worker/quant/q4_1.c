/* Q4_1: 4-bit codes, a scale and a minimum a group. */
#include "gpu-worker/quant/quant.h"
#include <string.h>

struct q4_1_block {
    uint16_t d, m;  /* f16 */
    uint8_t qs[16]; /* value i in the low, value 16 + i in the high half of byte i */
};

static void unpack(const void *block, uint32_t group, struct quant_group *out)
{
    struct q4_1_block b;
    memcpy(&b, block, sizeof b);
    memset(out, 0, sizeof *out);
    out->d = b.d;
    out->m = b.m;
    for (int i = 0; i < 16; i++) {
        out->q[i] = b.qs[i] & 15;
        out->q[16 + i] = b.qs[i] >> 4;
    }
}

enum { D = offsetof(struct q4_1_block, d), M = offsetof(struct q4_1_block, m) };
const struct quant_format quant_q4_1 = {"Q4_1", 3, 32, sizeof(struct q4_1_block), 4, 0, QUANT_SCALE_MIN, unpack, NULL, D, M, 0};
