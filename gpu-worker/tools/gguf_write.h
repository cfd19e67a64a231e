/* Writes a GGUF file: metadata of another one, tensors one after the other. The file appears under its name whole or not at all.
 */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include "libprompt/error.h"
#include "libprompt/gguf.h"

struct gguf_tensor_plan {
    struct kvg_str name;
    uint32_t n_dims;
    uint64_t dims[4]; /* dims[0] varies fastest */
    uint32_t ggml_type;
    uint64_t n_bytes;
};

struct gguf_writer {
    FILE *file;
    char path[4096], temporary[4128];
    const struct gguf_tensor_plan *tensors; /* the caller's, alive until the end */
    size_t n_tensors, next;                 /* next: whose bytes come next */
    uint64_t left;                          /* bytes of the current tensor that are not written yet */
};

/* Writes header, metadata and descriptors to a temporary file (temporary.h) beside path. file_type replaces general.file_type
 * (llama.cpp's numbers). What exists at path and is no regular file is left alone. */
int gguf_write_begin(struct gguf_writer *writer, const char *path, const struct kvg_gguf *metadata, uint32_t file_type,
                     const struct gguf_tensor_plan *tensors, size_t n_tensors, struct kvg_error *err);
/* The next bytes of the tensors, in order; several calls may share a tensor, none spans two. */
int gguf_write_bytes(struct gguf_writer *writer, const void *bytes, uint64_t n, struct kvg_error *err);
/* Every byte was written: the file gets its name, unless something has it by now. */
int gguf_write_end(struct gguf_writer *writer, struct kvg_error *err);
/* Removes the temporary file, where there is one. */
void gguf_write_abort(struct gguf_writer *writer);
