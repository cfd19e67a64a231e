/* What filters, tests and methods share. Internal to libprompt. */
#pragma once
#include "libprompt/jinja_run.h"

/* An optional argument: the default where it is not given. */
bool arg_int(struct render *r, struct value v, int64_t otherwise, int64_t *out);
bool arg_str(struct render *r, struct value v, const struct str **out); /* NULL where not given or None */
bool arg_bool(struct value v, bool otherwise);

const struct function *find_in(const struct function *table, size_t n, const char *name, size_t len);
/* The filters on sequences (jinja_filters_seq.c). */
extern const struct function kvg_seq_filters[];
extern const size_t kvg_n_seq_filters;
struct value run_test(struct render *r, const struct str *name, struct value self, const struct args *args);
