#include "gpu-worker/tools/progress.h"
#include <stdio.h>
#include <time.h>
#include <unistd.h>

enum { WIDTH = 30 };

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void show(struct progress_bar *bar, double now)
{
    char filled[WIDTH + 1];
    double share = bar->total ? (double)bar->done / (double)bar->total : 1, spent = now - bar->began;
    for (int i = 0; i < WIDTH; i++)
        filled[i] = i < share * WIDTH ? '#' : '.';
    filled[WIDTH] = '\0';
    fprintf(stderr, "%s%s [%s] %3.0f %%, %.0f s", bar->terminal ? "\r\x1b[K" : "", bar->title, filled, 100 * share, spent);
    if (share > 0 && share < 1)
        fprintf(stderr, ", %.0f s left", spent / share * (1 - share));
    if (!bar->terminal)
        fputc('\n', stderr);
    fflush(stderr);
    bar->shown = now;
}

void progress_begin(struct progress_bar *bar, const char *title, uint64_t total)
{
    double now = seconds();
    *bar = (struct progress_bar){title, 0, total, now, now, isatty(STDERR_FILENO)};
}

void progress_advance(struct progress_bar *bar, uint64_t work)
{
    double now = seconds();
    bar->done += work;
    if (now - bar->shown >= (bar->terminal ? 0.2 : 10))
        show(bar, now);
}

void progress_end(struct progress_bar *bar)
{
    show(bar, seconds());
    if (bar->terminal)
        fputc('\n', stderr);
}
