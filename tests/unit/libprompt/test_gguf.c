#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cmocka.h>
#include "libprompt/gguf.h"

/* A file under construction. */
struct file {
    unsigned char bytes[4096];
    size_t n;
};

static void put(struct file *f, uint64_t v, int n)
{
    for (int i = 0; i < n; i++)
        f->bytes[f->n++] = (unsigned char)(v >> 8 * i);
}

static void put_string(struct file *f, const char *s)
{
    put(f, strlen(s), 8);
    memcpy(f->bytes + f->n, s, strlen(s));
    f->n += strlen(s);
}

static void put_header(struct file *f, uint32_t version, uint64_t n_tensors, uint64_t n_values)
{
    f->n = 0;
    memcpy(f->bytes, "GGUF", 4);
    f->n = 4;
    put(f, version, 4);
    put(f, n_tensors, 8);
    put(f, n_values, 8);
}

static void put_tensor(struct file *f, const char *name, uint32_t type, uint32_t n_dims, const uint64_t *dims, uint64_t offset)
{
    put_string(f, name);
    put(f, n_dims, 4);
    for (uint32_t i = 0; i < n_dims; i++)
        put(f, dims[i], 8);
    put(f, type, 4);
    put(f, offset, 8);
}

static void put_padding(struct file *f, size_t data)
{
    while (f->n % 32)
        f->bytes[f->n++] = 0;
    memset(f->bytes + f->n, 1, data);
    f->n += data;
}

static void good_file(struct file *f)
{
    put_header(f, 3, 2, 5);
    put_string(f, "general.architecture"), put(f, KVG_GGUF_STRING, 4), put_string(f, "llama");
    put_string(f, "n"), put(f, KVG_GGUF_I16, 4), put(f, (uint16_t)-5, 2);
    put_string(f, "eps"), put(f, KVG_GGUF_F32, 4), put(f, 0x3f000000, 4);
    put_string(f, "yes"), put(f, KVG_GGUF_BOOL, 4), put(f, 1, 1);
    put_string(f, "words"), put(f, KVG_GGUF_ARRAY, 4), put(f, KVG_GGUF_STRING, 4), put(f, 2, 8), put_string(f, "a"),
        put_string(f, "");
    put_tensor(f, "x", 0, 1, (uint64_t[]){8}, 0);
    put_tensor(f, "y", 2, 2, (uint64_t[]){64, 3}, 32);
    put_padding(f, 32 + 2 * 3 * 18);
}

/* The file with only tensor b described, and `data` bytes behind the header. */
static void one_tensor(struct file *f, uint32_t type, uint32_t n_dims, const uint64_t *dims, uint64_t offset, size_t data)
{
    put_header(f, 3, 1, 0);
    put_tensor(f, "b", type, n_dims, dims, offset);
    put_padding(f, data);
}

static void assert_refused(const struct file *f, const char *words)
{
    struct kvg_gguf *gguf;
    struct kvg_error err;
    unsigned char *exact = malloc(f->n ? f->n : 1); /* so that a sanitizer sees reads past the end */

    memcpy(exact, f->bytes, f->n);
    assert_int_equal(kvg_gguf_parse(&gguf, exact, f->n, &err), KVG_FILE);
    assert_null(gguf);
    if (!strstr(err.message, words))
        fail_msg("\"%s\" lacks \"%s\"", err.message, words);
    free(exact);
}

static void values_and_tensors_are_read(void **state)
{
    struct file f;
    struct kvg_gguf *gguf;
    struct kvg_str s;
    uint64_t u;
    double d;
    bool b;
    const struct kvg_gguf_tensor *y;
    const unsigned char *cursor;

    good_file(&f);
    assert_int_equal(kvg_gguf_parse(&gguf, f.bytes, f.n, NULL), 0);
    assert_true(kvg_gguf_str(gguf, "general.architecture", &s) && kvg_str_eq(s, "llama"));
    assert_false(kvg_gguf_u64(gguf, "n", &u));
    assert_true(kvg_gguf_f64(gguf, "n", &d) && d == -5);
    assert_true(kvg_gguf_f64(gguf, "eps", &d) && d == 0.5);
    assert_true(kvg_gguf_bool(gguf, "yes", &b) && b);
    assert_false(kvg_gguf_bool(gguf, "eps", &b));
    assert_int_equal(kvg_gguf_find(gguf, "words")->n, 2);
    cursor = kvg_gguf_find(gguf, "words")->bytes;
    s = kvg_gguf_next_string(&cursor);
    assert_true(kvg_str_eq(s, "a"));
    s = kvg_gguf_next_string(&cursor);
    assert_int_equal(s.len, 0);
    y = kvg_gguf_tensor(gguf, "y");
    assert_non_null(y);
    assert_int_equal(y->n_bytes, 108);
    assert_int_equal(y->dims[1] * y->dims[2] * y->dims[3], 3);
    assert_int_equal(y->offset, gguf->data_offset + 32);
    assert_null(kvg_gguf_tensor(gguf, "z"));
    assert_null(kvg_gguf_find(gguf, "z"));
    kvg_gguf_close(gguf);
}

