/* What expressions and statements of a running template share. Internal to libprompt. */
#pragma once
#include "libprompt/jinja_ast.h"

/* Nested evaluations, each some hundred bytes of C stack. */
enum { MAX_EVAL_DEPTH = 3000 };

struct record {
    struct record *outer; /* of the function in which this one was defined */
    struct value slots[];
};

struct value eval(struct render *r, const struct expr *e);
struct value eval_call(struct render *r, const struct expr *e, const struct kwarg *caller);
bool eval_args(struct render *r, const struct expr *e, struct args *args);
struct value apply_filter(struct render *r, const struct expr *e, struct value self);

/* Runs the template's body, which prints to r->out; false when it failed. */
bool run_template(struct render *r);

struct kvg_render_limits;
void render_init(struct render *r, const struct kvg_template *tmpl, const struct kvg_render_limits *limits,
                 struct kvg_arena *arena, struct kvg_error *err);
/* One value for each free name: global functions, else V_MISSING; NULL when failed. The caller sets its bindings. */
struct value *render_globals(struct render *r);
int render_with(struct render *r, struct value *globals, struct kvg_text *out);
/* The number of a free name of the template, or -1: a binding that no expression reads needs no value. */
int free_name_index(const struct kvg_template *tmpl, const char *name, size_t len);
