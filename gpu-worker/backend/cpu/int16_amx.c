/* INT16 products (int16.inc.h) of many rows on AMX; int16_words_amx.c and int16_pairs_amx.c have those of fewer. Weights w = 256
 * high + low (high signed, low unsigned) are unpacked into two planes of tiles, and the sum of a tile of 16 rows x 16 outputs is
 * that of four byte products, kept as three:
 *
 *   top += a_high w_high        middle += a_high w_low + a_low w_high        bottom += a_low w_low        (S = 2^16, 2^8, 1 of
 * them)
 *
 *   panel --unpack--> planes [half][unit of 64 columns][high, low][16 lines][64]       a stretch of columns at a time, in L1
 *   for each tile of rows:  8 TDPs a unit of both halves, while the vector units finish the tile before
 */
#include "gpu-worker/backend/cpu/int16_amx.h"
#include "gpu-worker/backend/cpu/kernels.h"

/* Tiles 0..2 and 3..5: the sums of the two halves; 6: activations; 7: weights. */
static void int16_begin(uint32_t rows)
{
    struct amx_config config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int t = 0; t < AMX_TILES; t++) {
        config.rows[t] = (uint8_t)(t < 7 ? rows : 16);
        config.row_bytes[t] = AMX_ROW_BYTES;
    }
    __asm__ volatile("" : : "m"(config) : "memory"); /* see amx_begin */
    _tile_loadconfig(&config);
}

enum {
    LEAST_ROWS = 3,    /* fewer are faster on VNNI */
    PAIRS_TO = 96,     /* rows that int16_pairs_amx.c is faster with */
    BLOCK_ROWS = 512,  /* rows whose sums are kept from stretch to stretch */
    STRETCH = 9,       /* most units: 36 KiB of planes */
    SHORT_STRETCH = 5, /* where few rows share them */
    FEW_ROWS = 32,
    TILE_BYTES = 1024,
    SUMS = 3 * 256,
};

struct planes {
    _Alignas(64) uint8_t b[2][STRETCH][2][TILE_BYTES];
    _Alignas(64) int32_t done[2 * SUMS];
    _Alignas(64) int32_t carried[BLOCK_ROWS / AMX_ROWS][2 * SUMS]; /* only where the columns take several stretches */
};

/* A tile of rows times a panel whose sums wait to be scaled and stored. */
struct pending {
    const struct panel_store *store;
    const float *unit, *row_scale;
    size_t row, column;
    uint32_t rows, valid; /* valid: a bit for each output that exists */
};

V_INLINE void finish_rows(const struct pending *t, const int32_t *sums, uint32_t first, uint32_t end)
{
    for (uint32_t r = first; r < end && r < t->rows; r++)
        for (uint32_t h = 0; h < 2; h++) {
            const __m512i *s = (const __m512i *)(sums + h * SUMS) + r;
            __m512i middle = _mm512_add_epi32(_mm512_add_epi32(s[16], _mm512_srai_epi32(s[32], 8)), _mm512_set1_epi32(128));
            int16_store(t->store, t->row + r, t->column + 16 * h, (__mmask16)(t->valid >> 16 * h),
                        _mm512_add_epi32(s[0], _mm512_srai_epi32(middle, 8)), t->unit + 16 * h, t->row_scale[r]);
        }
}

/* Asks for the lines that rows first..end will be stored to. They lie far apart, a line or two a row, so without this every store
 * waits for the cache below. */
V_INLINE void fetch_rows(const struct pending *t, uint32_t first, uint32_t end)
{
    for (uint32_t r = first; r < end && r < t->rows; r++) {
        const float *out = t->store->out + (t->row + r) * t->store->ld + t->column;
        __builtin_prefetch(out, 1);
        __builtin_prefetch(out + 16, 1);
    }
}

