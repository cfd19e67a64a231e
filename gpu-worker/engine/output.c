#include "gpu-worker/engine/output.h"

static bool contains(const uint32_t *ids, size_t n, uint32_t id)
{
    for (size_t i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

static void fill_usage(const struct sequence *seq, struct engine_event *event)
{
    event->choice = seq->choice;
    event->prompt_tokens = seq->n_prompt;
    event->cached_tokens = seq->cached_tokens;
    event->completion_tokens = sequence_generated(seq);
    event->text = seq->request->text;
    event->matched_stop_token = KVG_NO_TOKEN;
}

static bool ends_generation(const struct output *output, const struct sequence *seq, uint32_t id)
{
    const struct engine_params *params = &seq->request->params;

    if (sequence_generated(seq) <= params->min_tokens)
        return false; /* it was banned; min_tokens counts tokens before the end */
    return (!params->ignore_eos && contains(output->vocab->end_ids, output->vocab->n_end_ids, id)) ||
           contains(params->stop_ids, params->n_stop_ids, id);
}

/* The token's text through the stop strings, into the request's buffer. Whether one was completed. */
static bool add_text(struct output *output, struct sequence *seq, uint32_t id, struct engine_event *event)
{
    struct request *request = seq->request;
    size_t n = kvg_detokenize_step(&seq->detokenizer, id, output->piece);
    int found = STOP_NONE;

    if (sequence_generated(seq) <= request->params.min_tokens) { /* text before min_tokens cannot stop */
        for (size_t i = 0; i < n; i++)
            request->text[i] = output->piece[i];
        event->text_len = n;
        return false;
    }
    event->text_len = stop_feed(&seq->stop, output->piece, n, request->params.include_stop, request->text, &found);
    return found != STOP_NONE;
}

/* The generation ends without a stop string: an incomplete character, then what a stop string might have begun. */
static void flush_text(struct output *output, struct sequence *seq, struct engine_event *event)
{
    struct request *request = seq->request;
    int found = STOP_NONE;
    size_t n = kvg_detokenize_end(&seq->detokenizer, output->piece);

    event->text_len +=
        stop_feed(&seq->stop, output->piece, n, request->params.include_stop, request->text + event->text_len, &found);
    if (found == STOP_NONE)
        event->text_len += stop_flush(&seq->stop, request->text + event->text_len);
}

static void fill_logprob(struct output *output, const struct sample_result *result, struct engine_event *event)
{
    output->logprob = (struct engine_token_logprob){.id = result->id,
                                                    .logprob = result->logprob,
                                                    .n_top = result->n_top,
                                                    .top_ids = result->top_ids,
                                                    .top_logprobs = result->top_logprobs};
    event->logprobs = &output->logprob;
}

void output_commit(struct output *output, struct sequence *seq, const struct sample_result *result, struct engine_event *event)
{
    const struct engine_params *params = &seq->request->params;

    *event = (struct engine_event){.ids = &output->id, .n_ids = 1};
    output->id = seq->ids[seq->n_ids++] = result->id;
    if (seq->counts)
        sequence_count(seq, result->id);
    fill_usage(seq, event);
    if (params->want_logprobs)
        fill_logprob(output, result, event);
    if (ends_generation(output, seq, result->id)) {
        event->finish = FINISH_STOP;
        event->matched_stop_token = result->id;
        if (params->include_stop && add_text(output, seq, result->id, event))
            return;
    } else if (add_text(output, seq, result->id, event)) {
        event->finish = FINISH_STOP;
        return;
    } else if (seq->n_ids == seq->limit) {
        event->finish = FINISH_LENGTH;
    }
    if (event->finish != FINISH_NONE)
        flush_text(output, seq, event);
}

void output_end(struct sequence *seq, enum engine_finish finish, const char *error, struct engine_event *event)
{
    *event = (struct engine_event){.finish = finish, .error = error};
    fill_usage(seq, event);
}
