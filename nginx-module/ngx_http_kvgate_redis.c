/* One connection to Redis per nginx worker: hiredis' asynchronous client on nginx's event loop, pipelined.
 *
 *   tick, each second   no connection -> connect to the next server, or ask the next Sentinel for it; silent for two ticks -> drop
 *                       it; else poll workers.lua. Of several servers each is tried within AGAIN, then all again after a second
 *   ROLE beside a poll  where there are several servers or Sentinels: a replica is dropped, since somewhere there is a master
 *   route query         EVALSHA (EVAL after NOSCRIPT) with a timer; a reply that comes too late is only thrown away
 *   BREAKER timeouts in a row -> queries answer REDIS_TIMEOUT at once, until a poll is answered in time; while that lasts, one is
 *                       sent every PROBE, as soon as the one before is answered, so no request pays for finding out
 *
 * Its replies are guarded by replies.c, its events are in hiredis.c, TLS in tls.c.
 */
#include "ngx_http_kvgate.h"
#include <hiredis/async.h>

#define NGX_HTTP_KVGATE_TICK     1000
#define NGX_HTTP_KVGATE_SILENT   2
#define NGX_HTTP_KVGATE_BREAKER  3
#define NGX_HTTP_KVGATE_PROBE    100
#define NGX_HTTP_KVGATE_AGAIN    20


/* A script call on its way. Freed by its reply, which hiredis delivers (as NULL) even when the connection goes. */
struct ngx_http_kvgate_call_s {
    ngx_http_kvgate_reply_pt       handler;  /* NULL once it has been called or cancelled */
    void                          *data;
    ngx_event_t                    timer;
    struct kvg_arena               arena;    /* argv */
    enum kvg_script_id             script;
    int                            argc;
    const char                   **argv;
    size_t                        *argv_len;
    uint64_t                       start;
    unsigned                       evaluated:1;
};


typedef struct {
    ngx_http_kvgate_main_conf_t   *conf;
    redisAsyncContext             *context;
    redisAsyncContext             *sentinel;  /* while one is asked */
    ngx_uint_t                     next;      /* of the servers, to be tried next */
    ngx_uint_t                     tries;     /* since one answered */
    struct kvg_redis_url           url;       /* of context, or tried last */
    ngx_uint_t                     silent;    /* ticks since the last reply */
    ngx_uint_t                     timeouts;  /* in a row */
    ngx_uint_t                     polls;     /* under way */
    ngx_event_t                    tick;
    ngx_event_t                    probe;     /* while the breaker is open */
    unsigned                       connected:1;
    unsigned                       complained:1;  /* the present outage is in the log */
} ngx_http_kvgate_redis_t;


static void ngx_http_kvgate_redis_reply(redisAsyncContext *context, void *reply, void *privdata);
static void ngx_http_kvgate_redis_poll(void);

static ngx_http_kvgate_redis_t  redis;


/* ---- connecting ---- */

/* What was tried is of no use: one after the other is tried at once, then all of them each second. */
static void
ngx_http_kvgate_redis_again(void)
{
    if (redis.tries < redis.conf->redis.n && redis.conf->redis.n > 1 && redis.tick.timer_set) {
        ngx_add_timer(&redis.tick, NGX_HTTP_KVGATE_AGAIN);
    }
}


/* hiredis gives the connection up. */
static void
ngx_http_kvgate_redis_gone(redisAsyncContext *context)
{
    if (redis.context == context) {
        redis.context = NULL;
        redis.connected = 0;
        ngx_http_kvgate_redis_again();

    } else if (redis.sentinel == context) {
        redis.sentinel = NULL;
        ngx_http_kvgate_redis_again();
    }
}


static void
ngx_http_kvgate_redis_complain(const char *what)
{
    if (!redis.complained && !ngx_exiting && !ngx_quit && !ngx_terminate) {
        redis.complained = 1;
        ngx_log_error(NGX_LOG_ERR, ngx_cycle->log, 0,
                      "kvgate: redis %s: %s; requests are routed without it, retrying each second",
                      redis.url.shown, what);
    }
}


static void
ngx_http_kvgate_redis_failed(redisAsyncContext *context, const char *what)
{
    ngx_http_kvgate_redis_complain(what);
}


static void
ngx_http_kvgate_redis_on_connect(const redisAsyncContext *context, int status)
{
    if (status != REDIS_OK) {
        ngx_http_kvgate_redis_complain(context->c.errstr[0] ? context->c.errstr : "cannot connect");
    }
}


