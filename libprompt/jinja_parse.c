/* Statements, and what both halves of the parser use. */
#include "libprompt/jinja_ast.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void *parse_alloc(struct parser *p, size_t n)
{
    void *bytes = kvg_arena_zalloc(p->arena, n);
    if (!bytes && !p->failed) {
        p->failed = true;
        kvg_fail(p->err, KVG_NOMEM, "chat template: out of memory");
    }
    return bytes;
}

void *syntax_error(struct parser *p, uint32_t line, const char *format, ...)
{
    if (p->failed)
        return NULL;
    char text[200];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    p->failed = true;
    kvg_fail(p->err, KVG_INVALID, "chat template, line %u: %s", line, text);
    return NULL;
}

bool list_add(struct parser *p, struct list *list, void *item)
{
    if (!item)
        return false;
    if (list->n == list->cap) {
        uint32_t cap = list->cap ? list->cap * 2 : 4;
        void **v = kvg_arena_grow(p->arena, list->v, list->cap * sizeof *v, cap * sizeof *v);
        if (!v) {
            p->failed = true;
            kvg_fail(p->err, KVG_NOMEM, "chat template: out of memory");
            return false;
        }
        list->v = v;
        list->cap = cap;
    }
    list->v[list->n++] = item;
    return true;
}

const struct str *new_str(struct parser *p, struct kvg_str text)
{
    struct str *s = parse_alloc(p, sizeof *s);
    if (!s)
        return NULL;
    *s = (struct str){.bytes = text.bytes, .len = text.len, .origin = KVG_TEMPLATE, .ascii = 1};
    for (size_t i = 0; i < text.len; i++)
        if ((unsigned char)text.bytes[i] >= 0x80)
            s->ascii = 2;
    return s;
}

static bool parse_body(struct parser *p, struct block *block, const char *const *ends);

static struct stmt *new_stmt(struct parser *p, enum stmt_kind kind, uint32_t line)
{
    struct stmt *s = parse_alloc(p, sizeof *s);
    if (s) {
        s->kind = (uint8_t)kind;
        s->line = line;
    }
    return s;
}

static bool expect_block_end(struct parser *p)
{
    if (p->token->type == T_BLOCK_END) {
        p->token++;
        return true;
    }
    syntax_error(p, p->token->line, "expected end of statement block");
    return false;
}

/* The body behind a block's head, up to one of `ends`, which the cursor then stands on. */
static bool parse_statements(struct parser *p, struct block *block, const char *const *ends)
{
    skip_op(p, ':');
    return expect_block_end(p) && parse_body(p, block, ends);
}

/* The same up to the one word `end`, which it passes. */
static bool parse_until(struct parser *p, struct block *block, const char *end)
{
    const char *const ends[] = {end, NULL};
    return parse_statements(p, block, ends) && skip_name(p, end);
}

static struct stmt *parse_set(struct parser *p, uint32_t line)
{
    struct expr *target = parse_target(p, true, NULL);
    if (!target)
        return NULL;
    bool is_block = !skip_op(p, '=');
    struct stmt *s = new_stmt(p, is_block ? S_SET_BLOCK : S_SET, line);
    if (!s)
        return NULL;
    s->target = target;
    if (!is_block)
        return (s->expr = parse_tuple(p, true)) ? s : NULL;
    s->expr = parse_filter_chain(p, NULL, false);
    return !p->failed && parse_until(p, &s->body, "endset") ? s : NULL;
}

static struct stmt *parse_for(struct parser *p, uint32_t line)
{
    static const char *const ends[] = {"endfor", "else", NULL};
    struct stmt *s = new_stmt(p, S_FOR, line);
    if (!s || !(s->target = parse_target(p, false, "in")))
        return NULL;
    if (!skip_name(p, "in"))
        return syntax_error(p, p->token->line, "expected 'in'");
    if (!(s->expr = parse_tuple(p, false)))
        return NULL;
    if (skip_name(p, "if") && !(s->test = parse_expression(p)))
        return NULL;
    if (at_name(p, "recursive"))
        return syntax_error(p, line, "recursive loops are not supported");
    p->loops++;
    bool ok = parse_statements(p, &s->body, ends);
    p->loops--;
    if (!ok)
        return NULL;
    if (skip_name(p, "endfor"))
        return s;
    p->token++;
    return parse_until(p, &s->orelse, "endfor") ? s : NULL;
}

