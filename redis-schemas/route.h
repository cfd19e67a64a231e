/* The C side of route.lua and workers.lua: arguments in, choices out. Used by the gateway and by tests. Does no I/O. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <hiredis/hiredis.h>
#include "libprompt/arena.h"
#include "libprompt/block_chain.h"
#include "libprompt/error.h"
#include "redis-schemas/keys.h"

/* No script's reply has an array of more elements; readers refuse those that claim to. */
enum { KVG_REPLY_ELEMENTS = 65536 };

struct kvg_route_query {
    const char *prefix, *model;
    struct kvg_hash fingerprint;
    uint32_t block_size;
    const struct kvg_hash *chain; /* [n_blocks] */
    size_t n_blocks;
    size_t prompt_tokens;
    double alpha;    /* 0 = route.lua's own */
    const char *now; /* seconds with fraction; NULL = the server's TIME */
    bool explain;
    bool observe; /* the request goes elsewhere: nothing is written */
};

/* EVALSHA's whole argument vector (argv[0] is the command), in the arena. Of a long chain only the blocks of route.lua's grid are
 * in it: 31 KB instead of 200 KB for 6,250 blocks. 0 or KVG_NOMEM. After NOSCRIPT, replace argv[0] by "EVAL" and argv[1] by the
 * script's source. */
int kvg_route_argv(const struct kvg_route_query *query, struct kvg_arena *arena, int *argc, const char ***argv,
                   size_t **argv_len);

enum kvg_route_status { KVG_ROUTE_OK, KVG_ROUTE_NO_WORKERS, KVG_ROUTE_MISMATCH };

struct kvg_route_choice {
    char worker[KVG_NAME_MAX + 1];
    char addr[128]; /* numeric IP:port, [IPv6]:port or unix:/path, as the worker advertises it */
    uint64_t lease;
    uint32_t hit_blocks; /* depth of the chain that this worker holds */
    double backlog;      /* tokens */
    double cost;
    char reason[16]; /* "prefix" (it holds blocks), "load" (least cost without a hit), "tie" (rendezvous among near-equals) */
};

struct kvg_route_reply {
    enum kvg_route_status status;
    struct kvg_route_choice choices[3]; /* best first */
    size_t n_choices;
    char mismatch[160]; /* what differs, for the log */
    char *explain;      /* JSON with every candidate's terms, in the arena; NULL unless asked for. It comes alone: the
                         * choices are in it by rank, and n_choices is 0 */
};
/* 0, or KVG_INVALID with a message when Redis answered an error (its text is the message) or something unexpected. A choice that
 * is malformed is left out where another remains: 0, with a message in *err (empty otherwise, if the caller emptied it). */
int kvg_route_parse(const redisReply *reply, struct kvg_arena *arena, struct kvg_route_reply *out, struct kvg_error *err);

/* workers.lua: all live workers of a model, for the gateway's fallback and status. */
struct kvg_live_worker {
    char worker[KVG_NAME_MAX + 1];
    char addr[128];
    uint64_t lease;
    uint64_t beat;  /* counts this lease's heartbeats: a larger one clears a "down" mark */
    char state[16]; /* "ready", "draining" */
    double running, waiting, blocks_used, blocks_total, backlog;
    char version[32];
};
int kvg_workers_argv(const char *prefix, const char *model, struct kvg_arena *arena, int *argc, const char ***argv,
                     size_t **argv_len);
/* As kvg_route_parse: malformed workers are left out, with a message in *err. */
int kvg_workers_parse(const redisReply *reply, struct kvg_arena *arena, struct kvg_live_worker **workers, size_t *n,
                      struct kvg_error *err);
