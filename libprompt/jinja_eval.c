/* Expressions of a running template. */
#include "libprompt/jinja_run.h"
#include <math.h>
#include <string.h>

static struct value eval_slow(struct render *r, const struct expr *e);

/* ---- operators ---- */

static struct value type_error(struct render *r, const char *op, struct value a, struct value b)
{
    if (a.type == V_UNDEFINED || b.type == V_UNDEFINED)
        return fail_undefined(r, a.type == V_UNDEFINED ? a : b);
    return fail_value(r, "unsupported operand type(s) for %s: '%s' and '%s'", op, type_name(a), type_name(b));
}

static struct value add_seqs(struct render *r, const struct seq *a, const struct seq *b)
{
    struct seq *out = burn(r, (a->n + b->n) * 16) ? seq_new(r, a->kind, a->n + b->n) : NULL;
    if (!out)
        return ERROR_VALUE;
    memcpy(out->items, a->items, a->n * sizeof *a->items);
    memcpy(out->items + a->n, b->items, b->n * sizeof *b->items);
    out->origin = a->origin | b->origin;
    return seq_value(out);
}

static struct value add_strs(struct render *r, const struct str *a, const struct str *b)
{
    if (!a->markup && !b->markup)
        return str_value(str_concat(r, a, b));
    const struct str *x = a->markup ? a : str_escape(r, a), *y = b->markup ? b : str_escape(r, b);
    const struct str *out = x && y ? str_concat(r, x, y) : NULL;
    if (out && out != x && out != y)
        ((struct str *)out)->markup = 1;
    return str_value(out);
}

static struct value repeat(struct render *r, struct value v, int64_t n)
{
    if (v.type == V_STR)
        return str_value(str_repeat(r, v.s, n));
    uint64_t total;
    n = n < 0 ? 0 : n;
    if (__builtin_mul_overflow(v.seq->n, (uint64_t)n, &total) || total > (1u << 24))
        return fail_limit(r, "memory");
    struct seq *out = burn(r, total * 16) ? seq_new(r, v.seq->kind, total) : NULL;
    for (uint64_t i = 0; out && i < total; i++)
        out->items[i] = v.seq->items[i % v.seq->n];
    return seq_value(out);
}

/* Python's floor division and modulo of integers; b is not 0. */
static struct value int_divide(struct render *r, int op, int64_t a, int64_t b)
{
    if (b == -1)
        return op == OP_MOD ? int_value(0) : a == INT64_MIN ? fail_value(r, "integer overflow") : int_value(-a);
    int64_t q = a / b, m = a % b;
    bool adjust = m != 0 && (m < 0) != (b < 0);
    return int_value(op == OP_MOD ? m + (adjust ? b : 0) : q - adjust);
}

static struct value int_power(struct render *r, int64_t a, int64_t n)
{
    if (n < 0)
        return a == 0 ? fail_value(r, "0.0 cannot be raised to a negative power") : float_value(pow((double)a, (double)n));
    int64_t out = 1;
    for (; n; n >>= 1) {
        if ((n & 1) && __builtin_mul_overflow(out, a, &out))
            return fail_value(r, "integer overflow");
        if (n > 1 && __builtin_mul_overflow(a, a, &a))
            return fail_value(r, "integer overflow");
    }
    return int_value(out);
}

static struct value int_op(struct render *r, int op, int64_t a, int64_t b)
{
    int64_t out;
    bool over;
    switch (op) {
    case OP_ADD:
        over = __builtin_add_overflow(a, b, &out);
        break;
    case OP_SUB:
        over = __builtin_sub_overflow(a, b, &out);
        break;
    case OP_MUL:
        over = __builtin_mul_overflow(a, b, &out);
        break;
    case OP_POW:
        return int_power(r, a, b);
    default:
        if (b == 0)
            return fail_value(r, op == OP_DIV ? "division by zero" : "integer division or modulo by zero");
        return op == OP_DIV ? float_value((double)a / (double)b) : int_divide(r, op, a, b);
    }
    return over ? fail_value(r, "integer overflow") : int_value(out);
}

