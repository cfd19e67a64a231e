/* How likely drafts are held to be, on invented records. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>
#include "gpu-worker/engine/chance.h"

enum { LEVEL = NGRAM_LEVELS - 1 };

static struct chance_all all;

/* n sequences of which all drafts, or none, are accepted. */
static void sequences(uint32_t n, uint32_t n_drafts, bool accepted)
{
    for (uint32_t i = 0; i < n; i++) {
        struct chance own = {0};
        for (uint32_t k = 0; k < n_drafts; k++)
            chance_learn_context(&all, &own, LEVEL, 1, accepted);
    }
}

static void a_new_sequence_begins_with_what_is_known_of_all(void **state)
{
    struct chance own = {0};

    chance_init(&all);
    assert_true(chance_of(&all, &own, LEVEL) == 0.5);
    sequences(40, 12, true);
    assert_true(chance_of(&all, &own, LEVEL) > 0.9);
    assert_true(chance_of(&all, &own, BESIDE) == 0.5);
    sequences(40, 12, false);
    assert_true(chance_of(&all, &own, LEVEL) < 0.1);
}

static void one_long_copy_tells_the_others_little(void **state)
{
    struct chance own = {0};

    chance_init(&all);
    sequences(20, 4, false);
    sequences(1, 1000, true);
    assert_true(chance_of(&all, &own, LEVEL) < 0.3);
}

static void its_own_failures_count_more_than_the_success_of_others_at_every_level(void **state)
{
    struct chance own = {0};

    chance_init(&all);
    sequences(40, 12, true);
    chance_learn_context(&all, &own, LEVEL, 1, 0);
    assert_true(chance_of(&all, &own, LEVEL) < 0.4);
    double before = chance_of(&all, &(struct chance){0}, BESIDE);
    assert_true(chance_of(&all, &own, BESIDE) < 0.6 * before);
    assert_true(chance_of(&all, &own, BY_MODEL) == chance_of(&all, &(struct chance){0}, BY_MODEL));
    for (int i = 0; i < 20; i++)
        chance_learn_context(&all, &own, LEVEL, 5, 5);
    assert_true(chance_of(&all, &own, LEVEL) > 0.9);
}

static void a_sequence_proves_itself_by_a_draft_until_it_fails_twice(void **state)
{
    struct chance own = {0};

    chance_init(&all);
    assert_false(own.proven);
    chance_learn_context(&all, &own, LEVEL, 1, 0);
    assert_false(own.proven);
    chance_learn_context(&all, &own, LEVEL, 2, 1);
    assert_true(own.proven);
    chance_learn_context(&all, &own, LEVEL, 1, 0);
    assert_true(own.proven);
    chance_learn_context(&all, &own, LEVEL, 0, 0); /* its generation ended: nothing was looked at */
    assert_true(own.proven);
    chance_learn_context(&all, &own, LEVEL, 1, 0);
    assert_false(own.proven);
}

static void drafts_by_the_model_count_by_how_sure_it_was(void **state)
{
    struct chance own = {0};
    uint8_t sure[3];

    chance_init(&all);
    assert_int_equal(chance_level(0), SURE);
    assert_int_equal(chance_level(1), CHANCE_LEVELS - 1);
    for (uint32_t i = 1; i <= 100; i++)
        assert_in_range(chance_level(i / 100.0), chance_level((i - 1) / 100.0), chance_level((i - 1) / 100.0) + 1);
    sure[0] = sure[1] = (uint8_t)chance_level(0.99);
    sure[2] = (uint8_t)chance_level(0.1);
    for (int i = 0; i < 200; i++)
        chance_learn_model(&all, &own, sure, 3, 2);
    assert_true(chance_of(&all, &own, sure[0]) > 0.95);
    assert_true(chance_of(&all, &own, sure[2]) < 0.05);
    assert_true(chance_of(&all, &own, BY_MODEL) > 0.6 && chance_of(&all, &own, BY_MODEL) < 0.7);
    assert_true(chance_of(&all, &own, LEVEL) == 0.5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_new_sequence_begins_with_what_is_known_of_all),
        cmocka_unit_test(one_long_copy_tells_the_others_little),
        cmocka_unit_test(its_own_failures_count_more_than_the_success_of_others_at_every_level),
        cmocka_unit_test(a_sequence_proves_itself_by_a_draft_until_it_fails_twice),
        cmocka_unit_test(drafts_by_the_model_count_by_how_sure_it_was),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
