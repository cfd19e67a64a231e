/* The prompt side of one model: tokenizer, chat template, fingerprint. What gateway and worker share, so that they derive
 * identical ids from identical bytes.
 *
 * Immutable after it is opened, and safe for any number of threads (the memory of segments inside locks itself).
 */
#pragma once
#include <stdbool.h>
#include "libprompt/arena.h"
#include "libprompt/block_chain.h"
#include "libprompt/error.h"
#include "libprompt/jinja.h"
#include "libprompt/json.h"
#include "libprompt/tokenizer.h"

struct kvg_prompt_model;

/* path: a GGUF or its cut. segment_memory: bytes for remembered segments; 0 turns that off. */
int kvg_prompt_model_open(struct kvg_prompt_model **out, const char *path, size_t segment_memory, struct kvg_error *err);
void kvg_prompt_model_close(struct kvg_prompt_model *model);

const struct kvg_tokenizer *kvg_prompt_model_tokenizer(const struct kvg_prompt_model *model);
const struct kvg_template *kvg_prompt_model_template(const struct kvg_prompt_model *model); /* NULL: the model has none */
const struct kvg_hash *kvg_prompt_model_fingerprint(const struct kvg_prompt_model *model);

enum kvg_endpoint { KVG_CHAT_COMPLETIONS, KVG_COMPLETIONS };

/* How many prompts the body holds: 1 for chat; for completions the entries of an array of strings or of arrays.
 * KVG_INVALID (param "prompt") for none, empty or malformed ones. */
int kvg_prompt_count(enum kvg_endpoint endpoint, const struct kvg_json *body, size_t *count, struct kvg_error *err);

/* ids of the body's prompt number `index`, in the arena. now: seconds since the epoch, for strftime_now.
 * Token ids out of the vocabulary, an empty prompt and every fault of kvg_chat_render are errors with err->param. */
int kvg_prompt_ids(const struct kvg_prompt_model *model, enum kvg_endpoint endpoint, const struct kvg_json *body, size_t index,
                   int64_t now, struct kvg_arena *arena, struct kvg_ids *out, struct kvg_error *err);

/* The rendered prompt of a chat body, in the arena: what kvg_prompt_ids tokenizes. */
int kvg_prompt_text(const struct kvg_prompt_model *model, const struct kvg_json *body, int64_t now, struct kvg_arena *arena,
                    struct kvg_text *out, struct kvg_error *err);
