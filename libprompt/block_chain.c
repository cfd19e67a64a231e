/* The chain of block hashes; see block_chain.h for the formula. The seed hashes, in this order, each after its length as u32
 * LE: schema version (u32 LE), model name, fingerprint (16 bytes), block size (u32 LE), salt. */
#include "libprompt/block_chain.h"

#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

static void store_u32(uint8_t *p, uint32_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
    p[2] = (uint8_t)(v >> 16);
    p[3] = (uint8_t)(v >> 24);
}

static void add_field(XXH3_state_t *state, const void *bytes, size_t n)
{
    uint8_t len[4];

    store_u32(len, (uint32_t)n);
    XXH3_128bits_update(state, len, 4);
    if (n)
        XXH3_128bits_update(state, bytes, n);
}

static void to_canonical(XXH128_hash_t hash, struct kvg_hash *out)
{
    XXH128_canonical_t canonical;

    XXH128_canonicalFromHash(&canonical, hash);
    memcpy(out->bytes, canonical.digest, sizeof out->bytes);
}

void kvg_chain_seed(const struct kvg_chain_identity *identity, struct kvg_hash *seed)
{
    XXH3_state_t state;
    uint8_t number[4];

    XXH3_INITSTATE(&state);
    XXH3_128bits_reset(&state);
    store_u32(number, KVG_SCHEMA_VERSION);
    add_field(&state, number, 4);
    add_field(&state, identity->model, strlen(identity->model));
    add_field(&state, identity->fingerprint.bytes, sizeof identity->fingerprint.bytes);
    store_u32(number, identity->block_size);
    add_field(&state, number, 4);
    add_field(&state, identity->salt, identity->salt_len);
    to_canonical(XXH3_128bits_digest(&state), seed);
}

/* One block that fits the stack buffer: a single one-shot hash. Ids are little-endian bytes on any host. */
static void hash_block(const struct kvg_hash *previous, const uint32_t *ids, uint32_t n, struct kvg_hash *out)
{
    uint8_t bytes[16 + 512 * 4];

    memcpy(bytes, previous->bytes, 16);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    memcpy(bytes + 16, ids, (size_t)n * 4);
#else
    for (uint32_t i = 0; i < n; i++)
        store_u32(bytes + 16 + (size_t)i * 4, ids[i]);
#endif
    to_canonical(XXH3_128bits(bytes, 16 + (size_t)n * 4), out);
}

static void hash_large_block(const struct kvg_hash *previous, const uint32_t *ids, uint32_t n, struct kvg_hash *out)
{
    XXH3_state_t state;
    uint8_t id[4];

    XXH3_INITSTATE(&state);
    XXH3_128bits_reset(&state);
    XXH3_128bits_update(&state, previous->bytes, 16);
    for (uint32_t i = 0; i < n; i++) {
        store_u32(id, ids[i]);
        XXH3_128bits_update(&state, id, 4);
    }
    to_canonical(XXH3_128bits_digest(&state), out);
}

size_t kvg_chain_extend(const struct kvg_hash *previous, const uint32_t *ids, size_t n, uint32_t block_size, struct kvg_hash *out)
{
    size_t n_blocks = n / block_size;

    for (size_t b = 0; b < n_blocks; b++) {
        const uint32_t *block = ids + b * block_size;
        const struct kvg_hash *before = b ? &out[b - 1] : previous;

        if (block_size <= 512)
            hash_block(before, block, block_size, &out[b]);
        else
            hash_large_block(before, block, block_size, &out[b]);
    }
    return n_blocks;
}

void kvg_hash_hex(const struct kvg_hash *hash, char out[KVG_HASH_HEX + 1])
{
    static const char digits[] = "0123456789abcdef";

    for (int i = 0; i < 16; i++) {
        out[2 * i] = digits[hash->bytes[i] >> 4];
        out[2 * i + 1] = digits[hash->bytes[i] & 15];
    }
    out[KVG_HASH_HEX] = 0;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

int kvg_hash_parse(const char *hex, struct kvg_hash *out)
{
    struct kvg_hash parsed;

    for (int i = 0; i < 16; i++) {
        int high = hex_digit(hex[2 * i]), low = high < 0 ? -1 : hex_digit(hex[2 * i + 1]);
        if (low < 0)
            return -1;
        parsed.bytes[i] = (uint8_t)(high << 4 | low);
    }
    if (hex[KVG_HASH_HEX])
        return -1;
    *out = parsed;
    return 0;
}
