#include <string.h>
#include "libprompt/block_chain.h"
#include "libprompt/error.h"

int kvg_salt_join(struct kvg_str operator_salt, struct kvg_str cache_salt, struct kvg_arena *arena, struct kvg_str *out)
{
    if (cache_salt.len == 0) {
        *out = operator_salt;
        return KVG_OK;
    }
    size_t len = operator_salt.len + 1 + cache_salt.len;
    char *joined = kvg_arena_alloc(arena, len);
    if (!joined)
        return KVG_NOMEM;
    if (operator_salt.len)
        memcpy(joined, operator_salt.bytes, operator_salt.len);
    joined[operator_salt.len] = '\x1f';
    memcpy(joined + operator_salt.len + 1, cache_salt.bytes, cache_salt.len);
    *out = (struct kvg_str){joined, len};
    return KVG_OK;
}
