#include "gpu-worker/options.h"
#include <arpa/inet.h>
#include <ctype.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "gpu-worker/engine/ngram.h"
#include "gpu-worker/server/listen.h"
#include "libprompt/json.h"

enum { MOST_SPECULATIVE = 16 };
enum kind { TEXT, CHOICE, COUNT, BYTES, SHARE, RATE, ON, OFF, NAMES };

struct flag {
    const char *name;
    enum kind kind;
    size_t at;            /* offset in struct options */
    const char *argument; /* as --help shows it; a CHOICE's values, separated by | */
    const char *help;     /* with unit and default */
    uint64_t low, high;   /* COUNT */
};

#define AT(member) offsetof(struct options, member)

static const struct flag flags[] = {
    {"model", TEXT, AT(model), "FILE", "the model: a GGUF file, or a Hugging Face folder; required"},
    {"served-model-name", NAMES, AT(served_model_name), "NAME [ALIAS ...]",
     "name in requests, replies and Redis; default: the name of the file, without .gguf, or of the folder. Aliases are accepted "
     "in requests"},
    {"host", TEXT, AT(host), "ADDRESS", "address of the plain listener; default 127.0.0.1"},
    {"port", COUNT, AT(port), "N", "TCP port of the plain listener; 0 = none; default 8000", 0, 65535},
    {"api-key", TEXT, AT(api_key), "KEY",
     "clients must send Authorization: Bearer KEY; default: the variable KVGATE_API_KEY, else open"},
    {"gateway-listen", TEXT, AT(gateway_listen), "ADDRESS",
     "IP:port or unix:/path for the gateway alone: only there count X-Kvgate-*, prompt_token_ids and priority; default: none"},
    {"advertise", TEXT, AT(advertise), "ADDRESS",
     "how the gateway reaches --gateway-listen: numeric IP:port or unix:/path; default: the same"},
    {"max-model-len", COUNT, AT(max_model_len), "TOKENS",
     "longest prompt and answer together; default: the model's context length", 2, 1 << 26},
    {"max-num-seqs", COUNT, AT(max_num_seqs), "N", "most requests in one step; default 64", 1, 65536},
    {"max-num-batched-tokens", COUNT, AT(max_num_batched_tokens), "TOKENS", "most tokens computed in one step; default 2048", 1,
     1 << 20},
    {"max-waiting", COUNT, AT(max_waiting), "N", "most requests that wait before further ones get 503; default 1024", 1, 1 << 20},
    {"block-size", COUNT, AT(block_size), "TOKENS", "tokens of a KV block: a power of two from 16 to 512; default 32", 16, 512},
    {"kv-cache-memory", BYTES, AT(kv_cache_memory), "BYTES",
     "memory for KV blocks, such as 512M or 2G (1024-based); default: a quarter of the free memory, 8G at most"},
    {"num-kv-blocks", COUNT, AT(num_kv_blocks), "N", "number of KV blocks, instead of --kv-cache-memory", 1, 1u << 31},
    {"kv-cache-dtype", CHOICE, AT(kv_cache_dtype), "auto|f16|bf16|int8|fp8|float16|bfloat16|fp8_e4m3",
     "how keys and values are kept; int8 (a scale for each token and head) and, on a GPU only, fp8 (e4m3) halve the memory and "
     "lose the most; auto: bf16 on AMX and GPUs, f16 elsewhere; default auto"},
    {"gpu-memory-utilization", SHARE, AT(gpu_memory_utilization), "SHARE",
     "a GPU's memory is used up to this share, above 0 and up to 1, and KV blocks get what is left of it (on the CPU: this share "
     "of "
     "the free memory), instead of --kv-cache-memory; default on a GPU 0.9"},
    {"enable-prefix-caching", OFF, AT(disable_prefix_caching), NULL,
     "reuse the KV blocks of earlier prompts; this is the default"},
    {"no-enable-prefix-caching", ON, AT(disable_prefix_caching), NULL, "compute every prompt anew"},
    {"enable-chunked-prefill", OFF, AT(disable_chunked_prefill), NULL,
     "compute long prompts in parts, beside running answers; this is the default"},
    {"no-enable-chunked-prefill", ON, AT(disable_chunked_prefill), NULL, "compute each prompt in one step as far as it fits"},
    {"warm", TEXT, AT(warm), "FILE",
     "request bodies (chat or completions), one a line: their prompts are computed before the worker is ready, and evicted last; "
     "default: none"},
    {"scheduling-policy", CHOICE, AT(scheduling_policy), "fcfs|priority",
     "order of waiting requests; priority: lower numbers first; default fcfs"},
    {"speculative-model", TEXT, AT(speculative_model), "ngram|FILE[,ngram]",
     "draft several tokens and verify them in one step; ngram: what followed the last tokens when they "
     "stood in the context before; FILE: this and a smaller model with the same vocabulary, file or folder, whichever pays more "
     "for a request (\",ngram\" only spells that out); default: none"},
    {"num-speculative-tokens", COUNT, AT(num_speculative_tokens), "N",
     "drafts of a request at first; the number then follows what is accepted and what it costs, down to none; default 5", 1,
     MOST_SPECULATIVE},
    {"speculative-config", TEXT, AT(speculative_config), "JSON",
     "the two above as vLLM takes them: {\"method\": \"ngram\", \"num_speculative_tokens\": 5} or {\"model\": \"FILE\", ...}, "
     "the latter with any \"method\" for both kinds of drafts; \"prompt_lookup_max\" and \"prompt_lookup_min\", 1 to 64: how "
     "many tokens must have stood in the context before, at best and at least; one alone is both; default 8 and 2"},
    {"spec-accept", CHOICE, AT(spec_accept), "coupled|rejection|argmax|top-p",
     "which drafts are accepted; coupled: exactly those that equal what is drawn without drafts, so the same answers to the bit; "
     "rejection: by chance, so that answers follow the same distribution but are other ones; argmax (lossy): the most likely "
     "token, too; top-p (lossy): any of the likeliest tokens that hold top_p of the probability, 0.9 where the request has 1; "
     "default coupled"},
    {"device", CHOICE, AT(device), "auto|cpu|cuda",
     "auto takes a CUDA device where this build and machine have one; default auto"},
    {"deterministic", ON, AT(deterministic), NULL,
     "on CUDA: a request's answer is the same bits in any batch (on the CPU it always is), at the price of slower kernels"},
    {"enforce-eager", ON, AT(enforce_eager), NULL, "on CUDA: launch each kernel by itself, without CUDA graphs"},
    {"tensor-parallel-size", COUNT, AT(tensor_parallel_size), "N",
     "compute each layer on N ranks together, a process each: parts of the machine's cores on the CPU; heads and kv heads must "
     "be divisible by N, or N by the kv heads; default 1",
     1, 64},
    {"threads", COUNT, AT(threads), "N", "compute threads on the CPU, of each rank; default: all cores, divided among the ranks",
     1, 1024},
    {"cpu-isa", CHOICE, AT(cpu_isa), "auto|generic|avx2|avx512|amx", "instruction set of the CPU kernels; default auto"},
    {"cpu-arithmetic", CHOICE, AT(cpu_arithmetic), "auto|int8|int16",
     "what activations are rounded to before products with quantized weights; default auto: int16 where that is fast"},
    {"redis", TEXT, AT(redis), "URL",
     "redis://[user:password@]host[:port][/db] or unix:/path, or several joined by commas, or sentinel://host[:port],…/master; "
     "default: none, nothing is published"},
    {"redis-prefix", TEXT, AT(redis_prefix), "PREFIX", "start of every Redis key; default kvgate:"},
    {"worker-id", TEXT, AT(worker_id), "ID", "this worker's name in Redis, unique for the model; default: host name and port"},
    {"log-level", CHOICE, AT(log_level), "debug|info|warn|error", "least level that is logged, to stderr; default info"},
    {"plan", ON, AT(plan), NULL,
     "serve nothing: print, by the roofline, how many KV blocks, requests at once and workers a load needs; the flags below "
     "belong "
     "to it, and block-size, kv-cache-dtype, max-num-seqs and gpu-memory-utilization count"},
    {"memory", BYTES, AT(plan_memory), "BYTES", "memory of one worker's machine, such as 80G; default: the machine's"},
    {"qps", RATE, AT(plan_qps), "N", "requests a second, of all workers together; default 1"},
    {"in", COUNT, AT(plan_in), "TOKENS", "tokens of a prompt; default 1024", 1, 1 << 26},
    {"out", COUNT, AT(plan_out), "TOKENS", "tokens of an answer; default 256", 1, 1 << 26},
    {"plan-cached", SHARE, AT(plan_cached), "SHARE", "share of a prompt that is found in the cache; default none"},
    {"plan-share", SHARE, AT(plan_share), "SHARE", "share of the roofline that is to be used; default 0.7"},
    {"plan-machine", TEXT, AT(plan_machine), "NAME",
     "cpu: this machine, measured; or a GPU by its vendor's figures (h100, h200, a100, ...); default cpu"},
    {"plan-bandwidth", RATE, AT(plan_bandwidth), "BYTES/S", "memory read in a second, such as 3350G (1000-based), instead"},
    {"plan-compute", RATE, AT(plan_compute), "OPS/S", "operations in a second, such as 989T, instead"},
    {"json", ON, AT(plan_json), NULL, "--plan as one JSON object"},
    {"help", ON, AT(help), NULL, "print this and exit"},
    {"version", ON, AT(version), NULL, "print the version and exit"},
};

