/* Attention on AMX. Everything is transposed: a lane is a query row, so that the softmax over keys needs no sums across lanes.
 *
 *   S^T [16 keys][16 rows]  += K [16 keys][32 dims] Q^T            K page  [key_dim / 32][16 keys][32 dims]: tiles as they lie
 *   O^T [16 dims][16 rows]  += V^T [16 dims][32 keys] P^T          V       [block_size / 32][head_dim][32 keys], too
 *
 * The right factors are pairs: Q^T [dims / 2][16 rows][2], P^T [keys / 2][16 rows][2].
 *
 *   bf16   keys and values straight from the pool; queries and probabilities rounded to BF16
 *   int8   made BF16 exactly, once for all rows of a tile; the scales multiply scores and probabilities
 *   f16    made two BF16 values, 8 bits and the 3 that are left; queries and probabilities likewise (16 bits). Of the four
 * products of two pairs three count:  q k = q_high k_high + q_low k_high + q_high k_low
 *
 * The maximum m of a row is taken from the first 64 keys of a segment and moved only when the probabilities of a later step sum
 * to more than 2^16: m cancels in o / l, so any value near the maximum serves. Therefore -m is where the sums of S^T start, and
 * most steps neither look for a maximum nor rescale. Each row decides by its own numbers alone, which depend on nothing but the
 * row and its keys, and a factor of 1 changes no bit: so they are the same in every tile.
 */
#include <string.h>
#include "gpu-worker/backend/cpu/amx.h"
#include "gpu-worker/backend/cpu/attention.h"
#include "gpu-worker/backend/cpu/kernels.h"
#include "gpu-worker/backend/cpu/kv_amx.h"
#include "gpu-worker/backend/cpu/v16.h"

enum { LANES = 16, LINE_BYTES = 64, MOST_LANE_BLOCKS = ATTENTION_TILE / LANES };

static const uint32_t FEW = 4, SOME = 8; /* widths below LANES */

static const float NOTHING_SEEN = -1e30f, MOST_SUM = 0x1p16f;

struct shape {
    uint32_t head_dim, key_dim, n_lane_blocks;
    uint32_t width;                                         /* rows of a block: 4, 8 or LANES */
    uint32_t low[MOST_LANE_BLOCKS], high[MOST_LANE_BLOCKS]; /* smallest and largest position of the block's rows */
    __m512i position[MOST_LANE_BLOCKS];
};

/* What a step of 64 keys multiplies. Parts [1] only for f16. */
struct operands {
    const uint16_t *k[2][PAGES], *v[2][KEY_TILE / VALUE_KEYS];
    const float *k_scales[PAGES], *v_scales[PAGES];
};

/* ---- BF16 ---- */

static const uint32_t HIGH = 0xffff0000;

/* 32 values in order. */
V_INLINE __m512i bf16_32(v16 a, v16 b)
{
    return (__m512i)_mm512_cvtne2ps_pbh(b, a);
}

/* 4 keys of `width` rows each, x[4 * width / LANES], as pairs of keys [2][width][2]. */
V_INLINE void store_bf16_pairs(uint32_t width, uint32_t *p, const v16 *x)
{
    const __m512i of_16 = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
                                           4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i of_8 = _mm512_set_epi16(31, 23, 30, 22, 29, 21, 28, 20, 27, 19, 26, 18, 25, 17, 24, 16, 15, 7, 14, 6, 13, 5, 12,
                                          4, 11, 3, 10, 2, 9, 1, 8, 0);
    const __m256i of_4 = _mm256_set_epi16(15, 11, 14, 10, 13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0);
    if (width == FEW) {
        _mm256_store_si256((__m256i *)p, _mm256_permutexvar_epi16(of_4, (__m256i)_mm512_cvtneps_pbh(x[0])));
    } else if (width == SOME) {
        _mm512_store_si512(p, _mm512_permutexvar_epi16(of_8, bf16_32(x[0], x[1])));
    } else {
        _mm512_store_si512(p, _mm512_permutexvar_epi16(of_16, bf16_32(x[0], x[1])));
        _mm512_store_si512(p + LANES, _mm512_permutexvar_epi16(of_16, bf16_32(x[2], x[3])));
    }
}

/* The upper 16 bits of a value as BF16: at most 8 bits are left of an f16. */
V_INLINE v16 truncated(v16 x)
{
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)HIGH)));
}

/* ---- operands ---- */

/* 32 stored values -> BF16 in high (and low). */
V_INLINE void widen_32(enum backend_kv_dtype dtype, __m512i x, uint16_t *high, uint16_t *low)
{
    if (dtype == KV_BF16) {
        _mm512_store_si512(high, x);
    } else if (dtype == KV_INT8) {
        __m256i q = _mm512_castsi512_si256(x);
        v16 a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(q)));
        v16 b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(q, 1)));
        _mm512_store_si512(high, bf16_32(a, b));
    } else {
        v16 a = _mm512_cvtph_ps(_mm512_castsi512_si256(x)), b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1));
        v16 ha = truncated(a), hb = truncated(b);
        _mm512_store_si512(high, bf16_32(ha, hb));
        _mm512_store_si512(low, bf16_32(v16_sub(a, ha), v16_sub(b, hb)));
    }
}

