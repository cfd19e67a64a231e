#include "gpu-worker/server/api_params.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHAT = 1, TEXT = 2, BOTH = 3 };
enum { GREEDY_BELOW_MILLIONTHS = 10 }; /* temperatures under 1e-5 are greedy: 1 / t would leave f32 */

/* One parse: what the handlers share. */
struct parse {
    const struct api_context *context;
    struct kvg_arena *arena;
    struct api_params *out;
    struct kvg_error *err;
    const struct field *field; /* the member being read */
    bool has_max_tokens, has_top_logprobs, has_stream_options;
    int64_t max_tokens, max_completion_tokens, best_of, logprobs_n; /* -1: not given */
};

enum kind {
    NUMBER,     /* float at `at`, low..high */
    INTEGER,    /* uint32_t at `at`, low..high */
    BOOLEAN,    /* bool at `at` */
    ACCEPT,     /* any value: a hint, or libprompt reads it */
    ONLY_FALSE, /* a switch that can only be off */
    ONLY_TRUE,  /* a switch that can only be on */
    REFUSE,     /* not supported unless null or empty */
    CUSTOM
};

struct field {
    const char *name;
    uint8_t endpoints;
    enum kind kind;
    size_t at; /* offset in struct api_params */
    double low, high;
    int (*parse)(struct parse *p, const struct kvg_json *value);
};

/* ---- errors ------------------------------------------------------------------------------------------------------------ */

static const char *const type_names[] = {"null", "false", "true", "a number", "a string", "an array", "an object"};

/* The value as an error message shows it: a number's own text (shortened), else its type. */
static const char *shown(const struct kvg_json *value, char out[48])
{
    if (value->type != KVG_JSON_NUMBER)
        return type_names[value->type];
    snprintf(out, 48, "%.*s%s", (int)(value->str.len > 32 ? 32 : value->str.len), value->str.bytes,
             value->str.len > 32 ? "..." : "");
    return out;
}

static int blame(struct parse *p, int code)
{
    if (p->err)
        snprintf(p->err->param, sizeof p->err->param, "%s", p->field->name);
    return code;
}

static int expected(struct parse *p, const char *what, const struct kvg_json *got)
{
    char text[48];
    return blame(p, kvg_fail(p->err, KVG_INVALID, "%s must be %s, got %s", p->field->name, what, shown(got, text)));
}

static int unsupported(struct parse *p, const char *what)
{
    return blame(p, kvg_fail(p->err, KVG_UNSUPPORTED, "%s is not supported: %s", p->field->name, what));
}

static int no_memory(struct parse *p)
{
    return kvg_fail(p->err, KVG_NOMEM, "out of memory while reading %s", p->field->name);
}

/* ---- scalar members ---------------------------------------------------------------------------------------------------- */

static int read_number(struct parse *p, const struct kvg_json *value)
{
    const struct field *f = p->field;
    double number;
    char what[96];
    snprintf(what, sizeof what, "a number from %g to %g", f->low, f->high);
    if (!kvg_json_double(value, &number) || number > f->high || number < f->low)
        return expected(p, what, value);
    float narrow = (float)number;
    memcpy((char *)p->out + f->at, &narrow, sizeof narrow);
    return KVG_OK;
}

/* 1.0 and 2e3, as clients write integers whose language has none. Exact: below 2^53. */
static bool whole_double(const struct kvg_json *value, int64_t *out)
{
    double number;

    if (!kvg_json_double(value, &number) || !(number > -0x1p53 && number < 0x1p53) || number != floor(number))
        return false;
    *out = (int64_t)number;
    return true;
}

static int read_int(struct parse *p, const struct kvg_json *value, int64_t low, int64_t high, int64_t *out)
{
    char what[96];
    if (high == INT64_MAX && low > INT64_MIN)
        snprintf(what, sizeof what, "an integer of at least %lld and below 2^63", (long long)low);
    else
        snprintf(what, sizeof what, "an integer from %lld to %lld", (long long)low, (long long)high);
    if ((!kvg_json_int(value, out) && !whole_double(value, out)) || *out < low || *out > high)
        return expected(p, what, value);
    return KVG_OK;
}

