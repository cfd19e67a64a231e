/* Filters on single values, with jinja2's defaults. */
#include "libprompt/jinja_builtin.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool arg_int(struct render *r, struct value v, int64_t otherwise, int64_t *out)
{
    *out = otherwise;
    if (v.type == V_MISSING || v.type == V_NONE || as_int(v, out))
        return true;
    fail_value(r, "'%s' object cannot be interpreted as an integer", type_name(v));
    return false;
}

bool arg_str(struct render *r, struct value v, const struct str **out)
{
    *out = NULL;
    if (v.type == V_MISSING || v.type == V_NONE)
        return true;
    if (v.type != V_STR)
        return fail_value(r, "expected str, not %s", type_name(v)), false;
    *out = v.s;
    return true;
}

bool arg_bool(struct value v, bool otherwise)
{
    return v.type == V_MISSING ? otherwise : truth(v);
}

const struct function *find_in(const struct function *table, size_t n, const char *name, size_t len)
{
    for (size_t i = 0; i < n; i++)
        if (strlen(table[i].name) == len && memcmp(table[i].name, name, len) == 0)
            return &table[i];
    return NULL;
}

#define FILTER(name) static struct value name(struct render *r, struct value self, const struct value *p, const struct args *args)

FILTER(f_default)
{
    bool missing = self.type == V_UNDEFINED || (arg_bool(p[1], false) && !truth(self));
    if (!missing)
        return self;
    return p[0].type == V_MISSING ? str_value(str_literal(r, "")) : p[0];
}

FILTER(f_string)
{
    return self.type == V_STR ? self : str_value(to_str(r, self));
}

FILTER(f_safe)
{
    const struct str *s = to_str(r, self);
    struct str *markup = s ? render_alloc(r, sizeof *markup) : NULL;
    if (!markup)
        return ERROR_VALUE;
    *markup = *s;
    markup->markup = 1;
    return str_value(markup);
}

FILTER(f_escape)
{
    if (self.type == V_STR && self.s->markup)
        return self;
    const struct str *s = to_str(r, self);
    return s ? str_value(str_escape(r, s)) : ERROR_VALUE;
}

FILTER(f_forceescape)
{
    const struct str *s = to_str(r, self);
    return s ? str_value(str_escape(r, s)) : ERROR_VALUE;
}

static struct value change_case(struct render *r, struct value self, enum str_case how)
{
    const struct str *s = to_str(r, self);
    return s ? str_value(str_case(r, s, how)) : ERROR_VALUE;
}

FILTER(f_upper)
{
    return change_case(r, self, CASE_UPPER);
}

FILTER(f_lower)
{
    return change_case(r, self, CASE_LOWER);
}

FILTER(f_title)
{
    return change_case(r, self, CASE_JINJA_TITLE);
}

FILTER(f_capitalize)
{
    return change_case(r, self, CASE_CAPITALIZE);
}

FILTER(f_trim)
{
    const struct str *s = to_str(r, self), *chars;
    return s && arg_str(r, p[0], &chars) ? str_value(str_strip(r, s, chars, true, true)) : ERROR_VALUE;
}

FILTER(f_replace)
{
    int64_t count;
    if (p[0].type == V_MISSING || p[1].type == V_MISSING)
        return fail_value(r, "replace needs the old and the new text");
    const struct str *s = to_str(r, self), *from = to_str(r, p[0]), *to = to_str(r, p[1]);
    if (!s || !from || !to || !arg_int(r, p[2], -1, &count))
        return ERROR_VALUE;
    return str_value(str_replace(r, s, from, to, count));
}

FILTER(f_length)
{
    return value_length(r, self);
}

static const struct str *spaces(struct render *r, int64_t n)
{
    return str_repeat(r, str_literal(r, " "), n);
}

FILTER(f_indent)
{
    int64_t width = 4;
    const struct str *indent = p[0].type == V_STR ? p[0].s : NULL;
    if (self.type == V_UNDEFINED)
        return fail_undefined(r, self);
    if (self.type != V_STR)
        return fail_value(r, "unsupported operand type(s) for +=: '%s' and 'str'", type_name(self));
    if (!indent && (!arg_int(r, p[0], 4, &width) || !(indent = spaces(r, width))))
        return ERROR_VALUE;
    bool first = arg_bool(p[1], false), blank = arg_bool(p[2], false);
    const struct str *newline = str_literal(r, "\n"), *whole = newline ? str_concat(r, self.s, newline) : NULL;
    struct seq *lines = whole ? str_splitlines(r, whole, false) : NULL;
    struct pieces out;
    pieces_init(&out);
    for (size_t i = 0; lines && i < lines->n; i++) {
        const struct str *line = lines->items[i].s;
        if ((i && !pieces_add_str(r, &out, newline)) || ((i ? blank || line->len : first) && !pieces_add_str(r, &out, indent)) ||
            !pieces_add_str(r, &out, line))
            return ERROR_VALUE;
    }
    return lines ? str_value(pieces_str(r, &out)) : ERROR_VALUE;
}

