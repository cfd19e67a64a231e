/* Every op of the CUDA backend but sampling, against the CPU's: backend x format x shape. */
#include "tests/cusim/backend/twin.h"

enum { MOST = 192 * 768 };
static float values[MOST], other[MOST], got[MOST], wanted[MOST];

/* ---- products ---- */

struct product_case {
    const struct quant_format *format;
    const uint8_t *rows[2];
    uint32_t n_rows[2], cols, n;
    bool accumulate, bias, deterministic;
};

/* One backend with two matrices; x is `values`, what the products are added to and the biases are `other`. */
struct product_world {
    struct backend *b;
    struct tensor *table, *x, *before[2], *weights[2], *biases[2], *outs[2];
};

static void open_products(struct product_world *world, bool cuda, const struct product_case *c)
{
    struct backend *b = world->b = open_twin(cuda, c->deterministic);
    world->table = new_table(b, values, TWIN_ROWS, c->cols);
    world->x = new_activation(b, TWIN_ROWS, c->cols);
    for (int i = 0; i < 2; i++) {
        world->weights[i] = new_weight(b, c->format, c->rows[i], c->n_rows[i], c->cols, WEIGHT_MATMUL);
        world->outs[i] = new_activation(b, TWIN_ROWS, c->n_rows[i]);
        world->biases[i] = new_weight(b, &quant_f32, other, 1, c->n_rows[i], WEIGHT_VECTOR);
        world->before[i] = new_table(b, other, TWIN_ROWS, c->n_rows[i]);
    }
    new_pool(b, 1, 1, 16, 16);
}

/* x W0^T and x W1^T into out[n][n_rows0] and behind it [n][n_rows1]. */
static void multiply(const struct product_world *world, const struct product_case *c, float *out)
{
    struct backend *b = world->b;
    struct backend_matmul args = {.count = 2, .accumulate = c->accumulate};
    begin_rows(b, c->n);
    b->ops->embed(b, world->table, world->x);
    for (int i = 0; i < 2; i++) {
        args.weights[i] = world->weights[i];
        args.outs[i] = world->outs[i];
        args.biases[i] = c->bias ? world->biases[i] : NULL;
        b->ops->embed(b, world->before[i], world->outs[i]);
    }
    b->ops->matmul(b, c->n, world->x, &args);
    end_rows(b);
    for (int i = 0; i < 2; i++) {
        memcpy(out, b->ops->host(b, world->outs[i]), (size_t)c->n * c->n_rows[i] * sizeof *out);
        out += (size_t)c->n * c->n_rows[i];
    }
}

/* Rounding x to bf16 moves each term by at most 2^-9 of itself (f16: 2^-12), the weights are exact. */
static double rounding_bound(const struct product_case *c, double share)
{
    double most = 0;
    static float w[768];
    for (int i = 0; i < 2; i++)
        for (uint32_t r = 0; r < c->n_rows[i]; r += 5) {
            quant_decode(c->format, c->rows[i] + r * quant_row_bytes(c->format, c->cols), w, c->cols);
            double terms = 0;
            for (uint32_t k = 0; k < c->cols; k++)
                terms += fabs((double)w[k]);
            most = fmax(most, terms);
        }
    return most * share * 8; /* |x| <= 8 */
}

static void check_product(const struct product_world worlds[2], const struct product_case *c)
{
    size_t n = (size_t)c->n * (c->n_rows[0] + c->n_rows[1]);
    char what[100];
    snprintf(what, sizeof what, "%s, %u rows of %u%s", c->format->name, c->n, c->cols, c->deterministic ? ", deterministic" : "");
    multiply(&worlds[0], c, wanted);
    multiply(&worlds[1], c, got);
    bool tiled = c->n > 8 || c->deterministic, quantized = c->format->scales != QUANT_FLOAT;
    double share = quantized || !tiled || c->format == &quant_f32 ? 1e-6 : c->format == &quant_f16 ? 0x1p-12 : 0x1p-9;
    if (quantized && tiled)
        assert_memory_equal(got, wanted, n * sizeof *got); /* the same operations in the same order */
    assert_near(what, got, wanted, n, 2e-6, rounding_bound(c, share));
}

