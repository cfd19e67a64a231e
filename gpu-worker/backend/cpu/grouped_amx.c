/* Products with W8A8, BF16 and W4A16 panels (grouped_panels.h) on AMX.
 *
 * W8A8 and BF16 lie as tiles. A stretch of a panel's units stays in L1 while all rows of the pass meet it, two tiles of rows by
 * two halves at once; between stretches their sums wait in memory, exactly:
 *
 *   for each stretch, each 32 rows:  load or zero 4 tiles of sums;  for each unit: 2 + 2 loads, 4 products;  store or finish
 *
 * A BF16 sum adds units in their order at every number of rows (one row is a tile of one row), so its bits are those of every
 * number. They are not those of other instruction sets: rows are rounded to BF16, and a tile adds even and odd columns apart.
 *
 * W4A16 codes less their zeros are unpacked into signed bytes, a stretch of groups at a time. The sums of a group, of high and of
 * low bytes, are stored and scaled into f32 while the tiles of the next are worked on.
 */
#include "gpu-worker/backend/cpu/amx.h"
#include "gpu-worker/backend/cpu/grouped_panels.h"
#include "gpu-worker/backend/cpu/kernels.h"
#include "gpu-worker/backend/cpu/v16.h"

enum {
    BLOCK_ROWS = 512,          /* rows whose sums are kept from stretch to stretch */
    STRETCH = 16,              /* units: 32 KiB */
    TILE_SUMS = 256,           /* values of a tile */
    GROUP_STRETCH = 4,         /* groups of 128 columns, or twice as many of 64: 16 KiB of bytes */
    ONE_AHEAD = 2 * UNIT_HALF, /* bytes that one tile of rows asks for ahead; twice as many are slower */
    W8A8_AMX_ROWS = 8,         /* fewer are faster on VNNI */
    W4A16_AMX_ROWS = 8,
};

/* A product with a panel that lies as tiles. */
struct tiled {
    enum panel_kind kind;
    const uint8_t *head, *units, *rows; /* of the panel; the activations' first byte */
    size_t n_units;
    const float *row_scale;
    const struct panel_store *store;
    size_t column;
    uint32_t n_rows; /* of the whole input */
    uint32_t valid;  /* a bit for each output that exists */
};

static void store_row(const struct tiled *t, uint32_t row, uint32_t half, __m512i sums)
{
    __mmask16 valid = (__mmask16)(t->valid >> 16 * half);
    size_t column = t->column + 16 * half;
    float *out = t->store->out + row * t->store->ld + column;
    __m512 value = _mm512_castsi512_ps(sums);
    if (t->kind == PANEL_W8A8) {
        __m512i codes = _mm512_load_si512(t->head + 2 * LINE + half * LINE);
        __m512 scale = _mm512_mul_ps(_mm512_load_ps((const float *)t->head + 16 * half), _mm512_set1_ps(t->row_scale[row]));
        value = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_slli_epi32(codes, 7))), scale);
    }
    if (t->store->bias)
        value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(valid, t->store->bias + column));
    if (t->store->accumulate)
        value = _mm512_add_ps(_mm512_maskz_loadu_ps(valid, out), value);
    _mm512_mask_storeu_ps(out, valid, value);
}

/* sums: [2 halves][16][16] of the tile that begins at `row`. */
V_INLINE void finish_tile(const struct tiled *t, uint32_t row, uint32_t end, const int32_t *sums)
{
    for (uint32_t r = 0; r < AMX_ROWS && row + r < end; r++)
        for (uint32_t h = 0; h < 2; h++)
            store_row(t, row + r, h, _mm512_load_si512(sums + h * TILE_SUMS + r * 16));
}

/* Where unit u of the tile that begins at `row` lies. */
V_INLINE const uint8_t *rows_at(const struct tiled *t, uint32_t row, size_t u)
{
    uint32_t height = t->n_rows - row < AMX_ROWS ? t->n_rows - row : AMX_ROWS;
    return t->rows + (row * t->n_units + u * height) * UNIT_BYTES;
}

/* Tile numbers must be literals. */
#define MULTIPLY(kind, c, a, b)                                                                                                  \
    do {                                                                                                                         \
        if ((kind) == PANEL_W8A8)                                                                                                \
            _tile_dpbusd(c, a, b);                                                                                               \
        else                                                                                                                     \
            _tile_dpbf16ps(c, a, b);                                                                                             \
    } while (0)

