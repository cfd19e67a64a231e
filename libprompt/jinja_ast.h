/* The compiled template: what the parser builds, the scope pass completes and the interpreter walks. Internal to libprompt.
 *
 * A function is the template itself or the body of a macro or call block. Each of its variables, one a scope and name, has a
 * slot in the function's record; a name is (levels of enclosing functions, slot), as closures see it in Python.
 */
#pragma once
#include "libprompt/jinja_value.h"

enum expr_kind {
    E_CONST,
    E_NAME,
    E_LIST,
    E_TUPLE,
    E_DICT, /* items: key, value, key, value … */
    E_GETATTR,
    E_GETITEM,
    E_SLICE, /* of a; items: start, stop, step, NULL where absent */
    E_CALL,
    E_FILTER, /* a == NULL: applies to the captured block */
    E_TEST,
    E_NOT,
    E_NEG,
    E_POS,
    E_AND,
    E_OR,
    E_BINARY,
    E_CONCAT,
    E_COMPARE, /* a, then items with ops */
    E_COND,    /* a if b else c */
    E_NSREF,   /* an assignment's target: a.name */
};

enum operator{
    OP_ADD,
    OP_SUB,
    OP_MUL,
    OP_DIV,
    OP_FLOORDIV,
    OP_MOD,
    OP_POW,
    OP_EQ,
    OP_NE,
    OP_LT,
    OP_LE,
    OP_GT,
    OP_GE,
    OP_IN,
    OP_NOT_IN
};

struct expr {
    uint8_t kind;
    uint8_t op;
    uint16_t level; /* E_NAME: enclosing functions to go out */
    uint32_t slot;  /* E_NAME */
    uint32_t line;
    uint32_t n; /* items */
    union {
        struct value constant;
        struct {
            struct expr *a, *b, *c;
        };
    };
    struct expr **items;    /* positional arguments of calls, filters and tests too */
    uint8_t *ops;           /* E_COMPARE */
    const struct str *name; /* variable, attribute, filter, test */
    struct expr **kw;       /* keyword arguments */
    const struct str **kw_names;
    uint32_t n_kw;
    struct expr *dyn_args, *dyn_kwargs;
    const struct function *function; /* filter or test; NULL: unknown, which fails when it is reached */
};

enum stmt_kind {
    S_DATA,
    S_PRINT,
    S_SET,
    S_SET_BLOCK,
    S_IF,
    S_FOR,
    S_MACRO,
    S_CALL_BLOCK,
    S_FILTER_BLOCK,
    S_SCOPE, /* with and generation */
    S_BREAK,
    S_CONTINUE,
};

enum load_kind { LOAD_PARAMETER, LOAD_RESOLVE, LOAD_ALIAS, LOAD_UNDEFINED };

struct load {
    uint8_t kind;
    uint16_t level; /* ALIAS: where the outer variable is */
    uint32_t slot;
    uint32_t source; /* ALIAS: its slot; RESOLVE: number of the free name */
};

/* What has to be set when a scope is entered. */
struct scope {
    struct load *loads;
    uint32_t n;
};

struct block {
    struct stmt **items;
    uint32_t n;
};

struct macro {
    const struct str *name; /* NULL for a call block's body */
    struct expr **params;   /* E_NAME, slots in the macro's own record */
    struct expr **defaults; /* of the last n_defaults parameters */
    uint32_t n_params, n_defaults;
    struct block body;
    struct scope scope;
    uint32_t n_slots;
    bool uses_caller, uses_kwargs, uses_varargs, explicit_caller;
    uint32_t caller_slot, kwargs_slot, varargs_slot;
};

struct stmt {
    uint8_t kind;
    bool uses_loop;
    uint32_t line;
    struct stmt *next_if; /* S_IF: the elif that follows */
    struct expr *target;  /* S_SET, S_SET_BLOCK, S_FOR, S_MACRO; S_CALL_BLOCK: the call */
    struct expr *expr;    /* value, condition, iterable, filter */
    struct expr *test;    /* S_FOR: its `if` */
    struct expr *test_target;
    struct expr **exprs; /* S_PRINT; S_SCOPE: values of the targets */
    struct expr **targets;
    uint32_t n_exprs;
    const struct str *data;
    struct block body, orelse;
    struct scope scope, test_scope, else_scope;
    uint32_t loop_slot;
    struct macro *macro;
};

struct kvg_template {
    struct kvg_arena arena;
    struct block body;
    struct scope scope;
    uint32_t n_slots;
    const struct str **free_names;
    uint32_t n_free_names;
};

enum token_type {
    T_EOF,
    T_DATA,
    T_BLOCK_BEGIN,
    T_BLOCK_END,
    T_VARIABLE_BEGIN,
    T_VARIABLE_END,
    T_NAME,
    T_STRING,
    T_INTEGER,
    T_FLOAT,
    T_OPERATOR,
};

enum op_token { /* two-character operators; the others are their own character */
                OT_FLOORDIV = 256,
                OT_POW,
                OT_EQ,
                OT_NE,
                OT_GE,
                OT_LE,
};

struct token {
    uint8_t type;
    uint16_t op;
    uint32_t line;
    struct kvg_str text; /* data, name, decoded string, digits of an integer over int64 */
    int64_t i;
    double f;
};

enum { MAX_PARSE_DEPTH = 200 };

/* Splits source into tokens, the last one T_EOF, all in the arena. */
int jinja_lex(struct kvg_arena *arena, const char *source, size_t len, struct token **out, struct kvg_error *err);

struct parser {
    struct kvg_arena *arena;
    struct kvg_error *err;
    struct token *token; /* the one under the cursor */
    uint32_t depth;
    uint32_t loops; /* loops around the cursor within its function */
    bool failed;
};

int jinja_parse(struct kvg_template *tmpl, struct token *tokens, struct kvg_error *err);
int jinja_resolve_scopes(struct kvg_template *tmpl, struct kvg_error *err);

/* Expressions (jinja_expr.c); NULL when failed. */
struct expr *parse_expression(struct parser *p);
struct expr *parse_tuple(struct parser *p, bool with_condexpr);
struct expr *parse_target(struct parser *p, bool with_namespace, const char *end_word);
struct expr *parse_filter_chain(struct parser *p, struct expr *node, bool start_inline);
void *parse_alloc(struct parser *p, size_t n);
void *syntax_error(struct parser *p, uint32_t line, const char *format, ...) __attribute__((format(printf, 3, 4)));
bool at_op(const struct parser *p, int op);
bool at_name(const struct parser *p, const char *word);
bool skip_op(struct parser *p, int op);
bool skip_name(struct parser *p, const char *word);
bool expect_op(struct parser *p, int op);
const struct str *parse_name(struct parser *p);
/* A string of the template. All that a render would note about it is known now: threads share it. */
const struct str *new_str(struct parser *p, struct kvg_str text);
struct expr *new_expr(struct parser *p, enum expr_kind kind, uint32_t line);

/* A growing array of pointers in the arena. */
struct list {
    void **v;
    uint32_t n, cap;
};
bool list_add(struct parser *p, struct list *list, void *item);
