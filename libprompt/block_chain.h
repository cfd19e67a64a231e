/* The identity of a prompt prefix: one hash for each whole block of ids, each naming all ids up to its block's end.
 *
 *   seed = XXH3-128(len-prefixed: schema version, model, fingerprint, block size, salt)
 *   h[0] = XXH3-128(seed || ids of block 0, u32 LE)     h[i] = XXH3-128(h[i-1] || ids of block i)
 */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include "libprompt/arena.h"
#include "libprompt/json.h"

enum { KVG_SCHEMA_VERSION = 1, KVG_HASH_HEX = 32 };

struct kvg_hash {
    uint8_t bytes[16]; /* canonical (big-endian) XXH3-128 */
};

struct kvg_chain_identity {
    const char *model; /* NUL-terminated name */
    struct kvg_hash fingerprint;
    uint32_t block_size;
    const char *salt; /* may be NULL when salt_len is 0 */
    size_t salt_len;
};

void kvg_chain_seed(const struct kvg_chain_identity *identity, struct kvg_hash *seed);
/* Hashes of the whole blocks of ids[0..n), continuing from `previous` (the seed, or the hash of the block before);
 * out has room for n / block_size hashes; returns that number. */
size_t kvg_chain_extend(const struct kvg_hash *previous, const uint32_t *ids, size_t n, uint32_t block_size,
                        struct kvg_hash *out);
void kvg_hash_hex(const struct kvg_hash *hash, char out[KVG_HASH_HEX + 1]);
int kvg_hash_parse(const char *hex, struct kvg_hash *out); /* 0, or -1 when not 32 hex digits */

/* The salt of a request's chain, in the arena: the operator's alone (API key, or X-Kvgate-Salt) where the client gives no
 * cache_salt, else operator + "\x1f" + cache_salt; so a client's can only refine the operator's, which holds no \x1f.
 * KVG_NOMEM or 0. */
int kvg_salt_join(struct kvg_str operator_salt, struct kvg_str cache_salt, struct kvg_arena *arena, struct kvg_str *out);
