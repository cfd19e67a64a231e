/* Paged attention. Keys and values are read through the block table; scores are in log2 units.
 *
 * Sequences with one row (decode): attention_decode_kernel, its keys cut into splits of split_keys, whose parts
 * attention_combine_kernel puts together. A token's key or value takes LANES neighbouring lanes with 8 values each; each such
 * lane group walks every (32 / LANES x warps)-th token, or pair of tokens where values have 8 bits, with a softmax state of its
 * own, all are merged at the end. Where every sequence of a step decodes, the kernel also rotates q and k and appends the newest
 * token: each block that attends to that token computes its key and value itself, the one with the kv head's first query heads
 * stores them.
 *
 * Sequences with more rows, and all in deterministic mode: attention_tile_kernel, after FlashAttention-2 (Dao, 2023), on tensor
 * cores. A tile is 64 (row, head of the group) pairs of one kv head, row by row, so that keys are read once for the group; keys
 * come in tiles at fixed positions, so the result of a row does not depend on its company. Queries and probabilities are rounded
 * to bf16.
 *
 * In a layer with a window a row sees its last `window` positions: splits begin at the first of them, tiles of keys before the
 * first that any row of the tile sees are left out.
 */
#pragma once
#include "gpu-worker/backend/cuda/rope.cuh"

static constexpr int DECODE_WARPS = 4, TILE_ROWS = 64, TILE_THREADS = 128;
#define NO_SCORE (-1e30f)

struct attention_args {
    const float *q;
    float *out;
    uint32_t cols; /* n_heads * head_dim */
    float scale;   /* times log2(e) */
};

/* ---- decode ---- */

/* What a sequence's one row attends to: positions begin..keys - 1, in splits of split_keys. */
struct decode_span {
    uint32_t begin, keys, split_keys;
};

__device__ __forceinline__ struct decode_span span_of(const struct kv_view &kv, const struct step_view &step, uint32_t n_past)
{
    uint32_t split_keys = step.split_keys[0];
    return {window_start(kv, n_past), n_past + 1, kv.window ? min(split_keys, kv.window_split) : split_keys};
}

/* One query head's running softmax over the tokens a lane group has seen, 8 dimensions a lane. */
struct softmax_state {
    float m, l, o[8];
};

__device__ __forceinline__ void softmax_merge(struct softmax_state *a, float m, float l, const float o[8])
{
    float most = fmaxf(a->m, m), fa = exp2f(a->m - most), fb = exp2f(m - most);
    a->m = most;
    a->l = a->l * fa + l * fb;
#pragma unroll
    for (int i = 0; i < 8; i++)
        a->o[i] = a->o[i] * fa + o[i] * fb;
}

/* The keys or values that a lane of a lane group attends to, from one 16-byte load: the eight of a token or, of 8 bits, of a pair
 * of tokens. Lanes of a pair then load 16 values of one token each and exchange what the other needs. All lanes of the warp call.
 */
template <int STORE>
__device__ __forceinline__ uint4 load_tokens(const uint8_t *p, bool inside)
{
    uint4 raw = inside ? ld128(p) : make_uint4(0, 0, 0, 0);
    if constexpr (STORE != STORE_BF16) {
        bool odd = threadIdx.x % 2;
        uint32_t x = __shfl_xor_sync(FULL_WARP, odd ? raw.x : raw.z, 1), y = __shfl_xor_sync(FULL_WARP, odd ? raw.y : raw.w, 1);
        return odd ? make_uint4(x, y, raw.z, raw.w) : make_uint4(raw.x, raw.y, x, y);
    }
    return raw;
}

/* The scale of each token of a pair, of which lanes of a pair have loaded one each. */
__device__ __forceinline__ void exchange_scale(float mine, float out[2])
{
    bool odd = threadIdx.x % 2;
    float other = __shfl_xor_sync(FULL_WARP, mine, 1);
    out[0] = odd ? other : mine;
    out[1] = odd ? mine : other;
}

