#include "gpu-worker/engine/copied.h"

static uint32_t swapped(const struct copied *copy, uint32_t id)
{
    for (uint32_t i = 0; i < COPIED_SWAPS; i++)
        if (copy->swaps[i].from == id && copy->swaps[i].to != id)
            return copy->swaps[i].to;
    return id;
}

void copied_draft(struct copied *copy, uint32_t *ids, uint32_t n_ids, uint32_t at, uint32_t n)
{
    copy->offset = n_ids - at;
    for (uint32_t i = 0; i < n; i++)
        ids[n_ids + i] = at + i < n_ids ? swapped(copy, ids[at + i]) : ids[at + i];
}

static void add_swap(struct copied *copy, struct copied_swap swap)
{
    copy->swaps[copy->n_swaps++ % COPIED_SWAPS] = swap;
}

static void forget_swap(struct copied *copy, uint32_t from)
{
    for (uint32_t i = 0; i < COPIED_SWAPS; i++)
        if (copy->swaps[i].from == from)
            copy->swaps[i] = (struct copied_swap){0};
}

/* A change is believed only when the copy goes on right behind it, which it does not where tokens were put in or left out. */
void copied_verified(struct copied *copy, const uint32_t *ids, uint32_t n_ids, uint32_t n_accepted)
{
    uint32_t last = n_ids - 1, from = ids[last - copy->offset], to = ids[last];

    if (copy->seen.from != copy->seen.to && n_accepted && copy->seen_at + 1 == last - n_accepted)
        add_swap(copy, copy->seen);
    copy->seen = (struct copied_swap){0};
    if (swapped(copy, from) == to)
        return;
    forget_swap(copy, from);
    copy->seen = (struct copied_swap){from, to};
    copy->seen_at = last;
}
