/* The pool-thread half that every request with a prompt shares: JSON, model name, salt, ids. */
#pragma once
#include <stdbool.h>
#include "gpu-worker/server/api_params.h"
#include "gpu-worker/server/conn.h"
#include "libprompt/prompt.h"

/* Taken from the request on the loop thread; the body is the job's. */
struct prompt_source {
    struct server *server;
    bool gateway;
    bool same_fingerprint; /* X-Kvgate-Fingerprint is this worker's own */
    bool no_priority;      /* X-Kvgate-Priority: off. The client's priority counts as 0 */
    int64_t predicted;     /* X-Kvgate-Hit-Tokens: what the gateway expects to be cached; -1: it does not say */
    struct kvg_str salt;   /* the operator's; owned: prompt_source_free */
    char *salt_memory;
};

struct prompt_fault {
    int status;       /* 0: none */
    const char *code; /* OpenAI's "code", static; NULL: none */
    struct kvg_error err;
};

/* false after it has answered with an error (X-Kvgate-Salt unusable, no memory). */
bool prompt_source_init(struct prompt_source *source, struct conn *conn);
void prompt_source_free(struct prompt_source *source);

/* --- pool thread; each returns whether it succeeded, else *fault is filled --- */
bool prompt_fail(struct prompt_fault *fault, int status, const char *code); /* fault->err is filled already */
bool prompt_parse(struct kvg_buf *text, struct kvg_arena *arena, struct kvg_json **body, struct prompt_fault *fault);
bool prompt_check_model(const struct prompt_source *source, struct kvg_str model, struct prompt_fault *fault);
bool prompt_salt(const struct prompt_source *source, struct kvg_str cache_salt, struct kvg_arena *arena, struct kvg_str *out,
                 struct prompt_fault *fault);
/* Ids of prompt number index; the gateway's where they come with this worker's fingerprint. */
bool prompt_ids(const struct prompt_source *source, enum kvg_endpoint endpoint, const struct kvg_json *body,
                const struct kvg_ids *given, size_t index, struct kvg_arena *arena, struct kvg_ids *out,
                struct prompt_fault *fault);