V_INLINE void prepare_keys(enum backend_kv_dtype dtype, const struct shape *shape, struct amx_scratch *s,
                           const struct key_pages *pages, struct operands *ops)
{
    for (uint32_t i = 0; i < PAGES; i++) {
        uint32_t page = i < pages->n_pages ? i : 0; /* scores of keys that nobody sees are not used */
        const uint8_t *from = pages->page[page].k;
        size_t at = (size_t)page * shape->key_dim * KV_PAGE;
        ops->k_scales[i] = pages->page[page].k_scales;
        if (dtype == KV_BF16) {
            ops->k[0][i] = (const uint16_t *)from;
            continue;
        }
        ops->k[0][i] = s->k[0] + at, ops->k[1][i] = s->k[1] + at;
        for (uint32_t j = 0; i == page && j < shape->key_dim * KV_PAGE; j += 32) {
            __m512i x = dtype == KV_INT8 ? _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(from + j)))
                                         : _mm512_loadu_si512((const uint16_t *)from + j);
            widen_32(dtype, x, s->k[0] + at + j, s->k[1] + at + j);
        }
    }
}

/* Values of 32 keys as [head_dim][32]. Keys that nobody sees become zero: they may be anything, and 0 * NaN is none. */
V_INLINE void gather_values(enum backend_kv_dtype dtype, const struct kv_layer *kv, const struct key_pages *pages, uint32_t half,
                            uint16_t *high, uint16_t *low)
{
    uint32_t seen = pages->n_keys - half * VALUE_KEYS < VALUE_KEYS && pages->n_keys > half * VALUE_KEYS
                        ? pages->n_keys - half * VALUE_KEYS
                    : pages->n_keys > half * VALUE_KEYS ? VALUE_KEYS
                                                        : 0;
    uint32_t page = half * 2 < pages->n_pages ? half * 2 : 0, second = page + 1 < pages->n_pages ? page + 1 : page;
    const uint8_t *a = pages->page[page].v + value_at(kv, pages->page[page].slot) * kv->value_bytes;
    const uint8_t *b = pages->page[second].v + value_at(kv, pages->page[second].slot) * kv->value_bytes;
    __mmask32 mask = seen == VALUE_KEYS ? ~0u : (1u << seen) - 1;
    size_t stride = value_stride(kv) * kv->value_bytes;
    for (uint32_t d = 0; d < kv->head_dim; d++, a += stride, b += stride) {
        __m512i x;
        if (dtype == KV_INT8) {
            __m128i x0 = _mm_maskz_loadu_epi8((__mmask16)mask, a), x1 = _mm_maskz_loadu_epi8((__mmask16)(mask >> 16), b);
            x = _mm512_castsi256_si512(_mm256_inserti128_si256(_mm256_castsi128_si256(x0), x1, 1));
        } else {
            __m256i x0 = _mm256_maskz_loadu_epi16((__mmask16)mask, a), x1 = _mm256_maskz_loadu_epi16((__mmask16)(mask >> 16), b);
            x = _mm512_inserti64x4(_mm512_castsi256_si512(x0), x1, 1);
        }
        widen_32(dtype, x, high + (size_t)d * VALUE_KEYS, low + (size_t)d * VALUE_KEYS);
    }
}

V_INLINE void prepare_values(enum backend_kv_dtype dtype, const struct kv_layer *kv, struct amx_scratch *s,
                             const struct key_pages *pages, struct operands *ops)
{
    for (uint32_t i = 0; i < PAGES; i++)
        ops->v_scales[i] = pages->page[i < pages->n_pages ? i : 0].v_scales;
    for (uint32_t half = 0; half < KEY_TILE / VALUE_KEYS; half++) {
        size_t at = (size_t)half * VALUE_KEYS * kv->head_dim;
        ops->v[0][half] = s->v[0] + at, ops->v[1][half] = s->v[1] + at;
        if (dtype == KV_BF16 && kv->block_size >= VALUE_KEYS && pages->n_keys >= (half + 1) * VALUE_KEYS)
            ops->v[0][half] = (const uint16_t *)pages->page[2 * half].v + value_at(kv, pages->page[2 * half].slot);
        else
            gather_values(dtype, kv, pages, half, s->v[0] + at, s->v[1] + at);
    }
}

/* Keys and values of a later step, asked for beside the softmax of this one, a little with each 4 keys of each block of rows.
 * Asked for all at once they would wait for each other, and the step with them. */
struct fetch {
    const struct kv_layer *kv;
    struct key_pages pages;
    uint32_t at, each; /* the next of its FETCHES parts, so many with each 4 keys */
};
enum { FETCHES = KEY_TILE };

