/* Collectives over shared memory, with real processes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>
#include "gpu-worker/backend/comm.h"
#include "gpu-worker/backend/cpu/thread_pool.h"
#include "tests/unit/gpu-worker/rank_group.h"

enum { SLOT = 1 << 18 }; /* floats of a round, see comm_shm.c */

/* Values whose sums depend on the order in which they are added. */
static float value_of(uint32_t rank, size_t i)
{
    uint32_t x = (uint32_t)i * 2654435761u + rank * 40503u + 12345u;
    x ^= x >> 15;
    return ((float)(x % 2001) - 1000) * (x & 64 ? 1e-4f : 1.0f);
}

static float sum_of(uint32_t size, size_t i)
{
    float sum = value_of(0, i);
    for (uint32_t r = 1; r < size; r++)
        sum += value_of(r, i);
    return sum;
}

static void run_on_pool(void *pool, uint32_t n, uint32_t chunk, comm_item item, void *arg)
{
    thread_pool_for(pool, n, chunk, item, arg);
}

static int reduce_sizes(struct comm *comm, void *threads)
{
    static const size_t sizes[] = {0, 1, 2, 4095, 4096, 4097, 100000, SLOT, SLOT + 1, 2 * SLOT + 4099};
    float *data = malloc((2 * SLOT + 4099) * sizeof *data);
    struct thread_pool *pool = threads ? thread_pool_open(2) : NULL;
    comm->run = pool ? run_on_pool : NULL;
    comm->context = pool;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (size_t i = 0; i < sizes[s]; i++)
            data[i] = value_of(comm->rank, i);
        rank_check(comm->ops->all_reduce(comm, data, sizes[s], NULL) == 0);
        for (size_t i = 0; i < sizes[s]; i++) {
            float want = sum_of(comm->size, i);
            rank_check(memcmp(&data[i], &want, sizeof want) == 0);
        }
    }
    thread_pool_close(pool);
    free(data);
    return 0;
}

static void test_all_reduce_adds_in_the_order_of_ranks_on_every_rank(void **unused)
{
    int threads = 1;
    for (uint32_t size = 1; size <= 4; size++)
        assert_int_equal(run_ranks(size, reduce_sizes, NULL), 0);
    assert_int_equal(run_ranks(2, reduce_sizes, &threads), 0);
}

static int gather_shapes(struct comm *comm, void *unused)
{
    static const uint32_t shapes[][2] = {{1, 1}, {1, 7}, {3, 10}, {5, 4}, {64, 1000}, {33, 32003}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        uint32_t rows = shapes[s][0], cols = shapes[s][1], first, width;
        comm_share(cols, 1, comm->size, comm->rank, &first, &width);
        float *part = malloc(((size_t)rows * width + 1) * sizeof *part),
              *out = comm->rank ? NULL : calloc(rows, cols * sizeof *out);
        for (uint32_t r = 0; r < rows; r++)
            for (uint32_t c = 0; c < width; c++)
                part[(size_t)r * width + c] = (float)(r * cols + first + c);
        rank_check(comm->ops->gather(comm, part, out, rows, cols, NULL) == 0);
        for (uint32_t i = 0; i < rows * cols && !comm->rank; i++)
            rank_check(out[i] == (float)i);
        free(part);
        free(out);
    }
    return 0;
}

static void test_gather_puts_the_columns_of_each_rank_in_their_place(void **unused)
{
    for (uint32_t size = 1; size <= 5; size++)
        assert_int_equal(run_ranks(size, gather_shapes, NULL), 0);
}

static int tell_all(struct comm *comm, void *unused)
{
    static const size_t sizes[] = {1, 32, 4 * SLOT, 4 * SLOT + 3, 9 * SLOT};
    uint8_t *data = malloc(9 * SLOT), records[COMM_MOST_RANKS * 3];
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (size_t i = 0; i < sizes[s]; i++)
            data[i] = comm->rank ? 0 : (uint8_t)(i * 7 + i / 251 + s);
        rank_check(comm->ops->broadcast(comm, data, sizes[s], NULL) == 0);
        for (size_t i = 0; i < sizes[s]; i++)
            rank_check(data[i] == (uint8_t)(i * 7 + i / 251 + s));
    }
    uint8_t mine[3] = {(uint8_t)comm->rank, 17, (uint8_t)(comm->rank * 3)};
    rank_check(comm->ops->exchange(comm, mine, records, sizeof mine, NULL) == 0);
    for (uint32_t r = 0; r < comm->size; r++)
        rank_check(records[3 * r] == r && records[3 * r + 1] == 17 && records[3 * r + 2] == r * 3);
    rank_check(comm->ops->exchange(comm, data, data, COMM_RECORD + 1, NULL) == KVG_INVALID);
    free(data);
    return 0;
}

static void test_broadcast_and_exchange_reach_every_rank(void **unused)
{
    for (uint32_t size = 1; size <= 4; size++)
        assert_int_equal(run_ranks(size, tell_all, NULL), 0);
}

