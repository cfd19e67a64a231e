#include "gpu-worker/model/quantized.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/log.h"
#include "gpu-worker/quant/f16.h"

enum { NAME_SIZE = 200, STRIP = 32 /* rows unpacked at once */, HALF_BYTES = 16 /* codes of a 4-bit block */ };

/* A matrix while it is read. */
struct reading {
    const struct quantization *quantization;
    struct quantization own; /* what it points to */
    const struct safetensors *folder;
    struct kvg_error *err;
    char base[NAME_SIZE]; /* "model.layers.0.mlp.up_proj." */
    uint32_t rows, cols, groups, per_word;
    const struct safetensors_tensor *codes, *scales, *zeros, *g_idx, *shape;
    float *scale;       /* [groups, rows] */
    uint16_t *zero;     /* [groups, rows] */
    uint32_t *group_of; /* [cols] */
    uint32_t *order;    /* [cols]; NULL: as they are */
    uint8_t *strip;     /* [STRIP, cols] codes */
    uint32_t per_group; /* columns of a grouped matrix's group */
};

/* ---- the tensors of a matrix ------------------------------------------------------------------------------------------- */

static bool base_of(const char *name, char out[NAME_SIZE])
{
    size_t n = strlen(name), last = strlen("weight");
    if (n < last || n - last >= NAME_SIZE || strcmp(name + n - last, "weight") != 0)
        return false;
    memcpy(out, name, n - last);
    out[n - last] = '\0';
    return true;
}

static const char *codes_name(enum quantized_method method)
{
    return method == QUANTIZED_PACKED ? "weight_packed" : method == QUANTIZED_INT8 ? "weight" : "qweight";
}

static const struct safetensors_tensor *find_part(const struct safetensors *folder, const char *base, const char *part)
{
    char name[NAME_SIZE + 32];
    snprintf(name, sizeof name, "%s%s", base, part);
    return safetensors_find(folder, name);
}

bool quantized_has(const struct quantization *quantization, const struct safetensors *folder, const char *name)
{
    char base[NAME_SIZE];
    if (quantization->method == QUANTIZED_NONE || !base_of(name, base))
        return false;
    const struct safetensors_tensor *codes = find_part(folder, base, codes_name(quantization->method));
    return codes && (quantization->method != QUANTIZED_INT8 || codes->dtype == ST_I8);
}

/* The part of exactly this type (ST_DTYPES: F16, BF16 or F32) and shape; second = 0: of one dimension. */
static int take_part(const struct reading *m, const struct safetensors_tensor **out, const char *part,
                     enum safetensors_dtype dtype, uint64_t first, uint64_t second)
{
    const struct safetensors_tensor *t = *out = find_part(m->folder, m->base, part);
    uint32_t n_dims = second ? 2 : 1, group = m->quantization->group ? m->quantization->group : m->cols;
    if (!t)
        return kvg_fail(m->err, KVG_FILE, "tensor %s%s is missing", m->base, part);
    if (dtype == ST_DTYPES ? !safetensors_format(t->dtype) : t->dtype != dtype)
        return kvg_fail(m->err, KVG_FILE, "tensor %s%s has type %s, expected %s", m->base, part, safetensors_dtype_name(t->dtype),
                        dtype == ST_DTYPES ? "F16, BF16 or F32" : safetensors_dtype_name(dtype));
    if (t->n_dims != n_dims || t->shape[0] != first || t->shape[1] != (second ? second : 1))
        return kvg_fail(m->err, KVG_FILE,
                        "tensor %s%s is [%llu, %llu] of %u dimensions, expected [%llu, %llu] of %u: a matrix [%u, %u] of %u bits "
                        "in groups of %u",
                        m->base, part, (unsigned long long)t->shape[0], (unsigned long long)t->shape[1], t->n_dims,
                        (unsigned long long)first, (unsigned long long)(second ? second : 1), n_dims, m->rows, m->cols,
                        m->quantization->bits, group);
    return 0;
}

static int take_gptq(struct reading *m)
{
    uint32_t per = m->per_word;
    int failed;
    if ((failed = take_part(m, &m->codes, "qweight", ST_I32, m->cols / per, m->rows)) ||
        (failed = take_part(m, &m->zeros, "qzeros", ST_I32, m->groups, m->rows / per)) ||
        (failed = take_part(m, &m->scales, "scales", ST_DTYPES, m->groups, m->rows)))
        return failed;
    if (!find_part(m->folder, m->base, "g_idx") && !m->quantization->act_order)
        return 0;
    return take_part(m, &m->g_idx, "g_idx", ST_I32, m->cols, 0);
}

