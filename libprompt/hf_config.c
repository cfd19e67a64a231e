/* config.json -> the keys under which GGUF files keep a model's numbers, so that the worker reads both alike.
 *
 *   num_hidden_layers                  <arch>.block_count
 *   rope_parameters | rope_theta ...   <arch>.rope.freq_base, .freq_base_swa (sliding layers), .rope.scaling.*
 *   layer_types | pattern, window      <arch>.attention.sliding_window, .attention.sliding_layers (i32, 1 = sliding)
 *   query_pre_attn_scalar              <arch>.attention.scale
 *   tie_word_embeddings                kvgate.tie_word_embeddings
 *   quantization_config                kvgate.quantization_config (its JSON text)
 *
 * A setting that changes the result and has no key is refused by name.
 */
#include "libprompt/hf_folder.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* What a model_type is called in GGUF files, and what its config.json means where it says nothing. */
struct kind {
    const char *model_type, *arch, *activation;
    double rope_base;
    bool tied;
    bool windows;  /* without layer_types: every layer slides over sliding_window */
    bool switched; /* windows count only with use_sliding_window */
    bool gemma;
};
static const struct kind KINDS[] = {
    {"llama", "llama", "silu", 10000, false, false, false, false},
    {"mistral", "mistral", "silu", 10000, false, true, false, false},
    {"qwen2", "qwen2", "silu", 10000, false, true, true, false},
    {"qwen3", "qwen3", "silu", 10000, false, true, true, false},
    {"gemma3_text", "gemma3", "gelu_pytorch_tanh", 1e6, true, true, false, true},
};

/* The numbers that are copied. needed: else absent ones are left out. */
static const struct {
    const char *key, *name;
    bool needed;
} NUMBERS[] = {
    {"num_hidden_layers", "block_count", true},
    {"hidden_size", "embedding_length", true},
    {"intermediate_size", "feed_forward_length", true},
    {"max_position_embeddings", "context_length", true},
    {"num_attention_heads", "attention.head_count", true},
    {"num_key_value_heads", "attention.head_count_kv", false},
    {"head_dim", "attention.key_length", false},
    {"head_dim", "attention.value_length", false},
};

enum { MAX_LAYERS = 1024, KEY_SIZE = 96 };

struct reader {
    struct kvg_gguf_writer *writer;
    const struct kvg_json *config;
    const struct kind *kind;
    struct kvg_error *err;
    const char *text; /* of the document */
};

static bool absent(const struct kvg_json *value)
{
    return !value || value->type == KVG_JSON_NULL;
}

static bool json_is(const struct kvg_json *value, const char *text)
{
    return value && value->type == KVG_JSON_STRING && kvg_str_eq(value->str, text);
}

static const char *key_of(const struct reader *r, const char *name, char out[KEY_SIZE])
{
    snprintf(out, KEY_SIZE, "%s.%s", r->kind->arch, name);
    return out;
}

/* The value as config.json writes it, for messages; at most 60 bytes. */
static int unsupported(const struct reader *r, const char *key, const struct kvg_json *value)
{
    bool text = value->type == KVG_JSON_STRING || value->type == KVG_JSON_NUMBER;
    const char *word = value->type == KVG_JSON_TRUE ? "true" : value->type == KVG_JSON_FALSE ? "false" : "of this form";
    struct kvg_str shown = text ? value->str : (struct kvg_str){word, strlen(word)};

    return kvg_fail(r->err, KVG_UNSUPPORTED, "config.json: %s %.*s is not supported for %s", key,
                    (int)(shown.len < 60 ? shown.len : 60), shown.bytes, r->kind->model_type);
}

static int write_numbers(const struct reader *r)
{
    char key[KEY_SIZE];
    int64_t n;

    for (size_t i = 0; i < sizeof NUMBERS / sizeof *NUMBERS; i++) {
        const struct kvg_json *value = kvg_json_get(r->config, NUMBERS[i].key);
        if (absent(value) && !NUMBERS[i].needed)
            continue;
        if (absent(value) || !kvg_json_int(value, &n) || n < 1 || n > UINT32_MAX)
            return kvg_fail(r->err, KVG_FILE, "config.json: %s is missing or no number from 1 to %u", NUMBERS[i].key, UINT32_MAX);
        kvg_gguf_write_u32(r->writer, key_of(r, NUMBERS[i].name, key), (uint32_t)n);
    }
    return 0;
}

/* A number that has a default; refused when it is there and no number. */
static int read_number(const struct reader *r, const struct kvg_json *object, const char *key, double *out)
{
    const struct kvg_json *value = kvg_json_get(object, key);

    if (absent(value) || kvg_json_double(value, out))
        return 0;
    return kvg_fail(r->err, KVG_FILE, "config.json: %s is no number", key);
}

/* ---- rotary embeddings ---- */

