/* Where Redis is: the URLs that the worker's --redis and the gateway's kvgate_redis take. */
#pragma once
#include <stdint.h>
#include "libprompt/error.h"

struct kvg_redis_url {
    char path[108];     /* unix socket; "" = TCP */
    char host[256];     /* name or address, without brackets */
    uint16_t port;      /* 6379 unless given */
    char user[129];     /* percent-decoded; "" = none, AUTH takes the password alone */
    char password[513]; /* percent-decoded; "" = no AUTH */
    int db;             /* 0 unless given */
    char shown[320];    /* for logs: no user, no password */
};

/* redis://[[user]:password@]host[:port][/db], host being a name, IPv4 or [IPv6]; or unix:/path[?db=N]. A db on its own
 * selects it; rediss:// (TLS) is refused. 0, or KVG_INVALID with a message that never holds the password. */
int kvg_redis_url_parse(const char *url, struct kvg_redis_url *out, struct kvg_error *err);
