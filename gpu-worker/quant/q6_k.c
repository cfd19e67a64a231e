/* Q6_K: 6-bit codes around 32, one signed 8-bit scale per 16 values under one f16 scale per 256. */
#include "gpu-worker/quant/quant.h"
#include <string.h>

struct q6_k_block {
    uint8_t ql[128];   /* low 4 bits: each half of 128 values takes 64 bytes, values 0..63 low, 64..127 high */
    uint8_t qh[64];    /* upper 2 bits: byte i of a half holds them for values i, 32 + i, 64 + i, 96 + i */
    int8_t scales[16]; /* one per 16 values */
    uint16_t d;        /* f16 */
};

static void unpack(const void *block, uint32_t group, struct quant_group *out)
{
    struct q6_k_block b;
    memcpy(&b, block, sizeof b);
    memset(out, 0, sizeof *out);
    const uint8_t *ql = b.ql + group / 4 * 64 + (group & 1) * 32, *qh = b.qh + group / 4 * 32;
    uint32_t quarter = group & 3;
    out->d = b.d;
    out->sc[0] = b.scales[2 * group];
    out->sc[1] = b.scales[2 * group + 1];
    for (int i = 0; i < 32; i++)
        out->q[i] = (uint8_t)((ql[i] >> 4 * (quarter / 2) & 15) | (qh[i] >> 2 * quarter & 3) << 4);
}

enum { D = offsetof(struct q6_k_block, d) };
const struct quant_format quant_q6_k = {"Q6_K", 14, 256, sizeof(struct q6_k_block), 6, 32, QUANT_SUPER_16, unpack, NULL, D, D, 0};
