/* What the loader hands to a backend. The backend is one that only keeps what it was given. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "gpu-worker/model/loader.h"

enum { ROWS = 8, COLS = 64 };

static struct backend_weight given;

static int keep(struct backend *backend, struct tensor **out, const struct backend_weight *weight, enum backend_weight_use use,
                struct kvg_error *err)
{
    given = *weight;
    *out = NULL;
    return 0;
}

static const struct backend_ops ops = {.weight = keep};

/* A folder whose output matrix is W8A8: codes I8 [ROWS, COLS] and a scale a row. */
static struct safetensors *open_folder(unsigned char **bytes)
{
    static const char header[] = "{\"lm_head.weight\":{\"dtype\":\"I8\",\"shape\":[8,64],\"data_offsets\":[0,512]},"
                                 "\"lm_head.weight_scale\":{\"dtype\":\"F32\",\"shape\":[8,1],\"data_offsets\":[512,544]}}";
    uint64_t length = sizeof header - 1;
    size_t size = sizeof length + length + ROWS * COLS + ROWS * sizeof(float);
    struct safetensors *folder;
    struct kvg_error err;

    *bytes = calloc(1, size);
    memcpy(*bytes, &length, sizeof length);
    memcpy(*bytes + sizeof length, header, length);
    if (safetensors_parse(&folder, *bytes, size, &err) != 0)
        fail_msg("%s", err.message);
    return folder;
}

static const void *source_of(struct loader *loader, struct loader_part part)
{
    struct tensor *tensor;
    struct kvg_error err;

    if (loader_tensor_part(loader, &tensor, "output.weight", ROWS, COLS, &part, WEIGHT_MATMUL, LOADER_REQUIRED, &err) != 0)
        fail_msg("%s", err.message);
    return given.source;
}

/* A backend takes two matrices of one source and one size for the same. */
static void parts_of_a_quantized_matrix_have_sources_of_their_own(void **state)
{
    for (int grouped = 0; grouped <= 1; grouped++) {
        struct backend backend = {.ops = &ops, .grouped = grouped};
        unsigned char *bytes;
        bool used[2] = {false};
        struct loader loader = {.folder = open_folder(&bytes),
                                .backend = &backend,
                                .quantization = {.method = QUANTIZED_INT8, .bits = 8, .activations = grouped},
                                .used = used};
        const void *whole = source_of(&loader, (struct loader_part){0, ROWS, 0, COLS});
        const void *first = source_of(&loader, (struct loader_part){0, ROWS / 2, 0, COLS});
        const void *second = source_of(&loader, (struct loader_part){ROWS / 2, ROWS / 2, 0, COLS});
        const void *third = source_of(&loader, (struct loader_part){ROWS / 2, ROWS / 2, COLS / 2, COLS / 2});
        assert_true(used[0] && used[1]);
        assert_ptr_equal(whole, safetensors_find(loader.folder, "lm_head.weight")->data);
        assert_ptr_equal(first, whole);
        assert_ptr_not_equal(second, first);
        assert_ptr_not_equal(third, second);
        assert_ptr_equal(second, source_of(&loader, (struct loader_part){ROWS / 2, ROWS / 2, 0, COLS}));
        safetensors_close((struct safetensors *)loader.folder);
        free(bytes);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(parts_of_a_quantized_matrix_have_sources_of_their_own)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
