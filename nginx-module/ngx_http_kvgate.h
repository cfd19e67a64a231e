/* kvgate's nginx module: what its files share.
 *
 * A request in a location with `kvgate on`:
 *
 *   request.c   PRECONTENT handler: body read, clients' X-Kvgate-* dropped, ctx made
 *   prompt.c    body -> JSON -> ids -> chain; touches no nginx object of the request, so that it may run in a thread
 *   limit.c     429 where its key has sent too much
 *   lookup.c    who shall serve it: Redis' answer (redis.c), else rendezvous hashing over the known workers (shared.c)
 *   request.c   ids appended to the body, headers set, phases resumed
 *   balancer.c  connects to the chosen worker; the retry rule
 *   filter.c    an SSE error frame where the worker's stream ends early; what the worker says it found in its cache
 *   recent.c    what is remembered of it: the last decisions, what each worker served, who was sent which block
 *
 * Everything runs on nginx's event loop, except ngx_http_kvgate_prompt_run for large bodies.
 */
#ifndef _NGX_HTTP_KVGATE_H_INCLUDED_
#define _NGX_HTTP_KVGATE_H_INCLUDED_

#include <ngx_config.h>
#include <ngx_core.h>
#include <ngx_http.h>

#include "libprompt/arena.h"
#include "libprompt/block_chain.h"
#include "libprompt/error.h"
#include "libprompt/json.h"
#include "libprompt/prompt.h"
#include "redis-schemas/keys.h"
#include "redis-schemas/limit.h"
#include "redis-schemas/route.h"
#include "redis-schemas/url.h"

#define NGX_HTTP_KVGATE_OFF      0
#define NGX_HTTP_KVGATE_ON       1
#define NGX_HTTP_KVGATE_OBSERVE  2

#define ngx_http_kvgate_quote(x)   #x
#define ngx_http_kvgate_string(x)  ngx_http_kvgate_quote(x)
#ifdef KVGATE_VERSION
#define NGX_HTTP_KVGATE_VERSION  ngx_http_kvgate_string(KVGATE_VERSION)
#else
#define NGX_HTTP_KVGATE_VERSION  "unknown"
#endif

/* Bodies larger than this are parsed and tokenized in a thread. */
#define NGX_HTTP_KVGATE_INLINE  32768

/* Workers that a request may be tried on, best first. */
#define NGX_HTTP_KVGATE_CANDIDATES  8

/* Workers of one model that the zone has room for. */
#define NGX_HTTP_KVGATE_WORKERS  256

/* Decisions of one model that kvgate_status shows, choices of each, and bytes of a worker's id in them. */
#define NGX_HTTP_KVGATE_DECISIONS  64
#define NGX_HTTP_KVGATE_CHOICES    3
#define NGX_HTTP_KVGATE_SHOWN      48

/* Blocks that a bucket of the placements has room for: one cache line. */
#define NGX_HTTP_KVGATE_WAYS  4

/* Why a request went where it went: $kvgate_reason. README.md says what each means; names in variables.c. */
typedef enum {
    NGX_HTTP_KVGATE_NONE = 0,
    NGX_HTTP_KVGATE_PREFIX,
    NGX_HTTP_KVGATE_LOAD,
    NGX_HTTP_KVGATE_TIE,
    NGX_HTTP_KVGATE_MISMATCH,
    NGX_HTTP_KVGATE_NO_WORKERS,
    NGX_HTTP_KVGATE_REDIS_TIMEOUT,
    NGX_HTTP_KVGATE_REDIS_DOWN,
    NGX_HTTP_KVGATE_REDIS_ERROR,
    NGX_HTTP_KVGATE_DENIED,
    NGX_HTTP_KVGATE_UNPARSED,
    NGX_HTTP_KVGATE_BYPASS,
    NGX_HTTP_KVGATE_REFUSED,
    NGX_HTTP_KVGATE_LIMITED,
    NGX_HTTP_KVGATE_REASONS
} ngx_http_kvgate_reason_e;

