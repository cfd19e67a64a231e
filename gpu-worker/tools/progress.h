/* A bar with the time left on stderr: redrawn on a terminal, elsewhere a line each ten seconds. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

struct progress_bar {
    const char *title;
    uint64_t done, total; /* in any unit of work */
    double began, shown;  /* seconds */
    bool terminal;
};

void progress_begin(struct progress_bar *bar, const char *title, uint64_t total);
void progress_advance(struct progress_bar *bar, uint64_t work);
void progress_end(struct progress_bar *bar);
