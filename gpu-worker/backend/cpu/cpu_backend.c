/* The CPU backend: which instruction set, how many threads, and the table of its operations. */
#define _GNU_SOURCE
#include "gpu-worker/backend/cpu/cpu.h"
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include "gpu-worker/backend/comm.h"

static bool has_generic(void)
{
    return true;
}

#if defined(__x86_64__)
static bool has_avx2(void)
{
    /* F16C is older than AVX2 and in every CPU that has it; clang 14 cannot ask for it. */
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

bool amx_supported(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    enum { TILE = 1 << 24, INT8 = 1 << 25, BF16 = 1 << 22, AVX512_BF16 = 1 << 5 };
    unsigned a, b, c, d;
    if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (TILE | INT8 | BF16)) != (TILE | INT8 | BF16))
        return false;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & AVX512_BF16))
        return false;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

static void avx2_kernels(struct kernels *out)
{
    *out = kernels_avx2;
}

static void avx512_kernels(struct kernels *out)
{
    *out = kernels_avx512;
}
#endif

static void generic_kernels(struct kernels *out)
{
    *out = kernels_generic;
}

/* Best first. */
static const struct {
    const char *name, *needs;
    bool (*supported)(void);
    void (*kernels)(struct kernels *out);
} isas[] = {
#if defined(__x86_64__)
    {"amx", "AMX (int8, BF16), and a kernel that allows its tiles", amx_supported, kernels_amx},
    {"avx512", "AVX-512 F, BW, VL, DQ and VNNI", has_avx512, avx512_kernels},
    {"avx2", "AVX2, FMA and F16C", has_avx2, avx2_kernels},
#endif
    {"generic", "nothing", has_generic, generic_kernels},
};

static int choose_isa(const char *name, struct kernels *out, struct kvg_error *err)
{
    bool any = !name || !*name || strcmp(name, "auto") == 0;
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        if (!any && strcmp(name, isas[i].name) != 0)
            continue;
        if (isas[i].supported()) {
            isas[i].kernels(out);
            return 0;
        }
        if (!any)
            return kvg_fail(err, KVG_UNSUPPORTED, "--cpu-isa %s needs %s, which this CPU lacks", name, isas[i].needs);
    }
    return kvg_fail(err, KVG_INVALID, "unknown --cpu-isa \"%s\" (auto, generic, avx2, avx512, amx)", name);
}

static int choose_arithmetic(const char *name, enum cpu_arithmetic *out, struct kvg_error *err)
{
    static const char *const names[] = {[ARITHMETIC_AUTO] = "auto", [ARITHMETIC_INT8] = "int8", [ARITHMETIC_INT16] = "int16"};
    *out = ARITHMETIC_AUTO;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (!name || !*name || strcmp(name, names[i]) == 0) {
            *out = (enum cpu_arithmetic)i;
            return 0;
        }
    }
    return kvg_fail(err, KVG_INVALID, "unknown --cpu-arithmetic \"%s\" (auto, int8, int16)", name);
}

/* All cores that this process may use; of a group, which shares them, a rank's part. */
static uint32_t default_threads(const struct comm *comm)
{
    cpu_set_t set;
    uint32_t cores = sched_getaffinity(0, sizeof set, &set) == 0 ? (uint32_t)CPU_COUNT(&set) : 1, ranks = comm ? comm->size : 1;
    return cores > ranks ? cores / ranks : 1;
}

/* ", int16 Q4_0 Q4_1" after what out holds. */
static void describe_formats(const char *arithmetic, uint32_t formats, char *out, size_t size)
{
    for (uint32_t i = 0; formats >> i; i++) {
        size_t n = strlen(out);
        if (!(formats >> i & 1))
            continue;
        bool first = (formats & ((1u << i) - 1)) == 0;
        snprintf(out + n, size - n, "%s%s %s", first ? ", " : "", first ? arithmetic : "", quant_at(i)->name);
    }
}