/* What kvgate_limit said of a request: $kvgate_limit_status. */
typedef enum {
    NGX_HTTP_KVGATE_LIMIT_NONE = 0,
    NGX_HTTP_KVGATE_LIMIT_PASSED,
    NGX_HTTP_KVGATE_LIMIT_REQUESTS,     /* refused: too many */
    NGX_HTTP_KVGATE_LIMIT_TOKENS,
    NGX_HTTP_KVGATE_LIMIT_UNCHECKED,    /* Redis could not be asked */
    NGX_HTTP_KVGATE_LIMITS
} ngx_http_kvgate_limit_e;

/* What this gateway's requests had of a worker. `told` are those whose reply said, in its usage, how much of the prompt was
 * cached: of them also what was predicted. */
typedef struct {
    uint64_t                       requests;
    uint64_t                       failures;    /* with a status of 500 and more, or a stream that ended early */
    uint64_t                       prompt_tokens;
    uint64_t                       hit_tokens;  /* predicted */
    uint64_t                       told;
    uint64_t                       told_prompt_tokens;
    uint64_t                       told_hit_tokens;
    uint64_t                       cached_tokens;
} ngx_http_kvgate_served_t;

/* One worker as the last poll saw it. */
typedef struct {
    struct kvg_live_worker         live;
    ngx_http_kvgate_served_t       served;
    uint32_t                       flight;      /* requests of this gateway that it has at the moment */
    uint64_t                       down_lease;  /* a connect to this lease failed … */
    uint64_t                       down_beat;   /* … when this was its beat; a later beat clears the mark */
    unsigned                       down:1;
} ngx_http_kvgate_worker_t;

/* A request that was routed, and why there. */
typedef struct {
    char                           worker[NGX_HTTP_KVGATE_SHOWN];
    uint64_t                       hit_tokens;
    double                         backlog;     /* tokens, and cost as route.lua counts it; -1: Redis was not there to say */
    double                         cost;
} ngx_http_kvgate_shown_t;

typedef struct {
    uint64_t                       number;      /* of the model's decisions, from 1; 0: none */
    uint64_t                       at;          /* milliseconds since 1970 */
    ngx_http_kvgate_reason_e       reason;
    uint64_t                       prompt_tokens;
    int64_t                        cached_tokens;  /* as the worker told; -1: it did not, or not yet */
    uint32_t                       tokenize;    /* microseconds */
    uint32_t                       lookup;
    ngx_uint_t                     n;           /* choices, best first */
    ngx_http_kvgate_shown_t        choices[NGX_HTTP_KVGATE_CHOICES];
} ngx_http_kvgate_decision_t;

/* Who was sent a block lately, by the first 8 bytes of its hash. Read without the mutex: a wrong answer only costs a hit. */
typedef struct {
    uint64_t                       hash;
    uint32_t                       lease;       /* 0: free */
    uint32_t                       used;        /* seconds since 1970 */
} ngx_http_kvgate_placement_t;

/* In shared memory, under the zone's mutex; counters are atomic. */
typedef struct ngx_http_kvgate_pool_s  ngx_http_kvgate_pool_t;

struct ngx_http_kvgate_pool_s {
    ngx_http_kvgate_pool_t        *next;
    char                           name[KVG_NAME_MAX + 1];
    ngx_atomic_t                   users;       /* nginx workers whose configuration has the model */
    time_t                         polled;      /* when workers[] was last written; 0: never */
    ngx_uint_t                     n;
    ngx_atomic_t                   requests;
    ngx_atomic_t                   prompt_tokens;
    ngx_atomic_t                   hit_tokens;  /* predicted */
    ngx_http_kvgate_served_t       served;      /* by workers that are gone as well */
    uint64_t                       decided;     /* number of the last decision */
    ngx_http_kvgate_decision_t     decisions[NGX_HTTP_KVGATE_DECISIONS];
    ngx_http_kvgate_placement_t   *placements;  /* [buckets][NGX_HTTP_KVGATE_WAYS] */
    ngx_uint_t                     buckets;     /* a power of two; 0: the zone had no room */
    ngx_http_kvgate_worker_t       workers[NGX_HTTP_KVGATE_WORKERS];
};

