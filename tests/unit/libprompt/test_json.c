#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cmocka.h>
#include "libprompt/json.h"
#include "libprompt/utf8.h"

static struct kvg_arena arena;
static struct kvg_error err;

static int setup(void **state)
{
    kvg_arena_init(&arena, 0);
    memset(&err, 0, sizeof err);
    return 0;
}

static int teardown(void **state)
{
    kvg_arena_free(&arena);
    return 0;
}

static struct kvg_json *parse_n(const char *text, size_t n, int want)
{
    struct kvg_json *out = NULL;
    int rc = kvg_json_parse(&arena, text, n, NULL, &out, &err);
    if (rc != want)
        fail_msg("'%.60s': got %d (%s), want %d", text, rc, rc ? err.message : "", want);
    return rc == 0 ? out : NULL;
}

static struct kvg_json *parse(const char *text)
{
    return parse_n(text, strlen(text), 0);
}

/* Compact JSON text of a tree. */
static void dump(const struct kvg_json *value, struct kvg_buf *buf)
{
    static const char *const words[] = {"null", "false", "true"};
    switch (value->type) {
    case KVG_JSON_NUMBER:
        kvg_buf_add(buf, value->str.bytes, value->str.len);
        break;
    case KVG_JSON_STRING:
        kvg_buf_json_string(buf, value->str.bytes, value->str.len);
        break;
    case KVG_JSON_ARRAY:
    case KVG_JSON_OBJECT:
        kvg_buf_puts(buf, value->type == KVG_JSON_ARRAY ? "[" : "{");
        for (uint32_t i = 0; i < value->n; i++) {
            kvg_buf_puts(buf, i ? "," : "");
            if (value->type == KVG_JSON_OBJECT) {
                kvg_buf_json_string(buf, value->items[i].key.bytes, value->items[i].key.len);
                kvg_buf_puts(buf, ":");
            }
            dump(&value->items[i], buf);
        }
        kvg_buf_puts(buf, value->type == KVG_JSON_ARRAY ? "]" : "}");
        break;
    default:
        kvg_buf_puts(buf, words[value->type]);
    }
}

static void assert_dump(const struct kvg_json *value, const char *want)
{
    struct kvg_buf buf = {0};
    dump(value, &buf);
    assert_false(buf.failed);
    assert_string_equal(buf.bytes, want);
    kvg_buf_free(&buf);
}

