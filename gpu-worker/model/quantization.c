/* quantization_config of a folder: which of its forms are served. */
#include <string.h>
#include "gpu-worker/model/quantized.h"
#include "libprompt/json.h"

#define AT_MOST(s) (int)((s).len < 60 ? (s).len : 60), (s).bytes

struct reader {
    const struct kvg_json *config;
    struct quantization *out;
    struct kvg_error *err;
};

static bool absent(const struct kvg_json *value)
{
    return !value || value->type == KVG_JSON_NULL;
}

/* The string `key`; `fallback` where it is absent, "" where it is no string. */
static struct kvg_str text_of(const struct kvg_json *object, const char *key, const char *fallback)
{
    const struct kvg_json *value = kvg_json_get(object, key);
    if (absent(value))
        return (struct kvg_str){fallback, strlen(fallback)};
    return value->type == KVG_JSON_STRING ? value->str : (struct kvg_str){"", 0};
}

/* A whole number in least..most. */
static int number_of(const struct reader *r, const struct kvg_json *object, const char *key, int64_t least, int64_t most,
                     int64_t *out)
{
    const struct kvg_json *value = kvg_json_get(object, key);
    if (absent(value) || !kvg_json_int(value, out))
        return kvg_fail(r->err, KVG_FILE, "quantization_config: %s is missing or not a whole number", key);
    if (*out < least || *out > most)
        return kvg_fail(r->err, KVG_UNSUPPORTED, "quantization_config: %s is %lld, outside %lld..%lld", key, (long long)*out,
                        (long long)least, (long long)most);
    return 0;
}

/* bits and a group size that is -1 (a row) or a multiple of 32. bits_key may be one of two names. */
static int read_numbers(const struct reader *r, const char *bits_key, const char *group_key)
{
    int64_t bits, group;
    int failed;
    if ((failed = number_of(r, r->config, bits_key, 4, 8, &bits)) ||
        (failed = number_of(r, r->config, group_key, -1, 1 << 20, &group)))
        return failed;
    if (bits != 4 && bits != 8)
        return kvg_fail(r->err, KVG_UNSUPPORTED, "quantization_config: %s is %d: 4 and 8 are served", bits_key, (int)bits);
    if (group != -1 && (group < QUANT_GROUP || group % QUANT_GROUP))
        return kvg_fail(r->err, KVG_UNSUPPORTED, "quantization_config: %s is %d: multiples of %d and -1 are served", group_key,
                        (int)group, QUANT_GROUP);
    r->out->bits = (uint32_t)bits;
    r->out->group = group == -1 ? 0 : (uint32_t)group;
    return 0;
}

/* Of GPTQ's `dynamic`, other numbers for layers whose names fit a pattern, those are served that give lm_head other bits. */
static int read_dynamic(const struct reader *r, const struct kvg_json *dynamic)
{
    static const char *const heads[] = {"lm_head", "^lm_head$", "+:lm_head", "+:^lm_head$"};
    const struct kvg_json *other = dynamic->type == KVG_JSON_OBJECT && dynamic->n == 1 ? &dynamic->items[0] : NULL;
    int64_t bits = 0;
    bool head = false;
    if (dynamic->type == KVG_JSON_OBJECT && dynamic->n == 0)
        return 0;
    for (size_t i = 0; other && i < sizeof heads / sizeof *heads; i++)
        head = head || kvg_str_eq(other->key, heads[i]);
    if (!head || other->type != KVG_JSON_OBJECT || other->n != 1 || !kvg_json_int(kvg_json_get(other, "bits"), &bits) ||
        (bits != 4 && bits != 8))
        return kvg_fail(r->err, KVG_UNSUPPORTED, "quantization_config: dynamic: nothing but bits of lm_head, 4 or 8, is served");
    r->out->head_bits = (uint32_t)bits;
    return 0;
}

