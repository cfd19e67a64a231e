/* The inner loops, once per instruction set. kernels.inc.h is the source of all of them; kernels_<isa>.c compiles it. */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "gpu-worker/backend/backend.h"
#include "gpu-worker/backend/cpu/attention.h"
#include "gpu-worker/backend/cpu/panels.h"

struct kernels {
    const char *name; /* "avx512-vnni" */
    /* Rows first..end of a->x into a's integers. */
    void (*quantize)(const struct acts *a, uint32_t first, uint32_t end);
    void (*quantize_int16)(const struct acts *a, uint32_t first, uint32_t end);
    void (*quantize_rows8)(const struct acts *a, uint32_t first, uint32_t end);
    /* Rows to BF16, which this set multiplies with BF16 weights; NULL: it multiplies the rows as they are. */
    void (*round_rows16)(const struct acts *a, uint32_t first, uint32_t end);
    /* The form that INT16 kinds read where there are words_from to ACTS_TILE rows; NULL: the planes always. */
    void (*quantize_words)(const struct acts *a, uint32_t first, uint32_t end);
    uint32_t words_from;
    uint32_t int16_sums_below; /* rows: the kernels of INT16 for fewer read sums of groups; see struct acts */
    /* Panel p times rows first..end (first a multiple of ACTS_TILE). */
    void (*panel[PANEL_KINDS])(const struct panels *w, uint32_t p, const struct acts *a, uint32_t first, uint32_t end,
                               const struct panel_store *store);
    void (*rmsnorm)(const float *x, const float *weight, uint32_t n, float eps, float *out);
    void (*silu_mul)(float *gate, const float *up, size_t n);
    /* The same of n_cols columns of two panels' results [n_rows][PANEL_ROWS] into rows of out, `ld` values apart. */
    void (*silu_mul_panel)(const float *gate, const float *up, uint32_t n_rows, uint32_t n_cols, float *out, size_t ld);
    void (*gelu_mul)(float *gate, const float *up, size_t n);
    /* angles: cosines [rotated / 2], then sines. */
    void (*rotate)(float *head, const float *angles, uint32_t rotated, enum rope_style style);
    struct attention_kernels attention[KV_DTYPES];
    struct attention_kernels window_attention[KV_DTYPES]; /* of layers with a sliding window; their KV has a layout of its own */
    uint32_t attention_rows;                              /* of a tile; at most ATTENTION_TILE */
    uint32_t key_padding;                                 /* head dimensions of keys are padded to a multiple of it */
    enum backend_kv_dtype kv_auto;
};

extern const struct kernels kernels_generic, kernels_avx2, kernels_avx512;
/* The kernels of AVX-512 with those replaced that AMX does better. The process must have asked for the tiles (amx_supported). */
void kernels_amx(struct kernels *out);
/* Whether the CPU has AMX int8 and BF16 and the kernel lets this process use the tiles; asks it to. */
bool amx_supported(void);
/* Sets the products of INT16. */
void int16_amx(struct kernels *out);
/* Those of few rows, at most ACTS_TILE: rows first..end of a->x into a->words, and panel p of an INT16 kind times all of them. */
void int16_words_quantize(const struct acts *a, uint32_t first, uint32_t end);
void int16_words_panel(const struct panels *w, uint32_t p, const struct acts *a, const struct panel_store *store);
/* Sets the attention of AMX, but for layers with a window. */
void attention_amx(struct kernels *out);
/* Sets the products with W8A8, W4A16 and BF16 weights of AMX. */
void grouped_amx(struct kernels *out);
