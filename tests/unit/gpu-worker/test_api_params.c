/* Bodies -> parameters, or an error that names the member. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>
#include "gpu-worker/server/api_params.h"

#define CHAT KVG_CHAT_COMPLETIONS
#define TEXT KVG_COMPLETIONS

struct world {
    struct kvg_arena arena;
    struct api_params params;
    struct kvg_error err;
    int code;
};

static void parse(struct world *w, struct api_context context, const char *body)
{
    struct kvg_json *json;
    memset(w, 0, sizeof *w);
    kvg_arena_init(&w->arena, 0);
    w->code = kvg_json_parse(&w->arena, body, strlen(body), NULL, &json, &w->err);
    if (w->code == KVG_OK)
        w->code = api_params_parse(&context, json, &w->arena, &w->params, &w->err);
}

static struct api_context plain(enum kvg_endpoint endpoint)
{
    return (struct api_context){.endpoint = endpoint, .n_vocab = 1000};
}

static const struct refusal {
    enum kvg_endpoint endpoint;
    const char *body;
    int code;
    const char *param;
} refusals[] = {
    /* numbers: type, range, not finite */
    {CHAT, "{\"temperature\":-0.1}", KVG_INVALID, "temperature"},
    {CHAT, "{\"temperature\":2.01}", KVG_INVALID, "temperature"},
    {CHAT, "{\"temperature\":100}", KVG_INVALID, "temperature"},
    {CHAT, "{\"temperature\":\"nan\"}", KVG_INVALID, "temperature"},
    {CHAT, "{\"temperature\":1e999}", KVG_INVALID, "temperature"},
    {CHAT, "{\"temperature\":true}", KVG_INVALID, "temperature"},
    {CHAT, "{\"temperature\":NaN}", KVG_INVALID, ""},
    {CHAT, "{\"temperature\":Infinity}", KVG_INVALID, ""},
    {CHAT, "{\"temperature\":-Infinity}", KVG_INVALID, ""},
    {CHAT, "{\"top_p\":1.0000001}", KVG_INVALID, "top_p"},
    {CHAT, "{\"top_p\":-1}", KVG_INVALID, "top_p"},
    {CHAT, "{\"top_p\":1e999}", KVG_INVALID, "top_p"},
    {CHAT, "{\"min_p\":1e999}", KVG_INVALID, "min_p"},
    {CHAT, "{\"min_p\":-1}", KVG_INVALID, "min_p"},
    {CHAT, "{\"presence_penalty\":2.5}", KVG_INVALID, "presence_penalty"},
    {CHAT, "{\"frequency_penalty\":-1e999}", KVG_INVALID, "frequency_penalty"},
    {CHAT, "{\"repetition_penalty\":0}", KVG_INVALID, "repetition_penalty"},
    {CHAT, "{\"top_k\":-2}", KVG_INVALID, "top_k"},
    {CHAT, "{\"top_k\":1.5}", KVG_INVALID, "top_k"},
    {CHAT, "{\"seed\":1.5}", KVG_INVALID, "seed"},
    {CHAT, "{\"seed\":1e16}", KVG_INVALID, "seed"}, /* not every integer of this size is a double */
    {CHAT, "{\"seed\":99999999999999999999}", KVG_INVALID, "seed"},
    {CHAT, "{\"n\":0}", KVG_INVALID, "n"},
    {CHAT, "{\"n\":-1}", KVG_INVALID, "n"},
    {CHAT, "{\"n\":1000000000}", KVG_INVALID, "n"},
    {TEXT, "{\"max_tokens\":0}", KVG_INVALID, "max_tokens"},
    {TEXT, "{\"max_tokens\":-1}", KVG_INVALID, "max_tokens"},
    {TEXT, "{\"max_tokens\":9223372036854775808}", KVG_INVALID, "max_tokens"},
    {TEXT, "{\"max_tokens\":1.5}", KVG_INVALID, "max_tokens"},
    {TEXT, "{\"max_tokens\":\"5\"}", KVG_INVALID, "max_tokens"},
    {CHAT, "{\"max_tokens\":0}", KVG_INVALID, "max_tokens"},
    {CHAT, "{\"max_completion_tokens\":0,\"max_tokens\":5}", KVG_INVALID, "max_completion_tokens"},
    {CHAT, "{\"max_tokens\":5,\"min_tokens\":6}", KVG_INVALID, "min_tokens"},
    /* lists and objects */
    {CHAT, "{\"stop\":\"\"}", KVG_INVALID, "stop"},
    {CHAT, "{\"stop\":[\"a\",1]}", KVG_INVALID, "stop"},
    {CHAT, "{\"stop\":{}}", KVG_INVALID, "stop"},
    {CHAT, "{\"stop\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"a\",\"b\",\"c\",\"d\",\"e\",\"f\",\"g\",\"h\"]}",
     KVG_INVALID, "stop"},
    {CHAT, "{\"stop_token_ids\":[1000]}", KVG_INVALID, "stop_token_ids"},
    {CHAT, "{\"stop_token_ids\":5}", KVG_INVALID, "stop_token_ids"},
    {CHAT, "{\"logit_bias\":{\"1000\":1}}", KVG_INVALID, "logit_bias"},
    {CHAT, "{\"logit_bias\":{\"01\":1}}", KVG_INVALID, "logit_bias"},
    {CHAT, "{\"logit_bias\":{\"x\":1}}", KVG_INVALID, "logit_bias"},
    {CHAT, "{\"logit_bias\":{\"1\":101}}", KVG_INVALID, "logit_bias"},
    {CHAT, "{\"logit_bias\":[1]}", KVG_INVALID, "logit_bias"},
    {CHAT, "{\"logprobs\":1}", KVG_INVALID, "logprobs"},
    {CHAT, "{\"top_logprobs\":5}", KVG_INVALID, "top_logprobs"},
    {CHAT, "{\"logprobs\":true,\"top_logprobs\":21}", KVG_INVALID, "top_logprobs"},
    {TEXT, "{\"logprobs\":true}", KVG_INVALID, "logprobs"},
    {TEXT, "{\"logprobs\":21}", KVG_INVALID, "logprobs"},
    {TEXT, "{\"logprobs\":1,\"echo\":true}", KVG_UNSUPPORTED, "logprobs"},
    {CHAT, "{\"stream_options\":{\"include_usage\":true}}", KVG_INVALID, "stream_options"},
    {CHAT, "{\"stream\":true,\"stream_options\":{\"include_usage\":1}}", KVG_INVALID, "stream_options"},
    {CHAT, "{\"stream\":\"true\"}", KVG_INVALID, "stream"},
    {CHAT, "{\"model\":5}", KVG_INVALID, "model"},
    {CHAT, "{\"cache_salt\":\"\"}", KVG_INVALID, "cache_salt"},
    {CHAT, "{\"tools\":{}}", KVG_INVALID, "tools"},
    {CHAT, "{\"tools\":[1]}", KVG_INVALID, "tools"},
    {CHAT, "{\"chat_template_kwargs\":[]}", KVG_INVALID, "chat_template_kwargs"},
    /* what only the gateway may say */
    {CHAT, "{\"prompt_token_ids\":[1]}", KVG_INVALID, "prompt_token_ids"},
    {CHAT, "{\"priority\":1}", KVG_UNSUPPORTED, "priority"},
    /* known and unsupported */
    {TEXT, "{\"suffix\":\"x\"}", KVG_UNSUPPORTED, "suffix"},
    {TEXT, "{\"best_of\":2}", KVG_UNSUPPORTED, "best_of"},
    {CHAT, "{\"audio\":{\"voice\":\"x\"}}", KVG_UNSUPPORTED, "audio"},
    {CHAT, "{\"modalities\":[\"text\",\"audio\"]}", KVG_UNSUPPORTED, "modalities"},
    {CHAT, "{\"functions\":[{}]}", KVG_UNSUPPORTED, "functions"},
    {CHAT, "{\"tool_choice\":\"required\"}", KVG_UNSUPPORTED, "tool_choice"},
    {CHAT, "{\"tool_choice\":{\"type\":\"function\"}}", KVG_UNSUPPORTED, "tool_choice"},
    {CHAT, "{\"response_format\":{\"type\":\"json_schema\"}}", KVG_UNSUPPORTED, "response_format"},
    {CHAT, "{\"response_format\":\"text\"}", KVG_INVALID, "response_format"},
    {CHAT, "{\"logits_processors\":[\"x\"]}", KVG_UNSUPPORTED, "logits_processors"},
    {CHAT, "{\"use_beam_search\":true}", KVG_UNSUPPORTED, "use_beam_search"},
    {CHAT, "{\"skip_special_tokens\":false}", KVG_UNSUPPORTED, "skip_special_tokens"},
    {CHAT, "{\"echo\":true}", KVG_UNSUPPORTED, "echo"},
    {CHAT, "[]", KVG_INVALID, ""},
};

