/* One connection to Redis per nginx worker: hiredis' asynchronous client on nginx's event loop, pipelined.
 *
 *   tick, each second   no connection -> connect to the next URL; silent for two ticks -> drop it; else poll workers.lua
 *   route query         EVALSHA (EVAL after NOSCRIPT) with a timer; a reply that comes too late is only thrown away
 *   BREAKER timeouts in a row -> queries answer REDIS_TIMEOUT at once, until a poll is answered in time; while that lasts, one is
 *                       sent every PROBE, as soon as the one before is answered, so no request pays for finding out
 *
 * Events are level-triggered: hiredis reads 16 KiB an event and would stall under edge-triggered ones.
 */
#include "ngx_http_kvgate.h"
#include <hiredis/async.h>

#define NGX_HTTP_KVGATE_TICK     1000
#define NGX_HTTP_KVGATE_SILENT   2
#define NGX_HTTP_KVGATE_BREAKER  3
#define NGX_HTTP_KVGATE_PROBE    100


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
    ngx_uint_t                     url;       /* of context */
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


/* ---- hiredis on nginx's events ---- */

static void
ngx_http_kvgate_redis_read(ngx_event_t *ev)
{
    ngx_connection_t  *c = ev->data;

    if (c->close) {
        /* nginx closes idle connections: this worker is quitting */
        redisAsyncFree(c->data);
        return;
    }

    redisAsyncHandleRead(c->data);
}


static void
ngx_http_kvgate_redis_write(ngx_event_t *ev)
{
    ngx_connection_t  *c = ev->data;

    redisAsyncHandleWrite(c->data);
}


static void
ngx_http_kvgate_redis_add_read(void *data)
{
    ngx_connection_t  *c = data;

    if (!c->read->active) {
        (void) ngx_add_event(c->read, NGX_READ_EVENT, NGX_LEVEL_EVENT);
    }
}


static void
ngx_http_kvgate_redis_del_read(void *data)
{
    ngx_connection_t  *c = data;

    if (c->read->active) {
        (void) ngx_del_event(c->read, NGX_READ_EVENT, 0);
    }
}


static void
ngx_http_kvgate_redis_add_write(void *data)
{
    ngx_connection_t  *c = data;

    if (!c->write->active) {
        (void) ngx_add_event(c->write, NGX_WRITE_EVENT, NGX_LEVEL_EVENT);
    }
}


static void
ngx_http_kvgate_redis_del_write(void *data)
{
    ngx_connection_t  *c = data;

    if (c->write->active) {
        (void) ngx_del_event(c->write, NGX_WRITE_EVENT, 0);
    }
}


/* hiredis closes the descriptor itself, after this. */
static void
ngx_http_kvgate_redis_cleanup(void *data)
{
    ngx_connection_t  *c = data;

    ngx_http_kvgate_redis_del_read(c);
    ngx_http_kvgate_redis_del_write(c);

    if (c->read->posted) {
        ngx_delete_posted_event(c->read);
    }

    if (c->write->posted) {
        ngx_delete_posted_event(c->write);
    }

    /* nginx's free list overwrites c->data */
    if (redis.context == c->data) {
        redis.context = NULL;
        redis.connected = 0;
    }

    ngx_free_connection(c);
    c->fd = (ngx_socket_t) -1;
}


/* ---- connecting ---- */

static struct kvg_redis_url *
ngx_http_kvgate_redis_url(void)
{
    return (struct kvg_redis_url *) redis.conf->redis.elts + redis.url;
}


static void
ngx_http_kvgate_redis_complain(const char *what)
{
    if (!redis.complained && !ngx_exiting && !ngx_quit && !ngx_terminate) {
        redis.complained = 1;
        ngx_log_error(NGX_LOG_ERR, ngx_cycle->log, 0,
                      "kvgate: redis %s: %s; requests are routed without it, retrying each second",
                      ngx_http_kvgate_redis_url()->shown, what);
    }
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
        ngx_http_kvgate_complain(NGX_LOG_ERR, ngx_cycle->log, "redis %s: %s: %s", ngx_http_kvgate_redis_url()->shown,
                                 (char *) privdata, reply->str);
    }
}


static void
ngx_http_kvgate_redis_greet(void)
{
    redisAsyncContext            *context = redis.context;
    struct kvg_redis_url         *url = ngx_http_kvgate_redis_url();

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


static void
ngx_http_kvgate_redis_connect(void)
{
    ngx_connection_t             *c;
    redisAsyncContext            *context;
    struct kvg_redis_url         *url;

    url = ngx_http_kvgate_redis_url();
    context = url->path[0] ? redisAsyncConnectUnix(url->path) : redisAsyncConnect(url->host, url->port);

    if (context == NULL) {
        return;
    }

    if (context->err) {
        ngx_http_kvgate_redis_complain(context->errstr);
        redisAsyncFree(context);
        return;
    }

    c = ngx_get_connection(context->c.fd, ngx_cycle->log);
    if (c == NULL) {
        redisAsyncFree(context);
        return;
    }

    ngx_http_kvgate_replies_guard(context);

    c->data = context;
    c->idle = 1;
    c->read->handler = ngx_http_kvgate_redis_read;
    c->write->handler = ngx_http_kvgate_redis_write;
    c->read->log = ngx_cycle->log;
    c->write->log = ngx_cycle->log;

    context->ev.data = c;
    context->ev.addRead = ngx_http_kvgate_redis_add_read;
    context->ev.delRead = ngx_http_kvgate_redis_del_read;
    context->ev.addWrite = ngx_http_kvgate_redis_add_write;
    context->ev.delWrite = ngx_http_kvgate_redis_del_write;
    context->ev.cleanup = ngx_http_kvgate_redis_cleanup;
    redisAsyncSetConnectCallback(context, ngx_http_kvgate_redis_on_connect);
    redisAsyncSetDisconnectCallback(context, ngx_http_kvgate_redis_on_disconnect);

    redis.context = context;
    redis.silent = 0;
    ngx_http_kvgate_redis_greet();
    ngx_http_kvgate_redis_poll();
}


static void
ngx_http_kvgate_redis_tick(ngx_event_t *ev)
{
    if (ngx_exiting || ngx_quit || ngx_terminate) {
        return;
    }

    if (redis.context && redis.silent >= NGX_HTTP_KVGATE_SILENT) {
        ngx_http_kvgate_redis_complain("no answer for two seconds");
        redisAsyncFree(redis.context);
    }

    if (redis.context) {
        redis.silent++;
        ngx_http_kvgate_redis_poll();

    } else {
        redis.url = (redis.url + 1) % redis.conf->redis.nelts;
        ngx_http_kvgate_redis_connect();
    }

    ngx_add_timer(ev, NGX_HTTP_KVGATE_TICK);
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
        ngx_log_error(NGX_LOG_NOTICE, ngx_cycle->log, 0, "kvgate: redis %s answers", ngx_http_kvgate_redis_url()->shown);
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
        ngx_http_kvgate_complain(NGX_LOG_WARN, ngx_cycle->log, "redis %s: %s.lua: %s", ngx_http_kvgate_redis_url()->shown,
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
