/* Renders chat templates for the golden tests. Reads cases from stdin, one JSON object a line, and answers each with a line.
 *
 *   {"template": "...", "body": {...}, "bos_token": "...", "eos_token": "...", "now": 0}   a request, as kvg_chat_render sees it
 *   {"template": "...", "vars": {...}, "now": 0}                                            plain variables, all of them input
 *   -> {"text": "...", "runs": [[length, origin], ...]}   or   {"error": "...", "code": -3, "param": "..."}
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "libprompt/chat_request.h"

static struct kvg_str string_member(const struct kvg_json *object, const char *name)
{
    const struct kvg_json *value = kvg_json_get(object, name);
    return value && value->type == KVG_JSON_STRING ? value->str : (struct kvg_str){"", 0};
}

static int render_vars(const struct kvg_template *tmpl, const struct kvg_json *vars, int64_t now, struct kvg_arena *arena,
                       struct kvg_text *out, struct kvg_error *err)
{
    struct kvg_binding *bindings = calloc(vars->n + 1, sizeof *bindings);
    for (uint32_t i = 0; i < vars->n; i++)
        bindings[i] = (struct kvg_binding){kvg_arena_copy(arena, vars->items[i].key.bytes, vars->items[i].key.len),
                                           &vars->items[i], KVG_INPUT};
    const struct kvg_render_limits limits = {.now = now};
    int rc = kvg_template_render(tmpl, bindings, vars->n, &limits, arena, out, err);
    free(bindings);
    return rc;
}

/* Templates of neighbouring cases are mostly the same: the last one is kept. */
static int open_template(struct kvg_template **tmpl, char **source, struct kvg_str wanted, struct kvg_error *err)
{
    if (*tmpl && strlen(*source) == wanted.len && memcmp(*source, wanted.bytes, wanted.len) == 0)
        return 0;
    kvg_template_close(*tmpl);
    *tmpl = NULL;
    free(*source);
    *source = strndup(wanted.bytes, wanted.len);
    return kvg_template_open(tmpl, wanted.bytes, wanted.len, err);
}

static int render_case(const struct kvg_json *root, struct kvg_template **tmpl, char **source, struct kvg_arena *arena,
                       struct kvg_text *out, struct kvg_error *err)
{
    int64_t now = 0;
    int rc = open_template(tmpl, source, string_member(root, "template"), err);
    if (rc < 0)
        return rc;
    kvg_json_int(kvg_json_get(root, "now"), &now);
    const struct kvg_json *vars = kvg_json_get(root, "vars"), *body = kvg_json_get(root, "body");
    if (vars)
        return render_vars(*tmpl, vars, now, arena, out, err);
    const struct kvg_chat_context context = {*tmpl, string_member(root, "bos_token"), string_member(root, "eos_token"), now};
    return body ? kvg_chat_render(&context, body, arena, out, err) : kvg_fail(err, KVG_INVALID, "a case needs vars or a body");
}

static void answer(int rc, const struct kvg_text *text, const struct kvg_error *err)
{
    struct kvg_buf reply = {0};
    if (rc < 0) {
        kvg_buf_puts(&reply, "{\"error\": ");
        kvg_buf_json_string(&reply, err->message, strlen(err->message));
        kvg_buf_printf(&reply, ", \"code\": %d, \"param\": ", rc);
        kvg_buf_json_string(&reply, err->param, strlen(err->param));
        kvg_buf_puts(&reply, "}\n");
    } else {
        kvg_buf_puts(&reply, "{\"text\": ");
        kvg_buf_json_string(&reply, text->bytes, text->len);
        kvg_buf_puts(&reply, ", \"runs\": [");
        for (size_t i = 0; i < text->n_runs; i++)
            kvg_buf_printf(&reply, "%s[%zu, %d]", i ? ", " : "", text->runs[i].len, text->runs[i].origin);
        kvg_buf_puts(&reply, "]}\n");
    }
    fwrite(reply.bytes, 1, reply.len, stdout);
    fflush(stdout);
    kvg_buf_free(&reply);
}

int main(void)
{
    char *line = NULL, *source = NULL;
    size_t cap = 0;
    struct kvg_template *tmpl = NULL;
    for (ssize_t n; (n = getline(&line, &cap, stdin)) > 0;) {
        struct kvg_arena arena;
        struct kvg_error err = {0};
        struct kvg_json *root;
        struct kvg_text text;
        kvg_arena_init(&arena, 0);
        int rc = kvg_json_parse(&arena, line, (size_t)n, NULL, &root, &err);
        if (rc == 0)
            rc = render_case(root, &tmpl, &source, &arena, &text, &err);
        answer(rc, &text, &err);
        kvg_arena_free(&arena);
    }
    kvg_template_close(tmpl);
    free(source);
    free(line);
    return 0;
}
