#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <openssl/sha.h>
#include <stdio.h>
#include <string.h>
#include "redis-schemas/keys.h"
#include "redis-schemas/sha1.h"
#include "redis-schemas/url.h"

static void names_match_the_stated_pattern(void **state)
{
    char longest[KVG_NAME_MAX + 2];
    memset(longest, 'a', sizeof longest);
    assert_true(kvg_name_valid("SmolLM2-135M_v.1/x", 18));
    assert_true(kvg_name_valid(longest, KVG_NAME_MAX));
    assert_false(kvg_name_valid(longest, KVG_NAME_MAX + 1));
    assert_false(kvg_name_valid("", 0));
    for (int c = 0; c < 256; c++) {
        char name[3] = {'a', (char)c, 'b'};
        bool valid = c && c < 128 && strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._/-", c);
        assert_int_equal(kvg_name_valid(name, 3), valid);
        assert_int_equal(kvg_prefix_valid(name, 3), valid || c == ':');
    }
    assert_true(kvg_prefix_valid("", 0));
    assert_true(kvg_prefix_valid(longest, KVG_PREFIX_MAX));
    assert_false(kvg_prefix_valid(longest, KVG_PREFIX_MAX + 1));
}

static void keys_share_the_hash_tag(void **state)
{
    char key[KVG_KEY_MAX];
    struct kvg_hash hash = {{0x0a, 0xf1, 0x22}};
    assert_int_equal(kvg_key_base(key, "kvgate:", "m"), 11);
    assert_string_equal(key, "kvgate:{m}:");
    kvg_key_meta(key, "kvgate:", "m");
    assert_string_equal(key, "kvgate:{m}:meta");
    kvg_key_lease(key, "", "m");
    assert_string_equal(key, "{m}:lease");
    kvg_key_leases(key, "a:b:", "m/1");
    assert_string_equal(key, "a:b:{m/1}:leases");
    kvg_key_load(key, "kvgate:", "m");
    assert_string_equal(key, "kvgate:{m}:load");
    kvg_key_worker(key, "kvgate:", "m", "w1");
    assert_string_equal(key, "kvgate:{m}:w:w1");
    assert_int_equal(kvg_key_own(key, "kvgate:", "m", &hash), strlen("kvgate:{m}:own:0af1"));
    assert_string_equal(key, "kvgate:{m}:own:0af1");
}

static void the_longest_names_fit_a_key(void **state)
{
    char key[KVG_KEY_MAX], prefix[KVG_PREFIX_MAX + 1], name[KVG_NAME_MAX + 1];
    memset(prefix, 'p', KVG_PREFIX_MAX);
    memset(name, 'n', KVG_NAME_MAX);
    prefix[KVG_PREFIX_MAX] = name[KVG_NAME_MAX] = '\0';
    int len = kvg_key_worker(key, prefix, name, name);
    assert_int_equal(len, strlen(key));
}

static void scripts_are_embedded_under_their_sha1(void **state)
{
    for (int i = 0; i < KVG_SCRIPT_COUNT; i++) {
        const struct kvg_script *script = kvg_script((enum kvg_script_id)i);
        uint8_t digest[20];
        char hex[41];
        SHA1((const unsigned char *)script->source, script->len, digest);
        for (int b = 0; b < 20; b++)
            snprintf(hex + 2 * b, 3, "%02x", digest[b]);
        assert_string_equal(hex, script->sha1);
        assert_int_equal(script->len, strlen(script->source));
    }
    assert_string_equal(kvg_script(KVG_SCRIPT_ROUTE)->name, "route");
    assert_string_equal(kvg_script(KVG_SCRIPT_HOLDS)->name, "holds");
}

static void sha1_agrees_with_libcrypto_at_every_length(void **state)
{
    uint8_t bytes[300], own[KVG_SHA1_SIZE], reference[KVG_SHA1_SIZE];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)(i * 37 + 11);
    for (size_t n = 0; n <= sizeof bytes; n++) {
        kvg_sha1(bytes, n, own);
        SHA1(bytes, n, reference);
        assert_memory_equal(own, reference, KVG_SHA1_SIZE);
    }
}

