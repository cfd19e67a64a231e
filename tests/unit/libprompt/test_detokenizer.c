#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "libprompt/tokenizer.h"
#include "tests/tools/toy_vocab.h"

struct world {
    struct toy_bytes file;
    struct kvg_gguf *gguf;
    struct kvg_tokenizer *tokenizer;
};

enum { SPACE_A = 256, CONTROL, BROKEN };

static const struct toy_token pieces[] = {{"▁a", 1, -1}, {"<s>", 3, 0}, {"\xc3\xa9\xe2\x82", 1, -2}};
static const struct toy_vocab spm = {.model = "llama",
                                     .tokens = pieces,
                                     .n_tokens = 3,
                                     .bos = -1,
                                     .eos = -1,
                                     .unk = -1,
                                     .add_bos = -1,
                                     .add_eos = -1,
                                     .add_space_prefix = -1};

static void open_world(struct world *w)
{
    struct kvg_error err;

    w->file = toy_vocab_bytes(&spm);
    if (kvg_gguf_parse(&w->gguf, w->file.bytes, w->file.n, &err) || kvg_tokenizer_open(&w->tokenizer, w->gguf, &err))
        fail_msg("%s", err.message);
}

static void close_world(struct world *w)
{
    kvg_tokenizer_close(w->tokenizer);
    kvg_gguf_close(w->gguf);
    free(w->file.bytes);
}

/* Feeds ids one by one and checks what each step gives, then what the end gives. */
static void expect_steps(struct kvg_detokenizer *d, const uint32_t *ids, const char *const *steps, size_t n, const char *end)
{
    char buf[64];

    for (size_t i = 0; i < n; i++) {
        size_t len = kvg_detokenize_step(d, ids[i], buf);
        assert_true(len <= KVG_DETOKENIZE_ROOM(kvg_token_bytes(d->tokenizer, ids[i], false).len));
        buf[len] = 0;
        assert_string_equal(buf, steps[i]);
    }
    buf[kvg_detokenize_end(d, buf)] = 0;
    assert_string_equal(buf, end);
}

/* Case S1. */
static void a_character_is_held_until_it_is_whole(void **state)
{
    struct world w;
    struct kvg_detokenizer d;

    open_world(&w);
    d = (struct kvg_detokenizer){.tokenizer = w.tokenizer};
    expect_steps(&d, (uint32_t[]){0xf0, 0x9f, 0x98, 0x81, '!'}, (const char *[]){"", "", "", "😁", "!"}, 5, "");
    d = (struct kvg_detokenizer){.tokenizer = w.tokenizer};
    expect_steps(&d, (uint32_t[]){BROKEN, 0xac}, (const char *[]){"é", "€"}, 2, "");
    close_world(&w);
}

static void what_can_never_become_a_character_is_one_replacement(void **state)
{
    struct world w;
    struct kvg_detokenizer d;

    open_world(&w);
    d = (struct kvg_detokenizer){.tokenizer = w.tokenizer};
    expect_steps(&d, (uint32_t[]){0xf0, 0x9f, 'x'}, (const char *[]){"", "", "\ufffdx"}, 3, "");
    d = (struct kvg_detokenizer){.tokenizer = w.tokenizer};
    expect_steps(&d, (uint32_t[]){0x80, 0xff, 0xc0}, (const char *[]){"\ufffd", "\ufffd", "\ufffd"}, 3, "");
    d = (struct kvg_detokenizer){.tokenizer = w.tokenizer};
    expect_steps(&d, (uint32_t[]){0xed, 0xa0, 0x80}, (const char *[]){"", "\ufffd\ufffd", "\ufffd"}, 3, "");
    d = (struct kvg_detokenizer){.tokenizer = w.tokenizer};
    expect_steps(&d, (uint32_t[]){0xe2, 0xe2, 0x82}, (const char *[]){"", "\ufffd", ""}, 3, "\ufffd");
    close_world(&w);
}

static void the_first_space_is_dropped_once_unless_text_is_continued(void **state)
{
    struct world w;
    struct kvg_detokenizer d;

    open_world(&w);
    d = (struct kvg_detokenizer){.tokenizer = w.tokenizer};
    expect_steps(&d, (uint32_t[]){CONTROL, SPACE_A, SPACE_A}, (const char *[]){"", "a", " a"}, 3, "");
    d = (struct kvg_detokenizer){.tokenizer = w.tokenizer, .keep_leading_space = true};
    expect_steps(&d, (uint32_t[]){SPACE_A, SPACE_A}, (const char *[]){" a", " a"}, 2, "");
    close_world(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_character_is_held_until_it_is_whole),
        cmocka_unit_test(what_can_never_become_a_character_is_one_replacement),
        cmocka_unit_test(the_first_space_is_dropped_once_unless_text_is_continued),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
