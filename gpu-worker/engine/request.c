#include "gpu-worker/engine/request.h"
#include <openssl/sha.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_CHOICES = 128 };

static void *copy(struct kvg_arena *arena, const void *from, size_t n, size_t size)
{
    void *to = kvg_arena_alloc(arena, n * size);
    if (to && n)
        memcpy(to, from, n * size);
    return to;
}

static int check_prompt(const struct request_world *world, const struct engine_submit *submit, struct kvg_error *err)
{
    if (submit->n_ids == 0)
        return kvg_fail(err, KVG_INVALID, "the prompt is empty");
    if (submit->n_ids >= world->max_len)
        return kvg_fail(err, KVG_INVALID, "the prompt has %zu tokens; with one more it exceeds the model's context of %u tokens",
                        submit->n_ids, world->max_len);
    if (submit->n_ids >= world->pool_tokens)
        return kvg_fail(err, KVG_INVALID, "the prompt has %zu tokens; with one more it exceeds the KV cache of %u tokens",
                        submit->n_ids, world->pool_tokens);
    for (size_t i = 0; i < submit->n_ids; i++)
        if (submit->ids[i] >= world->n_vocab)
            return kvg_fail(err, KVG_INVALID, "prompt token %zu is %u, but the vocabulary has %u", i, submit->ids[i],
                            world->n_vocab);
    if (submit->params.n == 0 || submit->params.n > MOST_CHOICES)
        return kvg_fail(err, KVG_INVALID, "n is %u; it must be from 1 to %d", submit->params.n, MOST_CHOICES);
    return 0;
}

static int copy_params(struct request *request, const struct request_world *world, const struct engine_params *params)
{
    struct engine_params *own = &request->params;
    bool ends = !params->ignore_eos;
    size_t n_end = ends ? world->vocab->n_end_ids : 0;

    *own = *params;
    own->stop = NULL; /* the set has them */
    own->stop_len = NULL;
    own->biases = copy(&request->arena, params->biases, params->n_biases, sizeof *params->biases);
    uint32_t *banned = kvg_arena_alloc(&request->arena, (n_end + params->n_stop_ids) * sizeof *banned);
    if (!own->biases || !banned)
        return KVG_NOMEM;
    if (n_end)
        memcpy(banned, world->vocab->end_ids, n_end * sizeof *banned);
    if (params->n_stop_ids)
        memcpy(banned + n_end, params->stop_ids, params->n_stop_ids * sizeof *banned);
    own->stop_ids = banned + n_end;
    request->banned = banned;
    request->n_banned = (uint32_t)(n_end + params->n_stop_ids);
    if (stop_set_init(&request->stops, &request->arena, params->stop, params->stop_len, params->n_stop) < 0)
        return KVG_NOMEM;
    request->text = kvg_arena_alloc(&request->arena, world->longest_piece + request->stops.longest + 16);
    return request->text ? 0 : KVG_NOMEM;
}

static bool has_penalty(const struct engine_params *params)
{
    return params->repetition_penalty != 1 || params->presence_penalty != 0 || params->frequency_penalty != 0;
}

static int by_id(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* The prompt's ids and how often each occurs, with room for those to come. */
static int count_prompt(struct sequence *seq, uint32_t n_vocab)
{
    struct kvg_arena *arena = &seq->request->arena;
    uint32_t most = seq->limit < n_vocab ? seq->limit : n_vocab;
    uint32_t *sorted = copy(arena, seq->ids, seq->n_prompt, sizeof *sorted);

    seq->counts = kvg_arena_alloc(arena, most * sizeof *seq->counts);
    if (!sorted || !seq->counts)
        return KVG_NOMEM;
    qsort(sorted, seq->n_prompt, sizeof *sorted, by_id);
    for (uint32_t i = 0; i < seq->n_prompt; i++) {
        if (i == 0 || sorted[i] != sorted[i - 1])
            seq->counts[seq->n_counts++] = (struct sample_count){.id = sorted[i]};
        seq->counts[seq->n_counts - 1].prompt++;
    }
    return 0;
}

void sequence_count(struct sequence *seq, uint32_t id)
{
    uint32_t low = 0, high = seq->n_counts;

    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (seq->counts[middle].id < id)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == seq->n_counts || seq->counts[low].id != id) {
        memmove(seq->counts + low + 1, seq->counts + low, (seq->n_counts - low) * sizeof *seq->counts);
        seq->counts[low] = (struct sample_count){.id = id};
        seq->n_counts++;
    }
    seq->counts[low].output++;
}

