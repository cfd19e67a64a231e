/* limits: what this machine can do at most, for the share that a benchmark's rows reach of it. One JSON line on stdout.
 *
 * usage: limits THREADS MEGABYTES...
 *
 *   read: GB/s of all threads together over a buffer of so many MB in huge pages, each thread its own part, again and again as
 *         decoding reads its weights; median pass. A buffer far below the cache's size measures the cache.
 *   vnni, amx_int8, amx_bf16: 10^9 operations a second (a multiply and an add are two) on registers and tiles that stay
 */
#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_THREADS = 256, PASSES = 9, ROUNDS = 9, MIN_BYTES = 256 << 20 };

/* Runs on each thread at once; returns its work in the kernel's unit (bytes or operations). */
typedef double kernel_fn(const char *bytes, size_t n);

struct job {
    pthread_t thread;
    pthread_barrier_t *barrier;
    kernel_fn *kernel;
    const char *bytes;
    size_t n;
    int rounds;
    double work, *times; /* of thread 0: seconds of each round, from barrier to barrier */
};

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static volatile uint64_t sink; /* keeps the results from being optimized away */

static double read_plain(const char *bytes, size_t n)
{
    const uint64_t *words = (const uint64_t *)bytes;
    uint64_t sums[8] = {0};
    for (size_t i = 0; i + 8 <= n / 8; i += 8)
        for (int k = 0; k < 8; k++)
            sums[k] += words[i + k];
    sink = sums[0] ^ sums[1] ^ sums[2] ^ sums[3] ^ sums[4] ^ sums[5] ^ sums[6] ^ sums[7];
    return (double)n;
}

__attribute__((target("avx512f"))) static double read_avx512(const char *bytes, size_t n)
{
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (size_t i = 0; i + 256 <= n; i += 256) {
        _mm_prefetch(bytes + i + 2048, _MM_HINT_T0);
        _mm_prefetch(bytes + i + 2048 + 64, _MM_HINT_T0);
        _mm_prefetch(bytes + i + 2048 + 128, _MM_HINT_T0);
        _mm_prefetch(bytes + i + 2048 + 192, _MM_HINT_T0);
        a = _mm512_add_epi64(a, _mm512_load_si512(bytes + i));
        b = _mm512_add_epi64(b, _mm512_load_si512(bytes + i + 64));
        c = _mm512_add_epi64(c, _mm512_load_si512(bytes + i + 128));
        d = _mm512_add_epi64(d, _mm512_load_si512(bytes + i + 192));
    }
    a = _mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d));
    sink = (uint64_t)_mm512_reduce_add_epi64(a);
    return (double)n;
}

enum { COUNT = 2000000 };

__attribute__((target("avx512f,avx512vnni"))) static double vnni(const char *bytes, size_t n)
{
    __m512i acc[16], x = _mm512_set1_epi8(1), y = _mm512_set1_epi8(2);
    for (int k = 0; k < 16; k++)
        acc[k] = _mm512_setzero_si512();
    for (int i = 0; i < COUNT; i++) {
        for (int k = 0; k < 16; k++)
            acc[k] = _mm512_dpbusd_epi32(acc[k], x, y);
        __asm__ volatile("" : "+v"(x), "+v"(y));
    }
    for (int k = 1; k < 16; k++)
        acc[0] = _mm512_add_epi32(acc[0], acc[k]);
    sink = (uint64_t)_mm512_reduce_add_epi32(acc[0]);
    return COUNT * 16.0 * 64 * 2;
}

/* Eight tiles of 16 rows of 64 bytes: 0..3 add up, 4 and 5 by 6 and 7. */
struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

__attribute__((target("amx-tile"))) static void tiles_start(void)
{
    struct tile_shapes shapes = {.palette = 1};
    static const char zeros[1024];
    for (int i = 0; i < 8; i++)
        shapes.row_bytes[i] = 64, shapes.rows[i] = 16;
    __asm__ volatile("" : : "r"(&shapes) : "memory"); /* gcc 12 knows of only 8 of the bytes that are read next */
    _tile_loadconfig(&shapes);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, zeros, 64);
    _tile_loadd(5, zeros, 64);
    _tile_loadd(6, zeros, 64);
    _tile_loadd(7, zeros, 64);
}