V_INLINE void fetch_part(const struct kv_layer *kv, const struct key_pages *pages, uint32_t part)
{
    uint32_t page = part / KV_PAGE, key = part % KV_PAGE, k_bytes = kv->key_dim * kv->value_bytes,
             v_bytes = kv->head_dim * kv->value_bytes;
    if (page >= pages->n_pages)
        return;
    if (kv->value_bytes == 1 && key == 0) {
        _mm_prefetch((const char *)pages->page[page].k_scales, _MM_HINT_T1);
        _mm_prefetch((const char *)pages->page[page].v_scales, _MM_HINT_T1);
    }
    const uint8_t *k = pages->page[page].k + key * k_bytes, *v = pages->page[page].v + (pages->page[page].slot + key) * v_bytes;
    for (uint32_t at = 0; at < k_bytes; at += LINE_BYTES)
        _mm_prefetch((const char *)k + at, _MM_HINT_T1);
    for (uint32_t at = 0; at < v_bytes; at += LINE_BYTES)
        _mm_prefetch((const char *)v + at, _MM_HINT_T1);
}

V_INLINE void fetch_parts(struct fetch *fetch)
{
    for (uint32_t i = 0; i < fetch->each && fetch->at < FETCHES; i++)
        fetch_part(fetch->kv, &fetch->pages, fetch->at++);
}

/* ---- scores ---- */

/* Tile numbers must be literals. */
#define SCORE_PAGE(t)                                                                                                            \
    _tile_loadd(4, ops->k[0][t] + at, AMX_ROW_BYTES);                                                                            \
    _tile_dpbf16ps(t, 4, 6);                                                                                                     \
    if (dtype == KV_F16) {                                                                                                       \
        _tile_dpbf16ps(t, 4, 7);                                                                                                 \
        _tile_loadd(5, ops->k[1][t] + at, AMX_ROW_BYTES);                                                                        \
        _tile_dpbf16ps(t, 5, 6);                                                                                                 \
    }

/* s[64 keys][width rows] = k q, minus m where from_m. */
V_INLINE void score(enum backend_kv_dtype dtype, uint32_t width, const struct shape *shape, struct amx_scratch *s,
                    const struct operands *ops, uint32_t block, bool from_m, float *scores)
{
    const uint32_t *q[2] = {s->q[0] + (size_t)block * shape->key_dim / 2 * LANES,
                            s->q[1] + (size_t)block * shape->key_dim / 2 * LANES};
    if (from_m) {
        const float *m = s->minus_m + block * LANES; /* the same line as every row */
        _tile_loadd(0, m, 0);
        _tile_loadd(1, m, 0);
        _tile_loadd(2, m, 0);
        _tile_loadd(3, m, 0);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (uint32_t d = 0; d < shape->key_dim; d += 32) {
        size_t at = (size_t)d * KV_PAGE;
        _tile_loadd(6, q[0] + d / 2 * LANES, AMX_ROW_BYTES);
        if (dtype == KV_F16)
            _tile_loadd(7, q[1] + d / 2 * LANES, AMX_ROW_BYTES);
        SCORE_PAGE(0)
        SCORE_PAGE(1)
        SCORE_PAGE(2)
        SCORE_PAGE(3)
    }
    _tile_stored(0, scores, width * sizeof *scores);
    _tile_stored(1, scores + KV_PAGE * width, width * sizeof *scores);
    _tile_stored(2, scores + 2 * KV_PAGE * width, width * sizeof *scores);
    _tile_stored(3, scores + 3 * KV_PAGE * width, width * sizeof *scores);
}

/* ---- softmax ---- */

/* Relative error 8e-5, for what is rounded to BF16. VREDUCE leaves the fraction, VSCALEF takes the floor itself. */
V_INLINE v16 power_of_2_short(v16 x)
{
    v16 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    v16 p = v16_fma(r, v16_set1(0x1.3f96a4p-4f), v16_set1(0x1.cefc4cp-3f));
    p = v16_fma(p, r, v16_set1(0x1.64444cp-1f));
    p = v16_fma(p, r, v16_set1(0x1.fff632p-1f));
    return _mm512_scalef_ps(p, x);
}

/* v16_exp2 without its bounds. */
V_INLINE v16 power_of_2(v16 x)
{
    v16 n = v16_round(x);
    return _mm512_scalef_ps(v16_exp2_fraction(v16_sub(x, n)), n);
}

/* Key of each lane after the vector's first. */
V_INLINE __m512i lane_keys(uint32_t width)
{
    return width == FEW    ? _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0)
           : width == SOME ? _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0)
                           : _mm512_setzero_si512();
}

V_INLINE __mmask16 sees(uint32_t width, __m512i position, uint32_t key)
{
    return _mm512_cmpge_epu32_mask(position, _mm512_add_epi32(_mm512_set1_epi32((int)key), lane_keys(width)));
}

