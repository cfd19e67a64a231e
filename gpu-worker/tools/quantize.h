/* kvgate-quantize: what its flags say, and its two kinds of output. */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "libprompt/error.h"

struct quantize_flags {
    const char *in, *out, *format, *calibration;
    uint32_t tokens, context, threads, memory_mib, group;
    bool lm_head, awq, act_order; /* awq: of GGUF files, instead of GPTQ */
};

/* in, out: GGUF files; format q8_0, q4_0, bf16. out must not exist: KVG_FILE. See kvgate_quantize.c. */
int quantize_gguf(const struct quantize_flags *flags, struct kvg_error *err);
/* in, out: Hugging Face folders; format w8a8 (compressed-tensors), gptq-int4, awq-int4, or q8_0: GPTQ's tensors
 * with 8 bits in groups of 32. out must not exist. */
int quantize_hf(const struct quantize_flags *flags, struct kvg_error *err);
