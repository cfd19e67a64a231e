/* Tests (`x is ...`) and the global functions. */
#include "libprompt/jinja_builtin.h"
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <utf8proc.h>
#include "libprompt/utf8.h"

#define TEST(name) static struct value name(struct render *r, struct value self, const struct value *p, const struct args *args)

TEST(t_defined)
{
    return bool_value(self.type != V_UNDEFINED);
}

TEST(t_undefined)
{
    return bool_value(self.type == V_UNDEFINED);
}

TEST(t_none)
{
    return bool_value(self.type == V_NONE);
}

TEST(t_string)
{
    return bool_value(self.type == V_STR);
}

TEST(t_mapping)
{
    return bool_value(self.type == V_DICT);
}

TEST(t_number)
{
    return bool_value(is_number(self) || self.type == V_BIGINT);
}

TEST(t_integer)
{
    return bool_value(self.type == V_INT || self.type == V_BIGINT);
}

TEST(t_float)
{
    return bool_value(self.type == V_FLOAT);
}

TEST(t_boolean)
{
    return bool_value(self.type == V_BOOL);
}

TEST(t_true)
{
    return bool_value(self.type == V_BOOL && self.b);
}

TEST(t_false)
{
    return bool_value(self.type == V_BOOL && !self.b);
}

/* What has a length and items by number or key. */
TEST(t_sequence)
{
    bool indexed = self.type == V_SEQ && (self.seq->kind <= SEQ_TUPLE || self.seq->kind == SEQ_RANGE);
    return bool_value(indexed || self.type == V_STR || self.type == V_DICT || self.type == V_UNDEFINED);
}

TEST(t_iterable)
{
    return bool_value(self.type == V_SEQ || self.type == V_STR || self.type == V_DICT || self.type == V_UNDEFINED ||
                      self.type == V_LOOP);
}

TEST(t_callable)
{
    return bool_value(is_callable(self));
}

TEST(t_sameas)
{
    if (self.type != p[0].type)
        return bool_value(false);
    if (self.type == V_BOOL || self.type == V_NONE)
        return bool_value(self.type == V_NONE || self.b == p[0].b);
    if (self.type == V_INT)
        return bool_value(self.i == p[0].i && self.i >= -5 && self.i <= 256);
    return bool_value(self.macro == p[0].macro);
}

TEST(t_escaped)
{
    return bool_value(self.type == V_STR && self.s->markup);
}

static struct value remainder_is(struct render *r, struct value self, int64_t by, int64_t want)
{
    struct value v = binary_op(r, OP_MOD, self, int_value(by));
    return v.type == V_ERROR ? v : bool_value(is_number(v) && as_double(v) == (double)want);
}

TEST(t_odd)
{
    return remainder_is(r, self, 2, 1);
}

TEST(t_even)
{
    return remainder_is(r, self, 2, 0);
}

TEST(t_divisibleby)
{
    struct value v = p[0].type == V_MISSING ? fail_value(r, "divisibleby needs a number") : binary_op(r, OP_MOD, self, p[0]);
    return v.type == V_ERROR ? v : bool_value(!truth(v));
}

enum wanted_case { LOWER, UPPER };

static struct value case_is(struct render *r, struct value self, enum wanted_case wanted)
{
    const struct str *s = to_str(r, self);
    bool any = false;
    if (!s || !burn(r, s->len * 2))
        return ERROR_VALUE;
    for (size_t i = 0; i < s->len;) {
        unsigned n = kvg_utf8_len((const unsigned char *)s->bytes + i, s->len - i);
        n = n ? n : 1;
        utf8proc_category_t c = utf8proc_category((utf8proc_int32_t)kvg_utf8_decode((const unsigned char *)s->bytes + i, n));
        if (c == UTF8PROC_CATEGORY_LT || c == (wanted == LOWER ? UTF8PROC_CATEGORY_LU : UTF8PROC_CATEGORY_LL))
            return bool_value(false);
        any |= c == (wanted == LOWER ? UTF8PROC_CATEGORY_LL : UTF8PROC_CATEGORY_LU);
        i += n;
    }
    return bool_value(any);
}

TEST(t_lower)
{
    return case_is(r, self, LOWER);
}

TEST(t_upper)
{
    return case_is(r, self, UPPER);
}

