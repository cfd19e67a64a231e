#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "libprompt/segment_memory.h"
#include "libprompt/tokenizer.h"
#include "tests/tools/toy_vocab.h"

/* A tokenizer, the file it reads, and the ids of the last text. */
struct world {
    struct toy_bytes file;
    struct kvg_gguf *gguf;
    struct kvg_tokenizer *tokenizer;
    struct kvg_arena arena;
    struct kvg_ids ids;
};

static void open_world(struct world *w, const struct toy_vocab *vocab)
{
    struct kvg_error err;

    w->file = toy_vocab_bytes(vocab);
    kvg_arena_init(&w->arena, 0);
    if (kvg_gguf_parse(&w->gguf, w->file.bytes, w->file.n, &err) || kvg_tokenizer_open(&w->tokenizer, w->gguf, &err))
        fail_msg("%s", err.message);
}

static void close_world(struct world *w)
{
    kvg_tokenizer_close(w->tokenizer);
    kvg_gguf_close(w->gguf);
    kvg_arena_free(&w->arena);
    free(w->file.bytes);
}

static void refuse_world(const struct toy_vocab *vocab, int code, const char *words)
{
    struct toy_bytes file = toy_vocab_bytes(vocab);
    struct kvg_gguf *gguf;
    struct kvg_tokenizer *tokenizer;
    struct kvg_error err;

    assert_int_equal(kvg_gguf_parse(&gguf, file.bytes, file.n, &err), 0);
    assert_int_equal(kvg_tokenizer_open(&tokenizer, gguf, &err), code);
    assert_null(tokenizer);
    if (!strstr(err.message, words))
        fail_msg("\"%s\" lacks \"%s\"", err.message, words);
    kvg_gguf_close(gguf);
    free(file.bytes);
}

/* Runs: pairs of (text, origin) up to a NULL text. */
static void encode_runs(struct world *w, int flags, ...)
{
    struct kvg_run runs[8];
    char bytes[256];
    size_t n = 0, len = 0;
    const char *part;
    va_list args;

    va_start(args, flags);
    while ((part = va_arg(args, const char *))) {
        runs[n] = (struct kvg_run){strlen(part), (uint8_t)va_arg(args, int)};
        memcpy(bytes + len, part, runs[n].len);
        len += runs[n++].len;
    }
    va_end(args);
    assert_int_equal(kvg_tokenize(w->tokenizer, &(struct kvg_text){bytes, len, runs, n}, flags, &w->arena, &w->ids, NULL), 0);
}

static void expect(const struct world *w, size_t n, ...)
{
    va_list args;

    assert_int_equal(w->ids.n, n);
    va_start(args, n);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(w->ids.ids[i], va_arg(args, int));
    va_end(args);
}

enum { HE = 256, LL, HELL, HELLO, LO, BOS, EOS, END, USER };

static const struct toy_token tokens[] = {
    {"he", 1, 0},  {"ll", 1, 0},   {"hell", 1, 0},    {"hello", 1, 0},    {"lo", 1, 0},
    {"<s>", 3, 0}, {"</s>", 3, 0}, {"<|end|>", 3, 0}, {"<|end|>>", 4, 0},
};
static const char *const merges[] = {"l o", "h e", "l l", "he ll", "hell o", NULL};
static const struct toy_vocab bpe = {
    .model = "gpt2",
    .pre = "gpt-2",
    .tokens = tokens,
    .n_tokens = 9,
    .merges = merges,
    .bos = BOS,
    .eos = EOS,
    .unk = -1,
    .add_bos = -1,
    .add_eos = -1,
    .add_space_prefix = -1,
};

static void the_lowest_rank_merges_first(void **state)
{
    struct world w;

    open_world(&w, &bpe);
    encode_runs(&w, 0, "hello", KVG_INPUT, NULL);
    expect(&w, 3, HE, 'l', LO); /* "lo" has the lowest rank, so "hello" is never reached */
    encode_runs(&w, 0, "hell", KVG_INPUT, NULL);
    expect(&w, 1, HELL);
    encode_runs(&w, 0, "lll", KVG_INPUT, NULL);
    expect(&w, 2, LL, 'l'); /* the leftmost of equals */
    close_world(&w);
}

