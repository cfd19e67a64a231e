/* load: a light HTTP load client for all benchmarks: one thread, epoll, keep-alive, aware of server-sent events.
 *
 * usage: load --url URL --requests FILE [options]       one JSON result on stdout
 *   --url URL            http://HOST:PORT/PATH (a numeric address), or http://unix:/SOCKET:/PATH
 *   --requests FILE      one request body a line ("-": stdin); used in order, again from the start when the count is larger
 *   --count N            how many requests to send (default: the lines of the file)
 *   --connections N      closed loop: N requests at a time (default 1); open loop: at most N at a time (default 1024)
 *   --rate R             open loop: R requests a second, evenly spaced; a request that finds no free connection waits, and
 *                        its waiting counts (its time starts when it was due)
 *   --poisson SEED       with --rate: exponentially distributed gaps
 *   --timed              open loop: each line is SECONDS<TAB>BODY, sent SECONDS after the start
 *   --header 'K: V'      added to each request; repeatable
 *   --timeout S          a request without an end after S seconds fails (default 300)
 *   --details FILE       one JSON line a request
 *   --events FILE        one line an event with text, at once: CLOCK_MONOTONIC seconds, and the request's number from 0
 *
 * Times are seconds. ttft: until the first event with text (a plain reply: its first body byte). inter_token: gaps between
 * events with text. A request is good when it has status 200 and a whole reply (a stream: a finish or [DONE], no error frame).
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <http_parser.h>
#include <math.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include "libprompt/arena.h"
#include "libprompt/json.h"

enum { WORKER_MAX = 64, REPLY_MAX = 8 << 20 };

struct options {
    const char *url, *requests, *details, *events;
    size_t count;
    unsigned connections;
    double rate, timeout;
    uint64_t poisson;
    bool timed;
    char headers[8192];
};

struct body {
    char *bytes; /* within the file's text */
    size_t len;
    double at; /* --timed: seconds after the start */
};

struct record {
    double due, sent, first, last, end; /* seconds after the start; first and last: events with text */
    int status;
    bool good, done;
    uint32_t events, prompt_tokens, completion_tokens, cached_tokens;
    char worker[WORKER_MAX], reason[WORKER_MAX];
    long hit_tokens; /* X-Kvgate-Hit-Tokens; -1 without */
    const char *error;
};

struct connection {
    int fd;                /* -1: not connected */
    bool used;             /* it has carried a reply already */
    struct record *record; /* NULL: idle */
    char *out;             /* head and body of the request */
    size_t out_len, out_done;
    http_parser parser;
    bool is_stream;
    char field[WORKER_MAX];
    size_t field_len;
    char value[256];
    size_t value_len;
    bool in_value;
    struct kvg_buf reply; /* a plain reply, or the rest of an unfinished SSE line */
};

struct load {
    struct options options;
    struct sockaddr_storage addr;
    socklen_t addr_len;
    char host[128], path[1024];
    char *text;
    struct body *bodies;
    size_t n_bodies;
    struct record *records;
    size_t next, finished; /* next: the request to be sent next */
    struct connection *connections;
    int epoll;
    double start;
    double *gaps;
    size_t n_gaps, cap_gaps;
    FILE *events;
    size_t reconnects;
    struct kvg_arena arena;
    uint64_t random;
};

static struct load L;

static void die(const char *what, const char *detail)
{
    fprintf(stderr, "load: %s%s%s\n", what, detail ? ": " : "", detail ? detail : "");
    exit(2);
}

static double clock_now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static double elapsed(void)
{
    return clock_now() - L.start;
}

/* ---- options, address, request bodies ---- */

static void parse_url(const char *url)
{
    if (strncmp(url, "http://", 7) != 0)
        die("the URL must start with http://", url);
    url += 7;
    if (strncmp(url, "unix:", 5) == 0) {
        struct sockaddr_un *un = (struct sockaddr_un *)&L.addr;
        const char *end = strchr(url + 5, ':');
        size_t len = end ? (size_t)(end - url - 5) : strlen(url + 5);
        if (len == 0 || len >= sizeof un->sun_path)
            die("bad socket path", url);
        un->sun_family = AF_UNIX;
        memcpy(un->sun_path, url + 5, len);
        L.addr_len = sizeof *un;
        snprintf(L.host, sizeof L.host, "localhost");
        snprintf(L.path, sizeof L.path, "%s", end && end[1] ? end + 1 : "/");
        return;
    }
    struct sockaddr_in *in = (struct sockaddr_in *)&L.addr;
    const char *slash = strchr(url, '/');
    size_t len = slash ? (size_t)(slash - url) : strlen(url);
    if (len == 0 || len >= sizeof L.host)
        die("bad host", url);
    memcpy(L.host, url, len);
    snprintf(L.path, sizeof L.path, "%s", slash ? slash : "/");
    char name[128];
    memcpy(name, L.host, len + 1);
    char *colon = strchr(name, ':');
    in->sin_port = htons(colon ? (uint16_t)atoi(colon + 1) : 80);
    if (colon)
        *colon = '\0';
    in->sin_family = AF_INET;
    if (inet_pton(AF_INET, strcmp(name, "localhost") == 0 ? "127.0.0.1" : name, &in->sin_addr) != 1)
        die("not a numeric address", name);
    L.addr_len = sizeof *in;
}

