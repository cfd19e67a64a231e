/* Methods of str, list, tuple and dict that Python has and templates use. */
#include "libprompt/jinja_builtin.h"
#include "libprompt/utf8.h"
#include <string.h>
#include <utf8proc.h>

#define METHOD(name) static struct value name(struct render *r, struct value self, const struct value *p, const struct args *args)

/* ---- str ---- */

static struct value strip(struct render *r, struct value self, const struct value *p, bool left, bool right)
{
    const struct str *chars;
    return arg_str(r, p[0], &chars) ? str_value(str_strip(r, self.s, chars, left, right)) : ERROR_VALUE;
}

METHOD(s_strip)
{
    return strip(r, self, p, true, true);
}

METHOD(s_lstrip)
{
    return strip(r, self, p, true, false);
}

METHOD(s_rstrip)
{
    return strip(r, self, p, false, true);
}

static struct value split(struct render *r, struct value self, const struct value *p, bool from_right)
{
    const struct str *separator;
    int64_t max;
    if (!arg_str(r, p[0], &separator) || !arg_int(r, p[1], -1, &max))
        return ERROR_VALUE;
    return seq_value(str_split(r, self.s, separator, max, from_right));
}

METHOD(s_split)
{
    return split(r, self, p, false);
}

METHOD(s_rsplit)
{
    return split(r, self, p, true);
}

METHOD(s_splitlines)
{
    return seq_value(str_splitlines(r, self.s, arg_bool(p[0], false)));
}

static bool has_affix(const struct str *s, const struct str *affix, bool end)
{
    return affix->len <= s->len && memcmp(end ? s->bytes + s->len - affix->len : s->bytes, affix->bytes, affix->len) == 0;
}

/* The part of self between character numbers p[0] and p[1]. */
static const struct str *part(struct render *r, struct value self, struct value from, struct value to)
{
    struct value v = from.type == V_MISSING && to.type == V_MISSING ? self : get_slice(r, self, from, to, MISSING_VALUE);
    return v.type == V_STR ? v.s : NULL;
}

static struct value affix_test(struct render *r, struct value self, const struct value *p, bool end)
{
    const struct str *s = part(r, self, p[1], p[2]);
    if (!s)
        return ERROR_VALUE;
    if (p[0].type == V_STR)
        return bool_value(has_affix(s, p[0].s, end));
    if (p[0].type != V_SEQ || p[0].seq->kind != SEQ_TUPLE)
        return fail_value(r, "%s first arg must be str or a tuple of str, not %s", end ? "endswith" : "startswith",
                          type_name(p[0]));
    for (size_t i = 0; i < p[0].seq->n; i++) {
        struct value v = p[0].seq->items[i];
        if (v.type != V_STR)
            return fail_value(r, "tuple for %s must only contain str", end ? "endswith" : "startswith");
        if (has_affix(s, v.s, end))
            return bool_value(true);
    }
    return bool_value(false);
}

METHOD(s_startswith)
{
    return affix_test(r, self, p, false);
}

METHOD(s_endswith)
{
    return affix_test(r, self, p, true);
}

static struct value remove_affix(struct render *r, struct value self, const struct value *p, bool end)
{
    const struct str *affix;
    if (!arg_str(r, p[0], &affix) || !affix)
        return ERROR_VALUE;
    if (!has_affix(self.s, affix, end))
        return self;
    return str_value(str_slice(r, self.s, end ? 0 : affix->len, end ? self.s->len - affix->len : self.s->len));
}

METHOD(s_removeprefix)
{
    return remove_affix(r, self, p, false);
}

METHOD(s_removesuffix)
{
    return remove_affix(r, self, p, true);
}

METHOD(s_upper)
{
    return str_value(str_case(r, self.s, CASE_UPPER));
}

METHOD(s_lower)
{
    return str_value(str_case(r, self.s, CASE_LOWER));
}

METHOD(s_title)
{
    return str_value(str_case(r, self.s, CASE_TITLE));
}

METHOD(s_capitalize)
{
    return str_value(str_case(r, self.s, CASE_CAPITALIZE));
}

METHOD(s_swapcase)
{
    return str_value(str_case(r, self.s, CASE_SWAP));
}