/* Every lane group of the warp gets what all of them attended to. All lanes call. */
template <int LANES>
__device__ __forceinline__ void merge_lane_groups(struct softmax_state *state)
{
#pragma unroll
    for (uint32_t step = LANES; step < WARP; step *= 2) {
        float m = __shfl_xor_sync(FULL_WARP, state->m, step), l = __shfl_xor_sync(FULL_WARP, state->l, step), o[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            o[i] = __shfl_xor_sync(FULL_WARP, state->o[i], step);
        softmax_merge(state, m, l, o);
    }
}

/* Adds a token to the states of all heads; the lanes of a token's group call together, all lanes of the warp do. */
template <int G, int LANES>
__device__ __forceinline__ void attend_token(const float q[G][8], const float k[8], const float v[8], float k_scale,
                                             uint32_t heads, bool valid, struct softmax_state state[G])
{
#pragma unroll
    for (int g = 0; g < G; g++) {
        if ((uint32_t)g >= heads)
            break;
        float score = 0;
#pragma unroll
        for (int i = 0; i < 8; i++)
            score = fmaf(q[g][i], k[i], score);
#pragma unroll
        for (uint32_t step = LANES / 2; step; step /= 2)
            score += __shfl_xor_sync(FULL_WARP, score, step);
        if (valid)
            softmax_merge(&state[g], score * k_scale, 1.0f, v);
    }
}

/* Key and value of the newest token, as the pool keeps them; all lanes of the warp call. store: this lane writes its part. */
template <int STORE, int LANES>
__device__ __forceinline__ void append_token(const struct rope_args &rope, const struct kv_view &kv, size_t row, uint32_t kv_head,
                                             struct kv_place place, uint32_t d, bool store, float k[8], float v[8],
                                             float *k_scale)
{
    float v_scale;
    rotate_eight(rope, rope.k + row * rope.kv_cols + kv_head * kv.head_dim, kv.head_dim, d, rope.angles + row * rope.rotated, k);
    load_eight(rope.v + row * rope.kv_cols + kv_head * kv.head_dim, kv.head_dim, d, v);
    uint4 packed_k = pack_head<STORE, LANES>(k, k_scale), packed_v = pack_head<STORE, LANES>(v, &v_scale);
    if (store) {
        store_head<STORE>(kv.k, kv.k_scales, place, d, packed_k, *k_scale);
        store_head<STORE>(kv.v, kv.v_scales, place, d, packed_v, v_scale);
    }
    unpack_eight<STORE>(packed_k, k);
    unpack_eight<STORE>(packed_v, v);
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] *= v_scale;
}

/* G: heads of a group that one block takes; D: head_dim rounded up to 64, 128 or 256; STORE: of the KV pool.
 * grid (kv heads x ceil(group / G), splits, items); bounds by which no variant spills */