static void add_header(const char *header)
{
    size_t n = strlen(L.options.headers);
    if (!strchr(header, ':') || n + strlen(header) + 3 > sizeof L.options.headers)
        die("bad or too many headers", header);
    sprintf(L.options.headers + n, "%s\r\n", header);
}

static void parse_options(int argc, char **argv)
{
    static const struct option known[] = {{"url", 1, 0, 'u'},
                                          {"requests", 1, 0, 'f'},
                                          {"count", 1, 0, 'n'},
                                          {"connections", 1, 0, 'c'},
                                          {"rate", 1, 0, 'r'},
                                          {"poisson", 1, 0, 'p'},
                                          {"timed", 0, 0, 't'},
                                          {"header", 1, 0, 'H'},
                                          {"timeout", 1, 0, 'T'},
                                          {"details", 1, 0, 'd'},
                                          {"events", 1, 0, 'e'},
                                          {"help", 0, 0, 'h'},
                                          {0}};
    struct options *o = &L.options;
    int c;

    o->timeout = 300;
    while ((c = getopt_long(argc, argv, "", known, NULL)) != -1) {
        switch (c) {
        case 'u':
            o->url = optarg;
            break;
        case 'f':
            o->requests = optarg;
            break;
        case 'n':
            o->count = strtoull(optarg, NULL, 10);
            break;
        case 'c':
            o->connections = (unsigned)strtoul(optarg, NULL, 10);
            break;
        case 'r':
            o->rate = strtod(optarg, NULL);
            break;
        case 'p':
            o->poisson = strtoull(optarg, NULL, 10) + 1;
            break;
        case 't':
            o->timed = true;
            break;
        case 'H':
            add_header(optarg);
            break;
        case 'T':
            o->timeout = strtod(optarg, NULL);
            break;
        case 'd':
            o->details = optarg;
            break;
        case 'e':
            o->events = optarg;
            break;
        default:
            die("usage: load --url URL --requests FILE [--count N] [--connections N] [--rate R [--poisson SEED]] [--timed] "
                "[--header 'K: V'] [--timeout S] [--details FILE]",
                NULL);
        }
    }
    if (!o->url || !o->requests || optind != argc)
        die("--url and --requests are needed (see the head of load.c)", NULL);
    if (o->connections == 0)
        o->connections = o->rate > 0 || o->timed ? 1024 : 1;
}

static void read_bodies(void)
{
    FILE *f = strcmp(L.options.requests, "-") == 0 ? stdin : fopen(L.options.requests, "r");
    struct kvg_buf all = {0};
    char piece[65536];
    size_t n;

    if (!f)
        die(L.options.requests, strerror(errno));
    while ((n = fread(piece, 1, sizeof piece, f)) > 0)
        kvg_buf_add(&all, piece, n);
    kvg_buf_add(&all, "\n", 1);
    if (all.failed)
        die("out of memory", NULL);
    L.text = all.bytes;
    for (char *line = all.bytes, *end; line < all.bytes + all.len; line = end + 1) {
        end = memchr(line, '\n', (size_t)(all.bytes + all.len - line));
        if (end == line)
            continue;
        struct body body = {line, (size_t)(end - line), 0};
        if (L.options.timed) {
            body.at = strtod(line, &body.bytes);
            if (*body.bytes++ != '\t')
                die("--timed: a line without SECONDS<TAB>", NULL);
            body.len = (size_t)(end - body.bytes);
        }
        if ((L.n_bodies & (L.n_bodies - 1)) == 0)
            L.bodies = realloc(L.bodies, (L.n_bodies ? L.n_bodies * 2 : 1) * sizeof *L.bodies);
        L.bodies[L.n_bodies++] = body;
    }
    if (L.n_bodies == 0)
        die("no request in", L.options.requests);
    if (L.options.count == 0)
        L.options.count = L.n_bodies;
}

