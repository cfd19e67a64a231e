/* The operation `attention`: how a step's rows become pieces for the thread pool.
 *
 * A tile is up to ATTENTION_TILE rows, (token, head of the group) pairs of one sequence, times one kv head. Where few tiles, or
 * one much longer than the others, would leave threads idle, runs of the segments of a tile's keys are pieces of their own: each
 * writes its states to `partials`, and the thread that ends the last one combines them in order.
 *
 * Sequences that decode behind the same blocks (a system prompt, a conversation's fork) share the segments that lie in them:
 * these are computed first, with the rows of all of them in one tile, so that keys and values are read once, and full tiles
 * (Hydragen, Juravsky et al. 2024). Each sequence then goes on from its rows of that state. A row's arithmetic is the same either
 * way.
 *
 *   sequence 1   | shared segments | own ...          common tile: rows of 1 | rows of 2 | rows of 3     -> common state
 *   sequence 2   | the same blocks | own ...                                     |
 *   sequence 3   | the same blocks | own ...                                     +-> taken, then own segments folded in
 */
#include "gpu-worker/backend/cpu/cpu.h"
#include <stdatomic.h>
#include <stdlib.h>

enum {
    PARTIAL_BYTES = 16 << 20,
    COMMON_BYTES = 4 << 20,
    COMMON_ROWS = 32,   /* of a common tile */
    MOST_OWN_ROWS = 16, /* of a sequence in one: more fill a tile by themselves */
    MOST_CANDIDATES = 256,
    WORTH = 4,         /* a sequence shares where at least a quarter of its keys are common */
    MOST_SPLIT = 4096, /* pieces of a split step, of one kv head */
    MOST_SEGMENTS = 1024,
    MOST_BALANCED = 64, /* threads */
    MOST_IDLE = 6       /* percent of the threads' time */
};

struct attention_piece {
    uint32_t seq, tile;    /* the tile of the sequence */
    uint32_t segment, run; /* the first of its segments and how many; or WHOLE */
    uint32_t n_segments;   /* of the tile */
    uint32_t index;        /* of the tile among split tiles */
    uint32_t before;       /* segments of split tiles before it */
};

/* Rows of several sequences over the segments that they share. */
struct common_tile {
    uint32_t first, n_seqs; /* of plan->members */
    uint32_t n_rows, n_segments;
};

/* Where a sequence's rows lie in its common tile. */
struct common_place {
    uint32_t tile; /* or NO_TILE */
    uint32_t row;
};
static const uint32_t NO_TILE = UINT32_MAX;

struct attention_plan {
    uint32_t tile_rows, n_pieces; /* pieces of each kv head */
    uint32_t chunk;               /* pieces times kv heads that a thread takes at once: 1, or all heads of a piece */
    struct attention_piece *pieces;
    size_t partial_floats;  /* of one state */
    float *partials;        /* [kv head][segments of split tiles] states */
    uint32_t n_partials;    /* of one kv head in this step */
    _Atomic uint32_t *left; /* [kv head][split tiles] segments that are not done */

    struct common_tile *commons; /* [n_commons], room for max_seqs */
    struct common_place *places; /* [n_seqs] */
    uint32_t *members;           /* [n_members] sequences in common tiles, tile after tile */
    uint32_t n_commons, n_members;
    size_t common_floats; /* of one state */
    float *common_states; /* [common tile][kv head] */
};

int cpu_attention_alloc(struct cpu_backend *cpu, struct kvg_error *err)
{
    uint32_t group = cpu->kv.n_heads / cpu->kv.n_kv_heads;
    size_t most = ((size_t)cpu->options.max_rows * group + 15) / 16 + cpu->options.max_seqs + MOST_SPLIT;
    struct attention_plan *plan = cpu->plan = calloc(1, sizeof *plan);
    if (plan) {
        plan->pieces = calloc(most, sizeof *plan->pieces);
        plan->left = calloc((size_t)MOST_SPLIT * cpu->kv.n_kv_heads, sizeof *plan->left);
        plan->partials = cpu_map(PARTIAL_BYTES);
        plan->commons = calloc(cpu->options.max_seqs, sizeof *plan->commons);
        plan->places = calloc(cpu->options.max_seqs, sizeof *plan->places);
        plan->members = calloc(cpu->options.max_seqs, sizeof *plan->members);
        plan->common_states = cpu_map(COMMON_BYTES);
    }
    if (!plan || !plan->pieces || !plan->left || !plan->partials || !plan->commons || !plan->places || !plan->members ||
        !plan->common_states)
        return kvg_fail(err, KVG_NOMEM, "no memory for the attention of %u rows", cpu->options.max_rows);
    return 0;
}

