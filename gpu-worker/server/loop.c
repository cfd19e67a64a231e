#define _GNU_SOURCE /* accept4 */
#include "gpu-worker/server/loop.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include "gpu-worker/log.h"
#include "gpu-worker/server/conn.h"
#include "gpu-worker/server/server_internal.h"

enum { EVENTS = 256, ACCEPTS = 64, KEEP_INBOX = 1 << 20, STOP_MS = 5000 };

/* How a record lies in the inbox: this, then n_bytes of payload, padded to 8. */
struct record {
    struct job *job;
    uint32_t n_bytes;
    uint32_t done; /* 1: job->ops->done; 0: ->event */
};

/* ---- inbox: any thread ------------------------------------------------------------------------------------------------- */

void loop_wake(struct loop *loop)
{
    uint64_t one = 1;
    ssize_t n = write(loop->event_fd, &one, sizeof one); /* EAGAIN: it is awake anyway */
    (void)n;
}

/* While the inbox is locked, its last record's n_bytes is found through this offset. */
static size_t open_record(struct loop *loop, struct job *job, uint32_t done)
{
    struct record record = {.job = job, .done = done};
    size_t at = loop->inbox.len;
    kvg_buf_add(&loop->inbox, (const char *)&record, sizeof record);
    return at;
}

/* Wakes before it unlocks: the record may be the last one that keeps the loop, and its descriptors, alive. */
static void unlock_inbox(struct loop *loop, bool was_empty)
{
    if (loop->inbox.failed)
        log_fatal("out of memory for the events of running requests");
    if (was_empty)
        loop_wake(loop);
    pthread_mutex_unlock(&loop->lock);
}

void loop_post_done(struct loop *loop, struct job *job)
{
    pthread_mutex_lock(&loop->lock);
    bool was_empty = open_record(loop, job, 1) == 0;
    unlock_inbox(loop, was_empty);
}

void loop_post_begin(struct loop *loop, struct job *job)
{
    pthread_mutex_lock(&loop->lock);
    loop->open_record = open_record(loop, job, 0);
}

void loop_post_add(struct loop *loop, const void *bytes, size_t n)
{
    if (n)
        kvg_buf_add(&loop->inbox, bytes, n);
}

void loop_post_end(struct loop *loop)
{
    static const char zeros[8];
    size_t n = loop->inbox.len - loop->open_record - sizeof(struct record);
    kvg_buf_add(&loop->inbox, zeros, -loop->inbox.len & 7);
    if (!loop->inbox.failed)
        ((struct record *)(loop->inbox.bytes + loop->open_record))->n_bytes = (uint32_t)n;
    unlock_inbox(loop, loop->open_record == 0);
}

/* ---- loop thread ------------------------------------------------------------------------------------------------------- */

static int64_t monotonic_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

const char *loop_date(struct loop *loop)
{
    time_t now = time(NULL);
    struct tm tm;
    if (now != loop->date_s) {
        gmtime_r(&now, &tm);
        strftime(loop->date, sizeof loop->date, "%a, %d %b %Y %H:%M:%S GMT", &tm);
        loop->date_s = now;
    }
    return loop->date;
}

static void read_inbox(struct loop *loop)
{
    pthread_mutex_lock(&loop->lock);
    struct kvg_buf full = loop->inbox;
    loop->inbox = loop->taken;
    loop->inbox.len = 0;
    pthread_mutex_unlock(&loop->lock);
    loop->taken = full;

    for (size_t at = 0; at < full.len;) {
        const struct record *record = (const struct record *)(full.bytes + at);
        if (record->done)
            record->job->ops->done(record->job);
        else
            record->job->ops->event(record->job, (const char *)(record + 1), record->n_bytes);
        at += sizeof *record + ((record->n_bytes + 7) & ~7u);
    }
    if (loop->taken.cap > KEEP_INBOX)
        kvg_buf_free(&loop->taken);
}

static void watch_listener(struct loop *loop, struct listener *listener)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLEXCLUSIVE, .data.ptr = listener};
    if (epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, listener->fd, &event) == 0)
        listener->paused = false;
}

static void pause_listener(struct loop *loop, struct listener *listener)
{
    epoll_ctl(loop->epoll_fd, EPOLL_CTL_DEL, listener->fd, NULL);
    listener->paused = true;
}

static void accept_some(struct loop *loop, struct listener *listener)
{
    for (int i = 0; i < ACCEPTS; i++) {
        if (loop->n_conns >= SERVER_MAX_CONNECTIONS)
            return pause_listener(loop, listener);
        int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            conn_open(loop, fd, listener->gateway);
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            log_warn("cannot accept a connection: %s", strerror(errno));
            return pause_listener(loop, listener);
        } else if (errno != EINTR && errno != ECONNABORTED) {
            return; /* EAGAIN: all taken */
        }
    }
}

static void settle_touched(struct loop *loop)
{
    while (loop->touched) {
        struct conn *conn = loop->touched;
        loop->touched = conn->next_touched;
        conn->touched = false;
        conn_settle(conn);
    }
}

