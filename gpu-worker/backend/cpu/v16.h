/* Sixteen f32 lanes, written once for every instruction set: AVX-512 (one register), AVX2 (two), portable C (an array).
 *
 * Each operation is one IEEE operation a lane (v16_fma rounds once), and reductions add lanes in one fixed order, so code written
 * on these types gives the same bits on every instruction set. Include it only from files that are compiled for their set.
 *
 * u8x64 holds 64 codes of one cell line (see panels.h), i32x16 the exact sums of 16 output rows.
 */
#pragma once
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include "gpu-worker/backend/cpu/panels.h"
#include "gpu-worker/quant/f16.h"

#define V_INLINE static inline __attribute__((always_inline))
/* Sanitizers multiply the code of a kernel: there it is kept small. Results do not depend on it. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define V_SMALL 1
#else
#define V_SMALL 0
#endif
/* Before the short loops over a cell's lines and halves; portable code would only grow. */
#if defined(__AVX2__) && !V_SMALL
#define V_UNROLL _Pragma("GCC unroll 8")
#else
#define V_UNROLL
#endif

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#include <immintrin.h>

enum { V_ROWS = V_SMALL ? 2 : 4, V_ATTENTION_ROWS = V_SMALL ? 2 : 8, V_DOT8_SIGNED = 0 };
typedef __m512 v16;
typedef __m512i i32x16;
typedef __m512i u8x64;