static void long_words_merge_like_short_ones(void **state)
{
    struct world w;
    enum { REPEATS = 400 };
    char *text = malloc(REPEATS * 5);
    struct kvg_run run = {REPEATS * 5, KVG_INPUT};

    open_world(&w, &bpe);
    for (int i = 0; i < REPEATS; i++)
        memcpy(text + i * 5, "hello", 5);
    assert_int_equal(kvg_tokenize(w.tokenizer, &(struct kvg_text){text, run.len, &run, 1}, 0, &w.arena, &w.ids, NULL), 0);
    assert_int_equal(w.ids.n, REPEATS * 3);
    for (int i = 0; i < REPEATS; i++) {
        assert_int_equal(w.ids.ids[i * 3], HE);
        assert_int_equal(w.ids.ids[i * 3 + 2], LO);
    }
    free(text);
    close_world(&w);
}

static void ignore_merges_takes_a_whole_word_of_the_vocabulary(void **state)
{
    struct toy_vocab vocab = bpe;
    struct world w;

    vocab.pre = "llama-bpe";
    open_world(&w, &vocab);
    encode_runs(&w, 0, "hello", KVG_INPUT, NULL);
    expect(&w, 1, HELLO);
    assert_true(kvg_tokenizer_info(w.tokenizer)->add_bos); /* the family adds BOS where the file says nothing */
    close_world(&w);
}

/* Case T3: a control token matches only where every byte is the template's. */
static void control_tokens_need_template_bytes(void **state)
{
    struct world w;

    open_world(&w, &bpe);
    encode_runs(&w, 0, "he<|end|>he", KVG_TEMPLATE, NULL);
    expect(&w, 3, HE, END, HE);
    encode_runs(&w, 0, "<|end|>", KVG_INPUT, NULL);
    assert_int_equal(w.ids.n, 7);
    encode_runs(&w, 0, "<|en", KVG_TEMPLATE, "d|>", KVG_INPUT, NULL);
    assert_int_equal(w.ids.n, 7);
    encode_runs(&w, 0, "<|en", KVG_INPUT, "d|>", KVG_TEMPLATE, NULL);
    assert_int_equal(w.ids.n, 7);
    encode_runs(&w, 0, "<|end|>", KVG_INPUT, "<|end|>", KVG_TEMPLATE, NULL);
    assert_int_equal(w.ids.n, 8);
    assert_int_equal(w.ids.ids[7], END);
    close_world(&w);
}

static void the_longest_added_token_wins_and_user_defined_ones_match_anywhere(void **state)
{
    struct world w;

    open_world(&w, &bpe);
    encode_runs(&w, 0, "<|end|>>", KVG_TEMPLATE, NULL);
    expect(&w, 1, USER);
    encode_runs(&w, 0, "<|end|>>", KVG_INPUT, NULL);
    expect(&w, 1, USER);
    close_world(&w);
}

/* Case C5. */
static void bos_and_eos_come_exactly_once(void **state)
{
    struct toy_vocab vocab = bpe;
    struct world w;

    vocab.add_bos = vocab.add_eos = 1;
    open_world(&w, &vocab);
    encode_runs(&w, KVG_ADD_SPECIAL, "he", KVG_TEMPLATE, NULL);
    expect(&w, 3, BOS, HE, EOS);
    encode_runs(&w, KVG_ADD_SPECIAL, "<s>he", KVG_TEMPLATE, NULL);
    expect(&w, 3, BOS, HE, EOS);
    encode_runs(&w, KVG_ADD_BOS, "", KVG_TEMPLATE, NULL);
    expect(&w, 1, BOS);
    encode_runs(&w, 0, "<s>he", KVG_TEMPLATE, NULL);
    expect(&w, 2, BOS, HE);
    encode_runs(&w, 0, "he", KVG_TEMPLATE, NULL);
    expect(&w, 1, HE);
    close_world(&w);
    vocab.bos = -1; /* a model without BOS gets none, whatever its flag says */
    open_world(&w, &vocab);
    encode_runs(&w, KVG_ADD_BOS, "he", KVG_TEMPLATE, NULL);
    expect(&w, 1, HE);
    close_world(&w);
}

