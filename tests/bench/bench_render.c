/* Time from a parsed body to the rendered prompt, and of parsing: a chat of about 2,000 tokens, warm.
 *
 *   bench_render TEMPLATE.jinja [RUNS]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "libprompt/chat_request.h"

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static char *read_file(const char *path, size_t *n)
{
    FILE *file = fopen(path, "rb");
    char *bytes = malloc(1 << 20);
    *n = file ? fread(bytes, 1, 1 << 20, file) : 0;
    if (file)
        fclose(file);
    return bytes;
}

/* A system prompt and twelve turns, about 8 kB of prose in all. */
static void write_body(struct kvg_buf *body)
{
    static const char prose[] = "The quick brown fox jumps over the lazy dog; it's \\\"quoted\\\" once, then goes on.\\n";
    kvg_buf_puts(body, "{\"model\":\"m\",\"messages\":[{\"role\":\"system\",\"content\":\"");
    for (int i = 0; i < 40; i++)
        kvg_buf_puts(body, prose);
    for (int turn = 0; turn < 12; turn++) {
        kvg_buf_printf(body, "\"},{\"role\":\"%s\",\"content\":\"", turn % 2 ? "assistant" : "user");
        for (int i = 0; i < 5; i++)
            kvg_buf_puts(body, prose);
    }
    kvg_buf_puts(body, "\"},{\"role\":\"user\",\"content\":\"And now?\"}],\"stream\":true}");
}

int main(int argc, char **argv)
{
    size_t n;
    int runs = argc > 2 ? atoi(argv[2]) : 5000;
    struct kvg_error err;
    struct kvg_template *tmpl;
    struct kvg_buf body = {0};
    if (argc < 2 || runs < 1)
        return fprintf(stderr, "usage: bench_render TEMPLATE.jinja [RUNS]\n"), 2;
    char *source = read_file(argv[1], &n);
    if (kvg_template_open(&tmpl, source, n, &err) < 0)
        return fprintf(stderr, "%s\n", err.message), 1;
    write_body(&body);
    double *parse = calloc((size_t)runs, sizeof *parse), *render = calloc((size_t)runs, sizeof *render);
    size_t prompt = 0;
    for (int i = 0; i < runs; i++) {
        struct kvg_arena arena;
        struct kvg_json *root;
        struct kvg_text text;
        kvg_arena_init(&arena, 0);
        double start = now_us();
        int rc = kvg_json_parse(&arena, body.bytes, body.len, NULL, &root, &err);
        double parsed = now_us();
        const struct kvg_chat_context context = {.tmpl = tmpl, .bos_token = {"<s>", 3}, .eos_token = {"</s>", 4}};
        if (rc < 0 || kvg_chat_render(&context, root, &arena, &text, &err) < 0)
            return fprintf(stderr, "%s\n", err.message), 1;
        render[i] = now_us() - parsed;
        parse[i] = parsed - start;
        prompt = text.len;
        kvg_arena_free(&arena);
    }
    qsort(parse, (size_t)runs, sizeof *parse, by_value);
    qsort(render, (size_t)runs, sizeof *render, by_value);
    printf("%zu bytes of body, %zu of prompt: parse %.1f us, render %.1f us (medians of %d)\n", body.len, prompt, parse[runs / 2],
           render[runs / 2], runs);
    kvg_template_close(tmpl);
    kvg_buf_free(&body);
    free(source);
    free(parse);
    free(render);
    return 0;
}
