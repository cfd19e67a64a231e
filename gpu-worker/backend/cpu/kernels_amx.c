/* Products of many rows with a panel on AMX: the integer sums of a group of columns for 16 rows x 16 outputs are one TDPBSSD, and
 * what follows is the arithmetic of kernels.inc.h in the same order, so the bits are those of every other instruction set.
 *
 *   panel --unpack--> signed bytes [group][half][8 lines][64], scales f32     a stretch of columns at a time
 *   for each tile of 16 rows and half:  sums += TDPBSSD,  acc = fma(sum, d_w * d_x, acc) ...
 *
 * Some tiles of rows alone unpack and multiply at the same time ("few rows" below). Fewer rows go to the kernels of AVX-512.
 */
#include "gpu-worker/backend/cpu/amx.h"
#include "gpu-worker/backend/cpu/kernels.h"
#include "gpu-worker/backend/cpu/v16.h"

enum {
    LEAST_REST = 5,   /* rows of the last tile, where the panel is already unpacked: fewer are faster on VNNI */
    SHORT_TILE = 8,   /* rows; a tile of so few takes half the time of a whole one */
    BLOCK_ROWS = 512, /* rows whose sums are kept while a stretch is unpacked */
    STRETCH = 48,     /* groups */
    AHEAD_TILES = 4,  /* of rows; most that share asking for weights */
    GROUP_BYTES = 2 * 8 * LINE
};

/* A stretch of one panel. Scales of a group that has two (QUANT_SUPER_16) lie one after the other. */
struct stretch {
    _Alignas(64) int8_t b[STRETCH * GROUP_BYTES];
    _Alignas(64) float d[2 * STRETCH][PANEL_ROWS];
    _Alignas(64) float m[STRETCH][PANEL_ROWS];
    _Alignas(64) int32_t sums[4][AMX_ROWS * 16];
};

/* Of the i-th group of d and m; QUANT_SUPER_16 has two d a group and no m. */
V_INLINE void unpack_scales(float (*d)[PANEL_ROWS], float (*m)[PANEL_ROWS], uint32_t i, enum quant_scales scales,
                            const uint8_t *cell, const uint8_t *super)
{
    for (uint32_t h = 0; h < 2; h++) {
        const uint16_t *file = (const uint16_t *)(scales >= QUANT_SUPER_MIN ? super : cell) + 16 * h;
        v16 scale = v16_from_f16(file);
        if (scales == QUANT_SUPER_16) {
            v16_store(d[2 * i] + 16 * h, v16_mul(scale, v16_from_i8((const int8_t *)cell + 16 * h)));
            v16_store(d[2 * i + 1] + 16 * h, v16_mul(scale, v16_from_i8((const int8_t *)cell + PANEL_ROWS + 16 * h)));
            continue;
        }
        if (scales == QUANT_SUPER_MIN) {
            v16 minimum = v16_mul(v16_from_f16(file + 32), v16_from_u8(cell + PANEL_ROWS + 16 * h));
            scale = v16_mul(scale, v16_from_u8(cell + 16 * h));
            v16_store(m[i] + 16 * h, v16_sub(v16_set1(0), minimum));
        }
        if (scales == QUANT_SCALE_MIN)
            v16_store(m[i] + 16 * h, v16_from_f16(file + 32));
        v16_store(d[i] + 16 * h, scale);
    }
}

/* A line of codes less their offset. Of codes of 5 and 6 bits the offset is that of the bits above the fourth, set beside it. */
V_INLINE u8x64 signed_line(const uint8_t *half, uint32_t bits, bool offset, int g)
{
    if (!offset || bits == 4 || bits == 8)
        return _mm512_sub_epi8(cell_line(half, bits, g), _mm512_set1_epi8((char)(offset ? 1 << (bits - 1) : 0)));
    u8x64 packed = u8x64_load(half + g % 4 * LINE), least = _mm512_set1_epi8((char)(256 - (1 << (bits - 1))));
    packed = g < 4 ? packed : _mm512_srli_epi16(packed, 4);
    packed = _mm512_ternarylogic_epi32(packed, _mm512_set1_epi8(15), least, 0xea); /* packed & 15 | least */
    packed = u8x64_add_bits(packed, half + 4 * LINE + g * 8, 16);
    return bits == 6 ? u8x64_add_bits(packed, half + 5 * LINE + g * 8, 32) : packed;
}

