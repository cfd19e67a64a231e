/* The operation `attention`: a thread computes the pieces that it takes. How they are cut: attention_plan.h. */
#include "gpu-worker/backend/cpu/attention_plan.h"

struct attention_job {
    struct cpu_backend *cpu;
    const struct backend_attention *args;
};

/* The keys that a piece reads; those of segments in common have been read. */
static struct key_run keys_of(const struct cpu_backend *cpu, const struct attention_piece *piece)
{
    const struct backend_seq *seq = &cpu->step.seqs[piece->seq];
    const struct common_place *place = &cpu->plan->places[piece->seq];
    uint32_t end = attention_last(cpu, piece, piece->tile + piece->n_tiles - 1);
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
    tile->last = attention_last(cpu, piece, index);
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
    size_t at = piece->before + t * attention_states_of(piece, plan->run) + i;
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
