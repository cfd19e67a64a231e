/* Products of many rows on 16 registers of 32 bytes (AVX2); a part of kernels.inc.h.
 *
 * Unpacking codes and scales costs more here than multiplying one row by them. So half a panel is unpacked, a chunk of its groups
 * at a time, and met by up to UNPACKED_ROWS rows while it lies in L1; the rows' sums wait in memory between chunks:
 *
 *   for each half, each block of rows, each chunk of groups: unpack; for each 4 (INT16: 2) rows: add the chunk to their sums
 *
 * Four rows by 16 outputs are 8 registers of sums, two of codes and one of activations. AVX2 has byte products of 16 bits only,
 * so as many lines as cannot overflow are summed in 16 bits and then widened: 8 of 4-bit codes (8 * 2 * 15 * 127 < 2^15), 4 of
 * 5-bit ones, 2 of 6-bit ones. Integers are exact and the groups' order is that of quant_rows, so the bits are too.
 */

enum { UNPACKED_GROUPS = 2 * INT16_RUN, UNPACKED_ROWS = 64, GROUP_LINES = 8 };

struct unpacked_group {
    u8x64 lines[GROUP_LINES]; /* as cell_line gives them; 8-bit codes signed */
    union {
        struct half_scales scales;
        struct {
            i32x16 s, c; /* INT16, as pairs */
        };
    };
};

V_INLINE __m256i broadcast4(const int8_t *x)
{
    int32_t x4;
    memcpy(&x4, x, 4);
    return _mm256_set1_epi32(x4);
}

/* How many lines a run may have. */
V_INLINE int run_lines(uint32_t bits)
{
    return bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
}

/* Adds codes times x to the sum of a run. */
V_INLINE __m256i run_add(bool first, __m256i sum, __m256i codes, __m256i x)
{
    __m256i product = _mm256_maddubs_epi16(codes, x);
    return first ? product : _mm256_add_epi16(sum, product);
}

V_INLINE __m256i run_end(__m256i sum)
{
    return _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
}

/* One run of n rows: lines `first` to `first` + `count` of a group. */
V_INLINE void run_of_lines(uint32_t bits, const struct unpacked_group *w, const int8_t *q, size_t stride, int n, int first,
                           int count, i32x16 runs[])
{
    bool as_signed = bits == 8;
    V_UNROLL
    for (int i = 0; i < count; i++) {
        u8x64 line = w->lines[first + i], size = line;
        if (as_signed)
            size = (u8x64){_mm256_abs_epi8(line.a), _mm256_abs_epi8(line.b)};
        V_UNROLL
        for (int r = 0; r < n; r++) {
            __m256i x = broadcast4(q + (size_t)r * stride + 4 * (first + i));
            runs[r].a = run_add(i == 0, runs[r].a, size.a, as_signed ? _mm256_sign_epi8(x, line.a) : x);
            runs[r].b = run_add(i == 0, runs[r].b, size.b, as_signed ? _mm256_sign_epi8(x, line.b) : x);
        }
    }
}

/* ---- int8 groups ---- */

V_INLINE void unpack_quant(uint32_t bits, enum quant_scales scales, const uint8_t *panel, size_t first, size_t n, uint32_t h,
                           struct unpacked_group *out)
{
    for (size_t b = first; b < first + n; b++, out++) {
        const uint8_t *cell = panel + panel_cell_offset(bits, scales, b);
        const uint8_t *super = panel + panel_cell_offset(bits, scales, b & ~(size_t)7) - panel_super_bytes(scales);
        const uint8_t *codes = cell + panel_head_bytes(scales) + h * panel_half_bytes(bits);
        out->scales = load_scales(scales, cell, super, h);
        V_UNROLL
        for (int g = 0; g < GROUP_LINES; g++) {
            u8x64 line = cell_line(codes, bits, g);
            __m256i flip = _mm256_set1_epi8((char)(bits == 8 ? 0x80 : 0));
            out->lines[g] = (u8x64){_mm256_xor_si256(line.a, flip), _mm256_xor_si256(line.b, flip)};
        }
    }
}

