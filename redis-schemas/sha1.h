/* SHA-1 (FIPS 180-4), for rendezvous scores alone: Redis offers it to Lua scripts, and libcrypto would be a heavy guest
 * in nginx. Not for security. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { KVG_SHA1_SIZE = 20 };

void kvg_sha1(const void *bytes, size_t n, uint8_t digest[KVG_SHA1_SIZE]);
