/* What a client sees: stop strings, ends, whole characters, on a scripted model whose tokens are chosen here. */
#include "engine_world.h"

/* After the prompt's last id (the byte "\n") the model says these pieces, then <|im_end|>. */
#define TEXT "The quick brown fox jumps.\xc3\xa9"

static char scripted[64];
static const uint32_t prompt[] = {'h', 'i', '\n'};
static struct world w;
static struct call call;

/* Ids of the vocabulary's bytes are the bytes' own numbers in toy models. */
static struct reply *ask(struct engine_params params)
{
    run_call(&w, &call, prompt, 3, &params);
    return &call.choices[0];
}

static struct reply *ask_with_stops(struct engine_params params, const char *const *stops, size_t n)
{
    size_t lens[8];
    for (size_t i = 0; i < n; i++)
        lens[i] = strlen(stops[i]);
    params.stop = stops;
    params.stop_len = lens;
    params.n_stop = n;
    return ask(params);
}

static struct engine_params until_end(void)
{
    struct engine_params params = default_params(100);
    params.ignore_eos = false;
    return params;
}

static void the_end_token_stops_without_text(void **state)
{
    struct reply *reply = ask(until_end());

    assert_string_equal(reply->text, TEXT);
    assert_int_equal(reply->finish, FINISH_STOP);
    assert_int_equal(reply->n_ids, 7);
    assert_int_equal(reply->matched, reply->ids[6]);
    struct engine_params params = until_end();
    params.max_tokens = 7; /* the end comes with the last token allowed: it is a stop all the same */
    assert_int_equal(ask(params)->finish, FINISH_STOP);
    params.max_tokens = 6;
    assert_int_equal(ask(params)->finish, FINISH_LENGTH);
    assert_string_equal(call.choices[0].text, TEXT);
}

static void a_stop_string_over_two_tokens_is_cut_off(void **state)
{
    struct reply *reply = ask_with_stops(until_end(), (const char *[]){"own fox"}, 1);

    assert_string_equal(reply->text, "The quick br");
    assert_int_equal(reply->finish, FINISH_STOP);
    assert_int_equal(reply->matched, KVG_NO_TOKEN);
    assert_int_equal(reply->n_ids, 5);
    struct engine_params params = until_end();
    params.include_stop = true;
    assert_string_equal(ask_with_stops(params, (const char *[]){"own fox"}, 1)->text, "The quick brown fox");
}

static void of_several_stops_the_first_to_end_wins(void **state)
{
    const char *stops[] = {"fox jumps", "quick brown", "qui", "quick"};
    assert_string_equal(ask_with_stops(until_end(), stops, 4)->text, "The ");
}

static void what_only_began_a_stop_is_flushed(void **state)
{
    const char *stops[] = {".\xc3\xa9 and then more"};
    struct engine_params params = until_end();

    assert_string_equal(ask_with_stops(params, stops, 1)->text, TEXT);
    params.max_tokens = 6;
    assert_string_equal(ask_with_stops(params, stops, 1)->text, TEXT);
    assert_int_equal(call.choices[0].finish, FINISH_LENGTH);
}

static void min_tokens_forbids_every_kind_of_end(void **state)
{
    struct engine_params params = until_end();
    const char *stops[] = {"quick"};

    params.min_tokens = 3;
    assert_string_equal(ask_with_stops(params, stops, 1)->text, TEXT); /* "quick" came too early */
    params.min_tokens = 20;
    struct reply *reply = ask(params);
    assert_true(reply->n_ids >= 20);
    for (size_t i = 0; i < 20; i++)
        assert_int_not_equal(reply->ids[i], kvg_tokenizer_info(kvg_prompt_model_tokenizer(w.prompt_model))->end_ids[0]);
}

static void ignore_eos_goes_on_behind_the_end(void **state)
{
    struct reply *reply = ask(default_params(30));

    assert_int_equal(reply->n_ids, 30);
    assert_int_equal(reply->finish, FINISH_LENGTH);
}

