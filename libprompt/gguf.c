/* Reader of the GGUF header. Layout of the file (all little-endian):
 *
 *   "GGUF" version:u32 n_tensors:u64 n_values:u64
 *   n_values  x { key:string type:u32 value }          string = len:u64 bytes; array = item_type:u32 n:u64 items
 *   n_tensors x { name:string n_dims:u32 dims:u64[n_dims] type:u32 offset:u64 }
 *   padding to `alignment`, then the data that the offsets count from
 *
 * Every length is compared with what is left of the file before it is used, and sizes are multiplied with overflow checks.
 */
#include "libprompt/gguf.h"
#include "libprompt/hf_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    HEADER_BYTES = 24,
    MIN_VALUE_BYTES = 8 + 4 + 1, /* an empty key is refused later; this only bounds the allocation */
    MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8,
    MAX_KEY_BYTES = 65535, /* the format's own limits */
    MAX_NAME_BYTES = 256,  /* 64 in the format; some writers exceed that */
    MAX_VALUES = 1 << 16,
    MAX_TENSORS = 1 << 20,
    MAX_ALIGNMENT = 1 << 20,
    DEFAULT_ALIGNMENT = 32,
};

static const struct kvg_gguf_layout LAYOUTS[] = {
    [0] = {"F32", 1, 4},         [1] = {"F16", 1, 2},         [2] = {"Q4_0", 32, 18},      [3] = {"Q4_1", 32, 20},
    [6] = {"Q5_0", 32, 22},      [7] = {"Q5_1", 32, 24},      [8] = {"Q8_0", 32, 34},      [9] = {"Q8_1", 32, 36},
    [10] = {"Q2_K", 256, 84},    [11] = {"Q3_K", 256, 110},   [12] = {"Q4_K", 256, 144},   [13] = {"Q5_K", 256, 176},
    [14] = {"Q6_K", 256, 210},   [15] = {"Q8_K", 256, 292},   [16] = {"IQ2_XXS", 256, 66}, [17] = {"IQ2_XS", 256, 74},
    [18] = {"IQ3_XXS", 256, 98}, [19] = {"IQ1_S", 256, 50},   [20] = {"IQ4_NL", 32, 18},   [21] = {"IQ3_S", 256, 110},
    [22] = {"IQ2_S", 256, 82},   [23] = {"IQ4_XS", 256, 136}, [24] = {"I8", 1, 1},         [25] = {"I16", 1, 2},
    [26] = {"I32", 1, 4},        [27] = {"I64", 1, 8},        [28] = {"F64", 1, 8},        [29] = {"IQ1_M", 256, 56},
    [30] = {"BF16", 1, 2},       [34] = {"TQ1_0", 256, 54},   [35] = {"TQ2_0", 256, 66},
};

static const uint8_t TYPE_BYTES[] = {
    [KVG_GGUF_U8] = 1,  [KVG_GGUF_I8] = 1,   [KVG_GGUF_U16] = 2, [KVG_GGUF_I16] = 2, [KVG_GGUF_U32] = 4, [KVG_GGUF_I32] = 4,
    [KVG_GGUF_F32] = 4, [KVG_GGUF_BOOL] = 1, [KVG_GGUF_U64] = 8, [KVG_GGUF_I64] = 8, [KVG_GGUF_F64] = 8,
};

const struct kvg_gguf_layout *kvg_gguf_layout(uint32_t ggml_type)
{
    if (ggml_type >= sizeof LAYOUTS / sizeof *LAYOUTS || !LAYOUTS[ggml_type].name)
        return NULL;
    return &LAYOUTS[ggml_type];
}

/* What is left of the file, and where to complain. */
struct reader {
    const unsigned char *bytes;
    size_t size, at;
    struct kvg_error *err;
};