static struct value float_op(struct render *r, int op, double a, double b)
{
    switch (op) {
    case OP_ADD:
        return float_value(a + b);
    case OP_SUB:
        return float_value(a - b);
    case OP_MUL:
        return float_value(a * b);
    case OP_POW:
        return float_value(pow(a, b));
    default:
        break;
    }
    if (b == 0)
        return fail_value(r, "float division by zero");
    if (op == OP_DIV)
        return float_value(a / b);
    double m = fmod(a, b);
    if (m != 0 && (m < 0) != (b < 0))
        m += b;
    return float_value(op == OP_MOD ? m : floor((a - m) / b + 0.5));
}

struct value binary_op(struct render *r, int op, struct value a, struct value b)
{
    static const char *const names[] = {"+", "-", "*", "/", "//", "%", "** or pow()"};
    int64_t i, j;
    if (a.type == V_STR && op == OP_MOD)
        return percent_format(r, a.s, b);
    if (is_number(a) && is_number(b)) {
        uint8_t origin = a.origin | b.origin;
        if (as_int(a, &i) && as_int(b, &j))
            return with_origin(int_op(r, op, i, j), origin);
        return with_origin(float_op(r, op, as_double(a), as_double(b)), origin);
    }
    if (op == OP_ADD && a.type == V_STR && b.type == V_STR)
        return add_strs(r, a.s, b.s);
    bool lists = a.type == V_SEQ && a.seq->kind <= SEQ_TUPLE;
    if (op == OP_ADD && lists && b.type == V_SEQ && a.seq->kind == b.seq->kind)
        return add_seqs(r, a.seq, b.seq);
    if (op == OP_MUL && (a.type == V_STR || lists) && as_int(b, &j))
        return repeat(r, a, j);
    if (op == OP_MUL && (b.type == V_STR || (b.type == V_SEQ && b.seq->kind <= SEQ_TUPLE)) && as_int(a, &i))
        return repeat(r, b, i);
    if (op == OP_ADD && a.type == V_STR && b.type != V_UNDEFINED)
        return fail_value(r, "can only concatenate str (not \"%s\") to str", type_name(b));
    return type_error(r, names[op], a, b);
}

static int compare_op(struct render *r, int op, struct value a, struct value b)
{
    static const char *const names[] = {"<", "<=", ">", ">="};
    int order, equal;
    switch (op) {
    case OP_EQ:
        return value_equal(r, a, b);
    case OP_NE:
        return (equal = value_equal(r, a, b)) < 0 ? -1 : !equal;
    case OP_IN:
        return value_contains(r, b, a);
    case OP_NOT_IN:
        return (equal = value_contains(r, b, a)) < 0 ? -1 : !equal;
    default:
        break;
    }
    if (value_compare(r, a, b, names[op - OP_LT], &order) < 0)
        return -1;
    if (order == 2) /* a NaN */
        return 0;
    return op == OP_LT ? order < 0 : op == OP_LE ? order <= 0 : op == OP_GT ? order > 0 : order >= 0;
}

static struct value eval_compare(struct render *r, const struct expr *e)
{
    struct value left = eval(r, e->a);
    for (uint32_t i = 0; i < e->n; i++) {
        if (left.type == V_ERROR)
            return left;
        struct value right = eval(r, e->items[i]);
        if (right.type == V_ERROR)
            return right;
        int holds = compare_op(r, e->ops[i], left, right);
        if (holds <= 0)
            return holds < 0 ? ERROR_VALUE : bool_value(false);
        left = right;
    }
    return bool_value(true);
}

static struct value eval_sign(struct render *r, const struct expr *e)
{
    struct value v = eval(r, e->a);
    int64_t i;
    if (v.type == V_ERROR)
        return v;
    if (v.type == V_UNDEFINED)
        return fail_undefined(r, v);
    if (v.type == V_FLOAT)
        return with_origin(float_value(e->kind == E_NEG ? -v.f : v.f), v.origin);
    if (!as_int(v, &i))
        return fail_value(r, "bad operand type for unary %s: '%s'", e->kind == E_NEG ? "-" : "+", type_name(v));
    if (e->kind == E_NEG && __builtin_sub_overflow(0, i, &i))
        return fail_value(r, "integer overflow");
    return with_origin(int_value(i), v.origin);
}

