/* One pass over the text, no recursion: open containers and finished values lie on one value stack.
 *
 *   [1, {"a": 2, "b"        stack:  ARRAY  1  OBJECT  2(key a)      (a container's str.len holds its parent's index)
 *
 * A closing bracket moves the container's children from the top of the stack into the arena, where they are consecutive.
 */
#include "libprompt/json.h"
#include "libprompt/utf8.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { DEFAULT_DEPTH = 256, DEFAULT_VALUES = 4000000, STACK_INLINE = 48, SMALL_OBJECT = 12 };
#define NO_PARENT SIZE_MAX

struct parser {
    struct kvg_arena *arena;
    struct kvg_error *err;
    const char *text;
    size_t len, pos;
    size_t max_values, n_values;
    uint32_t max_depth, depth;
    bool unique_keys;
    struct kvg_json *stack; /* `local`, or malloced once that is full */
    size_t top, cap;
    size_t parent; /* index of the innermost open container */
    struct kvg_json local[STACK_INLINE];
};

static int fail_at(struct parser *p, size_t position, int code, const char *what)
{
    kvg_fail(p->err, code, "%s at byte %zu", what, position);
    if (p->err)
        p->err->position = position;
    return code;
}

/* The text at `pos` is not what the grammar asks for. */
static int fail_token(struct parser *p, const char *expected)
{
    if (p->pos >= p->len)
        return fail_at(p, p->len, KVG_INVALID, "JSON ends too early");
    unsigned char c = (unsigned char)p->text[p->pos];
    if (c > 0x20 && c < 0x7f)
        kvg_fail(p->err, KVG_INVALID, "JSON: expected %s but found '%c' at byte %zu", expected, c, p->pos);
    else
        kvg_fail(p->err, KVG_INVALID, "JSON: expected %s but found byte 0x%02x at byte %zu", expected, c, p->pos);
    if (p->err)
        p->err->position = p->pos;
    return KVG_INVALID;
}

static int no_memory(struct parser *p)
{
    return fail_at(p, p->pos, KVG_NOMEM, "JSON: out of memory");
}

static void skip_space(struct parser *p)
{
    while (p->pos < p->len) {
        char c = p->text[p->pos];
        if (c != ' ' && c != '\n' && c != '\t' && c != '\r')
            return;
        p->pos++;
    }
}

static int grow_stack(struct parser *p)
{
    size_t cap = p->cap * 2;
    struct kvg_json *stack = p->stack == p->local ? malloc(cap * sizeof *stack) : realloc(p->stack, cap * sizeof *stack);
    if (!stack)
        return no_memory(p);
    if (p->stack == p->local)
        memcpy(stack, p->local, sizeof p->local);
    p->stack = stack;
    p->cap = cap;
    return 0;
}

/* A new value on the stack, for the member `key` (empty within an array). */
static int push(struct parser *p, enum kvg_json_type type, size_t start, struct kvg_str key, struct kvg_json **out)
{
    if (p->n_values == p->max_values) {
        kvg_fail(p->err, KVG_LIMIT, "JSON has more than %zu values", p->max_values);
        if (p->err)
            p->err->position = start;
        return KVG_LIMIT;
    }
    if (p->top == p->cap && grow_stack(p) < 0)
        return KVG_NOMEM;
    p->n_values++;
    struct kvg_json *value = &p->stack[p->top++];
    *value = (struct kvg_json){.type = type, .start = start, .end = p->pos, .key = key};
    *out = value;
    return 0;
}

/* ---- strings ---- */