static struct stmt *parse_if(struct parser *p, uint32_t line)
{
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    struct stmt *first = NULL, **link = &first;
    for (;;) {
        struct stmt *s = new_stmt(p, S_IF, line);
        if (!s || !(s->expr = parse_tuple(p, false)) || !parse_statements(p, &s->body, ends))
            return NULL;
        *link = s;
        link = &s->next_if;
        line = p->token->line;
        if (skip_name(p, "elif"))
            continue;
        if (skip_name(p, "else") && !parse_statements(p, &s->orelse, (const char *const[]){"endif", NULL}))
            return NULL;
        p->token++;
        return first;
    }
}

static bool parse_signature(struct parser *p, struct macro *m)
{
    struct list params = {0}, defaults = {0};
    if (!expect_op(p, '('))
        return false;
    while (!at_op(p, ')')) {
        if (params.n && !expect_op(p, ','))
            return false;
        struct expr *param = new_expr(p, E_NAME, p->token->line);
        if (!param || !(param->name = parse_name(p)) || !list_add(p, &params, param))
            return false;
        if (skip_op(p, '=')) {
            if (!list_add(p, &defaults, parse_expression(p)))
                return false;
        } else if (defaults.n) {
            syntax_error(p, param->line, "non-default argument follows default argument");
            return false;
        }
    }
    m->params = (struct expr **)params.v;
    m->n_params = params.n;
    m->defaults = (struct expr **)defaults.v;
    m->n_defaults = defaults.n;
    return expect_op(p, ')');
}

/* A function's body: loops outside it cannot be left from within. */
static bool parse_function_body(struct parser *p, struct block *body, const char *end)
{
    uint32_t loops = p->loops;
    p->loops = 0;
    bool ok = parse_until(p, body, end);
    p->loops = loops;
    return ok;
}

static struct stmt *parse_macro(struct parser *p, uint32_t line)
{
    struct stmt *s = new_stmt(p, S_MACRO, line);
    if (!s || !(s->macro = parse_alloc(p, sizeof *s->macro)) || !(s->target = new_expr(p, E_NAME, line)) ||
        !(s->target->name = parse_name(p)))
        return NULL;
    s->macro->name = s->target->name;
    return parse_signature(p, s->macro) && parse_function_body(p, &s->macro->body, "endmacro") ? s : NULL;
}

static struct stmt *parse_call_block(struct parser *p, uint32_t line)
{
    struct stmt *s = new_stmt(p, S_CALL_BLOCK, line);
    if (!s || !(s->macro = parse_alloc(p, sizeof *s->macro)))
        return NULL;
    if (at_op(p, '(') && !parse_signature(p, s->macro))
        return NULL;
    if (!(s->target = parse_expression(p)))
        return NULL;
    if (s->target->kind != E_CALL)
        return syntax_error(p, line, "expected call");
    return parse_function_body(p, &s->macro->body, "endcall") ? s : NULL;
}

static struct stmt *parse_filter_block(struct parser *p, uint32_t line)
{
    struct stmt *s = new_stmt(p, S_FILTER_BLOCK, line);
    if (!s || !(s->expr = parse_filter_chain(p, NULL, true)))
        return NULL;
    return parse_until(p, &s->body, "endfilter") ? s : NULL;
}

static struct stmt *parse_with(struct parser *p, uint32_t line)
{
    struct stmt *s = new_stmt(p, S_SCOPE, line);
    struct list targets = {0}, values = {0};
    if (!s)
        return NULL;
    while (p->token->type != T_BLOCK_END) {
        if (targets.n && !expect_op(p, ','))
            return NULL;
        struct expr *target = new_expr(p, E_NAME, p->token->line);
        if (!target || !(target->name = parse_name(p)) || !list_add(p, &targets, target) || !expect_op(p, '=') ||
            !list_add(p, &values, parse_expression(p)))
            return NULL;
    }
    s->targets = (struct expr **)targets.v;
    s->exprs = (struct expr **)values.v;
    s->n_exprs = values.n;
    return parse_until(p, &s->body, "endwith") ? s : NULL;
}

/* {% generation %}: what it holds is printed; its variables are its own. */
static struct stmt *parse_generation(struct parser *p, uint32_t line)
{
    struct stmt *s = new_stmt(p, S_SCOPE, line);
    return s && parse_function_body(p, &s->body, "endgeneration") ? s : NULL;
}

