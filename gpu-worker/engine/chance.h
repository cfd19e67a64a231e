/* How likely a draft is accepted, where those before it were: by where it comes from, as it went so far.
 *
 * A sequence's own record counts most, and beginning with what is known of all. Answers that copy and answers that do not are two
 * different things: a sequence tells the others only of its first drafts of a kind, so that a few long copies are not all that is
 * known, and where its drafts from the context fail more often than usual, they all are worth less. Until one of them was
 * accepted it has proven nothing, and few are tried.
 */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "gpu-worker/engine/ngram.h"

/* Where a draft comes from: one of the runs of ngram.h, what goes on beside the last of them, or the model; there by how sure the
 * model was of it, too. */
enum { BESIDE = NGRAM_LEVELS, BY_MODEL, SURE, SURE_LEVELS = 10, CHANCE_LEVELS = SURE + SURE_LEVELS };

/* Drafts that were looked at, and accepted ones; both fade. */
struct chance_rate {
    double tried, accepted;
};

/* A sequence's; zero at first. */
struct chance {
    struct chance_rate rates[CHANCE_LEVELS];
    double expected, accepted;   /* of its drafts from the context: by the rates of all, and so many were; both fade */
    uint32_t n_told[BESIDE + 1]; /* drafts that entered the rates of all */
    uint32_t failures;           /* since the last accepted draft from the context */
    bool proven;
};

/* Of all sequences. */
struct chance_all {
    struct chance_rate rates[CHANCE_LEVELS];
};

void chance_init(struct chance_all *all);
/* The level of a draft by the model to which it gave this probability. */
uint32_t chance_level(double sure);
/* From 0 to 1. */
double chance_of(const struct chance_all *all, const struct chance *own, uint32_t level);
/* Of the drafts from the context, all of one level, n_tried were looked at and the first n_accepted accepted. */
void chance_learn_context(struct chance_all *all, struct chance *own, uint32_t level, uint32_t n_tried, uint32_t n_accepted);
/* The same of drafts by the model, of the levels in `sure`. */
void chance_learn_model(struct chance_all *all, struct chance *own, const uint8_t *sure, uint32_t n_tried, uint32_t n_accepted);
