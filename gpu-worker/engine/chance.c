#include "gpu-worker/engine/chance.h"

enum {
    TOLD = 12,        /* a sequence's drafts of a level that the others hear of */
    DISPROVEN_BY = 2, /* verifications in a row without an accepted draft */
};
static const double surest[SURE_LEVELS] = {0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98, 2}; /* upper bounds */
static const double window = 50, window_context = 200, window_model = 1000;                     /* drafts that count */
static const double model_at_first = 0.7, drafts_at_first = 12; /* enough to try it where one sequence decodes alone */
static const double weight_of_all = 2.5, weight_of_model = 10;  /* own drafts that what is known of all counts as */

void chance_init(struct chance_all *all)
{
    for (int i = 0; i < CHANCE_LEVELS; i++) {
        double sure = i >= SURE && surest[i - SURE] < 1 ? surest[i - SURE] : 1;
        all->rates[i] = (struct chance_rate){4, i <= BESIDE ? 2 : 4 * sure - 0.1};
    }
    all->rates[BY_MODEL] = (struct chance_rate){drafts_at_first, drafts_at_first * model_at_first};
}

uint32_t chance_level(double sure)
{
    uint32_t i = 0;
    while (sure >= surest[i])
        i++;
    return SURE + i;
}

static double usual(const struct chance_all *all, uint32_t level)
{
    return all->rates[level].accepted / all->rates[level].tried;
}

double chance_of(const struct chance_all *all, const struct chance *own, uint32_t level)
{
    const struct chance_rate *rate = &own->rates[level];
    double expected = usual(all, level), weight = level <= BESIDE ? weight_of_all : weight_of_model;

    if (level <= BESIDE && own->accepted < own->expected)
        expected *= (own->accepted + 1) / (own->expected + 1);
    return (rate->accepted + weight * expected) / (rate->tried + weight);
}

static void learn(struct chance_rate *rate, double length, bool accepted)
{
    rate->tried += 1 - rate->tried / length;
    rate->accepted += accepted - rate->accepted / length;
}

void chance_learn_context(struct chance_all *all, struct chance *own, uint32_t level, uint32_t n_tried, uint32_t n_accepted)
{
    double expected = usual(all, level);

    for (uint32_t i = 0; i < n_tried; i++) {
        bool accepted = i < n_accepted;
        learn(&own->rates[level], window, accepted);
        own->expected += expected - own->expected / window;
        own->accepted += accepted - own->accepted / window;
        if (own->n_told[level] < TOLD) {
            own->n_told[level]++;
            learn(&all->rates[level], window_context, accepted);
        }
    }
    own->failures = n_accepted ? 0 : own->failures + (n_tried > 0);
    own->proven = n_accepted || (own->proven && own->failures < DISPROVEN_BY);
}

void chance_learn_model(struct chance_all *all, struct chance *own, const uint8_t *sure, uint32_t n_tried, uint32_t n_accepted)
{
    for (uint32_t i = 0; i < n_tried; i++) {
        uint32_t levels[] = {BY_MODEL, sure[i]};
        for (int k = 0; k < 2; k++) {
            learn(&own->rates[levels[k]], window, i < n_accepted);
            learn(&all->rates[levels[k]], window_model, i < n_accepted);
        }
    }
}
