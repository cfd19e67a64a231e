/* The publisher's thread. What it goes through:
 *
 *             ┌────────────── resync ◄─────────────────────────────┐
 *             ▼                                                     │
 *   UNREGISTERED ──► AWAIT_SNAPSHOT ──► SEND_SNAPSHOT ──► LIVE ─────┤
 *        │ register     (the engine         (last batch     │ batches, heartbeats
 *        │ says so       hands it over)      switches live) │
 *        └──────────────────── another process took the id: SUPERSEDED
 *
 * A connection may break in any of these; the thread then reconnects and goes on where it was. The batch in flight keeps its
 * number and its length, so that one which was applied although its reply got lost is not applied twice, and nothing is
 * skipped. */
#include "gpu-worker/kv/publish.h"
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include "gpu-worker/kv/publish_link.h"
#include "gpu-worker/kv/publish_queue.h"
#include "gpu-worker/log.h"

enum {
    BATCH_EVENTS = 256, /* about a millisecond of Redis' time */
    BEAT_MS = 1000,
    RETRY_MS = 1000,
    SHED_MS = 5000, /* stored blocks are left out for so long after Redis was out of memory */
    DEFAULT_QUEUE = 65536,
    DEFAULT_STALL_MS = 10000,
    ID_MAX = 24,
};

enum phase { UNREGISTERED, AWAIT_SNAPSHOT, SEND_SNAPSHOT, LIVE, SUPERSEDED };
enum answer { ANSWER_OK, ANSWER_RESYNC, ANSWER_SUPERSEDED, ANSWER_MISMATCH, ANSWER_ERROR, ANSWER_DOWN };

/* Something that does not work, for a log that says so once, and once when it works again. */
struct trouble {
    char code[24]; /* "" = none */
    int64_t since;
};

struct publisher {
    char *model, *worker_id, *addr, *version, *prefix;
    char meta[KVG_KEY_MAX], client_name[KVG_NAME_MAX + 24];
    char nonce[17], fingerprint[KVG_HASH_HEX + 1], block_size[ID_MAX];
    void (*superseded)(void *context);
    void *context;
    pthread_t thread;
    struct publish_queue queue;

    /* written by the engine thread, read by the publisher's */
    _Atomic uint32_t running, waiting, blocks_used, blocks_total;
    _Atomic uint64_t backlog;
    _Atomic int64_t reported_ms;
    _Atomic bool draining, stop, held;

    /* written by the publisher's thread, read by publisher_stats */
    _Atomic bool connected, registered, mismatch;
    _Atomic uint64_t lease, batches, stored, evicted, resyncs, errors;

    /* the publisher's thread alone */
    struct publish_link link;
    enum phase phase;
    bool ever_registered, sent_draining, silent, shed;
    int64_t stall_ms;
    int connect_fails;
    int64_t connect_at, register_at, beat_at, beat_retry_at, batch_at, shed_at;
    uint64_t seq;    /* of the last batch that Redis acknowledged under this lease */
    size_t inflight; /* events of the batch that may or may not have been applied; 0 = none */
    bool shedding;   /* Redis is out of memory: batches go without their stored events */
    size_t snapshot_sent;
    struct trouble link_trouble, register_trouble, beat_trouble, batch_trouble;
    char warned_policy[48];
    char events[BATCH_EVENTS * QUEUE_EVENT_BYTES];
};

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* --- the log: each change of state once --- */

__attribute__((format(printf, 4, 5))) static void trouble_set(struct publisher *p, struct trouble *trouble, const char *code,
                                                              const char *format, ...)
{
    char text[512];
    va_list args;
    atomic_fetch_add(&p->errors, 1);
    if (!strncmp(trouble->code, code, sizeof trouble->code - 1))
        return;
    if (!trouble->code[0])
        trouble->since = now_ms();
    snprintf(trouble->code, sizeof trouble->code, "%s", code);
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    log_warn("redis %s: %s", p->link.url.shown, text);
}

static void trouble_clear(struct publisher *p, struct trouble *trouble, const char *text)
{
    if (trouble->code[0])
        log_info("redis %s: %s after %.1f s", p->link.url.shown, text, (double)(now_ms() - trouble->since) / 1000);
    trouble->code[0] = '\0';
}

/* --- calls --- */