V_INLINE v16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
V_INLINE void v16_store(float *p, v16 a) { _mm512_storeu_ps(p, a); }
V_INLINE v16 v16_set1(float x) { return _mm512_set1_ps(x); }
V_INLINE v16 v16_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
V_INLINE v16 v16_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
V_INLINE v16 v16_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
V_INLINE v16 v16_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
V_INLINE v16 v16_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
V_INLINE v16 v16_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
V_INLINE v16 v16_abs(v16 a) { return _mm512_abs_ps(a); }
V_INLINE v16 v16_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
V_INLINE v16 v16_round(v16 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* a * 2^n for integral n in -126..127 */
V_INLINE v16 v16_scale2(v16 a, v16 n)
{
    __m512i e = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
    return _mm512_mul_ps(a, _mm512_castsi512_ps(e));
}
V_INLINE v16 v16_from_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
V_INLINE void v16_to_f16(uint16_t *p, v16 a)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
V_INLINE v16 v16_from_bf16(const uint16_t *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
/* 32 BF16: those at even and those at odd places */
V_INLINE void v16_bf16_pairs(const uint8_t *p, v16 *even, v16 *odd)
{
    __m512i pairs = _mm512_loadu_si512(p);
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int32_t)0xffff0000u)));
}
V_INLINE v16 v16_from_u8(const uint8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p))); }
V_INLINE v16 v16_from_i8(const int8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
/* lanes i with i < n keep a, the others become b */
V_INLINE v16 v16_first(int n, v16 a, v16 b) { return _mm512_mask_mov_ps(b, (__mmask16)(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1), a); }
/* rounds to nearest, stores 16 int8 (values must fit) and returns their sum */
V_INLINE int32_t v16_to_i8(int8_t *p, v16 a)
{
    __m512i i = _mm512_cvtps_epi32(a);
    _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(i));
    return _mm512_reduce_add_epi32(i);
}
V_INLINE i32x16 i32x16_set1(int32_t x) { return _mm512_set1_epi32(x); }
V_INLINE v16 v16_from_i32(i32x16 a) { return _mm512_cvtepi32_ps(a); }
V_INLINE u8x64 u8x64_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
V_INLINE u8x64 u8x64_low4(u8x64 a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
V_INLINE u8x64 u8x64_high4(u8x64 a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
V_INLINE u8x64 u8x64_add_bits(u8x64 a, const uint8_t *bits, char value)
{
    uint64_t mask;
    memcpy(&mask, bits, 8);
    return _mm512_mask_add_epi8(a, mask, a, _mm512_set1_epi8(value));
}
/* lane l += a[4l]*x[0] + ... + a[4l+3]*x[3]; codes of at most 7 bits */
V_INLINE i32x16 i32x16_dot(i32x16 sum, u8x64 a, const int8_t *x)
{
    int32_t x4;
    memcpy(&x4, x, 4);
    return _mm512_dpbusd_epi32(sum, a, _mm512_set1_epi32(x4));
}
V_INLINE i32x16 i32x16_dot8(i32x16 sum, u8x64 a, const int8_t *x) { return i32x16_dot(sum, a, x); }
V_INLINE i32x16 i32x16_add(i32x16 a, i32x16 b) { return _mm512_add_epi32(a, b); }
V_INLINE i32x16 i32x16_and(i32x16 a, int32_t b) { return _mm512_and_si512(a, _mm512_set1_epi32(b)); }
#define i32x16_sra(a, n) _mm512_srai_epi32(a, n)
/* Rounds 32 values of at most 32512 to a = 256 high + low, -128 <= low < 128. */
V_INLINE void v16_planes(int8_t *high, int8_t *low, v16 a, v16 b)
{
    __m512i words = _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b));
    words = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), words);
    _mm256_storeu_si256((__m256i *)low, _mm512_cvtepi16_epi8(words));
    words = _mm512_srai_epi16(_mm512_add_epi16(words, _mm512_set1_epi16(128)), 8);
    _mm256_storeu_si256((__m256i *)high, _mm512_cvtepi16_epi8(words));
}
/* The sums of 16 bytes each: the first as the low 16 bits. */
V_INLINE int32_t sums_of_halves(const int8_t *p)
{
    __m256i ones = _mm256_set1_epi8(1), s = _mm256_dpbusd_epi32(_mm256_setzero_si256(), ones, _mm256_loadu_si256((const __m256i *)p));
    s = _mm256_add_epi32(s, _mm256_shuffle_epi32(s, 0x4e));
    s = _mm256_add_epi32(s, _mm256_shuffle_epi32(s, 0xb1));
    return _mm256_extract_epi16(s, 0) | (int32_t)((uint32_t)_mm256_extract_epi16(s, 8) << 16);
}
/* lane l: the int16 p[l], to be multiplied as pairs */
V_INLINE i32x16 i32x16_pairs(const uint8_t *p)
{
    __m512i twice = _mm512_set_epi32(0xf000f, 0xe000e, 0xd000d, 0xc000c, 0xb000b, 0xa000a, 0x90009, 0x80008, 0x70007, 0x60006,
                                     0x50005, 0x40004, 0x30003, 0x20002, 0x10001, 0);
    return _mm512_permutexvar_epi16(twice, _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)p)));
}
/* lane l: the byte p[l] as the upper byte of both */
V_INLINE i32x16 i32x16_byte_pairs(const uint8_t *p)
{
    __m512i to = _mm512_set_epi32(0xf800f80, 0xe800e80, 0xd800d80, 0xc800c80, 0xb800b80, 0xa800a80, 0x9800980, 0x8800880, 0x7800780,
                                  0x6800680, 0x5800580, 0x4800480, 0x3800380, 0x2800280, 0x1800180, 0x800080);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)), to);
}
V_INLINE i32x16 i32x16_pairs_times(i32x16 pairs, int16_t x) { return _mm512_mullo_epi16(pairs, _mm512_set1_epi16(x)); }
/* (x y + 2^14) >> 15 of each */
V_INLINE i32x16 i32x16_pairs_mulhrs(i32x16 x, i32x16 y) { return _mm512_mulhrs_epi16(x, y); }
V_INLINE i32x16 i32x16_pairs_of(i32x16 low, i32x16 high) { return _mm512_mask_blend_epi16(0xaaaaaaaa, low, high); }
/* lane l += x[l] * the upper of pairs[l], modulo 2^32 */
V_INLINE i32x16 i32x16_times_upper(i32x16 sum, i32x16 x, i32x16 pairs)
{
    return _mm512_add_epi32(sum, _mm512_mullo_epi32(x, _mm512_srai_epi32(pairs, 16)));
}
/* lane l += the products of pairs[l] and the two 16 bits of x, modulo 2^32 */
V_INLINE i32x16 i32x16_dot16(i32x16 sum, i32x16 pairs, int32_t x) { return _mm512_dpwssd_epi32(sum, pairs, _mm512_set1_epi32(x)); }
/* Sums of a group's 4-bit codes times 32 signed bytes, of 16 output rows: each half of a group fits 16 bits. */
typedef struct {
    __m512i low, high;
} code_sums;
V_INLINE code_sums code_sums_zero(void) { return (code_sums){_mm512_setzero_si512(), _mm512_setzero_si512()}; }
/* One line of packed codes: low halves times x[0..3], high halves (kept times 16) times x[16..19]. */
V_INLINE code_sums code_sums_add(code_sums s, u8x64 packed, const int8_t *x)
{
    return (code_sums){i32x16_dot(s.low, u8x64_low4(packed), x),
                       i32x16_dot(s.high, _mm512_and_si512(packed, _mm512_set1_epi8((char)0xf0)), x + 16)};
}
/* lane l += pairs[l] * sums[l], modulo 2^32 */
V_INLINE i32x16 code_sums_scale(i32x16 sum, code_sums s, i32x16 pairs)
{
    return _mm512_dpwssd_epi32(sum, _mm512_mask_blend_epi16(0xaaaaaaaa, s.low, _mm512_slli_epi32(s.high, 12)), pairs);
}
/* 32 floats: those at even and those at odd places; and back. */
V_INLINE void v16_unzip(const float *p, v16 *even, v16 *odd)
{
    const __m512i at = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    v16 a = v16_load(p), b = v16_load(p + 16);
    *even = _mm512_permutex2var_ps(a, at, b);
    *odd = _mm512_permutex2var_ps(a, _mm512_add_epi32(at, _mm512_set1_epi32(1)), b);
}
V_INLINE void v16_zip(float *p, v16 even, v16 odd)
{
    const __m512i at = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    v16_store(p, _mm512_permutex2var_ps(even, at, odd));
    v16_store(p + 16, _mm512_permutex2var_ps(even, _mm512_add_epi32(at, _mm512_set1_epi32(8)), odd));
}
V_INLINE void v_prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }

