/* Python's two formatting languages: '%s of %d' % args and '{} of {name:>5}'.format(...). */
#include "libprompt/jinja_builtin.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_WIDTH = 10000 };

struct spec {
    char fill, align, sign, type;
    bool alternate, zero, comma;
    int64_t width, precision; /* -1: none */
};

static bool add_fill(struct render *r, struct pieces *out, char fill, int64_t n)
{
    char *bytes = n > 0 ? render_alloc(r, (size_t)n) : NULL;
    if (n <= 0)
        return true;
    return bytes && pieces_add(r, out, memset(bytes, fill, (size_t)n), (size_t)n, KVG_TEMPLATE);
}

/* Pads s to the width; numbers go to the right, and zeros behind their sign. */
static bool add_padded(struct render *r, struct pieces *out, const struct spec *spec, const struct str *s, bool number)
{
    int64_t pad = spec->width - (int64_t)str_chars(r, s);
    char align = spec->align ? spec->align : number ? '>' : '<';
    size_t sign = 0;
    if (align == '=' && s->len && strchr("+- ", s->bytes[0]))
        sign = 1;
    int64_t left = align == '<' ? 0 : align == '^' ? pad / 2 : pad;
    return pieces_add_range(r, out, s, 0, sign) && add_fill(r, out, spec->fill ? spec->fill : ' ', left) &&
           pieces_add_range(r, out, s, sign, s->len) && add_fill(r, out, spec->fill ? spec->fill : ' ', pad < 0 ? 0 : pad - left);
}

static size_t group_thousands(char *text, size_t n)
{
    size_t start = text[0] == '-' || text[0] == '+' || text[0] == ' ', end = start;
    while (end < n && text[end] >= '0' && text[end] <= '9')
        end++;
    for (size_t i = end; i > start + 3; i -= 3) {
        memmove(text + i - 3 + 1, text + i - 3, n - (i - 3));
        text[i - 3] = ',';
        n++;
    }
    return n;
}

static size_t format_integer(const struct spec *spec, int64_t value, char text[160])
{
    uint64_t magnitude = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
    char digits[80];
    size_t n = 0;
    int base = spec->type == 'x' || spec->type == 'X' ? 16 : spec->type == 'o' ? 8 : spec->type == 'b' ? 2 : 10;
    do {
        int d = (int)(magnitude % (unsigned)base);
        digits[n++] = (char)(d < 10 ? '0' + d : (spec->type == 'X' ? 'A' : 'a') + d - 10);
    } while ((magnitude /= (unsigned)base));
    for (; (int64_t)n < spec->precision && n < 60;)
        digits[n++] = '0';
    size_t w = 0;
    if (value < 0)
        text[w++] = '-';
    else if (spec->sign == '+' || spec->sign == ' ')
        text[w++] = spec->sign;
    if (spec->alternate && base != 10) {
        text[w++] = '0';
        text[w++] = spec->type;
    }
    while (n)
        text[w++] = digits[--n];
    return spec->comma ? group_thousands(text, w) : w;
}

static bool add_double(struct render *r, struct pieces *out, const struct spec *spec, double value, uint8_t origin)
{
    if (spec->precision > 300)
        return fail_value(r, "precision %lld is too large", (long long)spec->precision), false;
    char text[1024], format[16];
    size_t n;
    if (spec->type == '%')
        value *= 100;
    if (!spec->type && spec->precision < 0) {
        n = format_double(value, text);
    } else {
        bool fixed = spec->type == '%' || spec->type == 'F';
        snprintf(format, sizeof format, "%%%s%s.*%c", spec->alternate ? "#" : "",
                 spec->sign == '+'   ? "+"
                 : spec->sign == ' ' ? " "
                                     : "",
                 fixed        ? 'f'
                 : spec->type ? spec->type
                              : 'g');
        n = (size_t)snprintf(text, 700, format, spec->precision < 0 ? 6 : (int)spec->precision, value);
    }
    if (spec->comma)
        n = group_thousands(text, n);
    if (spec->type == '%')
        text[n++] = '%';
    char *copy = render_alloc(r, n);
    const struct str *s = copy ? str_new(r, memcpy(copy, text, n), n, origin) : NULL;
    return s && add_padded(r, out, spec, s, true);
}

