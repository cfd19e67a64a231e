/* Statements of a running template: scopes, loops, macros, captured blocks. */
#include "libprompt/jinja_run.h"
#include <string.h>

enum flow { FLOW_ERROR = -1, FLOW_NEXT, FLOW_BREAK, FLOW_CONTINUE };

/* The `loop` variable. Items that the loop's `if` refuses are skipped as late as jinja skips them: when asked for. */
struct loop_state {
    const struct stmt *stmt;
    struct record *record;
    struct seq *items;
    size_t next; /* number of the item to look at next */
    int64_t index0;
    int64_t length; /* -1: not yet known */
    bool peeked;
    struct value after; /* the item peeked at; V_MISSING: there is none */
    struct value current, before;
    struct seq *changed; /* arguments of the last loop.changed() */
};

static enum flow run_block(struct render *r, const struct block *block);

static void enter_scope(struct render *r, const struct scope *scope)
{
    for (uint32_t i = 0; i < scope->n; i++) {
        const struct load *load = &scope->loads[i];
        struct value v = MISSING_VALUE;
        if (load->kind == LOAD_RESOLVE) {
            v = r->globals[load->source];
        } else if (load->kind == LOAD_ALIAS) {
            const struct record *record = r->record;
            for (uint32_t k = load->level; k; k--)
                record = record->outer;
            v = record->slots[load->source];
        }
        r->record->slots[load->slot] = v;
    }
}

/* ---- assignment ---- */

static bool assign(struct render *r, const struct expr *target, struct value v);

static bool assign_tuple(struct render *r, const struct expr *target, struct value v)
{
    struct seq *seq = iterate(r, v);
    if (!seq)
        return false;
    if (seq->n != target->n) {
        fail_value(r,
                   seq->n < target->n ? "not enough values to unpack (expected %u, got %zu)"
                                      : "too many values to unpack (expected %u, got %zu)",
                   target->n, seq->n);
        return false;
    }
    for (uint32_t i = 0; i < target->n; i++)
        if (!assign(r, target->items[i], seq->items[i]))
            return false;
    return true;
}

static bool assign_attribute(struct render *r, const struct expr *target, struct value v)
{
    struct value ns = eval(r, target->a);
    if (ns.type != V_NAMESPACE) {
        fail_value(r, "cannot assign attribute on non-namespace object");
        return false;
    }
    if (target->name->bytes[0] == '_') {
        fail_value(r, "cannot store underscore-prefixed attributes on a namespace");
        return false;
    }
    return dict_set(r, ns.dict, (struct value){.type = V_STR, .s = target->name}, v);
}

static bool assign(struct render *r, const struct expr *target, struct value v)
{
    if (target->kind == E_NAME)
        r->record->slots[target->slot] = v;
    else if (target->kind == E_TUPLE)
        return assign_tuple(r, target, v);
    else
        return assign_attribute(r, target, v);
    return true;
}

/* ---- loops ---- */

/* The next item that the loop's `if` lets through: 1, 0 at the end, -1 when failed. */
static int pull(struct render *r, struct loop_state *loop, struct value *out)
{
    const struct stmt *s = loop->stmt;
    while (loop->next < loop->items->n) {
        *out = loop->items->items[loop->next++];
        if (!s->test)
            return 1;
        struct record *record = r->record;
        r->record = loop->record;
        struct value holds = assign(r, s->test_target, *out) ? eval(r, s->test) : ERROR_VALUE;
        r->record = record;
        if (holds.type == V_ERROR)
            return -1;
        if (truth(holds))
            return 1;
    }
    return 0;
}

static bool peek(struct render *r, struct loop_state *loop)
{
    if (loop->peeked)
        return true;
    int rc = pull(r, loop, &loop->after);
    if (rc < 0)
        return false;
    if (rc == 0)
        loop->after = MISSING_VALUE;
    loop->peeked = true;
    return true;
}

