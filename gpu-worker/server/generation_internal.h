/* The state of one completion request, shared by generation.c (life), generation_read.c (pool thread) and stream.c (text). */
#pragma once
#include "gpu-worker/server/api_params.h"
#include "gpu-worker/server/generation.h"
#include "gpu-worker/server/prompt_job.h"
#include "gpu-worker/server/reply.h"
#include "gpu-worker/server/server_internal.h"

struct choice {
    bool started; /* its first chunk was written */
    enum engine_finish finish;
    uint32_t completion_tokens;
    struct engine_speculation speculation;
    struct kvg_buf text;      /* not streamed: all of it */
    struct logprobs logprobs; /* not streamed: all; streamed: those of the next chunk */
};

struct prompt_run {
    struct generation *generation;
    struct kvg_ids ids;  /* until they are submitted */
    struct kvg_buf echo; /* the prompt's text, with echo */
    uint64_t request_id;
    bool open;    /* submitted, and its last event has not come */
    bool pending; /* counted in server.n_pending */
    uint32_t prompt_tokens, cached_tokens;
};

struct generation {
    struct job job;
    struct server *server;
    struct prompt_source source;
    struct prompt_fault fault; /* of the pool thread's half */
    struct kvg_arena arena;    /* body tree, parameters, ids: freed once submitted */
    struct api_params params;
    struct kvg_str salt;
    struct reply_head head;
    uint32_t n_prompts, n_choices, n_open, n_unfinished;
    struct prompt_run *prompts; /* [n_prompts] */
    struct choice *choices;     /* [n_choices] */
    struct kvg_buf frame;       /* SSE lines of one event */
};

/* One engine event as it travels through the inbox, followed by text and log-probabilities. */
struct event_record {
    uint32_t prompt, choice; /* choice within the prompt */
    uint32_t text_len, n_logprobs;
    enum engine_finish finish;
    uint32_t prompt_tokens, cached_tokens, completion_tokens;
    bool last_choice;
    struct engine_speculation speculation;
    char error[160];
};

/* Pool thread: everything up to the ids of each prompt; on failure generation->fault says why. */
void generation_read(struct generation *generation);

/* --- stream.c: appends to generation->frame what the client gets --- */
void stream_delta(struct generation *generation, uint32_t index, const char *text, size_t n);
void stream_finish(struct generation *generation, uint32_t index);
void stream_end(struct generation *generation);                                            /* usage where asked for, [DONE] */
void stream_error(struct generation *generation, int status, const struct kvg_error *err); /* the error frame */
/* The one object of an answer that is not streamed. */
void answer_json(struct generation *generation, struct kvg_buf *out);
