#define _GNU_SOURCE
#include "gpu-worker/model/safetensors.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "gpu-worker/quant/quant.h"

enum {
    PREFIX_BYTES = 8,
    MAX_HEADER = 100 << 20, /* the format's own limit */
    MAX_INDEX = 64 << 20,
    MAX_TENSORS = 1 << 20,
    MAX_FILES = 1 << 14,
    NAME_SHOWN = 100,
};
#define INDEX_NAME  "model.safetensors.index.json"
#define SINGLE_NAME "model.safetensors"

static const struct {
    const char *name;
    uint32_t bytes;
} dtypes[ST_DTYPES] = {
    [ST_BOOL] = {"BOOL", 1},       [ST_U8] = {"U8", 1},   [ST_I8] = {"I8", 1},   [ST_F8_E5M2] = {"F8_E5M2", 1},
    [ST_F8_E4M3] = {"F8_E4M3", 1}, [ST_I16] = {"I16", 2}, [ST_U16] = {"U16", 2}, [ST_F16] = {"F16", 2},
    [ST_BF16] = {"BF16", 2},       [ST_I32] = {"I32", 4}, [ST_U32] = {"U32", 4}, [ST_F32] = {"F32", 4},
    [ST_F64] = {"F64", 8},         [ST_I64] = {"I64", 8}, [ST_U64] = {"U64", 8},
};

/* An opened handle: the public struct first, then what close needs. */
struct handle {
    struct safetensors st;
    struct kvg_arena arena; /* headers and index */
    char *folder;
    size_t capacity; /* of st.tensors */
    bool mapped;
};

const char *safetensors_dtype_name(enum safetensors_dtype dtype)
{
    return dtypes[dtype].name;
}

const struct quant_format *safetensors_format(enum safetensors_dtype dtype)
{
    return dtype == ST_F32 ? &quant_f32 : dtype == ST_F16 ? &quant_f16 : dtype == ST_BF16 ? &quant_bf16 : NULL;
}

/* A string of the file as it may be shown: printable ASCII, cut. */
struct shown {
    char text[NAME_SHOWN + 4];
};
static struct shown show(struct kvg_str s)
{
    struct shown out;
    size_t n = s.len < NAME_SHOWN ? s.len : NAME_SHOWN;
    for (size_t i = 0; i < n; i++)
        out.text[i] = s.bytes[i] >= 32 && s.bytes[i] < 127 ? s.bytes[i] : '?';
    memcpy(out.text + n, s.len > n ? "..." : "", s.len > n ? 4 : 1);
    return out;
}

static int order_str(struct kvg_str a, struct kvg_str b)
{
    size_t n = a.len < b.len ? a.len : b.len;
    int order = memcmp(a.bytes, b.bytes, n);
    return order ? order : (a.len > b.len) - (a.len < b.len);
}

static int by_name(const void *a, const void *b)
{
    return order_str(((const struct safetensors_tensor *)a)->name, ((const struct safetensors_tensor *)b)->name);
}

static int name_order(const void *key, const void *tensor)
{
    return order_str(*(const struct kvg_str *)key, ((const struct safetensors_tensor *)tensor)->name);
}

static int by_place(const void *a, const void *b)
{
    const struct safetensors_tensor *x = a, *y = b;
    if (x->data != y->data)
        return x->data < y->data ? -1 : 1;
    return (x->n_bytes > y->n_bytes) - (x->n_bytes < y->n_bytes);
}

/* ---- one file's header ---- */

static int read_dtype(const struct kvg_json *value, struct safetensors_tensor *t, const char *file, struct kvg_error *err)
{
    if (!value || value->type != KVG_JSON_STRING)
        return kvg_fail(err, KVG_FILE, "%s: tensor %s has no dtype", file, show(t->name).text);
    for (int i = 0; i < ST_DTYPES; i++)
        if (kvg_str_eq(value->str, dtypes[i].name)) {
            t->dtype = (enum safetensors_dtype)i;
            return 0;
        }
    return kvg_fail(err, KVG_FILE, "%s: tensor %s has dtype \"%.20s\", which is unknown", file, show(t->name).text,
                    show(value->str).text);
}

