/* INT16 products (int16.inc.h) of more than a few rows on AMX. Weights w = 256 high + low (high signed, low unsigned) are
 * unpacked into two planes of tiles, and the sum of a tile of 16 rows x 16 outputs is that of four byte products, kept as three:
 *
 *   top += a_high w_high        middle += a_high w_low + a_low w_high        bottom += a_low w_low        (S = 2^16, 2^8, 1 of
 * them)
 *
 *   panel --unpack--> planes [half][unit of 64 columns][high, low][16 lines][64]       a stretch of columns at a time, in L1
 *   for each tile of rows:  8 TDPs a unit of both halves, while the vector units finish the tile before
 */
#include "gpu-worker/backend/cpu/amx.h"
#include "gpu-worker/backend/cpu/kernels.h"
#include "gpu-worker/backend/cpu/v16.h"

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
    BLOCK_ROWS = 512,  /* rows whose sums are kept from stretch to stretch */
    STRETCH = 9,       /* most units: 36 KiB of planes */
    SHORT_STRETCH = 5, /* where few rows share them */
    FEW_ROWS = 32,
    RING = 4, /* units, where one tile of rows is all there is */
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
            __mmask16 valid = (__mmask16)(t->valid >> 16 * h);
            size_t column = t->column + 16 * h;
            float *out = t->store->out + (t->row + r) * t->store->ld + column;
            __m512i middle = _mm512_add_epi32(_mm512_add_epi32(s[16], _mm512_srai_epi32(s[32], 8)), _mm512_set1_epi32(128));
            __m512 value = _mm512_cvtepi32_ps(_mm512_add_epi32(s[0], _mm512_srai_epi32(middle, 8)));
            value = _mm512_mul_ps(value, _mm512_mul_ps(_mm512_load_ps(t->unit + 16 * h), _mm512_set1_ps(t->row_scale[r])));
            if (t->store->bias)
                value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(valid, t->store->bias + column));
            if (t->store->accumulate)
                value = _mm512_add_ps(_mm512_maskz_loadu_ps(valid, out), value);
            _mm512_mask_storeu_ps(out, valid, value);
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

/* One line of 64 codes (low byte of each 16 bits and high byte) as w = s q + c, split into its bytes. */
V_INLINE void split_line(__m512i even, __m512i odd, __m512i s, __m512i c, uint8_t *high, uint8_t *low)
{
    __m512i bytes = _mm512_set1_epi16(255);
    even = _mm512_add_epi16(_mm512_mullo_epi16(even, s), c);
    odd = _mm512_add_epi16(_mm512_mullo_epi16(odd, s), c);
    _mm512_store_si512(high, _mm512_ternarylogic_epi32(bytes, _mm512_srli_epi16(even, 8), odd, 0xca));
    _mm512_store_si512(low, _mm512_ternarylogic_epi32(bytes, even, _mm512_slli_epi16(odd, 8), 0xca));
}

V_INLINE void unpack_half(bool minimum, const uint8_t *cell, uint32_t h, uint8_t *high)
{
    const uint8_t *codes = cell + (minimum ? 2 * LINE : LINE) + h * panel_half_bytes(4);
    __m512i nibble = _mm512_set1_epi16(15), s = i32x16_pairs(cell + 32 * h);
    __m512i c = minimum ? i32x16_pairs(cell + LINE + 32 * h) : i32x16_pairs_times(s, -8);
    V_UNROLL
    for (int g = 0; g < 4; g++) {
        __m512i x = _mm512_load_si512(codes + g * LINE);
        uint8_t *to = high + g * LINE;
        split_line(_mm512_and_si512(x, nibble), _mm512_and_si512(_mm512_srli_epi16(x, 8), nibble), s, c, to, to + TILE_BYTES);
        to += 4 * LINE;
        split_line(_mm512_and_si512(_mm512_srli_epi16(x, 4), nibble), _mm512_srli_epi16(x, 12), s, c, to, to + TILE_BYTES);
    }
}