/* Into L1 what meets further tiles of rows soon; into L2 what streams through for one. */
V_INLINE void fetch_lines(const uint8_t *ahead, size_t lines, bool one)
{
    for (size_t l = 0; l < lines && !one; l++)
        _mm_prefetch((const char *)ahead + l * LINE, _MM_HINT_T0);
    for (size_t l = 0; l < 2 * UNIT_LINES && one; l++)
        _mm_prefetch((const char *)ahead + l * LINE, _MM_HINT_T1);
}

/* n units from unit u of the panel times the tile at `row`, and with `two` the next one: sums start from `carried` (u = 0: from
 * zero) and go there. ahead: what is asked for meanwhile, `lines` lines a unit. one: these are all rows. */
V_INLINE void tiled_units(enum panel_kind kind, bool two, const struct tiled *t, uint32_t row, size_t u, size_t n,
                          int32_t *carried, const uint8_t *ahead, size_t lines, bool one)
{
    const uint8_t *b = t->units + u * 2 * UNIT_HALF, *a0 = rows_at(t, row, u);
    const uint8_t *a1 = two ? rows_at(t, row + AMX_ROWS, u) : a0;
    size_t step0 = (size_t)(rows_at(t, row, 1) - rows_at(t, row, 0));
    size_t step1 = two ? (size_t)(rows_at(t, row + AMX_ROWS, 1) - rows_at(t, row + AMX_ROWS, 0)) : 0;
    if (u) {
        _tile_loadd(0, carried, LINE);
        _tile_loadd(1, carried + TILE_SUMS, LINE);
        if (two) {
            _tile_loadd(2, carried + 2 * TILE_SUMS, LINE);
            _tile_loadd(3, carried + 3 * TILE_SUMS, LINE);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (size_t i = 0; i < n; i++, b += 2 * UNIT_HALF, a0 += step0, a1 += step1, ahead += lines * LINE) {
        fetch_lines(ahead, lines, one);
        _tile_loadd(4, a0, UNIT_BYTES);
        _tile_loadd(6, b, LINE);
        MULTIPLY(kind, 0, 4, 6);
        _tile_loadd(7, b + UNIT_HALF, LINE);
        MULTIPLY(kind, 1, 4, 7);
        if (two) {
            _tile_loadd(5, a1, UNIT_BYTES);
            MULTIPLY(kind, 2, 5, 6);
            MULTIPLY(kind, 3, 5, 7);
        }
    }
    _tile_stored(0, carried, LINE);
    _tile_stored(1, carried + TILE_SUMS, LINE);
    if (two) {
        _tile_stored(2, carried + 2 * TILE_SUMS, LINE);
        _tile_stored(3, carried + 3 * TILE_SUMS, LINE);
    }
}

/* Rows first..end, at most BLOCK_ROWS, times the panel. */
V_INLINE void tiled_block(enum panel_kind kind, const struct tiled *t, uint32_t first, uint32_t end)
{
    _Alignas(64) int32_t carried[BLOCK_ROWS / AMX_ROWS][2 * TILE_SUMS];
    uint32_t pairs = (end - first + 2 * AMX_ROWS - 1) / (2 * AMX_ROWS);
    bool one = end - first <= AMX_ROWS;
    size_t stretch = one ? t->n_units : STRETCH; /* one tile of rows has no use for L1 */
    for (size_t u = 0; u < t->n_units; u += stretch) {
        size_t n = t->n_units - u < stretch ? t->n_units - u : stretch,
               lines = one ? 2 * UNIT_LINES : (2 * UNIT_LINES + pairs - 1) / pairs;
        const uint8_t *ahead = t->units + (one ? ONE_AHEAD : (u + n) * 2 * UNIT_HALF);
        for (uint32_t row = first; row < end; row += 2 * AMX_ROWS) {
            int32_t *sums = carried[(row - first) / AMX_ROWS];
            if (end - row > AMX_ROWS)
                tiled_units(kind, true, t, row, u, n, sums, ahead, lines, false);
            else
                tiled_units(kind, false, t, row, u, n, sums, ahead, lines, one);
            ahead += n * lines * LINE;
            if (u + n < t->n_units)
                continue;
            finish_tile(t, row, end, sums);
            if (end - row > AMX_ROWS)
                finish_tile(t, row + AMX_ROWS, end, sums + 2 * TILE_SUMS);
        }
    }
}

V_INLINE void tiled_panel(enum panel_kind kind, const struct panels *w, uint32_t p, const struct acts *a, uint32_t first,
                          uint32_t end, const struct panel_store *store)
{
    uint32_t n_valid = w->rows - p * PANEL_ROWS < PANEL_ROWS ? w->rows - p * PANEL_ROWS : PANEL_ROWS;
    bool w8a8 = kind == PANEL_W8A8;
    struct tiled t = {.kind = kind,
                      .head = w->data + (size_t)p * w->panel_bytes,
                      .rows = w8a8 ? a->rows8 : (const uint8_t *)a->rows16,
                      .n_units = w8a8 ? w8a8_units(w->cols) : bf16_units(w->cols),
                      .row_scale = a->row8_scale,
                      .store = store,
                      .column = (size_t)p * PANEL_ROWS,
                      .n_rows = a->rows,
                      .valid = ~0u >> (PANEL_ROWS - n_valid)};
    t.units = t.head + (w8a8 ? W8A8_HEAD : 0);
    amx_begin(end - first < AMX_ROWS ? end - first : AMX_ROWS, AMX_ROW_BYTES);
    for (; first < end; first += BLOCK_ROWS)
        tiled_block(kind, &t, first, end - first < BLOCK_ROWS ? end : first + BLOCK_ROWS);
    amx_end();
}

static void w8a8_amx(const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                     const struct panel_store *store)
{
    if (end - first < W8A8_AMX_ROWS)
        kernels_avx512.panel[PANEL_W8A8](w, p, a, first, end, store);
    else
        tiled_panel(PANEL_W8A8, w, p, a, first, end, store);
}

static void bf16_amx(const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                     const struct panel_store *store)
{
    tiled_panel(PANEL_BF16, w, p, a, first, end, store);
}

static void round_rows16(const struct acts *a, uint32_t first, uint32_t end)
{
    size_t units = bf16_units(a->cols);
    for (uint32_t row = first; row < end; row++) {
        const float *x = a->x + (size_t)row * a->cols;
        uint32_t tile = row / ACTS_TILE * ACTS_TILE, height = a->rows - tile < ACTS_TILE ? a->rows - tile : ACTS_TILE;
        uint16_t *out = a->rows16 + (tile * units + (row - tile)) * BF16_UNIT;
        for (size_t u = 0; u < units; u++, out += height * BF16_UNIT) {
            size_t n = a->cols - u * BF16_UNIT;
            __mmask32 valid = n >= BF16_UNIT ? ~0u : (1u << n) - 1;
            __m512 low = _mm512_maskz_loadu_ps((__mmask16)valid, x + u * BF16_UNIT);
            __m512 high = _mm512_maskz_loadu_ps((__mmask16)(valid >> 16), x + u * BF16_UNIT + 16);
            _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
}

/* ---- W4A16 ---- */

struct codes {
    _Alignas(64) int8_t b[GROUP_STRETCH * 4 * UNIT_HALF]; /* [group][half][unit of 64 columns][16 lines] */
    _Alignas(64) float scale[GROUP_STRETCH * 2][PANEL_ROWS];
    _Alignas(64) int32_t sums[2][2 * TILE_SUMS];
    _Alignas(64) float carried[BLOCK_ROWS / AMX_ROWS][2][TILE_SUMS];
};

/* Signed bytes of half h of 32 columns: a half of a tile, 8 lines. */
V_INLINE void unpack_half(const uint8_t *lines, __m512i zero, int8_t *to)
{
    __m512i low = _mm512_set1_epi8(15);
    V_UNROLL
    for (int g = 0; g < 4; g++) {
        __m512i packed = _mm512_load_si512(lines + g * LINE);
        _mm512_store_si512(to + g * LINE, _mm512_sub_epi8(_mm512_and_si512(packed, low), zero));
        packed = _mm512_and_si512(_mm512_srli_epi16(packed, 4), low);
        _mm512_store_si512(to + (4 + g) * LINE, _mm512_sub_epi8(packed, zero));
    }
}

/* The zero of each of 16 outputs in its four bytes. */
V_INLINE __m512i four_times(const uint8_t *zero)
{
    __m512i at = _mm512_set_epi32(0x0f0f0f0f, 0x0e0e0e0e, 0x0d0d0d0d, 0x0c0c0c0c, 0x0b0b0b0b, 0x0a0a0a0a, 0x09090909, 0x08080808,
                                  0x07070707, 0x06060606, 0x05050505, 0x04040404, 0x03030303, 0x02020202, 0x01010101, 0);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)zero)), at);
}

