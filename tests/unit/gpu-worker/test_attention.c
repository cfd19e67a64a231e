/* Rope, KV and attention of the CPU backend, on every instruction set this CPU has, against plain code in double; and
 * row-invariance: the bits of a row are the same at every number of threads, chunk and block placement, and whatever is computed
 * together. Instruction sets give the same bits, too, but for AMX. */
#include <math.h>
#include "gpu-worker/quant/f16.h"
#include "tests/unit/gpu-worker/cpu_world.h"

struct geometry {
    uint32_t head_dim, n_heads, n_kv_heads, block_size;
    enum rope_style style;
    enum backend_kv_dtype dtype;
};
/* TOKENS: past the first segment of keys. */
enum { TOKENS = 290, MAX_WIDTH = 7 * 128 };

struct inputs {
    float q[TOKENS * MAX_WIDTH], k[TOKENS * MAX_WIDTH], v[TOKENS * MAX_WIDTH];
};

static double rotated(const struct geometry *g, const float *head, uint32_t d, uint32_t position, const float *frequencies)
{
    uint32_t half = g->head_dim / 2, i = g->style == ROPE_INTERLEAVED ? d / 2 : d % half;
    uint32_t a = g->style == ROPE_INTERLEAVED ? 2 * i : i, b = g->style == ROPE_INTERLEAVED ? 2 * i + 1 : i + half;
    double angle = position * (double)frequencies[i], c = cos(angle), s = sin(angle);
    return d == a ? head[a] * c - head[b] * s : head[a] * s + head[b] * c;
}

/* One head's row as the pool keeps it. */
static void stored(enum backend_kv_dtype dtype, const double *x, uint32_t dim, double *out)
{
    double amax = 0;
    for (uint32_t d = 0; d < dim; d++)
        amax = fmax(amax, fabs(x[d]));
    for (uint32_t d = 0; d < dim; d++)
        out[d] = dtype == KV_F16    ? (double)f16_to_f32(f32_to_f16((float)x[d]))
                 : dtype == KV_BF16 ? (double)bf16_to_f32(f32_to_bf16((float)x[d]))
                                    : (double)(nearbyintf((float)x[d] * (127.0f / (float)amax)) * ((float)amax / 127.0f));
}

/* Keys [t][kv head][dim] rotated and as stored, values as stored. */
static void plain_kv(const struct geometry *g, const struct inputs *in, const float *frequencies, double *k, double *v)
{
    uint32_t dim = g->head_dim;
    double row[MAX_WIDTH];
    for (uint32_t i = 0; i < TOKENS * g->n_kv_heads; i++) {
        for (uint32_t d = 0; d < dim; d++)
            row[d] = (float)rotated(g, in->k + (size_t)i * dim, d, i / g->n_kv_heads, frequencies);
        stored(g->dtype, row, dim, k + (size_t)i * dim);
        for (uint32_t d = 0; d < dim; d++)
            row[d] = in->v[(size_t)i * dim + d];
        stored(g->dtype, row, dim, v + (size_t)i * dim);
    }
}

/* Row `token` of the exact answer over keys and values as stored; returns the largest sum of |q k| of a score. */
static double plain_attention(const struct geometry *g, const struct inputs *in, const float *frequencies, const double *keys,
                              const double *values, uint32_t token, double *out)
{
    uint32_t dim = g->head_dim, q_width = g->n_heads * dim;
    double most_terms = 0;
    for (uint32_t h = 0; h < g->n_heads; h++) {
        uint32_t kv = h / (g->n_heads / g->n_kv_heads);
        double scores[TOKENS], high = -1e30, sum = 0, q[MAX_WIDTH];
        for (uint32_t d = 0; d < dim; d++)
            q[d] = rotated(g, in->q + token * q_width + h * dim, d, token, frequencies) / sqrt(dim);
        for (uint32_t t = 0; t <= token; t++) {
            const double *k = keys + ((size_t)t * g->n_kv_heads + kv) * dim;
            double terms = 0;
            scores[t] = 0;
            for (uint32_t d = 0; d < dim; d++)
                scores[t] += q[d] * k[d], terms += fabs(q[d] * k[d]);
            high = fmax(high, scores[t]);
            most_terms = fmax(most_terms, terms);
        }
        for (uint32_t d = 0; d < dim; d++)
            out[h * dim + d] = 0;
        for (uint32_t t = 0; t <= token; t++) {
            double p = exp(scores[t] - high);
            sum += p;
            for (uint32_t d = 0; d < dim; d++)
                out[h * dim + d] += p * values[((size_t)t * g->n_kv_heads + kv) * dim + d];
        }
        for (uint32_t d = 0; d < dim; d++)
            out[h * dim + d] /= sum;
    }
    return most_terms;
}

