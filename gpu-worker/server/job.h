/* The work behind one request whose answer is not at hand: it is read on a pool thread, then answered on the connection's
 * own loop thread, whether the client still waits or not.
 *
 *   loop thread: job_start -> pool thread: run -> loop thread: done -> (events from the engine: event) -> job_end
 *
 * The job owns itself; conn is NULL once the client has left, which client_left is told at once.
 */
#pragma once
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include "libprompt/json.h"

struct conn;
struct loop;
struct job;

struct job_ops {
    void (*run)(struct job *job);                                /* pool thread; looks at `gone` between heavy steps */
    void (*done)(struct job *job);                               /* loop thread, once, after run; may end the job */
    void (*event)(struct job *job, const char *bytes, size_t n); /* loop thread: what was posted by loop_post_* */
    void (*client_left)(struct job *job); /* loop thread, between job_start and job_end; may end the job only after `done` */
};

struct job {
    const struct job_ops *ops;
    struct loop *loop;
    struct conn *conn;   /* loop thread only */
    atomic_bool gone;    /* the client has left */
    struct kvg_buf body; /* the request's */
    struct job *next;    /* in the pool's queue */
};

/* --- the pool of threads that parse and tokenize --- */
struct pool;
int pool_open(struct pool **out, unsigned threads);
void pool_close(struct pool *pool); /* after the last job came back */
void pool_add(struct pool *pool, struct job *job);
unsigned pool_queued(struct pool *pool);