/* Tiles of half h of group g, units of 64 columns one after the other. */
V_INLINE int8_t *tiles_of(int8_t *b, uint32_t units, uint32_t i, uint32_t h)
{
    return b + (i * 2 + h) * (size_t)units * UNIT_HALF;
}

V_INLINE void unpack_groups(bool zeros, const struct panels *w, const uint8_t *panel, uint32_t first, uint32_t n, int8_t *b,
                            float (*scale)[PANEL_ROWS])
{
    uint32_t groups = w->cols / w->group, units = w->group / INT16_UNIT;
    const uint8_t *cell = panel + w4a16_head_bytes(groups, zeros) + first * w4a16_cell_bytes(w->group);
    for (uint32_t i = 0; i < n; i++, cell += w4a16_cell_bytes(w->group))
        for (uint32_t h = 0; h < 2; h++) {
            __m512i zero = zeros ? four_times(panel + (first + i) * PANEL_ROWS + 16 * h) : _mm512_set1_epi8(8);
            const uint8_t *lines = cell + LINE + h * 4 * LINE;
            v16_store(scale[i] + 16 * h, v16_from_f16((const uint16_t *)cell + 16 * h));
            for (uint32_t block = 0; block < 2 * units; block++)
                unpack_half(lines + block * 8 * LINE, zero, tiles_of(b, units, i, h) + block * 8 * LINE);
        }
}

