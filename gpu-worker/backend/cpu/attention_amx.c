/* Attention on AMX: BF16 products that keep f16's keys and values exactly.
 *
 * An f16 value is the sum of two BF16 values, 8 bits of it and the 3 bits that are left; a query and a probability are rounded to
 * such a pair (16 bits). Of the four products of two pairs three count:
 *
 *   q k = q_high k_high + q_low k_high + q_high k_low     (q_low k_low is 2^-16 of it)
 *
 * Per 64 keys at fixed absolute positions, keys and values are split once for all rows of the tile (tokens and heads of the
 * group); then for 16 rows: scores by TDPBF16PS over head_dim, one row of online softmax at a time, values by TDPBF16PS over
 * keys, o = fma(o, f, values). A row's numbers depend on nothing but the row and its keys, so they are the same in every tile.
 */
#include "gpu-worker/backend/cpu/amx.h"
#include "gpu-worker/backend/cpu/attention.h"
#include "gpu-worker/backend/cpu/v16.h"

enum { LINE_PAIRS = 16 };

static const uint32_t HIGH = 0xffff0000;

/* (a, b) -> BF16 pairs of a dword a lane, a in its low half: the high parts (truncated) and what they leave. */
V_INLINE void split_pair(v16 a, v16 b, uint32_t *high, uint32_t *low)
{
    __m512i mask = _mm512_set1_epi32((int)HIGH), x = _mm512_castps_si512(a), y = _mm512_castps_si512(b);
    v16 rest_a = v16_sub(a, _mm512_castsi512_ps(_mm512_and_si512(x, mask)));
    v16 rest_b = v16_sub(b, _mm512_castsi512_ps(_mm512_and_si512(y, mask)));
    /* (mask & y) | x >> 16 */
    _mm512_store_si512(high, _mm512_ternarylogic_epi32(mask, y, _mm512_srli_epi32(x, 16), 0xea));
    x = _mm512_castps_si512(rest_a), y = _mm512_castps_si512(rest_b);
    _mm512_store_si512(low, _mm512_ternarylogic_epi32(mask, y, _mm512_srli_epi32(x, 16), 0xea));
}

/* 32 values -> 32 BF16 values rounded to nearest, and 32 of the remainders. */
V_INLINE void split_row(v16 a, v16 b, uint16_t *high, uint16_t *low)
{
    const __m512i half = _mm512_set1_epi32(0x8000), mask = _mm512_set1_epi32((int)HIGH);
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21,
                                         19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    __m512i x = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(a), half), mask);
    __m512i y = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(b), half), mask);
    _mm512_store_si512(high, _mm512_permutex2var_epi16(x, odd, y));
    _mm512_store_si512(low, (__m512i)_mm512_cvtne2ps_pbh(v16_sub(b, _mm512_castsi512_ps(y)), v16_sub(a, _mm512_castsi512_ps(x))));
}

/* What every loop below needs of the tile. */
struct shape {
    uint32_t head_dim, padded; /* to a multiple of 32 */
    uint32_t rows;
};

/* Scaled queries in log2 units; dimensions past head_dim are zero. */
static void begin_rows(const struct attention_tile *tile, const struct shape *shape, struct attention_scratch *s)
{
    v16 scale = v16_set1(tile->scale * 0x1.715476p+0f), zero = v16_set1(0);
    for (uint32_t r = 0; r < shape->rows; r++) {
        for (uint32_t d = 0; d < shape->padded; d += 32) {
            v16 a = v16_mul(v16_load(tile->q[r] + d), scale);
            v16 b = d + 16 < shape->head_dim ? v16_mul(v16_load(tile->q[r] + d + 16), scale) : zero;
            split_row(a, b, s->amx.q_high + r * shape->padded + d, s->amx.q_low + r * shape->padded + d);
        }
        for (uint32_t d = 0; d < shape->head_dim; d += 16)
            v16_store(s->o[r] + d, zero);
        v16_store(s->l[r], zero);
        s->m[r] = -1e30f;
    }
}

/* [page][padded / 2][16 keys] pairs of dimensions. What the next tile needs is fetched meanwhile. */
static void split_keys(struct attention_scratch *s, const struct shape *shape, const struct key_pages *pages,
                       const struct key_pages *next)
{
    uint32_t lines = shape->padded / 2;
    for (uint32_t page = 0; page < pages->n_pages; page++) {
        const uint16_t *k = pages->k[page], *fetch = next->k[page < next->n_pages ? page : 0];
        uint32_t *high = s->amx.k_high + page * lines * LINE_PAIRS, *low = s->amx.k_low + page * lines * LINE_PAIRS;
        for (uint32_t i = 0; i < shape->head_dim / 2; i++, high += LINE_PAIRS, low += LINE_PAIRS) {
            _mm_prefetch((const char *)(fetch + (size_t)2 * i * KV_PAGE), _MM_HINT_T1);
            split_pair(v16_from_f16(k + (size_t)2 * i * KV_PAGE), v16_from_f16(k + ((size_t)2 * i + 1) * KV_PAGE), high, low);
        }
        for (uint32_t i = shape->head_dim / 2; i < lines; i++, high += LINE_PAIRS, low += LINE_PAIRS) {
            _mm512_store_si512(high, _mm512_setzero_si512());
            _mm512_store_si512(low, _mm512_setzero_si512());
        }
    }
}

