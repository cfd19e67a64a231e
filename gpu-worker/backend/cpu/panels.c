#include "gpu-worker/backend/cpu/panels.h"
#include <math.h>
#include <string.h>
#include "gpu-worker/backend/cpu/grouped_panels.h"
#include "gpu-worker/quant/f16.h"

static const struct {
    uint32_t bits;
    enum quant_scales scales;
} kinds[PANEL_KINDS] = {
    [PANEL_F32] = {0, QUANT_FLOAT},
    [PANEL_F16] = {0, QUANT_FLOAT},
    [PANEL_BF16] = {0, QUANT_FLOAT},
    [PANEL_SCALE_4] = {4, QUANT_SCALE},
    [PANEL_SCALE_5] = {5, QUANT_SCALE},
    [PANEL_SCALE_8] = {8, QUANT_SCALE},
    [PANEL_MIN_4] = {4, QUANT_SCALE_MIN},
    [PANEL_MIN_5] = {5, QUANT_SCALE_MIN},
    [PANEL_SUPER_MIN_4] = {4, QUANT_SUPER_MIN},
    [PANEL_SUPER_MIN_5] = {5, QUANT_SUPER_MIN},
    [PANEL_SUPER16_6] = {6, QUANT_SUPER_16},
    [PANEL_INT16_SCALE_4] = {4, QUANT_SCALE},
    [PANEL_INT16_SCALE_5] = {5, QUANT_SCALE},
    [PANEL_INT16_MIN_4] = {4, QUANT_SCALE_MIN},
    [PANEL_INT16_MIN_5] = {5, QUANT_SCALE_MIN},
    [PANEL_INT16_SUPER_MIN_4] = {4, QUANT_SUPER_MIN},
    [PANEL_INT16_SUPER_MIN_5] = {5, QUANT_SUPER_MIN},
    [PANEL_INT16_SUPER16_6] = {6, QUANT_SUPER_16},
};

static bool find_kind(const struct quant_format *format, enum panel_kind first, enum panel_kind last, enum panel_kind *kind)
{
    for (enum panel_kind i = first; i <= last; i++) {
        if (kinds[i].bits == format->bits && kinds[i].scales == format->scales) {
            *kind = i;
            return true;
        }
    }
    return false;
}

static bool kind_of(const struct quant_format *format, enum panel_kind *kind)
{
    if (format->scales != QUANT_FLOAT)
        return find_kind(format, PANEL_SCALE_4, PANEL_SUPER16_6, kind);
    *kind = format == &quant_f32 ? PANEL_F32 : format == &quant_f16 ? PANEL_F16 : PANEL_BF16;
    return true;
}

bool panels_layout(struct panels *panels, const struct quant_format *format, bool int16, uint32_t rows, uint32_t cols)
{
    *panels = (struct panels){.bits = format->bits,
                              .offset = format->offset,
                              .scales = format->scales,
                              .rows = rows,
                              .cols = cols,
                              .n_panels = (rows + PANEL_ROWS - 1) / PANEL_ROWS};
    if (!kind_of(format, &panels->kind) || cols % format->block_values)
        return false;
    size_t groups = cols / QUANT_GROUP, supers = (groups + QUANT_SUPER_GROUPS - 1) / QUANT_SUPER_GROUPS;
    if (panels->kind == PANEL_BF16) {
        panels->panel_bytes = bf16_units(cols) * 2 * UNIT_HALF;
        return true;
    }
    if (format->scales == QUANT_FLOAT) {
        panels->panel_bytes = (size_t)cols * PANEL_ROWS * format->block_bytes;
        return true;
    }
    panels->panel_bytes = groups * panel_cell_bytes(format->bits, format->scales) + supers * panel_super_bytes(format->scales);
    if (int16 && cols <= INT16_MOST_COLS && find_kind(format, PANEL_INT16_SCALE_4, PANEL_INT16_SUPER16_6, &panels->kind))
        panels->panel_bytes += 2 * LINE;
    return true;
}

static void pack_float(const struct panels *panels, size_t size, const uint8_t *file_rows, uint32_t first, uint32_t n,
                       uint8_t *panel)
{
    for (uint32_t r = 0; r < n; r++) {
        const uint8_t *row = file_rows + (size_t)(first + r) * panels->cols * size;
        for (size_t k = 0; k < panels->cols; k++)
            memcpy(panel + (k * PANEL_ROWS + r) * size, row + k * size, size);
    }
}