/* Sets n_bytes to what the shape needs. */
static int read_shape(const struct kvg_json *value, struct safetensors_tensor *t, const char *file, struct kvg_error *err)
{
    uint64_t bytes = dtypes[t->dtype].bytes;
    int64_t n;
    if (!value || value->type != KVG_JSON_ARRAY)
        return kvg_fail(err, KVG_FILE, "%s: tensor %s has no shape", file, show(t->name).text);
    if (value->n > SAFETENSORS_DIMS)
        return kvg_fail(err, KVG_FILE, "%s: tensor %s has %u dimensions, at most %d are supported", file, show(t->name).text,
                        value->n, SAFETENSORS_DIMS);
    t->n_dims = value->n;
    for (uint32_t i = 0; i < SAFETENSORS_DIMS; i++) {
        t->shape[i] = 1;
        if (i >= value->n)
            continue;
        if (!kvg_json_int(&value->items[i], &n) || n < 0)
            return kvg_fail(err, KVG_FILE, "%s: tensor %s: dimension %u is no whole number of 0 or more", file,
                            show(t->name).text, i);
        t->shape[i] = (uint64_t)n;
        if (__builtin_mul_overflow(bytes, t->shape[i], &bytes))
            return kvg_fail(err, KVG_FILE, "%s: tensor %s: the size of its shape overflows at dimension %u (%" PRId64 ")", file,
                            show(t->name).text, i, n);
    }
    t->n_bytes = bytes;
    return 0;
}

static int read_range(const struct kvg_json *value, const struct safetensors_file *file, struct safetensors_tensor *t,
                      struct kvg_error *err)
{
    uint64_t room = file->size - file->data_offset;
    int64_t begin, end;
    if (!value || value->type != KVG_JSON_ARRAY || value->n != 2 || !kvg_json_int(&value->items[0], &begin) ||
        !kvg_json_int(&value->items[1], &end))
        return kvg_fail(err, KVG_FILE, "%s: tensor %s: data_offsets are no pair of whole numbers", file->name,
                        show(t->name).text);
    if (begin < 0 || end < begin || (uint64_t)end > room)
        return kvg_fail(err, KVG_FILE, "%s: tensor %s: data_offsets [%" PRId64 ", %" PRId64 "] do not lie in %" PRIu64 " bytes",
                        file->name, show(t->name).text, begin, end, room);
    if ((uint64_t)(end - begin) != t->n_bytes)
        return kvg_fail(err, KVG_FILE, "%s: tensor %s: its shape needs %" PRIu64 " %s bytes, data_offsets give %" PRId64,
                        file->name, show(t->name).text, t->n_bytes, dtypes[t->dtype].name, end - begin);
    t->data = file->map + file->data_offset + begin;
    return 0;
}

static int read_tensor(const struct kvg_json *entry, const struct safetensors_file *file, struct safetensors_tensor *t,
                       struct kvg_error *err)
{
    int failed;
    t->name = entry->key;
    if (entry->key.len == 0 || entry->key.len > SAFETENSORS_NAME || memchr(entry->key.bytes, 0, entry->key.len))
        return kvg_fail(err, KVG_FILE, "%s: a tensor's name has %zu bytes or a NUL, allowed are 1 to %d", file->name,
                        entry->key.len, SAFETENSORS_NAME);
    if (entry->type != KVG_JSON_OBJECT)
        return kvg_fail(err, KVG_FILE, "%s: tensor %s is described by no object", file->name, show(t->name).text);
    if ((failed = read_dtype(kvg_json_get(entry, "dtype"), t, file->name, err)) ||
        (failed = read_shape(kvg_json_get(entry, "shape"), t, file->name, err)))
        return failed;
    return read_range(kvg_json_get(entry, "data_offsets"), file, t, err);
}

