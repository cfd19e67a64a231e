#include "gpu-worker/plan.h"
#include <ctype.h>
#include <math.h>
#include <string.h>
#include <unistd.h>
#include "gpu-worker/options.h"
#include "libprompt/json.h"

enum { SETTLE_ROUNDS = 200 };
static const double MEMORY_SHARE = 0.9;

/* ---- machines ---------------------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    double bytes_per_s, ops_per_s;
    uint32_t memory_gib;
} machines[] = {
    {"b200", 8.0e12, 2250e12, 180},    {"h200", 4.8e12, 989e12, 141}, {"h100", 3.35e12, 989e12, 80},
    {"h100-pcie", 2.0e12, 756e12, 80}, {"a100", 2.04e12, 312e12, 80}, {"a100-40g", 1.555e12, 312e12, 40},
    {"l40s", 0.864e12, 362e12, 48},    {"l4", 0.3e12, 121e12, 24},    {"a10", 0.6e12, 125e12, 24},
    {"rtx4090", 1.008e12, 165e12, 24},
};

int plan_machine_find(const char *name, struct plan_machine *out, struct kvg_error *err)
{
    char all[160] = "";
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
        size_t at = strlen(all);
        snprintf(all + at, sizeof all - at, "%s%s", i ? ", " : "", machines[i].name);
        if (strcasecmp(machines[i].name, name) != 0)
            continue;
        *out = (struct plan_machine){.cuda = true,
                                     .bytes_per_s = machines[i].bytes_per_s,
                                     .ops_per_s = machines[i].ops_per_s,
                                     .memory = (uint64_t)machines[i].memory_gib << 30,
                                     .memory_share = MEMORY_SHARE};
        snprintf(out->name, sizeof out->name, "%s", machines[i].name);
        return 0;
    }
    return kvg_fail(err, KVG_INVALID, "--plan-machine \"%.60s\" is not known (cpu, %s)", name, all);
}

/* ---- the roofline ------------------------------------------------------------------------------------------------------ */

/* What the formulas of plan.h need, once. */
struct roofline {
    double step_bytes, kv_token_bytes, weights, layer_weights, output_weights, attention; /* attention: L H D */
    double context;
    const struct plan_machine *machine;
    const struct plan_load *load;
};

static double step_seconds(const struct roofline *r, double b, bool *by_memory)
{
    double memory = (r->step_bytes + b * r->context * r->kv_token_bytes) / r->machine->bytes_per_s;
    double compute = b * (2 * r->weights + 4 * r->attention * r->context) / r->machine->ops_per_s;
    *by_memory = memory >= compute;
    return fmax(memory, compute);
}

static double prompt_seconds(const struct roofline *r, bool *by_memory)
{
    double in = r->load->in, n = fmax(1, in * (1 - r->load->cached)), before = in - n;
    double memory = r->step_bytes / r->machine->bytes_per_s;
    double ops = 2 * r->layer_weights * n + 2 * r->attention * (in * in - before * before) + 2 * r->output_weights;
    double compute = ops / r->machine->ops_per_s;
    *by_memory = memory >= compute;
    return fmax(memory, compute);
}

/* How many run at once where each of the workers gets its part of the load. s(B) B is affine on either roof, so the iteration
 * converges wherever the load is below what a worker can take. */
static void settle(const struct roofline *r, struct plan *out)
{
    double rate = r->load->qps / out->workers, busy = rate * out->prompt_s, b = 1;
    bool by_memory;
    for (int i = 0; i < SETTLE_ROUNDS; i++) {
        b = rate * r->load->out * step_seconds(r, fmax(b, 1), &by_memory) / (1 - busy);
        b = fmin(b, out->concurrency);
    }
    out->running = b;
    out->token_s = step_seconds(r, fmax(b, 1), &out->decode_by_memory) / (1 - busy);
    out->first_token_s = out->prompt_s / (1 - busy) + out->token_s;
}

