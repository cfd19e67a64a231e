/* The collectives of comm.h over memory that the ranks share.
 *
 * A call is a number of rounds. In a round a rank writes what it gives into its slot and the call's tag beside it, meets the
 * others, then reads their slots:
 *
 *   rank 0   write slot 0 | arrived 0 = round | wait for all |   read slots 0, 1   | write slot 0' ...
 *   rank 1   write slot 1 | arrived 1 = round | wait for all |   read slots 0, 1   | write slot 1' ...
 *
 * There are two slots a rank, used in turn, so one meeting a round is enough: who writes a slot again has met, in between, all
 * that could still read it. After the meeting every rank compares the tags, so ranks whose calls differ all learn it in the same
 * round, and none is left waiting.
 */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "gpu-worker/backend/comm.h"
#include "gpu-worker/backend/sleep.h"

enum {
    SLOT_BYTES = 1 << 20,
    SLOT_FLOATS = SLOT_BYTES / sizeof(float),
    PIECE = 4096,       /* floats that a thread takes at once */
    SPIN_PAUSES = 4000, /* about 0.1 ms: as long as ranks of one step usually lie apart */
    LINE = 64
};

enum call { CALL_NONE, CALL_REDUCE, CALL_GATHER, CALL_BROADCAST, CALL_EXCHANGE };
static const char *const call_names[] = {"nothing", "all_reduce", "gather", "broadcast", "exchange"};

struct tag {
    uint32_t call;
    uint64_t size; /* floats; of a gather rows * cols; else bytes */
};

struct seat {
    _Alignas(LINE) _Atomic uint32_t arrived; /* in this round, modulo 2^32; the futex */
    _Atomic uint32_t sleepers;
    struct tag tags[2];
};

struct comm_shared {
    uint32_t size;
    size_t bytes;
    struct seat seats[COMM_MOST_RANKS];
    _Alignas(LINE) uint8_t slots[]; /* [size][2][SLOT_BYTES] */
};

struct comm_shm {
    struct comm base;
    struct comm_shared *shared;
    uint32_t round;
    struct kvg_error failure; /* the first; code 0 = none */
};

/* ---- life -------------------------------------------------------------------------------------------------------------- */

int comm_shm_create(struct comm_shared **out, uint32_t size, struct kvg_error *err)
{
    if (size < 1 || size > COMM_MOST_RANKS)
        return kvg_fail(err, KVG_INVALID, "a group of %u ranks; 1 to %u are possible", size, COMM_MOST_RANKS);
    size_t bytes = sizeof(struct comm_shared) + (size_t)size * 2 * SLOT_BYTES;
    struct comm_shared *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return kvg_fail(err, KVG_NOMEM, "no shared memory for %u ranks (%zu bytes)", size, bytes);
    shared->size = size;
    shared->bytes = bytes;
    *out = shared;
    return 0;
}

void comm_shm_free(struct comm_shared *shared)
{
    if (shared)
        munmap(shared, shared->bytes);
}

/* ---- a round ----------------------------------------------------------------------------------------------------------- */

static struct comm_shm *shm_of(struct comm *comm)
{
    return (struct comm_shm *)comm;
}

/* The slot of a rank in this round. */
static float *slot(const struct comm_shm *shm, uint32_t rank)
{
    return (float *)(shm->shared->slots + ((size_t)rank * 2 + shm->round % 2) * SLOT_BYTES);
}

/* Until the rank has arrived in this round. */
static void wait_for(const struct comm_shm *shm, uint32_t rank)
{
    struct seat *seat = &shm->shared->seats[rank];
    for (uint32_t spin = 0;; spin++) {
        uint32_t seen = atomic_load_explicit(&seat->arrived, memory_order_acquire);
        if ((int32_t)(seen - shm->round) >= 0)
            return;
        if (spin < SPIN_PAUSES) {
            cpu_pause();
            continue;
        }
        sleep_while(&seat->arrived, seen, &seat->sleepers, 0);
    }
}