static void
ngx_http_kvgate_redis_on_disconnect(const redisAsyncContext *context, int status)
{
    if (status != REDIS_OK && context->err == REDIS_ERR_OOM) {
        ngx_http_kvgate_redis_complain("out of memory, or a reply that was not asked for or is too large");

    } else if (status != REDIS_OK) {
        ngx_http_kvgate_redis_complain(context->errstr && context->errstr[0] ? context->errstr : "connection lost");
    }
}


/* The answer to AUTH, SELECT and CLIENT SETNAME. */
static void
ngx_http_kvgate_redis_greeted(redisAsyncContext *context, void *data, void *privdata)
{
    redisReply  *reply = data;

    if (reply == NULL) {
        return;
    }

    redis.silent = 0;

    if (reply->type == REDIS_REPLY_ERROR) {
        ngx_http_kvgate_complain(NGX_LOG_ERR, ngx_cycle->log, "redis %s: %s: %s", redis.url.shown,
                                 (char *) privdata, reply->str);
    }
}


static void
ngx_http_kvgate_redis_greet(void)
{
    redisAsyncContext            *context = redis.context;
    struct kvg_redis_url         *url = &redis.url;

    if (url->user[0]) {
        redisAsyncCommand(context, ngx_http_kvgate_redis_greeted, "AUTH", "AUTH %s %s", url->user, url->password);

    } else if (url->password[0]) {
        redisAsyncCommand(context, ngx_http_kvgate_redis_greeted, "AUTH", "AUTH %s", url->password);
    }

    if (url->db) {
        redisAsyncCommand(context, ngx_http_kvgate_redis_greeted, "SELECT", "SELECT %d", (int) url->db);
    }

    redisAsyncCommand(context, ngx_http_kvgate_redis_greeted, "CLIENT SETNAME", "CLIENT SETNAME kvgate-gateway:%d",
                      (int) ngx_pid);
}


/* Whether a server that takes no writes is to be left for another. */
static ngx_uint_t
ngx_http_kvgate_redis_several(void)
{
    return redis.conf->redis.n > 1 || redis.conf->redis.master[0];
}


static void
ngx_http_kvgate_redis_role(redisAsyncContext *context, void *data, void *privdata)
{
    redisReply  *reply = data;

    if (reply == NULL || context != redis.context) {
        return;
    }

    redis.silent = 0;

    if (reply->type == REDIS_REPLY_ERROR) {
        ngx_http_kvgate_complain(NGX_LOG_ERR, ngx_cycle->log, "redis %s: ROLE: %s: it is used even if it takes no writes", redis.url.shown,
                                 reply->str);
        return;
    }

    if (reply->type == REDIS_REPLY_ARRAY && reply->elements && reply->element[0]->type == REDIS_REPLY_STRING
        && ngx_strcmp(reply->element[0]->str, "master") != 0)
    {
        ngx_http_kvgate_complain(NGX_LOG_WARN, ngx_cycle->log, "redis %s is a replica: looking for the master", redis.url.shown);
        redisAsyncFree(context);
        return;
    }

    redis.tries = 0;
}


/* redis.url, with its events. NULL: not even begun. */
static redisAsyncContext *
ngx_http_kvgate_redis_open(void)
{
    redisAsyncContext     *context;
    struct kvg_redis_url  *url = &redis.url;

    context = url->path[0] ? redisAsyncConnectUnix(url->path) : redisAsyncConnect(url->host, url->port);

    if (context == NULL) {
        return NULL;
    }

    if (context->err) {
        ngx_http_kvgate_redis_complain(context->errstr);
        redisAsyncFree(context);
        return NULL;
    }

    if (ngx_http_kvgate_hiredis_attach(context, ngx_http_kvgate_redis_gone, ngx_http_kvgate_redis_failed) != NGX_OK) {
        redisAsyncFree(context);
        return NULL;
    }

#if (NGX_SSL)
    if (url->tls && ngx_http_kvgate_tls_attach(context->ev.data, redis.conf->redis_ssl, url->name) != NGX_OK) {
        redisAsyncFree(context);
        return NULL;
    }
#endif

    ngx_http_kvgate_replies_guard(context);
    redisAsyncSetConnectCallback(context, ngx_http_kvgate_redis_on_connect);
    redisAsyncSetDisconnectCallback(context, ngx_http_kvgate_redis_on_disconnect);
    redis.silent = 0;

    return context;
}


static void
ngx_http_kvgate_redis_begin(void)
{
    redis.context = ngx_http_kvgate_redis_open();

    if (redis.context) {
        ngx_http_kvgate_redis_greet();
        ngx_http_kvgate_redis_poll();
    }
}