/* n tensors of one file: their ranges, in order, follow each other from the first data byte to the last. */
static int check_cover(struct safetensors_tensor *tensors, size_t n, const struct safetensors_file *file, struct kvg_error *err)
{
    const unsigned char *start = file->map + file->data_offset, *at = start, *end = file->map + file->size;
    qsort(tensors, n, sizeof *tensors, by_place);
    for (size_t i = 0; i < n; i++) {
        if (tensors[i].data < at)
            return kvg_fail(err, KVG_FILE, "%s: tensors %s and %s overlap at data byte %td", file->name,
                            show(tensors[i - 1].name).text, show(tensors[i].name).text, tensors[i].data - start);
        if (tensors[i].data > at)
            return kvg_fail(err, KVG_FILE, "%s: bytes %td to %td before tensor %s belong to no tensor", file->name, at - start,
                            tensors[i].data - start, show(tensors[i].name).text);
        at += tensors[i].n_bytes;
    }
    if (at != end)
        return kvg_fail(err, KVG_FILE, "%s: the data has %td bytes, its tensors have %td", file->name, end - start, at - start);
    return 0;
}

static int reserve(struct handle *handle, size_t more, struct kvg_error *err)
{
    size_t wanted = handle->st.n_tensors + more;
    if (wanted > MAX_TENSORS)
        return kvg_fail(err, KVG_FILE, "safetensors: %zu tensors, at most %d are supported", wanted, MAX_TENSORS);
    if (wanted <= handle->capacity)
        return 0;
    struct safetensors_tensor *grown = realloc(handle->st.tensors, (wanted + wanted / 2) * sizeof *grown);
    if (!grown)
        return kvg_fail(err, KVG_NOMEM, "safetensors: no memory for %zu tensors", wanted);
    handle->st.tensors = grown;
    handle->capacity = wanted + wanted / 2;
    return 0;
}

static int header_size(const struct safetensors_file *file, uint64_t *out, struct kvg_error *err)
{
    uint64_t n = 0;
    if (file->size < PREFIX_BYTES)
        return kvg_fail(err, KVG_FILE, "%s: %zu bytes are too few for a safetensors file", file->name, file->size);
    for (int i = 0; i < PREFIX_BYTES; i++)
        n |= (uint64_t)file->map[i] << 8 * i;
    if (n > MAX_HEADER)
        return kvg_fail(err, KVG_FILE, "%s: a header of %" PRIu64 " bytes, at most %d are allowed", file->name, n, MAX_HEADER);
    if (n < 2 || n > file->size - PREFIX_BYTES)
        return kvg_fail(err, KVG_FILE, "%s: a header of %" PRIu64 " bytes in a file of %zu", file->name, n, file->size);
    *out = n;
    return 0;
}

/* JSON text whose error names the file. */
static int parse_json(struct handle *handle, const char *text, size_t n, const char *name, struct kvg_json **out,
                      struct kvg_error *err)
{
    struct kvg_json_limits limits = {.depth = 16, .unique_keys = true};
    struct kvg_error why = {0};
    int failed = kvg_json_parse(&handle->arena, text, n, &limits, out, &why);
    if (failed)
        return kvg_fail(err, failed == KVG_NOMEM ? failed : KVG_FILE, "%s: %.200s", name, why.message);
    if ((*out)->type != KVG_JSON_OBJECT)
        return kvg_fail(err, KVG_FILE, "%s: no JSON object", name);
    return 0;
}

/* Adds the tensors of a mapped file. */
static int read_file(struct handle *handle, uint32_t number, struct kvg_error *err)
{
    struct safetensors_file *file = &handle->st.files[number];
    struct safetensors_tensor *first;
    struct kvg_json *header;
    uint64_t n = 0;
    int failed = header_size(file, &n, err);
    if (failed || (failed = parse_json(handle, (const char *)file->map + PREFIX_BYTES, n, file->name, &header, err)) ||
        (failed = reserve(handle, header->n, err)))
        return failed;
    file->data_offset = PREFIX_BYTES + n;
    first = handle->st.tensors + handle->st.n_tensors;
    size_t count = 0;
    for (uint32_t i = 0; i < header->n; i++) {
        if (kvg_str_eq(header->items[i].key, "__metadata__")) {
            if (header->items[i].type != KVG_JSON_OBJECT)
                return kvg_fail(err, KVG_FILE, "%s: __metadata__ is no object", file->name);
            continue;
        }
        if ((failed = read_tensor(&header->items[i], file, &first[count], err)))
            return failed;
        handle->st.total_bytes += first[count].n_bytes;
        first[count++].file = number;
    }
    handle->st.n_tensors += count;
    return check_cover(first, count, file, err);
}