/* splitmix64 */
static double random_unit(void)
{
    uint64_t z = (L.random += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return ((double)((z ^ (z >> 31)) >> 11) + 0.5) * 0x1p-53;
}

static void plan_arrivals(void)
{
    double at = 0;
    L.records = calloc(L.options.count, sizeof *L.records);
    if (!L.records)
        die("out of memory", NULL);
    L.random = L.options.poisson;
    for (size_t i = 0; i < L.options.count; i++) {
        L.records[i].hit_tokens = -1;
        if (L.options.timed)
            L.records[i].due = L.bodies[i % L.n_bodies].at;
        else if (L.options.rate > 0) {
            L.records[i].due = at;
            at += (L.options.poisson ? -log(random_unit()) : 1.0) / L.options.rate;
        }
    }
}

/* ---- replies ---- */

static void take_usage(struct record *record, const struct kvg_json *root)
{
    const struct kvg_json *usage = kvg_json_get(root, "usage");
    int64_t n;
    if (kvg_json_int(kvg_json_get(usage, "prompt_tokens"), &n))
        record->prompt_tokens = (uint32_t)n;
    if (kvg_json_int(kvg_json_get(usage, "completion_tokens"), &n))
        record->completion_tokens = (uint32_t)n;
    if (kvg_json_int(kvg_json_get(kvg_json_get(usage, "prompt_tokens_details"), "cached_tokens"), &n))
        record->cached_tokens = (uint32_t)n;
}

static void text_event(struct record *record, double now)
{
    if (record->events++ == 0)
        record->first = now;
    else {
        if (L.n_gaps == L.cap_gaps) {
            L.cap_gaps = L.cap_gaps ? L.cap_gaps * 2 : 4096;
            L.gaps = realloc(L.gaps, L.cap_gaps * sizeof *L.gaps);
            if (!L.gaps)
                die("out of memory", NULL);
        }
        L.gaps[L.n_gaps++] = now - record->last;
    }
    record->last = now;
    if (L.events)
        fprintf(L.events, "%.6f %zu\n", L.start + now, (size_t)(record - L.records));
}

/* One event's JSON: text, finish, usage or an error frame. */
static void take_event(struct record *record, const char *text, size_t len, double now)
{
    struct kvg_error err;
    struct kvg_json *root;

    if (len == 6 && memcmp(text, "[DONE]", 6) == 0) {
        record->done = true;
        return;
    }
    kvg_arena_free(&L.arena);
    if (kvg_json_parse(&L.arena, text, len, NULL, &root, &err) != 0) {
        record->error = "an event is no JSON";
        return;
    }
    if (kvg_json_get(root, "error"))
        record->error = "error event";
    take_usage(record, root);
    const struct kvg_json *choices = kvg_json_get(root, "choices");
    if (!choices || choices->type != KVG_JSON_ARRAY || choices->n == 0)
        return;
    const struct kvg_json *choice = &choices->items[0];
    const struct kvg_json *delta = kvg_json_get(choice, "delta");
    const struct kvg_json *content = kvg_json_get(delta ? delta : choice, delta ? "content" : "text");
    const struct kvg_json *finish = kvg_json_get(choice, "finish_reason");
    if (content && content->type == KVG_JSON_STRING && content->str.len > 0)
        text_event(record, now);
    if (finish && finish->type == KVG_JSON_STRING)
        record->done = true;
}

static void take_lines(struct connection *c, double now)
{
    size_t at = 0;
    for (char *end; at < c->reply.len && (end = memchr(c->reply.bytes + at, '\n', c->reply.len - at));
         at = (size_t)(end + 1 - c->reply.bytes)) {
        const char *line = c->reply.bytes + at;
        size_t len = (size_t)(end - line);
        if (len && line[len - 1] == '\r')
            len--;
        if (len >= 5 && memcmp(line, "data:", 5) == 0) {
            size_t skip = len > 5 && line[5] == ' ' ? 6 : 5;
            take_event(c->record, line + skip, len - skip, now);
        }
    }
    memmove(c->reply.bytes, c->reply.bytes + at, c->reply.len - at);
    c->reply.len -= at;
}

static void end_header(struct connection *c)
{
    struct record *r = c->record;
    c->field[c->field_len] = c->value[c->value_len] = '\0';
    if (strcasecmp(c->field, "content-type") == 0)
        c->is_stream = strncasecmp(c->value, "text/event-stream", 17) == 0;
    else if (strcasecmp(c->field, "x-kvgate-worker") == 0)
        snprintf(r->worker, sizeof r->worker, "%.*s", WORKER_MAX - 1, c->value);
    else if (strcasecmp(c->field, "x-kvgate-reason") == 0)
        snprintf(r->reason, sizeof r->reason, "%.*s", WORKER_MAX - 1, c->value);
    else if (strcasecmp(c->field, "x-kvgate-hit-tokens") == 0)
        r->hit_tokens = strtol(c->value, NULL, 10);
    c->field_len = c->value_len = 0;
    c->in_value = false;
}

static int on_header_field(http_parser *p, const char *at, size_t n)
{
    struct connection *c = p->data;
    if (c->in_value)
        end_header(c);
    for (size_t i = 0; i < n && c->field_len < sizeof c->field - 1; i++)
        c->field[c->field_len++] = at[i];
    return 0;
}

static int on_header_value(http_parser *p, const char *at, size_t n)
{
    struct connection *c = p->data;
    c->in_value = true;
    for (size_t i = 0; i < n && c->value_len < sizeof c->value - 1; i++)
        c->value[c->value_len++] = at[i];
    return 0;
}

static int on_headers_complete(http_parser *p)
{
    struct connection *c = p->data;
    if (c->in_value)
        end_header(c);
    c->record->status = (int)p->status_code;
    return 0;
}

static int on_body(http_parser *p, const char *at, size_t n)
{
    struct connection *c = p->data;
    double now = elapsed();
    if (!c->is_stream && c->record->first == 0)
        c->record->first = now;
    if (c->reply.len + n > REPLY_MAX)
        return -1;
    kvg_buf_add(&c->reply, at, n);
    if (c->is_stream)
        take_lines(c, now);
    return 0;
}

static void finish(struct connection *c, const char *error);

static int on_message_complete(http_parser *p)
{
    struct connection *c = p->data;
    struct record *r = c->record;
    struct kvg_error err;
    struct kvg_json *root;

    if (!c->is_stream) {
        kvg_arena_free(&L.arena);
        r->done = kvg_json_parse(&L.arena, c->reply.bytes, c->reply.len, NULL, &root, &err) == 0;
        if (r->done)
            take_usage(r, root);
    }
    finish(c, r->error ? r->error : r->done ? NULL : "the reply ended early");
    return 0;
}

static const http_parser_settings callbacks = {.on_header_field = on_header_field,
                                               .on_header_value = on_header_value,
                                               .on_headers_complete = on_headers_complete,
                                               .on_body = on_body,
                                               .on_message_complete = on_message_complete};

/* ---- connections ---- */

static void close_connection(struct connection *c)
{
    if (c->fd >= 0)
        close(c->fd);
    c->fd = -1;
    c->used = false;
}

/* Ends the connection's request; the connection stays open for the next one unless it failed. */
static void finish(struct connection *c, const char *error)
{
    struct record *r = c->record;
    r->end = elapsed();
    r->error = error;
    r->good = !error && r->status == 200;
    c->record = NULL;
    c->used = true;
    L.finished++;
    free(c->out);
    c->out = NULL;
    if (error)
        close_connection(c);
}

static void connect_to_server(struct connection *c)
{
    int one = 1;
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET | EPOLLRDHUP, .data.ptr = c};

    c->fd = socket(L.addr.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0)
        die("socket", strerror(errno));
    if (L.addr.ss_family == AF_INET)
        setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (epoll_ctl(L.epoll, EPOLL_CTL_ADD, c->fd, &event) != 0)
        die("epoll_ctl", strerror(errno));
    if (connect(c->fd, (struct sockaddr *)&L.addr, L.addr_len) != 0 && errno != EINPROGRESS)
        finish(c, "connect failed");
}

