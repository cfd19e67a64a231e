/* Q4_K: 4-bit codes in 8 groups of 32, 6-bit scales and minimums under one f16 pair. */
#include "gpu-worker/quant/quant.h"
#include "gpu-worker/quant/k_scales.h"
#include <string.h>

struct q4_k_block {
    uint16_t d, dmin;   /* f16 */
    uint8_t scales[12]; /* see k_scales.h */
    uint8_t qs[128];    /* groups 2j and 2j + 1 in the low and high halves of bytes 32j..32j+31 */
};

static void unpack(const void *block, uint32_t group, struct quant_group *out)
{
    struct q4_k_block b;
    memcpy(&b, block, sizeof b);
    memset(out, 0, sizeof *out);
    k_scales(b.scales, group, &out->sc[0], &out->mn);
    out->d = b.d;
    out->m = b.dmin;
    for (int i = 0; i < 32; i++)
        out->q[i] = b.qs[group / 2 * 32 + i] >> 4 * (group & 1) & 15;
}

enum { D = offsetof(struct q4_k_block, d), M = offsetof(struct q4_k_block, dmin) };
const struct quant_format quant_q4_k = {"Q4_K", 12, 256, sizeof(struct q4_k_block), 4, 0, QUANT_SUPER_MIN, unpack, NULL, D, M, 0};
