/* The members of a completion request's body -> engine parameters, each validated.
 *
 * Rules: null counts as absent; a member of the wrong type, out of range or not finite is KVG_INVALID; a known member whose
 * meaning is not supported is KVG_UNSUPPORTED; both with err->param. Members that nobody knows are counted and ignored.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "gpu-worker/engine/engine.h"
#include "libprompt/arena.h"
#include "libprompt/json.h"
#include "libprompt/prompt.h"

enum {
    API_MAX_CHOICES = 128,    /* n */
    API_MAX_STOPS = 16,       /* stop strings */
    API_MAX_STOP_IDS = 256,   /* stop_token_ids */
    API_MAX_BIASES = 4096,    /* logit_bias */
    API_MAX_SALT = 1024,      /* bytes of cache_salt */
    API_MAX_STOP_BYTES = 4096 /* bytes of one stop string */
};

struct api_context {
    enum kvg_endpoint endpoint;
    bool gateway;             /* the gateway listener: prompt_token_ids and priority are honoured */
    bool no_priority;         /* the gateway lets clients have none: theirs counts as 0 */
    bool priority_scheduling; /* --scheduling-policy priority */
    uint32_t n_vocab;
};

struct api_params {
    struct engine_params engine; /* its arrays live in the arena; seed is 0 where has_seed is false */
    bool has_seed;
    bool stream, include_usage, continuous_usage, include_speculation;
    bool echo;                 /* completions */
    struct kvg_str model;      /* len 0: not given */
    struct kvg_str cache_salt; /* len 0: not given */
    struct kvg_ids prompt_ids; /* prompt_token_ids; n 0: not given */
    uint32_t n_unknown;        /* members that were ignored because nobody knows them */
};

/* 0, or a kvg_status with err->param naming the member. The prompt itself (messages, prompt, tools) is libprompt's to judge. */
int api_params_parse(const struct api_context *context, const struct kvg_json *body, struct kvg_arena *arena,
                     struct api_params *out, struct kvg_error *err);

/* A non-empty array of token ids below n_vocab -> ids in the arena. name goes to err->param. */
int api_token_ids(const struct kvg_json *value, const char *name, uint32_t n_vocab, struct kvg_arena *arena, struct kvg_ids *out,
                  struct kvg_error *err);
