#include "gpu-worker/engine/drafter.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/engine/batch.h"
#include "gpu-worker/log.h"

struct drafter {
    struct drafter_options options;
    struct kvg_hash *marks;        /* [n_blocks] the chain hash of the whole block that the draft model computed last */
    uint32_t *ids;                 /* [max_rows] */
    struct model_seq *seqs;        /* [max_seqs] */
    uint32_t *outputs;             /* [max_seqs] */
    struct draft_order **drawn;    /* [n_outputs] */
    struct sample_row *samples;    /* [n_outputs] */
    struct sample_result *results; /* [n_outputs] */
    float *probs;                  /* [keep_probs, n_vocab] */
    struct model_batch batch;
};

static bool same_text(struct kvg_str a, struct kvg_str b)
{
    return a.len == b.len && (a.len == 0 || memcmp(a.bytes, b.bytes, a.len) == 0);
}

int drafter_check_vocab(const struct kvg_tokenizer *target, const struct kvg_tokenizer *draft, uint32_t draft_rows,
                        struct kvg_error *err)
{
    uint32_t n = kvg_tokenizer_info(target)->n_vocab, n_draft = kvg_tokenizer_info(draft)->n_vocab;

    for (uint32_t id = 0; id < n && id < n_draft; id++) {
        struct kvg_str a = kvg_token_text(target, id), b = kvg_token_text(draft, id);
        if (!same_text(a, b) || kvg_token_kind(target, id) != kvg_token_kind(draft, id))
            return kvg_fail(err, KVG_INVALID,
                            "the draft model has another vocabulary: id %u is \"%.*s\", the model's is \"%.*s\"", id,
                            (int)(b.len < 40 ? b.len : 40), b.bytes, (int)(a.len < 40 ? a.len : 40), a.bytes);
    }
    if (n_draft < n || draft_rows < n)
        return kvg_fail(err, KVG_INVALID, "the draft model's vocabulary ends before id %u; the model has %u ids",
                        n_draft < draft_rows ? n_draft : draft_rows, n);
    return 0;
}

int drafter_open(struct drafter **out, const struct drafter_options *options, struct kvg_error *err)
{
    struct drafter *drafter = calloc(1, sizeof *drafter);
    uint32_t n = options->max_seqs;

    if (!drafter)
        return kvg_fail(err, KVG_NOMEM, "no memory for a drafter");
    drafter->options = *options;
    drafter->marks = calloc(options->n_blocks, sizeof *drafter->marks);
    drafter->ids = calloc(options->max_rows, sizeof *drafter->ids);
    drafter->seqs = calloc(n, sizeof *drafter->seqs);
    drafter->outputs = calloc(n, sizeof *drafter->outputs);
    drafter->drawn = calloc(n, sizeof(struct draft_order *));
    drafter->samples = calloc(n, sizeof *drafter->samples);
    drafter->results = calloc(n, sizeof *drafter->results);
    if (options->keep_probs)
        drafter->probs = malloc((size_t)options->keep_probs * options->n_vocab * sizeof *drafter->probs);
    drafter->batch = (struct model_batch){.ids = drafter->ids, .seqs = drafter->seqs, .outputs = drafter->outputs};
    int rc = model_kv_alloc(options->model, options->n_blocks, options->block_size, err);
    if (rc == 0 && (!drafter->marks || !drafter->ids || !drafter->seqs || !drafter->outputs || !drafter->drawn ||
                    !drafter->samples || !drafter->results || (options->keep_probs && !drafter->probs)))
        rc = kvg_fail(err, KVG_NOMEM, "no memory for drafts of %u sequences", n);
    if (rc < 0) {
        drafter_close(drafter);
        return rc;
    }
    *out = drafter;
    return 0;
}

void drafter_close(struct drafter *drafter)
{
    if (!drafter)
        return;
    free(drafter->marks);
    free(drafter->ids);
    free(drafter->seqs);
    free(drafter->outputs);
    free(drafter->drawn);
    free(drafter->samples);
    free(drafter->results);
    free(drafter->probs);
    free(drafter);
}

uint32_t drafter_longest(const struct drafter *drafter)
{
    return model_info(drafter->options.model)->max_position;
}

uint32_t drafter_covered(const struct drafter *drafter, const struct sequence *seq)
{
    uint32_t size = drafter->options.block_size, n = 0;

    while (n < seq->held.n_hashed && (n + 1) * size < seq->n_ids &&
           memcmp(&drafter->marks[seq->held.blocks[n]], &seq->held.hash[n], sizeof *seq->held.hash) == 0)
        n++;
    return n * size;
}

/* The KV of the ids up to n_computed is there: whole blocks are marked, beginning with the last one before `from`, whose hash may
 * not have been known in the step that filled it. Only tokens that the target has computed are hashed, so never a draft. */