/* Durations in buckets; the last has no bound. The bounds are in shared.c. */
#define NGX_HTTP_KVGATE_TIMES  12

typedef struct {
    ngx_atomic_t                   n[NGX_HTTP_KVGATE_TIMES];
    ngx_atomic_t                   sum;         /* microseconds */
} ngx_http_kvgate_times_t;

typedef struct {
    ngx_http_kvgate_pool_t        *pools;
    ngx_atomic_t                   reasons[NGX_HTTP_KVGATE_REASONS];
    ngx_atomic_t                   limits[NGX_HTTP_KVGATE_LIMITS];
    ngx_http_kvgate_times_t        tokenize;
    ngx_http_kvgate_times_t        lookup;
} ngx_http_kvgate_shared_t;

typedef struct {
    char                          *name;        /* NUL-terminated, in the cycle's pool */
    ngx_str_t                      path;
    time_t                         created;     /* when this configuration was read */
    ngx_array_t                    aliases;     /* of ngx_str_t; at most KVG_NAME_MAX bytes each */
    uint32_t                       block_size;
    size_t                         segments;    /* bytes for remembered segments */
    struct kvg_prompt_model       *prompt;
    char                           fingerprint[KVG_HASH_HEX + 1];
    ngx_http_kvgate_pool_t        *pool;        /* in the zone; set when the zone is */
} ngx_http_kvgate_model_t;

typedef struct {
    ngx_array_t                    models;      /* of ngx_http_kvgate_model_t */
    struct kvg_redis_servers       redis;       /* hosts are numeric */
    ngx_msec_t                     redis_timeout;
    ngx_str_t                      redis_prefix;  /* NUL-terminated */
    ngx_str_t                      redis_ca;    /* "": the system's */
    ngx_str_t                      redis_certificate;  /* .data NULL: none */
    ngx_str_t                      redis_certificate_key;
#if (NGX_SSL)
    ngx_ssl_t                     *redis_ssl;   /* NULL: no rediss:// */
#endif
    ngx_array_t                   *allow;       /* of ngx_cidr_t */
    double                         alpha;
    ngx_shm_zone_t                *zone;
    ngx_slab_pool_t               *shpool;      /* set with the zone */
    ngx_http_kvgate_shared_t      *shared;
} ngx_http_kvgate_main_conf_t;

typedef struct {
    ngx_http_complex_value_t       key;
    ngx_str_t                      name;
    struct kvg_limit_rate          requests;    /* rate 0: not limited */
    struct kvg_limit_rate          tokens;
} ngx_http_kvgate_limit_t;

typedef struct {
    ngx_uint_t                     mode;
    ngx_array_t                   *bypass;      /* of ngx_http_complex_value_t */
    ngx_http_complex_value_t      *salt;
    ngx_flag_t                     priority;
    ngx_http_kvgate_limit_t       *limit;
} ngx_http_kvgate_loc_conf_t;

typedef struct {
    ngx_http_upstream_init_pt      original_init_upstream;
    ngx_http_upstream_init_peer_pt original_init_peer;
} ngx_http_kvgate_srv_conf_t;

/* A worker that a request may go to. Lives in the request's pool. */
typedef struct {
    ngx_http_kvgate_pool_t        *pool;
    ngx_str_t                      worker;
    ngx_str_t                      addr;
    struct sockaddr               *sockaddr;
    socklen_t                      socklen;
    uint64_t                       lease;
    uint32_t                       hit_blocks;
    double                         backlog;     /* tokens, and cost, as route.lua counts it; -1: not from Redis */
    double                         cost;
    unsigned                       down:1;
} ngx_http_kvgate_candidate_t;