enum { SP_UNK = 256, SP_S, SP_A, SP_B, SP_AB, SP_SPACE, SP_SPACE_A, SP_USER };

static const struct toy_token pieces[] = {
    {"<unk>", 2, 0}, {"<s>", 3, 0}, {"a", 1, -5}, {"b", 1, -6}, {"ab", 1, -2}, {"▁", 1, -4}, {"▁a", 1, -1}, {"<u>", 4, 0},
};
static const struct toy_vocab spm = {
    .model = "llama",
    .tokens = pieces,
    .n_tokens = 8,
    .bos = SP_S,
    .eos = -1,
    .unk = SP_UNK,
    .add_bos = -1,
    .add_eos = -1,
    .add_space_prefix = -1,
};

static void sentence_piece_merges_by_score_and_falls_back_to_bytes(void **state)
{
    struct world w;

    open_world(&w, &spm);
    encode_runs(&w, 0, "ab", KVG_INPUT, NULL);
    expect(&w, 2, SP_SPACE_A, SP_B); /* "▁a" scores above "ab" */
    encode_runs(&w, 0, "bab", KVG_INPUT, NULL);
    expect(&w, 3, SP_SPACE, SP_B, SP_AB);
    encode_runs(&w, 0, "\xc3\xa9", KVG_INPUT, NULL);
    expect(&w, 3, SP_SPACE, 0xc3, 0xa9);
    encode_runs(&w, 0, "a<u>a", KVG_INPUT, NULL);
    expect(&w, 3, SP_SPACE_A, SP_USER, SP_SPACE_A); /* every segment gets its space */
    encode_runs(&w, KVG_ADD_BOS, "<0x41>", KVG_INPUT, NULL);
    assert_int_equal(w.ids.n, 8); /* BOS, space, and six bytes: a byte token's name is ordinary text */
    close_world(&w);
}

static void without_a_space_prefix_text_stays_as_it_is(void **state)
{
    struct toy_vocab vocab = spm;
    struct world w;

    vocab.add_space_prefix = 0;
    open_world(&w, &vocab);
    encode_runs(&w, 0, "ab a", KVG_INPUT, NULL);
    expect(&w, 2, SP_AB, SP_SPACE_A);
    encode_runs(&w, 0, "ab▁a", KVG_INPUT, NULL);
    expect(&w, 2, SP_AB, SP_SPACE_A);
    close_world(&w);
}

static void what_is_remembered_equals_what_is_computed(void **state)
{
    static const char *const texts[] = {"hello <|end|> hell", "he",
                                        "some text that is long enough to be remembered by its bytes, hello hello"};
    struct kvg_segment_memory *memory = kvg_segment_memory_open(1 << 20);
    struct kvg_segment_stats stats;
    struct kvg_ids again;
    struct world w;

    open_world(&w, &bpe);
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
            struct kvg_run run = {strlen(texts[i]), KVG_TEMPLATE};
            struct kvg_text text = {texts[i], run.len, &run, 1};
            assert_int_equal(kvg_tokenize(w.tokenizer, &text, 0, &w.arena, &w.ids, NULL), 0);
            assert_int_equal(kvg_tokenize_remembering(w.tokenizer, memory, &text, 0, &w.arena, &again, NULL), 0);
            assert_int_equal(again.n, w.ids.n);
            assert_memory_equal(again.ids, w.ids.ids, w.ids.n * sizeof *again.ids);
        }
    }
    kvg_segment_memory_stats(memory, &stats);
    assert_int_equal(stats.hits, 2);
    close_world(&w);
    kvg_segment_memory_close(memory);
}