static uint32_t load_u32(const unsigned char *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint64_t load_u64(const unsigned char *p)
{
    return load_u32(p) | (uint64_t)load_u32(p + 4) << 32;
}

struct kvg_str kvg_gguf_next_string(const unsigned char **cursor)
{
    struct kvg_str s = {(const char *)*cursor + 8, (size_t)load_u64(*cursor)};

    *cursor += 8 + s.len;
    return s;
}

/* A name from the file as it may be shown: printable ASCII, at most 80 bytes. */
static const char *shown(struct kvg_str name, char out[84])
{
    size_t n = name.len < 80 ? name.len : 80;

    for (size_t i = 0; i < n; i++)
        out[i] = name.bytes[i] >= 32 && name.bytes[i] < 127 ? name.bytes[i] : '?';
    memcpy(out + n, name.len > 80 ? "..." : "", name.len > 80 ? 4 : 1);
    return out;
}

static int truncated(struct reader *r, const char *what, uint64_t need)
{
    return kvg_fail(r->err, KVG_FILE, "GGUF: the file ends inside %s: %" PRIu64 " bytes are needed at offset %zu, %zu are left",
                    what, need, r->at, r->size - r->at);
}

static int read_u32(struct reader *r, const char *what, uint32_t *out)
{
    if (r->size - r->at < 4)
        return truncated(r, what, 4);
    *out = load_u32(r->bytes + r->at);
    r->at += 4;
    return 0;
}

static int read_u64(struct reader *r, const char *what, uint64_t *out)
{
    if (r->size - r->at < 8)
        return truncated(r, what, 8);
    *out = load_u64(r->bytes + r->at);
    r->at += 8;
    return 0;
}

static int read_string(struct reader *r, const char *what, struct kvg_str *out)
{
    uint64_t len = 0;

    if (read_u64(r, what, &len))
        return KVG_FILE;
    if (len > r->size - r->at)
        return truncated(r, what, len);
    *out = (struct kvg_str){(const char *)r->bytes + r->at, (size_t)len};
    r->at += len;
    return 0;
}

static int read_name(struct reader *r, const char *what, size_t max, struct kvg_str *out)
{
    if (read_string(r, what, out))
        return KVG_FILE;
    if (out->len == 0 || out->len > max)
        return kvg_fail(r->err, KVG_FILE, "GGUF: %s at offset %zu has %zu bytes, allowed are 1 to %zu", what, r->at - out->len,
                        out->len, max);
    if (memchr(out->bytes, 0, out->len))
        return kvg_fail(r->err, KVG_FILE, "GGUF: %s at offset %zu contains a NUL byte", what, r->at - out->len);
    return 0;
}

static int skip_items(struct reader *r, enum kvg_gguf_type type, uint64_t n, struct kvg_str key)
{
    char name[84];
    struct kvg_str ignored;

    if (type == KVG_GGUF_STRING) {
        if (n > (r->size - r->at) / 8)
            return truncated(r, shown(key, name), n);
        for (uint64_t i = 0; i < n; i++) {
            if (read_string(r, shown(key, name), &ignored))
                return KVG_FILE;
        }
        return 0;
    }
    if (n > (r->size - r->at) / TYPE_BYTES[type])
        return truncated(r, shown(key, name), n);
    for (uint64_t i = 0; type == KVG_GGUF_BOOL && i < n; i++) {
        if (r->bytes[r->at + i] > 1)
            return kvg_fail(r->err, KVG_FILE, "GGUF: %s holds %d as a boolean", shown(key, name), r->bytes[r->at + i]);
    }
    r->at += n * TYPE_BYTES[type];
    return 0;
}

static int read_value(struct reader *r, struct kvg_gguf_value *value)
{
    uint32_t type = 0, item_type = 0;
    char name[84];

    if (read_name(r, "a metadata key", MAX_KEY_BYTES, &value->key) || read_u32(r, shown(value->key, name), &type))
        return KVG_FILE;
    if (type > KVG_GGUF_F64)
        return kvg_fail(r->err, KVG_FILE, "GGUF: %s has value type %u, known are 0 to %d", shown(value->key, name), type,
                        KVG_GGUF_F64);
    value->type = value->item_type = type;
    value->n = 1;
    if (type == KVG_GGUF_ARRAY) {
        if (read_u32(r, shown(value->key, name), &item_type) || read_u64(r, shown(value->key, name), &value->n))
            return KVG_FILE;
        if (item_type > KVG_GGUF_F64 || item_type == KVG_GGUF_ARRAY)
            return kvg_fail(r->err, KVG_FILE, "GGUF: %s is an array of type %u, which is unknown or an array itself",
                            shown(value->key, name), item_type);
        value->item_type = item_type;
    }
    value->bytes = r->bytes + r->at;
    if (skip_items(r, value->item_type, value->n, value->key))
        return KVG_FILE;
    value->n_bytes = (size_t)(r->bytes + r->at - value->bytes);
    return 0;
}

/* bytes = product of dims / weights of a group * bytes of a group, or an error that names the tensor */
static int size_tensor(struct reader *r, struct kvg_gguf_tensor *tensor)
{
    const struct kvg_gguf_layout *layout = kvg_gguf_layout(tensor->ggml_type);
    char name[84];
    uint64_t groups;

    shown(tensor->name, name);
    if (!layout)
        return kvg_fail(r->err, KVG_FILE, "GGUF: tensor %s has type id %u, which is unknown or was removed from the format", name,
                        tensor->ggml_type);
    for (uint32_t i = 0; i < tensor->n_dims; i++) {
        if (tensor->dims[i] == 0 || tensor->dims[i] > INT64_MAX)
            return kvg_fail(r->err, KVG_FILE, "GGUF: tensor %s: dimension %u is %" PRIu64, name, i, tensor->dims[i]);
    }
    if (tensor->dims[0] % layout->weights)
        return kvg_fail(r->err, KVG_FILE,
                        "GGUF: tensor %s: a row of %" PRIu64 " weights is not a whole number of %s groups of %u", name,
                        tensor->dims[0], layout->name, layout->weights);
    groups = tensor->dims[0] / layout->weights;
    if (__builtin_mul_overflow(groups, tensor->dims[1], &groups) || __builtin_mul_overflow(groups, tensor->dims[2], &groups) ||
        __builtin_mul_overflow(groups, tensor->dims[3], &groups) ||
        __builtin_mul_overflow(groups, layout->bytes, &tensor->n_bytes) || tensor->n_bytes > INT64_MAX)
        return kvg_fail(r->err, KVG_FILE,
                        "GGUF: tensor %s: the size of %" PRIu64 " x %" PRIu64 " x %" PRIu64 " x %" PRIu64 " %s overflows", name,
                        tensor->dims[0], tensor->dims[1], tensor->dims[2], tensor->dims[3], layout->name);
    return 0;
}

static int read_tensor(struct reader *r, struct kvg_gguf_tensor *tensor)
{
    char name[84];

    if (read_name(r, "a tensor name", MAX_NAME_BYTES, &tensor->name) || read_u32(r, shown(tensor->name, name), &tensor->n_dims))
        return KVG_FILE;
    if (tensor->n_dims < 1 || tensor->n_dims > 4)
        return kvg_fail(r->err, KVG_FILE, "GGUF: tensor %s has %u dimensions, allowed are 1 to 4", shown(tensor->name, name),
                        tensor->n_dims);
    for (uint32_t i = 0; i < 4; i++) {
        tensor->dims[i] = 1;
        if (i < tensor->n_dims && read_u64(r, shown(tensor->name, name), &tensor->dims[i]))
            return KVG_FILE;
    }
    if (read_u32(r, shown(tensor->name, name), &tensor->ggml_type) || read_u64(r, shown(tensor->name, name), &tensor->offset))
        return KVG_FILE;
    return size_tensor(r, tensor);
}

static int compare_str(struct kvg_str a, struct kvg_str b)
{
    size_t n = a.len < b.len ? a.len : b.len;
    int order = memcmp(a.bytes, b.bytes, n);

    return order ? order : (a.len > b.len) - (a.len < b.len);
}

static int by_name(const void *a, const void *b)
{
    return compare_str(*(const struct kvg_str *)a, *(const struct kvg_str *)b);
}

/* names: a scratch array of n, sorted here */
static int refuse_duplicates(struct reader *r, struct kvg_str *names, size_t n, const char *what)
{
    char name[84];

    qsort(names, n, sizeof *names, by_name);
    for (size_t i = 1; i < n; i++) {
        if (compare_str(names[i - 1], names[i]) == 0)
            return kvg_fail(r->err, KVG_FILE, "GGUF: %s %s occurs twice", what, shown(names[i], name));
    }
    return 0;
}

static int check_names(struct reader *r, const struct kvg_gguf *gguf)
{
    size_t n = gguf->n_values > gguf->n_tensors ? gguf->n_values : gguf->n_tensors;
    struct kvg_str *names = malloc((n + 1) * sizeof *names);
    int rc;

    if (!names)
        return kvg_fail(r->err, KVG_NOMEM, "GGUF: out of memory for %zu names", n);
    for (size_t i = 0; i < gguf->n_values; i++)
        names[i] = gguf->values[i].key;
    rc = refuse_duplicates(r, names, gguf->n_values, "metadata key");
    for (size_t i = 0; !rc && i < gguf->n_tensors; i++)
        names[i] = gguf->tensors[i].name;
    if (!rc)
        rc = refuse_duplicates(r, names, gguf->n_tensors, "tensor");
    free(names);
    return rc;
}

static int read_alignment(struct reader *r, struct kvg_gguf *gguf)
{
    const struct kvg_gguf_value *value = kvg_gguf_find(gguf, "general.alignment");
    uint64_t alignment = DEFAULT_ALIGNMENT;

    if (value && (value->type != KVG_GGUF_U32 || !kvg_gguf_u64(gguf, "general.alignment", &alignment)))
        return kvg_fail(r->err, KVG_FILE, "GGUF: general.alignment has value type %d, it must be a u32", value->type);
    if (alignment < 8 || alignment > MAX_ALIGNMENT || (alignment & (alignment - 1)))
        return kvg_fail(r->err, KVG_FILE, "GGUF: general.alignment is %" PRIu64 ", it must be a power of two from 8 to %d",
                        alignment, MAX_ALIGNMENT);
    gguf->alignment = (uint32_t)alignment;
    return 0;
}

/* Turns offsets into absolute ones and checks that each tensor lies inside the file. */
static int place_tensors(struct reader *r, struct kvg_gguf *gguf)
{
    char name[84];

    gguf->data_offset = (r->at + (uint64_t)gguf->alignment - 1) & ~((uint64_t)gguf->alignment - 1);
    for (size_t i = 0; i < gguf->n_tensors; i++) {
        struct kvg_gguf_tensor *tensor = &gguf->tensors[i];
        uint64_t start, end;

        if (tensor->offset % gguf->alignment)
            return kvg_fail(r->err, KVG_FILE, "GGUF: tensor %s: offset %" PRIu64 " is no multiple of the alignment %u",
                            shown(tensor->name, name), tensor->offset, gguf->alignment);
        if (__builtin_add_overflow(gguf->data_offset, tensor->offset, &start) ||
            __builtin_add_overflow(start, tensor->n_bytes, &end) || end > gguf->size)
            return kvg_fail(r->err, KVG_FILE,
                            "GGUF: tensor %s: %" PRIu64 " bytes at data offset %" PRIu64
                            " lie beyond the end of the file (%zu bytes; is it "
                            "cut short?)",
                            shown(tensor->name, name), tensor->n_bytes, tensor->offset, gguf->size);
        tensor->offset = start;
    }
    return 0;
}

static int by_offset(const void *a, const void *b)
{
    const struct kvg_gguf_tensor *x = *(const struct kvg_gguf_tensor *const *)a, *y = *(const struct kvg_gguf_tensor *const *)b;

    return (x->offset > y->offset) - (x->offset < y->offset);
}

static int refuse_overlaps(struct reader *r, const struct kvg_gguf *gguf)
{
    const struct kvg_gguf_tensor **order = malloc((gguf->n_tensors + 1) * sizeof *order);
    char a[84], b[84];
    int rc = 0;

    if (!order)
        return kvg_fail(r->err, KVG_NOMEM, "GGUF: out of memory for %zu tensors", gguf->n_tensors);
    for (size_t i = 0; i < gguf->n_tensors; i++)
        order[i] = &gguf->tensors[i];
    qsort(order, gguf->n_tensors, sizeof *order, by_offset);
    for (size_t i = 1; !rc && i < gguf->n_tensors; i++) {
        if (order[i - 1]->offset + order[i - 1]->n_bytes > order[i]->offset)
            rc = kvg_fail(r->err, KVG_FILE, "GGUF: tensors %s and %s overlap", shown(order[i - 1]->name, a),
                          shown(order[i]->name, b));
    }
    free(order);
    return rc;
}

/* Magic, version and the two counts. */
static int read_header(struct reader *r, struct kvg_gguf *gguf, uint64_t *n_tensors, uint64_t *n_values)
{
    char magic[84];

    if (r->size < 4)
        return truncated(r, "the magic number", 4);
    if (memcmp(r->bytes, "GGUF", 4) != 0)
        return kvg_fail(r->err, KVG_FILE, "not a GGUF file: it starts with \"%s\", not \"GGUF\"",
                        shown((struct kvg_str){(const char *)r->bytes, 4}, magic));
    r->at = 4;
    if (read_u32(r, "the version", &gguf->version))
        return KVG_FILE;
    if (gguf->version && (gguf->version & 0xffff) == 0)
        return kvg_fail(r->err, KVG_FILE,
                        "GGUF: the file is big-endian (version bytes 0x%08x); only little-endian files are read", gguf->version);
    if (gguf->version != 2 && gguf->version != 3)
        return kvg_fail(r->err, KVG_FILE, "GGUF: version %u is not supported, only 2 and 3 are", gguf->version);
    if (read_u64(r, "the tensor count", n_tensors) || read_u64(r, "the metadata count", n_values))
        return KVG_FILE;
    if (*n_values > MAX_VALUES || *n_values > (r->size - r->at) / MIN_VALUE_BYTES)
        return kvg_fail(r->err, KVG_FILE, "GGUF: %" PRIu64 " metadata entries do not fit a file of %zu bytes (limit %d)",
                        *n_values, r->size, MAX_VALUES);
    if (*n_tensors > MAX_TENSORS || *n_tensors > (r->size - r->at) / MIN_TENSOR_BYTES)
        return kvg_fail(r->err, KVG_FILE, "GGUF: %" PRIu64 " tensors do not fit a file of %zu bytes (limit %d)", *n_tensors,
                        r->size, MAX_TENSORS);
    return 0;
}

static int parse(struct reader *r, struct kvg_gguf *gguf)
{
    uint64_t n_tensors = 0, n_values = 0;

    if (read_header(r, gguf, &n_tensors, &n_values))
        return KVG_FILE;
    gguf->values = calloc(n_values + 1, sizeof *gguf->values);
    gguf->tensors = calloc(n_tensors + 1, sizeof *gguf->tensors);
    if (!gguf->values || !gguf->tensors)
        return kvg_fail(r->err, KVG_NOMEM, "GGUF: out of memory for %" PRIu64 " values and %" PRIu64 " tensors", n_values,
                        n_tensors);
    for (; gguf->n_values < n_values; gguf->n_values++) {
        if (read_value(r, &gguf->values[gguf->n_values]))
            return KVG_FILE;
    }
    for (; gguf->n_tensors < n_tensors; gguf->n_tensors++) {
        if (read_tensor(r, &gguf->tensors[gguf->n_tensors]))
            return KVG_FILE;
    }
    if (check_names(r, gguf) || read_alignment(r, gguf) || place_tensors(r, gguf) || refuse_overlaps(r, gguf))
        return KVG_FILE;
    return 0;
}

/* An opened handle: the public struct first, then what close needs. */
struct handle {
    struct kvg_gguf gguf;
    bool mapped;
    bool owned; /* the bytes were made from a folder */
};

static int open_bytes(struct kvg_gguf **out, const unsigned char *bytes, size_t size, bool mapped, struct kvg_error *err)
{
    struct reader r = {bytes, size, 0, err};
    struct handle *handle = calloc(1, sizeof *handle);
    int rc;

    *out = NULL;
    if (!handle)
        return kvg_fail(err, KVG_NOMEM, "GGUF: out of memory");
    handle->gguf.map = bytes;
    handle->gguf.size = size;
    rc = parse(&r, &handle->gguf);
    if (rc) {
        kvg_gguf_close(&handle->gguf);
        return rc;
    }
    handle->mapped = mapped;
    *out = &handle->gguf;
    return 0;
}

int kvg_gguf_parse(struct kvg_gguf **out, const unsigned char *bytes, size_t size, struct kvg_error *err)
{
    return open_bytes(out, bytes, size, false, err);
}

static int open_folder(struct kvg_gguf **out, const char *path, struct kvg_error *err)
{
    struct kvg_buf bytes;
    int rc = kvg_folder_metadata(&bytes, path, err);

    if (rc)
        return rc;
    rc = open_bytes(out, (const unsigned char *)bytes.bytes, bytes.len, false, err);
    if (rc)
        kvg_buf_free(&bytes);
    else
        ((struct handle *)*out)->owned = true;
    return rc;
}

int kvg_gguf_open(struct kvg_gguf **out, const char *path, struct kvg_error *err)
{
    struct stat st;
    void *map;
    int rc, fd;

    *out = NULL;
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode))
        return open_folder(out, path, err);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return kvg_fail(err, KVG_FILE, "cannot open %.200s: %s", path, strerror(errno));
    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_size == 0) {
        close(fd);
        return kvg_fail(err, KVG_FILE, "%.200s is empty or no regular file", path);
    }
    map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (map == MAP_FAILED)
        return kvg_fail(err, KVG_FILE, "cannot map %.200s (%lld bytes): %s", path, (long long)st.st_size, strerror(errno));
    rc = open_bytes(out, map, (size_t)st.st_size, true, err);
    if (rc)
        munmap(map, (size_t)st.st_size);
    return rc;
}

