/* Q4_0: 4-bit codes around 8, one scale a group. */
#include "gpu-worker/quant/quant.h"
#include <string.h>

struct q4_0_block {
    uint16_t d;     /* f16 */
    uint8_t qs[16]; /* value i in the low, value 16 + i in the high half of byte i */
};

static void unpack(const void *block, uint32_t group, struct quant_group *out)
{
    struct q4_0_block b;
    memcpy(&b, block, sizeof b);
    memset(out, 0, sizeof *out);
    out->d = b.d;
    for (int i = 0; i < 16; i++) {
        out->q[i] = b.qs[i] & 15;
        out->q[16 + i] = b.qs[i] >> 4;
    }
}

enum { D = offsetof(struct q4_0_block, d) };
const struct quant_format quant_q4_0 = {"Q4_0", 2, 32, sizeof(struct q4_0_block), 4, 8, QUANT_SCALE, unpack, NULL, D, D, 0};
