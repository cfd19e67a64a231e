/* The noise of sampling, bit-equal on every backend: Philox4x32-10 and one polynomial log and exp in f32.
 *
 * Gumbel noise g(seed, choice, position, id) = -log(-log(u)); argmax over (log-probability + g) draws from the distribution.
 * Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Polynomials: S. Moshier's Cephes.
 *
 * Every multiplication and addition below is rounded on its own: no contraction into FMA, so that a CPU without FMA and a GPU
 * agree. The build says -ffp-contract=off; device code uses the _rn intrinsics.
 */
#pragma once
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define SAMPLE_INLINE static __host__ __device__ __forceinline__
#else
#define SAMPLE_INLINE static inline
#endif
#ifdef __CUDA_ARCH__
#define SAMPLE_MUL(a, b) __fmul_rn((a), (b))
#define SAMPLE_ADD(a, b) __fadd_rn((a), (b))
#else
#define SAMPLE_MUL(a, b) ((a) * (b))
#define SAMPLE_ADD(a, b) ((a) + (b))
#endif

/* No noise is larger (the largest is 16.635…), so a token this far below the best score cannot win. */
#define SAMPLE_NOISE_MAX 16.75f

/* counter[4] -> four random words, in place. key: the seed. */
SAMPLE_INLINE void sample_philox(uint32_t counter[4], uint64_t seed)
{
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * counter[0], b = (uint64_t)0xCD9E8D57u * counter[2];
        uint32_t c1 = counter[1], c3 = counter[3];
        counter[0] = (uint32_t)(b >> 32) ^ c1 ^ k0;
        counter[1] = (uint32_t)b;
        counter[2] = (uint32_t)(a >> 32) ^ c3 ^ k1;
        counter[3] = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

/* a * x + b, rounded twice. */
SAMPLE_INLINE float sample_step(float a, float x, float b)
{
    return SAMPLE_ADD(SAMPLE_MUL(a, x), b);
}

/* Natural log of a normal, positive x; within 2 ulp. */
SAMPLE_INLINE float sample_log(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t offset = bits - 0x3f3504f3u; /* sqrt(1/2): the mantissa goes to [sqrt(1/2), sqrt(2)) */
    float e = (float)((int32_t)offset >> 23);
    bits = (offset & 0x007fffffu) + 0x3f3504f3u;
    memcpy(&x, &bits, sizeof x);
    x = SAMPLE_ADD(x, -1.0f);
    float z = SAMPLE_MUL(x, x), y = 7.0376836292e-2f;
    y = sample_step(y, x, -1.1514610310e-1f);
    y = sample_step(y, x, 1.1676998740e-1f);
    y = sample_step(y, x, -1.2420140846e-1f);
    y = sample_step(y, x, 1.4249322787e-1f);
    y = sample_step(y, x, -1.6668057665e-1f);
    y = sample_step(y, x, 2.0000714765e-1f);
    y = sample_step(y, x, -2.4999993993e-1f);
    y = sample_step(y, x, 3.3333331174e-1f);
    y = SAMPLE_MUL(SAMPLE_MUL(y, x), z);
    y = sample_step(-2.12194440e-4f, e, y);
    y = sample_step(-0.5f, z, y);
    return sample_step(0.693359375f, e, SAMPLE_ADD(x, y));
}

/* e^x for x <= 0; 0 below -87. Within 2 ulp. */
SAMPLE_INLINE float sample_exp(float x)
{
    float in = x;
    x = x < -87.0f ? -87.0f : x;
    float n = (float)(int32_t)SAMPLE_ADD(SAMPLE_MUL(x, 1.44269504f), -0.5f); /* to the nearest: x <= 0 truncates upwards */
    x = sample_step(-0.693359375f, n, x);
    x = sample_step(2.12194440e-4f, n, x);
    float y = 1.9875691500e-4f;
    y = sample_step(y, x, 1.3981999507e-3f);
    y = sample_step(y, x, 8.3334519073e-3f);
    y = sample_step(y, x, 4.1665795894e-2f);
    y = sample_step(y, x, 1.6666665459e-1f);
    y = sample_step(y, x, 5.0000001201e-1f);
    y = SAMPLE_ADD(sample_step(y, SAMPLE_MUL(x, x), x), 1.0f);
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23, keep = in < -87.0f ? 0 : ~0u; /* a mask, so that loops vectorize */
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    y = SAMPLE_MUL(y, scale);
    memcpy(&bits, &y, sizeof bits);
    bits &= keep;
    memcpy(&y, &bits, sizeof y);
    return y;
}

/* A random word to Gumbel noise. The uniform number is (k + 1/2) / 2^23: never 0, never 1, exact in f32. */
SAMPLE_INLINE float sample_gumbel(uint32_t word)
{
    float u = SAMPLE_MUL(SAMPLE_ADD((float)(word >> 9), 0.5f), 1.1920928955078125e-7f);
    return -sample_log(-sample_log(u));
}

SAMPLE_INLINE float sample_noise(uint64_t seed, uint32_t choice, uint32_t position, uint32_t id)
{
    uint32_t counter[4] = {id, position, choice, 0};
    sample_philox(counter, seed);
    return sample_gumbel(counter[0]);
}
