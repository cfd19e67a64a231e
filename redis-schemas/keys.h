/* Names of kvgate's Redis keys, and the scripts. redis-schemas/README.md lists every key with type, TTL, writer and reader.
 *
 * All keys of one model share the hash tag {model}, hence one shard.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include "libprompt/block_chain.h"

enum { KVG_NAME_MAX = 128, KVG_PREFIX_MAX = 64, KVG_KEY_MAX = 512, KVG_CLAIM_HEX = 20 };

/* Whether a model name or worker id matches [A-Za-z0-9._/-]{1,128}. */
bool kvg_name_valid(const char *name, size_t len);
/* Whether a key prefix matches [A-Za-z0-9._/:-]{0,64}: no brace, which would move the hash tag. */
bool kvg_prefix_valid(const char *prefix, size_t len);

/* Each writes a NUL-terminated key to out[KVG_KEY_MAX] and returns its length. prefix: "kvgate:" by default. Names and prefix
 * are valid by the two functions above. */
int kvg_key_meta(char *out, const char *prefix, const char *model); /* KEYS[1] of every script */
int kvg_key_lease(char *out, const char *prefix, const char *model);
int kvg_key_leases(char *out, const char *prefix, const char *model);
int kvg_key_load(char *out, const char *prefix, const char *model);
int kvg_key_worker(char *out, const char *prefix, const char *model, const char *worker_id);
int kvg_key_own(char *out, const char *prefix, const char *model, const struct kvg_hash *hash); /* by its first 4 hex digits */
/* KEYS[1] of limit.lua; id: 40 hex digits. */
int kvg_key_limit(char *out, const char *prefix, const char *id);
/* "kvgate:{m}:" alone: the scripts build the names of own buckets from it. */
int kvg_key_base(char *out, const char *prefix, const char *model);

/* A Lua script compiled into the binary. */
struct kvg_script {
    const char *name; /* "route" */
    const char *source;
    size_t len;
    char sha1[41]; /* for EVALSHA */
};
enum kvg_script_id {
    KVG_SCRIPT_ROUTE,
    KVG_SCRIPT_PUBLISH,
    KVG_SCRIPT_HEARTBEAT,
    KVG_SCRIPT_REGISTER,
    KVG_SCRIPT_WORKERS,
    KVG_SCRIPT_FORGET,
    KVG_SCRIPT_HOLDS,
    KVG_SCRIPT_OWNERS,
    KVG_SCRIPT_LIMIT,
    KVG_SCRIPT_COUNT
};
const struct kvg_script *kvg_script(enum kvg_script_id id);

/* Rendezvous score of a worker for a block: first 8 hex digits of SHA1(hash hex + worker id), as route.lua computes it. The
 * highest score wins (Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous", 1996). */
uint32_t kvg_rendezvous_score(const struct kvg_hash *hash, const char *worker_id);
/* Which block of the chain decides: min(n, 1024 / block_size) - 1. n >= 1. */
size_t kvg_rendezvous_block(size_t n, uint32_t block_size);