static void rendezvous_scores_equal_the_vectors(void **state)
{
    FILE *file = fopen("tests/golden/rendezvous.json", "r");
    char line[512], hex[33], worker[KVG_NAME_MAX + 1];
    unsigned score;
    int n = 0;
    assert_non_null(file);
    while (fgets(line, sizeof line, file)) {
        struct kvg_hash hash;
        if (sscanf(line, " {\"hash\": \"%32[0-9a-f]\", \"worker\": \"%128[^\"]\", \"score\": %u}", hex, worker, &score) != 3)
            continue;
        assert_int_equal(kvg_hash_parse(hex, &hash), 0);
        assert_int_equal(kvg_rendezvous_score(&hash, worker), score);
        n++;
    }
    fclose(file);
    assert_int_equal(n, 16);
}

static void the_deciding_block_is_within_the_first_1024_tokens(void **state)
{
    assert_int_equal(kvg_rendezvous_block(1, 32), 0);
    assert_int_equal(kvg_rendezvous_block(32, 32), 31);
    assert_int_equal(kvg_rendezvous_block(33, 32), 31);
    assert_int_equal(kvg_rendezvous_block(100000, 16), 63);
    assert_int_equal(kvg_rendezvous_block(3, 512), 1);
}

static void several_servers_and_sentinels_are_taken_apart(void **state)
{
    struct kvg_redis_servers servers = {0};
    struct kvg_redis_url master;
    struct kvg_error err;
    assert_int_equal(kvg_redis_servers_parse("redis://u:a,b@one,redis://[::1]:7/2,unix:/run/x.sock", &servers, &err), 0);
    assert_int_equal(servers.n, 3);
    assert_string_equal(servers.urls[0].password, "a,b");
    assert_string_equal(servers.urls[1].host, "::1");
    assert_string_equal(servers.urls[2].path, "/run/x.sock");
    assert_string_equal(servers.master, "");
    assert_int_equal(kvg_redis_servers_parse("sentinel://a/m", &servers, &err), KVG_INVALID);

    memset(&servers, 0, sizeof servers);
    assert_int_equal(kvg_redis_servers_parse("sentinel://u:p%2f@one,two:7,[::1]/fleet/3", &servers, &err), 0);
    assert_int_equal(servers.n, 3);
    assert_string_equal(servers.master, "fleet");
    assert_int_equal(servers.urls[0].port, 26379);
    assert_int_equal(servers.urls[1].port, 7);
    assert_string_equal(servers.urls[2].host, "::1");
    assert_string_equal(servers.urls[1].password, "");
    assert_int_equal(kvg_redis_master(&servers, "10.0.0.1", "6380", &master, &err), 0);
    assert_string_equal(master.host, "10.0.0.1");
    assert_int_equal(master.port, 6380);
    assert_string_equal(master.user, "u");
    assert_string_equal(master.password, "p/");
    assert_int_equal(master.db, 3);
    assert_string_equal(master.shown, "fleet at 10.0.0.1:6380 db 3");
    assert_int_equal(kvg_redis_master(&servers, "", "6380", &master, &err), KVG_INVALID);
    assert_int_equal(kvg_redis_master(&servers, "a", "x", &master, &err), KVG_INVALID);
    assert_int_equal(kvg_redis_servers_parse("redis://one", &servers, &err), KVG_INVALID);
}