static void describe_grouped(uint32_t kinds, char *out, size_t size)
{
    for (uint32_t kind = 0; kind < GROUPED_KINDS; kind++) {
        size_t n = strlen(out);
        if (kinds >> kind & 1)
            snprintf(out + n, size - n, ", %s", grouped_name((enum grouped_kind)kind));
    }
}

static void cpu_describe(const struct backend *backend, char *out, size_t size)
{
    const struct cpu_backend *cpu = (const struct cpu_backend *)backend;
    uint32_t n = thread_pool_size(cpu->pool);
    snprintf(out, size, "cpu %s, %u thread%s", cpu->kernels.name, n, n == 1 ? "" : "s");
    describe_formats("int16", cpu->int16_formats, out, size);
    describe_formats("int8", cpu->int8_formats, out, size);
    describe_grouped(cpu->grouped_kinds, out, size);
}

static void cpu_close(struct backend *backend)
{
    struct cpu_backend *cpu = cpu_of(backend);
    if (!cpu)
        return;
    if (cpu->options.comm)
        cpu->options.comm->run = NULL;
    thread_pool_close(cpu->pool);
    cpu_free_memory(cpu);
    free(cpu);
}

static const struct backend_ops cpu_ops = {
    .describe = cpu_describe,
    .close = cpu_close,
    .weight = cpu_weight,
    .activation = cpu_activation,
    .kv_block_bytes = cpu_kv_block_bytes,
    .kv_alloc = cpu_kv_alloc,
    .begin_step = cpu_begin_step,
    .end_step = cpu_end_step,
    .embed = cpu_embed,
    .rmsnorm = cpu_rmsnorm,
    .matmul = cpu_matmul,
    .normed_matmul = cpu_normed_matmul,
    .normed_gated = cpu_normed_gated,
    .angles = cpu_angles,
    .rope_store = cpu_rope_store,
    .attention = cpu_attention,
    .silu_mul = cpu_silu_mul,
    .head_rmsnorm = cpu_head_rmsnorm,
    .scale = cpu_scale,
    .add = cpu_add,
    .gelu_mul = cpu_gelu_mul,
    .gather = cpu_gather,
    .all_reduce = cpu_all_reduce,
    .gather_columns = cpu_gather_columns,
    .sample = cpu_sample,
    .host = cpu_host,
};

static void run_on_pool(void *context, uint32_t n, uint32_t chunk, comm_item item, void *arg)
{
    thread_pool_for(context, n, chunk, item, arg);
}

int cpu_backend_open(struct backend **out, const struct backend_options *options, struct kvg_error *err)
{
    struct kernels kernels;
    enum cpu_arithmetic arithmetic = ARITHMETIC_AUTO;
    int failed = choose_isa(options->isa, &kernels, err);
    if (!failed)
        failed = choose_arithmetic(options->arithmetic, &arithmetic, err);
    if (failed)
        return failed;
    uint32_t threads = options->threads ? options->threads : default_threads(options->comm);
    struct cpu_backend *cpu = calloc(1, sizeof *cpu);
    if (!cpu)
        return kvg_fail(err, KVG_NOMEM, "no memory for the CPU backend");
    cpu->base.ops = &cpu_ops;
    cpu->base.kv_auto = kernels.kv_auto;
    cpu->base.gathers = true;
    cpu->base.grouped = true;
    cpu->kernels = kernels;
    cpu->arithmetic = arithmetic;
    cpu->options = *options;
    cpu->pool = thread_pool_open(threads);
    cpu->attention = cpu_alloc(threads * sizeof *cpu->attention);
    cpu->places = calloc(options->max_rows, sizeof *cpu->places);
    if (!cpu->pool || !cpu->attention || !cpu->places) {
        cpu_close(&cpu->base);
        return kvg_fail(err, KVG_NOMEM, "cannot start %u threads or get memory for steps of %u rows", threads, options->max_rows);
    }
    if (options->comm) {
        options->comm->run = run_on_pool;
        options->comm->context = cpu->pool;
    }
    *out = &cpu->base;
    return 0;
}
