/* Histograms and the Prometheus page. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <pthread.h>
#include <cmocka.h>
#include "gpu-worker/metrics.h"

static void histogram_counts_a_value_on_a_bound_in_that_bucket(void **state)
{
    static const double bounds[] = {1, 2, 4};
    struct histogram h;

    histogram_init(&h, bounds, 3);
    const double values[] = {0, 1, 1.5, 2, 4, 4.5, -1, 0.0 / 0.0};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        histogram_add(&h, values[i]);
    assert_int_equal(h.counts[0], 4); /* 0, 1, and the two that count as 0 */
    assert_int_equal(h.counts[1], 2);
    assert_int_equal(h.counts[2], 1);
    assert_int_equal(h.counts[3], 1);
    assert_int_equal(h.n, 8);
    assert_int_equal(h.sum_micro, 13000000);
}

static void *add_thousand(void *h)
{
    for (int i = 0; i < 1000; i++)
        histogram_add(h, 1.5);
    return NULL;
}

static void histogram_loses_nothing_between_threads(void **state)
{
    static const double bounds[] = {1, 2};
    struct histogram h;
    pthread_t threads[4];

    histogram_init(&h, bounds, 2);
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, add_thousand, &h);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(h.counts[1], 4000);
    assert_int_equal(h.sum_micro, 6000000000ull);
}

/* The value behind the one line that starts with `series`. */
static double value_of(const char *page, const char *series)
{
    for (const char *line = page; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, series, strlen(series)) == 0)
            return strtod(line + strlen(series), NULL);
    }
    fail_msg("no series %s", series);
    return 0;
}

static void page_has_every_series_with_help_type_and_label(void **state)
{
    static struct engine_metrics metrics;
    struct kvg_buf out = {0};

    engine_metrics_init(&metrics);
    metrics.running = 3;
    metrics.blocks_total = 8;
    metrics.blocks_used = 2;
    metrics.finished_length = 5;
    histogram_add(&metrics.rows_per_forward, 40);
    histogram_add(&metrics.rows_per_forward, 1e9);
    engine_metrics_render(&metrics, "a/b-1", &out);
    kvg_buf_add(&out, "", 1);
    assert_false(out.failed);
    assert_true(value_of(out.bytes, "kvgate_num_requests_running{model_name=\"a/b-1\"} ") == 3);
    assert_true(value_of(out.bytes, "kvgate_kv_cache_usage_perc{model_name=\"a/b-1\"} ") == 0.25);
    assert_true(value_of(out.bytes, "kvgate_request_success_total{model_name=\"a/b-1\",finished_reason=\"length\"} ") == 5);
    assert_true(value_of(out.bytes, "kvgate_rows_per_forward_bucket{model_name=\"a/b-1\",le=\"32\"} ") == 0);
    assert_true(value_of(out.bytes, "kvgate_rows_per_forward_bucket{model_name=\"a/b-1\",le=\"48\"} ") == 1);
    assert_true(value_of(out.bytes, "kvgate_rows_per_forward_bucket{model_name=\"a/b-1\",le=\"+Inf\"} ") == 2);
    assert_true(value_of(out.bytes, "kvgate_rows_per_forward_count{model_name=\"a/b-1\"} ") == 2);
    char *rest = out.bytes, *line;
    char name[128] = "";
    while ((line = strsep(&rest, "\n")) && *line) {
        if (strncmp(line, "# HELP ", 7) == 0)
            snprintf(name, sizeof name, "%.*s", (int)strcspn(line + 7, " "), line + 7);
        else if (strncmp(line, "# TYPE ", 7) == 0)
            assert_int_equal(strncmp(line + 7, name, strlen(name)), 0);
        else
            assert_int_equal(strncmp(line, name, strlen(name)), 0);
    }
    kvg_buf_free(&out);
}

static void label_escapes_quotes_and_backslashes(void **state)
{
    static struct engine_metrics metrics;
    struct kvg_buf out = {0};

    engine_metrics_init(&metrics);
    engine_metrics_render(&metrics, "a\"b\\c\nd", &out);
    kvg_buf_add(&out, "", 1);
    assert_non_null(strstr(out.bytes, "{model_name=\"a\\\"b\\\\c\\nd\"}"));
    kvg_buf_free(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(histogram_counts_a_value_on_a_bound_in_that_bucket),
        cmocka_unit_test(histogram_loses_nothing_between_threads),
        cmocka_unit_test(page_has_every_series_with_help_type_and_label),
        cmocka_unit_test(label_escapes_quotes_and_backslashes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