static void arrive(const struct comm_shm *shm, struct tag tag)
{
    struct seat *seat = &shm->shared->seats[shm->base.rank];
    seat->tags[shm->round % 2] = tag;
    atomic_store(&seat->arrived, shm->round);
    wake_sleepers(&seat->arrived, &seat->sleepers, 0);
}

static int compare_tags(struct comm_shm *shm)
{
    const struct seat *seats = shm->shared->seats;
    const struct tag *first = &seats[0].tags[shm->round % 2];
    for (uint32_t r = 1; r < shm->base.size; r++) {
        const struct tag *other = &seats[r].tags[shm->round % 2];
        if (other->call != first->call || other->size != first->size)
            return kvg_fail(&shm->failure, KVG_INVALID, "tensor parallelism: rank 0 is in %s of %llu, rank %u in %s of %llu",
                            call_names[first->call], (unsigned long long)first->size, r, call_names[other->call],
                            (unsigned long long)other->size);
    }
    return 0;
}

/* What this rank gives lies in its slot of the round. After it, what all gave can be read. */
static int meet(struct comm_shm *shm, enum call call, uint64_t size)
{
    arrive(shm, (struct tag){call, size});
    for (uint32_t r = 0; r < shm->base.size; r++)
        wait_for(shm, r);
    return compare_tags(shm);
}

/* The group is of use, and the next round begins. */
static bool begin_round(struct comm_shm *shm)
{
    shm->round++;
    return shm->failure.code == 0;
}

static int failed(const struct comm_shm *shm, struct kvg_error *err)
{
    return kvg_fail(err, shm->failure.code, "%s", shm->failure.message);
}

/* ---- pieces of a round on the rank's threads --------------------------------------------------------------------------- */

struct piece_job {
    const struct comm_shm *shm;
    float *data;
    size_t n;
};

static void run_pieces(const struct comm_shm *shm, float *data, size_t n, comm_item item)
{
    struct piece_job job = {shm, data, n};
    uint32_t pieces = (uint32_t)((n + PIECE - 1) / PIECE);
    if (shm->base.run && pieces > 1)
        shm->base.run(shm->base.context, pieces, 1, item, &job);
    else
        item(&job, 0, 0, pieces);
}

static void give_pieces(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    const struct piece_job *job = arg;
    size_t at = (size_t)first * PIECE, stop = (size_t)end * PIECE < job->n ? (size_t)end * PIECE : job->n;
    memcpy(slot(job->shm, job->shm->base.rank) + at, job->data + at, (stop - at) * sizeof *job->data);
}

static void add_piece(const struct piece_job *job, size_t at, size_t n)
{
    float *restrict data = job->data + at;
    memcpy(data, slot(job->shm, 0) + at, n * sizeof *data);
    for (uint32_t r = 1; r < job->shm->base.size; r++) {
        const float *restrict part = slot(job->shm, r) + at;
        for (size_t i = 0; i < n; i++)
            data[i] += part[i];
    }
}

static void add_pieces(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    const struct piece_job *job = arg;
    for (size_t p = first; p < end; p++)
        add_piece(job, p * PIECE, job->n - p * PIECE < PIECE ? job->n - p * PIECE : PIECE);
}

/* ---- the table --------------------------------------------------------------------------------------------------------- */

static int shm_all_reduce(struct comm *comm, float *data, size_t n, struct kvg_error *err)
{
    struct comm_shm *shm = shm_of(comm);
    for (size_t at = 0; at < n; at += SLOT_FLOATS) {
        size_t part = n - at < SLOT_FLOATS ? n - at : SLOT_FLOATS;
        if (!begin_round(shm))
            return failed(shm, err);
        run_pieces(shm, data + at, part, give_pieces);
        if (meet(shm, CALL_REDUCE, n))
            return failed(shm, err);
        run_pieces(shm, data + at, part, add_pieces);
    }
    return 0;
}