/* Case F1: products of dimensions and padding that wrap around 64 bits. */
static void tensor_sizes_that_overflow_are_refused(void **state)
{
    struct file f;

    put_header(&f, 3, 2, 0);
    put_tensor(&f, "a", 0, 1, (uint64_t[]){64}, 0);
    put_tensor(&f, "b", 0, 3, (uint64_t[]){4, 1073741823, 1073741825}, 256);
    put_padding(&f, 256);
    assert_refused(&f, "tensor b");
    one_tensor(&f, 24, 2, (uint64_t[]){INT64_MAX, 2}, 0, 64);
    assert_refused(&f, "tensor b");
    one_tensor(&f, 0, 2, (uint64_t[]){UINT64_MAX, 2}, 0, 64);
    assert_refused(&f, "tensor b");
    one_tensor(&f, 0, 2, (uint64_t[]){64, (1ull << 42) + 1}, 0, 64);
    assert_refused(&f, "tensor b");
    one_tensor(&f, 0, 1, (uint64_t[]){16}, UINT64_MAX - 31, 64);
    assert_refused(&f, "tensor b");
}

/* Case F3. */
static void files_that_cannot_be_served_are_told_apart(void **state)
{
    static const uint32_t bad_types[] = {4, 5, 31, 32, 33, 36, 37, 38, 39, 42, 255, UINT32_MAX};
    struct file f;
    char words[32];

    put_header(&f, 0x03000000, 0, 0);
    assert_refused(&f, "big-endian");
    put_header(&f, 1, 0, 0);
    assert_refused(&f, "version 1");
    put_header(&f, 4, 0, 0);
    assert_refused(&f, "version 4");
    put_header(&f, 3, 0, 0);
    memcpy(f.bytes, "FUGG", 4);
    assert_refused(&f, "FUGG");
    for (size_t i = 0; i < sizeof bad_types / sizeof *bad_types; i++) {
        one_tensor(&f, bad_types[i], 1, (uint64_t[]){256}, 0, 1024);
        snprintf(words, sizeof words, "type id %u,", bad_types[i]);
        assert_refused(&f, words);
        assert_refused(&f, "tensor b");
    }
    one_tensor(&f, 2, 2, (uint64_t[]){33, 1}, 0, 1024);
    assert_refused(&f, "row of 33 weights");
    one_tensor(&f, 0, 2, (uint64_t[]){32, 0}, 0, 1024);
    assert_refused(&f, "dimension 1 is 0");
    one_tensor(&f, 0, 5, (uint64_t[]){2, 2, 2, 2, 2}, 0, 1024);
    assert_refused(&f, "5 dimensions");
    one_tensor(&f, 0, 0, NULL, 0, 1024);
    assert_refused(&f, "0 dimensions");
    one_tensor(&f, 0, 1, (uint64_t[]){16}, 8, 1024);
    assert_refused(&f, "alignment");
    one_tensor(&f, 0, 1, (uint64_t[]){16}, 32, 64);
    assert_refused(&f, "end of the file");
}

static void names_must_be_unique_and_tensors_apart(void **state)
{
    struct file f;

    put_header(&f, 3, 0, 2);
    for (int i = 0; i < 2; i++)
        put_string(&f, "k"), put(&f, KVG_GGUF_U8, 4), put(&f, 1, 1);
    assert_refused(&f, "k occurs twice");
    put_header(&f, 3, 2, 0);
    put_tensor(&f, "b", 0, 1, (uint64_t[]){8}, 0);
    put_tensor(&f, "b", 0, 1, (uint64_t[]){8}, 32);
    put_padding(&f, 64);
    assert_refused(&f, "b occurs twice");
    put_header(&f, 3, 2, 0);
    put_tensor(&f, "b", 0, 1, (uint64_t[]){16}, 0);
    put_tensor(&f, "c", 0, 1, (uint64_t[]){8}, 32);
    put_padding(&f, 64);
    assert_refused(&f, "overlap");
}