static bool advance(struct render *r, struct loop_state *loop, bool *more)
{
    struct value v;
    if (!peek(r, loop))
        return false;
    v = loop->after;
    loop->peeked = false;
    *more = v.type != V_MISSING;
    loop->index0++;
    loop->before = loop->current;
    loop->current = v;
    return true;
}

/* How many items pass in all; those still to come are looked at now. */
static bool loop_length(struct render *r, struct loop_state *loop)
{
    if (loop->length >= 0)
        return true;
    if (!loop->stmt->test) {
        loop->length = (int64_t)loop->items->n;
        return true;
    }
    if (!peek(r, loop))
        return false;
    struct seq *rest = seq_new(r, SEQ_LIST, loop->items->n - loop->next);
    if (!rest)
        return false;
    size_t n = 0;
    for (int rc; (rc = pull(r, loop, &rest->items[n])) != 0; n++)
        if (rc < 0)
            return false;
    rest->n = n;
    loop->length = loop->index0 + 1 + (loop->after.type != V_MISSING) + (int64_t)n;
    /* the loop goes on over what passed */
    struct stmt *untested = render_alloc(r, sizeof *untested);
    if (!untested)
        return false;
    *untested = *loop->stmt;
    untested->test = NULL;
    loop->stmt = untested;
    loop->items = rest;
    loop->next = 0;
    return true;
}

static struct value loop_cycle(struct render *r, struct value self, const struct value *p, const struct args *args)
{
    if (!args->n_pos)
        return fail_value(r, "no items for cycling given");
    return args->pos[self.loop->index0 % args->n_pos];
}

static struct value loop_changed(struct render *r, struct value self, const struct value *p, const struct args *args)
{
    struct seq *now = seq_new(r, SEQ_TUPLE, args->n_pos), *last = self.loop->changed;
    if (!now)
        return ERROR_VALUE;
    if (args->n_pos)
        memcpy(now->items, args->pos, args->n_pos * sizeof *now->items);
    int same = last ? value_equal(r, seq_value(last), seq_value(now)) : 0;
    self.loop->changed = now;
    return same < 0 ? ERROR_VALUE : bool_value(!same);
}

static struct value loop_method(struct render *r, struct loop_state *loop, const struct function *function)
{
    struct method_value *bound = render_alloc(r, sizeof *bound);
    if (!bound)
        return ERROR_VALUE;
    *bound = (struct method_value){{.type = V_LOOP, .loop = loop}, function};
    return (struct value){.type = V_METHOD, .method = bound};
}

static struct value loop_neighbour(struct value v, bool there)
{
    static const struct str hint = {.bytes = "there is no such item", .len = 21, .ascii = 1};
    return there ? v : (struct value){.type = V_UNDEFINED, .why = UNDEFINED_HINT, .s = &hint};
}

struct value loop_attribute(struct render *r, struct loop_state *loop, const struct str *name)
{
    static const struct function cycle = {"cycle", "*", loop_cycle}, changed = {"changed", "*", loop_changed};
    const struct kvg_str n = {name->bytes, name->len};
    if (kvg_str_eq(n, "index0"))
        return int_value(loop->index0);
    if (kvg_str_eq(n, "index"))
        return int_value(loop->index0 + 1);
    if (kvg_str_eq(n, "first"))
        return bool_value(loop->index0 == 0);
    if (kvg_str_eq(n, "last"))
        return peek(r, loop) ? bool_value(loop->after.type == V_MISSING) : ERROR_VALUE;
    if (kvg_str_eq(n, "previtem"))
        return loop_neighbour(loop->before, loop->index0 > 0);
    if (kvg_str_eq(n, "nextitem"))
        return peek(r, loop) ? loop_neighbour(loop->after, loop->after.type != V_MISSING) : ERROR_VALUE;
    if (kvg_str_eq(n, "length"))
        return loop_length(r, loop) ? int_value(loop->length) : ERROR_VALUE;
    if (kvg_str_eq(n, "revindex"))
        return loop_length(r, loop) ? int_value(loop->length - loop->index0) : ERROR_VALUE;
    if (kvg_str_eq(n, "revindex0"))
        return loop_length(r, loop) ? int_value(loop->length - loop->index0 - 1) : ERROR_VALUE;
    if (kvg_str_eq(n, "depth"))
        return int_value(1);
    if (kvg_str_eq(n, "depth0"))
        return int_value(0);
    if (kvg_str_eq(n, "cycle"))
        return loop_method(r, loop, &cycle);
    if (kvg_str_eq(n, "changed"))
        return loop_method(r, loop, &changed);
    return undefined_attribute((struct value){.type = V_LOOP}, (struct value){.type = V_STR, .s = name});
}