V_INLINE void unpack_stretch(struct stretch *s, uint32_t bits, enum quant_scales scales, const uint8_t *panel, size_t first,
                             uint32_t n)
{
    bool offset = scales == QUANT_SCALE || scales == QUANT_SUPER_16;
    for (uint32_t i = 0; i < n; i++) {
        size_t b = first + i;
        const uint8_t *cell = panel + panel_cell_offset(bits, scales, b);
        const uint8_t *super = panel + panel_cell_offset(bits, scales, b & ~(size_t)7) - panel_super_bytes(scales);
        const uint8_t *codes = cell + panel_head_bytes(scales);
        unpack_scales(s->d, s->m, i, scales, cell, super);
        for (uint32_t h = 0; h < 2; h++)
            for (int g = 0; g < 8; g++) {
                u8x64 line = signed_line(codes + h * panel_half_bytes(bits), bits, offset, g);
                _mm512_store_si512(s->b + i * GROUP_BYTES + (h * 8 + (uint32_t)g) * LINE, line);
            }
    }
}

/* What 16 rows x 16 outputs need of a stretch: n units of 32 columns, or of 16 where a group has two scales. */
struct unit_run {
    enum quant_scales scales;
    uint32_t n, per_group, rows; /* rows: the tile's stride in d and s */
    const int8_t *a, *b;
    size_t a_step;        /* of a group */
    const float *w, *m;   /* [.][PANEL_ROWS] */
    const float *d, *s;   /* [group][rows] */
    const uint8_t *ahead; /* what the next stretch will unpack: `lines` of it are asked for with each unit */
    uint32_t lines;
};

V_INLINE const int8_t *unit_a(const struct unit_run *run, uint32_t u)
{
    return run->per_group == 1 ? run->a + u * run->a_step : run->a + u / 2 * run->a_step + u % 2 * 16;
}

V_INLINE const int8_t *unit_b(const struct unit_run *run, uint32_t u)
{
    return run->per_group == 1 ? run->b + u * GROUP_BYTES : run->b + u / 2 * GROUP_BYTES + u % 2 * 4 * LINE;
}

V_INLINE void scale_unit(const struct unit_run *run, int height, const int32_t *sums, uint32_t u, v16 acc[AMX_ROWS])
{
    bool minimum = run->scales == QUANT_SCALE_MIN || run->scales == QUANT_SUPER_MIN;
    v16 w = v16_load(run->w + (size_t)u * PANEL_ROWS), m = minimum ? v16_load(run->m + (size_t)u * PANEL_ROWS) : w;
    const float *d = run->d + u / run->per_group * run->rows, *s = run->s + u / run->per_group * run->rows;
    _Pragma("GCC unroll 16") for (int r = 0; r < height; r++)
    {
        v16 sum = v16_from_i32(_mm512_load_si512(sums + 16 * r));
        acc[r] = v16_fma(sum, v16_mul(w, v16_set1(d[r])), acc[r]);
        if (minimum)
            acc[r] = v16_fma(m, v16_set1(s[r]), acc[r]);
    }
}

V_INLINE void ask_ahead(const struct unit_run *run, uint32_t u)
{
    for (uint32_t i = u * run->lines; i < (u + 4) * run->lines; i++)
        _mm_prefetch((const char *)run->ahead + (size_t)i * LINE, _MM_HINT_T1);
}