/* After all files: sorted by name, each name once. */
static int sort_tensors(struct handle *handle, struct kvg_error *err)
{
    struct safetensors *st = &handle->st;
    if (st->n_tensors)
        qsort(st->tensors, st->n_tensors, sizeof *st->tensors, by_name);
    for (size_t i = 1; i < st->n_tensors; i++)
        if (by_name(&st->tensors[i - 1], &st->tensors[i]) == 0)
            return kvg_fail(err, KVG_FILE, "tensor %s lies in %.80s and in %.80s", show(st->tensors[i].name).text,
                            st->files[st->tensors[i - 1].file].name, st->files[st->tensors[i].file].name);
    return 0;
}

/* ---- files and folders ---- */

static int map_file(const char *path, const unsigned char **map, size_t *size, struct kvg_error *err)
{
    struct stat st;
    void *memory = MAP_FAILED;
    int fd = open(path, O_RDONLY | O_CLOEXEC), failed = 0;
    if (fd < 0)
        return kvg_fail(err, KVG_FILE, "cannot open %.200s: %s", path, strerror(errno));
    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_size == 0)
        failed = kvg_fail(err, KVG_FILE, "%.200s is empty or no regular file", path);
    else if ((memory = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0)) == MAP_FAILED)
        failed = kvg_fail(err, KVG_FILE, "cannot map %.200s (%lld bytes): %s", path, (long long)st.st_size, strerror(errno));
    close(fd);
    if (failed)
        return failed;
    *map = memory;
    *size = (size_t)st.st_size;
    return 0;
}

/* "<folder>/<name>" in the arena. */
static char *join(struct handle *handle, const char *name)
{
    size_t n = strlen(handle->folder) + strlen(name) + 2;
    char *path = kvg_arena_alloc(&handle->arena, n);
    if (path)
        snprintf(path, n, "%s/%s", handle->folder, name);
    return path;
}

/* Maps and reads one more file. */
static int add_file(struct handle *handle, const char *name, const char *path, struct kvg_error *err)
{
    struct safetensors *st = &handle->st;
    struct safetensors_file *grown = realloc(st->files, (st->n_files + 1) * sizeof *grown);
    if (!grown || !path)
        return kvg_fail(err, KVG_NOMEM, "safetensors: no memory for file %zu", st->n_files);
    st->files = grown;
    struct safetensors_file *file = &st->files[st->n_files];
    *file = (struct safetensors_file){.name = name};
    int failed = map_file(path, &file->map, &file->size, err);
    if (failed)
        return failed;
    st->n_files++;
    return read_file(handle, (uint32_t)st->n_files - 1, err);
}

static bool ends_with(struct kvg_str s, const char *end)
{
    size_t n = strlen(end);
    return s.len > n && memcmp(s.bytes + s.len - n, end, n) == 0;
}

/* The file number of a shard, which is opened when its name comes up first. Names are plain: a hostile index must not reach other
 * folders. */
static int find_shard(struct handle *handle, const struct kvg_json *entry, uint32_t *out, struct kvg_error *err)
{
    struct safetensors *st = &handle->st;
    struct kvg_str name = entry->str;
    if (entry->type != KVG_JSON_STRING || !ends_with(name, ".safetensors") || name.bytes[0] == '.' ||
        memchr(name.bytes, '/', name.len) || memchr(name.bytes, 0, name.len) || name.len > 255)
        return kvg_fail(err, KVG_FILE, INDEX_NAME ": tensor %s: \"%s\" is no name of a .safetensors file beside it",
                        show(entry->key).text, entry->type == KVG_JSON_STRING ? show(name).text : "");
    for (uint32_t i = (uint32_t)st->n_files; i-- > 0;)
        if (kvg_str_eq(name, st->files[i].name)) {
            *out = i;
            return 0;
        }
    if (st->n_files == MAX_FILES)
        return kvg_fail(err, KVG_FILE, INDEX_NAME ": more than %d files", MAX_FILES);
    char *copy = kvg_arena_copy(&handle->arena, name.bytes, name.len), *path = copy ? join(handle, copy) : NULL;
    if (path && access(path, F_OK) != 0)
        return kvg_fail(err, KVG_FILE, INDEX_NAME ": shard %s, which has tensor %s, is missing", show(name).text,
                        show(entry->key).text);
    *out = (uint32_t)st->n_files;
    return add_file(handle, copy, path, err);
}

