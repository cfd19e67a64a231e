/* Which variable a name means, by jinja2's own rules (its idtracking): decided once, at compile time.
 *
 * Each scope (template, loop body, macro, block that captures) looks through its statements before any code runs:
 *   a name that is only read and that no scope around knows is a free name, looked up among the bindings and globals;
 *   a name that is assigned becomes the scope's own variable, which starts as a copy of the outer one (ALIAS), or as
 *   undefined; where it is assigned in a branch only and nothing outside has it, it starts as the free name of that name.
 */
#include "libprompt/jinja_ast.h"
#include <string.h>

enum { MAX_SYMBOLS = 4096, MAX_WALK_DEPTH = 1200 };

struct symbol {
    const struct str *name;
    struct load load;
    uint32_t stored; /* order of its first assignment in this frame; 0: none */
};

struct function_slots {
    uint32_t n;
};

struct frame {
    struct frame *parent;
    struct function_slots *slots;
    uint32_t level; /* functions around it */
    bool soft;      /* within an if: unknown filters fail only when reached */
    struct symbol *symbols;
    uint32_t n, cap, n_stored;
};

struct resolver {
    struct kvg_template *tmpl;
    struct parser p; /* for its arena and errors */
    uint32_t cap_free, depth;
};

static bool deeper(struct resolver *rs, uint32_t line)
{
    if (++rs->depth <= MAX_WALK_DEPTH)
        return true;
    syntax_error(&rs->p, line, "expression nested too deeply");
    return false;
}

static struct symbol *find_own(const struct frame *f, const struct str *name)
{
    for (uint32_t i = 0; i < f->n; i++)
        if (str_same(f->symbols[i].name, name))
            return &f->symbols[i];
    return NULL;
}

static struct symbol *find_symbol(struct frame *f, const struct str *name, struct frame **owner)
{
    for (; f; f = f->parent) {
        struct symbol *s = find_own(f, name);
        if (s) {
            *owner = f;
            return s;
        }
    }
    return NULL;
}

static struct symbol *define(struct resolver *rs, struct frame *f, const struct str *name, struct load load)
{
    struct symbol *s = find_own(f, name);
    if (!s && f->n == f->cap) {
        uint32_t cap = f->cap ? f->cap * 2 : 16;
        struct symbol *grown = kvg_arena_grow(rs->p.arena, f->symbols, f->cap * sizeof *grown, cap * sizeof *grown);
        if (!grown || cap > MAX_SYMBOLS)
            return syntax_error(&rs->p, 0, "too many variables");
        f->symbols = grown;
        f->cap = cap;
    }
    if (!s) {
        s = &f->symbols[f->n++];
        *s = (struct symbol){.name = name};
        load.slot = f->slots->n++;
    } else {
        load.slot = s->load.slot;
    }
    s->load = load;
    return s;
}

static struct load free_name(struct resolver *rs, const struct str *name)
{
    struct kvg_template *t = rs->tmpl;
    uint32_t i = 0;
    while (i < t->n_free_names && !str_same(t->free_names[i], name))
        i++;
    if (i == t->n_free_names) {
        if (i == rs->cap_free) {
            uint32_t cap = i ? i * 2 : 16;
            const struct str **grown = kvg_arena_grow(rs->p.arena, t->free_names, i * sizeof *grown, cap * sizeof *grown);
            if (!grown || cap > MAX_SYMBOLS) {
                syntax_error(&rs->p, 0, "too many variables");
                return (struct load){.kind = LOAD_UNDEFINED};
            }
            t->free_names = grown;
            rs->cap_free = cap;
        }
        t->free_names[t->n_free_names++] = name;
    }
    return (struct load){.kind = LOAD_RESOLVE, .source = i};
}

/* The load that copies the variable of an outer scope, if there is one. */
static bool alias_of(struct frame *f, const struct str *name, struct load *load)
{
    struct frame *owner;
    struct symbol *outer = f->parent ? find_symbol(f->parent, name, &owner) : NULL;
    if (!outer)
        return false;
    *load = (struct load){.kind = LOAD_ALIAS, .level = (uint16_t)(f->level - owner->level), .source = outer->load.slot};
    return true;
}

static void symbol_load(struct resolver *rs, struct frame *f, const struct str *name)
{
    struct frame *owner;
    if (!find_symbol(f, name, &owner))
        define(rs, f, name, free_name(rs, name));
}

static void symbol_store(struct resolver *rs, struct frame *f, const struct str *name)
{
    struct symbol *s = find_own(f, name);
    if (!s) {
        struct load load;
        if (!alias_of(f, name, &load))
            load = (struct load){.kind = LOAD_UNDEFINED};
        s = define(rs, f, name, load);
    }
    if (s && !s->stored)
        s->stored = ++f->n_stored;
}