/* Of the step's keys from `key`. */
V_INLINE v16 scales_of(uint32_t width, const float *const pages[PAGES], uint32_t key)
{
    if (width == LANES)
        return v16_set1(pages[key / KV_PAGE][key % KV_PAGE]);
    return _mm512_permutexvar_ps(_mm512_add_epi32(_mm512_set1_epi32((int)(key % KV_PAGE)), lane_keys(width)),
                                 v16_load(pages[key / KV_PAGE]));
}

/* Each row's part of every lane that the row has. */
V_INLINE v16 swap_halves(v16 x)
{
    return _mm512_shuffle_f32x4(x, x, 0x4e);
}
V_INLINE v16 swap_quarters(v16 x)
{
    return _mm512_shuffle_f32x4(x, x, 0xb1);
}

/* P^T of 4 keys from `key` of the step. */
V_INLINE void store_keys(enum backend_kv_dtype dtype, bool masked, uint32_t width, struct amx_scratch *s,
                         const struct operands *ops, uint32_t key, v16 *x, const __mmask16 *seen)
{
    uint32_t n = 4 * width / LANES, at = key / 2 * width;
    v16 high[4];
    for (uint32_t j = 0; dtype == KV_INT8 && j < n; j++) {
        x[j] = v16_mul(x[j], scales_of(width, ops->v_scales, key + j * LANES / width));
        if (masked) /* the scale of an unseen key may be anything */
            x[j] = _mm512_maskz_mov_ps(seen[j], x[j]);
    }
    if (dtype != KV_F16) {
        store_bf16_pairs(width, s->p[0] + at, x);
        return;
    }
    for (uint32_t j = 0; j < n; j++) {
        high[j] = truncated(x[j]);
        x[j] = v16_sub(x[j], high[j]);
    }
    store_bf16_pairs(width, s->p[0] + at, high);
    store_bf16_pairs(width, s->p[1] + at, x);
}

/* P^T of 64 keys from `first`, and its sums by row: of every fourth key, then of those, at every width. shift is taken off the
 * scores. */
V_INLINE v16 probabilities(enum backend_kv_dtype dtype, bool masked, uint32_t width, struct amx_scratch *s,
                           const struct operands *ops, const float *scores, __m512i position, uint32_t first, bool shifted,
                           v16 shift, struct fetch *fetch)
{
    uint32_t n = 4 * width / LANES;
    v16 sums[4] = {v16_set1(0), v16_set1(0), v16_set1(0), v16_set1(0)};
#pragma GCC unroll 4
    for (uint32_t key = 0; key < KEY_TILE; key += 4) {
        v16 x[4];
        __mmask16 seen[4];
        if (fetch)
            fetch_parts(fetch);
        for (uint32_t j = 0; j < n; j++) {
            uint32_t at = key + j * LANES / width;
            seen[j] = masked ? sees(width, position, first + at) : (__mmask16)~0;
            x[j] = v16_load(scores + at * width);
            if (shifted)
                x[j] = v16_sub(x[j], shift);
            x[j] = dtype == KV_F16 ? power_of_2(x[j]) : power_of_2_short(x[j]);
            if (masked)
                x[j] = _mm512_maskz_mov_ps(seen[j], x[j]);
            sums[j] = v16_add(sums[j], x[j]);
        }
        store_keys(dtype, masked, width, s, ops, key, x, seen);
    }
    if (width == FEW) {
        v16 pairs = v16_add(sums[0], swap_quarters(sums[0]));
        return v16_add(pairs, swap_halves(pairs));
    }
    if (width == SOME)
        return v16_add(v16_add(sums[0], swap_halves(sums[0])), v16_add(sums[1], swap_halves(sums[1])));
    return v16_add(v16_add(sums[0], sums[1]), v16_add(sums[2], sums[3]));
}

/* Largest score of each row; unseen keys do not count. */
V_INLINE v16 largest(uint32_t width, bool masked, const float *scores, __m512i position, uint32_t first)
{
    v16 high[4];
    for (int j = 0; j < 4; j++)
        high[j] = v16_set1(NOTHING_SEEN);
    for (uint32_t i = 0; i < KEY_TILE * width; i += 4 * LANES)
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t at = i + j * LANES;
            v16 x = v16_load(scores + at);
            high[j] =
                masked ? _mm512_mask_max_ps(high[j], sees(width, position, first + at / width), high[j], x) : v16_max(high[j], x);
        }
    v16 most = v16_max(v16_max(high[0], high[1]), v16_max(high[2], high[3]));
    if (width <= SOME)
        most = v16_max(most, swap_halves(most));
    return width == FEW ? v16_max(most, swap_quarters(most)) : most;
}

V_INLINE void scale_scores(uint32_t width, float *scores, const struct operands *ops)
{
    for (uint32_t at = 0; at < KEY_TILE * width; at += LANES)
        v16_store(scores + at, v16_mul(v16_load(scores + at), scales_of(width, ops->k_scales, at / width)));
}