/* ---- literals ---- */

static struct value eval_list(struct render *r, const struct expr *e)
{
    struct seq *seq = seq_new(r, e->kind == E_TUPLE ? SEQ_TUPLE : SEQ_LIST, e->n);
    for (uint32_t i = 0; seq && i < e->n; i++)
        if ((seq->items[i] = eval(r, e->items[i])).type == V_ERROR)
            return ERROR_VALUE;
    return seq_value(seq);
}

static struct value eval_dict(struct render *r, const struct expr *e)
{
    struct dict *dict = dict_new(r, e->n / 2);
    for (uint32_t i = 0; dict && i < e->n; i += 2) {
        struct value key = eval(r, e->items[i]);
        struct value value = key.type == V_ERROR ? key : eval(r, e->items[i + 1]);
        if (value.type == V_ERROR || !dict_set(r, dict, key, value))
            return ERROR_VALUE;
    }
    return dict_value(dict);
}

static struct value eval_concat(struct render *r, const struct expr *e)
{
    struct pieces out;
    pieces_init(&out);
    for (uint32_t i = 0; i < e->n; i++)
        if (!print_value(r, &out, eval(r, e->items[i])))
            return ERROR_VALUE;
    return str_value(pieces_str(r, &out));
}

/* ---- calls ---- */

static bool add_dynamic(struct render *r, const struct expr *e, struct args *args)
{
    struct seq *extra = NULL;
    struct dict *named = NULL;
    if (e->dyn_args) {
        struct value v = eval(r, e->dyn_args);
        if (v.type == V_ERROR || !(extra = iterate(r, v)))
            return false;
    }
    if (e->dyn_kwargs) {
        struct value v = eval(r, e->dyn_kwargs);
        if (v.type != V_DICT) {
            fail_value(r, "argument after ** must be a mapping, not %s", type_name(v));
            return false;
        }
        named = v.dict;
    }
    size_t n_pos = args->n_pos + (extra ? extra->n : 0), n_kw = args->n_kw + (named ? named->n : 0);
    if (n_pos + n_kw > 65536)
        return fail_limit(r, "arguments"), false;
    struct value *pos = burn(r, (n_pos + n_kw) * 16) ? render_alloc(r, n_pos * sizeof *pos) : NULL;
    struct kwarg *kw = pos ? render_alloc(r, n_kw * sizeof *kw) : NULL;
    if (!kw)
        return false;
    if (args->n_pos)
        memcpy(pos, args->pos, args->n_pos * sizeof *pos);
    if (args->n_kw)
        memcpy(kw, args->kw, args->n_kw * sizeof *kw);
    for (size_t i = args->n_pos; i < n_pos; i++)
        pos[i] = extra->items[i - args->n_pos];
    for (size_t i = args->n_kw; i < n_kw; i++) {
        const struct pair *pair = &named->pairs[i - args->n_kw];
        if (pair->key.type != V_STR)
            return fail_value(r, "keywords must be strings"), false;
        kw[i] = (struct kwarg){pair->key.s, pair->value};
    }
    *args = (struct args){pos, kw, (uint32_t)n_pos, (uint32_t)n_kw};
    return true;
}

bool eval_args(struct render *r, const struct expr *e, struct args *args)
{
    *args = (struct args){.n_pos = e->n, .n_kw = e->n_kw};
    if (e->n && !(args->pos = render_alloc(r, e->n * sizeof *args->pos)))
        return false;
    if (e->n_kw && !(args->kw = render_alloc(r, e->n_kw * sizeof *args->kw)))
        return false;
    for (uint32_t i = 0; i < e->n; i++)
        if ((args->pos[i] = eval(r, e->items[i])).type == V_ERROR)
            return false;
    for (uint32_t i = 0; i < e->n_kw; i++) {
        args->kw[i] = (struct kwarg){e->kw_names[i], eval(r, e->kw[i])};
        if (args->kw[i].value.type == V_ERROR)
            return false;
    }
    return (!e->dyn_args && !e->dyn_kwargs) || add_dynamic(r, e, args);
}

