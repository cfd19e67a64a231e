#include "gpu-worker/tools/parallel.h"
#include <pthread.h>
#include <unistd.h>

enum { MOST = 256 };

struct range {
    pthread_t thread;
    void (*body)(void *context, uint64_t first, uint64_t last);
    void *context;
    uint64_t first, last;
};

static void *run(void *argument)
{
    struct range *range = argument;
    range->body(range->context, range->first, range->last);
    return NULL;
}

void parallel_ranges(uint32_t threads, uint64_t n, void (*body)(void *context, uint64_t first, uint64_t last), void *context)
{
    struct range ranges[MOST];
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    uint64_t parts = threads ? threads : cores > 0 ? (uint64_t)cores : 1, started = 1;

    parts = parts > MOST ? MOST : parts;
    parts = parts > n ? n : parts;
    if (parts == 0)
        return;
    for (uint64_t i = 0; i < parts; i++)
        ranges[i] = (struct range){0, body, context, n * i / parts, n * (i + 1) / parts};
    while (started < parts && pthread_create(&ranges[started].thread, NULL, run, &ranges[started]) == 0)
        started++;
    run(&ranges[0]);
    for (uint64_t i = started; i < parts; i++) /* no thread for these */
        run(&ranges[i]);
    for (uint64_t i = 1; i < started; i++)
        pthread_join(ranges[i].thread, NULL);
}
