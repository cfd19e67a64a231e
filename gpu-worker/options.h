/* kvgate-worker's command line. Flags carry vLLM's names where it has them. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "libprompt/error.h"

enum { OPTIONS_MAX_ALIASES = 16 };

/* Strings point into argv or the environment, or at the struct's own buffers. */
struct options {
    const char *model;
    const char *served_model_name; /* the first name; derived from the file name by default */
    const char *aliases[OPTIONS_MAX_ALIASES];
    size_t n_aliases;
    const char *host;
    uint32_t port; /* 0 = no plain listener */
    const char *api_key;
    const char *gateway_listen, *advertise; /* advertise: gateway_listen by default */
    uint32_t max_model_len, max_num_seqs, max_num_batched_tokens, block_size, num_kv_blocks, max_waiting;
    uint64_t kv_cache_memory;      /* bytes; 0 = not given */
    double gpu_memory_utilization; /* 0 = not given */
    bool disable_prefix_caching, disable_chunked_prefill, deterministic, enforce_eager;
    const char *warm;              /* NULL = none */
    const char *scheduling_policy; /* "fcfs", "priority" */
    const char *speculative_model; /* "ngram", a GGUF file, or NULL: no drafts */
    const char *speculative_config;
    const char *spec_accept; /* "coupled", "rejection", "argmax", "top-p" */
    uint32_t num_speculative_tokens;
    uint32_t prompt_lookup_max, prompt_lookup_min; /* of --speculative-config; both or none are 0 */
    const char *device, *cpu_isa, *cpu_arithmetic, *kv_cache_dtype;
    uint32_t threads;              /* 0 = all cores */
    uint32_t tensor_parallel_size; /* ranks; 1 = this process alone */
    const char *redis, *redis_prefix, *worker_id;
    const char *log_level;
    bool help, version;
    /* --plan: what a load needs, see plan.h; rates are 0 where they are not given */
    bool plan, plan_json;
    uint64_t plan_memory;
    double plan_qps, plan_cached, plan_share, plan_bandwidth, plan_compute;
    uint32_t plan_in, plan_out;
    const char *plan_machine;

    char name_buffer[129], id_buffer[129], draft_buffer[4096];
};

/* 0, or KVG_INVALID with one line that names the flag. Nothing else is checked once help or version is asked for. */
int options_parse(struct options *options, int argc, char **argv, struct kvg_error *err);
/* --help, to stdout: every flag with its unit and default. */
void options_help(void);