static void bad_members_are_refused_by_name(void **state)
{
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        struct world w;
        parse(&w, plain(refusals[i].endpoint), refusals[i].body);
        if (w.code != refusals[i].code || strcmp(w.err.param, refusals[i].param) != 0)
            fail_msg("%s: code %d, param \"%s\", message \"%s\"", refusals[i].body, w.code, w.err.param, w.err.message);
        assert_true(w.err.message[0] != '\0');
        kvg_arena_free(&w.arena);
    }
}

static void a_key_that_is_no_token_id_is_named(void **state)
{
    struct world w;

    parse(&w, plain(CHAT), "{\"logit_bias\":{\"1\":1,\"1000\":1}}");
    assert_non_null(strstr(w.err.message, "\"1000\""));
    kvg_arena_free(&w.arena);
    parse(&w, plain(CHAT), "{\"logit_bias\":{\"012345678901234567890123456789\":1}}");
    assert_non_null(strstr(w.err.message, "\"012345678901234567890123…\""));
    kvg_arena_free(&w.arena);
}

static const struct acceptance {
    enum kvg_endpoint endpoint;
    const char *body;
    const char *summary; /* as summarize() writes it */
} acceptances[] = {
    {CHAT, "{}", "max=4294967295 n=1 t=1 p=1 k=0"},
    {TEXT, "{}", "max=16 n=1 t=1 p=1 k=0"},
    {TEXT, "{\"max_tokens\":1}", "max=1 n=1 t=1 p=1 k=0"},
    {TEXT, "{\"max_tokens\":100000000}", "max=100000000 n=1 t=1 p=1 k=0"},
    {TEXT, "{\"max_tokens\":9223372036854775807}", "max=4294967295 n=1 t=1 p=1 k=0"},
    {TEXT, "{\"max_tokens\":0,\"echo\":true}", "max=0 n=1 t=1 p=1 k=0"},
    {CHAT, "{\"max_completion_tokens\":7,\"max_tokens\":5}", "max=7 n=1 t=1 p=1 k=0"},
    {CHAT, "{\"temperature\":0}", "max=4294967295 n=1 t=0 p=1 k=0"},
    {CHAT, "{\"temperature\":1e-38}", "max=4294967295 n=1 t=0 p=1 k=0"},
    {CHAT, "{\"temperature\":9e-6}", "max=4294967295 n=1 t=0 p=1 k=0"},
    {CHAT, "{\"temperature\":2}", "max=4294967295 n=1 t=2 p=1 k=0"},
    {CHAT, "{\"top_p\":0}", "max=4294967295 n=1 t=1 p=1 k=1"},
    {CHAT, "{\"top_p\":1e-300}", "max=4294967295 n=1 t=1 p=1 k=1"},
    {CHAT, "{\"top_p\":1}", "max=4294967295 n=1 t=1 p=1 k=0"},
    {CHAT, "{\"top_k\":-1}", "max=4294967295 n=1 t=1 p=1 k=0"},
    {CHAT, "{\"top_k\":0}", "max=4294967295 n=1 t=1 p=1 k=0"},
    {CHAT, "{\"top_k\":40}", "max=4294967295 n=1 t=1 p=1 k=40"},
    {CHAT, "{\"top_k\":40.0,\"max_tokens\":1.6e1,\"seed\":1.0}", "max=16 n=1 t=1 p=1 k=40"},
    {CHAT, "{\"top_k\":1000000000}", "max=4294967295 n=1 t=1 p=1 k=0"},
    {CHAT, "{\"n\":3,\"best_of\":3}", "max=4294967295 n=3 t=1 p=1 k=0"},
    {CHAT, "{\"n\":null,\"temperature\":null,\"stop\":null,\"tools\":null,\"audio\":null,\"seed\":null}",
     "max=4294967295 n=1 t=1 p=1 k=0"},
    {CHAT,
     "{\"user\":\"u\",\"metadata\":{},\"store\":false,\"service_tier\":\"auto\",\"parallel_tool_calls\":true,\"chat_template_"
     "kwargs\":{},"
     "\"response_format\":{\"type\":\"text\"},\"tool_choice\":\"auto\",\"tools\":[{}],\"modalities\":[\"text\"],\"stop\":[],"
     "\"stop_token_ids\":[]}",
     "max=4294967295 n=1 t=1 p=1 k=0"},
};

