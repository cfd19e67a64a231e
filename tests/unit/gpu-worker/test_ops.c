/* Every operation of the CPU backend but attention (test_attention.c), on every instruction set this CPU has, against plain code
 * in double; and row-invariance: the bits of a row are the same at every number of rows and threads. Instruction sets give the
 * same bits, too. */
#include <math.h>
#include "gpu-worker/quant/f16.h"
#include "tests/unit/gpu-worker/cpu_world.h"

enum { N = 70, MAX_K = 1536 };

/* ---- matmul ---- */

/* Random rows of a format with scales near 2^-6. */
static uint8_t *random_rows(const struct quant_format *format, uint32_t rows, uint32_t cols)
{
    size_t n = rows * quant_row_bytes(format, cols);
    uint8_t *data = malloc(n);
    for (size_t i = 0; i < n; i++)
        data[i] = (uint8_t)(next_random() >> 7);
    for (size_t b = 0; b < n; b += format->block_bytes) {
        uint16_t d = (uint16_t)(0x2400 + next_random() % 512), m = (uint16_t)(0xa000 + next_random() % 512);
        if (format == &quant_f32) {
            float value = random_float();
            memcpy(data + b, &value, 4);
        } else if (format == &quant_f16 || format == &quant_bf16) {
            uint16_t value = format == &quant_f16 ? f32_to_f16(random_float()) : (uint16_t)(f32_bits(random_float()) >> 16);
            memcpy(data + b, &value, 2);
        } else if (format == &quant_q6_k) {
            memcpy(data + b + 208, &d, 2);
        } else {
            memcpy(data + b, &d, 2);
            if (format->scales == QUANT_SCALE_MIN || format->scales == QUANT_SUPER_MIN)
                memcpy(data + b + 2, &m, 2);
        }
    }
    return data;
}

/* What the definition of matmul allows int16: rounding of x to half a step of its row, of weights to some steps of theirs, and
 * of the sum to 2^15 steps of both. */
static double int16_rounding(const struct quant_format *format, uint32_t cols, const float *x, const float *w)
{
    double x_most = 0, w_most = 0, x_sum = 0, w_sum = 0;
    for (uint32_t k = 0; k < cols; k++) {
        x_most = fmax(x_most, fabs((double)x[k]));
        w_most = fmax(w_most, fabs((double)w[k]));
        x_sum += fabs((double)x[k]);
        w_sum += fabs((double)w[k]);
    }
    double a = x_most / 32512, d = w_most * 2 / 32600; /* the row's largest weight may be one its codes do not use */
    double steps = format->bits == 4 ? 12 : format->bits == 5 ? 24 : 32;
    return 1.001 * (a / 2 * w_sum + steps * d * x_sum + steps / 2 * cols * a * d + 32768 * a * d);
}

/* What the definition of matmul allows: rounding of x to d/2 per value (none for float weights), plus f32 sums. */
static void check_against_double(const struct quant_format *format, bool int16, const uint8_t *rows, uint32_t cols,
                                 const float *x, const float *bias, const float *out)
{
    static float w[MAX_K];
    for (uint32_t n = 0; n < N; n++) {
        quant_decode(format, rows + n * quant_row_bytes(format, cols), w, cols);
        for (uint32_t m = 0; m < MOST_ROWS; m += 9) {
            double sum = bias[n], rounding = 0, terms = 0;
            for (uint32_t g = 0; g < cols; g += QUANT_GROUP) {
                double amax = 0, weights = 0;
                for (uint32_t k = g; k < g + QUANT_GROUP; k++) {
                    double product = (double)x[m * cols + k] * w[k];
                    sum += product;
                    terms += fabs(product);
                    amax = fmax(amax, fabs((double)x[m * cols + k]));
                    weights += fabs((double)w[k]);
                }
                rounding += amax / 254 * 1.0001 * weights;
            }
            if (int16)
                rounding = int16_rounding(format, cols, x + m * cols, w);
            double bound =
                (format->scales == QUANT_FLOAT ? 0 : rounding) + (int16 ? 1e-6 : 1e-5) * (terms + fabs((double)bias[n]));
            if (fabs((double)out[m * N + n] - sum) > bound)
                fail_msg("%s%s row %u output %u: %g, expected %g within %g", format->name, int16 ? " int16" : "", m, n,
                         (double)out[m * N + n], sum, bound);
        }
    }
}