static void wrong_lists_of_servers_are_refused(void **state)
{
    const char *wrong[] = {"",
                           "sentinel://",
                           "sentinel://a",
                           "sentinel://a/",
                           "sentinel:///m",
                           "sentinel://a,,b/m",
                           "sentinel://a:0/m",
                           "sentinel://a/m/x",
                           "sentinel://u@a/m",
                           "redis://a,",
                           "redis://a,b",
                           "redis://a,redis://",
                           "sentinel://1,2,3,4,5,6,7,8,9/m",
                           "redis://1,redis://2,redis://3,redis://4,redis://5,redis://6,redis://7,redis://8,redis://9"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct kvg_redis_servers servers = {0};
        struct kvg_error err;
        if (kvg_redis_servers_parse(wrong[i], &servers, &err) != KVG_INVALID)
            fail_msg("%s is taken", wrong[i]);
    }
}

static void urls_are_taken_apart(void **state)
{
    struct kvg_redis_url url;
    assert_int_equal(kvg_redis_url_parse("redis://127.0.0.1", &url, NULL), 0);
    assert_string_equal(url.host, "127.0.0.1");
    assert_int_equal(url.port, 6379);
    assert_string_equal(url.shown, "127.0.0.1:6379 db 0");
    assert_int_equal(kvg_redis_url_parse("redis://u%3a1:p%40s:x@redis.local:7000/12", &url, NULL), 0);
    assert_string_equal(url.user, "u:1");
    assert_string_equal(url.password, "p@s:x");
    assert_string_equal(url.shown, "redis.local:7000 db 12");
    assert_int_equal(kvg_redis_url_parse("redis://:a@b@[::1]:7/", &url, NULL), 0);
    assert_string_equal(url.password, "a@b");
    assert_string_equal(url.host, "::1");
    assert_int_equal(url.port, 7);
    assert_false(url.tls || url.name[0]);
    assert_int_equal(kvg_redis_url_parse("rediss://u:p@redis.example:6390/2", &url, NULL), 0);
    assert_true(url.tls && url.port == 6390 && url.db == 2);
    assert_string_equal(url.name, "redis.example");
    assert_string_equal(url.shown, "tls redis.example:6390 db 2");
    assert_int_equal(kvg_redis_url_parse("unix:/run/redis.sock?db=3", &url, NULL), 0);
    assert_string_equal(url.path, "/run/redis.sock");
    assert_int_equal(url.db, 3);
    assert_int_equal(kvg_redis_url_parse("unix:///run/redis.sock", &url, NULL), 0);
    assert_string_equal(url.path, "/run/redis.sock");
}

static void wrong_urls_are_refused_without_their_password(void **state)
{
    static const char *const wrong[] = {
        "",
        "redis:",
        "redis://",
        "redis://:6379",
        "redis://h:0",
        "redis://h:65536",
        "redis://h:",
        "redis://h:6x",
        "redis://h/x",
        "redis://h/-1",
        "redis://u@h",
        "redis://:secret%zz@h",
        "redis://[::1",
        "redis://[::1]x",
        "rediss:",
        "rediss://",
        "redisss://h",
        "http://h",
        "unix:relative.sock",
        "unix:/a?db=x",
        "redis://:secret%4@h",
        "redis://:secret%00@h",
        "redis://h:999999999999",
        "unix:/a?x",
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct kvg_redis_url url;
        struct kvg_error err = {0};
        assert_int_equal(kvg_redis_url_parse(wrong[i], &url, &err), KVG_INVALID);
        assert_true(err.message[0] && !strstr(err.message, "secret"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_match_the_stated_pattern),
        cmocka_unit_test(keys_share_the_hash_tag),
        cmocka_unit_test(the_longest_names_fit_a_key),
        cmocka_unit_test(scripts_are_embedded_under_their_sha1),
        cmocka_unit_test(sha1_agrees_with_libcrypto_at_every_length),
        cmocka_unit_test(rendezvous_scores_equal_the_vectors),
        cmocka_unit_test(the_deciding_block_is_within_the_first_1024_tokens),
        cmocka_unit_test(urls_are_taken_apart),
        cmocka_unit_test(several_servers_and_sentinels_are_taken_apart),
        cmocka_unit_test(wrong_lists_of_servers_are_refused),
        cmocka_unit_test(wrong_urls_are_refused_without_their_password),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