static const struct flag *find_flag(const char *name, size_t len)
{
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        const char *known = flags[i].name;
        size_t k = 0;
        while (k < len && known[k] && (name[k] == known[k] || (name[k] == '_' && known[k] == '-')))
            k++;
        if (k == len && !known[k])
            return &flags[i];
    }
    return NULL;
}

/* ---- values ------------------------------------------------------------------------------------------------------------ */

static int read_count(const struct flag *flag, const char *text, uint32_t *out, struct kvg_error *err)
{
    char *end;
    unsigned long long n = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || n < flag->low || n > flag->high || strlen(text) > 12)
        return kvg_fail(err, KVG_INVALID, "--%s must be a whole number from %llu to %llu, got \"%s\"", flag->name,
                        (unsigned long long)flag->low, (unsigned long long)flag->high, text);
    *out = (uint32_t)n;
    return KVG_OK;
}

/* A number with K, M, G or T behind it, at step 1024 Ki too, or nothing: step, step^2, ... times it. *end: what follows. */
static double read_scaled(const char *text, double step, const char **end)
{
    static const char units[] = "KMGT";
    char *rest;
    double n = strtod(text, &rest);
    const char *unit = *rest ? strchr(units, toupper((unsigned char)*rest)) : NULL;

    for (ptrdiff_t i = unit ? unit - units : -1; i >= 0; i--)
        n *= step;
    rest += unit != NULL;
    *end = rest + (unit && step == 1024 && *rest == 'i');
    return n;
}

