/* How weights, activations, KV and the step's state lie in device memory. Structs of pointers go to kernels by value.
 *
 * A quantized matrix [rows, groups of 32] is repacked from the file's blocks into planes, so that neighbouring lanes of a warp
 * read neighbouring groups with one 16-byte load each:
 *
 *   codes   [rows][groups] 16 bytes   4- to 6-bit: value i in the low, value 16 + i in the high half of byte i (bits 0-3)
 *                                     8-bit: values 0..15 as signed bytes
 *   high    [rows][groups]            5-bit: u32, byte k: values k, 4+k, .. 28+k in bits 0..7
 *                                     6-bit: u32 x 2, byte k of the first: values k, 4+k, 8+k, 12+k, two bits each; second: 16+..
 *                                     8-bit: 16 bytes, values 16..31 as signed bytes
 *   scales  [rows][groups]            QUANT_SCALE f16 d | SCALE_MIN f16 d, m | SUPER_MIN u8 sc, mn | SUPER_16 i8 sc[2]
 *   supers  [rows][groups / 8]        SUPER_MIN f16 d, m | SUPER_16 f16 d
 *
 * Word j of a group's codes, masked to its low or high halves, is values 4j..4j+3 or 16+4j..16+4j+3: the operand of dp4a, and of
 * lane j (mod 4) in mma.m16n8k32.  A float matrix is [rows][ld] values of the file's type, ld = cols rounded up to 64, zeros.
 *
 * Activations that meet a quantized matrix are rounded to int8 per row and group (d = max|x| / 127), as on the CPU:
 *
 *   q       [2][rows][groups] 16 bytes    values 0..15 of every group, then values 16..31
 *   groups  [rows][groups] {d, s, sum, low}
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum matrix_kind {
    MATRIX_F32,
    MATRIX_F16,
    MATRIX_BF16,
    MATRIX_SCALE_4,
    MATRIX_SCALE_5,
    MATRIX_SCALE_8,
    MATRIX_MIN_4,
    MATRIX_MIN_5,
    MATRIX_SUPER_MIN_4,
    MATRIX_SUPER_MIN_5,
    MATRIX_SUPER16_6,
    MATRIX_KINDS
};

enum { FLOAT_ALIGN = 64 }; /* columns of a float matrix are padded to a multiple of it */

struct matrix {
    enum matrix_kind kind;
    uint32_t rows, cols;
    uint32_t ld; /* float: values from row to row; quantized: groups of a row */
    const uint8_t *codes, *high, *scales, *supers;
};

/* Scale, scale * sum, sum of q over the group, and over its first 16. */
struct act_group {
    float d, s;
    int32_t sum, low;
} __attribute__((aligned(16)));

struct acts {
    int8_t *q;
    struct act_group *groups;
    size_t plane; /* bytes from the first halves to the second */
    uint32_t n_groups;
};

/* One product of a matmul: out[row * ld + n] (+)= x W^T (+ bias). */
struct product {
    struct matrix w;
    const float *bias; /* NULL = none */
    float *out;
    uint32_t first_block; /* of the launch */
};
enum { PRODUCTS_MAX = 4 };
struct products {
    struct product p[PRODUCTS_MAX];
    uint32_t count, n; /* n: rows of x */
    bool accumulate;
};

/* KV pool: [block][layer][k, v][kv head][slot][head_dim] bf16; one layer's view of it. */
struct kv_view {
    uint16_t *k, *v;
    size_t block_values; /* from block to block */
    uint32_t n_heads, n_kv_heads, head_dim, block_size, block_shift;
};

/* Where a row of the step stands. */
static const uint32_t NO_BLOCK = 0xffffffffu;
struct row_state {
    uint32_t id, position;
    uint32_t block, slot; /* block NO_BLOCK: a row of padding */
} __attribute__((aligned(16)));

struct seq_state {
    uint32_t first_row, n_rows, n_past;
    uint32_t table; /* its block table's first entry in `tables` */
} __attribute__((aligned(16)));

/* A piece of attention: tile `tile` of a sequence's (row, head of the group) pairs. */
static const uint32_t NO_SEQ = 0xffffffffu;
struct attention_item {
    uint32_t seq, tile; /* seq NO_SEQ: padding */
} __attribute__((aligned(8)));

/* The step's state: begin_step fills it on the host and copies it to the device in one piece. */
struct step_view {
    struct row_state *rows;
    uint32_t *outputs;
    struct seq_state *seqs;
    struct attention_item *decodes, *tiles;
    uint32_t *split_keys; /* [1] keys of one split of decode attention */
    uint32_t *tables;
};
