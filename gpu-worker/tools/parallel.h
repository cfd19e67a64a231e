/* A loop whose parts run on several threads. */
#pragma once
#include <stdint.h>

/* Calls body(context, first, last) for disjoint ranges that cover 0..n, on up to `threads` threads (0 = all cores); returns when
 * all have. */
void parallel_ranges(uint32_t threads, uint64_t n, void (*body)(void *context, uint64_t first, uint64_t last), void *context);