void cpu_attention_free(struct cpu_backend *cpu)
{
    if (!cpu->plan)
        return;
    free(cpu->plan->pieces);
    free(cpu->plan->left);
    cpu_unmap(cpu->plan->partials, PARTIAL_BYTES);
    free(cpu->plan->commons);
    free(cpu->plan->places);
    free(cpu->plan->members);
    cpu_unmap(cpu->plan->common_states, COMMON_BYTES);
    free(cpu->plan);
}

/* ---- what sequences share ---- */

static uint32_t rows_of(const struct cpu_backend *cpu, uint32_t s)
{
    return cpu->step.seqs[s].n_rows * (cpu->kv.n_heads / cpu->kv.n_kv_heads);
}

/* Segments that every row of the sequence sees whole. */
static uint32_t whole_segments(const struct cpu_backend *cpu, uint32_t s)
{
    return cpu->step.seqs[s].n_past / SEGMENT;
}

static bool may_share(const struct cpu_backend *cpu, uint32_t s)
{
    return cpu->plan->places[s].tile == NO_TILE && whole_segments(cpu, s) && rows_of(cpu, s) <= MOST_OWN_ROWS;
}

/* Leading segments that lie in the same blocks. */
static uint32_t common_segments(const struct cpu_backend *cpu, uint32_t a, uint32_t b)
{
    const uint32_t *x = cpu->step.seqs[a].blocks, *y = cpu->step.seqs[b].blocks;
    uint32_t most = whole_segments(cpu, a), other = whole_segments(cpu, b), size = cpu->kv.block_size, n = 0;
    most = most < other ? most : other;
    while (n * size < most * SEGMENT && x[n] == y[n])
        n++;
    n = n * size / SEGMENT;
    return n < most ? n : most;
}

/* Sequences that share segments with a leader, and how many. */
struct candidates {
    uint32_t n, seq[MOST_CANDIDATES], common[MOST_CANDIDATES];
};

static void find_candidates(const struct cpu_backend *cpu, uint32_t leader, struct candidates *out)
{
    out->n = 0;
    for (uint32_t s = leader + 1; s < cpu->step.n_seqs && out->n < MOST_CANDIDATES; s++) {
        uint32_t n = may_share(cpu, s) ? common_segments(cpu, leader, s) : 0;
        if (n == 0 || n * WORTH < whole_segments(cpu, s))
            continue;
        out->seq[out->n] = s;
        out->common[out->n++] = n;
    }
}

/* So many segments that reading them together saves the most. */
static uint32_t best_common(const struct candidates *some)
{
    uint32_t best = 0, most = 0;
    for (uint32_t i = 0; i < some->n; i++) {
        uint32_t n = 0;
        for (uint32_t j = 0; j < some->n; j++)
            n += some->common[j] >= some->common[i];
        if (n * some->common[i] > most)
            most = n * some->common[i], best = some->common[i];
    }
    return best;
}

/* Into the last common tile, or where it is full into a new one. False: no room for its state. */
static bool join(struct cpu_backend *cpu, uint32_t s, uint32_t n_segments, bool new_group)
{
    struct attention_plan *plan = cpu->plan;
    uint32_t rows = rows_of(cpu, s);
    if (new_group || plan->commons[plan->n_commons - 1].n_rows + rows > COMMON_ROWS) {
        if ((plan->n_commons + 1) * cpu->kv.n_kv_heads * plan->common_floats * sizeof(float) > COMMON_BYTES)
            return false;
        plan->commons[plan->n_commons++] = (struct common_tile){.first = plan->n_members, .n_segments = n_segments};
    }
    struct common_tile *tile = &plan->commons[plan->n_commons - 1];
    plan->places[s] = (struct common_place){plan->n_commons - 1, tile->n_rows};
    plan->members[plan->n_members++] = s;
    tile->n_seqs++;
    tile->n_rows += rows;
    return true;
}