/* The quantized product once more, by its definition: integers, then groups in order, in double. */
static void check_against_rule(const struct quant_format *format, const uint8_t *rows, uint32_t cols, const float *x,
                               const float *bias, const float *out)
{
    static float w[MAX_K];
    for (uint32_t n = 0; n < N; n++) {
        quant_decode(format, rows + n * quant_row_bytes(format, cols), w, cols);
        for (uint32_t m = 0; m < MOST_ROWS; m += 31) {
            double sum = bias[n], terms = fabs((double)bias[n]);
            for (uint32_t g = 0; g < cols; g += QUANT_GROUP) {
                float amax = 0;
                for (uint32_t k = g; k < g + QUANT_GROUP; k++)
                    amax = fmaxf(amax, fabsf(x[m * cols + k]));
                for (uint32_t k = g; k < g + QUANT_GROUP; k++) {
                    double product = (double)rintf(x[m * cols + k] * (127.0f / amax)) * (double)(amax / 127.0f) * (double)w[k];
                    sum += product;
                    terms += fabs(product);
                }
            }
            if (fabs((double)out[m * N + n] - sum) > 2e-6 * terms)
                fail_msg("%s row %u output %u: %g, by the rule %g", format->name, m, n, (double)out[m * N + n], sum);
        }
    }
}

/* The weights of a row in units of its D (returned), by their definition. */
static float int16_weights(const struct quant_format *format, const uint8_t *row, uint32_t cols, int32_t *w)
{
    struct quant_group group;
    float unit = 0;
    for (uint32_t k = 0; k < cols; k++) {
        quant_unpack(format, row, k / QUANT_GROUP, &group);
        float d = f16_to_f32(group.d), m = f16_to_f32(group.m);
        float s = format->scales >= QUANT_SUPER_MIN ? d * (float)group.sc[format->scales == QUANT_SUPER_16 ? k / 16 % 2 : 0] : d;
        float c = format->scales == QUANT_SUPER_MIN ? m * -(float)group.mn : format->offset ? -(float)format->offset * s : m;
        float last = (float)((1 << format->bits) - 1) * s + c;
        unit = fmaxf(unit, fmaxf(fabsf(c), fabsf(last)) / 32600);
        if (format->scales >= QUANT_SUPER_MIN)
            unit = fmaxf(unit, fmaxf(fabsf(d), fabsf(m)) * 128 / 32767);
    }
    for (uint32_t k = 0; k < cols; k++) {
        quant_unpack(format, row, k / QUANT_GROUP, &group);
        float d = f16_to_f32(group.d) / unit, m = f16_to_f32(group.m) / unit;
        int32_t s = (int32_t)rintf(d), c = (int32_t)rintf(m);
        if (format->scales >= QUANT_SUPER_MIN) {
            s = ((int32_t)rintf(d * 128) * group.sc[format->scales == QUANT_SUPER_16 ? k / 16 % 2 : 0] + 64) >> 7;
            c = ((int32_t)rintf(m * -128) * group.mn + 64) >> 7;
        }
        w[k] = s * group.q[k % QUANT_GROUP] + (format->offset ? -(int32_t)format->offset * s : c);
    }
    return unit;
}

/* The int16 product by its definition, to the bit: plain integers, then one product and the bias in f32. */
static void check_against_int16(const struct quant_format *format, const uint8_t *rows, uint32_t cols, const float *x,
                                const float *bias, const float *out)
{
    static int32_t w[MAX_K];
    for (uint32_t n = 0; n < N; n++) {
        float unit = int16_weights(format, rows + n * quant_row_bytes(format, cols), cols, w);
        for (uint32_t m = 0; m < MOST_ROWS; m += 31) {
            float amax = 0;
            for (uint32_t k = 0; k < cols; k++)
                amax = fmaxf(amax, fabsf(x[m * cols + k]));
            int64_t sum = 0;
            for (uint32_t k = 0; k < cols; k++)
                sum += (int64_t)w[k] * (int64_t)rintf(x[m * cols + k] * (32512 / amax));
            float want = (float)((sum + 32768) >> 16) * (unit * (amax / 32512 * 65536)) + bias[n];
            if (out[m * N + n] != want)
                fail_msg("%s row %u output %u: %g, by the int16 rule %g", format->name, m, n, (double)out[m * N + n],
                         (double)want);
        }
    }
}

