/* Weight formats against decoders written here straight from the formats' definitions, value by value. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "gpu-worker/quant/f16.h"
#include "gpu-worker/quant/quant.h"

static uint32_t state = 1;

static uint32_t next_random(void)
{
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
}

/* f16 from its three fields, by arithmetic alone. */
static double half(const uint8_t *p)
{
    unsigned h = p[0] | p[1] << 8, exponent = h >> 10 & 31, mantissa = h & 1023;
    double value = exponent ? ldexp(1024 + mantissa, (int)exponent - 25) : ldexp(mantissa, -24);
    return h >> 15 ? -value : value;
}

static unsigned bit(const uint8_t *p, unsigned i)
{
    return p[i / 8] >> i % 8 & 1;
}

/* 6-bit scale (which = 0) or minimum (1) of group g. */
static unsigned six(const uint8_t *s, unsigned g, unsigned which)
{
    if (g < 4)
        return s[g + 4 * which] % 64;
    unsigned low = which ? s[g + 4] / 16 : s[g + 4] % 16;
    return low + s[g - 4 + 4 * which] / 64 * 16;
}

static double plain(const char *name, const uint8_t *b, unsigned i)
{
    unsigned low = i < 16;
    if (strcmp(name, "Q4_0") == 0)
        return half(b) * ((double)(low ? b[2 + i] % 16 : b[2 + i - 16] / 16) - 8);
    if (strcmp(name, "Q4_1") == 0)
        return half(b) * (low ? b[4 + i] % 16 : b[4 + i - 16] / 16) + half(b + 2);
    if (strcmp(name, "Q5_0") == 0)
        return half(b) * ((double)(low ? b[6 + i] % 16 : b[6 + i - 16] / 16) + 16.0 * bit(b + 2, i) - 16);
    if (strcmp(name, "Q5_1") == 0)
        return half(b) * ((low ? b[8 + i] % 16 : b[8 + i - 16] / 16) + 16.0 * bit(b + 4, i)) + half(b + 2);
    if (strcmp(name, "Q8_0") == 0)
        return half(b) * (int8_t)b[2 + i];
    unsigned g = i / 32, l = i % 32;
    if (strcmp(name, "Q4_K") == 0 || strcmp(name, "Q5_K") == 0) {
        const uint8_t *qs = name[1] == '4' ? b + 16 : b + 48;
        unsigned q = g % 2 ? qs[g / 2 * 32 + l] / 16 : qs[g / 2 * 32 + l] % 16;
        if (name[1] == '5')
            q += 16 * (b[16 + l] >> g & 1);
        return half(b) * six(b + 4, g, 0) * q - half(b + 2) * six(b + 4, g, 1);
    }
    /* Q6_K */
    unsigned in = i % 128, at = i / 128 * 64 + in % 64;
    unsigned q = (in < 64 ? b[at] % 16 : b[at] / 16) + 16 * (b[128 + i / 128 * 32 + l] >> 2 * (in / 32) & 3);
    return half(b + 208) * (int8_t)b[192 + i / 16] * ((double)q - 32);
}

/* Random bytes whose f16 scales are ordinary numbers. */
static void random_block(const char *name, uint8_t *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        b[i] = (uint8_t)(next_random() >> 7);
    size_t d = strcmp(name, "Q6_K") == 0 ? 208 : 0;
    b[d + 1] = (uint8_t)((b[d + 1] & 0x83) | 0x24);
    if (strchr(name, '1') || strcmp(name, "Q4_K") == 0 || strcmp(name, "Q5_K") == 0)
        b[3] = (uint8_t)((b[3] & 0x83) | 0x24);
}

static void test_every_quantized_format_decodes_as_defined(void **unused)
{
    for (size_t f = 0; quant_at(f); f++) {
        const struct quant_format *format = quant_at(f);
        uint8_t block[256];
        float out[256];
        if (format->scales == QUANT_FLOAT)
            continue;
        for (int round = 0; round < 200; round++) {
            random_block(format->name, block, format->block_bytes);
            quant_decode(format, block, out, format->block_values);
            for (unsigned i = 0; i < format->block_values; i++) {
                double want = plain(format->name, block, i);
                if (fabs(out[i] - want) > 3e-6 * (fabs(want) + 1))
                    fail_msg("%s value %u: %g, expected %g", format->name, i, (double)out[i], want);
            }
        }
    }
}

static void test_codes_are_in_range(void **unused)
{
    for (size_t f = 0; quant_at(f); f++) {
        const struct quant_format *format = quant_at(f);
        uint8_t block[256];
        struct quant_group group;
        if (format->scales == QUANT_FLOAT)
            continue;
        random_block(format->name, block, format->block_bytes);
        for (uint32_t g = 0; g < format->block_values / QUANT_GROUP; g++) {
            quant_unpack(format, block, g, &group);
            for (int i = 0; i < QUANT_GROUP; i++)
                assert_true(group.q[i] < 1u << format->bits);
        }
    }
}

