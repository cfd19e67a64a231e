/* The INT16 arithmetic (panels.h) on v16.h's types; a part of kernels.inc.h.
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
            if (a->sums) {
                a->high_sum[sum] = sums_of_halves(high);
                a->low_sum[sum] = sums_of_halves(low);
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

/* Adds a group's codes times the two planes of n rows, by their scales. */
V_INLINE void int16_codes(uint32_t bits, enum quant_scales scales, const uint8_t *codes, const struct int16_scales *w,
                          const int8_t *high_x, const int8_t *low_x, int n, i32x16 high[], i32x16 low[])
{
    i32x16 sums[V_ROWS][2][2];
    int parts = scales == QUANT_SUPER_16 ? 2 : 1;
    for (int r = 0; r < n; r++)
        sums[r][0][0] = sums[r][0][1] = sums[r][1][0] = sums[r][1][1] = i32x16_set1(0);
    V_UNROLL
    for (int g = 0; g < 8; g++) {
        u8x64 line = cell_line(codes, bits, g);
        int part = g / 4 * (parts - 1);
        for (int r = 0; r < n; r++) {
            sums[r][0][part] = i32x16_dot(sums[r][0][part], line, high_x + r * INT16_UNIT + 4 * g);
            sums[r][1][part] = i32x16_dot(sums[r][1][part], line, low_x + r * INT16_UNIT + 4 * g);
        }
    }
    for (int r = 0; r < n; r++)
        for (int i = 0; i < parts; i++) {
            high[r] = i32x16_times_upper(high[r], sums[r][0][i], w->s[i]);
            low[r] = i32x16_times_upper(low[r], sums[r][1][i], w->s[i]);
        }
}

/* The same of 4-bit codes, whose sums fit 16 bits. */
V_INLINE void int16_codes_4(const uint8_t *codes, const struct int16_scales *w, const int8_t *high_x, const int8_t *low_x, int n,
                            i32x16 high[], i32x16 low[])
{
    code_sums sums[V_ROWS][2];
    for (int r = 0; r < n; r++)
        sums[r][0] = sums[r][1] = code_sums_zero();
    V_UNROLL
    for (int g = 0; g < 4; g++) {
        u8x64 line = u8x64_load(codes + g * LINE);
        for (int r = 0; r < n; r++) {
            sums[r][0] = code_sums_add(sums[r][0], line, high_x + r * INT16_UNIT + 4 * g);
            sums[r][1] = code_sums_add(sums[r][1], line, low_x + r * INT16_UNIT + 4 * g);
        }
    }
    for (int r = 0; r < n; r++) {
        high[r] = code_sums_scale(high[r], sums[r][0], w->s[0]);
        low[r] = code_sums_scale(low[r], sums[r][1], w->s[0]);
    }
}

/* One group of one panel half for n rows: `at` and `sum` are where the first row's planes and sums of the group lie. */
V_INLINE void int16_group(uint32_t bits, enum quant_scales scales, const uint8_t *cell, const uint8_t *super, uint32_t h,
                          const struct acts *a, size_t at, size_t sum, int n, i32x16 high[], i32x16 low[])
{
    const uint8_t *codes = cell + panel_head_bytes(scales) + h * panel_half_bytes(bits);
    struct int16_scales w = int16_scales(bits, scales, cell, super, h);
    i32x16 c = scales == QUANT_SUPER_16 ? i32x16_pairs_of(w.c[0], w.c[1]) : w.c[0];
    if (bits == 4)
        int16_codes_4(codes, &w, a->high_plane + at, a->low_plane + at, n, high, low);
    else
        int16_codes(bits, scales, codes, &w, a->high_plane + at, a->low_plane + at, n, high, low);
    for (int r = 0; r < n; r++) {
        high[r] = i32x16_dot16(high[r], c, a->high_sum[sum + (size_t)r]);
        low[r] = i32x16_dot16(low[r], c, a->low_sum[sum + (size_t)r]);
    }
}

/* n rows (n <= V_ROWS, a constant) from `row` of a tile times `halves` halves of a panel from half `h`. */
V_INLINE void int16_rows(uint32_t bits, enum quant_scales scales, const uint8_t *panel, const struct acts *a, uint32_t tile,
                         uint32_t row, uint32_t height, int n, uint32_t h, uint32_t halves, v16 out[][2])
{
    size_t groups = a->cols / QUANT_GROUP, lines = panel_cell_bytes(bits, scales) / LINE;
    size_t sum = tile * groups + row, plane = tile * int16_units(a->cols) * INT16_UNIT + row * INT16_UNIT;
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
        for (; g < stop; g++, sum += height) {
            const uint8_t *cell = int16_cell(bits, scales, panel, g), *super = int16_super(bits, scales, panel, g);
            for (size_t i = 0; i < panel_super_bytes(scales) && h == 0 && g % QUANT_SUPER_GROUPS == 0; i += LINE)
                v_prefetch_l2(super + STREAM_AHEAD + i);
            V_UNROLL
            for (uint32_t i = 0; i < halves; i++) {
                for (size_t l = lines * i / halves; l < lines * (i + 1) / halves && h == 0; l++)
                    v_prefetch_l2(cell + STREAM_AHEAD + l * LINE);
                int16_group(bits, scales, cell, super, h + i, a, plane + g / 2 * height * INT16_UNIT + g % 2 * QUANT_GROUP, sum,
                            n, high[i], low[i]);
            }
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

V_INLINE void int16_panel(uint32_t bits, enum quant_scales scales, const struct panels *w, uint32_t p, const struct acts *a,
                          uint32_t first, uint32_t end, const struct panel_store *store)
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
            int16_rows(bits, scales, panel, a, tile, r, height, (n), h, (n) < 4 ? 2 : 1, out);                                   \
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