/* Tile numbers must be literals. */
#define DOT(t, ta, tb, u)                                                                                                        \
    do {                                                                                                                         \
        _tile_zero(t);                                                                                                           \
        _tile_loadd(ta, unit_a(run, u), QUANT_GROUP);                                                                            \
        _tile_loadd(tb, unit_b(run, u), LINE);                                                                                   \
        _tile_dpbssd(t, ta, tb);                                                                                                 \
    } while (0)
#define PUT(t) _tile_stored(t, sums[t], LINE)
/* Unit u is scaled while u + 1 is stored and u + 3 is multiplied. */
#define STEP(k, scaled, stored, t, ta, tb)                                                                                       \
    do {                                                                                                                         \
        PUT(stored);                                                                                                             \
        DOT(t, ta, tb, u + (k) + 3);                                                                                             \
        scale_unit(run, height, sums[scaled], u + (k), acc);                                                                     \
    } while (0)
#define LAST(k, scaled, stored, t, ta, tb)                                                                                       \
    do {                                                                                                                         \
        if (u + (k) < run->n) {                                                                                                  \
            if (u + (k) + 1 < run->n)                                                                                            \
                PUT(stored);                                                                                                     \
            if (u + (k) + 3 < run->n)                                                                                            \
                DOT(t, ta, tb, u + (k) + 3);                                                                                     \
            scale_unit(run, height, sums[scaled], u + (k), acc);                                                                 \
        }                                                                                                                        \
    } while (0)

V_INLINE void multiply_units(const struct unit_run *run, int height, int32_t sums[4][AMX_ROWS * 16], v16 acc[AMX_ROWS])
{
    uint32_t u = 0;
    DOT(0, 4, 6, 0);
    if (run->n > 1)
        DOT(1, 5, 7, 1);
    PUT(0);
    if (run->n > 2)
        DOT(2, 4, 6, 2);
    for (; u + 7 <= run->n; u += 4) {
        ask_ahead(run, u);
        STEP(0, 0, 1, 3, 5, 7);
        STEP(1, 1, 2, 0, 4, 6);
        STEP(2, 2, 3, 1, 5, 7);
        STEP(3, 3, 0, 2, 4, 6);
    }
    ask_ahead(run, u);
    LAST(0, 0, 1, 3, 5, 7);
    LAST(1, 1, 2, 0, 4, 6);
    LAST(2, 2, 3, 1, 5, 7);
    LAST(3, 3, 0, 2, 4, 6);
    LAST(4, 0, 1, 3, 5, 7);
    LAST(5, 1, 2, 0, 4, 6);
}

/* The bytes that follow a stretch. The first tiles of rows share asking for them, [tile][half][unit][lines]. */
struct ahead {
    const uint8_t *from;
    uint32_t tiles, lines;
};

V_INLINE struct ahead ahead_of(uint32_t bits, enum quant_scales scales, const uint8_t *after, uint32_t tiles)
{
    uint32_t cell = (uint32_t)((panel_cell_bytes(bits, scales) + panel_super_bytes(scales) / QUANT_SUPER_GROUPS) / LINE + 1);
    tiles = tiles < AHEAD_TILES ? tiles : AHEAD_TILES;
    uint32_t pieces = tiles * 2 * (scales == QUANT_SUPER_16 ? 2 : 1);
    return (struct ahead){after, tiles, (cell + pieces - 1) / pieces};
}

/* One tile of rows (the tiles are configured for `height`, a constant), the i-th of its block, times a stretch; `carried` holds
 * the f32 sums from stretch to stretch, [half][16 rows][16]. */