void kvg_gguf_release(const struct kvg_gguf *gguf, const struct kvg_gguf_tensor *tensor)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)gguf->map + tensor->offset;
    uintptr_t first = (start + page - 1) & ~(page - 1), end = (start + tensor->n_bytes) & ~(page - 1);

    if (((const struct handle *)gguf)->mapped && first < end)
        madvise((void *)first, end - first, MADV_DONTNEED);
}

void kvg_gguf_close(struct kvg_gguf *gguf)
{
    struct handle *handle = (struct handle *)gguf;

    if (!handle)
        return;
    if (handle->mapped)
        munmap((void *)gguf->map, gguf->size);
    if (handle->owned)
        free((void *)gguf->map);
    free(gguf->values);
    free(gguf->tensors);
    free(handle);
}

const struct kvg_gguf_value *kvg_gguf_find(const struct kvg_gguf *gguf, const char *key)
{
    for (size_t i = 0; i < gguf->n_values; i++) {
        if (kvg_str_eq(gguf->values[i].key, key))
            return &gguf->values[i];
    }
    return NULL;
}

const struct kvg_gguf_tensor *kvg_gguf_tensor(const struct kvg_gguf *gguf, const char *name)
{
    for (size_t i = 0; i < gguf->n_tensors; i++) {
        if (kvg_str_eq(gguf->tensors[i].name, name))
            return &gguf->tensors[i];
    }
    return NULL;
}