static void well_formed_documents_parse(void **state)
{
    static const char *const cases[][2] = {
        {"null", "null"},
        {" \t\r\n true ", "true"},
        {"-0", "-0"},
        {"1.5e+10", "1.5e+10"},
        {"0E-1", "0E-1"},
        {"\"\"", "\"\""},
        {"\"a\\u00e9\\n\\/\\\"\\\\\"", "\"a\xc3\xa9\\n/\\\"\\\\\""},
        {"\"\\ud83d\\ude00\"", "\"\xf0\x9f\x98\x80\""},
        {"\"\\b\\f\\r\\t\"", "\"\\b\\f\\r\\t\""},
        {"\"\\u0000x\"", "\"\\u0000x\""},
        {"\"\\uFFFF\"", "\"\xef\xbf\xbf\""},
        {"[]", "[]"},
        {"[ ]", "[]"},
        {"{ }", "{}"},
        {"[1, [2, [3], {}], \"x\"]", "[1,[2,[3],{}],\"x\"]"},
        {"{\"a\": {\"b\": [null, false]}, \"c\": -1}", "{\"a\":{\"b\":[null,false]},\"c\":-1}"},
        {"{\"\": 1, \"\xe4\xbd\xa0\": 2}", "{\"\":1,\"\xe4\xbd\xa0\":2}"},
        {"\"\x7f\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xf0\x90\x80\x80\xf4\x8f\xbf\xbf\"",
         "\"\\u007f\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xf0\x90\x80\x80\xf4\x8f\xbf\xbf\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_dump(parse(cases[i][0]), cases[i][1]);
}

static void malformed_documents_are_refused_with_their_position(void **state)
{
    static const struct {
        const char *text;
        size_t position;
    } cases[] = {
        {"", 0},
        {"  ", 2},
        {"nul", 3},
        {"nulL", 3},
        {"nullx", 4},
        {"NaN", 0},
        {"-NaN", 1},
        {"Infinity", 0},
        {"-Infinity", 1},
        {"01", 1},
        {"-", 1},
        {"1.", 2},
        {".5", 0},
        {"+1", 0},
        {"1e", 2},
        {"1e+", 3},
        {"0x10", 1},
        {"[1,]", 3},
        {"[,1]", 1},
        {"[1 2]", 3},
        {"[1}", 2},
        {"{\"a\":1,}", 7},
        {"{\"a\" 1}", 5},
        {"{a:1}", 1},
        {"{1:1}", 1},
        {"{\"a\":}", 5},
        {"{\"a\"}", 4},
        {"{\"a\":1]", 6},
        {"[]]", 2},
        {"{} {}", 3},
        {"'a'", 0},
        {"\"a\nb\"", 2},
        {"\"a\x1f\"", 2},
        {"\"\\x\"", 1},
        {"\"\\u12g4\"", 1},
        {"\"\\u12\"", 1},
        {"\"\\ud800\"", 1},
        {"\"\\ud800x\"", 1},
        {"\"\\ud800\\n\"", 1},
        {"\"\\ud800\\u0041\"", 1},
        {"\"\\ud800\\ud800\"", 1},
        {"\"\\udc00\"", 1},
        {"\"a\\udfff\"", 2},
        {"\"\x80\"", 1},
        {"\"\xc0\xaf\"", 1},
        {"\"\xc1\xbf\"", 1},
        {"\"\xe0\x80\xaf\"", 1},
        {"\"\xe0\x9f\xbf\"", 1},
        {"\"\xed\xa0\x80\"", 1},
        {"\"\xed\xbf\xbf\"", 1},
        {"\"\xf0\x80\x80\xaf\"", 1},
        {"\"\xf0\x8f\xbf\xbf\"", 1},
        {"\"\xf4\x90\x80\x80\"", 1},
        {"\"\xf5\x80\x80\x80\"", 1},
        {"\"\xff\"", 1},
        {"\"ab\xe4\xbd\"", 3},
        {"\xef\xbb\xbf{}", 0},
        {"\xc2\xa0{}", 0},
        {"// c\n1", 0},
        {"{\"\xff\":1}", 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        parse_n(cases[i].text, strlen(cases[i].text), KVG_INVALID);
        if (err.position != cases[i].position)
            fail_msg("'%s': position %zu, want %zu (%s)", cases[i].text, err.position, cases[i].position, err.message);
    }
    parse_n("\"\0\"", 3, KVG_INVALID);
    parse_n("1\0", 2, KVG_INVALID);
}

static void a_duplicate_is_refused_by_name_where_keys_must_be_unique(void **state)
{
    static const struct kvg_json_limits limits = {.unique_keys = true};
    static const char small[] = "{\"a\": {\"b\": 1, \"c\": 2, \"b\": 3}}";
    struct kvg_json *out;
    char large[4096];
    size_t n = 1;

    assert_int_equal(kvg_json_parse(&arena, small, strlen(small), &limits, &out, &err), KVG_INVALID);
    assert_non_null(strstr(err.message, "\"b\" occurs twice"));
    large[0] = '{';
    for (int i = 0; i < 200; i++)
        n += (size_t)sprintf(large + n, "\"k%d\":%d,", i, i);
    strcpy(large + n, "\"k42\":0}");
    assert_int_equal(kvg_json_parse(&arena, large, strlen(large), &limits, &out, &err), KVG_INVALID);
    assert_non_null(strstr(err.message, "\"k42\" occurs twice"));
    strcpy(large + n, "\"other\":0}");
    assert_int_equal(kvg_json_parse(&arena, large, strlen(large), &limits, &out, &err), 0);
}

static void the_last_duplicate_wins_in_the_place_of_the_first(void **state)
{
    assert_dump(parse("{\"a\":1,\"b\":2,\"a\":3}"), "{\"a\":3,\"b\":2}");
    assert_dump(parse("{\"a\":1,\"\\u0061\":{\"a\":1,\"a\":2},\"c\":4}"), "{\"a\":{\"a\":2},\"c\":4}");
    struct kvg_buf text = {0}, want = {0};
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < 500; i++)
            kvg_buf_printf(&text, "%s\"k%d\":%d", pass + i ? "," : "{", i, pass * 1000 + i);
    kvg_buf_puts(&text, "}");
    for (int i = 0; i < 500; i++)
        kvg_buf_printf(&want, "%s\"k%d\":%d", i ? "," : "{", i, 1000 + i);
    kvg_buf_puts(&want, "}");
    assert_dump(parse_n(text.bytes, text.len, 0), want.bytes);
    kvg_buf_free(&text);
    kvg_buf_free(&want);
}

static void values_know_their_bytes_and_plain_strings_are_slices(void **state)
{
    const char *text = " {\"a\" : [10, \"xy\"], \"b\":\"q\\n\" }";
    struct kvg_json *root = parse(text);
    assert_int_equal(root->start, 1);
    assert_int_equal(root->end, strlen(text));
    struct kvg_json *a = kvg_json_get(root, "a"), *b = kvg_json_get(root, "b");
    assert_memory_equal(text + a->start, "[10, \"xy\"]", a->end - a->start);
    assert_memory_equal(text + a->items[0].start, "10", a->items[0].end - a->items[0].start);
    assert_memory_equal(text + b->start, "\"q\\n\"", b->end - b->start);
    assert_ptr_equal(a->items[1].str.bytes, text + a->items[1].start + 1);
    assert_ptr_equal(a->key.bytes, text + 3);
    assert_true(kvg_str_eq(b->str, "q\n"));
    assert_null(kvg_json_get(root, "c"));
    assert_null(kvg_json_get(a, "a"));
    assert_null(kvg_json_get(NULL, "a"));
}

/* Text that ends at an unreadable page. */
static char *guarded(const char *text, size_t n, char **map, size_t *map_len)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), body = (n + page - 1) / page * page;
    *map_len = body + page;
    *map = mmap(NULL, *map_len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(*map, MAP_FAILED);
    assert_int_equal(mprotect(*map + body, page, PROT_NONE), 0);
    return memcpy(*map + body - n, text, n);
}

static void a_document_cut_at_any_byte_is_refused_and_never_overread(void **state)
{
    const char *text = "{\"messages\": [{\"role\": \"user\", \"content\": \"a long plain run of text, \\u00e9 \\ud83d\\ude00 "
                       "\xe4\xbd\xa0\xf0\x9f\x98\x80 end\"}], \"t\": -1.25e-3, \"x\": [true, false, null, {}]}";
    size_t n = strlen(text), map_len;
    char *map;
    for (size_t cut = 0; cut <= n; cut++) {
        char *copy = guarded(text, cut, &map, &map_len);
        struct kvg_json *out;
        int rc = kvg_json_parse(&arena, copy, cut, NULL, &out, &err);
        assert_int_equal(rc, cut < n ? KVG_INVALID : 0);
        if (cut < n)
            assert_true(err.position <= cut);
        munmap(map, map_len);
        kvg_arena_free(&arena);
    }
}

static char *repeat(const char *unit, size_t times, const char *tail, size_t *n)
{
    size_t len = strlen(unit);
    char *text = malloc(len * times + strlen(tail) + 1);
    for (size_t i = 0; i < times; i++)
        memcpy(text + i * len, unit, len);
    strcpy(text + len * times, tail);
    *n = strlen(text);
    return text;
}

static void depth_is_limited_however_the_nesting_is_written(void **state)
{
    static const struct {
        const char *unit;
        size_t times;
    } cases[] = {{"[", 1000000}, {"{\"x\":", 100000}, {"[{\"a\":", 100000}, {"[0,", 300000}, {"[[],", 257}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t n;
        char *text = repeat(cases[i].unit, cases[i].times, "", &n);
        parse_n(text, n, KVG_LIMIT);
        free(text);
    }
    size_t n, m;
    char *open = repeat("[", 256, "", &n), *close = repeat("]", 256, "", &m);
    struct kvg_buf text = {0};
    kvg_buf_add(&text, open, n);
    kvg_buf_add(&text, close, m);
    parse_n(text.bytes, text.len, 0);
    struct kvg_json *out;
    assert_int_equal(kvg_json_parse(&arena, text.bytes, text.len, &(struct kvg_json_limits){.depth = 255}, &out, &err),
                     KVG_LIMIT);
    assert_int_equal(err.position, 255);
    kvg_buf_free(&text);
    free(open);
    free(close);
}

static void a_million_members_and_a_million_digits_parse(void **state)
{
    struct kvg_buf text = {0};
    for (int i = 0; i < 1000000; i++)
        kvg_buf_printf(&text, "%c\"k%d\":%d", i ? ',' : '{', i, i);
    kvg_buf_puts(&text, "}");
    struct kvg_json *root = parse_n(text.bytes, text.len, 0);
    assert_int_equal(root->n, 1000000);
    assert_true(kvg_str_eq(root->items[999999].key, "k999999"));
    kvg_buf_free(&text);

    size_t n;
    char *digits = repeat("7", 1000000, "", &n);
    double d;
    int64_t i;
    struct kvg_json *number = parse_n(digits, n, 0);
    assert_int_equal(number->str.len, 1000000);
    assert_false(kvg_json_int(number, &i));
    assert_false(kvg_json_double(number, &d));
    free(digits);
}

static void the_number_of_values_is_limited(void **state)
{
    struct kvg_json *out;
    const struct kvg_json_limits limits = {.values = 4};
    assert_int_equal(kvg_json_parse(&arena, "[1,2,3]", 7, &limits, &out, &err), 0);
    assert_int_equal(kvg_json_parse(&arena, "[1,2,3,4]", 9, &limits, &out, &err), KVG_LIMIT);
}

static void an_arena_limit_is_an_error_not_a_crash(void **state)
{
    const char *text = "{\"a\":[1,2,3,\"x\\ny\"],\"b\":{\"c\":[[[]]]}}";
    for (size_t limit = 16;; limit += 16) {
        struct kvg_arena small;
        kvg_arena_init(&small, limit);
        struct kvg_json *out;
        int rc = kvg_json_parse(&small, text, strlen(text), NULL, &out, &err);
        kvg_arena_free(&small);
        if (rc == 0)
            break;
        assert_int_equal(rc, KVG_NOMEM);
        assert_true(limit < 4096);
    }
}

static void numbers_convert_only_where_they_fit(void **state)
{
    static const struct {
        const char *text;
        bool is_int;
        int64_t i;
        bool is_double;
        double d;
    } cases[] = {
        {"0", true, 0, true, 0},
        {"-0", true, 0, true, -0.0},
        {"9223372036854775807", true, INT64_MAX, true, 9223372036854775807.0},
        {"-9223372036854775808", true, INT64_MIN, true, -9223372036854775808.0},
        {"9223372036854775808", false, 0, true, 9223372036854775808.0},
        {"-9223372036854775809", false, 0, true, -9223372036854775808.0},
        {"1.0", false, 0, true, 1},
        {"1e3", false, 0, true, 1000},
        {"1e999", false, 0, false, 0},
        {"-1e999", false, 0, false, 0},
        {"1e-999", false, 0, true, 0},
        {"\"5\"", false, 0, false, 0},
        {"null", false, 0, false, 0},
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        struct kvg_json *value = parse(cases[k].text);
        int64_t i = 77;
        double d = 77;
        assert_int_equal(kvg_json_int(value, &i), cases[k].is_int);
        assert_int_equal(kvg_json_double(value, &d), cases[k].is_double);
        assert_true(i == (cases[k].is_int ? cases[k].i : 77));
        assert_true(d == (cases[k].is_double ? cases[k].d : 77));
    }
    assert_false(kvg_json_int(NULL, &(int64_t){0}));
}

static void every_code_point_survives_the_writer_and_the_parser(void **state)
{
    struct kvg_buf raw = {0}, text = {0};
    for (uint32_t c = 0; c <= 0x10ffff; c += c < 0x3000 ? 1 : 37) {
        char bytes[4];
        if (c < 0xd800 || c > 0xdfff)
            kvg_buf_add(&raw, bytes, kvg_utf8_encode(c, bytes));
    }
    kvg_buf_json_string(&text, raw.bytes, raw.len);
    struct kvg_json *value = parse_n(text.bytes, text.len, 0);
    assert_int_equal(value->str.len, raw.len);
    assert_memory_equal(value->str.bytes, raw.bytes, raw.len);
    kvg_buf_free(&raw);
    kvg_buf_free(&text);
}

static void the_writer_turns_broken_bytes_into_replacement_characters(void **state)
{
    struct kvg_buf buf = {0};
    kvg_buf_json_string(&buf, "a\xff\xe4\xbd z\xed\xa0\x80", 9);
    assert_string_equal(buf.bytes, "\"a\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd z\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\"");
    kvg_buf_free(&buf);
}

static void the_buffer_grows_over_every_size(void **state)
{
    struct kvg_buf buf = {0};
    for (int i = 0; i < 5000; i++)
        kvg_buf_printf(&buf, "%d,", i);
    assert_int_equal(buf.len, 10 * 2 + 90 * 3 + 900 * 4 + 4000 * 5);
    assert_int_equal(strlen(buf.bytes), buf.len);
    assert_string_equal(buf.bytes + buf.len - 10, "4998,4999,");
    kvg_buf_free(&buf);
    kvg_buf_printf(&buf, "%600d", 1);
    assert_int_equal(buf.len, 600);
    kvg_buf_free(&buf);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(well_formed_documents_parse),
        TEST(malformed_documents_are_refused_with_their_position),
        TEST(a_duplicate_is_refused_by_name_where_keys_must_be_unique),
        TEST(the_last_duplicate_wins_in_the_place_of_the_first),
        TEST(values_know_their_bytes_and_plain_strings_are_slices),
        TEST(a_document_cut_at_any_byte_is_refused_and_never_overread),
        TEST(depth_is_limited_however_the_nesting_is_written),
        TEST(a_million_members_and_a_million_digits_parse),
        TEST(the_number_of_values_is_limited),
        TEST(an_arena_limit_is_an_error_not_a_crash),
        TEST(numbers_convert_only_where_they_fit),
        TEST(every_code_point_survives_the_writer_and_the_parser),
        TEST(the_writer_turns_broken_bytes_into_replacement_characters),
        TEST(the_buffer_grows_over_every_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
