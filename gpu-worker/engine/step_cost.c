#include "gpu-worker/engine/step_cost.h"

enum {
    STALE = 1024,        /* steps that a mean counts */
    STALE_DOUBTED = 128, /* the same of one measurement far above what was expected */
    ABOUT = 4,           /* bins to either side that are about as many: a quarter */
    MANY = 6,
};
static const double most_jump = 2, most_guessed = 4; /* times what is expected, by its own mean or by those of others */
static const double price_of_row = 0.1;

static uint32_t bin_of(uint32_t rows)
{
    uint32_t doublings = 0;

    if (rows < STEP_COST_EXACT)
        return rows;
    while (rows >> doublings >= 2 * STEP_COST_EXACT)
        doublings++;
    uint32_t bin = STEP_COST_EXACT + 16 * doublings + ((rows >> doublings) - STEP_COST_EXACT) / (STEP_COST_EXACT / 16);
    return bin < STEP_COST_BINS ? bin : STEP_COST_BINS - 1;
}

/* Of the rows in a bin, the middle. */
static double rows_of(uint32_t bin)
{
    if (bin < STEP_COST_EXACT)
        return bin;
    uint32_t doublings = (bin - STEP_COST_EXACT) / 16, part = (bin - STEP_COST_EXACT) % 16, width = STEP_COST_EXACT / 16;
    return (double)(1u << doublings) * (STEP_COST_EXACT + part * width + (width - 1) / 2.0);
}

static bool fresh(const struct step_cost *cost, uint32_t bin, uint64_t age)
{
    return cost->seen[bin] && cost->now - cost->seen[bin] <= age;
}

/* Whether the bin's mean counts. A number of rows that looks dear is not measured again while that is believed. */
static bool believed(const struct step_cost *cost, uint32_t bin)
{
    return fresh(cost, bin, cost->doubted[bin] ? STALE_DOUBTED : STALE);
}

void step_cost_add(struct step_cost *cost, uint32_t rows, double seconds)
{
    uint32_t bin = bin_of(rows);

    if (rows == 0 || !(seconds > 0))
        return;
    bool first = !fresh(cost, bin, STALE);
    double *mean = &cost->mean[bin], expected = step_cost_of(cost, rows), most = (first ? most_guessed : most_jump) * expected;
    cost->doubted[bin] = first && cost->now && seconds > most_jump * expected;
    if (cost->now++ && seconds > most) /* an interruption */
        seconds = most;
    if (first)
        cost->n[bin] = 0;
    cost->n[bin] += cost->n[bin] < STEP_COST_MEAN;
    *mean += (seconds - *mean) / cost->n[bin];
    cost->seen[bin] = cost->now;
}

bool step_cost_fresh(const struct step_cost *cost, uint32_t rows, uint64_t age)
{
    uint32_t bin = bin_of(rows), about = bin < STEP_COST_EXACT ? 0 : ABOUT;

    for (uint32_t i = bin - about; i <= bin + about && i < STEP_COST_BINS; i++)
        if (fresh(cost, i, age))
            return true;
    return false;
}

/* What one more row is assumed to take, as a share of the cost of so many: few hardly cost more than one, and of many three
 * quarters of each one's share. */
static double share_of_row(double rows)
{
    return rows < MANY ? price_of_row / (1 + price_of_row * (rows - 1)) : 0.75 / rows;
}

/* Of more rows than were measured, by those that were. */
static double beyond(double cost, double measured, double rows)
{
    return cost * (1 + share_of_row(measured) * (rows - measured));
}

static double guess(double rows)
{
    return 1 + price_of_row * (rows - 1);
}

double step_cost_of(const struct step_cost *cost, uint32_t rows)
{
    uint32_t bin = bin_of(rows), below = bin, above = bin;

    while (below && !believed(cost, below))
        below--;
    while (above < STEP_COST_BINS && !believed(cost, above))
        above++;
    bool ceiling = above < STEP_COST_BINS;
    if (!below && !ceiling)
        return guess(rows);
    if (below == bin && bin < STEP_COST_EXACT)
        return cost->mean[bin];
    if (!ceiling || below == above)
        return beyond(cost->mean[below], rows_of(below), rows);
    if (!below)
        return cost->mean[above] * guess(rows) / guess(rows_of(above));
    double share = (rows - rows_of(below)) / (rows_of(above) - rows_of(below));
    return cost->mean[below] + share * (cost->mean[above] - cost->mean[below]);
}

double step_cost_of_row(const struct step_cost *cost, uint32_t rows)
{
    double now = step_cost_of(cost, rows), measured = step_cost_of(cost, rows + 1) - now, least = share_of_row(rows) / 2 * now;
    return measured > least ? measured : least;
}
