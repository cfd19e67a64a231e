#include "gpu-worker/tools/int_pack.h"
#include <math.h>
#include <string.h>
#include "gpu-worker/quant/f16.h"

uint16_t int_pack_w8(const float *x, uint64_t n, int8_t *q)
{
    float low, high;
    grid_extent(x, (uint32_t)n, &low, &high);
    uint16_t bits = f32_to_bf16(fmaxf(high, -low) / 127);
    float scale = bf16_to_f32(bits), inverse = scale > 0 ? 1 / scale : 0;
    for (uint64_t i = 0; i < n; i++)
        q[i] = (int8_t)rounding_nearest(x[i] * inverse, -127, 127);
    return bits;
}

static void put_scales(const struct int_pack_matrix *m, uint16_t *scales)
{
    uint64_t groups = m->cols / m->group;
    for (uint64_t g = 0; g < groups; g++)
        for (uint64_t r = 0; r < m->rows; r++)
            scales[g * m->rows + r] = f32_to_f16(m->ranges[r * groups + g].scale);
}

static uint32_t code_at(const struct int_pack_matrix *m, uint64_t r, uint64_t i)
{
    return (uint32_t)grid_code(m->w[r * m->cols + i], m->ranges[(r * m->cols + i) / m->group]);
}

void int_pack_gptq(const struct int_pack_matrix *m, uint32_t *qweight, uint16_t *scales, uint32_t *qzeros, int32_t *g_idx)
{
    uint64_t groups = m->cols / m->group, words = m->rows / 8;
    memset(qweight, 0, m->cols / 8 * m->rows * sizeof *qweight);
    memset(qzeros, 0, groups * words * sizeof *qzeros);
    for (uint64_t i = 0; i < m->cols; i++) {
        uint64_t column = m->order ? m->order[i] : i;
        for (uint64_t r = 0; r < m->rows; r++)
            qweight[column / 8 * m->rows + r] |= code_at(m, r, i) << 4 * (column % 8);
        g_idx[column] = (int32_t)(i / m->group);
    }
    for (uint64_t g = 0; g < groups; g++)
        for (uint64_t r = 0; r < m->rows; r++)
            qzeros[g * words + r / 8] |= (((uint32_t)m->ranges[r * groups + g].zero - 1) & 15) << 4 * (r % 8);
    put_scales(m, scales);
}

/* Where a word keeps the i-th of eight rows: the inverse of 0 2 4 6 1 3 5 7, in bits. */
static uint32_t awq_shift(uint64_t i)
{
    return (uint32_t)(4 * (i / 2 + i % 2 * 4));
}

void int_pack_awq(const struct int_pack_matrix *m, uint32_t *qweight, uint16_t *scales, uint32_t *qzeros)
{
    uint64_t groups = m->cols / m->group, words = m->rows / 8;
    memset(qweight, 0, m->cols * words * sizeof *qweight);
    memset(qzeros, 0, groups * words * sizeof *qzeros);
    for (uint64_t r = 0; r < m->rows; r++) {
        for (uint64_t c = 0; c < m->cols; c++)
            qweight[c * words + r / 8] |= code_at(m, r, c) << awq_shift(r % 8);
        for (uint64_t g = 0; g < groups; g++)
            qzeros[g * words + r / 8] |= (uint32_t)m->ranges[r * groups + g].zero << awq_shift(r % 8);
    }
    put_scales(m, scales);
}

static void pack_eight_group(const struct int_pack_eight *m, uint64_t r, uint64_t g)
{
    const float *w = m->w + r * m->cols + g * m->group;
    float most = 0;
    for (uint32_t i = 0; i < m->group; i++)
        most = fmaxf(most, fabsf(w[i]));
    uint16_t bits = m->scales[g * m->rows + r] = f32_to_f16(most / 127);
    float scale = f16_to_f32(bits), inverse = scale > 0 ? 1 / scale : 0;
    for (uint32_t i = 0; i < m->group; i += 4) {
        uint32_t word = 0;
        for (uint32_t j = 0; j < 4; j++)
            word |= (uint32_t)(rounding_nearest(w[i + j] * inverse, -127, 127) + 128) << 8 * j;
        m->qweight[(g * m->group + i) / 4 * m->rows + r] = word;
    }
}

void int_pack_eight_rows(void *context, uint64_t first, uint64_t last)
{
    const struct int_pack_eight *m = context;
    uint64_t groups = m->cols / m->group;
    for (uint64_t i = 0; i < m->cols && first == 0; i++)
        m->g_idx[i] = (int32_t)(i / m->group);
    for (uint64_t g = 0; g < groups; g++) {
        for (uint64_t r = 4 * first; r < 4 * last; r++)
            pack_eight_group(m, r, g);
        for (uint64_t r = first; r < last; r++)
            m->qzeros[g * (m->rows / 4) + r] = 0x7f7f7f7f;
    }
}