/* What steps of one layer work on. Blocks of the pool hold NaN, as their last owner may have left it there. */
struct layer {
    struct cpu_backend *cpu;
    struct tensor *q, *k, *v, *attended, *angles, *frequencies;
    const struct geometry *geometry;
};

static struct layer open_layer(struct cpu_backend *cpu, const struct geometry *g, uint32_t n_blocks, const float *frequencies)
{
    struct backend_kv kv = {1, g->n_heads, g->n_kv_heads, g->head_dim, n_blocks, g->block_size, g->dtype};
    uint32_t q_width = g->n_heads * g->head_dim, kv_width = g->n_kv_heads * g->head_dim;
    assert_int_equal(cpu->base.ops->kv_alloc(&cpu->base, &kv, NULL), 0);
    memset(cpu->kv_memory, 0xff, cpu->kv_bytes);
    return (struct layer){.cpu = cpu,
                          .q = activation(cpu, 256, q_width),
                          .k = activation(cpu, 256, kv_width),
                          .v = activation(cpu, 256, kv_width),
                          .attended = activation(cpu, 256, q_width),
                          .angles = activation(cpu, 256, g->head_dim),
                          .frequencies = vector_of(cpu, frequencies, g->head_dim / 2),
                          .geometry = g};
}

/* The rows of seqs, which lie in q, k and v. attend: else their keys and values are only kept. */
static void run_step(const struct layer *l, uint32_t n_rows, const struct backend_seq *seqs, uint32_t n_seqs, bool attend)
{
    static const uint32_t ids[256];
    const struct backend_ops *ops = l->cpu->base.ops;
    struct backend *backend = &l->cpu->base;
    struct backend_step step = {.n_rows = n_rows, .n_seqs = n_seqs, .ids = ids, .seqs = seqs};
    struct backend_rope rope = {0, l->q, l->k, l->v, l->angles, l->geometry->style};
    struct backend_attention attention = {0, 1.0f / sqrtf((float)l->geometry->head_dim), l->q, l->attended};
    assert_int_equal(ops->begin_step(backend, &step, NULL), 0);
    ops->angles(backend, l->frequencies, l->angles);
    ops->rope_store(backend, &rope);
    if (attend)
        ops->attention(backend, &attention);
    assert_int_equal(ops->end_step(backend, NULL), 0);
}

/* All tokens of one sequence in chunks, its blocks scattered by `spread`; beside it a second sequence that must not matter. */
static void run_attention(struct cpu_backend *cpu, const struct geometry *g, const struct inputs *in, const float *frequencies,
                          uint32_t chunk, uint32_t spread, float *out)
{
    uint32_t blocks[2][TOKENS / 16 + 1], n_blocks = TOKENS / g->block_size + 1;
    uint32_t q_width = g->n_heads * g->head_dim, kv_width = g->n_kv_heads * g->head_dim;
    struct layer l = open_layer(cpu, g, n_blocks * spread + 1, frequencies);
    for (uint32_t b = 0; b < n_blocks; b++) {
        blocks[0][b] = (n_blocks - 1 - b) * spread + spread / 2;
        blocks[1][b] = n_blocks * spread;
    }
    for (uint32_t at = 0; at < TOKENS; at += chunk) {
        uint32_t n = TOKENS - at < chunk ? TOKENS - at : chunk;
        struct backend_seq seqs[2] = {{0, 2, 0, blocks[1]}, {2, n, at, blocks[0]}};
        memset(l.q->data, 0, 2 * q_width * 4), memset(l.k->data, 0, 2 * kv_width * 4), memset(l.v->data, 0, 2 * kv_width * 4);
        memcpy(l.q->data + 2 * q_width, in->q + at * q_width, n * q_width * 4);
        memcpy(l.k->data + 2 * kv_width, in->k + at * kv_width, n * kv_width * 4);
        memcpy(l.v->data + 2 * kv_width, in->v + at * kv_width, n * kv_width * 4);
        run_step(&l, n + 2, seqs, 2, true);
        memcpy(out + at * q_width, l.attended->data + 2 * q_width, n * q_width * 4);
    }
}