static int take_awq(struct reading *m)
{
    int failed;
    if ((failed = take_part(m, &m->codes, "qweight", ST_I32, m->cols, m->rows / m->per_word)) ||
        (failed = take_part(m, &m->zeros, "qzeros", ST_I32, m->groups, m->rows / m->per_word)))
        return failed;
    return take_part(m, &m->scales, "scales", ST_DTYPES, m->groups, m->rows);
}

/* weight_shape repeats what the model's configuration says. */
static int check_shape(const struct reading *m)
{
    int64_t rows, cols;
    memcpy(&rows, m->shape->data, sizeof rows);
    memcpy(&cols, m->shape->data + sizeof rows, sizeof cols);
    if (rows != m->rows || cols != m->cols)
        return kvg_fail(m->err, KVG_FILE, "tensor %sweight_shape says [%lld, %lld], expected [%u, %u]", m->base, (long long)rows,
                        (long long)cols, m->rows, m->cols);
    return 0;
}

static int take_packed(struct reading *m)
{
    uint32_t per = m->per_word;
    int failed;
    if ((failed = take_part(m, &m->codes, "weight_packed", ST_I32, m->rows, (m->cols + per - 1) / per)) ||
        (failed = take_part(m, &m->scales, "weight_scale", ST_DTYPES, m->rows, m->groups)))
        return failed;
    if (m->quantization->zeros &&
        (failed = take_part(m, &m->zeros, "weight_zero_point", ST_I32, (m->rows + per - 1) / per, m->groups)))
        return failed;
    if (find_part(m->folder, m->base, "weight_g_idx") && (failed = take_part(m, &m->g_idx, "weight_g_idx", ST_I32, m->cols, 0)))
        return failed;
    if (!find_part(m->folder, m->base, "weight_shape"))
        return 0;
    failed = take_part(m, &m->shape, "weight_shape", ST_I64, 2, 0);
    return failed ? failed : check_shape(m);
}

static int take_int8(struct reading *m)
{
    int failed = take_part(m, &m->codes, "weight", ST_I8, m->rows, m->cols);
    const struct safetensors_tensor *scales = find_part(m->folder, m->base, "weight_scale");
    bool whole = scales && scales->n_dims == 1 && scales->shape[0] == 1 && m->rows > 1;
    return failed  ? failed
           : whole ? take_part(m, &m->scales, "weight_scale", ST_DTYPES, 1, 0)
                   : take_part(m, &m->scales, "weight_scale", ST_DTYPES, m->rows, 1);
}

static int take_parts(struct reading *m)
{
    const struct quantization *q = m->quantization;
    bool rows_packed = q->method == QUANTIZED_GPTQ || q->method == QUANTIZED_AWQ;
    uint32_t group = q->group ? q->group : m->cols;
    if (m->cols % group || m->cols % QUANT_GROUP || (rows_packed && m->rows % m->per_word))
        return kvg_fail(m->err, KVG_UNSUPPORTED,
                        "matrix %sweight [%u, %u]: columns must come in groups of %u and blocks of %u, rows in words of %u",
                        m->base, m->rows, m->cols, group, QUANT_GROUP, rows_packed ? m->per_word : 1);
    m->groups = m->cols / group;
    return q->method == QUANTIZED_GPTQ     ? take_gptq(m)
           : q->method == QUANTIZED_AWQ    ? take_awq(m)
           : q->method == QUANTIZED_PACKED ? take_packed(m)
                                           : take_int8(m);
}

/* ---- scales, zeros and groups ------------------------------------------------------------------------------------------ */

static uint32_t word_at(const struct safetensors_tensor *t, uint64_t i)
{
    uint32_t word;
    memcpy(&word, t->data + i * sizeof word, sizeof word);
    return word;
}

/* Code i of a word. */
static uint32_t code_at(const struct reading *m, uint32_t word, uint32_t i)
{
    uint32_t bits = m->quantization->bits;
    return word >> i * bits & ((1u << bits) - 1);
}