static void multiply(struct cpu_backend *cpu, const struct quant_format *format, const uint8_t *rows, const float *bias,
                     uint32_t cols, const float *x, uint32_t n, float *out, bool accumulate)
{
    struct backend_weight weight = {format, rows, N, cols};
    struct tensor *w, *in = activation(cpu, MOST_ROWS, cols), *result = activation(cpu, MOST_ROWS, N);
    assert_int_equal(cpu->base.ops->weight(&cpu->base, &w, &weight, WEIGHT_MATMUL, NULL), 0);
    struct backend_matmul args = {
        .count = 1, .weights = {w}, .biases = {vector_of(cpu, bias, N)}, .outs = {result}, .accumulate = accumulate};
    memcpy(in->data, x, (size_t)n * cols * sizeof *x);
    memcpy(result->data, out, (size_t)n * N * sizeof *out);
    cpu->base.ops->matmul(&cpu->base, n, in, &args);
    memcpy(out, result->data, (size_t)n * N * sizeof *out);
}

static bool covers_int16(const struct quant_format *format)
{
    return format->bits >= 4 && format->bits <= 6;
}

static void check_rows(const struct quant_format *format, bool int16, uint32_t cols, float *first_isa)
{
    static const uint32_t counts[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  12, 14, 15, 16,
                                      17, 22, 31, 32, 33, 40, 41, 48, 64, 65, 96, 97, 128};
    static float x[MOST_ROWS * MAX_K], whole[MOST_ROWS * N], part[MOST_ROWS * N], bias[N];
    uint8_t *rows = random_rows(format, N, cols);
    for (size_t i = 0; i < (size_t)MOST_ROWS * cols; i++)
        x[i] = random_float() * (i % 37 == 0 ? 8 : 1);
    for (uint32_t i = 0; i < N; i++)
        bias[i] = random_float();
    bool any = false;
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        const char *arithmetic = int16 ? "int16" : "int8";
        struct cpu_backend *cpu = open_arithmetic(isas[i], arithmetic, 2);
        if (!cpu)
            continue;
        multiply(cpu, format, rows, bias, cols, x, MOST_ROWS, whole, false);
        close_backend(cpu);
        if (format != &quant_bf16 || strcmp(isas[i], "amx") != 0)
            check_against_double(format, int16, rows, cols, x, bias, whole);
        if (int16)
            check_against_int16(format, rows, cols, x, bias, whole);
        else if (format->scales != QUANT_FLOAT)
            check_against_rule(format, rows, cols, x, bias, whole);
        bool rounds = format == &quant_bf16 && strcmp(isas[i], "amx") == 0; /* test_grouped.c checks it */
        if (any && !rounds)
            assert_memory_equal(whole, first_isa, sizeof whole);
        memcpy(first_isa, whole, sizeof whole);
        any = true;
        for (uint32_t threads = 1; threads <= 2; threads++) {
            cpu = open_arithmetic(isas[i], arithmetic, threads);
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
                uint32_t first = MOST_ROWS - counts[c];
                multiply(cpu, format, rows, bias, cols, x + (size_t)first * cols, counts[c], part, false);
                if (memcmp(part, whole + (size_t)first * N, (size_t)counts[c] * N * sizeof *part))
                    fail_msg("%s %s: %u rows on %u threads differ from 128", isas[i], format->name, counts[c], threads);
            }
            close_backend(cpu);
        }
    }
    free(rows);
}

static void test_matmul_is_right_and_row_invariant_in_every_format(void **unused)
{
    static float first_isa[MOST_ROWS * N];
    for (size_t f = 0; quant_at(f); f++) {
        for (int int16 = 0; int16 <= covers_int16(quant_at(f)); int16++) {
            check_rows(quant_at(f), int16, 1536, first_isa);
            if (quant_at(f)->block_values <= QUANT_GROUP)
                check_rows(quant_at(f), int16, 96, first_isa);
        }
    }
}