static int init_sequence(struct sequence *seq, struct request *request, const struct request_world *world,
                         const struct engine_submit *submit)
{
    struct kvg_arena *arena = &request->arena;
    uint32_t most = world->max_len < world->pool_tokens ? world->max_len : world->pool_tokens;
    uint32_t n = (uint32_t)submit->n_ids, room = most - n;

    seq->request = request;
    seq->n_prompt = seq->n_ids = n;
    seq->limit = n + (submit->params.max_tokens < room ? submit->params.max_tokens : room);
    uint32_t n_blocks = seq->limit / world->block_size + 1;
    seq->ids = kvg_arena_alloc(arena, (size_t)seq->limit * sizeof *seq->ids);
    seq->held.blocks = kvg_arena_alloc(arena, (size_t)n_blocks * sizeof *seq->held.blocks);
    seq->held.hash = kvg_arena_alloc(arena, (size_t)n_blocks * sizeof *seq->held.hash);
    if (!seq->ids || !seq->held.blocks || !seq->held.hash || stop_match_init(&seq->stop, arena, &request->stops) < 0)
        return KVG_NOMEM;
    memcpy(seq->ids, submit->ids, submit->n_ids * sizeof *seq->ids);
    seq->held.salt = &request->salt;
    seq->detokenizer.tokenizer = kvg_prompt_model_tokenizer(world->prompt_model);
    seq->detokenizer.keep_leading_space = !submit->params.drop_leading_space;
    return has_penalty(&request->params) ? count_prompt(seq, world->n_vocab) : 0;
}

static int fill(struct request *request, const struct request_world *world, const struct engine_submit *submit)
{
    struct kvg_chain_identity identity = {.model = world->model_name,
                                          .fingerprint = *kvg_prompt_model_fingerprint(world->prompt_model),
                                          .block_size = world->block_size,
                                          .salt = submit->salt,
                                          .salt_len = submit->salt_len};

    if (copy_params(request, world, &submit->params) < 0)
        return KVG_NOMEM;
    SHA256((const unsigned char *)(submit->salt_len ? submit->salt : ""), submit->salt_len, request->salt.digest);
    request->n_choices = request->n_open = submit->params.n;
    request->choices = kvg_arena_zalloc(&request->arena, request->n_choices * sizeof *request->choices);
    if (!request->choices)
        return KVG_NOMEM;
    for (uint32_t i = 0; i < request->n_choices; i++) {
        struct sequence *seq = &request->choices[i];
        seq->choice = i;
        if (init_sequence(seq, request, world, submit) < 0)
            return KVG_NOMEM;
        kvg_chain_seed(&identity, &seq->held.seed);
        cache_hash(&seq->held, seq->ids, seq->n_ids, world->block_size);
    }
    return 0;
}

int request_create(struct request **out, const struct request_world *world, const struct engine_submit *submit,
                   struct kvg_error *err)
{
    int rc = check_prompt(world, submit, err);
    if (rc < 0)
        return rc;
    struct request *request = calloc(1, sizeof *request);
    if (!request)
        return kvg_fail(err, KVG_NOMEM, "no memory for a request");
    kvg_arena_init(&request->arena, 0);
    request->sink = submit->sink;
    request->context = submit->context;
    request->warm = submit->warm;
    if (fill(request, world, submit) < 0) {
        request_free(request);
        return kvg_fail(err, KVG_NOMEM, "no memory for a request of %zu tokens and %u choices", submit->n_ids, submit->params.n);
    }
    *out = request;
    return 0;
}

void request_free(struct request *request)
{
    if (!request)
        return;
    kvg_arena_free(&request->arena);
    free(request);
}
