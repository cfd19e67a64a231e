/* Runs a function as each rank of a group: rank 0 in the test's own process, the others in children. */
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>
#include "gpu-worker/backend/comm.h"

enum { RANK_LIMIT_SECONDS = 300 }; /* a rank that waits for ever ends by SIGALRM */

/* In a rank: the check failed. Says where; the test fails. */
#define rank_check(condition)                                                                                                    \
    do {                                                                                                                         \
        if (!(condition)) {                                                                                                      \
            fprintf(stderr, "%s:%d: rank %u: %s is false\n", __FILE__, __LINE__, comm->rank, #condition);                        \
            return 1;                                                                                                            \
        }                                                                                                                        \
    } while (0)

typedef int rank_function(struct comm *comm, void *context); /* 0, or what went wrong */

static inline int run_rank(struct comm_shared *shared, uint32_t rank, rank_function *function, void *context)
{
    struct kvg_error err = {0};
    struct comm *comm;
    if (comm_shm_join(&comm, shared, rank, &err)) {
        fprintf(stderr, "rank %u: %s\n", rank, err.message);
        return 1;
    }
    int wrong = function(comm, context);
    comm->ops->close(comm);
    return wrong;
}

/* How many ranks did not return 0. Changes that ranks other than 0 make to memory are lost, but for shared mappings. */
static inline uint32_t run_ranks(uint32_t size, rank_function *function, void *context)
{
    struct comm_shared *shared;
    uint32_t wrong = 0;
    pid_t pids[COMM_MOST_RANKS];
    if (comm_shm_create(&shared, size, NULL))
        return size;
    fflush(NULL);
    for (uint32_t r = 1; r < size; r++)
        if ((pids[r] = fork()) == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            alarm(RANK_LIMIT_SECONDS);
            int failed = run_rank(shared, r, function, context);
            fflush(NULL);
            _exit(failed ? 1 : 0);
        }
    alarm(RANK_LIMIT_SECONDS);
    wrong += run_rank(shared, 0, function, context) != 0;
    for (uint32_t r = 1, status; r < size; r++)
        wrong += waitpid(pids[r], (int *)&status, 0) != pids[r] || status != 0;
    alarm(0);
    comm_shm_free(shared);
    return wrong;
}