/* Index of the first byte at or after i that is not plain: a quote, a backslash, a control byte or a byte over 0x7f. */
static size_t skip_plain(const char *text, size_t i, size_t len)
{
#ifdef __SSE2__
    for (; i + 16 <= len; i += 16) {
        __m128i v = _mm_loadu_si128((const __m128i *)(text + i));
        /* signed compare: bytes over 0x7f are negative, hence below 0x20 too */
        __m128i odd = _mm_or_si128(_mm_cmplt_epi8(v, _mm_set1_epi8(0x20)),
                                   _mm_or_si128(_mm_cmpeq_epi8(v, _mm_set1_epi8('"')), _mm_cmpeq_epi8(v, _mm_set1_epi8('\\'))));
        unsigned mask = (unsigned)_mm_movemask_epi8(odd);
        if (mask)
            return i + (unsigned)__builtin_ctz(mask);
    }
#endif
    for (; i < len; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c < 0x20 || c > 0x7f || c == '"' || c == '\\')
            break;
    }
    return i;
}

static int hex4(const char *p)
{
    int value = 0;
    for (int i = 0; i < 4; i++) {
        char c = p[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0)
            return -1;
        value = value * 16 + digit;
    }
    return value;
}

/* The code point of the \uXXXX at text[i], a surrogate pair included; *used is its bytes of source. -1: malformed,
 * -2: a surrogate without its other half. */
static int32_t unicode_escape(const char *text, size_t i, size_t len, unsigned *used)
{
    int high = i + 6 <= len ? hex4(text + i + 2) : -1;
    if (high < 0)
        return -1;
    *used = 6;
    if (high < 0xd800 || high > 0xdfff)
        return high;
    if (high > 0xdbff || i + 12 > len || text[i + 6] != '\\' || text[i + 7] != 'u')
        return -2;
    int low = hex4(text + i + 8);
    if (low < 0)
        return -1;
    if (low < 0xdc00 || low > 0xdfff)
        return -2;
    *used = 12;
    return 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
}

static int check_escape(struct parser *p, size_t i, unsigned *used)
{
    if (i + 1 >= p->len)
        return fail_at(p, p->len, KVG_INVALID, "JSON ends too early");
    *used = 2;
    if (p->text[i + 1] != 'u')
        return p->text[i + 1] && strchr("\"\\/bfnrt", p->text[i + 1]) ? 0 : fail_at(p, i, KVG_INVALID, "JSON: unknown escape");
    int32_t c = unicode_escape(p->text, i, p->len, used);
    if (c == -2)
        return fail_at(p, i, KVG_INVALID, "JSON: surrogate escape without its other half");
    return c < 0 ? fail_at(p, i, KVG_INVALID, "JSON: malformed \\u escape") : 0;
}

/* Decodes raw[0..n), whose escapes have been checked; the result is never longer than the source. */
static size_t unescape(const char *raw, size_t n, char *out)
{
    size_t w = 0;
    for (size_t i = 0; i < n;) {
        const char *slash = memchr(raw + i, '\\', n - i);
        size_t plain = (slash ? (size_t)(slash - raw) : n) - i;
        memcpy(out + w, raw + i, plain);
        w += plain;
        i += plain;
        if (!slash)
            break;
        unsigned used = 2;
        switch (raw[i + 1]) {
        case 'u':
            w += kvg_utf8_encode((uint32_t)unicode_escape(raw, i, n, &used), out + w);
            break;
        case 'b':
            out[w++] = '\b';
            break;
        case 'f':
            out[w++] = '\f';
            break;
        case 'n':
            out[w++] = '\n';
            break;
        case 'r':
            out[w++] = '\r';
            break;
        case 't':
            out[w++] = '\t';
            break;
        default:
            out[w++] = raw[i + 1];
        }
        i += used;
    }
    return w;
}