static int read_bytes(const struct flag *flag, const char *text, uint64_t *out, struct kvg_error *err)
{
    const char *end;
    double n = read_scaled(text, 1024, &end);

    if (*end == 'B' || *end == 'b')
        end++;
    if (text[0] < '0' || text[0] > '9' || *end || !(n >= 1) || n > 1e15)
        return kvg_fail(err, KVG_INVALID, "--%s must be a number of bytes such as 512M or 2G, got \"%s\"", flag->name, text);
    *out = (uint64_t)n;
    return KVG_OK;
}

/* A number above 0, 1000-based units allowed. */
static int read_rate(const struct flag *flag, const char *text, double *out, struct kvg_error *err)
{
    const char *end;
    double n = read_scaled(text, 1000, &end);

    if (!((text[0] >= '0' && text[0] <= '9') || text[0] == '.') || *end || !(n > 0) || n > 1e21)
        return kvg_fail(err, KVG_INVALID, "--%s must be a number above 0, such as 10 or 3350G, got \"%s\"", flag->name, text);
    *out = n;
    return KVG_OK;
}

static int read_share(const struct flag *flag, const char *text, double *out, struct kvg_error *err)
{
    char *end;
    double share = strtod(text, &end);
    if (end == text || *end || !(share > 0 && share <= 1))
        return kvg_fail(err, KVG_INVALID, "--%s must be above 0 and at most 1, got \"%s\"", flag->name, text);
    *out = share;
    return KVG_OK;
}