V_INLINE void tile_stretch(struct stretch *s, enum quant_scales scales, int height, const struct acts *a, uint32_t tile,
                           uint32_t i, size_t first, uint32_t n, struct ahead ahead, float *carried)
{
    uint32_t rows = a->rows - tile < ACTS_TILE ? a->rows - tile : ACTS_TILE, per_group = scales == QUANT_SUPER_16 ? 2 : 1;
    size_t at = tile * (size_t)(a->cols / QUANT_GROUP) + first * rows;
    struct unit_run run = {.scales = scales,
                           .n = n * per_group,
                           .per_group = per_group,
                           .rows = rows,
                           .a = a->q + at * QUANT_GROUP,
                           .a_step = (size_t)rows * QUANT_GROUP,
                           .d = a->d + at,
                           .s = a->s + at};
    for (uint32_t h = 0; h < 2; h++, carried += AMX_ROWS * 16) {
        v16 acc[AMX_ROWS];
        run.b = s->b + h * 8 * LINE;
        run.w = s->d[0] + 16 * h;
        run.m = s->m[0] + 16 * h;
        run.lines = i < ahead.tiles ? ahead.lines : 0;
        run.ahead = ahead.from + (size_t)(2 * i + h) * run.n * ahead.lines * LINE;
        _Pragma("GCC unroll 16") for (int r = 0; r < height; r++) acc[r] = first ? v16_load(carried + 16 * r) : v16_set1(0);
        multiply_units(&run, height, s->sums, acc);
        _Pragma("GCC unroll 16") for (int r = 0; r < height; r++) v16_store(carried + 16 * r, acc[r]);
    }
}

static void store_tile(const struct panel_store *store, uint32_t row, uint32_t rows, uint32_t p, uint32_t n_valid,
                       const float *carried)
{
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t h = 0; h < 2; h++) {
            int n = (int)n_valid - (int)(16 * h);
            size_t column = (size_t)p * PANEL_ROWS + 16 * h;
            float *out = store->out + (row + r) * store->ld + column;
            if (n <= 0)
                break;
            v16 value = v16_load(carried + (h * AMX_ROWS + r) * 16);
            if (store->bias)
                value = v16_add(value, v16_load_n(store->bias + column, n));
            if (store->accumulate)
                value = v16_add(v16_load_n(out, n), value);
            v16_store_n(out, value, n);
        }
}

/* Rows first..end: whole tiles of activations, of which the last may be short. Its missing rows are read from what follows (the
 * activations have room for that) and not stored. */
V_INLINE void amx_block(uint32_t bits, enum quant_scales scales, const struct panels *w, uint32_t p, const struct acts *a,
                        uint32_t first, uint32_t end, const struct panel_store *store)
{
    struct stretch s;
    _Alignas(64) float carried[BLOCK_ROWS * PANEL_ROWS];
    const uint8_t *panel = w->data + (size_t)p * w->panel_bytes;
    size_t groups = w->cols / QUANT_GROUP;
    uint32_t rest = (end - first) % ACTS_TILE, whole = rest && rest <= SHORT_TILE ? end - rest : end;
    uint32_t k_bytes = scales == QUANT_SUPER_16 ? 16 : 32;
    for (size_t g = 0; g < groups; g += STRETCH) {
        uint32_t n = (uint32_t)(groups - g < STRETCH ? groups - g : STRETCH);
        const uint8_t *after = g + n < groups ? panel + panel_cell_offset(bits, scales, g + n) : panel + w->panel_bytes;
        struct ahead ahead = ahead_of(bits, scales, after, (end - first + ACTS_TILE - 1) / ACTS_TILE);
        unpack_stretch(&s, bits, scales, panel, g, n);
        if (first < whole)
            amx_begin(AMX_ROWS, k_bytes);
        for (uint32_t tile = first; tile < whole; tile += ACTS_TILE)
            tile_stretch(&s, scales, AMX_ROWS, a, tile, (tile - first) / ACTS_TILE, g, n, ahead,
                         carried + (size_t)(tile - first) * PANEL_ROWS);
        if (whole < end) {
            amx_begin(SHORT_TILE, k_bytes);
            tile_stretch(&s, scales, SHORT_TILE, a, whole, (whole - first) / ACTS_TILE, g, n, ahead,
                         carried + (size_t)(whole - first) * PANEL_ROWS);
        }
    }
    for (uint32_t tile = first; tile < end; tile += ACTS_TILE)
        store_tile(store, tile, end - tile < ACTS_TILE ? end - tile : ACTS_TILE, p, w->rows - p * PANEL_ROWS,
                   carried + (size_t)(tile - first) * PANEL_ROWS);
}

