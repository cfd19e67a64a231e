#include "gpu-worker/backend/cpu/panels.h"
#include <string.h>

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
};

static bool kind_of(const struct quant_format *format, enum panel_kind *kind)
{
    if (format->scales == QUANT_FLOAT) {
        *kind = format == &quant_f32 ? PANEL_F32 : format == &quant_f16 ? PANEL_F16 : PANEL_BF16;
        return true;
    }
    for (int i = PANEL_SCALE_4; i < PANEL_KINDS; i++) {
        if (kinds[i].bits == format->bits && kinds[i].scales == format->scales) {
            *kind = (enum panel_kind)i;
            return true;
        }
    }
    return false;
}

bool panels_layout(struct panels *panels, const struct quant_format *format, uint32_t rows, uint32_t cols)
{
    *panels = (struct panels){.bits = format->bits,
                              .offset = format->offset,
                              .scales = format->scales,
                              .rows = rows,
                              .cols = cols,
                              .n_panels = (rows + PANEL_ROWS - 1) / PANEL_ROWS};
    if (!kind_of(format, &panels->kind) || cols % format->block_values)
        return false;
    if (format->scales == QUANT_FLOAT) {
        panels->panel_bytes = (size_t)cols * PANEL_ROWS * format->block_bytes;
    } else {
        size_t groups = cols / QUANT_GROUP, supers = (groups + QUANT_SUPER_GROUPS - 1) / QUANT_SUPER_GROUPS;
        panels->panel_bytes =
            groups * panel_cell_bytes(format->bits, format->scales) + supers * panel_super_bytes(format->scales);
    }
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

static void pack_codes(uint32_t bits, const uint8_t q[QUANT_GROUP], uint32_t lane, uint8_t *half)
{
    if (bits == 8) {
        for (int g = 0; g < 8; g++)
            memcpy(half + g * LINE + lane * 4, q + 4 * g, 4);
        return;
    }
    for (int i = 0; i < 16; i++)
        half[i / 4 * LINE + lane * 4 + i % 4] = (uint8_t)((q[i] & 15) | (q[16 + i] & 15) << 4);
    for (uint32_t plane = 0; plane + 4 < bits; plane++)
        for (int g = 0; g < 8; g++)
            for (uint32_t j = 0; j < 4; j++) {
                uint32_t bit = lane * 4 + j;
                half[4 * LINE + plane * LINE + (size_t)g * 8 + bit / 8] |=
                    (uint8_t)((q[4 * g + (int)j] >> (4 + plane) & 1) << bit % 8);
            }
}

void panels_pack(const struct panels *panels, const struct quant_format *format, const void *file_rows, uint32_t p)
{
    uint8_t *panel = panels->data + (size_t)p * panels->panel_bytes;
    uint32_t first = p * PANEL_ROWS, n = panels->rows - first < PANEL_ROWS ? panels->rows - first : PANEL_ROWS;

    memset(panel, 0, panels->panel_bytes);
    if (panels->scales == QUANT_FLOAT) {
        pack_float(panels, format->block_bytes, file_rows, first, n, panel);
        return;
    }
    size_t row_bytes = quant_row_bytes(format, panels->cols);
    for (uint32_t r = 0; r < n; r++) {
        const uint8_t *row = (const uint8_t *)file_rows + (first + r) * row_bytes;
        for (size_t b = 0; b < panels->cols / QUANT_GROUP; b++) {
            struct quant_group group;
            uint8_t *cell = panel + panel_cell_offset(panels->bits, panels->scales, b);
            quant_unpack(format, row, b, &group);
            pack_scales(panels, &group, b % QUANT_SUPER_GROUPS == 0, r, cell);
            pack_codes(panels->bits, group.q, r % 16,
                       cell + panel_head_bytes(panels->scales) + r / 16 * panel_half_bytes(panels->bits));
        }
    }
}
