#include "redis-schemas/route.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ARGV_MAX = 13 };

/* An argument vector under construction. A failed allocation makes `failed` stick. */
struct args {
    struct kvg_arena *arena;
    const char **argv;
    size_t *len;
    int argc;
    bool failed;
};

static void args_init(struct args *args, struct kvg_arena *arena)
{
    args->arena = arena;
    args->argc = 0;
    args->argv = kvg_arena_alloc(arena, ARGV_MAX * sizeof *args->argv);
    args->len = kvg_arena_alloc(arena, ARGV_MAX * sizeof *args->len);
    args->failed = !args->argv || !args->len;
}

static void add_borrowed(struct args *args, const char *bytes, size_t len)
{
    if (args->failed)
        return;
    args->argv[args->argc] = bytes;
    args->len[args->argc++] = len;
}

static void add_copy(struct args *args, const char *text)
{
    char *copy = args->failed ? NULL : kvg_arena_copy(args->arena, text, strlen(text));
    if (!copy)
        args->failed = true;
    else
        add_borrowed(args, copy, strlen(text));
}

static void add_number(struct args *args, double value)
{
    char text[40];
    snprintf(text, sizeof text, "%.15g", value);
    add_copy(args, text);
}

/* EVALSHA sha 1 meta */
static void add_call(struct args *args, enum kvg_script_id script, const char *prefix, const char *model)
{
    char key[KVG_KEY_MAX];
    add_borrowed(args, "EVALSHA", 7);
    add_borrowed(args, kvg_script(script)->sha1, 40);
    add_borrowed(args, "1", 1);
    kvg_key_meta(key, prefix, model);
    add_copy(args, key);
}

/* Blocks of the grid: all to DENSE, then OCTAVE between every two powers of two, and the last. */
enum { DENSE = 512, OCTAVE = 128 };

/* The grid's block after `block` in a prompt of n (both count from 1); over n after the last. */
static size_t grid_next(size_t block, size_t n)
{
    size_t step = 1;
    for (size_t start = DENSE; start <= block; start *= 2)
        step = start / OCTAVE;
    return block == n || block + step <= n ? block + step : n;
}

static void add_chain(struct args *args, const struct kvg_hash *chain, size_t n)
{
    size_t places = 0;
    for (size_t block = 1; block <= n; block = grid_next(block, n))
        places++;
    char *hex = args->failed ? NULL : kvg_arena_alloc(args->arena, places * KVG_HASH_HEX + 1), *at = hex;
    if (!hex) {
        args->failed = true;
        return;
    }
    for (size_t block = 1; block <= n; block = grid_next(block, n), at += KVG_HASH_HEX)
        kvg_hash_hex(&chain[block - 1], at);
    add_borrowed(args, hex, places * KVG_HASH_HEX);
}

static int args_done(const struct args *args, int *argc, const char ***argv, size_t **argv_len)
{
    if (args->failed)
        return KVG_NOMEM;
    *argc = args->argc;
    *argv = args->argv;
    *argv_len = args->len;
    return 0;
}

int kvg_route_argv(const struct kvg_route_query *query, struct kvg_arena *arena, int *argc, const char ***argv, size_t **argv_len)
{
    struct args args;
    char hex[KVG_HASH_HEX + 1];
    args_init(&args, arena);
    add_call(&args, KVG_SCRIPT_ROUTE, query->prefix, query->model);
    add_chain(&args, query->chain, query->n_blocks);
    add_number(&args, (double)query->prompt_tokens);
    add_copy(&args, query->explain ? "explain" : query->observe ? "observe" : "");
    if (query->alpha > 0)
        add_number(&args, query->alpha);
    else
        add_borrowed(&args, "", 0);
    add_number(&args, query->block_size);
    kvg_hash_hex(&query->fingerprint, hex);
    add_copy(&args, hex);
    add_number(&args, KVG_SCHEMA_VERSION);
    add_copy(&args, query->now ? query->now : "");
    add_number(&args, (double)query->n_blocks);
    return args_done(&args, argc, argv, argv_len);
}

int kvg_workers_argv(const char *prefix, const char *model, struct kvg_arena *arena, int *argc, const char ***argv,
                     size_t **argv_len)
{
    struct args args;
    args_init(&args, arena);
    add_call(&args, KVG_SCRIPT_WORKERS, prefix, model);
    return args_done(&args, argc, argv, argv_len);
}

/* --- replies: whatever Redis sends, nothing is read past its end and nothing unexpected is taken for an answer --- */

/* Reads the strings of one row in order. `bad` sticks at the first element that is missing, not a string or too long. */
struct row {
    const redisReply *reply;
    size_t at;
    bool bad;
};

static void row_text(struct row *row, char *out, size_t size)
{
    const redisReply *item = row->at < row->reply->elements ? row->reply->element[row->at] : NULL;
    out[0] = '\0';
    row->at++;
    if (!item || item->type == REDIS_REPLY_NIL) {
        row->bad |= !item;
        return;
    }
    if (item->type != REDIS_REPLY_STRING || (size_t)item->len >= size || memchr(item->str, '\0', (size_t)item->len)) {
        row->bad = true;
        return;
    }
    memcpy(out, item->str, (size_t)item->len);
    out[item->len] = '\0';
}

