#include <string.h>
#include "gpu-worker/server/generation_internal.h"

static struct reply_usage usage_of(const struct generation *generation)
{
    struct reply_usage usage = {0};
    for (uint32_t i = 0; i < generation->n_prompts; i++) {
        usage.prompt_tokens += generation->prompts[i].prompt_tokens;
        usage.cached_tokens += generation->prompts[i].cached_tokens;
    }
    for (uint32_t i = 0; i < generation->n_choices; i++)
        usage.completion_tokens += generation->choices[i].completion_tokens;
    return usage;
}

/* The sum over all choices; K, whether it is on, and its gain are the last one's that had drafts: none change nothing, a gain
 * of 1. */
static struct engine_speculation speculation_of(const struct generation *generation)
{
    struct engine_speculation sum = {.gain = 1};
    for (uint32_t i = 0; i < generation->n_choices; i++) {
        const struct engine_speculation *one = &generation->choices[i].speculation;
        sum.runs += one->runs;
        sum.drafted += one->drafted;
        sum.accepted += one->accepted;
        for (int k = 0; k < SPEC_POSITIONS; k++)
            sum.accepted_at[k] += one->accepted_at[k];
        sum.active |= one->active;
        if (one->most) {
            sum.most = one->most;
            sum.gain = one->gain;
        }
    }
    return sum;
}

static bool is_chat(const struct generation *generation)
{
    return generation->head.endpoint == KVG_CHAT_COMPLETIONS;
}

/* data: {"id":...,"choices":[{"index":i, */
static void open_chunk(struct generation *generation, uint32_t index)
{
    kvg_buf_puts(&generation->frame, "data: ");
    reply_open(&generation->frame, &generation->head);
    kvg_buf_printf(&generation->frame, "[{\"index\":%u,", index);
}

/* With include_usage every chunk has the member: null, or the numbers so far where continuous_usage_stats asks for them. */
static void close_chunk(struct generation *generation)
{
    struct kvg_buf *frame = &generation->frame;
    kvg_buf_puts(frame, "}]");
    if (generation->params.continuous_usage) {
        struct reply_usage usage = usage_of(generation);
        kvg_buf_puts(frame, ",\"usage\":");
        usage_json(frame, &usage);
    } else if (generation->params.include_usage) {
        kvg_buf_puts(frame, ",\"usage\":null");
    }
    kvg_buf_puts(frame, "}\n\n");
}

static void add_logprobs(struct generation *generation, struct choice *choice)
{
    kvg_buf_puts(&generation->frame, ",\"logprobs\":");
    if (choice->logprobs.n)
        logprobs_json(&generation->frame, generation->head.endpoint, &choice->logprobs);
    else
        kvg_buf_puts(&generation->frame, "null");
    logprobs_reset(&choice->logprobs);
}

/* The first chunk of a choice: the role, or the echoed prompt. */
static void start_choice(struct generation *generation, uint32_t index)
{
    struct choice *choice = &generation->choices[index];
    const struct kvg_buf *echo = &generation->prompts[index / generation->params.engine.n].echo;

    if (choice->started)
        return;
    choice->started = true;
    if (!is_chat(generation) && !generation->params.echo)
        return;
    open_chunk(generation, index);
    if (is_chat(generation)) {
        kvg_buf_puts(&generation->frame, "\"delta\":{\"role\":\"assistant\",\"content\":\"\"}");
    } else {
        kvg_buf_puts(&generation->frame, "\"text\":");
        kvg_buf_json_string(&generation->frame, echo->bytes, echo->len);
    }
    kvg_buf_puts(&generation->frame, ",\"logprobs\":null,\"finish_reason\":null");
    close_chunk(generation);
}

void stream_delta(struct generation *generation, uint32_t index, const char *text, size_t n)
{
    struct choice *choice = &generation->choices[index];

    start_choice(generation, index);
    if (n == 0 && choice->logprobs.n == 0)
        return;
    open_chunk(generation, index);
    kvg_buf_puts(&generation->frame, is_chat(generation) ? "\"delta\":{\"content\":" : "\"text\":");
    kvg_buf_json_string(&generation->frame, text, n);
    if (is_chat(generation))
        kvg_buf_puts(&generation->frame, "}");
    add_logprobs(generation, choice);
    kvg_buf_puts(&generation->frame, ",\"finish_reason\":null");
    close_chunk(generation);
}

void stream_finish(struct generation *generation, uint32_t index)
{
    struct choice *choice = &generation->choices[index];

    start_choice(generation, index);
    open_chunk(generation, index);
    kvg_buf_puts(&generation->frame, is_chat(generation) ? "\"delta\":{}" : "\"text\":\"\"");
    kvg_buf_printf(&generation->frame, ",\"logprobs\":null,\"finish_reason\":\"%s\"", finish_reason(choice->finish));
    close_chunk(generation);
}

void stream_end(struct generation *generation)
{
    struct kvg_buf *frame = &generation->frame;
    if (generation->params.include_usage) {
        struct reply_usage usage = usage_of(generation);
        struct engine_speculation speculation = speculation_of(generation);
        if (generation->params.include_speculation)
            usage.speculation = &speculation;
        kvg_buf_puts(frame, "data: ");
        reply_open(frame, &generation->head);
        kvg_buf_puts(frame, "[],\"usage\":");
        usage_json(frame, &usage);
        kvg_buf_puts(frame, "}\n\n");
    }
    kvg_buf_puts(frame, "data: [DONE]\n\n");
}

void stream_error(struct generation *generation, int status, const struct kvg_error *err)
{
    kvg_buf_puts(&generation->frame, "data: ");
    error_json(&generation->frame, status, NULL, err);
    kvg_buf_puts(&generation->frame, "\n\n");
}

static void add_choice(struct generation *generation, uint32_t index, struct kvg_buf *out)
{
    struct choice *choice = &generation->choices[index];
    struct kvg_buf text = {0};
    const struct kvg_buf *echo = &generation->prompts[index / generation->params.engine.n].echo;

    kvg_buf_add(&text, echo->bytes, echo->len);
    kvg_buf_add(&text, choice->text.bytes, choice->text.len);
    kvg_buf_printf(out, "%s{\"index\":%u,", index ? "," : "", index);
    kvg_buf_puts(out, is_chat(generation) ? "\"message\":{\"role\":\"assistant\",\"content\":" : "\"text\":");
    kvg_buf_json_string(out, text.bytes, text.len);
    kvg_buf_puts(out, is_chat(generation) ? ",\"refusal\":null},\"logprobs\":" : ",\"logprobs\":");
    if (generation->params.engine.want_logprobs)
        logprobs_json(out, generation->head.endpoint, &choice->logprobs);
    else
        kvg_buf_puts(out, "null");
    kvg_buf_printf(out, ",\"finish_reason\":\"%s\"}", finish_reason(choice->finish));
    out->failed |= text.failed || choice->text.failed;
    kvg_buf_free(&text);
}

void answer_json(struct generation *generation, struct kvg_buf *out)
{
    struct reply_usage usage = usage_of(generation);

    reply_open(out, &generation->head);
    kvg_buf_puts(out, "[");
    for (uint32_t i = 0; i < generation->n_choices; i++)
        add_choice(generation, i, out);
    kvg_buf_puts(out, "],\"usage\":");
    usage_json(out, &usage);
    kvg_buf_puts(out, "}");
}
