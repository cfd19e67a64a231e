/* Where Redis is: the URLs that the worker's --redis and the gateway's kvgate_redis take. */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <stddef.h>
#include "libprompt/error.h"

struct kvg_redis_url {
    char path[108];     /* unix socket; "" = TCP */
    char host[256];     /* name or address, without brackets */
    uint16_t port;      /* 6379 unless given */
    char user[129];     /* percent-decoded; "" = none, AUTH takes the password alone */
    char password[513]; /* percent-decoded; "" = no AUTH */
    int db;             /* 0 unless given */
    bool tls;           /* rediss:// */
    char name[256];     /* host as the URL has it, with which a certificate is compared; "" without TLS */
    char shown[320];    /* for logs: no user, no password */
};

/* redis://[[user]:password@]host[:port][/db], host being a name, IPv4 or [IPv6]; rediss://… for TLS; or unix:/path[?db=N]. A db
 * on its own selects it. 0, or KVG_INVALID with a message that never holds the password. */
int kvg_redis_url_parse(const char *url, struct kvg_redis_url *out, struct kvg_error *err);

/* Where to look for a Redis that takes writes: one of several servers, or the master that a Sentinel names. */
enum { KVG_REDIS_SERVERS = 8 };

struct kvg_redis_servers {
    struct kvg_redis_url urls[KVG_REDIS_SERVERS]; /* [n], to be tried in turn: Redis servers, or Sentinels where master is set */
    size_t n;
    char master[129];           /* the name that Sentinels know it by; "" = urls are Redis servers */
    struct kvg_redis_url login; /* with a master: its user, password and db */
};

/* Adds to *out (zeroed before the first) what text names: Redis URLs joined by commas, or
 * sentinel://[[user]:password@]host[:port],host[:port],…/master[/db], which must be all there is; ports of Sentinels are 26379
 * unless given. 0, or KVG_INVALID with a message that never holds the password. */
int kvg_redis_servers_parse(const char *text, struct kvg_redis_servers *out, struct kvg_error *err);
/* The URL of the master at the host and port that a Sentinel told. 0, or KVG_INVALID. */
int kvg_redis_master(const struct kvg_redis_servers *servers, const char *host, const char *port, struct kvg_redis_url *out,
                     struct kvg_error *err);
