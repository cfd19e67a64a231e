/* One request out of a stream of bytes, however it is cut. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "gpu-worker/server/http.h"

enum { MAX_BODY = 1000 };

static const char *const good[] = {
    "GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
    "POST /v1/completions?x=1 HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nX-Request-Id: abc\r\n\r\nhello",
    "POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;ext=1\r\nlo\r\n0\r\nTrailer: "
    "t\r\n\r\n",
    "POST http://host:80/v1/completions HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello",
    "\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
};

/* Feeds text[0..n) in pieces of `piece` bytes, from heap copies so that a sanitizer sees reads past them. */
static size_t feed(struct http_reader *reader, const char *text, size_t n, size_t piece)
{
    size_t used = 0;
    while (used < n && !reader->request.complete && !reader->request.status) {
        size_t len = n - used < piece ? n - used : piece;
        char *copy = malloc(len);
        memcpy(copy, text + used, len);
        used += http_reader_feed(reader, copy, len);
        free(copy);
    }
    return used;
}

static void pieces_do_not_matter(void **state)
{
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        for (size_t piece = 1; piece <= strlen(good[i]); piece++) {
            struct http_reader reader;
            http_reader_init(&reader, MAX_BODY);
            assert_int_equal(feed(&reader, good[i], strlen(good[i]), piece), strlen(good[i]));
            assert_true(reader.request.complete);
            assert_int_equal(reader.request.status, 0);
            if (reader.request.method == HTTP_POST) {
                assert_int_equal(reader.request.body.len, 5);
                assert_memory_equal(reader.request.body.bytes, "hello", 5);
                assert_true(kvg_str_eq(http_path(&reader.request), "/v1/completions"));
            }
            http_reader_free(&reader);
        }
}

static void a_truncated_request_is_incomplete_and_no_error(void **state)
{
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        for (size_t n = 0; n < strlen(good[i]); n++) {
            struct http_reader reader;
            http_reader_init(&reader, MAX_BODY);
            feed(&reader, good[i], n, n ? n : 1);
            assert_false(reader.request.complete);
            assert_int_equal(reader.request.status, 0);
            http_reader_free(&reader);
        }
}

static void bytes_behind_a_request_are_left(void **state)
{
    static const char two[] = "POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nxyGET /b HTTP/1.1\r\nHost: a\r\n\r\n";
    struct http_reader reader;
    http_reader_init(&reader, MAX_BODY);
    size_t used = http_reader_feed(&reader, two, sizeof two - 1);
    assert_true(reader.request.complete);
    assert_memory_equal(two + used, "GET /b", 6);
    assert_int_equal(http_reader_feed(&reader, two + used, 5), 0); /* until the next one is asked for */
    http_reader_next(&reader);
    used += http_reader_feed(&reader, two + used, sizeof two - 1 - used);
    assert_int_equal(used, sizeof two - 1);
    assert_true(reader.request.complete && kvg_str_eq(http_path(&reader.request), "/b"));
    http_reader_free(&reader);
}

static void headers_are_found_by_any_case_and_the_last_wins(void **state)
{
    static const char text[] = "GET / HTTP/1.1\r\nHost: a\r\nX-Kvgate-Salt: one\r\nx-kvgate-SALT: two\r\nEmpty:\r\n\r\n";
    struct http_reader reader;
    http_reader_init(&reader, MAX_BODY);
    http_reader_feed(&reader, text, sizeof text - 1);
    assert_true(kvg_str_eq(http_header(&reader.request, "x-kvgate-salt"), "two"));
    assert_non_null(http_header(&reader.request, "empty").bytes);
    assert_int_equal(http_header(&reader.request, "empty").len, 0);
    assert_null(http_header(&reader.request, "x-kvgate").bytes);
    http_reader_free(&reader);
}