METHOD(s_replace)
{
    int64_t count;
    const struct str *from, *to;
    if (!arg_str(r, p[0], &from) || !arg_str(r, p[1], &to) || !arg_int(r, p[2], -1, &count))
        return ERROR_VALUE;
    if (!from || !to)
        return fail_value(r, "replace() needs the old and the new text");
    return str_value(str_replace(r, self.s, from, to, count));
}

METHOD(s_join)
{
    struct seq *items = p[0].type == V_MISSING ? NULL : iterate(r, p[0]);
    if (!items)
        return fail_value(r, "can only join an iterable");
    return str_value(str_join(r, self.s, items, true));
}

METHOD(s_format)
{
    return brace_format(r, self.s, args);
}

/* find, rfind, index, rindex: the character number, or -1. */
static int64_t find(struct render *r, struct value self, const struct value *p, bool from_right)
{
    const struct str *sub, *s = part(r, self, p[1], p[2]);
    if (!s || !arg_str(r, p[0], &sub) || !sub)
        return -2;
    size_t at = from_right ? str_rfind(r, s, sub, s->len) : str_find(r, s, sub, 0);
    if (at == SIZE_MAX)
        return -1;
    const struct str *before = str_slice(r, self.s, 0, (size_t)(s->bytes - self.s->bytes) + at);
    return before ? (int64_t)str_chars(r, before) : -2;
}

static struct value find_result(struct render *r, int64_t at, bool must)
{
    if (at == -2)
        return fail_value(r, "must be str");
    return at == -1 && must ? fail_value(r, "substring not found") : int_value(at);
}

METHOD(s_find)
{
    return find_result(r, find(r, self, p, false), false);
}

METHOD(s_rfind)
{
    return find_result(r, find(r, self, p, true), false);
}

METHOD(s_index)
{
    return find_result(r, find(r, self, p, false), true);
}

METHOD(s_rindex)
{
    return find_result(r, find(r, self, p, true), true);
}

METHOD(s_count)
{
    const struct str *sub, *s = part(r, self, p[1], p[2]);
    int64_t n = 0;
    if (!s || !arg_str(r, p[0], &sub))
        return ERROR_VALUE;
    if (!sub)
        return fail_value(r, "must be str");
    if (!sub->len)
        return int_value((int64_t)str_chars(r, s) + 1);
    for (size_t at = 0; (at = str_find(r, s, sub, at)) != SIZE_MAX; at += sub->len)
        n++;
    return int_value(n);
}

static struct value partition(struct render *r, struct value self, const struct value *p, bool from_right)
{
    const struct str *separator, *s = self.s;
    if (!arg_str(r, p[0], &separator))
        return ERROR_VALUE;
    if (!separator || !separator->len)
        return fail_value(r, "empty separator");
    size_t at = from_right ? str_rfind(r, s, separator, s->len) : str_find(r, s, separator, 0);
    struct seq *out = seq_new(r, SEQ_TUPLE, 3);
    if (!out)
        return ERROR_VALUE;
    if (at == SIZE_MAX) {
        struct value empty = str_value(str_literal(r, ""));
        out->items[0] = from_right ? empty : self;
        out->items[1] = empty;
        out->items[2] = from_right ? self : empty;
    } else {
        out->items[0] = str_value(str_slice(r, s, 0, at));
        out->items[1] = str_value(str_slice(r, s, at, at + separator->len));
        out->items[2] = str_value(str_slice(r, s, at + separator->len, s->len));
    }
    return seq_value(out);
}

METHOD(s_partition)
{
    return partition(r, self, p, false);
}

METHOD(s_rpartition)
{
    return partition(r, self, p, true);
}

/* ljust, rjust, zfill, center. */
static struct value pad(struct render *r, struct value self, const struct value *p, char where)
{
    int64_t width;
    const struct str *fill = NULL;
    if (!arg_int(r, p[0], 0, &width) || !arg_str(r, p[1], &fill))
        return ERROR_VALUE;
    if (!fill)
        fill = str_literal(r, where == 'z' ? "0" : " ");
    int64_t n = width - (int64_t)str_chars(r, self.s), left = n / 2 + (n & width & 1);
    if (n <= 0)
        return self;
    left = where == 'l' ? 0 : where == 'c' ? left : n;
    const struct str *a = str_repeat(r, fill, left), *b = str_repeat(r, fill, n - left), *s = self.s, *sign = NULL;
    if (where == 'z' && s->len && (s->bytes[0] == '-' || s->bytes[0] == '+')) {
        sign = str_slice(r, s, 0, 1);
        s = str_slice(r, s, 1, s->len);
    }
    if (!a || !b || !s)
        return ERROR_VALUE;
    a = sign ? str_concat(r, sign, a) : a;
    s = a ? str_concat(r, a, s) : NULL;
    return s ? str_value(str_concat(r, s, b)) : ERROR_VALUE;
}

