/* What the two files of INT16 products on AMX share; only for files that are compiled for it. */
#pragma once
#include "gpu-worker/backend/cpu/amx.h"
#include "gpu-worker/backend/cpu/int16.h"

/* Panel p of an INT16 kind times rows first..end, more than ACTS_TILE in all; faster than int16_amx.c's where they are few. */
void int16_pairs_panel(const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                       const struct panel_store *store);

/* Line g of a group's codes as words: columns 4g, 4g + 2 and 4g + 1, 4g + 3 of each row. */
struct int16_line {
    __m512i even, odd;
};

V_INLINE struct int16_line int16_line(uint32_t bits, const uint8_t *codes, int g)
{
    __m512i nibble = _mm512_set1_epi16(15), byte = _mm512_set1_epi16(255);
    if (bits > 4) {
        __m512i x = cell_line(codes, bits, g);
        return (struct int16_line){_mm512_and_si512(x, byte), _mm512_srli_epi16(x, 8)};
    }
    __m512i x = _mm512_load_si512(codes + g % 4 * LINE);
    if (g < 4)
        return (struct int16_line){_mm512_and_si512(x, nibble), _mm512_and_si512(_mm512_srli_epi16(x, 8), nibble)};
    return (struct int16_line){_mm512_and_si512(_mm512_srli_epi16(x, 4), nibble), _mm512_srli_epi16(x, 12)};
}

/* One line of 64 codes as w = s q + c, split into its bytes. */
V_INLINE void int16_split_line(struct int16_line line, __m512i s, __m512i c, uint8_t *high, uint8_t *low)
{
    __m512i bytes = _mm512_set1_epi16(255);
    __m512i even = _mm512_add_epi16(_mm512_mullo_epi16(line.even, s), c);
    __m512i odd = _mm512_add_epi16(_mm512_mullo_epi16(line.odd, s), c);
    _mm512_store_si512(high, _mm512_ternarylogic_epi32(bytes, _mm512_srli_epi16(even, 8), odd, 0xca));
    _mm512_store_si512(low, _mm512_ternarylogic_epi32(bytes, even, _mm512_slli_epi16(odd, 8), 0xca));
}

/* Tiles 0..5. */
V_INLINE void int16_zero_sums(void)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
}

/* 16 results of a row from `column` on, of which those in `valid` exist. sums: rounded to 2^16; unit: D of each output. */
V_INLINE void int16_store(const struct panel_store *store, size_t row, size_t column, __mmask16 valid, __m512i sums,
                          const float *unit, float row_scale)
{
    float *out = store->out + row * store->ld + column;
    __m512 value = _mm512_cvtepi32_ps(sums);
    value = _mm512_mul_ps(value, _mm512_mul_ps(_mm512_load_ps(unit), _mm512_set1_ps(row_scale)));
    if (store->bias)
        value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(valid, store->bias + column));
    if (store->accumulate)
        value = _mm512_add_ps(_mm512_maskz_loadu_ps(valid, out), value);
    _mm512_mask_storeu_ps(out, valid, value);
}