static void rescale(const struct shape *shape, const struct attention_state *state, uint32_t block, v16 f)
{
    float *o = state->o + (size_t)block * shape->head_dim * LANES;
    for (uint32_t d = 0; d < shape->head_dim; d++)
        v16_store(o + d * LANES, v16_mul(v16_load(o + d * LANES), f));
}

static void set_m(struct amx_scratch *s, const struct attention_state *state, uint32_t block, v16 m)
{
    v16_store(state->m + block * LANES, m);
    v16_store(s->minus_m + block * LANES, v16_sub(v16_set1(0), m));
}

/* The first step of a segment: m. */
V_INLINE void open_segment(enum backend_kv_dtype dtype, bool masked, uint32_t width, const struct shape *shape,
                           struct amx_scratch *s, const struct operands *ops, const struct attention_state *state, float *scores,
                           uint32_t block, uint32_t first)
{
    if (dtype == KV_INT8)
        scale_scores(width, scores, ops);
    set_m(s, state, block, largest(width, masked, scores, shape->position[block], first));
}

/* One step of 64 keys from `first` for a block of rows; `opening` in the first of a segment, after open_segment. Whether a row's
 * m moved. */
V_INLINE bool softmax_64(enum backend_kv_dtype dtype, bool masked, uint32_t width, const struct shape *shape,
                         struct amx_scratch *s, const struct operands *ops, const struct attention_state *state, float *scores,
                         uint32_t block, uint32_t first, bool opening, struct fetch *fetch)
{
    __m512i position = shape->position[block];
    float *l = state->l + block * LANES, *m = state->m + block * LANES;
    if (opening) {
        v16_store(l, probabilities(dtype, masked, width, s, ops, scores, position, first, true, v16_load(m), fetch));
        return false;
    }
    if (dtype == KV_INT8)
        scale_scores(width, scores, ops);
    v16 shift = dtype == KV_INT8 ? v16_load(m) : v16_set1(0);
    v16 sum = probabilities(dtype, masked, width, s, ops, scores, position, first, dtype == KV_INT8, shift, fetch);
    v16 old = v16_load(l);
    __mmask16 over = _mm512_cmp_ps_mask(sum, v16_set1(MOST_SUM), _CMP_GT_OQ);
    if (over) { /* rows that are not over keep their m: less 0, times 1 */
        v16 more = _mm512_maskz_mov_ps(over, v16_sub(largest(width, masked, scores, position, first), shift)),
            f = power_of_2(v16_sub(v16_set1(0), more));
        set_m(s, state, block, v16_add(v16_load(m), more));
        sum = probabilities(dtype, masked, width, s, ops, scores, position, first, true, v16_add(shift, more), NULL);
        old = v16_mul(old, f);
        rescale(shape, state, block, f);
    }
    v16_store(l, v16_add(old, sum));
    return over != 0;
}

/* ---- values ---- */

#define VALUE_TILE(t)                                                                                                            \
    if (d + 16 * (t) < shape->head_dim) {                                                                                        \
        _tile_loadd(4, ops->v[0][half] + at + (t)*16 * VALUE_KEYS, AMX_ROW_BYTES);                                               \
        _tile_dpbf16ps(t, 4, 6);                                                                                                 \
        if (dtype == KV_F16) {                                                                                                   \
            _tile_dpbf16ps(t, 4, 7);                                                                                             \
            _tile_loadd(5, ops->v[1][half] + at + (t)*16 * VALUE_KEYS, AMX_ROW_BYTES);                                           \
            _tile_dpbf16ps(t, 5, 6);                                                                                             \
        }                                                                                                                        \
    }
#define VALUE_BEGIN(t)                                                                                                           \
    if (opening)                                                                                                                 \
        _tile_zero(t);                                                                                                           \
    else if (d + 16 * (t) < shape->head_dim)                                                                                     \
    _tile_loadd(t, o + (d + 16 * (t)) * LANES, AMX_ROW_BYTES)
#define VALUE_END(t)                                                                                                             \
    if (d + 16 * (t) < shape->head_dim)                                                                                          \
    _tile_stored(t, o + (d + 16 * (t)) * LANES, AMX_ROW_BYTES)

/* o[dims][16 rows] += v p, 64 dimensions at a time. */
V_INLINE void add_values(enum backend_kv_dtype dtype, uint32_t width, const struct shape *shape, struct amx_scratch *s,
                         const struct operands *ops, const struct attention_state *state, uint32_t block, bool opening)
{
    float *o = state->o + (size_t)block * shape->head_dim * LANES;
    for (uint32_t d = 0; d < shape->head_dim; d += 64) {
        size_t at = (size_t)d * VALUE_KEYS;
        VALUE_BEGIN(0);
        VALUE_BEGIN(1);
        VALUE_BEGIN(2);
        VALUE_BEGIN(3);
        for (uint32_t half = 0; half < KEY_TILE / VALUE_KEYS; half++) {
            _tile_loadd(6, s->p[0] + half * VALUE_KEYS / 2 * width, width * sizeof *s->p[0]);
            if (dtype == KV_F16)
                _tile_loadd(7, s->p[1] + half * VALUE_KEYS / 2 * width, width * sizeof *s->p[1]);
            VALUE_TILE(0)
            VALUE_TILE(1)
            VALUE_TILE(2)
            VALUE_TILE(3)
        }
        VALUE_END(0);
        VALUE_END(1);
        VALUE_END(2);
        VALUE_END(3);
    }
}

