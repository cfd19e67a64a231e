/* Products with grouped matrices on every instruction set this CPU has: the bits of their definition (quant/grouped.h), at every
 * number of rows and threads; BF16 products within their bound, and their bits at every number of rows. */
#include <math.h>
#include "gpu-worker/backend/cpu/grouped_panels.h"
#include "gpu-worker/quant/f16.h"
#include "tests/unit/gpu-worker/cpu_world.h"

enum { ROWS = 80, N = 70, MAX_K = 1600 };

static const uint32_t counts[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18,
                                  19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 47, 65, 80};

/* ---- matrices ---- */

struct drawn {
    struct quant_grouped matrix;
    uint8_t q[N * MAX_K], zero[N * MAX_K / GROUPED_SMALL];
    float scale[N * MAX_K / GROUPED_SMALL];
};

static void read_drawn(const void *context, uint32_t first, uint32_t n, const struct grouped_rows *out)
{
    const struct drawn *d = context;
    size_t cols = d->matrix.cols, groups = cols / d->matrix.group;
    memcpy(out->q, d->q + first * cols, n * cols);
    memcpy(out->scale, d->scale + first * groups, n * groups * sizeof *out->scale);
    if (d->matrix.zeros)
        memcpy(out->zero, d->zero + first * groups, n * groups);
}

/* extreme: the largest codes, and zeros that make the largest differences. */
static void draw(struct drawn *d, enum grouped_kind kind, uint32_t cols, uint32_t group, bool zeros, bool extreme)
{
    size_t groups = cols / group;
    d->matrix = (struct quant_grouped){
        .kind = kind, .rows = N, .cols = cols, .group = group, .zeros = zeros, .context = d, .read = read_drawn};
    for (size_t i = 0; i < (size_t)N * cols; i++)
        d->q[i] = (uint8_t)(kind == GROUPED_W8A8 ? (extreme ? 0x80 : next_random() >> 9) : extreme ? 0 : next_random() >> 9 & 15);
    for (size_t i = 0; i < N * groups; i++) {
        d->scale[i] = kind == GROUPED_W8A8 ? random_float() * 0x1p-6f : f16_to_f32(f32_to_f16(random_float() * 0x1p-4f));
        d->zero[i] = (uint8_t)(extreme ? 16 : next_random() % 17);
    }
}

static int32_t code_of(const struct drawn *d, uint32_t n, uint32_t k)
{
    uint8_t q = d->q[(size_t)n * d->matrix.cols + k];
    if (d->matrix.kind == GROUPED_W8A8)
        return (int8_t)q;
    return q - (d->matrix.zeros ? d->zero[(size_t)n * (d->matrix.cols / d->matrix.group) + k / d->matrix.group] : 8);
}

/* ---- the definition ---- */

static float defined_product(const struct drawn *d, uint32_t n, const float *x)
{
    bool w8a8 = d->matrix.kind == GROUPED_W8A8;
    uint32_t cols = d->matrix.cols, group = d->matrix.group;
    float most = w8a8 ? 127 : 32512, amax = 0, acc = 0;
    int64_t sum = 0;
    for (uint32_t k = 0; k < cols; k++)
        amax = fmaxf(amax, fabsf(x[k]));
    for (uint32_t k = 0; k < cols; k++) {
        sum += (int64_t)rintf(x[k] * (most / amax)) * code_of(d, n, k);
        if ((k + 1) % group)
            continue;
        assert_true(sum == (int32_t)sum);
        float scale = d->scale[(size_t)n * (cols / group) + k / group];
        acc = w8a8 ? (float)(int32_t)sum * (scale * (amax / 127)) : fmaf((float)(int32_t)sum, scale, acc);
        sum = 0;
    }
    return w8a8 ? acc : acc * (amax / 32512);
}

/* ---- the backend ---- */

struct product {
    struct cpu_backend *cpu;
    struct tensor *weight, *bias, *x, *out;
};

static struct product open_product(const char *isa, uint32_t threads, const struct backend_weight *weight, const float *bias)
{
    struct product p = {open_backend(isa, threads)};
    if (!p.cpu)
        return p;
    assert_int_equal(p.cpu->base.ops->weight(&p.cpu->base, &p.weight, weight, WEIGHT_MATMUL, NULL), 0);
    p.bias = vector_of(p.cpu, bias, N);
    p.x = activation(p.cpu, ROWS, weight->cols);
    p.out = activation(p.cpu, ROWS, N);
    return p;
}

static const float *multiply(const struct product *p, const float *x, uint32_t n)
{
    struct backend_matmul args = {.count = 1, .weights = {p->weight}, .biases = {p->bias}, .outs = {p->out}};
    memcpy(p->x->data, x, (size_t)n * p->x->cols * sizeof *x);
    p->cpu->base.ops->matmul(&p->cpu->base, n, p->x, &args);
    return p->out->data;
}

static void close_product(struct product *p)
{
    close_backend(p->cpu);
}

