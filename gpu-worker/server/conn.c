#include "gpu-worker/server/conn.h"
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>
#include "gpu-worker/server/reply.h"
#include "gpu-worker/server/routes.h"
#include "gpu-worker/server/server_internal.h"

enum { KEEP_OUT = 256 << 10 };

/* ---- life -------------------------------------------------------------------------------------------------------------- */

/* Fails on a unix socket, which needs none of it. Keep-alive probes find a client whose machine is gone within a minute. */
static void tune_socket(int fd)
{
    int one = 1, idle_s = 30, interval_s = 10, probes = 3;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

void conn_open(struct loop *loop, int fd, bool gateway)
{
    struct conn *conn = calloc(1, sizeof *conn);
    if (!conn) {
        close(fd);
        return;
    }
    tune_socket(fd);
    conn->loop = loop;
    conn->fd = fd;
    conn->gateway = gateway;
    conn->interest = EPOLLIN;
    conn->activity_ms = loop->now_ms;
    http_reader_init(&conn->reader, loop->server->options.max_body_bytes);
    struct epoll_event event = {.events = conn->interest, .data.ptr = conn};
    if (epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0) {
        close(fd);
        free(conn);
        return;
    }
    conn->next = loop->conns;
    if (conn->next)
        conn->next->previous = conn;
    loop->conns = conn;
    loop->n_conns++;
    atomic_fetch_add(&loop->server->counters.connections, 1);
}

static void touch(struct conn *conn)
{
    if (conn->touched)
        return;
    conn->touched = true;
    conn->next_touched = conn->loop->touched;
    conn->loop->touched = conn;
}

static void untouch(struct conn *conn)
{
    struct conn **at = &conn->loop->touched;
    while (*at && *at != conn)
        at = &(*at)->next_touched;
    if (*at)
        *at = conn->next_touched;
    conn->touched = false;
}

/* Tells the job, which lives on until its engine requests have ended. */
static void drop_job(struct conn *conn)
{
    struct job *job = conn->job;
    if (!job)
        return;
    conn->job = NULL;
    job->conn = NULL;
    atomic_store(&job->gone, true);
    atomic_fetch_add(&conn->loop->server->counters.clients_left, 1);
    job->ops->client_left(job);
}

/* The server's budget for request bodies follows what this connection holds. */
static void count_body(struct conn *conn, size_t now)
{
    atomic_fetch_add(&conn->loop->server->body_bytes, (uint64_t)now - conn->body_counted);
    conn->body_counted = now;
}

static void count_busy(struct conn *conn, bool busy)
{
    if (busy == conn->counted_busy)
        return;
    conn->counted_busy = busy;
    if (busy)
        atomic_fetch_add(&conn->loop->server->n_busy, 1);
    else
        atomic_fetch_sub(&conn->loop->server->n_busy, 1);
}

void conn_close(struct conn *conn)
{
    struct loop *loop = conn->loop;

    drop_job(conn);
    count_body(conn, 0);
    count_busy(conn, false);
    if (conn->touched)
        untouch(conn);
    if (conn->previous)
        conn->previous->next = conn->next;
    else
        loop->conns = conn->next;
    if (conn->next)
        conn->next->previous = conn->previous;
    loop->n_conns--;
    atomic_fetch_sub(&loop->server->counters.connections, 1);
    close(conn->fd); /* epoll forgets it */
    http_reader_free(&conn->reader);
    kvg_buf_free(&conn->in);
    kvg_buf_free(&conn->out);
    free(conn);
}

/* ---- replies ----------------------------------------------------------------------------------------------------------- */

static void out_text(struct conn *conn, const char *text)
{
    kvg_buf_puts(&conn->out, text);
}

static bool closes_after(const struct conn *conn)
{
    return !conn->reader.request.keep_alive || !conn->reader.request.complete || atomic_load(&conn->loop->server->draining);
}

static void head(struct conn *conn, int status, const char *type)
{
    kvg_buf_printf(&conn->out, "HTTP/1.1 %d %s\r\nDate: %s\r\nContent-Type: %s\r\n", status,
                   http_status_str((enum http_status)status), loop_date(conn->loop), type);
    if (conn->request_id[0])
        kvg_buf_printf(&conn->out, "x-request-id: %s\r\n", conn->request_id);
    if (closes_after(conn)) {
        out_text(conn, "Connection: close\r\n");
        conn->reader.request.keep_alive = false;
    } else if (conn->reader.request.http10) {
        out_text(conn, "Connection: keep-alive\r\n");
    }
}

/* The current request is answered: forget it, go on with the next or close. */
static void finish(struct conn *conn)
{
    bool close_it = !conn->reader.request.keep_alive || !conn->reader.request.complete;

    conn->streaming = conn->continued = false;
    conn->started_ms = 0;
    conn->request_id[0] = '\0';
    count_body(conn, 0);
    http_reader_next(&conn->reader);
    conn->state = close_it ? CONN_CLOSING : CONN_READING;
    touch(conn);
}

void conn_reply(struct conn *conn, const struct reply *reply, const char *body, size_t n)
{
    if (conn->streaming) /* too late for a status: a fault in the caller would corrupt the framing */
        return;
    counters_reply(&conn->loop->server->counters, conn->route, reply->status);
    head(conn, reply->status, reply->type ? reply->type : "application/json");
    if (reply->allow)
        kvg_buf_printf(&conn->out, "Allow: %s\r\n", reply->allow);
    if (reply->retry_after)
        out_text(conn, "Retry-After: 1\r\n");
    kvg_buf_printf(&conn->out, "Content-Length: %zu\r\n\r\n", n);
    if (!reply->no_body)
        kvg_buf_add(&conn->out, body, n);
    finish(conn);
}

void conn_error(struct conn *conn, int status, const char *code, const struct kvg_error *err)
{
    struct kvg_buf body = {0};
    error_json(&body, status, code, err);
    struct reply reply = {.status = status, .retry_after = status == 503, .no_body = conn->reader.request.method == HTTP_HEAD};
    conn_reply(conn, &reply, body.bytes, body.len);
    kvg_buf_free(&body);
}

void conn_errorf(struct conn *conn, int status, const char *code, const char *format, ...)
{
    struct kvg_error err = {0};
    va_list args;
    va_start(args, format);
    vsnprintf(err.message, sizeof err.message, format, args);
    va_end(args);
    conn_error(conn, status, code, &err);
}

void conn_stream_begin(struct conn *conn)
{
    counters_reply(&conn->loop->server->counters, conn->route, 200);
    conn->chunked = !conn->reader.request.http10;
    if (!conn->chunked)
        conn->reader.request.keep_alive = false; /* the end of an HTTP/1.0 stream is the end of its connection */
    head(conn, 200, "text/event-stream; charset=utf-8");
    out_text(conn, "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n");
    out_text(conn, conn->chunked ? "Transfer-Encoding: chunked\r\n\r\n" : "\r\n");
    conn->streaming = true;
    conn->written_ms = conn->loop->now_ms;
    touch(conn);
}

static void send_bytes(struct conn *conn)
{
    while (conn->sent < conn->out.len) {
        ssize_t n = send(conn->fd, conn->out.bytes + conn->sent, conn->out.len - conn->sent, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EINTR)
                continue;
            if (errno != EAGAIN)
                conn->eof = true;
            return;
        }
        conn->sent += (size_t)n;
        conn->activity_ms = conn->loop->now_ms;
    }
    conn->sent = conn->out.len = 0;
    if (conn->out.cap > KEEP_OUT)
        kvg_buf_free(&conn->out);
}

