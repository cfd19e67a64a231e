/* The operation `attention`: how a step's rows become pieces for the thread pool.
 *
 * A tile is up to ATTENTION_TILE rows, (token, head of the group) pairs of one sequence, times one kv head; a piece is a tile, or
 * behind a long context several of them. Where few pieces, or one much longer than the others, would leave threads idle, runs of
 * the segments of some pieces' keys are pieces of their own: the states of what follows the first run are written to `partials`,
 * and the thread that ends the last run combines them in order.
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
#include <string.h>

enum {
    PARTIAL_BYTES = 16 << 20,
    COMMON_BYTES = 4 << 20,
    COMMON_ROWS = 32,   /* of a common tile */
    MOST_OWN_ROWS = 16, /* of a sequence in one: more fill a tile by themselves */
    MOST_CANDIDATES = 256,
    WORTH = 4,         /* a sequence shares where at least a quarter of its keys are common */
    MOST_SPLIT = 4096, /* runs in a step */
    MOST_GROUP = 8,    /* tiles of a piece */
    STRETCH = 4,       /* segments that they go through together */
    KEPT_BYTES = 1 << 20,
    MOST_SEGMENTS = 1024,
    MOST_BALANCED = 64, /* threads */
    MOST_IDLE = 6       /* percent of the threads' time */
};

struct attention_piece {
    uint32_t seq, tile, n_tiles, kv_head; /* tiles of the sequence, from `tile` on */
    uint32_t segment, run;                /* the first of its segments and how many; or WHOLE */
    uint32_t n_segments;                  /* of the last tile */
    uint32_t index;                       /* among split pieces */
    uint32_t before;                      /* states of split pieces before it */
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
    uint32_t tile_rows, n_pieces;
    uint32_t chunk; /* pieces that a thread takes at once: 1, or THREAD_POOL_SHRINKING */
    struct attention_piece *pieces, *tiles;
    size_t partial_floats;    /* of one state */
    float *partials;          /* [n_partials] states of split pieces */
    uint32_t n_partials, run; /* run: segments of a split piece's runs but the last */
    _Atomic uint32_t *left;   /* [split pieces] segments that are not done */
    float *totals;            /* [threads][MOST_GROUP] states */
    size_t total_floats;      /* of one of them */

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
    size_t tiles = (((size_t)cpu->options.max_rows * group + 15) / 16 + cpu->options.max_seqs) * cpu->kv.n_kv_heads;
    struct attention_plan *plan = cpu->plan = calloc(1, sizeof *plan);
    if (plan) {
        plan->pieces = calloc(tiles + MOST_SPLIT, sizeof *plan->pieces);
        plan->tiles = calloc(tiles, sizeof *plan->tiles);
        plan->left = calloc(MOST_SPLIT, sizeof *plan->left);
        plan->total_floats = attention_state_floats(ATTENTION_TILE, cpu->kv.head_dim);
        plan->totals =
            cpu_alloc(thread_pool_size(cpu->pool) * (MOST_GROUP + STRETCH) * plan->total_floats * sizeof *plan->totals);
        plan->partials = cpu_map(PARTIAL_BYTES);
        plan->commons = calloc(cpu->options.max_seqs, sizeof *plan->commons);
        plan->places = calloc(cpu->options.max_seqs, sizeof *plan->places);
        plan->members = calloc(cpu->options.max_seqs, sizeof *plan->members);
        plan->common_states = cpu_map(COMMON_BYTES);
    }
    if (!plan || !plan->pieces || !plan->tiles || !plan->totals || !plan->left || !plan->partials || !plan->commons ||
        !plan->places || !plan->members || !plan->common_states)
        return kvg_fail(err, KVG_NOMEM, "no memory for the attention of %u rows", cpu->options.max_rows);
    return 0;
}