static const struct {
    const char *key, *name;
} SCALINGS[] = {
    {"factor", "rope.scaling.factor"},
    {"low_freq_factor", "rope.scaling.low_freq_factor"},
    {"high_freq_factor", "rope.scaling.high_freq_factor"},
    {"original_max_position_embeddings", "rope.scaling.original_context_length"},
    {"attention_factor", "rope.scaling.attn_factor"},
    {"mscale", "rope.scaling.mscale"},
    {"mscale_all_dim", "rope.scaling.mscale_all_dim"},
    {"beta_fast", "rope.scaling.yarn_beta_fast"},
    {"beta_slow", "rope.scaling.yarn_beta_slow"},
};

/* rope_type (or the older `type`) and its numbers. */
static int write_scaling(const struct reader *r, const struct kvg_json *scaling)
{
    const struct kvg_json *type = kvg_json_get(scaling, "rope_type"), *truncate = kvg_json_get(scaling, "truncate");
    char key[KEY_SIZE];
    double value;

    type = absent(type) ? kvg_json_get(scaling, "type") : type;
    if (absent(type) || json_is(type, "default"))
        return 0;
    if (!json_is(type, "linear") && !json_is(type, "llama3") && !json_is(type, "yarn"))
        return unsupported(r, "rope_scaling type", type);
    if (truncate && truncate->type == KVG_JSON_FALSE)
        return unsupported(r, "rope_scaling truncate", truncate);
    kvg_gguf_write_str(r->writer, key_of(r, "rope.scaling.type", key), type->str);
    for (size_t i = 0; i < sizeof SCALINGS / sizeof *SCALINGS; i++) {
        const struct kvg_json *number = kvg_json_get(scaling, SCALINGS[i].key);
        if (absent(number))
            continue;
        if (!kvg_json_double(number, &value))
            return kvg_fail(r->err, KVG_FILE, "config.json: rope_scaling %s is no number", SCALINGS[i].key);
        kvg_gguf_write_f64(r->writer, key_of(r, SCALINGS[i].name, key), value);
    }
    return 0;
}

/* rope_parameters holds one set, or one for each kind of layer; before it there were rope_theta, rope_local_base_freq and
 * rope_scaling. */
static int write_rope(const struct reader *r)
{
    const struct kvg_json *all = kvg_json_get(r->config, "rope_parameters"), *full = kvg_json_get(all, "full_attention");
    const struct kvg_json *sliding = kvg_json_get(all, "sliding_attention"), *scaling = kvg_json_get(r->config, "rope_scaling");
    double base = r->kind->rope_base, local = r->kind->gemma ? 10000 : 0, part = 1;
    const struct kvg_json *local_type = kvg_json_get(sliding, "rope_type");
    char key[KEY_SIZE];
    int rc;

    full = full ? full : all;
    if ((rc = read_number(r, r->config, "rope_theta", &base)) || (rc = read_number(r, full, "rope_theta", &base)) ||
        (rc = read_number(r, r->config, "rope_local_base_freq", &local)) ||
        (rc = read_number(r, sliding, "rope_theta", &local)) ||
        (rc = read_number(r, r->config, "partial_rotary_factor", &part)) ||
        (rc = read_number(r, full, "partial_rotary_factor", &part)))
        return rc;
    if (part != 1)
        return kvg_fail(r->err, KVG_UNSUPPORTED, "config.json: partial_rotary_factor %g is not supported", part);
    if (!absent(local_type) && !json_is(local_type, "default"))
        return unsupported(r, "rope_parameters of sliding_attention: rope_type", local_type);
    kvg_gguf_write_f64(r->writer, key_of(r, "rope.freq_base", key), base);
    if (local != 0)
        kvg_gguf_write_f64(r->writer, key_of(r, "rope.freq_base_swa", key), local);
    return write_scaling(r, absent(full) ? scaling : full);
}

/* ---- sliding windows ---- */

static int listed_layers(const struct reader *r, const struct kvg_json *types, int32_t *sliding, int64_t n)
{
    if (types->type != KVG_JSON_ARRAY || types->n != n)
        return kvg_fail(r->err, KVG_FILE, "config.json: layer_types has %u entries, the model %lld layers",
                        types->type == KVG_JSON_ARRAY ? types->n : 0, (long long)n);
    for (int64_t i = 0; i < n; i++) {
        sliding[i] = json_is(&types->items[i], "sliding_attention");
        if (!sliding[i] && !json_is(&types->items[i], "full_attention"))
            return unsupported(r, "layer_types entry", &types->items[i]);
    }
    return 0;
}