V_INLINE void unpack_half(uint32_t bits, enum quant_scales scales, const uint8_t *cell, const uint8_t *super, uint32_t h,
                          uint8_t *to)
{
    const uint8_t *codes = cell + panel_head_bytes(scales) + h * panel_half_bytes(bits);
    struct int16_scales w = int16_scales(bits, scales, cell, super, h);
    V_UNROLL
    for (int g = 0; g < 8; g++, to += LINE)
        int16_split_line(int16_line(bits, codes, g), w.s[g / 4], w.c[g / 4], to, to + TILE_BYTES);
}

V_INLINE void unpack(uint32_t bits, enum quant_scales scales, const struct panels *w, const uint8_t *panel, size_t unit,
                     uint8_t *b0, uint8_t *b1)
{
    size_t groups = w->cols / QUANT_GROUP;
    for (size_t g = 2 * unit; g < 2 * unit + 2; g++) {
        const uint8_t *cell = int16_cell(bits, scales, panel, g), *super = int16_super(bits, scales, panel, g);
        for (uint32_t h = 0; h < 2; h++) {
            uint8_t *to = (h ? b1 : b0) + g % 2 * 8 * LINE;
            if (g < groups) {
                unpack_half(bits, scales, cell, super, h, to);
            } else {
                memset(to, 0, 8 * LINE);
                memset(to + TILE_BYTES, 0, 8 * LINE);
            }
        }
        for (size_t i = 0; i < panel_cell_bytes(bits, scales); i += LINE)
            _mm_prefetch((const char *)cell + 2048 + i, _MM_HINT_T0);
    }
}

/* Both halves share the loads of activations, and a sum waits for its last product while five others are worked on: a TDP takes
 * 16 cycles but its result 52. */
V_INLINE void multiply_unit(const int8_t *high, const int8_t *low, const uint8_t *b0, const uint8_t *b1)
{
    _tile_stream_loadd(6, high, INT16_UNIT);
    _tile_loadd(7, b0, LINE);
    _tile_dpbssd(0, 6, 7);
    _tile_loadd(7, b1, LINE);
    _tile_dpbssd(3, 6, 7);
    _tile_loadd(7, b0 + TILE_BYTES, LINE);
    _tile_dpbsud(1, 6, 7);
    _tile_loadd(7, b1 + TILE_BYTES, LINE);
    _tile_dpbsud(4, 6, 7);
    _tile_stream_loadd(6, low, INT16_UNIT);
    _tile_dpbsud(5, 6, 7);
    _tile_loadd(7, b0 + TILE_BYTES, LINE);
    _tile_dpbsud(2, 6, 7);
    _tile_loadd(7, b0, LINE);
    _tile_dpbssd(1, 6, 7);
    _tile_loadd(7, b1, LINE);
    _tile_dpbssd(4, 6, 7);
}

V_INLINE void store_sums(int32_t *to)
{
    _tile_stored(0, to, LINE);
    _tile_stored(1, to + 256, LINE);
    _tile_stored(2, to + 512, LINE);
    _tile_stored(3, to + 768, LINE);
    _tile_stored(4, to + 1024, LINE);
    _tile_stored(5, to + 1280, LINE);
}

/* n units of one tile of rows: the sums start from `from` (NULL = zero) and end in `to`, [half][top, middle, bottom]. Meanwhile
 * the rows of the tile before are finished from `done`, and those of this one, to be finished next, are asked for. */
V_INLINE void multiply(const int8_t *high, const int8_t *low, size_t step, const uint8_t *b, size_t n, const int32_t *from,
                       int32_t *to, const struct pending *before, const int32_t *done, const struct pending *current)
{
    uint32_t each = (uint32_t)((AMX_ROWS + n - 1) / n), row = 0;
    if (from) {
        _tile_loadd(0, from, LINE);
        _tile_loadd(1, from + 256, LINE);
        _tile_loadd(2, from + 512, LINE);
        _tile_loadd(3, from + 768, LINE);
        _tile_loadd(4, from + 1024, LINE);
        _tile_loadd(5, from + 1280, LINE);
    } else {
        int16_zero_sums();
    }
    for (size_t k = 0; k < n; k++, high += step, low += step, b += 2 * TILE_BYTES) {
        multiply_unit(high, low, b, b + STRETCH * 2 * TILE_BYTES);
        finish_rows(before, done, row, row + each);
        fetch_rows(current, row, row + each);
        row += each;
    }
    store_sums(to);
}