static double row_number(struct row *row)
{
    char text[48], *end;
    row_text(row, text, sizeof text);
    double value = strtod(text, &end);
    if (*end || !(value >= 0 && value < 1e18))
        row->bad = true;
    return row->bad ? 0 : value;
}

/* Texts that must not be empty. */
static void row_name(struct row *row, char *out, size_t size)
{
    row_text(row, out, size);
    row->bad |= !out[0];
}

/* A worker's entry that somebody else wrote into: the others count all the same. */
static void left_out(struct kvg_error *err, const char *script, const char *worker)
{
    kvg_fail(err, KVG_INVALID, "%s.lua: the entry of worker \"%s\" is malformed and left out", script, worker);
}

static int unexpected(struct kvg_error *err, const char *script, const redisReply *reply)
{
    if (!reply)
        return kvg_fail(err, KVG_INVALID, "%s.lua: no reply", script);
    if (reply->type == REDIS_REPLY_ERROR)
        return kvg_fail(err, KVG_INVALID, "%.*s", (int)(reply->len < 300 ? reply->len : 300), reply->str);
    return kvg_fail(err, KVG_INVALID, "%s.lua: unexpected reply (type %d, %zu elements)", script, reply->type,
                    reply->type == REDIS_REPLY_ARRAY ? reply->elements : 0);
}

static int parse_choice(const redisReply *reply, struct kvg_route_choice *choice)
{
    choice->worker[0] = '\0';
    if (reply->type != REDIS_REPLY_ARRAY)
        return -1;
    struct row row = {.reply = reply};
    row_name(&row, choice->worker, sizeof choice->worker);
    row_name(&row, choice->addr, sizeof choice->addr);
    choice->lease = (uint64_t)row_number(&row);
    double depth = row_number(&row);
    choice->hit_blocks = depth <= UINT32_MAX ? (uint32_t)depth : 0;
    choice->backlog = row_number(&row);
    choice->cost = row_number(&row);
    row_name(&row, choice->reason, sizeof choice->reason);
    return row.bad ? -1 : 0;
}

int kvg_route_parse(const redisReply *reply, struct kvg_arena *arena, struct kvg_route_reply *out, struct kvg_error *err)
{
    memset(out, 0, sizeof *out);
    if (reply && reply->type == REDIS_REPLY_STRING) {
        out->explain = kvg_arena_copy(arena, reply->str, (size_t)reply->len);
        return out->explain ? 0 : kvg_fail(err, KVG_NOMEM, "route.lua: out of memory");
    }
    if (!reply || reply->type != REDIS_REPLY_ARRAY)
        return unexpected(err, "route", reply);
    char status[16];
    struct row row = {.reply = reply};
    row_name(&row, status, sizeof status);
    if (!row.bad && !strcmp(status, "none")) {
        out->status = KVG_ROUTE_NO_WORKERS;
        return 0;
    }
    if (!row.bad && !strcmp(status, "mismatch")) {
        out->status = KVG_ROUTE_MISMATCH;
        row_text(&row, out->mismatch, sizeof out->mismatch);
        return row.bad ? unexpected(err, "route", reply) : 0;
    }
    if (row.bad || strcmp(status, "ok") || reply->elements < 2 || reply->elements > 4)
        return unexpected(err, "route", reply);
    for (size_t i = 1; i < reply->elements; i++) {
        struct kvg_route_choice *choice = &out->choices[out->n_choices];
        if (parse_choice(reply->element[i], choice))
            left_out(err, "route", choice->worker);
        else
            out->n_choices++;
    }
    return out->n_choices ? 0 : unexpected(err, "route", reply);
}

static int parse_worker(const redisReply *reply, struct kvg_live_worker *worker)
{
    if (reply->type != REDIS_REPLY_ARRAY)
        return -1;
    struct row row = {.reply = reply};
    row_name(&row, worker->worker, sizeof worker->worker);
    row_name(&row, worker->addr, sizeof worker->addr);
    worker->lease = (uint64_t)row_number(&row);
    worker->beat = (uint64_t)row_number(&row);
    row_text(&row, worker->state, sizeof worker->state);
    worker->running = row_number(&row);
    worker->waiting = row_number(&row);
    worker->blocks_used = row_number(&row);
    worker->blocks_total = row_number(&row);
    worker->backlog = row_number(&row);
    row_text(&row, worker->version, sizeof worker->version);
    return row.bad ? -1 : 0;
}

int kvg_workers_parse(const redisReply *reply, struct kvg_arena *arena, struct kvg_live_worker **workers, size_t *n,
                      struct kvg_error *err)
{
    *workers = NULL;
    *n = 0;
    if (!reply || reply->type != REDIS_REPLY_ARRAY)
        return unexpected(err, "workers", reply);
    struct kvg_live_worker *list = kvg_arena_zalloc(arena, reply->elements * sizeof *list);
    if (!list)
        return kvg_fail(err, KVG_NOMEM, "workers.lua: out of memory for %zu workers", reply->elements);
    for (size_t i = 0; i < reply->elements; i++) {
        if (parse_worker(reply->element[i], &list[*n]))
            left_out(err, "workers", list[*n].worker);
        else
            ++*n;
    }
    *workers = list;
    return *n || !reply->elements ? 0 : unexpected(err, "workers", reply);
}
