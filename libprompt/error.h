/* What a libprompt call reports when it fails. The caller owns the struct; a call writes it only when it fails. */
#pragma once
#include <stddef.h>

enum kvg_status {
    KVG_OK = 0,
    KVG_INVALID = -1,     /* the input is wrong: an HTTP 400 whose message names the field */
    KVG_UNSUPPORTED = -2, /* a known field whose meaning is not supported: an HTTP 400 */
    KVG_RENDER = -3,      /* well-formed input that the chat template refuses or cannot render */
    KVG_LIMIT = -4,       /* a stated limit (depth, bytes, fuel) was exceeded: an HTTP 400 or 413 */
    KVG_NOMEM = -5,
    KVG_FILE = -6, /* a model file that cannot be read or does not validate */
};

struct kvg_error {
    int code;            /* enum kvg_status */
    size_t position;     /* byte offset in the input where that is known, else (size_t)-1 */
    char param[96];      /* the request field at fault, e.g. "messages[1].content[0].type"; "" when there is none */
    char message[320];   /* one line, no trailing newline, valid UTF-8 */
};

/* Fills *err (which may be NULL) and returns code, so that a caller can write `return kvg_fail(err, KVG_INVALID, ...)`. */
int kvg_fail(struct kvg_error *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
