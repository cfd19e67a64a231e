/* kvgate-quantize: writes a model with its matrices in another format.
 *
 *   kvgate-quantize IN.gguf OUT.gguf --format q8_0|q4_0|bf16    [--calibration FILE] [--lm-head] [flags]
 *   kvgate-quantize IN/     OUT/     --format w8a8|gptq-int4|awq-int4|q8_0    [--calibration FILE] [--lm-head] [flags]
 *
 * q8_0, q4_0: the matrices in layers; embedding, output matrix and norms stay as they are. --lm-head: the output matrix (where it
 * is tied, the embedding) as Q8_0. bf16: every matrix, as a base to compare others with. A matrix that is quantized already is
 * decoded first: what it lost stays lost. Folders are those of Hugging Face. w8a8: compressed-tensors, int8 weights with a scale
 * for each row, activations quantized for each token as they come. gptq-int4, awq-int4: groups of 128, symmetric, asymmetric.
 * q8_0 of a folder: the same numbers as in a GGUF file, as GPTQ's tensors of 8 bits in groups of 32.
 * --lm-head: lm_head too, rounded: to 8 bits, but beside awq-int4 to 4.
 * --calibration: instead of rounding each number for itself, by the inputs that a text gives: q4_0 and gptq-int4 by GPTQ
 * (gptq.h), awq-int4, and q4_0 with --awq, by AWQ (awq.h), which scales columns, and what feeds them the other way; w8a8 by
 * SmoothQuant (smooth.h), which does the same for the sake of the inputs. --act-order: with gptq-int4, columns whose inputs are
 * largest are rounded first. OUT must not exist; it appears whole or not at all.
 */
#include <cblas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "gpu-worker/log.h"
#include "gpu-worker/tools/quantize.h"
#include "gpu-worker/tools/temporary.h"

static _Noreturn void usage(const char *what, const char *why)
{
    fprintf(stderr, "kvgate-quantize: %s%s%s\n", what, *what ? ": " : "", why);
    exit(2);
}

static const char help[] =
    "usage: kvgate-quantize IN.gguf OUT.gguf --format q8_0|q4_0|bf16 [--calibration FILE [--awq]] [flags]\n"
    "       kvgate-quantize IN/ OUT/ --format w8a8|gptq-int4|awq-int4|q8_0 [--calibration FILE [--act-order]] [flags]\n"
    "\n"
    "Writes a model with the matrices of its layers in another format: a GGUF file, or a Hugging Face folder. OUT must not "
    "exist.\n"
    "\n"
    "    --calibration FILE  of text, or JSON lines with text, prompt or messages: rounds by what the model's inputs are on it\n"
    "                  (q4_0, gptq-int4: GPTQ; awq-int4: AWQ; w8a8: SmoothQuant);  --awq  AWQ for q4_0;  --act-order  for "
    "gptq-int4\n"
    "    --lm-head     the output matrix as well\n"
    "    --group N     columns that share a scale in gptq-int4 and awq-int4, a power of two from 8 to 128, default 128; "
    "kvgate-worker serves\n"
    "                  multiples of 32\n"
    "    --tokens N    of the calibration that are used, default 16384;  --context N  of a sequence, default 512\n"
    "    --memory MIB  for sums of the calibration, default 4096: more layers in one pass;  --threads N";