static void check_widths(struct product_case *c)
{
    static const uint32_t counts[] = {1, 2, 3, 8, 9, 16, 17, 130};
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        struct product_world worlds[2];
        c->deterministic = deterministic;
        for (int cuda = 0; cuda < 2; cuda++)
            open_products(&worlds[cuda], cuda, c);
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i += 1 + 2 * (size_t)deterministic) {
            c->n = counts[i];
            c->bias = i % 2 == 0;
            c->accumulate = i % 3 == 0;
            check_product(worlds, c);
        }
        for (int cuda = 0; cuda < 2; cuda++)
            close_twin(worlds[cuda].b);
    }
}

static void test_products_of_every_format_at_every_width(void **unused)
{
    random_floats(values, MOST);
    random_floats(other, MOST);
    for (size_t i = 0; i < MOST; i += 37)
        values[i] *= 8;
    for (size_t f = 0; quant_at(f); f++) {
        const struct quant_format *format = quant_at(f);
        uint32_t narrow = format->scales == QUANT_FLOAT ? 90 : format->block_values > QUANT_GROUP ? 256 : 96;
        for (uint32_t cols = narrow; cols; cols = cols == narrow && f % 2 ? 768 : 0) {
            struct product_case c = {.format = format, .cols = cols, .n_rows = {70, 37}};
            for (int i = 0; i < 2; i++)
                c.rows[i] = random_rows(format, c.n_rows[i], cols);
            check_widths(&c);
            for (int i = 0; i < 2; i++)
                free((void *)c.rows[i]);
        }
    }
}

static void test_products_of_mixed_formats_share_their_input(void **unused)
{
    enum { COLS = 256, N = 3, ROWS = 20 };
    const struct quant_format *const formats[4] = {&quant_q4_k, &quant_bf16, &quant_q6_k, &quant_q4_k};
    uint8_t *rows[4];
    random_floats(values, N * COLS);
    for (int i = 0; i < 4; i++)
        rows[i] = random_rows(formats[i], ROWS, COLS);
    for (int cuda = 0; cuda < 2; cuda++) {
        struct backend *b = open_twin(cuda, false);
        struct tensor *table = new_table(b, values, N, COLS), *x = new_activation(b, TWIN_ROWS, COLS);
        struct backend_matmul args = {.count = 4};
        for (int i = 0; i < 4; i++) {
            args.weights[i] = new_weight(b, formats[i], rows[i], ROWS, COLS, WEIGHT_MATMUL);
            args.outs[i] = new_activation(b, TWIN_ROWS, ROWS);
        }
        new_pool(b, 1, 1, 16, 16);
        begin_rows(b, N);
        b->ops->embed(b, table, x);
        b->ops->matmul(b, N, x, &args);
        end_rows(b);
        for (int i = 0; i < 4; i++)
            memcpy((cuda ? got : wanted) + i * N * ROWS, b->ops->host(b, args.outs[i]), N * ROWS * sizeof(float));
        close_twin(b);
    }
    assert_near("four formats", got, wanted, 4 * N * ROWS, 1e-6, 1e-4);
    for (int i = 0; i < 4; i++)
        free(rows[i]);
}

/* ---- row by row ---- */

static void test_embedding_is_exact_in_every_format(void **unused)
{
    enum { ROWS = 7, COLS = 512 };
    for (size_t f = 0; quant_at(f); f++) {
        uint8_t *rows = random_rows(quant_at(f), ROWS, COLS);
        for (int cuda = 0; cuda < 2; cuda++) {
            struct backend *b = open_twin(cuda, false);
            struct tensor *table = new_weight(b, quant_at(f), rows, ROWS, COLS, WEIGHT_EMBEDDING);
            struct tensor *x = new_activation(b, TWIN_ROWS, COLS);
            new_pool(b, 1, 1, 16, 16);
            begin_rows(b, ROWS);
            b->ops->embed(b, table, x);
            end_rows(b);
            memcpy(cuda ? got : wanted, b->ops->host(b, x), ROWS * COLS * sizeof(float));
            close_twin(b);
        }
        if (memcmp(got, wanted, ROWS * COLS * sizeof *got))
            fail_msg("%s: the embedding differs", quant_at(f)->name);
        free(rows);
    }
}