static void mark(struct drafter *drafter, const struct draft_order *order, uint32_t from)
{
    const struct cache_seq *held = &order->seq->held;
    uint32_t size = drafter->options.block_size, whole = order->n_computed / size;

    for (uint32_t i = from < size ? 0 : from / size - 1; i < whole && i < held->n_hashed; i++)
        drafter->marks[held->blocks[i]] = held->hash[i];
}

static void add_output(struct drafter *drafter, struct draft_order *order, uint32_t position)
{
    struct model_batch *batch = &drafter->batch;
    struct sample_row row = batch_sample_row(order->seq, batch->n_outputs, drafter->options.n_vocab);

    row.position = position;
    row.want_logprob = true;
    row.top_logprobs = 0;
    drafter->drawn[batch->n_outputs] = order;
    drafter->samples[batch->n_outputs] = row;
    drafter->outputs[batch->n_outputs++] = batch->n_rows - 1;
}

/* The order's rows of round `made`: what is missing up to the last draft. */
static void add_rows(struct drafter *drafter, struct draft_order *order, uint32_t made, uint32_t *room)
{
    struct model_batch *batch = &drafter->batch;
    const struct sequence *seq = order->seq;
    uint32_t end = seq->n_ids + made, rows = end - order->n_computed, from = order->n_computed;

    if (rows > *room) {
        rows = *room;
        order->n = 0;
    }
    if (rows == 0)
        return;
    drafter->seqs[batch->n_seqs++] = (struct model_seq){
        .first_row = batch->n_rows, .n_rows = rows, .n_past = from, .blocks = seq->held.blocks, .n_blocks = seq->held.n_blocks};
    memcpy(drafter->ids + batch->n_rows, seq->ids + from, rows * sizeof *drafter->ids);
    batch->n_rows += rows;
    *room -= rows;
    order->n_computed += rows;
    if (order->n)
        add_output(drafter, order, end);
    mark(drafter, order, from);
}

static void forward(struct drafter *drafter)
{
    struct model_batch *batch = &drafter->batch;
    struct kvg_error err;

    if (model_forward(drafter->options.model, batch, &err) < 0 ||
        (batch->n_outputs &&
         model_sample(drafter->options.model, drafter->samples, batch->n_outputs, drafter->results, &err) < 0))
        log_fatal("drafter: forward of %u rows: %s", batch->n_rows, err.message);
}

void drafter_begin(struct drafter *drafter, const struct draft_order *orders, uint32_t n)
{
    float *at = drafter->probs;

    for (uint32_t i = 0; i < n && at; i++) {
        orders[i].seq->draft_probs = at;
        at += (size_t)orders[i].n * drafter->options.n_vocab;
    }
}

/* Ids that the draft model did not score cannot have been drawn. */
static void keep_probs(struct drafter *drafter, uint32_t made)
{
    const struct model_info *info = model_info(drafter->options.model);
    uint32_t scored = drafter->batch.brief ? info->scored : info->n_vocab, n_vocab = drafter->options.n_vocab;
    const float *logits = drafter->probs && drafter->batch.n_outputs ? model_logits(drafter->options.model) : NULL;

    for (uint32_t i = 0; i < drafter->batch.n_outputs && logits; i++) {
        const float *first = drafter->drawn[i]->seq->draft_probs;
        float *own = drafter->probs + (first - drafter->probs) + (size_t)made * n_vocab;
        for (uint32_t id = scored; id < n_vocab; id++)
            own[id] = 0;
        sample_distribution_cpu(logits + (size_t)i * scored, scored, &drafter->samples[i], own);
    }
}

uint32_t drafter_round(struct drafter *drafter, struct draft_order *orders, uint32_t n, uint32_t made, uint32_t most, bool brief)
{
    struct model_batch *batch = &drafter->batch;

    most = most > 2 * n ? most : 2 * n; /* all that lack no more than usual get drafts */
    most = most < drafter->options.max_rows ? most : drafter->options.max_rows;
    uint32_t room = most;
    batch->n_rows = batch->n_seqs = batch->n_outputs = 0;
    batch->brief = brief;
    for (uint32_t i = 0; i < n; i++)
        if (made == 0 || made < orders[i].n)
            add_rows(drafter, &orders[i], made, &room);
    if (batch->n_rows == 0)
        return 0;
    forward(drafter);
    keep_probs(drafter, made);
    for (uint32_t i = 0; i < batch->n_outputs; i++) {
        struct draft_order *order = drafter->drawn[i];
        order->seq->ids[order->seq->n_ids + made] = drafter->results[i].id;
        order->sure = exp(drafter->results[i].logprob);
    }
    return batch->n_rows;
}