/* The prompt side of a request, as plain memory: input above, result below. */
typedef struct {
    const ngx_http_kvgate_main_conf_t *conf;
    enum kvg_endpoint              endpoint;
    struct kvg_str                 salt;        /* the operator's */
    int64_t                        now;
    ngx_flag_t                     priority;    /* 0: the client's is overridden */
    ngx_flag_t                     count;       /* 1: tokens of all prompts are counted */
    ngx_flag_t                     append;      /* 0: nothing is appended (observe) */
    ngx_buf_t                    **slices;      /* memory buffers of the body, in order … */
    ngx_uint_t                     n_slices;
    ngx_fd_t                       fd;          /* … or a file */
    off_t                          file_pos;
    size_t                         size;        /* bytes of the body */

    struct kvg_arena               work;        /* freed once a worker is chosen */
    struct kvg_arena               keep;        /* chain and tail: freed with the request */

    ngx_http_kvgate_reason_e       reason;      /* NONE: has ids; UNPARSED; REFUSED */
    ngx_uint_t                     http_status; /* of REFUSED */
    const char                    *error_code;  /* of REFUSED; NULL: none */
    struct kvg_error               error;
    ngx_http_kvgate_model_t       *model;       /* NULL unless known */
    size_t                         n_prompts;
    size_t                         n_ids;       /* of the first */
    ngx_uint_t                     all_tokens;  /* of all, where they are counted */
    struct kvg_hash               *chain;       /* [n_blocks], in keep */
    size_t                         n_blocks;
    size_t                         cut;         /* bytes of the body before its final brace */
    struct kvg_str                 tail;        /* what takes the place of the rest, in keep; len 0: body unchanged */
    ngx_uint_t                     microseconds;
} ngx_http_kvgate_prompt_t;

/* A script call on its way to Redis and back (redis.c). */
typedef struct ngx_http_kvgate_call_s  ngx_http_kvgate_call_t;

/* Found by ngx_http_kvgate_ctx even after an internal redirect, which clears r->ctx. */
typedef struct {
    ngx_http_request_t            *request;
    ngx_uint_t                     mode;        /* of the location that made it */
    ngx_http_kvgate_prompt_t       prompt;
    ngx_http_kvgate_call_t        *lookup;      /* a query under way, of kvgate_limit or of the choice */
    ngx_http_kvgate_limit_e        limit;
    ngx_http_kvgate_reason_e       failure;     /* of Redis when the limit was asked; NONE: it answered, or was not asked */
    struct kvg_limit_reply         left;        /* where limit is neither NONE nor UNCHECKED */
    ngx_http_kvgate_reason_e       reason;
    size_t                         hit_tokens;  /* predicted for the first candidate */
    ngx_uint_t                     lookup_microseconds;
    uint64_t                       lookup_start;

    ngx_http_kvgate_candidate_t    candidates[NGX_HTTP_KVGATE_CANDIDATES];
    ngx_uint_t                     n_candidates;
    ngx_http_kvgate_candidate_t   *chosen;      /* the one in use */

    ngx_chain_t                   *client_bufs;   /* body and length as the client sent them */
    off_t                          client_length;
    ngx_chain_t                   *bufs;          /* body with the ids */

    u_char                         last[2];     /* last bytes of the reply sent so far */
    uint64_t                       decision;    /* its number; 0: not recorded */
    int64_t                        cached_tokens;  /* as the worker told; -1: not told */
    ngx_uint_t                     usage_matched;  /* bytes of the member's name that the reply's last bytes are */

    unsigned                       routed:1;    /* candidates are for use, not only for the log */
    unsigned                       others:1;    /* the known workers that Redis did not name are no candidates yet (add_others) */
    unsigned                       done:1;      /* the handler has nothing left to do */
    unsigned                       prompted:1;  /* it has a prompt to look at */
    unsigned                       waiting:1;   /* for a thread or for Redis */
    unsigned                       in_thread:1;
    unsigned                       rewritten:1; /* the body is ours at the moment */
    unsigned                       keepalive:1; /* the client's connection is kept after the reply */
    unsigned                       failed:1;    /* an SSE error frame was sent */
} ngx_http_kvgate_ctx_t;

extern ngx_module_t  ngx_http_kvgate_module;

/* request.c: the handler; clients' errors */
ngx_int_t ngx_http_kvgate_handler(ngx_http_request_t *r);
/* The context of a main request, or NULL. */
ngx_http_kvgate_ctx_t *ngx_http_kvgate_ctx(ngx_http_request_t *r);
/* Continues a request whose worker is chosen (ctx->reason is set). */
void ngx_http_kvgate_decided(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx);
/* Continues a request of which kvgate_limit is asked (ctx->limit is set). */
void ngx_http_kvgate_limited(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx);
uint64_t ngx_http_kvgate_microseconds(void);

