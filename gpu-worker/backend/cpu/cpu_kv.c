/* The KV pool. Its pages are taken when a block is first written: resident memory is what is in use, and start costs nothing. */
#include "gpu-worker/backend/cpu/cpu.h"
#include <stdlib.h>

/* Sets everything but memory. */
static struct kv_layer layer_layout(const struct cpu_backend *cpu, const struct backend_kv *kv)
{
    enum backend_kv_dtype dtype = kv->dtype == KV_AUTO ? cpu->base.kv_auto : kv->dtype;
    uint32_t padding = cpu->kernels.key_padding;
    struct kv_layer layer = {.n_kv_heads = kv->n_kv_heads,
                             .head_dim = kv->head_dim,
                             .key_dim = (kv->head_dim + padding - 1) / padding * padding,
                             .block_size = kv->block_size,
                             .block_shift = (uint32_t)__builtin_ctz(kv->block_size),
                             .value_bytes = dtype == KV_INT8 ? 1 : 2};
    size_t scales = dtype == KV_INT8 ? kv->block_size * sizeof(float) : 0;
    layer.values = (size_t)kv->block_size * layer.key_dim * layer.value_bytes;
    layer.k_scales = layer.values + (size_t)kv->block_size * layer.head_dim * layer.value_bytes;
    layer.v_scales = layer.k_scales + scales;
    layer.head_bytes = layer.v_scales + scales;            /* whole cache lines: a block has at least 16 slots */
    layer.block_bytes = kv->n_kv_heads * layer.head_bytes; /* of one layer here */
    return layer;
}

size_t cpu_kv_block_bytes(const struct backend *backend, const struct backend_kv *kv)
{
    return kv->n_layers * layer_layout((const struct cpu_backend *)backend, kv).block_bytes;
}

static int check_kv(const struct backend_kv *kv, struct kvg_error *err)
{
    if (kv->block_size < KV_PAGE || kv->block_size > 512 || (kv->block_size & (kv->block_size - 1)))
        return kvg_fail(err, KVG_INVALID, "block size %u is not a power of two from %d to 512", kv->block_size, KV_PAGE);
    if (kv->head_dim == 0 || kv->head_dim % 16 || kv->head_dim > MAX_HEAD_DIM)
        return kvg_fail(err, KVG_UNSUPPORTED, "head dimension %u is not a multiple of 16 up to %d", kv->head_dim, MAX_HEAD_DIM);
    if (kv->n_kv_heads == 0 || kv->n_heads % kv->n_kv_heads)
        return kvg_fail(err, KVG_UNSUPPORTED, "%u heads are not divisible by %u kv heads", kv->n_heads, kv->n_kv_heads);
    if (kv->dtype >= KV_DTYPES)
        return kvg_fail(err, KVG_INVALID, "KV dtype %d of %d", (int)kv->dtype, KV_DTYPES);
    if (kv->dtype == KV_FP8)
        return kvg_fail(err, KVG_UNSUPPORTED, "--kv-cache-dtype fp8: the CPU backend keeps KV as f16, bf16 or int8");
    return 0;
}

int cpu_kv_alloc(struct backend *backend, const struct backend_kv *kv, struct kvg_error *err)
{
    struct cpu_backend *cpu = cpu_of(backend);
    int failed = check_kv(kv, err);
    if (failed)
        return failed;
    struct kv_layer layer = layer_layout(cpu, kv);
    size_t layer_bytes = layer.block_bytes;
    layer.block_bytes *= kv->n_layers;
    cpu->kv_bytes = layer.block_bytes * kv->n_blocks;
    cpu->layers = calloc(kv->n_layers, sizeof *cpu->layers);
    cpu->kv_memory = cpu_map(cpu->kv_bytes);
    if (!cpu->layers || !cpu->kv_memory)
        return kvg_fail(err, KVG_NOMEM, "no memory for %u KV blocks (%zu bytes)", kv->n_blocks, cpu->kv_bytes);
    cpu->kv = *kv;
    cpu->window_kernels = cpu->kernels.window_attention[kv->dtype == KV_AUTO ? cpu->base.kv_auto : kv->dtype];
    cpu->attention_kernels = cpu->kernels.attention[kv->dtype == KV_AUTO ? cpu->base.kv_auto : kv->dtype];
    for (uint32_t i = 0; i < kv->n_layers; i++) {
        cpu->layers[i] = layer;
        cpu->layers[i].memory = cpu->kv_memory + i * layer_bytes;
    }
    return cpu_attention_alloc(cpu, err);
}

void cpu_kv_free(struct cpu_backend *cpu)
{
    free(cpu->layers);
    cpu_unmap(cpu->kv_memory, cpu->kv_bytes);
}