static void test_norm_gate_and_gather(void **unused)
{
    enum { ROWS = 5 };
    static const uint32_t widths[] = {2048, 96, 70};
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
        uint32_t cols = widths[w], n = ROWS * cols;
        random_floats(values, n);
        random_floats(other, n);
        for (int cuda = 0; cuda < 2; cuda++) {
            struct backend *b = open_twin(cuda, false);
            float *out = cuda ? got : wanted;
            struct tensor *table = new_table(b, values, ROWS, cols), *more = new_table(b, other, ROWS, cols);
            struct tensor *weight = new_weight(b, &quant_f32, other, 1, cols, WEIGHT_VECTOR);
            struct tensor *x = new_activation(b, TWIN_ROWS, cols), *y = new_activation(b, TWIN_ROWS, cols);
            struct tensor *normed = new_activation(b, TWIN_ROWS, cols), *picked = new_activation(b, TWIN_ROWS, cols);
            new_pool(b, 1, 1, 16, 16);
            begin_rows(b, ROWS);
            b->ops->embed(b, table, x);
            b->ops->embed(b, more, y);
            b->ops->rmsnorm(b, ROWS, x, weight, 1e-5f, normed);
            b->ops->gather(b, x, picked);
            b->ops->silu_mul(b, ROWS, x, y);
            end_rows(b);
            memcpy(out, b->ops->host(b, normed), n * sizeof *out);
            memcpy(out + n, b->ops->host(b, x), n * sizeof *out);
            memcpy(out + 2 * n, b->ops->host(b, picked), n * sizeof *out);
            close_twin(b);
        }
        assert_near("rmsnorm", got, wanted, n, 1e-6, 1e-7);
        assert_near("silu_mul", got + n, wanted + n, n, 1e-6, 1e-7);
        assert_memory_equal(got + 2 * n, wanted + 2 * n, n * sizeof *got);
    }
}

/* What only some families need; the product reads the form that gelu_mul writes for it. */
static void test_head_norms_sums_and_gelu(void **unused)
{
    enum { ROWS = 5, HEADS = 3, OUT = 40 };
    static const uint32_t widths[] = {16, 80, 256};
    uint8_t *rows = random_rows(&quant_f32, OUT, HEADS * 256);
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
        uint32_t cols = HEADS * widths[w], n = ROWS * cols;
        random_floats(values, n);
        random_floats(other, n);
        for (uint32_t i = 0; i < n; i++)
            values[i] *= 6;
        for (int cuda = 0; cuda < 2; cuda++) {
            struct backend *b = open_twin(cuda, false);
            float *out = cuda ? got : wanted;
            struct tensor *table = new_table(b, values, ROWS, cols), *more = new_table(b, other, ROWS, cols);
            struct tensor *weight = new_weight(b, &quant_f32, other, 1, widths[w], WEIGHT_VECTOR);
            struct tensor *matrix = new_weight(b, &quant_f32, rows, OUT, cols, WEIGHT_MATMUL);
            struct tensor *x = new_activation(b, TWIN_ROWS, cols), *y = new_activation(b, TWIN_ROWS, cols);
            struct tensor *gate = new_activation(b, TWIN_ROWS, cols), *product = new_activation(b, TWIN_ROWS, OUT);
            struct backend_matmul args = {.count = 1, .weights = {matrix}, .outs = {product}};
            new_pool(b, 1, 1, 16, 16);
            begin_rows(b, ROWS);
            b->ops->embed(b, table, x);
            b->ops->embed(b, table, gate);
            b->ops->embed(b, more, y);
            b->ops->gelu_mul(b, ROWS, gate, y);
            b->ops->matmul(b, ROWS, gate, &args);
            b->ops->head_rmsnorm(b, ROWS, x, weight, 1e-5f);
            b->ops->scale(b, ROWS, x, 11.3f);
            b->ops->add(b, ROWS, x, y);
            end_rows(b);
            memcpy(out, b->ops->host(b, x), n * sizeof *out);
            memcpy(out + n, b->ops->host(b, gate), n * sizeof *out);
            memcpy(out + 2 * n, b->ops->host(b, product), ROWS * OUT * sizeof *out);
            close_twin(b);
        }
        assert_near("head_rmsnorm, scale and add", got, wanted, n, 2e-6, 1e-6);
        assert_near("gelu_mul", got + n, wanted + n, n, 1e-6, 1e-6);
        assert_near("what follows gelu_mul", got + 2 * n, wanted + 2 * n, ROWS * OUT, 1e-5, 1e-3);
    }
    free(rows);
}

/* ---- what follows a product ---- */

enum { HIDDEN = 128, FFN = 192 };