METHOD(s_ljust)
{
    return pad(r, self, p, 'l');
}

METHOD(s_rjust)
{
    return pad(r, self, p, 'r');
}

METHOD(s_center)
{
    return pad(r, self, p, 'c');
}

METHOD(s_zfill)
{
    const struct value width[2] = {p[0], MISSING_VALUE};
    return pad(r, self, width, 'z');
}

static bool is_alpha(utf8proc_category_t c)
{
    return c >= UTF8PROC_CATEGORY_LU && c <= UTF8PROC_CATEGORY_LO;
}

static bool is_digit(utf8proc_category_t c)
{
    return c == UTF8PROC_CATEGORY_ND;
}

static bool is_alnum(utf8proc_category_t c)
{
    return is_alpha(c) || (c >= UTF8PROC_CATEGORY_ND && c <= UTF8PROC_CATEGORY_NO);
}

static struct value all_are(struct render *r, struct value self, bool (*is)(utf8proc_category_t))
{
    const struct str *s = self.s;
    if (!burn(r, s->len * 2))
        return ERROR_VALUE;
    for (size_t i = 0; i < s->len;) {
        unsigned n = kvg_utf8_len((const unsigned char *)s->bytes + i, s->len - i);
        n = n ? n : 1;
        uint32_t c = kvg_utf8_decode((const unsigned char *)s->bytes + i, n);
        if (is ? !is(utf8proc_category((utf8proc_int32_t)c)) : !py_space(c))
            return bool_value(false);
        i += n;
    }
    return bool_value(s->len != 0);
}

METHOD(s_isdigit)
{
    return all_are(r, self, is_digit);
}

METHOD(s_isalpha)
{
    return all_are(r, self, is_alpha);
}

METHOD(s_isalnum)
{
    return all_are(r, self, is_alnum);
}

METHOD(s_isspace)
{
    return all_are(r, self, NULL);
}

METHOD(s_isascii)
{
    return bool_value(str_is_ascii(r, self.s));
}

METHOD(s_isupper)
{
    return call_function(r, find_test("upper", 5), self, &(struct args){0});
}

METHOD(s_islower)
{
    return call_function(r, find_test("lower", 5), self, &(struct args){0});
}

static const struct function str_methods[] = {
    {"strip", "chars", s_strip},
    {"lstrip", "chars", s_lstrip},
    {"rstrip", "chars", s_rstrip},
    {"split", "sep,maxsplit", s_split},
    {"rsplit", "sep,maxsplit", s_rsplit},
    {"splitlines", "keepends", s_splitlines},
    {"startswith", "prefix,start,end", s_startswith},
    {"endswith", "suffix,start,end", s_endswith},
    {"removeprefix", "prefix", s_removeprefix},
    {"removesuffix", "suffix", s_removesuffix},
    {"upper", "", s_upper},
    {"lower", "", s_lower},
    {"casefold", "", s_lower},
    {"title", "", s_title},
    {"capitalize", "", s_capitalize},
    {"swapcase", "", s_swapcase},
    {"replace", "old,new,count", s_replace},
    {"join", "iterable", s_join},
    {"format", "*", s_format},
    {"find", "sub,start,end", s_find},
    {"rfind", "sub,start,end", s_rfind},
    {"index", "sub,start,end", s_index},
    {"rindex", "sub,start,end", s_rindex},
    {"count", "sub,start,end", s_count},
    {"partition", "sep", s_partition},
    {"rpartition", "sep", s_rpartition},
    {"ljust", "width,fillchar", s_ljust},
    {"rjust", "width,fillchar", s_rjust},
    {"center", "width,fillchar", s_center},
    {"zfill", "width", s_zfill},
    {"isdigit", "", s_isdigit},
    {"isdecimal", "", s_isdigit},
    {"isnumeric", "", s_isdigit},
    {"isalpha", "", s_isalpha},
    {"isalnum", "", s_isalnum},
    {"isspace", "", s_isspace},
    {"isascii", "", s_isascii},
    {"isupper", "", s_isupper},
    {"islower", "", s_islower},
};

