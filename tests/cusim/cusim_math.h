/* Host twins of the CUDA intrinsics that the headers declare for device code only. Included by cusim.h. */
#pragma once

CUSIM_INLINE float __uint_as_float(unsigned x)
{
    float f;
    memcpy(&f, &x, 4);
    return f;
}
CUSIM_INLINE unsigned __float_as_uint(float x)
{
    unsigned u;
    memcpy(&u, &x, 4);
    return u;
}
CUSIM_INLINE float __int_as_float(int x)
{
    return __uint_as_float((unsigned)x);
}
CUSIM_INLINE int __float_as_int(float x)
{
    return (int)__float_as_uint(x);
}

/* Fast approximations are computed exactly: a test's bound must leave them room. The first two names are glibc's own. */
#define __expf(x)    expf(x)
#define __logf(x)    logf(x)
#define __sinf(x)    sinf(x)
#define __cosf(x)    cosf(x)
#define __powf(x, y) powf((x), (y))
CUSIM_INLINE float __fdividef(float a, float b)
{
    return a / b;
}
CUSIM_INLINE float rsqrtf(float x)
{
    return 1.0f / sqrtf(x);
}
CUSIM_INLINE float __frsqrt_rn(float x)
{
    return (float)(1.0 / sqrt((double)x));
}
CUSIM_INLINE float __frcp_rn(float x)
{
    return 1.0f / x;
}
CUSIM_INLINE float __fsqrt_rn(float x)
{
    return sqrtf(x);
}
CUSIM_INLINE float __fdiv_rn(float a, float b)
{
    return a / b;
}
CUSIM_INLINE float __fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}
CUSIM_INLINE float __fmul_rn(float a, float b)
{
    return a * b;
}
CUSIM_INLINE float __fadd_rn(float a, float b)
{
    return a + b;
}
CUSIM_INLINE float __fsub_rn(float a, float b)
{
    return a - b;
}
CUSIM_INLINE float __saturatef(float x)
{
    return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f;
}

/* Conversions saturate and take NaN to 0, unlike C's. */
CUSIM_INLINE int cusim_to_int(double rounded)
{
    if (!(rounded > -2147483648.0))
        return rounded != rounded ? 0 : INT32_MIN;
    return rounded < 2147483647.0 ? (int)rounded : INT32_MAX;
}
CUSIM_INLINE int __float2int_rn(float x)
{
    return cusim_to_int(rint((double)x));
}
CUSIM_INLINE int __float2int_rz(float x)
{
    return cusim_to_int(trunc((double)x));
}
CUSIM_INLINE int __float2int_rd(float x)
{
    return cusim_to_int(floor((double)x));
}
CUSIM_INLINE int __float2int_ru(float x)
{
    return cusim_to_int(ceil((double)x));
}
CUSIM_INLINE unsigned __float2uint_rn(float x)
{
    double r = rint((double)x);
    return !(r > 0) ? 0u : r < 4294967295.0 ? (unsigned)r : UINT32_MAX;
}
CUSIM_INLINE float __int2float_rn(int x)
{
    return (float)x;
}
CUSIM_INLINE float __uint2float_rn(unsigned x)
{
    return (float)x;
}

CUSIM_INLINE int __popc(unsigned x)
{
    return __builtin_popcount(x);
}
CUSIM_INLINE int __ffs(int x)
{
    return __builtin_ffs(x);
}
CUSIM_INLINE int __clz(int x)
{
    return x ? __builtin_clz((unsigned)x) : 32;
}
CUSIM_INLINE unsigned __umulhi(unsigned a, unsigned b)
{
    return (unsigned)(((uint64_t)a * b) >> 32);
}
CUSIM_INLINE unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift)
{
    return (unsigned)((((uint64_t)hi << 32) | lo) >> (shift & 31));
}
CUSIM_INLINE unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned shift)
{
    return (unsigned)(((((uint64_t)hi << 32) | lo) << (shift & 31)) >> 32);
}

/* Products of the four bytes, summed onto c. */
CUSIM_INLINE int __dp4a(int a, int b, int c)
{
    unsigned sum = (unsigned)c;
    for (int i = 0; i < 32; i += 8)
        sum += (unsigned)((int8_t)((unsigned)a >> i) * (int8_t)((unsigned)b >> i));
    return (int)sum;
}
CUSIM_INLINE unsigned __dp4a(unsigned a, unsigned b, unsigned c)
{
    for (int i = 0; i < 32; i += 8)
        c += (uint8_t)(a >> i) * (unsigned)(uint8_t)(b >> i);
    return c;
}