static void start_reply(struct connection *c)
{
    http_parser_init(&c->parser, HTTP_RESPONSE);
    c->parser.data = c;
    c->is_stream = c->in_value = false;
    c->field_len = c->value_len = 0;
    c->reply.len = 0;
    c->out_done = 0;
}

static void write_request(struct connection *c)
{
    while (c->fd >= 0 && c->record && c->out_done < c->out_len) {
        ssize_t n = send(c->fd, c->out + c->out_done, c->out_len - c->out_done, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EAGAIN || errno == ENOTCONN)
                return;
            break; /* the reading side finds out what happened */
        }
        c->out_done += (size_t)n;
    }
}

static void send_request(struct connection *c, size_t index)
{
    const struct body *body = &L.bodies[index % L.n_bodies];
    char *out;
    int head;

    c->record = &L.records[index];
    c->record->sent = elapsed();
    if (L.options.rate <= 0 && !L.options.timed)
        c->record->due = c->record->sent;
    head = asprintf(&out, "POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n%s\r\n",
                    L.path, L.host, body->len, L.options.headers);
    out = head < 0 ? NULL : realloc(out, (size_t)head + body->len);
    if (!out)
        die("out of memory", NULL);
    memcpy(out + head, body->bytes, body->len);
    c->out = out;
    c->out_len = (size_t)head + body->len;
    start_reply(c);
    if (c->fd < 0)
        connect_to_server(c);
    write_request(c);
}