V_INLINE void unpack(bool minimum, const struct panels *w, const uint8_t *panel, size_t unit, uint8_t *b0, uint8_t *b1)
{
    size_t groups = w->cols / QUANT_GROUP, cell_bytes = int16_cell_bytes(minimum);
    for (size_t g = 2 * unit; g < 2 * unit + 2; g++) {
        const uint8_t *cell = panel + 2 * LINE + g * cell_bytes;
        for (uint32_t h = 0; h < 2; h++) {
            uint8_t *to = (h ? b1 : b0) + g % 2 * 8 * LINE;
            if (g < groups) {
                unpack_half(minimum, cell, h, to);
            } else {
                memset(to, 0, 8 * LINE);
                memset(to + TILE_BYTES, 0, 8 * LINE);
            }
        }
        for (size_t i = 0; i < cell_bytes; i += LINE)
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

V_INLINE void zero_sums(void)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
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
        zero_sums();
    }
    for (size_t k = 0; k < n; k++, high += step, low += step, b += 2 * TILE_BYTES) {
        multiply_unit(high, low, b, b + STRETCH * 2 * TILE_BYTES);
        finish_rows(before, done, row, row + each);
        fetch_rows(current, row, row + each);
        row += each;
    }
    store_sums(to);
}

/* One tile of rows alone: unit u + 2 is unpacked while the products of unit u are worked on. */
V_INLINE void amx_tile(bool minimum, const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                       const struct panel_store *store)
{
    _Alignas(64) uint8_t b[RING][2][2 * TILE_BYTES];
    _Alignas(64) int32_t sums[2 * SUMS];
    const uint8_t *panel = w->data + (size_t)p * w->panel_bytes;
    size_t units = int16_units(w->cols);
    uint32_t height = a->rows - first < AMX_ROWS ? a->rows - first : AMX_ROWS;
    uint32_t n_valid = w->rows - p * PANEL_ROWS < PANEL_ROWS ? w->rows - p * PANEL_ROWS : PANEL_ROWS;
    struct pending tile = {store,       (const float *)panel,         a->row_scale + first, first, (size_t)p * PANEL_ROWS,
                           end - first, ~0u >> (PANEL_ROWS - n_valid)};
    zero_sums();
    unpack(minimum, w, panel, 0, b[0][0], b[0][1]);
    for (size_t u = 0; u < units; u++) {
        size_t at = (first * units + u * height) * INT16_UNIT;
        if (u + 1 < units)
            unpack(minimum, w, panel, u + 1, b[(u + 1) % RING][0], b[(u + 1) % RING][1]);
        multiply_unit(a->high_plane + at, a->low_plane + at, b[u % RING][0], b[u % RING][1]);
    }
    store_sums(sums);
    finish_rows(&tile, sums, 0, AMX_ROWS);
}

V_INLINE void amx_block(bool minimum, const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                        const struct panel_store *store)
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
            unpack(minimum, w, panel, unit + i, planes.b[0][i][0], planes.b[1][i][0]);
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

V_INLINE void amx_panel(bool minimum, const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                        const struct panel_store *store)
{
    if (a->rows < INT16_AMX_ROWS) {
        kernels_avx512.panel[w->kind](w, p, a, first, end, store);
        return;
    }
    int16_begin(end - first < AMX_ROWS ? end - first : AMX_ROWS);
    if (end - first <= AMX_ROWS) {
        amx_tile(minimum, w, p, a, first, end, store);
        first = end;
    }
    uint32_t block = int16_units(w->cols) > STRETCH ? BLOCK_ROWS : end - first;
    for (; first < end; first += block)
        amx_block(minimum, w, p, a, first, end - first < block ? end : first + block, store);
    amx_end();
}

void int16_panel_scale_amx(const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                           const struct panel_store *store)
{
    amx_panel(false, w, p, a, first, end, store);
}

void int16_panel_min_amx(const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                         const struct panel_store *store)
{
    amx_panel(true, w, p, a, first, end, store);
}
