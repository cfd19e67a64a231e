/* Products of the CUDA backend with grouped matrices, against the CPU's: kind x group x zeros x rows of x. Integers are exact, so
 * results have the CPU's bits, but for W4A16 at few rows, which adds a row's groups in another order. */
#include "tests/cusim/backend/twin.h"

enum { N_ROWS = 70, MOST_COLS = 448, MATRICES = 2, MOST_X = 132 };
static float values[MOST_X * MOST_COLS], other[MOST_X * MOST_COLS];
static float got[MATRICES * MOST_X * MOST_COLS], wanted[MATRICES * MOST_X * MOST_COLS];

struct drawn {
    struct quant_grouped matrix;
    uint8_t q[MOST_COLS * MOST_COLS], zero[MOST_COLS * MOST_COLS / 32];
    float scale[MOST_COLS * MOST_COLS / 32];
};
static struct drawn drawn[4];

static void read_drawn(const void *context, uint32_t first, uint32_t n, const struct grouped_rows *out)
{
    const struct drawn *d = context;
    size_t cols = d->matrix.cols, groups = cols / d->matrix.group;
    memcpy(out->q, d->q + first * cols, n * cols);
    memcpy(out->scale, d->scale + first * groups, n * groups * sizeof *out->scale);
    if (d->matrix.zeros)
        memcpy(out->zero, d->zero + first * groups, n * groups);
}

/* The largest codes, zeros and scales are among them. */
static void draw(struct drawn *d, enum grouped_kind kind, uint32_t rows, uint32_t cols, uint32_t group, bool zeros)
{
    bool w8a8 = kind == GROUPED_W8A8;
    d->matrix = (struct quant_grouped){
        .kind = kind, .rows = rows, .cols = cols, .group = w8a8 ? cols : group, .zeros = zeros, .context = d, .read = read_drawn};
    for (size_t i = 0; i < (size_t)rows * cols; i++)
        d->q[i] = (uint8_t)(w8a8 ? (i % 61 ? next_random() >> 9 : 0x80) : next_random() >> 9 & 15);
    for (size_t i = 0; i < (size_t)rows * (cols / d->matrix.group); i++) {
        d->scale[i] = w8a8 ? random_float() * 0x1p-6f : f16_to_f32(f32_to_f16(random_float() * 0x1p-4f));
        d->zero[i] = (uint8_t)(next_random() % 17);
    }
}

static struct tensor *new_grouped(struct backend *b, const struct drawn *d)
{
    struct tensor *tensor;
    struct kvg_error err;
    struct backend_weight weight = {.rows = d->matrix.rows, .cols = d->matrix.cols, .grouped = &d->matrix};
    must(b->ops->weight(b, &tensor, &weight, WEIGHT_MATMUL, &err), &err);
    return tensor;
}

/* ---- one product ---- */

struct world {
    struct backend *b;
    struct tensor *table, *x, *before, *bias, *weights[MATRICES], *outs[MATRICES];
};

static struct world open_world(bool cuda, bool deterministic, uint32_t cols)
{
    struct world w = {open_twin(cuda, deterministic)};
    w.table = new_table(w.b, values, MOST_X, cols);
    w.x = new_activation(w.b, TWIN_ROWS, cols);
    w.before = new_table(w.b, other, MOST_X, N_ROWS);
    w.bias = new_weight(w.b, &quant_f32, other, 1, N_ROWS, WEIGHT_VECTOR);
    for (int i = 0; i < MATRICES; i++) {
        w.weights[i] = new_grouped(w.b, &drawn[i]);
        w.outs[i] = new_activation(w.b, TWIN_ROWS, N_ROWS);
    }
    new_pool(w.b, 1, 1, 16, 16);
    return w;
}