static void pack_bf16(const struct panels *panels, const uint8_t *file_rows, uint32_t first, uint32_t n, uint8_t *panel)
{
    for (uint32_t r = 0; r < n; r++) {
        const uint8_t *row = file_rows + (size_t)(first + r) * panels->cols * 2;
        uint8_t *to = panel + r / 16 * UNIT_HALF + r % 16 * 4;
        for (size_t k = 0; k < panels->cols; k += 2)
            memcpy(to + k / BF16_UNIT * 2 * UNIT_HALF + k % BF16_UNIT / 2 * LINE, row + k * 2, k + 1 < panels->cols ? 4 : 2);
    }
}

static void pack_scales(const struct panels *panels, const struct quant_group *group, bool super, uint32_t r, uint8_t *cell)
{
    uint8_t *at = panels->scales >= QUANT_SUPER_MIN ? cell - panel_super_bytes(panels->scales) : cell;
    if (panels->scales < QUANT_SUPER_MIN || super) {
        memcpy(at + 2 * r, &group->d, 2);
        if (panels->scales != QUANT_SCALE && panels->scales != QUANT_SUPER_16)
            memcpy(at + LINE + 2 * r, &group->m, 2);
    }
    if (panels->scales == QUANT_SUPER_MIN) {
        cell[r] = (uint8_t)group->sc[0];
        cell[PANEL_ROWS + r] = group->mn;
    } else if (panels->scales == QUANT_SUPER_16) {
        cell[r] = (uint8_t)group->sc[0];
        cell[PANEL_ROWS + r] = (uint8_t)group->sc[1];
    }
}

static uint32_t four_codes(const uint8_t *q)
{
    uint32_t x;
    memcpy(&x, q, sizeof x);
    return x;
}

void panel_pack_codes(uint32_t bits, const uint8_t q[QUANT_GROUP], uint32_t lane, uint8_t *half)
{
    const uint32_t nibbles = 0x0f0f0f0f, lowest = 0x01010101, gather = 0x01020408; /* bit 8 i of x: bit 24 + i of x * gather */
    if (bits == 8) {
        for (int g = 0; g < 8; g++)
            memcpy(half + g * LINE + lane * 4, q + 4 * g, 4);
        return;
    }
    for (int g = 0; g < 4; g++) {
        uint32_t x = (four_codes(q + 4 * g) & nibbles) | (four_codes(q + 16 + 4 * g) & nibbles) << 4;
        memcpy(half + g * LINE + lane * 4, &x, 4);
    }
    for (uint32_t plane = 0; plane + 4 < bits; plane++)
        for (int g = 0; g < 8; g++) {
            uint32_t four = (four_codes(q + 4 * g) >> (4 + plane) & lowest) * gather >> 24;
            half[4 * LINE + plane * LINE + (size_t)g * 8 + lane / 2] |= (uint8_t)(four << lane % 2 * 4);
        }
}

/* The largest weight that codes of a group can stand for. */
static float largest_weight(const struct quant_format *format, const struct quant_group *group)
{
    float d = f16_to_f32(group->d), m = f16_to_f32(group->m), last = (float)((1 << format->bits) - 1), most = 0;
    if (format->scales == QUANT_SUPER_MIN)
        m *= -(float)group->mn;
    for (int i = 0; i < (format->scales == QUANT_SUPER_16 ? 2 : 1); i++) {
        float scale = format->scales >= QUANT_SUPER_MIN ? d * (float)group->sc[i] : d;
        float least = format->offset ? -(float)format->offset * scale : m;
        float low = fabsf(least), high = fabsf(last * scale + least);
        most = low > most || isnan(low) ? low : most;
        most = high > most || isnan(high) ? high : most;
    }
    return most;
}

/* What d and m of super-blocks are multiples of, in INT16 units: s and c keep all bits of their 8-bit factors. */
#define INT16_SUPER 128.0f

/* The unit D of a row; infinite or NaN where a scale is. */
static float int16_unit(const struct quant_format *format, const struct quant_group *groups, size_t n)
{
    float unit = 0;
    for (size_t b = 0; b < n; b++) {
        float least = largest_weight(format, &groups[b]) / INT16_WEIGHT;
        unit = least > unit || isnan(least) ? least : unit;
        if (format->scales >= QUANT_SUPER_MIN && b % QUANT_SUPER_GROUPS == 0) {
            least = fmaxf(fabsf(f16_to_f32(groups[b].d)), fabsf(f16_to_f32(groups[b].m))) * INT16_SUPER / INT16_MAX;
            unit = least > unit ? least : unit;
        }
    }
    return unit;
}

