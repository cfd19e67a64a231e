#include "gpu-worker/server/http.h"
#include <string.h>
#include <strings.h>

/* http-parser stops as soon as a callback returns -1 (1 from on_headers_complete would only skip the body). */
static int refuse(struct http_reader *reader, int status, const char *why)
{
    reader->request.status = status;
    reader->request.why = why;
    return -1;
}

static struct http_reader *owner(http_parser *parser)
{
    return parser->data;
}

static int add_head(struct http_reader *reader, const char *at, size_t len)
{
    reader->head_bytes += len;
    if (reader->head_bytes > HTTP_MAX_HEAD)
        return refuse(reader, 431, "the request's headers are larger than 32768 bytes");
    kvg_buf_add(&reader->request.head, at, len);
    return reader->request.head.failed ? refuse(reader, 500, "out of memory") : 0;
}

static int on_url(http_parser *parser, const char *at, size_t len)
{
    struct http_reader *reader = owner(parser);
    if (reader->request.url_len + len > HTTP_MAX_URL)
        return refuse(reader, 414, "the URL is longer than 8192 bytes");
    reader->request.url_len += (uint32_t)len;
    return add_head(reader, at, len);
}

static int on_header_field(http_parser *parser, const char *at, size_t len)
{
    struct http_reader *reader = owner(parser);
    struct http_request *request = &reader->request;

    if (request->headers_done) { /* a trailer: counted, not kept */
        reader->head_bytes += len;
        return reader->head_bytes > HTTP_MAX_HEAD ? refuse(reader, 431, "the request's trailers are too large") : 0;
    }
    if (reader->in_value || request->n_headers == 0) {
        if (request->n_headers == HTTP_MAX_HEADERS)
            return refuse(reader, 431, "the request has more than 100 headers");
        request->headers[request->n_headers++] = (struct http_header){.name = (uint32_t)request->head.len};
        reader->in_value = false;
    }
    if (memchr(at, ' ', len)) /* "Content-Length : 3" is how two parsers come to disagree */
        return refuse(reader, 400, "a header name holds a space");
    request->headers[request->n_headers - 1].name_len += (uint32_t)len;
    return add_head(reader, at, len);
}

static int on_header_value(http_parser *parser, const char *at, size_t len)
{
    struct http_reader *reader = owner(parser);
    struct http_request *request = &reader->request;

    if (request->headers_done) {
        reader->head_bytes += len;
        return reader->head_bytes > HTTP_MAX_HEAD ? refuse(reader, 431, "the request's trailers are too large") : 0;
    }
    struct http_header *header = &request->headers[request->n_headers - 1];
    if (!reader->in_value) {
        header->value = (uint32_t)request->head.len;
        reader->in_value = true;
    }
    header->value_len += (uint32_t)len;
    return add_head(reader, at, len);
}

static uint32_t count_headers(const struct http_request *request, const char *name)
{
    size_t len = strlen(name);
    uint32_t n = 0;

    for (uint32_t i = 0; i < request->n_headers; i++) {
        const struct http_header *header = &request->headers[i];
        n += header->name_len == len && strncasecmp(request->head.bytes + header->name, name, len) == 0;
    }
    return n;
}

/* Whether every header of that name, if there is one, has this one value. */
static bool is_only(const struct http_request *request, const char *name, const char *value)
{
    size_t name_len = strlen(name), len = strlen(value);

    for (uint32_t i = 0; i < request->n_headers; i++) {
        const struct http_header *header = &request->headers[i];
        const char *at = request->head.bytes + header->value;
        size_t n = header->value_len;
        if (header->name_len != name_len || strncasecmp(request->head.bytes + header->name, name, name_len) != 0)
            continue;
        while (n && (at[n - 1] == ' ' || at[n - 1] == '\t'))
            n--;
        if (n != len || strncasecmp(at, value, len) != 0)
            return false;
    }
    return true;
}

static int on_headers_complete(http_parser *parser)
{
    struct http_reader *reader = owner(parser);
    struct http_request *request = &reader->request;

    request->headers_done = true;
    request->method = parser->method;
    request->http10 = parser->http_major < 1 || (parser->http_major == 1 && parser->http_minor == 0);
    request->keep_alive = http_should_keep_alive(parser);
    if (parser->http_major > 1)
        return refuse(reader, 505, "only HTTP/1.0 and HTTP/1.1 are spoken here");
    if (count_headers(request, "host") > 1 || (!request->http10 && count_headers(request, "host") == 0))
        return refuse(reader, 400, "an HTTP/1.1 request has one Host header");
    if (!is_only(request, "transfer-encoding", "chunked"))
        return refuse(reader, 501, "the only transfer encoding that is understood is chunked");
    if (!is_only(request, "content-encoding", "identity"))
        return refuse(reader, 415, "a compressed request body is not understood: send it without Content-Encoding");
    struct kvg_str expect = http_header(request, "expect");
    request->expect_continue = !request->http10 && expect.len == 12 && strncasecmp(expect.bytes, "100-continue", 12) == 0;
    if (expect.bytes && !request->expect_continue && !request->http10)
        return refuse(reader, 417, "the only expectation that can be met is 100-continue");
    if ((parser->flags & F_CONTENTLENGTH) && parser->content_length > reader->max_body)
        return refuse(reader, 413, "the request body is too large");
    return 0;
}

