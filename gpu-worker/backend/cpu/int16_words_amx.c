/* INT16 products (int16.inc.h) of up to 16 rows on AMX, where unpacking weights is most of the work. Weights stay words: they are
 * stored as w + 2^15 = 256 high + low, both unsigned, in the order in which they fall out of the codes, and bytes of activations
 * lie across from them in three ways, so that a product is one byte sum of
 *
 *   top += a_high w_high        middle += a_high w_low + a_low w_high        bottom += a_low w_low        (S = 2^16, 2^8, 1 of
 * them, less 2^15 sum(a))
 *
 *   weights      line 2g:  columns 4g, 4g + 2 of row 0 | ... of row 15     line 2g + 1:  columns 4g + 1, 4g + 3
 *   activations  [group][top: 0 high, middle: high low, bottom: low 0][rows][64]
 *
 * All three of up to 5 rows are rows of one tile, two of them of up to 8: a tile of 16 rows takes hardly longer than one of 8.
 */
#include "gpu-worker/backend/cpu/int16_amx.h"
#include "gpu-worker/backend/cpu/kernels.h"

enum {
    TILE_BYTES = 1024,
    GROUP_LINES = 3, /* of a row of activations */
    RING = 4,        /* cells */
    AHEAD = 3904,    /* bytes, as STREAM_AHEAD */
};

/* ---- activations ---- */

V_INLINE void store_words(int8_t *to, size_t form, v16 x0, v16 x1)
{
    __m512i words = _mm512_packs_epi32(_mm512_cvtps_epi32(x0), _mm512_cvtps_epi32(x1)), bytes = _mm512_set1_epi16(255);
    words = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), words);
    words = _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(words, 0xd8), 0xd8); /* columns 0, 2, 1, 3 of each four */
    __m512i high = _mm512_andnot_si512(bytes, _mm512_add_epi16(words, _mm512_set1_epi16(128)));
    _mm512_store_si512(to, high);
    _mm512_store_si512(to + form, _mm512_or_si512(_mm512_srli_epi16(high, 8), _mm512_slli_epi16(words, 8)));
    _mm512_store_si512(to + 2 * form, _mm512_and_si512(words, bytes));
}

void int16_words_quantize(const struct acts *a, uint32_t first, uint32_t end)
{
    size_t groups = a->cols / QUANT_GROUP, form = (size_t)a->rows * LINE;
    for (uint32_t row = first; row < end; row++) {
        const float *x = a->x + (size_t)row * a->cols;
        int8_t *to = a->words + (size_t)row * LINE;
        float amax = row_amax(x, a->cols);
        v16 inverse = v16_set1(amax > 0 ? INT16_ACTIVATION / amax : 0);
        __m512i sum = _mm512_setzero_si512();
        a->row_scale[row] = amax / INT16_ACTIVATION * 65536;
        for (size_t g = 0; g < groups; g++, x += QUANT_GROUP, to += GROUP_LINES * form) {
            v16 x0 = int16_scaled(x, inverse), x1 = int16_scaled(x + 16, inverse);
            sum = _mm512_add_epi32(sum, _mm512_add_epi32(_mm512_cvtps_epi32(x0), _mm512_cvtps_epi32(x1)));
            store_words(to, form, x0, x1);
        }
        a->row_sum[row] = _mm512_reduce_add_epi32(sum);
    }
}

/* ---- weights ---- */

V_INLINE void store_weights(uint8_t *to, __m512i codes, __m512i s, __m512i c)
{
    _mm512_store_si512(to, _mm512_add_epi16(_mm512_mullo_epi16(codes, s), c));
}

/* Half a cell as a tile. */
V_INLINE void unpack(uint32_t bits, enum quant_scales scales, const uint8_t *cell, const uint8_t *super, uint32_t h, uint8_t *to)
{
    const uint8_t *codes = cell + panel_head_bytes(scales) + h * panel_half_bytes(bits);
    struct int16_scales w = int16_scales(bits, scales, cell, super, h);
    __m512i c[2];
    for (int i = 0; i < 2; i++)
        c[i] = _mm512_xor_si512(w.c[i], _mm512_set1_epi16((short)0x8000));
    V_UNROLL
    for (int g = 0; g < 8; g++, to += 2 * LINE) {
        struct int16_line line = int16_line(bits, codes, g);
        store_weights(to, line.even, w.s[g / 4], c[g / 4]);
        store_weights(to + LINE, line.odd, w.s[g / 4], c[g / 4]);
    }
}

/* ---- products ---- */

