/* Weight formats: how a tensor's bytes in a model file become numbers.
 *
 * A quantized row is a run of file blocks; each block holds one or eight groups of 32 values. Whatever the file packs them like,
 * a format hands out groups in one normal form, from which backends build their own layouts:
 *
 *   QUANT_SCALE       w = d * (q - offset)                 Q4_0 Q5_0 Q8_0
 *   QUANT_SCALE_MIN   w = d * q + m                        Q4_1 Q5_1
 *   QUANT_SUPER_MIN   w = d * sc[0] * q - m * mn           Q4_K Q5_K     d, m shared by 8 groups
 *   QUANT_SUPER_16    w = d * sc[i / 16] * (q - offset)    Q6_K          d shared by 8 groups, one sc per 16 values
 *   QUANT_FLOAT       no groups: decode() alone            F32 F16 BF16
 *
 * A new format is one file here and one line in formats.def. The files use only what C and CUDA C++ share.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { QUANT_GROUP = 32, QUANT_SUPER_GROUPS = 8 };

enum quant_scales { QUANT_FLOAT, QUANT_SCALE, QUANT_SCALE_MIN, QUANT_SUPER_MIN, QUANT_SUPER_16 };

struct quant_group {
    uint8_t q[QUANT_GROUP]; /* unsigned codes of `bits` bits, in the order of the row */
    uint16_t d, m;          /* f16 bits; m is 0 where the form has none */
    int8_t sc[2];           /* 6-bit (SUPER_MIN, sc[0] only) or signed 8-bit (SUPER_16) scales */
    uint8_t mn;
};

struct quant_format {
    const char *name;      /* "Q4_1" */
    uint32_t ggml_type;    /* the type id in GGUF files */
    uint32_t block_values; /* values in one file block */
    uint32_t block_bytes;
    uint32_t bits, offset; /* of a code; 0 for floats */
    enum quant_scales scales;
    void (*unpack)(const void *block, uint32_t group, struct quant_group *out); /* quantized formats: group of one block */
    void (*decode)(const void *src, float *dst, size_t n);                      /* float formats: n values */
    uint32_t d_at, m_at; /* quantized formats: bytes of a block before its f16 d and m; without m both are d's */
    uint32_t exponent;   /* float formats: bits of the exponent in a value, all set in infinities and NaN; else 0 */
};

#define QUANT_FORMAT(name) extern const struct quant_format quant_##name;
#include "gpu-worker/quant/formats.def"
#undef QUANT_FORMAT

/* NULL for a type id that no format has. */
const struct quant_format *quant_find(uint32_t ggml_type);
/* i-th format, NULL past the last. */
const struct quant_format *quant_at(size_t i);
/* Bytes of a row of n values; 0 if n is not a whole number of blocks. */
size_t quant_row_bytes(const struct quant_format *format, size_t n);
/* Group g of a row. */
void quant_unpack(const struct quant_format *format, const void *row, size_t g, struct quant_group *out);
/* Whether the scales of a group are numbers, so that its weights are. */
int quant_group_finite(const struct quant_group *group);
/* Whether all n values of a row are numbers; n a whole number of blocks. */
int quant_row_finite(const struct quant_format *format, const void *row, size_t n);
/* dst[0..n) = the n values of a row in f32; n a whole number of blocks. Sets the meaning of every format: products and sums are
 * taken in f32 in the order written above. */
void quant_decode(const struct quant_format *format, const void *row, float *dst, size_t n);