enum { MAX_PARAMS = 8 };

/* Sets p[] from positional and keyword arguments by the names in `params`. */
static bool bind_params(struct render *r, const struct function *f, const struct args *args, struct value p[MAX_PARAMS])
{
    uint32_t n = 0;
    const char *names[MAX_PARAMS];
    size_t lens[MAX_PARAMS];
    for (const char *at = f->params; *at && n < MAX_PARAMS; n++) {
        names[n] = at;
        lens[n] = strcspn(at, ",");
        at += lens[n] + (at[lens[n]] == ',');
        p[n] = n < args->n_pos ? args->pos[n] : MISSING_VALUE;
    }
    if (args->n_pos > n)
        return fail_value(r, "%s() takes at most %u arguments (%u given)", f->name, n, args->n_pos), false;
    for (uint32_t i = 0; i < args->n_kw; i++) {
        uint32_t k = 0;
        while (k < n && !(args->kw[i].name->len == lens[k] && memcmp(args->kw[i].name->bytes, names[k], lens[k]) == 0))
            k++;
        if (k == n)
            return fail_value(r, "%s() got an unexpected keyword argument '%.*s'", f->name, (int)args->kw[i].name->len,
                              args->kw[i].name->bytes),
                   false;
        if (p[k].type != V_MISSING)
            return fail_value(r, "%s() got multiple values for argument '%.*s'", f->name, (int)lens[k], names[k]), false;
        p[k] = args->kw[i].value;
    }
    return true;
}

struct value call_function(struct render *r, const struct function *f, struct value self, const struct args *args)
{
    if (f->params[0] == '*')
        return f->call(r, self, NULL, args);
    struct value p[MAX_PARAMS];
    return bind_params(r, f, args, p) ? f->call(r, self, p, args) : ERROR_VALUE;
}

struct value call_value(struct render *r, struct value callee, const struct args *args)
{
    switch (callee.type) {
    case V_MACRO:
        return call_macro(r, callee.macro, args);
    case V_FUNCTION:
        return call_function(r, callee.function, NONE_VALUE, args);
    case V_METHOD:
        return call_function(r, callee.method->function, callee.method->self, args);
    case V_UNDEFINED:
        return fail_undefined(r, callee);
    case V_LOOP:
        return fail_value(r, "recursive loops are not supported");
    default:
        return fail_value(r, "'%s' object is not callable", type_name(callee));
    }
}

struct value eval_call(struct render *r, const struct expr *e, const struct kwarg *caller)
{
    /* a method of a value needs no bound object of its own */
    struct value callee, self = MISSING_VALUE;
    const struct function *method = NULL;
    if (e->a->kind == E_GETATTR) {
        self = eval(r, e->a->a);
        if (self.type == V_ERROR)
            return self;
        bool unsafe = false;
        if (self.type == V_STR || self.type == V_DICT || self.type == V_SEQ)
            method = find_method(self, e->a->name->bytes, e->a->name->len, &unsafe);
        callee = method && !unsafe ? NONE_VALUE : get_attr(r, self, e->a->name);
    } else {
        callee = eval(r, e->a);
    }
    struct args args;
    if (callee.type == V_ERROR || !eval_args(r, e, &args))
        return ERROR_VALUE;
    if (caller) {
        struct kwarg *kw = render_alloc(r, (args.n_kw + 1) * sizeof *kw);
        if (!kw)
            return ERROR_VALUE;
        if (args.n_kw)
            memcpy(kw, args.kw, args.n_kw * sizeof *kw);
        kw[args.n_kw++] = *caller;
        args.kw = kw;
    }
    return method ? call_function(r, method, self, &args) : call_value(r, callee, &args);
}

