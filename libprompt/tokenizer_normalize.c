/* NFC for the families whose tokenizer declares it. Text without a composing character, nearly all text, is not touched. */
#include "libprompt/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

static bool needs_nfc(const struct kvg_tokenizer *tokenizer, const uint8_t *p, const uint8_t *end)
{
    unsigned len;

    for (; p < end; p += len) {
        if (*p < 0xcc) { /* below U+0300 nothing composes */
            len = *p < 0x80 ? 1 : 2;
            continue;
        }
        if (tokenizer->classes[kvg_decode(p, end, &len)] & KVG_COMPOSING)
            return true;
    }
    return false;
}

/* A growing string in the arena. */
struct text_buf {
    struct kvg_arena *arena;
    char *bytes;
    size_t len, cap;
};

static int append(struct text_buf *buf, const void *bytes, size_t n)
{
    if (buf->cap - buf->len < n) {
        size_t cap = (buf->len + n) * 2;
        char *grown = kvg_arena_grow(buf->arena, buf->bytes, buf->cap, cap);
        if (!grown)
            return KVG_NOMEM;
        buf->bytes = grown;
        buf->cap = cap;
    }
    if (n)
        memcpy(buf->bytes + buf->len, bytes, n);
    buf->len += n;
    return 0;
}

/* Appends the NFC of p[0..n), or the bytes as they are when they are not UTF-8. */
static int append_nfc(struct text_buf *buf, const uint8_t *p, size_t n)
{
    utf8proc_uint8_t *nfc = NULL;
    utf8proc_ssize_t len = n ? utf8proc_map(p, (utf8proc_ssize_t)n, &nfc, UTF8PROC_STABLE | UTF8PROC_COMPOSE) : 0;
    int rc;

    if (len == UTF8PROC_ERROR_NOMEM)
        return KVG_NOMEM;
    rc = len < 0 ? append(buf, p, n) : append(buf, nfc, (size_t)len);
    free(nfc);
    return rc;
}

/* A FROZEN character is copied as it is, and the parts around it are normalized apart. */
int kvg_nfc(const struct kvg_tokenizer *tokenizer, struct kvg_str in, struct kvg_arena *arena, struct kvg_str *out)
{
    const uint8_t *start = (const uint8_t *)in.bytes, *p = start, *end = start + in.len;
    struct text_buf buf = {.arena = arena};
    unsigned len;

    *out = in;
    if (!needs_nfc(tokenizer, p, end))
        return 0;
    for (; p < end; p += len) {
        if (!(tokenizer->classes[kvg_decode(p, end, &len)] & KVG_FROZEN))
            continue;
        if (append_nfc(&buf, start, (size_t)(p - start)) || append(&buf, p, len))
            return KVG_NOMEM;
        start = p + len;
    }
    if (append_nfc(&buf, start, (size_t)(end - start)))
        return KVG_NOMEM;
    *out = (struct kvg_str){buf.bytes, buf.len};
    return 0;
}
