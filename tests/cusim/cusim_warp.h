/* Warp operations on the emulator: shuffles, votes, reductions, mma and ldmatrix. Each gathers the operands of all lanes of its
 * mask and computes all results at once. Fragment layouts: PTX ISA, "Matrix fragments for mma.m16n8k16 / m16n8k32". Included by
 * cusim.h.
 */
#pragma once

namespace cusim
{
/* What a lane brings to a shuffle. Lanes may name different sources, never different widths. */
template <class T>
struct shuffle_operand {
    int lane; /* of the source, or the distance */
    int width;
    T value;
};

CUSIM_INLINE int shuffle_source(warp_op op, int lane, int arg, int width)
{
    int base = lane & ~(width - 1), last = base + width - 1, from = lane;
    if (op == SHUFFLE)
        return base + (arg & (width - 1));
    if (op == SHUFFLE_UP)
        from = lane - arg < base ? lane : lane - arg;
    else if (op == SHUFFLE_DOWN)
        from = lane + arg > last ? lane : lane + arg;
    else if (op == SHUFFLE_XOR)
        from = (lane ^ arg) > last ? lane : lane ^ arg;
    return from;
}

template <class T, int OP>
CUSIM_NOSAN void shuffle_lanes(unsigned mask, const void *const ins[32], void *const outs[32])
{
    for (int lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1))
            continue;
        const auto *mine = static_cast<const shuffle_operand<T> *>(ins[lane]);
        int from = shuffle_source((warp_op)OP, lane, mine->lane, mine->width);
        if (from >= 0 && from < 32 && mask >> from & 1)
            memcpy(outs[lane], &static_cast<const shuffle_operand<T> *>(ins[from])->value, sizeof(T));
        else
            memset(outs[lane], 0xff, sizeof(T)); /* undefined in CUDA: NaN here */
    }
}

template <class T, int OP>
CUSIM_NOSAN __attribute__((noinline)) T shuffle(unsigned mask, T v, int arg, int width)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 2, "shuffles move 2, 4 or 8 bytes");
    shuffle_operand<T> in{arg, width, v};
    T out;
    warp_call(mask, (warp_op)OP, &in, &out, shuffle_lanes<T, OP>, CUSIM_HERE);
    return out;
}

struct vote_result {
    unsigned trues, members;
};

CUSIM_NOSAN inline void vote_lanes(unsigned mask, const void *const ins[32], void *const outs[32])
{
    vote_result r = {0, mask};
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1 && *static_cast<const int *>(ins[lane]))
            r.trues |= 1u << lane;
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1)
            memcpy(outs[lane], &r, sizeof r);
}

CUSIM_NOSAN __attribute__((noinline)) inline vote_result vote(unsigned mask, int predicate)
{
    vote_result r;
    warp_call(mask, VOTE, &predicate, &r, vote_lanes, CUSIM_HERE);
    return r;
}

template <class T>
CUSIM_NOSAN void match_lanes(unsigned mask, const void *const ins[32], void *const outs[32])
{
    for (int lane = 0; lane < 32; lane++) {
        unsigned same = 0;
        for (int other = 0; other < 32 && mask >> lane & 1; other++)
            if (mask >> other & 1 && *static_cast<const T *>(ins[other]) == *static_cast<const T *>(ins[lane]))
                same |= 1u << other;
        if (mask >> lane & 1)
            memcpy(outs[lane], &same, sizeof same);
    }
}

template <class T>
CUSIM_NOSAN __attribute__((noinline)) unsigned match(unsigned mask, T v)
{
    unsigned same;
    warp_call(mask, MATCH, &v, &same, match_lanes<T>, CUSIM_HERE);
    return same;
}

enum reduction { SUM, MIN, MAX };
template <class T, int HOW>
CUSIM_NOSAN void reduce_lanes(unsigned mask, const void *const ins[32], void *const outs[32])
{
    T r = *static_cast<const T *>(ins[__builtin_ctz(mask)]);
    for (unsigned rest = mask & (mask - 1); rest; rest &= rest - 1) {
        T v = *static_cast<const T *>(ins[__builtin_ctz(rest)]);
        r = HOW == SUM ? (T)((unsigned)r + (unsigned)v) : HOW == MIN ? (v < r ? v : r) : (v > r ? v : r);
    }
    for (unsigned rest = mask; rest; rest &= rest - 1)
        memcpy(outs[__builtin_ctz(rest)], &r, sizeof r);
}

template <class T, int HOW>
CUSIM_NOSAN __attribute__((noinline)) T reduce(unsigned mask, T v)
{
    T r;
    warp_call(mask, REDUCE, &v, &r, reduce_lanes<T, HOW>, CUSIM_HERE);
    return r;
}