FILTER(f_center)
{
    int64_t width;
    const struct str *s = to_str(r, self);
    if (!s || !arg_int(r, p[0], 80, &width))
        return ERROR_VALUE;
    int64_t pad = width - (int64_t)str_chars(r, s);
    if (pad <= 0)
        return str_value(s);
    int64_t left = pad / 2 + (pad & width & 1);
    const struct str *a = spaces(r, left), *b = spaces(r, pad - left), *ab = a ? str_concat(r, a, s) : NULL;
    return ab && b ? str_value(str_concat(r, ab, b)) : ERROR_VALUE;
}

/* int(text, base) or float(text): the text trimmed, digits in groups of single underscores. */
static bool number_text(const struct str *s, char text[400])
{
    size_t from = 0, to = s->len, n = 0;
    while (from < to && py_space((unsigned char)s->bytes[from]) && (unsigned char)s->bytes[from] < 0x80)
        from++;
    while (to > from && py_space((unsigned char)s->bytes[to - 1]) && (unsigned char)s->bytes[to - 1] < 0x80)
        to--;
    if (to == from || to - from >= 400)
        return false;
    for (size_t i = from; i < to; i++) {
        char c = s->bytes[i];
        bool inner = i > from && i + 1 < to && s->bytes[i - 1] != '_' && s->bytes[i + 1] != '_';
        if (c == '_' && !inner)
            return false;
        if (c == '\0' || (unsigned char)c >= 0x80)
            return false;
        if (c != '_')
            text[n++] = c;
    }
    text[n] = '\0';
    return true;
}

static bool parse_float(const struct str *s, double *out)
{
    char text[400], *end;
    if (!number_text(s, text) || strpbrk(text, "xXpP("))
        return false;
    *out = strtod(text, &end);
    return *end == '\0' && end != text;
}

static bool parse_int(const struct str *s, int base, int64_t *out)
{
    char text[400], *end;
    if (!number_text(s, text))
        return false;
    const char *digits = text + (text[0] == '-' || text[0] == '+');
    if (digits[0] == '-' || digits[0] == '+' || py_space((unsigned char)digits[0]))
        return false;
    char mark = digits[0] == '0' ? digits[1] | 32 : 0;
    if (mark == 'x' && base != 16)
        return false;
    if ((mark == 'o' && base == 8) || (mark == 'b' && base == 2))
        digits += 2;
    unsigned long long magnitude = strtoull(digits, &end, base);
    if (*end || end == digits || magnitude > INT64_MAX)
        return false;
    *out = text[0] == '-' ? -(int64_t)magnitude : (int64_t)magnitude;
    return true;
}

FILTER(f_int)
{
    int64_t i, base;
    double f;
    struct value otherwise = p[0].type == V_MISSING ? int_value(0) : p[0];
    if (!arg_int(r, p[1], 10, &base))
        return ERROR_VALUE;
    if (self.type == V_BIGINT)
        return self;
    if (self.type == V_UNDEFINED)
        return fail_undefined(r, self);
    if (as_int(self, &i))
        return with_origin(int_value(i), self.origin);
    if (self.type == V_STR && base >= 2 && base <= 36 && parse_int(self.s, (int)base, &i))
        return with_origin(int_value(i), str_origin(self.s));
    if (self.type == V_FLOAT)
        f = self.f;
    else if (self.type != V_STR || !parse_float(self.s, &f))
        return otherwise;
    if (!isfinite(f) || fabs(f) >= 9.2e18)
        return otherwise;
    return with_origin(int_value((int64_t)f), self.type == V_STR ? str_origin(self.s) : self.origin);
}

FILTER(f_float)
{
    double f;
    struct value otherwise = p[0].type == V_MISSING ? float_value(0) : p[0];
    if (self.type == V_UNDEFINED)
        return fail_undefined(r, self);
    if (is_number(self))
        return with_origin(float_value(as_double(self)), self.origin);
    if (self.type == V_STR && parse_float(self.s, &f))
        return with_origin(float_value(f), str_origin(self.s));
    return otherwise;
}

FILTER(f_abs)
{
    int64_t i;
    if (self.type == V_UNDEFINED)
        return fail_undefined(r, self);
    if (self.type == V_FLOAT)
        return with_origin(float_value(fabs(self.f)), self.origin);
    if (!as_int(self, &i) || i == INT64_MIN)
        return fail_value(r, "bad operand type for abs(): '%s'", type_name(self));
    return with_origin(int_value(i < 0 ? -i : i), self.origin);
}

