/* AMX tiles: what the files of AMX products and attention share. Include it only from files that are compiled for AMX.
 *
 * Every kernel configures the tiles when it starts and releases them when it ends, so that no thread carries 8 KiB of tile state
 * through a context switch while it runs something else.
 */
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { AMX_TILES = 8, AMX_ROWS = 16, AMX_ROW_BYTES = 64 };

struct amx_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64)));

/* Tiles 0..3 hold sums (`columns` <= 16 of 32 bits), 4 and 5 `rows` rows of the left factor, 6 and 7 the right factor: a dword of
 * k values a column, so `k_bytes` / 4 lines. */
static inline void amx_begin_columns(uint32_t rows, uint32_t k_bytes, uint32_t columns)
{
    struct amx_config config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int t = 0; t < AMX_TILES; t++) {
        config.rows[t] = (uint8_t)(t < 6 ? rows : k_bytes / 4);
        config.row_bytes[t] = (uint16_t)(t == 4 || t == 5 ? k_bytes : columns * 4);
    }
    /* gcc 12's intrinsic tells the compiler of 8 of its 64 bytes; without this the stores above are dropped. */
    __asm__ volatile("" : : "m"(config) : "memory");
    _tile_loadconfig(&config);
}

static inline void amx_begin(uint32_t rows, uint32_t k_bytes)
{
    amx_begin_columns(rows, k_bytes, AMX_ROW_BYTES / 4);
}

static inline void amx_end(void)
{
    _tile_release();
}