static void plan_common_tiles(struct cpu_backend *cpu)
{
    struct attention_plan *plan = cpu->plan;
    struct candidates some;
    plan->n_commons = plan->n_members = 0;
    plan->common_floats = attention_state_floats(COMMON_ROWS, cpu->kv.head_dim);
    for (uint32_t s = 0; s < cpu->step.n_seqs; s++)
        plan->places[s].tile = NO_TILE;
    if (cpu->kv.windows) /* rows of layers with a window start anywhere in the segments */
        return;
    for (uint32_t s = 0; s + 1 < cpu->step.n_seqs; s++) {
        if (!may_share(cpu, s))
            continue;
        find_candidates(cpu, s, &some);
        uint32_t n = best_common(&some);
        if (n == 0 || n * WORTH < whole_segments(cpu, s))
            continue;
        if (!join(cpu, s, n, true))
            return;
        for (uint32_t i = 0; i < some.n; i++)
            if (some.common[i] >= n && !join(cpu, some.seq[i], n, false))
                return;
    }
}

uint32_t cpu_attention_sharing(const struct cpu_backend *cpu)
{
    return cpu->plan->n_members;
}

/* ---- the plan of a step ---- */

static uint32_t segments_of_longest(const struct cpu_backend *cpu)
{
    uint32_t most = 0;
    for (uint32_t s = 0; s < cpu->step.n_seqs; s++) {
        const struct backend_seq *seq = &cpu->step.seqs[s];
        uint32_t n = (seq->n_past + seq->n_rows - 1) / SEGMENT + 1;
        most = n > most ? n : most;
    }
    return most;
}

/* Large tiles read keys and values less often; small ones keep every thread busy where segments are too few for that. */
static uint32_t choose_tile_rows(const struct cpu_backend *cpu)
{
    uint32_t rows = cpu->step.n_rows * (cpu->kv.n_heads / cpu->kv.n_kv_heads), threads = thread_pool_size(cpu->pool);
    uint32_t tile = cpu->kernels.attention_rows, segments = segments_of_longest(cpu);
    if (threads > 1)
        while (tile > 16 && (uint64_t)(rows + tile - 1) / tile * cpu->kv.n_kv_heads * segments < 4 * threads)
            tile /= 2;
    return tile;
}

/* One piece a tile, the last tile first: later tiles of a prompt see more keys, and the longest should not start last. */
static void plan_whole_tiles(struct cpu_backend *cpu, struct attention_plan *plan)
{
    uint32_t group = cpu->kv.n_heads / cpu->kv.n_kv_heads;
    plan->n_pieces = 0;
    for (uint32_t s = cpu->step.n_seqs; s-- > 0;) {
        const struct backend_seq *seq = &cpu->step.seqs[s];
        if (plan->places[s].tile != NO_TILE) {
            plan->pieces[plan->n_pieces++] = (struct attention_piece){.seq = s, .segment = WHOLE, .n_segments = 1};
            continue;
        }
        for (uint32_t tile = (seq->n_rows * group + plan->tile_rows - 1) / plan->tile_rows; tile-- > 0;) {
            uint32_t rows = (tile + 1) * plan->tile_rows, token = (rows + group - 1) / group;
            uint32_t last = seq->n_past + (token < seq->n_rows ? token : seq->n_rows) - 1;
            plan->pieces[plan->n_pieces++] =
                (struct attention_piece){.seq = s, .tile = tile, .segment = WHOLE, .n_segments = last / SEGMENT + 1};
        }
    }
}

/* Reading a segment and beginning with it takes about as long as two blocks of 16 rows. */
static uint64_t cost_of(const struct cpu_backend *cpu, const struct attention_piece *piece)
{
    uint32_t tile_rows = cpu->plan->tile_rows, rows = rows_of(cpu, piece->seq) - piece->tile * tile_rows;
    return 2 + ((rows < tile_rows ? rows : tile_rows) + 15) / 16;
}