static void a_stop_token_gives_no_text_unless_included(void **state)
{
    struct engine_params params = until_end();
    struct reply *reply = ask(params);
    uint32_t stop = reply->ids[3];

    params.stop_ids = &stop;
    params.n_stop_ids = 1;
    assert_string_equal(ask(params)->text, "The quick br");
    assert_int_equal(call.choices[0].matched, stop);
    params.include_stop = true;
    assert_string_equal(ask(params)->text, "The quick brown f");
}

static void a_bias_and_a_ban_change_the_token(void **state)
{
    struct engine_params params = until_end();
    struct sample_bias bias = {'Z', 100};

    params.max_tokens = 1;
    params.biases = &bias;
    params.n_biases = 1;
    assert_string_equal(ask(params)->text, "Z");
}

/* A vocabulary may hold tokens of bytes that are no characters: each of them comes out as three. */
static void broken_bytes_of_one_token_find_room(void **state)
{
    static struct world odd;
    static struct call odd_call;
    char path[64];
    struct engine_params params = until_end();

    write_script_with(path, "pieces=[bytes([0x80]) * 600]", "{10: v.id(bytes([0x80]) * 600)}");
    open_world(&odd, path, (struct engine_options){.num_kv_blocks = 64, .block_size = 16});
    run_call(&odd, &odd_call, prompt, 3, &params);
    struct reply *reply = &odd_call.choices[0];
    assert_int_equal(strlen(reply->text), 3 * 600);
    for (size_t i = 0; i < 600; i++)
        assert_memory_equal(reply->text + 3 * i, "\xef\xbf\xbd", 3);
    close_world(&odd);
    unlink(path);
}

static int open_scripted(void **state)
{
    write_toy(scripted, "script 'The| quick| br|own f|ox jumps|.\xc3\xa9'");
    open_world(&w, scripted, (struct engine_options){.num_kv_blocks = 64, .block_size = 16});
    return 0;
}

static int close_scripted(void **state)
{
    close_world(&w);
    return unlink(scripted);
}

/* The bytes of a character come one a token; what stays incomplete at the end becomes U+FFFD. */
static void characters_over_tokens_come_whole(void **state)
{
    static const struct {
        const char *table, *text;
    } cases[] = {
        {"{10: 97, 97: 0xf0, 0xf0: 0x9f, 0x9f: 0xa6, 0xa6: 0x99, 0x99: v.eos}", "a\xf0\x9f\xa6\x99"},
        {"{10: 97, 97: 0xf0, 0xf0: 0x9f, 0x9f: v.eos}", "a\xef\xbf\xbd"},
        {"{10: 97, 97: 0xf0, 0xf0: 98, 98: v.eos}", "a\xef\xbf\xbd"
                                                    "b"},
    };
    for (size_t i = 0; i < 3; i++) {
        struct engine_params params = until_end();
        struct world other;
        char path[64];

        write_script(path, cases[i].table);
        open_world(&other, path, (struct engine_options){.num_kv_blocks = 64, .block_size = 16});
        run_call(&other, &call, prompt, 3, &params);
        assert_string_equal(call.choices[0].text, cases[i].text);
        close_world(&other);
        unlink(path);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_end_token_stops_without_text),           cmocka_unit_test(a_stop_string_over_two_tokens_is_cut_off),
        cmocka_unit_test(of_several_stops_the_first_to_end_wins),     cmocka_unit_test(what_only_began_a_stop_is_flushed),
        cmocka_unit_test(min_tokens_forbids_every_kind_of_end),       cmocka_unit_test(ignore_eos_goes_on_behind_the_end),
        cmocka_unit_test(a_stop_token_gives_no_text_unless_included), cmocka_unit_test(a_bias_and_a_ban_change_the_token),
        cmocka_unit_test(broken_bytes_of_one_token_find_room),        cmocka_unit_test(characters_over_tokens_come_whole),
    };
    return cmocka_run_group_tests(tests, open_scripted, close_scripted);
}
