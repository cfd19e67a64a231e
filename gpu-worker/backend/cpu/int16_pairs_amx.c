/* INT16 products (int16.inc.h) of more than 16 rows on AMX, as many as share a panel too seldom for its unpacking to be small
 * beside the products. Both go on at the same time: unpacking needs the vector units and products do not. Two tiles of rows go
 * through half a panel, so that its six sums (int16_amx.c has them) stay in tiles from the first column to the last:
 *
 *   panel --unpack--> ring of units of 64 columns [high, low][16 lines][64], two units ahead of
 *   8 TDPs a unit, beside them also: the sums of the half before become results, the next panel is asked for
 *
 * Weights read back right after they were written would wait for the stores, hence two units.
 */
#include "gpu-worker/backend/cpu/int16_amx.h"
#include "gpu-worker/backend/cpu/kernels.h"

enum {
    PAIR_ROWS = 2 * AMX_ROWS,
    RING = 4, /* units */
    LEAD = 2, /* units */
    TILE_BYTES = 1024,
    SUMS = 3 * 256,
};

/* ---- sums to results ---- */

/* Half a panel's results of a pair of tiles whose sums are complete. */
struct results {
    const int32_t *sums;    /* [2][top, middle, bottom][16 rows][16] */
    float *out;             /* of the first row */
    const float *row_scale; /* of the first row */
    size_t ld;
    uint32_t rows;
    __mmask16 valid; /* outputs that exist */
    bool accumulate;
    __m512 unit, bias; /* bias: 0 where there is none */
    bool biased;
};

V_INLINE void finish_rows(const struct results *t, uint32_t first, uint32_t end)
{
    end = end < t->rows ? end : t->rows;
    for (uint32_t r = first; r < end; r++) {
        const __m512i *s = (const __m512i *)(t->sums + r / AMX_ROWS * SUMS) + r % AMX_ROWS;
        float *out = t->out + r * t->ld;
        __m512i middle = _mm512_add_epi32(_mm512_add_epi32(s[16], _mm512_srai_epi32(s[32], 8)), _mm512_set1_epi32(128));
        __m512 value = _mm512_cvtepi32_ps(_mm512_add_epi32(s[0], _mm512_srai_epi32(middle, 8)));
        value = _mm512_mul_ps(value, _mm512_mul_ps(t->unit, _mm512_set1_ps(t->row_scale[r])));
        if (t->biased)
            value = _mm512_add_ps(value, t->bias);
        if (t->accumulate)
            value = _mm512_add_ps(_mm512_maskz_loadu_ps(t->valid, out), value);
        _mm512_mask_storeu_ps(out, t->valid, value);
    }
}

/* Asks for the lines that rows first..end will be stored to: they lie far apart, so without this every store waits. */
V_INLINE void fetch_rows(const struct results *t, uint32_t first, uint32_t end)
{
    for (uint32_t r = first; r < end && r < t->rows; r++)
        __builtin_prefetch(t->out + r * t->ld, 1);
}

/* ---- weights ---- */

/* Half a cell. */
struct half_cell {
    const uint8_t *codes;
    struct int16_scales w;
};

V_INLINE struct half_cell half_cell(uint32_t bits, enum quant_scales scales, const uint8_t *panel, size_t g, uint32_t h)
{
    const uint8_t *cell = int16_cell(bits, scales, panel, g), *super = int16_super(bits, scales, panel, g);
    return (struct half_cell){cell + panel_head_bytes(scales) + h * panel_half_bytes(bits),
                              int16_scales(bits, scales, cell, super, h)};
}

/* Two lines of 64 codes as w = s q + c, split into its bytes. */
V_INLINE void unpack_lines(uint32_t bits, const struct half_cell *half, int g, uint8_t *to)
{
    V_UNROLL
    for (int i = g; i < g + 2; i++)
        int16_split_line(int16_line(bits, half->codes, i), half->w.s[i / 4], half->w.c[i / 4], to + i * LINE,
                         to + i * LINE + TILE_BYTES);
}

/* ---- products ---- */

/* Where the units of half a panel come from, one after the other. */
struct unpacking {
    const uint8_t *panel;
    size_t groups, units, unit;
    uint32_t h;
};

V_INLINE void unpack_next(struct unpacking *from)
{
    if (++from->unit == from->units) {
        from->unit = 0;
        from->h ^= 1;
    }
}