/* [head_dim / 16][32 pairs of keys][16 dimensions]. Keys that nobody sees become zero: they may be anything. */
static void split_values(struct attention_scratch *s, const struct shape *shape, const struct key_pages *pages,
                         const struct key_pages *next)
{
    uint32_t end = (pages->n_keys + 31) / 32 * 32;
    for (uint32_t key = 0; key < end; key += 2) {
        uint32_t page = key / KV_PAGE, slot = key % KV_PAGE;
        const uint16_t *v = page < pages->n_pages ? pages->v[page] + (size_t)slot * shape->head_dim : NULL;
        const uint16_t *fetch = next->v[page < next->n_pages ? page : 0] + (size_t)slot * shape->head_dim;
        for (uint32_t d = 0; d < shape->head_dim; d += 16) {
            size_t at = ((size_t)d / 16 * 32 + key / 2) * LINE_PAIRS;
            v16 a = key < pages->n_keys ? v16_from_f16(v + d) : v16_set1(0);
            v16 b = key + 1 < pages->n_keys ? v16_from_f16(v + shape->head_dim + d) : v16_set1(0);
            _mm_prefetch((const char *)(fetch + 2 * (size_t)d), _MM_HINT_T1);
            split_pair(a, b, s->amx.v_high + at, s->amx.v_low + at);
        }
    }
}

/* Tile numbers must be literals. */
#define SCORE_PAGE(t)                                                                                                            \
    if ((t) < n_pages) {                                                                                                         \
        size_t at = ((size_t)(t)*shape->padded / 2 + d / 2) * LINE_PAIRS;                                                        \
        _tile_loadd(6, s->amx.k_high + at, AMX_ROW_BYTES);                                                                       \
        _tile_loadd(7, s->amx.k_low + at, AMX_ROW_BYTES);                                                                        \
        _tile_dpbf16ps(t, 4, 6);                                                                                                 \
        _tile_dpbf16ps(t, 5, 6);                                                                                                 \
        _tile_dpbf16ps(t, 4, 7);                                                                                                 \
    }
#define SCORE_STORE(t)                                                                                                           \
    if ((t) < n_pages)                                                                                                           \
    _tile_stored(t, s->p[row] + (t)*KV_PAGE, sizeof s->p[0])

/* p[row..row + 15][64] = q k. */
static void score_16(struct attention_scratch *s, const struct shape *shape, uint32_t n_pages, uint32_t row)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (uint32_t d = 0; d < shape->padded; d += 32) {
        _tile_loadd(4, s->amx.q_high + row * shape->padded + d, shape->padded * 2);
        _tile_loadd(5, s->amx.q_low + row * shape->padded + d, shape->padded * 2);
        SCORE_PAGE(0)
        SCORE_PAGE(1)
        SCORE_PAGE(2)
        SCORE_PAGE(3)
    }
    SCORE_STORE(0);
    SCORE_STORE(1);
    SCORE_STORE(2);
    SCORE_STORE(3);
}