/* ---- segments ---- */

/* Rows of `block` that end before the segment. */
static void leave_empty(const struct shape *shape, const struct attention_state *state, uint32_t block)
{
    for (uint32_t d = 0; d < shape->head_dim; d++)
        v16_store(state->o + ((size_t)block * shape->head_dim + d) * LANES, v16_set1(0));
    v16_store(state->l + block * LANES, v16_set1(0));
    v16_store(state->m + block * LANES, v16_set1(NOTHING_SEEN));
}

/* Scores of the next 16 rows are on their way in the tiles while the softmax of these 16 runs. */
V_INLINE void attend_keys(enum backend_kv_dtype dtype, const struct shape *shape, struct amx_scratch *s,
                          const struct operands *ops, const struct attention_state *state, uint32_t first, bool opening,
                          struct fetch *fetch)
{
    bool from_m = !opening && dtype != KV_INT8;
    uint32_t begin = 0;
    while (shape->high[begin] < first)
        begin++;
    score(dtype, LANES, shape, s, ops, begin, from_m, s->s[begin & 1]);
    for (uint32_t b = begin; b < shape->n_lane_blocks; b++) {
        float *scores = s->s[b & 1];
        bool masked = shape->low[b] < first + KEY_TILE - 1;
        if (b + 1 < shape->n_lane_blocks)
            score(dtype, LANES, shape, s, ops, b + 1, from_m, s->s[(b + 1) & 1]);
        if (opening)
            open_segment(dtype, masked, LANES, shape, s, ops, state, scores, b, first);
        if (masked)
            softmax_64(dtype, true, LANES, shape, s, ops, state, scores, b, first, opening, fetch);
        else
            softmax_64(dtype, false, LANES, shape, s, ops, state, scores, b, first, opening, fetch);
        add_values(dtype, LANES, shape, s, ops, state, b, opening);
    }
}

/* What to fetch: keys from `first`, after the last of them those of the next run. */
static struct key_pages pages_ahead(const struct attention_tile *tile, uint32_t first)
{
    struct key_pages none = {0};
    if (first <= tile->keys.end)
        return pages_of(tile->kv, &tile->keys, first);
    first -= tile->keys.end / KEY_TILE * KEY_TILE + KEY_TILE - tile->next.begin;
    return tile->next.blocks && first <= tile->next.end ? pages_of(tile->kv, &tile->next, first) : none;
}

V_INLINE void attend_blocks(enum backend_kv_dtype dtype, const struct attention_tile *tile, const struct shape *shape,
                            struct amx_scratch *s, uint32_t begin, uint32_t end, const struct attention_state *state)
{
    struct operands ops;
    uint32_t each = (4 + shape->n_lane_blocks - 1) / shape->n_lane_blocks;
    for (uint32_t b = 0; b < shape->n_lane_blocks && shape->high[b] < begin; b++)
        leave_empty(shape, state, b);
    for (uint32_t first = begin; first <= end; first += KEY_TILE) {
        struct key_pages pages = find_pages(tile, first);
        struct fetch fetch = {tile->kv, pages_ahead(tile, first + KEY_TILE), 0, each};
        prepare_keys(dtype, shape, s, &pages, &ops);
        prepare_values(dtype, tile->kv, s, &pages, &ops);
        attend_keys(dtype, shape, s, &ops, state, first, first == begin, &fetch);
    }
}

/* One block of rows. Here the scores of the next keys are on their way while the softmax of these runs, and the keys after them
 * on theirs from memory. If m moves, the scores that started from it are computed again. */