V_INLINE struct half_cell unpacked_cell(uint32_t bits, enum quant_scales scales, const struct unpacking *from, size_t i)
{
    size_t g = 2 * from->unit + i; /* past the last, activations are zero and any weights do */
    return half_cell(bits, scales, from->panel, g < from->groups ? g : from->groups - 1, from->h);
}

/* Activations of a unit of 64 columns: two planes of two tiles of rows. */
struct unit_rows {
    const int8_t *high[2], *low[2];
    size_t step[2]; /* to the next unit */
};

/* The 8 products of a unit from `b` (tiles 0..2 and 3..5: the sums of two tiles of rows; 6: activations; 7: weights), and the
 * next unit but one unpacked to `to` beside them. A sum waits for its last product while three others are worked on: a TDP takes
 * 16 cycles but its result 52. */
V_INLINE void multiply_unit(uint32_t bits, enum quant_scales scales, const struct unit_rows *a, const uint8_t *b,
                            const struct unpacking *from, uint8_t *to)
{
    struct half_cell half = unpacked_cell(bits, scales, from, 0);
    _tile_loadd(7, b, LINE);
    _tile_loadd(6, a->high[0], INT16_UNIT);
    _tile_dpbssd(0, 6, 7);
    unpack_lines(bits, &half, 0, to);
    _tile_loadd(6, a->high[1], INT16_UNIT);
    _tile_dpbssd(3, 6, 7);
    unpack_lines(bits, &half, 2, to);
    _tile_loadd(6, a->low[0], INT16_UNIT);
    _tile_dpbssd(1, 6, 7);
    unpack_lines(bits, &half, 4, to);
    _tile_loadd(6, a->low[1], INT16_UNIT);
    _tile_dpbssd(4, 6, 7);
    unpack_lines(bits, &half, 6, to);
    half = unpacked_cell(bits, scales, from, 1);
    to += 8 * LINE;
    _tile_loadd(7, b + TILE_BYTES, LINE);
    _tile_dpbsud(5, 6, 7);
    unpack_lines(bits, &half, 0, to);
    _tile_loadd(6, a->low[0], INT16_UNIT);
    _tile_dpbsud(2, 6, 7);
    unpack_lines(bits, &half, 2, to);
    _tile_loadd(6, a->high[0], INT16_UNIT);
    _tile_dpbsud(1, 6, 7);
    unpack_lines(bits, &half, 4, to);
    _tile_loadd(6, a->high[1], INT16_UNIT);
    _tile_dpbsud(4, 6, 7);
    unpack_lines(bits, &half, 6, to);
}

/* In the order in which they are complete. */
V_INLINE void store_sums(int32_t *to)
{
    _tile_stored(0, to, LINE);
    _tile_stored(3, to + SUMS, LINE);
    _tile_stored(5, to + SUMS + 512, LINE);
    _tile_stored(2, to + 512, LINE);
    _tile_stored(1, to + 256, LINE);
    _tile_stored(4, to + SUMS + 256, LINE);
}

V_INLINE struct unit_rows pair_rows(const struct acts *a, uint32_t first, size_t units)
{
    struct unit_rows out;
    for (uint32_t i = 0; i < 2; i++) {
        uint32_t tile = first + i * AMX_ROWS < a->rows ? first + i * AMX_ROWS : first; /* no second one: its sums are not used */
        size_t at = tile * units * INT16_UNIT;
        out.high[i] = a->high_plane + at;
        out.low[i] = a->low_plane + at;
        out.step[i] = (a->rows - tile < AMX_ROWS ? a->rows - tile : AMX_ROWS) * (size_t)INT16_UNIT;
    }
    return out;
}

V_INLINE struct results pair_results(const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                                     uint32_t h, const struct panel_store *store, const int32_t *sums)
{
    size_t column = (size_t)p * PANEL_ROWS + 16 * h;
    uint32_t left = column < w->rows ? w->rows - (uint32_t)column : 0;
    __mmask16 valid = left < 16 ? (__mmask16)((1u << left) - 1) : 0xffff;
    return (struct results){.sums = sums,
                            .out = store->out + first * store->ld + column,
                            .row_scale = a->row_scale + first,
                            .ld = store->ld,
                            .rows = end - first < PAIR_ROWS ? end - first : PAIR_ROWS,
                            .valid = valid,
                            .accumulate = store->accumulate,
                            .unit = _mm512_load_ps((const float *)(w->data + (size_t)p * w->panel_bytes) + 16 * h),
                            .bias = store->bias ? _mm512_maskz_loadu_ps(valid, store->bias + column) : _mm512_setzero_ps(),
                            .biased = store->bias};
}

