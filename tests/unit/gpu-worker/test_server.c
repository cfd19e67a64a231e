/* The HTTP server in front of a scripted engine: each test plays the engine's part itself, so that errors in mid-stream,
 * slow readers and clients that leave come at a moment of its choosing. Tokens are characters: id = byte. */
#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>
#include "gpu-worker/kv/publish.h"
#include "gpu-worker/server/server.h"
#include "tests/unit/gpu-worker/scripted_engine.h"

enum { WAIT_MS = 10000 };

struct world {
    struct server *server;
    uint16_t port;
    char gateway[64];
};

/* ---- client side ------------------------------------------------------------------------------------------------------- */

static uint16_t free_port(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, len), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&address, &len), 0);
    close(fd);
    return ntohs(address.sin_port);
}

static int dial(const struct world *w)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(w->port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    return fd;
}

static int dial_gateway(const struct world *w)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    strcpy(address.sun_path, w->gateway + 5);
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    return fd;
}

static void say(int fd, const char *text)
{
    size_t n = strlen(text);
    assert_int_equal(send(fd, text, n, MSG_NOSIGNAL), (ssize_t)n);
}

static void post_with(int fd, const char *path, const char *headers, const char *body)
{
    char text[4096];
    snprintf(text, sizeof text, "POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: %zu\r\n\r\n%s", path, headers, strlen(body),
             body);
    say(fd, text);
}

static void post(int fd, const char *path, const char *body)
{
    post_with(fd, path, "", body);
}

/* Reads until `mark` has come or the peer closes; what was read is in a static buffer. */
static const char *hear(int fd, const char *mark)
{
    static char text[1 << 16];
    size_t n = 0;
    text[0] = '\0';
    while (n < sizeof text - 1) {
        struct pollfd ready = {.fd = fd, .events = POLLIN};
        if (poll(&ready, 1, WAIT_MS) != 1)
            fail_msg("no \"%s\" within 10 s, only:\n%s", mark ? mark : "end", text);
        ssize_t got = recv(fd, text + n, sizeof text - 1 - n, 0);
        if (got <= 0)
            break;
        n += (size_t)got;
        text[n] = '\0';
        if (mark && strstr(text, mark))
            break;
    }
    return text;
}

static void assert_has(const char *text, const char *part)
{
    if (!strstr(text, part))
        fail_msg("\"%s\" is missing in:\n%s", part, text);
}

static void assert_lacks(const char *text, const char *part)
{
    if (strstr(text, part))
        fail_msg("\"%s\" should not be in:\n%s", part, text);
}

static unsigned count(const char *text, const char *part)
{
    unsigned n = 0;
    for (const char *at = text; (at = strstr(at, part)); at += strlen(part))
        n++;
    return n;
}

/* ---- setup ------------------------------------------------------------------------------------------------------------- */

/* limits: what differs from the usual world. */
static int open_world_with(void **state, struct server_options limits)
{
    struct world *w = calloc(1, sizeof *w);
    struct kvg_error err = {0};
    scripted_reset();
    w->port = free_port();
    snprintf(w->gateway, sizeof w->gateway, "unix:/tmp/kvgate-test-%d.sock", (int)getpid());
    struct server_options options = {
        .host = "127.0.0.1",
        .port = w->port,
        .gateway_listen = w->gateway,
        .model_name = "toy",
        .api_key = limits.api_key,
        .version = "0",
        .max_body_bytes = 4096,
        .max_waiting = limits.max_waiting,
        .idle_ms = limits.idle_ms,
        .read_ms = limits.read_ms,
        .send_ms = limits.send_ms,
        .comment_ms = limits.comment_ms,
        .priority_scheduling = true,
    };
    if (server_open(&w->server, &options, NULL, NULL, NULL, &err) < 0)
        fail_msg("%s", err.message);
    *state = w;
    return 0;
}

static int open_world(void **state)
{
    return open_world_with(state, (struct server_options){0});
}

static int open_locked(void **state)
{
    return open_world_with(state, (struct server_options){.api_key = "secret"});
}

static int open_narrow(void **state)
{
    return open_world_with(state, (struct server_options){.max_waiting = 1});
}

static int open_wide(void **state)
{
    return open_world_with(state, (struct server_options){.max_waiting = 1 << 20});
}

static int open_hasty(void **state)
{
    return open_world_with(state, (struct server_options){.idle_ms = 1, .read_ms = 1, .send_ms = 1, .comment_ms = 1});
}