/* rewrite.c: what the upstream is sent. Both may be called again, also after an internal redirect. */
ngx_int_t ngx_http_kvgate_set_headers(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_uint_t ours);
ngx_int_t ngx_http_kvgate_set_body(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_uint_t ours);

/* prompt.c */
/* Once, before the first request. */
void ngx_http_kvgate_prompt_init(void);
/* Fills the result half. Runs in any thread. */
void ngx_http_kvgate_prompt_run(ngx_http_kvgate_prompt_t *prompt);
/* The model of that name or alias, or NULL. */
ngx_http_kvgate_model_t *ngx_http_kvgate_find_model(const ngx_http_kvgate_main_conf_t *conf, struct kvg_str name, ngx_uint_t *aliased);

/* limit.c */
char *ngx_http_kvgate_limit(ngx_conf_t *cf, ngx_command_t *cmd, void *conf);
/* Asks whether the location's limit lets the request pass: NGX_OK when ctx->limit is set (NONE: there is no limit), NGX_AGAIN when
 * ngx_http_kvgate_limited will be called later, NGX_ERROR. */
ngx_int_t ngx_http_kvgate_limit_ask(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx);
/* x-ratelimit-* of a reply to come. */
ngx_int_t ngx_http_kvgate_limit_headers(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx);
/* Sends the 429. */
ngx_int_t ngx_http_kvgate_limit_refuse(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx);

/* lookup.c */
/* Starts to choose a worker: NGX_OK when that is done, NGX_AGAIN when ngx_http_kvgate_decided will be called later. */
ngx_int_t ngx_http_kvgate_lookup(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx);
/* Of a request whose choices, all of Redis, come to an end: adds the other known workers behind them. How many. */
ngx_uint_t ngx_http_kvgate_add_others(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx);
/* Tokens of the prompt that the candidate is expected to take from its cache. As in the worker, the last token is computed in any
 * case, and with it its block. The prompt has ids. */
size_t ngx_http_kvgate_candidate_hit(ngx_http_kvgate_ctx_t *ctx, ngx_http_kvgate_candidate_t *candidate);
/* For a request without a usable prompt: the known workers of its model (or of any), least loaded first. */
void ngx_http_kvgate_any_worker(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx);

/* redis.c */
typedef void (*ngx_http_kvgate_reply_pt)(void *data, ngx_http_kvgate_reason_e failure, const redisReply *reply);
ngx_int_t ngx_http_kvgate_redis_init(ngx_cycle_t *cycle, ngx_http_kvgate_main_conf_t *conf);
void ngx_http_kvgate_redis_exit(void);
/* Asks route.lua. handler is called once: with the reply, or with NULL and REDIS_TIMEOUT, REDIS_DOWN or REDIS_ERROR. Returns NULL
 * (handler is not called) and *failure where the query cannot even be sent. */
ngx_http_kvgate_call_t *ngx_http_kvgate_redis_route(const struct kvg_route_query *query, ngx_http_kvgate_reply_pt handler,
                                                      void *data, ngx_http_kvgate_reason_e *failure);
/* The same with limit.lua. */
ngx_http_kvgate_call_t *ngx_http_kvgate_redis_limit(const struct kvg_limit_query *query, ngx_http_kvgate_reply_pt handler,
                                                      void *data, ngx_http_kvgate_reason_e *failure);
/* The handler will not be called any more. */
void ngx_http_kvgate_redis_cancel(ngx_http_kvgate_call_t *call);

/* hiredis.c: nginx's events for a new connection; gone is called when hiredis gives it up, failed before that where it was TLS that
 * did. NGX_ERROR: not attached. */
struct redisAsyncContext;
ngx_int_t ngx_http_kvgate_hiredis_attach(struct redisAsyncContext *context, void (*gone)(struct redisAsyncContext *context),
                                         void (*failed)(struct redisAsyncContext *context, const char *what));

