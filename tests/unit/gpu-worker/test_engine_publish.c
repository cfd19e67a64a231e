/* The engine and a real Redis: at quiet the claims of the worker's lease equal its tree, also after evictions, after cancelled
 * requests and after Redis has forgotten everything.
 */
#include <signal.h>
#include <sys/wait.h>
#include <hiredis/hiredis.h>
#include "engine_world.h"
#include "gpu-worker/kv/publish.h"
#include "libprompt/block_chain.h"

enum { VOCAB = 256, BLOCK = 16 };

static char toy[64], folder[64], socket_path[96];
static pid_t redis_pid;
static redisContext *redis;

static void pause_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

static void start_redis(void)
{
    snprintf(folder, sizeof folder, "/tmp/kvgate-publish-XXXXXX");
    assert_non_null(mkdtemp(folder));
    snprintf(socket_path, sizeof socket_path, "%s/redis.sock", folder);
    redis_pid = fork();
    if (redis_pid == 0) {
        execlp("redis-server", "redis-server", "--port", "0", "--unixsocket", socket_path, "--save", "", "--dir", folder,
               "--logfile", "redis.log", (char *)NULL);
        _exit(127);
    }
    for (int i = 0; i < 200; i++, pause_ms(50)) {
        redis = redisConnectUnix(socket_path);
        if (redis && !redis->err)
            return;
        redisFree(redis);
    }
    fail_msg("redis-server does not start");
}

/* Claims under any lease: the fields of all own buckets. */
static size_t count_claims(void)
{
    size_t n = 0;
    redisReply *keys = redisCommand(redis, "KEYS kvgate:{toy}:own:*");

    for (size_t i = 0; i < keys->elements; i++) {
        redisReply *fields = redisCommand(redis, "HLEN %s", keys->element[i]->str);
        n += (size_t)fields->integer;
        freeReplyObject(fields);
    }
    freeReplyObject(keys);
    return n;
}

static bool is_claimed(const struct kvg_hash *hash)
{
    char hex[KVG_HASH_HEX + 1], bucket[64], field[17];

    kvg_hash_hex(hash, hex);
    snprintf(bucket, sizeof bucket, "kvgate:{toy}:own:%.4s", hex);
    snprintf(field, sizeof field, "%.16s", hex + 4);
    redisReply *reply = redisCommand(redis, "HEXISTS %s %s", bucket, field);
    bool claimed = reply->integer == 1;
    freeReplyObject(reply);
    return claimed;
}

static void wait_claims(struct world *w)
{
    check_engine(w);
    size_t want = engine_metrics(w->engine)->blocks_cached, have = 0;
    for (int i = 0; i < 200; i++, pause_ms(50))
        if ((have = count_claims()) == want)
            return;
    fail_msg("%zu claims, but the tree has %zu blocks", have, want);
}

/* The leading whole blocks of ids[n] that are claimed; what follows the first gap must not be. */
static size_t claimed_prefix(struct world *w, const uint32_t *ids, size_t n)
{
    struct kvg_hash seed, chain[64];
    struct kvg_chain_identity identity = {
        .model = "toy", .fingerprint = *kvg_prompt_model_fingerprint(w->prompt_model), .block_size = BLOCK};
    size_t n_blocks, depth = 0;

    kvg_chain_seed(&identity, &seed);
    n_blocks = kvg_chain_extend(&seed, ids, n, BLOCK, chain);
    while (depth < n_blocks && is_claimed(&chain[depth]))
        depth++;
    for (size_t i = depth; i < n_blocks; i++)
        assert_false(is_claimed(&chain[i]));
    return depth;
}

static void claims_equal_the_tree_at_quiet(void **state)
{
    static struct call calls[8];
    static uint32_t ids[8][300];
    struct engine_params params = default_params(30);
    struct publisher_options options = {
        .prefix = "kvgate:", .model = "toy", .worker_id = "w1", .addr = "127.0.0.1:1", .version = "test", .block_size = BLOCK};
    struct kvg_prompt_model *prompt_model;
    struct kvg_error err;
    struct world w;
    char url[256];

    snprintf(url, sizeof url, "unix:%s", socket_path);
    options.redis = url;
    assert_int_equal(kvg_prompt_model_open(&prompt_model, toy, 0, &err), 0);
    options.fingerprint = *kvg_prompt_model_fingerprint(prompt_model);
    kvg_prompt_model_close(prompt_model);
    if (publisher_open(&the_publisher, &options, &err) < 0)
        fail_msg("%s", err.message);
    open_world(&w, toy, (struct engine_options){.num_kv_blocks = 60, .block_size = BLOCK, .max_num_batched_tokens = 128});
    for (uint64_t round = 0; round < 6; round++) {
        for (uint64_t i = 0; i < 8; i++) {
            make_ids(ids[i], 300, 64, round * 8 + i, VOCAB);
            start_call(&w, &calls[i], ids[i], 100 + 20 * i, &params);
        }
        engine_cancel(w.engine, calls[round].id);
        for (int i = 0; i < 8; i++)
            wait_call(&calls[i]);
        if (round == 3)
            freeReplyObject(redisCommand(redis, "FLUSHALL"));
        wait_claims(&w);
        for (size_t i = 0; i < 8; i++)
            claimed_prefix(&w, ids[i], 100 + 20 * i);
    }
    run_call(&w, &calls[0], ids[0], 290, &params);
    wait_claims(&w);
    assert_int_equal(claimed_prefix(&w, ids[0], 290), 290 / BLOCK);
    assert_true(engine_metrics(w.engine)->evicted_blocks > 0);
    close_world(&w);
    publisher_close(the_publisher);
}

static int set_up(void **state)
{
    write_toy(toy, "random --layers 2 --hidden 64 --heads 4 --kv-heads 2 --ffn 96 --context 1024");
    start_redis();
    return 0;
}

static int tear_down(void **state)
{
    char command[256];

    redisFree(redis);
    kill(redis_pid, SIGTERM);
    waitpid(redis_pid, NULL, 0);
    snprintf(command, sizeof command, "rm -r %s %s", folder, toy);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(claims_equal_the_tree_at_quiet)};
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