static int close_world(void **state)
{
    struct world *w = *state;
    server_close(w->server);
    assert_int_equal(scripted_open(), 0); /* every submitted request has ended */
    free(w);
    return 0;
}

/* ---- answers ----------------------------------------------------------------------------------------------------------- */

static void an_answer_has_openais_shape(void **state)
{
    int fd = dial(*state);
    post_with(fd, "/v1/chat/completions", "x-request-id: mine\r\n",
              "{\"model\":\"toy\",\"messages\":\"hi\",\"seed\":5,\"whatever\":1}");
    struct scripted *r = scripted_wait(0);
    assert_int_equal(r->params.seed, 5);
    assert_int_equal(r->n_ids, 2);
    scripted_text(r, 0, "Hel");
    scripted_text(r, 0, "lo \"x\"");
    scripted_finish(r, 0, FINISH_STOP);
    const char *text = hear(fd, "}}}");
    assert_has(text, "HTTP/1.1 200 OK\r\n");
    assert_has(text, "x-request-id: mine\r\n");
    assert_has(text, "{\"id\":\"chatcmpl-");
    assert_has(text, "\"object\":\"chat.completion\"");
    assert_has(text, "\"message\":{\"role\":\"assistant\",\"content\":\"Hello \\\"x\\\"\"");
    assert_has(text, "\"finish_reason\":\"stop\"");
    assert_has(text, "\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":2,\"total_tokens\":4,\"prompt_tokens_details\":{"
                     "\"cached_tokens\":1}}");
    close(fd);
}

static void a_stream_has_role_deltas_finish_usage_done(void **state)
{
    int fd = dial(*state);
    post(fd, "/v1/chat/completions", "{\"messages\":\"hi\",\"stream\":true,\"stream_options\":{\"include_usage\":true}}");
    struct scripted *r = scripted_wait(0);
    scripted_text(r, 0, "A");
    scripted_text(r, 0, ""); /* a held token: no chunk */
    scripted_text(r, 0, "\xc3\xa9");
    scripted_finish(r, 0, FINISH_LENGTH);
    const char *text = hear(fd, "0\r\n\r\n");
    assert_has(text, "Content-Type: text/event-stream");
    assert_has(text, "X-Accel-Buffering: no\r\n");
    assert_has(text, "Cache-Control: no-cache\r\n");
    const char *role = strstr(text, "\"delta\":{\"role\":\"assistant\",\"content\":\"\"}"),
               *a = strstr(text, "\"delta\":{\"content\":\"A\"}");
    const char *e = strstr(text, "\"delta\":{\"content\":\"\xc3\xa9\"}"), *end = strstr(text, "\"finish_reason\":\"length\"");
    const char *usage = strstr(text, "\"choices\":[],\"usage\":{"), *done = strstr(text, "data: [DONE]\n\n");
    assert_true(role && a && e && end && usage && done);
    assert_true(role < a && a < e && e < end && end < usage && usage < done);
    assert_int_equal(count(text, "data: {"), 5);
    assert_int_equal(count(text, "\"finish_reason\":\"length\""), 1);
    assert_int_equal(count(text, "\"usage\":null"), 4);
    close(fd);
}

static void no_usage_chunk_comes_unasked(void **state)
{
    int fd = dial(*state);
    post(fd, "/v1/completions", "{\"prompt\":\"p\",\"stream\":true}");
    struct scripted *r = scripted_wait(0);
    assert_int_equal(r->params.max_tokens, 16);
    scripted_text(r, 0, "x");
    scripted_finish(r, 0, FINISH_STOP);
    const char *text = hear(fd, "0\r\n\r\n");
    assert_lacks(text, "usage");
    assert_has(text, "\"object\":\"text_completion\"");
    assert_has(text, "\"text\":\"x\"");
    assert_has(text, "data: [DONE]");
    close(fd);
}