/* A Sentinel says where the master is. Names are not taken: looking them up would hold up all requests. */
static void
ngx_http_kvgate_redis_told(redisAsyncContext *context, void *data, void *privdata)
{
    redisReply            *reply = data;
    in_addr_t              v4;
    struct in6_addr        v6;
    struct kvg_error       err;
    struct kvg_redis_url   master;

    if (reply == NULL || context != redis.sentinel) {
        return;
    }

    err.message[0] = '\0';

    if (reply->type != REDIS_REPLY_ARRAY || reply->elements != 2 || reply->element[0]->type != REDIS_REPLY_STRING
        || reply->element[1]->type != REDIS_REPLY_STRING)
    {
        ngx_http_kvgate_redis_complain(reply->type == REDIS_REPLY_ERROR ? reply->str : "knows no such master");

    } else if (kvg_redis_master(&redis.conf->redis, reply->element[0]->str, reply->element[1]->str, &master, &err) != KVG_OK) {
        ngx_http_kvgate_redis_complain(err.message);

    } else if (inet_pton(AF_INET, master.host, &v4) != 1 && inet_pton(AF_INET6, master.host, &v6) != 1) {
        ngx_http_kvgate_redis_complain("names the master by a host name; set \"resolve-hostnames no\" there");

    } else {
        redis.sentinel = NULL;  /* its cleanup tries nothing else */
        redis.url = master;
        ngx_http_kvgate_redis_begin();
    }

    redisAsyncFree(context);
}


static void
ngx_http_kvgate_redis_connect(void)
{
    redis.url = redis.conf->redis.urls[redis.next];
    redis.next = (redis.next + 1) % redis.conf->redis.n;
    redis.tries++;

    if (redis.conf->redis.master[0] == '\0') {
        ngx_http_kvgate_redis_begin();
        return;
    }

    redis.sentinel = ngx_http_kvgate_redis_open();

    if (redis.sentinel) {
        redisAsyncCommand(redis.sentinel, ngx_http_kvgate_redis_told, NULL, "SENTINEL GET-MASTER-ADDR-BY-NAME %s", redis.conf->redis.master);
    }
}


static void
ngx_http_kvgate_redis_tick(ngx_event_t *ev)
{
    if (ngx_exiting || ngx_quit || ngx_terminate) {
        return;
    }

    if ((redis.context || redis.sentinel) && redis.silent >= NGX_HTTP_KVGATE_SILENT) {
        ngx_http_kvgate_redis_complain("no answer for two seconds");
        redisAsyncFree(redis.context ? redis.context : redis.sentinel);
    }

    if (redis.context || redis.sentinel) {
        redis.silent++;

    } else {
        ngx_http_kvgate_redis_connect();
    }

    ngx_add_timer(ev, NGX_HTTP_KVGATE_TICK);

    if (redis.context && redis.silent) {
        ngx_http_kvgate_redis_poll();
    }
}


static void
ngx_http_kvgate_redis_probe(ngx_event_t *ev)
{
    if (redis.timeouts < NGX_HTTP_KVGATE_BREAKER || ngx_exiting || ngx_quit || ngx_terminate) {
        return;
    }

    if (redis.context && redis.polls == 0) {
        ngx_http_kvgate_redis_poll();
    }

    ngx_add_timer(ev, NGX_HTTP_KVGATE_PROBE);
}


ngx_int_t
ngx_http_kvgate_redis_init(ngx_cycle_t *cycle, ngx_http_kvgate_main_conf_t *conf)
{
    redis.conf = conf;
    redis.tick.handler = ngx_http_kvgate_redis_tick;
    redis.tick.data = &redis;
    redis.tick.log = cycle->log;
    redis.tick.cancelable = 1;
    redis.probe.handler = ngx_http_kvgate_redis_probe;
    redis.probe.data = &redis;
    redis.probe.log = cycle->log;
    redis.probe.cancelable = 1;

    ngx_http_kvgate_redis_connect();
    ngx_add_timer(&redis.tick, NGX_HTTP_KVGATE_TICK);

    return NGX_OK;
}


void
ngx_http_kvgate_redis_exit(void)
{
    if (redis.tick.timer_set) {
        ngx_del_timer(&redis.tick);
    }

    if (redis.probe.timer_set) {
        ngx_del_timer(&redis.probe);
    }

    if (redis.sentinel) {
        redisAsyncFree(redis.sentinel);
    }

    if (redis.context) {
        redisAsyncFree(redis.context);
    }
}


/* ---- script calls ---- */

