#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>
#include "gpu-worker/model/safetensors.h"

/* header and data as a file's bytes in a malloced block of exactly that size; *n: its size. declared < 0: the header's true size.
 */
static unsigned char *file_bytes(const char *header, long long declared, size_t data, size_t *n)
{
    size_t length = strlen(header);
    uint64_t prefix = declared < 0 ? length : (uint64_t)declared;
    unsigned char *bytes = malloc(8 + length + data);
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)(prefix >> 8 * i);
    memcpy(bytes + 8, header, length);
    for (size_t i = 0; i < data; i++)
        bytes[8 + length + i] = (unsigned char)i;
    *n = 8 + length + data;
    return bytes;
}

#define TENSOR(name, dtype, shape, range) "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" range "}"
#define TWO                               "{" TENSOR("b", "BF16", "[3]", "[16,22]") "," TENSOR("a", "F32", "[2,2]", "[0,16]") "}  "

static void test_unordered_header_without_gaps_loads(void **state)
{
    struct kvg_error err;
    struct safetensors *st;
    size_t n;
    unsigned char *bytes = file_bytes(TWO, -1, 22, &n);
    assert_int_equal(safetensors_parse(&st, bytes, n, &err), 0);
    assert_int_equal(st->n_tensors, 2);
    const struct safetensors_tensor *a = safetensors_find(st, "a"), *b = safetensors_find(st, "b");
    assert_ptr_equal(a, &st->tensors[0]);
    assert_int_equal(a->dtype, ST_F32);
    assert_int_equal(a->n_dims, 2);
    assert_int_equal(a->shape[0] * a->shape[1] * a->shape[2], 4);
    assert_int_equal(a->data[5], 5);
    assert_int_equal(b->data[0], 16);
    assert_int_equal(b->n_bytes, 6);
    assert_int_equal(st->total_bytes, 22);
    assert_null(safetensors_find(st, "c"));
    safetensors_close(st);
    free(bytes);
}

/* Each lie, the data's size, and what the text has to name. */
static const struct {
    const char *header;
    long long declared;
    size_t data;
    const char *says[2];
} lies[] = {
    {"{" TENSOR("a", "F32", "[1000,1000]", "[0,4]") "}", -1, 4, {"tensor a", "4000000 F32 bytes"}},
    {"{" TENSOR("A", "U8", "[16]", "[0,16]") "," TENSOR("B", "U8", "[16]", "[8,24]") "}", -1, 24, {"overlap", "A and B"}},
    {"{" TENSOR("A", "U8", "[16]", "[0,16]") "," TENSOR("B", "U8", "[16]", "[32,48]") "}", -1, 48, {"16 to 32", "B"}},
    {"{" TENSOR("A", "U8", "[16]", "[4,20]") "}", -1, 20, {"0 to 4", "A"}},
    {"{" TENSOR("A", "U8", "[16]", "[16,0]") "}", -1, 16, {"tensor A", "[16, 0]"}},
    {"{" TENSOR("A", "U8", "[8]", "[-8,0]") "}", -1, 16, {"tensor A", "[-8, 0]"}},
    {"{" TENSOR("A", "U8", "[8]", "[0,8]") "}", -1, 16, {"16 bytes", "have 8"}},
    {"{" TENSOR("A", "U8", "[8]", "[0,8]") "}", -1, 4, {"tensor A", "4 bytes"}},
    {"{" TENSOR("A", "U8", "[8]", "[0,8,9]") "}", -1, 8, {"tensor A", "pair"}},
    {"{" TENSOR("A", "U8", "[8]", "[0,8.0]") "}", -1, 8, {"tensor A", "pair"}},
    {"{" TENSOR("A", "F33", "[8]", "[0,8]") "}", -1, 8, {"tensor A", "F33"}},
    {"{" TENSOR("A", "U8", "[-1]", "[0,8]") "}", -1, 8, {"tensor A", "dimension 0"}},
    {"{" TENSOR("A", "U8", "[1.5]", "[0,8]") "}", -1, 8, {"tensor A", "dimension 0"}},
    {"{" TENSOR("A", "F64", "[4611686018427387904,4]", "[0,8]") "}", -1, 8, {"tensor A", "overflows"}},
    {"{" TENSOR("A", "U8", "[1,1,1,1,1,1,1,1,8]", "[0,8]") "}", -1, 8, {"tensor A", "9 dimensions"}},
    {"{" TENSOR("A", "U8", "[8]", "[0,8]") "," TENSOR("A", "U8", "[8]", "[0,8]") "}", -1, 8, {"\"A\"", "twice"}},
    {"{\"A\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[8],\"data_offsets\":[0,8]}}", -1, 8, {"dtype", "twice"}},
    {"{" TENSOR("", "U8", "[8]", "[0,8]") "}", -1, 8, {"name has 0 bytes", ""}},
    {"{" TENSOR("A\\u0000B", "U8", "[8]", "[0,8]") "}", -1, 8, {"NUL", ""}},
    {"{\"A\":{\"shape\":[8],\"data_offsets\":[0,8]}}", -1, 8, {"tensor A", "no dtype"}},
    {"{\"A\":{\"dtype\":\"U8\",\"data_offsets\":[0,8]}}", -1, 8, {"tensor A", "no shape"}},
    {"{\"A\":{\"dtype\":\"U8\",\"shape\":[8]}}", -1, 8, {"tensor A", "data_offsets"}},
    {"{\"A\":7}", -1, 0, {"tensor A", "no object"}},
    {"{\"__metadata__\":7}", -1, 0, {"__metadata__", ""}},
    {"[]", -1, 0, {"no JSON object", ""}},
    {"{}", 0, 0, {"header of 0 bytes", ""}},
    {"{}", 3, 0, {"header of 3 bytes", "file of 10"}},
    {"{}", 0x7fffffffffffffff, 0, {"9223372036854775807", "at most"}},
};