/* Where AWQ keeps the i-th of eight rows. */
static uint32_t awq_nibble(uint32_t i)
{
    return i / 2 + i % 2 * 4;
}

static float float_at(const struct safetensors_tensor *t, uint64_t i)
{
    float value;
    uint16_t half;
    if (t->dtype == ST_F32) {
        memcpy(&value, t->data + i * sizeof value, sizeof value);
        return value;
    }
    memcpy(&half, t->data + i * sizeof half, sizeof half);
    return t->dtype == ST_F16 ? f16_to_f32(half) : bf16_to_f32(half);
}

static int read_scales(struct reading *m)
{
    enum quantized_method method = m->quantization->method;
    bool by_row = method == QUANTIZED_PACKED || method == QUANTIZED_INT8, one = m->scales->n_dims == 1;
    for (uint64_t g = 0; g < m->groups; g++)
        for (uint64_t r = 0; r < m->rows; r++) {
            float s = float_at(m->scales, one ? 0 : by_row ? r * m->groups + g : g * m->rows + r);
            if (!isfinite(s))
                return kvg_fail(m->err, KVG_FILE, "matrix %sweight: the scale of row %llu, group %llu is %g", m->base,
                                (unsigned long long)r, (unsigned long long)g, (double)s);
            m->scale[g * m->rows + r] = s;
        }
    return 0;
}

static uint32_t zero_at(const struct reading *m, uint64_t g, uint64_t r)
{
    uint32_t per = m->per_word, at = (uint32_t)(r % per);
    switch (m->quantization->method) {
    case QUANTIZED_GPTQ:
        return code_at(m, word_at(m->zeros, g * (m->rows / per) + r / per), at) + m->quantization->zero_add;
    case QUANTIZED_AWQ:
        return code_at(m, word_at(m->zeros, g * (m->rows / per) + r / per), awq_nibble(at));
    default:
        return m->zeros ? code_at(m, word_at(m->zeros, r / per * m->groups + g), at) : 1u << (m->quantization->bits - 1);
    }
}

static void read_zeros(struct reading *m)
{
    for (uint64_t g = 0; g < m->groups; g++)
        for (uint64_t r = 0; r < m->rows; r++)
            m->zero[g * m->rows + r] = (uint16_t)zero_at(m, g, r);
}

/* compressed-tensors writes -1 for each column where columns were not sorted. */
static bool unset(const struct safetensors_tensor *g_idx, uint32_t cols)
{
    for (uint32_t c = 0; c < cols; c++)
        if ((int32_t)word_at(g_idx, c) != -1)
            return false;
    return true;
}

static int read_groups(struct reading *m, bool *sorted)
{
    uint32_t group = m->cols / m->groups;
    bool listed = m->g_idx && !(m->quantization->method == QUANTIZED_PACKED && unset(m->g_idx, m->cols));
    *sorted = true;
    for (uint32_t c = 0; c < m->cols; c++) {
        uint32_t g = listed ? word_at(m->g_idx, c) : c / group;
        if (g >= m->groups)
            return kvg_fail(m->err, KVG_FILE, "tensor %s%sg_idx: column %u is of group %d, outside 0..%u", m->base,
                            m->quantization->method == QUANTIZED_PACKED ? "weight_" : "", c, (int32_t)g, m->groups - 1);
        m->group_of[c] = g;
        *sorted = *sorted && g == c / group;
    }
    return 0;
}

/* Columns by group, each group's in their own order. False where a group's columns are no whole number of blocks. */
static bool sort_columns(struct reading *m)
{
    uint32_t at = 0;
    for (uint32_t g = 0; g < m->groups; g++) {
        for (uint32_t c = 0; c < m->cols; c++)
            if (m->group_of[c] == g)
                m->order[at++] = c;
        if (at % QUANT_GROUP)
            return false;
    }
    return true;
}

/* ---- codes ------------------------------------------------------------------------------------------------------------- */

