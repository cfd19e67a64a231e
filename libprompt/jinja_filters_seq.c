/* Filters on sequences and mappings. What is a generator in jinja2 is one here: it has no length and can be read once. */
#include "libprompt/jinja_builtin.h"
#include <string.h>

#define FILTER(name) static struct value name(struct render *r, struct value self, const struct value *p, const struct args *args)

/* A sequence of the same items that belongs to the caller. */
static struct seq *copy_items(struct render *r, struct value v, enum seq_kind kind)
{
    struct seq *items = iterate(r, v), *out = items && burn(r, items->n * 16) ? seq_new(r, kind, items->n) : NULL;
    if (!out)
        return NULL;
    if (items->n)
        memcpy(out->items, items->items, items->n * sizeof *out->items);
    out->origin = items->origin;
    return out;
}

static bool is_index(const struct str *s, int64_t *out)
{
    *out = 0;
    for (size_t i = 0; i < s->len; i++) {
        if (s->bytes[i] < '0' || s->bytes[i] > '9')
            return false;
        *out = *out * 10 + (s->bytes[i] - '0');
    }
    return s->len > 0 && s->len < 10;
}

/* item.a.b.0 by a dotted name; an integer is an index. */
static struct value get_path(struct render *r, struct value item, struct value path, struct value otherwise)
{
    if (path.type == V_MISSING || path.type == V_NONE)
        return item;
    size_t from = 0;
    for (bool more = true; more && item.type != V_ERROR;) {
        struct value key = path;
        more = false;
        if (path.type == V_STR) {
            const char *dot = memchr(path.s->bytes + from, '.', path.s->len - from);
            size_t to = dot ? (size_t)(dot - path.s->bytes) : path.s->len;
            const struct str *part = str_slice(r, path.s, from, to);
            if (!part)
                return ERROR_VALUE;
            key = str_value(part);
            int64_t index;
            if (is_index(part, &index))
                key = int_value(index);
            from = to + 1;
            more = dot != NULL;
        }
        item = get_item(r, item, key);
        if (item.type == V_UNDEFINED && otherwise.type != V_MISSING && otherwise.type != V_NONE)
            item = otherwise;
    }
    return item;
}

static struct value sort_key(struct render *r, struct value item, struct value path, struct value otherwise, bool case_sensitive)
{
    struct value key = get_path(r, item, path, otherwise);
    return key.type == V_STR && !case_sensitive ? str_value(str_case(r, key.s, CASE_LOWER)) : key;
}

/* ---- sorting: a stable merge sort, since comparing may fail ---- */

struct keyed {
    struct value key, item;
};

static bool merge_sort(struct render *r, struct keyed *v, struct keyed *scratch, size_t n, bool reverse)
{
    if (n < 2)
        return true;
    size_t half = n / 2, i = 0, j = half, w = 0;
    if (!merge_sort(r, v, scratch, half, reverse) || !merge_sort(r, v + half, scratch, n - half, reverse))
        return false;
    while (i < half && j < n) {
        int order;
        if (!burn(r, 0) || value_compare(r, v[j].key, v[i].key, "<", &order) < 0)
            return false;
        scratch[w++] = (reverse ? order > 0 && order != 2 : order < 0) ? v[j++] : v[i++];
    }
    while (i < half)
        scratch[w++] = v[i++];
    memcpy(v, scratch, w * sizeof *v);
    return true;
}

static struct keyed *sorted(struct render *r, const struct seq *items, struct value path, struct value otherwise,
                            bool case_sensitive, bool reverse)
{
    struct keyed *v = render_alloc(r, items->n * sizeof *v), *scratch = v ? render_alloc(r, items->n * sizeof *v) : NULL;
    if (!scratch)
        return NULL;
    for (size_t i = 0; i < items->n; i++) {
        v[i] = (struct keyed){sort_key(r, items->items[i], path, otherwise, case_sensitive), items->items[i]};
        if (v[i].key.type == V_ERROR)
            return NULL;
    }
    return merge_sort(r, v, scratch, items->n, reverse) ? v : NULL;
}

FILTER(f_sort)
{
    struct seq *out = copy_items(r, self, SEQ_LIST);
    struct keyed *v = out ? sorted(r, out, p[2], MISSING_VALUE, arg_bool(p[1], false), arg_bool(p[0], false)) : NULL;
    for (size_t i = 0; v && i < out->n; i++)
        out->items[i] = v[i].item;
    return v ? seq_value(out) : ERROR_VALUE;
}

static struct seq *items_of(struct render *r, const struct dict *dict, enum seq_kind kind)
{
    struct seq *out = burn(r, dict->n * 32) ? seq_new(r, kind, dict->n) : NULL;
    for (size_t i = 0; out && i < out->n; i++)
        if ((out->items[i] = pair_tuple(r, dict->pairs[i].key, dict->pairs[i].value)).type == V_ERROR)
            return NULL;
    return out;
}