static enum flow run_for(struct render *r, const struct stmt *s)
{
    struct value iterable = eval(r, s->expr);
    struct seq *items = iterable.type == V_ERROR ? NULL : iterate(r, iterable);
    if (!items)
        return FLOW_ERROR;
    struct loop_state *loop = render_alloc(r, sizeof *loop);
    if (!loop)
        return FLOW_ERROR;
    *loop = (struct loop_state){.stmt = s, .record = r->record, .items = items, .index0 = -1, .length = -1};
    if (s->test)
        enter_scope(r, &s->test_scope);
    bool any = false;
    for (;;) {
        struct value item;
        if (s->uses_loop) {
            bool more;
            if (!advance(r, loop, &more))
                return FLOW_ERROR;
            if (!more)
                break;
            item = loop->current;
            r->record->slots[s->loop_slot] = (struct value){.type = V_LOOP, .loop = loop};
        } else {
            int rc = pull(r, loop, &item);
            if (rc < 0)
                return FLOW_ERROR;
            if (rc == 0)
                break;
        }
        if (!burn(r, 0) || !assign(r, s->target, item))
            return FLOW_ERROR;
        enter_scope(r, &s->scope);
        enum flow flow = run_block(r, &s->body);
        if (flow == FLOW_ERROR)
            return flow;
        if (flow == FLOW_BREAK)
            break;
        any |= flow == FLOW_NEXT; /* as in jinja, an iteration left early does not count against the else */
    }
    if (any || !s->orelse.n)
        return FLOW_NEXT;
    enter_scope(r, &s->else_scope);
    return run_block(r, &s->orelse);
}

/* ---- capturing ---- */

/* What the block prints, as a string. */
static const struct str *capture(struct render *r, const struct block *block)
{
    struct pieces out, *outer = r->out;
    pieces_init(&out);
    r->out = &out;
    enum flow flow = run_block(r, block);
    r->out = outer;
    return flow == FLOW_ERROR ? NULL : pieces_str(r, &out);
}

static struct value filter_block(struct render *r, const struct expr *filter, struct value captured)
{
    if (filter->a)
        captured = filter_block(r, filter->a, captured);
    return captured.type == V_ERROR ? captured : apply_filter(r, filter, captured);
}

static enum flow run_captured(struct render *r, const struct stmt *s)
{
    struct pieces out, *outer = r->out;
    pieces_init(&out);
    enter_scope(r, &s->scope);
    r->out = &out;
    enum flow flow = run_block(r, &s->body);
    r->out = outer;
    if (flow != FLOW_NEXT) /* break and continue leave the block, and what it printed */
        return flow;
    struct value v = str_value(pieces_str(r, &out));
    if (v.type != V_ERROR && s->expr)
        v = filter_block(r, s->expr, v);
    if (v.type == V_ERROR)
        return FLOW_ERROR;
    bool ok = s->kind == S_SET_BLOCK ? assign(r, s->target, v) : print_value(r, r->out, v);
    return ok ? FLOW_NEXT : FLOW_ERROR;
}

/* ---- macros ---- */

static struct value macro_keyword(const struct args *args, bool *used, const struct str *name)
{
    for (uint32_t i = 0; i < args->n_kw; i++)
        if (!used[i] && str_same(args->kw[i].name, name)) {
            used[i] = true;
            return args->kw[i].value;
        }
    return MISSING_VALUE;
}