/* A signed integer value widened; false when it is no integer. U64 above INT64_MAX come as `big`. */
static bool load_int(const struct kvg_gguf_value *value, int64_t *out, bool *big)
{
    const unsigned char *p = value->bytes;

    *big = false;
    switch (value->type) {
    case KVG_GGUF_U8:
        *out = p[0];
        return true;
    case KVG_GGUF_I8:
        *out = (int8_t)p[0];
        return true;
    case KVG_GGUF_U16:
        *out = p[0] | p[1] << 8;
        return true;
    case KVG_GGUF_I16:
        *out = (int16_t)(p[0] | p[1] << 8);
        return true;
    case KVG_GGUF_U32:
        *out = load_u32(p);
        return true;
    case KVG_GGUF_I32:
        *out = (int32_t)load_u32(p);
        return true;
    case KVG_GGUF_U64:
        *out = (int64_t)load_u64(p);
        *big = *out < 0;
        return true;
    case KVG_GGUF_I64:
        *out = (int64_t)load_u64(p);
        return true;
    default:
        return false;
    }
}

bool kvg_gguf_u64(const struct kvg_gguf *gguf, const char *key, uint64_t *out)
{
    const struct kvg_gguf_value *value = kvg_gguf_find(gguf, key);
    int64_t v;
    bool big;

    if (!value || !load_int(value, &v, &big) || (v < 0 && !big))
        return false;
    *out = (uint64_t)v;
    return true;
}