static void choices_are_numbered_over_prompts(void **state)
{
    int fd = dial(*state);
    post(fd, "/v1/completions", "{\"prompt\":[\"ab\",\"c\"],\"n\":2,\"echo\":true}");
    struct scripted *first = scripted_wait(0), *second = scripted_wait(1);
    scripted_text(second, 1, "3");
    scripted_text(first, 1, "1");
    scripted_text(first, 0, "0");
    scripted_text(second, 0, "2");
    scripted_finish(second, 0, FINISH_STOP);
    scripted_finish(first, 1, FINISH_STOP);
    scripted_finish(first, 0, FINISH_STOP);
    scripted_finish(second, 1, FINISH_LENGTH);
    const char *text = hear(fd, "}}}");
    assert_has(text, "{\"index\":0,\"text\":\"ab0\"");
    assert_has(text, "{\"index\":1,\"text\":\"ab1\"");
    assert_has(text, "{\"index\":2,\"text\":\"c2\"");
    assert_has(text, "{\"index\":3,\"text\":\"c3\"");
    assert_has(text, "\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4,\"total_tokens\":7");
    close(fd);
}

static void echo_without_tokens_needs_no_engine(void **state)
{
    int fd = dial(*state);
    post(fd, "/v1/completions", "{\"prompt\":\"abc\",\"max_tokens\":0,\"echo\":true}");
    const char *text = hear(fd, "}}}");
    assert_has(text, "\"text\":\"abc\"");
    assert_has(text, "\"finish_reason\":\"length\"");
    assert_has(text, "\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":0,\"total_tokens\":3");
    post(fd, "/v1/completions", "{\"prompt\":\"abc\",\"max_tokens\":0,\"echo\":true,\"stream\":true}");
    text = hear(fd, "0\r\n\r\n");
    assert_has(text, "\"text\":\"abc\"");
    assert_has(text, "data: [DONE]");
    close(fd);
}

static void log_probabilities_come_in_both_forms(void **state)
{
    int fd = dial(*state);
    post(fd, "/v1/chat/completions", "{\"messages\":\"hi\",\"logprobs\":true,\"top_logprobs\":2}");
    struct scripted *r = scripted_wait(0);
    scripted_logprob(r, "A", 'A');
    scripted_finish(r, 0, FINISH_STOP);
    const char *text = hear(fd, "}}}");
    assert_has(text, "\"logprobs\":{\"content\":[{\"token\":\"A\",\"logprob\":-0.5,\"bytes\":[65],\"top_logprobs\":[{\"token\":"
                     "\"A\",\"logprob\":-0.5,"
                     "\"bytes\":[65]},{\"token\":\"B\",\"logprob\":-9999,\"bytes\":[66]}]}],\"refusal\":null}");
    post(fd, "/v1/completions", "{\"prompt\":\"p\",\"logprobs\":2}");
    r = scripted_wait(1);
    scripted_logprob(r, "A", 'A');
    scripted_logprob(r, "A", 'A');
    scripted_finish(r, 0, FINISH_STOP);
    text = hear(fd, "}}}");
    assert_has(text,
               "\"logprobs\":{\"tokens\":[\"A\",\"A\"],\"token_logprobs\":[-0.5,-0.5],\"top_logprobs\":[{\"A\":-0.5,\"B\":-9999},"
               "{\"A\":-0.5,\"B\":-9999}],\"text_offset\":[0,1]}");
    close(fd);
}

/* ---- errors ------------------------------------------------------------------------------------------------------------ */

static void an_error_in_mid_stream_is_a_frame_and_no_done(void **state)
{
    int fd = dial(*state);
    post(fd, "/v1/chat/completions", "{\"messages\":\"hi\",\"stream\":true,\"n\":2}");
    struct scripted *r = scripted_wait(0);
    scripted_text(r, 0, "A");
    scripted_error(r, 1, "device lost");
    const char *text = hear(fd, "0\r\n\r\n");
    assert_has(text, "data: {\"error\":{\"message\":\"device lost\",\"type\":\"server_error\"");
    assert_lacks(text, "[DONE]");
    scripted_wait_cancelled(r);                        /* the other choice does not run on */
    post(fd, "/v1/completions", "{\"prompt\":\"p\"}"); /* the connection is good for more */
    r = scripted_wait(1);
    scripted_error(r, 0, "device lost");
    text = hear(fd, "}}");
    assert_has(text, "HTTP/1.1 500 ");
    assert_has(text, "device lost");
    close(fd);
}