static void multiply(const struct world *w, uint32_t n, bool bias, bool accumulate, float *out)
{
    struct backend_matmul args = {.count = MATRICES, .accumulate = accumulate};
    struct backend *b = w->b;
    begin_rows(b, n);
    b->ops->embed(b, w->table, w->x);
    for (int i = 0; i < MATRICES; i++) {
        args.weights[i] = w->weights[i];
        args.biases[i] = bias ? w->bias : NULL;
        args.outs[i] = w->outs[i];
        b->ops->embed(b, w->before, w->outs[i]);
    }
    b->ops->matmul(b, n, w->x, &args);
    end_rows(b);
    for (int i = 0; i < MATRICES; i++)
        memcpy(out + (size_t)i * n * N_ROWS, b->ops->host(b, w->outs[i]), (size_t)n * N_ROWS * sizeof *out);
}

static void check_product(bool deterministic, uint32_t cols, bool exact_few)
{
    static const uint32_t counts[] = {1, 2, 3, 8, 9, 17, 130};
    const char *name = grouped_name(drawn[0].matrix.kind);
    struct world worlds[2];
    for (int cuda = 0; cuda < 2; cuda++)
        worlds[cuda] = open_world(cuda, deterministic, cols);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i += 1 + deterministic) {
        uint32_t n = counts[i], size = MATRICES * n * N_ROWS;
        char what[100];
        snprintf(what, sizeof what, "%s in groups of %u, %u rows of %u%s", name, drawn[0].matrix.group, n, cols,
                 deterministic ? ", deterministic" : "");
        multiply(&worlds[0], n, i % 2, i % 3 == 1, wanted);
        multiply(&worlds[1], n, i % 2, i % 3 == 1, got);
        if (exact_few || deterministic || n > 8)
            for (uint32_t v = 0; v < size; v++)
                if (memcmp(&got[v], &wanted[v], sizeof *got) != 0)
                    fail_msg("%s, value %u: %.9g, the CPU has %.9g", what, v, (double)got[v], (double)wanted[v]);
        assert_near(what, got, wanted, size, 2e-6, 1e-4);
    }
    for (int cuda = 0; cuda < 2; cuda++)
        close_twin(worlds[cuda].b);
}

static void test_grouped_products_have_the_bits_of_the_definition(void **unused)
{
    static const struct {
        enum grouped_kind kind;
        uint32_t cols, group;
        bool zeros;
    } cases[] = {{GROUPED_W8A8, 96, 0, false},
                 {GROUPED_W8A8, 416, 0, false},
                 {GROUPED_W4A16, 192, GROUPED_SMALL, true},
                 {GROUPED_W4A16, 384, GROUPED_LARGE, true},
                 {GROUPED_W4A16, 448, GROUPED_SMALL, false}};
    random_floats(values, sizeof values / sizeof *values);
    random_floats(other, sizeof other / sizeof *other);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int m = 0; m < MATRICES; m++)
            draw(&drawn[m], cases[i].kind, N_ROWS, cases[i].cols, cases[i].group, cases[i].zeros);
        memset(values + 2 * cases[i].cols, 0, cases[i].cols * sizeof *values); /* a row without a scale */
        for (int deterministic = 0; deterministic < 2; deterministic++)
            check_product(deterministic, cases[i].cols, cases[i].kind == GROUPED_W8A8);
    }
}

/* ---- beside other matrices, and after other ops ---- */

enum { HIDDEN = 128, FFN = 192 };

