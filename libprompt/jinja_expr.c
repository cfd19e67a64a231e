/* Expressions, by precedence: condexpr, or, and, not, compare, + -, ~, * / // %, **, unary, postfix, filters and tests. */
#include "libprompt/jinja_ast.h"
#include <stdio.h>
#include <string.h>

bool at_op(const struct parser *p, int op)
{
    return p->token->type == T_OPERATOR && p->token->op == op;
}

static bool is_word(const struct token *token, const char *word)
{
    return token->type == T_NAME && kvg_str_eq(token->text, word);
}

bool at_name(const struct parser *p, const char *word)
{
    return is_word(p->token, word);
}

bool skip_op(struct parser *p, int op)
{
    bool there = at_op(p, op);
    p->token += there;
    return there;
}

bool skip_name(struct parser *p, const char *word)
{
    bool there = at_name(p, word);
    p->token += there;
    return there;
}

static const char *describe(const struct token *token, char text[48])
{
    switch (token->type) {
    case T_EOF:
        return "end of template";
    case T_BLOCK_END:
        return "end of statement block";
    case T_VARIABLE_END:
        return "end of print statement";
    case T_NAME:
        snprintf(text, 48, "'%.*s'", (int)(token->text.len < 40 ? token->text.len : 40), token->text.bytes);
        return text;
    case T_OPERATOR:
        if (token->op < 256) {
            snprintf(text, 48, "'%c'", token->op);
            return text;
        }
        return "an operator";
    case T_STRING:
        return "a string";
    default:
        return "a number";
    }
}

bool expect_op(struct parser *p, int op)
{
    if (skip_op(p, op))
        return true;
    char text[48];
    syntax_error(p, p->token->line, "expected '%c', got %s", op, describe(p->token, text));
    return false;
}

const struct str *parse_name(struct parser *p)
{
    if (p->token->type != T_NAME) {
        char text[48];
        return syntax_error(p, p->token->line, "expected a name, got %s", describe(p->token, text));
    }
    return new_str(p, (p->token++)->text);
}

struct expr *new_expr(struct parser *p, enum expr_kind kind, uint32_t line)
{
    struct expr *e = parse_alloc(p, sizeof *e);
    if (e) {
        e->kind = kind;
        e->line = line;
    }
    return e;
}

static struct expr *constant(struct parser *p, uint32_t line, struct value value)
{
    struct expr *e = new_expr(p, E_CONST, line);
    if (e)
        e->constant = value;
    return e;
}

static void set_items(struct expr *e, const struct list *list)
{
    e->items = (struct expr **)list->v;
    e->n = list->n;
}

/* ---- primaries ---- */

static struct expr *parse_list_or_dict(struct parser *p, bool dict)
{
    uint32_t line = p->token++->line;
    int close = dict ? '}' : ']';
    struct list items = {0};
    while (!at_op(p, close)) {
        if (items.n && (!expect_op(p, ',') || at_op(p, close)))
            break;
        if (!list_add(p, &items, parse_expression(p)))
            return NULL;
        if (dict && (!expect_op(p, ':') || !list_add(p, &items, parse_expression(p))))
            return NULL;
    }
    if (p->failed || !expect_op(p, close))
        return NULL;
    struct expr *e = new_expr(p, dict ? E_DICT : E_LIST, line);
    if (e)
        set_items(e, &items);
    return e;
}

static struct expr *parse_strings(struct parser *p)
{
    uint32_t line = p->token->line;
    size_t len = 0;
    struct token *first = p->token;
    for (struct token *t = first; t->type == T_STRING; t++)
        len += t->text.len;
    char *bytes = parse_alloc(p, len + 1), *w = bytes;
    if (!bytes)
        return NULL;
    for (; p->token->type == T_STRING; p->token++) {
        memcpy(w, p->token->text.bytes, p->token->text.len);
        w += p->token->text.len;
    }
    const struct str *s = new_str(p, (struct kvg_str){bytes, len});
    return s ? constant(p, line, str_value(s)) : NULL;
}

