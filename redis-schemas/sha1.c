#include "redis-schemas/sha1.h"
#include <string.h>

enum { BLOCK = 64, LENGTH_AT = 56 };

static uint32_t rotate(uint32_t x, int bits)
{
    return x << bits | x >> (32 - bits);
}

static uint32_t load_be(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static void store_be(uint8_t *p, uint32_t x)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(x >> (24 - 8 * i));
}

/* The function and constant of round t; names as in FIPS 180-4, 4.1.1 and 4.2.1. */
static uint32_t round_term(int t, uint32_t b, uint32_t c, uint32_t d)
{
    if (t < 20)
        return ((b & c) ^ (~b & d)) + 0x5a827999;
    if (t < 40)
        return (b ^ c ^ d) + 0x6ed9eba1;
    if (t < 60)
        return ((b & c) ^ (b & d) ^ (c & d)) + 0x8f1bbcdc;
    return (b ^ c ^ d) + 0xca62c1d6;
}

static void compress(uint32_t state[5], const uint8_t *block)
{
    uint32_t w[80];
    for (int t = 0; t < 16; t++)
        w[t] = load_be(block + 4 * t);
    for (int t = 16; t < 80; t++)
        w[t] = rotate(w[t - 3] ^ w[t - 8] ^ w[t - 14] ^ w[t - 16], 1);
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3], e = state[4];
    for (int t = 0; t < 80; t++) {
        uint32_t next = rotate(a, 5) + round_term(t, b, c, d) + e + w[t];
        e = d;
        d = c;
        c = rotate(b, 30);
        b = a;
        a = next;
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
    state[4] += e;
}

void kvg_sha1(const void *bytes, size_t n, uint8_t digest[KVG_SHA1_SIZE])
{
    uint32_t state[5] = {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476, 0xc3d2e1f0};
    const uint8_t *in = bytes;
    size_t left = n;
    for (; left >= BLOCK; left -= BLOCK, in += BLOCK)
        compress(state, in);

    uint8_t tail[2 * BLOCK] = {0};
    if (left)
        memcpy(tail, in, left);
    tail[left] = 0x80;
    size_t end = left < LENGTH_AT ? BLOCK : 2 * BLOCK;
    store_be(tail + end - 8, (uint32_t)((uint64_t)n >> 29));
    store_be(tail + end - 4, (uint32_t)((uint64_t)n << 3));
    compress(state, tail);
    if (end > BLOCK)
        compress(state, tail + BLOCK);
    for (int i = 0; i < 5; i++)
        store_be(digest + 4 * i, state[i]);
}