static void read_flags(struct quantize_flags *flags, int argc, char **argv)
{
    const struct {
        const char *name;
        const char **text;
        uint32_t *count, most;
        bool *set; /* without a value */
    } known[] = {
        {"--format", &flags->format, NULL, 0, NULL},
        {"--calibration", &flags->calibration, NULL, 0, NULL},
        {"--tokens", NULL, &flags->tokens, 1u << 26, NULL},
        {"--context", NULL, &flags->context, 1 << 16, NULL},
        {"--group", NULL, &flags->group, 128, NULL},
        {"--threads", NULL, &flags->threads, 1024, NULL},
        {"--memory", NULL, &flags->memory_mib, 1 << 24, NULL},
        {"--lm-head", NULL, NULL, 0, &flags->lm_head},
        {"--awq", NULL, NULL, 0, &flags->awq},
        {"--act-order", NULL, NULL, 0, &flags->act_order},
    };
    for (int i = 1; i < argc; i++) {
        size_t k = 0;
        char *end;
        if (strcmp(argv[i], "--help") == 0) {
            puts(help);
            exit(0);
        }
        if (strncmp(argv[i], "--", 2) != 0) {
            if (flags->in && flags->out)
                usage(argv[i], "is a third file name");
            *(flags->in ? &flags->out : &flags->in) = argv[i];
            continue;
        }
        while (k < sizeof known / sizeof *known && strcmp(known[k].name, argv[i]) != 0)
            k++;
        if (k == sizeof known / sizeof *known)
            usage(argv[i], "is not known");
        if (known[k].set) {
            *known[k].set = true;
            continue;
        }
        if (i + 1 == argc)
            usage(argv[i], "needs a value");
        const char *value = argv[++i];
        if (known[k].text) {
            *known[k].text = value;
            continue;
        }
        unsigned long n = strtoul(value, &end, 10);
        if (*end || value[0] < '0' || value[0] > '9' || n < 1 || n > known[k].most)
            usage(argv[i - 1], "must be a whole number above 0, and not too large");
        *known[k].count = (uint32_t)n;
    }
    if (!flags->in || !flags->out)
        usage("", help);
}

/* Which of the two IN is, said before its bytes are taken for the other. What cannot be opened is said by who opens it. */
static void check_input(const struct quantize_flags *flags, bool wants_folder)
{
    struct stat st;
    if (stat(flags->in, &st) != 0)
        return;
    if (wants_folder && !S_ISDIR(st.st_mode))
        usage(flags->in, "is a file: --format w8a8, gptq-int4 and awq-int4 take a Hugging Face folder");
    if (!wants_folder && S_ISDIR(st.st_mode))
        usage(flags->in, "is a folder: --format q4_0 and bf16 take a GGUF file (of a folder: gptq-int4 --group 32)");
}

static bool is_folder(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* The format's own function; that of q8_0 goes by what IN is. */
static int (*function_of(const struct quantize_flags *flags))(const struct quantize_flags *flags, struct kvg_error *err)
{
    static const struct {
        const char *name;
        int (*quantize)(const struct quantize_flags *flags, struct kvg_error *err);
        bool calibrated;
    } known[] = {{"q8_0", quantize_gguf, false}, {"q4_0", quantize_gguf, true},    {"bf16", quantize_gguf, false},
                 {"w8a8", quantize_hf, true},    {"gptq-int4", quantize_hf, true}, {"awq-int4", quantize_hf, true}};
    for (size_t i = 0; flags->format && i < sizeof known / sizeof *known; i++) {
        if (strcmp(known[i].name, flags->format) != 0)
            continue;
        if (flags->calibration && !known[i].calibrated)
            usage("--calibration", "serves --format q4_0, w8a8, gptq-int4 and awq-int4 alone");
        if (flags->awq && (!flags->calibration || known[i].quantize != quantize_gguf))
            usage("--awq", "needs --calibration and --format q4_0");
        if (flags->act_order && (!flags->calibration || strcmp(flags->format, "gptq-int4") != 0))
            usage("--act-order", "needs --calibration and --format gptq-int4");
        if (strcmp(flags->format, "q8_0") == 0 && is_folder(flags->in))
            return quantize_hf;
        check_input(flags, known[i].quantize == quantize_hf);
        return known[i].quantize;
    }
    usage("--format", "must be one of q8_0, q4_0, bf16, w8a8, gptq-int4, awq-int4");
}

int main(int argc, char **argv)
{
    struct quantize_flags flags = {.tokens = 16384, .context = 512, .memory_mib = 4096, .group = 128};
    struct kvg_error err = {0};

    read_flags(&flags, argc, argv);
    if (flags.group < 8 || (flags.group & (flags.group - 1)))
        usage("--group", "must be a power of two from 8 to 128");
    log_set_level(LOG_WARN);
    temporary_watch(); /* where it cannot be had, an interrupted run leaves OUT.PID.part */
    if (flags.threads)
        openblas_set_num_threads((int)flags.threads); /* products of GPTQ and AWQ */
    int failed = function_of(&flags)(&flags, &err);
    if (failed)
        fprintf(stderr, "kvgate-quantize: %s\n", err.message);
    return failed ? 1 : 0;
}
