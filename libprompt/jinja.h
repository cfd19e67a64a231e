/* Chat templates: the Jinja that `transformers` gives them (trim_blocks, lstrip_blocks, loop controls, its own tojson),
 * over JSON values, carrying the origin of every byte through each filter and operation.
 *
 * A compiled template is immutable and may be rendered by any number of threads at once.
 */
#pragma once
#include <stdint.h>
#include "libprompt/arena.h"
#include "libprompt/error.h"
#include "libprompt/json.h"
#include "libprompt/text.h"

struct kvg_template;

/* Compiles source[0..len); a syntax error names its line. The caller closes the result. */
int kvg_template_open(struct kvg_template **out, const char *source, size_t len, struct kvg_error *err);
void kvg_template_close(struct kvg_template *tmpl);

struct kvg_binding {
    const char *name;
    const struct kvg_json *value; /* NULL: not defined */
    uint8_t origin;               /* of its strings: KVG_INPUT for what a client sent */
};

struct kvg_render_limits {
    uint64_t fuel;       /* 0 = 20,000,000; every evaluated node costs 1, and every 16 bytes touched */
    size_t output_bytes; /* 0 = 64 MiB */
    int64_t now;         /* seconds since the epoch for strftime_now (UTC) */
};

/* Renders with `bindings`; *out lives in the arena. KVG_RENDER carries the template's own raise_exception text. */
int kvg_template_render(const struct kvg_template *tmpl, const struct kvg_binding *bindings, size_t n_bindings,
                        const struct kvg_render_limits *limits, struct kvg_arena *arena, struct kvg_text *out,
                        struct kvg_error *err);