/* Rows first..first+n into strip [n][cols]; for the layouts whose words lie row after row, word after word. */
static void unpack_columns(const struct reading *m, uint32_t first, uint32_t n, uint8_t *strip)
{
    uint32_t per = m->per_word, words = m->rows / per;
    bool awq = m->quantization->method == QUANTIZED_AWQ;
    for (uint64_t c = 0; c < m->cols; c += awq ? 1 : per)
        for (uint32_t r = 0; r < n; r++) {
            uint8_t *out = strip + (size_t)r * m->cols + c;
            if (awq) {
                uint32_t word = word_at(m->codes, c * words + (first + r) / per);
                out[0] = (uint8_t)code_at(m, word, awq_nibble((first + r) % per));
                continue;
            }
            uint32_t word = word_at(m->codes, c / per * m->rows + first + r);
            for (uint32_t i = 0; i < per; i++)
                out[i] = (uint8_t)code_at(m, word, i);
        }
}

static void unpack_rows(const struct reading *m, uint32_t first, uint32_t n, uint8_t *strip)
{
    uint32_t per = m->per_word, words = (m->cols + per - 1) / per;
    for (uint32_t r = 0; r < n; r++) {
        uint8_t *out = strip + (size_t)r * m->cols;
        uint64_t row = first + r;
        for (uint32_t c = 0; c < m->cols && m->quantization->method == QUANTIZED_INT8; c++)
            out[c] = (uint8_t)(m->codes->data[row * m->cols + c] ^ 0x80);
        for (uint32_t c = 0; c < m->cols && m->quantization->method != QUANTIZED_INT8; c += per) {
            uint32_t word = word_at(m->codes, row * words + c / per);
            for (uint32_t i = 0; i < per && c + i < m->cols; i++)
                out[c + i] = (uint8_t)code_at(m, word, i);
        }
    }
}

static void unpack(const struct reading *m, uint32_t first, uint32_t n, uint8_t *strip)
{
    enum quantized_method method = m->quantization->method;
    (method == QUANTIZED_GPTQ || method == QUANTIZED_AWQ ? unpack_columns : unpack_rows)(m, first, n, strip);
}

static void put_half(uint8_t **out, float value)
{
    uint16_t half = f32_to_f16(value);
    memcpy(*out, &half, sizeof half);
    *out += sizeof half;
}

/* 32 columns of a row whose codes are q; all of one group where the format has blocks. */
static uint8_t *encode_block(const struct reading *m, const struct quant_format *format, const uint8_t *q,
                             const uint32_t *columns, uint64_t r, uint8_t *out)
{
    uint64_t at = (uint64_t)m->group_of[columns[0]] * m->rows + r;
    if (format->scales == QUANT_FLOAT) {
        for (int i = 0; i < QUANT_GROUP; i++) {
            at = (uint64_t)m->group_of[columns[i]] * m->rows + r;
            float w = m->scale[at] * (float)((int)q[columns[i]] - (int)m->zero[at]);
            if (format == &quant_f16) {
                put_half(&out, w);
                continue;
            }
            memcpy(out, &w, sizeof w);
            out += sizeof w;
        }
        return out;
    }
    put_half(&out, m->scale[at]);
    if (format->scales == QUANT_SCALE_MIN)
        put_half(&out, -m->scale[at] * (float)m->zero[at]);
    if (format->bits == 4) {
        for (int i = 0; i < HALF_BYTES; i++)
            *out++ = (uint8_t)(q[columns[i]] | q[columns[HALF_BYTES + i]] << 4);
        return out;
    }
    for (int i = 0; i < QUANT_GROUP; i++)
        *out++ = (uint8_t)(q[columns[i]] ^ 0x80);
    return out;
}

static int encode(struct reading *m, struct quantized_matrix *out)
{
    size_t row_bytes = quant_row_bytes(out->format, m->cols);
    uint32_t plain[QUANT_GROUP];
    uint8_t *at = out->data = malloc(m->rows * row_bytes);
    if (!at)
        return kvg_fail(m->err, KVG_NOMEM, "no memory for %zu bytes of %sweight", m->rows * row_bytes, m->base);
    for (uint32_t first = 0; first < m->rows; first += STRIP) {
        uint32_t n = m->rows - first < STRIP ? m->rows - first : STRIP;
        unpack(m, first, n, m->strip);
        for (uint32_t r = 0; r < n; r++)
            for (uint32_t c = 0; c < m->cols; c += QUANT_GROUP) {
                for (uint32_t i = 0; i < QUANT_GROUP && !m->order; i++)
                    plain[i] = c + i;
                at = encode_block(m, out->format, m->strip + (size_t)r * m->cols, m->order ? m->order + c : plain, first + r, at);
            }
    }
    return 0;
}