void conn_stream_write(struct conn *conn, const char *bytes, size_t n)
{
    if (n == 0)
        return;
    if (conn->chunked)
        kvg_buf_printf(&conn->out, "%zx\r\n", n);
    kvg_buf_add(&conn->out, bytes, n);
    if (conn->chunked)
        out_text(conn, "\r\n");
    conn->written_ms = conn->loop->now_ms;
    if (conn->out.len - conn->sent > SERVER_MAX_BUFFERED)
        send_bytes(conn); /* many events may have come at once */
    if (conn->out.len - conn->sent > SERVER_MAX_BUFFERED || conn->out.failed) {
        atomic_fetch_add(&conn->loop->server->counters.clients_dropped, 1);
        drop_job(conn);
        conn->state = CONN_CLOSING;
        conn->eof = true; /* nobody reads: settle closes at once */
    }
    touch(conn);
}

void conn_stream_end(struct conn *conn)
{
    if (conn->chunked)
        out_text(conn, "0\r\n\r\n");
    finish(conn);
}

/* ---- jobs -------------------------------------------------------------------------------------------------------------- */

void job_start(struct job *job, const struct job_ops *ops, struct conn *conn)
{
    job->ops = ops;
    job->loop = conn->loop;
    job->conn = conn;
    job->body = conn->reader.request.body; /* stays in the connection's count: it is freed before the next request */
    conn->reader.request.body = (struct kvg_buf){0};
    conn->job = job;
    conn->state = CONN_BUSY;
    conn->loop->n_jobs++;
    pool_add(conn->loop->server->pool, job);
}

