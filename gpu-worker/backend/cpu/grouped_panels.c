#include "gpu-worker/backend/cpu/grouped_panels.h"
#include <string.h>
#include "gpu-worker/quant/f16.h"

void grouped_layout(struct panels *panels, const struct quant_grouped *matrix)
{
    uint32_t groups = matrix->cols / matrix->group;
    bool w8a8 = matrix->kind == GROUPED_W8A8;
    *panels = (struct panels){.kind = w8a8            ? PANEL_W8A8
                                      : matrix->zeros ? PANEL_W4A16_ZEROS
                                                      : PANEL_W4A16,
                              .bits = w8a8 ? 8 : 4,
                              .scales = QUANT_SCALE,
                              .rows = matrix->rows,
                              .cols = matrix->cols,
                              .group = matrix->group,
                              .n_panels = (matrix->rows + PANEL_ROWS - 1) / PANEL_ROWS};
    panels->panel_bytes = w8a8 ? W8A8_HEAD + w8a8_units(matrix->cols) * 2 * UNIT_HALF
                               : w4a16_head_bytes(groups, matrix->zeros) + groups * w4a16_cell_bytes(matrix->group);
}

size_t grouped_scratch_bytes(const struct quant_grouped *matrix)
{
    size_t groups = matrix->cols / matrix->group;
    return PANEL_ROWS * (matrix->cols + groups * (sizeof(float) + 1));
}

static struct grouped_rows rows_in(const struct quant_grouped *matrix, void *scratch)
{
    size_t groups = matrix->cols / matrix->group;
    struct grouped_rows rows = {.scale = scratch};
    rows.q = (uint8_t *)(rows.scale + PANEL_ROWS * groups);
    rows.zero = rows.q + PANEL_ROWS * (size_t)matrix->cols;
    return rows;
}

static void pack_w8a8(const struct panels *panels, const struct grouped_rows *rows, uint32_t n, uint8_t *panel)
{
    size_t cols = panels->cols;
    for (uint32_t r = 0; r < n; r++) {
        const int8_t *q = (const int8_t *)rows->q + r * cols;
        uint8_t *to = panel + W8A8_HEAD + r / 16 * UNIT_HALF + r % 16 * 4;
        int32_t sum = 0;
        for (size_t k = 0; k < cols; k++)
            sum += q[k];
        memcpy(panel + r * sizeof(float), &rows->scale[r], sizeof(float));
        memcpy(panel + 2 * LINE + r * sizeof sum, &sum, sizeof sum);
        for (size_t k = 0; k < cols; k += 4)
            memcpy(to + k / UNIT_BYTES * 2 * UNIT_HALF + k % UNIT_BYTES / 4 * LINE, q + k, 4);
    }
}

static void pack_w4a16(const struct panels *panels, const struct grouped_rows *rows, uint32_t n, bool zeros, uint8_t *panel)
{
    uint32_t groups = panels->cols / panels->group;
    uint8_t *cells = panel + w4a16_head_bytes(groups, zeros);
    for (uint32_t r = 0; r < n; r++)
        for (size_t g = 0; g < groups; g++) {
            uint8_t *cell = cells + g * w4a16_cell_bytes(panels->group);
            uint16_t scale = f32_to_f16(rows->scale[r * groups + g]);
            memcpy(cell + r * sizeof scale, &scale, sizeof scale);
            if (zeros)
                panel[g * PANEL_ROWS + r] = rows->zero[r * groups + g];
            for (size_t k = 0; k < panels->group; k += QUANT_GROUP)
                panel_pack_codes(4, rows->q + (size_t)r * panels->cols + g * panels->group + k, r % 16,
                                 cell + LINE + k * PANEL_ROWS / 2 + r / 16 * 4 * LINE);
        }
}

void grouped_pack(const struct panels *panels, const struct quant_grouped *matrix, void *scratch, uint32_t p)
{
    uint32_t first = p * PANEL_ROWS, n = panels->rows - first < PANEL_ROWS ? panels->rows - first : PANEL_ROWS;
    uint8_t *panel = panels->data + (size_t)p * panels->panel_bytes;
    struct grouped_rows rows = rows_in(matrix, scratch);
    memset(panel, 0, panels->panel_bytes);
    matrix->read(matrix->context, matrix->first + first, n, &rows);
    if (panels->kind == PANEL_W8A8)
        pack_w8a8(panels, &rows, n, panel);
    else
        pack_w4a16(panels, &rows, n, matrix->zeros, panel);
}
