/* The INT16 arithmetic (panels.h) for few rows, on v16.h's types; a part of kernels.inc.h.
 *
 *   S   = sum over all columns of w a = sum over groups of s (sum q a) + c (sum a)           exact
 *   out = f32(floor((S + 2^15) / 2^16)) * (D * 2^16 amax / 32512)
 *
 * No order of operations shows in an exact sum, so every kernel, tile and split gives these bits. With a = 256 high + low the two
 * sums of at most 16 groups stay exact in int32 (512 columns * 32767 * 128 < 2^31); then their carries move up:
 *
 *   S = 2^16 top + 2^8 middle + bottom
 */

enum { INT16_RUN = 16 }; /* groups */

V_INLINE float row_amax(const float *x, size_t n)
{
    v16 most[4] = {v16_set1(0), v16_set1(0), v16_set1(0), v16_set1(0)};
    size_t k = 0;
    for (; k + 64 <= n; k += 64)
        for (size_t i = 0; i < 4; i++)
            most[i] = v16_max(v16_abs(v16_load(x + k + 16 * i)), most[i]);
    for (; k < n; k += 16)
        most[0] = v16_max(v16_abs(v16_load(x + k)), most[0]);
    return v16_hmax(v16_max(v16_max(most[0], most[1]), v16_max(most[2], most[3])));
}

/* Values that are no numbers become -32512: integers stay within their bounds whatever comes. */
V_INLINE v16 int16_scaled(const float *x, v16 inverse)
{
    v16 bound = v16_set1(INT16_ACTIVATION), least = v16_set1(-INT16_ACTIVATION);
    return v16_min(v16_max(v16_mul(v16_load(x), inverse), least), bound);
}

static void quantize_int16(const struct acts *a, uint32_t first, uint32_t end)
{
    size_t groups = a->cols / QUANT_GROUP, padded = int16_units(a->cols) * INT16_UNIT;
    for (uint32_t row = first; row < end; row++) {
        const float *x = a->x + (size_t)row * a->cols;
        uint32_t tile = row / ACTS_TILE * ACTS_TILE, height = a->rows - tile < ACTS_TILE ? a->rows - tile : ACTS_TILE;
        size_t at = tile * padded + (row - tile) * INT16_UNIT, sum = tile * groups + (row - tile);
        float amax = row_amax(x, a->cols);
        v16 inverse = v16_set1(amax > 0 ? INT16_ACTIVATION / amax : 0);
        a->row_scale[row] = amax / INT16_ACTIVATION * 65536;
        for (size_t g = 0; g < groups; g++, x += QUANT_GROUP, sum += height) {
            int8_t *high = a->high_plane + at + g % 2 * QUANT_GROUP, *low = a->low_plane + at + g % 2 * QUANT_GROUP;
            v16_planes(high, low, int16_scaled(x, inverse), int16_scaled(x + 16, inverse));
            if (a->rows < a->sums_below) {
                a->high_sum[sum] = sum_of_32(high) & 0xffff;
                a->low_sum[sum] = sum_of_32(low) & 0xffff;
            }
            at += g % 2 * height * INT16_UNIT;
        }
        if (groups % 2) {
            memset(a->high_plane + at + QUANT_GROUP, 0, QUANT_GROUP);
            memset(a->low_plane + at + QUANT_GROUP, 0, QUANT_GROUP);
        }
    }
}

struct int16_sums {
    i32x16 top, middle, bottom;
};

V_INLINE void int16_carry(struct int16_sums *s, i32x16 high, i32x16 low)
{
    s->top = i32x16_add(s->top, i32x16_sra(high, 8));
    s->middle = i32x16_add(s->middle, i32x16_add(i32x16_and(high, 255), i32x16_sra(low, 8)));
    s->bottom = i32x16_add(s->bottom, i32x16_and(low, 255));
}

V_INLINE v16 int16_value(const struct int16_sums *s, v16 unit, float scale)
{
    i32x16 middle = i32x16_add(i32x16_add(s->middle, i32x16_sra(s->bottom, 8)), i32x16_set1(128));
    return v16_mul(v16_from_i32(i32x16_add(s->top, i32x16_sra(middle, 8))), v16_mul(unit, v16_set1(scale)));
}