/* What a script answered; text gets the second element (a lease, a reason) or the error. */
static enum answer read_answer(const redisReply *reply, char *text, size_t size)
{
    text[0] = '\0';
    if (reply->type == REDIS_REPLY_ERROR) {
        snprintf(text, size, "%s", reply->str);
        return ANSWER_ERROR;
    }
    if (reply->type != REDIS_REPLY_ARRAY || !reply->elements || reply->element[0]->type != REDIS_REPLY_STRING) {
        snprintf(text, size, "unexpected reply of type %d", reply->type);
        return ANSWER_ERROR;
    }
    const char *word = reply->element[0]->str;
    if (reply->elements > 1 && reply->element[1]->type == REDIS_REPLY_STRING)
        snprintf(text, size, "%s", reply->element[1]->str);
    return !strcmp(word, "ok")           ? ANSWER_OK
           : !strcmp(word, "resync")     ? ANSWER_RESYNC
           : !strcmp(word, "superseded") ? ANSWER_SUPERSEDED
           : !strcmp(word, "mismatch")   ? ANSWER_MISMATCH
                                         : ANSWER_ERROR;
}

static void connection_lost(struct publisher *p)
{
    int64_t delay = p->connect_fails < 4 ? 100 << p->connect_fails : RETRY_MS;
    p->connect_fails++;
    p->connect_at = now_ms() + (delay < RETRY_MS ? delay : RETRY_MS);
    atomic_store(&p->connected, false);
    trouble_set(p, &p->link_trouble, p->link.why, "%s; this worker serves on and tries again each second", p->link.why);
}

static enum answer call(struct publisher *p, enum kvg_script_id script, size_t n, const char *const *args, const size_t *lens,
                        char *text, size_t size)
{
    redisReply *reply = link_call(&p->link, script, p->meta, n, args, lens);
    if (!reply) {
        connection_lost(p);
        return ANSWER_DOWN;
    }
    enum answer answer = read_answer(reply, text, size);
    freeReplyObject(reply);
    /* A demoted master: another address, or the same, may lead to the new one. */
    if (answer == ANSWER_ERROR && !strncmp(text, "READONLY", 8))
        link_pass_on(&p->link);
    return answer;
}

/* The first word of an error, such as OOM, READONLY, LOADING, is its code. */
static void call_failed(struct publisher *p, struct trouble *trouble, const char *what, const char *text)
{
    char code[24];
    snprintf(code, sizeof code, "%.*s", (int)strcspn(text, " "), text);
    trouble_set(p, trouble, code, "%s fails: %s; trying again each second", what, text);
    if (!p->link.context) {
        atomic_store(&p->connected, false);
        p->connect_at = now_ms() + RETRY_MS;
    }
}

static void connect_redis(struct publisher *p)
{
    if (link_open(&p->link, p->client_name)) {
        connection_lost(p);
        return;
    }
    p->connect_fails = 0;
    if (p->link_trouble.code[0])
        trouble_clear(p, &p->link_trouble, "connected again");
    else if (!p->ever_registered)
        log_info("redis %s: connected", p->link.url.shown);
    atomic_store(&p->connected, true);
    if (p->link.policy[0] && strcmp(p->link.policy, "noeviction") && strcmp(p->link.policy, p->warned_policy)) {
        log_warn("redis %s: maxmemory-policy is %s; set it to noeviction, or Redis may drop keys of live workers",
                 p->link.url.shown, p->link.policy);
        snprintf(p->warned_policy, sizeof p->warned_policy, "%s", p->link.policy);
    }
}

/* --- changes of state --- */

static void resync(struct publisher *p, const char *why)
{
    log_warn("redis %s: resync: %s; taking a new lease and sending all blocks", p->link.url.shown, why);
    atomic_fetch_add(&p->resyncs, 1);
    atomic_store(&p->registered, false);
    p->phase = UNREGISTERED;
}

static void superseded(struct publisher *p)
{
    log_error("redis %s: another process took the worker id %s: this one must end", p->link.url.shown, p->worker_id);
    atomic_store(&p->registered, false);
    p->phase = SUPERSEDED;
    if (p->superseded)
        p->superseded(p->context);
}