#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

/* As many rows and more meet unpacked codes (unpacked.inc.h). */
#define V_UNPACK_FROM 4
enum { V_ROWS = 2, V_ATTENTION_ROWS = V_SMALL ? 2 : 4, V_DOT8_SIGNED = 1 };
typedef struct {
    __m256 a, b;
} v16;
typedef struct {
    __m256i a, b;
} i32x16;
typedef struct {
    __m256i a, b;
} u8x64;

#define V16_EACH(expr_a, expr_b) ((v16){(expr_a), (expr_b)})
V_INLINE v16 v16_load(const float *p) { return V16_EACH(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
V_INLINE void v16_store(float *p, v16 x)
{
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
V_INLINE v16 v16_set1(float x) { return V16_EACH(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
V_INLINE v16 v16_add(v16 x, v16 y) { return V16_EACH(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
V_INLINE v16 v16_sub(v16 x, v16 y) { return V16_EACH(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
V_INLINE v16 v16_mul(v16 x, v16 y) { return V16_EACH(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
V_INLINE v16 v16_div(v16 x, v16 y) { return V16_EACH(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
V_INLINE v16 v16_max(v16 x, v16 y) { return V16_EACH(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
V_INLINE v16 v16_min(v16 x, v16 y) { return V16_EACH(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)); }
V_INLINE v16 v16_abs(v16 x)
{
    __m256 sign = _mm256_set1_ps(-0.0f);
    return V16_EACH(_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b));
}
V_INLINE v16 v16_fma(v16 x, v16 y, v16 z) { return V16_EACH(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)); }
V_INLINE v16 v16_round(v16 x)
{
    return V16_EACH(_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                    _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
V_INLINE __m256 v8_scale2(__m256 a, __m256 n)
{
    __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(e));
}
V_INLINE v16 v16_scale2(v16 x, v16 n) { return V16_EACH(v8_scale2(x.a, n.a), v8_scale2(x.b, n.b)); }
V_INLINE v16 v16_from_f16(const uint16_t *p)
{
    return V16_EACH(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))));
}
V_INLINE void v16_to_f16(uint16_t *p, v16 x)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
V_INLINE __m256 v8_from_bf16(const uint16_t *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
V_INLINE v16 v16_from_bf16(const uint16_t *p) { return V16_EACH(v8_from_bf16(p), v8_from_bf16(p + 8)); }
V_INLINE void v16_bf16_pairs(const uint8_t *p, v16 *even, v16 *odd)
{
    __m256i a = _mm256_loadu_si256((const __m256i *)p), b = _mm256_loadu_si256((const __m256i *)(p + 32));
    __m256i upper = _mm256_set1_epi32((int32_t)0xffff0000u);
    *even = V16_EACH(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)));
    *odd = V16_EACH(_mm256_castsi256_ps(_mm256_and_si256(a, upper)), _mm256_castsi256_ps(_mm256_and_si256(b, upper)));
}
V_INLINE __m256 v8_from_u8(const void *p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p))); }
V_INLINE __m256 v8_from_i8(const void *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p))); }
V_INLINE v16 v16_from_u8(const uint8_t *p) { return V16_EACH(v8_from_u8(p), v8_from_u8(p + 8)); }
V_INLINE v16 v16_from_i8(const int8_t *p) { return V16_EACH(v8_from_i8(p), v8_from_i8(p + 8)); }
V_INLINE v16 v16_first(int n, v16 x, v16 y)
{
    __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 low = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes));
    __m256 high = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lanes));
    return V16_EACH(_mm256_blendv_ps(y.a, x.a, low), _mm256_blendv_ps(y.b, x.b, high));
}
V_INLINE int32_t v16_to_i8(int8_t *p, v16 x)
{
    __m256i a = _mm256_cvtps_epi32(x.a), b = _mm256_cvtps_epi32(x.b);
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    __m256i s = _mm256_add_epi32(a, b);
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
}
V_INLINE i32x16 i32x16_set1(int32_t x) { return (i32x16){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
V_INLINE v16 v16_from_i32(i32x16 x) { return V16_EACH(_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)); }
V_INLINE u8x64 u8x64_load(const uint8_t *p)
{
    return (u8x64){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))};
}
V_INLINE u8x64 u8x64_low4(u8x64 x)
{
    __m256i low = _mm256_set1_epi8(15);
    return (u8x64){_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low)};
}
V_INLINE u8x64 u8x64_high4(u8x64 x)
{
    return u8x64_low4((u8x64){_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
}
V_INLINE __m256i bytes_of_bits(const uint8_t *bits, char value)
{
    int32_t word;
    memcpy(&word, bits, 4);
    __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    __m256i select = _mm256_set1_epi64x((long long)0x8040201008040201ull);
    __m256i x = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), spread), select);
    return _mm256_and_si256(_mm256_cmpeq_epi8(x, select), _mm256_set1_epi8(value));
}
V_INLINE u8x64 u8x64_add_bits(u8x64 x, const uint8_t *bits, char value)
{
    return (u8x64){_mm256_or_si256(x.a, bytes_of_bits(bits, value)), _mm256_or_si256(x.b, bytes_of_bits(bits + 4, value))};
}
V_INLINE __m256i dot_pairs(__m256i sum, __m256i u, __m256i s)
{
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
}
/* |code * x| sums of two stay below 2^15 for codes of at most 7 bits, so that maddubs never saturates. */
V_INLINE i32x16 i32x16_dot(i32x16 sum, u8x64 codes, const int8_t *x)
{
    int32_t x4;
    memcpy(&x4, x, 4);
    __m256i s = _mm256_set1_epi32(x4);
    return (i32x16){dot_pairs(sum.a, codes.a, s), dot_pairs(sum.b, codes.b, s)};
}
/* 8-bit codes around 128, taken as signed: |w| times x with w's sign, 128 * 127 * 2 < 2^15. */
V_INLINE __m256i dot_signed(__m256i sum, __m256i codes, __m256i s)
{
    __m256i w = _mm256_xor_si256(codes, _mm256_set1_epi8((char)0x80));
    return dot_pairs(sum, _mm256_abs_epi8(w), _mm256_sign_epi8(s, w));
}
V_INLINE i32x16 i32x16_dot8(i32x16 sum, u8x64 codes, const int8_t *x)
{
    int32_t x4;
    memcpy(&x4, x, 4);
    __m256i s = _mm256_set1_epi32(x4);
    return (i32x16){dot_signed(sum.a, codes.a, s), dot_signed(sum.b, codes.b, s)};
}
V_INLINE i32x16 i32x16_add(i32x16 x, i32x16 y) { return (i32x16){_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
V_INLINE i32x16 i32x16_and(i32x16 x, int32_t y)
{
    return (i32x16){_mm256_and_si256(x.a, _mm256_set1_epi32(y)), _mm256_and_si256(x.b, _mm256_set1_epi32(y))};
}
#define i32x16_sra(x, n) ((i32x16){_mm256_srai_epi32((x).a, n), _mm256_srai_epi32((x).b, n)})
V_INLINE __m256i words_of(v16 x)
{
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)), 0xd8);
}
V_INLINE void v16_planes(int8_t *high, int8_t *low, v16 x, v16 y)
{
    __m256i a = words_of(x), b = words_of(y), bytes = _mm256_set1_epi16(255), half = _mm256_set1_epi16(128);
    __m256i l = _mm256_packus_epi16(_mm256_and_si256(a, bytes), _mm256_and_si256(b, bytes));
    __m256i h = _mm256_packs_epi16(_mm256_srai_epi16(_mm256_add_epi16(a, half), 8), _mm256_srai_epi16(_mm256_add_epi16(b, half), 8));
    _mm256_storeu_si256((__m256i *)low, _mm256_permute4x64_epi64(l, 0xd8));
    _mm256_storeu_si256((__m256i *)high, _mm256_permute4x64_epi64(h, 0xd8));
}
V_INLINE int32_t sums_of_halves(const int8_t *p)
{
    __m256i ones = _mm256_set1_epi8(1), words = _mm256_maddubs_epi16(ones, _mm256_loadu_si256((const __m256i *)p));
    __m256i s = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
    s = _mm256_add_epi32(s, _mm256_shuffle_epi32(s, 0x4e));
    s = _mm256_add_epi32(s, _mm256_shuffle_epi32(s, 0xb1));
    return _mm256_extract_epi16(s, 0) | (int32_t)((uint32_t)_mm256_extract_epi16(s, 8) << 16);
}
V_INLINE __m256i pairs8(const uint8_t *p)
{
    __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_or_si256(x, _mm256_slli_epi32(x, 16));
}
V_INLINE i32x16 i32x16_byte_pairs(const uint8_t *p)
{
    __m256i x = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    __m256i to = _mm256_set_epi32(0x7800780, 0x6800680, 0x5800580, 0x4800480, 0x3800380, 0x2800280, 0x1800180, 0x800080);
    return (i32x16){_mm256_shuffle_epi8(x, to), _mm256_shuffle_epi8(x, _mm256_or_si256(to, _mm256_set1_epi16(0x800)))};
}
V_INLINE i32x16 i32x16_pairs_mulhrs(i32x16 x, i32x16 y)
{
    return (i32x16){_mm256_mulhrs_epi16(x.a, y.a), _mm256_mulhrs_epi16(x.b, y.b)};
}
V_INLINE i32x16 i32x16_pairs_of(i32x16 low, i32x16 high)
{
    return (i32x16){_mm256_blend_epi16(low.a, high.a, 0xaa), _mm256_blend_epi16(low.b, high.b, 0xaa)};
}
V_INLINE i32x16 i32x16_times_upper(i32x16 sum, i32x16 x, i32x16 pairs)
{
    return (i32x16){_mm256_add_epi32(sum.a, _mm256_mullo_epi32(x.a, _mm256_srai_epi32(pairs.a, 16))),
                    _mm256_add_epi32(sum.b, _mm256_mullo_epi32(x.b, _mm256_srai_epi32(pairs.b, 16)))};
}
V_INLINE i32x16 i32x16_pairs(const uint8_t *p) { return (i32x16){pairs8(p), pairs8(p + 16)}; }
V_INLINE i32x16 i32x16_pairs_times(i32x16 pairs, int16_t x)
{
    return (i32x16){_mm256_mullo_epi16(pairs.a, _mm256_set1_epi16(x)), _mm256_mullo_epi16(pairs.b, _mm256_set1_epi16(x))};
}
V_INLINE i32x16 i32x16_dot16(i32x16 sum, i32x16 pairs, int32_t x)
{
    __m256i s = _mm256_set1_epi32(x);
    return (i32x16){_mm256_add_epi32(sum.a, _mm256_madd_epi16(pairs.a, s)), _mm256_add_epi32(sum.b, _mm256_madd_epi16(pairs.b, s))};
}
/* 16-bit sums of all even, and all odd, pairs of codes of a group: 8 * 2 * 15 * 128 < 2^15. */
typedef struct {
    __m256i a, b;
} code_sums;
V_INLINE code_sums code_sums_zero(void) { return (code_sums){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
V_INLINE code_sums code_sums_add(code_sums s, u8x64 packed, const int8_t *x)
{
    int32_t low4, high4;
    memcpy(&low4, x, 4);
    memcpy(&high4, x + 16, 4);
    __m256i xl = _mm256_set1_epi32(low4), xh = _mm256_set1_epi32(high4);
    u8x64 low = u8x64_low4(packed), high = u8x64_high4(packed);
    s.a = _mm256_add_epi16(s.a, _mm256_add_epi16(_mm256_maddubs_epi16(low.a, xl), _mm256_maddubs_epi16(high.a, xh)));
    s.b = _mm256_add_epi16(s.b, _mm256_add_epi16(_mm256_maddubs_epi16(low.b, xl), _mm256_maddubs_epi16(high.b, xh)));
    return s;
}
V_INLINE i32x16 code_sums_scale(i32x16 sum, code_sums s, i32x16 pairs)
{
    return (i32x16){_mm256_add_epi32(sum.a, _mm256_madd_epi16(s.a, pairs.a)), _mm256_add_epi32(sum.b, _mm256_madd_epi16(s.b, pairs.b))};
}
V_INLINE __m256 v8_unzip(__m256 a, __m256 b, bool odd)
{
    __m256 x = odd ? _mm256_shuffle_ps(a, b, 0xdd) : _mm256_shuffle_ps(a, b, 0x88);
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8));
}
V_INLINE void v16_unzip(const float *p, v16 *even, v16 *odd)
{
    v16 x = v16_load(p), y = v16_load(p + 16);
    *even = V16_EACH(v8_unzip(x.a, x.b, false), v8_unzip(y.a, y.b, false));
    *odd = V16_EACH(v8_unzip(x.a, x.b, true), v8_unzip(y.a, y.b, true));
}
V_INLINE void v8_zip(float *p, __m256 even, __m256 odd)
{
    __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    _mm256_storeu_ps(p, _mm256_permute2f128_ps(low, high, 0x20));
    _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(low, high, 0x31));
}
V_INLINE void v16_zip(float *p, v16 even, v16 odd)
{
    v8_zip(p, even.a, odd.a);
    v8_zip(p + 16, even.b, odd.b);
}
V_INLINE void v_prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }

