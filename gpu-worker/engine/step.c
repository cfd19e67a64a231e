#include "gpu-worker/engine/step.h"
#include "gpu-worker/engine/clock.h"
#include <stdlib.h>
#include "gpu-worker/log.h"

/* ---- what the cache tells goes to the publisher ---------------------------------------------------------------------------- */

/* The publisher asks for everything after a reconnect or a gap; it must come before the next event. */
static void answer_snapshot(struct stepper *step)
{
    const struct kvg_hash *hashes;

    if (!step->publisher || !publisher_wants_snapshot(step->publisher))
        return;
    size_t n = cache_snapshot(step->cache, &hashes);
    publisher_snapshot(step->publisher, hashes, n);
}

static void on_stored(void *context, const struct kvg_hash *hash, size_t n)
{
    struct stepper *step = context;
    answer_snapshot(step);
    publisher_stored(step->publisher, hash, n);
}

static void on_evicted(void *context, const struct kvg_hash *hash, size_t n)
{
    struct stepper *step = context;
    answer_snapshot(step);
    publisher_evicted(step->publisher, hash, n);
}

/* ---- life ------------------------------------------------------------------------------------------------------------------ */

static int open_speculation(struct stepper *step, const struct step_options *options, struct kvg_error *err)
{
    struct speculate_options spec = options->spec;
    int rc = options->drafter.model ? drafter_open(&spec.drafter, &options->drafter, err) : 0;

    spec.cache = step->cache;
    if (rc < 0 || (rc = speculate_open(&step->spec, &spec, err)) == 0)
        return rc;
    drafter_close(spec.drafter);
    return rc;
}

int step_init(struct stepper *step, const struct step_options *options, struct kvg_error *err)
{
    struct cache_options cache = {.n_blocks = options->n_blocks,
                                  .block_size = options->sched.block_size,
                                  .disable_prefix_caching = options->sched.disable_prefix_caching};
    int rc;

    if (step->publisher)
        cache.events = (struct cache_events){.stored = on_stored, .evicted = on_evicted, .context = step};
    step->n_vocab = options->n_vocab;
    step->max_rows = options->sched.max_rows;
    if ((rc = cache_open(&step->cache, &cache, err)) < 0 ||
        (rc = sched_init(&step->sched, &options->sched, step->cache, err)) < 0 ||
        (rc = batch_init(&step->batch, options->sched.max_rows, options->sched.max_num_seqs,
                         options->sched.max_num_seqs + options->spec.most_drafts, err)) < 0 ||
        (options->spec.most_drafts && (rc = open_speculation(step, options, err)) < 0))
        return rc;
    step->plan.entries = calloc(options->sched.max_num_seqs, sizeof *step->plan.entries);
    step->output.piece = malloc(options->longest_piece + 8);
    step->accept = options->accept;
    if (step->accept != ACCEPT_COUPLED)
        step->scratch = malloc(model_info(step->model)->n_vocab * sizeof *step->scratch);
    if (!step->plan.entries || !step->output.piece || (step->accept != ACCEPT_COUPLED && !step->scratch))
        return kvg_fail(err, KVG_NOMEM, "no memory for the step's tables");
    return 0;
}

void step_free(struct stepper *step)
{
    free(step->plan.entries);
    free(step->output.piece);
    free(step->scratch);
    speculate_close(step->spec);
    batch_free(&step->batch);
    sched_free(&step->sched);
    cache_close(step->cache);
}

/* ---- events ---------------------------------------------------------------------------------------------------------------- */

static void count_finish(struct stepper *step, const struct sequence *seq, enum engine_finish finish, double now)
{
    struct engine_metrics *m = step->metrics;

    m->finished_stop += finish == FINISH_STOP;
    m->finished_length += finish == FINISH_LENGTH;
    m->finished_abort += finish == FINISH_ABORT || finish == FINISH_ERROR;
    if (finish != FINISH_STOP && finish != FINISH_LENGTH)
        return;
    histogram_add(&m->e2e_time, now - seq->request->t_submitted);
    if (seq->t_first > 0)
        histogram_add(&m->decode_time, now - seq->t_first);
}

/* Hands the event to the client's sink. After the last one of a choice its blocks are already free; after the last one of the
 * request, the request is gone. */
static void emit(struct stepper *step, struct sequence *seq, struct engine_event *event, double now)
{
    struct request *request = seq->request;

    if (event->finish != FINISH_NONE) {
        sched_remove(&step->sched, seq);
        count_finish(step, seq, event->finish, now);
        event->last_choice = --request->n_open == 0;
    }
    request->sink(request->context, event);
    if (event->last_choice)
        step->ended(step->context, request);
}

void step_add(struct stepper *step, struct request *request)
{
    struct engine_event event;
    double now = clock_now();

    for (uint32_t i = 0, n = request->n_choices; i < n; i++) {
        struct sequence *seq = &request->choices[i];
        if (seq->n_ids < seq->limit) {
            sched_add(&step->sched, seq, request->t_submitted);
            continue;
        }
        output_end(seq, FINISH_LENGTH, NULL, &event); /* max_tokens 0 */
        emit(step, seq, &event, now);
    }
}

