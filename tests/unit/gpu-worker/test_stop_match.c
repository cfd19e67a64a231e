/* Stop strings over pieces of text: the cases one by one, then every way of cutting random text against a plain search. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "gpu-worker/engine/stop_match.h"

struct world {
    struct kvg_arena arena;
    struct stop_set set;
    struct stop_match match;
    char out[4096];
    size_t n_out;
    int found;
};

static void begin(struct world *w, const char *const *stops, size_t n)
{
    size_t lens[8];

    for (size_t i = 0; i < n; i++)
        lens[i] = strlen(stops[i]);
    kvg_arena_init(&w->arena, 0);
    assert_int_equal(stop_set_init(&w->set, &w->arena, stops, lens, n), 0);
    assert_int_equal(stop_match_init(&w->match, &w->arena, &w->set), 0);
    w->n_out = 0;
    w->found = STOP_NONE;
}

static void feed(struct world *w, const char *text, size_t n, bool include)
{
    assert_int_equal(w->found, STOP_NONE);
    w->n_out += stop_feed(&w->match, text, n, include, w->out + w->n_out, &w->found);
    w->out[w->n_out] = '\0';
}

static void flush(struct world *w)
{
    w->n_out += stop_flush(&w->match, w->out + w->n_out);
    w->out[w->n_out] = '\0';
}

#define BEGIN(w, ...) begin(w, (const char *const[]){__VA_ARGS__}, sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))
#define FEED(w, text) feed(w, text, strlen(text), false)

static void a_stop_over_two_tokens_is_found_and_its_beginning_not_sent(void **state)
{
    struct world w;

    BEGIN(&w, "own fox");
    FEED(&w, "The quick");
    assert_string_equal(w.out, "The quick");
    FEED(&w, " br");
    assert_string_equal(w.out, "The quick br");
    FEED(&w, "own f");
    assert_string_equal(w.out, "The quick br");
    FEED(&w, "ox jumps");
    assert_int_equal(w.found, 0);
    assert_string_equal(w.out, "The quick br");
    kvg_arena_free(&w.arena);
}

static void text_that_cannot_begin_a_stop_is_passed_at_once(void **state)
{
    struct world w;
    char stop[201];

    memset(stop, 'z', 200);
    stop[200] = '\0';
    BEGIN(&w, stop);
    FEED(&w, "no such letter here");
    assert_string_equal(w.out, "no such letter here");
    FEED(&w, "zz");
    assert_string_equal(w.out, "no such letter here");
    FEED(&w, "!");
    assert_string_equal(w.out, "no such letter herezz!");
    kvg_arena_free(&w.arena);
}

static void held_text_is_flushed_at_the_end(void **state)
{
    struct world w;

    BEGIN(&w, "the end of all");
    FEED(&w, "this is the end");
    assert_string_equal(w.out, "this is ");
    flush(&w);
    assert_string_equal(w.out, "this is the end");
    kvg_arena_free(&w.arena);
}

static void of_several_stops_the_one_that_ends_first_wins(void **state)
{
    struct world w;

    BEGIN(&w, "abcd", "ab", "bc", "xabc");
    FEED(&w, "__a");
    FEED(&w, "bcd");
    assert_int_equal(w.found, 1);
    assert_string_equal(w.out, "__");
    kvg_arena_free(&w.arena);
    BEGIN(&w, "bc", "abc");
    FEED(&w, "_abc");
    assert_int_equal(w.found, 1); /* both end here: the longer */
    assert_string_equal(w.out, "_");
    kvg_arena_free(&w.arena);
}

static void a_stop_that_overlaps_itself_is_found(void **state)
{
    struct world w;

    BEGIN(&w, "aab");
    FEED(&w, "xaa");
    FEED(&w, "aaab!");
    assert_int_equal(w.found, 0);
    assert_string_equal(w.out, "xaaa");
    kvg_arena_free(&w.arena);
}

static void include_keeps_the_stop_string(void **state)
{
    struct world w;

    BEGIN(&w, "END");
    feed(&w, "text EN", 7, true);
    assert_string_equal(w.out, "text ");
    feed(&w, "D more", 6, true);
    assert_string_equal(w.out, "text END");
    kvg_arena_free(&w.arena);
}

/* Bytes of the text before the first stop to be completed (longest of those), or the whole length. */
static size_t plain_search(const char *text, const char *const *stops, size_t n)
{
    for (size_t end = 1; end <= strlen(text); end++) {
        size_t longest = 0;
        for (size_t i = 0; i < n; i++) {
            size_t len = strlen(stops[i]);
            if (len <= end && len > longest && memcmp(text + end - len, stops[i], len) == 0)
                longest = len;
        }
        if (longest)
            return end - longest;
    }
    return strlen(text);
}

static void any_cut_gives_what_a_plain_search_gives(void **state)
{
    uint64_t random = 1;
#define DRAW(n) ((random = random * 6364136223846793005u + 1442695040888963407u), (uint32_t)(random >> 33) % (n))
    for (int trial = 0; trial < 20000; trial++) {
        char text[41], strings[3][9];
        const char *stops[3] = {strings[0], strings[1], strings[2]};
        size_t n = DRAW(41), n_stops = 1 + DRAW(3);
        struct world w;

        for (size_t i = 0; i < n; i++)
            text[i] = (char)('a' + DRAW(2));
        text[n] = '\0';
        for (size_t s = 0; s < n_stops; s++) {
            size_t len = 1 + DRAW(8);
            for (size_t i = 0; i < len; i++)
                strings[s][i] = (char)('a' + DRAW(2));
            strings[s][len] = '\0';
        }
        begin(&w, stops, n_stops);
        for (size_t at = 0, k; at < n && w.found == STOP_NONE; at += k) {
            k = 1 + DRAW(6);
            k = k < n - at ? k : n - at;
            feed(&w, text + at, k, false);
            for (size_t s = 0; s < n_stops && w.found == STOP_NONE; s++) /* what was passed cannot begin a stop */
                for (size_t tail = 1; tail < strlen(stops[s]) && tail <= w.n_out && w.match.n_held == 0; tail++)
                    assert_true(memcmp(w.out + w.n_out - tail, stops[s], tail) != 0);
        }
        if (w.found == STOP_NONE)
            flush(&w);
        size_t want = plain_search(text, stops, n_stops);
        assert_int_equal(w.n_out, want);
        assert_memory_equal(w.out, text, want);
        kvg_arena_free(&w.arena);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stop_over_two_tokens_is_found_and_its_beginning_not_sent),
        cmocka_unit_test(text_that_cannot_begin_a_stop_is_passed_at_once),
        cmocka_unit_test(held_text_is_flushed_at_the_end),
        cmocka_unit_test(of_several_stops_the_one_that_ends_first_wins),
        cmocka_unit_test(a_stop_that_overlaps_itself_is_found),
        cmocka_unit_test(include_keeps_the_stop_string),
        cmocka_unit_test(any_cut_gives_what_a_plain_search_gives),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
