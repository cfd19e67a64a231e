/* kvgate's nginx module: what its files share.
 *
 * A request in a location with `kvgate on`:
 *
 *   request.c   PRECONTENT handler: body read, clients' X-Kvgate-* dropped, ctx made
 *   prompt.c    body -> JSON -> ids -> chain; touches no nginx object of the request, so that it may run in a thread
 *   lookup.c    who shall serve it: Redis' answer (redis.c), else rendezvous hashing over the known workers (shared.c)
 *   request.c   ids appended to the body, headers set, phases resumed
 *   balancer.c  connects to the chosen worker; the retry rule
 *   filter.c    an SSE error frame where the worker's stream ends early
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
    NGX_HTTP_KVGATE_REASONS
} ngx_http_kvgate_reason_e;

/* One worker as the last poll saw it. */
typedef struct {
    struct kvg_live_worker         live;
    uint64_t                       down_lease;  /* a connect to this lease failed … */
    uint64_t                       down_beat;   /* … when this was its beat; a later beat clears the mark */
    unsigned                       down:1;
} ngx_http_kvgate_worker_t;

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
    ngx_http_kvgate_worker_t       workers[NGX_HTTP_KVGATE_WORKERS];
};

typedef struct {
    ngx_http_kvgate_pool_t        *pools;
    ngx_atomic_t                   reasons[NGX_HTTP_KVGATE_REASONS];
} ngx_http_kvgate_shared_t;

typedef struct {
    char                          *name;        /* NUL-terminated, in the cycle's pool */
    ngx_str_t                      path;
    ngx_array_t                    aliases;     /* of ngx_str_t */
    uint32_t                       block_size;
    size_t                         segments;    /* bytes for remembered segments */
    struct kvg_prompt_model       *prompt;
    char                           fingerprint[KVG_HASH_HEX + 1];
    ngx_http_kvgate_pool_t        *pool;        /* in the zone; set when the zone is */
} ngx_http_kvgate_model_t;

typedef struct {
    ngx_array_t                    models;      /* of ngx_http_kvgate_model_t */
    ngx_array_t                    redis;       /* of struct kvg_redis_url; host is numeric */
    ngx_msec_t                     redis_timeout;
    ngx_str_t                      redis_prefix;  /* NUL-terminated */
    ngx_array_t                   *allow;       /* of ngx_cidr_t */
    double                         alpha;
    ngx_shm_zone_t                *zone;
    ngx_slab_pool_t               *shpool;      /* set with the zone */
    ngx_http_kvgate_shared_t      *shared;
} ngx_http_kvgate_main_conf_t;

typedef struct {
    ngx_uint_t                     mode;
    ngx_array_t                   *bypass;      /* of ngx_http_complex_value_t */
    ngx_http_complex_value_t      *salt;
    ngx_flag_t                     priority;
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
    unsigned                       down:1;
} ngx_http_kvgate_candidate_t;

/* The prompt side of a request, as plain memory: input above, result below. */
typedef struct {
    const ngx_http_kvgate_main_conf_t *conf;
    enum kvg_endpoint              endpoint;
    struct kvg_str                 salt;        /* the operator's */
    int64_t                        now;
    ngx_flag_t                     priority;    /* 0: the client's is overridden */
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
    size_t                         n_ids;
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
    ngx_http_kvgate_call_t        *lookup;      /* a query under way */
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

    unsigned                       routed:1;    /* candidates are for use, not only for the log */
    unsigned                       done:1;      /* the handler has nothing left to do */
    unsigned                       waiting:1;   /* for a thread or for Redis */
    unsigned                       in_thread:1;
    unsigned                       rewritten:1; /* the body is ours at the moment */
    unsigned                       failed:1;    /* an SSE error frame was sent */
} ngx_http_kvgate_ctx_t;

extern ngx_module_t  ngx_http_kvgate_module;

/* request.c: the handler; clients' errors */
ngx_int_t ngx_http_kvgate_handler(ngx_http_request_t *r);
/* The context of a main request, or NULL. */
ngx_http_kvgate_ctx_t *ngx_http_kvgate_ctx(ngx_http_request_t *r);
/* Continues a request whose worker is chosen (ctx->reason is set). */
void ngx_http_kvgate_decided(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx);
uint64_t ngx_http_kvgate_microseconds(void);

/* rewrite.c: what the upstream is sent. Both may be called again, also after an internal redirect. */
ngx_int_t ngx_http_kvgate_set_headers(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_uint_t ours);
ngx_int_t ngx_http_kvgate_set_body(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx, ngx_uint_t ours);

/* prompt.c: fills the result half. Runs in any thread. */
void ngx_http_kvgate_prompt_run(ngx_http_kvgate_prompt_t *prompt);

/* lookup.c */
/* Starts to choose a worker: NGX_OK when that is done, NGX_AGAIN when ngx_http_kvgate_decided will be called later. */
ngx_int_t ngx_http_kvgate_lookup(ngx_http_request_t *r, ngx_http_kvgate_ctx_t *ctx);
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
/* The handler will not be called any more. */
void ngx_http_kvgate_redis_cancel(ngx_http_kvgate_call_t *call);

/* replies.c: a new connection's reader refuses what would end or bloat the process. */
struct redisAsyncContext;
void ngx_http_kvgate_replies_guard(struct redisAsyncContext *context);

/* shared.c */
ngx_int_t ngx_http_kvgate_zone_init(ngx_shm_zone_t *zone, void *old);
/* An nginx worker starts (1) or stops (-1) to use the pools of its configuration. */
void ngx_http_kvgate_pools_use(ngx_http_kvgate_main_conf_t *conf, ngx_int_t step);
void ngx_http_kvgate_count(ngx_http_kvgate_main_conf_t *conf, ngx_http_kvgate_reason_e reason);
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

/* log.c: logs "kvgate: …", unless the same text was logged within the last minute. For trouble that lasts. */
void ngx_cdecl ngx_http_kvgate_complain(ngx_uint_t level, ngx_log_t *log, const char *format, ...);

/* directives.c */
char *ngx_http_kvgate_model(ngx_conf_t *cf, ngx_command_t *cmd, void *conf);
/* Refuses a name that two models answer to. */
char *ngx_http_kvgate_check_names(ngx_conf_t *cf, ngx_http_kvgate_main_conf_t *mcf);
char *ngx_http_kvgate_redis(ngx_conf_t *cf, ngx_command_t *cmd, void *conf);
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

/* variables.c */
extern const ngx_str_t  ngx_http_kvgate_reasons[NGX_HTTP_KVGATE_REASONS];
ngx_int_t ngx_http_kvgate_add_variables(ngx_conf_t *cf);

/* status.c */
ngx_int_t ngx_http_kvgate_status_handler(ngx_http_request_t *r);

#endif /* _NGX_HTTP_KVGATE_H_INCLUDED_ */