void step_abort(struct stepper *step, struct request *request, enum engine_finish finish, const char *error)
{
    struct engine_event event;
    double now = clock_now();

    for (uint32_t i = 0, n = request->n_choices; i < n; i++) {
        struct sequence *seq = &request->choices[i];
        if (seq->state == SEQUENCE_DONE)
            continue;
        output_end(seq, finish, error, &event);
        emit(step, seq, &event, now);
        if (event.last_choice)
            return; /* gone */
    }
}

static void count_token(struct stepper *step, struct sequence *seq, double now)
{
    struct engine_metrics *m = step->metrics;

    m->generation_tokens++;
    if (seq->t_first == 0) {
        seq->t_first = now;
        histogram_add(&m->ttft, now - seq->request->t_submitted);
        histogram_add(&m->prefill_time, now - seq->t_admitted);
    } else {
        histogram_add(&m->inter_token, now - seq->t_last);
    }
    seq->t_last = now;
}

/* ---- the step -------------------------------------------------------------------------------------------------------------- */

/* A sequence in its first step: what it found in the cache. */
static void count_admission(struct stepper *step, struct sequence *seq)
{
    struct engine_metrics *m = step->metrics;

    seq->counted = true;
    m->prompt_tokens += seq->n_prompt;
    m->prefix_query_tokens += step->sched.options.disable_prefix_caching ? 0 : seq->n_prompt;
    m->prefix_hit_tokens += seq->cached_tokens;
    histogram_add(&m->queue_time, seq->t_admitted - seq->request->t_submitted);
}

static void count_plan(struct stepper *step)
{
    const struct step_plan *plan = &step->plan;
    struct engine_metrics *m = step->metrics;

    for (uint32_t i = 0; i < plan->n; i++)
        if (!plan->entries[i].seq->counted)
            count_admission(step, plan->entries[i].seq);
    m->steps++;
    m->computed_prompt_tokens += plan->n_rows - plan->n_decodes - plan->n_drafts;
    histogram_add(&m->rows_per_forward, plan->n_rows);
    histogram_add(&m->sequences_per_forward, plan->n);
    histogram_add(&m->batch_utilization, (double)plan->n_rows / step->max_rows);
}

/* What was drawn as without drafts gives way to a draft, or to what the rule draws in its place. */
static void accept_drafts(struct stepper *step)
{
    struct batch *batch = &step->batch;
    const float *logits = NULL; /* asked for where a draft needs them: a device copies them */
    uint32_t n_vocab = model_info(step->model)->n_vocab;

    for (uint32_t i = 0; i < batch->n_draws; i++) {
        const struct draw *draw = &batch->draws[i];
        if (draw->n_drafts == 0)
            continue;
        if (!logits && !(logits = model_logits(step->model)))
            log_fatal("engine: the logits of %u rows cannot be read", batch->model.n_outputs);
        struct accept_draft draft = batch_draft(draw, step->n_vocab);
        accept_draft(step->accept, logits + (size_t)draw->output * n_vocab, n_vocab, &batch->samples[draw->at], &draft,
                     step->scratch, &batch->results[draw->at]);
    }
}

void step_lap(struct stepper *step, enum step_part part)
{
    double now = clock_now();
    step->metrics->step_nanos[part] += (uint64_t)((now - step->lap) * 1e9);
    step->lap = now;
}

static void sample_round(struct stepper *step)
{
    struct batch *batch = &step->batch;
    bool ahead = step->accept == ACCEPT_COUPLED && model_info(step->model)->samples_ahead;
    uint32_t first = batch->n_samples, n = batch_sampling(batch, step->n_vocab, ahead);
    struct kvg_error err;

    if (n && model_sample(step->model, batch->samples + first, n, batch->results + first, &err) < 0)
        log_fatal("engine: sampling of %u rows: %s", n, err.message);
    if (step->spec && step->accept != ACCEPT_COUPLED)
        accept_drafts(step);
}

static void forward_and_sample(struct stepper *step)
{
    struct batch *batch = &step->batch;
    struct kvg_error err;

    if (model_forward(step->model, &batch->model, &err) < 0)
        log_fatal("engine: forward of %u rows: %s", batch->model.n_rows, err.message);
    step_lap(step, STEP_FORWARD);
    sample_round(step);
    step_lap(step, STEP_SAMPLE);
}

/* So many more rows of the sequence hold tokens that it keeps: full blocks enter the tree before any client hears of what was
 * drawn from them. */
static void store(struct stepper *step, struct sequence *seq, uint32_t n_rows)
{
    seq->n_computed += n_rows;
    cache_store(step->cache, &seq->held, seq->ids, seq->n_computed);
    if (seq->request->warm)
        cache_warm(step->cache, &seq->held);
}

static void store_rows(struct stepper *step)
{
    for (uint32_t i = 0; i < step->plan.n; i++)
        store(step, step->plan.entries[i].seq, step->plan.entries[i].n_rows - step->plan.entries[i].n_drafts);
}