/* ---- grouped matrices ---------------------------------------------------------------------------------------------------- */

static void read_w8a8(const void *context, uint32_t first, uint32_t n, const struct grouped_rows *out)
{
    const struct reading *m = context;
    memcpy(out->q, m->codes->data + (size_t)first * m->cols, (size_t)n * m->cols);
    memcpy(out->scale, m->scale + first, n * sizeof *out->scale);
}

static void gather(const uint32_t *order, uint32_t cols, uint8_t *row)
{
    uint8_t as_stored[GROUPED_MOST_COLS];
    memcpy(as_stored, row, cols);
    for (uint32_t i = 0; i < cols; i++)
        row[i] = as_stored[order[i]];
}

static void read_w4a16(const void *context, uint32_t first, uint32_t n, const struct grouped_rows *out)
{
    const struct reading *m = context;
    uint32_t groups = m->cols / m->per_group;
    unpack(m, first, n, out->q);
    for (uint32_t r = 0; r < n; r++) {
        if (m->order)
            gather(m->order, m->cols, out->q + (size_t)r * m->cols);
        for (uint32_t g = 0; g < groups; g++) {
            uint32_t column = m->order ? m->order[g * m->per_group] : g * m->per_group;
            size_t at = (size_t)m->group_of[column] * m->rows + first + r;
            out->scale[(size_t)r * groups + g] = m->scale[at];
            out->zero[(size_t)r * groups + g] = (uint8_t)m->zero[at];
        }
    }
}

bool quantized_grouped(const struct quantization *quantization, uint32_t cols, struct quant_grouped *out)
{
    bool w8a8 = quantization->method == QUANTIZED_INT8;
    enum grouped_kind kind = w8a8 ? GROUPED_W8A8 : GROUPED_W4A16;
    uint32_t group = grouped_group(kind, cols, quantization->group ? quantization->group : cols);
    *out = (struct quant_grouped){.kind = kind, .cols = cols, .group = group, .zeros = !w8a8 && quantization->zeros};
    return group && (w8a8 ? quantization->activations : quantization->bits == 4);
}

/* Whether every `per_group` columns, in their order, are of one group. */
static bool one_group_each(const struct reading *m, uint32_t per_group)
{
    for (uint32_t i = 0; i < m->cols; i++) {
        uint32_t first = i / per_group * per_group;
        if (m->group_of[m->order ? m->order[i] : i] != m->group_of[m->order ? m->order[first] : first])
            return false;
    }
    return true;
}

/* True where the matrix is a grouped one, which reads through *m from now on. */
static bool make_grouped(struct reading *m, bool centred, struct quantized_matrix *out)
{
    if (!quantized_grouped(m->quantization, m->cols, &out->grouped))
        return false;
    m->per_group = out->grouped.group;
    if (out->grouped.kind == GROUPED_W4A16 && m->per_group == GROUPED_LARGE && !one_group_each(m, m->per_group))
        m->per_group = GROUPED_SMALL;
    if (out->grouped.kind == GROUPED_W4A16 && !one_group_each(m, m->per_group))
        return false;
    out->grouped.rows = m->rows;
    out->grouped.group = m->per_group;
    out->grouped.zeros = out->grouped.kind == GROUPED_W4A16 && !centred;
    out->grouped.read = out->grouped.kind == GROUPED_W8A8 ? read_w8a8 : read_w4a16;
    out->grouped.context = out->reading = m;
    out->format = NULL;
    return true;
}

/* ---- the whole --------------------------------------------------------------------------------------------------------- */

/* The least that a scale must keep of itself in f16. */
static bool fits_f16(float scale)
{
    return fabsf(f16_to_f32(f32_to_f16(scale)) - scale) <= 0x1p-8f * fabsf(scale);
}

/* Whether scales may be f16; and whether all zeros are those of symmetric codes. */
static bool survey(const struct reading *m, bool *centred)
{
    uint32_t middle = 1u << (m->quantization->bits - 1);
    *centred = true;
    for (uint64_t i = 0; i < (uint64_t)m->groups * m->rows; i++) {
        if (!fits_f16(m->scale[i]))
            return false;
        *centred = *centred && m->zero[i] == middle;
    }
    return true;
}