FILTER(f_round)
{
    int64_t precision, i;
    const struct str *method;
    if (!arg_int(r, p[0], 0, &precision) || !arg_str(r, p[1], &method))
        return ERROR_VALUE;
    if (self.type == V_UNDEFINED)
        return fail_undefined(r, self);
    if (!is_number(self))
        return fail_value(r, "type %s doesn't define __round__ method", type_name(self));
    struct kvg_str how = method ? (struct kvg_str){method->bytes, method->len} : (struct kvg_str){"common", 6};
    double f = as_double(self);
    if (precision < -300 || precision > 300)
        return fail_value(r, "round: precision %lld is out of range", (long long)precision);
    if (kvg_str_eq(how, "common")) {
        if (as_int(self, &i) && precision >= 0)
            return with_origin(int_value(i), self.origin);
        if (precision < 0) {
            double scale = pow(10, (double)-precision);
            f = nearbyint(f / scale) * scale;
            return with_origin(as_int(self, &i) ? int_value((int64_t)f) : float_value(f), self.origin);
        }
        char text[700];
        snprintf(text, sizeof text, "%.*f", (int)precision, f);
        return with_origin(float_value(strtod(text, NULL)), self.origin);
    }
    double scale = pow(10, (double)precision);
    if (kvg_str_eq(how, "ceil"))
        return with_origin(float_value(ceil(f * scale) / scale), self.origin);
    if (kvg_str_eq(how, "floor"))
        return with_origin(float_value(floor(f * scale) / scale), self.origin);
    return fail_value(r, "method must be common, ceil or floor");
}

FILTER(f_format)
{
    const struct str *s = to_str(r, self);
    if (args->n_pos && args->n_kw)
        return fail_value(r, "can't handle positional and keyword arguments at the same time");
    if (!s)
        return ERROR_VALUE;
    if (!args->n_kw)
        return percent_format(r, s, seq_value(&(struct seq){.items = args->pos, .n = args->n_pos, .kind = SEQ_TUPLE}));
    struct dict *named = dict_new(r, args->n_kw);
    for (uint32_t i = 0; named && i < args->n_kw; i++)
        if (!dict_set(r, named, (struct value){.type = V_STR, .s = args->kw[i].name}, args->kw[i].value))
            return ERROR_VALUE;
    return named ? percent_format(r, s, dict_value(named)) : ERROR_VALUE;
}

/* tojson as `transformers` defines it, a json.dumps. */
FILTER(f_tojson)
{
    struct json_style style = {.ensure_ascii = arg_bool(p[0], false), .sort_keys = arg_bool(p[3], false)};
    int64_t width;
    if (p[1].type == V_STR)
        style.indent = p[1].s;
    else if (p[1].type != V_MISSING && p[1].type != V_NONE &&
             (!arg_int(r, p[1], 0, &width) || !(style.indent = spaces(r, width))))
        return ERROR_VALUE;
    style.item_separator = str_literal(r, style.indent ? "," : ", ");
    style.key_separator = str_literal(r, ": ");
    if (p[2].type != V_MISSING && p[2].type != V_NONE) {
        struct seq *pair = iterate(r, p[2]);
        if (!pair || pair->n != 2 || pair->items[0].type != V_STR || pair->items[1].type != V_STR)
            return fail_value(r, "tojson: separators must be two strings");
        style.item_separator = pair->items[0].s;
        style.key_separator = pair->items[1].s;
    }
    return style.item_separator && style.key_separator ? str_value(to_json(r, self, &style)) : ERROR_VALUE;
}

FILTER(f_wordcount)
{
    const struct str *s = to_str(r, self);
    int64_t n = 0;
    bool word = false;
    if (!s || !burn(r, s->len * 2))
        return ERROR_VALUE;
    for (size_t i = 0; i < s->len; i++) {
        unsigned char c = (unsigned char)s->bytes[i];
        bool in = c >= 0x80 || c == '_' || (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z');
        n += in && !word;
        word = in;
    }
    return int_value(n);
}

FILTER(f_attr)
{
    const struct str *name;
    if (!arg_str(r, p[0], &name) || !name)
        return ERROR_VALUE;
    /* attributes only, never items */
    bool unsafe = false;
    if (self.type == V_DICT && !find_method(self, name->bytes, name->len, &unsafe))
        return undefined_attribute(self, p[0]);
    return get_attr(r, self, name);
}

static const struct function filters[] = {
    {"tojson", "ensure_ascii,indent,separators,sort_keys", f_tojson},
    {"trim", "chars", f_trim},
    {"length", "", f_length},
    {"count", "", f_length},
    {"string", "", f_string},
    {"default", "default_value,boolean", f_default},
    {"d", "default_value,boolean", f_default},
    {"upper", "", f_upper},
    {"lower", "", f_lower},
    {"title", "", f_title},
    {"capitalize", "", f_capitalize},
    {"replace", "old,new,count", f_replace},
    {"safe", "", f_safe},
    {"escape", "", f_escape},
    {"e", "", f_escape},
    {"forceescape", "", f_forceescape},
    {"indent", "width,first,blank", f_indent},
    {"int", "default,base", f_int},
    {"float", "default", f_float},
    {"abs", "", f_abs},
    {"round", "precision,method", f_round},
    {"format", "*", f_format},
    {"center", "width", f_center},
    {"wordcount", "", f_wordcount},
    {"attr", "name", f_attr},
};

const struct function *find_filter(const char *name, size_t len)
{
    const struct function *f = find_in(filters, sizeof filters / sizeof *filters, name, len);
    return f ? f : find_in(kvg_seq_filters, kvg_n_seq_filters, name, len);
}