static ngx_http_kvgate_call_t *
ngx_http_kvgate_call_create(enum kvg_script_id script, ngx_http_kvgate_reply_pt handler, void *data)
{
    ngx_http_kvgate_call_t  *call;

    call = ngx_calloc(sizeof(ngx_http_kvgate_call_t), ngx_cycle->log);
    if (call == NULL) {
        return NULL;
    }

    kvg_arena_init(&call->arena, 0);
    call->script = script;
    call->handler = handler;
    call->data = data;
    call->start = ngx_http_kvgate_microseconds();

    return call;
}


static void
ngx_http_kvgate_call_free(ngx_http_kvgate_call_t *call)
{
    if (call->timer.timer_set) {
        ngx_del_timer(&call->timer);
    }

    kvg_arena_free(&call->arena);
    ngx_free(call);
}


static ngx_int_t
ngx_http_kvgate_call_send(ngx_http_kvgate_call_t *call)
{
    int  rc;

    rc = redisAsyncCommandArgv(redis.context, ngx_http_kvgate_redis_reply, call, call->argc, call->argv, call->argv_len);

    return rc == REDIS_OK ? NGX_OK : NGX_ERROR;
}


/* Redis was restarted or flushed its scripts: send the source, which also caches it. */
static ngx_int_t
ngx_http_kvgate_call_evaluate(ngx_http_kvgate_call_t *call)
{
    const struct kvg_script  *script;

    script = kvg_script(call->script);
    call->evaluated = 1;
    call->argv[0] = "EVAL";
    call->argv_len[0] = sizeof("EVAL") - 1;
    call->argv[1] = script->source;
    call->argv_len[1] = script->len;

    return ngx_http_kvgate_call_send(call);
}


static void
ngx_http_kvgate_call_done(ngx_http_kvgate_call_t *call, ngx_http_kvgate_reason_e failure, const redisReply *reply)
{
    ngx_http_kvgate_reply_pt  handler;

    if (call->timer.timer_set) {
        ngx_del_timer(&call->timer);
    }

    handler = call->handler;
    call->handler = NULL;

    if (handler) {
        handler(call->data, failure, reply);
    }
}


static void
ngx_http_kvgate_redis_answers(ngx_http_kvgate_call_t *call)
{
    redis.silent = 0;

    if (call->handler && ngx_http_kvgate_microseconds() - call->start <= redis.conf->redis_timeout * 1000) {
        redis.timeouts = 0;
    }

    if (!redis.connected && redis.context) {
        redis.connected = 1;
        redis.complained = 0;
        ngx_log_error(NGX_LOG_NOTICE, ngx_cycle->log, 0, "kvgate: redis %s answers", redis.url.shown);
    }
}


static void
ngx_http_kvgate_redis_reply(redisAsyncContext *context, void *data, void *privdata)
{
    redisReply              *reply = data;
    ngx_http_kvgate_call_t  *call = privdata;

    if (reply == NULL) {
        ngx_http_kvgate_call_done(call, NGX_HTTP_KVGATE_REDIS_DOWN, NULL);
        ngx_http_kvgate_call_free(call);
        return;
    }

    ngx_http_kvgate_redis_answers(call);

    if (reply->type == REDIS_REPLY_ERROR && !call->evaluated && ngx_strncmp(reply->str, "NOSCRIPT", 8) == 0
        && ngx_http_kvgate_call_evaluate(call) == NGX_OK)
    {
        return;
    }

    if (reply->type == REDIS_REPLY_ERROR) {
        ngx_http_kvgate_complain(NGX_LOG_WARN, ngx_cycle->log, "redis %s: %s.lua: %s", redis.url.shown,
                                 kvg_script(call->script)->name, reply->str);
        ngx_http_kvgate_call_done(call, NGX_HTTP_KVGATE_REDIS_ERROR, NULL);

    } else {
        ngx_http_kvgate_call_done(call, NGX_HTTP_KVGATE_NONE, reply);
    }

    ngx_http_kvgate_call_free(call);
}


/* ---- polling the live workers ---- */

static void
ngx_http_kvgate_redis_polled(void *data, ngx_http_kvgate_reason_e failure, const redisReply *reply)
{
    size_t                    n;
    struct kvg_error          err;
    struct kvg_arena          arena;
    struct kvg_live_worker   *workers;
    ngx_http_kvgate_model_t  *model = data;

    redis.polls--;

    if (reply == NULL) {
        return;
    }

    kvg_arena_init(&arena, 0);
    err.message[0] = '\0';

    if (kvg_workers_parse(reply, &arena, &workers, &n, &err) == KVG_OK) {
        ngx_http_kvgate_workers_set(redis.conf, model->pool, workers, n);
    }

    if (err.message[0]) {
        ngx_http_kvgate_complain(NGX_LOG_WARN, ngx_cycle->log, "model \"%s\": %s", model->name, err.message);
    }

    kvg_arena_free(&arena);
}


