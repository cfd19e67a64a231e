#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "redis-schemas/route.h"

/* --- a Redis of our own, on a socket in a temporary folder --- */

struct world {
    char dir[64], socket[96];
    pid_t pid;
    redisContext *redis;
    struct kvg_arena arena;
};

static int start(void **state)
{
    struct world *w = calloc(1, sizeof *w);
    strcpy(w->dir, "/tmp/kvgate-route-XXXXXX");
    if (!mkdtemp(w->dir))
        return -1;
    snprintf(w->socket, sizeof w->socket, "%s/s", w->dir);
    w->pid = fork();
    if (w->pid == 0) {
        if (!freopen("/dev/null", "w", stdout))
            _exit(1);
        execlp("redis-server", "redis-server", "--port", "0", "--unixsocket", w->socket, "--save", "", "--dir", w->dir, NULL);
        _exit(127);
    }
    for (int tries = 0; tries < 500; tries++) {
        w->redis = redisConnectUnix(w->socket);
        if (w->redis && !w->redis->err)
            break;
        redisFree(w->redis);
        w->redis = NULL;
        usleep(20000);
    }
    kvg_arena_init(&w->arena, 0);
    *state = w;
    return w->redis ? 0 : -1;
}

static int stop(void **state)
{
    struct world *w = *state;
    redisFree(w->redis);
    kill(w->pid, SIGTERM);
    waitpid(w->pid, NULL, 0);
    unlink(w->socket);
    rmdir(w->dir);
    kvg_arena_free(&w->arena);
    free(w);
    return 0;
}

static redisReply *eval(struct world *w, enum kvg_script_id script, const char *format, ...)
{
    char args[2048];
    va_list list;
    const char *argv[20] = {"EVAL", kvg_script(script)->source, "1", "kvgate:{m}:meta"};
    int argc = 4;
    va_start(list, format);
    vsnprintf(args, sizeof args, format, list);
    va_end(list);
    for (char *at = args, *word; (word = strsep(&at, "|")); argc++)
        argv[argc] = word;
    redisReply *reply = redisCommandArgv(w->redis, argc, argv, NULL);
    assert_non_null(reply);
    return reply;
}

/* A live worker that holds chain[0..n). */
static void live_worker(struct world *w, const char *id, const struct kvg_hash *chain, size_t n, int backlog)
{
    char events[2048] = "", hex[KVG_HASH_HEX + 1], fingerprint[KVG_HASH_HEX + 1];
    struct kvg_hash zero = {{0}};
    kvg_hash_hex(&zero, fingerprint);
    redisReply *reply = eval(w, KVG_SCRIPT_REGISTER, "%s|n-%s|first|32|%s|1|127.0.0.1:9|1.0|", id, id, fingerprint);
    assert_int_equal(reply->type, REDIS_REPLY_ARRAY);
    char lease[24];
    snprintf(lease, sizeof lease, "%s", reply->element[1]->str);
    freeReplyObject(reply);
    for (size_t i = 0; i < n; i++) {
        kvg_hash_hex(&chain[i], hex);
        snprintf(events + strlen(events), sizeof events - strlen(events), "+%.20s", hex);
    }
    freeReplyObject(eval(w, KVG_SCRIPT_PUBLISH, "%s|n-%s|%s|1|live|%s", id, id, lease, events));
    reply = eval(w, KVG_SCRIPT_HEARTBEAT, "%s|n-%s|%s|ready|1|2|30|100|%d|", id, id, lease, backlog);
    assert_string_equal(reply->element[0]->str, "ok");
    freeReplyObject(reply);
}

/* EVALSHA, and after NOSCRIPT once more as EVAL, as route.h says. */
static redisReply *call(struct world *w, int argc, const char **argv, size_t *len, enum kvg_script_id script)
{
    redisReply *reply = redisCommandArgv(w->redis, argc, argv, len);
    assert_non_null(reply);
    if (reply->type == REDIS_REPLY_ERROR && !strncmp(reply->str, "NOSCRIPT", 8)) {
        freeReplyObject(reply);
        argv[0] = "EVAL";
        len[0] = 4;
        argv[1] = kvg_script(script)->source;
        len[1] = kvg_script(script)->len;
        reply = redisCommandArgv(w->redis, argc, argv, len);
    }
    return reply;
}

