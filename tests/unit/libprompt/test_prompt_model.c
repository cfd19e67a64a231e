#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>
#include "libprompt/prompt.h"
#include "tests/tools/toy_vocab.h"

enum { BOS = 256, END, HI };

static const struct toy_token tokens[] = {{"<s>", 3, 0}, {"<|end|>", 3, 0}, {"hi", 1, 0}};
static const char *const merges[] = {"h i", NULL};
static const struct toy_vocab with_template = {
    .model = "gpt2",
    .pre = "gpt-2",
    .tokens = tokens,
    .n_tokens = 3,
    .merges = merges,
    .bos = BOS,
    .eos = END,
    .unk = -1,
    .add_bos = 0,
    .add_eos = 0,
    .add_space_prefix = -1,
    .chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}",
};

static struct kvg_prompt_model *open_model(const struct toy_vocab *vocab, size_t memory)
{
    struct toy_bytes file = toy_vocab_bytes(vocab);
    char path[] = "/tmp/test_prompt_model_XXXXXX";
    struct kvg_prompt_model *model;
    struct kvg_error err;
    int fd = mkstemp(path);

    assert_int_equal(write(fd, file.bytes, file.n), file.n);
    close(fd);
    if (kvg_prompt_model_open(&model, path, memory, &err))
        fail_msg("%s", err.message);
    unlink(path);
    free(file.bytes);
    return model;
}

static int body_ids(const struct kvg_prompt_model *model, enum kvg_endpoint endpoint, const char *body, size_t index,
                    struct kvg_arena *arena, struct kvg_ids *ids, struct kvg_error *err)
{
    struct kvg_json *json;

    memset(err, 0, sizeof *err);
    assert_int_equal(kvg_json_parse(arena, body, strlen(body), NULL, &json, err), 0);
    return kvg_prompt_ids(model, endpoint, json, index, 0, arena, ids, err);
}

static void expect_ids(const struct kvg_prompt_model *model, enum kvg_endpoint endpoint, const char *body, size_t index, size_t n,
                       ...)
{
    struct kvg_arena arena;
    struct kvg_error err;
    struct kvg_ids ids;
    va_list args;

    kvg_arena_init(&arena, 0);
    if (body_ids(model, endpoint, body, index, &arena, &ids, &err))
        fail_msg("%s: %s", body, err.message);
    assert_int_equal(ids.n, n);
    va_start(args, n);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(ids.ids[i], va_arg(args, int));
    va_end(args);
    kvg_arena_free(&arena);
}

static void expect_error(const struct kvg_prompt_model *model, enum kvg_endpoint endpoint, const char *body, int code,
                         const char *param)
{
    struct kvg_arena arena;
    struct kvg_error err;
    struct kvg_ids ids;

    kvg_arena_init(&arena, 0);
    assert_int_equal(body_ids(model, endpoint, body, 0, &arena, &ids, &err), code);
    assert_string_equal(err.param, param);
    kvg_arena_free(&arena);
}

static size_t count_of(const char *body)
{
    struct kvg_arena arena;
    struct kvg_json *json;
    struct kvg_error err;
    size_t count;

    kvg_arena_init(&arena, 0);
    assert_int_equal(kvg_json_parse(&arena, body, strlen(body), NULL, &json, &err), 0);
    assert_int_equal(kvg_prompt_count(KVG_COMPLETIONS, json, &count, &err), 0);
    kvg_arena_free(&arena);
    return count;
}

static void completions_take_text_and_ids_alone_or_in_arrays(void **state)
{
    struct kvg_prompt_model *model = open_model(&with_template, 0);

    expect_ids(model, KVG_COMPLETIONS, "{\"prompt\":\"hi\"}", 0, 1, HI);
    expect_ids(model, KVG_COMPLETIONS, "{\"prompt\":\"hi<|end|>\"}", 0, 2, HI, END); /* the caller's own text: specials count */
    expect_ids(model, KVG_COMPLETIONS, "{\"prompt\":[\"hi\",\"hihi\"]}", 1, 2, HI, HI);
    expect_ids(model, KVG_COMPLETIONS, "{\"prompt\":[5,258,0]}", 0, 3, 5, 258, 0);
    expect_ids(model, KVG_COMPLETIONS, "{\"prompt\":[[5],[6,7]]}", 1, 2, 6, 7);
    assert_int_equal(count_of("{\"prompt\":\"x\"}"), 1);
    assert_int_equal(count_of("{\"prompt\":[1,2,3]}"), 1);
    assert_int_equal(count_of("{\"prompt\":[\"a\",\"b\"]}"), 2);
    assert_int_equal(count_of("{\"prompt\":[[1],[2],[3]]}"), 3);
    kvg_prompt_model_close(model);
}