static bool bind_rest(struct render *r, const struct macro *m, struct record *record, const struct args *args, bool *used)
{
    static const struct str caller = {.bytes = "caller", .len = 6, .ascii = 1};
    if (m->uses_caller) {
        struct value v = macro_keyword(args, used, &caller);
        record->slots[m->caller_slot] = v.type == V_MISSING || v.type == V_NONE ? undefined_name(&caller) : v;
    }
    struct dict *rest = m->uses_kwargs ? dict_new(r, args->n_kw) : NULL;
    for (uint32_t i = 0; i < args->n_kw; i++) {
        if (used[i])
            continue;
        if (!m->uses_kwargs)
            return fail_value(r, "macro '%.*s' takes no keyword argument '%.*s'", m->name ? (int)m->name->len : 0,
                              m->name ? m->name->bytes : "", (int)args->kw[i].name->len, args->kw[i].name->bytes),
                   false;
        if (!rest || !dict_set(r, rest, (struct value){.type = V_STR, .s = args->kw[i].name}, args->kw[i].value))
            return false;
    }
    if (m->uses_kwargs)
        record->slots[m->kwargs_slot] = dict_value(rest);
    if (!m->uses_varargs && args->n_pos > m->n_params)
        return fail_value(r, "macro '%.*s' takes not more than %u argument(s)", m->name ? (int)m->name->len : 0,
                          m->name ? m->name->bytes : "", m->n_params),
               false;
    if (m->uses_varargs) {
        size_t n = args->n_pos > m->n_params ? args->n_pos - m->n_params : 0;
        struct seq *more = seq_new(r, SEQ_TUPLE, n);
        if (!more)
            return false;
        for (size_t i = 0; i < n; i++)
            more->items[i] = args->pos[m->n_params + i];
        record->slots[m->varargs_slot] = seq_value(more);
    }
    return true;
}

static struct record *bind_macro(struct render *r, const struct macro_value *macro, const struct args *args)
{
    const struct macro *m = macro->def;
    struct record *record = render_alloc(r, sizeof *record + m->n_slots * sizeof *record->slots);
    bool *used = record ? render_alloc(r, args->n_kw) : NULL;
    if (!used || !burn(r, m->n_slots))
        return NULL;
    record->outer = macro->outer;
    for (uint32_t i = 0; i < m->n_slots; i++)
        record->slots[i] = MISSING_VALUE;
    memset(used, 0, args->n_kw);
    for (uint32_t i = 0; i < m->n_params; i++)
        record->slots[m->params[i]->slot] = i < args->n_pos ? args->pos[i] : macro_keyword(args, used, m->params[i]->name);
    return bind_rest(r, m, record, args, used) ? record : NULL;
}

static bool set_defaults(struct render *r, const struct macro *m)
{
    for (uint32_t i = 0; i < m->n_params; i++) {
        struct value *slot = &r->record->slots[m->params[i]->slot];
        if (slot->type != V_MISSING)
            continue;
        uint32_t required = m->n_params - m->n_defaults;
        *slot = i < required ? undefined_name(m->params[i]->name) : eval(r, m->defaults[i - required]);
        if (slot->type == V_ERROR)
            return false;
    }
    return true;
}

struct value call_macro(struct render *r, const struct macro_value *macro, const struct args *args)
{
    struct record *record = bind_macro(r, macro, args), *caller = r->record;
    if (!record)
        return ERROR_VALUE;
    if (r->depth + 8 > MAX_EVAL_DEPTH)
        return fail_limit(r, "nesting");
    uint32_t line = r->line;
    r->depth += 8; /* a macro's body takes more stack than an expression */
    r->record = record;
    enter_scope(r, &macro->def->scope);
    struct value v = set_defaults(r, macro->def) ? str_value(capture(r, &macro->def->body)) : ERROR_VALUE;
    r->record = caller;
    r->depth -= 8;
    r->line = line;
    return v;
}

