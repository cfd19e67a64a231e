/* Values of a template under way, and the state of one render. Internal to libprompt.
 *
 * Everything lives in the render's arena. All values are immutable once built, but namespaces and the position of
 * generators, so strings and lists are shared freely: a slice of a string is a slice of its bytes.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "libprompt/arena.h"
#include "libprompt/error.h"
#include "libprompt/json.h"
#include "libprompt/text.h"

enum value_type {
    V_ERROR,     /* an operation failed; the render's error says why */
    V_MISSING,   /* a variable that is not set, an argument that is not given */
    V_UNDEFINED, /* jinja's Undefined: prints as nothing, fails when used */
    V_NONE,
    V_BOOL,
    V_INT,
    V_BIGINT, /* an integer over int64, as its source digits */
    V_FLOAT,
    V_STR,
    V_SEQ,
    V_DICT,
    V_NAMESPACE,
    V_MACRO,
    V_FUNCTION, /* a global function */
    V_METHOD,   /* a method bound to its object */
    V_LOOP,     /* the `loop` variable */
};

struct str {
    const char *bytes;
    size_t len;
    const struct kvg_run *runs; /* NULL: every byte has `origin` */
    uint32_t n_runs;
    uint8_t origin;
    uint8_t markup; /* jinja's Markup: `+` escapes what is added to it */
    uint8_t ascii;  /* 0: not yet known (never so where renders share the string), 1: only ASCII, 2: not */
};

struct value {
    uint8_t type;
    uint8_t origin; /* of scalars: who wrote the number, bool or None */
    uint8_t why;    /* of V_UNDEFINED: enum undefined_why */
    uint8_t of;     /* of V_UNDEFINED: the type of the object that lacks the name */
    union {
        bool b;
        int64_t i;
        double f;
        const struct str *s; /* V_STR, V_BIGINT; V_UNDEFINED: the name, or NULL */
        struct seq *seq;
        struct dict *dict; /* V_DICT, V_NAMESPACE */
        const struct macro_value *macro;
        const struct method_value *method;
        const struct function *function;
        struct loop_state *loop;
    };
};

enum undefined_why { UNDEFINED_NAME, UNDEFINED_ATTRIBUTE, UNDEFINED_UNSAFE, UNDEFINED_HINT };

enum seq_kind { SEQ_LIST, SEQ_TUPLE, SEQ_GENERATOR, SEQ_RANGE, SEQ_KEYS, SEQ_VALUES, SEQ_ITEMS };

struct seq {
    struct value *items;
    size_t n;
    size_t taken; /* of a generator: items already consumed */
    uint8_t kind;
    uint8_t origin;
};

struct pair {
    struct value key, value;
};

struct dict {
    struct pair *pairs; /* in insertion order */
    size_t n, cap;
    uint32_t *index; /* open-addressed pair number + 1, built for large dictionaries */
    size_t index_size;
    uint8_t origin;
};

struct record; /* the variables of one activation of the template or a macro */

struct macro_value {
    const struct macro *def;
    struct record *outer;
};

struct kwarg {
    const struct str *name;
    struct value value;
};

struct args {
    struct value *pos;
    struct kwarg *kw;
    uint32_t n_pos, n_kw;
};

struct render;
/* `p` holds one value a parameter name of `params`, V_MISSING where none was given; with params "*" it is NULL. */
typedef struct value builtin_fn(struct render *r, struct value self, const struct value *p, const struct args *args);

struct function {
    const char *name;
    const char *params; /* comma-separated names; "*": the function reads `args` itself */
    builtin_fn *call;
};

struct method_value {
    struct value self;
    const struct function *function;
};

/* Bytes under construction: slices, joined once. */
struct piece {
    const char *bytes;
    size_t len;
    uint8_t origin;
};

enum { PIECES_INLINE = 8 };

struct pieces {
    struct piece *v;
    size_t n, cap;
    size_t len; /* bytes in all */
    struct piece local[PIECES_INLINE];
};

struct render {
    const struct kvg_template *tmpl;
    struct kvg_arena *arena;
    struct kvg_error *err;
    int64_t fuel;
    uint32_t depth; /* nested evaluations */
    size_t arena_start, output_limit;
    int64_t now;
    struct pieces *out;
    struct record *record;
    const struct value *globals; /* one for each of the template's free names */
    uint32_t line;               /* of the statement under way */
};

