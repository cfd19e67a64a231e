#include "libprompt/gguf_write.h"

#include <string.h>
#include "libprompt/gguf.h"

enum { COUNT_OFFSET = 16 };

static void put(struct kvg_gguf_writer *writer, uint64_t value, int n)
{
    char bytes[8];

    for (int i = 0; i < n; i++)
        bytes[i] = (char)(value >> 8 * i);
    kvg_buf_add(&writer->buf, bytes, (size_t)n);
}

static void put_str(struct kvg_gguf_writer *writer, struct kvg_str s)
{
    put(writer, s.len, 8);
    kvg_buf_add(&writer->buf, s.bytes, s.len);
}

static void put_key(struct kvg_gguf_writer *writer, const char *key, enum kvg_gguf_type type)
{
    put_str(writer, (struct kvg_str){key, strlen(key)});
    put(writer, type, 4);
    writer->n_values++;
}

static void put_array(struct kvg_gguf_writer *writer, const char *key, enum kvg_gguf_type type, size_t n)
{
    put_key(writer, key, KVG_GGUF_ARRAY);
    put(writer, type, 4);
    put(writer, n, 8);
}

void kvg_gguf_write_begin(struct kvg_gguf_writer *writer)
{
    *writer = (struct kvg_gguf_writer){0};
    kvg_buf_add(&writer->buf, "GGUF", 4);
    put(writer, 3, 4);
    put(writer, 0, 8);
    put(writer, 0, 8);
}

void kvg_gguf_write_u32(struct kvg_gguf_writer *writer, const char *key, uint32_t value)
{
    put_key(writer, key, KVG_GGUF_U32);
    put(writer, value, 4);
}

void kvg_gguf_write_f64(struct kvg_gguf_writer *writer, const char *key, double value)
{
    uint64_t bits;

    memcpy(&bits, &value, 8);
    put_key(writer, key, KVG_GGUF_F64);
    put(writer, bits, 8);
}

void kvg_gguf_write_bool(struct kvg_gguf_writer *writer, const char *key, bool value)
{
    put_key(writer, key, KVG_GGUF_BOOL);
    put(writer, value, 1);
}

void kvg_gguf_write_str(struct kvg_gguf_writer *writer, const char *key, struct kvg_str value)
{
    put_key(writer, key, KVG_GGUF_STRING);
    put_str(writer, value);
}

void kvg_gguf_write_strs(struct kvg_gguf_writer *writer, const char *key, const struct kvg_str *values, size_t n)
{
    put_array(writer, key, KVG_GGUF_STRING, n);
    for (size_t i = 0; i < n; i++)
        put_str(writer, values[i]);
}

void kvg_gguf_write_i32s(struct kvg_gguf_writer *writer, const char *key, const int32_t *values, size_t n)
{
    put_array(writer, key, KVG_GGUF_I32, n);
    for (size_t i = 0; i < n; i++)
        put(writer, (uint32_t)values[i], 4);
}

void kvg_gguf_write_end(struct kvg_gguf_writer *writer)
{
    for (int i = 0; i < 8 && !writer->buf.failed; i++)
        writer->buf.bytes[COUNT_OFFSET + i] = (char)(writer->n_values >> 8 * i);
}