static int read_gptq(const struct reader *r)
{
    const struct kvg_json *dynamic = kvg_json_get(r->config, "dynamic"), *order = kvg_json_get(r->config, "desc_act");
    const struct kvg_json *symmetric = kvg_json_get(r->config, "sym");
    struct kvg_str form = text_of(r->config, "checkpoint_format", "gptq");
    bool second = kvg_str_eq(form, "gptq_v2");
    if (!second && !kvg_str_eq(form, "gptq"))
        return kvg_fail(r->err, KVG_UNSUPPORTED, "quantization_config: checkpoint_format \"%.*s\": gptq and gptq_v2 are served",
                        AT_MOST(form));
    int failed = absent(dynamic) ? 0 : read_dynamic(r, dynamic);
    if (failed)
        return failed;
    r->out->method = QUANTIZED_GPTQ;
    r->out->zero_add = second ? 0 : 1;
    r->out->act_order = order && order->type == KVG_JSON_TRUE;
    r->out->zeros = symmetric && symmetric->type == KVG_JSON_FALSE;
    return read_numbers(r, "bits", "group_size");
}

static int read_awq(const struct reader *r)
{
    struct kvg_str version = text_of(r->config, "version", "gemm");
    bool short_names = absent(kvg_json_get(r->config, "bits")) && !absent(kvg_json_get(r->config, "w_bit"));
    if (!kvg_str_eq(version, "gemm") && !kvg_str_eq(version, "GEMM"))
        return kvg_fail(r->err, KVG_UNSUPPORTED, "quantization_config: version \"%.*s\" of awq: gemm is served",
                        AT_MOST(version));
    r->out->method = QUANTIZED_AWQ;
    r->out->zeros = true;
    int failed = read_numbers(r, short_names ? "w_bit" : "bits", short_names ? "q_group_size" : "group_size");
    if (!failed && r->out->bits != 4)
        failed = kvg_fail(r->err, KVG_UNSUPPORTED, "quantization_config: awq of %u bits: 4 are served", r->out->bits);
    return failed;
}

/* Static scales would mean other numbers. */
static int read_activations(const struct reader *r, const struct kvg_json *activations)
{
    const struct kvg_json *dynamic = kvg_json_get(activations, "dynamic");
    struct kvg_str type = text_of(activations, "type", "int");
    if (absent(activations))
        return 0;
    if (!dynamic || dynamic->type != KVG_JSON_TRUE)
        return kvg_fail(r->err, KVG_UNSUPPORTED, "quantization_config: input_activations are not dynamic");
    r->out->activations = true;
    return kvg_str_eq(type, "int")
               ? 0
               : kvg_fail(r->err, KVG_UNSUPPORTED, "quantization_config: input_activations of type \"%.*s\"", AT_MOST(type));
}

static int read_weights(const struct reader *r, const struct kvg_json *weights)
{
    struct kvg_str type = text_of(weights, "type", "int"), strategy = text_of(weights, "strategy", "");
    const struct kvg_json *symmetric = kvg_json_get(weights, "symmetric");
    int64_t bits, group = 0;
    int failed = number_of(r, weights, "num_bits", 4, 8, &bits);
    if (failed)
        return failed;
    bool rows = kvg_str_eq(strategy, "channel") || kvg_str_eq(strategy, "tensor");
    if (!rows && !kvg_str_eq(strategy, "group"))
        return kvg_fail(r->err, KVG_UNSUPPORTED, "quantization_config: strategy \"%.*s\": channel, group and tensor are served",
                        AT_MOST(strategy));
    if (!kvg_str_eq(type, "int") || (bits != 4 && bits != 8))
        return kvg_fail(r->err, KVG_UNSUPPORTED,
                        "quantization_config: weights of type \"%.*s\" and %d bits: int of 4 and 8 are "
                        "served",
                        AT_MOST(type), (int)bits);
    if (!rows && (failed = number_of(r, weights, "group_size", QUANT_GROUP, 1 << 20, &group)))
        return failed;
    if (group % QUANT_GROUP)
        return kvg_fail(r->err, KVG_UNSUPPORTED, "quantization_config: group_size is %d: multiples of %d are served", (int)group,
                        QUANT_GROUP);
    r->out->bits = (uint32_t)bits;
    r->out->group = (uint32_t)group;
    r->out->zeros = symmetric && symmetric->type == KVG_JSON_FALSE;
    return 0;
}