static struct kvg_route_reply route(struct world *w, struct kvg_route_query *query)
{
    struct kvg_route_reply out;
    struct kvg_error err = {0};
    const char **argv;
    size_t *len;
    int argc;
    query->prefix = "kvgate:";
    query->model = "m";
    assert_int_equal(kvg_route_argv(query, &w->arena, &argc, &argv, &len), 0);
    redisReply *reply = call(w, argc, argv, len, KVG_SCRIPT_ROUTE);
    if (kvg_route_parse(reply, &w->arena, &out, &err))
        fail_msg("%s", err.message);
    freeReplyObject(reply);
    return out;
}

static void make_chain(struct kvg_hash *chain, size_t n, uint8_t seed)
{
    for (size_t i = 0; i < n; i++)
        for (size_t b = 0; b < 16; b++)
            chain[i].bytes[b] = (uint8_t)(seed * 151 + i * 31 + b * 17 + (i * b) % 13);
}

static void a_query_comes_back_as_choices(void **state)
{
    struct world *w = *state;
    struct kvg_hash chain[40];
    make_chain(chain, 40, 1);
    freeReplyObject(redisCommand(w->redis, "FLUSHALL"));
    struct kvg_route_query query = {.block_size = 32, .chain = chain, .n_blocks = 40, .prompt_tokens = 1300};
    assert_int_equal(route(w, &query).status, KVG_ROUTE_NO_WORKERS);
    live_worker(w, "w1", chain, 33, 700);
    live_worker(w, "w2", chain, 0, 5);
    struct kvg_route_reply reply = route(w, &query);
    assert_int_equal(reply.status, KVG_ROUTE_OK);
    assert_int_equal(reply.n_choices, 2);
    assert_string_equal(reply.choices[0].worker, "w1");
    assert_string_equal(reply.choices[0].addr, "127.0.0.1:9");
    assert_string_equal(reply.choices[0].reason, "prefix");
    assert_int_equal(reply.choices[0].hit_blocks, 33);
    assert_int_equal(reply.choices[0].lease, 1);
    assert_true(reply.choices[0].backlog == 700 && reply.choices[0].cost == 8 * (1300 - 33 * 32) + 700);
    assert_string_equal(reply.choices[1].reason, "load");
    assert_null(reply.explain);

    query.explain = true;
    reply = route(w, &query);
    assert_non_null(reply.explain);
    assert_non_null(strstr(reply.explain, "\"worker\": \"w1\""));
    query.explain = false;
    query.block_size = 64;
    reply = route(w, &query);
    assert_int_equal(reply.status, KVG_ROUTE_MISMATCH);
    assert_string_equal(reply.mismatch, "block size is 64 here and 32 at the workers");
}

static void ties_fall_as_the_gateways_own_rendezvous_order_says(void **state)
{
    struct world *w = *state;
    static const char *const ids[] = {"alpha", "beta", "gamma"};
    for (uint8_t seed = 0; seed < 20; seed++) {
        freeReplyObject(redisCommand(w->redis, "FLUSHALL")); /* else the earlier ones would count, as being in flight */
        for (int i = 0; i < 3; i++)
            live_worker(w, ids[i], NULL, 0, i);
        struct kvg_hash chain[50];
        size_t n = 1 + seed * 2;
        make_chain(chain, n, seed);
        struct kvg_route_query query = {.block_size = 32, .chain = chain, .n_blocks = n, .prompt_tokens = n * 32};
        struct kvg_route_reply reply = route(w, &query);
        assert_int_equal(reply.n_choices, 3);
        const struct kvg_hash *turn = &chain[kvg_rendezvous_block(n, 32)];
        for (int i = 0; i + 1 < 3; i++)
            assert_true(kvg_rendezvous_score(turn, reply.choices[i].worker) >=
                        kvg_rendezvous_score(turn, reply.choices[i + 1].worker));
        assert_string_equal(reply.choices[0].reason, "tie");
    }
}

