/* From a sampled token to what the client sees: end conditions, text, stop strings, log-probabilities.
 *
 *   id -> detokenizer (whole characters) -> stop strings (held back while they may begin one) -> event
 */
#pragma once
#include "gpu-worker/engine/engine.h"
#include "gpu-worker/engine/request.h"

/* Storage that an event points into; one a thread. */
struct output {
    const struct kvg_vocab_info *vocab;
    char *piece; /* longest piece + 8 bytes */
    uint32_t id;
    struct engine_token_logprob logprob;
};

/* Appends the token to the sequence and fills the event: finish is not NONE when it was the last one, and then everything held
 * is in the text. The event's pointers are valid until the request's next event. */
void output_commit(struct output *output, struct sequence *seq, const struct sample_result *result, struct engine_event *event);
/* An event without a token: FINISH_ABORT, FINISH_ERROR with its text, or FINISH_LENGTH before the first token. */
void output_end(struct sequence *seq, enum engine_finish finish, const char *error, struct engine_event *event);
