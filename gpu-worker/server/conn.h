/* A client's connection. Everything here runs on its loop's thread.
 *
 *   READING --request complete--> BUSY --reply written--> READING (keep-alive) or CLOSING --sent--> LINGER --> gone
 *
 * A client that leaves while BUSY takes its job with it. Replies to pipelined requests leave in order, as requests are
 * taken up one at a time.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "gpu-worker/server/http.h"
#include "gpu-worker/server/job.h"
#include "libprompt/error.h"

enum conn_state { CONN_READING, CONN_BUSY, CONN_CLOSING, CONN_LINGER };
enum { CONN_REQUEST_ID_MAX = 128 };

struct conn {
    struct loop *loop;
    struct conn *next, *previous; /* all of the loop */
    struct conn *next_touched;
    bool touched, gateway;
    int fd;
    uint32_t interest; /* what epoll watches */
    enum conn_state state;
    struct http_reader reader;
    struct kvg_buf in;  /* bytes behind the current request */
    struct kvg_buf out; /* bytes [sent, len) still have to be sent */
    size_t sent;
    size_t body_counted; /* of the server's budget for request bodies */
    struct job *job;     /* BUSY: who will answer */
    bool streaming, chunked, continued, eof, counted_busy;
    int route; /* enum route, for the counters */
    char request_id[CONN_REQUEST_ID_MAX + 1];
    int64_t started_ms;  /* first byte of the request */
    int64_t activity_ms; /* last read, or last progress in sending */
    int64_t written_ms;  /* a stream's last bytes */
};

/* Takes over fd (non-blocking); closes it on failure. */
void conn_open(struct loop *loop, int fd, bool gateway);
void conn_close(struct conn *conn);
void conn_ready(struct conn *conn, uint32_t events); /* epoll's events */
void conn_settle(struct conn *conn);                 /* reads on, sends, closes: after anything happened; may free conn */
void conn_tick(struct conn *conn);                   /* time limits and keep-alive comments; may free conn */

/* --- answering the current request --- */
struct reply {
    int status;
    const char *type;  /* Content-Type; NULL: application/json */
    const char *allow; /* with 405 and OPTIONS */
    bool retry_after;  /* Retry-After: 1 */
    bool no_body;      /* HEAD: the length without the bytes */
};
void conn_reply(struct conn *conn, const struct reply *reply, const char *body, size_t n);
/* OpenAI's error object. err->param may be empty; code may be NULL. */
void conn_error(struct conn *conn, int status, const char *code, const struct kvg_error *err);
void conn_errorf(struct conn *conn, int status, const char *code, const char *format, ...) __attribute__((format(printf, 4, 5)));
/* text/event-stream: begin, any number of writes, end. conn_stream_write closes a connection whose reader is too slow:
 * then the job has lost its client when it returns. */
void conn_stream_begin(struct conn *conn);
void conn_stream_write(struct conn *conn, const char *bytes, size_t n);
void conn_stream_end(struct conn *conn);

/* Hands the request to the pool; the body moves into the job. job is zeroed but for what its kind adds. */
void job_start(struct job *job, const struct job_ops *ops, struct conn *conn);
/* The answer is complete: job and connection go on without each other. */
void job_detach(struct job *job);
/* Nothing will name the job any more: the caller frees it after this. Detaches it where that has not happened. */
void job_end(struct job *job);
