/* kvgate-prompt: what gateway and worker make of a request, from the command line. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "libprompt/prompt.h"

enum { EXIT_USAGE = 2, MAX_INPUT = 1 << 30 };

static const char USAGE[] =
    "usage: kvgate-prompt cut IN OUT             write the GGUF IN without its tensors: what the gateway needs\n"
    "       kvgate-prompt fingerprint FILE       print the prompt fingerprint of a GGUF, its cut, or a Hugging Face folder\n"
    "       kvgate-prompt ids   --model FILE [--chat | --completion | --text] < INPUT\n"
    "                                            print the token ids as a JSON array, one line a prompt\n"
    "       kvgate-prompt text  --model FILE < BODY\n"
    "                                            print the prompt that the chat template renders\n"
    "       kvgate-prompt chain --model FILE --name MODEL [--block-size TOKENS] [--salt SALT]\n"
    "                           [--chat | --completion | --text] < INPUT\n"
    "                                            print one block hash a line\n"
    "       kvgate-prompt --help | --version\n"
    "\n"
    "INPUT is the JSON body of POST /v1/chat/completions or /v1/completions (told apart by its members unless --chat or\n"
    "--completion says which), or with --text a completion prompt as it is. --block-size is 32 tokens by default, a power\n"
    "of two from 16 to 512; --salt is what the gateway sends as X-Kvgate-Salt, empty by default, and a cache_salt in the body\n"
    "refines it as there. The exit status is 0, 1 when a file or the input is refused, and 2 for wrong usage.\n";

struct options {
    const char *command, *model, *name, *salt;
    unsigned long block_size;
    bool chat, completion, text;
};

/* A model and one request, read and parsed. */
struct request {
    struct kvg_prompt_model *model;
    struct kvg_arena arena;
    struct kvg_json *body;
    enum kvg_endpoint endpoint;
};

static int usage_error(const char *what, const char *value)
{
    fprintf(stderr, "kvgate-prompt: %s%s%s; see kvgate-prompt --help\n", what, value ? ": " : "", value ? value : "");
    return EXIT_USAGE;
}

static int refuse(const struct kvg_error *err)
{
    fprintf(stderr, "kvgate-prompt: %s%s%s%s\n", err->message, err->param[0] ? " (" : "", err->param, err->param[0] ? ")" : "");
    return EXIT_FAILURE;
}

/* The value of an option that takes one, or NULL when it is missing. */
static const char *option_value(int argc, char **argv, int *i)
{
    return *i + 1 < argc ? argv[++*i] : NULL;
}

static int parse_option(struct options *options, int argc, char **argv, int *i)
{
    const char *name = argv[*i], *value;
    char *end;

    if (strcmp(name, "--chat") == 0)
        options->chat = true;
    else if (strcmp(name, "--completion") == 0)
        options->completion = true;
    else if (strcmp(name, "--text") == 0)
        options->text = true;
    else if (strcmp(name, "--model") && strcmp(name, "--name") && strcmp(name, "--salt") && strcmp(name, "--block-size"))
        return usage_error("unknown argument", name);
    else if (!(value = option_value(argc, argv, i)))
        return usage_error("a value is missing after", name);
    else if (strcmp(name, "--model") == 0)
        options->model = value;
    else if (strcmp(name, "--name") == 0)
        options->name = value;
    else if (strcmp(name, "--salt") == 0)
        options->salt = value;
    else {
        errno = 0;
        options->block_size = strtoul(value, &end, 10);
        if (errno || *end || end == value || options->block_size < 16 || options->block_size > 512 ||
            (options->block_size & (options->block_size - 1)))
            return usage_error("--block-size must be a power of two from 16 to 512", value);
    }
    return 0;
}

static int parse_options(struct options *options, int argc, char **argv)
{
    int rc;

    for (int i = 2; i < argc; i++) {
        if ((rc = parse_option(options, argc, argv, &i)))
            return rc;
    }
    if (options->chat + options->completion + options->text > 1)
        return usage_error("only one of --chat, --completion and --text can hold", NULL);
    if (!options->model)
        return usage_error("--model is missing", NULL);
    return 0;
}

static char *read_input(struct kvg_arena *arena, size_t *len)
{
    size_t cap = 1 << 16, n;
    char *bytes = kvg_arena_alloc(arena, cap);

    *len = 0;
    while (bytes && (n = fread(bytes + *len, 1, cap - *len, stdin)) > 0) {
        *len += n;
        if (*len == cap && cap < MAX_INPUT) {
            bytes = kvg_arena_grow(arena, bytes, cap, cap * 2);
            cap *= 2;
        }
    }
    return bytes;
}

/* --text: the completion body whose prompt is the input. */
static int text_body(struct request *request, const char *bytes, size_t len)
{
    struct kvg_json *body = kvg_arena_zalloc(&request->arena, sizeof *body),
                    *prompt = kvg_arena_zalloc(&request->arena, sizeof *prompt);

    if (!body || !prompt)
        return KVG_NOMEM;
    prompt->type = KVG_JSON_STRING;
    prompt->key = (struct kvg_str){"prompt", 6};
    prompt->str = (struct kvg_str){bytes, len};
    body->type = KVG_JSON_OBJECT;
    body->n = 1;
    body->items = prompt;
    request->body = body;
    request->endpoint = KVG_COMPLETIONS;
    return 0;
}