template <int G, int D, int STORE>
__global__ void __launch_bounds__(DECODE_WARPS *WARP, G <= 2 ? 4 : 2)
    attention_decode_kernel(struct attention_args args, struct rope_args rope, struct kv_view kv, struct step_view step,
                            struct attention_parts parts)
{
    constexpr uint32_t LANES = D / 8, TOKENS = WARP / LANES, EACH = kv_traits<STORE>::loaded / 8;
    constexpr uint32_t STRIDE = DECODE_WARPS * TOKENS * EACH; /* EACH: tokens a lane group takes at a time */
    CU_SHARED(float[DECODE_WARPS][G][D], shared_o);
    CU_SHARED(float2[DECODE_WARPS][G], shared_ml);
    const struct attention_item item = step.decodes[blockIdx.z];
    if (item.seq == NO_SEQ)
        return;
    const struct seq_state seq = step.seqs[item.seq];
    uint32_t group = kv.n_heads / kv.n_kv_heads, chunks = (group + G - 1) / G;
    uint32_t kv_head = blockIdx.x / chunks, head0 = kv_head * group + blockIdx.x % chunks * G;
    uint32_t heads = min((uint32_t)G, (kv_head + 1) * group - head0);
    const struct decode_span span = span_of(kv, step, seq.n_past);
    uint32_t keys = span.keys, first = span.begin + blockIdx.y * span.split_keys;
    uint32_t end = min(keys, first + span.split_keys), lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (first >= keys)
        return;
    bool appends = rope.angles && end == keys; /* the newest token is not in the pool yet */
    uint32_t token = lane / LANES, d = lane % LANES * 8, stored_end = appends ? end - 1 : end;
    bool inside = d < kv.head_dim;
    const uint32_t *table = step.tables + seq.table;
    float q[G][8];
    struct softmax_state state[G];
#pragma unroll
    for (int g = 0; g < G; g++) {
        state[g].m = NO_SCORE;
        state[g].l = 0;
        const float *head = args.q + (size_t)seq.first_row * args.cols + (head0 + ((uint32_t)g < heads ? g : 0)) * kv.head_dim;
        if (rope.angles)
            rotate_eight(rope, head, kv.head_dim, d, rope.angles + (size_t)seq.first_row * rope.rotated, q[g]);
        else
            load_eight(head, kv.head_dim, d, q[g]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            q[g][i] *= args.scale;
            state[g].o[i] = 0;
        }
    }
    uint32_t piece = d / kv_traits<STORE>::loaded * kv_traits<STORE>::loaded; /* the first value that the lane loads */
    for (uint32_t t = first + warp * TOKENS * EACH; t < stored_end; t += STRIDE) {
        uint32_t mine = t + token * EACH, loads = mine + lane % EACH;
        struct kv_place at = kv_find<STORE>(kv, table, kv_head, loads < stored_end ? loads : t);
        size_t place = at.values + piece * kv_traits<STORE>::bytes;
        uint4 k_raw = load_tokens<STORE>(kv.k + place, piece < kv.head_dim);
        uint4 v_raw = load_tokens<STORE>(kv.v + place, piece < kv.head_dim);
        float k_scale[2] = {1, 1}, v_scale[2] = {1, 1};
        if constexpr (STORE == STORE_INT8) {
            exchange_scale(kv.k_scales[at.scale], k_scale);
            exchange_scale(kv.v_scales[at.scale], v_scale);
        }
#pragma unroll
        for (uint32_t e = 0; e < EACH; e++) {
            float k[8], v[8];
            unpack_eight<STORE>(e ? make_uint4(k_raw.z, k_raw.w, 0, 0) : k_raw, k);
            unpack_eight<STORE>(e ? make_uint4(v_raw.z, v_raw.w, 0, 0) : v_raw, v);
            if constexpr (STORE == STORE_INT8)
#pragma unroll
                for (int i = 0; i < 8; i++)
                    v[i] *= v_scale[e];
            attend_token<G, LANES>(q, k, v, k_scale[e], heads, mine + e < stored_end, state);
        }
    }
    if (appends && warp == 0) {
        float k[8], v[8], k_scale;
        append_token<STORE, LANES>(rope, kv, seq.first_row, kv_head, kv_find<STORE>(kv, table, kv_head, keys - 1), d,
                                   inside && token == 0 && blockIdx.x % chunks == 0, k, v, &k_scale);
        attend_token<G, LANES>(q, k, v, k_scale, heads, token == 0, state);
    }
#pragma unroll
    for (int g = 0; g < G; g++) {
        merge_lane_groups<LANES>(&state[g]);
        if (token == 0) {
            stf4(&shared_o[warp][g][d], make_float4(state[g].o[0], state[g].o[1], state[g].o[2], state[g].o[3]));
            stf4(&shared_o[warp][g][d + 4], make_float4(state[g].o[4], state[g].o[5], state[g].o[6], state[g].o[7]));
            if (d == 0)
                st64(&shared_ml[warp][g], make_uint2(__float_as_uint(state[g].m), __float_as_uint(state[g].l)));
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < heads * kv.head_dim; i += DECODE_WARPS * WARP) {
        uint32_t g = i / kv.head_dim, c = i % kv.head_dim;
        float m = NO_SCORE, l = 0, o = 0;
#pragma unroll
        for (int w = 0; w < DECODE_WARPS; w++)
            m = fmaxf(m, shared_ml[w][g].x);
#pragma unroll
        for (int w = 0; w < DECODE_WARPS; w++) {
            float f = exp2f(shared_ml[w][g].x - m);
            l = fmaf(shared_ml[w][g].y, f, l);
            o = fmaf(shared_o[w][g][c], f, o);
        }
        size_t at = ((size_t)blockIdx.z * kv.n_heads + head0 + g) * parts.splits + blockIdx.y;
        parts.o[at * kv.head_dim + c] = o;
        if (c == 0)
            st64(&parts.ml[at], make_uint2(__float_as_uint(m), __float_as_uint(l)));
    }
}

/* One block an item; an item of padding, which is the row of its index, becomes zeros. Dynamic shared memory: n_heads x splits
 * floats. */
__global__ void __launch_bounds__(ROW_THREADS)
    attention_combine_kernel(struct attention_args args, struct kv_view kv, struct step_view step, struct attention_parts parts,
                             struct act_forms forms)
{
    CU_DYN_SMEM(float, weights);
    const struct attention_item item = step.decodes[blockIdx.x];
    if (item.seq == NO_SEQ) {
        for_columns(blockIdx.x, args.cols, args.out + (size_t)blockIdx.x * args.cols, forms, [](uint32_t) { return 0.0f; });
        return;
    }
    const struct seq_state seq = step.seqs[item.seq];
    const struct decode_span span = span_of(kv, step, seq.n_past);
    uint32_t n = (span.keys - span.begin + span.split_keys - 1) / span.split_keys;
    for (uint32_t h = threadIdx.x; h < kv.n_heads; h += ROW_THREADS) {
        const float2 *ml = parts.ml + ((size_t)blockIdx.x * kv.n_heads + h) * parts.splits;
        float m = NO_SCORE, l = 0;
        for (uint32_t s = 0; s < n; s++)
            m = fmaxf(m, ml[s].x);
        for (uint32_t s = 0; s < n; s++)
            l = fmaf(ml[s].y, exp2f(ml[s].x - m), l);
        for (uint32_t s = 0; s < n; s++)
            weights[h * parts.splits + s] = exp2f(ml[s].x - m) / l;
    }
    __syncthreads();
    const float *o = parts.o + (size_t)blockIdx.x * kv.n_heads * parts.splits * kv.head_dim;
    for_columns(seq.first_row, args.cols, args.out + (size_t)seq.first_row * args.cols, forms, [&](uint32_t c) {
        uint32_t at = c / kv.head_dim * parts.splits;
        float sum = 0;
        for (uint32_t s = 0; s < n; s++)
            sum = fmaf(o[(size_t)(at + s) * kv.head_dim + c % kv.head_dim], weights[at + s], sum);
        return sum;
    });
}

/* ---- tiles ---- */

template <int D>
struct tile_shared {
    static constexpr int KEYS = D > 128 ? 32 : 64, LD = D + 8; /* 16 bytes of padding: ldmatrix meets no bank twice */
    uint16_t q[TILE_ROWS][LD], k[2][KEYS][LD], v[2][KEYS][LD];
    static constexpr size_t scale_bytes = 2 * 2 * KEYS * sizeof(float);
    float k_scale[2][KEYS], v_scale[2][KEYS]; /* STORE_INT8; else not in memory */
};

/* Eight values become bf16, which holds 8-bit values exactly. */
template <int STORE>
__device__ __forceinline__ uint4 bf16_eight(uint4 packed)
{
    float v[8];
    unpack_eight<STORE>(packed, v);
    return make_uint4(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7]));
}