/* n = norm(x); q = Q n, k = K n, v = V n, of three kinds; g = silu(G n) * (U n); x += D g: x, q, k, v to result. */
static void run_half_layer(bool cuda, uint32_t n, const uint8_t *rows, float *result)
{
    struct backend *b = open_twin(cuda, false);
    struct tensor *table = new_table(b, values, n, HIDDEN), *norm = new_weight(b, &quant_f32, other, 1, HIDDEN, WEIGHT_VECTOR);
    struct tensor *x = new_activation(b, TWIN_ROWS, HIDDEN), *normed = new_activation(b, TWIN_ROWS, HIDDEN), *three[3];
    struct tensor *gate = new_activation(b, TWIN_ROWS, FFN), *up = new_activation(b, TWIN_ROWS, FFN);
    struct tensor *w8 = new_grouped(b, &drawn[0]), *w4 = new_grouped(b, &drawn[1]), *gate_w = new_grouped(b, &drawn[2]);
    struct tensor *down_w = new_grouped(b, &drawn[3]), *q8 = new_weight(b, &quant_q8_0, rows, HIDDEN, HIDDEN, WEIGHT_MATMUL);
    for (int i = 0; i < 3; i++)
        three[i] = new_activation(b, TWIN_ROWS, HIDDEN);
    struct backend_matmul qkv = {.count = 3, .weights = {w8, w4, q8}, .outs = {three[0], three[1], three[2]}};
    struct backend_matmul both = {.count = 2, .weights = {gate_w, gate_w}, .outs = {gate, up}};
    struct backend_matmul down = {.count = 1, .weights = {down_w}, .outs = {x}, .accumulate = true};
    new_pool(b, 1, 1, 16, 16);
    begin_rows(b, n);
    b->ops->embed(b, table, x);
    b->ops->rmsnorm(b, n, x, norm, 1e-5f, normed);
    b->ops->matmul(b, n, normed, &qkv);
    b->ops->matmul(b, n, normed, &both);
    b->ops->silu_mul(b, n, gate, up);
    b->ops->matmul(b, n, gate, &down);
    unsigned long before = launches();
    end_rows(b);
    if (cuda) /* embed, norm with the form of W8A8, W8A8, form, W4A16, form, Q8_0, form, gate and up, silu with its form, down */
        assert_launches(launches() - before, 11);
    for (int i = 0; i < 4; i++)
        memcpy(result + (size_t)i * n * HIDDEN, b->ops->host(b, i < 3 ? three[i] : x), n * HIDDEN * sizeof *result);
    close_twin(b);
}

static void test_each_product_reads_its_own_form(void **unused)
{
    static const uint32_t counts[] = {3, 20};
    uint8_t *rows = random_rows(&quant_q8_0, HIDDEN, HIDDEN);
    random_floats(values, MOST_X * HIDDEN);
    random_floats(other, HIDDEN);
    draw(&drawn[0], GROUPED_W8A8, HIDDEN, HIDDEN, 0, false);
    draw(&drawn[1], GROUPED_W4A16, HIDDEN, HIDDEN, GROUPED_LARGE, true);
    draw(&drawn[2], GROUPED_W4A16, FFN, HIDDEN, GROUPED_SMALL, true);
    draw(&drawn[3], GROUPED_W4A16, HIDDEN, FFN, GROUPED_SMALL, false);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        uint32_t n = counts[i] * HIDDEN * 4;
        double error = 0, size = 0;
        run_half_layer(false, counts[i], rows, wanted);
        run_half_layer(true, counts[i], rows, got);
        for (uint32_t v = 0; v < n; v++) {
            error += fabs((double)got[v] - (double)wanted[v]);
            size += fabs((double)wanted[v]);
        }
        assert_near("three kinds of matrices", got, wanted, n, 1e-4, 0.03 * size / n); /* a value on the edge of two steps */
        if (!(error <= 2e-4 * size))
            fail_msg("three kinds of matrices: mean error %g of %g", error / n, size / n);
    }
    free(rows);
}

/* ---- columns in another order ---- */

enum { ORDERED = 4, COLS = 256 };

/* Four products of one input, of matrices with orders A, none, A and B, the last two of them grouped. */
static void multiply_ordered(bool cuda, bool deterministic, uint32_t n, const uint8_t *rows, uint32_t orders[2][COLS], float *out)
{
    struct backend *b = open_twin(cuda, deterministic);
    struct tensor *table = new_table(b, values, n, COLS), *x = new_activation(b, TWIN_ROWS, COLS);
    struct backend_matmul args = {.count = ORDERED};
    struct kvg_error err;
    for (int i = 0; i < ORDERED; i++) {
        const struct quant_grouped *grouped = i >= 2 ? &drawn[i - 2].matrix : NULL;
        struct backend_weight weight = {.format = grouped ? NULL : &quant_q4_1,
                                        .data = grouped ? NULL : rows,
                                        .rows = N_ROWS,
                                        .cols = COLS,
                                        .source = grouped ? NULL : rows + i,
                                        .order = i == 1 ? NULL : orders[i / 3],
                                        .grouped = grouped};
        struct tensor *tensor;
        must(b->ops->weight(b, &tensor, &weight, WEIGHT_MATMUL, &err), &err);
        args.weights[i] = tensor;
        args.outs[i] = new_activation(b, TWIN_ROWS, N_ROWS);
    }
    new_pool(b, 1, 1, 16, 16);
    begin_rows(b, n);
    b->ops->embed(b, table, x);
    b->ops->matmul(b, n, x, &args);
    unsigned long before = launches();
    end_rows(b);
    if (cuda) /* embed; four products, each of an input of its own */
        assert_launches(launches() - before, 1 + 4 + 4);
    for (int i = 0; i < ORDERED; i++)
        memcpy(out + (size_t)i * n * N_ROWS, b->ops->host(b, args.outs[i]), (size_t)n * N_ROWS * sizeof *out);
    close_twin(b);
}