/* The string whose opening quote is at `pos`; `pos` ends behind its closing one. */
static int parse_string(struct parser *p, struct kvg_str *out)
{
    size_t start = p->pos + 1, i = start;
    bool escaped = false;
    for (;;) {
        i = skip_plain(p->text, i, p->len);
        if (i >= p->len)
            return fail_at(p, p->len, KVG_INVALID, "JSON ends too early");
        unsigned char c = (unsigned char)p->text[i];
        if (c == '"')
            break;
        unsigned used;
        if (c == '\\') {
            escaped = true;
            int rc = check_escape(p, i, &used);
            if (rc < 0)
                return rc;
        } else if (c < 0x20) {
            return fail_at(p, i, KVG_INVALID, "JSON: unescaped control character in a string");
        } else if (!(used = kvg_utf8_len((const unsigned char *)p->text + i, p->len - i))) {
            return fail_at(p, i, KVG_INVALID, "JSON: invalid UTF-8");
        }
        i += used;
    }
    *out = (struct kvg_str){p->text + start, i - start};
    p->pos = i + 1;
    if (escaped) {
        char *bytes = kvg_arena_alloc(p->arena, i - start);
        if (!bytes)
            return no_memory(p);
        *out = (struct kvg_str){bytes, unescape(p->text + start, i - start, bytes)};
    }
    return 0;
}

/* ---- numbers ---- */

static bool skip_digits(struct parser *p)
{
    size_t start = p->pos;
    while (p->pos < p->len && p->text[p->pos] >= '0' && p->text[p->pos] <= '9')
        p->pos++;
    return p->pos > start;
}

static int parse_number(struct parser *p, struct kvg_str key)
{
    size_t start = p->pos;
    if (p->text[p->pos] == '-')
        p->pos++;
    if (p->pos < p->len && p->text[p->pos] == '0')
        p->pos++;
    else if (!skip_digits(p))
        return fail_token(p, "a digit");
    if (p->pos < p->len && p->text[p->pos] == '.') {
        p->pos++;
        if (!skip_digits(p))
            return fail_token(p, "a digit");
    }
    if (p->pos < p->len && (p->text[p->pos] == 'e' || p->text[p->pos] == 'E')) {
        p->pos++;
        if (p->pos < p->len && (p->text[p->pos] == '+' || p->text[p->pos] == '-'))
            p->pos++;
        if (!skip_digits(p))
            return fail_token(p, "a digit");
    }
    struct kvg_json *value;
    int rc = push(p, KVG_JSON_NUMBER, start, key, &value);
    if (rc == 0)
        value->str = (struct kvg_str){p->text + start, p->pos - start};
    return rc;
}

/* ---- containers ---- */

static bool same_key(const struct kvg_json *a, const struct kvg_json *b)
{
    return a->key.len == b->key.len && memcmp(a->key.bytes, b->key.bytes, a->key.len) == 0;
}

/* A later duplicate gives its value to the first member of that key, as a Python dict does, where duplicates are allowed. */
static int replace_member(struct parser *p, struct kvg_json *first, const struct kvg_json *later)
{
    if (p->unique_keys) {
        int shown = (int)(later->key.len < 80 ? later->key.len : 80);
        kvg_fail(p->err, KVG_INVALID, "the key \"%.*s\" occurs twice in one object at byte %zu", shown, later->key.bytes,
                 later->start);
        if (p->err)
            p->err->position = later->start;
        return KVG_INVALID;
    }
    *first = *later;
    return 0;
}

static int unique_small(struct parser *p, struct kvg_json *members, uint32_t n, uint32_t *out)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t j = 0;
        while (j < kept && !same_key(&members[j], &members[i]))
            j++;
        if (j < kept) {
            int rc = replace_member(p, &members[j], &members[i]);
            if (rc < 0)
                return rc;
        } else if (kept++ != i) {
            members[kept - 1] = members[i];
        }
    }
    *out = kept;
    return 0;
}

/* The same with an open-addressed table of member numbers; the seed keeps a client from choosing collisions. */
static int unique_large(struct parser *p, struct kvg_json *members, uint32_t n, uint64_t seed, uint32_t *out)
{
    size_t size = 64;
    while (size < (size_t)n * 2)
        size *= 2;
    uint32_t *table = calloc(size, sizeof *table); /* member number + 1 */
    if (!table)
        return no_memory(p);
    uint32_t kept = 0;
    int rc = 0;
    for (uint32_t i = 0; i < n; i++) {
        size_t slot = XXH3_64bits_withSeed(members[i].key.bytes, members[i].key.len, seed) & (size - 1);
        while (table[slot] && !same_key(&members[table[slot] - 1], &members[i]))
            slot = (slot + 1) & (size - 1);
        if (table[slot]) {
            if ((rc = replace_member(p, &members[table[slot] - 1], &members[i])) < 0)
                break;
            continue;
        }
        members[kept++] = members[i];
        table[slot] = kept;
    }
    free(table);
    *out = kept;
    return rc;
}

