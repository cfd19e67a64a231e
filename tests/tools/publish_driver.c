/* A worker without a model: drives the publisher by commands on stdin, one a line, and keeps the set of blocks that an engine
 * would hold. For tests; each command answers one line.
 *
 *   usage: publish_driver URL MODEL WORKER [ADDR [BLOCK_SIZE [QUEUE_BLOCKS [STALL_MS]]]]
 *
 *   store N        N new blocks           -> held count        evict N   the newest N, leaf first  -> held count
 *   churn N SEED   N random stores and evictions, store again and evict again among them           -> held count
 *   held           -> first 20 hex digits of each held block   stats     -> name=value ...
 *   report on|off  whether steps end      drain                load B    backlog tokens in the next reports
 *   seed N         drivers with equal seeds store equal blocks
 *   leave          publisher_close, exit
 */
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "gpu-worker/kv/publish.h"

enum { BLOCKS_MAX = 400000, TICK_MS = 10 };

struct driver {
    struct publisher *publisher;
    struct kvg_hash *held; /* [n] */
    size_t n;
    uint64_t random;
    uint64_t backlog;
    int reporting;
};

static void on_superseded(void *context)
{
    printf("superseded\n");
    fflush(stdout);
    _exit(3);
}

/* splitmix64 (Steele, Lea, Flood 2014) */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* As an engine must: the snapshot before the next event. */
static void answer_snapshot(struct driver *d)
{
    if (publisher_wants_snapshot(d->publisher))
        publisher_snapshot(d->publisher, d->held, d->n);
}

static void store(struct driver *d, size_t count)
{
    for (size_t i = 0; i < count && d->n < BLOCKS_MAX; i++) {
        uint64_t words[2] = {next_random(&d->random), next_random(&d->random)};
        memcpy(d->held[d->n].bytes, words, sizeof words);
        answer_snapshot(d);
        publisher_stored(d->publisher, &d->held[d->n++], 1);
    }
}

static void evict(struct driver *d, size_t count)
{
    for (size_t i = 0; i < count && d->n; i++) {
        answer_snapshot(d);
        publisher_evicted(d->publisher, &d->held[--d->n], 1);
    }
}

/* Stores and evictions of random blocks; now and then a block is told stored twice, or evicted and stored again. */
static void churn(struct driver *d, size_t count, uint64_t seed)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t r = next_random(&seed);
        answer_snapshot(d);
        if (!d->n || r % 8 < 4) {
            store(d, 1);
            continue;
        }
        size_t at = (size_t)(r >> 8) % d->n;
        struct kvg_hash hash = d->held[at];
        if (r % 8 == 4) {
            publisher_stored(d->publisher, &hash, 1);
        } else if (r % 8 == 5) {
            publisher_evicted(d->publisher, &hash, 1);
            publisher_stored(d->publisher, &hash, 1);
        } else {
            publisher_evicted(d->publisher, &hash, 1);
            d->held[at] = d->held[--d->n];
        }
    }
}

static void print_held(const struct driver *d)
{
    for (size_t i = 0; i < d->n; i++) {
        for (int b = 0; b < 10; b++)
            printf("%02x", d->held[i].bytes[b]);
        putchar(' ');
    }
    putchar('\n');
}

static void print_stats(struct driver *d)
{
    struct publisher_stats s;
    publisher_stats(d->publisher, &s);
    printf("connected=%d registered=%d mismatch=%d lease=%" PRIu64 " batches=%" PRIu64 " stored=%" PRIu64 " evicted=%" PRIu64
           " resyncs=%" PRIu64 " dropped=%" PRIu64 " errors=%" PRIu64 "\n",
           s.connected, s.registered, s.mismatch, s.lease, s.batches, s.stored, s.evicted, s.resyncs, s.dropped, s.errors);
}

static void report(struct driver *d)
{
    struct publisher_load load = {.running = 1, .blocks_used = (uint32_t)d->n, .blocks_total = 1000, .backlog = d->backlog};
    if (d->reporting)
        publisher_report(d->publisher, &load);
    answer_snapshot(d);
}

/* One command; 1 = leave. */
static int obey(struct driver *d, char *line)
{
    size_t count;
    uint64_t number;
    char word[16];
    if (sscanf(line, "store %zu", &count) == 1) {
        store(d, count);
        printf("%zu\n", d->n);
    } else if (sscanf(line, "evict %zu", &count) == 1) {
        evict(d, count);
        printf("%zu\n", d->n);
    } else if (sscanf(line, "churn %zu %" SCNu64, &count, &number) == 2) {
        churn(d, count, number);
        printf("%zu\n", d->n);
    } else if (sscanf(line, "seed %" SCNu64, &d->random) == 1) {
        printf("ok\n");
    } else if (sscanf(line, "load %" SCNu64, &d->backlog) == 1) {
        printf("ok\n");
    } else if (sscanf(line, "report %15s", word) == 1) {
        d->reporting = !strcmp(word, "on");
        printf("ok\n");
    } else if (!strncmp(line, "held", 4)) {
        print_held(d);
    } else if (!strncmp(line, "stats", 5)) {
        print_stats(d);
    } else if (!strncmp(line, "drain", 5)) {
        publisher_drain(d->publisher);
        printf("ok\n");
    } else if (!strncmp(line, "leave", 5)) {
        publisher_close(d->publisher);
        printf("ok\n");
        return 1;
    } else {
        printf("unknown command: %s", line);
    }
    fflush(stdout);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 4) {
        fprintf(stderr, "usage: publish_driver URL MODEL WORKER [ADDR [BLOCK_SIZE [QUEUE_BLOCKS [STALL_MS]]]]\n");
        return 2;
    }
    struct publisher_options options = {.redis = argv[1],
                                        .prefix = "kvgate:",
                                        .model = argv[2],
                                        .worker_id = argv[3],
                                        .addr = argc > 4 ? argv[4] : "127.0.0.1:9000",
                                        .version = "0.1.0",
                                        .block_size = argc > 5 ? (uint32_t)atoi(argv[5]) : 32,
                                        .queue_blocks = argc > 6 ? (size_t)atoi(argv[6]) : 0,
                                        .stall_ms = argc > 7 ? (uint32_t)atoi(argv[7]) : 0,
                                        .superseded = on_superseded};
    for (int i = 0; i < 16; i++)
        options.fingerprint.bytes[i] = (uint8_t)((i % 8) * 0x22 + 1);
    struct driver d = {.held = calloc(BLOCKS_MAX, sizeof *d.held), .random = (uint64_t)getpid() << 32, .reporting = 1};
    struct kvg_error err;
    if (!d.held || publisher_open(&d.publisher, &options, &err)) {
        fprintf(stderr, "%s\n", d.held ? err.message : "out of memory");
        free(d.held);
        return 1;
    }
    char line[256];
    size_t len = 0;
    for (;;) {
        struct pollfd in = {.fd = 0, .events = POLLIN};
        report(&d);
        if (poll(&in, 1, TICK_MS) <= 0)
            continue;
        if (len + 1 >= sizeof line || read(0, line + len, 1) != 1)
            return 0;
        if (line[len++] != '\n')
            continue;
        line[len] = '\0';
        len = 0;
        if (obey(&d, line))
            break;
    }
    free(d.held);
    return 0;
}