void job_detach(struct job *job)
{
    if (job->conn)
        job->conn->job = NULL;
    job->conn = NULL;
}

void job_end(struct job *job)
{
    job_detach(job);
    job->loop->n_jobs--;
    kvg_buf_free(&job->body);
}

/* ---- reading ----------------------------------------------------------------------------------------------------------- */

static bool usable_id(struct kvg_str id)
{
    if (id.len == 0 || id.len > CONN_REQUEST_ID_MAX)
        return false;
    for (size_t i = 0; i < id.len; i++)
        if (id.bytes[i] <= ' ' || id.bytes[i] >= 127 || id.bytes[i] == '"' || id.bytes[i] == '\\')
            return false;
    return true;
}

/* The client's own id where it is printable, else 128 random bits. */
static void name_request(struct conn *conn)
{
    struct kvg_str given = http_header(&conn->reader.request, "x-request-id");
    if (usable_id(given)) {
        memcpy(conn->request_id, given.bytes, given.len);
        conn->request_id[given.len] = '\0';
        return;
    }
    uint64_t random[2] = {0};
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        random[0] = (uint64_t)conn->loop->now_ms;
    snprintf(conn->request_id, sizeof conn->request_id, "%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
}

static void refuse_request(struct conn *conn, int status, const char *why)
{
    conn->route = ROUTE_OTHER;
    conn_errorf(conn, status, NULL, "%s", why);
}

/* One step with bytes that the parser has not seen yet; returns how many it took. */
static size_t read_request(struct conn *conn, const char *bytes, size_t n)
{
    struct server *server = conn->loop->server;
    struct http_request *request = &conn->reader.request;
    size_t used = http_reader_feed(&conn->reader, bytes, n);

    if (request->started && !conn->started_ms)
        conn->started_ms = conn->loop->now_ms;
    count_body(conn, request->body.len);
    if (request->status) {
        if (request->status == 413)
            conn_errorf(conn, 413, NULL, "the request body is larger than %u bytes", server->options.max_body_bytes);
        else
            refuse_request(conn, request->status, request->why);
    } else if (!request->complete && atomic_load(&server->body_bytes) > server->max_body_bytes_total) {
        refuse_request(conn, 503, "the request bodies of all clients together are too large");
    } else if (request->complete) {
        name_request(conn);
        route_request(conn);
    } else if (request->expect_continue && request->headers_done && !conn->continued) {
        conn->continued = true;
        out_text(conn, "HTTP/1.1 100 Continue\r\n\r\n");
    }
    return used;
}

/* Takes up requests until one is in work, the bytes are used up, or too many replies wait to be sent. */
static void take_requests(struct conn *conn)
{
    size_t at = 0;
    while (conn->state == CONN_READING && at < conn->in.len && conn->out.len - conn->sent < SERVER_MAX_REPLIES) {
        size_t used = read_request(conn, conn->in.bytes + at, conn->in.len - at);
        at += used;
        if (used == 0 && conn->state == CONN_READING)
            conn->state = CONN_CLOSING; /* the parser takes nothing and complains of nothing: cannot go on */
    }
    if (conn->state == CONN_CLOSING || conn->state == CONN_LINGER)
        at = conn->in.len; /* whatever follows a refused request is no request */
    if (at) {
        memmove(conn->in.bytes, conn->in.bytes + at, conn->in.len - at);
        conn->in.len -= at;
    }
    if (conn->in.len == 0)
        kvg_buf_free(&conn->in);
}

static void read_bytes(struct conn *conn)
{
    struct loop *loop = conn->loop;
    ssize_t n = recv(conn->fd, loop->scratch, sizeof loop->scratch, 0);
    if (n < 0) {
        if (errno != EAGAIN && errno != EINTR)
            conn->eof = true;
        return;
    }
    if (n == 0) {
        if (conn->state == CONN_READING && conn->sent < conn->out.len)
            conn->state = CONN_CLOSING; /* it may still read: what it asked for is sent first */
        else
            conn->eof = true;
        return;
    }
    if (conn->state == CONN_LINGER)
        return; /* swallowed, so that closing does not reset what was sent */
    conn->activity_ms = loop->now_ms;
    kvg_buf_add(&conn->in, loop->scratch, (size_t)n);
    if (conn->in.failed)
        conn->eof = true;
}

void conn_ready(struct conn *conn, uint32_t events)
{
    if ((events & EPOLLIN) && (conn->interest & EPOLLIN))
        read_bytes(conn);
    else if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))
        conn->eof = true;
    if (events & (EPOLLHUP | EPOLLERR))
        conn->eof = true;
    touch(conn);
}