static uint32_t declare_parameter(struct resolver *rs, struct frame *f, const struct str *name)
{
    struct symbol *s = define(rs, f, name, (struct load){.kind = LOAD_PARAMETER});
    if (!s)
        return 0;
    if (!s->stored)
        s->stored = ++f->n_stored;
    return s->load.slot;
}

/* ---- first pass over a scope: which names it reads and assigns ---- */

static void each_child(struct resolver *rs, struct frame *f, struct expr *e,
                       void (*visit)(struct resolver *, struct frame *, struct expr *))
{
    if (e->kind != E_CONST) {
        struct expr *children[] = {e->a, e->b, e->c, e->dyn_args, e->dyn_kwargs};
        for (size_t i = 0; i < sizeof children / sizeof *children; i++)
            if (children[i])
                visit(rs, f, children[i]);
    }
    for (uint32_t i = 0; i < e->n; i++)
        if (e->items[i])
            visit(rs, f, e->items[i]);
    for (uint32_t i = 0; i < e->n_kw; i++)
        visit(rs, f, e->kw[i]);
}

static void note_reads(struct resolver *rs, struct frame *f, struct expr *e)
{
    if (rs->p.failed || !deeper(rs, e->line))
        return;
    if (e->kind == E_NAME)
        symbol_load(rs, f, e->name);
    else
        each_child(rs, f, e, note_reads);
    rs->depth--;
}

static void note_target(struct resolver *rs, struct frame *f, struct expr *e, bool parameter)
{
    if (e->kind == E_NSREF)
        symbol_load(rs, f, e->a->name);
    else if (e->kind == E_NAME && parameter)
        declare_parameter(rs, f, e->name);
    else if (e->kind == E_NAME)
        symbol_store(rs, f, e->name);
    else
        for (uint32_t i = 0; i < e->n; i++)
            note_target(rs, f, e->items[i], parameter);
}

static void note_block(struct resolver *rs, struct frame *f, const struct block *block);

/* Names first assigned within the branches may be left unassigned: they start as the outer variable or the free name. */
static void note_if(struct resolver *rs, struct frame *f, struct stmt *s)
{
    note_reads(rs, f, s->expr);
    uint32_t before = f->n_stored;
    note_block(rs, f, &s->body);
    if (s->next_if)
        note_if(rs, f, s->next_if);
    note_block(rs, f, &s->orelse);
    for (uint32_t i = 0; i < f->n; i++) {
        struct symbol *symbol = &f->symbols[i];
        if (symbol->stored <= before || symbol->load.kind == LOAD_PARAMETER)
            continue;
        struct load load;
        if (!alias_of(f, symbol->name, &load))
            load = free_name(rs, symbol->name);
        load.slot = symbol->load.slot;
        symbol->load = load;
    }
}

static void note_stmt(struct resolver *rs, struct frame *f, struct stmt *s)
{
    switch (s->kind) {
    case S_SET:
        note_reads(rs, f, s->expr);
        note_target(rs, f, s->target, false);
        break;
    case S_SET_BLOCK:
        if (s->expr)
            note_reads(rs, f, s->expr);
        note_target(rs, f, s->target, false);
        break;
    case S_IF:
        note_if(rs, f, s);
        break;
    case S_MACRO:
        symbol_store(rs, f, s->target->name);
        break;
    case S_CALL_BLOCK:
        note_reads(rs, f, s->target);
        break;
    case S_FOR:
    case S_FILTER_BLOCK:
        note_reads(rs, f, s->expr);
        break;
    case S_PRINT:
    case S_SCOPE:
        for (uint32_t i = 0; i < s->n_exprs; i++)
            note_reads(rs, f, s->exprs[i]);
        break;
    default:
        break;
    }
}

static void note_block(struct resolver *rs, struct frame *f, const struct block *block)
{
    for (uint32_t i = 0; i < block->n && !rs->p.failed; i++)
        note_stmt(rs, f, block->items[i]);
}

/* ---- whether a body mentions `loop`, `caller`, `kwargs` or `varargs` ---- */

static bool expr_mentions(struct resolver *rs, const struct expr *e, const char *word)
{
    if (!e || !deeper(rs, e->line))
        return false;
    bool found = e->kind == E_NAME && e->name->len == strlen(word) && memcmp(e->name->bytes, word, e->name->len) == 0;
    if (e->kind != E_CONST)
        found = found || expr_mentions(rs, e->a, word) || expr_mentions(rs, e->b, word) || expr_mentions(rs, e->c, word);
    found = found || expr_mentions(rs, e->dyn_args, word) || expr_mentions(rs, e->dyn_kwargs, word);
    for (uint32_t i = 0; i < e->n && !found; i++)
        found = expr_mentions(rs, e->items[i], word);
    for (uint32_t i = 0; i < e->n_kw && !found; i++)
        found = expr_mentions(rs, e->kw[i], word);
    rs->depth--;
    return found;
}