static int read_integer(struct parse *p, const struct kvg_json *value)
{
    int64_t number;
    int code = read_int(p, value, (int64_t)p->field->low, (int64_t)p->field->high, &number);
    if (code == KVG_OK)
        *(uint32_t *)((char *)p->out + p->field->at) = (uint32_t)number;
    return code;
}

static int read_bool(struct parse *p, const struct kvg_json *value, bool *out)
{
    if (value->type != KVG_JSON_TRUE && value->type != KVG_JSON_FALSE)
        return expected(p, "true or false", value);
    *out = value->type == KVG_JSON_TRUE;
    return KVG_OK;
}

static int read_boolean(struct parse *p, const struct kvg_json *value)
{
    return read_bool(p, value, (bool *)((char *)p->out + p->field->at));
}

static int only_bool(struct parse *p, const struct kvg_json *value)
{
    bool on = false;
    int code = read_bool(p, value, &on);
    if (code == KVG_OK && on != (p->field->kind == ONLY_TRUE))
        return unsupported(p, on ? "it can only be false" : "it can only be true");
    return code;
}

static int refuse(struct parse *p, const struct kvg_json *value)
{
    bool empty = (value->type == KVG_JSON_ARRAY || value->type == KVG_JSON_OBJECT) && value->n == 0;
    return empty || value->type == KVG_JSON_FALSE ? KVG_OK : unsupported(p, "leave it out");
}

static int parse_model(struct parse *p, const struct kvg_json *value)
{
    if (value->type != KVG_JSON_STRING)
        return expected(p, "a string", value);
    p->out->model = value->str;
    return KVG_OK;
}

static int parse_salt(struct parse *p, const struct kvg_json *value)
{
    if (value->type != KVG_JSON_STRING || value->str.len == 0)
        return expected(p, "a non-empty string", value);
    if (value->str.len > API_MAX_SALT)
        return blame(
            p, kvg_fail(p->err, KVG_INVALID, "cache_salt has %zu bytes, at most %d are allowed", value->str.len, API_MAX_SALT));
    p->out->cache_salt = value->str;
    return KVG_OK;
}

static int parse_max_tokens(struct parse *p, const struct kvg_json *value)
{
    return read_int(p, value, 0, INT64_MAX, &p->max_tokens);
}

static int parse_max_completion_tokens(struct parse *p, const struct kvg_json *value)
{
    return read_int(p, value, 0, INT64_MAX, &p->max_completion_tokens);
}

static int parse_best_of(struct parse *p, const struct kvg_json *value)
{
    return read_int(p, value, 1, API_MAX_CHOICES, &p->best_of);
}

static int parse_seed(struct parse *p, const struct kvg_json *value)
{
    int64_t seed;
    int code = read_int(p, value, INT64_MIN, INT64_MAX, &seed);
    p->out->engine.seed = (uint64_t)seed;
    p->out->has_seed = code == KVG_OK;
    return code;
}

static int parse_top_k(struct parse *p, const struct kvg_json *value)
{
    int64_t k;
    int code = read_int(p, value, -1, INT64_MAX, &k);
    if (code == KVG_OK)
        p->out->engine.top_k = k <= 0 || k >= p->context->n_vocab ? 0 : (uint32_t)k;
    return code;
}

static int parse_priority(struct parse *p, const struct kvg_json *value)
{
    int64_t priority;
    int code = read_int(p, value, INT32_MIN, INT32_MAX, &priority);
    if (code != KVG_OK || priority == 0 || p->context->no_priority)
        return code;
    if (!p->context->gateway)
        return unsupported(p, "only the gateway may set it");
    if (!p->context->priority_scheduling)
        return unsupported(p, "this worker runs with --scheduling-policy fcfs");
    p->out->engine.priority = (int32_t)priority;
    return KVG_OK;
}