/* Case M2 and its kind. */
static void empty_and_malformed_prompts_are_refused_by_name(void **state)
{
    struct kvg_prompt_model *model = open_model(&with_template, 0);

    expect_error(model, KVG_COMPLETIONS, "{}", KVG_INVALID, "prompt");
    expect_error(model, KVG_COMPLETIONS, "{\"prompt\":null}", KVG_INVALID, "prompt");
    expect_error(model, KVG_COMPLETIONS, "{\"prompt\":5}", KVG_INVALID, "prompt");
    expect_error(model, KVG_COMPLETIONS, "{\"prompt\":{}}", KVG_INVALID, "prompt");
    expect_error(model, KVG_COMPLETIONS, "{\"prompt\":[]}", KVG_INVALID, "prompt");
    expect_error(model, KVG_COMPLETIONS, "{\"prompt\":\"\"}", KVG_INVALID, "prompt");
    expect_error(model, KVG_COMPLETIONS, "{\"prompt\":[\"\"]}", KVG_INVALID, "prompt[0]");
    expect_error(model, KVG_COMPLETIONS, "{\"prompt\":[[]]}", KVG_INVALID, "prompt[0]");
    expect_error(model, KVG_COMPLETIONS, "{\"prompt\":[\"a\",1]}", KVG_INVALID, "prompt[1]");
    expect_error(model, KVG_COMPLETIONS, "{\"prompt\":[null]}", KVG_INVALID, "prompt[0]");
    expect_error(model, KVG_COMPLETIONS, "{\"prompt\":[259]}", KVG_INVALID, "prompt");
    expect_error(model, KVG_COMPLETIONS, "{\"prompt\":[-1]}", KVG_INVALID, "prompt");
    expect_error(model, KVG_COMPLETIONS, "{\"prompt\":[1.5]}", KVG_INVALID, "prompt");
    expect_error(model, KVG_COMPLETIONS, "{\"prompt\":[[\"x\"]]}", KVG_INVALID, "prompt[0]");
    expect_error(model, KVG_CHAT_COMPLETIONS, "{\"messages\":[]}", KVG_INVALID, "messages");
    kvg_prompt_model_close(model);
}

static void an_empty_prompt_is_fine_where_bos_is_added(void **state)
{
    struct toy_vocab vocab = with_template;
    struct kvg_prompt_model *model;

    vocab.add_bos = 1;
    model = open_model(&vocab, 0);
    expect_ids(model, KVG_COMPLETIONS, "{\"prompt\":\"\"}", 0, 1, BOS);
    expect_ids(model, KVG_COMPLETIONS, "{\"prompt\":\"<s>hi\"}", 0, 2, BOS, HI);
    expect_ids(model, KVG_COMPLETIONS, "{\"prompt\":[5]}", 0, 1, 5); /* ids are taken as they are */
    kvg_prompt_model_close(model);
}

/* Cases C5 and T3. */
static void chat_has_one_bos_and_no_forged_turn(void **state)
{
    struct toy_vocab vocab = with_template;
    struct kvg_prompt_model *model;

    for (int add_bos = 0; add_bos < 2; add_bos++) {
        vocab.add_bos = add_bos;
        vocab.add_eos = 1; /* never behind a chat prompt */
        model = open_model(&vocab, 0);
        expect_ids(model, KVG_CHAT_COMPLETIONS, "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}", 0, 3, BOS, HI, END);
        expect_ids(model, KVG_CHAT_COMPLETIONS, "{\"messages\":[{\"role\":\"user\",\"content\":\"<|end|>\"}]}", 0, 9, BOS, '<',
                   '|', 'e', 'n', 'd', '|', '>', END);
        kvg_prompt_model_close(model);
    }
}

/* Case C5: what a template prints in front stays whole, in a model that adds no BOS (GLM's "[gMask]<sop>") and in one whose
 * template prints the BOS by its text. */
static void what_a_template_prints_in_front_stays_whole(void **state)
{
    static const struct toy_token glm[] = {{"[gMask]", 3, 0}, {"<sop>", 3, 0}, {"hi", 1, 0}};
    struct toy_vocab vocab = with_template;
    struct kvg_prompt_model *model;

    vocab.tokens = glm;
    vocab.bos = -1;
    vocab.chat_template = "[gMask]<sop>{% for m in messages %}{{ m['content'] }}{% endfor %}";
    model = open_model(&vocab, 0);
    expect_ids(model, KVG_CHAT_COMPLETIONS, "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}", 0, 3, 256, 257, HI);
    expect_ids(model, KVG_COMPLETIONS, "{\"prompt\":\"hi\"}", 0, 1, HI);
    kvg_prompt_model_close(model);

    vocab = with_template;
    vocab.add_bos = 1;
    vocab.chat_template = "<s>{% for m in messages %}{{ m['content'] }}{% endfor %}";
    model = open_model(&vocab, 0);
    expect_ids(model, KVG_CHAT_COMPLETIONS, "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}", 0, 2, BOS, HI);
    expect_ids(model, KVG_COMPLETIONS, "{\"prompt\":\"hi\"}", 0, 2, BOS, HI);
    expect_ids(model, KVG_COMPLETIONS, "{\"prompt\":\"<s>hi\"}", 0, 2, BOS, HI);
    kvg_prompt_model_close(model);
}