/* blocks: columns come in blocks of one group. */
static const struct quant_format *choose_format(const struct reading *m, bool halves, bool centred, bool blocks)
{
    uint32_t bits = m->quantization->bits;
    if (!halves) {
        log_warn("matrix %sweight: its scales lose too much in f16: kept as F32", m->base);
        return &quant_f32;
    }
    if (!blocks || (bits == 8 && !centred))
        return &quant_f16;
    return bits == 8 ? &quant_q8_0 : centred ? &quant_q4_0 : &quant_q4_1;
}

const struct quant_format *quantized_format(const struct quantization *quantization)
{
    bool zeros = quantization->zeros;
    return quantization->bits == 4 ? (zeros ? &quant_q4_1 : &quant_q4_0) : zeros ? &quant_f16 : &quant_q8_0;
}

static int allocate(struct reading *m)
{
    size_t n = (size_t)m->groups * m->rows;
    m->scale = malloc(n * sizeof *m->scale);
    m->zero = malloc(n * sizeof *m->zero);
    m->group_of = malloc(m->cols * sizeof *m->group_of);
    m->order = malloc(m->cols * sizeof *m->order);
    m->strip = malloc((size_t)STRIP * m->cols);
    bool all = m->scale && m->zero && m->group_of && m->order && m->strip;
    return all ? 0 : kvg_fail(m->err, KVG_NOMEM, "no memory for the scales of %sweight", m->base);
}

static void free_reading(struct reading *m)
{
    if (!m)
        return;
    free(m->scale);
    free(m->zero);
    free(m->group_of);
    free(m->order);
    free(m->strip);
    free(m);
}

static void list_parts(const struct reading *m, struct quantized_matrix *out)
{
    const struct safetensors_tensor *parts[QUANTIZED_PARTS] = {m->codes, m->scales, m->zeros, m->g_idx, m->shape};
    for (uint32_t i = 0, n = 0; i < QUANTIZED_PARTS; i++)
        if (parts[i])
            out->parts[n++] = parts[i];
}

static void forget_order(struct reading *m)
{
    free(m->order);
    m->order = NULL;
}

static int convert(struct reading *m, struct quantized_matrix *out, bool gathers, bool groups)
{
    bool sorted, centred;
    int failed;
    if ((failed = take_parts(m)) || (failed = allocate(m)) || (failed = read_scales(m)) || (failed = read_groups(m, &sorted)))
        return failed;
    read_zeros(m);
    list_parts(m, out);
    bool ordered = !sorted && gathers && sort_columns(m), halves = survey(m, &centred);
    if (!ordered)
        forget_order(m);
    if (groups && (sorted || ordered) && (halves || m->quantization->method == QUANTIZED_INT8) && make_grouped(m, centred, out)) {
        out->order = m->order;
        return 0;
    }
    out->format = choose_format(m, halves, centred, sorted || ordered);
    if (out->format->scales == QUANT_FLOAT)
        forget_order(m);
    if ((failed = encode(m, out)))
        return failed;
    out->order = m->order;
    m->order = NULL;
    return 0;
}

int quantized_read(struct quantized_matrix *out, const struct quantization *quantization, const struct safetensors *folder,
                   const char *name, uint32_t rows, uint32_t cols, bool gathers, bool groups, struct kvg_error *err)
{
    struct reading *m = calloc(1, sizeof *m);
    *out = (struct quantized_matrix){0};
    if (!m)
        return kvg_fail(err, KVG_NOMEM, "no memory to read %.160s", name);
    struct quantization own = quantization_of(quantization, name);
    *m = (struct reading){.quantization = &m->own,
                          .own = own,
                          .folder = folder,
                          .err = err,
                          .rows = rows,
                          .cols = cols,
                          .per_word = own.method == QUANTIZED_INT8 ? 1 : 32 / own.bits};
    int failed =
        base_of(name, m->base) ? convert(m, out, gathers, groups) : kvg_fail(err, KVG_FILE, "tensor %.160s is no matrix", name);
    if (!out->reading)
        free_reading(m);
    if (failed)
        quantized_free_data(out);
    return failed;
}

void quantized_free_data(struct quantized_matrix *matrix)
{
    free(matrix->data);
    if (!matrix->reading)
        free(matrix->order);
    free_reading(matrix->reading);
    matrix->data = NULL;
    matrix->order = NULL;
    matrix->reading = NULL;
}