/* What nginx's connection of it has as data. */
typedef struct {
    struct redisAsyncContext      *context;
    void                         (*gone)(struct redisAsyncContext *context);
    void                         (*failed)(struct redisAsyncContext *context, const char *what);
    ngx_uint_t                    *freed;       /* set to 1 when this is freed; may be NULL */
#if (NGX_SSL)
    ngx_ssl_t                     *ssl;
    const char                    *name;        /* that the server's certificate must be for */
    char                           why[160];    /* TLS failed */
#endif
    unsigned                       writing:1;   /* hiredis is */
} ngx_http_kvgate_link_t;

#if (NGX_SSL)
/* tls.c */
/* Makes redis_ssl, where a rediss:// is among the addresses. */
char *ngx_http_kvgate_tls_init(ngx_conf_t *cf, ngx_http_kvgate_main_conf_t *mcf);
/* TLS for an attached connection that is not used yet; name stays. NGX_ERROR: of no use any more, to be freed. */
ngx_int_t ngx_http_kvgate_tls_attach(ngx_connection_t *c, ngx_ssl_t *ssl, const char *name);
/* Ends it, where there is any. */
void ngx_http_kvgate_tls_detach(ngx_connection_t *c);
#endif

/* replies.c: a new connection's reader refuses what would end or bloat the process. */
void ngx_http_kvgate_replies_guard(struct redisAsyncContext *context);

/* shared.c */
ngx_int_t ngx_http_kvgate_zone_init(ngx_shm_zone_t *zone, void *old);
/* An nginx worker starts (1) or stops (-1) to use the pools of its configuration. */
void ngx_http_kvgate_pools_use(ngx_http_kvgate_main_conf_t *conf, ngx_int_t step);
void ngx_http_kvgate_count(ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_reason_e reason);
extern const ngx_uint_t  ngx_http_kvgate_bounds[NGX_HTTP_KVGATE_TIMES - 1];  /* microseconds */
void ngx_http_kvgate_count_time(ngx_http_kvgate_times_t *times, ngx_uint_t microseconds);
/* Whether the lease is marked down. Under the zone's mutex, or of a copy. */
ngx_uint_t ngx_http_kvgate_is_down(const ngx_http_kvgate_worker_t *w);
/* Replaces what is known of a pool's workers; marks of leases that have not beaten since stay. */
void ngx_http_kvgate_workers_set(ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_pool_t *pool,
                                 const struct kvg_live_worker *workers, size_t n);
/* Copies the ready workers into out[NGX_HTTP_KVGATE_WORKERS]; returns their number. */
ngx_uint_t ngx_http_kvgate_workers_get(ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_pool_t *pool,
                                       ngx_http_kvgate_worker_t *out);
/* Whether the lease is marked down. */
ngx_uint_t ngx_http_kvgate_worker_down(ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_pool_t *pool, ngx_str_t *id,
                                       uint64_t lease);
/* Marks a lease that refused a connection, until its next heartbeat. */
void ngx_http_kvgate_worker_mark(ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_pool_t *pool, ngx_str_t *id, uint64_t lease);

/* Counts a request that a worker of this gateway has (1) or has no more (-1). */
void ngx_http_kvgate_worker_flight(ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_pool_t *pool, ngx_str_t *id, uint64_t lease,
                                   ngx_int_t step);
/* The pool's worker of that id, or NULL. Under the zone's mutex. */
ngx_http_kvgate_worker_t *ngx_http_kvgate_worker_find(ngx_http_kvgate_pool_t *pool, const char *id, size_t len);

/* recent.c */
/* A pool's memory of placements, as much as the zone has room for beside the pools of all models. */
void ngx_http_kvgate_placements_alloc(ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_pool_t *pool);
/* The lease that was sent the longest beginning of the chain that is remembered, with its length in *blocks; 0: none. */
uint32_t ngx_http_kvgate_placed(ngx_http_kvgate_pool_t *pool, const struct kvg_hash *chain, size_t n, uint32_t *blocks);
/* Remembers that the chosen candidate is sent the prompt's blocks, instead of another that was before. */
void ngx_http_kvgate_sent(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx);
/* Remembers a decision whose candidates stand. */
void ngx_http_kvgate_remember(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx);
/* LOG phase: what the worker that served had of it. */
ngx_int_t ngx_http_kvgate_served(ngx_http_request_t *r);