/* Chat: a switch, with top_logprobs beside it. Completions: the number itself. */
static int parse_logprobs(struct parse *p, const struct kvg_json *value)
{
    if (p->context->endpoint == KVG_CHAT_COMPLETIONS)
        return read_bool(p, value, &p->out->engine.want_logprobs);
    int code = read_int(p, value, 0, SAMPLE_TOP_MAX, &p->logprobs_n);
    if (code == KVG_OK) {
        p->out->engine.want_logprobs = true;
        p->out->engine.top_logprobs = (uint32_t)p->logprobs_n;
    }
    return code;
}

static int parse_top_logprobs(struct parse *p, const struct kvg_json *value)
{
    int64_t n;
    int code = read_int(p, value, 0, SAMPLE_TOP_MAX, &n);
    if (code == KVG_OK)
        p->out->engine.top_logprobs = (uint32_t)n;
    p->has_top_logprobs = n > 0;
    return code;
}

/* ---- lists and objects ------------------------------------------------------------------------------------------------- */

static int add_stop(struct parse *p, const struct kvg_json *value, const char **text, size_t *len)
{
    if (value->type != KVG_JSON_STRING)
        return expected(p, "a string or an array of strings", value);
    if (value->str.len == 0 || value->str.len > API_MAX_STOP_BYTES)
        return blame(p, kvg_fail(p->err, KVG_INVALID, "stop holds a string of %zu bytes, 1 to %d are allowed", value->str.len,
                                 API_MAX_STOP_BYTES));
    *text = value->str.bytes;
    *len = value->str.len;
    return KVG_OK;
}

static int parse_stop(struct parse *p, const struct kvg_json *value)
{
    size_t n = value->type == KVG_JSON_ARRAY ? value->n : 1;
    if (n > API_MAX_STOPS)
        return blame(p, kvg_fail(p->err, KVG_INVALID, "stop has %zu strings, at most %d are allowed", n, API_MAX_STOPS));
    const char **texts = kvg_arena_alloc(p->arena, n * sizeof *texts);
    size_t *lens = kvg_arena_alloc(p->arena, n * sizeof *lens);
    if (!texts || !lens)
        return no_memory(p);
    for (size_t i = 0; i < n; i++) {
        int code = add_stop(p, value->type == KVG_JSON_ARRAY ? &value->items[i] : value, &texts[i], &lens[i]);
        if (code != KVG_OK)
            return code;
    }
    p->out->engine.stop = texts;
    p->out->engine.stop_len = lens;
    p->out->engine.n_stop = n;
    return KVG_OK;
}

int api_token_ids(const struct kvg_json *value, const char *name, uint32_t n_vocab, struct kvg_arena *arena, struct kvg_ids *out,
                  struct kvg_error *err)
{
    struct field field = {.name = name};
    struct parse p = {.arena = arena, .err = err, .field = &field};

    if (!value || value->type != KVG_JSON_ARRAY || value->n == 0)
        return blame(&p, kvg_fail(err, KVG_INVALID, "%s must be a non-empty array of token ids", name));
    uint32_t *ids = kvg_arena_alloc(arena, value->n * sizeof *ids);
    if (!ids)
        return no_memory(&p);
    for (uint32_t i = 0; i < value->n; i++) {
        int64_t id;
        char text[48];
        if (!kvg_json_int(&value->items[i], &id) || id < 0 || id >= n_vocab)
            return blame(&p, kvg_fail(err, KVG_INVALID, "%s[%u] must be a token id from 0 to %u, got %s", name, i, n_vocab - 1,
                                      shown(&value->items[i], text)));
        ids[i] = (uint32_t)id;
    }
    *out = (struct kvg_ids){ids, value->n};
    return KVG_OK;
}

static int parse_stop_ids(struct parse *p, const struct kvg_json *value)
{
    struct kvg_ids ids = {0};
    if (value->type == KVG_JSON_ARRAY && value->n == 0)
        return KVG_OK;
    if (value->type == KVG_JSON_ARRAY && value->n > API_MAX_STOP_IDS)
        return blame(
            p, kvg_fail(p->err, KVG_INVALID, "stop_token_ids has %u ids, at most %d are allowed", value->n, API_MAX_STOP_IDS));
    int code = api_token_ids(value, p->field->name, p->context->n_vocab, p->arena, &ids, p->err);
    if (code == KVG_OK) {
        p->out->engine.stop_ids = ids.ids;
        p->out->engine.n_stop_ids = ids.n;
    }
    return code;
}