/* Keys and values of one tile of positions; what lies past `end` or head_dim is zero. */
template <int D, int STORE>
__device__ __forceinline__ void load_keys(struct tile_shared<D> &shared, int stage, const struct kv_view &kv,
                                          const uint32_t *table, uint32_t kv_head, uint32_t first, uint32_t end)
{
    constexpr uint32_t LOADED = kv_traits<STORE>::loaded;
    for (uint32_t i = threadIdx.x; i < shared.KEYS * D / LOADED; i += TILE_THREADS) {
        uint32_t r = i / (D / LOADED), c = i % (D / LOADED) * LOADED;
        bool ok = first + r < end && c < kv.head_dim;
        struct kv_place at = {0, 0};
        if (ok)
            at = kv_find<STORE>(kv, table, kv_head, first + r);
        const uint8_t *k = kv.k + at.values + (ok ? c : 0) * kv_traits<STORE>::bytes;
        const uint8_t *v = kv.v + at.values + (ok ? c : 0) * kv_traits<STORE>::bytes;
        if constexpr (STORE == STORE_BF16) {
            cp_async<16>(&shared.k[stage][r][c], k, ok);
            cp_async<16>(&shared.v[stage][r][c], v, ok);
        } else {
            uint4 none = make_uint4(0, 0, 0, 0);
            uint4 k_raw = ok ? ld128(k) : none, v_raw = ok ? ld128(v) : none;
            st128(&shared.k[stage][r][c], bf16_eight<STORE>(k_raw));
            st128(&shared.k[stage][r][c + 8], bf16_eight<STORE>(make_uint4(k_raw.z, k_raw.w, 0, 0)));
            st128(&shared.v[stage][r][c], bf16_eight<STORE>(v_raw));
            st128(&shared.v[stage][r][c + 8], bf16_eight<STORE>(make_uint4(v_raw.z, v_raw.w, 0, 0)));
        }
        if (STORE == STORE_INT8 && c == 0) {
            shared.k_scale[stage][r] = ok ? kv.k_scales[at.scale] : 0.0f;
            shared.v_scale[stage][r] = ok ? kv.v_scales[at.scale] : 0.0f;
        }
    }
    cp_async_commit();
}

