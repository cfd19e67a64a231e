/* The C side of limit.lua: arguments in, the answer out. Does no I/O. */
#pragma once
#include <hiredis/hiredis.h>
#include "libprompt/arena.h"
#include "libprompt/error.h"
#include "redis-schemas/keys.h"

enum { KVG_LIMIT_ID = 40 };

/* What a key may use: a second, and at once. rate 0 = not limited. */
struct kvg_limit_rate {
    double rate, burst;
};

struct kvg_limit_query {
    const char *prefix;
    char id[KVG_LIMIT_ID + 1]; /* hex SHA-1 of the limit's name, a colon and the key, which may be a secret */
    double tokens;
    struct kvg_limit_rate requests_rate, tokens_rate;
};

/* EVALSHA's whole argument vector, as kvg_route_argv. 0 or KVG_NOMEM. */
int kvg_limit_argv(const struct kvg_limit_query *query, struct kvg_arena *arena, int *argc, const char ***argv,
                   size_t **argv_len);

/* left: what could be used at once; full: seconds until all of the burst is there again; -1 where that is not limited. */
struct kvg_limit_left {
    double left, full;
};

struct kvg_limit_reply {
    char why[16];       /* "ok", "requests", "tokens" */
    double retry_after; /* seconds; -1 = never */
    struct kvg_limit_left requests, tokens;
};

/* 0, or KVG_INVALID with a message when Redis answered an error or something unexpected. */
int kvg_limit_parse(const redisReply *reply, struct kvg_limit_reply *out, struct kvg_error *err);