static bool add_integer(struct render *r, struct pieces *out, const struct spec *spec, int64_t value, uint8_t origin)
{
    char text[160];
    size_t n = format_integer(spec, value, text);
    char *copy = render_alloc(r, n);
    const struct str *s = copy ? str_new(r, memcpy(copy, text, n), n, origin) : NULL;
    return s && add_padded(r, out, spec, s, true);
}

static bool add_string(struct render *r, struct pieces *out, const struct spec *spec, const struct str *s)
{
    if (s && spec->precision >= 0)
        s = str_slice(r, s, 0, str_byte_offset(r, s, (size_t)spec->precision));
    return s && add_padded(r, out, spec, s, false);
}

static const struct str *repr_str(struct render *r, struct value v)
{
    struct pieces out;
    pieces_init(&out);
    return repr_value(r, &out, v) ? pieces_str(r, &out) : NULL;
}

/* ---- % ---- */

static bool read_number(struct render *r, const struct str *f, size_t *i, int64_t *out)
{
    for (*out = 0; *i < f->len && f->bytes[*i] >= '0' && f->bytes[*i] <= '9'; (*i)++)
        if ((*out = *out * 10 + (f->bytes[*i] - '0')) > MAX_WIDTH)
            return fail_value(r, "format: a width over %d", MAX_WIDTH), false;
    return true;
}

struct percent_args {
    struct value all;
    size_t next;
    bool tuple;
};

static bool next_arg(struct render *r, struct percent_args *a, struct value *out)
{
    if (a->tuple ? a->next >= a->all.seq->n : a->next > 0)
        return fail_value(r, "not enough arguments for format string"), false;
    *out = a->tuple ? a->all.seq->items[a->next] : a->all;
    a->next++;
    return true;
}

static bool percent_item(struct render *r, struct pieces *out, struct spec *spec, struct value v)
{
    int64_t i;
    if (spec->zero && spec->align != '<') {
        spec->fill = '0';
        spec->align = '=';
    }
    switch (spec->type) {
    case 's':
        spec->align = spec->align == '<' ? '<' : '>';
        spec->fill = ' ';
        return add_string(r, out, spec, to_str(r, v));
    case 'r':
        spec->align = spec->align == '<' ? '<' : '>';
        spec->fill = ' ';
        return add_string(r, out, spec, repr_str(r, v));
    case 'd':
    case 'i':
    case 'u':
    case 'x':
    case 'X':
    case 'o':
        if (v.type == V_FLOAT && strchr("diu", spec->type) && fabs(v.f) < 9e18)
            v = with_origin(int_value((int64_t)v.f), v.origin);
        if (!as_int(v, &i))
            return fail_value(r, "%%%c format: a real number is required, not %s", spec->type, type_name(v)), false;
        return add_integer(r, out, spec, i, v.origin);
    case 'f':
    case 'F':
    case 'e':
    case 'E':
    case 'g':
    case 'G':
        if (!is_number(v))
            return fail_value(r, "must be real number, not %s", type_name(v)), false;
        return add_double(r, out, spec, as_double(v), v.origin);
    default:
        return fail_value(r, "unsupported format character '%c'", spec->type), false;
    }
}

/* One % item at f[*i], which passes it. */
static bool percent_one(struct render *r, struct pieces *out, const struct str *f, size_t *i, struct percent_args *a)
{
    struct spec spec = {.width = 0, .precision = -1};
    struct value v = MISSING_VALUE;
    if (*i < f->len && f->bytes[*i] == '(') {
        const char *close = memchr(f->bytes + *i, ')', f->len - *i);
        if (!close || a->all.type != V_DICT)
            return fail_value(r, close ? "format requires a mapping" : "incomplete format key"), false;
        size_t from = *i + 1, to = (size_t)(close - f->bytes);
        const struct value *found = dict_find_str(r, a->all.dict, f->bytes + from, to - from);
        if (!found)
            return fail_value(r, "format: no key '%.*s'", (int)(to - from), f->bytes + from), false;
        v = *found;
        *i = to + 1;
    }
    for (; *i < f->len && strchr("-+ #0", f->bytes[*i]) && f->bytes[*i]; (*i)++) {
        char c = f->bytes[*i];
        spec.align = c == '-' ? '<' : spec.align;
        spec.sign = c == '+' || (c == ' ' && spec.sign != '+') ? c : spec.sign;
        spec.alternate |= c == '#';
        spec.zero |= c == '0';
    }
    if (!read_number(r, f, i, &spec.width))
        return false;
    if (*i < f->len && f->bytes[*i] == '.') {
        (*i)++;
        if (!read_number(r, f, i, &spec.precision))
            return false;
    }
    if (*i >= f->len)
        return fail_value(r, "incomplete format"), false;
    spec.type = f->bytes[(*i)++];
    if (spec.type == '%')
        return pieces_add(r, out, "%", 1, KVG_TEMPLATE);
    if (v.type == V_MISSING && !next_arg(r, a, &v))
        return false;
    return percent_item(r, out, &spec, v);
}

