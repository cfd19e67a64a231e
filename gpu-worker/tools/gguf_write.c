#include "gpu-worker/tools/gguf_write.h"
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "gpu-worker/tools/temporary.h"

enum { ALIGNMENT = 32, VERSION = 3 };

static uint64_t aligned(uint64_t n)
{
    return (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static void put(struct gguf_writer *writer, const void *bytes, size_t n)
{
    fwrite(bytes, 1, n, writer->file); /* ferror is asked at the end of the header */
}

static void put_u32(struct gguf_writer *writer, uint32_t value)
{
    put(writer, &value, sizeof value);
}

static void put_u64(struct gguf_writer *writer, uint64_t value)
{
    put(writer, &value, sizeof value);
}

static void put_string(struct gguf_writer *writer, const char *bytes, size_t n)
{
    put_u64(writer, n);
    put(writer, bytes, n);
}

static void put_key_u32(struct gguf_writer *writer, const char *key, uint32_t value)
{
    put_string(writer, key, strlen(key));
    put_u32(writer, KVG_GGUF_U32);
    put_u32(writer, value);
}

/* Written anew, whatever the other file says. */
static bool replaced(struct kvg_str key)
{
    return kvg_str_eq(key, "general.file_type") || kvg_str_eq(key, "general.alignment") ||
           kvg_str_eq(key, "general.quantization_version");
}

static void put_metadata(struct gguf_writer *writer, const struct kvg_gguf *gguf, uint32_t file_type)
{
    for (size_t i = 0; i < gguf->n_values; i++) {
        const struct kvg_gguf_value *value = &gguf->values[i];
        if (replaced(value->key))
            continue;
        put_string(writer, value->key.bytes, value->key.len);
        put_u32(writer, value->type);
        if (value->type == KVG_GGUF_ARRAY) {
            put_u32(writer, value->item_type);
            put_u64(writer, value->n);
        }
        put(writer, value->bytes, value->n_bytes);
    }
    put_key_u32(writer, "general.file_type", file_type);
    put_key_u32(writer, "general.quantization_version", 2);
}

static void put_descriptors(struct gguf_writer *writer)
{
    uint64_t offset = 0;
    for (size_t i = 0; i < writer->n_tensors; i++) {
        const struct gguf_tensor_plan *tensor = &writer->tensors[i];
        put_string(writer, tensor->name.bytes, tensor->name.len);
        put_u32(writer, tensor->n_dims);
        put(writer, tensor->dims, tensor->n_dims * sizeof *tensor->dims);
        put_u32(writer, tensor->ggml_type);
        put_u64(writer, offset);
        offset += aligned(tensor->n_bytes);
    }
}

static void pad(struct gguf_writer *writer, uint64_t at)
{
    static const char zeros[ALIGNMENT];
    put(writer, zeros, aligned(at) - at);
}

static int failed(struct gguf_writer *writer, struct kvg_error *err)
{
    int code = kvg_fail(err, KVG_FILE, "cannot write %.200s: %s", writer->path, strerror(errno));
    gguf_write_abort(writer);
    return code;
}

static void remove_file(const char *path)
{
    unlink(path);
}

int gguf_write_begin(struct gguf_writer *writer, const char *path, const struct kvg_gguf *metadata, uint32_t file_type,
                     const struct gguf_tensor_plan *tensors, size_t n_tensors, struct kvg_error *err)
{
    struct stat there;
    uint64_t n_values = 2;

    *writer = (struct gguf_writer){.tensors = tensors, .n_tensors = n_tensors, .left = n_tensors ? tensors[0].n_bytes : 0};
    if (lstat(path, &there) == 0 && !S_ISREG(there.st_mode))
        return kvg_fail(err, KVG_FILE, "cannot write %.200s: it exists and is no regular file", path);
    if (snprintf(writer->path, sizeof writer->path, "%s", path) >= (int)sizeof writer->path)
        return kvg_fail(err, KVG_FILE, "the path %.200s is too long", path);
    snprintf(writer->temporary, sizeof writer->temporary, "%s.%ld.part", path, (long)getpid());
    temporary_hold(writer->temporary, remove_file);
    if (!(writer->file = fopen(writer->temporary, "wbx"))) {
        temporary_hold(NULL, NULL);
        return kvg_fail(err, KVG_FILE, "cannot create %.200s: %s", writer->temporary, strerror(errno));
    }
    for (size_t i = 0; i < metadata->n_values; i++)
        n_values += !replaced(metadata->values[i].key);
    put(writer, "GGUF", 4);
    put_u32(writer, VERSION);
    put_u64(writer, n_tensors);
    put_u64(writer, n_values);
    put_metadata(writer, metadata, file_type);
    put_descriptors(writer);
    pad(writer, (uint64_t)ftello(writer->file));
    return ferror(writer->file) ? failed(writer, err) : 0;
}

int gguf_write_bytes(struct gguf_writer *writer, const void *bytes, uint64_t n, struct kvg_error *err)
{
    if (writer->next == writer->n_tensors || n > writer->left) {
        gguf_write_abort(writer);
        return kvg_fail(err, KVG_INVALID, "%llu bytes for a tensor that lacks %llu", (unsigned long long)n,
                        (unsigned long long)writer->left);
    }
    put(writer, bytes, n);
    writer->left -= n;
    if (writer->left == 0) {
        pad(writer, writer->tensors[writer->next].n_bytes);
        writer->next++;
        writer->left = writer->next < writer->n_tensors ? writer->tensors[writer->next].n_bytes : 0;
    }
    return ferror(writer->file) ? failed(writer, err) : 0;
}

int gguf_write_end(struct gguf_writer *writer, struct kvg_error *err)
{
    if (writer->next != writer->n_tensors) {
        gguf_write_abort(writer);
        return kvg_fail(err, KVG_INVALID, "%zu of %zu tensors were written", writer->next, writer->n_tensors);
    }
    bool good = fflush(writer->file) == 0 && fsync(fileno(writer->file)) == 0;
    good = fclose(writer->file) == 0 && good;
    writer->file = NULL;
    return good && temporary_finish(writer->path) == 0 ? 0 : failed(writer, err);
}

void gguf_write_abort(struct gguf_writer *writer)
{
    if (writer->file)
        fclose(writer->file);
    writer->file = NULL;
    temporary_drop();
}
