/* Any safetensors file as a quantized matrix [8, 64] in groups of 32 or 64, by the method that the first byte names: refused, or
 * codes in the format's size or a grouped matrix whose every row can be read, and every column once in an order. */
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/log.h"
#include "gpu-worker/model/quantized.h"

enum { ROWS = 8, COLS = 64 };

static void check_order(const uint32_t *order)
{
    bool seen[COLS] = {false};
    for (uint32_t i = 0; i < COLS; i++) {
        if (order[i] >= COLS || seen[order[i]])
            abort();
        seen[order[i]] = true;
    }
}

static void decode_row(const struct quantized_matrix *matrix, uint32_t r, float row[COLS])
{
    uint8_t q[COLS], zero[COLS];
    float scale[COLS];
    struct grouped_rows scratch = {q, scale, zero};
    if (matrix->format)
        quant_decode(matrix->format, (char *)matrix->data + r * quant_row_bytes(matrix->format, COLS), row, COLS);
    else
        grouped_decode(&matrix->grouped, r, &scratch, row);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct quantization methods[] = {
        {QUANTIZED_GPTQ, 4, 32, 1, false, false},  {QUANTIZED_GPTQ, 8, 32, 0, false, true},
        {QUANTIZED_AWQ, 4, 32, 0, true, false},    {QUANTIZED_PACKED, 4, 32, 0, true, false},
        {QUANTIZED_PACKED, 8, 0, 0, false, false}, {QUANTIZED_INT8, 8, 0, 0, false, false},
        {QUANTIZED_GPTQ, 4, 64, 1, false, false},  {QUANTIZED_AWQ, 4, 64, 0, true, false},
        {QUANTIZED_PACKED, 4, 64, 0, true, false}, {QUANTIZED_INT8, 8, 0, 0, false, false, true},
    };
    struct safetensors *folder;
    struct quantized_matrix matrix;
    struct kvg_error err;
    float row[COLS];

    log_set_level(LOG_ERROR);
    if (size == 0)
        return 0;
    unsigned char *bytes = malloc(size);
    memcpy(bytes, data + 1, size - 1);
    if (safetensors_parse(&folder, bytes, size - 1, &err) == 0) {
        const struct quantization *method = &methods[(data[0] & 0x7f) % (sizeof methods / sizeof *methods)];
        if (quantized_has(method, folder, "m.weight") &&
            quantized_read(&matrix, method, folder, "m.weight", ROWS, COLS, data[0] & 0x80, true, &err) == 0) {
            for (uint32_t r = 0; r < ROWS; r++)
                decode_row(&matrix, r, row);
            if (matrix.order)
                check_order(matrix.order);
            quantized_free_data(&matrix);
        }
        safetensors_close(folder);
    }
    free(bytes);
    return 0;
}