/* One lane's fragments: a, b, and c or d as raw words. */
struct mma_operand {
    uint32_t a[4], b[2], c[4];
};

struct bf16_pair {
    CUSIM_NOSAN static float get(uint32_t word, int half)
    {
        uint32_t bits = (half ? word >> 16 : word & 0xffff) << 16;
        float f;
        memcpy(&f, &bits, 4);
        return f;
    }
};
struct f16_pair {
    CUSIM_NOSAN static float get(uint32_t word, int half)
    {
        __half_raw raw;
        raw.x = (unsigned short)(half ? word >> 16 : word);
        return __half2float(__half(raw));
    }
};

/* Sums in f32 in the order of k; the tensor core's own order and rounding differ, which a test's bound must allow. */
template <class PAIR>
CUSIM_NOSAN void mma_16816(unsigned, const void *const ins[32], void *const outs[32])
{
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const auto *m = static_cast<const mma_operand *>(ins[lane]);
        int group = lane >> 2, in_group = lane & 3;
        for (int half = 0; half < 2; half++) {
            for (int r = 0; r < 4; r++)
                a[group + (r & 1) * 8][in_group * 2 + half + (r >> 1) * 8] = PAIR::get(m->a[r], half);
            for (int r = 0; r < 2; r++)
                b[in_group * 2 + half + r * 8][group] = PAIR::get(m->b[r], half);
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        float d[4];
        memcpy(d, static_cast<const mma_operand *>(ins[lane])->c, sizeof d);
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < 16; k++)
                d[i] += a[(lane >> 2) + (i >> 1) * 8][k] * b[k][(lane & 3) * 2 + (i & 1)];
        memcpy(outs[lane], d, sizeof d);
    }
}

CUSIM_NOSAN inline void mma_s8(unsigned, const void *const ins[32], void *const outs[32])
{
    int8_t a[16][32], b[32][8];
    for (int lane = 0; lane < 32; lane++) {
        const auto *m = static_cast<const mma_operand *>(ins[lane]);
        int group = lane >> 2, in_group = lane & 3;
        for (int byte = 0; byte < 4; byte++) {
            for (int r = 0; r < 4; r++)
                a[group + (r & 1) * 8][in_group * 4 + byte + (r >> 1) * 16] = (int8_t)(m->a[r] >> (8 * byte));
            for (int r = 0; r < 2; r++)
                b[in_group * 4 + byte + r * 16][group] = (int8_t)(m->b[r] >> (8 * byte));
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        uint32_t d[4];
        memcpy(d, static_cast<const mma_operand *>(ins[lane])->c, sizeof d);
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < 32; k++)
                d[i] += (uint32_t)(a[(lane >> 2) + (i >> 1) * 8][k] * b[k][(lane & 3) * 2 + (i & 1)]);
        memcpy(outs[lane], d, sizeof d);
    }
}

template <class D>
CUSIM_NOSAN __attribute__((noinline)) void mma(D (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], warp_op op, warp_fn fn)
{
    mma_operand in;
    memcpy(in.a, a, sizeof in.a);
    memcpy(in.b, b, sizeof in.b);
    memcpy(in.c, d, sizeof in.c);
    warp_call(0xffffffffu, op, &in, in.c, fn, CUSIM_HERE);
    memcpy(d, in.c, sizeof in.c);
}

/* Lane 8 m + i brings the address of row i of matrix m; lane l gets, of each matrix, elements 2 (l % 4) and + 1 of row l / 4. */
template <int MATRICES, bool TRANSPOSED>
CUSIM_NOSAN void ldmatrix_lanes(unsigned, const void *const ins[32], void *const outs[32])
{
    for (int lane = 0; lane < 32; lane++)
        for (int m = 0; m < MATRICES; m++) {
            uint16_t pair[2];
            for (int i = 0; i < 2; i++) {
                int row = lane >> 2, col = (lane & 3) * 2 + i;
                if (TRANSPOSED)
                    std::swap(row, col);
                const auto *address = *static_cast<const uint16_t *const *>(ins[m * 8 + row]);
                memcpy(&pair[i], address + col, sizeof pair[i]);
            }
            memcpy(static_cast<char *>(outs[lane]) + 4 * m, pair, sizeof pair);
        }
}