static void engine_refusals_become_400_and_503(void **state)
{
    int fd = dial(*state);
    scripted_refuse(KVG_LIMIT, "queue full");
    post(fd, "/v1/chat/completions", "{\"messages\":\"hi\",\"stream\":true}");
    const char *text = hear(fd, "}}");
    assert_has(text, "HTTP/1.1 503 ");
    assert_has(text, "Retry-After: 1\r\n");
    scripted_refuse(KVG_INVALID, "the prompt has 2 tokens, the context holds 1");
    post(fd, "/v1/chat/completions", "{\"messages\":\"hi\",\"stream\":true}");
    text = hear(fd, "}}");
    assert_has(text, "HTTP/1.1 400 ");
    assert_has(text, "\"param\":\"messages\"");
    scripted_refuse(KVG_OK, NULL);
    close(fd);
}

static const struct error_case {
    const char *request;
    const char *status, *part;
} error_cases[] = {
    {"GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n", "404", "/nowhere"},
    {"GET /v1/chat/completions HTTP/1.1\r\nHost: a\r\n\r\n", "405", "Allow: POST"},
    {"POST /health HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", "405", "Allow: GET, HEAD"},
    {"DELETE /v1/models HTTP/1.1\r\nHost: a\r\n\r\n", "405", "method_not_allowed"},
    {"OPTIONS /v1/completions HTTP/1.1\r\nHost: a\r\n\r\n", "200", "Allow: POST"},
    {"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", "400", "\"error\""},
    {"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n[1] ", "400", "JSON object"},
    {"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 27\r\n\r\n{\"prompt\":\"x\",\"model\":\"oo\"}", "404",
     "model_not_found"},
    {"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 31\r\n\r\n{\"prompt\":\"x\",\"temperature\":NaN}", "400",
     "\"error\""},
    {"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 39\r\n\r\n{\"prompt\":\"x\",\"prompt_token_ids\":[1,2]}", "400",
     "prompt_token_ids"},
    {"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5000\r\n\r\n", "413", "4096"},
    {"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", "400",
     "Content-Length"},
    {"nonsense\r\n\r\n", "400", "\"error\""},
    {"GET /v1/models/oo HTTP/1.1\r\nHost: a\r\n\r\n", "404", "toy"},
};

static void errors_have_openais_shape(void **state)
{
    for (size_t i = 0; i < sizeof error_cases / sizeof *error_cases; i++) {
        int fd = dial(*state);
        char status[32];
        say(fd, error_cases[i].request);
        const char *text = hear(fd, error_cases[i].status[0] == '4' ? "}}" : "\r\n\r\n");
        snprintf(status, sizeof status, "HTTP/1.1 %s ", error_cases[i].status);
        assert_has(text, status);
        assert_has(text, error_cases[i].part);
        assert_has(text, "Content-Length: ");
        if (error_cases[i].status[0] == '4')
            assert_has(text, "{\"error\":{\"message\":");
        close(fd);
    }
}

static void the_key_is_asked_for_where_it_matters(void **state)
{
    static const char *const with[] = {"", "Authorization: Bearer wrong!\r\n", "Authorization: Bearer secret2\r\n",
                                       "Authorization: secret\r\n"};
    int fd = dial(*state);
    for (size_t i = 0; i < sizeof with / sizeof *with; i++) {
        post_with(fd, "/v1/completions", with[i], "{\"prompt\":\"x\",\"max_tokens\":0,\"echo\":true}");
        assert_has(hear(fd, "}}"), "HTTP/1.1 401 ");
    }
    post_with(fd, "/v1/completions", "Authorization: bearer secret\r\n", "{\"prompt\":\"x\",\"max_tokens\":0,\"echo\":true}");
    assert_has(hear(fd, "}}}"), "HTTP/1.1 200 ");
    say(fd, "GET /health HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_has(hear(fd, "}"), "HTTP/1.1 200 ");
    post_with(fd, "/v1/completions", "Authorization: Bearer secret\r\n", "{\"prompt\":\"x\",\"cache_salt\":\"c\"}");
    struct scripted *r = scripted_wait(0);
    assert_true(r->salt_len == 4 + 64 + 2 && memcmp(r->salt, "key:", 4) == 0 &&
                memcmp(r->salt + 68,
                       "\x1f"
                       "c",
                       2) == 0);
    scripted_finish(r, 0, FINISH_STOP);
    hear(fd, "}}}");
    close(fd);
}

/* ---- clients ----------------------------------------------------------------------------------------------------------- */

