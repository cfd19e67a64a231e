#include "gpu-worker/server/generation.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/server/generation_internal.h"

/* The job is the first member, so that a job is its generation. */
static struct generation *of(struct job *job)
{
    return (struct generation *)job;
}

/* ---- engine thread ----------------------------------------------------------------------------------------------------- */

static void post_logprob(struct loop *loop, const struct engine_token_logprob *token)
{
    loop_post_add(loop, token, sizeof *token); /* its pointers are set again where it is read */
    loop_post_add(loop, token->top_ids, token->n_top * sizeof *token->top_ids);
    loop_post_add(loop, token->top_logprobs, token->n_top * sizeof *token->top_logprobs);
}

static void on_engine_event(void *context, const struct engine_event *event)
{
    struct prompt_run *run = context;
    struct generation *g = run->generation;
    struct event_record record = {
        .prompt = (uint32_t)(run - g->prompts),
        .choice = event->choice,
        .text_len = (uint32_t)event->text_len,
        .n_logprobs = event->logprobs ? (uint32_t)event->n_ids : 0,
        .finish = event->finish,
        .prompt_tokens = event->prompt_tokens,
        .cached_tokens = event->cached_tokens,
        .completion_tokens = event->completion_tokens,
        .last_choice = event->last_choice,
    };
    if (event->speculation)
        record.speculation = *event->speculation;
    if (event->error)
        snprintf(record.error, sizeof record.error, "%s", event->error);
    loop_post_begin(g->job.loop, &g->job);
    loop_post_add(g->job.loop, &record, sizeof record);
    for (uint32_t i = 0; event->logprobs && i < record.n_logprobs; i++)
        post_logprob(g->job.loop, &event->logprobs[i]);
    loop_post_add(g->job.loop, event->text, event->text_len);
    loop_post_end(g->job.loop);
}

/* ---- life -------------------------------------------------------------------------------------------------------------- */

static void free_generation(struct generation *g)
{
    for (uint32_t i = 0; i < g->n_choices; i++) {
        kvg_buf_free(&g->choices[i].text);
        logprobs_free(&g->choices[i].logprobs);
    }
    for (uint32_t i = 0; i < g->n_prompts; i++)
        kvg_buf_free(&g->prompts[i].echo);
    free(g->prompts);
    free(g->choices);
    kvg_buf_free(&g->frame);
    kvg_arena_free(&g->arena);
    prompt_source_free(&g->source);
    job_end(&g->job);
    free(g);
}

static void no_longer_pending(struct generation *g, struct prompt_run *run)
{
    if (run->pending)
        atomic_fetch_sub(&g->server->n_pending, 1);
    run->pending = false;
}

/* The prompts are the pool thread's until the first of them is submitted. */
static void cancel_open(struct generation *g)
{
    for (uint32_t i = 0; g->n_open && i < g->n_prompts; i++)
        if (g->prompts[i].open)
            engine_cancel(g->server->engine, g->prompts[i].request_id);
}

/* Answers with an error, as a frame where the stream has begun, and ends what still runs. */
static void fail(struct generation *g, int status, const char *code, const struct kvg_error *err)
{
    struct conn *conn = g->job.conn;

    if (conn && conn->streaming) {
        atomic_fetch_add(&g->server->counters.stream_errors, 1);
        g->frame.len = 0;
        stream_error(g, status, err);
        conn_stream_write(conn, g->frame.bytes, g->frame.len);
        if (g->job.conn)
            conn_stream_end(conn);
    } else if (conn) {
        conn_error(conn, status, code, err);
    }
    job_detach(&g->job);
    cancel_open(g);
}

static void complete(struct generation *g)
{
    struct conn *conn = g->job.conn;
    if (conn->streaming) {
        conn_stream_end(conn);
    } else {
        struct kvg_buf body = {0};
        answer_json(g, &body);
        if (body.failed)
            conn_errorf(conn, 500, NULL, "out of memory for the answer");
        else
            conn_reply(conn, &(struct reply){.status = 200}, body.bytes, body.len);
        kvg_buf_free(&body);
    }
    job_detach(&g->job);
}