static void
ngx_http_kvgate_redis_poll(void)
{
    ngx_uint_t                i;
    ngx_http_kvgate_call_t   *call;
    ngx_http_kvgate_model_t  *model;

    if (redis.context && ngx_http_kvgate_redis_several()) {
        redisAsyncCommand(redis.context, ngx_http_kvgate_redis_role, NULL, "ROLE");
    }

    model = redis.conf->models.elts;

    for (i = 0; i < redis.conf->models.nelts && redis.context; i++) {
        call = ngx_http_kvgate_call_create(KVG_SCRIPT_WORKERS, ngx_http_kvgate_redis_polled, &model[i]);
        if (call == NULL) {
            return;
        }

        if (kvg_workers_argv((char *) redis.conf->redis_prefix.data, model[i].name, &call->arena, &call->argc, &call->argv,
                             &call->argv_len) != KVG_OK
            || ngx_http_kvgate_call_send(call) != NGX_OK)
        {
            ngx_http_kvgate_call_free(call);

        } else {
            redis.polls++;
        }
    }
}


/* ---- queries of requests ---- */

static void
ngx_http_kvgate_redis_timer(ngx_event_t *ev)
{
    ngx_http_kvgate_call_t  *call = ev->data;

    redis.timeouts++;

    if (redis.timeouts >= NGX_HTTP_KVGATE_BREAKER && !redis.probe.timer_set) {
        ngx_add_timer(&redis.probe, NGX_HTTP_KVGATE_PROBE);
    }

    ngx_http_kvgate_call_done(call, NGX_HTTP_KVGATE_REDIS_TIMEOUT, NULL);
}


/* A call for a request, unless there is nobody to ask. */
static ngx_http_kvgate_call_t *
ngx_http_kvgate_redis_ask(enum kvg_script_id script, ngx_http_kvgate_reply_pt handler, void *data, ngx_http_kvgate_reason_e *failure)
{
    *failure = NGX_HTTP_KVGATE_REDIS_DOWN;

    if (redis.context == NULL) {
        return NULL;
    }

    if (redis.timeouts >= NGX_HTTP_KVGATE_BREAKER) {
        *failure = NGX_HTTP_KVGATE_REDIS_TIMEOUT;
        return NULL;
    }

    return ngx_http_kvgate_call_create(script, handler, data);
}


/* Sends it with its timer; rc is that of making its arguments. */
static ngx_http_kvgate_call_t *
ngx_http_kvgate_redis_send(ngx_http_kvgate_call_t *call, int rc)
{
    if (rc != KVG_OK || ngx_http_kvgate_call_send(call) != NGX_OK) {
        ngx_http_kvgate_call_free(call);
        return NULL;
    }

    /* Not cancelable: while a request waits for it, the worker must not quit. */
    call->timer.handler = ngx_http_kvgate_redis_timer;
    call->timer.data = call;
    call->timer.log = ngx_cycle->log;
    ngx_time_update();  /* tokenizing took its time */
    ngx_add_timer(&call->timer, redis.conf->redis_timeout);

    return call;
}


ngx_http_kvgate_call_t *
ngx_http_kvgate_redis_route(const struct kvg_route_query *query, ngx_http_kvgate_reply_pt handler, void *data,
    ngx_http_kvgate_reason_e *failure)
{
    ngx_http_kvgate_call_t  *call;

    call = ngx_http_kvgate_redis_ask(KVG_SCRIPT_ROUTE, handler, data, failure);

    return call ? ngx_http_kvgate_redis_send(call, kvg_route_argv(query, &call->arena, &call->argc, &call->argv, &call->argv_len)) : NULL;
}


ngx_http_kvgate_call_t *
ngx_http_kvgate_redis_limit(const struct kvg_limit_query *query, ngx_http_kvgate_reply_pt handler, void *data,
    ngx_http_kvgate_reason_e *failure)
{
    ngx_http_kvgate_call_t  *call;

    call = ngx_http_kvgate_redis_ask(KVG_SCRIPT_LIMIT, handler, data, failure);

    return call ? ngx_http_kvgate_redis_send(call, kvg_limit_argv(query, &call->arena, &call->argc, &call->argv, &call->argv_len)) : NULL;
}


void
ngx_http_kvgate_redis_cancel(ngx_http_kvgate_call_t *call)
{
    if (call->timer.timer_set) {
        ngx_del_timer(&call->timer);
    }

    call->handler = NULL;
}
