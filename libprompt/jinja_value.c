/* Making, asking and comparing values, with Python's meaning of each. */
#include "libprompt/jinja_ast.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

enum { MAX_DEPTH = 3000, MEMORY_FACTOR = 8, DICT_INDEX_MIN = 16 };

/* ---- failing, memory, fuel ---- */

struct value fail_value(struct render *r, const char *format, ...)
{
    if (r->err && r->err->code == 0) {
        va_list args;
        va_start(args, format);
        char text[sizeof r->err->message];
        vsnprintf(text, sizeof text, format, args);
        va_end(args);
        kvg_fail(r->err, KVG_RENDER, "%s (line %u of the chat template)", text, r->line);
    }
    return ERROR_VALUE;
}

struct value fail_limit(struct render *r, const char *what)
{
    if (r->err && r->err->code == 0)
        kvg_fail(r->err, KVG_LIMIT, "the chat template exceeds its limit of %s", what);
    return ERROR_VALUE;
}

bool burn_slow(struct render *r)
{
    fail_limit(r, "steps");
    return false;
}

void *render_alloc(struct render *r, size_t n)
{
    if (n > SIZE_MAX / 4 || r->arena->used - r->arena_start > r->output_limit * MEMORY_FACTOR) {
        fail_limit(r, "memory");
        return NULL;
    }
    void *p = kvg_arena_alloc(r->arena, n);
    if (!p && r->err && r->err->code == 0)
        kvg_fail(r->err, KVG_NOMEM, "out of memory while rendering the chat template");
    return p;
}

/* ---- undefined ---- */

struct value undefined_name(const struct str *name)
{
    return (struct value){.type = V_UNDEFINED, .why = UNDEFINED_NAME, .s = name};
}

struct value undefined_attribute(struct value object, struct value name)
{
    uint8_t of = object.type == V_SEQ && object.seq->kind == SEQ_TUPLE ? V_ERROR : object.type;
    return (struct value){.type = V_UNDEFINED, .why = UNDEFINED_ATTRIBUTE, .of = of, .s = name.type == V_STR ? name.s : NULL};
}

struct value fail_undefined(struct render *r, struct value u)
{
    int n = u.s ? (int)(u.s->len < 80 ? u.s->len : 80) : 0;
    const char *name = u.s ? u.s->bytes : "";
    const char *of = u.of == V_NONE ? "None" : type_name((struct value){.type = u.of == V_ERROR ? V_NONE : u.of});
    if (u.why == UNDEFINED_NAME)
        return fail_value(r, "'%.*s' is undefined", n, name);
    if (u.why == UNDEFINED_UNSAFE)
        return fail_value(r, "access to attribute '%.*s' is unsafe", n, name);
    if (u.why == UNDEFINED_HINT)
        return fail_value(r, "%.*s", n, name);
    if (!u.s)
        return fail_value(r, "%s object has no such element", of);
    return fail_value(r, "'%s object' has no attribute '%.*s'", of, n, name);
}

/* ---- containers ---- */

struct seq *seq_new(struct render *r, enum seq_kind kind, size_t n)
{
    struct seq *seq = render_alloc(r, sizeof *seq + n * sizeof *seq->items);
    if (seq)
        *seq = (struct seq){.items = (struct value *)(seq + 1), .n = n, .kind = (uint8_t)kind};
    return seq;
}

struct value pair_tuple(struct render *r, struct value a, struct value b)
{
    struct seq *seq = seq_new(r, SEQ_TUPLE, 2);
    if (!seq)
        return ERROR_VALUE;
    seq->items[0] = a;
    seq->items[1] = b;
    return seq_value(seq);
}

struct dict *dict_new(struct render *r, size_t cap)
{
    struct dict *dict = render_alloc(r, sizeof *dict + cap * sizeof *dict->pairs);
    if (dict)
        *dict = (struct dict){.pairs = (struct pair *)(dict + 1), .cap = cap};
    return dict;
}

static uint64_t str_hash(const struct render *r, const char *bytes, size_t len)
{
    return XXH3_64bits_withSeed(bytes, len, (uint64_t)(uintptr_t)r->arena);
}