static void test_columns_are_gathered_by_the_order_of_each_matrix(void **unused)
{
    static const uint32_t counts[] = {1, 8, 9, 20};
    uint32_t orders[2][COLS];
    uint8_t *rows = random_rows(&quant_q4_1, N_ROWS, COLS);
    random_floats(values, 20 * COLS);
    for (uint32_t i = 0; i < COLS; i++) {
        orders[0][i] = i * 37 % COLS;
        orders[1][i] = COLS - 1 - i;
    }
    draw(&drawn[0], GROUPED_W4A16, N_ROWS, COLS, GROUPED_LARGE, true);
    draw(&drawn[1], GROUPED_W8A8, N_ROWS, COLS, 0, false);
    for (int deterministic = 0; deterministic < 2; deterministic++)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            uint32_t n = counts[i], size = ORDERED * n * N_ROWS;
            multiply_ordered(false, deterministic, n, rows, orders, wanted);
            multiply_ordered(true, deterministic, n, rows, orders, got);
            if (n > 8 || deterministic)
                assert_memory_equal(got, wanted, size * sizeof *got);
            assert_near("ordered columns", got, wanted, size, 2e-6, 1e-4);
        }
    free(rows);
}

static void test_orders_that_cannot_be_are_refused(void **unused)
{
    struct backend *b = open_twin(true, false);
    struct tensor *tensor;
    struct kvg_error err;
    uint32_t order[32] = {[3] = 32};
    uint8_t *rows = random_rows(&quant_q8_0, 4, 32);
    struct backend_weight weight = {.format = &quant_q8_0, .data = rows, .rows = 4, .cols = 32, .order = order};
    assert_int_equal(b->ops->weight(b, &tensor, &weight, WEIGHT_MATMUL, &err), KVG_INVALID);
    assert_string_equal(err.message, "column 3 is column 32 of 32");
    weight.format = &quant_f16;
    assert_int_equal(b->ops->weight(b, &tensor, &weight, WEIGHT_MATMUL, &err), KVG_UNSUPPORTED);
    assert_string_equal(err.message, "F16 weights have no order of columns");
    close_twin(b);
    free(rows);
}

static void test_groups_that_have_no_layout_are_refused(void **unused)
{
    struct backend *b = open_twin(true, false);
    struct tensor *tensor;
    struct kvg_error err;
    draw(&drawn[0], GROUPED_W4A16, 8, 96, 32, true);
    struct backend_weight weight = {.rows = 8, .cols = 96, .grouped = &drawn[0].matrix};
    assert_int_equal(b->ops->weight(b, &tensor, &weight, WEIGHT_MATMUL, &err), KVG_UNSUPPORTED);
    assert_string_equal(err.message, "the CUDA backend has no layout for 8 x 96 W4A16 in groups of 32");
    close_twin(b);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_grouped_products_have_the_bits_of_the_definition),
        cmocka_unit_test(test_each_product_reads_its_own_form),
        cmocka_unit_test(test_columns_are_gathered_by_the_order_of_each_matrix),
        cmocka_unit_test(test_orders_that_cannot_be_are_refused),
        cmocka_unit_test(test_groups_that_have_no_layout_are_refused),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