template <int MATRICES, bool TRANSPOSED>
CUSIM_NOSAN __attribute__((noinline)) void ldmatrix(uint32_t (&r)[MATRICES], const void *row)
{
    if (lane_index() < MATRICES * 8) { /* the other lanes' addresses are not used */
        check_aligned(row, 16);
        note(row, 16, READ, CUSIM_HERE);
    }
    uint32_t out[MATRICES];
    warp_call(0xffffffffu, LDMATRIX, &row, out, ldmatrix_lanes<MATRICES, TRANSPOSED>, CUSIM_HERE);
    memcpy(r, out, sizeof out);
}

CUSIM_NOSAN __attribute__((noinline)) inline void syncwarp(unsigned mask)
{
    warp_call(mask, SYNCWARP, nullptr, nullptr, nullptr, CUSIM_HERE);
}
} // namespace cusim

CUSIM_INLINE void __syncwarp(unsigned mask = 0xffffffffu)
{
    ::cusim::syncwarp(mask);
}

template <class T>
CUSIM_INLINE T __shfl_sync(unsigned mask, T v, int lane, int width = 32)
{
    return ::cusim::shuffle<T, ::cusim::SHUFFLE>(mask, v, lane, width);
}
template <class T>
CUSIM_INLINE T __shfl_up_sync(unsigned mask, T v, unsigned distance, int width = 32)
{
    return ::cusim::shuffle<T, ::cusim::SHUFFLE_UP>(mask, v, (int)distance, width);
}
template <class T>
CUSIM_INLINE T __shfl_down_sync(unsigned mask, T v, unsigned distance, int width = 32)
{
    return ::cusim::shuffle<T, ::cusim::SHUFFLE_DOWN>(mask, v, (int)distance, width);
}
template <class T>
CUSIM_INLINE T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32)
{
    return ::cusim::shuffle<T, ::cusim::SHUFFLE_XOR>(mask, v, lanes, width);
}

CUSIM_INLINE unsigned __ballot_sync(unsigned mask, int predicate)
{
    return ::cusim::vote(mask, predicate).trues;
}
CUSIM_INLINE int __any_sync(unsigned mask, int predicate)
{
    return ::cusim::vote(mask, predicate).trues != 0;
}
CUSIM_INLINE int __all_sync(unsigned mask, int predicate)
{
    ::cusim::vote_result r = ::cusim::vote(mask, predicate);
    return r.trues == r.members;
}
template <class T>
CUSIM_INLINE unsigned __match_any_sync(unsigned mask, T v)
{
    return ::cusim::match(mask, v);
}

CUSIM_INLINE unsigned __reduce_add_sync(unsigned mask, unsigned v)
{
    return ::cusim::reduce<unsigned, ::cusim::SUM>(mask, v);
}
CUSIM_INLINE int __reduce_add_sync(unsigned mask, int v)
{
    return ::cusim::reduce<int, ::cusim::SUM>(mask, v);
}
CUSIM_INLINE unsigned __reduce_min_sync(unsigned mask, unsigned v)
{
    return ::cusim::reduce<unsigned, ::cusim::MIN>(mask, v);
}
CUSIM_INLINE int __reduce_min_sync(unsigned mask, int v)
{
    return ::cusim::reduce<int, ::cusim::MIN>(mask, v);
}
CUSIM_INLINE unsigned __reduce_max_sync(unsigned mask, unsigned v)
{
    return ::cusim::reduce<unsigned, ::cusim::MAX>(mask, v);
}
CUSIM_INLINE int __reduce_max_sync(unsigned mask, int v)
{
    return ::cusim::reduce<int, ::cusim::MAX>(mask, v);
}

CUSIM_INLINE void mma_bf16_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
    ::cusim::mma(d, a, b, ::cusim::MMA_BF16, ::cusim::mma_16816<::cusim::bf16_pair>);
}
CUSIM_INLINE void mma_f16_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
    ::cusim::mma(d, a, b, ::cusim::MMA_F16, ::cusim::mma_16816<::cusim::f16_pair>);
}
CUSIM_INLINE void mma_s8_16832(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
    ::cusim::mma(d, a, b, ::cusim::MMA_S8, ::cusim::mma_s8);
}

CUSIM_INLINE void ldmatrix_x4(uint32_t (&r)[4], const void *row)
{
    ::cusim::ldmatrix<4, false>(r, row);
}
CUSIM_INLINE void ldmatrix_x4_trans(uint32_t (&r)[4], const void *row)
{
    ::cusim::ldmatrix<4, true>(r, row);
}
CUSIM_INLINE void ldmatrix_x2(uint32_t (&r)[2], const void *row)
{
    ::cusim::ldmatrix<2, false>(r, row);
}
CUSIM_INLINE void ldmatrix_x2_trans(uint32_t (&r)[2], const void *row)
{
    ::cusim::ldmatrix<2, true>(r, row);
}