/* Indexes the string keys; others are few and found by walking. */
static void build_index(struct render *r, struct dict *dict)
{
    size_t size = 64;
    while (size < dict->n * 2)
        size *= 2;
    uint32_t *index = render_alloc(r, size * sizeof *index);
    if (!index)
        return;
    memset(index, 0, size * sizeof *index);
    for (size_t i = 0; i < dict->n; i++) {
        if (dict->pairs[i].key.type != V_STR)
            return;
        size_t slot = str_hash(r, dict->pairs[i].key.s->bytes, dict->pairs[i].key.s->len) & (size - 1);
        while (index[slot])
            slot = (slot + 1) & (size - 1);
        index[slot] = (uint32_t)i + 1;
    }
    dict->index = index;
    dict->index_size = size;
}

struct value *dict_find_str(struct render *r, const struct dict *dict, const char *bytes, size_t len)
{
    if (dict->n > DICT_INDEX_MIN && !dict->index)
        build_index(r, (struct dict *)dict);
    if (dict->index) {
        size_t mask = dict->index_size - 1;
        for (size_t slot = str_hash(r, bytes, len) & mask; dict->index[slot]; slot = (slot + 1) & mask) {
            struct pair *pair = &dict->pairs[dict->index[slot] - 1];
            if (pair->key.s->len == len && memcmp(pair->key.s->bytes, bytes, len) == 0)
                return &pair->value;
        }
        return NULL;
    }
    r->fuel -= (int64_t)dict->n / 8;
    for (size_t i = 0; i < dict->n; i++) {
        const struct value *key = &dict->pairs[i].key;
        if (key->type == V_STR && key->s->len == len && memcmp(key->s->bytes, bytes, len) == 0)
            return &dict->pairs[i].value;
    }
    return NULL;
}

struct value *dict_find(struct render *r, const struct dict *dict, struct value key)
{
    if (key.type == V_STR)
        return dict_find_str(r, dict, key.s->bytes, key.s->len);
    for (size_t i = 0; i < dict->n; i++)
        if (dict->pairs[i].key.type != V_STR && value_equal(r, dict->pairs[i].key, key) == 1)
            return &dict->pairs[i].value;
    return NULL;
}

static bool hashable(struct value v)
{
    if (v.type == V_SEQ && v.seq->kind == SEQ_TUPLE) {
        for (size_t i = 0; i < v.seq->n; i++)
            if (v.seq->items[i].type == V_SEQ || v.seq->items[i].type == V_DICT)
                return false;
        return true;
    }
    return v.type != V_DICT && (v.type != V_SEQ || v.seq->kind == SEQ_GENERATOR || v.seq->kind == SEQ_RANGE);
}

bool dict_set(struct render *r, struct dict *dict, struct value key, struct value value)
{
    if (!hashable(key)) {
        fail_value(r, "unhashable type: '%s'", type_name(key));
        return false;
    }
    if (!burn(r, 0))
        return false;
    struct value *old = dict_find(r, dict, key);
    if (old) {
        *old = value;
        return true;
    }
    if (dict->n == dict->cap) {
        size_t cap = dict->cap ? dict->cap * 2 : 4;
        struct pair *pairs = render_alloc(r, cap * sizeof *pairs);
        if (!pairs)
            return false;
        if (dict->n)
            memcpy(pairs, dict->pairs, dict->n * sizeof *pairs);
        dict->pairs = pairs;
        dict->cap = cap;
    }
    dict->pairs[dict->n++] = (struct pair){key, value};
    if (dict->index && dict->n * 2 < dict->index_size && key.type == V_STR) {
        size_t slot = str_hash(r, key.s->bytes, key.s->len) & (dict->index_size - 1);
        while (dict->index[slot])
            slot = (slot + 1) & (dict->index_size - 1);
        dict->index[slot] = (uint32_t)dict->n;
    } else {
        dict->index = NULL;
    }
    return true;
}

/* ---- from JSON ---- */

static struct value number_from_json(struct render *r, const struct kvg_json *json)
{
    int64_t i;
    double f;
    if (kvg_json_int(json, &i))
        return int_value(i);
    if (!memchr(json->str.bytes, '.', json->str.len) && !memchr(json->str.bytes, 'e', json->str.len) &&
        !memchr(json->str.bytes, 'E', json->str.len)) {
        struct value v = str_value(str_new(r, json->str.bytes, json->str.len, KVG_INPUT));
        if (v.type == V_STR)
            v.type = V_BIGINT;
        return v;
    }
    if (kvg_json_double(json, &f))
        return float_value(f);
    return float_value(json->str.bytes[0] == '-' ? -INFINITY : INFINITY);
}