/* ---- few rows ----
 *
 * Where few tiles of rows share a panel, unpacking it is a large part of the work, and a stretch of it beside their activations
 * is more than L1 holds. So chunks of CHUNK groups go by in a ring, and beside the products of one the next but one is unpacked:
 * that takes integer instructions, for which a core has room beside TDPs and their sums' float instructions.
 *
 *   for each chunk:  for each part (a tile of rows and a half):  CHUNK times TDP, fma;  a share of a later chunk's unpacking
 *
 * Groups go through the tiles without a gap: those of a part begin while the part before is scaled.
 */

enum {
    CHUNK = 4,       /* groups */
    CHUNK_RING = 3,  /* chunks */
    CHUNK_LEAD = 2,  /* chunks; weights read back right after they were written would wait for the stores */
    FEW_TILES = 4,   /* most */
    FEW_AHEAD = 8192 /* bytes of the panel asked for beyond what is unpacked */
};

struct chunk {
    int8_t b[CHUNK][2][8 * LINE];
    float d[CHUNK][PANEL_ROWS], m[CHUNK][PANEL_ROWS];
};

struct few_rows {
    _Alignas(64) struct chunk ring[CHUNK_RING];
    _Alignas(64) int32_t sums[4][AMX_ROWS * 16];
    _Alignas(64) float carried[FEW_TILES][2][AMX_ROWS * 16];
};

/* Where a chunk is unpacked from. */
struct chunk_source {
    const uint8_t *panel;
    size_t groups, first; /* first: the chunk's first group */
};

/* A quarter, a constant, of group i of a chunk: 4 lines. */
V_INLINE void unpack_quarter(struct chunk *c, uint32_t bits, enum quant_scales scales, const struct chunk_source *from,
                             uint32_t i, int quarter)
{
    size_t b = from->first + i;
    if (b >= from->groups)
        return;
    const uint8_t *cell = from->panel + panel_cell_offset(bits, scales, b);
    const uint8_t *super = from->panel + panel_cell_offset(bits, scales, b & ~(size_t)7) - panel_super_bytes(scales);
    const uint8_t *codes = cell + panel_head_bytes(scales) + (size_t)(quarter / 2) * panel_half_bytes(bits);
    if (quarter == 0)
        unpack_scales(c->d, c->m, i, scales, cell, super);
    V_UNROLL
    for (int g = quarter % 2 * 4; g < quarter % 2 * 4 + 4; g++)
        _mm512_store_si512(c->b[i][quarter / 2] + g * LINE, signed_line(codes, bits, scales == QUANT_SCALE, g));
}

/* Part `part` of chunk k: half part % 2 and the part / 2-th tile from row `first` on. */
V_INLINE struct unit_run part_of_chunk(struct few_rows *few, enum quant_scales scales, const struct acts *a, uint32_t first,
                                       size_t k, uint32_t part)
{
    uint32_t tile = first + part / 2 * AMX_ROWS, h = part % 2, rows = a->rows - tile < ACTS_TILE ? a->rows - tile : ACTS_TILE;
    size_t at = tile * (size_t)(a->cols / QUANT_GROUP) + k * CHUNK * rows;
    struct chunk *chunk = &few->ring[k % CHUNK_RING];
    return (struct unit_run){.scales = scales,
                             .n = CHUNK,
                             .per_group = 1,
                             .rows = rows,
                             .a = a->q + at * QUANT_GROUP,
                             .b = chunk->b[0][h],
                             .a_step = (size_t)rows * QUANT_GROUP,
                             .w = chunk->d[0] + 16 * h,
                             .m = chunk->m[0] + 16 * h,
                             .d = a->d + at,
                             .s = a->s + at};
}

