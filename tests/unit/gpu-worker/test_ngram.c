/* Prompt lookup against a search through all ids. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "gpu-worker/engine/ngram.h"

enum { LONGEST = 3000 };

static struct ngram ngram;
static uint32_t ids[LONGEST];

/* The latest end before n of a run equal to the last ids, of three lengths, longest first. */
static uint32_t find_slowly(const uint32_t *lens, uint32_t n, uint32_t *level)
{
    for (uint32_t i = 0; i < 3; i++)
        for (uint32_t end = n - 1; n > lens[i] && end >= lens[i]; end--)
            if (memcmp(ids + end - lens[i], ids + n - lens[i], lens[i] * sizeof *ids) == 0) {
                *level = i;
                return end;
            }
    return 0;
}

/* A newer run may have taken an older one's slot: then a shorter run answers, or none; what is found is always a match. */
static void search(struct ngram_runs runs, const uint32_t *lens)
{
    static const uint32_t alphabets[] = {1, 2, 5, 30, 1000};

    for (uint32_t a = 0; a < 5; a++) {
        uint32_t n = 0, found = 0, missed = 0;
        srand(a + 1);
        ngram_reset(&ngram, LONGEST, runs);
        while (n < LONGEST) {
            for (uint32_t step = 1 + (uint32_t)rand() % 7; step && n < LONGEST; step--, n++)
                ids[n] = n > 40 && rand() % 3 ? ids[n - 37] : (uint32_t)rand() % alphabets[a];
            uint32_t level = 9, want_level = 9, at = ngram_find(&ngram, ids, n, &level), want = find_slowly(lens, n, &want_level);
            if (at != want || level != want_level)
                missed++;
            found += want != 0;
            if (at) {
                assert_true(at < n);
                assert_memory_equal(ids + at - lens[level], ids + n - lens[level], lens[level] * sizeof *ids);
            }
            assert_true(!at || want >= at || want_level < level);
        }
        assert_true(found > 20);
        assert_true(missed * 2 < found);
    }
}

static void finds_the_latest_match_of_the_longest_run(void **state)
{
    search((struct ngram_runs){0}, (const uint32_t[]){8, 4, 2});
}

static void runs_may_be_longer_or_shorter(void **state)
{
    search((struct ngram_runs){3, 3}, (const uint32_t[]){3, 3, 3});
    search((struct ngram_runs){12, 3}, (const uint32_t[]){12, 6, 3});
    search((struct ngram_runs){4, 1}, (const uint32_t[]){4, 2, 1});
    search((struct ngram_runs){NGRAM_MOST, 5}, (const uint32_t[]){64, 17, 5});
}

static void the_shortest_match_needs_three_ids(void **state)
{
    uint32_t level;

    ids[0] = ids[1] = ids[2] = 1;
    ngram_reset(&ngram, 10, (struct ngram_runs){0});
    assert_int_equal(ngram_find(&ngram, ids, 1, &level), 0);
    assert_int_equal(ngram_find(&ngram, ids, 2, &level), 0);
    assert_int_equal(ngram_find(&ngram, ids, 3, &level), 2);
    assert_int_equal(level, 2);
}

static void a_reset_forgets_everything(void **state)
{
    uint32_t level;

    for (uint32_t i = 0; i < 100; i++)
        ids[i] = i % 10;
    ngram_reset(&ngram, 100, (struct ngram_runs){0});
    assert_int_equal(ngram_find(&ngram, ids, 100, &level), 90);
    ngram_reset(&ngram, 100, (struct ngram_runs){0});
    for (uint32_t i = 0; i < 100; i++)
        ids[i] = i == 50 ? 9 : i % 10;
    assert_int_equal(ngram_find(&ngram, ids, 9, &level), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(finds_the_latest_match_of_the_longest_run),
        cmocka_unit_test(runs_may_be_longer_or_shorter),
        cmocka_unit_test(the_shortest_match_needs_three_ids),
        cmocka_unit_test(a_reset_forgets_everything),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