static struct value macro_value(struct render *r, const struct macro *def)
{
    struct macro_value *macro = render_alloc(r, sizeof *macro);
    if (!macro)
        return ERROR_VALUE;
    *macro = (struct macro_value){def, r->record};
    return (struct value){.type = V_MACRO, .macro = macro};
}

static enum flow run_call_block(struct render *r, const struct stmt *s)
{
    static const struct str name = {.bytes = "caller", .len = 6, .ascii = 1};
    struct kwarg caller = {&name, macro_value(r, s->macro)};
    struct value v = caller.value.type == V_ERROR ? caller.value : eval_call(r, s->target, &caller);
    return print_value(r, r->out, v) ? FLOW_NEXT : FLOW_ERROR;
}

/* ---- statements ---- */

static enum flow run_scope(struct render *r, const struct stmt *s)
{
    struct value *values = s->n_exprs ? render_alloc(r, s->n_exprs * sizeof *values) : NULL;
    if (s->n_exprs && !values)
        return FLOW_ERROR;
    for (uint32_t i = 0; i < s->n_exprs; i++)
        if ((values[i] = eval(r, s->exprs[i])).type == V_ERROR)
            return FLOW_ERROR;
    enter_scope(r, &s->scope);
    for (uint32_t i = 0; i < s->n_exprs; i++)
        if (!assign(r, s->targets[i], values[i]))
            return FLOW_ERROR;
    return run_block(r, &s->body);
}

static enum flow run_if(struct render *r, const struct stmt *s)
{
    for (; s; s = s->next_if) {
        r->line = s->line;
        struct value condition = eval(r, s->expr);
        if (condition.type == V_ERROR)
            return FLOW_ERROR;
        if (truth(condition))
            return run_block(r, &s->body);
        if (!s->next_if)
            return run_block(r, &s->orelse);
    }
    return FLOW_NEXT;
}

static bool run_print(struct render *r, const struct stmt *s)
{
    for (uint32_t i = 0; i < s->n_exprs; i++)
        if (!print_value(r, r->out, eval(r, s->exprs[i])))
            return false;
    return true;
}

static enum flow run_stmt(struct render *r, const struct stmt *s)
{
    struct value v;
    r->line = s->line;
    switch (s->kind) {
    case S_DATA:
        return pieces_add(r, r->out, s->data->bytes, s->data->len, KVG_TEMPLATE) ? FLOW_NEXT : FLOW_ERROR;
    case S_PRINT:
        return run_print(r, s) ? FLOW_NEXT : FLOW_ERROR;
    case S_SET:
        v = eval(r, s->expr);
        return v.type != V_ERROR && assign(r, s->target, v) ? FLOW_NEXT : FLOW_ERROR;
    case S_IF:
        return run_if(r, s);
    case S_FOR:
        return run_for(r, s);
    case S_MACRO:
        v = macro_value(r, s->macro);
        return v.type != V_ERROR && assign(r, s->target, v) ? FLOW_NEXT : FLOW_ERROR;
    case S_CALL_BLOCK:
        return run_call_block(r, s);
    case S_SET_BLOCK:
    case S_FILTER_BLOCK:
        return run_captured(r, s);
    case S_SCOPE:
        return run_scope(r, s);
    case S_BREAK:
        return FLOW_BREAK;
    default:
        return FLOW_CONTINUE;
    }
}

static enum flow run_block(struct render *r, const struct block *block)
{
    for (uint32_t i = 0; i < block->n; i++) {
        enum flow flow = run_stmt(r, block->items[i]);
        if (flow != FLOW_NEXT)
            return flow;
    }
    return FLOW_NEXT;
}

bool run_template(struct render *r)
{
    const struct kvg_template *t = r->tmpl;
    struct record *record = render_alloc(r, sizeof *record + t->n_slots * sizeof *record->slots);
    if (!record)
        return false;
    record->outer = NULL;
    for (uint32_t i = 0; i < t->n_slots; i++)
        record->slots[i] = MISSING_VALUE;
    r->record = record;
    enter_scope(r, &t->scope);
    return run_block(r, &t->body) != FLOW_ERROR;
}
