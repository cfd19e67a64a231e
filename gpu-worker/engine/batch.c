#include "gpu-worker/engine/batch.h"
#include <stdlib.h>
#include <string.h>
#include "gpu-worker/engine/accept.h"

/* Tests plant a mistake with these, to see that they would find it. */
#ifndef BATCH_OFF_BY_ROW
#define BATCH_OFF_BY_ROW 0
#endif
#ifndef BATCH_OFF_BY_DRAFT
#define BATCH_OFF_BY_DRAFT 0
#endif

int batch_init(struct batch *batch, uint32_t max_rows, uint32_t max_seqs, uint32_t max_outputs, struct kvg_error *err)
{
    *batch = (struct batch){.ids = calloc(max_rows, sizeof *batch->ids),
                            .seqs = calloc(max_seqs, sizeof *batch->seqs),
                            .outputs = calloc(max_outputs, sizeof *batch->outputs),
                            .samples = calloc(max_outputs, sizeof *batch->samples),
                            .results = calloc(max_outputs, sizeof *batch->results),
                            .draws = calloc(max_seqs, sizeof *batch->draws)};
    if (!batch->ids || !batch->seqs || !batch->outputs || !batch->samples || !batch->results || !batch->draws) {
        batch_free(batch);
        return kvg_fail(err, KVG_NOMEM, "no memory for batches of %u rows and %u sequences", max_rows, max_seqs);
    }
    batch->model.ids = batch->ids;
    batch->model.seqs = batch->seqs;
    batch->model.outputs = batch->outputs;
    return 0;
}

void batch_free(struct batch *batch)
{
    free(batch->ids);
    free(batch->seqs);
    free(batch->outputs);
    free(batch->samples);
    free(batch->results);
    free(batch->draws);
    *batch = (struct batch){0};
}

struct sample_row batch_sample_row(const struct sequence *seq, uint32_t output, uint32_t n_vocab)
{
    const struct request *request = seq->request;
    const struct engine_params *params = &request->params;
    bool ends_banned = sequence_generated(seq) < params->min_tokens;

    return (struct sample_row){.output = output,
                               .seed = params->seed,
                               .choice = seq->choice,
                               .position = seq->n_ids,
                               .temperature = params->temperature,
                               .top_p = params->top_p,
                               .min_p = params->min_p,
                               .top_k = params->top_k,
                               .repetition_penalty = params->repetition_penalty,
                               .presence_penalty = params->presence_penalty,
                               .frequency_penalty = params->frequency_penalty,
                               .counts = seq->counts,
                               .n_counts = seq->n_counts,
                               .biases = params->biases,
                               .n_biases = (uint32_t)params->n_biases,
                               .banned = request->banned,
                               .n_banned = ends_banned ? request->n_banned : 0,
                               .n_vocab = n_vocab,
                               .top_logprobs = params->want_logprobs ? params->top_logprobs : 0,
                               .want_logprob = params->want_logprobs};
}

/* The batch has the entry's rows: the last of them but the drafts, and the drafts, are outputs. */
static void add_draw(struct batch *batch, const struct plan_entry *entry)
{
    struct model_batch *model = &batch->model;

    batch->draws[batch->n_draws++] =
        (struct draw){.seq = entry->seq, .output = model->n_outputs, .n_drafts = entry->n_drafts, .n_proposed = entry->n_drafts};
    for (uint32_t row = model->n_rows - 1 - entry->n_drafts; row < model->n_rows; row++)
        batch->outputs[model->n_outputs++] = row + (row + 1 < model->n_rows ? BATCH_OFF_BY_ROW : 0);
}

struct accept_draft batch_draft(const struct draw *draw, uint32_t n_vocab)
{
    uint32_t at = draw->n_proposed - draw->n_drafts;
    const float *probs = draw->seq->draft_probs;

    at += draw->n_drafts > 1 ? BATCH_OFF_BY_DRAFT : 0;
    return (struct accept_draft){.id = draw->seq->ids[draw->seq->n_ids], .q = probs ? probs + (size_t)at * n_vocab : NULL};
}

/* How the token behind the next n drafts is drawn, if they are accepted. */
static struct sample_row sample_behind(const struct draw *draw, uint32_t n, uint32_t n_vocab)
{
    const struct request *request = draw->seq->request;
    struct sample_row row = batch_sample_row(draw->seq, draw->output + n, n_vocab);

    row.position += n;
    if (sequence_generated(draw->seq) + n >= request->params.min_tokens)
        row.n_banned = 0;
    return row;
}

uint32_t batch_sampling(struct batch *batch, uint32_t n_vocab, bool ahead)
{
    uint32_t first = batch->n_samples;

    for (uint32_t i = 0; i < batch->n_draws; i++) {
        struct draw *draw = &batch->draws[i];
        if (draw->n_ahead) {
            draw->at++;
            draw->n_ahead--;
            continue;
        }
        draw->at = batch->n_samples;
        draw->n_ahead = ahead && !draw->seq->counts ? draw->n_drafts : 0;
        for (uint32_t k = 0; k <= draw->n_ahead; k++)
            batch->samples[batch->n_samples++] = sample_behind(draw, k, n_vocab);
    }
    return batch->n_samples - first;
}

void batch_fill(struct batch *batch, const struct step_plan *plan)
{
    struct model_batch *model = &batch->model;

    model->n_rows = model->n_outputs = batch->n_draws = batch->n_samples = 0;
    model->n_seqs = plan->n;
    for (uint32_t i = 0; i < plan->n; i++) {
        const struct plan_entry *entry = &plan->entries[i];
        struct sequence *seq = entry->seq;
        batch->seqs[i] = (struct model_seq){.first_row = model->n_rows,
                                            .n_rows = entry->n_rows,
                                            .n_past = seq->n_computed,
                                            .blocks = seq->held.blocks,
                                            .n_blocks = seq->held.n_blocks};
        memcpy(batch->ids + model->n_rows, seq->ids + seq->n_computed, entry->n_rows * sizeof *batch->ids);
        model->n_rows += entry->n_rows;
        if (entry->samples)
            add_draw(batch, entry);
    }
}
