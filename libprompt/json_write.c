#include "libprompt/json.h"
#include "libprompt/utf8.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void kvg_buf_free(struct kvg_buf *buf)
{
    free(buf->bytes);
    memset(buf, 0, sizeof *buf);
}

/* Room for n more bytes and a NUL. */
static bool reserve(struct kvg_buf *buf, size_t n)
{
    if (buf->failed)
        return false;
    if (n < buf->cap - buf->len)
        return true;
    size_t need, cap = buf->cap ? buf->cap : 256;
    if (__builtin_add_overflow(buf->len, n, &need) || need >= SIZE_MAX / 2)
        goto fail;
    while (cap <= need)
        cap *= 2;
    char *bytes = realloc(buf->bytes, cap);
    if (!bytes)
        goto fail;
    buf->bytes = bytes;
    buf->cap = cap;
    return true;
fail:
    buf->failed = true;
    return false;
}

void kvg_buf_add(struct kvg_buf *buf, const char *bytes, size_t n)
{
    if (!reserve(buf, n))
        return;
    if (n)
        memcpy(buf->bytes + buf->len, bytes, n);
    buf->len += n;
    buf->bytes[buf->len] = '\0';
}

void kvg_buf_puts(struct kvg_buf *buf, const char *text)
{
    kvg_buf_add(buf, text, strlen(text));
}

void kvg_buf_printf(struct kvg_buf *buf, const char *format, ...)
{
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    size_t room = buf->failed ? 0 : buf->cap - buf->len;
    int n = vsnprintf(room ? buf->bytes + buf->len : NULL, room, format, args);
    if (n < 0)
        buf->failed = true;
    else if ((size_t)n >= room && reserve(buf, (size_t)n))
        vsnprintf(buf->bytes + buf->len, (size_t)n + 1, format, again);
    if (!buf->failed)
        buf->len += (size_t)n;
    va_end(again);
    va_end(args);
}

/* The escape of byte c, or NULL when it stands for itself. */
static const char *escape_of(unsigned char c, char scratch[8])
{
    switch (c) {
    case '"':
        return "\\\"";
    case '\\':
        return "\\\\";
    case '\n':
        return "\\n";
    case '\r':
        return "\\r";
    case '\t':
        return "\\t";
    case '\b':
        return "\\b";
    case '\f':
        return "\\f";
    }
    if (c >= 0x20 && c != 0x7f)
        return NULL;
    snprintf(scratch, 8, "\\u%04x", c);
    return scratch;
}

void kvg_buf_json_string(struct kvg_buf *buf, const char *bytes, size_t n)
{
    const unsigned char *p = (const unsigned char *)bytes;
    size_t plain = 0, i = 0; /* bytes[plain..i) are copied as they are */
    if (!reserve(buf, n + 2 > n ? n + 2 : n))
        return;
    kvg_buf_add(buf, "\"", 1);
    while (i < n) {
        unsigned len = kvg_utf8_len(p + i, n - i);
        char scratch[8];
        const char *escape = len == 0 ? "\xef\xbf\xbd" : len == 1 ? escape_of(p[i], scratch) : NULL;
        if (escape) {
            kvg_buf_add(buf, bytes + plain, i - plain);
            kvg_buf_puts(buf, escape);
            plain = i + 1;
        }
        i += len ? len : 1;
    }
    kvg_buf_add(buf, bytes + plain, n - plain);
    kvg_buf_add(buf, "\"", 1);
}