static int check_targets(const struct reader *r, const struct kvg_json *targets)
{
    bool linear = targets && targets->type == KVG_JSON_ARRAY && targets->n == 1 && targets->items[0].type == KVG_JSON_STRING &&
                  kvg_str_eq(targets->items[0].str, "Linear");
    return linear ? 0 : kvg_fail(r->err, KVG_UNSUPPORTED, "quantization_config: targets other than [\"Linear\"] are not served");
}

static int read_compressed(const struct reader *r)
{
    const struct kvg_json *groups = kvg_json_get(r->config, "config_groups"), *scheme;
    if (!groups || groups->type != KVG_JSON_OBJECT || groups->n != 1)
        return kvg_fail(r->err, KVG_UNSUPPORTED, "quantization_config: config_groups of %u schemes: one is served",
                        groups && groups->type == KVG_JSON_OBJECT ? groups->n : 0);
    scheme = &groups->items[0];
    struct kvg_str form = text_of(scheme, "format", "");
    if (form.len == 0)
        form = text_of(r->config, "format", "");
    bool packed = kvg_str_eq(form, "pack-quantized");
    if (!packed && !kvg_str_eq(form, "int-quantized"))
        return kvg_fail(r->err, KVG_UNSUPPORTED,
                        "quantization_config: format \"%.*s\" of compressed-tensors: int-quantized and pack-quantized are served",
                        AT_MOST(form));
    r->out->method = packed ? QUANTIZED_PACKED : QUANTIZED_INT8;
    int failed;
    if ((failed = check_targets(r, kvg_json_get(scheme, "targets"))) ||
        (failed = read_weights(r, kvg_json_get(scheme, "weights"))) ||
        (failed = read_activations(r, kvg_json_get(scheme, "input_activations"))))
        return failed;
    if (!packed && (r->out->bits != 8 || r->out->group || r->out->zeros))
        return kvg_fail(r->err, KVG_UNSUPPORTED,
                        "quantization_config: int-quantized with %u bits, groups of %u, %s: 8 bits, a scale a row and symmetric "
                        "are served",
                        r->out->bits, r->out->group, r->out->zeros ? "not symmetric" : "symmetric");
    return 0;
}

struct quantization quantization_of(const struct quantization *quantization, const char *name)
{
    struct quantization own = *quantization;
    if (own.head_bits && strcmp(name, "lm_head.weight") == 0)
        own.bits = own.head_bits;
    return own;
}

int quantization_read(struct quantization *out, const struct kvg_gguf *gguf, struct kvg_error *err)
{
    struct kvg_arena arena;
    struct kvg_json *config = NULL;
    struct kvg_str text;
    *out = (struct quantization){0};
    if (!kvg_gguf_str(gguf, "kvgate.quantization_config", &text))
        return 0;
    kvg_arena_init(&arena, 0);
    int failed = kvg_json_parse(&arena, text.bytes, text.len, NULL, &config, err);
    if (!failed) {
        struct reader r = {config, out, err};
        struct kvg_str method = text_of(config, "quant_method", "");
        failed = kvg_str_eq(method, "gptq")  ? read_gptq(&r)
                 : kvg_str_eq(method, "awq") ? read_awq(&r)
                 : kvg_str_eq(method, "compressed-tensors")
                     ? read_compressed(&r)
                     : kvg_fail(err, KVG_UNSUPPORTED,
                                "quantization_config: quant_method \"%.*s\": gptq, awq and "
                                "compressed-tensors are served",
                                AT_MOST(method));
    }
    kvg_arena_free(&arena);
    return failed;
}