/* Values at..at+n of a part [rows, width] into their columns of out [rows, cols]. */
static void place(float *out, uint32_t cols, const float *values, uint32_t first, uint32_t width, size_t at, size_t n)
{
    while (n) {
        size_t row = at / width, col = at % width, run = width - col < n ? width - col : n;
        memcpy(out + row * cols + first + col, values, run * sizeof *out);
        values += run;
        at += run;
        n -= run;
    }
}

static int shm_gather(struct comm *comm, const float *part, float *out, size_t rows, uint32_t cols, struct kvg_error *err)
{
    struct comm_shm *shm = shm_of(comm);
    uint32_t first, width, most = 0;
    for (uint32_t r = 0; r < comm->size; r++) {
        comm_share(cols, 1, comm->size, r, &first, &width);
        most = width > most ? width : most;
    }
    for (size_t at = 0; at < rows * most; at += SLOT_FLOATS) {
        if (!begin_round(shm))
            return failed(shm, err);
        comm_share(cols, 1, comm->size, comm->rank, &first, &width);
        size_t all = rows * width, n = at >= all ? 0 : all - at < SLOT_FLOATS ? all - at : SLOT_FLOATS;
        if (comm->rank && n)
            memcpy(slot(shm, comm->rank), part + at, n * sizeof *part);
        if (meet(shm, CALL_GATHER, (uint64_t)rows * cols))
            return failed(shm, err);
        for (uint32_t r = 0; r < comm->size && comm->rank == 0; r++) {
            comm_share(cols, 1, comm->size, r, &first, &width);
            all = rows * width;
            n = at >= all ? 0 : all - at < SLOT_FLOATS ? all - at : SLOT_FLOATS;
            place(out, cols, r ? slot(shm, r) : part + at, first, width, at, n);
        }
    }
    return 0;
}

static int shm_broadcast(struct comm *comm, void *data, size_t bytes, struct kvg_error *err)
{
    struct comm_shm *shm = shm_of(comm);
    uint8_t *mine = data;
    for (size_t at = 0; at < bytes; at += SLOT_BYTES) {
        size_t n = bytes - at < SLOT_BYTES ? bytes - at : SLOT_BYTES;
        if (!begin_round(shm))
            return failed(shm, err);
        if (comm->rank == 0)
            memcpy(slot(shm, 0), mine + at, n);
        if (meet(shm, CALL_BROADCAST, bytes))
            return failed(shm, err);
        if (comm->rank)
            memcpy(mine + at, slot(shm, 0), n);
    }
    return 0;
}

static int shm_exchange(struct comm *comm, const void *mine, void *all, size_t bytes, struct kvg_error *err)
{
    struct comm_shm *shm = shm_of(comm);
    if (bytes > COMM_RECORD)
        return kvg_fail(err, KVG_INVALID, "a record of %zu bytes; %d are possible", bytes, COMM_RECORD);
    if (!begin_round(shm))
        return failed(shm, err);
    memcpy(slot(shm, comm->rank), mine, bytes);
    if (meet(shm, CALL_EXCHANGE, bytes))
        return failed(shm, err);
    for (uint32_t r = 0; r < comm->size; r++)
        memcpy((uint8_t *)all + r * bytes, slot(shm, r), bytes);
    return 0;
}

static void shm_close(struct comm *comm)
{
    free(comm);
}

static const struct comm_ops shm_ops = {
    .all_reduce = shm_all_reduce,
    .gather = shm_gather,
    .broadcast = shm_broadcast,
    .exchange = shm_exchange,
    .close = shm_close,
};

int comm_shm_join(struct comm **out, struct comm_shared *shared, uint32_t rank, struct kvg_error *err)
{
    if (rank >= shared->size)
        return kvg_fail(err, KVG_INVALID, "rank %u of a group of %u", rank, shared->size);
    struct comm_shm *shm = calloc(1, sizeof *shm);
    if (!shm)
        return kvg_fail(err, KVG_NOMEM, "no memory for rank %u", rank);
    shm->base = (struct comm){.ops = &shm_ops, .rank = rank, .size = shared->size};
    shm->shared = shared;
    *out = &shm->base;
    return 0;
}
