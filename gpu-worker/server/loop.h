/* One I/O thread: an epoll loop that owns its connections, and an inbox by which other threads reach it.
 *
 * The inbox is a byte buffer of records that the loop thread swaps for an empty one, so that a post costs a copy and, when
 * the inbox was empty, one eventfd write; it never waits for a client.
 */
#pragma once
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include "libprompt/error.h"
#include "libprompt/json.h"

struct server;
struct conn;
struct job;

enum { LOOP_MAX_LISTENERS = 2, LOOP_READ_BYTES = 64 << 10 };

struct loop {
    struct server *server;
    pthread_t thread;
    bool running;   /* the thread exists */
    bool listening; /* watches its listeners */
    int epoll_fd, event_fd;
    struct listener {
        int fd;       /* -1: none */
        bool gateway; /* its connections may send X-Kvgate-* */
        bool paused;  /* out of descriptors: taken up again at the next tick */
    } listeners[LOOP_MAX_LISTENERS];

    struct conn *conns;   /* all connections of this loop */
    struct conn *touched; /* those that have something new to read or send */
    unsigned n_conns, n_jobs;
    int64_t now_ms, next_tick_ms; /* monotonic clock, once a round */
    int64_t date_s;               /* the second that `date` names */
    char date[32];
    char scratch[LOOP_READ_BYTES];

    pthread_mutex_t lock;        /* inbox */
    struct kvg_buf inbox, taken; /* taken: what the loop thread is reading */
    size_t open_record;          /* between loop_post_begin and _end: where the record starts */
};

int loop_open(struct loop *loop, struct server *server, struct kvg_error *err); /* without its thread */
int loop_start(struct loop *loop, struct kvg_error *err);
void loop_wake(struct loop *loop); /* any thread */
/* After server.stopping was set: joins the thread. False when jobs never came back, whose memory then has to stay. */
bool loop_close(struct loop *loop);

/* Now, as the Date header writes it; loop thread. */
const char *loop_date(struct loop *loop);

/* Any thread: job->ops->done, or ->event with a copy of the parts joined, will run on the loop thread. */
void loop_post_done(struct loop *loop, struct job *job);
/* An event in parts: begin, any number of adds, end; the inbox is locked in between. */
void loop_post_begin(struct loop *loop, struct job *job);
void loop_post_add(struct loop *loop, const void *bytes, size_t n);
void loop_post_end(struct loop *loop);