/* The draw's next draft, if it has one, is accepted or not. */
static void count_draft(struct sequence *seq, struct draw *draw, bool accepted)
{
    struct engine_speculation *count = &seq->speculation;

    if (draw->n_drafts == draw->n_proposed) { /* the first token of the draw */
        count->active = draw->n_proposed > 0;
        count->runs += draw->n_proposed > 0;
        count->drafted += draw->n_proposed;
    }
    if (accepted) {
        count->accepted++;
        if (draw->n_accepted < SPEC_POSITIONS)
            count->accepted_at[draw->n_accepted]++;
        draw->n_accepted++;
    }
}

/* Commits a token. Whether the sequence's next one can be drawn in this step: this one was its draft, whose row is computed.
 * If not, what the drafts took is given back. */
static bool commit(struct stepper *step, struct draw *draw, const struct sample_result *result, double now)
{
    struct sequence *seq = draw->seq;
    struct engine_event event;
    bool accepted = draw->n_drafts && result->id == seq->ids[seq->n_ids];

    count_token(step, seq, now);
    count_draft(seq, draw, accepted);
    output_commit(&step->output, seq, result, &event);
    event.speculation = step->spec ? &seq->speculation : NULL;
    bool goes_on = accepted && event.finish == FINISH_NONE;
    if (step->spec && !goes_on) {
        if (draw->n_proposed)
            speculate_verified(step->spec, seq, draw->n_proposed, draw->n_accepted, event.finish != FINISH_NONE);
        cache_trim(step->cache, &seq->held, seq->n_ids);
    }
    emit(step, seq, &event, now);
    if (!goes_on)
        return false;
    store(step, seq, 1);
    draw->output++;
    draw->n_drafts--;
    return true;
}

/* The first round is sampled; each further one is for those whose token was their draft. */
static void emit_tokens(struct stepper *step, double now)
{
    struct batch *batch = &step->batch;

    while (batch->n_draws) {
        uint32_t n = 0;
        for (uint32_t i = 0; i < batch->n_draws; i++)
            if (commit(step, &batch->draws[i], &batch->results[batch->draws[i].at], now))
                batch->draws[n++] = batch->draws[i];
        batch->n_draws = n;
        step_lap(step, STEP_EMIT);
        sample_round(step);
        step_lap(step, STEP_SAMPLE);
    }
}

/* Before store_rows(): n_computed is what lies before the rows. */
static void observe_pace(struct stepper *step, double seconds)
{
    const struct step_plan *plan = &step->plan;
    struct pacing_step pace = {.n_decodes = plan->n_decodes + plan->n_drafts};

    for (uint32_t i = plan->n_decodes; i < plan->n; i++) {
        const struct plan_entry *entry = &plan->entries[i];
        pace.prompt_rows += entry->n_rows;
        pace.keys += entry->n_rows * (entry->seq->n_computed + entry->n_rows / 2.0);
    }
    if (pace.prompt_rows)
        pace.keys /= pace.prompt_rows;
    pacing_observe(&step->sched.pacing, &pace, seconds);
}

void step_run(struct stepper *step)
{
    if (step->spec)
        speculate_propose(step->spec, step->sched.running, step->sched.n_running, step->sched.n_waiting);
    double start = clock_now();
    sched_plan(&step->sched, &step->plan, start);
    if (step->plan.n == 0)
        log_fatal("engine: %u sequences wait and nothing can run", step->sched.n_waiting);
    step->metrics->waiting = sched_waiting(&step->sched); /* who is answered in this step may ask again before step_report */
    batch_fill(&step->batch, &step->plan);
    step_lap(step, STEP_SCHEDULE);
    forward_and_sample(step);
    double now = clock_now();
    observe_pace(step, now - start);
    count_plan(step);
    store_rows(step);
    emit_tokens(step, now);
    if (step->spec)
        speculate_timed(step->spec, &step->plan, clock_now() - start);
}

void step_report(struct stepper *step)
{
    struct engine_metrics *m = step->metrics;
    struct cache_counts counts;
    uint64_t backlog = sched_backlog(&step->sched);
    uint32_t waiting = sched_waiting(&step->sched);

    cache_counts(step->cache, &counts);
    m->running = step->sched.n_running;
    m->waiting = waiting;
    m->blocks_total = counts.total;
    m->blocks_used = counts.used;
    m->blocks_cached = counts.cached;
    m->blocks_warm = counts.warm;
    m->evicted_blocks = counts.evicted;
    m->preemptions = step->sched.n_preemptions;
    if (step->sched.n_running == 0)
        m->spec_sequences = 0;
    m->backlog_tokens = backlog;
    if (!step->publisher)
        return;
    answer_snapshot(step);
    publisher_report(step->publisher, &(struct publisher_load){.running = step->sched.n_running,
                                                               .waiting = waiting,
                                                               .blocks_used = counts.used,
                                                               .blocks_total = counts.total,
                                                               .backlog = backlog});
}
