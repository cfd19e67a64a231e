/* The processes of a tensor-parallel group (--tensor-parallel-size). The worker is rank 0, and forks the others:
 *
 *   rank 0      HTTP, Redis, scheduler, drafts, its share of the model     watches the others: one that ends, ends the worker
 *   rank 1..    its share of the model, as rank 0 orders (model_follow)    is killed by the kernel when rank 0 ends
 *
 * So no rank waits long for one that is gone, whatever it was doing. Ranks other than 0 end by themselves only when rank 0 has
 * told their model to (model_close). */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "libprompt/error.h"

struct comm;
struct ranks;

/* Forks size - 1 processes; before the first thread. Returns in each of them: see ranks_comm()->rank. With size 1 nothing is
 * forked, and *out is NULL. */
int ranks_start(struct ranks **out, uint32_t size, struct kvg_error *err);
/* This process's place in the group; NULL without one. */
struct comm *ranks_comm(const struct ranks *ranks);
/* Whether this process is rank 0, or there is no group. */
bool ranks_lead(const struct ranks *ranks);
/* Rank 0: the others end, by themselves where their model was told to (model_close), else by force. */
void ranks_end(struct ranks *ranks, bool told);