static int read_choice(const struct flag *flag, const char *text, const char **out, struct kvg_error *err)
{
    size_t len = strlen(text);
    for (const char *at = flag->argument; *at; at += strcspn(at, "|"), at += *at == '|')
        if (strcspn(at, "|") == len && memcmp(at, text, len) == 0) {
            *out = text;
            return KVG_OK;
        }
    return kvg_fail(err, KVG_INVALID, "--%s must be one of %s, got \"%s\"", flag->name, flag->argument, text);
}

static int read_value(const struct flag *flag, struct options *options, const char *text, struct kvg_error *err)
{
    void *at = (char *)options + flag->at;
    switch (flag->kind) {
    case COUNT:
        return read_count(flag, text, at, err);
    case BYTES:
        return read_bytes(flag, text, at, err);
    case RATE:
        return read_rate(flag, text, at, err);
    case SHARE:
        return read_share(flag, text, at, err);
    case CHOICE:
        return read_choice(flag, text, at, err);
    default:
        if (!text[0])
            return kvg_fail(err, KVG_INVALID, "--%s must not be empty", flag->name);
        *(const char **)at = text;
        return KVG_OK;
    }
}

/* ---- rules between flags ----------------------------------------------------------------------------------------------- */

/* The rule for names in Redis keys. */
static bool name_valid(const char *name)
{
    size_t len = strlen(name);
    return len >= 1 && len <= 128 && strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._/-") == len;
}

static int check_name(const char *flag, const char *name, struct kvg_error *err)
{
    if (name_valid(name))
        return KVG_OK;
    return kvg_fail(err, KVG_INVALID, "--%s \"%.140s\": 1 to 128 letters, digits or . _ / - are allowed", flag, name);
}

static void derive_name(struct options *options)
{
    const char *end = options->model + strlen(options->model), *base;
    while (end > options->model + 1 && end[-1] == '/') /* a folder's */
        end--;
    for (base = end; base > options->model && base[-1] != '/';)
        base--;
    size_t len = (size_t)(end - base);
    if (len > 5 && memcmp(end - 5, ".gguf", 5) == 0)
        len -= 5;
    snprintf(options->name_buffer, sizeof options->name_buffer, "%.*s", (int)len, base);
    options->served_model_name = options->name_buffer;
}

static void derive_id(struct options *options)
{
    char host[100] = "";
    gethostname(host, sizeof host - 1);
    uint32_t port = options->port;
    char ignored[256];
    uint16_t gateway_port;
    if (!port && options->gateway_listen && split_address(options->gateway_listen, ignored, sizeof ignored, &gateway_port) == 0)
        port = gateway_port;
    snprintf(options->id_buffer, sizeof options->id_buffer, "%s-%u", host[0] ? host : "worker", port);
    options->worker_id = options->id_buffer;
}

/* Gateways connect to numbers only: names would have them wait for a resolver. */
static int check_advertise(const char *address, struct kvg_error *err)
{
    char host[256];
    unsigned char bytes[16];
    uint16_t port;

    if (listen_unix_path(address))
        return KVG_OK;
    if (split_address(address, host, sizeof host, &port) < 0 ||
        (inet_pton(AF_INET, host, bytes) != 1 && inet_pton(AF_INET6, host, bytes) != 1))
        return kvg_fail(err, KVG_INVALID, "--advertise \"%s\" must be a numeric IP:port, [IPv6]:port or unix:/path", address);
    if (strcmp(host, "0.0.0.0") == 0 || strcmp(host, "::") == 0)
        return kvg_fail(err, KVG_INVALID,
                        "--gateway-listen %s is every address: say with --advertise which one the gateway is to use", address);
    return KVG_OK;
}

/* A member of --speculative-config that is a number. */
static int read_speculative_number(const struct kvg_json *member, uint32_t most, uint32_t *out, struct kvg_error *err)
{
    int64_t n;

    if (!kvg_json_int(member, &n) || n < 1 || n > most)
        return kvg_fail(err, KVG_INVALID, "--speculative-config: \"%.*s\" must be a whole number from 1 to %u",
                        (int)member->key.len, member->key.bytes, most);
    *out = (uint32_t)n;
    return KVG_OK;
}