struct value value_from_json(struct render *r, const struct kvg_json *json, uint8_t origin)
{
    switch (json->type) {
    case KVG_JSON_NULL:
        return with_origin(NONE_VALUE, origin);
    case KVG_JSON_FALSE:
    case KVG_JSON_TRUE:
        return with_origin(bool_value(json->type == KVG_JSON_TRUE), origin);
    case KVG_JSON_NUMBER:
        return with_origin(number_from_json(r, json), origin);
    case KVG_JSON_STRING:
        return str_value(str_new(r, json->str.bytes, json->str.len, origin));
    case KVG_JSON_ARRAY: {
        struct seq *seq = seq_new(r, SEQ_LIST, json->n);
        if (!seq)
            return ERROR_VALUE;
        seq->origin = origin;
        for (uint32_t i = 0; i < json->n; i++)
            if ((seq->items[i] = value_from_json(r, &json->items[i], origin)).type == V_ERROR)
                return ERROR_VALUE;
        return seq_value(seq);
    }
    case KVG_JSON_OBJECT: {
        struct dict *dict = dict_new(r, json->n);
        if (!dict)
            return ERROR_VALUE;
        dict->origin = origin;
        for (uint32_t i = 0; i < json->n; i++) {
            struct pair *pair = &dict->pairs[dict->n++];
            pair->key = str_value(str_new(r, json->items[i].key.bytes, json->items[i].key.len, origin));
            pair->value = value_from_json(r, &json->items[i], origin);
            if (pair->key.type == V_ERROR || pair->value.type == V_ERROR)
                return ERROR_VALUE;
        }
        return dict_value(dict);
    }
    }
    return ERROR_VALUE;
}

/* ---- asking ---- */

const char *type_name(struct value v)
{
    switch (v.type) {
    case V_NONE:
        return "NoneType";
    case V_BOOL:
        return "bool";
    case V_INT:
    case V_BIGINT:
        return "int";
    case V_FLOAT:
        return "float";
    case V_STR:
        return "str";
    case V_SEQ: {
        static const char *const kinds[] = {"list", "tuple", "generator", "range", "dict_keys", "dict_values", "dict_items"};
        return v.seq ? kinds[v.seq->kind] : "list";
    }
    case V_DICT:
        return "dict";
    case V_NAMESPACE:
        return "Namespace";
    case V_MACRO:
        return "Macro";
    case V_FUNCTION:
        return "function";
    case V_METHOD:
        return "method";
    case V_LOOP:
        return "LoopContext";
    default:
        return "Undefined";
    }
}

bool truth(struct value v)
{
    switch (v.type) {
    case V_BOOL:
        return v.b;
    case V_INT:
        return v.i != 0;
    case V_FLOAT:
        return v.f != 0;
    case V_STR:
        return v.s->len != 0;
    case V_SEQ:
        return v.seq->kind == SEQ_GENERATOR || v.seq->n != 0;
    case V_DICT:
        return v.dict->n != 0;
    case V_ERROR:
    case V_MISSING:
    case V_UNDEFINED:
    case V_NONE:
        return false;
    default:
        return true;
    }
}

bool is_number(struct value v)
{
    return v.type == V_INT || v.type == V_FLOAT || v.type == V_BOOL;
}

double as_double(struct value v)
{
    return v.type == V_FLOAT ? v.f : v.type == V_BOOL ? v.b : (double)v.i;
}

bool as_int(struct value v, int64_t *out)
{
    if (v.type != V_INT && v.type != V_BOOL)
        return false;
    *out = v.type == V_BOOL ? v.b : v.i;
    return true;
}

bool is_callable(struct value v)
{
    return v.type == V_MACRO || v.type == V_FUNCTION || v.type == V_METHOD || v.type == V_LOOP || v.type == V_UNDEFINED;
}

static bool enter(struct render *r)
{
    if (++r->depth <= MAX_DEPTH && burn(r, 0))
        return true;
    r->depth--;
    fail_limit(r, "nesting");
    return false;
}