/* The sums of bytes in 16 bits that some instruction sets have are as large as they can be. */
static void test_matmul_of_the_largest_codes_does_not_overflow(void **unused)
{
    enum { COLS = 512, ROWS = 8 };
    static float x[ROWS * COLS], first[2][ROWS * N], out[ROWS * N], bias[N];
    for (size_t i = 0; i < (size_t)ROWS * COLS; i++)
        x[i] = i / COLS % 2 ? -3 : 3;
    for (size_t f = 0; quant_at(f); f++) {
        const struct quant_format *format = quant_at(f);
        size_t n = N * quant_row_bytes(format, COLS);
        uint8_t *rows = random_rows(format, N, COLS);
        if (format->scales == QUANT_FLOAT || !rows) {
            free(rows);
            continue;
        }
        for (size_t b = 0; b < n; b += format->block_bytes) {
            uint8_t scale[4], *at = rows + b + (format->scales == QUANT_SUPER_16 ? format->block_bytes - 2 : 0);
            size_t n_scale = format->scales == QUANT_SCALE_MIN || format->scales == QUANT_SUPER_MIN ? 4 : 2;
            memcpy(scale, at, n_scale);
            memset(rows + b, format->bits == 8 ? 0x80 : 0xff, format->block_bytes);
            memcpy(at, scale, n_scale);
        }
        for (size_t i = 0; i < 2 * sizeof isas / sizeof *isas; i++) {
            const char *isa = isas[i / 2];
            struct cpu_backend *cpu = open_arithmetic(isa, i % 2 ? "int16" : "int8", 1);
            if (!cpu)
                continue;
            multiply(cpu, format, rows, bias, COLS, x, ROWS, out, false);
            close_backend(cpu);
            if (i < 2)
                memcpy(first[i], out, sizeof out);
            if (memcmp(first[i % 2], out, sizeof out))
                fail_msg("%s %s: %g, %s has %g", isa, format->name, (double)out[0], isas[0], (double)first[i % 2][0]);
        }
        free(rows);
    }
}

/* Scratch grows by weights as they come: one that fills its last unit of 64 columns after one that fills half of it. */
static void test_matmul_is_right_behind_a_narrower_weight(void **unused)
{
    enum { NARROW = 96, COLS = 128, ROWS = 16 };
    static float x[ROWS * COLS], narrow[ROWS * N], out[ROWS * N], alone[ROWS * N], bias[N];
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        x[i] = random_float();
    for (size_t f = 0; quant_at(f); f++) {
        const struct quant_format *format = quant_at(f);
        if (format->block_values > QUANT_GROUP)
            continue;
        uint8_t *rows = random_rows(format, N, COLS), *narrow_rows = random_rows(format, N, NARROW);
        for (size_t i = 0; i < 2 * sizeof isas / sizeof *isas; i++) {
            const char *isa = isas[i / 2], *arithmetic = i % 2 ? "int16" : "int8";
            struct cpu_backend *cpu = open_arithmetic(isa, arithmetic, 1);
            if (!cpu)
                continue;
            multiply(cpu, format, rows, bias, COLS, x, ROWS, alone, false);
            close_backend(cpu);
            cpu = open_arithmetic(isa, arithmetic, 1);
            multiply(cpu, format, narrow_rows, bias, NARROW, x, ROWS, narrow, false);
            multiply(cpu, format, rows, bias, COLS, x, ROWS, out, false);
            close_backend(cpu);
            if (memcmp(out, alone, sizeof out))
                fail_msg("%s %s %s: a narrower weight changes the product", isa, arithmetic, format->name);
        }
        free(rows);
        free(narrow_rows);
    }
}

static void test_matmul_adds_to_its_output(void **unused)
{
    static const uint32_t counts[] = {3, 20, 50, MOST_ROWS};
    static float x[MOST_ROWS * 64], out[MOST_ROWS * N], plain[MOST_ROWS * N], bias[N];
    uint8_t *rows = random_rows(&quant_q4_0, N, 64);
    for (int i = 0; i < MOST_ROWS * 64; i++)
        x[i] = random_float();
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        struct cpu_backend *cpu = open_backend(isas[i], 1);
        if (!cpu)
            continue;
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            for (uint32_t j = 0; j < counts[c] * N; j++)
                out[j] = (float)j;
            multiply(cpu, &quant_q4_0, rows, bias, 64, x, counts[c], plain, false);
            multiply(cpu, &quant_q4_0, rows, bias, 64, x, counts[c], out, true);
            for (uint32_t j = 0; j < counts[c] * N; j++)
                assert_true(out[j] == (float)j + plain[j]);
        }
        close_backend(cpu);
    }
    free(rows);
}

static void test_zero_activations_give_zero(void **unused)
{
    static float x[2 * 64], out[2 * N], bias[N];
    uint8_t *rows = random_rows(&quant_q5_1, N, 64);
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        struct cpu_backend *cpu = open_backend(isas[i], 1);
        if (!cpu)
            continue;
        multiply(cpu, &quant_q5_1, rows, bias, 64, x, 2, out, false);
        for (int j = 0; j < 2 * N; j++)
            assert_true(out[j] == 0);
        close_backend(cpu);
    }
    free(rows);
}

