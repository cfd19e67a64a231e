#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include "gpu-worker/server/generation_internal.h"

enum { MAX_CHOICES_TOTAL = 2048 }; /* of one request, however many may wait */

static bool no_memory(struct generation *g)
{
    kvg_fail(&g->fault.err, KVG_NOMEM, "out of memory");
    return prompt_fail(&g->fault, 500, NULL);
}

static bool read_params(struct generation *g, const struct kvg_json *body)
{
    struct api_context context = {
        .endpoint = g->head.endpoint,
        .gateway = g->source.gateway,
        .no_priority = g->source.no_priority,
        .priority_scheduling = g->server->options.priority_scheduling,
        .n_vocab = kvg_tokenizer_info(kvg_prompt_model_tokenizer(g->server->prompt_model))->n_vocab,
    };
    int code = api_params_parse(&context, body, &g->arena, &g->params, &g->fault.err);
    if (code != KVG_OK)
        return prompt_fail(&g->fault, error_status(code), NULL);
    atomic_fetch_add(&g->server->counters.unknown_fields, g->params.n_unknown);
    if (!g->params.has_seed && getrandom(&g->params.engine.seed, sizeof g->params.engine.seed, 0) < 0)
        g->params.engine.seed = (uint64_t)time(NULL);
    return prompt_check_model(&g->source, g->params.model, &g->fault) &&
           prompt_salt(&g->source, g->params.cache_salt, &g->arena, &g->salt, &g->fault);
}

static bool make_room(struct generation *g, size_t n_prompts)
{
    uint32_t room = g->server->options.max_waiting + g->server->info.max_num_seqs;
    bool crowded = room < MAX_CHOICES_TOTAL;
    uint32_t most = crowded ? room : MAX_CHOICES_TOTAL;

    if (n_prompts > most / g->params.engine.n) {
        kvg_fail(&g->fault.err, KVG_INVALID, "%zu prompts with n = %u are more choices than the %u that %s", n_prompts,
                 g->params.engine.n, most, crowded ? "may run and wait at once" : "one request may have");
        snprintf(g->fault.err.param, sizeof g->fault.err.param, "prompt");
        return prompt_fail(&g->fault, 400, NULL);
    }
    g->prompts = calloc(n_prompts, sizeof *g->prompts);
    g->choices = calloc(n_prompts * g->params.engine.n, sizeof *g->choices);
    if (!g->prompts || !g->choices)
        return no_memory(g);
    g->n_prompts = (uint32_t)n_prompts;
    g->n_choices = g->n_unfinished = (uint32_t)n_prompts * g->params.engine.n;
    return true;
}

/* A string of the body as it stands, else the text of the ids. */
static bool read_echo(struct generation *g, const struct kvg_json *body, uint32_t index)
{
    const struct kvg_json *prompt = kvg_json_get(body, "prompt");
    struct prompt_run *run = &g->prompts[index];

    if (prompt->type == KVG_JSON_ARRAY && prompt->n && prompt->items[0].type != KVG_JSON_NUMBER)
        prompt = &prompt->items[index];
    if (prompt->type == KVG_JSON_STRING)
        kvg_buf_add(&run->echo, prompt->str.bytes, prompt->str.len);
    else
        ids_text(&run->echo, kvg_prompt_model_tokenizer(g->server->prompt_model), run->ids.ids, run->ids.n);
    return !run->echo.failed || no_memory(g);
}

/* max_tokens 0 with echo never reaches the engine: the same limit as there. */
static bool check_length(struct generation *g, size_t n_ids)
{
    if (g->params.engine.max_tokens != 0 || n_ids <= g->server->info.max_model_len)
        return true;
    kvg_fail(&g->fault.err, KVG_INVALID, "the prompt has %zu tokens, the context holds %u", n_ids, g->server->info.max_model_len);
    snprintf(g->fault.err.param, sizeof g->fault.err.param, "prompt");
    return prompt_fail(&g->fault, 400, "context_length_exceeded");
}

static bool read_prompts(struct generation *g, const struct kvg_json *body)
{
    size_t n;
    int code = kvg_prompt_count(g->head.endpoint, body, &n, &g->fault.err);
    if (code != KVG_OK)
        return prompt_fail(&g->fault, error_status(code), NULL);
    if (!make_room(g, n))
        return false;
    for (uint32_t i = 0; i < n && !atomic_load(&g->job.gone); i++) {
        struct prompt_run *run = &g->prompts[i];
        run->generation = g;
        if (!prompt_ids(&g->source, g->head.endpoint, body, &g->params.prompt_ids, i, &g->arena, &run->ids, &g->fault))
            return false;
        if (!check_length(g, run->ids.n) || (g->params.echo && !read_echo(g, body, i)))
            return false;
        run->prompt_tokens = (uint32_t)run->ids.n;
    }
    return true;
}

static void name_answer(struct generation *g)
{
    uint64_t random[2] = {0};
    if (getrandom(random, sizeof random, 0) < 0)
        random[0] = (uint64_t)(uintptr_t)g;
    snprintf(g->head.id, sizeof g->head.id, "%s-%016llx%016llx", g->head.endpoint == KVG_CHAT_COMPLETIONS ? "chatcmpl" : "cmpl",
             (unsigned long long)random[0], (unsigned long long)random[1]);
    g->head.created = (int64_t)time(NULL);
    g->head.model = g->server->options.model_name;
    g->head.stream = g->params.stream;
}

void generation_read(struct generation *g)
{
    struct kvg_json *body;

    if (prompt_parse(&g->job.body, &g->arena, &body, &g->fault) && read_params(g, body) && read_prompts(g, body))
        name_answer(g);
}