/* A tile of rows: where its planes of a stretch begin. */
struct planes_at {
    const int8_t *high, *low;
    size_t step; /* of a unit */
};

/* Sums of a group, high bytes into tile c and low ones into d. */
#define GROUP_DOT(c, d, at, tiles, units)                                                                                        \
    do {                                                                                                                         \
        const int8_t *high_ = (at).high, *low_ = (at).low;                                                                       \
        _tile_zero(c);                                                                                                           \
        _tile_zero(d);                                                                                                           \
        for (uint32_t unit_ = 0; unit_ < (units); unit_++, high_ += (at).step, low_ += (at).step) {                              \
            _tile_loadd(6, (tiles) + unit_ * UNIT_HALF, LINE);                                                                   \
            _tile_loadd(4, high_, INT16_UNIT);                                                                                   \
            _tile_dpbssd(c, 4, 6);                                                                                               \
            _tile_loadd(5, low_, INT16_UNIT);                                                                                    \
            _tile_dpbssd(d, 5, 6);                                                                                               \
        }                                                                                                                        \
        (at).high = high_;                                                                                                       \
        (at).low = low_;                                                                                                         \
    } while (0)

V_INLINE void scale_group(const int32_t *sums, const float *scale, v16 acc[AMX_ROWS])
{
    v16 s = v16_load(scale);
    _Pragma("GCC unroll 16") for (int r = 0; r < AMX_ROWS; r++)
    {
        __m512i high = _mm512_slli_epi32(_mm512_load_si512(sums + 16 * r), 8);
        acc[r] = v16_fma(_mm512_cvtepi32_ps(_mm512_add_epi32(high, _mm512_load_si512(sums + TILE_SUMS + 16 * r))), s, acc[r]);
    }
}

/* n groups of one half times a tile of rows; carried: its f32 sums. */
V_INLINE void multiply_groups(struct codes *codes, uint32_t units, uint32_t n, uint32_t h, struct planes_at at, bool begin,
                              float *carried)
{
    int8_t *b = codes->b;
    v16 acc[AMX_ROWS];
    _Pragma("GCC unroll 16") for (int r = 0; r < AMX_ROWS; r++) acc[r] = begin ? v16_set1(0) : v16_load(carried + 16 * r);
    GROUP_DOT(0, 1, at, tiles_of(b, units, 0, h), units);
    for (uint32_t i = 0; i < n; i += 2) {
        if (i + 1 < n)
            GROUP_DOT(2, 3, at, tiles_of(b, units, i + 1, h), units);
        _tile_stored(0, codes->sums[0], LINE);
        _tile_stored(1, codes->sums[0] + TILE_SUMS, LINE);
        scale_group(codes->sums[0], codes->scale[i] + 16 * h, acc);
        if (i + 1 == n)
            break;
        if (i + 2 < n)
            GROUP_DOT(0, 1, at, tiles_of(b, units, i + 2, h), units);
        _tile_stored(2, codes->sums[1], LINE);
        _tile_stored(3, codes->sums[1] + TILE_SUMS, LINE);
        scale_group(codes->sums[1], codes->scale[i + 1] + 16 * h, acc);
    }
    _Pragma("GCC unroll 16") for (int r = 0; r < AMX_ROWS; r++) v16_store(carried + 16 * r, acc[r]);
}