static void registered(struct publisher *p, const char *lease)
{
    trouble_clear(p, &p->register_trouble, "registered");
    atomic_store(&p->mismatch, false);
    atomic_store(&p->lease, strtoull(lease, NULL, 10));
    p->ever_registered = true;
    p->shed = p->shedding = false;
    p->seq = p->inflight = p->snapshot_sent = 0;
    p->beat_at = p->batch_at = 0;
    if (queue_complete(&p->queue)) {
        p->phase = SEND_SNAPSHOT; /* of nothing: the ring tells the rest */
    } else if (queue_want(&p->queue, atomic_load(&p->blocks_total)) == 0) {
        p->phase = AWAIT_SNAPSHOT;
    }
}

static void register_worker(struct publisher *p)
{
    char text[256], schema[ID_MAX];
    snprintf(schema, sizeof schema, "%d", KVG_SCHEMA_VERSION);
    const char *args[] = {p->worker_id, p->nonce,  p->ever_registered ? "again" : "first", p->block_size, p->fingerprint, schema,
                          p->addr,      p->version};
    p->register_at = now_ms() + RETRY_MS;
    switch (call(p, KVG_SCRIPT_REGISTER, 8, args, NULL, text, sizeof text)) {
    case ANSWER_OK:
        registered(p, text);
        break;
    case ANSWER_SUPERSEDED:
        superseded(p);
        break;
    case ANSWER_MISMATCH:
        atomic_store(&p->mismatch, true);
        trouble_set(p, &p->register_trouble, "mismatch",
                    "MISMATCH with model %s: %s. This worker serves, but its cache is not published and the gateway does not "
                    "route to it; it tries again each second",
                    p->model, text);
        break;
    case ANSWER_RESYNC:
    case ANSWER_ERROR:
        call_failed(p, &p->register_trouble, "registration", text);
        break;
    case ANSWER_DOWN:
        break;
    }
}

/* --- heartbeats --- */

static bool steps_are_done(struct publisher *p, int64_t now)
{
    bool silent = now - atomic_load(&p->reported_ms) > p->stall_ms;
    if (silent != p->silent) {
        if (silent)
            log_error("redis %s: no step ended for %.1f s: heartbeats stop, the gateway will route around this worker",
                      p->link.url.shown, (double)p->stall_ms / 1000);
        else
            log_info("redis %s: steps end again: heartbeats go on", p->link.url.shown);
        p->silent = silent;
    }
    return !silent;
}

static bool beat_due(struct publisher *p, int64_t now)
{
    return now >= p->beat_at || (atomic_load(&p->draining) != p->sent_draining && now >= p->beat_retry_at);
}

static void heartbeat(struct publisher *p, int64_t now)
{
    bool draining = atomic_load(&p->draining);
    char number[6][ID_MAX], text[256];
    snprintf(number[0], ID_MAX, "%" PRIu64, atomic_load(&p->lease));
    snprintf(number[1], ID_MAX, "%" PRIu32, atomic_load(&p->running));
    snprintf(number[2], ID_MAX, "%" PRIu32, atomic_load(&p->waiting));
    snprintf(number[3], ID_MAX, "%" PRIu32, atomic_load(&p->blocks_used));
    snprintf(number[4], ID_MAX, "%" PRIu32, atomic_load(&p->blocks_total));
    snprintf(number[5], ID_MAX, "%" PRIu64, atomic_load(&p->backlog));
    const char *args[] = {p->worker_id, p->nonce,  number[0], draining ? "draining" : "ready", number[1], number[2],
                          number[3],    number[4], number[5]};
    p->beat_at = p->beat_retry_at = now + BEAT_MS;
    switch (call(p, KVG_SCRIPT_HEARTBEAT, 9, args, NULL, text, sizeof text)) {
    case ANSWER_OK:
        p->sent_draining = draining;
        p->beat_retry_at = 0;
        trouble_clear(p, &p->beat_trouble, "heartbeats go through again");
        break;
    case ANSWER_RESYNC:
        resync(p, text);
        break;
    case ANSWER_SUPERSEDED:
        superseded(p);
        break;
    case ANSWER_MISMATCH:
    case ANSWER_ERROR:
        call_failed(p, &p->beat_trouble, "heartbeat", text);
        break;
    case ANSWER_DOWN:
        break;
    }
}

/* --- batches --- */