struct value percent_format(struct render *r, const struct str *f, struct value args)
{
    struct percent_args a = {.all = args, .tuple = args.type == V_SEQ && args.seq->kind == SEQ_TUPLE};
    struct pieces out;
    pieces_init(&out);
    size_t plain = 0;
    for (size_t i = 0; i < f->len;) {
        if (f->bytes[i] != '%') {
            i++;
            continue;
        }
        if (!pieces_add_range(r, &out, f, plain, i))
            return ERROR_VALUE;
        i++;
        if (!percent_one(r, &out, f, &i, &a))
            return ERROR_VALUE;
        plain = i;
    }
    if (!burn(r, f->len) || !pieces_add_range(r, &out, f, plain, f->len))
        return ERROR_VALUE;
    bool all_used =
        a.tuple ? a.next >= a.all.seq->n : a.next || args.type == V_DICT || (args.type == V_SEQ && args.seq->kind == SEQ_LIST);
    return all_used ? str_value(pieces_str(r, &out)) : fail_value(r, "not all arguments converted during string formatting");
}

/* ---- {} ---- */

static bool parse_spec(struct render *r, const struct str *text, struct spec *spec)
{
    const char *b = text->bytes;
    size_t n = text->len, i = 0;
    *spec = (struct spec){.precision = -1};
    if (n >= 2 && strchr("<>^=", b[1]) && b[1]) {
        spec->fill = b[0];
        spec->align = b[1];
        i = 2;
    } else if (n >= 1 && strchr("<>^=", b[0]) && b[0]) {
        spec->align = b[0];
        i = 1;
    }
    if (i < n && (b[i] == '+' || b[i] == '-' || b[i] == ' '))
        spec->sign = b[i++];
    if (i < n && b[i] == '#')
        spec->alternate = b[i++];
    if (i < n && b[i] == '0') {
        i++;
        if (!spec->align) {
            spec->fill = '0';
            spec->align = '=';
        }
    }
    if (!read_number(r, text, &i, &spec->width))
        return false;
    if (i < n && b[i] == ',')
        spec->comma = b[i++];
    if (i < n && b[i] == '.') {
        i++;
        if (!read_number(r, text, &i, &spec->precision))
            return false;
    }
    if (i < n)
        spec->type = b[i++];
    if (i < n)
        return fail_value(r, "Invalid format specifier '%.*s'", (int)(n < 60 ? n : 60), b), false;
    return true;
}

static bool brace_value(struct render *r, struct pieces *out, struct value v, const struct str *text)
{
    struct spec spec;
    int64_t i;
    if (!text->len)
        return print_value(r, out, v);
    if (!parse_spec(r, text, &spec))
        return false;
    if (v.type == V_STR) {
        if (spec.type && spec.type != 's')
            return fail_value(r, "Unknown format code '%c' for object of type 'str'", spec.type), false;
        return add_string(r, out, &spec, v.s);
    }
    if (as_int(v, &i) && (!spec.type || strchr("dxXob", spec.type)))
        return add_integer(r, out, &spec, i, v.origin);
    if (is_number(v) && (!spec.type || strchr("eEfFgG%", spec.type)))
        return add_double(r, out, &spec, as_double(v), v.origin);
    return fail_value(r, "unsupported format string passed to %s.__format__", type_name(v)), false;
}

struct brace_state {
    const struct args *args;
    size_t next;
};

