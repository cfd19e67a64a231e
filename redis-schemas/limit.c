#include "redis-schemas/limit.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ARGC = 10, TEXT = 40 };

/* Two numbers as text, or two empty texts. */
static void put_rate(const struct kvg_limit_rate *rate, char (*text)[TEXT])
{
    text[0][0] = text[1][0] = '\0';
    if (rate->rate > 0) {
        snprintf(text[0], TEXT, "%.15g", rate->rate);
        snprintf(text[1], TEXT, "%.15g", rate->burst);
    }
}

int kvg_limit_argv(const struct kvg_limit_query *query, struct kvg_arena *arena, int *argc, const char ***argv, size_t **argv_len)
{
    char key[KVG_KEY_MAX], text[5][TEXT];
    const char *args[ARGC] = {"EVALSHA", kvg_script(KVG_SCRIPT_LIMIT)->sha1, "1", key};
    *argc = ARGC - 1;
    *argv = kvg_arena_alloc(arena, ARGC * sizeof **argv);
    *argv_len = kvg_arena_alloc(arena, ARGC * sizeof **argv_len);
    if (!*argv || !*argv_len)
        return KVG_NOMEM;
    kvg_key_limit(key, query->prefix, query->id);
    snprintf(text[0], TEXT, "%.15g", query->tokens);
    put_rate(&query->requests_rate, text + 1);
    put_rate(&query->tokens_rate, text + 3);
    for (size_t i = 0; i < 5; i++)
        args[4 + i] = text[i];
    for (int i = 0; i < *argc; i++) {
        (*argv_len)[i] = strlen(args[i]);
        (*argv)[i] = kvg_arena_copy(arena, args[i], (*argv_len)[i]);
        if (!(*argv)[i])
            return KVG_NOMEM;
    }
    return 0;
}

/* The text of an element, NULL where there is none. */
static const char *element(const redisReply *reply, size_t i)
{
    return reply->element[i]->type == REDIS_REPLY_STRING ? reply->element[i]->str : NULL;
}

static double number(const char *text)
{
    char *end;
    double value = text && *text ? strtod(text, &end) : -1;
    return text && *text && (*end || !(value >= -1 && value <= 1e18)) ? -1 : value;
}

int kvg_limit_parse(const redisReply *reply, struct kvg_limit_reply *out, struct kvg_error *err)
{
    memset(out, 0, sizeof *out);
    if (reply && reply->type == REDIS_REPLY_ERROR)
        return kvg_fail(err, KVG_INVALID, "limit.lua: %.160s", reply->str);
    const char *why = reply && reply->type == REDIS_REPLY_ARRAY && reply->elements == 6 ? element(reply, 0) : NULL;
    if (!why || (strcmp(why, "ok") && strcmp(why, "requests") && strcmp(why, "tokens")))
        return kvg_fail(err, KVG_INVALID, "limit.lua: an unexpected reply of type %d", reply ? reply->type : 0);
    snprintf(out->why, sizeof out->why, "%s", why);
    out->retry_after = number(element(reply, 1));
    out->requests = (struct kvg_limit_left){number(element(reply, 2)), number(element(reply, 3))};
    out->tokens = (struct kvg_limit_left){number(element(reply, 4)), number(element(reply, 5))};
    return 0;
}