static struct expr *parse_word(struct parser *p, bool with_namespace)
{
    struct token *token = p->token;
    static const struct {
        const char *word;
        uint8_t type;
        bool b;
    } words[] = {{"true", V_BOOL, true},   {"True", V_BOOL, true},  {"false", V_BOOL, false},
                 {"False", V_BOOL, false}, {"none", V_NONE, false}, {"None", V_NONE, false}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (skip_name(p, words[i].word))
            return constant(p, token->line, (struct value){.type = words[i].type, .b = words[i].b});
    const struct str *name = parse_name(p);
    if (!name)
        return NULL;
    struct expr *e = new_expr(p, E_NAME, token->line);
    if (!e)
        return NULL;
    e->name = name;
    if (!with_namespace || !skip_op(p, '.'))
        return e;
    struct expr *ref = new_expr(p, E_NSREF, token->line);
    if (!ref || !(ref->name = parse_name(p)))
        return NULL;
    ref->a = e;
    return ref;
}

/* A tuple's items up to its end; one item without a comma is itself. */
static struct expr *parse_items(struct parser *p, struct expr *(*parse)(struct parser *), bool parentheses, const char *end_word)
{
    uint32_t line = p->token->line;
    struct list items = {0};
    bool is_tuple = false;
    for (;;) {
        if (items.n && !expect_op(p, ','))
            return NULL;
        if (p->token->type == T_VARIABLE_END || p->token->type == T_BLOCK_END || at_op(p, ')') ||
            (end_word && at_name(p, end_word)))
            break;
        if (!list_add(p, &items, parse(p)))
            return NULL;
        if (!at_op(p, ','))
            break;
        is_tuple = true;
    }
    if (!is_tuple && items.n)
        return items.v[0];
    if (!is_tuple && !parentheses) {
        char text[48];
        return syntax_error(p, p->token->line, "expected an expression, got %s", describe(p->token, text));
    }
    struct expr *e = new_expr(p, E_TUPLE, line);
    if (e)
        set_items(e, &items);
    return e;
}

static struct expr *parse_primary(struct parser *p)
{
    struct token *token = p->token;
    switch (token->type) {
    case T_NAME:
        return parse_word(p, false);
    case T_STRING:
        return parse_strings(p);
    case T_INTEGER:
        p->token++;
        return constant(p, token->line, int_value(token->i));
    case T_FLOAT:
        p->token++;
        return constant(p, token->line, float_value(token->f));
    default:
        break;
    }
    if (skip_op(p, '(')) {
        struct expr *e = parse_items(p, parse_expression, true, NULL);
        return e && expect_op(p, ')') ? e : NULL;
    }
    if (at_op(p, '[') || at_op(p, '{'))
        return parse_list_or_dict(p, at_op(p, '{'));
    char text[48];
    return syntax_error(p, token->line, "unexpected %s", describe(token, text));
}

static struct expr *parse_target_item(struct parser *p)
{
    return p->token->type == T_NAME ? parse_word(p, true) : parse_primary(p);
}

static bool assignable(const struct expr *e, bool with_namespace)
{
    if (e->kind == E_TUPLE) {
        for (uint32_t i = 0; i < e->n; i++)
            if (!assignable(e->items[i], with_namespace))
                return false;
        return true;
    }
    return e->kind == E_NAME || (e->kind == E_NSREF && with_namespace);
}

struct expr *parse_target(struct parser *p, bool with_namespace, const char *end_word)
{
    uint32_t line = p->token->line;
    struct expr *e = parse_items(p, parse_target_item, false, end_word);
    if (e && !assignable(e, with_namespace))
        return syntax_error(p, line, "cannot assign to this expression");
    return e;
}

/* ---- postfix ---- */

static bool parse_call_args(struct parser *p, struct expr *call)
{
    struct list items = {0}, kw = {0}, names = {0};
    if (!expect_op(p, '('))
        return false;
    for (bool first = true; !at_op(p, ')'); first = false) {
        if (!first && (!expect_op(p, ',') || at_op(p, ')')))
            break;
        uint32_t line = p->token->line;
        bool ok = true, is_kw = p->token->type == T_NAME && p->token[1].type == T_OPERATOR && p->token[1].op == '=';
        if (at_op(p, '*')) {
            ok = !call->dyn_args && !call->dyn_kwargs;
            p->token++;
            if (!(call->dyn_args = parse_expression(p)))
                return false;
        } else if (at_op(p, OT_POW)) {
            ok = !call->dyn_kwargs;
            p->token++;
            if (!(call->dyn_kwargs = parse_expression(p)))
                return false;
        } else if (is_kw) {
            ok = !call->dyn_kwargs;
            if (!list_add(p, &names, (void *)parse_name(p)))
                return false;
            p->token++;
            if (!list_add(p, &kw, parse_expression(p)))
                return false;
        } else {
            ok = !call->dyn_args && !call->dyn_kwargs && !kw.n;
            if (!list_add(p, &items, parse_expression(p)))
                return false;
        }
        if (!ok) {
            syntax_error(p, line, "invalid syntax for function call expression");
            return false;
        }
    }
    set_items(call, &items);
    call->kw = (struct expr **)kw.v;
    call->kw_names = (const struct str **)names.v;
    call->n_kw = kw.n;
    return !p->failed && expect_op(p, ')');
}

static struct expr *parse_call(struct parser *p, struct expr *callee)
{
    struct expr *e = new_expr(p, E_CALL, p->token->line);
    if (!e)
        return NULL;
    e->a = callee;
    return parse_call_args(p, e) ? e : NULL;
}

static bool at_slice_end(const struct parser *p)
{
    return at_op(p, ']') || at_op(p, ',');
}

/* What stands within [ ]: an expression or a slice of `object`. */
static struct expr *parse_subscribed(struct parser *p, struct expr *object)
{
    struct expr *parts[3] = {0};
    uint32_t line = p->token->line;
    if (!at_op(p, ':') && !(parts[0] = parse_expression(p)))
        return NULL;
    if (!at_op(p, ':')) {
        struct expr *e = new_expr(p, E_GETITEM, line);
        if (e) {
            e->a = object;
            e->b = parts[0];
        }
        return e;
    }
    for (int i = 1; i < 3 && skip_op(p, ':'); i++)
        if (!at_op(p, ':') && !at_slice_end(p) && !(parts[i] = parse_expression(p)))
            return NULL;
    struct expr *e = new_expr(p, E_SLICE, line);
    if (!e || !(e->items = parse_alloc(p, sizeof parts)))
        return NULL;
    memcpy(e->items, parts, sizeof parts);
    e->n = 3;
    e->a = object;
    return e;
}

static struct expr *parse_subscript(struct parser *p, struct expr *object)
{
    uint32_t line = p->token->line;
    if (skip_op(p, '[')) {
        struct expr *e = parse_subscribed(p, object);
        if (e && at_op(p, ','))
            return syntax_error(p, line, "a subscript of several parts is not supported");
        return e && expect_op(p, ']') ? e : NULL;
    }
    p->token++;
    if (p->token->type == T_NAME) {
        struct expr *e = new_expr(p, E_GETATTR, line);
        if (!e || !(e->name = parse_name(p)))
            return NULL;
        e->a = object;
        return e;
    }
    if (p->token->type != T_INTEGER)
        return syntax_error(p, line, "expected name or number");
    struct expr *e = new_expr(p, E_GETITEM, line);
    if (!e || !(e->b = constant(p, line, int_value((p->token++)->i))))
        return NULL;
    e->a = object;
    return e;
}

static struct expr *parse_postfix(struct parser *p, struct expr *node)
{
    while (node) {
        if (at_op(p, '.') || at_op(p, '['))
            node = parse_subscript(p, node);
        else if (at_op(p, '('))
            node = parse_call(p, node);
        else
            break;
    }
    return node;
}

/* A name with dots, as filters and tests may have. */
static const struct str *parse_dotted(struct parser *p)
{
    const struct str *name = parse_name(p);
    while (name && skip_op(p, '.')) {
        const struct str *part = parse_name(p);
        char *bytes = part ? parse_alloc(p, name->len + part->len + 1) : NULL;
        if (!bytes)
            return NULL;
        memcpy(bytes, name->bytes, name->len);
        bytes[name->len] = '.';
        memcpy(bytes + name->len + 1, part->bytes, part->len);
        name = new_str(p, (struct kvg_str){bytes, name->len + part->len + 1});
    }
    return name;
}

struct expr *parse_filter_chain(struct parser *p, struct expr *node, bool start_inline)
{
    while (at_op(p, '|') || start_inline) {
        uint32_t line = p->token->line;
        p->token += !start_inline;
        start_inline = false;
        struct expr *e = new_expr(p, E_FILTER, line);
        if (!e || !(e->name = parse_dotted(p)))
            return NULL;
        e->a = node;
        if (at_op(p, '(') && !parse_call_args(p, e))
            return NULL;
        e->function = find_filter(e->name->bytes, e->name->len);
        node = e;
    }
    return node;
}

static bool starts_test_argument(const struct parser *p)
{
    switch (p->token->type) {
    case T_NAME:
        return !at_name(p, "else") && !at_name(p, "or") && !at_name(p, "and");
    case T_STRING:
    case T_INTEGER:
    case T_FLOAT:
        return true;
    default:
        return at_op(p, '[') || at_op(p, '{');
    }
}

static struct expr *parse_test(struct parser *p, struct expr *node)
{
    uint32_t line = p->token++->line;
    bool negated = skip_name(p, "not");
    struct expr *e = new_expr(p, E_TEST, line);
    if (!e || !(e->name = parse_dotted(p)))
        return NULL;
    e->a = node;
    e->function = find_test(e->name->bytes, e->name->len);
    if (at_op(p, '(')) {
        if (!parse_call_args(p, e))
            return NULL;
    } else if (starts_test_argument(p)) {
        if (at_name(p, "is"))
            return syntax_error(p, line, "You cannot chain multiple tests with is");
        struct list items = {0};
        struct expr *argument = parse_primary(p);
        if (!list_add(p, &items, argument ? parse_postfix(p, argument) : NULL))
            return NULL;
        set_items(e, &items);
    }
    if (!negated)
        return e;
    struct expr *not = new_expr(p, E_NOT, line);
    if (not )
        not ->a = e;
    return not ;
}

static struct expr *parse_filter_expr(struct parser *p, struct expr *node)
{
    while (node) {
        if (at_op(p, '|'))
            node = parse_filter_chain(p, node, false);
        else if (at_name(p, "is"))
            node = parse_test(p, node);
        else if (at_op(p, '('))
            node = parse_call(p, node);
        else
            break;
    }
    return node;
}

/* ---- operators ---- */

static struct expr *parse_unary(struct parser *p, bool with_filter)
{
    uint32_t line = p->token->line;
    struct expr *node;
    if (at_op(p, '-') || at_op(p, '+')) {
        node = new_expr(p, at_op(p, '-') ? E_NEG : E_POS, line);
        p->token++;
        if (++p->depth > MAX_PARSE_DEPTH)
            return syntax_error(p, line, "expression nested too deeply");
        if (!node || !(node->a = parse_unary(p, false)))
            return NULL;
        p->depth--;
    } else {
        node = parse_primary(p);
    }
    node = parse_postfix(p, node);
    return with_filter ? parse_filter_expr(p, node) : node;
}

static struct expr *binary(struct parser *p, enum expr_kind kind, int op, struct expr *left, struct expr *right)
{
    if (!left || !right)
        return NULL;
    struct expr *e = new_expr(p, kind, left->line);
    if (e) {
        e->op = (uint8_t)op;
        e->a = left;
        e->b = right;
    }
    return e;
}

static struct expr *parse_pow(struct parser *p)
{
    struct expr *left = parse_unary(p, true);
    while (left && skip_op(p, OT_POW))
        left = binary(p, E_BINARY, OP_POW, left, parse_unary(p, true));
    return left;
}

static struct expr *parse_product(struct parser *p)
{
    struct expr *left = parse_pow(p);
    while (left) {
        int op = at_op(p, '*')           ? OP_MUL
                 : at_op(p, '/')         ? OP_DIV
                 : at_op(p, OT_FLOORDIV) ? OP_FLOORDIV
                 : at_op(p, '%')         ? OP_MOD
                                         : -1;
        if (op < 0)
            break;
        p->token++;
        left = binary(p, E_BINARY, op, left, parse_pow(p));
    }
    return left;
}

static struct expr *parse_concat(struct parser *p)
{
    struct expr *first = parse_product(p);
    if (!first || !at_op(p, '~'))
        return first;
    struct list items = {0};
    list_add(p, &items, first);
    while (skip_op(p, '~'))
        if (!list_add(p, &items, parse_product(p)))
            return NULL;
    struct expr *e = new_expr(p, E_CONCAT, first->line);
    if (e)
        set_items(e, &items);
    return e;
}

static struct expr *parse_sum(struct parser *p)
{
    struct expr *left = parse_concat(p);
    while (left && (at_op(p, '+') || at_op(p, '-'))) {
        int op = at_op(p, '+') ? OP_ADD : OP_SUB;
        p->token++;
        left = binary(p, E_BINARY, op, left, parse_concat(p));
    }
    return left;
}

/* The comparison operator at the cursor, which it passes; -1: none. */
static int comparison(struct parser *p)
{
    static const struct {
        int token, op;
    } ops[] = {{OT_EQ, OP_EQ}, {OT_NE, OP_NE}, {'<', OP_LT}, {OT_LE, OP_LE}, {'>', OP_GT}, {OT_GE, OP_GE}};
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        if (skip_op(p, ops[i].token))
            return ops[i].op;
    if (skip_name(p, "in"))
        return OP_IN;
    if (at_name(p, "not") && is_word(p->token + 1, "in")) {
        p->token += 2;
        return OP_NOT_IN;
    }
    return -1;
}

static struct expr *parse_compare(struct parser *p)
{
    struct expr *left = parse_sum(p);
    struct list items = {0};
    uint8_t ops[64];
    for (int op; left && (op = comparison(p)) >= 0;) {
        if (items.n == sizeof ops)
            return syntax_error(p, left->line, "too many comparisons in a chain");
        ops[items.n] = (uint8_t)op;
        if (!list_add(p, &items, parse_sum(p)))
            return NULL;
    }
    if (!left || !items.n)
        return left;
    struct expr *e = new_expr(p, E_COMPARE, left->line);
    if (!e || !(e->ops = parse_alloc(p, items.n)))
        return NULL;
    memcpy(e->ops, ops, items.n);
    set_items(e, &items);
    e->a = left;
    return e;
}

static struct expr *parse_not(struct parser *p)
{
    if (!at_name(p, "not"))
        return parse_compare(p);
    struct expr *e = new_expr(p, E_NOT, p->token->line);
    if (++p->depth > MAX_PARSE_DEPTH)
        return syntax_error(p, p->token->line, "expression nested too deeply");
    p->token++;
    if (!e || !(e->a = parse_not(p)))
        return NULL;
    p->depth--;
    return e;
}

static struct expr *parse_and(struct parser *p)
{
    struct expr *left = parse_not(p);
    while (left && skip_name(p, "and"))
        left = binary(p, E_AND, 0, left, parse_not(p));
    return left;
}

static struct expr *parse_or(struct parser *p)
{
    if (++p->depth > MAX_PARSE_DEPTH)
        return syntax_error(p, p->token->line, "expression nested too deeply");
    struct expr *left = parse_and(p);
    while (left && skip_name(p, "or"))
        left = binary(p, E_OR, 0, left, parse_and(p));
    p->depth--;
    return left;
}

struct expr *parse_expression(struct parser *p)
{
    struct expr *e = parse_or(p);
    while (e && skip_name(p, "if")) {
        struct expr *condition = parse_or(p), *otherwise = NULL;
        if (!condition)
            return NULL;
        if (skip_name(p, "else")) {
            if (++p->depth > MAX_PARSE_DEPTH)
                return syntax_error(p, p->token->line, "expression nested too deeply");
            if (!(otherwise = parse_expression(p)))
                return NULL;
            p->depth--;
        }
        if ((e = binary(p, E_COND, 0, e, condition)))
            e->c = otherwise;
    }
    return e;
}

struct expr *parse_tuple(struct parser *p, bool with_condexpr)
{
    return parse_items(p, with_condexpr ? parse_expression : parse_or, false, with_condexpr ? NULL : "recursive");
}
