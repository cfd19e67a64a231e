/* Checkpoints in the safetensors format: one file, or the shards of a folder that model.safetensors.index.json lists.
 *
 *   header_bytes:u64 LE   header: JSON {"name": {"dtype": "BF16", "shape": [rows, cols], "data_offsets": [begin, end]}, ...} data
 *
 * Files are mapped read-only. Everything in a header is checked before it is used: a tensor's shape times its dtype equals its
 * range, the ranges of a file cover its data once, without overlap or hole, names are unique over all shards, and the index and
 * the shards name the same tensors. Faults name file, tensor and both numbers.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include "libprompt/error.h"
#include "libprompt/json.h"

struct quant_format;

enum { SAFETENSORS_DIMS = 8, SAFETENSORS_NAME = 512 /* most bytes of a name */ };

enum safetensors_dtype {
    ST_BOOL,
    ST_U8,
    ST_I8,
    ST_F8_E5M2,
    ST_F8_E4M3,
    ST_I16,
    ST_U16,
    ST_F16,
    ST_BF16,
    ST_I32,
    ST_U32,
    ST_F32,
    ST_F64,
    ST_I64,
    ST_U64,
    ST_DTYPES
};

struct safetensors_tensor {
    struct kvg_str name;
    enum safetensors_dtype dtype;
    uint32_t n_dims;
    uint64_t shape[SAFETENSORS_DIMS]; /* the last varies fastest; unused ones are 1 */
    const unsigned char *data;        /* in the mapping, of any alignment */
    uint64_t n_bytes;
    uint32_t file; /* index into files */
};

struct safetensors_file {
    const char *name; /* without its folder */
    const unsigned char *map;
    size_t size;
    uint64_t data_offset;
};

struct safetensors {
    struct safetensors_tensor *tensors; /* ascending by name */
    size_t n_tensors;
    struct safetensors_file *files;
    size_t n_files;
    uint64_t total_bytes; /* of all tensors */
};

/* path: a .safetensors file, or a folder with model.safetensors.index.json and its shards, or else with model.safetensors. */
int safetensors_open(struct safetensors **out, const char *path, struct kvg_error *err);
/* One file's bytes, which the caller keeps alive (tests, fuzzing). */
int safetensors_parse(struct safetensors **out, const unsigned char *bytes, size_t size, struct kvg_error *err);
void safetensors_close(struct safetensors *checkpoint);

/* NULL if absent. */
const struct safetensors_tensor *safetensors_find(const struct safetensors *checkpoint, const char *name);
/* The tensor's bytes leave this process' memory; the file gives them again where they are read later. */
void safetensors_release(const struct safetensors *checkpoint, const struct safetensors_tensor *tensor);

/* "BF16". */
const char *safetensors_dtype_name(enum safetensors_dtype dtype);
/* The format of gpu-worker/quant that its bytes are: of F32, F16 and BF16; NULL of others. */
const struct quant_format *safetensors_format(enum safetensors_dtype dtype);