static int seqs_equal(struct render *r, const struct seq *a, const struct seq *b)
{
    if (a == b)
        return 1;
    if (a->kind != b->kind || a->n != b->n || a->kind == SEQ_GENERATOR)
        return 0;
    for (size_t i = 0; i < a->n; i++) {
        int equal = value_equal(r, a->items[i], b->items[i]);
        if (equal != 1)
            return equal;
    }
    return 1;
}

static int dicts_equal(struct render *r, const struct dict *a, const struct dict *b)
{
    if (a->n != b->n)
        return 0;
    for (size_t i = 0; i < a->n; i++) {
        const struct value *other = dict_find(r, b, a->pairs[i].key);
        int equal = other ? value_equal(r, a->pairs[i].value, *other) : 0;
        if (equal != 1)
            return equal;
    }
    return 1;
}

int value_equal(struct render *r, struct value a, struct value b)
{
    if (is_number(a) && is_number(b)) {
        int64_t i, j;
        return as_int(a, &i) && as_int(b, &j) ? i == j : as_double(a) == as_double(b);
    }
    if (a.type != b.type)
        return 0;
    int equal;
    switch (a.type) {
    case V_NONE:
    case V_UNDEFINED:
        return 1;
    case V_STR:
    case V_BIGINT:
        return burn(r, a.s->len == b.s->len ? a.s->len : 0) ? str_same(a.s, b.s) : -1;
    case V_SEQ:
    case V_DICT:
        if (!enter(r))
            return -1;
        equal = a.type == V_SEQ ? seqs_equal(r, a.seq, b.seq) : dicts_equal(r, a.dict, b.dict);
        r->depth--;
        return equal;
    default:
        return a.macro == b.macro; /* the same object */
    }
}

static int str_order(const struct str *a, const struct str *b)
{
    int c = memcmp(a->bytes, b->bytes, a->len < b->len ? a->len : b->len);
    return c ? c : a->len < b->len ? -1 : a->len > b->len;
}

int value_compare(struct render *r, struct value a, struct value b, const char *op, int *order)
{
    if (a.type == V_UNDEFINED || b.type == V_UNDEFINED) {
        fail_undefined(r, a.type == V_UNDEFINED ? a : b);
        return -1;
    }
    if (is_number(a) && is_number(b)) {
        int64_t i, j;
        if (as_int(a, &i) && as_int(b, &j))
            *order = i < j ? -1 : i > j;
        else
            *order = as_double(a) < as_double(b) ? -1 : as_double(a) > as_double(b) ? 1 : as_double(a) == as_double(b) ? 0 : 2;
        return 0;
    }
    if (a.type == V_STR && b.type == V_STR) {
        *order = str_order(a.s, b.s);
        return burn(r, a.s->len) ? 0 : -1;
    }
    if (a.type == V_SEQ && b.type == V_SEQ && a.seq->kind == b.seq->kind && a.seq->kind <= SEQ_TUPLE) {
        size_t n = a.seq->n < b.seq->n ? a.seq->n : b.seq->n;
        if (!enter(r))
            return -1;
        for (size_t i = 0; i < n; i++) {
            int equal = value_equal(r, a.seq->items[i], b.seq->items[i]);
            if (equal == 1)
                continue;
            int rc = equal < 0 ? -1 : value_compare(r, a.seq->items[i], b.seq->items[i], op, order);
            r->depth--;
            return rc;
        }
        r->depth--;
        *order = a.seq->n < b.seq->n ? -1 : a.seq->n > b.seq->n;
        return 0;
    }
    fail_value(r, "'%s' not supported between instances of '%s' and '%s'", op, type_name(a), type_name(b));
    return -1;
}

int value_contains(struct render *r, struct value container, struct value item)
{
    if (container.type == V_STR) {
        if (item.type == V_UNDEFINED || item.type != V_STR) {
            fail_value(r, "'in <string>' requires string as left operand, not %s", type_name(item));
            return -1;
        }
        return burn(r, container.s->len) ? str_find(r, container.s, item.s, 0) != SIZE_MAX : -1;
    }
    if (container.type == V_DICT) {
        if (!hashable(item)) {
            fail_value(r, "unhashable type: '%s'", type_name(item));
            return -1;
        }
        return dict_find(r, container.dict, item) != NULL;
    }
    struct seq *seq = iterate(r, container);
    if (!seq)
        return -1;
    for (size_t i = 0; i < seq->n; i++) {
        int equal = burn(r, 0) ? value_equal(r, seq->items[i], item) : -1;
        if (equal)
            return equal;
    }
    return 0;
}