static int parse_prompt_ids(struct parse *p, const struct kvg_json *value)
{
    if (!p->context->gateway)
        return blame(p, kvg_fail(p->err, KVG_INVALID, "prompt_token_ids may only come from the gateway"));
    return api_token_ids(value, p->field->name, p->context->n_vocab, p->arena, &p->out->prompt_ids, p->err);
}

static int by_id(const void *a, const void *b)
{
    uint32_t x = ((const struct sample_bias *)a)->id, y = ((const struct sample_bias *)b)->id;
    return x < y ? -1 : x > y;
}

/* A key of logit_bias: a token id in canonical decimal form, so that no id comes twice. */
static bool parse_id(struct kvg_str text, uint32_t n_vocab, uint32_t *out)
{
    uint64_t id = 0;
    if (text.len == 0 || text.len > 10 || (text.len > 1 && text.bytes[0] == '0'))
        return false;
    for (size_t i = 0; i < text.len; i++) {
        if (text.bytes[i] < '0' || text.bytes[i] > '9')
            return false;
        id = id * 10 + (uint64_t)(text.bytes[i] - '0');
    }
    *out = (uint32_t)id;
    return id < n_vocab;
}

static int no_bias_id(struct parse *p, struct kvg_str key)
{
    enum { SHOWN = 24 };

    return blame(p, kvg_fail(p->err, KVG_INVALID, "logit_bias has the key \"%.*s%s\", which is no token id from 0 to %u",
                             (int)(key.len < SHOWN ? key.len : SHOWN), key.bytes, key.len > SHOWN ? "…" : "",
                             p->context->n_vocab - 1));
}

static int parse_logit_bias(struct parse *p, const struct kvg_json *value)
{
    if (value->type != KVG_JSON_OBJECT)
        return expected(p, "an object of token id to bias", value);
    if (value->n > API_MAX_BIASES)
        return blame(
            p, kvg_fail(p->err, KVG_INVALID, "logit_bias has %u entries, at most %d are allowed", value->n, API_MAX_BIASES));
    struct sample_bias *biases = kvg_arena_alloc(p->arena, value->n * sizeof *biases);
    if (!biases)
        return no_memory(p);
    for (uint32_t i = 0; i < value->n; i++) {
        double bias;
        if (!parse_id(value->items[i].key, p->context->n_vocab, &biases[i].id))
            return no_bias_id(p, value->items[i].key);
        if (!kvg_json_double(&value->items[i], &bias) || bias < -100 || bias > 100)
            return expected(p, "an object whose values are numbers from -100 to 100", &value->items[i]);
        biases[i].bias = (float)bias;
    }
    qsort(biases, value->n, sizeof *biases, by_id);
    p->out->engine.biases = biases;
    p->out->engine.n_biases = value->n;
    return KVG_OK;
}

static int parse_stream_option(struct parse *p, const struct kvg_json *option)
{
    bool on = false;
    if (option->type == KVG_JSON_NULL)
        return KVG_OK;
    if (!kvg_str_eq(option->key, "include_usage") && !kvg_str_eq(option->key, "continuous_usage_stats") &&
        !kvg_str_eq(option->key, "include_speculation") && !kvg_str_eq(option->key, "include_obfuscation")) {
        p->out->n_unknown++;
        return KVG_OK;
    }
    if (read_bool(p, option, &on) != KVG_OK)
        return expected(p, "an object whose values are true or false", option);
    if (kvg_str_eq(option->key, "include_usage"))
        p->out->include_usage = on;
    if (kvg_str_eq(option->key, "continuous_usage_stats"))
        p->out->continuous_usage = on;
    if (kvg_str_eq(option->key, "include_speculation"))
        p->out->include_speculation = on;
    return KVG_OK;
}