/* backend.h's bound for |v| <= 1. f16 is tested with rotated keys, which may round the other way where they are near a tie. */
static double attention_bound(const char *isa, enum backend_kv_dtype dtype, double most_terms)
{
    if (dtype == KV_F16)
        return 2e-4;
    return strcmp(isa, "amx") == 0 ? 0x1p-8 + 0x1p-8 * most_terms : 1e-5;
}

static void check_attention(const char *isa, const struct geometry *g, const struct inputs *in, const float *frequencies,
                            const float *got)
{
    static double k[TOKENS * MAX_WIDTH], v[TOKENS * MAX_WIDTH];
    uint32_t q_width = g->n_heads * g->head_dim;
    double worst = 0;
    plain_kv(g, in, frequencies, k, v);
    for (uint32_t token = 0; token < TOKENS; token += token < 60 ? 29 : 127) {
        double want[MAX_WIDTH];
        double bound = attention_bound(isa, g->dtype, plain_attention(g, in, frequencies, k, v, token, want));
        for (uint32_t i = 0; i < q_width; i++) {
            worst = fmax(worst, fabs((double)got[token * q_width + i] - want[i]));
            if (!(fabs((double)got[token * q_width + i] - want[i]) <= bound))
                fail_msg("%s %s: token %u value %u: %g, expected %g", isa, backend_kv_dtype_name(g->dtype), token, i,
                         (double)got[token * q_width + i], want[i]);
        }
    }
    if (getenv("ATTENTION_ERRORS"))
        print_message("%s %s head_dim %u: largest error %.2g\n", isa, backend_kv_dtype_name(g->dtype), g->head_dim, worst);
}

static void check_geometry(const struct geometry *g)
{
    static struct inputs in;
    static float whole[TOKENS * MAX_WIDTH], part[TOKENS * MAX_WIDTH], first_isa[TOKENS * MAX_WIDTH];
    float frequencies[MAX_HEAD_DIM / 2];
    static const uint32_t chunks[] = {253, 16, 97};
    uint32_t q_width = g->n_heads * g->head_dim, n_kv = g->n_kv_heads * g->head_dim;
    for (uint32_t i = 0; i < TOKENS * q_width; i++)
        in.q[i] = random_float() * 3;
    for (uint32_t i = 0; i < TOKENS * n_kv; i++)
        in.k[i] = random_float() * 3, in.v[i] = random_float();
    for (uint32_t i = 0; i < g->head_dim / 2; i++)
        frequencies[i] = g->dtype == KV_F16 ? (float)pow(10000, -2.0 * i / g->head_dim) : 0; /* 0: keys are stored exactly */
    bool any = false;
    for (size_t s = 0; s < sizeof isas / sizeof *isas; s++) {
        for (size_t c = 0; c < sizeof chunks / sizeof *chunks; c++) {
            struct cpu_backend *cpu = open_backend(isas[s], c % 2 + 1);
            if (!cpu)
                continue;
            run_attention(cpu, g, &in, frequencies, chunks[c], (uint32_t)c + 1, c ? part : whole);
            close_backend(cpu);
            if (c && memcmp(part, whole, (size_t)TOKENS * q_width * 4))
                fail_msg("%s %s: chunks of %u differ (head_dim %u, block %u)", isas[s], backend_kv_dtype_name(g->dtype),
                         chunks[c], g->head_dim, g->block_size);
            if (c == 0 && any && strcmp(isas[s], "amx") != 0 && memcmp(whole, first_isa, (size_t)TOKENS * q_width * 4))
                fail_msg("%s differs from the set before it (head_dim %u)", isas[s], g->head_dim);
            if (c == 0) {
                memcpy(first_isa, whole, sizeof whole);
                check_attention(isas[s], g, &in, frequencies, whole);
            }
            any = true;
        }
    }
}

static void test_attention_is_right_and_invariant(void **unused)
{
    static const struct geometry geometries[] = {
        {64, 9, 3, 32, ROPE_INTERLEAVED},  {64, 7, 1, 16, ROPE_HALVES}, {128, 6, 1, 64, ROPE_HALVES},
        {16, 2, 2, 512, ROPE_INTERLEAVED}, {80, 2, 2, 16, ROPE_HALVES}, {256, 1, 1, 32, ROPE_HALVES},
        {32, 20, 1, 32, ROPE_INTERLEAVED},
    };
    for (size_t i = 0; i < sizeof geometries / sizeof *geometries; i++)
        for (enum backend_kv_dtype dtype = KV_F16; dtype <= KV_INT8; dtype++) {
            struct geometry g = geometries[i];
            g.dtype = dtype;
            check_geometry(&g);
        }
}