int plan_compute(const struct capacity *model, const struct plan_machine *machine, const struct plan_load *load,
                 uint64_t block_bytes, struct plan *out, struct kvg_error *err)
{
    double usable = (double)machine->memory * machine->memory_share, left = usable - (double)model->weight_bytes;
    struct roofline r = {.step_bytes = (double)(model->layer_bytes + model->output_bytes),
                         .kv_token_bytes = (double)block_bytes / load->block_size,
                         .weights = (double)(model->layer_weights + model->output_weights),
                         .layer_weights = (double)model->layer_weights,
                         .output_weights = (double)model->output_weights,
                         .attention = (double)model->n_layers * model->n_heads * model->head_dim,
                         .context = load->in + load->out / 2.0,
                         .machine = machine,
                         .load = load};
    uint64_t tokens = (uint64_t)load->in + load->out;

    *out = (struct plan){.block_bytes = block_bytes, .blocks_a_request = (uint32_t)((tokens - 1) / load->block_size + 1)};
    if (tokens > model->max_position)
        return kvg_fail(err, KVG_INVALID, "prompt and answer have %llu tokens, the model's context is %u",
                        (unsigned long long)tokens, model->max_position);
    if (left <= 0)
        return kvg_fail(err, KVG_INVALID, "the weights take %.2f GiB, and %.0f %% of --memory are %.2f GiB",
                        (double)model->weight_bytes / (1 << 30), 100 * machine->memory_share, usable / (1 << 30));
    out->kv_bytes = (uint64_t)left;
    out->blocks = out->kv_bytes / block_bytes;
    uint64_t fit = out->blocks / out->blocks_a_request;
    out->concurrency = fit < load->max_seqs ? (uint32_t)fit : load->max_seqs;
    out->prompt_s = prompt_seconds(&r, &out->prompt_by_memory);
    if (out->concurrency == 0)
        return 0;
    out->step_s = step_seconds(&r, out->concurrency, &out->decode_by_memory);
    out->worker_qps = load->share / (out->prompt_s + load->out * out->step_s / out->concurrency);
    double workers = ceil(load->qps / out->worker_qps);
    out->workers = workers < 1e9 ? (uint32_t)workers : 0;
    if (out->workers)
        settle(&r, out);
    return 0;
}

/* ---- output ------------------------------------------------------------------------------------------------------------ */

/* 1234567 as "1.18 MiB". */
static const char *bytes_text(double bytes, char out[32])
{
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    int unit = 0;
    for (; bytes >= 1024 && unit < 4; unit++)
        bytes /= 1024;
    snprintf(out, 32, unit ? "%.2f %s" : "%.0f %s", bytes, units[unit]);
    return out;
}

static void print_table(FILE *out, const char *path, const struct capacity *model, const struct plan_machine *machine,
                        const struct plan_load *load, const struct plan *plan)
{
    char a[32], b[32], c[32];
    fprintf(out, "model                %s: %s, %u layers, %.3g weights, %s\n", path, model->family, model->n_layers,
            (double)(model->layer_weights + model->output_weights), bytes_text((double)model->weight_bytes, a));
    fprintf(out, "machine              %s%s: %.4g GB/s, %.4g Tops/s, memory %s, of which %.0f %% are used\n", machine->name,
            machine->measured ? ", measured" : "", machine->bytes_per_s / 1e9, machine->ops_per_s / 1e12,
            bytes_text((double)machine->memory, a), 100 * machine->memory_share);
    fprintf(out,
            "load                 %g requests/s of %u + %u tokens, %.0f %% of a prompt cached, up to %.0f %% of the roofline\n",
            load->qps, load->in, load->out, 100 * load->cached, 100 * load->share);
    fprintf(out, "KV block             %llu bytes (%u tokens)\n", (unsigned long long)plan->block_bytes, load->block_size);
    fprintf(out, "KV blocks            %llu = %s beside %s of weights\n", (unsigned long long)plan->blocks,
            bytes_text((double)plan->blocks * (double)plan->block_bytes, b), bytes_text((double)model->weight_bytes, c));
    fprintf(out, "requests at once     %u (%u blocks each; --max-num-seqs %u)\n", plan->concurrency, plan->blocks_a_request,
            load->max_seqs);
    fprintf(out, "prompt               %.4g ms, limited by %s\n", plan->prompt_s * 1e3,
            plan->prompt_by_memory ? "memory" : "compute");
    if (!plan->workers) {
        fprintf(out, "workers              none suffice: %s\n",
                plan->concurrency ? "the load takes 1e9 and more" : "not one request fits");
        return;
    }
    fprintf(out, "a worker at most     %.4g requests/s, %.4g tokens/s, at %.4g ms a step\n", plan->worker_qps,
            plan->worker_qps * load->out, plan->step_s * 1e3);
    fprintf(out, "workers              %u\n", plan->workers);
    fprintf(out,
            "each then            %.1f requests at once, first token after %.4g ms, %.4g ms from token to token, limited by %s\n",
            plan->running, plan->first_token_s * 1e3, plan->token_s * 1e3, plan->decode_by_memory ? "memory" : "compute");
}

