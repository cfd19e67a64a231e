/* HTTP/1.1: the OpenAI-compatible API in front of an engine. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "gpu-worker/engine/engine.h"
#include "libprompt/error.h"
#include "libprompt/json.h"

struct server;
struct publisher;

enum { SERVER_SALT_SIZE = 80 };

/* The strings are the caller's and outlive the server. */
struct server_options {
    const char *host;           /* --host */
    uint16_t port;              /* --port; 0 = none */
    const char *gateway_listen; /* IP:port or unix:/path; NULL = none. Honours X-Kvgate-*, prompt_token_ids, priority */
    const char *model_name;     /* --served-model-name */
    const char *const *aliases; /* [n_aliases] further names that requests may use; replies carry model_name */
    size_t n_aliases;
    bool priority_scheduling; /* the engine's: else a priority other than 0 is refused */
    bool warming;             /* not ready before server_ready; requests are served */
    const char *api_key;      /* NULL = open */
    const char *version;
    uint32_t threads;        /* connection and tokenizing threads; 0 = 2 */
    uint32_t max_body_bytes; /* 0 = 32 MiB */
    /* Time limits in milliseconds; 0 = the value in parentheses. */
    uint32_t idle_ms;     /* a kept-alive connection without a request (180,000: longer than gateways keep theirs) */
    uint32_t read_ms;     /* the headers of a request in total; its body between two reads (30,000) */
    uint32_t send_ms;     /* without progress in sending (60,000) */
    uint32_t comment_ms;  /* a stream that is silent for this long gets a comment line (5,000) */
    uint32_t max_waiting; /* requests queued before 503; 0 = 1,024 */
};

int server_open(struct server **out, const struct server_options *options, struct engine *engine,
                const struct kvg_prompt_model *prompt_model, struct publisher *publisher, struct kvg_error *err);
/* Whether requests may use this name; an absent one (len 0) is the model's. */
bool server_serves(const struct server_options *options, struct kvg_str model);
/* The plain listener's salt: tenants by API key, which itself stays out of hashes and logs. "" without one. */
void server_key_salt(const char *api_key, char out[SERVER_SALT_SIZE]);
/* Any thread may call the rest. /ready says ready from now on. */
void server_ready(struct server *server);
/* Stops accepting, announces Connection: close, lets running replies end. */
void server_drain(struct server *server);
bool server_idle(const struct server *server); /* no reply is being sent */
/* Closes every connection, cancels what they asked for, joins the threads. The engine must still live. */
void server_close(struct server *server);