static int parse_stream_options(struct parse *p, const struct kvg_json *value)
{
    if (value->type != KVG_JSON_OBJECT)
        return expected(p, "an object", value);
    p->has_stream_options = true;
    for (uint32_t i = 0; i < value->n; i++) {
        int code = parse_stream_option(p, &value->items[i]);
        if (code != KVG_OK)
            return code;
    }
    return KVG_OK;
}

static int parse_response_format(struct parse *p, const struct kvg_json *value)
{
    const struct kvg_json *type = kvg_json_get(value, "type");
    if (value->type != KVG_JSON_OBJECT || !type || type->type != KVG_JSON_STRING)
        return expected(p, "an object with a string member \"type\"", value);
    return kvg_str_eq(type->str, "text") ? KVG_OK : unsupported(p, "only {\"type\": \"text\"} is");
}

static int parse_tool_choice(struct parse *p, const struct kvg_json *value)
{
    if (value->type == KVG_JSON_STRING && (kvg_str_eq(value->str, "none") || kvg_str_eq(value->str, "auto")))
        return KVG_OK;
    if (value->type != KVG_JSON_STRING && value->type != KVG_JSON_OBJECT)
        return expected(p, "\"none\" or \"auto\"", value);
    return unsupported(p, "only \"none\" and \"auto\" are");
}

static int parse_tools(struct parse *p, const struct kvg_json *value)
{
    if (value->type != KVG_JSON_ARRAY)
        return expected(p, "an array", value);
    for (uint32_t i = 0; i < value->n; i++)
        if (value->items[i].type != KVG_JSON_OBJECT)
            return expected(p, "an array of objects", &value->items[i]);
    return KVG_OK;
}

static int parse_modalities(struct parse *p, const struct kvg_json *value)
{
    bool text = value->type == KVG_JSON_ARRAY && value->n == 1 && value->items[0].type == KVG_JSON_STRING &&
                kvg_str_eq(value->items[0].str, "text");
    return text ? KVG_OK : unsupported(p, "only [\"text\"] is");
}

static int parse_template_kwargs(struct parse *p, const struct kvg_json *value)
{
    return value->type == KVG_JSON_OBJECT ? KVG_OK : expected(p, "an object", value);
}

/* ---- the table --------------------------------------------------------------------------------------------------------- */

#define AT(member)     .at = offsetof(struct api_params, member)
#define ENGINE(member) .at = offsetof(struct api_params, engine.member)