static int agree(struct comm *comm, void *unused)
{
    struct kvg_error err = {0};
    rank_check(comm_agree(comm, 0, &err) == 0);
    int failed = comm->rank >= 1 ? kvg_fail(&err, KVG_FILE, "file %u is gone", comm->rank) : 0;
    rank_check(comm_agree(comm, failed, &err) == KVG_FILE);
    rank_check(strcmp(err.message, comm->rank == 1 ? "file 1 is gone" : "rank 1: file 1 is gone") == 0);
    rank_check(comm_agree(comm, 0, &err) == 0);
    return 0;
}

static void test_ranks_agree_on_the_first_failure(void **unused)
{
    struct kvg_error err = {0};
    assert_int_equal(run_ranks(3, agree, NULL), 0);
    assert_int_equal(comm_agree(NULL, 0, &err), 0);
    assert_int_equal(comm_agree(NULL, KVG_NOMEM, &err), KVG_NOMEM);
}

/* The mistake is planted here: rank 1 leaves out one of its sums. */
static int skip_a_reduce(struct comm *comm, void *unused)
{
    float data[8] = {0}, logits[16] = {0};
    struct kvg_error err = {0};
    int failed = 0;
    for (int layer = 0; layer < 4 && !failed; layer++)
        if (comm->rank != 1 || layer != 2)
            failed = comm->ops->all_reduce(comm, data, 8, &err);
    if (!failed)
        failed = comm->ops->gather(comm, data, logits, 2, 8, &err);
    rank_check(failed == KVG_INVALID);
    rank_check(strcmp(err.message, "tensor parallelism: rank 0 is in all_reduce of 8, rank 1 in gather of 16") == 0);
    rank_check(comm->ops->broadcast(comm, data, 4, &err) == KVG_INVALID); /* and nobody waits for anybody any more */
    return 0;
}

static void test_a_rank_that_skips_its_reduce_is_named_on_every_rank(void **unused)
{
    assert_int_equal(run_ranks(2, skip_a_reduce, NULL), 0);
    assert_int_equal(run_ranks(3, skip_a_reduce, NULL), 0);
}

/* Ranks that come late by turns, so that they sleep, spin and meet in every order. */
static int many_rounds(struct comm *comm, void *unused)
{
    unsigned seed = comm->rank + 1;
    for (uint32_t round = 0; round < 3000; round++) {
        float data[3] = {(float)comm->rank, (float)round, 1};
        uint32_t word = comm->rank ? 0 : round;
        if (rand_r(&seed) % 50 == 0) {
            struct timespec late = {.tv_nsec = rand_r(&seed) % 400000};
            nanosleep(&late, NULL);
        }
        rank_check(comm->ops->all_reduce(comm, data, 3, NULL) == 0);
        rank_check(data[0] == (float)(comm->size * (comm->size - 1) / 2) && data[1] == (float)round * (float)comm->size &&
                   data[2] == (float)comm->size);
        rank_check(round % 7 || (comm->ops->broadcast(comm, &word, sizeof word, NULL) == 0 && word == round));
    }
    return 0;
}

static void test_no_round_mixes_with_another(void **unused)
{
    assert_int_equal(run_ranks(2, many_rounds, NULL), 0);
    assert_int_equal(run_ranks(3, many_rounds, NULL), 0);
}

static void test_shares_cover_all_in_whole_units(void **unused)
{
    static const uint32_t cases[][3] = {{4864, 256, 2}, {4864, 32, 2}, {10, 1, 3}, {3, 1, 4}, {100, 32, 2}, {4096, 256, 8}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        uint32_t total = cases[c][0], unit = total % cases[c][1] ? 1 : cases[c][1], at = 0, first, count;
        for (uint32_t r = 0; r < cases[c][2]; r++, at += count) {
            comm_share(total, cases[c][1], cases[c][2], r, &first, &count);
            assert_int_equal(first, at);
            assert_int_equal(count % unit, 0);
            assert_in_range(count, total / unit / cases[c][2] * unit, (total / unit / cases[c][2] + 1) * unit);
        }
        assert_int_equal(at, total);
    }
}

static void test_groups_of_no_or_too_many_ranks_are_refused(void **unused)
{
    struct comm_shared *shared;
    struct comm *comm;
    struct kvg_error err;
    assert_int_equal(comm_shm_create(&shared, 0, &err), KVG_INVALID);
    assert_int_equal(comm_shm_create(&shared, COMM_MOST_RANKS + 1, &err), KVG_INVALID);
    assert_string_equal(err.message, "a group of 65 ranks; 1 to 64 are possible");
    assert_int_equal(comm_shm_create(&shared, 2, &err), 0);
    assert_int_equal(comm_shm_join(&comm, shared, 2, &err), KVG_INVALID);
    comm_shm_free(shared);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shares_cover_all_in_whole_units),
        cmocka_unit_test(test_groups_of_no_or_too_many_ranks_are_refused),
        cmocka_unit_test(test_all_reduce_adds_in_the_order_of_ranks_on_every_rank),
        cmocka_unit_test(test_gather_puts_the_columns_of_each_rank_in_their_place),
        cmocka_unit_test(test_broadcast_and_exchange_reach_every_rank),
        cmocka_unit_test(test_ranks_agree_on_the_first_failure),
        cmocka_unit_test(test_a_rank_that_skips_its_reduce_is_named_on_every_rank),
        cmocka_unit_test(test_no_round_mixes_with_another),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