/* Whether threads that take pieces of at most `run` segments as they come end at about the same time. */
static bool balanced(const struct cpu_backend *cpu, uint32_t run)
{
    const struct attention_plan *plan = cpu->plan;
    uint32_t threads = thread_pool_size(cpu->pool);
    uint64_t load[MOST_BALANCED] = {0}, total = 0, most = 0;
    if (threads > MOST_BALANCED)
        return run == 1;
    for (uint32_t i = 0; i < plan->n_pieces; i++) {
        const struct attention_piece *piece = &plan->pieces[i];
        for (uint32_t j = 0; j < piece->n_segments; j += run)
            for (uint32_t kv = 0; kv < cpu->kv.n_kv_heads; kv++) {
                uint32_t n = piece->n_segments - j < run ? piece->n_segments - j : run, idle = 0;
                for (uint32_t t = 1; t < threads; t++)
                    idle = load[t] < load[idle] ? t : idle;
                load[idle] += n * cost_of(cpu, piece);
                total += n * cost_of(cpu, piece);
                most = load[idle] > most ? load[idle] : most;
            }
    }
    return most * threads * 100 <= total * (100 + MOST_IDLE);
}

/* Segments of a piece at most: as many as leave no thread idle, because each piece has a price of its own. */
static uint32_t choose_run(const struct cpu_backend *cpu)
{
    const struct attention_plan *plan = cpu->plan;
    uint64_t segments = 0;
    uint32_t longest = 1, n_kv = cpu->kv.n_kv_heads;
    for (uint32_t i = 0; i < plan->n_pieces; i++) {
        uint32_t n = plan->pieces[i].n_segments;
        segments += n;
        longest = n > longest ? n : longest;
    }
    if (thread_pool_size(cpu->pool) == 1 || longest > MOST_SEGMENTS || segments > MOST_SPLIT ||
        segments * n_kv * plan->partial_floats * sizeof(float) > PARTIAL_BYTES)
        return longest;
    uint32_t run = longest;
    while (run > 1 && !balanced(cpu, run))
        run = (run + 1) / 2;
    return run;
}

static uint32_t n_runs(const struct attention_piece *piece, uint32_t run)
{
    return (piece->n_segments + run - 1) / run;
}

/* Pieces are spread from the back so that none is overwritten before it is read. */
static void split_tiles(struct attention_plan *plan, uint32_t run, uint32_t n_kv)
{
    uint32_t n_tiles = plan->n_pieces, at = 0, index = 0;
    plan->n_partials = 0;
    for (uint32_t i = 0; i < n_tiles; i++)
        at += n_runs(&plan->pieces[i], run);
    plan->n_pieces = at;
    for (uint32_t i = n_tiles; i-- > 0;) {
        struct attention_piece piece = plan->pieces[i];
        at -= n_runs(&piece, run);
        if (piece.n_segments <= run) {
            plan->pieces[at] = piece;
            continue;
        }
        piece.index = index++;
        piece.before = plan->n_partials;
        plan->n_partials += piece.n_segments;
        for (uint32_t kv = 0; kv < n_kv; kv++)
            atomic_store_explicit(&plan->left[(size_t)kv * MOST_SPLIT + piece.index], piece.n_segments, memory_order_relaxed);
        for (uint32_t j = 0; j < n_runs(&piece, run); j++) {
            piece.segment = j * run;
            piece.run = piece.n_segments - piece.segment < run ? piece.n_segments - piece.segment : run;
            plan->pieces[at + j] = piece;
        }
    }
}

/* Decoding waits for memory: a thread that knows its next piece can fetch ahead. Prompts need even shares more. */
static uint32_t choose_chunk(const struct cpu_backend *cpu, const struct attention_plan *plan)
{
    bool decode = cpu->step.n_rows < 4 * cpu->step.n_seqs;
    return decode && plan->n_pieces >= 4 * thread_pool_size(cpu->pool) ? cpu->kv.n_kv_heads : 1;
}

void cpu_attention_begin(struct cpu_backend *cpu)
{
    struct attention_plan *plan = cpu->plan;
    plan->tile_rows = choose_tile_rows(cpu);
    plan->partial_floats = attention_state_floats(plan->tile_rows, cpu->kv.head_dim);
    plan_common_tiles(cpu);
    plan_whole_tiles(cpu, plan);
    split_tiles(plan, choose_run(cpu), cpu->kv.n_kv_heads);
    plan->chunk = choose_chunk(cpu, plan);
}