/* Group u of a part is scaled while the next is stored and `next_u` of `run`, three further, multiplied. */
#define FEW_STEP(u, stored, t, ta, tb, next_u)                                                                                   \
    do {                                                                                                                         \
        _tile_stored(stored, few.sums[stored], LINE);                                                                            \
        DOT(t, ta, tb, next_u);                                                                                                  \
        for (size_t line = 0; line < lines; line++, ahead += LINE)                                                               \
            _mm_prefetch((const char *)ahead, _MM_HINT_T1);                                                                      \
        for (uint32_t i = part * share; i < (part + 1) * share && i < CHUNK; i++)                                                \
            unpack_quarter(&few.ring[(k + CHUNK_LEAD) % CHUNK_RING], bits, scales, &from, i, u);                                 \
        if ((u) < valid)                                                                                                         \
            scale_unit(&now, height, few.sums[u], u, acc);                                                                       \
    } while (0)

/* Rows first..end, at most FEW_TILES tiles of `height` rows, a constant; of fewer than AMX_ROWS there is one. Rows that a last
 * tile has not are multiplied as in amx_block. */
V_INLINE void amx_few(uint32_t bits, enum quant_scales scales, int height, const struct panels *w, uint32_t p,
                      const struct acts *a, uint32_t first, uint32_t end, const struct panel_store *store)
{
    struct few_rows few;
    uint32_t parts = 2 * ((end - first + AMX_ROWS - 1) / AMX_ROWS), share = parts < CHUNK ? CHUNK / parts : 1;
    struct chunk_source from = {.panel = w->data + (size_t)p * w->panel_bytes, .groups = w->cols / QUANT_GROUP};
    size_t chunks = (from.groups + CHUNK - 1) / CHUNK, steps = chunks * parts * CHUNK;
    size_t lines = (w->panel_bytes / LINE + steps - 1) / steps;
    const uint8_t *ahead = from.panel + CHUNK_LEAD * CHUNK * panel_cell_bytes(bits, scales) + FEW_AHEAD;
    for (size_t k = 0; k < CHUNK_LEAD; k++, from.first += CHUNK)
        for (uint32_t i = 0; i < CHUNK; i++) {
            unpack_quarter(&few.ring[k], bits, scales, &from, i, 0);
            unpack_quarter(&few.ring[k], bits, scales, &from, i, 1);
            unpack_quarter(&few.ring[k], bits, scales, &from, i, 2);
            unpack_quarter(&few.ring[k], bits, scales, &from, i, 3);
        }
    amx_begin((uint32_t)height, QUANT_GROUP);
    struct unit_run now = part_of_chunk(&few, scales, a, first, 0, 0), next, *run = &now;
    DOT(0, 4, 6, 0);
    DOT(1, 5, 7, 1);
    _tile_stored(0, few.sums[0], LINE);
    DOT(2, 4, 6, 2);
    for (size_t k = 0; k < chunks; k++, from.first += CHUNK) {
        size_t left = from.groups - k * CHUNK, valid = left < CHUNK ? left : CHUNK;
        for (uint32_t part = 0; part < parts; part++, now = next) {
            float *carried = few.carried[part / 2][part % 2];
            bool last = part + 1 == parts;
            v16 acc[AMX_ROWS];
            next = part_of_chunk(&few, scales, a, first, last && k + 1 < chunks ? k + 1 : k, last ? 0 : part + 1);
            _Pragma("GCC unroll 16") for (int r = 0; r < height; r++) acc[r] = k ? v16_load(carried + 16 * r) : v16_set1(0);
            run = &now;
            FEW_STEP(0, 1, 3, 5, 7, 3);
            run = &next;
            FEW_STEP(1, 2, 0, 4, 6, 0);
            FEW_STEP(2, 3, 1, 5, 7, 1);
            FEW_STEP(3, 0, 2, 4, 6, 2);
            _Pragma("GCC unroll 16") for (int r = 0; r < height; r++) v16_store(carried + 16 * r, acc[r]);
        }
    }
    for (uint32_t tile = first; tile < end; tile += ACTS_TILE)
        store_tile(store, tile, end - tile < ACTS_TILE ? end - tile : ACTS_TILE, p, w->rows - p * PANEL_ROWS,
                   few.carried[(tile - first) / ACTS_TILE][0]);
}

