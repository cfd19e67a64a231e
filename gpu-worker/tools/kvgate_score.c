/* kvgate-score: log-probabilities that a model gives to a text, and the KL divergence from a base model's, window by window.
 *
 *   kvgate-score --model FILE [--model FILE ...] [--base FILE] --text FILE [--context 512] [--tokens 100000] [--skip 64] [--from
 * 0] [flags]
 *
 * The text is cut into windows of `context` tokens (BOS first where the model has one); the positions from `skip` on are scored,
 * each over the whole vocabulary. stdout: one JSON object a line, first {"windows", "scored_per_window", ...}, then one each
 * window: {"window", "tokens", "nll", "base_nll", "kl", "same_top"}, sums over its positions in nats. `--from W` begins at window
 * W, so a caller that kept the lines continues where it ended. Base and model are in memory together. Several models share what
 * the base costs: then a window has a line for each, which begins with {"model": its number from 0}.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/log.h"
#include "gpu-worker/model/model.h"
#include "gpu-worker/tools/divergence.h"
#include "gpu-worker/tools/parallel.h"
#include "libprompt/prompt.h"

enum { BLOCK = 32, CHUNK = 256, MOST_TEXT = 1 << 30, MOST_MODELS = DIVERGENCE_MODELS };

struct flags {
    const char *models[MOST_MODELS], *base, *text, *device, *isa, *arithmetic;
    uint32_t n_models, context, skip, tokens, from, threads;
};

struct scored {
    struct model *model;
    uint32_t *blocks, n_blocks;
};

static _Noreturn void fail(const char *what, const char *why)
{
    fprintf(stderr, "kvgate-score: %s: %s\n", what, why);
    exit(1);
}

/* The flags themselves are wrong. */
static _Noreturn void usage(const char *what, const char *why)
{
    fprintf(stderr, "kvgate-score: %s%s%s\n", what, *what ? ": " : "", why);
    exit(2);
}

/* Lines that are lost would be windows that nobody misses. */
static void flush_lines(void)
{
    if (fflush(stdout) != 0 || ferror(stdout))
        fail("stdout", "cannot be written");
}

static char *read_text(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END) != 0)
        fail(path, "cannot be read");
    long end = ftell(file);
    if (end <= 0 || end > MOST_TEXT)
        fail(path, "is empty or larger than 1 GiB");
    char *bytes = malloc((size_t)end);
    rewind(file);
    if (!bytes || fread(bytes, 1, (size_t)end, file) != (size_t)end)
        fail(path, "cannot be read");
    fclose(file);
    *size = (size_t)end;
    return bytes;
}

/* Ids of the text without BOS, in the arena. No more of it than is needed: a token has at least a byte. */
static struct kvg_ids tokenize(const struct flags *flags, const struct kvg_tokenizer *tokenizer, struct kvg_arena *arena)
{
    size_t size;
    struct kvg_error err;
    struct kvg_ids ids;
    char *bytes = read_text(flags->text, &size);
    size_t most = ((size_t)flags->tokens + flags->context) * 16;
    if (size > most)
        for (size = most; size > 0 && ((unsigned char)bytes[size] & 0xc0) == 0x80; size--)
            ;
    struct kvg_run run = {size, KVG_INPUT};
    struct kvg_text text = {bytes, size, &run, 1};
    if (kvg_tokenize(tokenizer, &text, 0, arena, &ids, &err) != 0)
        fail(flags->text, err.message);
    free(bytes);
    return ids;
}

static void open_model(struct scored *out, const struct flags *flags, const char *path)
{
    struct kvg_error err;
    struct model_options options = {.path = path,
                                    .device = flags->device,
                                    .cpu_isa = flags->isa,
                                    .cpu_arithmetic = flags->arithmetic,
                                    .threads = flags->threads,
                                    .max_rows = CHUNK,
                                    .max_seqs = 1,
                                    .max_outputs = CHUNK};
    if (model_open(&out->model, &options, &err) != 0)
        fail(path, err.message);
    out->n_blocks = (flags->context + BLOCK - 1) / BLOCK;
    out->blocks = calloc(out->n_blocks, sizeof *out->blocks);
    if (!out->blocks)
        fail(path, "no memory for a block table");
    for (uint32_t i = 0; i < out->n_blocks; i++)
        out->blocks[i] = i;
    if (model_kv_alloc(out->model, out->n_blocks, BLOCK, &err) != 0)
        fail(path, err.message);
}