/* ---- running it ---- */

struct attention_job {
    struct cpu_backend *cpu;
    const struct backend_attention *args;
};

static void describe_tile(const struct attention_job *job, const struct attention_piece *piece, uint32_t kv_head,
                          struct attention_tile *tile)
{
    struct cpu_backend *cpu = job->cpu;
    const struct backend_seq *seq = &cpu->step.seqs[piece->seq];
    uint32_t group = cpu->kv.n_heads / cpu->kv.n_kv_heads, tile_rows = cpu->plan->tile_rows, first = piece->tile * tile_rows;
    uint32_t n = seq->n_rows * group - first;
    tile->kv = &cpu->layers[job->args->layer];
    tile->blocks = seq->blocks;
    tile->kv_head = kv_head;
    tile->n_rows = n < tile_rows ? n : tile_rows;
    tile->last = seq->n_past + (first + tile->n_rows - 1) / group;
    tile->segment = piece->segment;
    tile->n_segments = piece->run;
    tile->begin = piece->segment == WHOLE ? 0 : piece->segment * SEGMENT;
    tile->end = tile->last;
    if (piece->segment != WHOLE && tile->begin + piece->run * SEGMENT <= tile->last)
        tile->end = tile->begin + piece->run * SEGMENT - 1;
    tile->next_head = cpu->plan->chunk > 1 && kv_head + 1 < cpu->kv.n_kv_heads;
    tile->scale = job->args->scale;
    tile->window = cpu->kv.windows ? cpu->kv.windows[job->args->layer] : 0;
    for (uint32_t i = 0; i < tile->n_rows; i++) {
        uint32_t token = (first + i) / group, head = kv_head * group + (first + i) % group;
        size_t at = (size_t)(seq->first_row + token) * job->args->q->cols + (size_t)head * cpu->kv.head_dim;
        tile->q[i] = job->args->q->data + at;
        tile->out[i] = job->args->out->data + at;
        tile->position[i] = seq->n_past + token;
    }
}

static void partials_of(const struct cpu_backend *cpu, uint32_t kv_head, uint32_t first, uint32_t n, uint32_t n_rows,
                        struct attention_state states[])
{
    const struct attention_plan *plan = cpu->plan;
    float *memory = plan->partials + ((size_t)kv_head * plan->n_partials + first) * plan->partial_floats;
    for (uint32_t i = 0; i < n; i++)
        states[i] = attention_state_at(memory + i * plan->partial_floats, n_rows, cpu->kv.head_dim);
}

static struct attention_state common_state(const struct cpu_backend *cpu, uint32_t tile, uint32_t kv_head)
{
    const struct attention_plan *plan = cpu->plan;
    float *memory = plan->common_states + ((size_t)tile * cpu->kv.n_kv_heads + kv_head) * plan->common_floats;
    return attention_state_at(memory, COMMON_ROWS, cpu->kv.head_dim);
}

/* All rows see all keys of the common segments. */
static void describe_common(const struct attention_job *job, const struct common_tile *common, uint32_t kv_head,
                            struct attention_tile *tile)
{
    struct cpu_backend *cpu = job->cpu;
    uint32_t group = cpu->kv.n_heads / cpu->kv.n_kv_heads, n = 0;
    tile->kv = &cpu->layers[job->args->layer];
    tile->blocks = cpu->step.seqs[cpu->plan->members[common->first]].blocks;
    tile->kv_head = kv_head;
    tile->window = 0;
    tile->n_rows = common->n_rows;
    tile->begin = 0;
    tile->last = tile->end = common->n_segments * SEGMENT - 1;
    tile->n_segments = 1;
    tile->next_head = false;
    tile->scale = job->args->scale;
    for (uint32_t i = 0; i < common->n_seqs; i++) {
        const struct backend_seq *seq = &cpu->step.seqs[cpu->plan->members[common->first + i]];
        for (uint32_t row = 0; row < seq->n_rows * group; row++, n++) {
            uint32_t token = row / group, head = kv_head * group + row % group;
            tile->q[n] =
                job->args->q->data + (size_t)(seq->first_row + token) * job->args->q->cols + (size_t)head * cpu->kv.head_dim;
            tile->position[n] = tile->last;
        }
    }
}