struct value value_length(struct render *r, struct value v)
{
    switch (v.type) {
    case V_UNDEFINED:
        return int_value(0);
    case V_STR:
        return int_value((int64_t)str_chars(r, v.s));
    case V_DICT:
        return int_value((int64_t)v.dict->n);
    case V_SEQ:
        if (v.seq->kind != SEQ_GENERATOR)
            return int_value((int64_t)v.seq->n);
        break;
    default:
        break;
    }
    return fail_value(r, "object of type '%s' has no len()", type_name(v));
}

static struct seq *chars_of(struct render *r, const struct str *s)
{
    if (!burn(r, s->len * 16))
        return NULL;
    struct seq *seq = seq_new(r, SEQ_LIST, str_chars(r, s));
    size_t at = 0;
    for (size_t i = 0; seq && i < seq->n; i++) {
        size_t end = at + 1;
        while (end < s->len && ((unsigned char)s->bytes[end] & 0xc0) == 0x80)
            end++;
        if ((seq->items[i] = str_value(str_slice(r, s, at, end))).type == V_ERROR)
            return NULL;
        at = end;
    }
    return seq;
}

struct seq *iterate(struct render *r, struct value v)
{
    switch (v.type) {
    case V_SEQ:
        if (v.seq->kind == SEQ_GENERATOR) {
            struct seq *rest = render_alloc(r, sizeof *rest);
            if (rest)
                *rest = (struct seq){.items = v.seq->n ? v.seq->items + v.seq->taken : NULL,
                                     .n = v.seq->n - v.seq->taken,
                                     .origin = v.seq->origin};
            v.seq->taken = v.seq->n;
            return rest;
        }
        return v.seq;
    case V_STR:
        return chars_of(r, v.s);
    case V_DICT: {
        struct seq *seq = burn(r, v.dict->n * 16) ? seq_new(r, SEQ_LIST, v.dict->n) : NULL;
        for (size_t i = 0; seq && i < seq->n; i++)
            seq->items[i] = v.dict->pairs[i].key;
        return seq;
    }
    case V_UNDEFINED:
        return seq_new(r, SEQ_LIST, 0);
    default:
        fail_value(r, "'%s' object is not iterable", type_name(v));
        return NULL;
    }
}

/* ---- items, attributes, slices ---- */

struct value get_attr(struct render *r, struct value object, const struct str *name)
{
    struct value key = {.type = V_STR, .s = name}, *found;
    if (object.type == V_UNDEFINED)
        return fail_undefined(r, object);
    if (object.type == V_LOOP)
        return loop_attribute(r, object.loop, name);
    if (object.type == V_NAMESPACE)
        return (found = dict_find_str(r, object.dict, name->bytes, name->len)) ? *found : undefined_attribute(object, key);
    bool unsafe = false;
    const struct function *method = find_method(object, name->bytes, name->len, &unsafe);
    if (unsafe)
        return (struct value){.type = V_UNDEFINED, .why = UNDEFINED_UNSAFE, .s = name};
    if (method) {
        struct method_value *bound = render_alloc(r, sizeof *bound);
        if (!bound)
            return ERROR_VALUE;
        *bound = (struct method_value){object, method};
        return (struct value){.type = V_METHOD, .method = bound};
    }
    if (object.type == V_DICT && (found = dict_find_str(r, object.dict, name->bytes, name->len)))
        return *found;
    if (object.type == V_MACRO && name->len == 4 && memcmp(name->bytes, "name", 4) == 0)
        return object.macro->def->name ? str_value(object.macro->def->name) : NONE_VALUE;
    return undefined_attribute(object, key);
}

static struct value index_str(struct render *r, const struct str *s, int64_t i)
{
    int64_t n = (int64_t)str_chars(r, s);
    if (i < 0)
        i += n;
    if (i < 0 || i >= n)
        return MISSING_VALUE;
    size_t from = str_byte_offset(r, s, (size_t)i), to = str_byte_offset(r, s, (size_t)i + 1);
    return str_value(str_slice(r, s, from, to));
}