static void close_model(struct scored *scored)
{
    model_close(scored->model);
    free(scored->blocks);
}

/* Logits of rows first..n of ids[0..n), which stand at position past; NULL where all rows are before first. */
static const float *forward(struct scored *scored, const uint32_t *ids, uint32_t n, uint32_t past, uint32_t first)
{
    struct model_seq seq = {0, n, past, scored->blocks, scored->n_blocks};
    uint32_t outputs[CHUNK], n_outputs = 0;
    struct kvg_error err;
    for (uint32_t i = first; i < n; i++)
        outputs[n_outputs++] = i;
    struct model_batch batch = {n, ids, 1, &seq, n_outputs, outputs};
    if (model_forward(scored->model, &batch, &err) != 0)
        fail("forward", err.message);
    return n_outputs ? model_logits(scored->model) : NULL;
}

struct sums {
    uint32_t tokens, same_top;
    double nll, base_nll, kl;
};

/* Rows of a chunk, measured on all threads. */
struct measured {
    const float *models[MOST_MODELS], *base; /* [n, n_vocab of each] */
    uint32_t n_models, vocabs[MOST_MODELS], base_vocab, n_common;
    const uint32_t *targets;
    struct divergence *out; /* [n, n_models] */
};

static void measure_rows(void *context, uint64_t first, uint64_t last)
{
    const struct measured *m = context;
    for (uint64_t row = first; row < last; row++) {
        const float *models[MOST_MODELS];
        for (uint32_t i = 0; i < m->n_models; i++)
            models[i] = m->models[i] + row * m->vocabs[i];
        divergence_measure(models, m->n_models, m->base ? m->base + row * m->base_vocab : NULL, m->n_common, m->targets[row],
                           m->out + row * m->n_models);
    }
}

/* n rows of ids[0..n) from `first` on, in all models; what they predict is ids[1..n]. */
static void add_rows(struct scored *models, struct scored *base, const struct flags *flags, const uint32_t *ids, uint32_t n,
                     uint32_t at, uint32_t first, struct sums *sums)
{
    struct divergence out[CHUNK * MOST_MODELS] = {0};
    struct measured m = {.n_models = flags->n_models, .targets = ids + first + 1, .out = out};
    m.base = base ? forward(base, ids, n, at, first) : NULL;
    m.base_vocab = m.n_common = base ? model_info(base->model)->n_vocab : UINT32_MAX;
    for (uint32_t i = 0; i < flags->n_models; i++) {
        m.models[i] = forward(&models[i], ids, n, at, first);
        m.vocabs[i] = model_info(models[i].model)->n_vocab;
        m.n_common = m.vocabs[i] < m.n_common ? m.vocabs[i] : m.n_common;
    }
    parallel_ranges(flags->threads, n - first, measure_rows, &m);
    for (uint32_t i = 0; i < (n - first) * flags->n_models; i++) {
        struct sums *s = &sums[i % flags->n_models];
        s->tokens++;
        s->nll += out[i].nll;
        s->base_nll += out[i].base_nll;
        s->kl += out[i].kl;
        s->same_top += out[i].same_top;
    }
}

/* One window: position i predicts ids[i + 1]; the last predicts nothing. sums: [n_models]. */
static void score_window(struct scored *models, struct scored *base, const struct flags *flags, const uint32_t *ids,
                         struct sums *sums)
{
    uint32_t last = flags->context - 1;
    memset(sums, 0, flags->n_models * sizeof *sums);
    for (uint32_t at = 0, n; at < last; at += n) {
        n = last - at < CHUNK ? last - at : CHUNK;
        add_rows(models, base, flags, ids + at, n, at, at >= flags->skip ? 0 : flags->skip - at < n ? flags->skip - at : n, sums);
    }
}