/* a[n][..] *= the scale of the column's key. */
template <int KEYS>
__device__ __forceinline__ void scale_keys(const float scale[KEYS], float a[][4])
{
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            a[n][e] *= scale[n * 8 + threadIdx.x % 4 * 2 + e % 2];
}

/* s[n][..] = q k^T for 16 query rows of the warp and all keys of the stage. */
template <int D>
__device__ __forceinline__ void tile_scores(const struct tile_shared<D> &shared, int stage, float s[][4])
{
    uint32_t lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        uint32_t q[4];
        ldmatrix_x4(q, &shared.q[row][k + lane / 16 * 8]);
#pragma unroll
        for (int n = 0; n < shared.KEYS / 16; n++) {
            uint32_t b[4];
            ldmatrix_x4(b, &shared.k[stage][n * 16 + lane % 8 + lane / 16 * 8][k + lane / 8 % 2 * 8]);
            const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
            mma_bf16_16816(s[2 * n], q, b0);
            mma_bf16_16816(s[2 * n + 1], q, b1);
        }
    }
}

/* o += p v */
template <int D>
__device__ __forceinline__ void tile_values(const struct tile_shared<D> &shared, int stage, const float p[][4], float o[][4])
{
    uint32_t lane = threadIdx.x % WARP;
#pragma unroll
    for (int k = 0; k < shared.KEYS / 16; k++) { /* the layout of sums is that of the operand */
        const uint32_t a[4] = {bf16_pair(p[2 * k][0], p[2 * k][1]), bf16_pair(p[2 * k][2], p[2 * k][3]),
                               bf16_pair(p[2 * k + 1][0], p[2 * k + 1][1]), bf16_pair(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, &shared.v[stage][k * 16 + lane % 16][n * 16 + lane / 16 * 8]);
            const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
            mma_bf16_16816(o[2 * n], a, b0);
            mma_bf16_16816(o[2 * n + 1], a, b1);
        }
    }
}

/* Scores of row r (0: lane / 4, 1: lane / 4 + 8), which sees keys start..last, become weights; older sums are scaled down to the
 * new maximum. Keys that the row does not see leave its sums as they are, bit for bit. */
template <int KEYS, int D>
__device__ __forceinline__ void tile_softmax(float s[][4], float o[][4], int r, uint32_t first, uint32_t start, uint32_t last,
                                             float scale, float *m, float *l)
{
    uint32_t lane = threadIdx.x % WARP;
    float most = *m;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; e++) {
            uint32_t key = first + n * 8 + lane % 4 * 2 + e % 2;
            s[n][e] = key >= start && key <= last ? s[n][e] * scale : NO_SCORE;
            most = fmaxf(most, s[n][e]);
        }
    most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
    most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2));
    float f = exp2f(*m - most);
    *m = most;
    *l *= f;
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        o[n][2 * r] *= f;
        o[n][2 * r + 1] *= f;
    }
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; e++) {
            s[n][e] = s[n][e] > NO_SCORE / 2 ? exp2f(s[n][e] - most) : 0.0f;
            *l += s[n][e];
        }
}