V_INLINE void attend_block(enum backend_kv_dtype dtype, uint32_t width, const struct attention_tile *tile,
                           const struct shape *shape, struct amx_scratch *s, uint32_t begin, uint32_t end,
                           const struct attention_state *state)
{
    struct operands ops, next_ops;
    struct key_pages pages = find_pages(tile, begin), next;
    prepare_keys(dtype, shape, s, &pages, &ops);
    score(dtype, width, shape, s, &ops, 0, false, s->s[0]);
    for (uint32_t first = begin, i = 0; first <= end; first += KEY_TILE, i++) {
        struct fetch fetch = {tile->kv, pages_ahead(tile, first + 2 * KEY_TILE), 0, 4};
        float *scores = s->s[i & 1], *next_scores = s->s[(i + 1) & 1];
        bool masked = shape->low[0] < first + KEY_TILE - 1, more = end - first >= KEY_TILE, opening = i == 0, moved;
        if (opening)
            open_segment(dtype, masked, width, shape, s, &ops, state, scores, 0, first);
        if (more) {
            next = find_pages(tile, first + KEY_TILE);
            prepare_keys(dtype, shape, s, &next, &next_ops);
            score(dtype, width, shape, s, &next_ops, 0, dtype != KV_INT8, next_scores);
        }
        prepare_values(dtype, tile->kv, s, &pages, &ops);
        if (masked)
            moved = softmax_64(dtype, true, width, shape, s, &ops, state, scores, 0, first, opening, &fetch);
        else
            moved = softmax_64(dtype, false, width, shape, s, &ops, state, scores, 0, first, opening, &fetch);
        if (moved && more && dtype != KV_INT8)
            score(dtype, width, shape, s, &next_ops, 0, true, next_scores);
        add_values(dtype, width, shape, s, &ops, state, 0, opening);
        if (more)
            pages = next, ops = next_ops;
    }
}

V_INLINE void attend_segment(enum backend_kv_dtype dtype, const struct attention_tile *tile, const struct shape *shape,
                             struct amx_scratch *s, uint32_t segment, const struct attention_state *state)
{
    uint32_t begin = segment * SEGMENT, end = tile->last < begin + SEGMENT - 1 ? tile->last : begin + SEGMENT - 1;
    if (shape->n_lane_blocks > 1)
        attend_blocks(dtype, tile, shape, s, begin, end, state);
    else if (shape->width == FEW)
        attend_block(dtype, FEW, tile, shape, s, begin, end, state);
    else if (shape->width == SOME)
        attend_block(dtype, SOME, tile, shape, s, begin, end, state);
    else
        attend_block(dtype, LANES, tile, shape, s, begin, end, state);
}

/* total = total and then state. A row that ends before the state's segment adds 0 to 1 times what it has. */
static void fold(const struct attention_tile *tile, const struct attention_state *total, const struct attention_state *state)
{
    uint32_t head_dim = tile->kv->head_dim;
    for (uint32_t i = 0; i < tile->n_rows; i += LANES) {
        v16 a = v16_load(total->m + i), b = v16_load(state->m + i), m = v16_max(a, b);
        v16 x = power_of_2(v16_sub(a, m)), y = power_of_2(v16_sub(b, m));
        float *o = total->o + (size_t)i * head_dim, *p = state->o + (size_t)i * head_dim;
        v16_store(total->m + i, m);
        v16_store(total->l + i, v16_fma(v16_load(total->l + i), x, v16_mul(v16_load(state->l + i), y)));
        for (uint32_t d = 0; d < head_dim; d++)
            v16_store(o + d * LANES, v16_fma(v16_load(o + d * LANES), x, v16_mul(v16_load(p + d * LANES), y)));
    }
}

static void finish(const struct attention_tile *tile, const struct attention_state *total)
{
    uint32_t head_dim = tile->kv->head_dim;
    for (uint32_t i = 0; i < tile->n_rows; i += LANES) {
        const float *o = total->o + (size_t)i * head_dim;
        v16 l = v16_load(total->l + i);
        for (uint32_t d = 0; d < head_dim; d += 16) {
            __m512i x[16];
            for (uint32_t j = 0; j < 16; j++)
                x[j] = _mm512_castps_si512(v16_div(v16_load(o + (d + j) * LANES), l));
            transpose_16(x);
            for (uint32_t r = 0; r < LANES && i + r < tile->n_rows; r++)
                _mm512_storeu_si512(tile->out[i + r] + d, x[r]);
        }
    }
}

/* Results below the smallest normal number become 0 while kernels run: exponentials need no bound then. */
enum { FLUSH_TO_ZERO = 0x8040 };

static void combine(const struct attention_tile *tile, const struct attention_state *states, uint32_t n)
{
    uint32_t control = _mm_getcsr();
    _mm_setcsr(control | FLUSH_TO_ZERO);
    for (uint32_t i = 1; i < n; i++)
        fold(tile, &states[0], &states[i]);
    finish(tile, &states[0]);
    _mm_setcsr(control);
}

static void fold_next(const struct attention_tile *tile, const struct attention_state *total, const struct attention_state *state)
{
    uint32_t control = _mm_getcsr();
    _mm_setcsr(control | FLUSH_TO_ZERO);
    fold(tile, total, state);
    _mm_setcsr(control);
}

static void take(const struct attention_tile *tile, const struct attention_state *to, const struct attention_state *from,
                 uint32_t first)
{
    uint32_t head_dim = tile->kv->head_dim;
    for (uint32_t i = 0; i < tile->n_rows; i++) {
        uint32_t row = first + i;
        float *o = to->o + (size_t)(i / LANES) * head_dim * LANES + i % LANES;
        const float *p = from->o + (size_t)(row / LANES) * head_dim * LANES + row % LANES;
        for (uint32_t d = 0; d < head_dim; d++)
            o[d * LANES] = p[d * LANES];
        to->l[i] = from->l[row];
        to->m[i] = from->m[row];
    }
}