/* One member of --speculative-config. */
static int read_speculative_member(struct options *options, const struct kvg_json *member, bool *by_model, struct kvg_error *err)
{
    if (kvg_str_eq(member->key, "method")) {
        if (member->type != KVG_JSON_STRING || !(kvg_str_eq(member->str, "ngram") || kvg_str_eq(member->str, "draft_model")))
            return kvg_fail(err, KVG_INVALID, "--speculative-config: \"method\" must be \"ngram\" or \"draft_model\"");
        *by_model = kvg_str_eq(member->str, "draft_model");
        if (!*by_model)
            options->speculative_model = "ngram";
        return KVG_OK;
    }
    if (kvg_str_eq(member->key, "model")) {
        if (member->type != KVG_JSON_STRING || member->str.len == 0 || member->str.len >= sizeof options->draft_buffer ||
            memchr(member->str.bytes, 0, member->str.len))
            return kvg_fail(err, KVG_INVALID, "--speculative-config: \"model\" must be the name of a file or folder");
        snprintf(options->draft_buffer, sizeof options->draft_buffer, "%.*s", (int)member->str.len, member->str.bytes);
        return KVG_OK;
    }
    if (kvg_str_eq(member->key, "num_speculative_tokens"))
        return read_speculative_number(member, MOST_SPECULATIVE, &options->num_speculative_tokens, err);
    if (kvg_str_eq(member->key, "prompt_lookup_max"))
        return read_speculative_number(member, NGRAM_MOST, &options->prompt_lookup_max, err);
    if (kvg_str_eq(member->key, "prompt_lookup_min"))
        return read_speculative_number(member, NGRAM_MOST, &options->prompt_lookup_min, err);
    return kvg_fail(err, KVG_INVALID, "--speculative-config: \"%.*s\" is not supported",
                    (int)(member->key.len < 64 ? member->key.len : 64), member->key.bytes);
}

/* One of the two alone is both. */
static int check_lookup(struct options *options, struct kvg_error *err)
{
    if (!options->prompt_lookup_max)
        options->prompt_lookup_max = options->prompt_lookup_min;
    if (!options->prompt_lookup_min)
        options->prompt_lookup_min = options->prompt_lookup_max;
    if (options->prompt_lookup_min > options->prompt_lookup_max)
        return kvg_fail(err, KVG_INVALID,
                        "--speculative-config: \"prompt_lookup_min\" is %u, more than \"prompt_lookup_max\", %u",
                        options->prompt_lookup_min, options->prompt_lookup_max);
    return KVG_OK;
}

static int read_speculative_config(struct options *options, struct kvg_error *err)
{
    struct kvg_json_limits limits = {.depth = 8, .values = 64};
    struct kvg_arena arena;
    struct kvg_json *config;
    struct kvg_error cause = {0};
    bool by_model = false;
    int code = KVG_OK;

    kvg_arena_init(&arena, 1 << 16);
    if (kvg_json_parse(&arena, options->speculative_config, strlen(options->speculative_config), &limits, &config, &cause) < 0)
        code = kvg_fail(err, KVG_INVALID, "--speculative-config: %s", cause.message);
    else if (config->type != KVG_JSON_OBJECT)
        code = kvg_fail(err, KVG_INVALID, "--speculative-config must be a JSON object");
    for (uint32_t i = 0; code == KVG_OK && i < config->n; i++)
        code = read_speculative_member(options, &config->items[i], &by_model, err);
    kvg_arena_free(&arena);
    if (code == KVG_OK && by_model && (!options->draft_buffer[0] || strcmp(options->draft_buffer, "ngram") == 0))
        return kvg_fail(err, KVG_INVALID, "--speculative-config: \"method\" is \"draft_model\", but \"model\" names no file");
    if (options->draft_buffer[0])
        options->speculative_model = options->draft_buffer;
    if (code == KVG_OK && !options->speculative_model)
        return kvg_fail(err, KVG_INVALID, "--speculative-config has neither \"method\" nor \"model\": nothing drafts");
    return code == KVG_OK ? check_lookup(options, err) : code;
}