/* The last loop to stop closes the door, when the backlog has been taken. */
static void stop_listening(struct loop *loop)
{
    if (!loop->listening)
        return;
    loop->listening = false;
    for (int i = 0; i < LOOP_MAX_LISTENERS; i++)
        if (loop->listeners[i].fd >= 0) {
            if (!loop->listeners[i].paused)
                accept_some(loop, &loop->listeners[i]);
            epoll_ctl(loop->epoll_fd, EPOLL_CTL_DEL, loop->listeners[i].fd, NULL);
            loop->listeners[i].fd = -1; /* the server's own, and closed by it */
        }
    if (atomic_fetch_sub(&loop->server->n_listening, 1) == 1)
        for (int i = 0; i < LOOP_MAX_LISTENERS; i++)
            if (loop->server->listen_fds[i] >= 0)
                shutdown(loop->server->listen_fds[i], SHUT_RDWR);
}

static void tick(struct loop *loop)
{
    for (struct conn *conn = loop->conns, *next; conn; conn = next) {
        next = conn->next;
        conn_tick(conn);
    }
    settle_touched(loop);
    for (int i = 0; i < LOOP_MAX_LISTENERS; i++)
        if (loop->listeners[i].fd >= 0 && loop->listeners[i].paused && loop->n_conns < SERVER_MAX_CONNECTIONS)
            watch_listener(loop, &loop->listeners[i]);
    loop->next_tick_ms = loop->now_ms + SERVER_TICK_MS;
}

static bool is_listener(struct loop *loop, const void *p)
{
    return p >= (void *)loop->listeners && p < (void *)(loop->listeners + LOOP_MAX_LISTENERS);
}

/* A connection may be freed while later events of the same round name it: its events are dropped then. */
static void dispatch(struct loop *loop, struct epoll_event *events, int n)
{
    for (int i = 0; i < n; i++) {
        void *p = events[i].data.ptr;
        if (p == loop) {
            uint64_t count;
            ssize_t got = read(loop->event_fd, &count, sizeof count);
            (void)got;
        } else if (is_listener(loop, p)) {
            if (((struct listener *)p)->fd >= 0)
                accept_some(loop, p);
        } else {
            conn_ready(p, events[i].events);
        }
        settle_touched(loop); /* only the event's own connection: one event a descriptor and round */
    }
}

static void *run(void *argument)
{
    struct loop *loop = argument;
    struct server *server = loop->server;
    struct epoll_event events[EVENTS];
    int64_t stop_at = INT64_MAX;

    for (;;) {
        loop->now_ms = monotonic_ms();
        int wait = (int)(loop->next_tick_ms > loop->now_ms ? loop->next_tick_ms - loop->now_ms : 0);
        int n = epoll_wait(loop->epoll_fd, events, EVENTS, wait);
        loop->now_ms = monotonic_ms();
        dispatch(loop, events, n < 0 ? 0 : n);
        read_inbox(loop);
        settle_touched(loop);
        if (loop->now_ms >= loop->next_tick_ms)
            tick(loop);
        if (atomic_load(&server->draining) || atomic_load(&server->stopping))
            stop_listening(loop);
        if (!atomic_load(&server->stopping))
            continue;
        while (loop->conns)
            conn_close(loop->conns);
        loop->touched = NULL;
        if (stop_at == INT64_MAX)
            stop_at = loop->now_ms + STOP_MS;
        if (loop->n_jobs == 0 || loop->now_ms > stop_at)
            return NULL;
    }
}

int loop_open(struct loop *loop, struct server *server, struct kvg_error *err)
{
    memset(loop, 0, sizeof *loop);
    loop->server = server;
    pthread_mutex_init(&loop->lock, NULL);
    for (int i = 0; i < LOOP_MAX_LISTENERS; i++)
        loop->listeners[i].fd = -1;
    loop->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    loop->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = loop};
    if (loop->epoll_fd < 0 || loop->event_fd < 0 || epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, loop->event_fd, &event) < 0)
        return kvg_fail(err, KVG_NOMEM, "cannot create an event loop: %s", strerror(errno));
    return KVG_OK;
}

int loop_start(struct loop *loop, struct kvg_error *err)
{
    for (int i = 0; i < LOOP_MAX_LISTENERS; i++)
        if (loop->listeners[i].fd >= 0)
            watch_listener(loop, &loop->listeners[i]);
    loop->listening = true;
    if (pthread_create(&loop->thread, NULL, run, loop) != 0)
        return kvg_fail(err, KVG_NOMEM, "cannot start an I/O thread");
    loop->running = true;
    return KVG_OK;
}

bool loop_close(struct loop *loop)
{
    if (loop->running) {
        loop_wake(loop);
        pthread_join(loop->thread, NULL);
    }
    if (loop->n_jobs)
        return false;
    close(loop->epoll_fd);
    close(loop->event_fd);
    kvg_buf_free(&loop->inbox);
    kvg_buf_free(&loop->taken);
    pthread_mutex_destroy(&loop->lock);
    return true;
}