struct value get_item(struct render *r, struct value object, struct value key)
{
    struct value *found, item = MISSING_VALUE;
    int64_t i;
    if (object.type == V_UNDEFINED)
        return fail_undefined(r, object);
    if (object.type == V_DICT) {
        if (hashable(key) && (found = dict_find(r, object.dict, key)))
            return *found;
    } else if (as_int(key, &i)) {
        if (object.type == V_STR) {
            item = index_str(r, object.s, i);
        } else if (object.type == V_SEQ && object.seq->kind <= SEQ_RANGE && object.seq->kind != SEQ_GENERATOR) {
            int64_t n = (int64_t)object.seq->n;
            i += i < 0 ? n : 0;
            if (i >= 0 && i < n)
                return object.seq->items[i];
        }
    }
    if (item.type != V_MISSING)
        return item;
    if (key.type == V_STR && object.type != V_DICT)
        return get_attr(r, object, key.s);
    if (key.type == V_STR) {
        bool unsafe = false;
        if (find_method(object, key.s->bytes, key.s->len, &unsafe) || unsafe)
            return get_attr(r, object, key.s);
    }
    return undefined_attribute(object, key);
}

/* Python's slice.indices: *n steps from *start. False: failed. */
static bool slice_indices(struct render *r, const struct value part[3], int64_t len, int64_t *start, int64_t *step, int64_t *n)
{
    int64_t v[3] = {0, 0, 1};
    for (int i = 0; i < 3; i++)
        if (part[i].type != V_MISSING && part[i].type != V_NONE && !as_int(part[i], &v[i])) {
            if (part[i].type == V_UNDEFINED)
                fail_value(r, "slice indices must be integers or None, not Undefined");
            return false;
        }
    *step = v[2];
    if (*step == 0) {
        fail_value(r, "slice step cannot be zero");
        return false;
    }
    bool down = *step < 0;
    int64_t low = down ? -1 : 0, high = down ? len - 1 : len;
    for (int i = 0; i < 2; i++) {
        bool given = part[i].type == V_INT || part[i].type == V_BOOL;
        if (!given)
            v[i] = (i == 0) == down ? high : low;
        else if (v[i] < 0)
            v[i] = v[i] < -len ? low : v[i] + len < low ? low : v[i] + len;
        else if (v[i] > high)
            v[i] = high;
    }
    *start = v[0];
    int64_t span = down ? v[0] - v[1] : v[1] - v[0];
    uint64_t stride = down ? 0 - (uint64_t)*step : (uint64_t)*step;
    *n = span <= 0 ? 0 : (int64_t)(((uint64_t)span - 1) / stride) + 1;
    return true;
}

struct value get_slice(struct render *r, struct value object, struct value start, struct value stop, struct value step)
{
    if (object.type == V_UNDEFINED)
        return fail_undefined(r, object);
    const struct value parts[3] = {start, stop, step};
    bool is_seq = object.type == V_SEQ && (object.seq->kind <= SEQ_TUPLE || object.seq->kind == SEQ_RANGE);
    if (object.type != V_STR && !is_seq)
        return undefined_attribute(object, NONE_VALUE);
    int64_t len = object.type == V_STR ? (int64_t)str_chars(r, object.s) : (int64_t)object.seq->n, first, by, n;
    if (!slice_indices(r, parts, len, &first, &by, &n))
        return r->err && r->err->code ? ERROR_VALUE : undefined_attribute(object, NONE_VALUE);
    if (!burn(r, (size_t)n * 4))
        return ERROR_VALUE;
    if (is_seq) {
        struct seq *seq = seq_new(r, object.seq->kind, (size_t)n);
        if (!seq)
            return ERROR_VALUE;
        seq->origin = object.seq->origin;
        for (int64_t i = 0; i < n; i++)
            seq->items[i] = object.seq->items[first + i * by];
        return seq_value(seq);
    }
    if (by == 1) {
        size_t from = str_byte_offset(r, object.s, (size_t)first), to = str_byte_offset(r, object.s, (size_t)(first + n));
        return str_value(str_slice(r, object.s, from, to));
    }
    struct seq *chars = chars_of(r, object.s);
    struct pieces out;
    pieces_init(&out);
    for (int64_t i = 0; chars && i < n; i++)
        if (!pieces_add_str(r, &out, chars->items[first + i * by].s))
            return ERROR_VALUE;
    return chars ? str_value(pieces_str(r, &out)) : ERROR_VALUE;
}