/* Adds n groups to the sums of n_rows rows from `at` on, whose group's first row in its tile is there. */
V_INLINE void unpacked_quant_rows(uint32_t bits, enum quant_scales scales, int32_t offset, const struct unpacked_group *w,
                                  size_t n, const struct acts *a, size_t at, uint32_t height, int n_rows, v16 acc[])
{
    int count = run_lines(bits);
    for (; n > 0; n--, w++, at += height) {
        i32x16 sums[4][2], runs[4];
        for (int r = 0; r < n_rows; r++) {
            int32_t low = scales == QUANT_SUPER_16 ? a->low[at + (size_t)r] : a->sum[at + (size_t)r];
            sums[r][0] = i32x16_set1(-offset * low);
            sums[r][1] = i32x16_set1(-offset * (a->sum[at + (size_t)r] - low));
        }
        V_UNROLL
        for (int g = 0; g < GROUP_LINES; g += count) {
            int part = scales == QUANT_SUPER_16 && g >= 4;
            run_of_lines(bits, w, a->q + at * QUANT_GROUP, QUANT_GROUP, n_rows, g, count, runs);
            V_UNROLL
            for (int r = 0; r < n_rows; r++)
                sums[r][part] = i32x16_add(sums[r][part], (i32x16){run_end(runs[r].a), run_end(runs[r].b)});
        }
        V_UNROLL
        for (int r = 0; r < n_rows; r++)
            acc[r] = add_group(scales, acc[r], sums[r], w->scales.d0, w->scales.d1, w->scales.m, a->d[at + (size_t)r],
                               a->s[at + (size_t)r]);
    }
}

/* Calls work(row in its tile, rows, row in the block) for the rows first..end of a block in steps of `most`, 2 and 1. */
#define UNPACKED_STEPS(most, work)                                                                                               \
    for (uint32_t tile = first; tile < end; tile += ACTS_TILE) {                                                                 \
        uint32_t height = a->rows - tile < ACTS_TILE ? a->rows - tile : ACTS_TILE, r = 0;                                        \
        uint32_t stop = end - tile < height ? end - tile : height;                                                               \
        for (; r + (most) <= stop; r += (most))                                                                                  \
            work(r, most, tile - first + r);                                                                                     \
        for (; r + 2 <= stop; r += 2)                                                                                            \
            work(r, 2, tile - first + r);                                                                                        \
        for (; r < stop; r++)                                                                                                    \
            work(r, 1, tile - first + r);                                                                                        \
    }

/* Half a panel times at most UNPACKED_ROWS rows. */
V_INLINE void unpacked_quant_half(uint32_t bits, enum quant_scales scales, const uint8_t *panel, uint32_t h, const struct acts *a,
                                  uint32_t first, uint32_t end, v16 acc[])
{
    struct unpacked_group w[UNPACKED_GROUPS];
    size_t groups = a->cols / QUANT_GROUP;
    int32_t offset = bits < 8 && (scales == QUANT_SCALE || scales == QUANT_SUPER_16) ? 1 << (bits - 1) : 0;
    for (uint32_t i = 0; i < end - first; i++)
        acc[i] = v16_set1(0);
    for (size_t g = 0; g < groups; g += UNPACKED_GROUPS) {
        size_t n = groups - g < UNPACKED_GROUPS ? groups - g : UNPACKED_GROUPS;
        unpack_quant(bits, scales, panel, g, n, h, w);
#define QUANT_STEP(r, n_rows, i)                                                                                                 \
    unpacked_quant_rows(bits, scales, offset, w, n, a, tile *groups + g * height + (r), height, n_rows, acc + (i))
        UNPACKED_STEPS(4, QUANT_STEP)
    }
}

V_INLINE void unpacked_quant_panel(uint32_t bits, enum quant_scales scales, const struct panels *w, uint32_t p,
                                   const struct acts *a, uint32_t first, uint32_t end, const struct panel_store *store)
{
    const uint8_t *panel = w->data + (size_t)p * w->panel_bytes;
    v16 acc[UNPACKED_ROWS];
    for (uint32_t block = first; block < end; block += UNPACKED_ROWS) {
        uint32_t n = end - block < UNPACKED_ROWS ? end - block : UNPACKED_ROWS;
        for (uint32_t h = 0; h < 2; h++) {
            unpacked_quant_half(bits, scales, panel, h, a, block, block + n, acc);
            for (uint32_t i = 0; i < n; i++)
                store_half(store, block + i, p, w->rows - p * PANEL_ROWS, h, acc[i]);
        }
    }
}

/* ---- INT16 ---- */

V_INLINE void unpack_int16(enum quant_scales scales, const uint8_t *panel, size_t first, size_t n, uint32_t h,
                           struct unpacked_group *out)
{
    for (size_t b = first; b < first + n; b++, out++) {
        const uint8_t *cell = int16_cell(4, scales, panel, b);
        struct int16_scales w = int16_scales(4, scales, cell, int16_super(4, scales, panel, b), h);
        out->s = w.s[0];
        out->c = w.c[0];
        V_UNROLL
        for (int g = 0; g < GROUP_LINES; g++)
            out->lines[g] = cell_line(cell + panel_head_bytes(scales) + h * panel_half_bytes(4), 4, g);
    }
}