static struct value from_int(int result)
{
    return result < 0 ? ERROR_VALUE : bool_value(result);
}

TEST(t_eq)
{
    return from_int(value_equal(r, self, p[0]));
}

TEST(t_ne)
{
    int equal = value_equal(r, self, p[0]);
    return from_int(equal < 0 ? equal : !equal);
}

TEST(t_in)
{
    return from_int(value_contains(r, p[0], self));
}

static struct value ordered(struct render *r, struct value a, struct value b, const char *op)
{
    int order;
    if (value_compare(r, a, b, op, &order) < 0)
        return ERROR_VALUE;
    if (order == 2)
        return bool_value(false);
    return bool_value(op[0] == '<' ? order < 0 || (op[1] && !order) : order > 0 || (op[1] && !order));
}

TEST(t_lt)
{
    return ordered(r, self, p[0], "<");
}

TEST(t_le)
{
    return ordered(r, self, p[0], "<=");
}

TEST(t_gt)
{
    return ordered(r, self, p[0], ">");
}

TEST(t_ge)
{
    return ordered(r, self, p[0], ">=");
}

TEST(t_filter)
{
    return bool_value(self.type == V_STR && find_filter(self.s->bytes, self.s->len));
}

TEST(t_test)
{
    return bool_value(self.type == V_STR && find_test(self.s->bytes, self.s->len));
}

static const struct function tests[] = {
    {"defined", "", t_defined},
    {"undefined", "", t_undefined},
    {"none", "", t_none},
    {"string", "", t_string},
    {"mapping", "", t_mapping},
    {"number", "", t_number},
    {"integer", "", t_integer},
    {"float", "", t_float},
    {"boolean", "", t_boolean},
    {"true", "", t_true},
    {"false", "", t_false},
    {"sequence", "", t_sequence},
    {"iterable", "", t_iterable},
    {"callable", "", t_callable},
    {"sameas", "other", t_sameas},
    {"escaped", "", t_escaped},
    {"odd", "", t_odd},
    {"even", "", t_even},
    {"divisibleby", "num", t_divisibleby},
    {"lower", "", t_lower},
    {"upper", "", t_upper},
    {"eq", "other", t_eq},
    {"equalto", "other", t_eq},
    {"==", "other", t_eq},
    {"ne", "other", t_ne},
    {"!=", "other", t_ne},
    {"in", "seq", t_in},
    {"lt", "other", t_lt},
    {"lessthan", "other", t_lt},
    {"<", "other", t_lt},
    {"le", "other", t_le},
    {"<=", "other", t_le},
    {"gt", "other", t_gt},
    {"greaterthan", "other", t_gt},
    {">", "other", t_gt},
    {"ge", "other", t_ge},
    {">=", "other", t_ge},
    {"filter", "", t_filter},
    {"test", "", t_test},
};

const struct function *find_test(const char *name, size_t len)
{
    return find_in(tests, sizeof tests / sizeof *tests, name, len);
}

struct value run_test(struct render *r, const struct str *name, struct value self, const struct args *args)
{
    const struct function *test = find_test(name->bytes, name->len);
    if (!test)
        return fail_value(r, "No test named '%.*s'.", (int)(name->len < 80 ? name->len : 80), name->bytes);
    return call_function(r, test, self, args);
}

/* ---- global functions ---- */

enum { MAX_RANGE = 100000, MAX_DATE = 512 };

TEST(g_range)
{
    int64_t v[3] = {0, 0, 1};
    if (args->n_kw || args->n_pos < 1 || args->n_pos > 3)
        return fail_value(r, "range expected 1 to 3 arguments, got %u", args->n_pos);
    for (uint32_t i = 0; i < args->n_pos; i++)
        if (!as_int(args->pos[i], &v[args->n_pos == 1 ? 1 : i]))
            return args->pos[i].type == V_UNDEFINED
                       ? fail_undefined(r, args->pos[i])
                       : fail_value(r, "'%s' object cannot be interpreted as an integer", type_name(args->pos[i]));
    if (v[2] == 0)
        return fail_value(r, "range() arg 3 must not be zero");
    bool empty = v[2] > 0 ? v[0] >= v[1] : v[0] <= v[1];
    uint64_t span = v[2] > 0 ? (uint64_t)v[1] - (uint64_t)v[0] : (uint64_t)v[0] - (uint64_t)v[1];
    uint64_t stride = v[2] > 0 ? (uint64_t)v[2] : 0 - (uint64_t)v[2], n = empty ? 0 : (span - 1) / stride + 1;
    if (n > MAX_RANGE)
        return fail_value(r, "Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d).", MAX_RANGE);
    struct seq *seq = burn(r, n * 16) ? seq_new(r, SEQ_RANGE, n) : NULL;
    for (uint64_t i = 0; seq && i < n; i++)
        seq->items[i] = int_value(v[0] + (int64_t)i * v[2]);
    return seq_value(seq);
}

