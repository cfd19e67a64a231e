#include "gpu-worker/quant/grouped.h"
#include "gpu-worker/quant/f16.h"

enum { BLOCK = 32 /* columns that backends handle at once */ };

const char *grouped_name(enum grouped_kind kind)
{
    static const char *const names[GROUPED_KINDS] = {"W8A8", "W4A16"};
    return names[kind];
}

bool grouped_valid(const struct quant_grouped *matrix)
{
    uint32_t group = matrix->group;
    if (matrix->rows == 0 || matrix->cols == 0 || matrix->cols % BLOCK || matrix->cols > GROUPED_MOST_COLS)
        return false;
    return matrix->kind == GROUPED_W8A8 ? group == matrix->cols && !matrix->zeros
                                        : (group == GROUPED_SMALL || group == GROUPED_LARGE) && matrix->cols % group == 0;
}

uint32_t grouped_group(enum grouped_kind kind, uint32_t cols, uint32_t group)
{
    if (cols % BLOCK || cols > GROUPED_MOST_COLS)
        return 0;
    if (kind == GROUPED_W8A8)
        return group == cols ? cols : 0;
    return group % GROUPED_LARGE == 0 ? GROUPED_LARGE : group % GROUPED_SMALL == 0 ? GROUPED_SMALL : 0;
}

uint64_t grouped_bytes(enum grouped_kind kind, uint32_t cols, uint32_t group, bool zeros, uint64_t values)
{
    if (kind == GROUPED_W8A8)
        return values + values / cols * 8;
    return values / 2 + values / group * (zeros ? 3 : 2);
}

void grouped_decode(const struct quant_grouped *matrix, uint32_t r, const struct grouped_rows *scratch, float *dst)
{
    matrix->read(matrix->context, matrix->first + r, 1, scratch);
    for (uint32_t k = 0; k < matrix->cols; k++) {
        uint32_t g = k / matrix->group;
        if (matrix->kind == GROUPED_W8A8)
            dst[k] = scratch->scale[g] * (float)(int8_t)scratch->q[k];
        else
            dst[k] = f16_to_f32(f32_to_f16(scratch->scale[g])) *
                     (float)((int)scratch->q[k] - (matrix->zeros ? (int)scratch->zero[g] : 8));
    }
}
