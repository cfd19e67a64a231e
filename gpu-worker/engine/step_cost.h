/* What a step of so many decode rows takes, as measured: the price of drafts.
 *
 * One running mean for each number of rows. Between measured numbers the cost is interpolated; beyond them it grows by a tenth
 * of one row's step for each row, until it is measured. A mean that was not refreshed for a while counts no more, because the
 * speed of a machine changes.
 */
#pragma once
#include <stdbool.h>
#include <stdint.h>

enum { STEP_COST_ROWS = 256 };

struct step_cost {
    double mean[STEP_COST_ROWS + 1];   /* seconds; [rows] */
    uint64_t seen[STEP_COST_ROWS + 1]; /* the step in which it was measured last; 0 = never */
    uint64_t now;                      /* steps measured */
};

/* A step of decode rows alone took so long. */
void step_cost_add(struct step_cost *cost, uint32_t rows, double seconds);
/* Expected, in seconds or in an unknown unit before anything was measured: only ratios count. Never 0. */
double step_cost_of(const struct step_cost *cost, uint32_t rows);
/* Whether the last measurement of `rows` is at most so many steps old. */
bool step_cost_fresh(const struct step_cost *cost, uint32_t rows, uint64_t age);