/* ---- element-wise ---- */

static void test_rmsnorm_and_silu(void **unused)
{
    enum { ROWS = 3, COLS = 72 }; /* not a multiple of 16 */
    static float values[ROWS * COLS], weights[COLS], first_norm[ROWS * COLS], first_silu[ROWS * COLS];
    bool any = false;
    for (int i = 0; i < ROWS * COLS; i++)
        values[i] = random_float() * 30;
    values[0] = -104, values[1] = 104, values[2] = 0;
    for (int i = 0; i < COLS; i++)
        weights[i] = random_float();
    for (size_t s = 0; s < sizeof isas / sizeof *isas; s++) {
        struct cpu_backend *cpu = open_backend(isas[s], 2);
        if (!cpu)
            continue;
        struct tensor *x = activation(cpu, ROWS, COLS), *out = activation(cpu, ROWS, COLS), *up = activation(cpu, ROWS, COLS);
        memcpy(x->data, values, sizeof values);
        for (int i = 0; i < ROWS * COLS; i++)
            up->data[i] = 0.5f;
        cpu->base.ops->rmsnorm(&cpu->base, ROWS, x, vector_of(cpu, weights, COLS), 1e-5f, out);
        cpu->base.ops->silu_mul(&cpu->base, ROWS, x, up);
        for (int r = 0; r < ROWS; r++) {
            double sum = 0;
            for (int i = 0; i < COLS; i++)
                sum += (double)values[r * COLS + i] * values[r * COLS + i];
            for (int i = 0; i < COLS; i++) {
                double v = values[r * COLS + i], norm = v / sqrt(sum / COLS + 1e-5) * weights[i], silu = v / (1 + exp(-v)) * 0.5;
                assert_true(fabs(out->data[r * COLS + i] - norm) <= 1e-6 * fabs(norm) + 1e-30);
                assert_true(fabs(x->data[r * COLS + i] - silu) <= 2e-6 * fabs(silu) + 1e-30);
            }
        }
        if (any) {
            assert_memory_equal(first_norm, out->data, sizeof first_norm);
            assert_memory_equal(first_silu, x->data, sizeof first_silu);
        }
        memcpy(first_norm, out->data, sizeof first_norm);
        memcpy(first_silu, x->data, sizeof first_silu);
        any = true;
        close_backend(cpu);
    }
}

/* ---- norms and gates with their products ---- */

enum { FUSED_COLS = 256, FUSED_ROWS = GATED_ROWS + 40 };

static struct tensor *matrix_of(struct cpu_backend *cpu, const struct quant_format *format, const void *rows)
{
    struct tensor *tensor;
    struct backend_weight weight = {format, rows, N, FUSED_COLS};
    assert_int_equal(cpu->base.ops->weight(&cpu->base, &tensor, &weight, WEIGHT_MATMUL, NULL), 0);
    return tensor;
}

static struct tensor *ordered_matrix(struct cpu_backend *cpu, const struct quant_format *format, const void *rows,
                                     const uint32_t *order)
{
    struct tensor *tensor;
    struct backend_weight weight = {
        .format = format, .data = rows, .rows = N, .cols = FUSED_COLS, .source = rows, .order = order};
    assert_int_equal(cpu->base.ops->weight(&cpu->base, &tensor, &weight, WEIGHT_MATMUL, NULL), 0);
    return tensor;
}

static struct tensor *random_activation(struct cpu_backend *cpu, uint32_t rows, uint32_t cols)
{
    struct tensor *tensor = activation(cpu, rows, cols);
    for (size_t i = 0; i < (size_t)rows * cols; i++)
        tensor->data[i] = random_float() * 8;
    return tensor;
}

