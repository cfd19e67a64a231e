#include "gpu-worker/kv/publish_link.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include "redis-schemas/route.h"

static const struct timeval TIMEOUT = {LINK_TIMEOUT_MS / 1000, LINK_TIMEOUT_MS % 1000 * 1000};

static void lost(struct publish_link *link)
{
    const redisContext *c = link->context;
    if (c && c->err == REDIS_ERR_IO && (errno == EAGAIN || errno == EWOULDBLOCK))
        snprintf(link->why, sizeof link->why, "no reply within %d ms", LINK_TIMEOUT_MS);
    else
        snprintf(link->why, sizeof link->why, "%s", c ? c->errstr : "out of memory");
    link_close(link);
}

void link_pass_on(struct publish_link *link)
{
    link_close(link);
    link->next = (link->next + 1) % link->servers.n;
}

void link_close(struct publish_link *link)
{
    if (link->context)
        redisFree(link->context);
    link->context = NULL;
}

static redisReply *command(struct publish_link *link, int argc, const char **argv, const size_t *lens)
{
    errno = 0;
    redisReply *reply = redisCommandArgv(link->context, argc, argv, lens);
    if (!reply)
        lost(link);
    return reply;
}

/* A command of the handshake, which must succeed. */
static int must(struct publish_link *link, int argc, const char **argv)
{
    redisReply *reply = command(link, argc, argv, NULL);
    if (!reply)
        return -1;
    int failed = reply->type == REDIS_REPLY_ERROR;
    if (failed) {
        snprintf(link->why, sizeof link->why, "%s: %s", argv[0], reply->str);
        link_close(link);
    }
    freeReplyObject(reply);
    return failed ? -1 : 0;
}

static int authenticate(struct publish_link *link)
{
    const char *with_user[] = {"AUTH", link->url.user, link->url.password}, *alone[] = {"AUTH", link->url.password};
    if (!link->url.password[0])
        return 0;
    return link->url.user[0] ? must(link, 3, with_user) : must(link, 2, alone);
}

static int select_db(struct publish_link *link)
{
    char db[16];
    const char *argv[] = {"SELECT", db};
    snprintf(db, sizeof db, "%d", link->url.db);
    return link->url.db ? must(link, 2, argv) : 0;
}

/* INFO rather than CONFIG GET, which managed services forbid. Not being told is no error. */
static int read_policy(struct publish_link *link)
{
    const char *argv[] = {"INFO", "memory"};
    redisReply *reply = command(link, 2, argv, NULL);
    link->policy[0] = '\0';
    if (!reply)
        return -1;
    const char *at = reply->type == REDIS_REPLY_STRING ? strstr(reply->str, "maxmemory_policy:") : NULL;
    if (at)
        sscanf(at, "maxmemory_policy:%47[a-z-]", link->policy);
    freeReplyObject(reply);
    return 0;
}

#if HIREDIS_MAJOR >= 1
typedef size_t elements_t;
#else
typedef int elements_t;
#endif

/* hiredis takes memory for as many elements as an array claims to have. */
static void *limited_array(const redisReadTask *task, elements_t n)
{
    const redisReplyObjectFunctions *original = task->privdata;
    return n > KVG_REPLY_ELEMENTS ? NULL : original->createArray(task, n);
}

static void limit_replies(struct publish_link *link)
{
    redisReader *reader = link->context->reader;
    link->reading = *reader->fn;
    link->reading.createArray = limited_array;
    reader->privdata = reader->fn;
    reader->fn = &link->reading;
}

/* Connects to link->url. */
static int connect_url(struct publish_link *link)
{
    link_close(link);
    errno = 0;
    link->context = link->url.path[0] ? redisConnectUnixWithTimeout(link->url.path, TIMEOUT)
                                      : redisConnectWithTimeout(link->url.host, link->url.port, TIMEOUT);
    if (!link->context || link->context->err || redisSetTimeout(link->context, TIMEOUT) != REDIS_OK) {
        lost(link);
        return -1;
    }
    limit_replies(link);
    return 0;
}

/* Asks the Sentinel that link->url names for the master, which link->url is then. */
static int find_master(struct publish_link *link)
{
    const char *argv[] = {"SENTINEL", "GET-MASTER-ADDR-BY-NAME", link->servers.master};
    struct kvg_redis_url master;
    struct kvg_error err;
    if (connect_url(link))
        return -1;
    redisReply *reply = command(link, 3, argv, NULL);
    if (!reply)
        return -1;
    int failed = -1;
    if (reply->type == REDIS_REPLY_ARRAY && reply->elements == 2 && reply->element[0]->type == REDIS_REPLY_STRING &&
        reply->element[1]->type == REDIS_REPLY_STRING)
        failed = kvg_redis_master(&link->servers, reply->element[0]->str, reply->element[1]->str, &master, &err);
    else
        kvg_fail(&err, KVG_INVALID, "%.100s",
                 reply->type == REDIS_REPLY_ERROR ? reply->str : "the Sentinel knows no such master");
    freeReplyObject(reply);
    link_close(link);
    if (failed)
        snprintf(link->why, sizeof link->why, "%.255s", err.message);
    else
        link->url = master;
    return failed;
}

/* A server among several is of use only where it takes writes. */
static int check_role(struct publish_link *link)
{
    const char *argv[] = {"ROLE"};
    if (!link->servers.master[0] && link->servers.n < 2)
        return 0;
    redisReply *reply = command(link, 1, argv, NULL);
    if (!reply)
        return -1;
    int replica = reply->type == REDIS_REPLY_ARRAY && reply->elements && reply->element[0]->type == REDIS_REPLY_STRING &&
                  strcmp(reply->element[0]->str, "master");
    freeReplyObject(reply);
    if (replica) {
        snprintf(link->why, sizeof link->why, "it is a replica");
        link_close(link);
    }
    return replica ? -1 : 0;
}

int link_open(struct publish_link *link, const char *name)
{
    const char *setname[] = {"CLIENT", "SETNAME", name};
    link->url = link->servers.urls[link->next];
    link->next = (link->next + 1) % link->servers.n;
    if (link->servers.master[0] && find_master(link))
        return -1;
    if (connect_url(link) || authenticate(link) || select_db(link) || must(link, 3, setname) || check_role(link) ||
        read_policy(link))
        return -1;
    /* The same again when the connection is lost: it may only have been cut. */
    link->next = (link->next + link->servers.n - 1) % link->servers.n;
    return 0;
}

redisReply *link_call(struct publish_link *link, enum kvg_script_id script, const char *meta, size_t n_args,
                      const char *const *args, const size_t *lens)
{
    const struct kvg_script *code = kvg_script(script);
    const char *argv[4 + LINK_ARGS_MAX] = {"EVALSHA", code->sha1, "1", meta};
    size_t len[4 + LINK_ARGS_MAX] = {7, strlen(code->sha1), 1, strlen(meta)};
    for (size_t i = 0; i < n_args; i++) {
        argv[4 + i] = args[i];
        len[4 + i] = lens ? lens[i] : strlen(args[i]);
    }
    redisReply *reply = command(link, (int)(4 + n_args), argv, len);
    if (!reply || reply->type != REDIS_REPLY_ERROR || strncmp(reply->str, "NOSCRIPT", 8))
        return reply;
    freeReplyObject(reply);
    argv[0] = "EVAL";
    len[0] = 4;
    argv[1] = code->source;
    len[1] = code->len;
    return command(link, (int)(4 + n_args), argv, len);
}