static void summarize(const struct api_params *p, char out[160])
{
    snprintf(out, 160, "max=%u n=%u t=%g p=%g k=%u", p->engine.max_tokens, p->engine.n, (double)p->engine.temperature,
             (double)p->engine.top_p, p->engine.top_k);
}

static void good_members_are_read(void **state)
{
    for (size_t i = 0; i < sizeof acceptances / sizeof *acceptances; i++) {
        struct world w;
        char summary[160];
        parse(&w, plain(acceptances[i].endpoint), acceptances[i].body);
        if (w.code != KVG_OK)
            fail_msg("%s: %s", acceptances[i].body, w.err.message);
        summarize(&w.params, summary);
        assert_string_equal(summary, acceptances[i].summary);
        kvg_arena_free(&w.arena);
    }
}

static void lists_arrive_whole_and_sorted(void **state)
{
    struct world w;
    parse(&w, plain(CHAT),
          "{\"stop\":[\"ab\",\"\\n\"],\"stop_token_ids\":[7,8],\"logit_bias\":{\"9\":-100,\"3\":0.5},\"seed\":-1.0,\"logprobs\":"
          "true,"
          "\"top_logprobs\":20,\"stream\":true,\"stream_options\":{\"include_usage\":true,\"later\":1},\"unheard\":1,\"of\":{}}");
    assert_int_equal(w.code, KVG_OK);
    const struct engine_params *e = &w.params.engine;
    assert_int_equal(e->n_stop, 2);
    assert_memory_equal(e->stop[0], "ab", 2);
    assert_int_equal(e->stop_len[1], 1);
    assert_int_equal(e->n_stop_ids, 2);
    assert_int_equal(e->stop_ids[1], 8);
    assert_int_equal(e->n_biases, 2);
    assert_int_equal(e->biases[0].id, 3);
    assert_int_equal(e->biases[1].id, 9);
    assert_true(e->biases[1].bias == -100);
    assert_true(w.params.has_seed && e->seed == UINT64_MAX);
    assert_true(e->want_logprobs && e->top_logprobs == 20);
    assert_true(w.params.stream && w.params.include_usage && !w.params.continuous_usage);
    assert_int_equal(w.params.n_unknown, 3);
    kvg_arena_free(&w.arena);
}

