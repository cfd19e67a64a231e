#include "gpu-worker/log.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static _Atomic enum log_level least = LOG_INFO;
static const char *const names[] = {"debug", "info", "warn", "error"};

void log_set_level(enum log_level level)
{
    least = level;
}

/* One fwrite a line, so that lines of different threads never mix. */
static void write_line(const char *level, const char *format, va_list args)
{
    char line[2048];
    struct timespec now;
    struct tm tm;

    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &tm);
    size_t n = strftime(line, sizeof line, "%Y-%m-%dT%H:%M:%S", &tm);
    n += (size_t)snprintf(line + n, sizeof line - n, ".%03ldZ %s ", now.tv_nsec / 1000000, level);
    int more = vsnprintf(line + n, sizeof line - n - 1, format, args);
    if (more > 0)
        n += (size_t)more;
    if (n > sizeof line - 2)
        n = sizeof line - 2;
    line[n++] = '\n';
    fwrite(line, 1, n, stderr);
}

void log_line(enum log_level level, const char *format, ...)
{
    if (level < least)
        return;
    va_list args;
    va_start(args, format);
    write_line(names[level], format, args);
    va_end(args);
}

void log_fatal(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    write_line("fatal", format, args);
    va_end(args);
    exit(70);
}