static void put_int16(uint8_t *at, uint32_t r, float units)
{
    int16_t x = (int16_t)lrintf(units); /* an instruction, unlike rintf */
    memcpy(at + 2 * r, &x, 2);
}

/* The scales of group b, of which `cell` is the cell. */
static void pack_int16_scales(const struct panels *panels, const struct quant_group *group, float unit, bool super, uint32_t r,
                              uint8_t *cell)
{
    float d = f16_to_f32(group->d) / unit, m = f16_to_f32(group->m) / unit;
    if (panels->scales < QUANT_SUPER_MIN) {
        put_int16(cell, r, d);
        if (panels->scales == QUANT_SCALE_MIN)
            put_int16(cell + LINE, r, m);
        return;
    }
    uint8_t *header = cell - panel_super_bytes(panels->scales);
    if (super)
        put_int16(header, r, d * INT16_SUPER);
    if (super && panels->scales == QUANT_SUPER_MIN)
        put_int16(header + LINE, r, -m * INT16_SUPER);
    cell[r] = (uint8_t)group->sc[0];
    cell[PANEL_ROWS + r] = panels->scales == QUANT_SUPER_MIN ? group->mn : (uint8_t)group->sc[1];
}

/* False: a scale is not finite, and the row's codes are left out. */
static bool pack_int16_row(const struct panels *panels, const struct quant_format *format, const uint8_t *row, uint32_t r,
                           uint8_t *panel)
{
    struct quant_group groups[INT16_MOST_COLS / QUANT_GROUP];
    size_t n = panels->cols / QUANT_GROUP;
    for (size_t b = 0; b < n; b++)
        quant_unpack(format, row, b, &groups[b]);
    float unit = int16_unit(format, groups, n);
    if (!(unit < INFINITY))
        return false;
    memcpy(panel + r * sizeof unit, &unit, sizeof unit);
    for (size_t b = 0; b < n && unit > 0; b++) {
        uint8_t *cell = panel + int16_cell_offset(panels->bits, panels->scales, b);
        pack_int16_scales(panels, &groups[b], unit, b % QUANT_SUPER_GROUPS == 0, r, cell);
        panel_pack_codes(panels->bits, groups[b].q, r % 16,
                         cell + panel_head_bytes(panels->scales) + r / 16 * panel_half_bytes(panels->bits));
    }
    return true;
}

/* False: a scale is not finite. */
static bool pack_row(const struct panels *panels, const struct quant_format *format, const uint8_t *row, uint32_t r,
                     uint8_t *panel)
{
    struct quant_group group;
    bool finite = true;
    for (size_t b = 0; b < panels->cols / QUANT_GROUP; b++) {
        uint8_t *cell = panel + panel_cell_offset(panels->bits, panels->scales, b);
        quant_unpack(format, row, b, &group);
        finite &= quant_group_finite(&group);
        pack_scales(panels, &group, b % QUANT_SUPER_GROUPS == 0, r, cell);
        panel_pack_codes(panels->bits, group.q, r % 16,
                         cell + panel_head_bytes(panels->scales) + r / 16 * panel_half_bytes(panels->bits));
    }
    return finite;
}

uint32_t panels_pack(const struct panels *panels, const struct quant_format *format, const void *file_rows, uint32_t p)
{
    uint8_t *panel = panels->data + (size_t)p * panels->panel_bytes;
    uint32_t first = p * PANEL_ROWS, n = panels->rows - first < PANEL_ROWS ? panels->rows - first : PANEL_ROWS;
    size_t row_bytes = quant_row_bytes(format, panels->cols);

    memset(panel, 0, panels->panel_bytes);
    if (panels->kind == PANEL_BF16)
        pack_bf16(panels, file_rows, first, n, panel);
    else if (panels->scales == QUANT_FLOAT)
        pack_float(panels, format->block_bytes, file_rows, first, n, panel);
    for (uint32_t r = 0; r < n; r++) {
        const uint8_t *row = (const uint8_t *)file_rows + (first + r) * row_bytes;
        bool finite = panels->scales == QUANT_FLOAT ? quant_row_finite(format, row, panels->cols)
                      : panels_int16(panels)        ? pack_int16_row(panels, format, row, r, panel)
                                                    : pack_row(panels, format, row, r, panel);
        if (!finite)
            return first + r;
    }
    return panels->rows;
}