/* "FILE,ngram" is FILE: lookup is always on beside a draft model. */
static void drop_ngram(struct options *options)
{
    static const char also[] = ",ngram";
    const char *model = options->speculative_model;
    size_t len = model ? strlen(model) : 0, extra = sizeof also - 1;

    if (len <= extra || len - extra >= sizeof options->draft_buffer || strcmp(model + len - extra, also) != 0)
        return;
    memmove(options->draft_buffer, model, len - extra);
    options->draft_buffer[len - extra] = '\0';
    options->speculative_model = options->draft_buffer;
}

static int check_speculation(struct options *options, struct kvg_error *err)
{
    if (options->speculative_config) {
        if (options->speculative_model || options->num_speculative_tokens)
            return kvg_fail(err, KVG_INVALID,
                            "give --speculative-config, or --speculative-model and --num-speculative-tokens, not both");
        if (read_speculative_config(options, err) < 0)
            return KVG_INVALID;
    }
    drop_ngram(options);
    if (options->num_speculative_tokens && !options->speculative_model)
        return kvg_fail(err, KVG_INVALID, "--num-speculative-tokens without --speculative-model drafts nothing");
    if (strcmp(options->spec_accept, "coupled") != 0 && !options->speculative_model)
        return kvg_fail(err, KVG_INVALID, "--spec-accept %s without --speculative-model: there are no drafts to accept",
                        options->spec_accept);
    return KVG_OK;
}

static int check(struct options *options, struct kvg_error *err)
{
    if (!options->model)
        return kvg_fail(err, KVG_INVALID, "--model FILE is required (--help lists all flags)");
    if (options->warm && options->disable_prefix_caching)
        return kvg_fail(err, KVG_INVALID, "--warm fills the prefix cache, which --no-enable-prefix-caching turns off");
    if (options->plan && options->plan_cached >= 1)
        return kvg_fail(err, KVG_INVALID, "--plan-cached must be below 1: the last token of a prompt is always computed");
    if (!options->plan && (options->plan_json || options->plan_memory || options->plan_machine))
        return kvg_fail(err, KVG_INVALID, "--%s belongs to --plan, which is not given",
                        options->plan_json     ? "json"
                        : options->plan_memory ? "memory"
                                               : "plan-machine");
    if (!options->served_model_name)
        derive_name(options);
    if (!options->worker_id)
        derive_id(options);
    if (!options->advertise)
        options->advertise = options->gateway_listen;
    if (check_name("served-model-name", options->served_model_name, err) < 0 ||
        check_name("worker-id", options->worker_id, err) < 0)
        return KVG_INVALID;
    if (options->block_size & (options->block_size - 1))
        return kvg_fail(err, KVG_INVALID, "--block-size must be a power of two from 16 to 512, got %u", options->block_size);
    if (!options->port && !options->gateway_listen)
        return kvg_fail(err, KVG_INVALID, "--port 0 without --gateway-listen leaves nothing to listen on");
    if (options->redis && !options->gateway_listen)
        return kvg_fail(err, KVG_INVALID, "--redis needs --gateway-listen: it is the address that is published");
    if (options->max_num_batched_tokens && options->max_num_seqs && options->max_num_batched_tokens < options->max_num_seqs)
        return kvg_fail(err, KVG_INVALID, "--max-num-batched-tokens is %u, less than --max-num-seqs, which is %u",
                        options->max_num_batched_tokens, options->max_num_seqs);
    if (!!options->kv_cache_memory + !!options->num_kv_blocks + (options->gpu_memory_utilization > 0) > 1)
        return kvg_fail(err, KVG_INVALID, "give one of --kv-cache-memory, --num-kv-blocks and --gpu-memory-utilization");
    if (check_speculation(options, err) < 0)
        return KVG_INVALID;
    return options->redis ? check_advertise(options->advertise, err) : KVG_OK;
}

/* ---- the command line -------------------------------------------------------------------------------------------------- */

