/* Products with W8A8 and W4A16 panels (grouped_panels.h) of few rows, on v16.h's types; a part of kernels.inc.h.
 *
 * Integer sums are exact, so how columns are split among registers, lines or tiles does not show; W4A16's one FMA a group runs in
 * the order of the groups everywhere.
 */

/* Codes stream through once. They are asked for into L2, further ahead than L1 has room for what is under way: asked for into L1,
 * the same bytes came 7 % slower from memory. Bytes; no multiple of 4096, which would alias. */
enum { GROUPED_AHEAD = 6208 };

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
/* Code sums of a whole group fit; the product of bytes is that of unsigned activations. */
enum { V_WIDE_SUMS = 1, V_SHIFTED_ROWS = 1 };
V_INLINE i32x16 i32x16_from_u8(const uint8_t *p)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}
V_INLINE i32x16 i32x16_load(const void *p)
{
    return _mm512_loadu_si512(p);
}
V_INLINE i32x16 i32x16_mul(i32x16 a, i32x16 b)
{
    return _mm512_mullo_epi32(a, b);
}
V_INLINE i32x16 code_sums_total(code_sums s)
{
    return _mm512_add_epi32(s.low, _mm512_srai_epi32(s.high, 4));
}
/* lane l += w[4l] * x[0] + ... + w[4l+3] * x[3], w signed, x unsigned */
V_INLINE i32x16 i32x16_dot_rows8(i32x16 sum, u8x64 w, const uint8_t *x)
{
    int32_t x4;
    memcpy(&x4, x, 4);
    return _mm512_dpbusd_epi32(sum, _mm512_set1_epi32(x4), w);
}
#elif defined(__AVX2__) && defined(__FMA__)
enum { V_WIDE_SUMS = 0, V_SHIFTED_ROWS = 0 };
V_INLINE i32x16 i32x16_from_u8(const uint8_t *p)
{
    return (i32x16){_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)),
                    _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))};
}
V_INLINE i32x16 i32x16_load(const void *p)
{
    return (i32x16){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
V_INLINE i32x16 i32x16_mul(i32x16 x, i32x16 y)
{
    return (i32x16){_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)};
}
V_INLINE i32x16 code_sums_total(code_sums s)
{
    __m256i ones = _mm256_set1_epi16(1);
    return (i32x16){_mm256_madd_epi16(s.a, ones), _mm256_madd_epi16(s.b, ones)};
}
/* The same less 128: 2 * 128 * 127 < 2^15. */
V_INLINE i32x16 i32x16_dot_rows8(i32x16 sum, u8x64 w, const uint8_t *x)
{
    uint32_t x4;
    memcpy(&x4, x, 4);
    __m256i s = _mm256_set1_epi32((int32_t)(x4 ^ 0x80808080u));
    return (i32x16){dot_pairs(sum.a, _mm256_abs_epi8(w.a), _mm256_sign_epi8(s, w.a)),
                    dot_pairs(sum.b, _mm256_abs_epi8(w.b), _mm256_sign_epi8(s, w.b))};
}
#else
enum { V_WIDE_SUMS = 1, V_SHIFTED_ROWS = 1 };
V_INLINE i32x16 i32x16_from_u8(const uint8_t *p)
{
    return I32_LANES(p[i]);
}
V_INLINE i32x16 i32x16_load(const void *p)
{
    i32x16 out;
    memcpy(&out, p, sizeof out);
    return out;
}
V_INLINE i32x16 i32x16_mul(i32x16 a, i32x16 b)
{
    return I32_LANES(a.i[i] * b.i[i]);
}
V_INLINE i32x16 code_sums_total(code_sums s)
{
    return s;
}
V_INLINE i32x16 i32x16_dot_rows8(i32x16 sum, u8x64 w, const uint8_t *x)
{
    for (int l = 0; l < 16; l++)
        for (int j = 0; j < 4; j++)
            sum.i[l] += (int8_t)w.b[4 * l + j] * x[j];
    return sum;
}
#endif

/* ---- W8A8 ---- */

/* a + 128 of each row in its tile; what is no number becomes -127. */
static void quantize_rows8(const struct acts *a, uint32_t first, uint32_t end)
{
    size_t units = w8a8_units(a->cols);
    v16 bound = v16_set1(127), least = v16_set1(-127);
    for (uint32_t row = first; row < end; row++) {
        const float *x = a->x + (size_t)row * a->cols;
        uint32_t tile = row / ACTS_TILE * ACTS_TILE, height = a->rows - tile < ACTS_TILE ? a->rows - tile : ACTS_TILE;
        uint8_t *out = a->rows8 + (tile * units + (row - tile)) * UNIT_BYTES;
        float amax = row_amax(x, a->cols);
        v16 inverse = v16_set1(amax > 0 ? 127.0f / amax : 0);
        a->row8_scale[row] = amax / 127.0f;
        for (size_t u = 0; u < units; u++, out += height * UNIT_BYTES) {
            size_t n = a->cols - u * UNIT_BYTES < UNIT_BYTES ? a->cols - u * UNIT_BYTES : UNIT_BYTES;
            for (size_t k = 0; k < n; k += 16)
                v16_to_i8((int8_t *)out + k, v16_min(v16_max(v16_mul(v16_load(x + u * UNIT_BYTES + k), inverse), least), bound));
            for (size_t k = 0; k < n; k++)
                out[k] ^= 0x80;
            memset(out + n, 0x80, UNIT_BYTES - n);
        }
    }
}

/* n rows (n <= V_ROWS, a constant) of one tile times a panel. */
V_INLINE void w8a8_rows(const uint8_t *panel, const struct acts *a, uint32_t tile, uint32_t row, uint32_t height, int n,
                        v16 out[][2])
{
    enum { PARTS = 2 }; /* chains of sums: one waits for a product while the other is worked on */
    size_t units = w8a8_units(a->cols);
    const uint8_t *x = a->rows8 + (tile * units + row) * UNIT_BYTES, *unit = panel + W8A8_HEAD;
    i32x16 sums[V_ROWS][2][PARTS];
    for (int r = 0; r < n; r++)
        for (int h = 0; h < 2; h++) {
            sums[r][h][0] = i32x16_mul(i32x16_load(panel + 2 * LINE + h * LINE), i32x16_set1(V_SHIFTED_ROWS ? -128 : 0));
            sums[r][h][1] = i32x16_set1(0);
        }
    for (size_t u = 0; u < units; u++, unit += 2 * UNIT_HALF, x += height * UNIT_BYTES) {
        V_UNROLL
        for (int g = 0; g < UNIT_LINES; g++) {
            u8x64 line0 = u8x64_load(unit + g * LINE), line1 = u8x64_load(unit + UNIT_HALF + g * LINE);
            int part = n <= 2 ? g % PARTS : 0;
            v_prefetch_l2(unit + GROUPED_AHEAD + g * LINE);
            v_prefetch_l2(unit + GROUPED_AHEAD + UNIT_HALF + g * LINE);
            for (int r = 0; r < n; r++) {
                sums[r][0][part] = i32x16_dot_rows8(sums[r][0][part], line0, x + r * UNIT_BYTES + 4 * g);
                sums[r][1][part] = i32x16_dot_rows8(sums[r][1][part], line1, x + r * UNIT_BYTES + 4 * g);
            }
        }
    }
    for (int r = 0; r < n; r++)
        for (int h = 0; h < 2; h++) {
            v16 scale = v16_mul(v16_load((const float *)panel + 16 * h), v16_set1(a->row8_scale[tile + row + (uint32_t)r]));
            out[r][h] = v16_mul(v16_from_i32(i32x16_add(sums[r][h][0], sums[r][h][1])), scale);
        }
}

/* ---- W4A16 ---- */

/* Sums of a group's codes times the planes of n rows: [row][half][high, low]. cell: its first codes. */
V_INLINE void w4a16_sums(const uint8_t *cell, uint32_t blocks, const struct acts *a, size_t plane, uint32_t height, int n,
                         uint32_t h, uint32_t halves, i32x16 total[][2][2])
{
    code_sums sums[V_ROWS][2][2];
    for (int r = 0; r < n; r++)
        for (uint32_t i = 0; i < halves; i++)
            for (int p = 0; p < 2; p++) {
                sums[r][i][p] = code_sums_zero();
                total[r][i][p] = i32x16_set1(0);
            }
    for (uint32_t b = 0; b < blocks; b++, cell += 8 * LINE) {
        size_t at = plane + b / 2 * height * INT16_UNIT + b % 2 * QUANT_GROUP;
        V_UNROLL
        for (int g = 0; g < 4; g++)
            for (uint32_t i = 0; i < halves; i++) {
                u8x64 line = u8x64_load(cell + (h + i) * 4 * LINE + g * LINE);
                v_prefetch_l2(cell + GROUPED_AHEAD + (h + i) * 4 * LINE + g * LINE);
                for (int r = 0; r < n; r++) {
                    sums[r][i][0] = code_sums_add(sums[r][i][0], line, a->high_plane + at + r * INT16_UNIT + 4 * g);
                    sums[r][i][1] = code_sums_add(sums[r][i][1], line, a->low_plane + at + r * INT16_UNIT + 4 * g);
                }
            }
        for (int r = 0; r < n && !V_WIDE_SUMS; r++)
            for (uint32_t i = 0; i < halves; i++)
                for (int p = 0; p < 2; p++) {
                    total[r][i][p] = i32x16_add(total[r][i][p], code_sums_total(sums[r][i][p]));
                    sums[r][i][p] = code_sums_zero();
                }
    }
    for (int r = 0; r < n && V_WIDE_SUMS; r++)
        for (uint32_t i = 0; i < halves; i++)
            for (int p = 0; p < 2; p++)
                total[r][i][p] = code_sums_total(sums[r][i][p]);
}

/* Sum of a row's activations over a group. */
V_INLINE int32_t w4a16_row_sum(const struct acts *a, size_t at, uint32_t height, uint32_t blocks)
{
    int32_t high = 0, low = 0;
    for (uint32_t b = 0; b < blocks; b++, at += height) {
        high += (int16_t)a->high_sum[at] + (a->high_sum[at] >> 16);
        low += (int16_t)a->low_sum[at] + (a->low_sum[at] >> 16);
    }
    return high * 256 + low;
}

/* n rows (n <= V_ROWS, a constant) of one tile times `halves` halves of a panel from half h. */
V_INLINE void w4a16_rows(bool zeros, const struct panels *w, const uint8_t *panel, const struct acts *a, uint32_t tile,
                         uint32_t row, uint32_t height, int n, uint32_t h, uint32_t halves, v16 out[][2])
{
    uint32_t blocks = w->group / QUANT_GROUP, groups = w->cols / w->group;
    size_t sum = tile * (size_t)(w->cols / QUANT_GROUP) + row, plane = (tile * int16_units(w->cols) + row) * INT16_UNIT;
    const uint8_t *cell = panel + w4a16_head_bytes(groups, zeros);
    v16 acc[V_ROWS][2];
    for (int r = 0; r < n; r++)
        acc[r][0] = acc[r][1] = v16_set1(0);
    for (uint32_t g = 0; g < groups; g++, cell += w4a16_cell_bytes(w->group)) {
        i32x16 total[V_ROWS][2][2];
        w4a16_sums(cell + LINE, blocks, a, plane, height, n, h, halves, total);
        for (int r = 0; r < n; r++) {
            int32_t x = w4a16_row_sum(a, sum + (size_t)r, height, blocks);
            for (uint32_t i = 0; i < halves; i++) {
                i32x16 less = i32x16_set1(-8 * x);
                if (zeros)
                    less = i32x16_mul(i32x16_from_u8(panel + g * PANEL_ROWS + (h + i) * 16), i32x16_set1(-x));
                i32x16 exact = i32x16_add(i32x16_add(i32x16_mul(total[r][i][0], i32x16_set1(256)), total[r][i][1]), less);
                acc[r][i] = v16_fma(v16_from_i32(exact), v16_from_f16((const uint16_t *)cell + 16 * (h + i)), acc[r][i]);
            }
        }
        plane += blocks / 2 * height * INT16_UNIT;
        sum += blocks * height;
    }
    for (int r = 0; r < n; r++)
        for (uint32_t i = 0; i < halves; i++)
            out[r][h + i] = v16_mul(acc[r][i], v16_set1(a->row_scale[tile + row + (uint32_t)r] * 0x1p-16f));
}

/* ---- panels ---- */

#define GROUPED_ROWS(n, work)                                                                                                    \
    for (; r + (n) <= stop; r += (n)) {                                                                                          \
        work(n);                                                                                                                 \
        for (uint32_t i = 0; i < (n); i++)                                                                                       \
            store_panel(store, tile + r + i, p, w->rows - p * PANEL_ROWS, out[i]);                                               \
    }
#define GROUPED_TILES(work)                                                                                                      \
    for (uint32_t tile = first; tile < end; tile += ACTS_TILE) {                                                                 \
        uint32_t height = a->rows - tile < ACTS_TILE ? a->rows - tile : ACTS_TILE, r = 0;                                        \
        uint32_t stop = end - tile < height ? end - tile : height;                                                               \
        if (V_ROWS >= 4)                                                                                                         \
            GROUPED_ROWS(V_ROWS < 4 ? 1 : 4, work)                                                                               \
        if (V_ROWS >= 2)                                                                                                         \
            GROUPED_ROWS(V_ROWS < 2 ? 1 : 2, work)                                                                               \
        GROUPED_ROWS(1, work)                                                                                                    \
    }

static void panel_w8a8(const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                       const struct panel_store *store)
{
    const uint8_t *panel = w->data + (size_t)p * w->panel_bytes;
    v16 out[V_ROWS][2];
#define W8A8_ROWS(n) w8a8_rows(panel, a, tile, r, height, (n), out)
    GROUPED_TILES(W8A8_ROWS)
}

V_INLINE void w4a16_panel(bool zeros, const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                          const struct panel_store *store)
{
    /* Rows that would leave no register to their sums meet one half after the other. */
    const uint8_t *panel = w->data + (size_t)p * w->panel_bytes;
    v16 out[V_ROWS][2];
#define W4A16_ROWS(n)                                                                                                            \
    for (uint32_t h = 0; h < 2; h += 2 * (n) <= V_ROWS ? 2 : 1)                                                                  \
    w4a16_rows(zeros, w, panel, a, tile, r, height, (n), h, 2 * (n) <= V_ROWS ? 2 : 1, out)
    GROUPED_TILES(W4A16_ROWS)
}

static void panel_w4a16(const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                        const struct panel_store *store)
{
    w4a16_panel(false, w, p, a, first, end, store);
}

static void panel_w4a16_zeros(const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                              const struct panel_store *store)
{
    w4a16_panel(true, w, p, a, first, end, store);
}