/* ---- loop thread: engine events ---------------------------------------------------------------------------------------- */

static const char *take(const char **at, size_t n)
{
    const char *bytes = *at;
    *at += n;
    return bytes;
}

static void read_logprobs(struct generation *g, struct choice *choice, const char **at, uint32_t n)
{
    const struct kvg_tokenizer *tokenizer = kvg_prompt_model_tokenizer(g->server->prompt_model);
    uint32_t ids[SAMPLE_TOP_MAX];
    float values[SAMPLE_TOP_MAX];

    for (uint32_t i = 0; i < n; i++) {
        struct engine_token_logprob token;
        memcpy(&token, take(at, sizeof token), sizeof token);
        memcpy(ids, take(at, token.n_top * sizeof *ids), token.n_top * sizeof *ids);
        memcpy(values, take(at, token.n_top * sizeof *values), token.n_top * sizeof *values);
        token.top_ids = ids;
        token.top_logprobs = values;
        logprobs_add(&choice->logprobs, g->head.endpoint, tokenizer, &token);
    }
}

static void write_frame(struct generation *g)
{
    if (g->frame.failed) {
        struct kvg_error err;
        kvg_buf_free(&g->frame);
        kvg_fail(&err, KVG_NOMEM, "out of memory for the answer");
        fail(g, 500, NULL, &err);
        return;
    }
    conn_stream_write(g->job.conn, g->frame.bytes, g->frame.len);
    g->frame.len = 0;
}

/* What the client is told of one event. */
static void deliver(struct generation *g, const struct event_record *event, const char *at)
{
    uint32_t index = event->prompt * g->params.engine.n + event->choice;
    struct choice *choice = &g->choices[index];
    struct prompt_run *run = &g->prompts[event->prompt];

    if (event->finish == FINISH_ERROR || event->finish == FINISH_ABORT) {
        struct kvg_error err;
        kvg_fail(&err, KVG_LIMIT, "%s", event->error[0] ? event->error : "the worker ended this request");
        fail(g, event->finish == FINISH_ABORT ? 503 : 500, NULL, &err);
        return;
    }
    if (event->prompt_tokens)
        run->prompt_tokens = event->prompt_tokens;
    if (event->choice == 0)
        run->cached_tokens = event->cached_tokens;
    choice->completion_tokens = event->completion_tokens;
    choice->speculation = event->speculation;
    read_logprobs(g, choice, &at, event->n_logprobs);
    if (event->finish != FINISH_NONE) {
        choice->finish = event->finish;
        g->n_unfinished--;
    }
    if (!g->params.stream) {
        kvg_buf_add(&choice->text, at, event->text_len);
    } else {
        stream_delta(g, index, at, event->text_len);
        if (event->finish != FINISH_NONE)
            stream_finish(g, index);
        if (g->n_unfinished == 0)
            stream_end(g);
        if (g->frame.len || g->frame.failed)
            write_frame(g);
    }
    if (g->n_unfinished == 0 && g->job.conn)
        complete(g);
}

static void on_event(struct job *job, const char *bytes, size_t n)
{
    struct generation *g = of(job);
    struct event_record event;

    memcpy(&event, bytes, sizeof event);
    if (event.prompt == 0 && event.choice == 0 && g->prompts[0].pending && g->source.predicted >= 0 && event.completion_tokens)
        counters_hit(&g->server->counters, g->source.predicted, event.cached_tokens);
    no_longer_pending(g, &g->prompts[event.prompt]);
    if (event.last_choice) {
        g->prompts[event.prompt].open = false;
        g->n_open--;
    }
    if (job->conn)
        deliver(g, &event, bytes + sizeof event);
    if (g->n_open == 0 && !job->conn) {
        free_generation(g);
    } else if (g->n_open == 0 && g->n_unfinished) { /* the engine is done, an answer is not: never leave the client waiting */
        struct kvg_error err;
        kvg_fail(&err, KVG_LIMIT, "the engine ended this request without an answer");
        fail(g, 500, NULL, &err);
        free_generation(g);
    }
}

