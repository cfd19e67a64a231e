/* GGUF metadata under construction: what a folder's JSON files say, in the form in which everything else reads it. */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "libprompt/json.h"

struct kvg_gguf_writer {
    struct kvg_buf buf; /* the file; its `failed` is checked once, at the end */
    uint64_t n_values;
};

/* Starts a file of version 3 without tensors. */
void kvg_gguf_write_begin(struct kvg_gguf_writer *writer);
void kvg_gguf_write_u32(struct kvg_gguf_writer *writer, const char *key, uint32_t value);
void kvg_gguf_write_f64(struct kvg_gguf_writer *writer, const char *key, double value);
void kvg_gguf_write_bool(struct kvg_gguf_writer *writer, const char *key, bool value);
void kvg_gguf_write_str(struct kvg_gguf_writer *writer, const char *key, struct kvg_str value);
void kvg_gguf_write_strs(struct kvg_gguf_writer *writer, const char *key, const struct kvg_str *values, size_t n);
void kvg_gguf_write_i32s(struct kvg_gguf_writer *writer, const char *key, const int32_t *values, size_t n);
/* Writes the counts; the bytes are those of writer->buf. */
void kvg_gguf_write_end(struct kvg_gguf_writer *writer);