/* The server closed. An idle connection may be closed at any time: a request that crossed with that is sent again. */
static void on_closed(struct connection *c, const char *why)
{
    if (!c->record) {
        close_connection(c);
        return;
    }
    if (c->used && c->record->status == 0) {
        close_connection(c);
        L.reconnects++;
        start_reply(c);
        connect_to_server(c);
        write_request(c);
        return;
    }
    http_parser_execute(&c->parser, &callbacks, NULL, 0);
    if (c->record)
        finish(c, why);
    close_connection(c);
}

static void read_reply(struct connection *c)
{
    static char piece[1 << 16];
    while (c->fd >= 0) {
        ssize_t n = recv(c->fd, piece, sizeof piece, 0);
        if (n < 0 && errno == EAGAIN)
            return;
        if (n <= 0) {
            on_closed(c, n == 0 ? "closed by the server" : errno == ECONNREFUSED ? "connection refused" : "connection reset");
            return;
        }
        if (!c->record) {
            close_connection(c);
            return;
        }
        http_parser_execute(&c->parser, &callbacks, piece, (size_t)n);
        if (HTTP_PARSER_ERRNO(&c->parser) != HPE_OK) {
            if (c->record)
                finish(c, "bad HTTP in the reply");
            close_connection(c);
        } else if (!c->record && !http_should_keep_alive(&c->parser)) {
            close_connection(c);
        }
    }
}

/* ---- the loop ---- */

static void start_due(void)
{
    bool open_loop = L.options.rate > 0 || L.options.timed;
    double now = elapsed();

    for (unsigned i = 0; i < L.options.connections && L.next < L.options.count; i++) {
        if (open_loop && L.records[L.next].due > now)
            return;
        if (!L.connections[i].record)
            send_request(&L.connections[i], L.next++);
    }
}

static int wait_ms(void)
{
    double wait = 0.1;
    if (L.next < L.options.count && (L.options.rate > 0 || L.options.timed))
        wait = fmin(wait, L.records[L.next].due - elapsed());
    return wait <= 0 ? 0 : (int)(wait * 1000);
}

static void end_late(void)
{
    double now = elapsed();
    for (unsigned i = 0; i < L.options.connections; i++)
        if (L.connections[i].record && now - L.connections[i].record->sent > L.options.timeout)
            finish(&L.connections[i], "timeout");
}

static void open_events(void)
{
    if (!L.options.events)
        return;
    L.events = fopen(L.options.events, "w");
    if (!L.events)
        die(L.options.events, strerror(errno));
    setvbuf(L.events, NULL, _IOLBF, 0); /* whole lines at once: others read them while this runs, or after it was stopped */
}

static void run(void)
{
    struct epoll_event events[256];

    L.epoll = epoll_create1(EPOLL_CLOEXEC);
    L.connections = calloc(L.options.connections, sizeof *L.connections);
    if (L.epoll < 0 || !L.connections)
        die("no memory or no epoll", NULL);
    for (unsigned i = 0; i < L.options.connections; i++)
        L.connections[i].fd = -1;
    L.start = clock_now();
    while (L.finished < L.options.count) {
        start_due();
        int n = epoll_wait(L.epoll, events, 256, L.finished < L.options.count ? wait_ms() : 0);
        for (int i = 0; i < n; i++) {
            struct connection *c = events[i].data.ptr;
            write_request(c);
            read_reply(c);
        }
        end_late();
    }
}