/* The value a field name such as `0`, `name`, `name.attr` or `name[key]` stands for. */
static struct value field_value(struct render *r, struct brace_state *state, const struct str *name)
{
    size_t end = 0;
    while (end < name->len && name->bytes[end] != '.' && name->bytes[end] != '[')
        end++;
    struct value v = MISSING_VALUE;
    bool digits = true;
    for (size_t i = 0; i < end; i++)
        digits &= name->bytes[i] >= '0' && name->bytes[i] <= '9';
    if (digits && end < 10) {
        size_t number = end ? (size_t)strtol(memcpy((char[12]){0}, name->bytes, end), NULL, 10) : state->next++;
        if (number < state->args->n_pos)
            v = state->args->pos[number];
    }
    for (uint32_t i = 0; !digits && i < state->args->n_kw; i++)
        if (state->args->kw[i].name->len == end && memcmp(state->args->kw[i].name->bytes, name->bytes, end) == 0)
            v = state->args->kw[i].value;
    if (v.type == V_MISSING)
        return fail_value(r, "format: no argument '%.*s'", (int)(end < 60 ? end : 60), name->bytes);
    while (end < name->len && v.type != V_ERROR) {
        bool item = name->bytes[end] == '[';
        size_t from = ++end;
        while (end < name->len && (item ? name->bytes[end] != ']' : name->bytes[end] != '.' && name->bytes[end] != '['))
            end++;
        const struct str *key = str_slice(r, name, from, end);
        if (!key)
            return ERROR_VALUE;
        end += item;
        bool number = item && key->len && key->len < 10;
        for (size_t i = 0; i < key->len; i++)
            number &= key->bytes[i] >= '0' && key->bytes[i] <= '9';
        if (number)
            v = get_item(r, v, int_value(strtol(memcpy((char[12]){0}, key->bytes, key->len), NULL, 10)));
        else
            v = item ? get_item(r, v, str_value(key)) : get_attr(r, v, key);
    }
    return v;
}

static bool brace_field(struct render *r, struct pieces *out, const struct str *field, struct brace_state *state)
{
    size_t name_end = 0;
    while (name_end < field->len && field->bytes[name_end] != '!' && field->bytes[name_end] != ':')
        name_end++;
    const struct str *name = str_slice(r, field, 0, name_end);
    struct value v = name ? field_value(r, state, name) : ERROR_VALUE;
    if (v.type == V_ERROR)
        return false;
    size_t i = name_end;
    if (i + 1 < field->len && field->bytes[i] == '!') {
        char how = field->bytes[i + 1];
        if (how != 's' && how != 'r')
            return fail_value(r, "Unknown conversion specifier '%c'", how), false;
        v = str_value(how == 's' ? to_str(r, v) : repr_str(r, v));
        i += 2;
    }
    if (i < field->len && field->bytes[i] != ':')
        return fail_value(r, "expected ':' after conversion specifier"), false;
    const struct str *spec = v.type == V_ERROR ? NULL : str_slice(r, field, i < field->len ? i + 1 : i, field->len);
    return spec && brace_value(r, out, v, spec);
}

struct value brace_format(struct render *r, const struct str *f, const struct args *args)
{
    struct brace_state state = {.args = args};
    struct pieces out;
    pieces_init(&out);
    size_t plain = 0;
    if (!burn(r, f->len))
        return ERROR_VALUE;
    for (size_t i = 0; i < f->len;) {
        char c = f->bytes[i];
        if (c != '{' && c != '}') {
            i++;
            continue;
        }
        if (i + 1 < f->len && f->bytes[i + 1] == c) { /* doubled: itself */
            if (!pieces_add_range(r, &out, f, plain, i + 1))
                return ERROR_VALUE;
            plain = i += 2;
            continue;
        }
        const char *close = c == '{' ? memchr(f->bytes + i, '}', f->len - i) : NULL;
        if (!close)
            return fail_value(r, "Single '%c' encountered in format string", c);
        size_t end = (size_t)(close - f->bytes);
        if (memchr(f->bytes + i + 1, '{', end - i - 1))
            return fail_value(r, "nested fields in a format string are not supported");
        const struct str *field = str_slice(r, f, i + 1, end);
        if (!field || !pieces_add_range(r, &out, f, plain, i) || !brace_field(r, &out, field, &state))
            return ERROR_VALUE;
        plain = i = end + 1;
    }
    return pieces_add_range(r, &out, f, plain, f->len) ? str_value(pieces_str(r, &out)) : ERROR_VALUE;
}