static void store_scaled(const struct tiled *t, uint32_t row, uint32_t end, const float (*sums)[TILE_SUMS])
{
    for (uint32_t r = 0; r < AMX_ROWS && row + r < end; r++)
        for (uint32_t h = 0; h < 2; h++) {
            v16 value = v16_mul(v16_load(sums[h] + 16 * r), v16_set1(t->row_scale[row + r] * 0x1p-16f));
            store_row(t, row + r, h, _mm512_castps_si512(value));
        }
}

V_INLINE void w4a16_block(bool zeros, const struct panels *w, const uint8_t *panel, const struct acts *a, const struct tiled *t,
                          uint32_t first, uint32_t end)
{
    struct codes codes;
    uint32_t groups = w->cols / w->group, units = w->group / INT16_UNIT;
    uint32_t stretch = GROUP_STRETCH * (units == 1 ? 2 : 1);
    size_t all_units = int16_units(w->cols);
    for (uint32_t g = 0; g < groups; g += stretch) {
        uint32_t n = groups - g < stretch ? groups - g : stretch;
        unpack_groups(zeros, w, panel, g, n, codes.b, codes.scale);
        for (uint32_t row = first; row < end; row += AMX_ROWS) {
            uint32_t height = a->rows - row < AMX_ROWS ? a->rows - row : AMX_ROWS;
            size_t from = (row * all_units + (size_t)g * units * height) * INT16_UNIT;
            struct planes_at at = {a->high_plane + from, a->low_plane + from, (size_t)height * INT16_UNIT};
            float(*carried)[TILE_SUMS] = codes.carried[(row - first) / AMX_ROWS];
            for (uint32_t h = 0; h < 2; h++)
                multiply_groups(&codes, units, n, h, at, g == 0, carried[h]);
            if (g + n == groups)
                store_scaled(t, row, end, carried);
        }
    }
}

V_INLINE void w4a16_amx(bool zeros, const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                        const struct panel_store *store)
{
    uint32_t n_valid = w->rows - p * PANEL_ROWS < PANEL_ROWS ? w->rows - p * PANEL_ROWS : PANEL_ROWS;
    const uint8_t *panel = w->data + (size_t)p * w->panel_bytes;
    struct tiled t = {.kind = w->kind,
                      .row_scale = a->row_scale,
                      .store = store,
                      .column = (size_t)p * PANEL_ROWS,
                      .valid = ~0u >> (PANEL_ROWS - n_valid)};
    if (a->rows < W4A16_AMX_ROWS) {
        kernels_avx512.panel[w->kind](w, p, a, first, end, store);
        return;
    }
    amx_begin(end - first < AMX_ROWS ? end - first : AMX_ROWS, AMX_ROW_BYTES);
    for (; first < end; first += BLOCK_ROWS)
        w4a16_block(zeros, w, panel, a, &t, first, end - first < BLOCK_ROWS ? end : first + BLOCK_ROWS);
    amx_end();
}

static void w4a16_plain_amx(const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                            const struct panel_store *store)
{
    w4a16_amx(false, w, p, a, first, end, store);
}

static void w4a16_zeros_amx(const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                            const struct panel_store *store)
{
    w4a16_amx(true, w, p, a, first, end, store);
}

void grouped_amx(struct kernels *out)
{
    out->round_rows16 = round_rows16;
    out->panel[PANEL_BF16] = bf16_amx;
    out->panel[PANEL_W8A8] = w8a8_amx;
    out->panel[PANEL_W4A16] = w4a16_plain_amx;
    out->panel[PANEL_W4A16_ZEROS] = w4a16_zeros_amx;
    if (out->int16_sums_below < W4A16_AMX_ROWS)
        out->int16_sums_below = W4A16_AMX_ROWS;
}