/* Every tensor of the index lies in its shard, and the shards have no others. wanted[i]: the shard of map->items[i]; named:
 * [n_tensors], all false. */
static int check_index(const struct handle *handle, const struct kvg_json *map, const uint32_t *wanted, bool *named,
                       struct kvg_error *err)
{
    const struct safetensors *st = &handle->st;
    for (uint32_t i = 0; i < map->n; i++) {
        const struct safetensors_tensor *found =
            st->n_tensors ? bsearch(&map->items[i].key, st->tensors, st->n_tensors, sizeof *found, name_order) : NULL;
        if (!found || found->file != wanted[i])
            return kvg_fail(err, KVG_FILE, INDEX_NAME ": tensor %s is not in %.80s", show(map->items[i].key).text,
                            st->files[wanted[i]].name);
        named[found - st->tensors] = true;
    }
    for (size_t i = 0; i < st->n_tensors; i++)
        if (!named[i])
            return kvg_fail(err, KVG_FILE, "%.80s: tensor %s is not in " INDEX_NAME, st->files[st->tensors[i].file].name,
                            show(st->tensors[i].name).text);
    return 0;
}

/* A shard-like file (model-*.safetensors) that the index does not name: a mixture of two checkpoints. */
static int refuse_stray(const struct handle *handle, struct kvg_error *err)
{
    DIR *folder = opendir(handle->folder);
    int failed = 0;
    if (!folder)
        return kvg_fail(err, KVG_FILE, "cannot list %.200s: %s", handle->folder, strerror(errno));
    for (struct dirent *entry; !failed && (entry = readdir(folder));) {
        struct kvg_str name = {entry->d_name, strlen(entry->d_name)};
        bool known = strncmp(name.bytes, "model", 5) != 0 || !ends_with(name, ".safetensors");
        for (size_t i = 0; i < handle->st.n_files && !known; i++)
            known = kvg_str_eq(name, handle->st.files[i].name);
        if (!known)
            failed = kvg_fail(err, KVG_FILE, "%.150s/%s is not in " INDEX_NAME ": a shard of another checkpoint?", handle->folder,
                              show(name).text);
    }
    closedir(folder);
    return failed;
}

static int read_index(struct handle *handle, const struct kvg_json *index, struct kvg_error *err)
{
    const struct kvg_json *map = kvg_json_get(index, "weight_map");
    if (!map || map->type != KVG_JSON_OBJECT || map->n == 0)
        return kvg_fail(err, KVG_FILE, INDEX_NAME ": weight_map is missing, empty or no object");
    uint32_t *wanted = kvg_arena_alloc(&handle->arena, map->n * sizeof *wanted);
    if (!wanted)
        return kvg_fail(err, KVG_NOMEM, "safetensors: no memory for an index of %u tensors", map->n);
    for (uint32_t i = 0; i < map->n; i++) {
        int failed = find_shard(handle, &map->items[i], &wanted[i], err);
        if (failed)
            return failed;
    }
    bool *named = kvg_arena_zalloc(&handle->arena, handle->st.n_tensors);
    if (!named)
        return kvg_fail(err, KVG_NOMEM, "safetensors: no memory for %zu tensors", handle->st.n_tensors);
    int failed = sort_tensors(handle, err);
    if (!failed)
        failed = check_index(handle, map, wanted, named, err);
    return failed ? failed : refuse_stray(handle, err);
}

static int open_sharded(struct handle *handle, const char *index_path, struct kvg_error *err)
{
    const unsigned char *text;
    struct kvg_json *index;
    size_t n;
    int failed = map_file(index_path, &text, &n, err);
    if (failed)
        return failed;
    if (n > MAX_INDEX)
        failed = kvg_fail(err, KVG_FILE, INDEX_NAME ": %zu bytes, at most %d are allowed", n, MAX_INDEX);
    else if (!(failed = parse_json(handle, (const char *)text, n, INDEX_NAME, &index, err)))
        failed = read_index(handle, index, err);
    munmap((void *)text, n);
    return failed;
}