/* Scaled queries in log2 units as pairs of dimensions [block][key_dim / 2][16 rows]. */
V_INLINE void prepare_queries(enum backend_kv_dtype dtype, const struct attention_tile *tile, const struct shape *shape,
                              struct amx_scratch *s)
{
    v16 scale = v16_set1(tile->scale * 0x1.715476p+0f);
    for (uint32_t b = 0; b < shape->n_lane_blocks; b++)
        for (uint32_t d = 0; d < shape->key_dim; d += 32) {
            size_t at = ((size_t)b * shape->key_dim + d) / 2 * LANES;
            __m512i high[16], low[16];
            for (uint32_t i = 0; i < LANES; i++) {
                uint32_t r = b * LANES + i;
                high[i] = low[i] = _mm512_setzero_si512();
                if (r >= tile->n_rows)
                    continue;
                v16 x = v16_mul(padded(tile->q[r], d, shape->head_dim), scale);
                v16 y = v16_mul(padded(tile->q[r], d + 16, shape->head_dim), scale), hx = truncated(x), hy = truncated(y);
                high[i] = dtype == KV_F16 ? bf16_32(hx, hy) : bf16_32(x, y);
                low[i] = bf16_32(v16_sub(x, hx), v16_sub(y, hy));
            }
            transpose_16(high);
            for (uint32_t i = 0; i < 16; i++)
                _mm512_store_si512(s->q[0] + at + i * LANES, high[i]);
            if (dtype != KV_F16)
                continue;
            transpose_16(low);
            for (uint32_t i = 0; i < 16; i++)
                _mm512_store_si512(s->q[1] + at + i * LANES, low[i]);
        }
}

static void describe_rows(const struct attention_tile *tile, struct shape *shape)
{
    uint32_t width = tile->n_rows <= FEW ? FEW : tile->n_rows <= SOME ? SOME : LANES;
    *shape = (struct shape){tile->kv->head_dim, tile->kv->key_dim, (tile->n_rows + LANES - 1) / LANES, width};
    for (uint32_t b = 0; b < shape->n_lane_blocks; b++) {
        uint32_t position[LANES];
        for (uint32_t i = 0; i < LANES; i++)
            position[i] = tile->position[b * LANES + i % width < tile->n_rows ? b * LANES + i % width : tile->n_rows - 1];
        shape->low[b] = position[0], shape->high[b] = position[LANES - 1];
        shape->position[b] = _mm512_loadu_si512(position);
    }
}

V_INLINE void attend(enum backend_kv_dtype dtype, const struct attention_tile *tile, struct attention_scratch *scratch,
                     const struct attention_state *partial)
{
    uint32_t control = _mm_getcsr();
    struct shape shape;
    describe_rows(tile, &shape);
    _mm_setcsr(control | FLUSH_TO_ZERO);
    prepare_queries(dtype, tile, &shape, &scratch->amx);
    amx_begin_columns(AMX_ROWS, AMX_ROW_BYTES, shape.width);
    if (partial) {
        for (uint32_t i = 0; i < tile->n_segments; i++)
            attend_segment(dtype, tile, &shape, &scratch->amx, tile->segment + i, &partial[i]);
        amx_end();
        _mm_setcsr(control);
        return;
    }
    struct attention_state total = attention_state_at(scratch->states[0], tile->n_rows, shape.head_dim);
    struct attention_state state = attention_state_at(scratch->states[1], tile->n_rows, shape.head_dim);
    for (uint32_t segment = 0; segment <= tile->last / SEGMENT; segment++) {
        attend_segment(dtype, tile, &shape, &scratch->amx, segment, segment ? &state : &total);
        if (segment)
            fold(tile, &total, &state);
    }
    amx_end();
    finish(tile, &total);
    _mm_setcsr(control);
}

#define ATTEND(name, dtype)                                                                                                      \
    static void name(const struct attention_tile *tile, struct attention_scratch *s, const struct attention_state *partial)      \
    {                                                                                                                            \
        attend(dtype, tile, s, partial);                                                                                         \
    }
ATTEND(attend_f16, KV_F16)
ATTEND(attend_bf16, KV_BF16)
ATTEND(attend_int8, KV_INT8)

void attention_amx(struct kernels *out)
{
    out->attention[KV_F16] =
        (struct attention_kernels){.attend = attend_f16, .combine = combine, .fold = fold_next, .take = take};
    out->attention[KV_BF16] =
        (struct attention_kernels){.attend = attend_bf16, .combine = combine, .fold = fold_next, .take = take};
    out->attention[KV_INT8] =
        (struct attention_kernels){.attend = attend_int8, .combine = combine, .fold = fold_next, .take = take};
    kv_store_amx(out->attention);
    out->attention_rows = ATTENTION_TILE;
    out->key_padding = 32;
    out->kv_auto = KV_BF16;
}