/* dict(mapping or pairs, **more) */
static struct dict *make_dict(struct render *r, const struct args *args)
{
    struct dict *dict = dict_new(r, args->n_kw);
    if (!dict)
        return NULL;
    if (args->n_pos > 1)
        return fail_value(r, "dict expected at most 1 argument, got %u", args->n_pos), NULL;
    if (args->n_pos && args->pos[0].type == V_DICT) {
        const struct dict *from = args->pos[0].dict;
        dict->origin = from->origin;
        for (size_t i = 0; i < from->n; i++)
            if (!dict_set(r, dict, from->pairs[i].key, from->pairs[i].value))
                return NULL;
    } else if (args->n_pos) {
        struct seq *items = iterate(r, args->pos[0]);
        for (size_t i = 0; items && i < items->n; i++) {
            struct seq *pair = iterate(r, items->items[i]);
            if (!pair || pair->n != 2)
                return fail_value(r, "dictionary update sequence element #%zu has the wrong length; 2 is required", i), NULL;
            if (!dict_set(r, dict, pair->items[0], pair->items[1]))
                return NULL;
        }
        if (!items)
            return NULL;
    }
    for (uint32_t i = 0; i < args->n_kw; i++)
        if (!dict_set(r, dict, (struct value){.type = V_STR, .s = args->kw[i].name}, args->kw[i].value))
            return NULL;
    return dict;
}

TEST(g_dict)
{
    return dict_value(make_dict(r, args));
}

TEST(g_namespace)
{
    struct value v = dict_value(make_dict(r, args));
    if (v.type == V_ERROR)
        return v;
    for (size_t i = 0; i < v.dict->n; i++)
        if (v.dict->pairs[i].key.type == V_STR && v.dict->pairs[i].key.s->len && v.dict->pairs[i].key.s->bytes[0] == '_')
            return fail_value(r, "cannot store underscore-prefixed attributes on a namespace");
    v.type = V_NAMESPACE;
    return v;
}

TEST(g_raise_exception)
{
    const struct str *message = p[0].type == V_MISSING ? NULL : to_str(r, p[0]);
    if (!message)
        return fail_value(r, "raise_exception() missing 1 required positional argument: 'message'");
    size_t n = message->len < 300 ? message->len : 300;
    while (n < message->len && n && ((unsigned char)message->bytes[n] & 0xc0) == 0x80)
        n--;
    if (r->err->code == 0)
        kvg_fail(r->err, KVG_RENDER, "%.*s", (int)n, message->bytes);
    return ERROR_VALUE;
}

TEST(g_strftime_now)
{
    const struct str *format;
    char text[MAX_DATE], pattern[128];
    struct tm tm;
    time_t now = (time_t)r->now;
    if (!arg_str(r, p[0], &format) || !format || format->len >= sizeof pattern || !gmtime_r(&now, &tm))
        return fail_value(r, "strftime_now needs a format of less than 128 bytes");
    memcpy(pattern, format->bytes, format->len);
    pattern[format->len] = '\0';
    size_t n = strftime(text, sizeof text, pattern, &tm);
    char *copy = render_alloc(r, n + 1);
    return copy ? str_value(str_new(r, memcpy(copy, text, n), n, str_origin(format))) : ERROR_VALUE;
}

static const struct function globals[] = {
    {"range", "*", g_range},
    {"dict", "*", g_dict},
    {"namespace", "*", g_namespace},
    {"raise_exception", "message", g_raise_exception},
    {"strftime_now", "format", g_strftime_now},
};

const struct function *find_global(const char *name, size_t len)
{
    return find_in(globals, sizeof globals / sizeof *globals, name, len);
}