FILTER(f_dictsort)
{
    const struct str *by;
    if (self.type == V_UNDEFINED)
        return fail_undefined(r, self);
    if (self.type != V_DICT)
        return fail_value(r, "'%s' object has no attribute 'items'", type_name(self));
    if (!arg_str(r, p[1], &by))
        return ERROR_VALUE;
    bool value = by && by->len == 5 && memcmp(by->bytes, "value", 5) == 0;
    if (by && !value && !(by->len == 3 && memcmp(by->bytes, "key", 3) == 0))
        return fail_value(r, "You can only sort by either \"key\" or \"value\"");
    struct seq *out = items_of(r, self.dict, SEQ_LIST);
    struct keyed *v = out ? sorted(r, out, int_value(value), MISSING_VALUE, arg_bool(p[0], false), arg_bool(p[2], false)) : NULL;
    for (size_t i = 0; v && i < out->n; i++)
        out->items[i] = v[i].item;
    return v ? seq_value(out) : ERROR_VALUE;
}

FILTER(f_items)
{
    if (self.type == V_UNDEFINED)
        return seq_value(seq_new(r, SEQ_GENERATOR, 0));
    if (self.type != V_DICT)
        return fail_value(r, "Can only get item pairs from a mapping.");
    return seq_value(items_of(r, self.dict, SEQ_GENERATOR));
}

FILTER(f_list)
{
    return seq_value(copy_items(r, self, SEQ_LIST));
}

FILTER(f_first)
{
    static const struct str hint = {.bytes = "No first item, sequence was empty.", .len = 34, .ascii = 1};
    if (self.type == V_STR && self.s->len)
        return get_item(r, self, int_value(0));
    struct seq *items = iterate(r, self);
    if (!items)
        return ERROR_VALUE;
    return items->n ? items->items[0] : (struct value){.type = V_UNDEFINED, .why = UNDEFINED_HINT, .s = &hint};
}

FILTER(f_last)
{
    static const struct str hint = {.bytes = "No last item, sequence was empty.", .len = 33, .ascii = 1};
    if (self.type == V_SEQ && self.seq->kind == SEQ_GENERATOR)
        return fail_value(r, "'generator' object is not reversible");
    if (self.type == V_UNDEFINED)
        return fail_value(r, "'Undefined' object is not reversible");
    if (self.type == V_STR && self.s->len)
        return get_item(r, self, int_value(-1));
    struct seq *items = iterate(r, self);
    if (!items)
        return ERROR_VALUE;
    return items->n ? items->items[items->n - 1] : (struct value){.type = V_UNDEFINED, .why = UNDEFINED_HINT, .s = &hint};
}

FILTER(f_reverse)
{
    if (self.type == V_STR)
        return get_slice(r, self, MISSING_VALUE, MISSING_VALUE, int_value(-1));
    struct seq *out = copy_items(r, self, SEQ_GENERATOR);
    for (size_t i = 0; out && i < out->n / 2; i++) {
        struct value v = out->items[i];
        out->items[i] = out->items[out->n - 1 - i];
        out->items[out->n - 1 - i] = v;
    }
    if (out && self.type == V_SEQ && self.seq->kind == SEQ_GENERATOR)
        out->kind = SEQ_LIST;
    return seq_value(out);
}

FILTER(f_join)
{
    const struct str *separator = p[0].type == V_MISSING ? str_literal(r, "") : to_str(r, p[0]);
    struct seq *items = separator ? iterate(r, self) : NULL;
    if (!items)
        return ERROR_VALUE;
    if (p[1].type != V_MISSING && p[1].type != V_NONE) {
        struct seq *mapped = seq_new(r, SEQ_LIST, items->n);
        for (size_t i = 0; mapped && i < items->n; i++)
            if ((mapped->items[i] = get_path(r, items->items[i], p[1], MISSING_VALUE)).type == V_ERROR)
                return ERROR_VALUE;
        items = mapped;
    }
    return items ? str_value(str_join(r, separator, items, false)) : ERROR_VALUE;
}

FILTER(f_unique)
{
    struct seq *items = iterate(r, self), *out = items ? seq_new(r, SEQ_GENERATOR, items->n) : NULL;
    struct dict *seen = out ? dict_new(r, items->n) : NULL;
    if (!seen)
        return ERROR_VALUE;
    out->n = 0;
    for (size_t i = 0; i < items->n; i++) {
        struct value key = sort_key(r, items->items[i], p[1], MISSING_VALUE, arg_bool(p[0], false));
        size_t before = seen->n;
        if (key.type == V_ERROR || !dict_set(r, seen, key, NONE_VALUE))
            return ERROR_VALUE;
        if (seen->n > before)
            out->items[out->n++] = items->items[i];
    }
    return seq_value(out);
}

