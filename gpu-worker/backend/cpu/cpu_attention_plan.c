/* How a step's rows become pieces for the thread pool: see attention_plan.h. */
#include "gpu-worker/backend/cpu/attention_plan.h"
#include <stdlib.h>
#include <string.h>

enum {
    PARTIAL_BYTES = 16 << 20,
    COMMON_BYTES = 4 << 20,
    MOST_OWN_ROWS = 16, /* of a sequence in a common tile: more fill a tile by themselves */
    MOST_CANDIDATES = 256,
    WORTH = 4,            /* a sequence shares where at least a quarter of its keys are common */
    MOST_SPLIT = 4096,    /* runs in a step */
    KEPT_BYTES = 1 << 20, /* of a head's keys and values that a core's own cache keeps for the next tile */
    MOST_BALANCED = 64,   /* threads */
    MOST_IDLE = 6         /* percent of the threads' time */
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

/* Segments that every row of the sequence sees whole. */
static uint32_t whole_segments(const struct cpu_backend *cpu, uint32_t s)
{
    return cpu->step.seqs[s].n_past / SEGMENT;
}

static bool may_share(const struct cpu_backend *cpu, uint32_t s)
{
    return cpu->plan->places[s].tile == NO_TILE && whole_segments(cpu, s) && attention_rows_of(cpu, s) <= MOST_OWN_ROWS;
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
    uint32_t rows = attention_rows_of(cpu, s);
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

/* One piece a tile and kv head, the last tile first: later tiles of a prompt see more keys, and the longest should not start
 * last. */
static void plan_whole_tiles(struct cpu_backend *cpu, struct attention_plan *plan)
{
    plan->n_pieces = 0;
    for (uint32_t s = cpu->step.n_seqs; s-- > 0;) {
        bool common = plan->places[s].tile != NO_TILE;
        for (uint32_t tile = (attention_rows_of(cpu, s) + plan->tile_rows - 1) / plan->tile_rows; tile-- > 0;)
            for (uint32_t kv = 0; kv < cpu->kv.n_kv_heads; kv++) {
                struct attention_piece piece = {.seq = s, .tile = tile, .n_tiles = 1, .kv_head = kv, .segment = WHOLE};
                piece.n_segments = common ? 1 : attention_last(cpu, &piece, tile) / SEGMENT + 1;
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
    uint32_t tile_rows = cpu->plan->tile_rows, rows = attention_rows_of(cpu, piece->seq) - piece->tile * tile_rows;
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
        states += (uint64_t)piece->n_tiles * attention_states_of(piece, split->run);
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
        plan->n_partials += piece.n_tiles * attention_states_of(&piece, split->run);
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

/* The largest groups that leave no thread idle. Where none does: the largest of all, of which some are split. */
static void plan_pieces(struct cpu_backend *cpu)
{
    struct attention_plan *plan = cpu->plan;
    const struct split none = {0, 1};
    plan_whole_tiles(cpu, plan);
    uint32_t n_tiles = plan->n_pieces, most = choose_group(cpu), group = most;
    memcpy(plan->tiles, plan->pieces, n_tiles * sizeof *plan->tiles);
    for (; group > 1; group--) {
        plan->n_pieces = group_tiles(cpu, plan->tiles, n_tiles, group, plan->pieces);
        if (balanced(cpu, &none))
            break;
    }
    if (group == 1)
        plan->n_pieces = group_tiles(cpu, plan->tiles, n_tiles, most, plan->pieces);
    struct split split = choose_split(cpu);
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