#else

enum { V_ROWS = 1, V_ATTENTION_ROWS = 1, V_DOT8_SIGNED = 0 };
typedef struct {
    float f[16];
} v16;
typedef struct {
    int32_t i[16];
} i32x16;
typedef struct {
    uint8_t b[64];
} u8x64;

#define V16_LANES(expr)                                                                                                                \
    ({                                                                                                                                 \
        v16 out_;                                                                                                                      \
        for (int i = 0; i < 16; i++)                                                                                                   \
            out_.f[i] = (expr);                                                                                                        \
        out_;                                                                                                                          \
    })
V_INLINE v16 v16_load(const float *p) { return V16_LANES(p[i]); }
V_INLINE void v16_store(float *p, v16 a) { memcpy(p, a.f, sizeof a.f); }
V_INLINE v16 v16_set1(float x) { return V16_LANES(x); }
V_INLINE v16 v16_add(v16 a, v16 b) { return V16_LANES(a.f[i] + b.f[i]); }
V_INLINE v16 v16_sub(v16 a, v16 b) { return V16_LANES(a.f[i] - b.f[i]); }
V_INLINE v16 v16_mul(v16 a, v16 b) { return V16_LANES(a.f[i] * b.f[i]); }
V_INLINE v16 v16_div(v16 a, v16 b) { return V16_LANES(a.f[i] / b.f[i]); }
V_INLINE v16 v16_max(v16 a, v16 b) { return V16_LANES(a.f[i] > b.f[i] ? a.f[i] : b.f[i]); }
V_INLINE v16 v16_min(v16 a, v16 b) { return V16_LANES(a.f[i] < b.f[i] ? a.f[i] : b.f[i]); }
V_INLINE v16 v16_abs(v16 a) { return V16_LANES(fabsf(a.f[i])); }
V_INLINE v16 v16_fma(v16 a, v16 b, v16 c) { return V16_LANES(fmaf(a.f[i], b.f[i], c.f[i])); }
/* |a| < 2^22: adding 1.5 * 2^23 rounds to an integer, ties to even */
V_INLINE v16 v16_round(v16 a) { return V16_LANES(a.f[i] + 0x1.8p23f - 0x1.8p23f); }
V_INLINE v16 v16_scale2(v16 a, v16 n) { return V16_LANES(a.f[i] * bits_f32((uint32_t)((int32_t)n.f[i] + 127) << 23)); }
V_INLINE v16 v16_from_f16(const uint16_t *p) { return V16_LANES(f16_to_f32(p[i])); }
V_INLINE void v16_to_f16(uint16_t *p, v16 a)
{
    for (int i = 0; i < 16; i++)
        p[i] = f32_to_f16(a.f[i]);
}
V_INLINE v16 v16_from_bf16(const uint16_t *p) { return V16_LANES(bf16_to_f32(p[i])); }
V_INLINE void v16_bf16_pairs(const uint8_t *p, v16 *even, v16 *odd)
{
    for (int i = 0; i < 16; i++) {
        uint32_t pair;
        memcpy(&pair, p + 4 * i, sizeof pair);
        even->f[i] = bits_f32(pair << 16);
        odd->f[i] = bits_f32(pair & 0xffff0000u);
    }
}
V_INLINE v16 v16_from_u8(const uint8_t *p) { return V16_LANES((float)p[i]); }
V_INLINE v16 v16_from_i8(const int8_t *p) { return V16_LANES((float)p[i]); }
V_INLINE v16 v16_first(int n, v16 a, v16 b) { return V16_LANES(i < n ? a.f[i] : b.f[i]); }
V_INLINE int32_t v16_to_i8(int8_t *p, v16 a)
{
    int32_t sum = 0;
    a = v16_round(a);
    for (int i = 0; i < 16; i++) {
        p[i] = (int8_t)a.f[i];
        sum += p[i];
    }
    return sum;
}
V_INLINE i32x16 i32x16_set1(int32_t x)
{
    i32x16 out;
    for (int i = 0; i < 16; i++)
        out.i[i] = x;
    return out;
}
V_INLINE v16 v16_from_i32(i32x16 a) { return V16_LANES((float)a.i[i]); }
V_INLINE u8x64 u8x64_load(const uint8_t *p)
{
    u8x64 out;
    memcpy(out.b, p, 64);
    return out;
}
V_INLINE u8x64 u8x64_low4(u8x64 a)
{
    for (int i = 0; i < 64; i++)
        a.b[i] &= 15;
    return a;
}
V_INLINE u8x64 u8x64_high4(u8x64 a)
{
    for (int i = 0; i < 64; i++)
        a.b[i] >>= 4;
    return a;
}
V_INLINE u8x64 u8x64_add_bits(u8x64 a, const uint8_t *bits, char value)
{
    for (int i = 0; i < 64; i++)
        a.b[i] = (uint8_t)(a.b[i] + (bits[i / 8] >> i % 8 & 1) * value);
    return a;
}
V_INLINE i32x16 i32x16_dot(i32x16 sum, u8x64 a, const int8_t *x)
{
    for (int l = 0; l < 16; l++)
        sum.i[l] += a.b[4 * l] * x[0] + a.b[4 * l + 1] * x[1] + a.b[4 * l + 2] * x[2] + a.b[4 * l + 3] * x[3];
    return sum;
}
V_INLINE i32x16 i32x16_dot8(i32x16 sum, u8x64 a, const int8_t *x) { return i32x16_dot(sum, a, x); }
#define I32_LANES(expr)                                                                                                                \
    ({                                                                                                                                 \
        i32x16 out_;                                                                                                                   \
        for (int i = 0; i < 16; i++)                                                                                                   \
            out_.i[i] = (int32_t)(expr);                                                                                               \
        out_;                                                                                                                          \
    })