/* Which layers see only the last sliding_window tokens. */
static int write_windows(const struct reader *r)
{
    const struct kvg_json *types = kvg_json_get(r->config, "layer_types"), *on = kvg_json_get(r->config, "use_sliding_window");
    int32_t sliding[MAX_LAYERS] = {0};
    const struct kvg_json *given = kvg_json_get(r->config, "sliding_window"); /* null: none; absent: the families' default */
    double window = 4096, pattern = 6, from = 28;
    char key[KEY_SIZE];
    int64_t n = 0;
    int rc, any = 0;

    kvg_json_int(kvg_json_get(r->config, "num_hidden_layers"), &n);
    if (n > MAX_LAYERS)
        return kvg_fail(r->err, KVG_UNSUPPORTED, "config.json: %lld layers, at most %d are supported", (long long)n, MAX_LAYERS);
    if ((rc = read_number(r, r->config, "sliding_window", &window)) ||
        (rc = read_number(r, r->config, "max_window_layers", &from)) ||
        (rc = read_number(r, r->config, "sliding_window_pattern", &pattern)) ||
        (rc = read_number(r, r->config, "_sliding_window_pattern", &pattern)))
        return rc;
    if (!absent(types) && (rc = listed_layers(r, types, sliding, n)))
        return rc;
    for (int64_t i = 0; absent(types) && r->kind->windows && pattern >= 1 && i < n; i++)
        sliding[i] = r->kind->gemma ? (i + 1) % (int64_t)pattern != 0 : r->kind->switched ? (double)i >= from : 1;
    for (int64_t i = 0; i < n; i++)
        any |= sliding[i];
    if (!any || (given && given->type == KVG_JSON_NULL) || (r->kind->switched && !(on && on->type == KVG_JSON_TRUE)))
        return 0;
    if (!(window >= 1 && window <= INT32_MAX))
        return kvg_fail(r->err, KVG_FILE, "config.json: sliding_window is %g", window);
    kvg_gguf_write_u32(r->writer, key_of(r, "attention.sliding_window", key), (uint32_t)window);
    kvg_gguf_write_i32s(r->writer, key_of(r, "attention.sliding_layers", key), sliding, (size_t)n);
    return 0;
}

/* ---- quantized weights ---- */

/* quantization_config as it stands there, JSON: the worker reads and judges it. */
static int write_quantization(const struct reader *r)
{
    const struct kvg_json *quant = kvg_json_get(r->config, "quantization_config");
    struct kvg_str text;

    if (absent(quant))
        return 0;
    if (quant->type != KVG_JSON_OBJECT)
        return kvg_fail(r->err, KVG_FILE, "config.json: quantization_config is no object");
    text = (struct kvg_str){r->text + quant->start, quant->end - quant->start};
    kvg_gguf_write_str(r->writer, "kvgate.quantization_config", text);
    return 0;
}

/* ---- the rest ---- */

static int check_rest(const struct reader *r)
{
    static const char *const activations[] = {"hidden_act", "hidden_activation"};
    static const char *const refused[] = {"attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"};

    for (size_t i = 0; i < sizeof activations / sizeof *activations; i++) {
        const struct kvg_json *value = kvg_json_get(r->config, activations[i]);
        if (!absent(value) && !json_is(value, r->kind->activation))
            return unsupported(r, activations[i], value);
    }
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        const struct kvg_json *value = kvg_json_get(r->config, refused[i]);
        if (!absent(value) && value->type != KVG_JSON_FALSE)
            return unsupported(r, refused[i], value);
    }
    return 0;
}

static int write_rest(const struct reader *r)
{
    const struct kvg_json *tie = kvg_json_get(r->config, "tie_word_embeddings");
    double eps = 1e-6, scalar = 256;
    char key[KEY_SIZE];
    int rc = read_number(r, r->config, "rms_norm_eps", &eps);

    if (!rc)
        rc = read_number(r, r->config, "query_pre_attn_scalar", &scalar);
    if (rc)
        return rc;
    if (!(scalar > 0))
        return kvg_fail(r->err, KVG_FILE, "config.json: query_pre_attn_scalar is %g", scalar);
    kvg_gguf_write_f64(r->writer, key_of(r, "attention.layer_norm_rms_epsilon", key), eps);
    if (r->kind->gemma)
        kvg_gguf_write_f64(r->writer, key_of(r, "attention.scale", key), 1 / sqrt(scalar));
    kvg_gguf_write_bool(r->writer, "kvgate.tie_word_embeddings", absent(tie) ? r->kind->tied : tie->type == KVG_JSON_TRUE);
    return 0;
}

int kvg_folder_config(struct kvg_gguf_writer *writer, const struct kvg_json *config, const char *text, struct kvg_error *err)
{
    const struct kvg_json *type = kvg_json_get(config, "model_type");
    struct reader r = {writer, config, NULL, err, text};
    int rc;

    if (absent(type) || type->type != KVG_JSON_STRING)
        return kvg_fail(err, KVG_FILE, "config.json: model_type is missing or no string");
    for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++)
        r.kind = kvg_str_eq(type->str, KINDS[i].model_type) ? &KINDS[i] : r.kind;
    if (!r.kind)
        return kvg_fail(err, KVG_UNSUPPORTED,
                        "config.json: model_type \"%.*s\" is not supported (llama, mistral, qwen2, qwen3, gemma3_text)",
                        (int)(type->str.len < 60 ? type->str.len : 60), type->str.bytes);
    kvg_gguf_write_str(writer, "general.architecture", (struct kvg_str){r.kind->arch, strlen(r.kind->arch)});
    if ((rc = check_rest(&r)) || (rc = write_numbers(&r)) || (rc = write_rope(&r)) || (rc = write_windows(&r)) ||
        (rc = write_rest(&r)))
        return rc;
    return write_quantization(&r);
}
