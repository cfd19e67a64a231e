#include "libprompt/jinja.h"
#include "libprompt/jinja_run.h"
#include <stdlib.h>
#include <string.h>

enum { DEFAULT_FUEL = 20000000, DEFAULT_OUTPUT = 64 << 20 };

int kvg_template_open(struct kvg_template **out, const char *source, size_t len, struct kvg_error *err)
{
    struct kvg_error local = {0};
    struct kvg_template *tmpl = calloc(1, sizeof *tmpl);
    if (!tmpl)
        return kvg_fail(err, KVG_NOMEM, "out of memory");
    err = err ? err : &local;
    kvg_arena_init(&tmpl->arena, 0);
    struct token *tokens;
    int rc = jinja_lex(&tmpl->arena, source, len, &tokens, err);
    if (rc == 0)
        rc = jinja_parse(tmpl, tokens, err);
    if (rc == 0)
        rc = jinja_resolve_scopes(tmpl, err);
    if (rc < 0) {
        kvg_template_close(tmpl);
        return rc;
    }
    *out = tmpl;
    return 0;
}

void kvg_template_close(struct kvg_template *tmpl)
{
    if (!tmpl)
        return;
    kvg_arena_free(&tmpl->arena);
    free(tmpl);
}

int free_name_index(const struct kvg_template *tmpl, const char *name, size_t len)
{
    for (uint32_t i = 0; i < tmpl->n_free_names; i++)
        if (tmpl->free_names[i]->len == len && memcmp(tmpl->free_names[i]->bytes, name, len) == 0)
            return (int)i;
    return -1;
}

void render_init(struct render *r, const struct kvg_template *tmpl, const struct kvg_render_limits *limits,
                 struct kvg_arena *arena, struct kvg_error *err)
{
    *r = (struct render){.tmpl = tmpl, .arena = arena, .err = err, .arena_start = arena->used};
    r->fuel = limits && limits->fuel ? (int64_t)limits->fuel : DEFAULT_FUEL;
    r->output_limit = limits && limits->output_bytes ? limits->output_bytes : DEFAULT_OUTPUT;
    r->now = limits ? limits->now : 0;
    err->code = 0;
}

struct value *render_globals(struct render *r)
{
    const struct kvg_template *t = r->tmpl;
    struct value *globals = render_alloc(r, t->n_free_names * sizeof *globals);
    for (uint32_t i = 0; globals && i < t->n_free_names; i++) {
        const struct function *f = find_global(t->free_names[i]->bytes, t->free_names[i]->len);
        globals[i] = f ? (struct value){.type = V_FUNCTION, .function = f} : MISSING_VALUE;
    }
    return globals;
}

/* Joins what was printed, and gives its runs. */
static int join_output(struct render *r, const struct pieces *printed, struct kvg_text *out)
{
    char *bytes = kvg_arena_alloc(r->arena, printed->len + 1), *w = bytes;
    struct kvg_run *runs = kvg_arena_alloc(r->arena, (printed->n + 1) * sizeof *runs);
    if (!bytes || !runs)
        return kvg_fail(r->err, KVG_NOMEM, "out of memory while rendering the chat template");
    size_t n = 0;
    for (size_t i = 0; i < printed->n; i++) {
        const struct piece *piece = &printed->v[i];
        memcpy(w, piece->bytes, piece->len);
        w += piece->len;
        if (n == 0 || runs[n - 1].origin != piece->origin)
            runs[n++] = (struct kvg_run){.len = 0, .origin = piece->origin};
        runs[n - 1].len += piece->len;
    }
    *w = '\0';
    *out = (struct kvg_text){.bytes = bytes, .len = printed->len, .runs = runs, .n_runs = n};
    return 0;
}

int render_with(struct render *r, struct value *globals, struct kvg_text *out)
{
    struct pieces printed;
    pieces_init(&printed);
    r->out = &printed;
    r->globals = globals;
    if (!globals || !run_template(r))
        return r->err->code ? r->err->code : kvg_fail(r->err, KVG_RENDER, "the chat template failed");
    if (r->fuel < 0) {
        fail_limit(r, "steps");
        return r->err->code;
    }
    return join_output(r, &printed, out);
}

int kvg_template_render(const struct kvg_template *tmpl, const struct kvg_binding *bindings, size_t n_bindings,
                        const struct kvg_render_limits *limits, struct kvg_arena *arena, struct kvg_text *out,
                        struct kvg_error *err)
{
    struct kvg_error local;
    struct render r;
    render_init(&r, tmpl, limits, arena, err ? err : &local);
    struct value *globals = render_globals(&r);
    for (size_t i = 0; globals && i < n_bindings; i++) {
        int k = free_name_index(tmpl, bindings[i].name, strlen(bindings[i].name));
        if (k < 0)
            continue;
        globals[k] = bindings[i].value ? value_from_json(&r, bindings[i].value, bindings[i].origin) : MISSING_VALUE;
        if (globals[k].type == V_ERROR)
            return r.err->code;
    }
    return render_with(&r, globals, out);
}