static void a_single_stop_string_is_a_list_of_one(void **state)
{
    struct world w;
    parse(&w, plain(TEXT), "{\"stop\":\"END\",\"logprobs\":0}");
    assert_int_equal(w.code, KVG_OK);
    assert_int_equal(w.params.engine.n_stop, 1);
    assert_int_equal(w.params.engine.stop_len[0], 3);
    assert_true(w.params.engine.want_logprobs && w.params.engine.top_logprobs == 0);
    kvg_arena_free(&w.arena);
}

static void the_gateway_may_send_ids_and_priority(void **state)
{
    struct api_context gateway = {.endpoint = CHAT, .gateway = true, .priority_scheduling = true, .n_vocab = 1000};
    struct world w;
    parse(&w, gateway, "{\"prompt_token_ids\":[1,999],\"priority\":-3,\"cache_salt\":\"s\"}");
    assert_int_equal(w.code, KVG_OK);
    assert_int_equal(w.params.prompt_ids.n, 2);
    assert_int_equal(w.params.prompt_ids.ids[1], 999);
    assert_int_equal(w.params.engine.priority, -3);
    assert_int_equal(w.params.cache_salt.len, 1);
    assert_true(w.params.engine.drop_leading_space); /* a chat's reply begins a text, a completion goes on with one */
    kvg_arena_free(&w.arena);
    parse(&w, (struct api_context){.endpoint = TEXT, .n_vocab = 1000}, "{}");
    assert_false(w.params.engine.drop_leading_space);
    kvg_arena_free(&w.arena);

    parse(&w, gateway, "{\"prompt_token_ids\":[1,1000]}");
    assert_int_equal(w.code, KVG_INVALID);
    assert_non_null(strstr(w.err.message, "prompt_token_ids[1]"));
    kvg_arena_free(&w.arena);

    gateway.no_priority = true;
    parse(&w, gateway, "{\"priority\":-3}");
    assert_int_equal(w.code, KVG_OK);
    assert_int_equal(w.params.engine.priority, 0);
    kvg_arena_free(&w.arena);
    parse(&w, gateway, "{\"priority\":\"high\"}");
    assert_int_equal(w.code, KVG_INVALID);
    kvg_arena_free(&w.arena);
    gateway.no_priority = false;

    gateway.priority_scheduling = false;
    parse(&w, gateway, "{\"priority\":1}");
    assert_int_equal(w.code, KVG_UNSUPPORTED);
    kvg_arena_free(&w.arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_members_are_refused_by_name),
        cmocka_unit_test(a_key_that_is_no_token_id_is_named),
        cmocka_unit_test(good_members_are_read),
        cmocka_unit_test(lists_arrive_whole_and_sorted),
        cmocka_unit_test(a_single_stop_string_is_a_list_of_one),
        cmocka_unit_test(the_gateway_may_send_ids_and_priority),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
