/* A rendered prompt: bytes, and for each run of bytes whether the template or the client wrote it.
 *
 *   <|im_start|>user\n   hi<|im_end|>   <|im_end|>\n<|im_start|>assistant\n
 *   |--- TEMPLATE ---|   |--- INPUT --| |------------ TEMPLATE ------------|
 *
 * The tokenizer lets a CONTROL token match only where every byte of it is TEMPLATE, so no client can forge a turn.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum kvg_origin { KVG_TEMPLATE, KVG_INPUT };

struct kvg_run {
    size_t len; /* bytes; never 0 */
    uint8_t origin;
};

struct kvg_text {
    const char *bytes;
    size_t len;
    const struct kvg_run *runs; /* neighbours differ in origin; their lengths add up to len */
    size_t n_runs;
};
