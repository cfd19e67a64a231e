/* Values as text: Python's str() and repr(), and json.dumps as `transformers` calls it.
 *
 * A container that came from the client prints as input throughout, punctuation included.
 */
#include "libprompt/jinja_ast.h"
#include "libprompt/utf8.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum { MAX_PRINT_DEPTH = 3000 };

static bool add_text(struct render *r, struct pieces *out, const char *text, uint8_t origin)
{
    return pieces_add(r, out, text, strlen(text), origin);
}

/* Text that is not a literal: copied into the arena. */
static bool add_copy(struct render *r, struct pieces *out, const char *text, size_t n, uint8_t origin)
{
    char *copy = render_alloc(r, n + 1);
    return copy && pieces_add(r, out, memcpy(copy, text, n), n, origin);
}

/* The shortest digits that read back as the same double, laid out as Python's repr does. */
size_t format_double(double value, char out[40])
{
    if (isnan(value) || isinf(value))
        return (size_t)snprintf(out, 40, "%s", isnan(value) ? "nan" : value < 0 ? "-inf" : "inf");
    char digits[40];
    int precision = 0;
    do {
        snprintf(digits, sizeof digits, "%.*e", precision, value);
    } while (strtod(digits, NULL) != value && ++precision < 17);
    int exponent = atoi(strchr(digits, 'e') + 1);
    if (exponent < -4 || exponent >= 16) {
        char mantissa[40];
        snprintf(mantissa, sizeof mantissa, "%.*s", (int)(strchr(digits, 'e') - digits), digits);
        return (size_t)snprintf(out, 40, "%se%c%02d", mantissa, exponent < 0 ? '-' : '+', abs(exponent));
    }
    int decimals = precision - exponent;
    return (size_t)snprintf(out, 40, "%.*f", decimals > 1 ? decimals : 1, value);
}

static bool print_scalar(struct render *r, struct pieces *out, struct value v)
{
    char text[48];
    switch (v.type) {
    case V_NONE:
        return add_text(r, out, "None", v.origin);
    case V_BOOL:
        return add_text(r, out, v.b ? "True" : "False", v.origin);
    case V_INT:
        return add_copy(r, out, text, (size_t)snprintf(text, sizeof text, "%lld", (long long)v.i), v.origin);
    case V_BIGINT:
        return pieces_add_str(r, out, v.s);
    case V_FLOAT:
        return add_copy(r, out, text, format_double(v.f, text), v.origin);
    case V_MACRO:
        return add_text(r, out, "<Macro>", KVG_TEMPLATE);
    case V_LOOP:
        return add_text(r, out, "<LoopContext>", KVG_TEMPLATE);
    case V_FUNCTION:
    case V_METHOD:
        return add_text(r, out, "<function>", KVG_TEMPLATE);
    default:
        return true;
    }
}

bool print_value(struct render *r, struct pieces *out, struct value v)
{
    switch (v.type) {
    case V_ERROR:
        return false;
    case V_STR:
        return pieces_add_str(r, out, v.s);
    case V_SEQ:
    case V_DICT:
    case V_NAMESPACE:
        return repr_value(r, out, v);
    default:
        return print_scalar(r, out, v);
    }
}

const struct str *to_str(struct render *r, struct value v)
{
    if (v.type == V_STR)
        return v.s;
    struct pieces out;
    pieces_init(&out);
    return print_value(r, &out, v) ? pieces_str(r, &out) : NULL;
}

static bool printable(uint32_t c)
{
    if (c < 0x7f)
        return c >= 0x20;
    switch (utf8proc_category((utf8proc_int32_t)c)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
        return false;
    default:
        return true;
    }
}