/* Sends events[0..len) as the next batch. An error that a batch without stored events would not meet turns `shedding` on. */
static enum answer send_batch(struct publisher *p, size_t len, bool last_of_snapshot)
{
    char lease[ID_MAX], seq[ID_MAX], text[256];
    snprintf(lease, sizeof lease, "%" PRIu64, atomic_load(&p->lease));
    snprintf(seq, sizeof seq, "%" PRIu64, p->seq + 1);
    const char *args[] = {p->worker_id, p->nonce, lease, seq, last_of_snapshot ? "live" : "", p->events};
    size_t lens[] = {strlen(p->worker_id), strlen(p->nonce), strlen(lease), strlen(seq), strlen(args[4]), len};
    enum answer answer = call(p, KVG_SCRIPT_PUBLISH, 6, args, lens, text, sizeof text);
    switch (answer) {
    case ANSWER_OK:
        p->seq++;
        atomic_fetch_add(&p->batches, 1);
        break;
    case ANSWER_RESYNC:
        resync(p, text);
        break;
    case ANSWER_SUPERSEDED:
        superseded(p);
        break;
    case ANSWER_MISMATCH:
    case ANSWER_ERROR:
        call_failed(p, &p->batch_trouble, "publishing", text);
        if (!strncmp(text, "OOM", 3) && !p->shedding) {
            p->shedding = true;
            p->shed_at = now_ms() + SHED_MS;
        } else {
            p->batch_at = now_ms() + RETRY_MS;
        }
        break;
    case ANSWER_DOWN:
        break;
    }
    return answer;
}

/* A batch went through. With its stored events left out (shedding), Redis knows less than the worker holds, never more; the
 * next batches try with all again after a while, and when one succeeds a resync brings back what was left out. */
static void batch_done(struct publisher *p, size_t n_stored, size_t n_evicted)
{
    atomic_fetch_add(&p->stored, n_stored);
    atomic_fetch_add(&p->evicted, n_evicted);
    if (p->shedding) {
        p->shed = true;
        return;
    }
    trouble_clear(p, &p->batch_trouble, "publishing again");
    if (p->shed && n_stored && p->phase == LIVE)
        resync(p, "stored blocks were left out while Redis was out of memory");
}

static void send_snapshot(struct publisher *p)
{
    size_t left = p->queue.snapshot_n - p->snapshot_sent, n = left < BATCH_EVENTS ? left : BATCH_EVENTS;
    size_t stored = p->shedding ? 0 : n;
    for (size_t i = 0; i < stored; i++)
        queue_format(&p->queue.snapshot[p->snapshot_sent + i], false, p->events + i * QUEUE_EVENT_BYTES);
    if (send_batch(p, stored * QUEUE_EVENT_BYTES, n == left) != ANSWER_OK)
        return;
    p->snapshot_sent += n;
    if (n == left) {
        log_info("redis %s: live as worker %s of model %s, lease %" PRIu64 ", %zu blocks", p->link.url.shown, p->worker_id,
                 p->model, atomic_load(&p->lease), p->snapshot_sent);
        queue_release(&p->queue);
        p->phase = LIVE;
        atomic_store(&p->registered, true);
    }
    batch_done(p, stored, 0);
}

static void send_events(struct publisher *p)
{
    uint64_t pending = queue_pending(&p->queue);
    size_t n_stored, n_evicted;
    if (!p->inflight)
        p->inflight = pending < BATCH_EVENTS ? (size_t)pending : BATCH_EVENTS;
    if (p->shedding && now_ms() >= p->shed_at)
        p->shedding = false;
    size_t len = queue_pack(&p->queue, p->inflight, p->shedding, p->events, &n_stored, &n_evicted);
    if (send_batch(p, len, false) != ANSWER_OK)
        return;
    queue_pop(&p->queue, p->inflight);
    p->inflight = 0;
    batch_done(p, n_stored, n_evicted);
}

/* --- the thread --- */