static int open_folder(struct handle *handle, struct kvg_error *err)
{
    char *index = join(handle, INDEX_NAME), *single = join(handle, SINGLE_NAME);
    int failed;
    if (!index || !single)
        return kvg_fail(err, KVG_NOMEM, "safetensors: out of memory");
    if (access(index, F_OK) == 0)
        return open_sharded(handle, index, err);
    if (access(single, F_OK) != 0)
        return kvg_fail(err, KVG_FILE, "%.200s has neither " SINGLE_NAME " nor " INDEX_NAME, handle->folder);
    if ((failed = add_file(handle, SINGLE_NAME, single, err)) || (failed = refuse_stray(handle, err)))
        return failed;
    return sort_tensors(handle, err);
}

static int open_path(struct handle *handle, const char *path, struct kvg_error *err)
{
    struct stat st;
    int failed;
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode)) {
        handle->folder = strdup(path);
        return handle->folder ? open_folder(handle, err) : kvg_fail(err, KVG_NOMEM, "safetensors: out of memory");
    }
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    char *copy = kvg_arena_copy(&handle->arena, name, strlen(name));
    failed = copy ? add_file(handle, copy, path, err) : kvg_fail(err, KVG_NOMEM, "safetensors: out of memory");
    return failed ? failed : sort_tensors(handle, err);
}

static struct handle *handle_new(bool mapped)
{
    struct handle *handle = calloc(1, sizeof *handle);
    if (handle) {
        kvg_arena_init(&handle->arena, 0);
        handle->mapped = mapped;
    }
    return handle;
}

int safetensors_open(struct safetensors **out, const char *path, struct kvg_error *err)
{
    struct handle *handle = handle_new(true);
    *out = NULL;
    if (!handle)
        return kvg_fail(err, KVG_NOMEM, "safetensors: out of memory");
    int failed = open_path(handle, path, err);
    if (failed) {
        safetensors_close(&handle->st);
        return failed;
    }
    *out = &handle->st;
    return 0;
}

int safetensors_parse(struct safetensors **out, const unsigned char *bytes, size_t size, struct kvg_error *err)
{
    struct handle *handle = handle_new(false);
    int failed = KVG_NOMEM;
    *out = NULL;
    if (handle && (handle->st.files = calloc(1, sizeof *handle->st.files))) {
        handle->st.files[0] = (struct safetensors_file){.name = "safetensors", .map = bytes, .size = size};
        handle->st.n_files = 1;
        failed = read_file(handle, 0, err);
        if (!failed)
            failed = sort_tensors(handle, err);
    }
    if (failed) {
        if (failed == KVG_NOMEM)
            kvg_fail(err, KVG_NOMEM, "safetensors: out of memory");
        safetensors_close(handle ? &handle->st : NULL);
        return failed;
    }
    *out = &handle->st;
    return 0;
}

void safetensors_close(struct safetensors *checkpoint)
{
    struct handle *handle = (struct handle *)checkpoint;
    if (!handle)
        return;
    for (size_t i = 0; handle->mapped && i < checkpoint->n_files; i++)
        munmap((void *)checkpoint->files[i].map, checkpoint->files[i].size);
    free(checkpoint->files);
    free(checkpoint->tensors);
    kvg_arena_free(&handle->arena);
    free(handle->folder);
    free(handle);
}

const struct safetensors_tensor *safetensors_find(const struct safetensors *checkpoint, const char *name)
{
    struct kvg_str key = {name, strlen(name)};
    if (checkpoint->n_tensors == 0)
        return NULL;
    return bsearch(&key, checkpoint->tensors, checkpoint->n_tensors, sizeof *checkpoint->tensors, name_order);
}

void safetensors_release(const struct safetensors *checkpoint, const struct safetensors_tensor *tensor)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)tensor->data;
    uintptr_t first = (start + page - 1) & ~(page - 1), end = (start + tensor->n_bytes) & ~(page - 1);
    if (((const struct handle *)checkpoint)->mapped && first < end)
        madvise((void *)first, end - first, MADV_DONTNEED);
}