V_INLINE void amx_block(uint32_t bits, enum quant_scales scales, const struct panels *w, uint32_t p, const struct acts *a,
                        uint32_t first, uint32_t end, const struct panel_store *store)
{
    struct planes planes;
    const uint8_t *panel = w->data + (size_t)p * w->panel_bytes;
    size_t units = int16_units(w->cols), most = end - first <= FEW_ROWS ? SHORT_STRETCH : STRETCH;
    size_t stretches = (units + most - 1) / most, each = (units + stretches - 1) / stretches;
    uint32_t n_valid = w->rows - p * PANEL_ROWS < PANEL_ROWS ? w->rows - p * PANEL_ROWS : PANEL_ROWS;
    struct pending before = {
        .store = store, .unit = (const float *)panel, .column = (size_t)p * PANEL_ROWS, .valid = ~0u >> (PANEL_ROWS - n_valid)};
    for (size_t unit = 0; unit < units; unit += each) {
        size_t n = units - unit < each ? units - unit : each;
        bool last = unit + n == units;
        for (size_t i = 0; i < n; i++)
            unpack(bits, scales, w, panel, unit + i, planes.b[0][i][0], planes.b[1][i][0]);
        for (uint32_t tile = first; tile < end; tile += AMX_ROWS) {
            uint32_t height = a->rows - tile < AMX_ROWS ? a->rows - tile : AMX_ROWS;
            size_t at = (tile * units + unit * height) * INT16_UNIT;
            int32_t *carried = stretches > 1 ? planes.carried[(tile - first) / AMX_ROWS] : NULL;
            struct pending current = before;
            current.rows = !last ? 0 : end - tile < AMX_ROWS ? end - tile : AMX_ROWS;
            current.row = tile;
            current.row_scale = a->row_scale + tile;
            multiply(a->high_plane + at, a->low_plane + at, (size_t)height * INT16_UNIT, planes.b[0][0][0], n,
                     unit ? carried : NULL, last ? planes.done : carried, &before, planes.done, &current);
            before = current;
        }
    }
    finish_rows(&before, planes.done, 0, AMX_ROWS);
}

V_INLINE void amx_panel(uint32_t bits, enum quant_scales scales, const struct panels *w, uint32_t p, const struct acts *a,
                        uint32_t first, uint32_t end, const struct panel_store *store)
{
    if (a->rows < LEAST_ROWS) {
        kernels_avx512.panel[w->kind](w, p, a, first, end, store);
        return;
    }
    if (a->rows <= ACTS_TILE) {
        int16_words_panel(w, p, a, store);
        return;
    }
    if (end - first <= PAIRS_TO) {
        int16_pairs_panel(w, p, a, first, end, store);
        return;
    }
    int16_begin(end - first < AMX_ROWS ? end - first : AMX_ROWS);
    uint32_t block = int16_units(w->cols) > STRETCH ? BLOCK_ROWS : end - first;
    for (; first < end; first += block)
        amx_block(bits, scales, w, p, a, first, end - first < block ? end : first + block, store);
    amx_end();
}

/* ---- activations ---- */

/* 32 of them as words. */
V_INLINE __m512i quantized(const float *x, v16 inverse)
{
    __m512i words =
        _mm512_packs_epi32(_mm512_cvtps_epi32(int16_scaled(x, inverse)), _mm512_cvtps_epi32(int16_scaled(x + 16, inverse)));
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), words);
}

/* The sums of each 16 bytes of two groups, as 16 bits. */
V_INLINE void store_group_sums(__m512i bytes, int32_t *sums, size_t next)
{
    __m512i s = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
    s = _mm512_add_epi32(s, _mm512_shuffle_epi32(s, 0x4e));
    s = _mm512_add_epi32(s, _mm512_shuffle_epi32(s, 0xb1));
    s = _mm512_permutexvar_epi32(_mm512_castsi128_si512(_mm_setr_epi32(0, 4, 8, 12)), s);
    __m128i words = _mm_cvtepi32_epi16(_mm512_castsi512_si128(s));
    sums[0] = _mm_cvtsi128_si32(words);
    if (next)
        sums[next] = _mm_extract_epi32(words, 1);
}