static int read_request(struct request *request, const struct options *options, struct kvg_error *err)
{
    size_t len;
    char *bytes = read_input(&request->arena, &len);
    int rc;

    if (!bytes)
        return kvg_fail(err, KVG_NOMEM, "out of memory for the input");
    if (options->text)
        return text_body(request, bytes, len) ? kvg_fail(err, KVG_NOMEM, "out of memory for the input") : 0;
    if ((rc = kvg_json_parse(&request->arena, bytes, len, NULL, &request->body, err)))
        return rc;
    request->endpoint = KVG_CHAT_COMPLETIONS;
    if (options->completion ||
        (!options->chat && !kvg_json_get(request->body, "messages") && kvg_json_get(request->body, "prompt")))
        request->endpoint = KVG_COMPLETIONS;
    return 0;
}

static void print_ids(const struct kvg_ids *ids)
{
    putchar('[');
    for (size_t i = 0; i < ids->n; i++)
        printf(i ? ",%u" : "%u", ids->ids[i]);
    puts("]");
}

static int print_chain(const struct request *request, const struct options *options, const struct kvg_ids *ids,
                       struct kvg_arena *arena)
{
    const struct kvg_json *cache_salt = kvg_json_get(request->body, "cache_salt");
    struct kvg_str salt = {options->salt, strlen(options->salt)};

    if (cache_salt && cache_salt->type == KVG_JSON_STRING && kvg_salt_join(salt, cache_salt->str, arena, &salt))
        return KVG_NOMEM;
    struct kvg_chain_identity identity = {
        .model = options->name,
        .fingerprint = *kvg_prompt_model_fingerprint(request->model),
        .block_size = (uint32_t)options->block_size,
        .salt = salt.bytes,
        .salt_len = salt.len,
    };
    struct kvg_hash seed, *chain = kvg_arena_alloc(arena, (ids->n / options->block_size + 1) * sizeof *chain);
    char hex[KVG_HASH_HEX + 1];

    if (!chain)
        return KVG_NOMEM;
    kvg_chain_seed(&identity, &seed);
    for (size_t i = 0, n = kvg_chain_extend(&seed, ids->ids, ids->n, identity.block_size, chain); i < n; i++) {
        kvg_hash_hex(&chain[i], hex);
        puts(hex);
    }
    return 0;
}

static int print_prompts(struct request *request, const struct options *options, struct kvg_error *err)
{
    struct kvg_ids ids;
    size_t count;
    int rc = kvg_prompt_count(request->endpoint, request->body, &count, err);

    for (size_t i = 0; !rc && i < count; i++) {
        rc = kvg_prompt_ids(request->model, request->endpoint, request->body, i, (int64_t)time(NULL), &request->arena, &ids, err);
        if (rc)
            break;
        if (strcmp(options->command, "ids") == 0)
            print_ids(&ids);
        else if (print_chain(request, options, &ids, &request->arena))
            rc = kvg_fail(err, KVG_NOMEM, "out of memory for the chain");
    }
    return rc;
}

static int print_text(struct request *request, struct kvg_error *err)
{
    struct kvg_text text;
    int rc = kvg_prompt_text(request->model, request->body, (int64_t)time(NULL), &request->arena, &text, err);

    if (!rc)
        fwrite(text.bytes, 1, text.len, stdout);
    return rc;
}

static int run_request(const struct options *options)
{
    struct request request = {0};
    struct kvg_error err = {0};
    int rc;

    kvg_arena_init(&request.arena, 0);
    rc = kvg_prompt_model_open(&request.model, options->model, 0, &err);
    if (!rc)
        rc = read_request(&request, options, &err);
    if (!rc)
        rc = strcmp(options->command, "text") == 0 ? print_text(&request, &err) : print_prompts(&request, options, &err);
    kvg_prompt_model_close(request.model);
    kvg_arena_free(&request.arena);
    return rc ? refuse(&err) : EXIT_SUCCESS;
}

static int print_fingerprint(const char *path)
{
    struct kvg_prompt_model *model;
    struct kvg_error err = {0};
    char hex[KVG_HASH_HEX + 1];

    if (kvg_prompt_model_open(&model, path, 0, &err))
        return refuse(&err);
    kvg_hash_hex(kvg_prompt_model_fingerprint(model), hex);
    puts(hex);
    kvg_prompt_model_close(model);
    return EXIT_SUCCESS;
}

static int run_command(int argc, char **argv)
{
    struct options options = {.command = argv[1], .salt = "", .block_size = 32};
    struct kvg_error err = {0};
    int rc;

    if (strcmp(argv[1], "cut") == 0) {
        if (argc != 4)
            return usage_error("cut takes two files", NULL);
        return kvg_gguf_cut(argv[2], argv[3], &err) ? refuse(&err) : EXIT_SUCCESS;
    }
    if (strcmp(argv[1], "fingerprint") == 0)
        return argc == 3 ? print_fingerprint(argv[2]) : usage_error("fingerprint takes one file", NULL);
    if (strcmp(argv[1], "ids") && strcmp(argv[1], "text") && strcmp(argv[1], "chain"))
        return usage_error("unknown command", argv[1]);
    if ((rc = parse_options(&options, argc, argv)))
        return rc;
    if (strcmp(argv[1], "chain") == 0 && !options.name)
        return usage_error("--name is missing", NULL);
    return run_request(&options);
}

int main(int argc, char **argv)
{
    int rc;

    if (argc < 2)
        return usage_error("a command is missing", NULL);
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        fputs(USAGE, stdout);
        return EXIT_SUCCESS;
    }
    if (strcmp(argv[1], "--version") == 0) {
        puts("kvgate-prompt " KVGATE_VERSION);
        return EXIT_SUCCESS;
    }
    rc = run_command(argc, argv);
    if (fflush(stdout) || ferror(stdout)) {
        fprintf(stderr, "kvgate-prompt: cannot write: %s\n", strerror(errno));
        return EXIT_FAILURE;
    }
    return rc;
}
