/* Q8_0: signed 8-bit values (handed out as codes around 128), one scale a group. */
#include "gpu-worker/quant/quant.h"
#include <string.h>

struct q8_0_block {
    uint16_t d; /* f16 */
    int8_t qs[32];
};

static void unpack(const void *block, uint32_t group, struct quant_group *out)
{
    struct q8_0_block b;
    memcpy(&b, block, sizeof b);
    memset(out, 0, sizeof *out);
    out->d = b.d;
    for (int i = 0; i < 32; i++)
        out->q[i] = (uint8_t)(b.qs[i] + 128);
}

enum { D = offsetof(struct q8_0_block, d) };
const struct quant_format quant_q8_0 = {"Q8_0", 8, 32, sizeof(struct q8_0_block), 8, 128, QUANT_SCALE, unpack, NULL, D, D, 0};