/* x += O a; n = norm(x); g = silu(G n) * (U n); x += D g; n = norm(x); out = O n: x and out to result. */
static void run_half_layer(bool cuda, const struct quant_format *format, uint8_t *const rows[4], uint32_t n, float *result)
{
    static const uint32_t shapes[4][2] = {{HIDDEN, HIDDEN}, {FFN, HIDDEN}, {FFN, HIDDEN}, {HIDDEN, FFN}};
    struct backend *b = open_twin(cuda, false);
    struct tensor *x_table = new_table(b, values, n, HIDDEN), *a_table = new_table(b, other, n, HIDDEN), *w[4];
    struct tensor *norm = new_weight(b, &quant_f32, values + 7, 1, HIDDEN, WEIGHT_VECTOR);
    struct tensor *bias = new_weight(b, &quant_f32, other + 7, 1, HIDDEN, WEIGHT_VECTOR);
    struct tensor *x = new_activation(b, TWIN_ROWS, HIDDEN), *a = new_activation(b, TWIN_ROWS, HIDDEN);
    struct tensor *normed = new_activation(b, TWIN_ROWS, HIDDEN), *out = new_activation(b, TWIN_ROWS, HIDDEN);
    struct tensor *gate = new_activation(b, TWIN_ROWS, FFN), *up = new_activation(b, TWIN_ROWS, FFN);
    for (int i = 0; i < 4; i++)
        w[i] = new_weight(b, format, rows[i], shapes[i][0], shapes[i][1], WEIGHT_MATMUL);
    struct backend_matmul add = {.count = 1, .weights = {w[0]}, .biases = {bias}, .outs = {x}, .accumulate = true};
    struct backend_matmul both = {.count = 2, .weights = {w[1], w[2]}, .outs = {gate, up}};
    struct backend_matmul down = {.count = 1, .weights = {w[3]}, .outs = {x}, .accumulate = true};
    struct backend_matmul last = {.count = 1, .weights = {w[0]}, .outs = {out}};
    new_pool(b, 1, 1, 16, 16);
    begin_rows(b, n);
    b->ops->embed(b, x_table, x);
    b->ops->embed(b, a_table, a);
    b->ops->matmul(b, n, a, &add);
    b->ops->rmsnorm(b, n, x, norm, 1e-5f, normed);
    b->ops->matmul(b, n, normed, &both);
    b->ops->silu_mul(b, n, gate, up);
    b->ops->matmul(b, n, gate, &down);
    b->ops->rmsnorm(b, n, x, norm, 1e-5f, normed);
    b->ops->matmul(b, n, normed, &last);
    unsigned long before = launches();
    end_rows(b);
    if (cuda) /* embed twice, the form of a, four products */
        assert_launches(launches() - before, format->scales == QUANT_FLOAT ? 6 : 7);
    memcpy(result, b->ops->host(b, x), n * HIDDEN * sizeof *result);
    memcpy(result + n * HIDDEN, b->ops->host(b, out), n * HIDDEN * sizeof *result);
    close_twin(b);
}

/* Sums come in another order, and the int8 groups are those of x * norm, not scaled by x's length: where that moves a value past
 * the middle of two steps, it moves by 1/127 of its group's largest. */
static void test_products_do_what_follows_them(void **unused)
{
    static const struct quant_format *const formats[] = {&quant_bf16, &quant_f32, &quant_q8_0, &quant_q4_1};
    static const uint32_t counts[] = {1, 2, 3, 8};
    random_floats(values, MOST);
    random_floats(other, MOST);
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        bool exact = formats[f]->scales == QUANT_FLOAT;
        uint8_t *rows[4];
        for (int i = 0; i < 4; i++)
            rows[i] = random_rows(formats[f], FFN, FFN);
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            uint32_t n = counts[i] * HIDDEN * 2;
            double error = 0, size = 0;
            char what[64];
            snprintf(what, sizeof what, "a half layer of %s, %u rows", formats[f]->name, counts[i]);
            run_half_layer(false, formats[f], rows, counts[i], wanted);
            run_half_layer(true, formats[f], rows, counts[i], got);
            for (uint32_t v = 0; v < n; v++) {
                error += fabs((double)got[v] - (double)wanted[v]);
                size += fabs((double)wanted[v]);
            }
            assert_near(what, got, wanted, n, 1e-4, (exact ? 1e-5 : 0.03) * size / n);
            if (!(error <= (exact ? 1e-6 : 1e-3) * size))
                fail_msg("%s: mean error %g of %g", what, error / n, size / n);
        }
        for (int i = 0; i < 4; i++)
            free(rows[i]);
    }
}

