#include "gpu-worker/server/server.h"
#include <openssl/sha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "gpu-worker/log.h"
#include "gpu-worker/server/listen.h"
#include "gpu-worker/server/server_internal.h"

enum { BODIES_TOTAL = 16 }; /* as many bodies of the largest size are held at a time */

static void default_to(uint32_t *value, uint32_t fallback)
{
    if (*value == 0)
        *value = fallback;
}

static void set_defaults(struct server_options *options)
{
    default_to(&options->threads, 2);
    default_to(&options->max_body_bytes, 32 << 20);
    default_to(&options->max_waiting, 1024);
    default_to(&options->idle_ms, 180 * 1000);
    default_to(&options->read_ms, 30 * 1000);
    default_to(&options->send_ms, 60 * 1000);
    default_to(&options->comment_ms, 5 * 1000);
}

bool server_serves(const struct server_options *options, struct kvg_str model)
{
    if (model.len == 0 || kvg_str_eq(model, options->model_name))
        return true;
    for (size_t i = 0; i < options->n_aliases; i++)
        if (kvg_str_eq(model, options->aliases[i]))
            return true;
    return false;
}

void server_key_salt(const char *api_key, char out[SERVER_SALT_SIZE])
{
    unsigned char digest[SHA256_DIGEST_LENGTH];
    out[0] = '\0';
    if (!api_key)
        return;
    SHA256((const unsigned char *)api_key, strlen(api_key), digest);
    size_t n = (size_t)snprintf(out, SERVER_SALT_SIZE, "key:");
    for (int i = 0; i < SHA256_DIGEST_LENGTH; i++)
        n += (size_t)snprintf(out + n, SERVER_SALT_SIZE - n, "%02x", digest[i]);
}

static int open_listeners(struct server *server, struct kvg_error *err)
{
    const struct server_options *options = &server->options;
    if (options->port && (server->listen_fds[0] = listen_tcp(options->host, options->port, err)) < 0)
        return -1;
    if (options->gateway_listen) {
        if ((server->listen_fds[1] = listen_address(options->gateway_listen, err)) < 0)
            return -1;
        server->unix_path = listen_unix_path(options->gateway_listen);
    }
    return 0;
}

static int start_threads(struct server *server, struct kvg_error *err)
{
    unsigned n = server->options.threads < SERVER_MAX_LOOPS ? server->options.threads : SERVER_MAX_LOOPS;

    if (pool_open(&server->pool, server->options.threads) < 0)
        return kvg_fail(err, KVG_NOMEM, "cannot start %u tokenizing threads", server->options.threads);
    for (; server->n_loops < n; server->n_loops++) {
        struct loop *loop = malloc(sizeof *loop);
        if (!loop)
            return kvg_fail(err, KVG_NOMEM, "out of memory for an event loop");
        server->loops[server->n_loops] = loop;
        if (loop_open(loop, server, err) != KVG_OK) {
            free(loop);
            return -1;
        }
        for (int i = 0; i < LOOP_MAX_LISTENERS; i++)
            loop->listeners[i] = (struct listener){.fd = server->listen_fds[i], .gateway = i == 1};
    }
    atomic_store(&server->n_listening, n);
    for (unsigned i = 0; i < n; i++)
        if (loop_start(server->loops[i], err) != KVG_OK)
            return -1;
    return 0;
}

int server_open(struct server **out, const struct server_options *options, struct engine *engine,
                const struct kvg_prompt_model *prompt_model, struct publisher *publisher, struct kvg_error *err)
{
    struct server *server = calloc(1, sizeof *server);
    if (!server)
        return kvg_fail(err, KVG_NOMEM, "out of memory for the server");
    server->options = *options;
    set_defaults(&server->options);
    server->engine = engine;
    server->prompt_model = prompt_model;
    server->publisher = publisher;
    server->listen_fds[0] = server->listen_fds[1] = -1;
    server->max_body_bytes_total = (uint64_t)server->options.max_body_bytes * BODIES_TOTAL;
    server->created = (int64_t)time(NULL);
    counters_init(&server->counters);
    engine_info(engine, &server->info);
    kvg_hash_hex(kvg_prompt_model_fingerprint(prompt_model), server->fingerprint);
    server_key_salt(options->api_key, server->key_salt);
    atomic_init(&server->warming, options->warming);
    if (open_listeners(server, err) < 0 || start_threads(server, err) < 0) {
        server_close(server);
        return -1;
    }
    *out = server;
    return 0;
}

static void wake_all(struct server *server)
{
    for (unsigned i = 0; i < server->n_loops; i++)
        loop_wake(server->loops[i]);
}

void server_ready(struct server *server)
{
    atomic_store(&server->warming, false);
}

void server_drain(struct server *server)
{
    atomic_store(&server->draining, true);
    wake_all(server);
}

bool server_idle(const struct server *server)
{
    return atomic_load(&server->n_busy) == 0;
}

void server_close(struct server *server)
{
    bool all_back = true;
    if (!server)
        return;
    atomic_store(&server->stopping, true);
    wake_all(server);
    for (unsigned i = 0; i < server->n_loops; i++)
        all_back &= loop_close(server->loops[i]);
    for (int i = 0; i < LOOP_MAX_LISTENERS; i++)
        if (server->listen_fds[i] >= 0)
            close(server->listen_fds[i]);
    if (server->unix_path)
        unlink(server->unix_path);
    if (!all_back) { /* the engine may still write to their inboxes */
        log_warn("some requests did not end within 5 s: their memory is left to the system");
        return;
    }
    pool_close(server->pool);
    for (unsigned i = 0; i < server->n_loops; i++)
        free(server->loops[i]);
    free(server);
}