/* sum += s times the sums of a group's codes times x, for n rows whose planes lie INT16_UNIT apart: as two 16-bit sums a lane. */
V_INLINE void unpacked_int16_dot(const struct unpacked_group *w, const int8_t *x, int n, i32x16 sum[])
{
    i32x16 runs[4];
    run_of_lines(4, w, x, INT16_UNIT, n, 0, GROUP_LINES, runs);
    V_UNROLL
    for (int r = 0; r < n; r++) {
        sum[r].a = _mm256_add_epi32(sum[r].a, _mm256_madd_epi16(runs[r].a, w->s.a));
        sum[r].b = _mm256_add_epi32(sum[r].b, _mm256_madd_epi16(runs[r].b, w->s.b));
    }
}

/* Adds n groups from group g on, a whole number of runs unless they are the last. */
V_INLINE void unpacked_int16_rows(const struct unpacked_group *w, size_t g, size_t n, const struct acts *a, uint32_t tile,
                                  uint32_t row, uint32_t height, int n_rows, struct int16_sums total[])
{
    const int8_t *high_plane = a->high_plane + (tile * int16_units(a->cols) + row) * INT16_UNIT;
    const int8_t *low_plane = a->low_plane + (tile * int16_units(a->cols) + row) * INT16_UNIT;
    size_t sum = tile * (a->cols / QUANT_GROUP) + g * height + row;
    for (size_t end = g + n; g < end;) {
        size_t stop = end - g < INT16_RUN ? end : g + INT16_RUN;
        i32x16 high[4], low[4];
        for (int r = 0; r < n_rows; r++)
            high[r] = low[r] = i32x16_set1(0);
        for (; g < stop; g++, w++, sum += height) {
            size_t at = g / 2 * height * INT16_UNIT + g % 2 * QUANT_GROUP;
            unpacked_int16_dot(w, high_plane + at, n_rows, high);
            unpacked_int16_dot(w, low_plane + at, n_rows, low);
            V_UNROLL
            for (int r = 0; r < n_rows; r++) {
                high[r] = i32x16_dot16(high[r], w->c, a->high_sum[sum + (size_t)r]);
                low[r] = i32x16_dot16(low[r], w->c, a->low_sum[sum + (size_t)r]);
            }
        }
        for (int r = 0; r < n_rows; r++)
            int16_carry(&total[r], high[r], low[r]);
    }
}

V_INLINE void unpacked_int16_half(enum quant_scales scales, const uint8_t *panel, uint32_t h, const struct acts *a,
                                  uint32_t first, uint32_t end, struct int16_sums total[])
{
    struct unpacked_group w[UNPACKED_GROUPS];
    size_t groups = a->cols / QUANT_GROUP;
    for (uint32_t i = 0; i < end - first; i++)
        total[i] = (struct int16_sums){i32x16_set1(0), i32x16_set1(0), i32x16_set1(0)};
    for (size_t g = 0; g < groups; g += UNPACKED_GROUPS) {
        size_t n = groups - g < UNPACKED_GROUPS ? groups - g : UNPACKED_GROUPS;
        unpack_int16(scales, panel, g, n, h, w);
#define INT16_STEP(r, n_rows, i) unpacked_int16_rows(w, g, n, a, tile, r, height, n_rows, total + (i))
        UNPACKED_STEPS(2, INT16_STEP)
    }
}

/* Of 4-bit codes. */
V_INLINE void unpacked_int16_panel(enum quant_scales scales, const struct panels *w, uint32_t p, const struct acts *a,
                                   uint32_t first, uint32_t end, const struct panel_store *store)
{
    const uint8_t *panel = w->data + (size_t)p * w->panel_bytes;
    struct int16_sums total[UNPACKED_ROWS];
    for (uint32_t block = first; block < end; block += UNPACKED_ROWS) {
        uint32_t n = end - block < UNPACKED_ROWS ? end - block : UNPACKED_ROWS;
        for (uint32_t h = 0; h < 2; h++) {
            v16 unit = v16_load((const float *)panel + 16 * h);
            unpacked_int16_half(scales, panel, h, a, block, block + n, total);
            for (uint32_t i = 0; i < n; i++)
                store_half(store, block + i, p, w->rows - p * PANEL_ROWS, h,
                           int16_value(&total[i], unit, a->row_scale[block + i]));
        }
    }
}