/* How many of the three sums of a row are rows of one tile. */
enum stack { STACK_1 = 1, STACK_2, STACK_3 };

static enum stack stack_of(uint32_t rows)
{
    return 3 * rows <= AMX_ROWS ? STACK_3 : 2 * rows <= AMX_ROWS ? STACK_2 : STACK_1;
}

/* Sums are tiles 0, 1 (STACK_3), 0..3 (STACK_2: 1 and 3 the bottoms) or 0..5. */
static void begin(enum stack stack, uint32_t rows)
{
    struct amx_config config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (uint32_t t = 0; t < AMX_TILES; t++) {
        uint32_t n = stack == STACK_3 ? 3 * rows : stack == STACK_2 ? (2 - t % 2) * rows : rows;
        config.rows[t] = (uint8_t)(t == 7 || (t == 6 && stack != STACK_1) ? AMX_ROWS : n);
        config.row_bytes[t] = AMX_ROW_BYTES;
    }
    __asm__ volatile("" : : "m"(config) : "memory"); /* see amx_begin */
    _tile_loadconfig(&config);
}

/* Activations x of a group times the first half of a cell, b. */
V_INLINE void multiply_first(enum stack stack, const int8_t *x, size_t form, const uint8_t *b)
{
    if (stack == STACK_1) {
        _tile_loadd(7, b, LINE);
        _tile_loadd(6, x, LINE);
        _tile_dpbsud(0, 6, 7);
        _tile_loadd(6, x + form, LINE);
        _tile_dpbsud(1, 6, 7);
        _tile_loadd(6, x + 2 * form, LINE);
        _tile_dpbsud(2, 6, 7);
        return;
    }
    _tile_loadd(4, x, LINE);
    _tile_loadd(6, b, LINE);
    _tile_dpbsud(0, 4, 6);
    if (stack == STACK_2) {
        _tile_loadd(5, x + 2 * form, LINE);
        _tile_dpbsud(1, 5, 6);
    }
}

/* Right after multiply_first. */
V_INLINE void multiply_second(enum stack stack, const int8_t *x, size_t form, const uint8_t *b)
{
    _tile_loadd(7, b, LINE);
    if (stack == STACK_1) {
        _tile_dpbsud(5, 6, 7);
        _tile_loadd(6, x, LINE);
        _tile_dpbsud(3, 6, 7);
        _tile_loadd(6, x + form, LINE);
        _tile_dpbsud(4, 6, 7);
    } else if (stack == STACK_2) {
        _tile_dpbsud(2, 4, 7);
        _tile_dpbsud(3, 5, 7);
    } else {
        _tile_dpbsud(1, 4, 7);
    }
}

/* To [half][top, middle, bottom][rows][16]. */
V_INLINE void store_sums(enum stack stack, int32_t *to, size_t rows)
{
    size_t sum = rows * 16;
    _tile_stored(0, to, LINE);
    if (stack == STACK_3) {
        _tile_stored(1, to + 3 * sum, LINE);
    } else if (stack == STACK_2) {
        _tile_stored(1, to + 2 * sum, LINE);
        _tile_stored(2, to + 3 * sum, LINE);
        _tile_stored(3, to + 5 * sum, LINE);
    } else {
        _tile_stored(1, to + sum, LINE);
        _tile_stored(2, to + 2 * sum, LINE);
        _tile_stored(3, to + 3 * sum, LINE);
        _tile_stored(4, to + 4 * sum, LINE);
        _tile_stored(5, to + 5 * sum, LINE);
    }
}

static void finish(const struct panels *w, uint32_t p, const struct acts *a, const struct panel_store *store, const int32_t *sums)
{
    const float *unit = (const float *)(w->data + (size_t)p * w->panel_bytes);
    uint32_t rows = a->rows, n_valid = w->rows - p * PANEL_ROWS;
    uint32_t valid = n_valid < PANEL_ROWS ? (1u << n_valid) - 1 : ~0u;
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t h = 0; h < 2; h++) {
            const __m512i *s = (const __m512i *)sums + (size_t)h * 3 * rows + r;
            __m512i top = _mm512_sub_epi32(s[0], _mm512_set1_epi32(a->row_sum[r] >> 1));
            __m512i middle = _mm512_sub_epi32(s[rows], _mm512_set1_epi32((a->row_sum[r] & 1) * 128 - 128));
            middle = _mm512_add_epi32(middle, _mm512_srai_epi32(s[2 * rows], 8));
            int16_store(store, r, (size_t)p * PANEL_ROWS + 16 * h, (__mmask16)(valid >> 16 * h),
                        _mm512_add_epi32(top, _mm512_srai_epi32(middle, 8)), unit + 16 * h, a->row_scale[r]);
        }
}

