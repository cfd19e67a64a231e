/* The worker's log: one line an event on stderr, `2026-01-31T12:00:00.123Z level text`. Safe from any thread. */
#pragma once

enum log_level { LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR };
void log_set_level(enum log_level level);
void log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define log_debug(...) log_line(LOG_DEBUG, __VA_ARGS__)
#define log_info(...)  log_line(LOG_INFO, __VA_ARGS__)
#define log_warn(...)  log_line(LOG_WARN, __VA_ARGS__)
#define log_error(...) log_line(LOG_ERROR, __VA_ARGS__)
/* An invariant is broken: logs and exits with status 70. The lease ends, and the gateway routes around this worker. */
_Noreturn void log_fatal(const char *format, ...) __attribute__((format(printf, 1, 2)));