static bool block_mentions(struct resolver *rs, const struct block *block, const char *word)
{
    for (uint32_t i = 0; i < block->n && !rs->p.failed; i++) {
        const struct stmt *s = block->items[i];
        for (; s; s = s->next_if) {
            bool found = expr_mentions(rs, s->expr, word) || expr_mentions(rs, s->test, word);
            if (s->kind == S_CALL_BLOCK)
                found = found || expr_mentions(rs, s->target, word);
            for (uint32_t k = 0; k < s->n_exprs && !found; k++)
                found = expr_mentions(rs, s->exprs[k], word);
            for (uint32_t k = 0; s->macro && k < s->macro->n_defaults && !found; k++)
                found = expr_mentions(rs, s->macro->defaults[k], word);
            if (found || block_mentions(rs, &s->body, word) || block_mentions(rs, &s->orelse, word) ||
                (s->macro && block_mentions(rs, &s->macro->body, word)))
                return true;
        }
    }
    return false;
}

/* ---- second pass: names become slots ---- */

static void resolve_block(struct resolver *rs, struct frame *f, const struct block *block);

static void resolve_expr(struct resolver *rs, struct frame *f, struct expr *e)
{
    if (rs->p.failed || !deeper(rs, e->line))
        return;
    if (e->kind == E_NAME) {
        struct frame *owner = NULL;
        struct symbol *s = find_symbol(f, e->name, &owner);
        if (!s)
            s = define(rs, owner = f, e->name, free_name(rs, e->name));
        if (s) {
            e->level = (uint16_t)(f->level - owner->level);
            e->slot = s->load.slot;
        }
        rs->depth--;
        return;
    }
    if ((e->kind == E_FILTER || e->kind == E_TEST) && !e->function && !f->soft)
        syntax_error(&rs->p, e->line, "No %s named '%.*s'.", e->kind == E_FILTER ? "filter" : "test",
                     (int)(e->name->len < 60 ? e->name->len : 60), e->name->bytes);
    bool soft = f->soft;
    f->soft |= e->kind == E_COND;
    each_child(rs, f, e, resolve_expr);
    f->soft = soft;
    rs->depth--;
}

static struct frame inner_frame(struct frame *f)
{
    return (struct frame){.parent = f, .slots = f->slots, .level = f->level};
}

static void finish_scope(struct resolver *rs, const struct frame *f, struct scope *scope)
{
    scope->loads = parse_alloc(&rs->p, (f->n + 1) * sizeof *scope->loads);
    if (!scope->loads)
        return;
    for (uint32_t i = 0; i < f->n; i++)
        if (f->symbols[i].load.kind != LOAD_PARAMETER)
            scope->loads[scope->n++] = f->symbols[i].load;
}

static struct expr *copy_target(struct resolver *rs, const struct expr *e)
{
    struct expr *copy = parse_alloc(&rs->p, sizeof *copy);
    if (!copy)
        return NULL;
    *copy = *e;
    if (e->n) {
        copy->items = parse_alloc(&rs->p, e->n * sizeof *copy->items);
        for (uint32_t i = 0; copy->items && i < e->n; i++)
            copy->items[i] = copy_target(rs, e->items[i]);
    }
    return rs->p.failed ? NULL : copy;
}

static void resolve_for(struct resolver *rs, struct frame *f, struct stmt *s)
{
    static const struct str loop_name = {.bytes = "loop", .len = 4, .ascii = 1};
    resolve_expr(rs, f, s->expr);
    if (s->test) {
        struct frame test = inner_frame(f);
        if (!(s->test_target = copy_target(rs, s->target)))
            return;
        note_target(rs, &test, s->test_target, true);
        note_reads(rs, &test, s->test);
        resolve_expr(rs, &test, s->test_target);
        resolve_expr(rs, &test, s->test);
        finish_scope(rs, &test, &s->test_scope);
    }
    struct frame body = inner_frame(f);
    s->uses_loop = block_mentions(rs, &s->body, "loop");
    if (s->uses_loop)
        s->loop_slot = declare_parameter(rs, &body, &loop_name);
    note_target(rs, &body, s->target, true);
    note_block(rs, &body, &s->body);
    resolve_expr(rs, &body, s->target);
    resolve_block(rs, &body, &s->body);
    finish_scope(rs, &body, &s->scope);
    struct frame orelse = inner_frame(f);
    note_block(rs, &orelse, &s->orelse);
    resolve_block(rs, &orelse, &s->orelse);
    finish_scope(rs, &orelse, &s->else_scope);
}