static void test_float_formats_are_exact(void **unused)
{
    float values[] = {0, -0.0f, 1, -1.5f, 65504, 6.103515625e-05f, 5.9604644775390625e-08f, -0.333251953125f}, out[8];
    uint16_t halves[8], tops[8];
    for (int i = 0; i < 8; i++) {
        halves[i] = f32_to_f16(values[i]);
        tops[i] = (uint16_t)(f32_bits(values[i]) >> 16);
    }
    quant_decode(&quant_f32, values, out, 8);
    assert_memory_equal(out, values, sizeof out);
    quant_decode(&quant_f16, halves, out, 8);
    assert_memory_equal(out, values, sizeof out);
    quant_decode(&quant_bf16, tops, out, 8);
    for (int i = 0; i < 8; i++)
        assert_int_equal(f32_bits(out[i]), (uint32_t)tops[i] << 16);
}

static void test_every_f16_survives_the_round_trip(void **unused)
{
    for (uint32_t h = 0; h < 65536; h++) {
        uint8_t bytes[2] = {(uint8_t)h, (uint8_t)(h >> 8)};
        if ((h & 0x7c00) == 0x7c00)
            continue;
        assert_true((double)f16_to_f32((uint16_t)h) == half(bytes));
        assert_int_equal(f32_to_f16(f16_to_f32((uint16_t)h)), h);
    }
    assert_true(isinf(f16_to_f32(0x7c00)) && isnan(f16_to_f32(0x7e00)));
    assert_int_equal(f32_to_f16(70000.0f), 0x7c00);
    assert_int_equal(f32_to_f16(1.0f + 0x1p-11f), 0x3c00);              /* tie: to even */
    assert_int_equal(f32_to_f16(1.0f + 0x1.8p-10f + 0x1p-24f), 0x3c02); /* just above a tie */
}

/* Against the groups as they are handed out, and floats as they are decoded; every second row is of ordinary numbers. */
static void test_a_row_is_finite_where_its_numbers_are(void **unused)
{
    enum { BLOCKS = 3, ROUNDS = 4000 };
    for (size_t f = 0; quant_at(f); f++) {
        const struct quant_format *format = quant_at(f);
        size_t n = BLOCKS * format->block_values;
        int n_finite = 0;
        for (int round = 0; round < ROUNDS; round++) {
            uint8_t row[BLOCKS * 256];
            int finite = 1;
            for (size_t b = 0; b < BLOCKS; b++)
                random_block(format->name, row + b * format->block_bytes, format->block_bytes);
            for (size_t i = 0; round % 2 && i < BLOCKS * format->block_bytes; i++)
                row[i] |= (uint8_t)(next_random() % 4 ? 0 : 0x7f);
            if (format->scales == QUANT_FLOAT) {
                float out[BLOCKS];
                quant_decode(format, row, out, n);
                for (size_t i = 0; i < n; i++)
                    finite &= isfinite(out[i]) != 0;
            }
            for (size_t g = 0; format->scales != QUANT_FLOAT && g < n / QUANT_GROUP; g++) {
                struct quant_group group;
                quant_unpack(format, row, g, &group);
                finite &= quant_group_finite(&group);
            }
            if (quant_row_finite(format, row, n) != finite)
                fail_msg("%s: a row is said to be %sfinite", format->name, finite ? "not " : "");
            n_finite += finite;
        }
        assert_true(n_finite > 0 && n_finite < ROUNDS);
    }
}

/* One value that is none, in every place of a row. */
static void test_one_infinity_in_a_row_is_found(void **unused)
{
    for (size_t f = 0; quant_at(f); f++) {
        const struct quant_format *format = quant_at(f);
        size_t blocks = 37;
        uint8_t row[37 * 256] = {0};
        assert_true(quant_row_finite(format, row, blocks * format->block_values));
        for (size_t b = 0; b < blocks; b++) {
            uint8_t *high = row + b * format->block_bytes + (strcmp(format->name, "Q6_K") == 0 ? 208 : 0) +
                            (format->scales == QUANT_FLOAT ? format->block_bytes - 2 : 0);
            memcpy(high, format->block_bytes == 4 || format == &quant_bf16 ? "\x80\xff" : "\0\xfc", 2);
            assert_false(quant_row_finite(format, row, blocks * format->block_values));
            memset(high, 0, 2);
        }
    }
}

static void test_rows_are_whole_blocks_and_ids_are_unique(void **unused)
{
    assert_int_equal(quant_row_bytes(&quant_q4_k, 512), 288);
    assert_int_equal(quant_row_bytes(&quant_q4_k, 576), 0);
    assert_int_equal(quant_row_bytes(&quant_q4_0, 33), 0);
    assert_null(quant_find(255));
    for (size_t f = 0; quant_at(f); f++)
        assert_ptr_equal(quant_find(quant_at(f)->ggml_type), quant_at(f));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_quantized_format_decodes_as_defined),
        cmocka_unit_test(test_codes_are_in_range),
        cmocka_unit_test(test_float_formats_are_exact),
        cmocka_unit_test(test_every_f16_survives_the_round_trip),
        cmocka_unit_test(test_a_row_is_finite_where_its_numbers_are),
        cmocka_unit_test(test_one_infinity_in_a_row_is_found),
        cmocka_unit_test(test_rows_are_whole_blocks_and_ids_are_unique),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