/* D: head_dim rounded up to 64, 128 or 256; STORE: of the KV pool. grid (items, kv heads); without the bound on blocks the
 * compiler aims at more, and spills */
template <int D, int STORE>
__global__ void __launch_bounds__(TILE_THREADS, D > 64 ? 1 : 4)
    attention_tile_kernel(struct attention_args args, struct kv_view kv, struct step_view step)
{
    constexpr int KEYS = tile_shared<D>::KEYS;
    CU_DYN_SMEM(uint4, memory);
    struct tile_shared<D> &shared = *(struct tile_shared<D> *)memory;
    const struct attention_item item = step.tiles[blockIdx.x];
    if (item.seq == NO_SEQ)
        return;
    const struct seq_state seq = step.seqs[item.seq];
    uint32_t group = kv.n_heads / kv.n_kv_heads, pairs = seq.n_rows * group, first_pair = item.tile * TILE_ROWS;
    uint32_t last_pair = min(pairs, first_pair + TILE_ROWS) - 1, end = seq.n_past + last_pair / group + 1;
    const uint32_t *table = step.tables + seq.table;
    uint32_t lane = threadIdx.x % WARP, row0 = threadIdx.x / WARP * 16 + lane / 4;
    uint32_t begin = window_start(kv, seq.n_past + first_pair / group) / KEYS * KEYS; /* rows ascend: none sees a key before it */

    load_keys<D, STORE>(shared, 0, kv, table, blockIdx.y, begin, end);
    for (uint32_t i = threadIdx.x; i < TILE_ROWS * D / 2; i += TILE_THREADS) {
        uint32_t r = i / (D / 2), c = i % (D / 2) * 2, pair = first_pair + r;
        uint32_t both = 0;
        if (pair < pairs && c < kv.head_dim) {
            const float *q = args.q + (size_t)(seq.first_row + pair / group) * args.cols +
                             (blockIdx.y * group + pair % group) * kv.head_dim + c;
            both = bf16_pair(q[0], q[1]);
        }
        *(uint32_t *)&shared.q[r][c] = both;
    }
    float o[D / 8][4] = {}, m[2] = {NO_SCORE, NO_SCORE}, l[2] = {0, 0};
    uint32_t start[2], last[2];
    for (int r = 0; r < 2; r++) {
        last[r] = seq.n_past + min(first_pair + row0 + 8 * r, last_pair) / group;
        start[r] = window_start(kv, last[r]);
    }
    for (uint32_t first = begin, stage = 0; first < end; first += KEYS, stage ^= 1) {
        if (first + KEYS < end) {
            load_keys<D, STORE>(shared, stage ^ 1, kv, table, blockIdx.y, first + KEYS, end);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        float s[KEYS / 8][4] = {};
        tile_scores<D>(shared, stage, s);
        if constexpr (STORE == STORE_INT8)
            scale_keys<KEYS>(shared.k_scale[stage], s);
#pragma unroll
        for (int r = 0; r < 2; r++)
            tile_softmax<KEYS, D>(s, o, r, first, start[r], last[r], args.scale, &m[r], &l[r]);
        if constexpr (STORE == STORE_INT8)
            scale_keys<KEYS>(shared.v_scale[stage], s);
        tile_values<D>(shared, stage, s, o);
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t pair = first_pair + row0 + 8 * r;
        l[r] += __shfl_xor_sync(FULL_WARP, l[r], 1);
        l[r] += __shfl_xor_sync(FULL_WARP, l[r], 2);
        if (pair > last_pair)
            continue;
        float *out =
            args.out + (size_t)(seq.first_row + pair / group) * args.cols + (blockIdx.y * group + pair % group) * kv.head_dim;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            uint32_t c = n * 8 + lane % 4 * 2;
            if (c < kv.head_dim) {
                out[c] = o[n][2 * r] / l[r];
                out[c + 1] = o[n][2 * r + 1] / l[r];
            }
        }
    }
}
