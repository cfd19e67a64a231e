/* limit.c: what is sent, and that no reply of whatever shape is taken for an answer that it is not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "redis-schemas/limit.h"

static void arguments_are_in_the_scripts_order(void **state)
{
    struct kvg_limit_query query = {
        .prefix = "kvgate:", .id = "0123456789012345678901234567890123456789", .tokens = 12, .tokens_rate = {0.5, 30}};
    const char *expected[] = {"EVALSHA", kvg_script(KVG_SCRIPT_LIMIT)->sha1,
                              "1",       "kvgate:limit:{0123456789012345678901234567890123456789}",
                              "12",      "",
                              "",        "0.5",
                              "30"};
    struct kvg_arena arena;
    const char **argv;
    size_t *len;
    int argc;
    kvg_arena_init(&arena, 0);
    assert_int_equal(kvg_limit_argv(&query, &arena, &argc, &argv, &len), 0);
    assert_int_equal(argc, 9);
    for (int i = 0; i < argc; i++) {
        assert_int_equal(len[i], strlen(expected[i]));
        assert_memory_equal(argv[i], expected[i], len[i]);
    }
    kvg_arena_free(&arena);
}

/* A reply of strings; NULL = nil. */
static int parse(const char *const *texts, size_t n, struct kvg_limit_reply *out)
{
    redisReply items[8] = {0}, *pointers[8], reply = {.type = REDIS_REPLY_ARRAY, .elements = n, .element = pointers};
    struct kvg_error err;
    for (size_t i = 0; i < n; i++) {
        items[i].type = texts[i] ? REDIS_REPLY_STRING : REDIS_REPLY_NIL;
        items[i].str = (char *)texts[i];
        items[i].len = texts[i] ? strlen(texts[i]) : 0;
        pointers[i] = &items[i];
    }
    return kvg_limit_parse(&reply, out, &err);
}

static void an_answer_is_read(void **state)
{
    struct kvg_limit_reply out;
    assert_int_equal(parse((const char *[]){"tokens", "1.5", "", "", "70", "0.25"}, 6, &out), 0);
    assert_string_equal(out.why, "tokens");
    assert_true(out.retry_after == 1.5 && out.requests.left == -1 && out.requests.full == -1);
    assert_true(out.tokens.left == 70 && out.tokens.full == 0.25);
}

static void nonsense_is_no_answer(void **state)
{
    struct kvg_limit_reply out;
    struct kvg_error err;
    redisReply error = {.type = REDIS_REPLY_ERROR, .str = "OOM command not allowed", .len = 23},
               text = {.type = REDIS_REPLY_STRING, .str = "ok"};
    assert_int_equal(kvg_limit_parse(NULL, &out, &err), KVG_INVALID);
    assert_int_equal(kvg_limit_parse(&text, &out, &err), KVG_INVALID);
    assert_int_equal(kvg_limit_parse(&error, &out, &err), KVG_INVALID);
    assert_non_null(strstr(err.message, "OOM"));
    assert_int_equal(parse((const char *[]){"ok", "0"}, 2, &out), KVG_INVALID);
    assert_int_equal(parse((const char *[]){NULL, "0", "1", "1", "1", "1"}, 6, &out), KVG_INVALID);
    assert_int_equal(parse((const char *[]){"perhaps", "0", "1", "1", "1", "1"}, 6, &out), KVG_INVALID);
    /* numbers that are none count as "not limited", and never as a time to wait for ever */
    assert_int_equal(parse((const char *[]){"ok", "nan", "1e99", "x", NULL, "-7"}, 6, &out), 0);
    assert_true(out.retry_after == -1 && out.requests.left == -1 && out.requests.full == -1 && out.tokens.left == -1 &&
                out.tokens.full == -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(arguments_are_in_the_scripts_order),
        cmocka_unit_test(an_answer_is_read),
        cmocka_unit_test(nonsense_is_no_answer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
