#include "gpu-worker/engine/step_cost.h"

enum { STALE = 1024 };
static const double newest_share = 0.2, most_jump = 2, price_of_row = 0.1;

void step_cost_add(struct step_cost *cost, uint32_t rows, double seconds)
{
    if (rows == 0 || rows > STEP_COST_ROWS || !(seconds > 0))
        return;
    cost->now++;
    double *mean = &cost->mean[rows];
    if (!step_cost_fresh(cost, rows, STALE))
        *mean = seconds;
    else if (seconds > most_jump * *mean) /* an interruption */
        seconds = most_jump * *mean;
    *mean += newest_share * (seconds - *mean);
    cost->seen[rows] = cost->now;
}

bool step_cost_fresh(const struct step_cost *cost, uint32_t rows, uint64_t age)
{
    return rows <= STEP_COST_ROWS && cost->seen[rows] && cost->now - cost->seen[rows] <= age;
}

static double guess(double rows)
{
    return 1 + price_of_row * (rows - 1);
}

double step_cost_of(const struct step_cost *cost, uint32_t rows)
{
    uint32_t below = rows < STEP_COST_ROWS ? rows : STEP_COST_ROWS, above = rows;

    while (below && !step_cost_fresh(cost, below, STALE))
        below--;
    while (above <= STEP_COST_ROWS && !step_cost_fresh(cost, above, STALE))
        above++;
    bool ceiling = above <= STEP_COST_ROWS;
    if (!below && !ceiling)
        return guess(rows);
    if (below == rows)
        return cost->mean[rows];
    if (!ceiling)
        return cost->mean[below] * guess(rows) / guess(below);
    if (!below)
        return cost->mean[above] * guess(rows) / guess(above);
    double share = (double)(rows - below) / (above - below);
    return cost->mean[below] + share * (cost->mean[above] - cost->mean[below]);
}
