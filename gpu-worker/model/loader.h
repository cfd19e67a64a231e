/* From an open GGUF file, or the metadata of a Hugging Face folder and its safetensors, to a model's shape and its backend
 * tensors; what families share. Every fault names the key or tensor. */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "gpu-worker/backend/backend.h"
#include "gpu-worker/model/quantized.h"
#include "gpu-worker/model/safetensors.h"
#include "libprompt/error.h"
#include "libprompt/gguf.h"

struct model_watch;

enum { MAX_LAYERS = 1024 };

/* How rotary frequencies are stretched over contexts longer than those of training. */
enum rope_scaling {
    ROPE_PLAIN,
    ROPE_LINEAR, /* all divided by `factor` */
    ROPE_LLAMA3, /* low ones divided by it, those between two wave lengths in part */
    ROPE_YARN,   /* Peng et al. 2023, arXiv 2309.00071 */
};
struct rope {
    enum rope_scaling scaling;
    double base, factor;
    double low, high, original;  /* llama3: its two factors; both: the context of training */
    double beta_fast, beta_slow; /* yarn: rotations in it between which frequencies are blended */
};

/* The numbers of a decoder-only transformer, as the file's metadata gives them, checked against each other. */
struct shape {
    uint32_t n_layers, hidden, ffn, n_heads, n_kv_heads, head_dim, rotated, max_position;
    float eps;
    struct rope rope;
    float attention_scale;        /* of q k^T */
    bool windowed;                /* some layer has a window */
    double window_base;           /* rotary base of layers with a window; 0 = as the others */
    uint32_t windows[MAX_LAYERS]; /* positions that a layer's rows see, their own included; 0 = all */
};

struct loader {
    const struct kvg_gguf *gguf;
    const struct safetensors *folder; /* where the tensors are; NULL: in gguf. Set before loader_init */
    const struct family *family;      /* set by loader_init */
    struct backend *backend;
    struct quantization quantization; /* of the folder; set by loader_init */
    char arch[32];                    /* "llama", the prefix of the file's keys */
    bool *used;                       /* [tensors of the folder or gguf] */
    uint64_t loaded_bytes, total_bytes;
    void (*progress)(double share, void *context);
    void *context;
    const struct model_watch *watch; /* is told of every matrix; NULL = none */
    uint32_t rank, ranks;            /* of a tensor-parallel group; 0 of 0: alone */
};

/* What a rank takes of a tensor. */
struct loader_part {
    uint32_t first_row, rows, first_col, cols;
};

/* path: a GGUF file, which has metadata and tensors, or a folder's metadata (*gguf) and its tensors (*folder, NULL of a file).
 * The caller closes both, after a failure too: each is NULL or open. */
int loader_open_files(const char *path, struct kvg_gguf **gguf, struct safetensors **folder, struct kvg_error *err);

/* backend: NULL where no tensor will be loaded. KVG_UNSUPPORTED: no family of this architecture. loader_free after failures too.
 */
int loader_init(struct loader *loader, const struct kvg_gguf *gguf, struct backend *backend, struct kvg_error *err);
void loader_free(struct loader *loader);

/* Metadata "<arch>.<key>"; the number must be in 1..most. */
int loader_u32(const struct loader *loader, const char *key, uint32_t most, uint32_t *out, struct kvg_error *err);
int loader_shape(const struct loader *loader, struct shape *shape, struct kvg_error *err);

enum loader_need { LOADER_OPTIONAL, LOADER_REQUIRED };

/* Names are those of GGUF files ("blk.0.attn_q.weight"); in a folder the tensor is found under the name that it has there.
 * The tensor `name` with exactly [rows, cols] (rows = 1: a vector). An absent optional tensor gives *out = NULL. */
int loader_tensor(struct loader *loader, struct tensor **out, const char *name, uint32_t rows, uint32_t cols,
                  enum backend_weight_use use, enum loader_need need, struct kvg_error *err);
/* As loader_tensor, but *out is this part of it, a tensor [part->rows, part->cols]. KVG_INVALID, with both numbers, where its
 * columns do not begin and end on borders of the format's blocks. */
int loader_tensor_part(struct loader *loader, struct tensor **out, const char *name, uint32_t rows, uint32_t cols,
                       const struct loader_part *part, enum backend_weight_use use, enum loader_need need, struct kvg_error *err);
/* The first rows of a matrix that was loaded already, as a matrix of its own. */
int loader_first_rows(struct loader *loader, struct tensor **out, const char *name, uint32_t rows, uint32_t cols,
                      struct kvg_error *err);
/* What GGUF files call the tensor that folders call "model.layers.3.mlp.up_proj.weight": "blk.3.ffn_up.weight". post_norms: of a
 * family that has them. False where the name is of no layer's part. */
bool loader_gguf_name(const char *name, bool post_norms, char out[64]);
/* Columns that a matrix can be cut after: the values of a block of its format; 1 where it is absent. */
uint32_t loader_block(const struct loader *loader, const char *name);
/* Rows of a matrix by name, 0 if absent. */
uint32_t loader_rows(const struct loader *loader, const char *name);
/* Whether the model has an output matrix of its own. A folder's config.json says; where it says tied, one that is there all the
 * same is not used. */
bool loader_has_output(const struct loader *loader);
/* Rotary frequencies of n = rotated / 2 pairs: base^(-i / n), scaled as the shape says and, where the file has rope_freqs.weight
 * (Llama 3's scaling in GGUF files), divided by its factors. */
int loader_frequencies(struct loader *loader, const struct shape *shape, struct tensor **out, struct kvg_error *err);
/* The same of layers with a window: plain, from their own base. */
int loader_window_frequencies(struct loader *loader, const struct shape *shape, struct tensor **out, struct kvg_error *err);
/* After loading. A tensor inside a layer that nobody asked for would change the result: refused. Others are warned about.
 */
int loader_finish(const struct loader *loader, struct kvg_error *err);
