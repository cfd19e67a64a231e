#include "gpu-worker/engine/ngram.h"
#include <string.h>

void ngram_reset(struct ngram *ngram, uint32_t longest, struct ngram_runs runs)
{
    uint32_t most = runs.longest ? runs.longest : NGRAM_LONGEST, least = runs.shortest ? runs.shortest : NGRAM_SHORTEST;
    uint32_t middle = most;

    while (middle * middle > most * least)
        middle--;
    ngram->len[0] = most;
    ngram->len[1] = middle;
    ngram->len[2] = least;
    ngram->n_known = 0;
    for (ngram->n_slots = 64; ngram->n_slots < longest && ngram->n_slots < NGRAM_SLOTS;)
        ngram->n_slots *= 2;
    for (uint32_t level = 0; level < NGRAM_LEVELS; level++)
        memset(ngram->last[level], 0, ngram->n_slots * sizeof *ngram->last[level]);
}

/* The slot of the run that ends before position `end`. */
static uint32_t slot_of(const struct ngram *ngram, const uint32_t *ids, uint32_t end, uint32_t len)
{
    uint64_t x = len;
    for (uint32_t i = end - len; i < end; i++)
        x = (x ^ ids[i]) * 0x9e3779b97f4a7c15u;
    return (uint32_t)(x >> 40) & (ngram->n_slots - 1);
}

/* All runs that end before n_ids enter; those that end there are what will be looked up. */
static void learn(struct ngram *ngram, const uint32_t *ids, uint32_t n_ids)
{
    for (uint32_t end = ngram->n_known + 1; end < n_ids; end++) {
        for (uint32_t level = 0; level < NGRAM_LEVELS; level++)
            if (end >= ngram->len[level])
                ngram->last[level][slot_of(ngram, ids, end, ngram->len[level])] = end;
        ngram->n_known = end;
    }
}

uint32_t ngram_find(struct ngram *ngram, const uint32_t *ids, uint32_t n_ids, uint32_t *level)
{
    learn(ngram, ids, n_ids);
    for (uint32_t i = 0; i < NGRAM_LEVELS; i++) {
        uint32_t len = ngram->len[i];
        if (n_ids <= len)
            continue;
        uint32_t at = ngram->last[i][slot_of(ngram, ids, n_ids, len)];
        if (at && memcmp(ids + at - len, ids + n_ids - len, len * sizeof *ids) == 0) {
            *level = i;
            return at;
        }
    }
    return 0;
}
