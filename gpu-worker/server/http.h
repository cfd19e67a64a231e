/* One HTTP/1.1 request out of a stream of bytes, on http-parser, with limits. No sockets here.
 *
 *   feed bytes -> (more needed) | complete | refused with a status
 *
 * Bytes behind a complete request are not consumed: they belong to the next one (pipelining).
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <http_parser.h>
#include "libprompt/json.h"

enum {
    HTTP_MAX_HEAD = 32 << 10, /* bytes of request line and headers, trailers included */
    HTTP_MAX_URL = 8 << 10,
    HTTP_MAX_HEADERS = 100
};

struct http_header {
    uint32_t name, name_len, value, value_len; /* offsets in request.head */
};

struct http_request {
    enum http_method method;
    struct kvg_buf head; /* the URL, then names and values */
    uint32_t url_len, n_headers;
    struct http_header headers[HTTP_MAX_HEADERS];
    struct kvg_buf body;
    bool keep_alive;      /* what the client asks for */
    bool http10;          /* no chunked reply */
    bool expect_continue; /* waits for "100 Continue" before it sends the body */
    bool started;         /* a byte of it was seen */
    bool headers_done, complete;
    int status; /* 0, or the status with which it has to be refused; then the connection cannot go on */
    const char *why;
};

struct http_reader {
    http_parser parser;
    struct http_request request;
    size_t max_body, head_bytes;
    bool in_value; /* the last header callback was for a value */
};

void http_reader_init(struct http_reader *reader, size_t max_body);
void http_reader_free(struct http_reader *reader);
/* Forgets the request and waits for the next one. */
void http_reader_next(struct http_reader *reader);
/* Returns how many of the n bytes it consumed; then look at request.complete and request.status. */
size_t http_reader_feed(struct http_reader *reader, const char *bytes, size_t n);

/* The path without query, and without scheme and host where the URL is absolute. */
struct kvg_str http_path(const struct http_request *request);
/* The value of a header by its lower-case name; bytes NULL when it is absent, the last one where there are several. */
struct kvg_str http_header(const struct http_request *request, const char *name);
