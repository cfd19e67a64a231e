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
 * lane j (mod 4) in mma.m16n8k32.  Grouped matrices (quant/grouped.h) have the same codes, of 8 bits (W8A8) or 4 (W4A16), and
 *
 *   scales  W8A8 [rows] f32 | W4A16 [rows][cols / group] u32: f16 scale, u16 zero
 *
 * A float matrix is [rows][ld] values of the file's type, ld = cols rounded up to 64, zeros.
 *
 * Activations that meet a quantized matrix are rounded to int8 per row and group (d = max|x| / 127), as on the CPU:
 *
 *   q       [2][rows][groups] 16 bytes    values 0..15 of every group, then values 16..31
 *   groups  [rows][groups] {d, s, sum, low}
 *
 * or, where it is a grouped one, per row (d = max|x| / 127 or 32512), in the same memory: int8 as above, or 16-bit integers as
 * 256 high + low, whose q is [4][rows][groups]: high of values 0..15, of 16..31, low of both. Each group's d is the row's.
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
    MATRIX_W8A8,
    MATRIX_W4A16,
    MATRIX_KINDS
};

enum { FLOAT_ALIGN = 64 }; /* columns of a float matrix are padded to a multiple of it */

struct matrix {
    enum matrix_kind kind;
    uint32_t rows, cols;
    uint32_t ld;          /* float: values from row to row; quantized: groups of a row */
    uint32_t group_shift; /* W4A16: a scale is that of 2^group_shift groups of 32 */
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
    size_t plane; /* bytes from the first halves to the second, and so on */
    uint32_t n_groups;
};

/* One product of a matmul: out[row * ld + n] (+)= x W^T (+ bias). */
struct product {
    struct matrix w;
    const float *bias; /* NULL = none */
    float *out;
    uint32_t first_block; /* of the launch */
};
/* The scale of a norm that x still lacks: 1 / sqrt(sum of `parts` parts / (32 parts) + eps) of each row. */
struct row_scale {
    const float *squares; /* [n][parts] sums of squares of 32 values each; NULL = x is whole */
    uint32_t parts;
    float eps;
};

/* What follows the products, of whole groups of 32 rows of W, for up to 8 rows of x:
 *   THEN_NORM   one product, added to the residual stream: next = out * norm, which lacks its row_scale, and `squares`
 *   THEN_GATE   two products: next = silu(first) * second; their own outs are not written */
enum { GEMV_ROWS_MAX = 8 };
enum product_then { THEN_NOTHING, THEN_NORM, THEN_GATE };
struct next_input {
    const float *norm;
    float *squares;
    float *out;       /* f32, or */
    struct acts acts; /* rounded */
    bool rounded;
};

enum { PRODUCTS_MAX = 4 };
struct products {
    struct product p[PRODUCTS_MAX];
    uint32_t count, n; /* n: rows of x */
    bool accumulate;
    enum product_then then;
    struct row_scale scale;
    struct next_input next;
};

/* KV pool: [block][layer][k, v][kv head][slot][head_dim] values, behind them, in int8, [k, v][kv head][slot] f32 scales; one
 * layer's view of it. */
enum kv_store { STORE_BF16, STORE_FP8, STORE_INT8, KV_STORES };
struct kv_view {
    uint8_t *k, *v;
    float *k_scales, *v_scales; /* STORE_INT8 */
    size_t block_bytes;         /* from block to block */
    uint32_t n_heads, n_kv_heads, head_dim, block_size, block_shift;
    uint32_t window;       /* positions that a row of the layer sees, its own included; 0 = all */
    uint32_t window_split; /* keys of a split of decode attention that always suffice for a window; 0 = no window */
};

/* Where a value lies: bytes for k and v, floats for scales. */
struct kv_place {
    size_t values, scale;
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