static struct value extreme(struct render *r, struct value self, const struct value *p, bool max)
{
    static const struct str hint = {.bytes = "No aggregated item, sequence was empty.", .len = 39, .ascii = 1};
    struct seq *items = iterate(r, self);
    struct value best = {.type = V_UNDEFINED, .why = UNDEFINED_HINT, .s = &hint}, best_key = MISSING_VALUE;
    for (size_t i = 0; items && i < items->n; i++) {
        int order = 0;
        struct value key = sort_key(r, items->items[i], p[1], MISSING_VALUE, arg_bool(p[0], false));
        if (key.type == V_ERROR || !burn(r, 0) || (i && value_compare(r, key, best_key, max ? ">" : "<", &order) < 0))
            return ERROR_VALUE;
        if (i == 0 || (max ? order > 0 && order != 2 : order < 0)) {
            best = items->items[i];
            best_key = key;
        }
    }
    return items ? best : ERROR_VALUE;
}

FILTER(f_min)
{
    return extreme(r, self, p, false);
}

FILTER(f_max)
{
    return extreme(r, self, p, true);
}

FILTER(f_sum)
{
    struct seq *items = iterate(r, self);
    struct value total = p[1].type == V_MISSING ? int_value(0) : p[1];
    if (total.type == V_STR)
        return fail_value(r, "sum() can't sum strings");
    for (size_t i = 0; items && i < items->n && total.type != V_ERROR; i++) {
        struct value item = get_path(r, items->items[i], p[0], MISSING_VALUE);
        total = item.type == V_ERROR ? item : binary_op(r, OP_ADD, total, item);
    }
    return items ? total : ERROR_VALUE;
}

FILTER(f_batch)
{
    int64_t size;
    struct seq *items = iterate(r, self);
    if (!items || !arg_int(r, p[0], 0, &size))
        return ERROR_VALUE;
    if (size < 1)
        return fail_value(r, "batch needs a positive line count");
    bool fill = p[1].type != V_MISSING && p[1].type != V_NONE;
    size_t each = (uint64_t)size < items->n || fill ? (size_t)size : items->n, n = each ? (items->n + each - 1) / each : 0;
    if (each > (1u << 20))
        return fail_limit(r, "memory");
    struct seq *out = seq_new(r, SEQ_GENERATOR, n);
    for (size_t i = 0; out && i < n; i++) {
        size_t have = items->n - i * each < each ? items->n - i * each : each;
        struct seq *line = burn(r, each * 16) ? seq_new(r, SEQ_LIST, fill ? each : have) : NULL;
        if (!line)
            return ERROR_VALUE;
        for (size_t k = 0; k < line->n; k++)
            line->items[k] = k < have ? items->items[i * each + k] : p[1];
        out->items[i] = seq_value(line);
    }
    return seq_value(out);
}

FILTER(f_slice)
{
    int64_t count;
    struct seq *items = iterate(r, self);
    if (!items || !arg_int(r, p[0], 0, &count))
        return ERROR_VALUE;
    if (count < 1 || count > 100000)
        return fail_value(r, "slice needs a positive count");
    size_t each = items->n / (size_t)count, extra = items->n % (size_t)count, at = 0;
    struct seq *out = burn(r, (size_t)count * 16) ? seq_new(r, SEQ_GENERATOR, (size_t)count) : NULL;
    for (size_t i = 0; out && i < out->n; i++) {
        size_t have = each + (i < extra);
        bool fill = p[1].type != V_MISSING && p[1].type != V_NONE && i >= extra;
        struct seq *part = seq_new(r, SEQ_LIST, have + fill);
        if (!part)
            return ERROR_VALUE;
        for (size_t k = 0; k < have; k++)
            part->items[k] = items->items[at++];
        if (fill)
            part->items[have] = p[1];
        out->items[i] = seq_value(part);
    }
    return seq_value(out);
}

FILTER(f_groupby)
{
    bool case_sensitive = arg_bool(p[2], false);
    struct seq *items = iterate(r, self);
    struct keyed *v = items ? sorted(r, items, p[0], p[1], case_sensitive, false) : NULL;
    struct seq *out = v ? seq_new(r, SEQ_LIST, items->n) : NULL;
    if (!out)
        return ERROR_VALUE;
    out->n = 0;
    for (size_t i = 0, end; i < items->n; i = end) {
        int equal = 1;
        for (end = i + 1; end < items->n && (equal = value_equal(r, v[i].key, v[end].key)) == 1; end++)
            ;
        struct seq *group = equal < 0 ? NULL : seq_new(r, SEQ_LIST, end - i);
        if (!group)
            return ERROR_VALUE;
        for (size_t k = i; k < end; k++)
            group->items[k - i] = v[k].item;
        struct value key = get_path(r, v[i].item, p[0], p[1]);
        if ((out->items[out->n++] = pair_tuple(r, key, seq_value(group))).type == V_ERROR)
            return ERROR_VALUE;
    }
    return seq_value(out);
}