static void attend_common(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct attention_job *job = arg;
    struct cpu_backend *cpu = job->cpu;
    const struct attention_kernels *kernels = &cpu->attention_kernels;
    struct attention_scratch *scratch = &cpu->attention[thread];
    for (uint32_t i = first; i < end; i++) {
        uint32_t index = i / cpu->kv.n_kv_heads, kv_head = i % cpu->kv.n_kv_heads;
        const struct common_tile *common = &cpu->plan->commons[index];
        struct attention_tile tile;
        describe_common(job, common, kv_head, &tile);
        struct attention_state total = common_state(cpu, index, kv_head);
        struct attention_state state = attention_state_at(scratch->states[0], tile.n_rows, cpu->kv.head_dim);
        for (tile.segment = 0; tile.segment < common->n_segments; tile.segment++) {
            kernels->attend(&tile, scratch, tile.segment ? &state : &total);
            if (tile.segment)
                kernels->fold(&tile, &total, &state);
        }
    }
}

/* The sequence's own segments, from its rows of the common state on. */
static void attend_rest(struct cpu_backend *cpu, struct attention_tile *tile, const struct common_place *place, uint32_t thread)
{
    const struct attention_kernels *kernels = &cpu->attention_kernels;
    struct attention_scratch *scratch = &cpu->attention[thread];
    struct attention_state common = common_state(cpu, place->tile, tile->kv_head);
    struct attention_state total = attention_state_at(scratch->states[0], tile->n_rows, cpu->kv.head_dim);
    struct attention_state state = attention_state_at(scratch->states[1], tile->n_rows, cpu->kv.head_dim);
    kernels->take(tile, &total, &common, place->row);
    tile->segment = cpu->plan->commons[place->tile].n_segments;
    tile->begin = tile->segment * SEGMENT;
    tile->n_segments = 1;
    for (; tile->segment <= tile->last / SEGMENT; tile->segment++) {
        kernels->attend(tile, scratch, &state);
        kernels->fold(tile, &total, &state);
    }
    kernels->combine(tile, &total, 1);
}

static void attend_piece(struct attention_job *job, const struct attention_piece *piece, uint32_t kv_head, uint32_t thread)
{
    struct cpu_backend *cpu = job->cpu;
    const struct attention_kernels *kernels = cpu_attention_kernels(cpu, job->args->layer);
    struct attention_tile tile;
    describe_tile(job, piece, kv_head, &tile);
    if (cpu->plan->places[piece->seq].tile != NO_TILE) {
        attend_rest(cpu, &tile, &cpu->plan->places[piece->seq], thread);
        return;
    }
    if (piece->segment == WHOLE) {
        kernels->attend(&tile, &cpu->attention[thread], NULL);
        return;
    }
    struct attention_state states[MOST_SEGMENTS];
    partials_of(cpu, kv_head, piece->before + piece->segment, piece->run, tile.n_rows, states);
    kernels->attend(&tile, &cpu->attention[thread], states);
    _Atomic uint32_t *left = &cpu->plan->left[(size_t)kv_head * MOST_SPLIT + piece->index];
    if (atomic_fetch_sub_explicit(left, piece->run, memory_order_acq_rel) != piece->run)
        return;
    atomic_store_explicit(left, piece->n_segments, memory_order_relaxed); /* for the next layer */
    partials_of(cpu, kv_head, piece->before, piece->n_segments, tile.n_rows, states);
    kernels->combine(&tile, states, piece->n_segments);
}

static void attend(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct attention_job *job = arg;
    uint32_t n_kv = job->cpu->kv.n_kv_heads;
    for (uint32_t i = first; i < end; i++)
        attend_piece(job, &job->cpu->plan->pieces[i / n_kv], i % n_kv, thread);
}

void cpu_attention(struct backend *backend, const struct backend_attention *args)
{
    struct attention_job job = {cpu_of(backend), args};
    thread_pool_for(job.cpu->pool, job.cpu->plan->n_commons * job.cpu->kv.n_kv_heads, 1, attend_common, &job);
    thread_pool_for(job.cpu->pool, job.cpu->plan->n_pieces * job.cpu->kv.n_kv_heads, job.cpu->plan->chunk, attend, &job);
}