static void draw_inputs(float *x, float *bias, uint32_t cols)
{
    for (size_t i = 0; i < (size_t)ROWS * cols; i++)
        x[i] = random_float() * (i % 37 == 0 ? 8 : 1);
    for (uint32_t i = 0; i < N; i++)
        bias[i] = random_float();
}

static void check_rows(const struct product *p, const char *isa, const float *x, const float *whole)
{
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        uint32_t first = ROWS - counts[c];
        const float *part = multiply(p, x + (size_t)first * p->x->cols, counts[c]);
        if (memcmp(part, whole + (size_t)first * N, (size_t)counts[c] * N * sizeof *part))
            fail_msg("%s: %u rows of %u columns differ from %d", isa, counts[c], p->x->cols, ROWS);
    }
}

static void check_grouped(const struct drawn *d, const float *x, const float *bias)
{
    static float want[ROWS * N];
    struct backend_weight weight = {.rows = N, .cols = d->matrix.cols, .grouped = &d->matrix};
    for (uint32_t m = 0; m < ROWS; m++)
        for (uint32_t n = 0; n < N; n++)
            want[m * N + n] = defined_product(d, n, x + (size_t)m * d->matrix.cols) + bias[n];
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++)
        for (uint32_t threads = 1; threads <= 2; threads++) {
            struct product p = open_product(isas[i], threads, &weight, bias);
            if (!p.cpu)
                continue;
            const float *got = multiply(&p, x, ROWS);
            for (uint32_t j = 0; j < ROWS * N; j++)
                if (got[j] != want[j])
                    fail_msg("%s %s, groups of %u: row %u output %u: %g, by definition %g", isas[i], grouped_name(d->matrix.kind),
                             d->matrix.group, j / N, j % N, (double)got[j], (double)want[j]);
            check_rows(&p, isas[i], x, want);
            close_product(&p);
        }
}

static const struct shape {
    enum grouped_kind kind;
    uint32_t cols, group;
    bool zeros;
} shapes[] = {
    {GROUPED_W8A8, 1536, 1536, false}, {GROUPED_W8A8, 96, 96, false},    {GROUPED_W8A8, 1600, 1600, false},
    {GROUPED_W4A16, 1536, 128, false}, {GROUPED_W4A16, 896, 128, true},  {GROUPED_W4A16, 128, 128, false},
    {GROUPED_W4A16, 1600, 64, true},   {GROUPED_W4A16, 1088, 64, false}, {GROUPED_W4A16, 64, 64, true},
};

static void test_every_kind_gives_the_bits_of_its_definition(void **unused)
{
    static float x[ROWS * MAX_K], bias[N];
    struct drawn *d = malloc(sizeof *d);
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        draw(d, shapes[s].kind, shapes[s].cols, shapes[s].group, shapes[s].zeros, false);
        draw_inputs(x, bias, shapes[s].cols);
        check_grouped(d, x, bias);
    }
    free(d);
}

static void test_the_largest_codes_do_not_overflow(void **unused)
{
    static float x[ROWS * MAX_K], bias[N];
    struct drawn *d = malloc(sizeof *d);
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        draw(d, shapes[s].kind, shapes[s].cols, shapes[s].group, shapes[s].zeros, true);
        for (size_t i = 0; i < (size_t)ROWS * shapes[s].cols; i++)
            x[i] = i / shapes[s].cols % 2 ? -1 : 1;
        check_grouped(d, x, bias);
    }
    free(d);
}

static void test_inputs_that_are_zero_or_no_numbers_stay_in_bounds(void **unused)
{
    static float x[ROWS * MAX_K], bias[N];
    struct drawn *d = malloc(sizeof *d);
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        struct backend_weight weight = {.rows = N, .cols = shapes[s].cols, .grouped = &d->matrix};
        draw(d, shapes[s].kind, shapes[s].cols, shapes[s].group, shapes[s].zeros, false);
        for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
            struct product p = open_product(isas[i], 1, &weight, bias);
            if (!p.cpu)
                continue;
            memset(x, 0, sizeof x);
            const float *got = multiply(&p, x, 3);
            for (uint32_t j = 0; j < 3 * N; j++)
                assert_true(got[j] == 0);
            x[1] = NAN;
            x[shapes[s].cols] = INFINITY;
            multiply(&p, x, 3); /* whatever it gives: no trap, no fault */
            close_product(&p);
        }
    }
    free(d);
}

static void test_decoding_is_the_definition_of_a_weight(void **unused)
{
    struct drawn *d = malloc(sizeof *d);
    static uint8_t q[MAX_K], zero[MAX_K];
    static float scale[MAX_K], row[MAX_K];
    struct grouped_rows scratch = {q, scale, zero};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        draw(d, shapes[s].kind, shapes[s].cols, shapes[s].group, shapes[s].zeros, false);
        grouped_decode(&d->matrix, 5, &scratch, row);
        for (uint32_t k = 0; k < shapes[s].cols; k++)
            assert_true(row[k] ==
                        d->scale[5 * (shapes[s].cols / shapes[s].group) + k / shapes[s].group] * (float)code_of(d, 5, k));
    }
    free(d);
}

