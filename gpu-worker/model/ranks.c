#define _GNU_SOURCE
#include "gpu-worker/model/ranks.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "gpu-worker/backend/comm.h"
#include "gpu-worker/log.h"

enum { STATUS_ORPHAN = 1, END_POLLS = 200, END_POLL_MS = 10 };

struct ranks {
    struct comm_shared *shared;
    struct comm *comm;
    pid_t pids[COMM_MOST_RANKS]; /* [size]; pids[0] = 0 */
    _Atomic bool gone[COMM_MOST_RANKS];
    _Atomic bool ending;
    pthread_t watcher;
    bool watches;
};

struct comm *ranks_comm(const struct ranks *ranks)
{
    return ranks ? ranks->comm : NULL;
}

bool ranks_lead(const struct ranks *ranks)
{
    return !ranks || ranks->comm->rank == 0;
}

/* ---- the children ------------------------------------------------------------------------------------------------------ */

static void be_child(uint32_t rank, pid_t parent)
{
    char name[24]; /* the kernel keeps 15 of it */
    snprintf(name, sizeof name, "kvgate-rank%u", rank);
    prctl(PR_SET_NAME, name);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) /* it ended before this was said */
        _exit(STATUS_ORPHAN);
}

/* Returns the rank of this process, or -1: what could be started has been ended. */
static int fork_all(struct ranks *ranks, uint32_t size)
{
    pid_t parent = getpid();
    fflush(NULL);
    for (uint32_t r = 1; r < size; r++) {
        ranks->pids[r] = fork();
        if (ranks->pids[r] == 0) {
            be_child(r, parent);
            return (int)r;
        }
        for (uint32_t i = 1; i < r && ranks->pids[r] < 0; i++) {
            kill(ranks->pids[i], SIGKILL);
            waitpid(ranks->pids[i], NULL, 0);
        }
        if (ranks->pids[r] < 0)
            return -1;
    }
    return 0;
}

/* ---- rank 0 watches ---------------------------------------------------------------------------------------------------- */

static uint32_t rank_of(const struct ranks *ranks, pid_t pid)
{
    uint32_t r = 1;
    while (r < ranks->comm->size && ranks->pids[r] != pid)
        r++;
    return r;
}

/* Until all others have ended; one that ends too early, or not as it should, ends this process as well. */
static void *watch(void *context)
{
    struct ranks *ranks = context;
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, 0)) > 0 || errno == EINTR) {
        uint32_t r = pid > 0 ? rank_of(ranks, pid) : ranks->comm->size;
        if (r == ranks->comm->size)
            continue;
        atomic_store(&ranks->gone[r], true);
        if (atomic_load(&ranks->ending) || (WIFEXITED(status) && WEXITSTATUS(status) == 0))
            continue;
        if (WIFSIGNALED(status))
            log_fatal("rank %u of %u (process %d) was killed by signal %d (%s): the others cannot go on without it", r,
                      ranks->comm->size, (int)pid, WTERMSIG(status), strsignal(WTERMSIG(status)));
        log_fatal("rank %u of %u (process %d) ended with status %d: the others cannot go on without it", r, ranks->comm->size,
                  (int)pid, WEXITSTATUS(status));
    }
    return NULL;
}

/* ---- life -------------------------------------------------------------------------------------------------------------- */

int ranks_start(struct ranks **out, uint32_t size, struct kvg_error *err)
{
    *out = NULL;
    if (size == 1)
        return 0;
    struct ranks *ranks = calloc(1, sizeof *ranks);
    int failed = ranks ? comm_shm_create(&ranks->shared, size, err) : kvg_fail(err, KVG_NOMEM, "no memory for %u ranks", size);
    if (failed) {
        free(ranks);
        return failed;
    }
    signal(SIGCHLD, SIG_DFL); /* ignored, it would hide how a rank ended */
    int rank = fork_all(ranks, size);
    if (rank < 0)
        failed = kvg_fail(err, KVG_NOMEM, "cannot start %u processes: %s", size - 1, strerror(errno));
    else
        failed = comm_shm_join(&ranks->comm, ranks->shared, (uint32_t)rank, err);
    if (!failed && rank == 0 && pthread_create(&ranks->watcher, NULL, watch, ranks) != 0)
        failed = kvg_fail(err, KVG_NOMEM, "the thread that watches the ranks cannot be started");
    ranks->watches = !failed && rank == 0;
    if (failed) /* children end with this process */
        return failed;
    *out = ranks;
    return 0;
}

void ranks_end(struct ranks *ranks, bool told)
{
    const struct timespec poll = {.tv_nsec = END_POLL_MS * 1000000};
    if (!ranks || !ranks->watches)
        return;
    atomic_store(&ranks->ending, true);
    for (uint32_t r = 1; r < ranks->comm->size; r++) {
        for (int i = 0; told && i < END_POLLS && !atomic_load(&ranks->gone[r]); i++)
            nanosleep(&poll, NULL);
        if (!atomic_load(&ranks->gone[r]))
            kill(ranks->pids[r], SIGKILL);
    }
    pthread_join(ranks->watcher, NULL);
    ranks->comm->ops->close(ranks->comm);
    comm_shm_free(ranks->shared);
    free(ranks);
}
