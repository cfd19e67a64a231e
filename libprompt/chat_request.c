/* The messages are built as template values in one pass over the body: what a client may leave out or write in several ways
 * has one form when the template sees it.
 */
#include "libprompt/chat_request.h"
#include "libprompt/jinja_run.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

struct conversation {
    struct render r;
    struct kvg_arena *arena;
    struct kvg_error *err;
};

/* The field at fault is named by the format that comes behind the message. */
static int fail_param(struct kvg_error *err, int code, const char *message, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static int fail_param(struct kvg_error *err, int code, const char *message, const char *format, ...)
{
    char param[sizeof err->param];
    va_list args;
    va_start(args, format);
    vsnprintf(param, sizeof param, format, args);
    va_end(args);
    kvg_fail(err, code, "%s: %s", param, message);
    memcpy(err->param, param, sizeof param);
    return code;
}

static struct value key_value(const struct str *key)
{
    return (struct value){.type = V_STR, .s = key};
}

static struct value input_str(struct conversation *c, const char *bytes, size_t len)
{
    return str_value(str_new(&c->r, bytes, len, KVG_INPUT));
}

/* ---- content ---- */

static int check_part(struct conversation *c, const struct kvg_json *part, uint32_t message, uint32_t i, struct kvg_str *text)
{
    const struct kvg_json *type = kvg_json_get(part, "type"), *t = kvg_json_get(part, "text");
    if (part->type != KVG_JSON_OBJECT)
        return fail_param(c->err, KVG_INVALID, "a content part must be an object", "messages[%u].content[%u]", message, i);
    if (!type || type->type != KVG_JSON_STRING)
        return fail_param(c->err, KVG_INVALID, "a content part needs a type", "messages[%u].content[%u].type", message, i);
    if (!kvg_str_eq(type->str, "text")) {
        char what[120];
        snprintf(what, sizeof what, "content of type '%.*s' is not supported by this model, only 'text'",
                 (int)(type->str.len < 40 ? type->str.len : 40), type->str.bytes);
        return fail_param(c->err, KVG_UNSUPPORTED, what, "messages[%u].content[%u].type", message, i);
    }
    if (!t || t->type != KVG_JSON_STRING)
        return fail_param(c->err, KVG_INVALID, "a text part needs a string", "messages[%u].content[%u].text", message, i);
    *text = t->str;
    return 0;
}

/* Text parts joined by newlines. */
static int join_parts(struct conversation *c, const struct kvg_json *parts, uint32_t message, struct value *out)
{
    size_t len = 0;
    struct kvg_str text = {"", 0};
    for (uint32_t i = 0; i < parts->n; i++) {
        int rc = check_part(c, &parts->items[i], message, i, &text);
        if (rc < 0)
            return rc;
        len += text.len + 1;
    }
    if (parts->n == 1) {
        *out = input_str(c, text.bytes, text.len);
        return 0;
    }
    char *bytes = render_alloc(&c->r, len + 1), *w = bytes;
    if (!bytes)
        return c->err->code;
    for (uint32_t i = 0; i < parts->n; i++) {
        text = kvg_json_get(&parts->items[i], "text")->str;
        if (i)
            *w++ = '\n';
        memcpy(w, text.bytes, text.len);
        w += text.len;
    }
    *out = input_str(c, bytes, (size_t)(w - bytes));
    return 0;
}

static int content_value(struct conversation *c, const struct kvg_json *content, struct kvg_str role, uint32_t message,
                         struct value *out)
{
    if (content && content->type == KVG_JSON_STRING) {
        *out = input_str(c, content->str.bytes, content->str.len);
        return 0;
    }
    if (content && content->type == KVG_JSON_ARRAY)
        return join_parts(c, content, message, out);
    bool may_lack = kvg_str_eq(role, "assistant") || kvg_str_eq(role, "tool") || kvg_str_eq(role, "function");
    if (may_lack && (!content || content->type == KVG_JSON_NULL)) {
        *out = input_str(c, "", 0);
        return 0;
    }
    return fail_param(c->err, KVG_INVALID, "must be a string or an array of text parts", "messages[%u].content", message);
}

/* ---- tool calls ---- */

/* Arguments that are the text of a JSON object become that object; none at all are an empty one. */
static int arguments_value(struct conversation *c, const struct kvg_json *arguments, uint32_t message, uint32_t call,
                           struct value *out)
{
    struct kvg_json *parsed;
    struct kvg_error err;
    if (arguments->type != KVG_JSON_STRING) {
        *out = value_from_json(&c->r, arguments, KVG_INPUT);
        return 0;
    }
    if (arguments->str.len == 0) {
        *out = dict_value(dict_new(&c->r, 0));
        return 0;
    }
    int rc = kvg_json_parse(c->arena, arguments->str.bytes, arguments->str.len, NULL, &parsed, &err);
    if (rc == KVG_LIMIT || rc == KVG_NOMEM)
        return fail_param(c->err, rc, err.message, "messages[%u].tool_calls[%u].function.arguments", message, call);
    *out = value_from_json(&c->r, rc == 0 && parsed->type == KVG_JSON_OBJECT ? parsed : arguments, KVG_INPUT);
    return 0;
}

/* The member of an object that is not taken as it was sent. */
struct special {
    const char *key;
    int (*convert)(struct conversation *c, const struct kvg_json *value, uint32_t message, uint32_t call, struct value *out);
};

/* place: number of the message and of its call. */
static int object_value(struct conversation *c, const struct kvg_json *object, const struct special *special,
                        const uint32_t place[2], struct value *out)
{
    struct dict *dict = dict_new(&c->r, object->n);
    for (uint32_t i = 0; dict && i < object->n; i++) {
        const struct kvg_json *member = &object->items[i];
        struct pair *pair = &dict->pairs[dict->n++];
        pair->key = input_str(c, member->key.bytes, member->key.len);
        int rc = 0;
        if (kvg_str_eq(member->key, special->key))
            rc = special->convert(c, member, place[0], place[1], &pair->value);
        else
            pair->value = value_from_json(&c->r, member, KVG_INPUT);
        if (rc < 0)
            return rc;
        if (pair->key.type == V_ERROR || pair->value.type == V_ERROR)
            return c->err->code;
    }
    if (dict)
        dict->origin = KVG_INPUT;
    *out = dict_value(dict);
    return dict ? 0 : c->err->code;
}

static int function_value(struct conversation *c, const struct kvg_json *function, uint32_t message, uint32_t call,
                          struct value *out)
{
    static const struct special arguments = {"arguments", arguments_value};

    if (function->type == KVG_JSON_OBJECT)
        return object_value(c, function, &arguments, (uint32_t[]){message, call}, out);
    *out = value_from_json(&c->r, function, KVG_INPUT);
    return 0;
}

static int call_value_of(struct conversation *c, const struct kvg_json *call, uint32_t message, uint32_t i, struct value *out)
{
    static const struct special function = {"function", function_value};

    if (call->type != KVG_JSON_OBJECT)
        return fail_param(c->err, KVG_INVALID, "must be an object", "messages[%u].tool_calls[%u]", message, i);
    return object_value(c, call, &function, (uint32_t[]){message, i}, out);
}

static int tool_calls_value(struct conversation *c, const struct kvg_json *calls, uint32_t message, struct value *out)
{
    if (calls->type == KVG_JSON_NULL) {
        *out = with_origin(NONE_VALUE, KVG_INPUT);
        return 0;
    }
    if (calls->type != KVG_JSON_ARRAY)
        return fail_param(c->err, KVG_INVALID, "must be an array", "messages[%u].tool_calls", message);
    struct seq *seq = seq_new(&c->r, SEQ_LIST, calls->n);
    if (!seq)
        return c->err->code;
    seq->origin = KVG_INPUT;
    for (uint32_t i = 0; i < calls->n; i++) {
        int rc = call_value_of(c, &calls->items[i], message, i, &seq->items[i]);
        if (rc < 0)
            return rc;
    }
    *out = seq_value(seq);
    return 0;
}

/* ---- messages ---- */

static int role_value(struct conversation *c, const struct kvg_json *message, uint32_t i, struct kvg_str *role)
{
    static const char *const roles[] = {"system", "developer", "user", "assistant", "tool", "function"};
    const struct kvg_json *value = kvg_json_get(message, "role");
    for (size_t k = 0; value && value->type == KVG_JSON_STRING && k < sizeof roles / sizeof *roles; k++)
        if (kvg_str_eq(value->str, roles[k])) {
            *role = (struct kvg_str){roles[k], strlen(roles[k])};
            return 0;
        }
    return fail_param(c->err, KVG_INVALID, "must be one of system, developer, user, assistant, tool, function",
                      "messages[%u].role", i);
}

/* What the model thought in an earlier turn goes by three names; a template finds it under the first two. */
static const struct kvg_json *reasoning_of(const struct kvg_json *message)
{
    static const char *const names[] = {"reasoning_content", "thinking", "reasoning"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const struct kvg_json *value = kvg_json_get(message, names[i]);
        if (value && value->type != KVG_JSON_NULL)
            return value;
    }
    return NULL;
}

static int member_value(struct conversation *c, const struct kvg_json *member, struct kvg_str role, uint32_t i, struct value *out)
{
    if (kvg_str_eq(member->key, "role")) {
        *out = str_value(str_new(&c->r, role.bytes, role.len, KVG_TEMPLATE));
    } else if (kvg_str_eq(member->key, "content")) {
        return content_value(c, member, role, i, out);
    } else if (kvg_str_eq(member->key, "tool_calls")) {
        return tool_calls_value(c, member, i, out);
    } else if (kvg_str_eq(member->key, "function_call")) {
        return function_value(c, member, i, 0, out);
    } else {
        *out = value_from_json(&c->r, member, KVG_INPUT);
    }
    return out->type == V_ERROR ? c->err->code : 0;
}

static int message_value(struct conversation *c, const struct kvg_json *message, uint32_t i, struct value *out)
{
    static const struct str thinking = {.bytes = "thinking", .len = 8, .ascii = 1},
                            reasoning_content = {.bytes = "reasoning_content", .len = 17, .ascii = 1},
                            content = {.bytes = "content", .len = 7, .ascii = 1};
    struct kvg_str role;
    if (message->type != KVG_JSON_OBJECT)
        return fail_param(c->err, KVG_INVALID, "must be an object", "messages[%u]", i);
    int rc = role_value(c, message, i, &role);
    const struct kvg_json *reasoning = reasoning_of(message);
    struct dict *dict = rc < 0 ? NULL : dict_new(&c->r, message->n + 3);
    if (!dict)
        return rc < 0 ? rc : c->err->code;
    dict->origin = KVG_INPUT;
    struct value thought = reasoning ? value_from_json(&c->r, reasoning, KVG_INPUT) : NONE_VALUE;
    if (thought.type == V_ERROR || (reasoning && !dict_set(&c->r, dict, key_value(&thinking), thought)))
        return c->err->code;
    for (uint32_t k = 0; k < message->n; k++) {
        const struct kvg_json *member = &message->items[k];
        struct value value, key = input_str(c, member->key.bytes, member->key.len);
        rc = member_value(c, member, role, i, &value);
        if (rc < 0)
            return rc;
        /* keys of one JSON object differ; only the one set above can be met again */
        if (!reasoning && key.type != V_ERROR)
            dict->pairs[dict->n++] = (struct pair){key, value};
        else if (key.type == V_ERROR || !dict_set(&c->r, dict, key, value))
            return c->err->code;
    }
    if (!kvg_json_get(message, "content")) {
        struct value empty;
        rc = content_value(c, NULL, role, i, &empty);
        if (rc < 0)
            return rc;
        if (!dict_set(&c->r, dict, key_value(&content), empty))
            return c->err->code;
    }
    if (reasoning && !dict_set(&c->r, dict, key_value(&reasoning_content), thought))
        return c->err->code;
    *out = dict_value(dict);
    return 0;
}

static int messages_value(struct conversation *c, const struct kvg_json *body, struct value *out)
{
    const struct kvg_json *messages = kvg_json_get(body, "messages");
    if (!messages || messages->type != KVG_JSON_ARRAY || messages->n == 0)
        return fail_param(c->err, KVG_INVALID, "must be an array of at least one message", "messages");
    struct seq *seq = seq_new(&c->r, SEQ_LIST, messages->n);
    if (!seq)
        return c->err->code;
    seq->origin = KVG_INPUT;
    for (uint32_t i = 0; i < messages->n; i++) {
        int rc = message_value(c, &messages->items[i], i, &seq->items[i]);
        if (rc < 0)
            return rc;
    }
    *out = seq_value(seq);
    return 0;
}

/* ---- the other variables ---- */

static void bind(struct conversation *c, struct value *globals, const char *name, struct value value)
{
    int i = free_name_index(c->r.tmpl, name, strlen(name));
    if (i >= 0)
        globals[i] = value;
}

/* tools, documents: an array of objects, or None. */
static int bind_objects(struct conversation *c, struct value *globals, const struct kvg_json *body, const char *name)
{
    const struct kvg_json *list = kvg_json_get(body, name);
    if (!list || list->type == KVG_JSON_NULL) {
        bind(c, globals, name, NONE_VALUE);
        return 0;
    }
    if (list->type != KVG_JSON_ARRAY)
        return fail_param(c->err, KVG_INVALID, "must be an array", "%s", name);
    for (uint32_t i = 0; i < list->n; i++)
        if (list->items[i].type != KVG_JSON_OBJECT)
            return fail_param(c->err, KVG_INVALID, "must be an object", "%s[%u]", name, i);
    if (free_name_index(c->r.tmpl, name, strlen(name)) < 0)
        return 0;
    struct value value = value_from_json(&c->r, list, KVG_INPUT);
    bind(c, globals, name, value);
    return value.type == V_ERROR ? c->err->code : 0;
}

static int bind_kwargs(struct conversation *c, struct value *globals, const struct kvg_json *body)
{
    static const char *const reserved[] = {"messages", "tools", "documents", "add_generation_prompt"};
    const struct kvg_json *kwargs = kvg_json_get(body, "chat_template_kwargs");
    if (!kwargs || kwargs->type == KVG_JSON_NULL)
        return 0;
    if (kwargs->type != KVG_JSON_OBJECT)
        return fail_param(c->err, KVG_INVALID, "must be an object", "chat_template_kwargs");
    for (uint32_t i = 0; i < kwargs->n; i++) {
        const struct kvg_json *member = &kwargs->items[i];
        for (size_t k = 0; k < sizeof reserved / sizeof *reserved; k++)
            if (kvg_str_eq(member->key, reserved[k]))
                return fail_param(c->err, KVG_INVALID, "is set by a member of the request itself", "chat_template_kwargs.%s",
                                  reserved[k]);
        int index = free_name_index(c->r.tmpl, member->key.bytes, member->key.len);
        if (index >= 0 && (globals[index] = value_from_json(&c->r, member, KVG_INPUT)).type == V_ERROR)
            return c->err->code;
    }
    return 0;
}

static void bind_token(struct conversation *c, struct value *globals, const char *name, struct kvg_str token)
{
    if (token.len)
        bind(c, globals, name, str_value(str_new(&c->r, token.bytes, token.len, KVG_TEMPLATE)));
}

static int bind_all(struct conversation *c, const struct kvg_chat_context *context, const struct kvg_json *body,
                    struct value *globals)
{
    struct value messages;
    const struct kvg_json *prompt = kvg_json_get(body, "add_generation_prompt");
    if (!globals)
        return c->err->code;
    if (body->type != KVG_JSON_OBJECT)
        return kvg_fail(c->err, KVG_INVALID, "the request body must be a JSON object");
    if (prompt && prompt->type > KVG_JSON_TRUE)
        return fail_param(c->err, KVG_INVALID, "must be a boolean", "add_generation_prompt");
    int rc = messages_value(c, body, &messages);
    if (rc < 0)
        return rc;
    bind(c, globals, "messages", messages);
    bind(c, globals, "add_generation_prompt", bool_value(!prompt || prompt->type != KVG_JSON_FALSE));
    bind_token(c, globals, "bos_token", context->bos_token);
    bind_token(c, globals, "eos_token", context->eos_token);
    if ((rc = bind_objects(c, globals, body, "tools")) < 0 || (rc = bind_objects(c, globals, body, "documents")) < 0)
        return rc;
    return bind_kwargs(c, globals, body);
}

int kvg_chat_render(const struct kvg_chat_context *context, const struct kvg_json *body, struct kvg_arena *arena,
                    struct kvg_text *out, struct kvg_error *err)
{
    struct kvg_error local;
    struct conversation c = {.arena = arena, .err = err ? err : &local};
    const struct kvg_render_limits limits = {.now = context->now};
    render_init(&c.r, context->tmpl, &limits, arena, c.err);
    struct value *globals = render_globals(&c.r);
    int rc = bind_all(&c, context, body, globals);
    return rc < 0 ? rc : render_with(&c.r, globals, out);
}