/* least: fewer rows are faster on VNNI. */
V_INLINE void amx_panel(enum panel_kind kind, uint32_t bits, enum quant_scales scales, uint32_t least, const struct panels *w,
                        uint32_t p, const struct acts *a, uint32_t first, uint32_t end, const struct panel_store *store)
{
    uint32_t rest = (end - first) % ACTS_TILE, stop = rest < LEAST_REST ? end - rest : end;
    if (end - first >= least) {
        if (scales != QUANT_SUPER_16 && stop - first <= FEW_TILES * AMX_ROWS) {
            if (stop - first <= SHORT_TILE)
                amx_few(bits, scales, SHORT_TILE, w, p, a, first, stop, store);
            else
                amx_few(bits, scales, AMX_ROWS, w, p, a, first, stop, store);
            first = stop;
        }
        for (; first < stop; first += BLOCK_ROWS)
            amx_block(bits, scales, w, p, a, first, stop - first < BLOCK_ROWS ? stop : first + BLOCK_ROWS, store);
        amx_end();
        first = stop;
    }
    if (first < end)
        kernels_avx512.panel[kind](w, p, a, first, end, store);
}

#define AMX_PANEL(name, kind, bits, scales, least)                                                                               \
    static void name(const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,                     \
                     const struct panel_store *store)                                                                            \
    {                                                                                                                            \
        amx_panel(kind, bits, scales, least, w, p, a, first, end, store);                                                        \
    }
AMX_PANEL(panel_scale_4, PANEL_SCALE_4, 4, QUANT_SCALE, 7)
AMX_PANEL(panel_scale_5, PANEL_SCALE_5, 5, QUANT_SCALE, 7)
AMX_PANEL(panel_scale_8, PANEL_SCALE_8, 8, QUANT_SCALE, 7)
AMX_PANEL(panel_min_4, PANEL_MIN_4, 4, QUANT_SCALE_MIN, 7)
AMX_PANEL(panel_min_5, PANEL_MIN_5, 5, QUANT_SCALE_MIN, 7)
AMX_PANEL(panel_super_min_4, PANEL_SUPER_MIN_4, 4, QUANT_SUPER_MIN, 7)
AMX_PANEL(panel_super_min_5, PANEL_SUPER_MIN_5, 5, QUANT_SUPER_MIN, 7)
AMX_PANEL(panel_super16_6, PANEL_SUPER16_6, 6, QUANT_SUPER_16, 13)

void kernels_amx(struct kernels *out)
{
    *out = kernels_avx512;
    out->name = "amx";
    attention_amx(out);
    out->panel[PANEL_SCALE_4] = panel_scale_4;
    out->panel[PANEL_SCALE_5] = panel_scale_5;
    out->panel[PANEL_SCALE_8] = panel_scale_8;
    out->panel[PANEL_MIN_4] = panel_min_4;
    out->panel[PANEL_MIN_5] = panel_min_5;
    out->panel[PANEL_SUPER_MIN_4] = panel_super_min_4;
    out->panel[PANEL_SUPER_MIN_5] = panel_super_min_5;
    out->panel[PANEL_SUPER16_6] = panel_super16_6;
    int16_amx(out);
    grouped_amx(out);
}
