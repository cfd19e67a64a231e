/* From a model file's blocks to the planes of layout.h. */
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/backend/cuda/cuda_internal.h"
#include "gpu-worker/quant/f16.h"

enum { PLANE_ALIGN = 256 };

static size_t plane(size_t *end, size_t bytes)
{
    size_t at = *end;
    *end = (at + bytes + PLANE_ALIGN - 1) / PLANE_ALIGN * PLANE_ALIGN;
    return at;
}

/* MATRIX_KINDS where no layout fits. */
static enum matrix_kind kind_of(const struct quant_format *format)
{
    enum { F32 = 0, F16 = 1 }; /* GGUF type ids */
    uint32_t bits = format->bits;
    switch (format->scales) {
    case QUANT_FLOAT:
        return format->ggml_type == F32 ? MATRIX_F32 : format->ggml_type == F16 ? MATRIX_F16 : MATRIX_BF16;
    case QUANT_SCALE:
        return bits == 4 ? MATRIX_SCALE_4 : bits == 5 ? MATRIX_SCALE_5 : bits == 8 ? MATRIX_SCALE_8 : MATRIX_KINDS;
    case QUANT_SCALE_MIN:
        return bits == 4 ? MATRIX_MIN_4 : bits == 5 ? MATRIX_MIN_5 : MATRIX_KINDS;
    case QUANT_SUPER_MIN:
        return bits == 4 ? MATRIX_SUPER_MIN_4 : bits == 5 ? MATRIX_SUPER_MIN_5 : MATRIX_KINDS;
    default:
        return bits == 6 ? MATRIX_SUPER16_6 : MATRIX_KINDS;
    }
}

static uint32_t high_bytes(uint32_t bits)
{
    return bits == 8 ? 16 : bits == 6 ? 8 : bits == 5 ? 4 : 0;
}

/* Bytes of a group's scales, and of a row's super scales per 8 groups. */
static uint32_t scale_bytes(enum quant_scales scales)
{
    return scales == QUANT_SCALE_MIN ? 4 : 2;
}
static uint32_t super_bytes(enum quant_scales scales)
{
    return scales == QUANT_SUPER_MIN ? 4 : scales == QUANT_SUPER_16 ? 2 : 0;
}

static void pack_codes(const struct quant_group *group, uint32_t bits, uint8_t *codes, uint8_t *high)
{
    for (int i = 0; i < 16; i++) {
        if (bits == 8) {
            codes[i] = (uint8_t)(group->q[i] - 128);
            high[i] = (uint8_t)(group->q[16 + i] - 128);
        } else {
            codes[i] = (uint8_t)((group->q[i] & 15) | group->q[16 + i] << 4);
        }
    }
    if (bits == 8 || bits == 4)
        return;
    memset(high, 0, high_bytes(bits));
    for (int i = 0; i < 16; i++) { /* value i is byte i % 4 of word i / 4 */
        if (bits == 5)
            high[i % 4] |= (uint8_t)((group->q[i] >> 4 & 1) << i / 4 | (group->q[16 + i] >> 4 & 1) << (4 + i / 4));
        if (bits == 6) {
            high[i % 4] |= (uint8_t)((group->q[i] >> 4 & 3) << 2 * (i / 4));
            high[4 + i % 4] |= (uint8_t)((group->q[16 + i] >> 4 & 3) << 2 * (i / 4));
        }
    }
}

static void pack_scales(const struct quant_group *group, enum quant_scales scales, uint8_t *out, uint8_t *super)
{
    if (scales == QUANT_SCALE || scales == QUANT_SCALE_MIN) {
        memcpy(out, &group->d, 2);
        if (scales == QUANT_SCALE_MIN)
            memcpy(out + 2, &group->m, 2);
        return;
    }
    out[0] = (uint8_t)group->sc[0];
    out[1] = scales == QUANT_SUPER_MIN ? group->mn : (uint8_t)group->sc[1];
    memcpy(super, &group->d, 2);
    if (scales == QUANT_SUPER_MIN)
        memcpy(super + 2, &group->m, 2);
}

