/* The KV pool. */
#include "gpu-worker/backend/cpu/cpu.h"
#include <stdlib.h>

static size_t kv_layer_values(const struct backend_kv *kv)
{
    return (size_t)kv->block_size * kv->n_kv_heads * kv->head_dim;
}

size_t cpu_kv_block_bytes(const struct backend *backend, const struct backend_kv *kv)
{
    return kv->n_layers * 2 * kv_layer_values(kv) * sizeof(uint16_t);
}

static int check_kv(const struct backend_kv *kv, struct kvg_error *err)
{
    if (kv->block_size < KV_PAGE || kv->block_size > 512 || (kv->block_size & (kv->block_size - 1)))
        return kvg_fail(err, KVG_INVALID, "block size %u is not a power of two from %d to 512", kv->block_size, KV_PAGE);
    if (kv->head_dim == 0 || kv->head_dim % 16 || kv->head_dim > MAX_HEAD_DIM)
        return kvg_fail(err, KVG_UNSUPPORTED, "head dimension %u is not a multiple of 16 up to %d", kv->head_dim, MAX_HEAD_DIM);
    if (kv->n_kv_heads == 0 || kv->n_heads % kv->n_kv_heads)
        return kvg_fail(err, KVG_UNSUPPORTED, "%u heads are not divisible by %u kv heads", kv->n_heads, kv->n_kv_heads);
    return 0;
}

int cpu_kv_alloc(struct backend *backend, const struct backend_kv *kv, struct kvg_error *err)
{
    struct cpu_backend *cpu = cpu_of(backend);
    int failed = check_kv(kv, err);
    if (failed)
        return failed;
    size_t values = kv_layer_values(kv); /* of a block's k, or v, in one layer */
    cpu->kv_bytes = cpu_kv_block_bytes(backend, kv) * kv->n_blocks;
    cpu->layers = calloc(kv->n_layers, sizeof *cpu->layers);
    cpu->kv_memory = cpu_map(cpu->kv_bytes);
    if (!cpu->layers || !cpu->kv_memory)
        return kvg_fail(err, KVG_NOMEM, "no memory for %u KV blocks (%zu bytes)", kv->n_blocks, cpu->kv_bytes);
    cpu->kv = *kv;
    for (uint32_t i = 0; i < kv->n_layers; i++)
        cpu->layers[i] = (struct kv_layer){.k = cpu->kv_memory + (size_t)i * 2 * values,
                                           .v = cpu->kv_memory + ((size_t)i * 2 + 1) * values,
                                           .block_values = (size_t)kv->n_layers * 2 * values,
                                           .n_kv_heads = kv->n_kv_heads,
                                           .head_dim = kv->head_dim,
                                           .block_size = kv->block_size,
                                           .block_shift = (uint32_t)__builtin_ctz(kv->block_size)};
    return 0;
}

void cpu_kv_free(struct cpu_backend *cpu)
{
    free(cpu->layers);
    cpu_unmap(cpu->kv_memory, cpu->kv_bytes);
}
