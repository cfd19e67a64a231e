/* What the files of server/ share about the whole server. Set up by server_open, then read-only but for the atomics. */
#pragma once
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include "gpu-worker/server/counters.h"
#include "gpu-worker/server/job.h"
#include "gpu-worker/server/loop.h"
#include "gpu-worker/server/server.h"

enum {
    SERVER_MAX_LOOPS = 8,
    SERVER_MAX_CONNECTIONS = 16384, /* of one loop */
    SERVER_MAX_BUFFERED = 4 << 20,  /* unsent bytes of a stream before its client is dropped */
    SERVER_MAX_REPLIES = 1 << 20,   /* unsent bytes before no further pipelined request is taken up */
    SERVER_LINGER_MS = 2 * 1000,    /* a closed connection's last bytes */
    SERVER_TICK_MS = 500
};

struct server {
    struct server_options options;
    struct engine *engine;
    const struct kvg_prompt_model *prompt_model;
    struct publisher *publisher;
    struct engine_info info;
    char fingerprint[KVG_HASH_HEX + 1];
    char key_salt[SERVER_SALT_SIZE]; /* the plain listener's salt: "key:" and the SHA-256 of the API key; "" without one */
    int64_t created;                 /* seconds since the epoch */
    const char *unix_path;           /* of the gateway listener: removed at the end; NULL: none */

    int listen_fds[LOOP_MAX_LISTENERS]; /* plain, gateway; -1: none */

    struct pool *pool;
    unsigned n_loops;
    struct loop *loops[SERVER_MAX_LOOPS];
    struct counters counters;
    _Atomic uint64_t body_bytes; /* request bodies held in memory */
    uint64_t max_body_bytes_total;
    atomic_uint n_busy;      /* connections with a reply in work or unsent */
    atomic_uint n_pending;   /* generations in the pool, or submitted and without a first token */
    atomic_uint n_listening; /* loops that still accept */
    atomic_bool warming, draining, stopping;
};
