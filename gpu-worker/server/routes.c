#include "gpu-worker/server/routes.h"
#include <openssl/crypto.h>
#include <string.h>
#include <strings.h>
#include "gpu-worker/server/generation.h"
#include "gpu-worker/server/reply.h"
#include "gpu-worker/server/server_internal.h"
#include "gpu-worker/server/tokenize.h"

enum { GET = 1, POST = 2 };
static const char MODEL_PREFIX[] = "/v1/models/";

/* ---- small replies ----------------------------------------------------------------------------------------------------- */

static void reply_buf(struct conn *conn, int status, const char *type, struct kvg_buf *body)
{
    struct reply reply = {
        .status = status, .type = type, .retry_after = status == 503, .no_body = conn->reader.request.method == HTTP_HEAD};
    if (body->failed)
        conn_errorf(conn, 500, NULL, "out of memory");
    else
        conn_reply(conn, &reply, body->bytes, body->len);
    kvg_buf_free(body);
}

static void get_health(struct conn *conn)
{
    struct kvg_buf body = {0};
    bool alive = engine_alive(conn->loop->server->engine);
    kvg_buf_puts(&body, alive ? "{\"status\":\"ok\"}" : "{\"status\":\"no step has finished for 10 s\"}");
    reply_buf(conn, alive ? 200 : 503, NULL, &body);
}

static void get_ready(struct conn *conn)
{
    struct server *server = conn->loop->server;
    struct kvg_buf body = {0};
    const char *status = atomic_load(&server->draining)  ? "draining"
                         : !engine_alive(server->engine) ? "not ready"
                         : atomic_load(&server->warming) ? "warming"
                                                         : "ready";
    kvg_buf_printf(&body, "{\"status\":\"%s\"}", status);
    reply_buf(conn, strcmp(status, "ready") == 0 ? 200 : 503, NULL, &body);
}

static void get_version(struct conn *conn)
{
    struct kvg_buf body = {0};
    kvg_buf_printf(&body, "{\"version\":\"%s\"}", conn->loop->server->options.version);
    reply_buf(conn, 200, NULL, &body);
}

static void get_metrics(struct conn *conn)
{
    struct server *server = conn->loop->server;
    struct kvg_buf body = {0};
    engine_metrics_render(engine_metrics(server->engine), server->options.model_name, &body);
    counters_render(&server->counters, server->options.model_name, server->publisher, &body);
    reply_buf(conn, 200, "text/plain; version=0.0.4; charset=utf-8", &body);
}

static void model_json(const struct server *server, const char *name, struct kvg_buf *out)
{
    kvg_buf_puts(out, "{\"id\":");
    kvg_buf_json_string(out, name, strlen(name));
    kvg_buf_printf(out, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"kvgate\",\"root\":", (long long)server->created);
    kvg_buf_json_string(out, server->options.model_name, strlen(server->options.model_name));
    kvg_buf_printf(out, ",\"parent\":null,\"max_model_len\":%u}", server->info.max_model_len);
}

static void get_models(struct conn *conn)
{
    struct server *server = conn->loop->server;
    struct kvg_buf body = {0};
    kvg_buf_puts(&body, "{\"object\":\"list\",\"data\":[");
    model_json(server, server->options.model_name, &body);
    for (size_t i = 0; i < server->options.n_aliases; i++) {
        kvg_buf_puts(&body, ",");
        model_json(server, server->options.aliases[i], &body);
    }
    kvg_buf_puts(&body, "]}");
    reply_buf(conn, 200, NULL, &body);
}

static void get_model(struct conn *conn)
{
    struct server *server = conn->loop->server;
    struct kvg_str path = http_path(&conn->reader.request);
    struct kvg_str name = {path.bytes + sizeof MODEL_PREFIX - 1, path.len - (sizeof MODEL_PREFIX - 1)};

    for (size_t i = 0; i <= server->options.n_aliases; i++) {
        const char *known = i ? server->options.aliases[i - 1] : server->options.model_name;
        struct kvg_buf body = {0};
        if (!kvg_str_eq(name, known))
            continue;
        model_json(server, known, &body);
        reply_buf(conn, 200, NULL, &body);
        return;
    }
    conn_errorf(conn, 404, "model_not_found", "this model does not exist: this worker serves \"%s\"", server->options.model_name);
}

/* ---- generations ------------------------------------------------------------------------------------------------------- */

