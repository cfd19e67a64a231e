/* One side of `make bench-prompt`: keeps a model open and repeats one piece of work for each line it reads.
 *
 * usage: bench_prompt MODEL TEXT_FILE BODY_FILE
 *
 * Lines "cold" (ids of the text, nothing remembered), "warm" (chat body bytes -> JSON -> prompt -> ids -> chain, remembered
 * from the run before) and "chain" (hashes of 100,000 ids); each is answered by "SECONDS TOKENS".
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "libprompt/prompt.h"

enum { CHAIN_IDS = 100000, BLOCK_SIZE = 32, CHAIN_REPEATS = 100, WARM_REPEATS = 200 };

struct bench {
    struct kvg_prompt_model *model;
    char *text, *body;
    size_t text_len, body_len;
};

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static char *read_file(const char *path, size_t *len)
{
    FILE *f = fopen(path, "rb");
    char *bytes = NULL;
    long size;

    if (!f || fseek(f, 0, SEEK_END) || (size = ftell(f)) < 0 || fseek(f, 0, SEEK_SET) || !(bytes = malloc((size_t)size + 1)) ||
        fread(bytes, 1, (size_t)size, f) != (size_t)size) {
        fprintf(stderr, "bench_prompt: cannot read %s\n", path);
        exit(1);
    }
    fclose(f);
    *len = (size_t)size;
    return bytes;
}

static void fail(const struct kvg_error *err)
{
    fprintf(stderr, "bench_prompt: %s\n", err->message);
    exit(1);
}

static void run_cold(const struct bench *bench)
{
    struct kvg_run run = {bench->text_len, KVG_INPUT};
    struct kvg_text text = {bench->text, bench->text_len, &run, 1};
    struct kvg_arena arena;
    struct kvg_error err;
    struct kvg_ids ids;
    double start = now();

    kvg_arena_init(&arena, 0);
    if (kvg_tokenize(kvg_prompt_model_tokenizer(bench->model), &text, 0, &arena, &ids, &err))
        fail(&err);
    printf("%.9f %zu\n", now() - start, ids.n);
    kvg_arena_free(&arena);
}

/* Returns the prompt's tokens. */
static size_t body_to_chain(const struct bench *bench)
{
    struct kvg_chain_identity identity = {.model = "bench", .block_size = BLOCK_SIZE};
    struct kvg_hash seed, *chain;
    struct kvg_arena arena;
    struct kvg_json *body;
    struct kvg_error err;
    struct kvg_ids ids;

    kvg_arena_init(&arena, 0);
    if (kvg_json_parse(&arena, bench->body, bench->body_len, NULL, &body, &err) ||
        kvg_prompt_ids(bench->model, KVG_CHAT_COMPLETIONS, body, 0, 0, &arena, &ids, &err))
        fail(&err);
    identity.fingerprint = *kvg_prompt_model_fingerprint(bench->model);
    chain = kvg_arena_alloc(&arena, (ids.n / BLOCK_SIZE + 1) * sizeof *chain);
    kvg_chain_seed(&identity, &seed);
    kvg_chain_extend(&seed, ids.ids, ids.n, BLOCK_SIZE, chain);
    kvg_arena_free(&arena);
    return ids.n;
}

static void run_warm(const struct bench *bench)
{
    size_t n = body_to_chain(bench);
    double start = now();

    for (int i = 0; i < WARM_REPEATS; i++)
        body_to_chain(bench);
    printf("%.9f %zu\n", (now() - start) / WARM_REPEATS, n);
}

static void run_chain(void)
{
    uint32_t *ids = malloc(CHAIN_IDS * sizeof *ids);
    struct kvg_hash seed = {{1}}, *chain = malloc(CHAIN_IDS / BLOCK_SIZE * sizeof *chain);
    double start;

    if (!ids || !chain)
        exit(1);
    for (uint32_t i = 0; i < CHAIN_IDS; i++)
        ids[i] = i * 2654435761u >> 15;
    start = now();
    for (int i = 0; i < CHAIN_REPEATS; i++) {
        kvg_chain_extend(&seed, ids, CHAIN_IDS, BLOCK_SIZE, chain);
        seed = chain[CHAIN_IDS / BLOCK_SIZE - 1];
    }
    printf("%.9f %d\n", (now() - start) / CHAIN_REPEATS, CHAIN_IDS);
    free(ids);
    free(chain);
}

int main(int argc, char **argv)
{
    struct bench bench;
    struct kvg_error err;
    char line[32];

    if (argc != 4) {
        fprintf(stderr, "usage: bench_prompt MODEL TEXT_FILE BODY_FILE\n");
        return 2;
    }
    if (kvg_prompt_model_open(&bench.model, argv[1], 64 << 20, &err))
        fail(&err);
    bench.text = read_file(argv[2], &bench.text_len);
    bench.body = read_file(argv[3], &bench.body_len);
    while (fgets(line, sizeof line, stdin)) {
        if (strcmp(line, "cold\n") == 0)
            run_cold(&bench);
        else if (strcmp(line, "warm\n") == 0)
            run_warm(&bench);
        else if (strcmp(line, "chain\n") == 0)
            run_chain();
        fflush(stdout);
    }
    kvg_prompt_model_close(bench.model);
    free(bench.text);
    free(bench.body);
    return 0;
}
