/* Quantized Hugging Face folders, as their quantization_config says, into blocks that backends multiply.
 *
 *   method           in place of X.weight [rows, cols]; P = 32 / bits codes a word, lowest bits first        w
 *   gptq             qweight I32 [cols / P, rows], qzeros I32 [groups, rows / P], scales [groups, rows],     s (q - z - 1)
 *                    g_idx I32 [cols]: the group of a column                                     gptq_v2:    s (q - z)
 *   awq              qweight I32 [cols, rows / 8], qzeros I32 [groups, rows / 8], scales [groups, rows];     s (q - z)
 *                    rows 0..7 of a word in its nibbles 0 4 1 5 2 6 3 7
 *   pack-quantized   weight_packed I32 [rows, cols / P], weight_scale [rows, groups],                        s (q - z)
 *                    weight_zero_point I32 [rows / P, groups], else z = 2^(bits - 1); weight_g_idx I32 [cols]
 *   int-quantized    weight I8 [rows, cols], weight_scale [rows, 1] or [1]                                   s q
 *
 * Scales are F16, BF16 or F32. What becomes of a matrix:
 *
 *   int-quantized, with quantized activations       GROUPED_W8A8 (grouped.h), exact
 *   4 bits, groups of whole 64s or 128s of columns  GROUPED_W4A16, exact but for the scale's rounding to f16
 *
 * and where the backend takes no grouped matrices, or a matrix is of none of these:
 *
 *   4 bits, all z = 8     Q4_0: exact but for the scale's rounding to f16
 *   4 bits, other z       Q4_1: the same, and s z rounded to f16, which is up to 2^-8 of a step
 *   8 bits, all z = 128   Q8_0: as Q4_0
 *   else                  F16 (8-bit codes with other zeros; columns whose order no backend gathers), or F32 where a scale
 *                         loses more than 2^-8 of itself in f16
 *
 * GPTQ with act-order: columns are sorted by group, stable; `order` says which column of the input each is.
 */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "gpu-worker/model/safetensors.h"
#include "gpu-worker/quant/grouped.h"
#include "gpu-worker/quant/quant.h"
#include "libprompt/error.h"
#include "libprompt/gguf.h"

enum quantized_method { QUANTIZED_NONE, QUANTIZED_GPTQ, QUANTIZED_AWQ, QUANTIZED_PACKED, QUANTIZED_INT8 };

struct quantization {
    enum quantized_method method;
    uint32_t bits, group; /* columns of a group; 0 = a row */
    uint32_t zero_add;    /* to stored zeros */
    bool zeros;           /* not symmetric; pack-quantized: there are tensors of zeros */
    bool act_order;       /* g_idx must be there */
    bool activations;     /* they are quantized too, to 8 bits, a scale a token */
    uint32_t head_bits;   /* of lm_head; 0: as the others */
};

/* From the folder's metadata. KVG_UNSUPPORTED names what in the quantization_config is not served. */
int quantization_read(struct quantization *out, const struct kvg_gguf *gguf, struct kvg_error *err);

enum { QUANTIZED_PARTS = 5 };

struct quantized_matrix {
    const struct quant_format *format; /* NULL: grouped */
    void *data;                        /* [rows] of the format, malloc'd */
    struct quant_grouped grouped;      /* reads the folder's tensors, until quantized_free_data */
    struct reading *reading;           /* its context */
    uint32_t *order;                   /* [cols]: column i of the data is column order[i] of the input; NULL: i itself */
    const struct safetensors_tensor *parts[QUANTIZED_PARTS]; /* what it was made of: NULL after the last. parts[0]: the codes */
};

/* That of the matrix `name`, as if it were all matrices'. */
struct quantization quantization_of(const struct quantization *quantization, const char *name);
/* What such matrices become where no backend takes grouped ones. */
const struct quant_format *quantized_format(const struct quantization *quantization);
/* Whether one of so many columns becomes a grouped one; sets its kind, cols, group and zeros. */
bool quantized_grouped(const struct quantization *quantization, uint32_t cols, struct quant_grouped *out);
/* Whether the matrix `name` ("….weight") is stored as codes; others of the folder are floats. */
bool quantized_has(const struct quantization *quantization, const struct safetensors *folder, const char *name);
/* The matrix `name` of exactly [rows, cols]. gathers, groups: the caller can make use of an order, of a grouped
 * matrix. KVG_FILE names the tensor that is missing or of another shape, type or range, with both numbers. */
int quantized_read(struct quantized_matrix *out, const struct quantization *quantization, const struct safetensors *folder,
                   const char *name, uint32_t rows, uint32_t cols, bool gathers, bool groups, struct kvg_error *err);
/* Data, order and what a grouped matrix reads with, not which parts it was made of. */
void quantized_free_data(struct quantized_matrix *matrix);