/* Python's escape of character c within quotes, or an empty text when it stands for itself. */
static size_t repr_escape(uint32_t c, char quote, char text[12])
{
    if (c == '\\' || c == (uint32_t)(unsigned char)quote)
        return (size_t)snprintf(text, 12, "\\%c", (char)c);
    if (c == '\n' || c == '\r' || c == '\t')
        return (size_t)snprintf(text, 12, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
    if (printable(c))
        return 0;
    return (size_t)snprintf(text, 12, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", c);
}

static bool repr_str(struct render *r, struct pieces *out, const struct str *s)
{
    char quote = memchr(s->bytes, '\'', s->len) && !memchr(s->bytes, '"', s->len) ? '"' : '\'';
    uint8_t origin = str_origin(s);
    size_t plain = 0;
    if (!burn(r, s->len * 4) || !add_text(r, out, quote == '"' ? "\"" : "'", origin))
        return false;
    for (size_t i = 0; i < s->len;) {
        unsigned n = kvg_utf8_len((const unsigned char *)s->bytes + i, s->len - i);
        n = n ? n : 1;
        char text[12];
        size_t escape = repr_escape(kvg_utf8_decode((const unsigned char *)s->bytes + i, n), quote, text);
        if (escape) {
            if (!pieces_add_range(r, out, s, plain, i) || !add_copy(r, out, text, escape, origin))
                return false;
            plain = i + n;
        }
        i += n;
    }
    return pieces_add_range(r, out, s, plain, s->len) && add_text(r, out, quote == '"' ? "\"" : "'", origin);
}

static bool repr_seq(struct render *r, struct pieces *out, const struct seq *seq)
{
    static const char *const open[] = {"[", "(", "<generator", "[", "dict_keys([", "dict_values([", "dict_items(["};
    static const char *const close[] = {"]", ")", ">", "]", "])", "])", "])"};
    if (!add_text(r, out, open[seq->kind], seq->origin))
        return false;
    for (size_t i = 0; seq->kind != SEQ_GENERATOR && i < seq->n; i++)
        if ((i && !add_text(r, out, ", ", seq->origin)) || !repr_value(r, out, seq->items[i]))
            return false;
    if (seq->kind == SEQ_TUPLE && seq->n == 1 && !add_text(r, out, ",", seq->origin))
        return false;
    return add_text(r, out, close[seq->kind], seq->origin);
}

static bool repr_dict(struct render *r, struct pieces *out, const struct dict *dict)
{
    if (!add_text(r, out, "{", dict->origin))
        return false;
    for (size_t i = 0; i < dict->n; i++)
        if ((i && !add_text(r, out, ", ", dict->origin)) || !repr_value(r, out, dict->pairs[i].key) ||
            !add_text(r, out, ": ", dict->origin) || !repr_value(r, out, dict->pairs[i].value))
            return false;
    return add_text(r, out, "}", dict->origin);
}

bool repr_value(struct render *r, struct pieces *out, struct value v)
{
    if (++r->depth > MAX_PRINT_DEPTH) {
        fail_limit(r, "nesting");
        return false;
    }
    bool ok;
    switch (v.type) {
    case V_STR:
        ok = repr_str(r, out, v.s);
        break;
    case V_SEQ:
        ok = repr_seq(r, out, v.seq);
        break;
    case V_DICT:
        ok = repr_dict(r, out, v.dict);
        break;
    case V_NAMESPACE:
        ok = add_text(r, out, "<Namespace ", KVG_TEMPLATE) && repr_dict(r, out, v.dict) && add_text(r, out, ">", KVG_TEMPLATE);
        break;
    case V_UNDEFINED:
        ok = add_text(r, out, "Undefined", KVG_TEMPLATE);
        break;
    default:
        ok = print_scalar(r, out, v);
    }
    r->depth--;
    return ok;
}

/* ---- JSON ---- */

struct json_writer {
    struct render *r;
    struct pieces out;
    const struct json_style *style;
    bool input; /* within a container of the client's: everything is input */
    uint32_t level;
};

static bool json_text(struct json_writer *w, const char *text)
{
    return add_text(w->r, &w->out, text, w->input ? KVG_INPUT : KVG_TEMPLATE);
}

static bool json_slice(struct json_writer *w, const struct str *s, size_t from, size_t to)
{
    return w->input ? pieces_add(w->r, &w->out, s->bytes + from, to - from, KVG_INPUT)
                    : pieces_add_range(w->r, &w->out, s, from, to);
}

/* The escape of the character of n bytes at p; NULL: it stands for itself. */
static const char *json_escape(const struct json_writer *w, const char *p, unsigned n, char text[16])
{
    static const char names[] = "\"\\\n\r\t\b\f";
    static const char *const escapes[] = {"\\\"", "\\\\", "\\n", "\\r", "\\t", "\\b", "\\f"};
    unsigned char c = (unsigned char)*p;
    const char *known = n == 1 ? memchr(names, c, sizeof names - 1) : NULL;
    if (known)
        return escapes[known - names];
    if (c >= 0x20 && (c < 0x80 || !w->style->ensure_ascii))
        return NULL;
    uint32_t code = kvg_utf8_decode((const unsigned char *)p, n);
    if (code < 0x10000)
        snprintf(text, 16, "\\u%04x", code);
    else
        snprintf(text, 16, "\\u%04x\\u%04x", 0xd800 + ((code - 0x10000) >> 10), 0xdc00 + ((code - 0x10000) & 0x3ff));
    return text;
}

static bool json_str(struct json_writer *w, const struct str *s)
{
    bool outer = w->input;
    w->input |= str_origin(s) == KVG_INPUT && !s->runs;
    size_t plain = 0;
    bool ok = burn(w->r, s->len * 2) && json_text(w, "\"");
    for (size_t i = 0; ok && i < s->len;) {
        unsigned char c = (unsigned char)s->bytes[i];
        if (c >= 0x20 && c != '"' && c != '\\' && (c < 0x80 || !w->style->ensure_ascii)) {
            i++;
            continue;
        }
        unsigned n = kvg_utf8_len((const unsigned char *)s->bytes + i, s->len - i);
        n = n ? n : 1;
        char text[16];
        const char *escape = json_escape(w, s->bytes + i, n, text);
        if (escape) {
            uint8_t origin = w->input ? KVG_INPUT : str_origin(s);
            ok = json_slice(w, s, plain, i) && add_copy(w->r, &w->out, escape, strlen(escape), origin);
            plain = i + n;
        }
        i += n;
    }
    ok = ok && json_slice(w, s, plain, s->len) && json_text(w, "\"");
    w->input = outer;
    return ok;
}

static bool json_newline(struct json_writer *w)
{
    if (!w->style->indent)
        return true;
    if (!json_text(w, "\n"))
        return false;
    for (uint32_t i = 0; i < w->level; i++)
        if (!json_slice(w, w->style->indent, 0, w->style->indent->len))
            return false;
    return true;
}

static bool json_value(struct json_writer *w, struct value v);

static bool json_seq(struct json_writer *w, const struct seq *seq)
{
    if (seq->n == 0)
        return json_text(w, "[]");
    w->level++;
    bool ok = json_text(w, "[");
    for (size_t i = 0; ok && i < seq->n; i++)
        ok = (!i || json_slice(w, w->style->item_separator, 0, w->style->item_separator->len)) && json_newline(w) &&
             json_value(w, seq->items[i]);
    w->level--;
    return ok && json_newline(w) && json_text(w, "]");
}

static bool json_key(struct json_writer *w, struct value key)
{
    switch (key.type) {
    case V_STR:
        return json_str(w, key.s);
    case V_INT:
    case V_BIGINT:
    case V_FLOAT:
    case V_BOOL:
    case V_NONE:
        return json_text(w, "\"") && json_value(w, key) && json_text(w, "\"");
    default:
        fail_value(w->r, "keys must be str, int, float, bool or None, not %s", type_name(key));
        return false;
    }
}

static int by_key(const void *a, const void *b)
{
    const struct str *x = ((const struct pair *)a)->key.s, *y = ((const struct pair *)b)->key.s;
    int c = memcmp(x->bytes, y->bytes, x->len < y->len ? x->len : y->len);
    return c ? c : x->len < y->len ? -1 : x->len > y->len;
}

static const struct pair *sorted_pairs(struct render *r, const struct dict *dict)
{
    struct pair *pairs = burn(r, dict->n * 64) ? render_alloc(r, dict->n * sizeof *pairs) : NULL;
    if (!pairs)
        return NULL;
    memcpy(pairs, dict->pairs, dict->n * sizeof *pairs);
    for (size_t i = 0; i < dict->n; i++)
        if (pairs[i].key.type != V_STR) {
            fail_value(r, "only string keys can be sorted");
            return NULL;
        }
    qsort(pairs, dict->n, sizeof *pairs, by_key);
    return pairs;
}

static bool json_dict(struct json_writer *w, const struct dict *dict)
{
    const struct pair *pairs = dict->pairs;
    if (dict->n == 0)
        return json_text(w, "{}");
    if (w->style->sort_keys && !(pairs = sorted_pairs(w->r, dict)))
        return false;
    w->level++;
    bool ok = json_text(w, "{");
    for (size_t i = 0; ok && i < dict->n; i++)
        ok = (!i || json_slice(w, w->style->item_separator, 0, w->style->item_separator->len)) && json_newline(w) &&
             json_key(w, pairs[i].key) && json_slice(w, w->style->key_separator, 0, w->style->key_separator->len) &&
             json_value(w, pairs[i].value);
    w->level--;
    return ok && json_newline(w) && json_text(w, "}");
}

static bool json_scalar(struct json_writer *w, struct value v)
{
    uint8_t origin = w->input ? KVG_INPUT : v.origin;
    switch (v.type) {
    case V_NONE:
        return add_text(w->r, &w->out, "null", origin);
    case V_BOOL:
        return add_text(w->r, &w->out, v.b ? "true" : "false", origin);
    case V_FLOAT:
        if (!isfinite(v.f))
            return add_text(w->r, &w->out, isnan(v.f) ? "NaN" : v.f < 0 ? "-Infinity" : "Infinity", origin);
        /* fall through */
    case V_INT:
    case V_BIGINT:
        return print_scalar(w->r, &w->out, with_origin(v, origin));
    default:
        fail_value(w->r, "Object of type %s is not JSON serializable", type_name(v));
        return false;
    }
}

static bool json_value(struct json_writer *w, struct value v)
{
    if (++w->r->depth > MAX_PRINT_DEPTH) {
        fail_limit(w->r, "nesting");
        return false;
    }
    bool outer = w->input, ok;
    if (v.type == V_STR) {
        ok = json_str(w, v.s);
    } else if (v.type == V_SEQ && v.seq->kind <= SEQ_TUPLE) {
        w->input |= v.seq->origin == KVG_INPUT;
        ok = json_seq(w, v.seq);
    } else if (v.type == V_DICT) {
        w->input |= v.dict->origin == KVG_INPUT;
        ok = json_dict(w, v.dict);
    } else {
        ok = json_scalar(w, v);
    }
    w->input = outer;
    w->r->depth--;
    return ok;
}

const struct str *to_json(struct render *r, struct value v, const struct json_style *style)
{
    struct json_writer w = {.r = r, .style = style};
    pieces_init(&w.out);
    return json_value(&w, v) ? pieces_str(r, &w.out) : NULL;
}
