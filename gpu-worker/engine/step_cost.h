/* What a step of so many rows takes, as measured: the price of drafts.
 *
 * One running mean, of STEP_COST_MEAN measurements, for each number of rows up to STEP_COST_EXACT, and for each sixteenth of a
 * doubling above. Between measured numbers the cost is interpolated; beyond them it grows by a tenth of one row's step for each
 * row, until it is measured. A mean that was not refreshed for a while counts no more, because the speed of a machine changes;
 * one measurement far above what was expected counts for less long, because it may have been an interruption.
 */
#pragma once
#include <stdbool.h>
#include <stdint.h>

enum { STEP_COST_EXACT = 64, STEP_COST_BINS = STEP_COST_EXACT + 16 * 12, STEP_COST_MEAN = 8 };

struct step_cost {
    double mean[STEP_COST_BINS];   /* seconds; see bin_of */
    uint64_t seen[STEP_COST_BINS]; /* the step in which it was measured last; 0 = never */
    uint8_t n[STEP_COST_BINS];     /* measurements that the mean is of, up to STEP_COST_MEAN */
    bool doubted[STEP_COST_BINS];  /* it is of one that was far above what was expected */
    uint64_t now;                  /* steps measured */
};

/* A step of so many rows took so long. */
void step_cost_add(struct step_cost *cost, uint32_t rows, double seconds);
/* Expected, in seconds or in an unknown unit before anything was measured: only ratios count. Never 0. */
double step_cost_of(const struct step_cost *cost, uint32_t rows);
/* What one more row takes at least: measured differences are small beside what a step's time varies by, and often below 0. */
double step_cost_of_row(const struct step_cost *cost, uint32_t rows);
/* Whether the last measurement of `rows`, or above STEP_COST_EXACT of about as many, is at most so many steps old. */
bool step_cost_fresh(const struct step_cost *cost, uint32_t rows, uint64_t age);