static void live_workers_are_listed_with_their_load(void **state)
{
    struct world *w = *state;
    struct kvg_live_worker *workers;
    struct kvg_error err = {0};
    const char **argv;
    size_t *len, n;
    int argc;
    freeReplyObject(redisCommand(w->redis, "FLUSHALL"));
    live_worker(w, "b", NULL, 0, 9);
    live_worker(w, "a", NULL, 0, 8);
    assert_int_equal(kvg_workers_argv("kvgate:", "m", &w->arena, &argc, &argv, &len), 0);
    redisReply *reply = call(w, argc, argv, len, KVG_SCRIPT_WORKERS);
    assert_int_equal(kvg_workers_parse(reply, &w->arena, &workers, &n, &err), 0);
    freeReplyObject(reply);
    assert_int_equal(n, 2);
    assert_string_equal(workers[0].worker, "a");
    assert_string_equal(workers[0].addr, "127.0.0.1:9");
    assert_string_equal(workers[0].state, "ready");
    assert_string_equal(workers[0].version, "1.0");
    assert_true(workers[0].lease == 2 && workers[0].beat == 1 && workers[0].running == 1 && workers[0].waiting == 2);
    assert_true(workers[0].blocks_used == 30 && workers[0].blocks_total == 100 && workers[0].backlog == 8);
}

/* --- replies that Redis should not send --- */

static redisReply *read_reply(const char *bytes)
{
    redisReader *reader = redisReaderCreate();
    void *reply = NULL;
    redisReaderFeed(reader, bytes, strlen(bytes));
    assert_int_equal(redisReaderGetReply(reader, &reply), REDIS_OK);
    redisReaderFree(reader);
    return reply;
}

#define ONE_CHOICE "*2\r\n$2\r\nok\r\n*7\r\n"

static void unexpected_replies_are_errors_with_a_text(void **state)
{
    static const char *const replies[] = {
        "-OOM command not allowed\r\n",
        ":1\r\n",
        "$-1\r\n",
        "+ok\r\n",
        "*0\r\n",
        "*1\r\n$2\r\nok\r\n",
        "*1\r\n:1\r\n",
        "*2\r\n$2\r\nok\r\n$1\r\nx\r\n",
        "*2\r\n$2\r\nok\r\n*1\r\n$1\r\nw\r\n",
        "*1\r\n$6\r\nstrang\r\n",
        ONE_CHOICE "$1\r\nw\r\n$1\r\na\r\n$1\r\n1\r\n$2\r\n-1\r\n$1\r\n0\r\n$1\r\n0\r\n$1\r\nr\r\n",
        ONE_CHOICE "$0\r\n\r\n$1\r\na\r\n$1\r\n1\r\n$1\r\n1\r\n$1\r\n0\r\n$1\r\n0\r\n$1\r\nr\r\n",
        ONE_CHOICE "$1\r\nw\r\n$1\r\na\r\n$1\r\n1\r\n$3\r\nnan\r\n$1\r\n0\r\n$1\r\n0\r\n$1\r\nr\r\n",
        ONE_CHOICE "$1\r\nw\r\n$1\r\na\r\n$1\r\n1\r\n$1\r\n1\r\n$1\r\n0\r\n$1\r\n0\r\n$16\r\nrrrrrrrrrrrrrrrr\r\n",
        "*5\r\n$2\r\nok\r\n*0\r\n*0\r\n*0\r\n*0\r\n",
    };
    struct world *w = *state;
    for (size_t i = 0; i < sizeof replies / sizeof *replies; i++) {
        struct kvg_route_reply out;
        struct kvg_live_worker *workers;
        struct kvg_error err = {0};
        size_t n;
        redisReply *reply = read_reply(replies[i]);
        assert_int_equal(kvg_route_parse(reply, &w->arena, &out, &err), KVG_INVALID);
        assert_true(err.message[0]);
        if (i == 0)
            assert_string_equal(err.message, "OOM command not allowed");
        if (strcmp(replies[i], "*0\r\n"))
            assert_int_equal(kvg_workers_parse(reply, &w->arena, &workers, &n, &err), KVG_INVALID);
        freeReplyObject(reply);
    }
    struct kvg_route_reply out;
    assert_int_equal(kvg_route_parse(NULL, &w->arena, &out, NULL), KVG_INVALID);
}