bool kvg_gguf_f64(const struct kvg_gguf *gguf, const char *key, double *out)
{
    const struct kvg_gguf_value *value = kvg_gguf_find(gguf, key);
    int64_t v;
    bool big;

    if (!value)
        return false;
    if (value->type == KVG_GGUF_F32) {
        uint32_t bits = load_u32(value->bytes);
        float f;
        memcpy(&f, &bits, 4);
        *out = f;
        return true;
    }
    if (value->type == KVG_GGUF_F64) {
        uint64_t bits = load_u64(value->bytes);
        memcpy(out, &bits, 8);
        return true;
    }
    if (!load_int(value, &v, &big))
        return false;
    *out = big ? (double)(uint64_t)v : (double)v;
    return true;
}

bool kvg_gguf_bool(const struct kvg_gguf *gguf, const char *key, bool *out)
{
    const struct kvg_gguf_value *value = kvg_gguf_find(gguf, key);

    if (!value || value->type != KVG_GGUF_BOOL)
        return false;
    *out = value->bytes[0] != 0;
    return true;
}

bool kvg_gguf_str(const struct kvg_gguf *gguf, const char *key, struct kvg_str *out)
{
    const struct kvg_gguf_value *value = kvg_gguf_find(gguf, key);
    const unsigned char *cursor;

    if (!value || value->type != KVG_GGUF_STRING)
        return false;
    cursor = value->bytes;
    *out = kvg_gguf_next_string(&cursor);
    return true;
}

