#include "gpu-worker/quant/quant.h"
#include "gpu-worker/quant/f16.h"

static const struct quant_format *const formats[] = {
#define QUANT_FORMAT(name) &quant_##name,
#include "gpu-worker/quant/formats.def"
#undef QUANT_FORMAT
};

const struct quant_format *quant_at(size_t i)
{
    return i < sizeof formats / sizeof *formats ? formats[i] : NULL;
}

const struct quant_format *quant_find(uint32_t ggml_type)
{
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (formats[i]->ggml_type == ggml_type)
            return formats[i];
    return NULL;
}

size_t quant_row_bytes(const struct quant_format *format, size_t n)
{
    return n % format->block_values ? 0 : n / format->block_values * format->block_bytes;
}

void quant_unpack(const struct quant_format *format, const void *row, size_t g, struct quant_group *out)
{
    size_t per_block = format->block_values / QUANT_GROUP;
    format->unpack((const uint8_t *)row + g / per_block * format->block_bytes, (uint32_t)(g % per_block), out);
}

int quant_group_finite(const struct quant_group *group)
{
    return f16_finite(group->d) && f16_finite(group->m);
}

static int floats_finite(const struct quant_format *format, const uint8_t *row, size_t n)
{
    uint32_t mask = format->exponent, bad = 0;
    if (format->block_bytes == 4) {
        for (size_t i = 0; i < n; i++) {
            uint32_t x;
            memcpy(&x, row + 4 * i, 4);
            bad |= (x & mask) == mask;
        }
        return !bad;
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t x;
        memcpy(&x, row + 2 * i, 2);
        bad |= (x & mask) == mask;
    }
    return !bad;
}

int quant_row_finite(const struct quant_format *format, const void *row, size_t n)
{
    const uint8_t *block = row;
    uint32_t bad = 0;
    if (format->scales == QUANT_FLOAT)
        return floats_finite(format, row, n);
    for (size_t i = 0; i < n / format->block_values; i++, block += format->block_bytes) {
        uint16_t d, m;
        memcpy(&d, block + format->d_at, 2);
        memcpy(&m, block + format->m_at, 2);
        bad |= !f16_finite(d);
        bad |= !f16_finite(m);
    }
    return !bad;
}

static void decode_group(const struct quant_format *format, const struct quant_group *group, float *dst)
{
    float d = f16_to_f32(group->d), m = f16_to_f32(group->m);
    for (int i = 0; i < QUANT_GROUP; i++) {
        float q = (float)((int)group->q[i] - (int)format->offset);
        switch (format->scales) {
        case QUANT_SCALE:
            dst[i] = d * q;
            break;
        case QUANT_SCALE_MIN:
            dst[i] = d * q + m;
            break;
        case QUANT_SUPER_MIN:
            dst[i] = d * (float)group->sc[0] * q - m * (float)group->mn;
            break;
        default:
            dst[i] = d * (float)group->sc[i / 16] * q;
        }
    }
}

void quant_decode(const struct quant_format *format, const void *row, float *dst, size_t n)
{
    if (format->scales == QUANT_FLOAT) {
        format->decode(row, dst, n);
        return;
    }
    struct quant_group group;
    for (size_t g = 0; g < n / QUANT_GROUP; g++) {
        quant_unpack(format, row, g, &group);
        decode_group(format, &group, dst + g * QUANT_GROUP);
    }
}
