#include "gpu-worker/server/prompt_job.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "gpu-worker/server/reply.h"
#include "gpu-worker/server/server_internal.h"

/* A decimal of up to 9 digits; -1 for anything else. */
static int64_t read_count(struct kvg_str text)
{
    int64_t n = 0;
    if (text.len == 0 || text.len > 9)
        return -1;
    for (size_t i = 0; i < text.len; i++) {
        if (text.bytes[i] < '0' || text.bytes[i] > '9')
            return -1;
        n = n * 10 + (text.bytes[i] - '0');
    }
    return n;
}

bool prompt_source_init(struct prompt_source *source, struct conn *conn)
{
    struct server *server = conn->loop->server;
    *source = (struct prompt_source){.server = server, .gateway = conn->gateway, .predicted = -1};
    if (!conn->gateway) {
        source->salt = (struct kvg_str){server->key_salt, strlen(server->key_salt)};
        return true;
    }
    struct kvg_str salt = http_header(&conn->reader.request, "x-kvgate-salt");
    struct kvg_str fingerprint = http_header(&conn->reader.request, "x-kvgate-fingerprint");
    source->same_fingerprint = kvg_str_eq(fingerprint, server->fingerprint);
    source->no_priority = kvg_str_eq(http_header(&conn->reader.request, "x-kvgate-priority"), "off");
    source->predicted = read_count(http_header(&conn->reader.request, "x-kvgate-hit-tokens"));
    if (salt.len > API_MAX_SALT || (salt.len && memchr(salt.bytes, '\x1f', salt.len))) {
        conn_errorf(conn, 400, NULL, "X-Kvgate-Salt has %zu bytes, at most %d without a unit separator are allowed", salt.len,
                    API_MAX_SALT);
        return false;
    }
    if (salt.len && !(source->salt_memory = malloc(salt.len))) {
        conn_errorf(conn, 500, NULL, "out of memory");
        return false;
    }
    if (salt.len)
        source->salt = (struct kvg_str){memcpy(source->salt_memory, salt.bytes, salt.len), salt.len};
    return true;
}

void prompt_source_free(struct prompt_source *source)
{
    free(source->salt_memory);
    source->salt_memory = NULL;
}

bool prompt_fail(struct prompt_fault *fault, int status, const char *code)
{
    fault->status = status;
    fault->code = code;
    return false;
}

bool prompt_parse(struct kvg_buf *text, struct kvg_arena *arena, struct kvg_json **body, struct prompt_fault *fault)
{
    int code = kvg_json_parse(arena, text->bytes ? text->bytes : "", text->len, NULL, body, &fault->err);
    if (code != KVG_OK)
        return prompt_fail(fault, error_status(code), NULL);
    if ((*body)->type != KVG_JSON_OBJECT) {
        kvg_fail(&fault->err, KVG_INVALID, "the body must be a JSON object");
        return prompt_fail(fault, 400, NULL);
    }
    return true;
}

bool prompt_check_model(const struct prompt_source *source, struct kvg_str model, struct prompt_fault *fault)
{
    const struct server_options *options = &source->server->options;
    if (server_serves(options, model))
        return true;
    kvg_fail(&fault->err, KVG_INVALID, "the model \"%.*s\" does not exist: this worker serves \"%s\"",
             (int)(model.len > 64 ? 64 : model.len), model.bytes, options->model_name);
    snprintf(fault->err.param, sizeof fault->err.param, "model");
    return prompt_fail(fault, 404, "model_not_found");
}

bool prompt_salt(const struct prompt_source *source, struct kvg_str cache_salt, struct kvg_arena *arena, struct kvg_str *out,
                 struct prompt_fault *fault)
{
    if (kvg_salt_join(source->salt, cache_salt, arena, out) == KVG_OK)
        return true;
    kvg_fail(&fault->err, KVG_NOMEM, "out of memory");
    return prompt_fail(fault, 500, NULL);
}

bool prompt_ids(const struct prompt_source *source, enum kvg_endpoint endpoint, const struct kvg_json *body,
                const struct kvg_ids *given, size_t index, struct kvg_arena *arena, struct kvg_ids *out,
                struct prompt_fault *fault)
{
    struct counters *counters = &source->server->counters;
    if (index == 0 && given->n && source->same_fingerprint) {
        atomic_fetch_add(&counters->ids_used, 1);
        *out = *given;
        return true;
    }
    if (index == 0 && given->n)
        atomic_fetch_add(&counters->fingerprint_mismatches, 1);
    int code = kvg_prompt_ids(source->server->prompt_model, endpoint, body, index, (int64_t)time(NULL), arena, out, &fault->err);
    return code == KVG_OK || prompt_fail(fault, error_status(code), NULL);
}