static int unique_members(struct parser *p, struct kvg_json *members, uint32_t *n)
{
    if (*n <= SMALL_OBJECT)
        return unique_small(p, members, *n, n);
    uint64_t seed = (uint64_t)(uintptr_t)p->arena ^ (uint64_t)(uintptr_t)p->text << 16;
    return unique_large(p, members, *n, seed, n);
}

static int open_container(struct parser *p, enum kvg_json_type type, struct kvg_str key)
{
    if (p->depth == p->max_depth) {
        kvg_fail(p->err, KVG_LIMIT, "JSON is nested deeper than %u levels at byte %zu", p->max_depth, p->pos);
        if (p->err)
            p->err->position = p->pos;
        return KVG_LIMIT;
    }
    struct kvg_json *value;
    int rc = push(p, type, p->pos, key, &value);
    if (rc < 0)
        return rc;
    value->str.len = p->parent;
    p->parent = p->top - 1;
    p->depth++;
    p->pos++;
    return 0;
}

static int close_container(struct parser *p)
{
    struct kvg_json *container = &p->stack[p->parent], *children = container + 1;
    uint32_t n = (uint32_t)(p->top - p->parent - 1);
    size_t outer = container->str.len;
    if (container->type == KVG_JSON_OBJECT && n > 1) {
        int rc = unique_members(p, children, &n);
        if (rc < 0)
            return rc;
    }
    struct kvg_json *items = kvg_arena_alloc(p->arena, n * sizeof *items);
    if (!items)
        return no_memory(p);
    memcpy(items, children, n * sizeof *items);
    p->pos++;
    container->n = n;
    container->items = items;
    container->end = p->pos;
    p->top = p->parent + 1;
    p->parent = outer;
    p->depth--;
    return 0;
}

/* ---- the document ---- */

static int parse_word(struct parser *p, const char *word, size_t n, enum kvg_json_type type, struct kvg_str key)
{
    size_t start = p->pos;
    for (size_t i = 0; i < n; i++, p->pos++)
        if (p->pos >= p->len || p->text[p->pos] != word[i])
            return fail_token(p, word);
    struct kvg_json *value;
    return push(p, type, start, key, &value);
}

/* A scalar, or the opening of a container. */
static int parse_value(struct parser *p, struct kvg_str key)
{
    if (p->pos >= p->len)
        return fail_token(p, "a value");
    size_t start = p->pos;
    switch (p->text[p->pos]) {
    case '{':
        return open_container(p, KVG_JSON_OBJECT, key);
    case '[':
        return open_container(p, KVG_JSON_ARRAY, key);
    case '"': {
        struct kvg_str str;
        struct kvg_json *value;
        int rc = parse_string(p, &str);
        if (rc == 0 && (rc = push(p, KVG_JSON_STRING, start, key, &value)) == 0)
            value->str = str;
        return rc;
    }
    case 't':
        return parse_word(p, "true", 4, KVG_JSON_TRUE, key);
    case 'f':
        return parse_word(p, "false", 5, KVG_JSON_FALSE, key);
    case 'n':
        return parse_word(p, "null", 4, KVG_JSON_NULL, key);
    case '-':
    case '0' ... '9':
        return parse_number(p, key);
    default:
        return fail_token(p, "a value");
    }
}

/* "key" : value */
static int parse_member(struct parser *p)
{
    if (p->pos >= p->len || p->text[p->pos] != '"')
        return fail_token(p, "a member name");
    struct kvg_str key;
    int rc = parse_string(p, &key);
    if (rc < 0)
        return rc;
    skip_space(p);
    if (p->pos >= p->len || p->text[p->pos] != ':')
        return fail_token(p, "':'");
    p->pos++;
    skip_space(p);
    return parse_value(p, key);
}