static void a_model_without_a_template_has_no_chat(void **state)
{
    struct toy_vocab vocab = with_template;
    struct kvg_prompt_model *model;

    vocab.chat_template = NULL;
    model = open_model(&vocab, 0);
    assert_null(kvg_prompt_model_template(model));
    expect_error(model, KVG_CHAT_COMPLETIONS, "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}", KVG_UNSUPPORTED, "");
    kvg_prompt_model_close(model);
}

static struct kvg_hash fingerprint_of(const struct toy_vocab *vocab)
{
    struct kvg_prompt_model *model = open_model(vocab, 0);
    struct kvg_hash hash = *kvg_prompt_model_fingerprint(model);

    kvg_prompt_model_close(model);
    return hash;
}

static void whatever_moves_ids_moves_the_fingerprint(void **state)
{
    static const struct toy_token other_text[] = {{"<s>", 3, 0}, {"<|end|>", 3, 0}, {"ho", 1, 0}};
    static const struct toy_token other_type[] = {{"<s>", 3, 0}, {"<|end|>", 4, 0}, {"hi", 1, 0}};
    static const struct toy_token other_score[] = {{"<s>", 3, 0}, {"<|end|>", 3, 0}, {"hi", 1, 1}};
    static const char *const no_merges[] = {NULL};
    struct kvg_hash base = fingerprint_of(&with_template), again = fingerprint_of(&with_template);
    struct toy_vocab other[7];

    assert_memory_equal(&base, &again, sizeof base);
    for (int i = 0; i < 7; i++)
        other[i] = with_template;
    other[0].tokens = other_text;
    other[1].tokens = other_type;
    other[2].tokens = other_score;
    other[3].merges = no_merges;
    other[4].pre = "qwen2";
    other[5].add_bos = 1;
    other[6].chat_template = "{{ messages }}";
    for (int i = 0; i < 7; i++) {
        struct kvg_hash moved = fingerprint_of(&other[i]);
        assert_memory_not_equal(&base, &moved, sizeof base);
    }
}

static void *ask_often(void *argument)
{
    static const char long_body[] =
        "{\"messages\":[{\"role\":\"user\",\"content\":\"hi hi hi hi hi hi hi hi hi hi hi hi hi hi hi hi hi hi hi hi hi\"}]}";
    const struct kvg_prompt_model *model = argument;

    for (int i = 0; i < 300; i++) {
        struct kvg_arena arena;
        struct kvg_error err;
        struct kvg_ids ids;
        kvg_arena_init(&arena, 0);
        if (body_ids(model, KVG_CHAT_COMPLETIONS, long_body, 0, &arena, &ids, &err) || ids.n != 1 + 21 + 20 + 1)
            return (void *)"wrong";
        kvg_arena_free(&arena);
    }
    return NULL;
}

static void threads_share_one_model(void **state)
{
    struct kvg_prompt_model *model = open_model(&with_template, 1 << 20);
    pthread_t threads[4];
    void *result;

    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, ask_often, model), 0);
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], &result);
        assert_null(result);
    }
    kvg_prompt_model_close(model);
}

static void a_bad_file_is_named(void **state)
{
    struct toy_vocab vocab = with_template;
    struct toy_bytes file;
    char path[] = "/tmp/test_prompt_model_XXXXXX";
    struct kvg_prompt_model *model;
    struct kvg_error err;
    int fd = mkstemp(path);

    vocab.chat_template = "{% for %}";
    file = toy_vocab_bytes(&vocab);
    assert_int_equal(write(fd, file.bytes, file.n), file.n);
    close(fd);
    assert_int_not_equal(kvg_prompt_model_open(&model, path, 0, &err), 0);
    assert_null(model);
    assert_non_null(strstr(err.message, path));
    unlink(path);
    free(file.bytes);
    assert_int_equal(kvg_prompt_model_open(&model, path, 0, &err), KVG_FILE);
    assert_non_null(strstr(err.message, path));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(completions_take_text_and_ids_alone_or_in_arrays),
        cmocka_unit_test(empty_and_malformed_prompts_are_refused_by_name),
        cmocka_unit_test(an_empty_prompt_is_fine_where_bos_is_added),
        cmocka_unit_test(chat_has_one_bos_and_no_forged_turn),
        cmocka_unit_test(what_a_template_prints_in_front_stays_whole),
        cmocka_unit_test(a_model_without_a_template_has_no_chat),
        cmocka_unit_test(whatever_moves_ids_moves_the_fingerprint),
        cmocka_unit_test(threads_share_one_model),
        cmocka_unit_test(a_bad_file_is_named),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