/* ---- positions and the KV pool ---- */

struct attention_case {
    uint32_t n_heads, n_kv_heads, head_dim, rotated, block_size;
    enum rope_style style;
    bool deterministic;
    enum backend_kv_dtype dtype; /* on the CPU f16 takes the place of bf16 and fp8 */
    uint32_t window;             /* 0 = none */
};

enum { FIRST = 108, SECOND = 5, DECODES = 2, ALIVE = 3 };

/* The nearest e4m3 value of |x| <= 1. */
static float to_fp8(float x)
{
    float step = ldexpf(1, x == 0 ? -9 : (int)fmaxf((float)ilogbf(x) - 3, -9));
    return rintf(x / step) * step;
}

/* Layer 1 of a backend's pool, whose rows' q, k and v are looked up in tables. */
struct attention_twin {
    struct backend *b;
    uint32_t windows[2]; /* of the pool, which keeps the pointer */
    struct tensor *q_table, *k_table, *v_table, *q, *k, *v, *attended, *frequencies, *angles;
};

static void draw_tables(const struct attention_case *c)
{
    uint32_t n = 2 * FIRST * c->n_kv_heads * c->head_dim;
    random_floats(values, FIRST * c->n_heads * c->head_dim);
    random_floats(other, n);
    for (uint32_t i = 0; c->dtype == KV_FP8 && i < n; i++)
        other[i] = to_fp8(other[i]);
}

/* fp8: rope does not turn, so that keys are stored exactly. */
static void open_attention(struct attention_twin *twin, bool cuda, const struct attention_case *c)
{
    uint32_t q_cols = c->n_heads * c->head_dim, kv_cols = c->n_kv_heads * c->head_dim;
    float frequencies[128];
    for (uint32_t i = 0; i < c->rotated / 2; i++)
        frequencies[i] = c->dtype == KV_FP8 ? 0 : powf(10000, -2.0f * (float)i / (float)c->rotated);
    struct backend *b = open_twin(cuda, c->deterministic);
    *twin = (struct attention_twin){.b = b,
                                    .windows = {3, c->window},
                                    .q_table = new_table(b, values, FIRST, q_cols),
                                    .k_table = new_table(b, other, FIRST, kv_cols),
                                    .v_table = new_table(b, other + FIRST * kv_cols, FIRST, kv_cols),
                                    .q = new_activation(b, TWIN_ROWS, q_cols),
                                    .k = new_activation(b, TWIN_ROWS, kv_cols),
                                    .v = new_activation(b, TWIN_ROWS, kv_cols),
                                    .attended = new_activation(b, TWIN_ROWS, q_cols),
                                    .frequencies = new_weight(b, &quant_f32, frequencies, 1, c->rotated / 2, WEIGHT_VECTOR),
                                    .angles = new_activation(b, TWIN_ROWS, c->rotated)};
    new_kv_pool(b, c->n_heads, c->n_kv_heads, c->head_dim, c->block_size, cuda || c->dtype == KV_INT8 ? c->dtype : KV_AUTO,
                c->window ? twin->windows : NULL);
}

static void attend_step(const struct attention_twin *twin, const struct attention_case *c, const struct backend_step *step)
{
    struct backend *b = twin->b;
    struct backend_rope rope = {1, twin->q, twin->k, twin->v, twin->angles, c->style};
    struct backend_attention attention = {1, 1 / sqrtf((float)c->head_dim), twin->q, twin->attended};
    struct kvg_error err;
    must(b->ops->begin_step(b, step, &err), &err);
    b->ops->embed(b, twin->q_table, twin->q);
    b->ops->embed(b, twin->k_table, twin->k);
    b->ops->embed(b, twin->v_table, twin->v);
    b->ops->angles(b, twin->frequencies, twin->angles);
    b->ops->rope_store(b, &rope);
    b->ops->attention(b, &attention);
    end_rows(b);
}

/* Three sequences over four steps: a prompt of 90, one of 17 and one of 1 token; then one of 1, 3 and 1 tokens; then one token
 * each, twice. The rows' q, k and v are the same table everywhere, so keys of different sequences differ by position only where
 * rope turns them. Attended rows go to out, q and k after the second step to turned. */