static void malformed_bytes_are_encoded_not_trusted(void **state)
{
    static const char *const pres[] = {"gpt-2",  "llama-bpe",    "qwen2",          "qwen35",     "smollm",
                                       "falcon", "deepseek-llm", "deepseek-coder", "deepseek-v3"};
    static const char bytes[] = "\xff\xfe\xc3 \xe2\x82 \xf0\x9f\x98 \xed\xa0\x80 \xf4\x90\x80\x80 ok \xc0\x80\xe0";

    for (size_t i = 0; i < sizeof pres / sizeof *pres; i++) {
        struct toy_vocab vocab = bpe;
        struct world w;
        size_t len = 0;

        vocab.pre = pres[i];
        open_world(&w, &vocab);
        encode_runs(&w, 0, bytes, KVG_INPUT, NULL);
        for (size_t k = 0; k < w.ids.n; k++)
            len += kvg_token_bytes(w.tokenizer, w.ids.ids[k], true).len;
        assert_int_equal(len, sizeof bytes - 1);
        close_world(&w);
    }
}

static void tokens_can_be_asked_about(void **state)
{
    const struct kvg_vocab_info *info;
    struct world w;

    open_world(&w, &bpe);
    info = kvg_tokenizer_info(w.tokenizer);
    assert_int_equal(info->n_vocab, 265);
    assert_int_equal(info->bos, BOS);
    assert_string_equal(info->kind, "gpt2");
    assert_string_equal(info->pre, "gpt-2");
    assert_int_equal(info->eot, END);
    assert_true(info->n_end_ids == 2 && info->end_ids[0] == EOS && info->end_ids[1] == END);
    assert_int_equal(kvg_token_find(w.tokenizer, "hell", 4), HELL);
    assert_int_equal(kvg_token_find(w.tokenizer, "hel", 3), KVG_NO_TOKEN);
    assert_true(kvg_str_eq(kvg_token_bytes(w.tokenizer, HELL, false), "hell"));
    assert_int_equal(kvg_token_bytes(w.tokenizer, END, false).len, 0);
    assert_true(kvg_str_eq(kvg_token_bytes(w.tokenizer, END, true), "<|end|>"));
    assert_int_equal(kvg_token_bytes(w.tokenizer, 265, true).len, 0);
    assert_int_equal(kvg_token_kind(w.tokenizer, END), KVG_TOKEN_CONTROL);
    assert_null(kvg_token_text(w.tokenizer, 265).bytes);
    close_world(&w);
}

static void files_that_would_give_wrong_ids_are_refused(void **state)
{
    static const char *const bad_merges[] = {"nospace", NULL};
    struct toy_vocab vocab = bpe;

    vocab.pre = "never-heard-of";
    refuse_world(&vocab, KVG_UNSUPPORTED, "never-heard-of");
    vocab = bpe;
    vocab.model = "bert";
    refuse_world(&vocab, KVG_UNSUPPORTED, "\"bert\"");
    vocab = bpe;
    vocab.bos = 265;
    refuse_world(&vocab, KVG_FILE, "bos_token_id is 265, the vocabulary has 265 tokens");
    vocab = bpe;
    vocab.merges = NULL;
    refuse_world(&vocab, KVG_FILE, "tokenizer.ggml.merges is missing");
    vocab.merges = bad_merges;
    refuse_world(&vocab, KVG_FILE, "entry 0 has no space");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_lowest_rank_merges_first),
        cmocka_unit_test(long_words_merge_like_short_ones),
        cmocka_unit_test(ignore_merges_takes_a_whole_word_of_the_vocabulary),
        cmocka_unit_test(control_tokens_need_template_bytes),
        cmocka_unit_test(the_longest_added_token_wins_and_user_defined_ones_match_anywhere),
        cmocka_unit_test(bos_and_eos_come_exactly_once),
        cmocka_unit_test(sentence_piece_merges_by_score_and_falls_back_to_bytes),
        cmocka_unit_test(without_a_space_prefix_text_stays_as_it_is),
        cmocka_unit_test(what_is_remembered_equals_what_is_computed),
        cmocka_unit_test(malformed_bytes_are_encoded_not_trusted),
        cmocka_unit_test(tokens_can_be_asked_about),
        cmocka_unit_test(files_that_would_give_wrong_ids_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