/* Refused before any work: the queue is full, or the worker drains. */
static bool overloaded(struct conn *conn)
{
    struct server *server = conn->loop->server;
    uint32_t waiting = atomic_load(&engine_metrics(server->engine)->waiting), limit = server->options.max_waiting;
    uint32_t pending = atomic_load(&server->n_pending) + pool_queued(server->pool);

    if (atomic_load(&server->draining)) {
        conn_errorf(conn, 503, "draining", "the worker is shutting down: try another one");
        return true;
    }
    if (waiting < limit && pending < limit + server->info.max_num_seqs)
        return false;
    conn_errorf(conn, 503, "overloaded", "%u requests are waiting, at most %u may", waiting > limit ? waiting : pending, limit);
    return true;
}

static void post_chat(struct conn *conn)
{
    if (!overloaded(conn))
        generation_start(conn, KVG_CHAT_COMPLETIONS);
}

static void post_completions(struct conn *conn)
{
    if (!overloaded(conn))
        generation_start(conn, KVG_COMPLETIONS);
}

/* ---- dispatch ---------------------------------------------------------------------------------------------------------- */

static const struct route_row {
    const char *path;
    enum route route;
    int methods;
    bool open; /* needs no API key */
    void (*handler)(struct conn *conn);
} rows[] = {
    {"/v1/chat/completions", ROUTE_CHAT, POST, false, post_chat},
    {"/v1/completions", ROUTE_COMPLETIONS, POST, false, post_completions},
    {"/tokenize", ROUTE_TOKENIZE, POST, false, tokenize_start},
    {"/detokenize", ROUTE_DETOKENIZE, POST, false, detokenize_start},
    {"/v1/models", ROUTE_MODELS, GET, false, get_models},
    {"/health", ROUTE_HEALTH, GET, true, get_health},
    {"/ready", ROUTE_READY, GET, true, get_ready},
    {"/metrics", ROUTE_METRICS, GET, true, get_metrics},
    {"/version", ROUTE_VERSION, GET, true, get_version},
};
static const struct route_row model_row = {MODEL_PREFIX, ROUTE_MODEL, GET, false, get_model};

static const struct route_row *find_row(struct kvg_str path)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (kvg_str_eq(path, rows[i].path))
            return &rows[i];
    if (path.len > sizeof MODEL_PREFIX - 1 && memcmp(path.bytes, MODEL_PREFIX, sizeof MODEL_PREFIX - 1) == 0)
        return &model_row;
    return NULL;
}

/* In constant time for keys of the right length. */
static bool authorized(struct conn *conn)
{
    const char *key = conn->loop->server->options.api_key;
    struct kvg_str given = http_header(&conn->reader.request, "authorization");
    if (!key)
        return true;
    if (given.len < 7 || strncasecmp(given.bytes, "Bearer ", 7) != 0)
        return false;
    return given.len - 7 == strlen(key) && CRYPTO_memcmp(given.bytes + 7, key, given.len - 7) == 0;
}

static void reply_methods(struct conn *conn, int status, const struct route_row *row)
{
    struct reply reply = {.status = status,
                          .allow = row->methods == GET ? "GET, HEAD, OPTIONS" : "POST, OPTIONS",
                          .no_body = conn->reader.request.method == HTTP_HEAD};
    struct kvg_error err;
    struct kvg_buf body = {0};

    if (status == 405) {
        kvg_fail(&err, KVG_INVALID, "%s does not take %s: use %s", row->path, http_method_str(conn->reader.request.method),
                 row->methods == GET ? "GET" : "POST");
        error_json(&body, status, "method_not_allowed", &err);
    }
    conn_reply(conn, &reply, body.bytes, body.len);
    kvg_buf_free(&body);
}

void route_request(struct conn *conn)
{
    const struct http_request *request = &conn->reader.request;
    struct kvg_str path = http_path(request);
    const struct route_row *row = find_row(path);

    conn->route = row ? row->route : ROUTE_OTHER;
    if (!row) {
        conn_errorf(conn, 404, "not_found", "there is nothing at %.*s", (int)(path.len > 128 ? 128 : path.len), path.bytes);
        return;
    }
    int method = request->method == HTTP_GET || request->method == HTTP_HEAD ? GET : request->method == HTTP_POST ? POST : 0;
    if (request->method == HTTP_OPTIONS)
        reply_methods(conn, 200, row);
    else if (method != row->methods)
        reply_methods(conn, 405, row);
    else if (!row->open && !authorized(conn))
        conn_errorf(conn, 401, "invalid_api_key", "the API key is missing or wrong: send Authorization: Bearer KEY");
    else
        row->handler(conn);
}