/* ---- the result ---- */

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_times(const char *name, double *values, size_t n)
{
    double sum = 0;
    static const double shares[] = {0, 0.5, 0.9, 0.95, 0.99, 1};
    static const char *const labels[] = {"min", "p50", "p90", "p95", "p99", "max"};

    qsort(values, n, sizeof *values, ascending);
    for (size_t i = 0; i < n; i++)
        sum += values[i];
    printf(", \"%s\": {\"n\": %zu", name, n);
    if (n)
        printf(", \"mean\": %.6f", sum / (double)n);
    for (int i = 0; n && i < 6; i++)
        printf(", \"%s\": %.6f", labels[i], values[(size_t)(shares[i] * (double)(n - 1) + 0.5)]);
    printf("}");
}

static void write_details(void)
{
    FILE *f = L.options.details ? fopen(L.options.details, "w") : NULL;
    if (L.options.details && !f)
        die(L.options.details, strerror(errno));
    for (size_t i = 0; f && i < L.options.count; i++) {
        const struct record *r = &L.records[i];
        fprintf(
            f,
            "{\"due\": %.6f, \"sent\": %.6f, \"ttft\": %.6f, \"total\": %.6f, \"status\": %d, \"good\": %s, \"events\": %u, "
            "\"prompt_tokens\": %u, \"completion_tokens\": %u, \"cached_tokens\": %u, \"hit_tokens\": %ld, \"worker\": \"%s\", "
            "\"reason\": \"%s\", \"error\": \"%s\"}\n",
            r->due, r->sent, r->first > 0 ? r->first - r->due : 0, r->end - r->due, r->status, r->good ? "true" : "false",
            r->events, r->prompt_tokens, r->completion_tokens, r->cached_tokens, r->hit_tokens, r->worker, r->reason,
            r->error ? r->error : "");
    }
    if (f)
        fclose(f);
}

static void print_errors(void)
{
    const char *seen[32];
    size_t n = 0;
    printf(", \"errors\": {");
    for (size_t i = 0; i < L.options.count; i++) {
        const char *error = L.records[i].error;
        size_t k = 0, times = 0;
        while (k < n && error && strcmp(seen[k], error) != 0)
            k++;
        if (!error || k < n || n == 32)
            continue;
        seen[n++] = error;
        for (size_t j = i; j < L.options.count; j++)
            times += L.records[j].error && strcmp(L.records[j].error, error) == 0;
        printf("%s\"%s\": %zu", n > 1 ? ", " : "", error, times);
    }
    printf("}");
}

static void print_result(void)
{
    double *ttft = calloc(L.options.count, sizeof *ttft), *total = calloc(L.options.count, sizeof *total), end = 0;
    size_t good = 0, n_first = 0;
    uint64_t prompt = 0, completion = 0, cached = 0, events = 0;

    if (!ttft || !total)
        die("out of memory", NULL);
    for (size_t i = 0; i < L.options.count; i++) {
        const struct record *r = &L.records[i];
        end = fmax(end, r->end);
        events += r->events;
        if (!r->good)
            continue;
        total[good++] = r->end - r->due;
        if (r->first > 0)
            ttft[n_first++] = r->first - r->due;
        prompt += r->prompt_tokens;
        completion += r->completion_tokens;
        cached += r->cached_tokens;
    }
    printf("{\"requests\": %zu, \"good\": %zu, \"failed\": %zu, \"reconnects\": %zu, \"seconds\": %.6f", L.options.count, good,
           L.options.count - good, L.reconnects, end);
    printf(", \"requests_per_second\": %.3f, \"prompt_tokens\": %lu, \"completion_tokens\": %lu, \"cached_tokens\": %lu, "
           "\"events\": %lu",
           end > 0 ? (double)good / end : 0, prompt, completion, cached, events);
    print_times("ttft", ttft, n_first);
    print_times("inter_token", L.gaps, L.n_gaps);
    print_times("total", total, good);
    print_errors();
    printf("}\n");
    free(ttft);
    free(total);
}

int main(int argc, char **argv)
{
    parse_options(argc, argv);
    parse_url(L.options.url);
    read_bodies();
    plan_arrivals();
    kvg_arena_init(&L.arena, 0);
    open_events();
    run();
    write_details();
    print_result();
    for (unsigned i = 0; i < L.options.connections; i++) {
        close_connection(&L.connections[i]);
        kvg_buf_free(&L.connections[i].reply);
    }
    kvg_arena_free(&L.arena);
    if (L.events)
        fclose(L.events);
    free(L.connections);
    free(L.records);
    free(L.bodies);
    free(L.gaps);
    free(L.text);
    return 0;
}