static void metadata_that_lies_is_refused(void **state)
{
    struct file f;

    put_header(&f, 3, 0, UINT64_MAX);
    put_padding(&f, 64);
    assert_refused(&f, "metadata entries");
    put_header(&f, 3, 1ull << 60, 0);
    put_padding(&f, 64);
    assert_refused(&f, "tensors do not fit");
    put_header(&f, 3, 0, 1);
    put(&f, UINT64_MAX, 8);
    put_padding(&f, 64);
    assert_refused(&f, "metadata key");
    put_header(&f, 3, 0, 1);
    put_string(&f, ""), put(&f, KVG_GGUF_U8, 4), put(&f, 1, 8);
    assert_refused(&f, "0 bytes");
    put_header(&f, 3, 0, 1);
    put_string(&f, "k\n\x80"), put(&f, 13, 4), put(&f, 1, 8);
    assert_refused(&f, "k?? has value type 13");
    put_header(&f, 3, 0, 1);
    put_string(&f, "k"), put(&f, KVG_GGUF_ARRAY, 4), put(&f, KVG_GGUF_ARRAY, 4), put(&f, 1, 8);
    assert_refused(&f, "array of type 9");
    put_header(&f, 3, 0, 1);
    put_string(&f, "k"), put(&f, KVG_GGUF_ARRAY, 4), put(&f, KVG_GGUF_U64, 4), put(&f, 1ull << 61, 8), put(&f, 0, 8);
    assert_refused(&f, "ends inside k");
    put_header(&f, 3, 0, 1);
    put_string(&f, "k"), put(&f, KVG_GGUF_BOOL, 4), put(&f, 2, 1);
    assert_refused(&f, "boolean");
    put_header(&f, 3, 0, 1);
    put_string(&f, "general.alignment"), put(&f, KVG_GGUF_U32, 4), put(&f, 24, 4);
    assert_refused(&f, "power of two");
    put_header(&f, 3, 0, 1);
    put_string(&f, "general.alignment"), put(&f, KVG_GGUF_STRING, 4), put_string(&f, "32");
    assert_refused(&f, "u32");
}

/* The file ends right before an unreadable page, and is cut at every byte. */
static void a_file_cut_anywhere_is_refused(void **state)
{
    long page = sysconf(_SC_PAGESIZE);
    unsigned char *two = mmap(NULL, (size_t)page * 2, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct file f;
    struct kvg_gguf *gguf;
    struct kvg_error err;

    assert_ptr_not_equal(two, MAP_FAILED);
    assert_int_equal(mprotect(two + page, (size_t)page, PROT_NONE), 0);
    good_file(&f);
    for (size_t n = 0; n < f.n; n++) {
        memcpy(two + page - n, f.bytes, n);
        assert_int_equal(kvg_gguf_parse(&gguf, two + page - n, n, &err), KVG_FILE);
    }
    munmap(two, (size_t)page * 2);
}

static void a_missing_or_empty_file_is_named(void **state)
{
    char path[] = "/tmp/test_gguf_XXXXXX";
    struct kvg_gguf *gguf;
    struct kvg_error err;

    assert_int_equal(kvg_gguf_open(&gguf, "/nonexistent/file", &err), KVG_FILE);
    assert_non_null(strstr(err.message, "/nonexistent/file"));
    close(mkstemp(path));
    assert_int_equal(kvg_gguf_open(&gguf, path, &err), KVG_FILE);
    assert_non_null(strstr(err.message, path));
    unlink(path);
    assert_int_equal(kvg_gguf_open(&gguf, "/tmp", &err), KVG_FILE);
}

static void a_cut_file_keeps_the_metadata_and_drops_the_tensors(void **state)
{
    char in[] = "/tmp/test_gguf_XXXXXX", out[64], link[64], target[64];
    struct kvg_error err;
    struct file f;
    struct kvg_gguf *gguf;
    struct kvg_str s;
    int fd = mkstemp(in);

    good_file(&f);
    assert_int_equal(write(fd, f.bytes, f.n), f.n);
    close(fd);
    snprintf(out, sizeof out, "%s.cut", in);
    assert_int_equal(kvg_gguf_cut(in, out, NULL), 0);
    assert_int_equal(kvg_gguf_open(&gguf, out, NULL), 0);
    assert_int_equal(gguf->n_tensors, 0);
    assert_int_equal(gguf->n_values, 5);
    assert_true(kvg_gguf_str(gguf, "general.architecture", &s) && kvg_str_eq(s, "llama"));
    kvg_gguf_close(gguf);
    unlink(in);
    unlink(out);
    assert_int_equal(kvg_gguf_cut("/nonexistent", out, NULL), KVG_FILE);
    snprintf(link, sizeof link, "%s.link", in);
    assert_int_equal(symlink(out, link), 0);
    assert_int_equal(kvg_gguf_cut(in, link, &err), KVG_FILE); /* neither a link nor a device is replaced */
    assert_non_null(strstr(err.message, "no regular file"));
    assert_int_equal(readlink(link, target, sizeof target), (ssize_t)strlen(out));
    unlink(link);
    assert_int_equal(access(out, F_OK), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_and_tensors_are_read),
        cmocka_unit_test(tensor_sizes_that_overflow_are_refused),
        cmocka_unit_test(files_that_cannot_be_served_are_told_apart),
        cmocka_unit_test(names_must_be_unique_and_tensors_apart),
        cmocka_unit_test(metadata_that_lies_is_refused),
        cmocka_unit_test(a_file_cut_anywhere_is_refused),
        cmocka_unit_test(a_missing_or_empty_file_is_named),
        cmocka_unit_test(a_cut_file_keeps_the_metadata_and_drops_the_tensors),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