/* v16_exp2 without its upper bound. */
V_INLINE v16 power_of_2(v16 x)
{
    x = v16_max(x, v16_set1(-126.0f));
    v16 n = v16_round(x), r = v16_sub(x, n);
    v16 p = v16_set1(1.535336188319500e-4f);
    p = v16_fma(p, r, v16_set1(1.339887440266574e-3f));
    p = v16_fma(p, r, v16_set1(9.618437357674640e-3f));
    p = v16_fma(p, r, v16_set1(5.550332471162809e-2f));
    p = v16_fma(p, r, v16_set1(2.402264791363012e-1f));
    p = v16_fma(p, r, v16_set1(6.931472028550421e-1f));
    p = v16_fma(p, r, v16_set1(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* One row of online softmax over 64 keys of which the row sees the first n > 0. */
V_INLINE void softmax_64(struct attention_scratch *s, uint32_t row, int64_t n)
{
    v16 x[4];
    __mmask64 seen = n >= KEY_TILE ? ~0ull : (1ull << n) - 1;
    for (int j = 0; j < 4; j++) {
        x[j] = v16_load(s->p[row] + 16 * j);
        if (n < KEY_TILE)
            x[j] = _mm512_mask_mov_ps(v16_set1(-1e30f), (__mmask16)(seen >> 16 * j), x[j]);
    }
    float high = _mm512_reduce_max_ps(v16_max(v16_max(x[0], x[1]), v16_max(x[2], x[3]))), old = s->m[row];
    float m = high > old ? high : old;
    for (int j = 0; j < 4; j++) {
        x[j] = power_of_2(v16_sub(x[j], v16_set1(m)));
        if (n < KEY_TILE)
            x[j] = _mm512_maskz_mov_ps((__mmask16)(seen >> 16 * j), x[j]);
    }
    v16 f = m == old ? v16_set1(1) : power_of_2(v16_set1(old - m));
    s->m[row] = m;
    s->f[row] = _mm512_cvtss_f32(f);
    v16_store(s->l[row], v16_fma(v16_load(s->l[row]), f, v16_add(v16_add(x[0], x[1]), v16_add(x[2], x[3]))));
    split_row(x[0], x[1], s->amx.p_high[row], s->amx.p_low[row]);
    split_row(x[2], x[3], s->amx.p_high[row] + 32, s->amx.p_low[row] + 32);
}

#define VALUE_TILE(t)                                                                                                            \
    if (d + 16 * (t) < shape->head_dim) {                                                                                        \
        size_t at = (((size_t)d / 16 + (t)) * 32 + key / 2) * LINE_PAIRS;                                                        \
        _tile_loadd(6, s->amx.v_high + at, AMX_ROW_BYTES);                                                                       \
        _tile_loadd(7, s->amx.v_low + at, AMX_ROW_BYTES);                                                                        \
        _tile_dpbf16ps(t, 4, 6);                                                                                                 \
        _tile_dpbf16ps(t, 5, 6);                                                                                                 \
        _tile_dpbf16ps(t, 4, 7);                                                                                                 \
    }
#define VALUE_STORE(t)                                                                                                           \
    if (d + 16 * (t) < shape->head_dim)                                                                                          \
    _tile_stored(t, s->amx.values[t], AMX_ROW_BYTES)

/* o[row..] = o * f + p v, for 64 dimensions at a time. */
static void value_16(struct attention_scratch *s, const struct shape *shape, const struct attention_tile *tile, uint32_t first,
                     uint32_t n_keys, uint32_t row)
{
    uint32_t end = shape->rows - row < AMX_ROWS ? shape->rows : row + AMX_ROWS;
    for (uint32_t d = 0; d < shape->head_dim; d += 64) {
        uint32_t width = shape->head_dim - d < 64 ? (shape->head_dim - d) / 16 : 4;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (uint32_t key = 0; key < n_keys; key += 32) {
            _tile_loadd(4, s->amx.p_high[row] + key, sizeof s->amx.p_high[0]);
            _tile_loadd(5, s->amx.p_low[row] + key, sizeof s->amx.p_low[0]);
            VALUE_TILE(0)
            VALUE_TILE(1)
            VALUE_TILE(2)
            VALUE_TILE(3)
        }
        VALUE_STORE(0);
        VALUE_STORE(1);
        VALUE_STORE(2);
        VALUE_STORE(3);
        for (uint32_t r = row; r < end; r++) {
            v16 f = v16_set1(s->f[r]);
            if (tile->position[r] < first)
                continue;
            for (uint32_t t = 0; t < width; t++) {
                float *o = s->o[r] + d + 16 * t;
                v16_store(o, v16_fma(v16_load(o), f, v16_load(s->amx.values[t] + (r - row) * 16)));
            }
        }
    }
}

void attention_amx(const struct attention_tile *tile, struct attention_scratch *s)
{
    uint32_t head_dim = tile->kv->head_dim, last = 0;
    struct shape shape = {head_dim, (head_dim + 31) / 32 * 32, tile->n_rows};
    for (uint32_t r = 0; r < tile->n_rows; r++)
        last = tile->position[r] > last ? tile->position[r] : last;
    begin_rows(tile, &shape, s);
    amx_begin(tile->n_rows < AMX_ROWS ? tile->n_rows : AMX_ROWS, AMX_ROW_BYTES);
    struct key_pages pages = find_pages(tile, 0, last), next = pages;
    for (uint32_t first = 0; first <= last; first += KEY_TILE, pages = next) {
        if (last - first >= KEY_TILE)
            next = find_pages(tile, first + KEY_TILE, last);
        split_keys(s, &shape, &pages, &next);
        split_values(s, &shape, &pages, &next);
        for (uint32_t row = 0; row < tile->n_rows; row += AMX_ROWS) {
            uint32_t end = tile->n_rows - row < AMX_ROWS ? tile->n_rows : row + AMX_ROWS;
            score_16(s, &shape, pages.n_pages, row);
            for (uint32_t r = row; r < end; r++)
                if (tile->position[r] >= first)
                    softmax_64(s, r, (int64_t)tile->position[r] + 1 - first);
            value_16(s, &shape, tile, first, pages.n_keys, row);
        }
    }
    amx_end();
    for (uint32_t r = 0; r < tile->n_rows; r++) {
        v16 sum = v16_set1(v16_sum(v16_load(s->l[r])));
        for (uint32_t d = 0; d < head_dim; d += 16)
            v16_store(tile->out[r] + d, v16_div(v16_load(s->o[r] + d), sum));
    }
}