#define GOOD_CHOICE "*7\r\n$1\r\ng\r\n$1\r\na\r\n$1\r\n1\r\n$1\r\n2\r\n$1\r\n0\r\n$1\r\n0\r\n$1\r\nr\r\n"
#define BAD_CHOICE  "*7\r\n$3\r\nbad\r\n$-1\r\n$1\r\n1\r\n$1\r\n2\r\n$1\r\n0\r\n$1\r\n0\r\n$1\r\nr\r\n"
#define WORKER(id, addr)                                                                                                         \
    "*11\r\n$1\r\n" id "\r\n" addr                                                                                               \
    "\r\n$1\r\n1\r\n$1\r\n1\r\n$5\r\nready\r\n$1\r\n0\r\n$1\r\n0\r\n$1\r\n0\r\n$1\r\n0\r\n$1\r\n0\r\n$1\r\nv\r\n"

static void a_malformed_entry_is_left_out_where_others_remain(void **state)
{
    static const char *const replies[] = {
        "*3\r\n$2\r\nok\r\n" BAD_CHOICE GOOD_CHOICE,
        "*3\r\n$2\r\nok\r\n" GOOD_CHOICE BAD_CHOICE,
        "*4\r\n$2\r\nok\r\n" BAD_CHOICE GOOD_CHOICE "*0\r\n",
    };
    struct world *w = *state;
    for (size_t i = 0; i < sizeof replies / sizeof *replies; i++) {
        struct kvg_route_reply out;
        struct kvg_error err = {0};
        redisReply *reply = read_reply(replies[i]);
        assert_int_equal(kvg_route_parse(reply, &w->arena, &out, &err), 0);
        assert_int_equal(out.n_choices, 1);
        assert_string_equal(out.choices[0].worker, "g");
        assert_int_equal(out.choices[0].hit_blocks, 2);
        assert_non_null(strstr(err.message, "left out"));
        freeReplyObject(reply);
    }
    struct kvg_live_worker *workers;
    struct kvg_error err = {0};
    size_t n;
    redisReply *reply = read_reply("*3\r\n" WORKER("x", "$-1") WORKER("y", "$1\r\na") ":1\r\n");
    assert_int_equal(kvg_workers_parse(reply, &w->arena, &workers, &n, &err), 0);
    assert_int_equal(n, 1);
    assert_string_equal(workers[0].worker, "y");
    assert_non_null(strstr(err.message, "left out"));
    freeReplyObject(reply);
}

static void a_full_arena_is_told(void **state)
{
    struct kvg_hash chain[64] = {{{0}}};
    struct kvg_route_query query = {.prefix = "kvgate:", .model = "m", .block_size = 32, .chain = chain, .n_blocks = 64};
    for (size_t limit = 1; limit < 2400; limit += 7) {
        struct kvg_arena arena;
        const char **argv;
        size_t *len;
        int argc;
        kvg_arena_init(&arena, limit);
        int rc = kvg_route_argv(&query, &arena, &argc, &argv, &len);
        assert_true(rc == 0 || rc == KVG_NOMEM);
        kvg_arena_free(&arena);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_query_comes_back_as_choices),
        cmocka_unit_test(ties_fall_as_the_gateways_own_rendezvous_order_says),
        cmocka_unit_test(live_workers_are_listed_with_their_load),
        cmocka_unit_test(unexpected_replies_are_errors_with_a_text),
        cmocka_unit_test(a_malformed_entry_is_left_out_where_others_remain),
        cmocka_unit_test(a_full_arena_is_told),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