static void test_a_lie_is_refused_and_named(void **state)
{
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        struct kvg_error err = {0};
        struct safetensors *st;
        size_t n;
        unsigned char *bytes = file_bytes(lies[i].header, lies[i].declared, lies[i].data, &n);
        assert_int_equal(safetensors_parse(&st, bytes, n, &err), KVG_FILE);
        assert_null(st);
        for (int k = 0; k < 2; k++)
            if (!strstr(err.message, lies[i].says[k]))
                fail_msg("%s: \"%s\" lacks \"%s\"", lies[i].header, err.message, lies[i].says[k]);
        free(bytes);
    }
}

static void test_every_truncation_is_refused(void **state)
{
    size_t n;
    unsigned char *bytes = file_bytes(TWO, -1, 22, &n);
    for (size_t cut = 0; cut < n; cut++) {
        unsigned char *exact = malloc(cut ? cut : 1);
        struct kvg_error err;
        struct safetensors *st;
        memcpy(exact, bytes, cut);
        assert_int_not_equal(safetensors_parse(&st, exact, cut, &err), 0);
        free(exact);
    }
    free(bytes);
}

/* ---- folders ---- */

static char folder[64];

static void path_of(char out[256], const char *name)
{
    snprintf(out, 256, "%s/%s", folder, name);
}

static void write_bytes(const char *name, const void *bytes, size_t n)
{
    char path[256];
    path_of(path, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    fclose(f);
}

static void write_shard(const char *name, const char *tensor)
{
    char header[256];
    size_t n;
    snprintf(header, sizeof header, "{" TENSOR("%s", "U8", "[4]", "[0,4]") "}", tensor);
    unsigned char *bytes = file_bytes(header, -1, 4, &n);
    write_bytes(name, bytes, n);
    free(bytes);
}

static void unlink_all(void)
{
    static const char *const names[] = {"model-1.safetensors", "model-2.safetensors", "model-3.safetensors", "model.safetensors",
                                        "model.safetensors.index.json"};
    char path[256];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        path_of(path, names[i]);
        unlink(path);
    }
}

