/* Q5_0: 5-bit codes around 16, one scale a group. */
#include "gpu-worker/quant/quant.h"
#include "gpu-worker/quant/fifth_bits.h"
#include <string.h>

struct q5_0_block {
    uint16_t d;     /* f16 */
    uint8_t qh[4];  /* bit i of these 32: the fifth bit of value i */
    uint8_t qs[16]; /* value i in the low, value 16 + i in the high half of byte i */
};

static void unpack(const void *block, uint32_t group, struct quant_group *out)
{
    struct q5_0_block b;
    memcpy(&b, block, sizeof b);
    memset(out, 0, sizeof *out);
    out->d = b.d;
    unpack_5_bits(b.qs, b.qh, out->q);
}

enum { D = offsetof(struct q5_0_block, d) };
const struct quant_format quant_q5_0 = {"Q5_0", 6, 32, sizeof(struct q5_0_block), 5, 16, QUANT_SCALE, unpack, NULL, D, D, 0};