/* Returns the first row that is not finite, or all rows. */
static uint32_t pack_quant(const struct repacked *out, const struct backend_weight *weight)
{
    const struct quant_format *format = weight->format;
    const struct matrix *m = &out->matrix;
    size_t row_bytes = quant_row_bytes(format, weight->cols), groups = m->ld;
    uint32_t bits = format->bits, high = high_bytes(bits), scale = scale_bytes(format->scales),
             super = super_bytes(format->scales);
    struct quant_group group;
    for (uint32_t row = 0; row < weight->rows; row++) {
        for (size_t g = 0; g < groups; g++) {
            size_t at = row * groups + g;
            quant_unpack(format, (const uint8_t *)weight->data + row * row_bytes, g, &group);
            if (!quant_group_finite(&group))
                return row;
            pack_codes(&group, bits, out->data + (size_t)m->codes + at * 16, out->data + (size_t)m->high + at * high);
            pack_scales(&group, format->scales, out->data + (size_t)m->scales + at * scale,
                        out->data + (size_t)m->supers + (row * (groups / QUANT_SUPER_GROUPS) + g / QUANT_SUPER_GROUPS) * super);
        }
    }
    return weight->rows;
}

static uint32_t pack_floats(const struct repacked *out, const struct backend_weight *weight)
{
    size_t from = (size_t)weight->cols * weight->format->block_bytes, to = (size_t)out->matrix.ld * weight->format->block_bytes;
    for (uint32_t row = 0; row < weight->rows; row++) {
        if (!quant_row_finite(weight->format, (const uint8_t *)weight->data + row * from, weight->cols))
            return row;
        memcpy(out->data + row * to, (const uint8_t *)weight->data + row * from, from);
    }
    return weight->rows;
}

int repack(struct repacked *out, const struct backend_weight *weight, struct kvg_error *err)
{
    const struct quant_format *format = weight->format;
    struct matrix *m = &out->matrix;
    size_t bytes = 0, groups = (size_t)weight->rows * (weight->cols / QUANT_GROUP);
    memset(out, 0, sizeof *out);
    m->kind = kind_of(format);
    m->rows = weight->rows;
    m->cols = weight->cols;
    if (m->kind == MATRIX_KINDS)
        return kvg_fail(err, KVG_UNSUPPORTED, "the CUDA backend has no layout for %s", format->name);
    if (quant_row_bytes(format, weight->cols) == 0)
        return kvg_fail(err, KVG_UNSUPPORTED, "%u columns are not a whole number of %s blocks of %u", weight->cols, format->name,
                        format->block_values);
    if (format->scales == QUANT_FLOAT) {
        m->ld = (weight->cols + FLOAT_ALIGN - 1) / FLOAT_ALIGN * FLOAT_ALIGN;
        bytes = (size_t)m->ld * weight->rows * format->block_bytes;
    } else {
        m->ld = weight->cols / QUANT_GROUP;
        m->codes = (const uint8_t *)plane(&bytes, groups * 16);
        m->high = (const uint8_t *)plane(&bytes, groups * high_bytes(format->bits));
        m->scales = (const uint8_t *)plane(&bytes, groups * scale_bytes(format->scales));
        m->supers = (const uint8_t *)plane(&bytes, groups / QUANT_SUPER_GROUPS * super_bytes(format->scales));
    }
    out->bytes = bytes;
    out->data = calloc(1, bytes);
    if (!out->data)
        return kvg_fail(err, KVG_NOMEM, "no memory to repack %u x %u %s weights (%zu bytes)", weight->rows, weight->cols,
                        format->name, bytes);
    uint32_t row = (format->scales == QUANT_FLOAT ? pack_floats : pack_quant)(out, weight);
    if (row == weight->rows)
        return 0;
    free(out->data);
    return kvg_fail(err, KVG_FILE, "row %u holds an infinity or NaN", row);
}