/* The bits of kernels_avx512.quantize_int16, a unit of 64 columns at a time. */
static void quantize_planes(const struct acts *a, uint32_t first, uint32_t end)
{
    size_t groups = a->cols / QUANT_GROUP, units = int16_units(a->cols);
    for (uint32_t row = first; row < end; row++) {
        const float *x = a->x + (size_t)row * a->cols;
        uint32_t tile = row / ACTS_TILE * ACTS_TILE, height = a->rows - tile < ACTS_TILE ? a->rows - tile : ACTS_TILE;
        size_t at = (tile * units + row - tile) * INT16_UNIT, sum = tile * groups + row - tile;
        float amax = row_amax(x, a->cols);
        v16 inverse = v16_set1(amax > 0 ? INT16_ACTIVATION / amax : 0);
        a->row_scale[row] = amax / INT16_ACTIVATION * 65536;
        for (size_t g = 0; g < groups; g += 2, x += INT16_UNIT, at += height * INT16_UNIT, sum += 2 * height) {
            bool both = g + 1 < groups;
            __m512i w0 = quantized(x, inverse), w1 = both ? quantized(x + QUANT_GROUP, inverse) : _mm512_setzero_si512();
            __m512i half = _mm512_set1_epi16(128), low = _mm512_castsi256_si512(_mm512_cvtepi16_epi8(w0));
            low = _mm512_inserti64x4(low, _mm512_cvtepi16_epi8(w1), 1);
            w0 = _mm512_srai_epi16(_mm512_add_epi16(w0, half), 8);
            w1 = _mm512_srai_epi16(_mm512_add_epi16(w1, half), 8);
            __m512i high = _mm512_castsi256_si512(_mm512_cvtepi16_epi8(w0));
            high = _mm512_inserti64x4(high, _mm512_cvtepi16_epi8(w1), 1);
            _mm512_store_si512(a->high_plane + at, high);
            _mm512_store_si512(a->low_plane + at, low);
            if (a->sums) {
                store_group_sums(high, a->high_sum + sum, both ? height : 0);
                store_group_sums(low, a->low_sum + sum, both ? height : 0);
            }
        }
    }
}

#define AMX_PANEL(name, bits, scales)                                                                                            \
    static void name(const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,                     \
                     const struct panel_store *store)                                                                            \
    {                                                                                                                            \
        amx_panel(bits, scales, w, p, a, first, end, store);                                                                     \
    }
AMX_PANEL(panel_scale_4, 4, QUANT_SCALE)
AMX_PANEL(panel_scale_5, 5, QUANT_SCALE)
AMX_PANEL(panel_min_4, 4, QUANT_SCALE_MIN)
AMX_PANEL(panel_min_5, 5, QUANT_SCALE_MIN)
AMX_PANEL(panel_super_min_4, 4, QUANT_SUPER_MIN)
AMX_PANEL(panel_super_min_5, 5, QUANT_SUPER_MIN)
AMX_PANEL(panel_super16_6, 6, QUANT_SUPER_16)

void int16_amx(struct kernels *out)
{
    out->quantize_int16 = quantize_planes;
    out->quantize_words = int16_words_quantize;
    out->words_from = LEAST_ROWS;
    out->int16_sums_below = LEAST_ROWS;
    out->panel[PANEL_INT16_SCALE_4] = panel_scale_4;
    out->panel[PANEL_INT16_SCALE_5] = panel_scale_5;
    out->panel[PANEL_INT16_MIN_4] = panel_min_4;
    out->panel[PANEL_INT16_MIN_5] = panel_min_5;
    out->panel[PANEL_INT16_SUPER_MIN_4] = panel_super_min_4;
    out->panel[PANEL_INT16_SUPER_MIN_5] = panel_super_min_5;
    out->panel[PANEL_INT16_SUPER16_6] = panel_super16_6;
}