void cpu_attention_free(struct cpu_backend *cpu)
{
    if (!cpu->plan)
        return;
    free(cpu->plan->pieces);
    free(cpu->plan->tiles);
    free(cpu->plan->totals);
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

/* The largest position of the rows of a tile. */
static uint32_t last_position(const struct cpu_backend *cpu, const struct attention_piece *piece, uint32_t tile)
{
    uint32_t rows = rows_of(cpu, piece->seq), end = (tile + 1) * cpu->plan->tile_rows;
    return cpu->step.seqs[piece->seq].n_past + ((end < rows ? end : rows) - 1) / (cpu->kv.n_heads / cpu->kv.n_kv_heads);
}

/* One piece a tile and kv head, the last tile first: later tiles of a prompt see more keys, and the longest should not start
 * last. */
static void plan_whole_tiles(struct cpu_backend *cpu, struct attention_plan *plan)
{
    plan->n_pieces = 0;
    for (uint32_t s = cpu->step.n_seqs; s-- > 0;) {
        bool common = plan->places[s].tile != NO_TILE;
        for (uint32_t tile = (rows_of(cpu, s) + plan->tile_rows - 1) / plan->tile_rows; tile-- > 0;)
            for (uint32_t kv = 0; kv < cpu->kv.n_kv_heads; kv++) {
                struct attention_piece piece = {.seq = s, .tile = tile, .n_tiles = 1, .kv_head = kv, .segment = WHOLE};
                piece.n_segments = common ? 1 : last_position(cpu, &piece, tile) / SEGMENT + 1;
                plan->pieces[plan->n_pieces++] = piece;
            }
    }
}

/* Up to `most` tiles of a sequence become one piece: a thread takes them through the keys segment by segment, so that these come
 * from memory once. */
static uint32_t group_tiles(struct cpu_backend *cpu, const struct attention_piece *tiles, uint32_t n, uint32_t most,
                            struct attention_piece *out)
{
    uint32_t n_kv = cpu->kv.n_kv_heads, n_out = 0;
    for (uint32_t i = 0, n_rows; i < n; i += n_rows * n_kv) {
        n_rows = 1;
        while (n_rows < most && n_rows <= tiles[i].tile && i + n_rows * n_kv < n && tiles[i + n_rows * n_kv].seq == tiles[i].seq)
            n_rows++;
        for (uint32_t kv = 0; kv < n_kv; kv++) {
            out[n_out] = tiles[i + kv];
            out[n_out].tile -= n_rows - 1;
            out[n_out++].n_tiles = n_rows;
        }
    }
    return n_out;
}

/* Reading a segment and beginning with it takes about as long as two blocks of 16 rows. */
static uint64_t cost_of(const struct cpu_backend *cpu, const struct attention_piece *piece)
{
    uint32_t tile_rows = cpu->plan->tile_rows, rows = rows_of(cpu, piece->seq) - piece->tile * tile_rows;
    uint32_t most = piece->n_tiles * tile_rows;
    return 2 + ((rows < most ? rows : most) + 15) / 16;
}

/* How the pieces are split: the first `n` of them into runs of so many segments. */
struct split {
    uint32_t n, run;
};

/* Whether threads that take the pieces as they come end at about the same time. */
static bool balanced(const struct cpu_backend *cpu, const struct split *split)
{
    const struct attention_plan *plan = cpu->plan;
    uint32_t threads = thread_pool_size(cpu->pool);
    uint64_t load[MOST_BALANCED] = {0}, total = 0, most = 0;
    if (threads > MOST_BALANCED)
        return split->n == plan->n_pieces && split->run == 1;
    for (uint32_t i = 0; i < plan->n_pieces; i++) {
        const struct attention_piece *piece = &plan->pieces[i];
        uint32_t run = i < split->n ? split->run : piece->n_segments;
        for (uint32_t j = 0; j < piece->n_segments; j += run) {
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

static uint32_t n_runs(const struct attention_piece *piece, uint32_t run)
{
    return (piece->n_segments + run - 1) / run;
}

/* States of each tile of a split piece: of its first run, and of every later segment. */
static uint32_t states_of(const struct attention_piece *piece, uint32_t run)
{
    return 1 + piece->n_segments - run;
}

/* Whether there is room for the pieces and states of a split. */
static bool has_room(const struct cpu_backend *cpu, const struct split *split)
{
    const struct attention_plan *plan = cpu->plan;
    uint64_t runs = 0, states = 0;
    for (uint32_t i = 0; i < split->n; i++) {
        const struct attention_piece *piece = &plan->pieces[i];
        if (piece->n_segments > MOST_SEGMENTS)
            return false;
        if (piece->n_segments <= split->run)
            continue;
        runs += n_runs(piece, split->run);
        states += (uint64_t)piece->n_tiles * states_of(piece, split->run);
    }
    return runs <= MOST_SPLIT && states * plan->partial_floats * sizeof(float) <= PARTIAL_BYTES;
}

/* The first n pieces in the longest runs that leave no thread idle; each run has a price of its own. */
static bool find_run(const struct cpu_backend *cpu, uint32_t n, uint32_t longest, struct split *out)
{
    *out = (struct split){n, longest};
    while (out->run > 1) {
        out->run = (out->run + 1) / 2;
        if (!has_room(cpu, out))
            return false;
        if (balanced(cpu, out))
            return true;
    }
    return false;
}

/* As few pieces as leave no thread idle: none, or those that are over when every thread has had as many, or all. */
static struct split choose_split(const struct cpu_backend *cpu)
{
    const struct attention_plan *plan = cpu->plan;
    struct split none = {0, 1}, some;
    uint32_t longest = 1, threads = thread_pool_size(cpu->pool);
    for (uint32_t i = 0; i < plan->n_pieces; i++)
        longest = plan->pieces[i].n_segments > longest ? plan->pieces[i].n_segments : longest;
    if (threads == 1 || balanced(cpu, &none))
        return none;
    if (find_run(cpu, plan->n_pieces % threads, longest, &some) || find_run(cpu, plan->n_pieces, longest, &some))
        return some;
    return some.run == 1 && has_room(cpu, &some) ? some : none;
}

/* Pieces are spread from the back so that none is overwritten before it is read. */
static void split_pieces(struct attention_plan *plan, const struct split *split)
{
    uint32_t n = plan->n_pieces, at = n, index = 0;
    plan->n_partials = 0;
    plan->run = split->run;
    for (uint32_t i = 0; i < split->n; i++)
        at += n_runs(&plan->pieces[i], split->run) - 1;
    plan->n_pieces = at;
    for (uint32_t i = n; i-- > 0;) {
        struct attention_piece piece = plan->pieces[i];
        uint32_t runs = i < split->n ? n_runs(&piece, split->run) : 1;
        at -= runs;
        if (runs == 1) {
            plan->pieces[at] = piece;
            continue;
        }
        piece.index = index++;
        piece.before = plan->n_partials;
        plan->n_partials += piece.n_tiles * states_of(&piece, split->run);
        atomic_store_explicit(&plan->left[piece.index], piece.n_segments, memory_order_relaxed);
        for (uint32_t j = 0; j < runs; j++) {
            piece.segment = j * split->run;
            piece.run = piece.n_segments - piece.segment < split->run ? piece.n_segments - piece.segment : split->run;
            plan->pieces[at + j] = piece;
        }
    }
}

/* Tiles that go through the keys together, where a head's keys and values are more than a core's own cache keeps for the next
 * tile. */
static uint32_t choose_group(struct cpu_backend *cpu)
{
    const struct kv_layer *kv = &cpu->layers[0];
    uint64_t bytes = (uint64_t)segments_of_longest(cpu) * SEGMENT * (kv->key_dim + kv->head_dim) * kv->value_bytes;
    return bytes < KEPT_BYTES || cpu->kv.windows ? 1 : MOST_GROUP;
}

static void plan_pieces(struct cpu_backend *cpu)
{
    struct attention_plan *plan = cpu->plan;
    struct split split;
    plan_whole_tiles(cpu, plan);
    struct attention_piece *tiles = plan->tiles;
    uint32_t n_tiles = plan->n_pieces, group = choose_group(cpu);
    if (group > 1)
        memcpy(tiles, plan->pieces, n_tiles * sizeof *tiles);
    for (; group > 1; group--) { /* the largest groups that need no splitting */
        plan->n_pieces = group_tiles(cpu, tiles, n_tiles, group, plan->pieces);
        if (balanced(cpu, &(struct split){0, 1}))
            break;
    }
    if (group == 1 && plan->n_pieces != n_tiles)
        plan->n_pieces = group_tiles(cpu, tiles, n_tiles, choose_group(cpu), plan->pieces);
    split = choose_split(cpu);
    split_pieces(plan, &split);
}

/* Decoding waits for memory: a thread that knows its next pieces can fetch ahead. Prompts need even shares more. */
static uint32_t choose_chunk(const struct cpu_backend *cpu, const struct attention_plan *plan)
{
    bool decode = cpu->step.n_rows < 4 * cpu->step.n_seqs;
    return decode && plan->n_pieces >= 8 * thread_pool_size(cpu->pool) ? THREAD_POOL_SHRINKING : 1;
}

void cpu_attention_begin(struct cpu_backend *cpu)
{
    struct attention_plan *plan = cpu->plan;
    plan->tile_rows = choose_tile_rows(cpu);
    plan->partial_floats = attention_state_floats(plan->tile_rows, cpu->kv.head_dim);
    plan_common_tiles(cpu);
    plan_pieces(cpu);
    plan->chunk = choose_chunk(cpu, plan);
}

/* ---- running it ---- */

struct attention_job {
    struct cpu_backend *cpu;
    const struct backend_attention *args;
};

/* The keys that a piece reads; those of segments in common have been read. */
static struct key_run keys_of(const struct cpu_backend *cpu, const struct attention_piece *piece)
{
    const struct backend_seq *seq = &cpu->step.seqs[piece->seq];
    const struct common_place *place = &cpu->plan->places[piece->seq];
    uint32_t end = last_position(cpu, piece, piece->tile + piece->n_tiles - 1);
    uint32_t begin = piece->segment == WHOLE ? 0 : piece->segment * SEGMENT;
    if (place->tile != NO_TILE)
        begin = cpu->plan->commons[place->tile].n_segments * SEGMENT;
    if (piece->segment != WHOLE && begin + piece->run * SEGMENT <= end)
        end = begin + piece->run * SEGMENT - 1;
    return (struct key_run){seq->blocks, piece->kv_head, begin, end};
}

/* Tile `index` of the sequence. next: what the thread goes on with after the piece. */
static void describe_tile(const struct attention_job *job, const struct attention_piece *piece, uint32_t index,
                          const struct key_run *next, struct attention_tile *tile)
{
    struct cpu_backend *cpu = job->cpu;
    const struct backend_seq *seq = &cpu->step.seqs[piece->seq];
    uint32_t group = cpu->kv.n_heads / cpu->kv.n_kv_heads, tile_rows = cpu->plan->tile_rows, first = index * tile_rows;
    uint32_t n = seq->n_rows * group - first;
    tile->kv = &cpu->layers[job->args->layer];
    tile->blocks = seq->blocks;
    tile->kv_head = piece->kv_head;
    tile->n_rows = n < tile_rows ? n : tile_rows;
    tile->last = last_position(cpu, piece, index);
    tile->segment = piece->segment;
    tile->n_segments = piece->run;
    tile->keys = keys_of(cpu, piece);
    tile->next = *next;
    tile->scale = job->args->scale;
    tile->window = cpu->kv.windows ? cpu->kv.windows[job->args->layer] : 0;
    for (uint32_t i = 0; i < tile->n_rows; i++) {
        uint32_t token = (first + i) / group, head = piece->kv_head * group + (first + i) % group;
        size_t at = (size_t)(seq->first_row + token) * job->args->q->cols + (size_t)head * cpu->kv.head_dim;
        tile->q[i] = job->args->q->data + at;
        tile->out[i] = job->args->out->data + at;
        tile->position[i] = seq->n_past + token;
    }
}

/* The state of tile t of a split piece over its first run, or, from 1 on, over a later segment. */
static struct attention_state partial_state(const struct cpu_backend *cpu, const struct attention_piece *piece, uint32_t t,
                                            uint32_t i, uint32_t n_rows)
{
    const struct attention_plan *plan = cpu->plan;
    size_t at = piece->before + t * states_of(piece, plan->run) + i;
    return attention_state_at(plan->partials + at * plan->partial_floats, n_rows, cpu->kv.head_dim);
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
    tile->last = common->n_segments * SEGMENT - 1;
    tile->keys = (struct key_run){tile->blocks, kv_head, 0, tile->last};
    tile->next = (struct key_run){0};
    tile->n_segments = 1;
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
    tile->n_segments = 1;
    for (; tile->segment <= tile->last / SEGMENT; tile->segment++) {
        kernels->attend(tile, scratch, &state);
        kernels->fold(tile, &total, &state);
    }
    kernels->combine(tile, &total, 1);
}

/* The thread's own states from number i on. */
static float *thread_states(const struct cpu_backend *cpu, uint32_t thread, uint32_t i)
{
    return cpu->plan->totals + ((size_t)thread * (MOST_GROUP + STRETCH) + i) * cpu->plan->total_floats;
}

/* The tiles through segments 0..end of their keys, all of them through a stretch before the next one, folded into a state of each
 * tile, totals. */
static void attend_stretches(struct cpu_backend *cpu, const struct attention_kernels *kernels, struct attention_tile *tiles,
                             uint32_t n, uint32_t end, const struct attention_state *totals, uint32_t thread)
{
    float *memory = thread_states(cpu, thread, MOST_GROUP);
    struct attention_state states[STRETCH];
    for (uint32_t first = 0; first < end; first += STRETCH)
        for (uint32_t t = 0; t < n; t++) {
            struct attention_tile *tile = &tiles[t];
            uint32_t seen = tile->last / SEGMENT + 1 < end ? tile->last / SEGMENT + 1 : end;
            if (seen <= first)
                continue;
            tile->segment = first;
            tile->n_segments = seen - first < STRETCH ? seen - first : STRETCH;
            for (uint32_t i = 0; i < tile->n_segments; i++)
                states[i] = attention_state_at(memory + i * cpu->plan->total_floats, tile->n_rows, cpu->kv.head_dim);
            if (first == 0)
                states[0] = totals[t];
            kernels->attend(tile, &cpu->attention[thread], states);
            for (uint32_t i = first == 0; i < tile->n_segments; i++)
                kernels->fold(tile, &totals[t], &states[i]);
        }
}

/* Several tiles, all keys. */
static void attend_group(struct cpu_backend *cpu, const struct attention_kernels *kernels, const struct attention_piece *piece,
                         struct attention_tile *tiles, uint32_t thread)
{
    struct attention_state totals[MOST_GROUP];
    float *memory = thread_states(cpu, thread, 0);
    for (uint32_t t = 0; t < piece->n_tiles; t++)
        totals[t] = attention_state_at(memory + t * cpu->plan->total_floats, tiles[t].n_rows, cpu->kv.head_dim);
    attend_stretches(cpu, kernels, tiles, piece->n_tiles, piece->n_segments, totals, thread);
    for (uint32_t t = 0; t < piece->n_tiles; t++)
        kernels->combine(&tiles[t], &totals[t], 1);
}

/* The results of a split piece's tile from its states. */
static void combine_runs(struct cpu_backend *cpu, const struct attention_kernels *kernels, const struct attention_piece *piece,
                         const struct attention_tile *tile, uint32_t t)
{
    struct attention_state states[MOST_SEGMENTS];
    uint32_t last = tile->last / SEGMENT, n = last < cpu->plan->run ? 1 : last - cpu->plan->run + 2;
    for (uint32_t i = 0; i < n; i++)
        states[i] = partial_state(cpu, piece, t, i, tile->n_rows);
    kernels->combine(tile, states, n);
}

/* A run of a split piece. The first run's segments are folded as they come; those of later runs wait for it, each in a state. */
static void attend_run(struct cpu_backend *cpu, const struct attention_kernels *kernels, const struct attention_piece *piece,
                       struct attention_tile *tiles, uint32_t thread)
{
    struct attention_plan *plan = cpu->plan;
    struct attention_state states[MOST_SEGMENTS], totals[MOST_GROUP];
    for (uint32_t t = 0; t < piece->n_tiles; t++)
        totals[t] = partial_state(cpu, piece, t, 0, tiles[t].n_rows);
    if (piece->segment == 0)
        attend_stretches(cpu, kernels, tiles, piece->n_tiles, piece->run, totals, thread);
    for (uint32_t t = 0; t < piece->n_tiles && piece->segment; t++) {
        uint32_t seen = tiles[t].last / SEGMENT + 1, n = seen <= piece->segment ? 0 : seen - piece->segment;
        tiles[t].n_segments = n < piece->run ? n : piece->run;
        for (uint32_t i = 0; i < tiles[t].n_segments; i++)
            states[i] = partial_state(cpu, piece, t, 1 + piece->segment - plan->run + i, tiles[t].n_rows);
        if (tiles[t].n_segments)
            kernels->attend(&tiles[t], &cpu->attention[thread], states);
    }
    _Atomic uint32_t *left = &plan->left[piece->index];
    if (atomic_fetch_sub_explicit(left, piece->run, memory_order_acq_rel) != piece->run)
        return;
    atomic_store_explicit(left, piece->n_segments, memory_order_relaxed); /* for the next layer */
    for (uint32_t t = 0; t < piece->n_tiles; t++)
        combine_runs(cpu, kernels, piece, &tiles[t], t);
}

static void attend_piece(struct attention_job *job, const struct attention_piece *piece, const struct key_run *next,
                         uint32_t thread)
{
    struct cpu_backend *cpu = job->cpu;
    const struct attention_kernels *kernels = cpu_attention_kernels(cpu, job->args->layer);
    struct attention_tile tiles[MOST_GROUP];
    for (uint32_t t = 0; t < piece->n_tiles; t++)
        describe_tile(job, piece, piece->tile + t, next, &tiles[t]);
    if (cpu->plan->places[piece->seq].tile != NO_TILE)
        attend_rest(cpu, &tiles[0], &cpu->plan->places[piece->seq], thread);
    else if (piece->segment != WHOLE)
        attend_run(cpu, kernels, piece, tiles, thread);
    else if (piece->n_tiles > 1)
        attend_group(cpu, kernels, piece, tiles, thread);
    else
        kernels->attend(&tiles[0], &cpu->attention[thread], NULL);
}

static void attend(void *arg, uint32_t thread, uint32_t first, uint32_t end)
{
    struct attention_job *job = arg;
    const struct attention_piece *pieces = job->cpu->plan->pieces;
    for (uint32_t i = first; i < end; i++) {
        struct key_run next = i + 1 < end ? keys_of(job->cpu, &pieces[i + 1]) : (struct key_run){0};
        attend_piece(job, &pieces[i], &next, thread);
    }
}

void cpu_attention(struct backend *backend, const struct backend_attention *args)
{
    struct attention_job job = {cpu_of(backend), args};
    thread_pool_for(job.cpu->pool, job.cpu->plan->n_commons * job.cpu->kv.n_kv_heads, 1, attend_common, &job);
    thread_pool_for(job.cpu->pool, job.cpu->plan->n_pieces, job.cpu->plan->chunk, attend, &job);
}
