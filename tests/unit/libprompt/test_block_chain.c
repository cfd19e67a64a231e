#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <xxhash.h>
#include "libprompt/arena.h"
#include "libprompt/block_chain.h"
#include "libprompt/json.h"

struct vector {
    struct kvg_chain_identity identity;
    struct kvg_hash seed;
    uint32_t *ids;
    size_t n_ids;
    const struct kvg_json *hashes;
};

static struct kvg_json *load_vectors(struct kvg_arena *arena)
{
    FILE *f = fopen("tests/golden/chain.json", "rb");
    char *text = kvg_arena_alloc(arena, 1 << 20);
    struct kvg_json *root;
    struct kvg_error err;
    size_t n;

    assert_non_null(f);
    n = fread(text, 1, 1 << 20, f);
    fclose(f);
    assert_int_equal(kvg_json_parse(arena, text, n, NULL, &root, &err), 0);
    assert_true(root->n >= 10);
    return root;
}

static struct kvg_hash hash_of(struct kvg_arena *arena, const struct kvg_json *hex)
{
    struct kvg_hash hash;

    assert_int_equal(kvg_hash_parse(kvg_arena_copy(arena, hex->str.bytes, hex->str.len), &hash), 0);
    return hash;
}

static struct vector read_vector(struct kvg_arena *arena, const struct kvg_json *json)
{
    const struct kvg_json *model = kvg_json_get(json, "model"), *salt = kvg_json_get(json, "salt"),
                          *ids = kvg_json_get(json, "ids");
    struct vector v = {.n_ids = ids->n, .hashes = kvg_json_get(json, "hashes")};
    int64_t number;

    v.identity.model = kvg_arena_copy(arena, model->str.bytes, model->str.len);
    v.identity.salt = salt->str.bytes;
    v.identity.salt_len = salt->str.len;
    v.identity.fingerprint = hash_of(arena, kvg_json_get(json, "fingerprint"));
    assert_true(kvg_json_int(kvg_json_get(json, "block_size"), &number));
    v.identity.block_size = (uint32_t)number;
    v.seed = hash_of(arena, kvg_json_get(json, "seed"));
    v.ids = kvg_arena_alloc(arena, (v.n_ids + 1) * sizeof *v.ids);
    for (size_t i = 0; i < v.n_ids; i++) {
        assert_true(kvg_json_int(&ids->items[i], &number));
        v.ids[i] = (uint32_t)number;
    }
    return v;
}

static void chain_equals_the_independent_vectors(void **state)
{
    struct kvg_arena arena;
    struct kvg_json *root;

    kvg_arena_init(&arena, 0);
    root = load_vectors(&arena);
    for (uint32_t i = 0; i < root->n; i++) {
        struct vector v = read_vector(&arena, &root->items[i]);
        struct kvg_hash seed, *out = kvg_arena_alloc(&arena, (v.n_ids / v.identity.block_size + 1) * sizeof *out);
        size_t n;

        kvg_chain_seed(&v.identity, &seed);
        assert_memory_equal(&seed, &v.seed, 16);
        n = kvg_chain_extend(&seed, v.ids, v.n_ids, v.identity.block_size, out);
        assert_int_equal(n, v.hashes->n);
        for (size_t b = 0; b < n; b++) {
            struct kvg_hash want = hash_of(&arena, &v.hashes->items[b]);
            assert_memory_equal(&out[b], &want, 16);
        }
    }
    kvg_arena_free(&arena);
}

static void continuing_a_chain_equals_computing_it_whole(void **state)
{
    uint32_t ids[640];
    struct kvg_hash seed = {{1, 2, 3}}, whole[40], parts[40];

    for (int i = 0; i < 640; i++)
        ids[i] = (uint32_t)(i * 2654435761u);
    assert_int_equal(kvg_chain_extend(&seed, ids, 640, 16, whole), 40);
    assert_int_equal(kvg_chain_extend(&seed, ids, 16 * 7 + 15, 16, parts), 7);
    assert_int_equal(kvg_chain_extend(&parts[6], ids + 16 * 7, 640 - 16 * 7, 16, parts + 7), 33);
    assert_memory_equal(whole, parts, sizeof whole);
}

static void blocks_above_the_stack_buffer_hash_the_same_way(void **state)
{
    enum { N = 2048 };
    uint32_t ids[N];
    unsigned char bytes[16 + N * 4];
    struct kvg_hash seed = {{9}}, out;
    XXH128_canonical_t want;

    for (uint32_t i = 0; i < N; i++) {
        ids[i] = i * 2654435761u;
        for (int k = 0; k < 4; k++)
            bytes[16 + i * 4 + k] = (unsigned char)(ids[i] >> 8 * k);
    }
    memcpy(bytes, &seed, 16);
    XXH128_canonicalFromHash(&want, XXH3_128bits(bytes, sizeof bytes));
    assert_int_equal(kvg_chain_extend(&seed, ids, N, N, &out), 1);
    assert_memory_equal(&out, &want, 16);
}

/* Every part of the identity moves every hash, and no two parts can be shifted into each other. */
static void any_difference_in_the_identity_changes_the_chain(void **state)
{
    struct kvg_chain_identity base = {.model = "ab", .fingerprint = {{7}}, .block_size = 16, .salt = "cd", .salt_len = 2};
    struct kvg_chain_identity other[6];
    struct kvg_hash seed, seeds[6];

    for (int i = 0; i < 6; i++)
        other[i] = base;
    other[0].model = "abc";
    other[1].fingerprint.bytes[15] = 1;
    other[2].block_size = 32;
    other[3].salt_len = 1;
    other[4].salt = NULL, other[4].salt_len = 0;
    other[5].model = "a";
    kvg_chain_seed(&base, &seed);
    for (int i = 0; i < 6; i++) {
        kvg_chain_seed(&other[i], &seeds[i]);
        assert_memory_not_equal(&seed, &seeds[i], 16);
        for (int k = 0; k < i; k++)
            assert_memory_not_equal(&seeds[i], &seeds[k], 16);
    }
}

static void hex_round_trips_and_refuses_anything_else(void **state)
{
    struct kvg_hash hash = {{0, 1, 0xab, 0xff}}, back;
    char hex[KVG_HASH_HEX + 1];

    kvg_hash_hex(&hash, hex);
    assert_string_equal(hex, "0001abff000000000000000000000000");
    assert_int_equal(kvg_hash_parse(hex, &back), 0);
    assert_memory_equal(&hash, &back, 16);
    assert_int_equal(kvg_hash_parse("0001ABFF000000000000000000000000", &back), 0);
    assert_memory_equal(&hash, &back, 16);
    assert_int_equal(kvg_hash_parse("", &back), -1);
    assert_int_equal(kvg_hash_parse("0001abff00000000000000000000000", &back), -1);
    assert_int_equal(kvg_hash_parse("0001abff0000000000000000000000000", &back), -1);
    assert_int_equal(kvg_hash_parse("0001abff0000000000000000000000g0", &back), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chain_equals_the_independent_vectors),
        cmocka_unit_test(continuing_a_chain_equals_computing_it_whole),
        cmocka_unit_test(blocks_above_the_stack_buffer_hash_the_same_way),
        cmocka_unit_test(any_difference_in_the_identity_changes_the_chain),
        cmocka_unit_test(hex_round_trips_and_refuses_anything_else),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