static void print_json(FILE *out, const char *path, const struct capacity *model, const struct plan_machine *machine,
                       const struct plan_load *load, const struct plan *plan)
{
    struct kvg_buf buf = {0};
    kvg_buf_puts(&buf, "{\"model\": ");
    kvg_buf_json_string(&buf, path, strlen(path));
    kvg_buf_printf(
        &buf,
        ", \"family\": \"%s\", \"weight_bytes\": %llu, \"step_bytes\": %llu, \"weights\": %llu, \"machine\": \"%s\", "
        "\"measured\": %s, \"bytes_per_s\": %.6g, \"ops_per_s\": %.6g, \"memory\": %llu, ",
        model->family, (unsigned long long)model->weight_bytes, (unsigned long long)(model->layer_bytes + model->output_bytes),
        (unsigned long long)(model->layer_weights + model->output_weights), machine->name, machine->measured ? "true" : "false",
        machine->bytes_per_s, machine->ops_per_s, (unsigned long long)machine->memory);
    kvg_buf_printf(
        &buf,
        "\"qps\": %g, \"in\": %u, \"out\": %u, \"cached\": %g, \"share\": %g, \"block_size\": %u, \"block_bytes\": %llu, "
        "\"blocks\": %llu, \"blocks_a_request\": %u, \"concurrency\": %u, \"prompt_ms\": %.6g, \"step_ms\": %.6g, "
        "\"worker_qps\": %.6g, \"workers\": %u, \"running\": %.6g, \"first_token_ms\": %.6g, \"token_ms\": %.6g, "
        "\"decode_limit\": \"%s\", \"prompt_limit\": \"%s\"}\n",
        load->qps, load->in, load->out, load->cached, load->share, load->block_size, (unsigned long long)plan->block_bytes,
        (unsigned long long)plan->blocks, plan->blocks_a_request, plan->concurrency, plan->prompt_s * 1e3, plan->step_s * 1e3,
        plan->worker_qps, plan->workers, plan->running, plan->first_token_s * 1e3, plan->token_s * 1e3,
        plan->decode_by_memory ? "memory" : "compute", plan->prompt_by_memory ? "memory" : "compute");
    fwrite(buf.bytes, 1, buf.len, out);
    kvg_buf_free(&buf);
}

void plan_print(FILE *out, bool json, const char *path, const struct capacity *model, const struct plan_machine *machine,
                const struct plan_load *load, const struct plan *plan)
{
    (json ? print_json : print_table)(out, path, model, machine, load, plan);
}

/* ---- --plan ------------------------------------------------------------------------------------------------------------ */

/* A worker on n of them. */
static void multiply(struct plan_machine *machine, uint32_t n)
{
    char name[sizeof machine->name];
    snprintf(name, sizeof name, "%u x %.40s", n, machine->name);
    memcpy(machine->name, name, sizeof name);
    machine->bytes_per_s *= n;
    machine->ops_per_s *= n;
    machine->memory *= n;
}

/* The machine that the flags name, or this CPU; a rate that is given replaces the machine's. */
static int choose_machine(const struct options *options, const struct capacity *model, struct plan_machine *out,
                          struct kvg_error *err)
{
    const char *name = options->plan_machine;
    bool cpu = !name || strcasecmp(name, "cpu") == 0;
    struct machine_rates rates;
    int failed;

    if (!cpu && (failed = plan_machine_find(name, out, err)))
        return failed;
    if (cpu) {
        *out = (struct plan_machine){.name = "cpu",
                                     .memory = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE),
                                     .memory_share = MEMORY_SHARE};
        if (!options->plan_bandwidth || !options->plan_compute) {
            if ((failed = capacity_measure_cpu(model, options->threads, options->cpu_isa, &rates, err)))
                return failed;
            out->measured = true;
            out->bytes_per_s = rates.bytes_per_s;
            out->ops_per_s = rates.ops_per_s;
        }
    }
    if (options->plan_bandwidth)
        out->bytes_per_s = options->plan_bandwidth;
    if (options->plan_compute)
        out->ops_per_s = options->plan_compute;
    if (options->plan_memory)
        out->memory = options->plan_memory;
    if (options->gpu_memory_utilization > 0)
        out->memory_share = options->gpu_memory_utilization;
    if (out->cuda && options->tensor_parallel_size > 1)
        multiply(out, options->tensor_parallel_size);
    return 0;
}

int plan_run(const struct options *options, struct kvg_error *err)
{
    struct plan_load load = {.qps = options->plan_qps,
                             .in = options->plan_in,
                             .out = options->plan_out,
                             .cached = options->plan_cached,
                             .share = options->plan_share,
                             .max_seqs = options->max_num_seqs,
                             .block_size = options->block_size};
    struct capacity model;
    struct plan_machine machine;
    struct plan plan;
    uint64_t block_bytes;
    int failed;

    if ((failed = capacity_read(&model, options->model, err)) ||
        (failed = capacity_divide(&model, options->tensor_parallel_size, err)) ||
        (failed = choose_machine(options, &model, &machine, err)) ||
        (failed = capacity_kv_block_bytes(&model, machine.cuda ? "cuda" : "cpu", options->cpu_isa, options->kv_cache_dtype,
                                          load.block_size, &block_bytes, err)) ||
        (failed = plan_compute(&model, &machine, &load, block_bytes, &plan, err)))
        return failed;
    plan_print(stdout, options->plan_json, options->model, &model, &machine, &load, &plan);
    return 0;
}