V_INLINE i32x16 i32x16_add(i32x16 a, i32x16 b) { return I32_LANES((uint32_t)a.i[i] + (uint32_t)b.i[i]); }
V_INLINE i32x16 i32x16_and(i32x16 a, int32_t b) { return I32_LANES(a.i[i] & b); }
V_INLINE i32x16 i32x16_sra(i32x16 a, int n) { return I32_LANES(a.i[i] >> n); }
V_INLINE void v16_planes(int8_t *high, int8_t *low, v16 a, v16 b)
{
    a = v16_round(a);
    b = v16_round(b);
    for (int i = 0; i < 32; i++) {
        int32_t x = (int32_t)(i < 16 ? a.f[i] : b.f[i - 16]);
        low[i] = (int8_t)(((x + 128) & 255) - 128);
        high[i] = (int8_t)((x + 128) >> 8);
    }
}
V_INLINE int32_t pair_of(int32_t low, int32_t high) { return (int32_t)((uint32_t)low & 0xffff) | (int32_t)((uint32_t)high << 16); }
V_INLINE int32_t lower_of(int32_t pair) { return (int16_t)pair; }
V_INLINE int32_t upper_of(int32_t pair) { return pair >> 16; }
V_INLINE int32_t sums_of_halves(const int8_t *p)
{
    int32_t sums[2] = {0};
    for (int i = 0; i < 32; i++)
        sums[i / 16] += p[i];
    return pair_of(sums[0], sums[1]);
}
V_INLINE i32x16 i32x16_pairs(const uint8_t *p)
{
    int16_t x[16];
    memcpy(x, p, sizeof x);
    return I32_LANES(pair_of(x[i], x[i]));
}
V_INLINE i32x16 i32x16_byte_pairs(const uint8_t *p) { return I32_LANES(pair_of(p[i] << 8, p[i] << 8)); }
V_INLINE i32x16 i32x16_pairs_times(i32x16 pairs, int16_t x)
{
    return I32_LANES(pair_of(lower_of(pairs.i[i]) * x, upper_of(pairs.i[i]) * x));
}
V_INLINE i32x16 i32x16_pairs_mulhrs(i32x16 x, i32x16 y)
{
    return I32_LANES(pair_of((lower_of(x.i[i]) * lower_of(y.i[i]) + 16384) >> 15, (upper_of(x.i[i]) * upper_of(y.i[i]) + 16384) >> 15));
}
V_INLINE i32x16 i32x16_pairs_of(i32x16 low, i32x16 high) { return I32_LANES(pair_of(lower_of(low.i[i]), upper_of(high.i[i]))); }
V_INLINE i32x16 i32x16_dot16(i32x16 sum, i32x16 pairs, int32_t x)
{
    return I32_LANES((uint32_t)sum.i[i] + (uint32_t)(lower_of(pairs.i[i]) * lower_of(x)) +
                     (uint32_t)(upper_of(pairs.i[i]) * upper_of(x)));
}
V_INLINE i32x16 i32x16_times_upper(i32x16 sum, i32x16 x, i32x16 pairs)
{
    return I32_LANES((uint32_t)sum.i[i] + (uint32_t)x.i[i] * (uint32_t)upper_of(pairs.i[i]));
}
typedef i32x16 code_sums;
V_INLINE code_sums code_sums_zero(void) { return i32x16_set1(0); }
V_INLINE code_sums code_sums_add(code_sums s, u8x64 packed, const int8_t *x)
{
    return i32x16_dot(i32x16_dot(s, u8x64_low4(packed), x), u8x64_high4(packed), x + 16);
}
V_INLINE i32x16 code_sums_scale(i32x16 sum, code_sums s, i32x16 pairs)
{
    return I32_LANES((uint32_t)sum.i[i] + (uint32_t)upper_of(pairs.i[i]) * (uint32_t)s.i[i]);
}
V_INLINE void v16_unzip(const float *p, v16 *even, v16 *odd)
{
    for (int i = 0; i < 16; i++)
        even->f[i] = p[2 * i], odd->f[i] = p[2 * i + 1];
}
V_INLINE void v16_zip(float *p, v16 even, v16 odd)
{
    for (int i = 0; i < 16; i++)
        p[2 * i] = even.f[i], p[2 * i + 1] = odd.f[i];
}
V_INLINE void v_prefetch(const void *p) { (void)p; }
#endif