static void a_client_that_leaves_cancels(void **state)
{
    static const char *const bodies[] = {"{\"messages\":\"hi\"}", "{\"messages\":\"hi\",\"stream\":true}"};
    for (unsigned i = 0; i < 4; i++) {
        int fd = dial(*state);
        post(fd, "/v1/chat/completions", bodies[i % 2]);
        struct scripted *r = scripted_wait(i);
        if (i >= 2)
            scripted_text(r, 0, "some");
        close(fd);
        scripted_wait_cancelled(r);
    }
}

/* While its body is read on another thread. What was submitted all the same is cancelled. */
static void a_client_may_leave_while_its_request_is_read(void **state)
{
    for (unsigned i = 0; i < 30; i++) {
        int fd = dial(*state);
        post(fd, "/v1/completions", "{\"prompt\":\"once upon a time\",\"n\":8}");
        usleep(i % 10 * 20);
        close(fd);
    }
    int fd = dial(*state);
    say(fd, "GET /health HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_has(hear(fd, "}"), "HTTP/1.1 200 ");
    for (int i = 0; i < 1000 && scripted_open(); i++)
        usleep(10000);
    assert_int_equal(scripted_open(), 0);
    close(fd);
}

static void a_reader_too_slow_is_dropped_and_the_engine_runs_on(void **state)
{
    static char big[1 << 16];
    struct world *w = *state;
    int fd = dial(w), other = dial(w);
    memset(big, 'x', sizeof big - 1);
    post(fd, "/v1/chat/completions", "{\"messages\":\"hi\",\"stream\":true}");
    struct scripted *r = scripted_wait(0);
    for (int i = 0; i < 400 && !scripted_cancelled(r); i++) /* 26 MB: over what the kernel and the server hold */
        scripted_text(r, 0, big);
    scripted_wait_cancelled(r);
    say(other, "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_has(hear(other, "fingerprint_mismatches_total{model_name=\"toy\"}"),
               "kvgate_clients_dropped_total{model_name=\"toy\"} 1");
    close(fd);
    close(other);
}

static void pipelined_requests_are_answered_in_order(void **state)
{
    int fd = dial(*state);
    say(fd, "GET /health HTTP/1.1\r\nHost: a\r\n\r\nPOST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: "
            "14\r\n\r\n{\"prompt\":\"p\"}GET "
            "/version HTTP/1.1\r\nHost: a\r\n\r\n"
            "GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n");
    struct scripted *r = scripted_wait(0);
    scripted_text(r, 0, "T");
    scripted_finish(r, 0, FINISH_STOP);
    const char *text = hear(fd, "/nowhere");
    const char *health = strstr(text, "{\"status\":\"ok\"}"), *answer = strstr(text, "\"text\":\"T\""),
               *version = strstr(text, "{\"version\"");
    assert_true(health && answer && version);
    assert_true(health < answer && answer < version);
    close(fd);
}

static void a_request_may_come_byte_by_byte_and_chunked(void **state)
{
    static const char text[] = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: "
                               "chunked\r\n\r\n7\r\n{\"promp\r\n7\r\nt\":\"p\"}\r\n0\r\n\r\n";
    int fd = dial(*state);
    for (size_t i = 0; i < sizeof text - 1; i++)
        assert_int_equal(send(fd, text + i, 1, 0), 1);
    scripted_finish(scripted_wait(0), 0, FINISH_STOP);
    assert_has(hear(fd, "}}}"), "HTTP/1.1 200 ");
    close(fd);
}