static struct value eval_filter(struct render *r, const struct expr *e)
{
    struct value self = eval(r, e->a);
    return self.type == V_ERROR ? self : apply_filter(r, e, self);
}

struct value apply_filter(struct render *r, const struct expr *e, struct value self)
{
    struct args args;
    if (!e->function)
        return fail_value(r, "No %s named '%.*s' found.", e->kind == E_TEST ? "test" : "filter",
                          (int)(e->name->len < 80 ? e->name->len : 80), e->name->bytes);
    return eval_args(r, e, &args) ? call_function(r, e->function, self, &args) : ERROR_VALUE;
}

/* ---- the rest ---- */

static struct value eval_slice(struct render *r, const struct expr *e)
{
    struct value object = eval(r, e->a), part[3];
    if (object.type == V_ERROR)
        return object;
    for (int i = 0; i < 3; i++)
        if ((part[i] = e->items[i] ? eval(r, e->items[i]) : MISSING_VALUE).type == V_ERROR)
            return ERROR_VALUE;
    return get_slice(r, object, part[0], part[1], part[2]);
}

static struct value eval_cond(struct render *r, const struct expr *e)
{
    static const struct str hint = {
        .bytes = "the inline if-expression evaluated to false and no else section was defined.", .len = 76, .ascii = 1};
    struct value condition = eval(r, e->b);
    if (condition.type == V_ERROR)
        return condition;
    if (truth(condition))
        return eval(r, e->a);
    return e->c ? eval(r, e->c) : (struct value){.type = V_UNDEFINED, .why = UNDEFINED_HINT, .s = &hint};
}

static struct value eval_slow(struct render *r, const struct expr *e)
{
    struct value a, b;
    switch (e->kind) {
    case E_GETATTR:
        a = eval(r, e->a);
        return a.type == V_ERROR ? a : get_attr(r, a, e->name);
    case E_GETITEM:
        a = eval(r, e->a);
        if (a.type == V_ERROR)
            return a;
        b = eval(r, e->b);
        return b.type == V_ERROR ? b : get_item(r, a, b);
    case E_AND:
    case E_OR:
        a = eval(r, e->a);
        return a.type == V_ERROR || truth(a) == (e->kind == E_OR) ? a : eval(r, e->b);
    case E_NOT:
        a = eval(r, e->a);
        return a.type == V_ERROR ? a : bool_value(!truth(a));
    case E_BINARY:
        a = eval(r, e->a);
        if (a.type == V_ERROR)
            return a;
        b = eval(r, e->b);
        return b.type == V_ERROR ? b : binary_op(r, e->op, a, b);
    case E_TEST:
    case E_FILTER:
        return eval_filter(r, e);
    case E_CALL:
        return eval_call(r, e, NULL);
    case E_COMPARE:
        return eval_compare(r, e);
    case E_CONCAT:
        return eval_concat(r, e);
    case E_COND:
        return eval_cond(r, e);
    case E_SLICE:
        return eval_slice(r, e);
    case E_LIST:
    case E_TUPLE:
        return eval_list(r, e);
    case E_DICT:
        return eval_dict(r, e);
    case E_NEG:
    case E_POS:
        return eval_sign(r, e);
    default:
        return fail_value(r, "unknown expression");
    }
}

struct value eval(struct render *r, const struct expr *e)
{
    if (e->kind == E_CONST)
        return e->constant;
    if (!burn(r, 0))
        return ERROR_VALUE;
    if (e->kind == E_NAME) {
        const struct record *record = r->record;
        for (uint32_t i = e->level; i; i--)
            record = record->outer;
        struct value v = record->slots[e->slot];
        return v.type == V_MISSING ? undefined_name(e->name) : v;
    }
    if (++r->depth > MAX_EVAL_DEPTH) {
        r->depth--;
        return fail_limit(r, "nesting");
    }
    struct value v = eval_slow(r, e);
    r->depth--;
    return v;
}