/* Lanes i and i + 8, then i + 4, i + 2, i + 1: the same tree everywhere. */
V_INLINE float v16_sum(v16 a)
{
    float f[16];
    v16_store(f, a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++)
            f[i] += f[i + half];
    return f[0];
}
V_INLINE float v16_hmax(v16 a)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(a);
#endif
    float f[16];
    v16_store(f, a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++)
            f[i] = f[i] > f[i + half] ? f[i] : f[i + half];
    return f[0];
}
/* The first n lanes from memory, the others 0. */
V_INLINE v16 v16_load_n(const float *p, int n)
{
    float f[16] = {0};
    if (n >= 16)
        return v16_load(p);
    memcpy(f, p, (size_t)n * sizeof *f);
    return v16_load(f);
}
V_INLINE void v16_store_n(float *p, v16 a, int n)
{
    float f[16];
    if (n >= 16) {
        v16_store(p, a);
        return;
    }
    v16_store(f, a);
    memcpy(p, f, (size_t)n * sizeof *f);
}
/* 2^r on [-1/2, 1/2]: minimax polynomial. */
V_INLINE v16 v16_exp2_fraction(v16 r)
{
    v16 p = v16_set1(1.535336188319500e-4f);
    p = v16_fma(p, r, v16_set1(1.339887440266574e-3f));
    p = v16_fma(p, r, v16_set1(9.618437357674640e-3f));
    p = v16_fma(p, r, v16_set1(5.550332471162809e-2f));
    p = v16_fma(p, r, v16_set1(2.402264791363012e-1f));
    p = v16_fma(p, r, v16_set1(6.931472028550421e-1f));
    return v16_fma(p, r, v16_set1(1.0f));
}
/* 2^x to within 2 ulp for -100 <= x <= 127; below it gives 2^-100, which is nothing beside 1 and still leaves products with it normal
 * (an operation on denormals takes a hundred cycles). */
V_INLINE v16 v16_exp2(v16 x)
{
    x = v16_min(v16_max(x, v16_set1(-100.0f)), v16_set1(127.0f));
    v16 n = v16_round(x);
    return v16_scale2(v16_exp2_fraction(v16_sub(x, n)), n);
}
/* The 8 lines of one half cell, unpacked from 4-bit halves and bit planes. */
V_INLINE u8x64 cell_line(const uint8_t *half, uint32_t bits, int g)
{
    if (bits == 8)
        return u8x64_load(half + g * LINE);
    u8x64 packed = u8x64_load(half + g % 4 * LINE), line = g < 4 ? u8x64_low4(packed) : u8x64_high4(packed);
    if (bits >= 5)
        line = u8x64_add_bits(line, half + 4 * LINE + g * 8, 16);
    if (bits >= 6)
        line = u8x64_add_bits(line, half + 5 * LINE + g * 8, 32);
    return line;
}