/* Inside the container `parent`: its next child, or its end. */
static int parse_next(struct parser *p)
{
    bool object = p->stack[p->parent].type == KVG_JSON_OBJECT, first = p->top == p->parent + 1;
    skip_space(p);
    if (p->pos < p->len && p->text[p->pos] == (object ? '}' : ']'))
        return close_container(p);
    if (!first) {
        if (p->pos >= p->len || p->text[p->pos] != ',')
            return fail_token(p, object ? "',' or '}'" : "',' or ']'");
        p->pos++;
        skip_space(p);
    }
    return object ? parse_member(p) : parse_value(p, (struct kvg_str){0});
}

static int parse_document(struct parser *p)
{
    skip_space(p);
    int rc = parse_value(p, (struct kvg_str){0});
    while (rc == 0 && p->parent != NO_PARENT)
        rc = parse_next(p);
    if (rc < 0)
        return rc;
    skip_space(p);
    return p->pos < p->len ? fail_token(p, "the end of the JSON text") : 0;
}

int kvg_json_parse(struct kvg_arena *arena, const char *text, size_t len, const struct kvg_json_limits *limits,
                   struct kvg_json **out, struct kvg_error *err)
{
    struct parser p;
    p.arena = arena;
    p.err = err;
    p.text = text;
    p.len = len;
    p.pos = 0;
    p.max_depth = limits && limits->depth ? limits->depth : DEFAULT_DEPTH;
    p.max_values = limits && limits->values ? limits->values : DEFAULT_VALUES;
    p.unique_keys = limits && limits->unique_keys;
    p.n_values = p.top = 0;
    p.depth = 0;
    p.stack = p.local;
    p.cap = STACK_INLINE;
    p.parent = NO_PARENT;
    int rc = parse_document(&p);
    if (rc == 0) {
        struct kvg_json *root = kvg_arena_alloc(arena, sizeof *root);
        if (root)
            *out = memcpy(root, p.stack, sizeof *root);
        else
            rc = no_memory(&p);
    }
    if (p.stack != p.local)
        free(p.stack);
    return rc;
}

/* ---- reading values ---- */

struct kvg_json *kvg_json_get(const struct kvg_json *object, const char *key)
{
    if (!object || object->type != KVG_JSON_OBJECT)
        return NULL;
    size_t len = strlen(key);
    for (uint32_t i = 0; i < object->n; i++)
        if (object->items[i].key.len == len && memcmp(object->items[i].key.bytes, key, len) == 0)
            return &object->items[i];
    return NULL;
}

bool kvg_json_int(const struct kvg_json *value, int64_t *out)
{
    if (!value || value->type != KVG_JSON_NUMBER)
        return false;
    const char *p = value->str.bytes, *end = p + value->str.len;
    bool negative = *p == '-';
    if (negative)
        p++;
    int64_t result = 0;
    for (; p < end; p++) {
        if (*p < '0' || *p > '9')
            return false;
        int digit = *p - '0';
        if (__builtin_mul_overflow(result, 10, &result) || __builtin_sub_overflow(result, digit, &result))
            return false;
    }
    if (!negative && __builtin_sub_overflow(0, result, &result))
        return false;
    *out = result;
    return true;
}

bool kvg_json_double(const struct kvg_json *value, double *out)
{
    if (!value || value->type != KVG_JSON_NUMBER)
        return false;
    char local[128], *text = value->str.len < sizeof local ? local : malloc(value->str.len + 1);
    if (!text)
        return false;
    memcpy(text, value->str.bytes, value->str.len);
    text[value->str.len] = '\0';
    double number = strtod(text, NULL);
    if (text != local)
        free(text);
    if (!isfinite(number))
        return false;
    *out = number;
    return true;
}

bool kvg_str_eq(struct kvg_str s, const char *literal)
{
    size_t len = strlen(literal);
    return s.len == len && memcmp(s.bytes, literal, len) == 0;
}
