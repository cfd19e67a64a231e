#include "gpu-worker/backend/comm.h"
#include <stdlib.h>
#include <string.h>

void comm_share(uint32_t total, uint32_t unit, uint32_t size, uint32_t rank, uint32_t *first, uint32_t *count)
{
    uint64_t units = unit && total % unit == 0 ? total / unit : total, each = units ? total / units : 0;
    uint64_t begin = units * rank / size * each, end = units * (rank + 1) / size * each;
    *first = (uint32_t)begin;
    *count = (uint32_t)(end - begin);
}

struct report {
    int code;
    char message[sizeof((struct kvg_error *)0)->message];
};
_Static_assert(sizeof(struct report) <= COMM_RECORD, "a report is a record");

int comm_agree(struct comm *comm, int failed, struct kvg_error *err)
{
    struct report mine = {.code = failed}, all[COMM_MOST_RANKS];
    if (!comm)
        return failed;
    if (failed && err)
        memcpy(mine.message, err->message, sizeof mine.message);
    int lost = comm->ops->exchange(comm, &mine, all, sizeof mine, err);
    if (lost)
        return lost;
    for (uint32_t r = 0; r < comm->size; r++) {
        if (!all[r].code)
            continue;
        return r == comm->rank ? failed : kvg_fail(err, all[r].code, "rank %u: %.300s", r, all[r].message);
    }
    return 0;
}
