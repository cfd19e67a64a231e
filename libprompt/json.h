/* JSON (RFC 8259) for hostile request bodies, and a writer for replies.
 *
 * Rules: UTF-8 only, overlong forms, surrogate code points and bytes over U+10FFFF are refused; a lone surrogate escape
 * (\ud800) is refused; NaN and Infinity are refused; of duplicate keys the last value wins, in the
 * place of the first (as Python's json does); depth is limited; nothing but white space may follow the value. Numbers keep their
 * source text.
 *
 * Strings without escapes point into the source, which has to outlive the tree; others live in the arena.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "libprompt/arena.h"
#include "libprompt/error.h"

enum kvg_json_type {
    KVG_JSON_NULL,
    KVG_JSON_FALSE,
    KVG_JSON_TRUE,
    KVG_JSON_NUMBER,
    KVG_JSON_STRING,
    KVG_JSON_ARRAY,
    KVG_JSON_OBJECT
};

struct kvg_str {
    const char *bytes; /* not NUL-terminated */
    size_t len;
};

struct kvg_json {
    enum kvg_json_type type;
    uint32_t n;         /* elements of an array, members of an object after duplicates are resolved */
    size_t start, end;  /* byte range of the value in the source */
    struct kvg_str key; /* of an object's member */
    union {
        struct kvg_str str;     /* STRING: decoded bytes; NUMBER: source text */
        struct kvg_json *items; /* ARRAY and OBJECT: n consecutive values, in source order */
    };
};

struct kvg_json_limits {
    uint32_t depth;   /* 0 = 256 */
    size_t values;    /* 0 = 4,000,000: values in one document */
    bool unique_keys; /* a key that occurs twice in one object is KVG_INVALID, naming it */
};

/* Parses text[0..len). 0 and *out (in the arena), or a kvg_status with err->position set. */
int kvg_json_parse(struct kvg_arena *arena, const char *text, size_t len, const struct kvg_json_limits *limits,
                   struct kvg_json **out, struct kvg_error *err);

/* The member `key` of an object, or NULL (also when `object` is NULL or no object). */
struct kvg_json *kvg_json_get(const struct kvg_json *object, const char *key);

/* The value of a NUMBER written as an integer (no point, no exponent) that fits int64; false for anything else. */
bool kvg_json_int(const struct kvg_json *value, int64_t *out);
/* The finite double of a NUMBER; false for other types and for magnitudes over DBL_MAX. */
bool kvg_json_double(const struct kvg_json *value, double *out);
bool kvg_str_eq(struct kvg_str s, const char *literal);

/* A growing byte buffer on malloc. On failed allocation `failed` is set and later writes do nothing. */
struct kvg_buf {
    char *bytes;
    size_t len, cap;
    bool failed;
};
void kvg_buf_free(struct kvg_buf *buf);
void kvg_buf_add(struct kvg_buf *buf, const char *bytes, size_t n);
void kvg_buf_puts(struct kvg_buf *buf, const char *text);
void kvg_buf_printf(struct kvg_buf *buf, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Adds a JSON string with its quotes. Bytes that are not valid UTF-8 become U+FFFD, so that a reply is always valid JSON. */
void kvg_buf_json_string(struct kvg_buf *buf, const char *bytes, size_t n);