/* Sequences that decode behind a conversation of LONG tokens in blocks 0, 1, ... of the pool. The first `deep` of them share two
 * segments of it, one shares a segment, the last nothing; with `copies` nobody shares a block, but what lies in them is the same.
 */
enum { LONG = 1024, SHARERS = 7, DRAFTING = 1 };

static struct backend_seq sharer(struct cpu_backend *cpu, uint32_t s, uint32_t first_row, bool copies, uint32_t *blocks)
{
    uint32_t size = cpu->kv.block_size, past = 2 * 256 + 37 * s + 5, n = LONG / size,
             shared = (s < SHARERS - 2 ? 2 : 1) * 256 / size;
    shared = s == SHARERS - 1 || copies ? 0 : shared;
    for (uint32_t b = 0; b < n; b++) {
        blocks[b] = b < shared ? b : n * (s + 1) + b;
        if (b >= shared) {
            uint32_t from = (b + 1) * size <= 256 * (s < SHARERS - 2 ? 2 : 1) && s < SHARERS - 1 ? b : (b + s) % n;
            memcpy(cpu->layers[0].memory + blocks[b] * cpu->layers[0].block_bytes,
                   cpu->layers[0].memory + from * cpu->layers[0].block_bytes, cpu->layers[0].block_bytes);
        }
    }
    return (struct backend_seq){first_row, s == DRAFTING ? 3 : 1, past, blocks};
}

/* One step of them; how many of them had their first segments computed together. */
static uint32_t decode_behind(struct cpu_backend *cpu, const struct geometry *g, bool copies, float *out)
{
    uint32_t blocks[SHARERS + 1][LONG / 16], n_blocks = LONG / g->block_size, q_width = g->n_heads * g->head_dim;
    uint32_t kv_width = g->n_kv_heads * g->head_dim;
    float frequencies[MAX_HEAD_DIM / 2] = {0};
    struct layer l = open_layer(cpu, g, n_blocks * (SHARERS + 1), frequencies);
    for (uint32_t b = 0; b < n_blocks; b++)
        blocks[SHARERS][b] = b;
    state = 77;
    for (uint32_t at = 0; at <= LONG; at += 256) {
        struct backend_seq seqs[SHARERS] = {{0, 256, at, blocks[SHARERS]}};
        uint32_t n_seqs = at == LONG ? SHARERS : 1, n_rows = at == LONG ? 0 : 256;
        for (uint32_t s = 0; s < SHARERS && at == LONG; s++, n_rows += seqs[s - 1].n_rows)
            seqs[s] = sharer(cpu, s, n_rows, copies, blocks[s]);
        for (uint32_t i = 0; i < n_rows * q_width; i++)
            l.q->data[i] = random_float() * 3;
        for (uint32_t i = 0; i < n_rows * kv_width; i++)
            l.k->data[i] = random_float() * 3, l.v->data[i] = random_float();
        run_step(&l, n_rows, seqs, n_seqs, true);
    }
    memcpy(out, l.attended->data, (SHARERS + 2) * q_width * sizeof *out);
    return cpu_attention_sharing(cpu);
}

static void test_sequences_behind_shared_blocks_get_the_bits_of_their_own_copies(void **unused)
{
    static const struct geometry geometries[] = {
        {64, 9, 3, 32, ROPE_INTERLEAVED}, {80, 6, 1, 16, ROPE_HALVES}, {16, 2, 2, 256, ROPE_INTERLEAVED}};
    static float shared[(SHARERS + 2) * MAX_WIDTH * 2], copied[(SHARERS + 2) * MAX_WIDTH * 2];
    for (size_t i = 0; i < sizeof geometries / sizeof *geometries; i++)
        for (int variant = 0; variant < KV_FP8 * (int)(sizeof isas / sizeof *isas); variant++) {
            struct geometry g = geometries[i];
            const char *isa = isas[variant / KV_FP8];
            g.dtype = (enum backend_kv_dtype)(variant % KV_FP8);
            struct cpu_backend *cpu = open_backend(isa, (uint32_t)variant % 2 + 1);
            if (!cpu)
                continue;
            size_t bytes = (SHARERS + 2) * g.n_heads * g.head_dim * sizeof *shared;
            uint32_t together = decode_behind(cpu, &g, false, shared), apart = decode_behind(cpu, &g, true, copied);
            assert_int_equal(apart, 0);
            assert_int_equal(together, g.n_heads / g.n_kv_heads * 3 > 16 ? SHARERS - 3 : SHARERS - 2);
            if (memcmp(shared, copied, bytes))
                fail_msg("%s %s: shared blocks change the result (head_dim %u, block %u)", isa, backend_kv_dtype_name(g.dtype),
                         g.head_dim, g.block_size);
            close_backend(cpu);
        }
}