static int on_body(http_parser *parser, const char *at, size_t len)
{
    struct http_reader *reader = owner(parser);
    if (len > reader->max_body - reader->request.body.len)
        return refuse(reader, 413, "the request body is too large");
    kvg_buf_add(&reader->request.body, at, len);
    return reader->request.body.failed ? refuse(reader, 500, "out of memory") : 0;
}

static int on_message_complete(http_parser *parser)
{
    owner(parser)->request.complete = true;
    http_parser_pause(parser, 1);
    return 0;
}

static const http_parser_settings settings = {
    .on_url = on_url,
    .on_header_field = on_header_field,
    .on_header_value = on_header_value,
    .on_headers_complete = on_headers_complete,
    .on_body = on_body,
    .on_message_complete = on_message_complete,
};

void http_reader_init(struct http_reader *reader, size_t max_body)
{
    memset(reader, 0, sizeof *reader);
    reader->max_body = max_body;
    http_reader_next(reader);
}

void http_reader_free(struct http_reader *reader)
{
    kvg_buf_free(&reader->request.head);
    kvg_buf_free(&reader->request.body);
}

void http_reader_next(struct http_reader *reader)
{
    struct kvg_buf head = reader->request.head;

    kvg_buf_free(&reader->request.body);
    memset(&reader->request, 0, sizeof reader->request);
    head.len = 0; /* its memory serves the next request */
    head.failed = false;
    reader->request.head = head;
    reader->head_bytes = 0;
    reader->in_value = false;
    http_parser_init(&reader->parser, HTTP_REQUEST);
    reader->parser.data = reader;
}

static int parser_fault(const http_parser *parser, const char **why)
{
    enum http_errno fault = HTTP_PARSER_ERRNO(parser);
    *why = http_errno_description(fault);
    switch (fault) {
    case HPE_HEADER_OVERFLOW:
        return 431;
    case HPE_INVALID_VERSION:
        return 505;
    case HPE_INVALID_TRANSFER_ENCODING:
        return 501;
    case HPE_INVALID_CONTENT_LENGTH: /* of a chunk, too */
        *why = "a length, of the body or of a chunk, is no number or is too large";
        return 400;
    case HPE_UNEXPECTED_CONTENT_LENGTH:
        *why = "a request may have one Content-Length, and none beside Transfer-Encoding";
        return 400;
    default:
        return 400;
    }
}

size_t http_reader_feed(struct http_reader *reader, const char *bytes, size_t n)
{
    struct http_request *request = &reader->request;
    if (n == 0 || request->complete || request->status)
        return 0;
    size_t used = http_parser_execute(&reader->parser, &settings, bytes, n);
    for (size_t i = 0; i < used && !request->started; i++) /* empty lines before a request do not start one */
        request->started = bytes[i] != '\r' && bytes[i] != '\n';
    if (request->complete || request->status)
        return used;
    if (HTTP_PARSER_ERRNO(&reader->parser) != HPE_OK)
        request->status = parser_fault(&reader->parser, &request->why);
    else if (reader->parser.upgrade || used < n)
        refuse(reader, 400, "upgrades and tunnels are not supported");
    return used;
}

struct kvg_str http_path(const struct http_request *request)
{
    const char *url = request->head.bytes;
    struct http_parser_url parts;
    struct kvg_str path = {url, request->url_len};

    http_parser_url_init(&parts);
    if (!url || http_parser_parse_url(url, request->url_len, request->method == HTTP_CONNECT, &parts) != 0)
        return path;
    if (parts.field_set & (1 << UF_PATH))
        return (struct kvg_str){url + parts.field_data[UF_PATH].off, parts.field_data[UF_PATH].len};
    return (struct kvg_str){"/", 1};
}

struct kvg_str http_header(const struct http_request *request, const char *name)
{
    size_t len = strlen(name);
    for (uint32_t i = request->n_headers; i-- > 0;) {
        const struct http_header *header = &request->headers[i];
        if (header->name_len == len && strncasecmp(request->head.bytes + header->name, name, len) == 0)
            return (struct kvg_str){header->value_len ? request->head.bytes + header->value : "", header->value_len};
    }
    return (struct kvg_str){NULL, 0};
}