/* ---- sending and closing ----------------------------------------------------------------------------------------------- */

static void watch(struct conn *conn)
{
    uint32_t wanted = conn->state == CONN_BUSY ? EPOLLRDHUP : 0; /* elsewhere a read finds the end */
    bool unsent = conn->sent < conn->out.len;
    if (conn->state == CONN_LINGER || (conn->state == CONN_READING && conn->out.len - conn->sent < SERVER_MAX_REPLIES))
        wanted |= EPOLLIN;
    if (unsent)
        wanted |= EPOLLOUT;
    if (wanted == conn->interest)
        return;
    struct epoll_event event = {.events = wanted, .data.ptr = conn};
    if (epoll_ctl(conn->loop->epoll_fd, EPOLL_CTL_MOD, conn->fd, &event) == 0)
        conn->interest = wanted;
}

void conn_settle(struct conn *conn)
{
    do {
        take_requests(conn);
        if (conn->out.failed)
            conn->eof = true;
        if (!(conn->eof && conn->state == CONN_BUSY)) /* the client of an unfinished answer has left */
            send_bytes(conn);
    } while (conn->state == CONN_READING && conn->in.len && conn->sent == conn->out.len && !conn->eof);
    if (conn->eof) {
        conn_close(conn);
        return;
    }
    bool unsent = conn->sent < conn->out.len;
    if (conn->state == CONN_CLOSING && !unsent) {
        shutdown(conn->fd, SHUT_WR);
        conn->state = CONN_LINGER;
        conn->started_ms = conn->loop->now_ms;
    }
    count_busy(conn, unsent || conn->state == CONN_BUSY);
    watch(conn);
}

/* A request that has begun and does not go on. */
static bool reads_late(const struct conn *conn, int64_t now)
{
    int64_t since = conn->reader.request.headers_done ? conn->activity_ms : conn->started_ms;
    return conn->started_ms && now - since > conn->loop->server->options.read_ms;
}

void conn_tick(struct conn *conn)
{
    const struct server_options *limits = &conn->loop->server->options;
    int64_t now = conn->loop->now_ms;
    bool unsent = conn->sent < conn->out.len;

    if (conn->state == CONN_LINGER) {
        if (now - conn->started_ms > SERVER_LINGER_MS)
            conn_close(conn);
    } else if (unsent && now - conn->activity_ms > limits->send_ms) {
        atomic_fetch_add(&conn->loop->server->counters.clients_dropped, 1);
        conn_close(conn);
    } else if (conn->state == CONN_READING && conn->started_ms) {
        if (reads_late(conn, now))
            refuse_request(conn, 408, "the request did not arrive in time");
    } else if (conn->state == CONN_READING && !unsent && now - conn->activity_ms > limits->idle_ms) {
        conn_close(conn);
    } else if (conn->streaming && !unsent && now - conn->written_ms > limits->comment_ms) {
        static const char comment[] = ": keep-alive\n\n";
        conn_stream_write(conn, comment, sizeof comment - 1);
    }
}