/* Behind FAR tokens threads take several tiles through the keys at once, and runs of the keys of some. */
enum { FAR = 4352 + 90, FAR_ROWS = 150 };

/* The attention of the last FAR_ROWS tokens, `chunk` of them in a step and two rows of another sequence beside each. */
static void attend_far(struct cpu_backend *cpu, const struct geometry *g, uint32_t chunk, float *out)
{
    static uint32_t blocks[2][(FAR + FAR_ROWS) / 16 + 1];
    uint32_t n_blocks = (FAR + FAR_ROWS) / g->block_size + 1, n;
    uint32_t q_width = g->n_heads * g->head_dim, kv_width = g->n_kv_heads * g->head_dim;
    float frequencies[MAX_HEAD_DIM / 2] = {0};
    struct layer l = open_layer(cpu, g, n_blocks + 1, frequencies);
    for (uint32_t b = 0; b < n_blocks; b++)
        blocks[0][b] = n_blocks - b;
    for (uint32_t at = 0; at < FAR + FAR_ROWS; at += n) {
        uint32_t most = at < FAR ? FAR - at : FAR + FAR_ROWS - at, size = at < FAR ? 250 : chunk;
        n = most < size ? most : size;
        struct backend_seq seqs[2] = {{0, 2, 0, blocks[1]}, {2, n, at, blocks[0]}};
        for (uint32_t r = 0; r < n + 2; r++) {
            state = r < 2 ? r : at + r; /* a row is the same in every chunk */
            for (uint32_t i = 0; i < q_width; i++)
                l.q->data[r * q_width + i] = random_float() * 3;
            for (uint32_t i = 0; i < kv_width; i++)
                l.k->data[r * kv_width + i] = random_float() * 3, l.v->data[r * kv_width + i] = random_float();
        }
        run_step(&l, n + 2, seqs, 2, at >= FAR);
        if (at >= FAR)
            memcpy(out + (at - FAR) * q_width, l.attended->data + 2 * q_width, n * q_width * sizeof *out);
    }
}

static void test_tiles_and_runs_behind_many_tokens_do_not_change_a_row(void **unused)
{
    static const struct geometry geometries[] = {{64, 9, 3, 32, ROPE_INTERLEAVED}, {128, 7, 1, 64, ROPE_HALVES}};
    static const struct {
        uint32_t chunk, threads;
    } ways[] = {{1, 1}, {FAR_ROWS, 1}, {FAR_ROWS, 2}, {70, 3}, {21, 2}, {FAR_ROWS, 7}, {2, 5}};
    static float alone[FAR_ROWS * 1024], other[FAR_ROWS * 1024];
    const char *some[] = {"amx", "avx512", "generic"};
    for (int variant = 0; variant < 6; variant++)
        for (size_t w = 0; w < sizeof ways / sizeof *ways; w++) {
            struct geometry g = geometries[variant % 2];
            struct cpu_backend *cpu =
                variant == 5 || (variant == 4 && w > 3) ? NULL : open_backend(some[variant / 2], ways[w].threads);
            if (!cpu)
                continue;
            g.dtype = variant / 2 ? KV_F16 : KV_BF16;
            attend_far(cpu, &g, ways[w].chunk, w ? other : alone);
            close_backend(cpu);
            if (w && memcmp(alone, other, (size_t)FAR_ROWS * g.n_heads * g.head_dim * sizeof *alone))
                fail_msg("%s: %u rows a step on %u threads differ (head_dim %u)", some[variant / 2], ways[w].chunk,
                         ways[w].threads, g.head_dim);
        }
}

int main(void)
{
    name_skipped_isas();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention_is_right_and_invariant),
        cmocka_unit_test(test_sequences_behind_shared_blocks_get_the_bits_of_their_own_copies),
        cmocka_unit_test(test_tiles_and_runs_behind_many_tokens_do_not_change_a_row),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