static void attend(bool cuda, const struct attention_case *c, float *out, float *turned)
{
    struct attention_twin twin;
    open_attention(&twin, cuda, c);
    struct backend *b = twin.b;
    uint32_t q_cols = c->n_heads * c->head_dim, kv_cols = c->n_kv_heads * c->head_dim, ids[FIRST], blocks[3][TWIN_BLOCKS / 3];
    for (uint32_t i = 0; i < FIRST; i++)
        ids[i] = (i * 29 + 3) % FIRST;
    for (uint32_t s = 0; s < 3; s++)
        for (uint32_t i = 0; i < TWIN_BLOCKS / 3; i++)
            blocks[s][i] = (i * 23 + s * 7 + 1) % (TWIN_BLOCKS / 3) * 3 + s;
    static const uint32_t n_rows[] = {FIRST, SECOND, ALIVE, ALIVE};
    const struct backend_seq seqs[][3] = {{{0, 90, 0, blocks[0]}, {90, 17, 0, blocks[1]}, {107, 1, 0, blocks[2]}},
                                          {{0, 1, 90, blocks[0]}, {1, 3, 17, blocks[1]}, {4, 1, 1, blocks[2]}},
                                          {{0, 1, 91, blocks[0]}, {1, 1, 20, blocks[1]}, {2, 1, 2, blocks[2]}},
                                          {{0, 1, 92, blocks[0]}, {1, 1, 21, blocks[1]}, {2, 1, 3, blocks[2]}}};
    for (int i = 0; i < 2 + DECODES; i++) {
        struct backend_step step = {n_rows[i], 3, 0, ids + i, ids, seqs[i]};
        attend_step(&twin, c, &step);
        memcpy(out, b->ops->host(b, twin.attended), n_rows[i] * q_cols * sizeof *out);
        out += n_rows[i] * q_cols;
        if (i == 1) {
            memcpy(turned, b->ops->host(b, twin.q), SECOND * q_cols * sizeof *turned);
            memcpy(turned + SECOND * q_cols, b->ops->host(b, twin.k), SECOND * kv_cols * sizeof *turned);
        }
    }
    close_twin(b);
}

/* K and V are stored as bf16 (8 bits) here and as f16 on the CPU, tiles also round q and p to bf16: |v| <= 1, and a score moves
 * by at most 2^-8 sum|q k| / sqrt(d). int8 and fp8 are stored alike, or exactly. */
static void check_attention(const struct attention_case *c)
{
    enum { ROWS = FIRST + SECOND + DECODES * ALIVE };
    static float turned[2][SECOND * 2 * 2048];
    uint32_t q_cols = c->n_heads * c->head_dim, kv_cols = c->n_kv_heads * c->head_dim;
    char what[100];
    snprintf(what, sizeof what, "attention of %u/%u heads of %u, %s, window %u%s", c->n_heads, c->n_kv_heads, c->head_dim,
             backend_kv_dtype_name(c->dtype), c->window, c->deterministic ? ", deterministic" : "");
    draw_tables(c);
    attend(false, c, wanted, turned[0]);
    attend(true, c, got, turned[1]);
    assert_near("rotation", turned[1], turned[0], SECOND * (q_cols + kv_cols), 2e-7, 1e-7);
    assert_near(what, got, wanted, ROWS * q_cols, 0, 0.02);
    double error = 0, decoded = 0;
    for (uint32_t i = 0; i < ROWS * q_cols; i++)
        error += fabs((double)got[i] - (double)wanted[i]);
    for (uint32_t i = (FIRST + SECOND) * q_cols; i < ROWS * q_cols; i++)
        decoded += fabs((double)got[i] - (double)wanted[i]);
    if (error / (ROWS * q_cols) > 0.002)
        fail_msg("%s: mean error %g", what, error / (ROWS * q_cols));
    if (!c->deterministic && decoded / (DECODES * ALIVE * q_cols) > (c->dtype == KV_FP8 ? 2e-6 : 0.001))
        fail_msg("%s: mean error of decoded rows %g", what, decoded / (DECODES * ALIVE * q_cols));
}

