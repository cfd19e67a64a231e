/* --plan: what a model needs for a load, by the roofline: blocks, requests at once, workers. Nothing is loaded or served.
 *
 * With W bytes and N numbers in the matrices that a step reads, b bytes of KV a token, L layers, H heads of D dimensions, a
 * machine of M bytes/s and F operations/s, in and out the tokens of a request's prompt and answer, h the share of prompts found
 * in the cache, and c = in + out / 2 the context of a request half way:
 *
 *   decode step of B requests   t(B) = max((W + B c b) / M,  B (2 N + 4 L H D c) / F)
 *   prompt                      p    = max(W / M,  (2 N_layers n + 2 L H D (in^2 - (in - n)^2) + 2 N_output) / F)
 *                               with n = in (1 - h)
 *   a request's share of time   s(B) = p + out t(B) / B
 *   a worker's requests/s       q(B) = share / s(B)
 *
 * B is at most what the KV blocks hold ((in + out) tokens each, nothing shared) and --max-num-seqs. t(B) / B falls with B, so
 * workers = ceil(qps / q(most B)). At that number each worker has r = qps / workers requests/s, and by Little's law as many at
 * once as satisfy  B = r out t(B) / (1 - r p). The roofline is a bound: `share` is how much of it the fleet is to use.
 *
 * A worker of several ranks on GPUs has as many times a GPU's M, F and memory; what ranks send each other, and that each holds
 * the embedding whole, is not counted.
 */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include "gpu-worker/model/capacity.h"
#include "libprompt/error.h"

struct plan_load {
    double qps;       /* requests a second, of the fleet */
    uint32_t in, out; /* tokens of a prompt and of an answer */
    double cached;    /* share of a prompt's tokens found in the cache, 0 to below 1 */
    double share;     /* of the roofline that may be used, above 0 to 1 */
    uint32_t max_seqs;
    uint32_t block_size;
};

struct plan_machine {
    char name[64];
    bool measured, cuda;
    double bytes_per_s, ops_per_s;
    uint64_t memory;     /* of one worker */
    double memory_share; /* of it that weights and KV may take */
};

struct plan {
    uint64_t block_bytes, kv_bytes, blocks;
    uint32_t blocks_a_request, concurrency;  /* requests at once that blocks and max_seqs allow; 0 where not one fits */
    double prompt_s, step_s;                 /* p, and t(concurrency) */
    double worker_qps;                       /* q(concurrency) */
    uint32_t workers;                        /* 0 where no number suffices */
    double running, token_s, first_token_s;  /* of each of `workers`: B, seconds from token to token, to the first token */
    bool decode_by_memory, prompt_by_memory; /* which roof limits */
};

/* A machine by name: "h100", "h200", "b200", "a100", "l40s", "l4", "rtx4090", ...: vendors' figures for dense BF16. KVG_INVALID
 * names an unknown one and lists all. */
int plan_machine_find(const char *name, struct plan_machine *out, struct kvg_error *err);

/* KVG_INVALID, with both numbers, where the weights do not fit into the memory. */
int plan_compute(const struct capacity *model, const struct plan_machine *machine, const struct plan_load *load,
                 uint64_t block_bytes, struct plan *out, struct kvg_error *err);

/* A table, or with `json` one JSON object. */
void plan_print(FILE *out, bool json, const char *path, const struct capacity *model, const struct plan_machine *machine,
                const struct plan_load *load, const struct plan *plan);

struct options;
/* The whole of --plan by the worker's flags: reads, measures where no machine is given, computes, prints to stdout. */
int plan_run(const struct options *options, struct kvg_error *err);