/* One group of one panel half for n rows: `at` and `sum` are where the first row's planes and sums of the group lie. */
V_INLINE void int16_group(bool minimum, const uint8_t *cell, uint32_t h, const struct acts *a, size_t at, size_t sum, int n,
                          i32x16 high[], i32x16 low[])
{
    const uint8_t *codes = cell + (minimum ? 2 * LINE : LINE) + h * panel_half_bytes(4);
    i32x16 s = i32x16_pairs(cell + 32 * h), c = minimum ? i32x16_pairs(cell + LINE + 32 * h) : i32x16_pairs_times(s, -8);
    code_sums sums[V_ROWS][2];
    for (int r = 0; r < n; r++)
        sums[r][0] = sums[r][1] = code_sums_zero();
    V_UNROLL
    for (int g = 0; g < 4; g++) {
        u8x64 line = u8x64_load(codes + g * LINE);
        for (int r = 0; r < n; r++) {
            sums[r][0] = code_sums_add(sums[r][0], line, a->high_plane + at + r * INT16_UNIT + 4 * g);
            sums[r][1] = code_sums_add(sums[r][1], line, a->low_plane + at + r * INT16_UNIT + 4 * g);
        }
    }
    for (int r = 0; r < n; r++) {
        high[r] = i32x16_dot16(code_sums_scale(high[r], sums[r][0], s), c, a->high_sum[sum + (size_t)r]);
        low[r] = i32x16_dot16(code_sums_scale(low[r], sums[r][1], s), c, a->low_sum[sum + (size_t)r]);
    }
}

/* n rows (n <= V_ROWS, a constant) from `row` of a tile times `halves` halves of a panel from half `h`. */
V_INLINE void int16_rows(bool minimum, const uint8_t *panel, const struct acts *a, uint32_t tile, uint32_t row, uint32_t height,
                         int n, uint32_t h, uint32_t halves, v16 out[][2])
{
    size_t groups = a->cols / QUANT_GROUP, cell_bytes = int16_cell_bytes(minimum);
    size_t sum = tile * groups + row, plane = tile * int16_units(a->cols) * INT16_UNIT + row * INT16_UNIT;
    const uint8_t *cell = panel + 2 * LINE;
    struct int16_sums total[V_ROWS][2];
    for (int r = 0; r < n; r++)
        for (uint32_t i = 0; i < halves; i++)
            total[r][i] = (struct int16_sums){i32x16_set1(0), i32x16_set1(0), i32x16_set1(0)};
    for (size_t g = 0; g < groups;) {
        size_t stop = groups - g < INT16_RUN ? groups : g + INT16_RUN;
        i32x16 high[2][V_ROWS], low[2][V_ROWS];
        for (uint32_t i = 0; i < halves; i++)
            for (int r = 0; r < n; r++)
                high[i][r] = low[i][r] = i32x16_set1(0);
        for (; g < stop; g++, cell += cell_bytes, sum += height) {
            if (h == 0)
                for (size_t i = 0; i < cell_bytes; i += LINE)
                    v_prefetch(cell + PREFETCH_AHEAD + i);
            V_UNROLL
            for (uint32_t i = 0; i < halves; i++)
                int16_group(minimum, cell, h + i, a, plane + g / 2 * height * INT16_UNIT + g % 2 * QUANT_GROUP, sum, n, high[i],
                            low[i]);
        }
        for (uint32_t i = 0; i < halves; i++)
            for (int r = 0; r < n; r++)
                int16_carry(&total[r][i], high[i][r], low[i][r]);
    }
    for (int r = 0; r < n; r++)
        for (uint32_t i = 0; i < halves; i++)
            out[r][h + i] =
                int16_value(&total[r][i], v16_load((const float *)panel + 16 * (h + i)), a->row_scale[tile + row + (uint32_t)r]);
}

V_INLINE void int16_panel(bool minimum, const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                          const struct panel_store *store)
{
    const uint8_t *panel = w->data + (size_t)p * w->panel_bytes;
    uint32_t n_valid = w->rows - p * PANEL_ROWS;
    v16 out[V_ROWS][2];
    for (uint32_t tile = first; tile < end; tile += ACTS_TILE) {
        uint32_t height = a->rows - tile < ACTS_TILE ? a->rows - tile : ACTS_TILE, r = 0;
        uint32_t stop = end - tile < height ? end - tile : height;
        /* Four rows fill the registers with one half. */
#define INT16_ROWS(n)                                                                                                            \
    for (; r + (n) <= stop; r += (n)) {                                                                                          \
        for (uint32_t h = 0; h < 2; h += (n) < 4 ? 2 : 1)                                                                        \
            int16_rows(minimum, panel, a, tile, r, height, (n), h, (n) < 4 ? 2 : 1, out);                                        \
        for (uint32_t i = 0; i < (n); i++)                                                                                       \
            store_panel(store, tile + r + i, p, n_valid, out[i]);                                                                \
    }
        if (V_ROWS >= 4)
            INT16_ROWS(V_ROWS < 4 ? 1 : 4)
        if (V_ROWS >= 2)
            INT16_ROWS(V_ROWS < 2 ? 1 : 2)
        INT16_ROWS(1)
    }
}