static struct stmt *parse_print(struct parser *p, uint32_t line)
{
    struct stmt *s = new_stmt(p, S_PRINT, line);
    struct list exprs = {0};
    if (!s)
        return NULL;
    while (p->token->type != T_BLOCK_END) {
        if (exprs.n && !expect_op(p, ','))
            return NULL;
        if (!list_add(p, &exprs, parse_expression(p)))
            return NULL;
    }
    s->exprs = (struct expr **)exprs.v;
    s->n_exprs = exprs.n;
    return s;
}

static struct stmt *parse_loop_control(struct parser *p, enum stmt_kind kind, uint32_t line)
{
    if (!p->loops)
        return syntax_error(p, line, "'%s' outside loop", kind == S_BREAK ? "break" : "continue");
    return new_stmt(p, kind, line);
}

static struct stmt *parse_statement(struct parser *p)
{
    uint32_t line = p->token->line;
    if (skip_name(p, "set"))
        return parse_set(p, line);
    if (skip_name(p, "if"))
        return parse_if(p, line);
    if (skip_name(p, "for"))
        return parse_for(p, line);
    if (skip_name(p, "macro"))
        return parse_macro(p, line);
    if (skip_name(p, "call"))
        return parse_call_block(p, line);
    if (skip_name(p, "filter"))
        return parse_filter_block(p, line);
    if (skip_name(p, "with"))
        return parse_with(p, line);
    if (skip_name(p, "generation"))
        return parse_generation(p, line);
    if (skip_name(p, "print"))
        return parse_print(p, line);
    if (skip_name(p, "break"))
        return parse_loop_control(p, S_BREAK, line);
    if (skip_name(p, "continue"))
        return parse_loop_control(p, S_CONTINUE, line);
    if (p->token->type != T_NAME)
        return syntax_error(p, line, "tag name expected");
    return syntax_error(p, line, "Encountered unknown tag '%.*s'", (int)(p->token->text.len < 60 ? p->token->text.len : 60),
                        p->token->text.bytes);
}

static struct stmt *parse_data(struct parser *p)
{
    struct stmt *s = new_stmt(p, S_DATA, p->token->line);
    const struct str *data = s ? new_str(p, p->token->text) : NULL;
    if (!data)
        return NULL;
    s->data = data;
    p->token++;
    return s;
}

static struct stmt *parse_variable(struct parser *p)
{
    uint32_t line = p->token++->line;
    struct stmt *s = new_stmt(p, S_PRINT, line);
    if (!s || !(s->exprs = parse_alloc(p, sizeof *s->exprs)) || !(s->exprs[0] = parse_tuple(p, true)))
        return NULL;
    s->n_exprs = 1;
    if (p->token->type != T_VARIABLE_END)
        return syntax_error(p, p->token->line, "expected end of print statement");
    p->token++;
    return s;
}

static bool at_one_of(const struct parser *p, const char *const *words)
{
    for (; words && *words; words++)
        if (at_name(p, *words))
            return true;
    return false;
}

static bool parse_body(struct parser *p, struct block *block, const char *const *ends)
{
    struct list items = {0};
    if (++p->depth > MAX_PARSE_DEPTH)
        return syntax_error(p, p->token->line, "blocks nested too deeply");
    bool done = false;
    while (!done && !p->failed) {
        struct stmt *s = NULL;
        if (p->token->type == T_DATA) {
            s = parse_data(p);
        } else if (p->token->type == T_VARIABLE_BEGIN) {
            s = parse_variable(p);
        } else if (p->token->type == T_EOF) {
            if (ends)
                syntax_error(p, p->token->line, "unexpected end of template: expected '%s'", ends[0]);
            break;
        } else {
            p->token++;
            if ((done = at_one_of(p, ends)))
                break;
            s = parse_statement(p);
            if (s && !expect_block_end(p))
                s = NULL;
        }
        if (!list_add(p, &items, s))
            break;
    }
    p->depth--;
    block->items = (struct stmt **)items.v;
    block->n = items.n;
    return !p->failed;
}

int jinja_parse(struct kvg_template *tmpl, struct token *tokens, struct kvg_error *err)
{
    struct parser p = {.arena = &tmpl->arena, .err = err, .token = tokens};
    if (parse_body(&p, &tmpl->body, NULL))
        return 0;
    return err ? err->code : KVG_INVALID;
}