static void expect_100_is_answered_before_the_body(void **state)
{
    int fd = dial(*state);
    say(fd, "POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 14\r\n\r\n");
    assert_string_equal(hear(fd, "\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
    say(fd, "{\"prompt\":\"p\"}");
    scripted_finish(scripted_wait(0), 0, FINISH_STOP);
    assert_has(hear(fd, "}}}"), "HTTP/1.1 200 ");
    say(fd, "POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 5000\r\n\r\n");
    assert_has(hear(fd, NULL), "HTTP/1.1 413 "); /* refused without the body */
    close(fd);
}

static void http_1_0_streams_end_with_the_connection(void **state)
{
    int fd = dial(*state);
    say(fd, "POST /v1/completions HTTP/1.0\r\nContent-Length: 28\r\n\r\n{\"prompt\":\"p\",\"stream\":true}");
    struct scripted *r = scripted_wait(0);
    scripted_text(r, 0, "x");
    scripted_finish(r, 0, FINISH_STOP);
    const char *text = hear(fd, NULL);
    assert_lacks(text, "chunked");
    assert_has(text, "Connection: close\r\n");
    assert_has(text, "\r\n\r\ndata: {");
    assert_has(text, "data: [DONE]\n\n");
    close(fd);
}

static void a_head_request_gets_no_body(void **state)
{
    int fd = dial(*state);
    say(fd, "HEAD /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    const char *text = hear(fd, NULL);
    assert_has(text, "Content-Length: 15\r\n");
    assert_lacks(text, "{");
    close(fd);
}

static void a_silent_stream_is_kept_alive_by_comments(void **state)
{
    int fd = dial(*state);
    post(fd, "/v1/completions", "{\"prompt\":\"p\",\"stream\":true}");
    struct scripted *r = scripted_wait(0);
    assert_has(hear(fd, ": keep-alive\n\n"), "\r\n: keep-alive\n\n\r\n");
    scripted_text(r, 0, "x");
    scripted_finish(r, 0, FINISH_STOP);
    assert_has(hear(fd, "[DONE]"), "\"text\":\"x\"");
    close(fd);
}

static void a_request_that_does_not_go_on_is_408_and_an_idle_connection_ends(void **state)
{
    int fd = dial(*state);
    say(fd, "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 14\r\n\r\n{");
    const char *text = hear(fd, NULL);
    assert_has(text, "HTTP/1.1 408 ");
    assert_has(text, "Connection: close\r\n");
    close(fd);
    fd = dial(*state);
    say(fd, "GET /health HTT");
    assert_has(hear(fd, NULL), "HTTP/1.1 408 ");
    close(fd);
    fd = dial(*state);
    assert_string_equal(hear(fd, NULL), ""); /* closed without a word */
    close(fd);
}

/* ---- the gateway ------------------------------------------------------------------------------------------------------- */

static void the_gateways_ids_count_under_this_workers_fingerprint(void **state)
{
    int fd = dial_gateway(*state);
    char headers[128];
    snprintf(headers, sizeof headers, "X-Kvgate-Salt: team\r\nX-Kvgate-Fingerprint: %s\r\n", SCRIPTED_FINGERPRINT);
    post_with(fd, "/v1/chat/completions", headers,
              "{\"model\":\"toy\",\"messages\":\"hi\",\"priority\":-2,\"prompt_token_ids\":[7,8,9]}");
    struct scripted *r = scripted_wait(0);
    assert_int_equal(r->n_ids, 3);
    assert_int_equal(r->ids[2], 9);
    assert_int_equal(r->params.priority, -2);
    assert_true(r->salt_len == 4 && memcmp(r->salt, "team", 4) == 0);
    scripted_finish(r, 0, FINISH_STOP);
    hear(fd, "}}}");

    post_with(fd, "/v1/chat/completions", "X-Kvgate-Fingerprint: 00\r\n",
              "{\"messages\":\"hi\",\"cache_salt\":\"c\",\"prompt_token_ids\":[7,8,9]}");
    r = scripted_wait(1);
    assert_int_equal(r->n_ids, 2); /* tokenized here */
    assert_true(r->salt_len == 2 && memcmp(r->salt,
                                           "\x1f"
                                           "c",
                                           2) == 0);
    scripted_finish(r, 0, FINISH_STOP);
    hear(fd, "}}}");
    say(fd, "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
    const char *text = hear(fd, "kvgate_gateway_fingerprint_mismatches_total{");
    assert_has(text, "kvgate_gateway_ids_used_total{model_name=\"toy\"} 1");
    assert_has(text, "kvgate_gateway_fingerprint_mismatches_total{model_name=\"toy\"} 1");
    close(fd);
}

/* Two models may have one tokenizer and template, so one fingerprint: the name decides. */
static void another_models_name_is_404_under_the_same_fingerprint(void **state)
{
    int fd = dial_gateway(*state);
    post_with(fd, "/v1/chat/completions", "X-Kvgate-Fingerprint: " SCRIPTED_FINGERPRINT "\r\n",
              "{\"model\":\"twin\",\"messages\":\"hi\",\"prompt_token_ids\":[7,8,9]}");
    assert_has(hear(fd, "}}"), "HTTP/1.1 404 ");
    close(fd);
}

static void the_gateways_prediction_is_compared_with_what_was_cached(void **state)
{
    static const char *const said[] = {"33", "1", "0", "many", "-1", ""}; /* the scripted engine finds 1 cached token */
    int fd = dial_gateway(*state);
    for (unsigned i = 0; i < sizeof said / sizeof *said; i++) {
        char headers[128];
        snprintf(headers, sizeof headers, "X-Kvgate-Fingerprint: %s\r\nX-Kvgate-Hit-Tokens: %s\r\n", SCRIPTED_FINGERPRINT,
                 said[i]);
        post_with(fd, "/v1/chat/completions", headers, "{\"messages\":\"hi\",\"n\":2,\"prompt_token_ids\":[7,8,9]}");
        struct scripted *r = scripted_wait(i);
        for (uint32_t choice = 0; choice < 2; choice++) {
            scripted_text(r, choice, "x");
            scripted_finish(r, choice, FINISH_STOP);
        }
        hear(fd, "}}}");
    }
    say(fd, "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
    const char *text = hear(fd, "kvgate_gateway_hit_error_tokens_count{model_name=\"toy\"} 3\n");
    assert_has(text, "kvgate_gateway_predicted_hit_tokens_total{model_name=\"toy\"} 34\n");
    assert_has(text, "kvgate_gateway_found_hit_tokens_total{model_name=\"toy\"} 3\n");
    assert_has(text, "kvgate_gateway_hit_error_tokens_bucket{model_name=\"toy\",le=\"0\"} 1\n");
    assert_has(text, "kvgate_gateway_hit_error_tokens_sum{model_name=\"toy\"} 33\n");
    close(fd);
}

static void the_plain_listener_ignores_the_gateways_headers(void **state)
{
    int fd = dial(*state);
    post_with(fd, "/v1/chat/completions", "X-Kvgate-Salt: team\r\n", "{\"messages\":\"hi\"}");
    struct scripted *r = scripted_wait(0);
    assert_int_equal(r->salt_len, 0);
    scripted_finish(r, 0, FINISH_STOP);
    hear(fd, "}}}");
    close(fd);
}

/* ---- the rest ---------------------------------------------------------------------------------------------------------- */

static void tokenize_gives_ids_and_chain(void **state)
{
    int fd = dial(*state);
    post(fd, "/tokenize", "{\"prompt\":\"0123456789abcdef0\"}");
    const char *text = hear(fd, "]}}");
    assert_has(text, "\"count\":17,\"max_model_len\":100,\"tokens\":[48,49,");
    assert_has(text, "\"kvgate\":{\"block_size\":16,\"fingerprint\":\"" SCRIPTED_FINGERPRINT "\",\"chain\":[\"");
    assert_int_equal(count(strstr(text, "chain"), "\""), 1 + 2);
    post(fd, "/detokenize", "{\"tokens\":[104,105]}");
    assert_has(hear(fd, "}"), "{\"prompt\":\"hi\"}");
    post(fd, "/detokenize", "{\"tokens\":[256]}");
    assert_has(hear(fd, "}}"), "\"param\":\"tokens\"");
    close(fd);
}

static void too_many_waiting_requests_get_503(void **state)
{
    int fds[8];
    unsigned n = 0;
    for (; n < 5; n++) { /* max_waiting 1 + max_num_seqs 4 */
        fds[n] = dial(*state);
        post(fds[n], "/v1/completions", "{\"prompt\":\"p\"}");
        scripted_wait(n);
    }
    int fd = dial(*state);
    post(fd, "/v1/completions", "{\"prompt\":\"p\"}");
    const char *text = hear(fd, "}}");
    assert_has(text, "HTTP/1.1 503 ");
    assert_has(text, "Retry-After");
    while (n-- > 0)
        close(fds[n]);
    close(fd);
}

/* One request with more prompts than may run and wait at once would keep all others out, and could never be taken. */
static void more_prompts_than_may_wait_are_refused_with_both_numbers(void **state)
{
    int fd = dial(*state);
    post(fd, "/v1/completions", "{\"prompt\":[\"a\",\"b\",\"c\"],\"n\":2}");
    const char *text = hear(fd, "}}");
    assert_has(text, "HTTP/1.1 400 ");
    assert_has(text, "3 prompts with n = 2 are more choices than the 5 that may run and wait at once");
    assert_has(text, "\"param\":\"prompt\"");
    close(fd);
}

/* However many may wait: the answers of one request are held together. */
static void more_prompts_than_a_request_may_have_are_refused_with_both_numbers(void **state)
{
    int fd = dial(*state);
    post(fd, "/v1/completions", "{\"n\":128,\"prompt\":[[1],[1],[1],[1],[1],[1],[1],[1],[1],[1],[1],[1],[1],[1],[1],[1],[1]]}");
    const char *text = hear(fd, "}}");
    assert_has(text, "HTTP/1.1 400 ");
    assert_has(text, "17 prompts with n = 128 are more choices than the 2048 that one request may have");
    close(fd);
}

static void a_drain_finishes_what_runs_and_takes_no_more(void **state)
{
    struct world *w = *state;
    int running = dial(w), kept = dial(w);
    say(kept, "GET /ready HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_has(hear(kept, "}"), "HTTP/1.1 200 ");
    post(running, "/v1/completions", "{\"prompt\":\"p\",\"stream\":true}");
    struct scripted *r = scripted_wait(0);
    scripted_text(r, 0, "one");
    hear(running, "one");
    server_drain(w->server);
    post(kept, "/v1/completions", "{\"prompt\":\"p\"}");
    const char *text = hear(kept, NULL);
    assert_has(text, "HTTP/1.1 503 ");
    assert_has(text, "Connection: close\r\n");
    assert_false(server_idle(w->server));
    scripted_text(r, 0, "two");
    scripted_finish(r, 0, FINISH_STOP);
    text = hear(running, "[DONE]");
    assert_has(text, "two");
    for (int i = 0; i < 1000 && !server_idle(w->server); i++)
        usleep(10000);
    assert_true(server_idle(w->server));
    close(running);
    close(kept);
}

static void closing_the_server_cancels_what_runs(void **state)
{
    int fd = dial(*state);
    post(fd, "/v1/completions", "{\"prompt\":\"p\",\"stream\":true}");
    scripted_wait(0);
    close_world(state);
    close(fd);
    open_world(state);
}

int main(void)
{
#define IN_WORLD(test) cmocka_unit_test_setup_teardown(test, open_world, close_world)
    const struct CMUnitTest tests[] = {
        IN_WORLD(an_answer_has_openais_shape),
        IN_WORLD(a_stream_has_role_deltas_finish_usage_done),
        IN_WORLD(no_usage_chunk_comes_unasked),
        IN_WORLD(choices_are_numbered_over_prompts),
        IN_WORLD(echo_without_tokens_needs_no_engine),
        IN_WORLD(log_probabilities_come_in_both_forms),
        IN_WORLD(an_error_in_mid_stream_is_a_frame_and_no_done),
        IN_WORLD(engine_refusals_become_400_and_503),
        IN_WORLD(errors_have_openais_shape),
        cmocka_unit_test_setup_teardown(the_key_is_asked_for_where_it_matters, open_locked, close_world),
        IN_WORLD(a_client_that_leaves_cancels),
        IN_WORLD(a_client_may_leave_while_its_request_is_read),
        IN_WORLD(a_reader_too_slow_is_dropped_and_the_engine_runs_on),
        IN_WORLD(pipelined_requests_are_answered_in_order),
        IN_WORLD(a_request_may_come_byte_by_byte_and_chunked),
        IN_WORLD(expect_100_is_answered_before_the_body),
        IN_WORLD(http_1_0_streams_end_with_the_connection),
        IN_WORLD(a_head_request_gets_no_body),
        IN_WORLD(the_gateways_ids_count_under_this_workers_fingerprint),
        IN_WORLD(another_models_name_is_404_under_the_same_fingerprint),
        IN_WORLD(the_gateways_prediction_is_compared_with_what_was_cached),
        IN_WORLD(the_plain_listener_ignores_the_gateways_headers),
        IN_WORLD(tokenize_gives_ids_and_chain),
        cmocka_unit_test_setup_teardown(too_many_waiting_requests_get_503, open_narrow, close_world),
        cmocka_unit_test_setup_teardown(more_prompts_than_may_wait_are_refused_with_both_numbers, open_narrow, close_world),
        cmocka_unit_test_setup_teardown(more_prompts_than_a_request_may_have_are_refused_with_both_numbers, open_wide,
                                        close_world),
        cmocka_unit_test_setup_teardown(a_silent_stream_is_kept_alive_by_comments, open_hasty, close_world),
        cmocka_unit_test_setup_teardown(a_request_that_does_not_go_on_is_408_and_an_idle_connection_ends, open_hasty,
                                        close_world),
        IN_WORLD(a_drain_finishes_what_runs_and_takes_no_more),
        IN_WORLD(closing_the_server_cancels_what_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
