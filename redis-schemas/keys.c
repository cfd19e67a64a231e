#include "redis-schemas/keys.h"
#include <stdio.h>
#include <string.h>
#include "redis-schemas/sha1.h"
#include "scripts.h"

static bool chars_valid(const char *text, size_t len, const char *also)
{
    for (size_t i = 0; i < len; i++) {
        char c = text[i];
        bool alnum = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
        if (!alnum && (!c || !strchr(also, c)))
            return false;
    }
    return true;
}

bool kvg_name_valid(const char *name, size_t len)
{
    return len >= 1 && len <= KVG_NAME_MAX && chars_valid(name, len, "._/-");
}

bool kvg_prefix_valid(const char *prefix, size_t len)
{
    return len <= KVG_PREFIX_MAX && chars_valid(prefix, len, "._/-:");
}

int kvg_key_base(char *out, const char *prefix, const char *model)
{
    return snprintf(out, KVG_KEY_MAX, "%s{%s}:", prefix, model);
}

static int key(char *out, const char *prefix, const char *model, const char *name)
{
    return snprintf(out, KVG_KEY_MAX, "%s{%s}:%s", prefix, model, name);
}

int kvg_key_meta(char *out, const char *prefix, const char *model)
{
    return key(out, prefix, model, "meta");
}

int kvg_key_lease(char *out, const char *prefix, const char *model)
{
    return key(out, prefix, model, "lease");
}

int kvg_key_leases(char *out, const char *prefix, const char *model)
{
    return key(out, prefix, model, "leases");
}

int kvg_key_load(char *out, const char *prefix, const char *model)
{
    return key(out, prefix, model, "load");
}

int kvg_key_worker(char *out, const char *prefix, const char *model, const char *worker_id)
{
    return snprintf(out, KVG_KEY_MAX, "%s{%s}:w:%s", prefix, model, worker_id);
}

int kvg_key_own(char *out, const char *prefix, const char *model, const struct kvg_hash *hash)
{
    return snprintf(out, KVG_KEY_MAX, "%s{%s}:own:%02x%02x", prefix, model, hash->bytes[0], hash->bytes[1]);
}

int kvg_key_limit(char *out, const char *prefix, const char *id)
{
    return snprintf(out, KVG_KEY_MAX, "%slimit:{%s}", prefix, id);
}

const struct kvg_script *kvg_script(enum kvg_script_id id)
{
    static const struct kvg_script scripts[KVG_SCRIPT_COUNT] = {
        [KVG_SCRIPT_ROUTE] = {"route", script_route, script_route_len, SCRIPT_ROUTE_SHA1},
        [KVG_SCRIPT_PUBLISH] = {"publish", script_publish, script_publish_len, SCRIPT_PUBLISH_SHA1},
        [KVG_SCRIPT_HEARTBEAT] = {"heartbeat", script_heartbeat, script_heartbeat_len, SCRIPT_HEARTBEAT_SHA1},
        [KVG_SCRIPT_REGISTER] = {"register", script_register, script_register_len, SCRIPT_REGISTER_SHA1},
        [KVG_SCRIPT_WORKERS] = {"workers", script_workers, script_workers_len, SCRIPT_WORKERS_SHA1},
        [KVG_SCRIPT_FORGET] = {"forget", script_forget, script_forget_len, SCRIPT_FORGET_SHA1},
        [KVG_SCRIPT_HOLDS] = {"holds", script_holds, script_holds_len, SCRIPT_HOLDS_SHA1},
        [KVG_SCRIPT_OWNERS] = {"owners", script_owners, script_owners_len, SCRIPT_OWNERS_SHA1},
        [KVG_SCRIPT_LIMIT] = {"limit", script_limit, script_limit_len, SCRIPT_LIMIT_SHA1},
    };
    return &scripts[id];
}

uint32_t kvg_rendezvous_score(const struct kvg_hash *hash, const char *worker_id)
{
    char text[KVG_HASH_HEX + KVG_NAME_MAX + 1];
    size_t len = strnlen(worker_id, KVG_NAME_MAX);
    kvg_hash_hex(hash, text);
    memcpy(text + KVG_HASH_HEX, worker_id, len);
    uint8_t digest[KVG_SHA1_SIZE];
    kvg_sha1(text, KVG_HASH_HEX + len, digest);
    return (uint32_t)digest[0] << 24 | (uint32_t)digest[1] << 16 | (uint32_t)digest[2] << 8 | digest[3];
}

size_t kvg_rendezvous_block(size_t n, uint32_t block_size)
{
    size_t limit = block_size && block_size <= 1024 ? 1024 / block_size : 1;
    return (n < limit ? n : limit) - 1;
}