static void check_fused(struct cpu_backend *cpu, const struct quant_format *one, const struct quant_format *other)
{
    static const uint32_t counts[] = {1, 17, 100, FUSED_ROWS};
    const struct backend_ops *ops = cpu->base.ops;
    struct backend *backend = &cpu->base;
    uint8_t *rows[2] = {random_rows(one, N, FUSED_COLS), random_rows(other, N, FUSED_COLS)};
    struct tensor *a = matrix_of(cpu, one, rows[0]), *b = matrix_of(cpu, other, rows[1]);
    struct tensor *x = random_activation(cpu, FUSED_ROWS, FUSED_COLS), *normed = activation(cpu, FUSED_ROWS, FUSED_COLS);
    struct tensor *bias = random_activation(cpu, 1, N), *out[4];
    struct backend_norm norm = {random_activation(cpu, 1, FUSED_COLS), 1e-5f, activation(cpu, FUSED_ROWS, FUSED_COLS)};
    for (int i = 0; i < 4; i++)
        out[i] = activation(cpu, FUSED_ROWS, N);
    struct backend_matmul parts = {2, {a, b}, {bias}, {out[0], out[1]}, false},
                          fused = {2, {a, b}, {bias}, {out[2], out[3]}, false};
    struct backend_matmul products = {2, {a, b}, {NULL}, {out[0], out[1]}, false};
    struct backend_gated gated = {a, b, out[2]};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        uint32_t n = counts[i];
        size_t bytes = (size_t)n * N * sizeof(float);
        ops->rmsnorm(backend, n, x, norm.weight, norm.eps, normed);
        ops->matmul(backend, n, normed, &parts);
        ops->normed_matmul(backend, n, x, &norm, &fused);
        assert_memory_equal(out[0]->data, out[2]->data, bytes);
        assert_memory_equal(out[1]->data, out[3]->data, bytes);
        ops->matmul(backend, n, normed, &products);
        ops->silu_mul(backend, n, out[0], out[1]);
        ops->normed_gated(backend, n, x, &norm, &gated);
        assert_memory_equal(out[0]->data, out[2]->data, bytes);
    }
    free(rows[0]), free(rows[1]);
}

static void test_products_with_norm_and_gate_have_the_bits_of_their_parts(void **unused)
{
    static const struct quant_format *const pairs[][2] = {
        {&quant_q4_1, &quant_q4_1}, {&quant_q4_0, &quant_q8_0}, {&quant_q6_k, &quant_f16}};
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++)
        for (size_t j = 0; j < sizeof pairs / sizeof *pairs; j++) {
            struct backend *backend;
            struct backend_options options = {isas[i], 2, FUSED_ROWS, 1, 1};
            struct kvg_error err;
            int rc = cpu_backend_open(&backend, &options, &err);
            if (rc == KVG_UNSUPPORTED)
                continue;
            assert_int_equal(rc, 0);
            check_fused(cpu_of(backend), pairs[j][0], pairs[j][1]);
            backend->ops->close(backend);
        }
}

static void random_order(uint32_t order[FUSED_COLS])
{
    for (uint32_t i = 0; i < FUSED_COLS; i++)
        order[i] = i;
    for (uint32_t i = FUSED_COLS - 1; i > 0; i--) {
        uint32_t j = (uint32_t)((random_float() + 1) / 2 * (float)i), other = order[i];
        order[i] = order[j];
        order[j] = other;
    }
}

static void gather_columns(const struct tensor *x, const uint32_t *order, struct tensor *out)
{
    for (uint32_t r = 0; r < FUSED_ROWS; r++)
        for (uint32_t i = 0; i < FUSED_COLS; i++)
            out->data[r * FUSED_COLS + i] = x->data[r * FUSED_COLS + (order ? order[i] : i)];
}