static const struct field fields[] = {
    {"model", BOTH, CUSTOM, .parse = parse_model},
    {"messages", CHAT, ACCEPT},
    {"prompt", TEXT, ACCEPT},
    {"prompt_token_ids", BOTH, CUSTOM, .parse = parse_prompt_ids},
    {"cache_salt", BOTH, CUSTOM, .parse = parse_salt},
    {"priority", BOTH, CUSTOM, .parse = parse_priority},

    {"stream", BOTH, BOOLEAN, AT(stream)},
    {"stream_options", BOTH, CUSTOM, .parse = parse_stream_options},
    {"echo", TEXT, BOOLEAN, AT(echo)},
    {"echo", CHAT, ONLY_FALSE},

    {"max_tokens", BOTH, CUSTOM, .parse = parse_max_tokens},
    {"max_completion_tokens", CHAT, CUSTOM, .parse = parse_max_completion_tokens},
    {"min_tokens", BOTH, INTEGER, ENGINE(min_tokens), 0, UINT32_MAX},
    {"n", BOTH, INTEGER, ENGINE(n), 1, API_MAX_CHOICES},
    {"best_of", BOTH, CUSTOM, .parse = parse_best_of},
    {"temperature", BOTH, NUMBER, ENGINE(temperature), 0, 2},
    {"top_p", BOTH, NUMBER, ENGINE(top_p), 0, 1},
    {"top_k", BOTH, CUSTOM, .parse = parse_top_k},
    {"min_p", BOTH, NUMBER, ENGINE(min_p), 0, 1},
    {"presence_penalty", BOTH, NUMBER, ENGINE(presence_penalty), -2, 2},
    {"frequency_penalty", BOTH, NUMBER, ENGINE(frequency_penalty), -2, 2},
    {"repetition_penalty", BOTH, NUMBER, ENGINE(repetition_penalty), 0.01, 100},
    {"seed", BOTH, CUSTOM, .parse = parse_seed},
    {"stop", BOTH, CUSTOM, .parse = parse_stop},
    {"stop_token_ids", BOTH, CUSTOM, .parse = parse_stop_ids},
    {"include_stop_str_in_output", BOTH, BOOLEAN, ENGINE(include_stop)},
    {"ignore_eos", BOTH, BOOLEAN, ENGINE(ignore_eos)},
    {"logprobs", BOTH, CUSTOM, .parse = parse_logprobs},
    {"top_logprobs", CHAT, CUSTOM, .parse = parse_top_logprobs},
    {"logit_bias", BOTH, CUSTOM, .parse = parse_logit_bias},

    {"tools", CHAT, CUSTOM, .parse = parse_tools},
    {"tool_choice", CHAT, CUSTOM, .parse = parse_tool_choice},
    {"response_format", BOTH, CUSTOM, .parse = parse_response_format},
    {"modalities", CHAT, CUSTOM, .parse = parse_modalities},
    {"chat_template_kwargs", CHAT, CUSTOM, .parse = parse_template_kwargs},

    /* hints without an effect on the text, and template input that libprompt reads */
    {"user", BOTH, ACCEPT},
    {"metadata", BOTH, ACCEPT},
    {"store", BOTH, ACCEPT},
    {"service_tier", BOTH, ACCEPT},
    {"parallel_tool_calls", CHAT, ACCEPT},
    {"safety_identifier", BOTH, ACCEPT},
    {"prompt_cache_key", BOTH, ACCEPT},
    {"prompt_cache_retention", BOTH, ACCEPT},
    {"documents", CHAT, ACCEPT},
    {"add_generation_prompt", CHAT, ACCEPT},

    /* known, and not supported: never dropped in silence */
    {"skip_special_tokens", BOTH, ONLY_TRUE},
    {"spaces_between_special_tokens", BOTH, ACCEPT},
    {"add_special_tokens", CHAT, ONLY_FALSE},
    {"add_special_tokens", TEXT, ONLY_TRUE},
    {"continue_final_message", CHAT, ONLY_FALSE},
    {"use_beam_search", BOTH, ONLY_FALSE},
    {"return_token_ids", BOTH, ONLY_FALSE},
    {"return_tokens_as_token_ids", BOTH, ONLY_FALSE},
    {"suffix", TEXT, REFUSE},
    {"audio", CHAT, REFUSE},
    {"functions", CHAT, REFUSE},
    {"function_call", CHAT, REFUSE},
    {"prediction", CHAT, REFUSE},
    {"reasoning_effort", CHAT, REFUSE},
    {"verbosity", CHAT, REFUSE},
    {"web_search_options", CHAT, REFUSE},
    {"chat_template", CHAT, REFUSE},
    {"mm_processor_kwargs", CHAT, REFUSE},
    {"prompt_embeds", BOTH, REFUSE},
    {"prompt_logprobs", BOTH, REFUSE},
    {"truncate_prompt_tokens", BOTH, REFUSE},
    {"logits_processors", BOTH, REFUSE},
    {"length_penalty", BOTH, REFUSE},
    {"bad_words", BOTH, REFUSE},
    {"allowed_token_ids", BOTH, REFUSE},
    {"structured_outputs", BOTH, REFUSE},
    {"guided_json", BOTH, REFUSE},
    {"guided_regex", BOTH, REFUSE},
    {"guided_choice", BOTH, REFUSE},
    {"guided_grammar", BOTH, REFUSE},
    {"grammar", BOTH, REFUSE},
    {"json_schema", BOTH, REFUSE},
    {"kv_transfer_params", BOTH, REFUSE},
    {"thinking_token_budget", BOTH, REFUSE},
};

static const struct field *find_field(struct kvg_str name, enum kvg_endpoint endpoint)
{
    uint8_t bit = endpoint == KVG_CHAT_COMPLETIONS ? CHAT : TEXT;
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if ((fields[i].endpoints & bit) && fields[i].name[0] == (name.len ? name.bytes[0] : '\0') &&
            kvg_str_eq(name, fields[i].name))
            return &fields[i];
    return NULL;
}

