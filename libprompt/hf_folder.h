/* A Hugging Face model folder (config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json)
 * as GGUF metadata. kvg_gguf_open does this for a folder; so whatever reads a model file reads a folder, and the file that
 * `kvgate-prompt cut DIR OUT` writes has the folder's fingerprint.
 */
#pragma once
#include "libprompt/error.h"
#include "libprompt/gguf_write.h"
#include "libprompt/json.h"

/* The folder's metadata as a whole GGUF file in *out, which the caller frees. */
int kvg_folder_metadata(struct kvg_buf *out, const char *folder, struct kvg_error *err);

/* ---- its parts ---- */

/* config.json and the text that it was parsed from: "general.architecture" and "<architecture>.*" under the names that GGUF files
 * use. What the file holds and no key can say is refused by name. */
int kvg_folder_config(struct kvg_gguf_writer *writer, const struct kvg_json *config, const char *text, struct kvg_error *err);
/* "tokenizer.ggml.*". settings: tokenizer_config.json, generation: generation_config.json; either may be NULL. */
int kvg_folder_tokenizer(struct kvg_gguf_writer *writer, struct kvg_arena *arena, const struct kvg_json *tokenizer,
                         const struct kvg_json *settings, const struct kvg_json *generation, struct kvg_error *err);