static void write_index(const char *map)
{
    char text[512];
    snprintf(text, sizeof text, "{\"metadata\":{},\"weight_map\":%s}", map);
    write_bytes("model.safetensors.index.json", text, strlen(text));
}

static void assert_refused(const char *says)
{
    struct kvg_error err = {0};
    struct safetensors *st;
    assert_int_equal(safetensors_open(&st, folder, &err), KVG_FILE);
    if (!strstr(err.message, says))
        fail_msg("\"%s\" lacks \"%s\"", err.message, says);
}

static int setup(void **state)
{
    strcpy(folder, "/tmp/kvgate-st-XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static int teardown(void **state)
{
    unlink_all();
    return rmdir(folder);
}

static void test_shards_load_as_their_index_says(void **state)
{
    struct kvg_error err = {0};
    struct safetensors *st;
    write_shard("model-1.safetensors", "x");
    write_shard("model-2.safetensors", "y");
    write_index("{\"x\":\"model-1.safetensors\",\"y\":\"model-2.safetensors\"}");
    if (safetensors_open(&st, folder, &err))
        fail_msg("%s", err.message);
    assert_int_equal(st->n_tensors, 2);
    assert_int_equal(st->n_files, 2);
    assert_string_equal(st->files[safetensors_find(st, "y")->file].name, "model-2.safetensors");
    safetensors_release(st, safetensors_find(st, "x"));
    assert_int_equal(safetensors_find(st, "x")->data[3], 3);
    safetensors_close(st);
}

static void test_index_and_shards_must_agree(void **state)
{
    write_shard("model-1.safetensors", "x");
    write_index("{\"x\":\"model-1.safetensors\",\"y\":\"model-2.safetensors\"}");
    assert_refused("shard model-2.safetensors, which has tensor y, is missing");
    write_shard("model-2.safetensors", "z");
    assert_refused("tensor y is not in model-2.safetensors");
    write_index("{\"x\":\"model-1.safetensors\"}");
    assert_refused("model-2.safetensors is not in model.safetensors.index.json");
    write_shard("model-2.safetensors", "x");
    write_index("{\"x\":\"model-1.safetensors\",\"y\":\"model-2.safetensors\"}");
    assert_refused("tensor x lies in");
    write_index("{\"x\":\"model-1.safetensors\",\"x\":\"model-2.safetensors\"}");
    assert_refused("twice");
    write_index("{\"x\":\"../model-1.safetensors\"}");
    assert_refused("no name of a .safetensors file");
    write_index("{\"x\":7}");
    assert_refused("no name of a .safetensors file");
    write_index("{}");
    assert_refused("weight_map");
}

static void test_stray_tensor_in_a_shard_is_refused(void **state)
{
    size_t n;
    unsigned char *bytes = file_bytes("{" TENSOR("x", "U8", "[2]", "[0,2]") "," TENSOR("w", "U8", "[2]", "[2,4]") "}", -1, 4, &n);
    write_bytes("model-1.safetensors", bytes, n);
    free(bytes);
    write_index("{\"x\":\"model-1.safetensors\"}");
    assert_refused("model-1.safetensors: tensor w is not in");
}

static void test_single_file_beside_shards_is_refused(void **state)
{
    write_shard("model.safetensors", "x");
    write_shard("model-1.safetensors", "x");
    assert_refused("model-1.safetensors is not in");
    unlink_all();
    assert_refused("neither model.safetensors nor");
}

int main(void)
{
#define FOLDER_TEST(test) cmocka_unit_test_setup_teardown(test, setup, teardown)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unordered_header_without_gaps_loads),
        cmocka_unit_test(test_a_lie_is_refused_and_named),
        cmocka_unit_test(test_every_truncation_is_refused),
        FOLDER_TEST(test_shards_load_as_their_index_says),
        FOLDER_TEST(test_index_and_shards_must_agree),
        FOLDER_TEST(test_stray_tensor_in_a_shard_is_refused),
        FOLDER_TEST(test_single_file_beside_shards_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