/* Against two bytes a weight: 51 % for W8A8, 27 % for W4A16 in groups of 128, as they lie in memory. */
static void test_panels_keep_to_their_bytes(void **unused)
{
    static const uint32_t widths[] = {896, 1536, 4864, 8960};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        uint64_t values = 4096 * (uint64_t)widths[i];
        struct quant_grouped m = {.kind = GROUPED_W8A8, .rows = 4096, .cols = widths[i], .group = widths[i]};
        struct panels panels;
        assert_true(grouped_valid(&m));
        grouped_layout(&panels, &m);
        assert_true(panels.n_panels * panels.panel_bytes <= 0.51 * 2 * (double)values);
        assert_int_equal(panels.n_panels * panels.panel_bytes, grouped_bytes(m.kind, m.cols, m.group, false, values));
        for (int zeros = 0; zeros < 2; zeros++) {
            m = (struct quant_grouped){.kind = GROUPED_W4A16, .rows = 4096, .cols = widths[i], .group = 128, .zeros = zeros};
            assert_true(grouped_valid(&m));
            grouped_layout(&panels, &m);
            assert_true(panels.n_panels * panels.panel_bytes <= 0.27 * 2 * (double)values);
            assert_true(panels.n_panels * panels.panel_bytes - grouped_bytes(m.kind, m.cols, m.group, zeros, values) <
                        panels.n_panels * LINE);
        }
    }
}

static void test_a_matrix_of_no_kind_is_refused(void **unused)
{
    struct drawn *d = malloc(sizeof *d);
    struct backend_weight weight = {.rows = N, .cols = 96, .grouped = &d->matrix};
    struct cpu_backend *cpu = open_backend("auto", 1);
    struct kvg_error err = {0};
    struct tensor *tensor;
    draw(d, GROUPED_W4A16, 96, 96, false, false);
    assert_int_equal(cpu->base.ops->weight(&cpu->base, &tensor, &weight, WEIGHT_MATMUL, &err), KVG_UNSUPPORTED);
    assert_string_equal(err.message, "a W4A16 matrix [70, 96] in groups of 96 for one of [70, 96]");
    draw(d, GROUPED_W4A16, 64, 64, false, false);
    assert_int_equal(cpu->base.ops->weight(&cpu->base, &tensor, &weight, WEIGHT_MATMUL, &err), KVG_UNSUPPORTED);
    assert_string_equal(err.message, "a W4A16 matrix [70, 64] in groups of 64 for one of [70, 96]");
    close_backend(cpu);
    free(d);
}

/* ---- BF16 ---- */

static void check_bf16(uint32_t cols)
{
    static float x[ROWS * MAX_K], bias[N], whole[ROWS * N];
    static uint16_t w[N * MAX_K];
    struct backend_weight weight = {&quant_bf16, w, N, cols};
    draw_inputs(x, bias, cols);
    for (size_t i = 0; i < (size_t)N * cols; i++)
        w[i] = f32_to_bf16(random_float());
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        struct product p = open_product(isas[i], 2, &weight, bias);
        if (!p.cpu)
            continue;
        memcpy(whole, multiply(&p, x, ROWS), sizeof whole);
        double rounding = strcmp(isas[i], "amx") == 0 ? 0x1p-8 : 1e-5;
        for (uint32_t m = 0; m < ROWS; m += 3)
            for (uint32_t n = 0; n < N; n++) {
                double sum = bias[n], terms = fabs((double)bias[n]);
                for (uint32_t k = 0; k < cols; k++) {
                    double product = (double)x[m * cols + k] * (double)bf16_to_f32(w[n * cols + k]);
                    sum += product;
                    terms += fabs(product);
                }
                if (!(fabs((double)whole[m * N + n] - sum) <= rounding * terms))
                    fail_msg("%s, %u columns: row %u output %u: %g, expected %g within %g", isas[i], cols, m, n,
                             (double)whole[m * N + n], sum, rounding * terms);
            }
        check_rows(&p, isas[i], x, whole);
        close_product(&p);
    }
}

static void test_bf16_is_within_its_bound_and_row_invariant(void **unused)
{
    static const uint32_t widths[] = {1536, 96, 1584, 40, 33, 1};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        check_bf16(widths[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_kind_gives_the_bits_of_its_definition),
        cmocka_unit_test(test_the_largest_codes_do_not_overflow),
        cmocka_unit_test(test_inputs_that_are_zero_or_no_numbers_stay_in_bounds),
        cmocka_unit_test(test_decoding_is_the_definition_of_a_weight),
        cmocka_unit_test(test_panels_keep_to_their_bytes),
        cmocka_unit_test(test_a_matrix_of_no_kind_is_refused),
        cmocka_unit_test(test_bf16_is_within_its_bound_and_row_invariant),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