static uint32_t special_parameter(struct resolver *rs, struct frame *f, const struct macro *m, const struct str *name, bool *uses,
                                  bool *explicit)
{
    *uses = *explicit = false;
    for (uint32_t i = 0; i < m->n_params; i++)
        *explicit |= str_same(m->params[i]->name, name);
    if (*explicit || !block_mentions(rs, &m->body, name->bytes))
        return 0;
    *uses = true;
    return declare_parameter(rs, f, name);
}

static void resolve_macro(struct resolver *rs, struct frame *f, struct macro *m)
{
    static const struct str caller = {.bytes = "caller", .len = 6, .ascii = 1},
                            kwargs = {.bytes = "kwargs", .len = 6, .ascii = 1},
                            varargs = {.bytes = "varargs", .len = 7, .ascii = 1};
    struct function_slots slots = {0};
    struct frame body = {.parent = f, .slots = &slots, .level = f->level + 1};
    bool given;
    for (uint32_t i = 0; i < m->n_params; i++)
        declare_parameter(rs, &body, m->params[i]->name);
    m->caller_slot = special_parameter(rs, &body, m, &caller, &m->uses_caller, &m->explicit_caller);
    m->kwargs_slot = special_parameter(rs, &body, m, &kwargs, &m->uses_kwargs, &given);
    m->varargs_slot = special_parameter(rs, &body, m, &varargs, &m->uses_varargs, &given);
    for (uint32_t i = 0; i < m->n_defaults; i++)
        note_reads(rs, &body, m->defaults[i]);
    note_block(rs, &body, &m->body);
    for (uint32_t i = 0; i < m->n_params; i++)
        resolve_expr(rs, &body, m->params[i]);
    for (uint32_t i = 0; i < m->n_defaults; i++)
        resolve_expr(rs, &body, m->defaults[i]);
    resolve_block(rs, &body, &m->body);
    finish_scope(rs, &body, &m->scope);
    m->n_slots = slots.n;
}

static void resolve_inner(struct resolver *rs, struct frame *f, struct stmt *s)
{
    struct frame inner = inner_frame(f);
    for (uint32_t i = 0; s->targets && i < s->n_exprs; i++)
        note_target(rs, &inner, s->targets[i], true);
    note_block(rs, &inner, &s->body);
    for (uint32_t i = 0; s->targets && i < s->n_exprs; i++)
        resolve_expr(rs, &inner, s->targets[i]);
    resolve_block(rs, &inner, &s->body);
    finish_scope(rs, &inner, &s->scope);
}

static void resolve_if(struct resolver *rs, struct frame *f, struct stmt *s)
{
    bool soft = f->soft;
    f->soft = true;
    for (; s; s = s->next_if) {
        resolve_expr(rs, f, s->expr);
        resolve_block(rs, f, &s->body);
        resolve_block(rs, f, &s->orelse);
    }
    f->soft = soft;
}

static void resolve_stmt(struct resolver *rs, struct frame *f, struct stmt *s)
{
    switch (s->kind) {
    case S_FOR:
        resolve_for(rs, f, s);
        return;
    case S_IF:
        resolve_if(rs, f, s);
        return;
    case S_MACRO:
    case S_CALL_BLOCK:
        resolve_expr(rs, f, s->target);
        resolve_macro(rs, f, s->macro);
        return;
    default:
        break;
    }
    if (s->expr)
        resolve_expr(rs, f, s->expr);
    for (uint32_t i = 0; i < s->n_exprs; i++)
        resolve_expr(rs, f, s->exprs[i]);
    if (s->target)
        resolve_expr(rs, f, s->target);
    if (s->kind == S_SET_BLOCK || s->kind == S_FILTER_BLOCK || s->kind == S_SCOPE)
        resolve_inner(rs, f, s);
}

static void resolve_block(struct resolver *rs, struct frame *f, const struct block *block)
{
    for (uint32_t i = 0; i < block->n && !rs->p.failed; i++)
        resolve_stmt(rs, f, block->items[i]);
}

int jinja_resolve_scopes(struct kvg_template *tmpl, struct kvg_error *err)
{
    struct resolver rs = {.tmpl = tmpl, .p = {.arena = &tmpl->arena, .err = err}};
    struct function_slots slots = {0};
    struct frame root = {.slots = &slots};
    note_block(&rs, &root, &tmpl->body);
    resolve_block(&rs, &root, &tmpl->body);
    finish_scope(&rs, &root, &tmpl->scope);
    tmpl->n_slots = slots.n;
    if (rs.p.failed)
        return err ? err->code : KVG_INVALID;
    return 0;
}