/* ---- map, select, reject ---- */

static struct value keyword(const struct args *args, const char *name)
{
    for (uint32_t i = 0; i < args->n_kw; i++)
        if (strlen(name) == args->kw[i].name->len && memcmp(name, args->kw[i].name->bytes, args->kw[i].name->len) == 0)
            return args->kw[i].value;
    return MISSING_VALUE;
}

FILTER(f_map)
{
    if (!truth(self))
        return seq_value(seq_new(r, SEQ_GENERATOR, 0));
    struct value attribute = keyword(args, "attribute"), otherwise = keyword(args, "default");
    const struct function *filter = NULL;
    bool by_attribute = !args->n_pos && attribute.type != V_MISSING;
    if (!by_attribute) {
        if (!args->n_pos || args->pos[0].type != V_STR)
            return fail_value(r, "map requires a filter argument");
        filter = find_filter(args->pos[0].s->bytes, args->pos[0].s->len);
        if (!filter)
            return fail_value(r, "No filter named '%.*s'.", (int)args->pos[0].s->len, args->pos[0].s->bytes);
    }
    struct seq *items = iterate(r, self), *out = items ? seq_new(r, SEQ_GENERATOR, items->n) : NULL;
    struct args rest = {args->n_pos ? args->pos + 1 : NULL, args->kw, args->n_pos ? args->n_pos - 1 : 0, args->n_kw};
    for (size_t i = 0; out && i < out->n; i++) {
        out->items[i] =
            by_attribute ? get_path(r, items->items[i], attribute, otherwise) : call_function(r, filter, items->items[i], &rest);
        if (out->items[i].type == V_ERROR || !burn(r, 0))
            return ERROR_VALUE;
    }
    return seq_value(out);
}

static struct value choose(struct render *r, struct value self, const struct args *args, bool by_attribute, bool keep)
{
    if (!truth(self))
        return seq_value(seq_new(r, SEQ_GENERATOR, 0));
    uint32_t off = by_attribute;
    if (by_attribute && !args->n_pos)
        return fail_value(r, "Missing parameter for attribute name");
    bool by_test = args->n_pos > off;
    if (by_test && args->pos[off].type != V_STR)
        return fail_value(r, "the name of a test must be a string");
    struct seq *items = iterate(r, self), *out = items ? seq_new(r, SEQ_GENERATOR, items->n) : NULL;
    struct args rest = {by_test ? args->pos + off + 1 : NULL, args->kw, by_test ? args->n_pos - off - 1 : 0, args->n_kw};
    size_t n = 0;
    for (size_t i = 0; out && i < items->n; i++) {
        struct value v = by_attribute ? get_path(r, items->items[i], args->pos[0], MISSING_VALUE) : items->items[i];
        if (v.type != V_ERROR && by_test)
            v = run_test(r, args->pos[off].s, v, &rest);
        if (v.type == V_ERROR || !burn(r, 0))
            return ERROR_VALUE;
        if (truth(v) == keep)
            out->items[n++] = items->items[i];
    }
    if (out)
        out->n = n;
    return seq_value(out);
}

FILTER(f_select)
{
    return choose(r, self, args, false, true);
}

FILTER(f_reject)
{
    return choose(r, self, args, false, false);
}

FILTER(f_selectattr)
{
    return choose(r, self, args, true, true);
}

FILTER(f_rejectattr)
{
    return choose(r, self, args, true, false);
}

const struct function kvg_seq_filters[] = {
    {"join", "d,attribute", f_join},
    {"list", "", f_list},
    {"items", "", f_items},
    {"first", "", f_first},
    {"last", "", f_last},
    {"map", "*", f_map},
    {"select", "*", f_select},
    {"reject", "*", f_reject},
    {"selectattr", "*", f_selectattr},
    {"rejectattr", "*", f_rejectattr},
    {"sort", "reverse,case_sensitive,attribute", f_sort},
    {"dictsort", "case_sensitive,by,reverse", f_dictsort},
    {"unique", "case_sensitive,attribute", f_unique},
    {"reverse", "", f_reverse},
    {"min", "case_sensitive,attribute", f_min},
    {"max", "case_sensitive,attribute", f_max},
    {"sum", "attribute,start", f_sum},
    {"batch", "linecount,fill_with", f_batch},
    {"slice", "slices,fill_with", f_slice},
    {"groupby", "attribute,default,case_sensitive", f_groupby},
};
const size_t kvg_n_seq_filters = sizeof kvg_seq_filters / sizeof *kvg_seq_filters;
