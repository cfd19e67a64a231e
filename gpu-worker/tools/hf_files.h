/* The files of a Hugging Face folder beside its weights. */
#pragma once
#include "libprompt/json.h"
#include "libprompt/error.h"

enum { HF_PATH = 4200 /* bytes of a folder's path, at most */ };

/* to/config.json: that of `in`, every member as its text stands there, and "quantization_config": added. KVG_UNSUPPORTED where it
 * has one already. */
int hf_files_config(const char *in, const char *to, const struct kvg_buf *added, struct kvg_error *err);
/* Tokenizer, templates, licence: all plain files but weights and config.json. */
int hf_files_copy(const char *in, const char *to, struct kvg_error *err);
/* The folder and the files in it. */
void hf_files_remove(const char *path);