/* log.c: logs "kvgate: …", unless the same text was logged within the last minute. For trouble that lasts. */
void ngx_cdecl ngx_http_kvgate_complain(ngx_uint_t level, ngx_log_t *log, const char *format, ...);

/* directives.c */
char *ngx_http_kvgate_model(ngx_conf_t *cf, ngx_command_t *cmd, void *conf);
/* Refuses a name that two models answer to. */
char *ngx_http_kvgate_check_names(ngx_conf_t *cf, ngx_http_kvgate_main_conf_t *mcf);
char *ngx_http_kvgate_redis(ngx_conf_t *cf, ngx_command_t *cmd, void *conf);
char *ngx_http_kvgate_redis_certificate(ngx_conf_t *cf, ngx_command_t *cmd, void *conf);
char *ngx_http_kvgate_redis_prefix(ngx_conf_t *cf, ngx_command_t *cmd, void *conf);
char *ngx_http_kvgate_zone(ngx_conf_t *cf, ngx_command_t *cmd, void *conf);
char *ngx_http_kvgate_allow(ngx_conf_t *cf, ngx_command_t *cmd, void *conf);
char *ngx_http_kvgate_alpha(ngx_conf_t *cf, ngx_command_t *cmd, void *conf);
char *ngx_http_kvgate_status(ngx_conf_t *cf, ngx_command_t *cmd, void *conf);
char *ngx_http_kvgate_add_zone(ngx_conf_t *cf, ngx_http_kvgate_main_conf_t *mcf, ngx_str_t *name, size_t size);
char *ngx_http_kvgate_add_redis(ngx_conf_t *cf, ngx_http_kvgate_main_conf_t *mcf, ngx_str_t *text);
ngx_int_t ngx_http_kvgate_default_allow(ngx_conf_t *cf, ngx_http_kvgate_main_conf_t *mcf);

/* balancer.c */
char *ngx_http_kvgate_balance(ngx_conf_t *cf, ngx_command_t *cmd, void *conf);

/* filter.c */
void ngx_http_kvgate_filter_init(void);

/* reply.c: short replies by the gateway itself */
/* Sends text, which is freed, with that status; returns what a handler returns. type: a static string. */
ngx_int_t ngx_http_kvgate_send(ngx_http_request_t *r, ngx_uint_t status, ngx_str_t *type, struct kvg_buf *text);
/* An error in OpenAI's shape. param and code may be NULL. */
ngx_int_t ngx_http_kvgate_send_error(ngx_http_request_t *r, ngx_uint_t status, const char *type, const char *message, const char *param,
                                     const char *code);
/* A header of the reply; name and value stay. */
ngx_int_t ngx_http_kvgate_add_header(ngx_http_request_t *r, const char *name, ngx_str_t *value);
/* GET …/models and …/models/NAME, answered for all models. NGX_DECLINED: the request is not that. */
ngx_int_t ngx_http_kvgate_models(ngx_http_request_t *r);

/* variables.c */
extern const ngx_str_t  ngx_http_kvgate_reasons[NGX_HTTP_KVGATE_REASONS];
extern const ngx_str_t  ngx_http_kvgate_limits[NGX_HTTP_KVGATE_LIMITS];
ngx_int_t ngx_http_kvgate_add_variables(ngx_conf_t *cf);

/* status.c: what is shown, as JSON, for Prometheus and as a page; metrics.c writes the second */
void ngx_http_kvgate_metrics(struct kvg_buf *buf, ngx_http_kvgate_main_conf_t *conf);
/* A copy of a pool's part before workers[], and its workers in workers[NGX_HTTP_KVGATE_WORKERS]. */
void ngx_http_kvgate_pool_copy(ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_pool_t *pool, ngx_http_kvgate_pool_t *copy);
ngx_int_t ngx_http_kvgate_status_handler(ngx_http_request_t *r);

#endif /* _NGX_HTTP_KVGATE_H_INCLUDED_ */