/* The header of `gguf` with a tensor count of 0, followed by its metadata as it lies in the file. */
static bool write_cut(FILE *f, const struct kvg_gguf *gguf)
{
    unsigned char header[HEADER_BYTES];
    const struct kvg_gguf_value *last = gguf->n_values ? &gguf->values[gguf->n_values - 1] : NULL;
    size_t end = last ? (size_t)(last->bytes + last->n_bytes - gguf->map) : HEADER_BYTES;

    memcpy(header, gguf->map, HEADER_BYTES);
    memset(header + 8, 0, 8);
    return fwrite(header, 1, HEADER_BYTES, f) == HEADER_BYTES &&
           fwrite(gguf->map + HEADER_BYTES, 1, end - HEADER_BYTES, f) == end - HEADER_BYTES;
}

int kvg_gguf_cut(const char *in, const char *out, struct kvg_error *err)
{
    struct kvg_gguf *gguf;
    char tmp[4096];
    struct stat there;
    FILE *f;
    bool written;
    int rc;

    if (lstat(out, &there) == 0 && !S_ISREG(there.st_mode)) /* renaming would replace a device or a link such as /dev/stdout */
        return kvg_fail(err, KVG_FILE, "cannot write %.200s: it exists and is no regular file", out);
    if ((rc = kvg_gguf_open(&gguf, in, err)))
        return rc;
    if (snprintf(tmp, sizeof tmp, "%s.%ld.tmp", out, (long)getpid()) >= (int)sizeof tmp || !(f = fopen(tmp, "wbx"))) {
        kvg_gguf_close(gguf);
        return kvg_fail(err, KVG_FILE, "cannot create %.200s: %s", out, strerror(errno));
    }
    written = write_cut(f, gguf);
    written = fflush(f) == 0 && fsync(fileno(f)) == 0 && written;
    written = fclose(f) == 0 && written;
    kvg_gguf_close(gguf);
    if (written && rename(tmp, out) == 0)
        return 0;
    rc = kvg_fail(err, KVG_FILE, "cannot write %.200s: %s", out, strerror(errno));
    unlink(tmp);
    return rc;
}