/* Products of weights with orders have the bits of products of gathered inputs, also fused, also where orders differ. */
static void check_orders(struct cpu_backend *cpu, const struct quant_format *format, const uint32_t *const orders[2])
{
    static const uint32_t counts[] = {1, 17, FUSED_ROWS};
    const struct backend_ops *ops = cpu->base.ops;
    struct backend *backend = &cpu->base;
    uint8_t *rows[2] = {random_rows(format, N, FUSED_COLS), random_rows(format, N, FUSED_COLS)};
    struct tensor *plain[2], *ordered[2], *out[4];
    struct tensor *x = random_activation(cpu, FUSED_ROWS, FUSED_COLS), *normed = activation(cpu, FUSED_ROWS, FUSED_COLS);
    struct tensor *gathered = activation(cpu, FUSED_ROWS, FUSED_COLS), *bias = random_activation(cpu, 1, N);
    struct backend_norm norm = {random_activation(cpu, 1, FUSED_COLS), 1e-5f, activation(cpu, FUSED_ROWS, FUSED_COLS)};
    for (int i = 0; i < 2; i++) {
        plain[i] = matrix_of(cpu, format, rows[i]);
        ordered[i] = ordered_matrix(cpu, format, rows[i], orders[i]);
    }
    for (int i = 0; i < 4; i++)
        out[i] = activation(cpu, FUSED_ROWS, N);
    struct backend_matmul both = {2, {ordered[0], ordered[1]}, {bias}, {out[2], out[3]}, false};
    struct backend_gated gated = {ordered[0], ordered[1], out[2]};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        uint32_t n = counts[i];
        size_t bytes = (size_t)n * N * sizeof(float);
        ops->rmsnorm(backend, n, x, norm.weight, norm.eps, normed);
        for (int j = 0; j < 2; j++) {
            struct backend_matmul one = {1, {plain[j]}, {j == 0 ? bias : NULL}, {out[j]}, false};
            gather_columns(normed, orders[j], gathered);
            ops->matmul(backend, n, gathered, &one);
        }
        ops->normed_matmul(backend, n, x, &norm, &both);
        assert_memory_equal(out[0]->data, out[2]->data, bytes);
        assert_memory_equal(out[1]->data, out[3]->data, bytes);
        ops->matmul(backend, n, normed, &both);
        assert_memory_equal(out[0]->data, out[2]->data, bytes);
        assert_memory_equal(out[1]->data, out[3]->data, bytes);
        struct backend_matmul gate = {1, {plain[0]}, {NULL}, {out[0]}, false};
        gather_columns(normed, orders[0], gathered);
        ops->matmul(backend, n, gathered, &gate);
        ops->silu_mul(backend, n, out[0], out[1]);
        ops->normed_gated(backend, n, x, &norm, &gated);
        assert_memory_equal(out[0]->data, out[2]->data, bytes);
    }
    free(rows[0]), free(rows[1]);
}

static void test_weights_with_an_order_meet_the_gathered_input(void **unused)
{
    static const struct quant_format *const formats[] = {&quant_q4_0, &quant_q4_1, &quant_q8_0};
    static uint32_t one[FUSED_COLS], other[FUSED_COLS];
    const uint32_t *const pairs[][2] = {{one, one}, {one, other}, {one, NULL}, {NULL, other}};
    random_order(one);
    random_order(other);
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++)
        for (size_t j = 0; j < sizeof formats / sizeof *formats; j++)
            for (size_t k = 0; k < sizeof pairs / sizeof *pairs; k++) {
                struct backend *backend;
                struct backend_options options = {isas[i], 2, FUSED_ROWS, 1, 1};
                int rc = cpu_backend_open(&backend, &options, NULL);
                if (rc == KVG_UNSUPPORTED)
                    continue;
                assert_int_equal(rc, 0);
                check_orders(cpu_of(backend), formats[j], pairs[k]);
                backend->ops->close(backend);
            }
}

static void test_an_order_out_of_range_or_of_floats_is_refused(void **unused)
{
    static uint8_t rows[N * FUSED_COLS * sizeof(float)];
    static uint32_t order[FUSED_COLS];
    struct cpu_backend *cpu = open_backend("generic", 1);
    struct tensor *tensor;
    struct kvg_error err;
    struct backend_weight weight = {.format = &quant_q4_0, .data = rows, .rows = N, .cols = FUSED_COLS, .order = order};
    order[3] = FUSED_COLS;
    assert_int_equal(cpu->base.ops->weight(&cpu->base, &tensor, &weight, WEIGHT_MATMUL, &err), KVG_INVALID);
    assert_string_equal(err.message, "column 3 is column 256 of 256");
    order[3] = 0;
    weight.format = &quant_f32;
    assert_int_equal(cpu->base.ops->weight(&cpu->base, &tensor, &weight, WEIGHT_MATMUL, &err), KVG_UNSUPPORTED);
    close_backend(cpu);
}