V_INLINE void fetch_half(uint32_t bits, enum quant_scales scales, const uint8_t *cell, uint32_t h)
{
    size_t lines = panel_cell_bytes(bits, scales) / LINE;
    for (size_t i = lines * h / 2; i < lines * (h + 1) / 2; i++)
        _mm_prefetch((const char *)cell + AHEAD + i * LINE, _MM_HINT_T1);
}

/* The next cell is unpacked while this one is multiplied. */
V_INLINE void multiply_panel(uint32_t bits, enum quant_scales scales, enum stack stack, const struct panels *w, uint32_t p,
                             const struct acts *a, const struct panel_store *store)
{
    _Alignas(64) uint8_t b[RING][2][TILE_BYTES];
    _Alignas(64) int32_t sums[2 * 3 * AMX_ROWS * 16];
    const uint8_t *panel = w->data + (size_t)p * w->panel_bytes;
    size_t groups = w->cols / QUANT_GROUP, form = (size_t)a->rows * LINE;
    const int8_t *x = a->words;
    begin(stack, a->rows);
    int16_zero_sums();
    for (uint32_t h = 0; h < 2; h++)
        unpack(bits, scales, int16_cell(bits, scales, panel, 0), int16_super(bits, scales, panel, 0), h, b[0][h]);
    for (size_t g = 0; g < groups; g++, x += GROUP_LINES * form) {
        size_t next = g + 1 < groups ? g + 1 : g;
        const uint8_t *cell = int16_cell(bits, scales, panel, next), *super = int16_super(bits, scales, panel, next);
        for (size_t i = 0; i < panel_super_bytes(scales) && next % QUANT_SUPER_GROUPS == 0; i += LINE)
            _mm_prefetch((const char *)super + AHEAD + i, _MM_HINT_T1);
        fetch_half(bits, scales, cell, 0);
        unpack(bits, scales, cell, super, 0, b[(g + 1) % RING][0]);
        multiply_first(stack, x, form, b[g % RING][0]);
        fetch_half(bits, scales, cell, 1);
        unpack(bits, scales, cell, super, 1, b[(g + 1) % RING][1]);
        multiply_second(stack, x, form, b[g % RING][1]);
    }
    store_sums(stack, sums, a->rows);
    amx_end();
    finish(w, p, a, store, sums);
}

#define WORDS_PANEL(name, bits, scales)                                                                                          \
    static void name(const struct panels *w, uint32_t p, const struct acts *a, const struct panel_store *store)                  \
    {                                                                                                                            \
        if (stack_of(a->rows) == STACK_3)                                                                                        \
            multiply_panel(bits, scales, STACK_3, w, p, a, store);                                                               \
        else if (stack_of(a->rows) == STACK_2)                                                                                   \
            multiply_panel(bits, scales, STACK_2, w, p, a, store);                                                               \
        else                                                                                                                     \
            multiply_panel(bits, scales, STACK_1, w, p, a, store);                                                               \
    }
WORDS_PANEL(words_scale_4, 4, QUANT_SCALE)
WORDS_PANEL(words_scale_5, 5, QUANT_SCALE)
WORDS_PANEL(words_min_4, 4, QUANT_SCALE_MIN)
WORDS_PANEL(words_min_5, 5, QUANT_SCALE_MIN)
WORDS_PANEL(words_super_min_4, 4, QUANT_SUPER_MIN)
WORDS_PANEL(words_super_min_5, 5, QUANT_SUPER_MIN)
WORDS_PANEL(words_super16_6, 6, QUANT_SUPER_16)

void int16_words_panel(const struct panels *w, uint32_t p, const struct acts *a, const struct panel_store *store)
{
    static void (*const panels[PANEL_KINDS])(const struct panels *, uint32_t, const struct acts *, const struct panel_store *) = {
        [PANEL_INT16_SCALE_4] = words_scale_4,
        [PANEL_INT16_SCALE_5] = words_scale_5,
        [PANEL_INT16_MIN_4] = words_min_4,
        [PANEL_INT16_MIN_5] = words_min_5,
        [PANEL_INT16_SUPER_MIN_4] = words_super_min_4,
        [PANEL_INT16_SUPER_MIN_5] = words_super_min_5,
        [PANEL_INT16_SUPER16_6] = words_super16_6,
    };
    panels[w->kind](w, p, a, store);
}