static void print_line(const struct flags *flags, uint32_t model, uint32_t window, const struct sums *s)
{
    if (!isfinite(s->nll) || !isfinite(s->base_nll) || !isfinite(s->kl))
        fail(flags->models[model], "logits of it or of the base are no finite numbers");
    printf("{");
    if (flags->n_models > 1)
        printf("\"model\": %u, ", model);
    printf("\"window\": %u, \"tokens\": %u, \"nll\": %.9g", window, s->tokens, s->nll);
    if (flags->base)
        printf(", \"base_nll\": %.9g, \"kl\": %.9g, \"same_top\": %u", s->base_nll, s->kl, s->same_top);
    printf("}\n");
}

static uint32_t number(const char *flag, const char *text, uint32_t least, uint32_t most)
{
    char *end, why[96];
    unsigned long n = strtoul(text, &end, 10);
    if (*end || text[0] < '0' || text[0] > '9' || n < least || n > most) {
        snprintf(why, sizeof why, "must be a whole number from %u to %u, got \"%.30s\"", least, most, text);
        usage(flag, why);
    }
    return (uint32_t)n;
}

static const char help[] =
    "kvgate-score --model FILE [--model FILE ...] [--base FILE] --text FILE [--context 512] [--tokens 100000] [--skip 64] "
    "[--from 0]\n"
    "             [--device cpu] [--cpu-isa auto] [--cpu-arithmetic auto] [--threads N]\n"
    "\n"
    "What log-probability each model gives to a text, and its KL divergence from the base, as a line of JSON (sums, in nats) a "
    "window\n"
    "of --context tokens: of its tokens from the --skip-th on, until --tokens are scored. --from W begins at window W.";

static void read_flags(struct flags *flags, int argc, char **argv)
{
    const struct {
        const char *name;
        const char **text;
        uint32_t *count, least, most;
    } known[] = {
        {"--base", &flags->base},
        {"--text", &flags->text},
        {"--device", &flags->device},
        {"--cpu-isa", &flags->isa},
        {"--cpu-arithmetic", &flags->arithmetic},
        {"--context", NULL, &flags->context, 2, 1 << 20},
        {"--tokens", NULL, &flags->tokens, 1, 1u << 30},
        {"--skip", NULL, &flags->skip, 0, 1 << 20},
        {"--from", NULL, &flags->from, 0, 1u << 30},
        {"--threads", NULL, &flags->threads, 1, 1024},
    };
    for (int i = 1; i < argc; i += 2) {
        size_t k = 0;
        if (strcmp(argv[i], "--help") == 0) {
            puts(help);
            exit(0);
        }
        if (strcmp(argv[i], "--model") == 0 && i + 1 < argc) {
            if (flags->n_models == MOST_MODELS)
                usage(argv[i + 1], "is one model too many");
            flags->models[flags->n_models++] = argv[i + 1];
            continue;
        }
        while (k < sizeof known / sizeof *known && strcmp(known[k].name, argv[i]) != 0)
            k++;
        if (k == sizeof known / sizeof *known || i + 1 == argc)
            usage(argv[i],
                  k == sizeof known / sizeof *known && strcmp(argv[i], "--model") != 0 ? "is not known" : "needs a value");
        if (known[k].text)
            *known[k].text = argv[i + 1];
        else
            *known[k].count = number(argv[i], argv[i + 1], known[k].least, known[k].most);
    }
    if (!flags->n_models || !flags->text)
        usage("", help);
    if (flags->skip + 2 > flags->context)
        usage("--skip", "leaves nothing of --context to score");
}