/* --served-model-name takes every word up to the next flag. */
static int read_aliases(struct options *options, int argc, char **argv, int *i, struct kvg_error *err)
{
    options->n_aliases = 0;
    while (*i + 1 < argc && strncmp(argv[*i + 1], "--", 2) != 0) {
        if (options->n_aliases == OPTIONS_MAX_ALIASES)
            return kvg_fail(err, KVG_INVALID, "--served-model-name has more than %d aliases", OPTIONS_MAX_ALIASES);
        options->aliases[options->n_aliases++] = argv[++*i];
    }
    return KVG_OK;
}

static int read_flag(struct options *options, int argc, char **argv, int *i, struct kvg_error *err)
{
    const char *word = argv[*i], *equals = strchr(word, '=');
    if (strcmp(word, "-h") == 0)
        word = "--help";
    if (strncmp(word, "--", 2) != 0)
        return kvg_fail(err, KVG_INVALID, "\"%s\" is no flag (--help lists all)", word);
    const struct flag *flag = find_flag(word + 2, equals ? (size_t)(equals - word - 2) : strlen(word + 2));
    if (!flag)
        return kvg_fail(err, KVG_INVALID, "%s is not known (--help lists all flags)", word);
    if (flag->kind == ON || flag->kind == OFF) {
        if (equals)
            return kvg_fail(err, KVG_INVALID, "--%s takes no value", flag->name);
        *(bool *)((char *)options + flag->at) = flag->kind == ON;
        return KVG_OK;
    }
    if (!equals && *i + 1 == argc)
        return kvg_fail(err, KVG_INVALID, "--%s needs a value: %s", flag->name, flag->argument);
    int code = read_value(flag, options, equals ? equals + 1 : argv[++*i], err);
    if (code == KVG_OK && flag->kind == NAMES)
        code = read_aliases(options, argc, argv, i, err);
    return code;
}

int options_parse(struct options *options, int argc, char **argv, struct kvg_error *err)
{
    *options = (struct options){
        .host = "127.0.0.1",
        .port = 8000,
        .api_key = getenv("KVGATE_API_KEY"),
        .block_size = 32,
        .max_num_seqs = 64,
        .tensor_parallel_size = 1,
        .max_num_batched_tokens = 2048,
        .max_waiting = 1024,
        .scheduling_policy = "fcfs",
        .spec_accept = "coupled",
        .device = "auto",
        .cpu_isa = "auto",
        .cpu_arithmetic = "auto",
        .kv_cache_dtype = "auto",
        .redis_prefix = "kvgate:",
        .log_level = "info",
        .plan_qps = 1,
        .plan_in = 1024,
        .plan_out = 256,
        .plan_share = 0.7,
    };
    if (options->api_key && !options->api_key[0])
        options->api_key = NULL;
    for (int i = 1; i < argc; i++) {
        int code = read_flag(options, argc, argv, &i, err);
        if (code != KVG_OK)
            return code;
    }
    return options->help || options->version ? KVG_OK : check(options, err);
}

/* Words of `text` in lines of at most 100 columns, indented. */
static void print_wrapped(const char *text)
{
    int column = 0;
    while (*text) {
        int len = (int)strcspn(text, " ");
        if (column == 0 || column + 1 + len > 92) {
            fputs(column ? "\n        " : "        ", stdout);
            column = 0;
        } else {
            putchar(' ');
        }
        printf("%.*s", len, text);
        column += len + 1; /* 0 only before the first word */
        text += len;
        text += strspn(text, " ");
    }
    putchar('\n');
}

void options_help(void)
{
    printf("kvgate-worker %s: serves one model over the OpenAI API.\n\nusage: kvgate-worker --model FILE [flags]\n\n",
           KVGATE_VERSION);
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        printf("  --%s%s%s\n", flags[i].name, flags[i].argument ? " " : "", flags[i].argument ? flags[i].argument : "");
        print_wrapped(flags[i].help);
    }
    printf("\nSIGTERM drains: running answers end, new requests get 503, then exit status 0; a second one exits at once.\n"
           "Exit status: 0 drained, 1 cannot start, 2 bad flags, 3 another process took the worker id, 70 broken invariant.\n");
}