/* ---- loop thread: from the pool to the engine -------------------------------------------------------------------------- */

static int submit(struct generation *g, uint32_t index, struct kvg_error *err)
{
    struct prompt_run *run = &g->prompts[index];
    struct engine_submit request = {
        .ids = run->ids.ids,
        .n_ids = run->ids.n,
        .salt = g->salt.bytes,
        .salt_len = g->salt.len,
        .params = g->params.engine,
        .sink = on_engine_event,
        .context = run,
    };
    int code = engine_submit(g->server->engine, &request, &run->request_id, err);
    if (code != KVG_OK)
        return code;
    run->open = run->pending = true;
    g->n_open++;
    atomic_fetch_add(&g->server->n_pending, 1);
    return KVG_OK;
}

/* Events wait in the inbox until this returns, so that nothing is answered before all prompts are in. */
static void submit_all(struct generation *g)
{
    struct kvg_error err = {0};

    for (uint32_t i = 0; i < g->n_prompts; i++) {
        int code = submit(g, i, &err);
        if (code == KVG_OK)
            continue;
        int status = code == KVG_LIMIT ? 503 : error_status(code);
        if (status == 400 && !err.param[0])
            snprintf(err.param, sizeof err.param, "%s", g->head.endpoint == KVG_CHAT_COMPLETIONS ? "messages" : "prompt");
        fail(g, status, status == 400 ? "context_length_exceeded" : NULL, &err);
        return;
    }
    if (g->params.stream)
        conn_stream_begin(g->job.conn);
}

/* max_tokens 0 with echo: the prompt alone. */
static void answer_echo(struct generation *g)
{
    struct conn *conn = g->job.conn;

    if (g->params.stream)
        conn_stream_begin(conn);
    for (uint32_t i = 0; i < g->n_choices; i++) {
        g->choices[i].finish = FINISH_LENGTH;
        if (g->params.stream)
            stream_finish(g, i);
    }
    if (g->params.stream) {
        stream_end(g);
        write_frame(g);
    }
    if (g->job.conn)
        complete(g);
}

/* Body tree, parameters and ids are in the engine's hands now; a stream may take minutes. */
static void free_request(struct generation *g)
{
    kvg_arena_free(&g->arena);
    kvg_buf_free(&g->job.body);
    g->params.engine.stop = NULL;
    g->params.engine.n_stop = 0;
}

static void on_read(struct job *job)
{
    struct generation *g = of(job);

    if (job->conn && g->fault.status)
        fail(g, g->fault.status, g->fault.code, &g->fault.err);
    else if (job->conn && g->params.engine.max_tokens == 0)
        answer_echo(g);
    else if (job->conn)
        submit_all(g);
    if (g->n_open == 0 && !job->conn)
        free_generation(g);
    else
        free_request(g);
}

static void on_client_left(struct job *job)
{
    cancel_open(of(job)); /* the last event of each open prompt frees it */
}

static void run(struct job *job)
{
    generation_read(of(job));
}

static const struct job_ops generation_ops = {.run = run, .done = on_read, .event = on_event, .client_left = on_client_left};

void generation_start(struct conn *conn, enum kvg_endpoint endpoint)
{
    struct generation *g = calloc(1, sizeof *g);
    if (!g) {
        conn_errorf(conn, 500, NULL, "out of memory");
        return;
    }
    g->server = conn->loop->server;
    g->head.endpoint = endpoint;
    kvg_arena_init(&g->arena, 0);
    if (!prompt_source_init(&g->source, conn)) {
        free(g);
        return;
    }
    job_start(&g->job, &generation_ops, conn);
}
