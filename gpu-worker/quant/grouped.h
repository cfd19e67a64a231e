/* Matrices whose codes share scales along a row: what GPTQ, AWQ and compressed-tensors write, in one form.
 *
 *   w[r][k] = scale[r][k / group] * (q[r][k] - zero[r][k / group])
 *
 *   kind             q               group         zero                   scale   meets activations of
 *   GROUPED_W8A8     int8            cols (a row)  0                      f32     8 bits, one scale a token
 *   GROUPED_W4A16    4 bits, 0..15   64 or 128     8, or 0..16 if zeros   f16     16 bits, one scale a token
 *
 * A scale of a whole row, or of more than 128 columns, is repeated: a group of 128 costs 1/32 of its codes' bytes. Backends hold
 * them in these bits, in an order of their own:
 *
 *   W8A8    8 bits a weight, and a row's scale (4 bytes) and sum of codes (4 bytes: unsigned activations need it)
 *   W4A16   4 bits a weight, and a group's scale (2 bytes) and, if zeros, its zero (1 byte)
 *
 * What a product is, with x the input row and integers exact (so that no order of them shows):
 *
 *   W8A8    a = rne(x * 127 / amax), d = amax / 127, amax = max|x| of the row
 *           out = f32(sum a q) * (scale * d)
 *   W4A16   a = rne(x * 32512 / amax), d = amax / 32512
 *           acc = fma(f32(sum over group g of a (q - zero)), scale[g], acc), g ascending;  out = acc * d
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum grouped_kind { GROUPED_W8A8, GROUPED_W4A16, GROUPED_KINDS };

/* GROUPED_W8A8: int32 sums of 255 * 128 a column; W4A16: of 16 * 32512 a column of a group. */
enum { GROUPED_MOST_COLS = 1 << 16, GROUPED_SMALL = 64, GROUPED_LARGE = 128 };

/* Rows first..first+n of a matrix. */
struct grouped_rows {
    uint8_t *q;    /* [n][cols]; W8A8: the bits of int8 */
    float *scale;  /* [n][groups], finite; W4A16: they lose nothing that matters in f16 */
    uint8_t *zero; /* [n][groups]; written only if zeros */
};

struct quant_grouped {
    enum grouped_kind kind;
    uint32_t rows, cols, group;
    uint32_t first;      /* row 0 is this row of what `read` reads */
    bool zeros;          /* W4A16: the zeros are not all 8 */
    const void *context; /* of read, which threads call at once for different rows */
    void (*read)(const void *context, uint32_t first, uint32_t n, const struct grouped_rows *out);
};

/* "W8A8", "W4A16". */
const char *grouped_name(enum grouped_kind kind);
/* Whether a backend that takes grouped matrices takes this one: the group is one of its kind, and cols a whole number of them and
 * of 32. */
bool grouped_valid(const struct quant_grouped *matrix);
/* Bytes of `values` weights as the table above counts them; cols: of a row. */
uint64_t grouped_bytes(enum grouped_kind kind, uint32_t cols, uint32_t group, bool zeros, uint64_t values);
/* The groups of columns that a kind takes for `cols` columns whose scales change every `group` of them; 0 = none. */
uint32_t grouped_group(enum grouped_kind kind, uint32_t cols, uint32_t group);
/* Row r as numbers, the reference of every kernel: dst[cols]; scratch holds a row of each part. */
void grouped_decode(const struct quant_grouped *matrix, uint32_t r, const struct grouped_rows *scratch, float *dst);
