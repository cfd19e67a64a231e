/* The header of a GGUF file (versions 2 and 3, little-endian): metadata and tensor descriptions, every field validated.
 *
 * The file is mapped read-only; strings and arrays point into the mapping and live until kvg_gguf_close.
 * A cut file (kvgate-prompt cut) has metadata and no tensors.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "libprompt/error.h"
#include "libprompt/json.h"

enum kvg_gguf_type {
    KVG_GGUF_U8,
    KVG_GGUF_I8,
    KVG_GGUF_U16,
    KVG_GGUF_I16,
    KVG_GGUF_U32,
    KVG_GGUF_I32,
    KVG_GGUF_F32,
    KVG_GGUF_BOOL,
    KVG_GGUF_STRING,
    KVG_GGUF_ARRAY,
    KVG_GGUF_U64,
    KVG_GGUF_I64,
    KVG_GGUF_F64
};

struct kvg_gguf_value {
    struct kvg_str key;
    enum kvg_gguf_type type; /* of an ARRAY: ARRAY, with item_type */
    enum kvg_gguf_type item_type;
    uint64_t n;                 /* items of an array, else 1 */
    const unsigned char *bytes; /* the first item as it lies in the file (unaligned; a string starts with its u64 length) */
    size_t n_bytes;
};

struct kvg_gguf_tensor {
    struct kvg_str name;
    uint32_t ggml_type; /* the file's type id; validated as known, with a whole number of quantization groups a row */
    uint32_t n_dims;
    uint64_t dims[4]; /* dims[0] varies fastest; unused ones are 1 */
    uint64_t offset;  /* absolute byte offset in the file */
    uint64_t n_bytes; /* offset + n_bytes <= file size */
};

struct kvg_gguf {
    const unsigned char *map;
    size_t size;
    uint32_t version, alignment;
    struct kvg_gguf_value *values;
    size_t n_values;
    struct kvg_gguf_tensor *tensors;
    size_t n_tensors;
    uint64_t data_offset;
};

/* path: a file, or a Hugging Face folder, whose metadata is made from its JSON files and which has no tensors here (hf_folder.h).
 */
int kvg_gguf_open(struct kvg_gguf **out, const char *path, struct kvg_error *err);
/* The same on bytes that the caller keeps alive (fuzzing, tests). */
int kvg_gguf_parse(struct kvg_gguf **out, const unsigned char *bytes, size_t size, struct kvg_error *err);
void kvg_gguf_close(struct kvg_gguf *gguf);
/* The tensor's bytes leave this process' memory; the file gives them again where they are read later. */
void kvg_gguf_release(const struct kvg_gguf *gguf, const struct kvg_gguf_tensor *tensor);

const struct kvg_gguf_value *kvg_gguf_find(const struct kvg_gguf *gguf, const char *key); /* NULL if absent */
const struct kvg_gguf_tensor *kvg_gguf_tensor(const struct kvg_gguf *gguf, const char *name);
bool kvg_gguf_u64(const struct kvg_gguf *gguf, const char *key, uint64_t *out); /* any integer type, non-negative */
bool kvg_gguf_f64(const struct kvg_gguf *gguf, const char *key, double *out);   /* any number type */
bool kvg_gguf_bool(const struct kvg_gguf *gguf, const char *key, bool *out);
bool kvg_gguf_str(const struct kvg_gguf *gguf, const char *key, struct kvg_str *out);

/* Walks an array of strings: start with cursor = value->bytes and call value->n times; each call yields one string. The file
 * was validated when it was opened, so no bound is checked again. */
struct kvg_str kvg_gguf_next_string(const unsigned char **cursor);

/* How a tensor type lies in memory: groups of `weights` consecutive weights of a row in `bytes` bytes. */
struct kvg_gguf_layout {
    const char *name; /* "Q4_K" */
    uint32_t weights, bytes;
};
const struct kvg_gguf_layout *kvg_gguf_layout(uint32_t ggml_type); /* NULL when the type id is unknown or was removed */

/* Writes `in` without its tensors: what the gateway needs, a few MB. `out` appears whole or not at all; what exists there and is
 * no regular file is left alone. */
int kvg_gguf_cut(const char *in, const char *out, struct kvg_error *err);
