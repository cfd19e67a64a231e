/* What the ranks of a tensor-parallel group do together, behind one table, as Shoeybi et al. (Megatron-LM, arXiv 1909.08053)
 * split a layer: each rank multiplies its own rows of q, k, v, gate and up, then its own columns of the matrices after them,
 * whose products are added over the group.
 *
 *   control, in host memory      broadcast, exchange         steps, sizes, who failed         comm_shm
 *   data, where tensors are      all_reduce, gather          sums of products, logits         comm_shm (CPU), NCCL (CUDA)
 *
 * Every rank makes the same calls with the same sizes in the same order, on one thread at a time. A call returns 0, or an error
 * on every rank that took part: the group is then of no use any more. A rank that has died is not noticed here: the others wait
 * for it until their processes end (ranks.h).
 */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include "libprompt/error.h"

enum { COMM_MOST_RANKS = 64 };

struct comm;

struct comm_ops {
    /* data[0..n) becomes its sum over the ranks, the same bits on all of them. comm_shm adds in the order of ranks: the same bits
     * in each run, whatever n is. */
    int (*all_reduce)(struct comm *comm, float *data, size_t n, struct kvg_error *err);
    /* Rank 0's out [rows, cols] = the ranks' parts side by side; part [rows, the columns that comm_share gives the rank]. Others
     * pass NULL for out. */
    int (*gather)(struct comm *comm, const float *part, float *out, size_t rows, uint32_t cols, struct kvg_error *err);
    /* Rank 0's bytes to all. NULL in a table for device memory, as is the next. */
    int (*broadcast)(struct comm *comm, void *data, size_t bytes, struct kvg_error *err);
    /* all[rank * bytes..] = the rank's own `mine`; bytes up to COMM_RECORD. */
    int (*exchange)(struct comm *comm, const void *mine, void *all, size_t bytes, struct kvg_error *err);
    void (*close)(struct comm *comm);
};

enum { COMM_RECORD = 1024 };

/* Items 0..n in pieces of at most `chunk`, as thread_pool_for runs them. */
typedef void (*comm_item)(void *arg, uint32_t thread, uint32_t first, uint32_t end);

struct comm {
    const struct comm_ops *ops;
    uint32_t rank, size;
    /* Where a rank has threads: runs items on them. NULL: the caller does all. */
    void (*run)(void *context, uint32_t n, uint32_t chunk, comm_item item, void *arg);
    void *context;
};

/* The part of `total` that is a rank's: whole units where total is a number of them, as equal as may be, in the order of ranks.
 */
void comm_share(uint32_t total, uint32_t unit, uint32_t size, uint32_t rank, uint32_t *first, uint32_t *count);
/* Every rank says whether it failed (0 or an error code, with *err). Returns what the first rank that failed said, on every rank;
 * err then begins with "rank N: " where it was another's. comm NULL: returns `failed`. */
int comm_agree(struct comm *comm, int failed, struct kvg_error *err);

/* ---- shared memory ----------------------------------------------------------------------------------------------------- */

/* Memory that processes forked after this call share, for `size` ranks. It has no name, so nothing is left behind and no mount
 * limits it. */
struct comm_shared;
int comm_shm_create(struct comm_shared **out, uint32_t size, struct kvg_error *err);
/* After every rank of this process has closed. */
void comm_shm_free(struct comm_shared *shared);
/* Once for each rank, by its process (or thread). The table works on host memory. */
int comm_shm_join(struct comm **out, struct comm_shared *shared, uint32_t rank, struct kvg_error *err);