/* Does what is due; returns for how many milliseconds nothing will be, unless woken. */
static int work(struct publisher *p)
{
    int64_t now = now_ms();
    if (p->phase == SUPERSEDED)
        return BEAT_MS;
    if (!p->link.context && now >= p->connect_at)
        connect_redis(p);
    if (p->phase == AWAIT_SNAPSHOT && queue_take(&p->queue) == 1)
        p->phase = SEND_SNAPSHOT;
    if (p->phase == LIVE && !p->inflight && queue_lost(&p->queue))
        resync(p, "the queue overflowed");
    if (!p->link.context)
        return (int)(p->connect_at > now ? p->connect_at - now : 1);

    if (p->phase == UNREGISTERED) {
        if (atomic_load(&p->held))
            return BEAT_MS;
        if (now < p->register_at)
            return (int)(p->register_at - now);
        register_worker(p);
        return p->phase == UNREGISTERED ? RETRY_MS / 10 : 0;
    }
    if (steps_are_done(p, now) && beat_due(p, now)) {
        heartbeat(p, now);
        return 0;
    }
    if (now >= p->batch_at) {
        if (p->phase == SEND_SNAPSHOT) {
            send_snapshot(p);
            return 0;
        }
        if (p->phase == LIVE && (p->inflight || queue_pending(&p->queue))) {
            send_events(p);
            return 0;
        }
    }
    int64_t until_beat = p->silent ? BEAT_MS : p->beat_at - now;
    return (int)(until_beat > 1 ? until_beat : 1);
}

static void leave(struct publisher *p)
{
    const char *args[] = {p->worker_id, p->nonce};
    if (!p->link.context || p->phase == SUPERSEDED || !p->ever_registered)
        return;
    redisReply *reply = link_call(&p->link, KVG_SCRIPT_FORGET, p->meta, 2, args, NULL);
    if (reply && reply->type == REDIS_REPLY_INTEGER)
        log_info("redis %s: left", p->link.url.shown);
    if (reply)
        freeReplyObject(reply);
}

static void *run(void *arg)
{
    struct publisher *p = arg;
    sigset_t all;
    sigfillset(&all); /* hiredis writes to sockets that may be closed: no SIGPIPE here */
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    while (!atomic_load(&p->stop)) {
        int idle_ms = work(p);
        if (idle_ms > 0 && !atomic_load(&p->stop))
            queue_wait(&p->queue, idle_ms < BEAT_MS ? idle_ms : BEAT_MS);
    }
    leave(p);
    link_close(&p->link);
    return NULL;
}

/* --- open and close --- */

static int check_options(const struct publisher_options *options, struct kvg_error *err)
{
    const char *prefix = options->prefix ? options->prefix : "kvgate:";
    if (!options->model || !kvg_name_valid(options->model, strlen(options->model)))
        return kvg_fail(err, KVG_INVALID, "model name \"%.140s\" does not match [A-Za-z0-9._/-]{1,128}",
                        options->model ? options->model : "");
    if (!options->worker_id || !kvg_name_valid(options->worker_id, strlen(options->worker_id)))
        return kvg_fail(err, KVG_INVALID, "worker id \"%.140s\" does not match [A-Za-z0-9._/-]{1,128}",
                        options->worker_id ? options->worker_id : "");
    if (!kvg_prefix_valid(prefix, strlen(prefix)))
        return kvg_fail(err, KVG_INVALID, "key prefix \"%.80s\" does not match [A-Za-z0-9._/:-]{0,64}", prefix);
    if (!options->addr || !options->addr[0] || strlen(options->addr) > 127 || strpbrk(options->addr, "\"\\ \t\r\n"))
        return kvg_fail(err, KVG_INVALID, "advertised address \"%.140s\" is not IP:port or unix:/path of at most 127 bytes",
                        options->addr ? options->addr : "");
    return 0;
}

static int copy_options(struct publisher *p, const struct publisher_options *options)
{
    uint64_t nonce = 0;
    p->model = strdup(options->model);
    p->worker_id = strdup(options->worker_id);
    p->addr = strdup(options->addr);
    p->version = strndup(options->version ? options->version : "", 31);
    p->prefix = strdup(options->prefix ? options->prefix : "kvgate:");
    if (!p->model || !p->worker_id || !p->addr || !p->version || !p->prefix)
        return -1;
    if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce)
        return -1;
    snprintf(p->nonce, sizeof p->nonce, "%016" PRIx64, nonce);
    kvg_hash_hex(&options->fingerprint, p->fingerprint);
    snprintf(p->block_size, sizeof p->block_size, "%" PRIu32, options->block_size);
    snprintf(p->client_name, sizeof p->client_name, "kvgate-worker:%s", p->worker_id);
    kvg_key_meta(p->meta, p->prefix, p->model);
    p->superseded = options->superseded;
    p->context = options->context;
    p->stall_ms = options->stall_ms ? options->stall_ms : DEFAULT_STALL_MS;
    atomic_store(&p->reported_ms, now_ms());
    atomic_store(&p->held, options->held);
    return 0;
}