static const struct refusal {
    const char *text;
    int status;
    const char *why; /* a part of it; NULL: whatever it is */
} refusals[] = {
    {"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
    {"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", 400},
    {"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400},
    {"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400},
    {"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400},
    {"POST / HTTP/1.1\r\nHost: a\r\nContent-Length : 3\r\n\r\nabc", 400},
    {"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1001\r\n\r\n", 413},
    {"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3ea\r\n", 0}, /* 1,002 bytes announced, none sent yet */
    {"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400},
    {"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n", 400, "of a chunk"},
    {"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501},
    {"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", 501},
    {"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", 501},
    {"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked \r\n\r\n1\r\na\r\n", 0},
    {"POST / HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", 415},
    {"POST / HTTP/1.1\r\nHost: a\r\nExpect: 200-ok\r\nContent-Length: 1\r\n\r\n", 417},
    {"GET / HTTP/1.1\r\n\r\n", 400},
    {"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400},
    {"GET / HTTP/1.0\r\nHost: a\r\nhost: b\r\n\r\n", 400},
    {"GET / HTTP/1.1\r\nHost:\r\nX-Partial: ", 0}, /* a name may be empty */
    {"GET / HTTP/2.0\r\n\r\n", 505},
    {"BREW / HTTP/1.1\r\nHost: a\r\n\r\n", 400},
    {"\x16\x03\x01\x02\x00\x01\x00\x01", 400},
    {"GET / HTTP/1.1\r\nHost: a\r\nBad\x01Name: x\r\n\r\n", 400},
    {"CONNECT host:80 HTTP/1.1\r\nHost: a\r\n\r\n", 0},
};

static void malformed_framing_is_refused(void **state)
{
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        struct http_reader reader;
        http_reader_init(&reader, MAX_BODY);
        feed(&reader, refusals[i].text, strlen(refusals[i].text), SIZE_MAX);
        if (reader.request.status != refusals[i].status ||
            (refusals[i].why && (!reader.request.why || !strstr(reader.request.why, refusals[i].why))))
            fail_msg("%s: status %d (%s)", refusals[i].text, reader.request.status, reader.request.why ? reader.request.why : "");
        assert_false(refusals[i].status && reader.request.complete);
        http_reader_free(&reader);
    }
}

static void limits_hold_at_their_edge(void **state)
{
    struct http_reader reader;
    char line[HTTP_MAX_URL + 100], body[MAX_BODY + 100];
    int n;

    for (int over = 0; over <= 1; over++) {
        http_reader_init(&reader, MAX_BODY);
        n = snprintf(line, sizeof line, "GET /%0*d HTTP/1.1\r\nHost: a\r\n\r\n", HTTP_MAX_URL - 1 + over, 0);
        feed(&reader, line, (size_t)n, SIZE_MAX);
        assert_int_equal(reader.request.status, over ? 414 : 0);
        http_reader_free(&reader);

        http_reader_init(&reader, MAX_BODY);
        n = snprintf(body, sizeof body, "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%0*d",
                     MAX_BODY + over, MAX_BODY + over, 0);
        feed(&reader, body, (size_t)n, SIZE_MAX);
        assert_int_equal(reader.request.status, over ? 413 : 0);
        http_reader_free(&reader);
    }
}

static void too_many_or_too_large_headers_are_431(void **state)
{
    struct http_reader reader;
    struct kvg_buf text = {0};

    kvg_buf_puts(&text, "GET / HTTP/1.1\r\nHost: a\r\n");
    for (int i = 0; i <= HTTP_MAX_HEADERS; i++)
        kvg_buf_printf(&text, "h%d: x\r\n", i);
    http_reader_init(&reader, MAX_BODY);
    feed(&reader, text.bytes, text.len, 7);
    assert_int_equal(reader.request.status, 431);
    http_reader_free(&reader);

    text.len = 0;
    kvg_buf_printf(&text, "GET / HTTP/1.1\r\nHost: a\r\nbig: %0*d\r\n\r\n", HTTP_MAX_HEAD, 0);
    http_reader_init(&reader, MAX_BODY);
    feed(&reader, text.bytes, text.len, 1000);
    assert_int_equal(reader.request.status, 431);
    http_reader_free(&reader);
    kvg_buf_free(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_do_not_matter),
        cmocka_unit_test(a_truncated_request_is_incomplete_and_no_error),
        cmocka_unit_test(bytes_behind_a_request_are_left),
        cmocka_unit_test(headers_are_found_by_any_case_and_the_last_wins),
        cmocka_unit_test(malformed_framing_is_refused),
        cmocka_unit_test(limits_hold_at_their_edge),
        cmocka_unit_test(too_many_or_too_large_headers_are_431),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