/* ---- dict ---- */

METHOD(d_get)
{
    if (p[0].type == V_MISSING)
        return fail_value(r, "get expected at least 1 argument, got 0");
    if (p[0].type == V_DICT || (p[0].type == V_SEQ && p[0].seq->kind == SEQ_LIST))
        return fail_value(r, "unhashable type: '%s'", type_name(p[0]));
    const struct value *found = dict_find(r, self.dict, p[0]);
    return found ? *found : p[1].type == V_MISSING ? NONE_VALUE : p[1];
}

static struct value view(struct render *r, struct value self, enum seq_kind kind)
{
    const struct dict *dict = self.dict;
    struct seq *out = burn(r, dict->n * 32) ? seq_new(r, kind, dict->n) : NULL;
    if (!out)
        return ERROR_VALUE;
    out->origin = dict->origin;
    for (size_t i = 0; i < dict->n; i++) {
        const struct pair *pair = &dict->pairs[i];
        out->items[i] = kind == SEQ_KEYS ? pair->key : kind == SEQ_VALUES ? pair->value : pair_tuple(r, pair->key, pair->value);
        if (out->items[i].type == V_ERROR)
            return ERROR_VALUE;
    }
    return seq_value(out);
}

METHOD(d_items)
{
    return view(r, self, SEQ_ITEMS);
}

METHOD(d_keys)
{
    return view(r, self, SEQ_KEYS);
}

METHOD(d_values)
{
    return view(r, self, SEQ_VALUES);
}

METHOD(d_copy)
{
    return self; /* no one can change either of them */
}

static const struct function dict_methods[] = {
    {"get", "key,default", d_get}, {"items", "", d_items}, {"keys", "", d_keys}, {"values", "", d_values}, {"copy", "", d_copy},
};

/* ---- list and tuple ---- */

METHOD(l_count)
{
    int64_t n = 0;
    for (size_t i = 0; i < self.seq->n; i++) {
        int equal = burn(r, 0) ? value_equal(r, self.seq->items[i], p[0]) : -1;
        if (equal < 0)
            return ERROR_VALUE;
        n += equal;
    }
    return int_value(n);
}

METHOD(l_index)
{
    for (size_t i = 0; i < self.seq->n; i++) {
        int equal = burn(r, 0) ? value_equal(r, self.seq->items[i], p[0]) : -1;
        if (equal)
            return equal < 0 ? ERROR_VALUE : int_value((int64_t)i);
    }
    return fail_value(r, "the value is not in the list");
}

static const struct function list_methods[] = {
    {"count", "value", l_count},
    {"index", "value", l_index},
    {"copy", "", d_copy},
};

static bool is_one_of(const char *const *words, const char *name, size_t len)
{
    for (; *words; words++)
        if (strlen(*words) == len && memcmp(*words, name, len) == 0)
            return true;
    return false;
}

const struct function *find_method(struct value object, const char *name, size_t len, bool *unsafe)
{
    static const char *const changes_list[] = {"append", "clear", "pop", "reverse", "insert", "sort", "extend", "remove", NULL};
    static const char *const changes_dict[] = {"clear", "pop", "popitem", "setdefault", "update", NULL};
    *unsafe = false;
    switch (object.type) {
    case V_STR:
        return find_in(str_methods, sizeof str_methods / sizeof *str_methods, name, len);
    case V_DICT:
        *unsafe = is_one_of(changes_dict, name, len);
        return find_in(dict_methods, sizeof dict_methods / sizeof *dict_methods, name, len);
    case V_SEQ:
        if (object.seq->kind > SEQ_TUPLE)
            return NULL;
        *unsafe = object.seq->kind == SEQ_LIST && is_one_of(changes_list, name, len);
        return find_in(list_methods, object.seq->kind == SEQ_LIST ? 3 : 2, name, len);
    default:
        return NULL;
    }
}
