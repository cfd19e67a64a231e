/* The engine's clock. */
#pragma once
#include <time.h>

/* Seconds, monotonic. */
static inline double clock_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}