/* The same ids must mean the same texts, or a divergence is that of two alphabets. */
static void check_vocabulary(const char *path, const struct kvg_tokenizer *tokenizer)
{
    struct kvg_prompt_model *base;
    struct kvg_error err;
    if (kvg_prompt_model_open(&base, path, 0, &err) != 0)
        fail(path, err.message);
    const struct kvg_tokenizer *other = kvg_prompt_model_tokenizer(base);
    uint32_t n = kvg_tokenizer_info(tokenizer)->n_vocab, m = kvg_tokenizer_info(other)->n_vocab;
    for (uint32_t id = 0; id < (n < m ? n : m); id++) {
        struct kvg_str a = kvg_token_text(tokenizer, id), b = kvg_token_text(other, id);
        char why[96];
        if (a.len == b.len && memcmp(a.bytes, b.bytes, a.len) == 0)
            continue;
        snprintf(why, sizeof why, "token %u is another one than in --model: not the same vocabulary", id);
        fail(path, why);
    }
    kvg_prompt_model_close(base);
}

/* Padding apart, a vocabulary may end before another one. */
static void check_ids(const char *path, const struct scored *scored, const struct kvg_ids *ids)
{
    uint32_t n_vocab = model_info(scored->model)->n_vocab;
    char why[96];
    for (size_t i = 0; i < ids->n; i++) {
        if (ids->ids[i] < n_vocab)
            continue;
        snprintf(why, sizeof why, "the text has token %u, the vocabulary %u: not the same vocabulary", ids->ids[i], n_vocab);
        fail(path, why);
    }
}

int main(int argc, char **argv)
{
    struct flags flags = {.device = "cpu", .isa = "auto", .arithmetic = "auto", .context = 512, .skip = 64, .tokens = 100000};
    struct scored models[MOST_MODELS] = {0}, base = {0};
    struct sums sums[MOST_MODELS];
    struct kvg_prompt_model *prompt;
    struct kvg_arena arena;
    struct kvg_error err;

    read_flags(&flags, argc, argv);
    log_set_level(LOG_WARN);
    if (kvg_prompt_model_open(&prompt, flags.models[0], 0, &err) != 0)
        fail(flags.models[0], err.message);
    const struct kvg_tokenizer *tokenizer = kvg_prompt_model_tokenizer(prompt);
    const struct kvg_vocab_info *vocab = kvg_tokenizer_info(tokenizer);
    if (flags.base)
        check_vocabulary(flags.base, tokenizer);
    for (uint32_t m = 1; m < flags.n_models; m++)
        check_vocabulary(flags.models[m], tokenizer);
    kvg_arena_init(&arena, 0);
    struct kvg_ids ids = tokenize(&flags, tokenizer, &arena);
    uint32_t bos = vocab->add_bos && vocab->bos != KVG_NO_TOKEN, step = flags.context - bos;
    uint32_t scored = flags.context - 1 - flags.skip, windows = (uint32_t)(ids.n / step);
    uint32_t wanted = (flags.tokens + scored - 1) / scored;
    windows = windows < wanted ? windows : wanted;
    if (windows == 0)
        fail(flags.text, "has fewer tokens than --context");
    for (uint32_t m = 0; m < flags.n_models; m++) {
        open_model(&models[m], &flags, flags.models[m]);
        check_ids(flags.models[m], &models[m], &ids);
    }
    if (flags.base) {
        open_model(&base, &flags, flags.base);
        check_ids(flags.base, &base, &ids);
    }
    uint32_t *window = malloc(flags.context * sizeof *window);
    if (!window)
        fail("--context", "no memory");
    printf("{\"windows\": %u, \"context\": %u, \"scored_per_window\": %u, \"from\": %u}\n", windows, flags.context, scored,
           flags.from);
    flush_lines();
    for (uint32_t w = flags.from; w < windows; w++) {
        window[0] = vocab->bos;
        memcpy(window + bos, ids.ids + (size_t)w * step, step * sizeof *window);
        score_window(models, flags.base ? &base : NULL, &flags, window, sums);
        for (uint32_t m = 0; m < flags.n_models; m++)
            print_line(&flags, m, w, &sums[m]);
        flush_lines();
    }
    free(window);
    kvg_arena_free(&arena);
    for (uint32_t m = 0; m < flags.n_models; m++)
        close_model(&models[m]);
    if (flags.base)
        close_model(&base);
    kvg_prompt_model_close(prompt);
    return 0;
}
