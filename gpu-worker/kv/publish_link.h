/* One connection to Redis for the publisher's thread: connect, authenticate, call scripts. Every call ends within a second. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <hiredis/hiredis.h>
#include "redis-schemas/keys.h"
#include "redis-schemas/url.h"

enum { LINK_TIMEOUT_MS = 1000, LINK_ARGS_MAX = 12 };

struct publish_link {
    struct kvg_redis_servers servers;
    size_t next;                       /* of them, to be tried by the next link_open */
    struct kvg_redis_url url;          /* in use, or tried last */
    redisContext *context;             /* NULL = not connected */
    redisReplyObjectFunctions reading; /* the connection's reader refuses arrays of over KVG_REPLY_ELEMENTS */
    char why[256];                     /* why the last call gave no reply */
    char policy[48];                   /* maxmemory-policy as Redis told it at link_open, "" where it does not tell */
};

/* Connects to one server: AUTH, SELECT, CLIENT SETNAME <name>. Where that fails, the next call tries the next of link->servers;
 * with Sentinels, each call asks one of them for the master. 0, or -1 with link->why. */
int link_open(struct publish_link *link, const char *name);
void link_close(struct publish_link *link);
/* Closes, and the next link_open tries another server: this one takes no writes. */
void link_pass_on(struct publish_link *link);

/* The script with KEYS[1] = meta and args: EVALSHA, then EVAL where Redis does not know it. The reply is the caller's
 * (freeReplyObject), errors that Redis answers included; NULL when the connection is lost: it is closed, link->why says why. */
redisReply *link_call(struct publish_link *link, enum kvg_script_id script, const char *meta, size_t n_args,
                      const char *const *args, const size_t *lens);