static void release(struct publisher *p)
{
    queue_free(&p->queue);
    free(p->model);
    free(p->worker_id);
    free(p->addr);
    free(p->version);
    free(p->prefix);
    free(p);
}

int publisher_open(struct publisher **out, const struct publisher_options *options, struct kvg_error *err)
{
    *out = NULL;
    if (check_options(options, err))
        return KVG_INVALID;
    struct publisher *p = calloc(1, sizeof *p);
    if (!p)
        return kvg_fail(err, KVG_NOMEM, "publisher: out of memory");
    p->queue.wake = -1;
    if (kvg_redis_servers_parse(options->redis ? options->redis : "", &p->link.servers, err)) {
        release(p);
        return KVG_INVALID;
    }
    for (size_t i = 0; i < p->link.servers.n; i++)
        if (p->link.servers.urls[i].tls) {
            release(p);
            return kvg_fail(err, KVG_INVALID,
                            "Redis URL: rediss:// (TLS) is not supported here: run a TLS proxy such as stunnel beside this "
                            "program and name its plain address or unix socket");
        }
    p->link.url = p->link.servers.urls[0];
    if (queue_init(&p->queue, options->queue_blocks ? options->queue_blocks : DEFAULT_QUEUE) || copy_options(p, options) ||
        pthread_create(&p->thread, NULL, run, p)) {
        release(p);
        return kvg_fail(err, KVG_NOMEM, "publisher: out of memory, file descriptors or threads");
    }
    *out = p;
    return 0;
}

void publisher_release(struct publisher *p)
{
    if (!p)
        return;
    atomic_store(&p->held, false);
    queue_wake(&p->queue);
}

void publisher_close(struct publisher *p)
{
    if (!p)
        return;
    atomic_store(&p->stop, true);
    queue_wake(&p->queue);
    pthread_join(p->thread, NULL);
    release(p);
}

/* --- engine thread --- */

void publisher_stored(struct publisher *p, const struct kvg_hash *hashes, size_t n)
{
    if (p)
        queue_push(&p->queue, hashes, n, false);
}

void publisher_evicted(struct publisher *p, const struct kvg_hash *hashes, size_t n)
{
    if (p)
        queue_push(&p->queue, hashes, n, true);
}

bool publisher_wants_snapshot(struct publisher *p)
{
    return p && queue_wants_snapshot(&p->queue);
}

void publisher_snapshot(struct publisher *p, const struct kvg_hash *hashes, size_t n)
{
    if (p)
        queue_snapshot(&p->queue, hashes, n);
}

void publisher_report(struct publisher *p, const struct publisher_load *load)
{
    if (!p)
        return;
    atomic_store(&p->running, load->running);
    atomic_store(&p->waiting, load->waiting);
    atomic_store(&p->blocks_used, load->blocks_used);
    atomic_store(&p->blocks_total, load->blocks_total);
    atomic_store(&p->backlog, load->backlog);
    atomic_store(&p->reported_ms, now_ms());
}

void publisher_drain(struct publisher *p)
{
    if (!p)
        return;
    atomic_store(&p->draining, true);
    queue_wake(&p->queue);
}

void publisher_stats(struct publisher *p, struct publisher_stats *out)
{
    memset(out, 0, sizeof *out);
    if (!p)
        return;
    out->connected = atomic_load(&p->connected);
    out->registered = atomic_load(&p->registered);
    out->mismatch = atomic_load(&p->mismatch);
    out->lease = atomic_load(&p->lease);
    out->batches = atomic_load(&p->batches);
    out->stored = atomic_load(&p->stored);
    out->evicted = atomic_load(&p->evicted);
    out->resyncs = atomic_load(&p->resyncs);
    out->dropped = atomic_load(&p->queue.dropped);
    out->errors = atomic_load(&p->errors);
}