static int read_member(struct parse *p, const struct kvg_json *value)
{
    switch (p->field->kind) {
    case NUMBER:
        return read_number(p, value);
    case INTEGER:
        return read_integer(p, value);
    case BOOLEAN:
        return read_boolean(p, value);
    case ACCEPT:
        return KVG_OK;
    case ONLY_FALSE:
    case ONLY_TRUE:
        return only_bool(p, value);
    case REFUSE:
        return refuse(p, value);
    case CUSTOM:
        return p->field->parse(p, value);
    }
    return KVG_OK;
}

static int fault(struct parse *p, const char *name, int code, const char *message)
{
    kvg_fail(p->err, code, "%s", message);
    if (p->err)
        snprintf(p->err->param, sizeof p->err->param, "%s", name);
    return code;
}

/* Rules between members, after all were read. */
static int check_together(struct parse *p)
{
    struct api_params *out = p->out;
    struct engine_params *e = &out->engine;
    bool chat = p->context->endpoint == KVG_CHAT_COMPLETIONS;
    int64_t limit = p->max_completion_tokens >= 0 ? p->max_completion_tokens : p->max_tokens;
    const char *name = p->max_completion_tokens >= 0 ? "max_completion_tokens" : "max_tokens";

    if (limit < 0)
        limit = chat ? UINT32_MAX : 16; /* OpenAI's default for completions */
    e->max_tokens = limit > UINT32_MAX ? UINT32_MAX : (uint32_t)limit;
    if (e->max_tokens == 0 && !out->echo)
        return fault(p, name, KVG_INVALID,
                     chat ? "the number of new tokens must be at least 1, got 0"
                          : "max_tokens must be at least 1, got 0 (0 goes with echo)");
    if (e->min_tokens > e->max_tokens) {
        char message[96];
        snprintf(message, sizeof message, "min_tokens is %u, more than %s, which is %u", e->min_tokens, name, e->max_tokens);
        return fault(p, "min_tokens", KVG_INVALID, message);
    }
    if (p->best_of >= 0 && p->best_of != e->n)
        return fault(p, "best_of", KVG_UNSUPPORTED, "best_of is only supported where it equals n");
    if (chat && p->has_top_logprobs && !e->want_logprobs)
        return fault(p, "top_logprobs", KVG_INVALID, "top_logprobs needs logprobs to be true");
    if (p->has_stream_options && !out->stream)
        return fault(p, "stream_options", KVG_INVALID, "stream_options needs stream to be true");
    if (out->echo && e->want_logprobs)
        return fault(p, "logprobs", KVG_UNSUPPORTED, "logprobs of an echoed prompt are not supported");
    e->drop_leading_space = chat;
    if (e->temperature * 1e6f < GREEDY_BELOW_MILLIONTHS)
        e->temperature = 0;
    if (e->top_p == 0) { /* the empty nucleus: the most probable token alone */
        e->top_p = 1;
        e->top_k = 1;
    }
    return KVG_OK;
}

int api_params_parse(const struct api_context *context, const struct kvg_json *body, struct kvg_arena *arena,
                     struct api_params *out, struct kvg_error *err)
{
    struct parse p = {.context = context, .arena = arena, .out = out, .err = err};

    p.max_tokens = p.max_completion_tokens = p.best_of = p.logprobs_n = -1;
    *out = (struct api_params){.engine = {.n = 1, .temperature = 1, .top_p = 1, .repetition_penalty = 1}};
    if (!body || body->type != KVG_JSON_OBJECT)
        return kvg_fail(err, KVG_INVALID, "the body must be a JSON object");
    for (uint32_t i = 0; i < body->n; i++) {
        const struct kvg_json *value = &body->items[i];
        p.field = find_field(value->key, context->endpoint);
        if (!p.field) {
            out->n_unknown++;
            continue;
        }
        if (value->type == KVG_JSON_NULL)
            continue;
        int code = read_member(&p, value);
        if (code != KVG_OK)
            return code;
    }
    return check_together(&p);
}