/* ---- grouped matrices ---- */

enum { STRIP = 64 /* rows read at once */ };

static struct grouped_rows alloc_strip(const struct quant_grouped *from, void **memory)
{
    size_t groups = (size_t)STRIP * (from->cols / from->group), codes = (size_t)STRIP * from->cols;
    uint8_t *bytes = *memory = malloc(groups * sizeof(float) + codes + groups);
    struct grouped_rows rows = {.scale = (float *)(void *)bytes};
    rows.q = bytes ? bytes + groups * sizeof(float) : NULL;
    rows.zero = bytes ? rows.q + codes : NULL;
    return rows;
}

static void pack_grouped_codes(const struct repacked *out, const uint8_t *q, size_t at)
{
    uint8_t *codes = out->data + (size_t)out->matrix.codes + at * 16, *high = out->data + (size_t)out->matrix.high + at * 16;
    if (out->matrix.kind == MATRIX_W8A8) {
        memcpy(codes, q, 16);
        memcpy(high, q + 16, 16);
        return;
    }
    for (int i = 0; i < 16; i++)
        codes[i] = (uint8_t)((q[i] & 15) | q[16 + i] << 4);
}

static void pack_strip(const struct repacked *out, const struct quant_grouped *from, const struct grouped_rows *rows,
                       uint32_t first, uint32_t n)
{
    size_t blocks = out->matrix.ld, groups = from->cols / from->group;
    uint8_t *scales = out->data + (size_t)out->matrix.scales;
    for (size_t i = 0; i < n * blocks; i++)
        pack_grouped_codes(out, rows->q + i * QUANT_GROUP, first * blocks + i);
    for (size_t i = 0; i < n * groups; i++) {
        uint32_t pair = f32_to_f16(rows->scale[i]) | (uint32_t)(from->zeros ? rows->zero[i] : 8) << 16;
        memcpy(scales + (first * groups + i) * 4, from->kind == GROUPED_W8A8 ? (void *)&rows->scale[i] : (void *)&pair, 4);
    }
}

int repack_grouped(struct repacked *out, const struct quant_grouped *from, struct kvg_error *err)
{
    struct matrix *m = &out->matrix;
    size_t bytes = 0, blocks = (size_t)from->rows * (from->cols / QUANT_GROUP);
    void *memory;
    memset(out, 0, sizeof *out);
    if (!grouped_valid(from))
        return kvg_fail(err, KVG_UNSUPPORTED, "the CUDA backend has no layout for %u x %u %s in groups of %u", from->rows,
                        from->cols, grouped_name(from->kind), from->group);
    m->kind = from->kind == GROUPED_W8A8 ? MATRIX_W8A8 : MATRIX_W4A16;
    m->rows = from->rows;
    m->cols = from->cols;
    m->ld = from->cols / QUANT_GROUP;
    m->group_shift = from->group == GROUPED_LARGE ? 2 : 1;
    m->codes = (const uint8_t *)plane(&bytes, blocks * 16);
    m->high = (const uint8_t *)plane(&bytes, m->kind == MATRIX_W8A8 ? blocks * 16 : 0);
    m->scales = (const uint8_t *)plane(&bytes, (size_t)from->rows * (from->cols / from->group) * 4);
    struct grouped_rows rows = alloc_strip(from, &memory);
    out->bytes = bytes;
    out->data = calloc(1, bytes);
    for (uint32_t first = 0; out->data && memory && first < from->rows; first += STRIP) {
        uint32_t n = from->rows - first < STRIP ? from->rows - first : STRIP;
        from->read(from->context, from->first + first, n, &rows);
        pack_strip(out, from, &rows, first, n);
    }
    if (!memory) {
        free(out->data);
        out->data = NULL;
    }
    free(memory);
    return out->data ? 0
                     : kvg_fail(err, KVG_NOMEM, "no memory to repack %u x %u %s weights (%zu bytes)", from->rows, from->cols,
                                grouped_name(from->kind), bytes);
}
