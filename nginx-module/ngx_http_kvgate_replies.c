/* Replies that no Redis sends, made errors of the connection before hiredis trips over them: it takes as much memory as an array
 * claims elements, and ends the process on a reply that nobody asked for. Both checks sit where its reader makes objects: one that
 * is not made is an error, after which the connection is dropped. */
#include "ngx_http_kvgate.h"
#include <hiredis/async.h>

#if (HIREDIS_MAJOR >= 1)
typedef size_t  ngx_http_kvgate_elements_t;
#else
typedef int     ngx_http_kvgate_elements_t;
#endif


static redisReplyObjectFunctions  ngx_http_kvgate_replies_original;
static redisReplyObjectFunctions  ngx_http_kvgate_replies_guarded;


static ngx_uint_t
ngx_http_kvgate_replies_asked(const redisReadTask *task)
{
    redisAsyncContext  *context = task->privdata;

    return task->parent != NULL || context->replies.head != NULL;
}


static void *
ngx_http_kvgate_replies_string(const redisReadTask *task, char *text, size_t len)
{
    return ngx_http_kvgate_replies_asked(task) ? ngx_http_kvgate_replies_original.createString(task, text, len) : NULL;
}


static void *
ngx_http_kvgate_replies_array(const redisReadTask *task, ngx_http_kvgate_elements_t n)
{
    if (!ngx_http_kvgate_replies_asked(task) || n > KVG_REPLY_ELEMENTS) {
        return NULL;
    }

    return ngx_http_kvgate_replies_original.createArray(task, n);
}


static void *
ngx_http_kvgate_replies_integer(const redisReadTask *task, long long value)
{
    return ngx_http_kvgate_replies_asked(task) ? ngx_http_kvgate_replies_original.createInteger(task, value) : NULL;
}


static void *
ngx_http_kvgate_replies_nil(const redisReadTask *task)
{
    return ngx_http_kvgate_replies_asked(task) ? ngx_http_kvgate_replies_original.createNil(task) : NULL;
}


void
ngx_http_kvgate_replies_guard(redisAsyncContext *context)
{
    redisReader  *reader = context->c.reader;

    ngx_http_kvgate_replies_original = *reader->fn;
    ngx_http_kvgate_replies_guarded = *reader->fn;
    ngx_http_kvgate_replies_guarded.createString = ngx_http_kvgate_replies_string;
    ngx_http_kvgate_replies_guarded.createArray = ngx_http_kvgate_replies_array;
    ngx_http_kvgate_replies_guarded.createInteger = ngx_http_kvgate_replies_integer;
    ngx_http_kvgate_replies_guarded.createNil = ngx_http_kvgate_replies_nil;
    reader->privdata = context;
    reader->fn = &ngx_http_kvgate_replies_guarded;
}