__attribute__((target("amx-tile,amx-int8"))) static double amx_int8(const char *bytes, size_t n)
{
    tiles_start();
    for (int i = 0; i < COUNT / 4; i++) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_release();
    return COUNT / 4 * 4.0 * 16 * 16 * 64 * 2;
}

__attribute__((target("amx-tile,amx-bf16"))) static double amx_bf16(const char *bytes, size_t n)
{
    tiles_start();
    for (int i = 0; i < COUNT / 4; i++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return COUNT / 4 * 4.0 * 16 * 16 * 32 * 2;
}

static void *work(void *arg)
{
    struct job *job = arg;
    for (int i = 0; i < job->rounds; i++) {
        pthread_barrier_wait(job->barrier);
        double start = seconds();
        job->work = job->kernel(job->bytes, job->n);
        pthread_barrier_wait(job->barrier);
        if (job->times)
            job->times[i] = seconds() - start;
    }
    return NULL;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Work a second, in 10^9, of all threads together in the median round. */
static double rate(kernel_fn *kernel, int threads, int rounds, const char *bytes, size_t n)
{
    static struct job jobs[MAX_THREADS];
    pthread_barrier_t barrier;
    double times[256], total = 0;

    pthread_barrier_init(&barrier, NULL, (unsigned)threads);
    size_t part = n / (size_t)threads & ~(size_t)4095;
    for (int i = 0; i < threads; i++) {
        jobs[i] =
            (struct job){.barrier = &barrier, .kernel = kernel, .bytes = bytes + (size_t)i * part, .n = part, .rounds = rounds};
        jobs[i].times = i == 0 ? times : NULL;
        if (pthread_create(&jobs[i].thread, NULL, work, &jobs[i]) != 0)
            exit(1);
    }
    for (int i = 0; i < threads; i++)
        pthread_join(jobs[i].thread, NULL);
    for (int i = 0; i < threads; i++)
        total += jobs[i].work;
    pthread_barrier_destroy(&barrier);
    qsort(times, (size_t)rounds, sizeof *times, ascending);
    return total / times[rounds / 2] * 1e-9;
}

static void print_read(int threads, size_t megabytes)
{
    size_t n = megabytes * 1000 * 1000, huge = (size_t)2 << 20, room = (n + 8192 + huge - 1) / huge * huge;
    char *bytes = aligned_alloc(huge, room);
    if (!bytes)
        exit(1);
    madvise(bytes, room, MADV_HUGEPAGE);
    memset(bytes, 1, room); /* untouched memory is one page of zeros and reads like the nearest cache */
    kernel_fn *kernel = __builtin_cpu_supports("avx512f") ? read_avx512 : read_plain;
    int rounds = n > MIN_BYTES ? PASSES : (int)((size_t)PASSES * MIN_BYTES / (n + 1));
    printf("\"%zu\": %.2f", megabytes, rate(kernel, threads, rounds > 255 ? 255 : rounds | 1, bytes, n));
    free(bytes);
}

static int may_use_tiles(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    unsigned a = 7, b = 0, c = 0, d = 0;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return (d >> 24 & 1) && (d >> 25 & 1) && (d >> 22 & 1) && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

int main(int argc, char **argv)
{
    int threads = argc > 1 ? atoi(argv[1]) : 0;
    if (threads < 1 || threads > MAX_THREADS) {
        fprintf(stderr, "usage: limits THREADS MEGABYTES...\n");
        return 2;
    }
    printf("{\"threads\": %d, \"read\": {", threads);
    for (int i = 2; i < argc; i++) {
        printf(i > 2 ? ", " : "");
        print_read(threads, (size_t)atol(argv[i]));
    }
    printf("}");
    if (__builtin_cpu_supports("avx512vnni"))
        printf(", \"vnni\": %.1f", rate(vnni, threads, ROUNDS, NULL, 0));
    if (may_use_tiles())
        printf(", \"amx_int8\": %.1f, \"amx_bf16\": %.1f", rate(amx_int8, threads, ROUNDS, NULL, 0),
               rate(amx_bf16, threads, ROUNDS, NULL, 0));
    printf("}\n");
    return 0;
}