static void test_attention_over_blocks(void **unused)
{
    static const struct attention_case cases[] = {
        {4, 4, 64, 64, 16, ROPE_INTERLEAVED, false, KV_BF16},  {6, 2, 64, 32, 32, ROPE_HALVES, false, KV_INT8},
        {7, 1, 80, 80, 16, ROPE_HALVES, false, KV_AUTO},       {2, 1, 128, 128, 16, ROPE_HALVES, false, KV_FP8},
        {4, 1, 256, 64, 16, ROPE_HALVES, false, KV_BF16},      {10, 1, 16, 16, 16, ROPE_HALVES, false, KV_INT8},
        {2, 2, 128, 64, 64, ROPE_INTERLEAVED, true, KV_INT8},  {6, 2, 64, 64, 16, ROPE_HALVES, true, KV_FP8},
        {2, 1, 128, 128, 32, ROPE_INTERLEAVED, true, KV_BF16}, {1, 1, 256, 64, 16, ROPE_HALVES, false, KV_INT8},
        {2, 1, 112, 72, 16, ROPE_HALVES, false, KV_INT8},      {3, 1, 48, 20, 16, ROPE_INTERLEAVED, false, KV_FP8},
        {2, 1, 48, 24, 16, ROPE_HALVES, true, KV_INT8},        {4, 4, 64, 64, 16, ROPE_HALVES, false, KV_BF16, 33},
        {6, 2, 64, 32, 32, ROPE_HALVES, false, KV_INT8, 1},    {7, 1, 80, 80, 16, ROPE_HALVES, false, KV_FP8, 70},
        {6, 2, 64, 64, 16, ROPE_HALVES, true, KV_INT8, 65}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_attention(&cases[i]);
}

/* A sequence that grows to a context of several splits beside a short one: chunks of the prompt, decode steps of both, a step
 * with a few rows of the long one (drafts). Attended rows of the steps after the prompt to out. */
enum { LONG = 330, CHUNK = 110, LONG_STEPS = LONG / CHUNK + 4, AFTER = 2 + 2 + 4 + 2 };

static void attend_long(bool cuda, const struct attention_case *c, float *out)
{
    struct attention_twin twin;
    open_attention(&twin, cuda, c);
    struct backend *b = twin.b;
    uint32_t q_cols = c->n_heads * c->head_dim, ids[CHUNK + LONG_STEPS], blocks[TWIN_BLOCKS];
    for (uint32_t i = 0; i < CHUNK + LONG_STEPS; i++)
        ids[i] = (i * 29 + 3) % FIRST;
    for (uint32_t i = 0; i < TWIN_BLOCKS; i++)
        blocks[i] = (i * 23 + 5) % TWIN_BLOCKS;
    static const uint32_t n_rows[LONG_STEPS] = {CHUNK, CHUNK, CHUNK, 1, 1, 3, 1};
    for (uint32_t i = 0, past = 0, other_past = 0; i < LONG_STEPS; past += n_rows[i++]) {
        bool alone = past < LONG;
        struct backend_seq seqs[2] = {{0, n_rows[i], past, blocks}, {n_rows[i], 1, other_past, blocks + TWIN_BLOCKS - 1}};
        uint32_t rows = n_rows[i] + (alone ? 0 : 1);
        struct backend_step step = {rows, alone ? 1 : 2, 0, ids + i, ids, seqs};
        attend_step(&twin, c, &step);
        if (alone)
            continue;
        memcpy(out, b->ops->host(b, twin.attended), rows * q_cols * sizeof *out);
        out += rows * q_cols;
        other_past++;
    }
    close_twin(b);
}

/* Bounds as for short ones; what is attended to a long context is smaller: its mean error shows what a bound would hide. */
static void test_attention_over_several_splits(void **unused)
{
    static const struct attention_case cases[] = {{4, 2, 64, 64, 16, ROPE_HALVES, false, KV_BF16},
                                                  {1, 1, 64, 64, 16, ROPE_HALVES, false, KV_FP8, 301},
                                                  {2, 1, 64, 64, 16, ROPE_HALVES, false, KV_INT8, 150},
                                                  {2, 1, 64, 64, 16, ROPE_HALVES, true, KV_BF16, 130}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct attention_case *c = &cases[i];
        uint32_t n = AFTER * c->n_heads * c->head_dim;
        char what[100];
        double error = 0;
        snprintf(what, sizeof what, "attention to %u keys, %s, window %u%s", LONG, backend_kv_dtype_name(c->dtype), c->window,
                 c->deterministic ? ", deterministic" : "");
        draw_tables(c);
        attend_long(false, c, wanted);
        attend_long(true, c, got);
        assert_near(what, got, wanted, n, 0, 0.005);
        for (uint32_t k = 0; k < n; k++)
            error += fabs((double)got[k] - (double)wanted[k]);
        if (error / n > 0.0005)
            fail_msg("%s: mean error %g", what, error / n);
    }
}

static void test_fp8_values_end_at_448_and_only_the_gpu_has_them(void **unused)
{
    struct backend *b = open_twin(true, false), *cpu = open_twin(false, false);
    struct backend_kv kv = {2, 1, 1, 16, TWIN_BLOCKS, 16, KV_FP8};
    struct kvg_error err;
    uint32_t id = 0, block = 3;
    struct backend_seq seq = {0, 1, 0, &block};
    struct backend_step step = {1, 1, 0, &id, &id, &seq};
    assert_int_equal(cpu->ops->kv_alloc(cpu, &kv, &err), KVG_UNSUPPORTED);
    assert_string_equal(err.message, "--kv-cache-dtype fp8: the CPU backend keeps KV as f16, bf16 or int8");
    for (int i = 0; i < 16; i++)
        values[i] = i % 3 ? -3 - (float)i : i ? 1000 : -1e9f;
    float frequencies[8] = {0};
    struct tensor *table = new_table(b, values, 1, 16), *frequency = new_weight(b, &quant_f32, frequencies, 1, 8, WEIGHT_VECTOR);
    struct tensor *q = new_activation(b, 1, 16), *k = new_activation(b, 1, 16), *v = new_activation(b, 1, 16);
    struct tensor *out = new_activation(b, 1, 16), *angles = new_activation(b, 1, 16);
    struct backend_rope rope = {0, q, k, v, angles, ROPE_HALVES};
    struct backend_attention attention = {0, 1e-6f, q, out};
    must(b->ops->kv_alloc(b, &kv, &err), &err);
    must(b->ops->begin_step(b, &step, &err), &err);
    struct tensor *const inputs[] = {q, k, v};
    for (int i = 0; i < 3; i++)
        b->ops->embed(b, table, inputs[i]);
    b->ops->angles(b, frequency, angles);
    b->ops->rope_store(b, &rope);
    b->ops->attention(b, &attention);
    end_rows(b);
    const float *attended = b->ops->host(b, out);
    for (int i = 0; i < 16; i++)
        if (attended[i] != (i % 3 ? (i == 14 ? -16 : -3 - (float)i) : i ? 448 : -448)) /* -17 lies between -16 and -18 */
            fail_msg("%g became %g", (double)values[i], (double)attended[i]);
    close_twin(b);
    close_twin(cpu);
}

/* ---- steps ---- */

static void test_bad_steps_are_refused(void **unused)
{
    struct backend *b = open_twin(true, false);
    struct kvg_error err;
    uint32_t ids[2] = {0, 0}, blocks[1] = {TWIN_BLOCKS};
    new_pool(b, 1, 1, 16, 16);
    struct backend_seq seq = {0, 2, 0, blocks};
    struct backend_step step = {2, 1, 0, ids, ids, &seq};
    assert_int_equal(b->ops->begin_step(b, &step, &err), KVG_INVALID);
    assert_string_equal(err.message, "block 64 of 64 in a block table");
    step.n_rows = TWIN_ROWS + 1;
    assert_int_equal(b->ops->begin_step(b, &step, &err), KVG_INVALID);
    blocks[0] = 0;
    step.n_rows = 2;
    seq.first_row = 1;
    assert_int_equal(b->ops->begin_step(b, &step, &err), KVG_INVALID);
    seq.first_row = 0;
    seq.n_rows = 1;
    assert_int_equal(b->ops->begin_step(b, &step, &err), KVG_INVALID);
    assert_string_equal(err.message, "the sequences cover 1 of 2 rows");
    close_twin(b);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products_of_every_format_at_every_width),
        cmocka_unit_test(test_products_of_mixed_formats_share_their_input),
        cmocka_unit_test(test_embedding_is_exact_in_every_format),
        cmocka_unit_test(test_norm_gate_and_gather),
        cmocka_unit_test(test_head_norms_sums_and_gelu),
        cmocka_unit_test(test_products_do_what_follows_them),
        cmocka_unit_test(test_attention_over_blocks),
        cmocka_unit_test(test_attention_over_several_splits),
        cmocka_unit_test(test_fp8_values_end_at_448_and_only_the_gpu_has_them),
        cmocka_unit_test(test_bad_steps_are_refused),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