/* Result byte i is byte number (selector nibble i, three bits) of b:a; the nibble's top bit spreads that byte's sign. */
CUSIM_INLINE unsigned __byte_perm(unsigned a, unsigned b, unsigned selector)
{
    uint64_t bytes = ((uint64_t)b << 32) | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) {
        unsigned nibble = selector >> (4 * i) & 15;
        unsigned byte = (unsigned)(bytes >> (8 * (nibble & 7))) & 255;
        if (nibble & 8)
            byte = byte & 128 ? 255 : 0;
        out |= byte << (8 * i);
    }
    return out;
}

/* Byte by byte, without carries between them. */
CUSIM_INLINE unsigned __vadd4(unsigned a, unsigned b)
{
    return ((a & 0x7f7f7f7fu) + (b & 0x7f7f7f7fu)) ^ ((a ^ b) & 0x80808080u);
}
CUSIM_INLINE unsigned __vsub4(unsigned a, unsigned b)
{
    return ((a | 0x80808080u) - (b & 0x7f7f7f7fu)) ^ ((a ^ ~b) & 0x80808080u);
}
CUSIM_INLINE unsigned __vsubss4(unsigned a, unsigned b)
{
    unsigned out = 0;
    for (int i = 0; i < 32; i += 8) {
        int d = (int8_t)(a >> i) - (int8_t)(b >> i);
        d = d < -128 ? -128 : d > 127 ? 127 : d;
        out |= ((unsigned)d & 255) << i;
    }
    return out;
}

CUSIM_INLINE int min(int a, int b)
{
    return a < b ? a : b;
}
CUSIM_INLINE int max(int a, int b)
{
    return a > b ? a : b;
}
CUSIM_INLINE unsigned min(unsigned a, unsigned b)
{
    return a < b ? a : b;
}
CUSIM_INLINE unsigned max(unsigned a, unsigned b)
{
    return a > b ? a : b;
}
CUSIM_INLINE long long min(long long a, long long b)
{
    return a < b ? a : b;
}
CUSIM_INLINE long long max(long long a, long long b)
{
    return a > b ? a : b;
}
CUSIM_INLINE float min(float a, float b)
{
    return fminf(a, b);
}
CUSIM_INLINE float max(float a, float b)
{
    return fmaxf(a, b);
}

template <class T>
CUSIM_INLINE T __ldg(const T *p)
{
    return *p;
}
template <class T>
CUSIM_INLINE T __ldcs(const T *p)
{
    return *p;
}
template <class T>
CUSIM_INLINE void __stcs(T *p, T v)
{
    *p = v;
}

/* Half and bfloat16 functions that the headers keep to device code: computed in f32, rounded once. */
CUSIM_INLINE __half2 __hfma2(__half2 a, __half2 b, __half2 c)
{
    return __halves2half2(__float2half_rn(fmaf(__low2float(a), __low2float(b), __low2float(c))),
                          __float2half_rn(fmaf(__high2float(a), __high2float(b), __high2float(c))));
}

/* Atomics return the old value. Fibers do not preempt one another, so a plain update is one. */
#define CUSIM_ATOMIC(name, T, update)                                                                                            \
    __attribute__((noinline, unused)) CUSIM_NOSAN static T name(T *p, T v)                                                       \
    {                                                                                                                            \
        ::cusim::note(p, sizeof(T), ::cusim::ATOMIC, CUSIM_HERE);                                                                \
        T old = *p;                                                                                                              \
        *p = (update);                                                                                                           \
        return old;                                                                                                              \
    }
CUSIM_ATOMIC(atomicAdd, int, (int)((unsigned)old + (unsigned)v))
CUSIM_ATOMIC(atomicAdd, unsigned, old + v)
CUSIM_ATOMIC(atomicAdd, unsigned long long, old + v)
CUSIM_ATOMIC(atomicAdd, float, old + v)
CUSIM_ATOMIC(atomicAdd, double, old + v)
CUSIM_ATOMIC(atomicMax, int, old > v ? old : v)
CUSIM_ATOMIC(atomicMax, unsigned, old > v ? old : v)
CUSIM_ATOMIC(atomicMax, unsigned long long, old > v ? old : v)
CUSIM_ATOMIC(atomicMin, int, old < v ? old : v)
CUSIM_ATOMIC(atomicMin, unsigned, old < v ? old : v)
CUSIM_ATOMIC(atomicExch, int, v)
CUSIM_ATOMIC(atomicExch, unsigned, v)
CUSIM_ATOMIC(atomicOr, unsigned, old | v)
CUSIM_ATOMIC(atomicAnd, unsigned, old &v)
#undef CUSIM_ATOMIC

template <class T>
__attribute__((noinline)) CUSIM_NOSAN T atomicCAS(T *p, T compare, T v)
{
    ::cusim::note(p, sizeof(T), ::cusim::ATOMIC, CUSIM_HERE);
    T old = *p;
    if (old == compare)
        *p = v;
    return old;
}