/* ---- failing, memory, fuel ---- */
struct value fail_value(struct render *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
struct value fail_limit(struct render *r, const char *what);
void *render_alloc(struct render *r, size_t n); /* NULL: failed, and the error is set */
bool burn_slow(struct render *r);
/* Pays for one step and n touched bytes; false when the fuel is spent. */
static inline bool burn(struct render *r, size_t n)
{
    r->fuel -= 1 + (int64_t)(n / 16);
    return __builtin_expect(r->fuel >= 0, 1) || burn_slow(r);
}

/* ---- making values ---- */
#define ERROR_VALUE   ((struct value){.type = V_ERROR})
#define MISSING_VALUE ((struct value){.type = V_MISSING})
#define NONE_VALUE    ((struct value){.type = V_NONE})
static inline struct value bool_value(bool b)
{
    return (struct value){.type = V_BOOL, .b = b};
}
static inline struct value int_value(int64_t i)
{
    return (struct value){.type = V_INT, .i = i};
}
static inline struct value float_value(double f)
{
    return (struct value){.type = V_FLOAT, .f = f};
}
static inline struct value str_value(const struct str *s)
{
    return s ? (struct value){.type = V_STR, .s = s} : ERROR_VALUE;
}
static inline struct value seq_value(struct seq *seq)
{
    return seq ? (struct value){.type = V_SEQ, .seq = seq} : ERROR_VALUE;
}
static inline struct value dict_value(struct dict *dict)
{
    return dict ? (struct value){.type = V_DICT, .dict = dict} : ERROR_VALUE;
}
static inline struct value with_origin(struct value v, uint8_t origin)
{
    v.origin = origin;
    return v;
}
struct value undefined_name(const struct str *name);
struct value undefined_attribute(struct value object, struct value name);
struct value fail_undefined(struct render *r, struct value undefined);
struct value value_from_json(struct render *r, const struct kvg_json *json, uint8_t origin);
struct seq *seq_new(struct render *r, enum seq_kind kind, size_t n);
struct value pair_tuple(struct render *r, struct value a, struct value b);
struct dict *dict_new(struct render *r, size_t cap);
bool dict_set(struct render *r, struct dict *dict, struct value key, struct value value);
struct value *dict_find(struct render *r, const struct dict *dict, struct value key);
struct value *dict_find_str(struct render *r, const struct dict *dict, const char *bytes, size_t len);

/* ---- asking values ---- */
const char *type_name(struct value v); /* as Python names it */
bool truth(struct value v);
bool is_number(struct value v);
double as_double(struct value v);
bool as_int(struct value v, int64_t *out);                         /* V_INT and V_BOOL */
int value_equal(struct render *r, struct value a, struct value b); /* 1, 0, or -1 when failed */
int value_compare(struct render *r, struct value a, struct value b, const char *op, int *order);
int value_contains(struct render *r, struct value container, struct value item);
struct value value_length(struct render *r, struct value v);
/* All items of an iterable as a sequence that may be shared with it; NULL when it cannot be iterated. */
struct seq *iterate(struct render *r, struct value v);
struct value get_item(struct render *r, struct value object, struct value key);
struct value get_attr(struct render *r, struct value object, const struct str *name);
struct value get_slice(struct render *r, struct value object, struct value start, struct value stop, struct value step);
struct value binary_op(struct render *r, int op, struct value a, struct value b);
bool is_callable(struct value v);

/* ---- strings (jinja_str.c) ---- */
void pieces_init(struct pieces *p);
bool pieces_add(struct render *r, struct pieces *p, const char *bytes, size_t len, uint8_t origin);
bool pieces_add_str(struct render *r, struct pieces *p, const struct str *s);
bool pieces_add_range(struct render *r, struct pieces *p, const struct str *s, size_t from, size_t to);
const struct str *pieces_str(struct render *r, const struct pieces *p);
/* Shares `bytes`, which have to live as long as the render. */
const struct str *str_new(struct render *r, const char *bytes, size_t len, uint8_t origin);
const struct str *str_literal(struct render *r, const char *text);
const struct str *str_slice(struct render *r, const struct str *s, size_t from, size_t to);
const struct str *str_concat(struct render *r, const struct str *a, const struct str *b);
bool str_is_ascii(struct render *r, const struct str *s);
size_t str_chars(struct render *r, const struct str *s);
size_t str_byte_offset(struct render *r, const struct str *s, size_t chars); /* of character number `chars`, or len */
size_t str_find(struct render *r, const struct str *s, const struct str *sub, size_t from); /* SIZE_MAX: not there */
size_t str_rfind(struct render *r, const struct str *s, const struct str *sub, size_t to);  /* ends at or before `to` */
bool str_same(const struct str *a, const struct str *b);
const struct str *str_strip(struct render *r, const struct str *s, const struct str *chars, bool left, bool right);
const struct str *str_replace(struct render *r, const struct str *s, const struct str *from, const struct str *to, int64_t count);
const struct str *str_repeat(struct render *r, const struct str *s, int64_t n);
enum str_case { CASE_UPPER, CASE_LOWER, CASE_TITLE, CASE_CAPITALIZE, CASE_SWAP, CASE_JINJA_TITLE };
const struct str *str_case(struct render *r, const struct str *s, enum str_case how);
const struct str *str_escape(struct render *r, const struct str *s);
const struct str *str_join(struct render *r, const struct str *separator, const struct seq *items, bool strict);
struct seq *str_split(struct render *r, const struct str *s, const struct str *separator, int64_t max, bool from_right);
struct seq *str_splitlines(struct render *r, const struct str *s, bool keep_ends);
bool py_space(uint32_t c);
uint8_t str_origin(const struct str *s); /* KVG_INPUT where any byte is input */

/* ---- text of values (jinja_print.c) ---- */
const struct str *to_str(struct render *r, struct value v); /* Python's str(); NULL when failed */
bool print_value(struct render *r, struct pieces *out, struct value v);
bool repr_value(struct render *r, struct pieces *out, struct value v);
struct json_style {
    bool ensure_ascii, sort_keys;
    const struct str *indent; /* of one level; NULL: one line */
    const struct str *item_separator, *key_separator;
};
const struct str *to_json(struct render *r, struct value v, const struct json_style *style);
size_t format_double(double value, char out[40]); /* Python's repr of a float */
/* printf-style and str.format formatting (jinja_format.c) */
struct value percent_format(struct render *r, const struct str *format, struct value args);
struct value brace_format(struct render *r, const struct str *format, const struct args *args);

/* ---- calling ---- */
struct value call_value(struct render *r, struct value callee, const struct args *args);
struct value call_function(struct render *r, const struct function *function, struct value self, const struct args *args);
const struct function *find_filter(const char *name, size_t len);
const struct function *find_test(const char *name, size_t len);
const struct function *find_global(const char *name, size_t len);
/* A method of values of that type; *unsafe: one that would change its object, which the sandbox forbids. */
const struct function *find_method(struct value object, const char *name, size_t len, bool *unsafe);
struct value loop_attribute(struct render *r, struct loop_state *loop, const struct str *name);
struct value call_macro(struct render *r, const struct macro_value *macro, const struct args *args);
