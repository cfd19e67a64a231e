/* One step of the engine: draft -> schedule -> batch -> forward -> sample or verify -> emit. Engine thread only; allocates
 * nothing after step_init.
 */
#pragma once
#include <stdbool.h>
#include "gpu-worker/engine/accept.h"
#include "gpu-worker/engine/batch.h"
#include "gpu-worker/engine/output.h"
#include "gpu-worker/engine/scheduler.h"
#include "gpu-worker/engine/speculate.h"
#include "gpu-worker/kv/cache.h"
#include "gpu-worker/kv/publish.h"
#include "gpu-worker/metrics.h"

struct stepper {
    struct model *model;
    struct publisher *publisher; /* may be NULL */
    struct kv_cache *cache;
    struct scheduler sched;
    struct step_plan plan;
    struct batch batch;
    struct output output;
    struct speculate *spec; /* NULL: no drafts */
    enum accept_rule accept;
    float *scratch; /* [n_vocab of the model]; NULL with ACCEPT_COUPLED */
    struct engine_metrics *metrics;
    double lap; /* clock_now() where the last part of a step ended */
    uint32_t n_vocab, max_rows;
    void (*ended)(void *context, struct request *request); /* after its last event: the request may go */
    void *context;
};

struct step_options {
    struct scheduler_options sched;
    struct speculate_options spec;  /* most_drafts 0: no drafts */
    struct drafter_options drafter; /* model NULL: none */
    enum accept_rule accept;
    uint32_t n_blocks;
    uint32_t n_vocab;     /* ids that may be drawn */
    size_t longest_piece; /* bytes that one token's text can come to */
};

/* step->model, publisher, metrics, ended, context and output.vocab are set by the caller before. 0 or an error. */
int step_init(struct stepper *step, const struct step_options *options, struct kvg_error *err);
void step_free(struct stepper *step);

void step_add(struct stepper *step, struct request *request);
/* Ends what is open of the request: FINISH_ABORT, or FINISH_ERROR with a text. Its blocks are free when this returns. */
void step_abort(struct stepper *step, struct request *request, enum engine_finish finish, const char *error);
static inline bool step_has_work(const struct stepper *step)
{
    return step->sched.n_running || step->sched.n_waiting;
}
void step_run(struct stepper *step);
/* The time since step->lap was spent on `part`; the next part begins. */
void step_lap(struct stepper *step, enum step_part part);
/* Gauges, and the load for the publisher's heartbeat: after each step and now and then while idle. */
void step_report(struct stepper *step);