/* A pass takes a pair of tiles of rows through half a panel. While it multiplies, the pass before is finished and the next panel
 * asked for. */
V_INLINE void multiply_panel(uint32_t bits, enum quant_scales scales, const struct panels *w, uint32_t p, const struct acts *a,
                             uint32_t first, uint32_t end, const struct panel_store *store)
{
    _Alignas(64) uint8_t b[RING][2 * TILE_BYTES];
    _Alignas(64) int32_t sums[2][2 * SUMS];
    const uint8_t *panel = w->data + (size_t)p * w->panel_bytes, *ahead = panel + w->panel_bytes, *stop = ahead + w->panel_bytes;
    size_t units = int16_units(w->cols), steps = (end - first + PAIR_ROWS - 1) / PAIR_ROWS * 2 * units, done = 0;
    size_t lines = (w->panel_bytes / LINE + steps - 1) / steps;
    uint32_t each = (uint32_t)((PAIR_ROWS + units - 1) / units);
    struct unpacking from = {panel, w->cols / QUANT_GROUP, units, 0, 0};
    struct results before = {.rows = 0};
    for (size_t i = 0; i < LEAD; i++, unpack_next(&from))
        for (size_t j = 0; j < 2; j++) {
            struct half_cell half = unpacked_cell(bits, scales, &from, j);
            V_UNROLL
            for (int g = 0; g < 8; g += 2)
                unpack_lines(bits, &half, g, b[i] + j * 8 * LINE);
        }
    for (uint32_t pass = 0; first < end; pass++, first += pass % 2 ? 0 : PAIR_ROWS) {
        struct unit_rows rows = pair_rows(a, first, units);
        struct results current = pair_results(w, p, a, first, end, pass % 2, store, sums[pass % 2]);
        int16_zero_sums();
        for (uint32_t row = 0, u = 0; u < units; u++, row += each, done++, unpack_next(&from)) {
            multiply_unit(bits, scales, &rows, b[done % RING], &from, b[(done + LEAD) % RING]);
            for (uint32_t i = 0; i < 2; i++) {
                rows.high[i] += rows.step[i];
                rows.low[i] += rows.step[i];
            }
            for (size_t i = 0; i < lines && ahead < stop; i++, ahead += LINE)
                _mm_prefetch((const char *)ahead, _MM_HINT_T1);
            finish_rows(&before, row, row + each);
            fetch_rows(&current, row, row + each);
        }
        store_sums(sums[pass % 2]);
        before = current;
    }
    finish_rows(&before, 0, PAIR_ROWS);
}

#define PAIRS_PANEL(name, bits, scales)                                                                                          \
    static void name(const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,                     \
                     const struct panel_store *store)                                                                            \
    {                                                                                                                            \
        multiply_panel(bits, scales, w, p, a, first, end, store);                                                                \
    }
PAIRS_PANEL(pairs_scale_4, 4, QUANT_SCALE)
PAIRS_PANEL(pairs_scale_5, 5, QUANT_SCALE)
PAIRS_PANEL(pairs_min_4, 4, QUANT_SCALE_MIN)
PAIRS_PANEL(pairs_min_5, 5, QUANT_SCALE_MIN)
PAIRS_PANEL(pairs_super_min_4, 4, QUANT_SUPER_MIN)
PAIRS_PANEL(pairs_super_min_5, 5, QUANT_SUPER_MIN)
PAIRS_PANEL(pairs_super16_6, 6, QUANT_SUPER_16)

void int16_pairs_panel(const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                       const struct panel_store *store)
{
    static void (*const panels[PANEL_KINDS])(const struct panels *, uint32_t, const struct acts *, uint32_t, uint32_t,
                                             const struct panel_store *) = {
        [PANEL_INT16_SCALE_4] = pairs_scale_4,
        [PANEL_INT16_SCALE_5] = pairs_scale_5,
        [PANEL_INT16_MIN_4] = pairs_min_4,
        [PANEL_INT16_MIN_5] = pairs_min_5,
        [PANEL_INT16_SUPER_MIN_4] = pairs_super_min_4,
        [PANEL_INT16_SUPER_MIN_5] = pairs_super_min_5,
        [PANEL_INT16_SUPER16_6] = pairs_super16_6,
    };
    amx_begin(AMX_ROWS, AMX_ROW_BYTES);
    panels[w->kind](w, p, a, first, end, store);
    amx_end();
}