static void test_embed_and_gather_are_exact(void **unused)
{
    struct cpu_backend *cpu = open_backend("auto", 2);
    struct backend_kv kv = {1, 1, 1, 16, 4, 16};
    uint8_t *rows = random_rows(&quant_q8_0, 40, 64);
    struct backend_weight weight = {&quant_q8_0, rows, 40, 64};
    struct tensor *table, *out = activation(cpu, 3, 64), *gathered = activation(cpu, 2, 64);
    uint32_t ids[] = {39, 0, 7}, outputs[] = {0, 2}, blocks[] = {2};
    struct backend_seq seq = {0, 3, 0, blocks};
    struct backend_step step = {.n_rows = 3, .n_seqs = 1, .n_outputs = 2, .ids = ids, .outputs = outputs, .seqs = &seq};
    float want[64];
    assert_int_equal(cpu->base.ops->weight(&cpu->base, &table, &weight, WEIGHT_EMBEDDING, NULL), 0);
    assert_int_equal(cpu->base.ops->kv_alloc(&cpu->base, &kv, NULL), 0);
    assert_int_equal(cpu->base.ops->begin_step(&cpu->base, &step, NULL), 0);
    cpu->base.ops->embed(&cpu->base, table, out);
    cpu->base.ops->gather(&cpu->base, out, gathered);
    for (int i = 0; i < 3; i++) {
        quant_decode(&quant_q8_0, rows + ids[i] * quant_row_bytes(&quant_q8_0, 64), want, 64);
        assert_memory_equal(out->data + i * 64, want, sizeof want);
    }
    assert_memory_equal(gathered->data + 64, want, sizeof want);
    free(rows);
    close_backend(cpu);
}

static void test_bad_options_and_steps_are_refused(void **unused)
{
    struct backend *backend;
    struct backend_options options = {"sse9", 1, 4, 2, 1};
    struct kvg_error err = {0};
    assert_int_equal(cpu_backend_open(&backend, &options, &err), KVG_INVALID);
    assert_non_null(strstr(err.message, "sse9"));
    options.isa = "generic";
    options.arithmetic = "int9";
    assert_int_equal(cpu_backend_open(&backend, &options, &err), KVG_INVALID);
    assert_string_equal(err.message, "unknown --cpu-arithmetic \"int9\" (auto, int8, int16)");
    options.arithmetic = "int8";
    assert_int_equal(cpu_backend_open(&backend, &options, &err), 0);
    struct backend_kv kv = {1, 3, 2, 16, 4, 16};
    assert_true(backend->ops->kv_alloc(backend, &kv, &err) != 0); /* 3 heads over 2 */
    kv = (struct backend_kv){1, 2, 2, 24, 4, 16};
    assert_true(backend->ops->kv_alloc(backend, &kv, &err) != 0); /* head dimension */
    kv = (struct backend_kv){1, 2, 2, 16, 4, 48};
    assert_true(backend->ops->kv_alloc(backend, &kv, &err) != 0); /* block size */
    kv = (struct backend_kv){1, 2, 2, 16, 4, 16};
    assert_int_equal(backend->ops->kv_alloc(backend, &kv, &err), 0);
    uint32_t ids[5] = {0}, bad_block[] = {4}, good_block[] = {3};
    struct backend_seq seq = {0, 5, 0, good_block};
    struct backend_step step = {.n_rows = 5, .n_seqs = 1, .ids = ids, .seqs = &seq};
    assert_true(backend->ops->begin_step(backend, &step, &err) != 0); /* more than max_rows */
    step.n_rows = 4;
    assert_true(backend->ops->begin_step(backend, &step, &err) != 0); /* the sequence is longer than the step */
    seq.n_rows = 3;
    assert_true(backend->ops->begin_step(backend, &step, &err) != 0); /* a row without a sequence */
    seq.n_rows = 4;
    assert_int_equal(backend->ops->begin_step(backend, &step, &err), 0);
    seq.blocks = bad_block;
    assert_true(backend->ops->begin_step(backend, &step, &err) != 0);
    assert_non_null(strstr(err.message, "block 4 of 4"));
    backend->ops->close(backend);
}

int main(void)
{
    name_skipped_isas();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matmul_is_right_and_row_invariant_in_every_format),
        cmocka_unit_test(test_matmul_of_the_largest_codes_does_not_overflow),
        cmocka_unit_test(test_matmul_is_right_behind_a_narrower_weight),
        cmocka_unit_test(test_matmul_adds_to_its_output),
        cmocka_unit_test(test_zero_activations_give_zero),
        cmocka_unit_test(test_rmsnorm_and_silu),
        cmocka_unit_test(test_products_with_norm_and_gate_have_the_bits_of_their_parts),
        cmocka_unit_test(test_weights_with_an_order_meet_the_gathered_input),
        cmocka_unit_test(test_an_order_out_of_range_or_of_floats_is_refused),
        cmocka_unit_test(test_embed_and_gather_are_exact),
        cmocka_unit_test(test_bad_options_and_steps_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
