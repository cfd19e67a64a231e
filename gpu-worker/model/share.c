#include "gpu-worker/model/share.h"
#include "gpu-worker/backend/comm.h"

enum { FFN_UNIT = 32 }; /* columns of floats: no rank's part ends within a vector register */

static int share_heads(struct share *out, const struct shape *shape, struct kvg_error *err)
{
    uint32_t size = out->size, heads = shape->n_heads, kv_heads = shape->n_kv_heads;
    if (heads % size)
        return kvg_fail(err, KVG_INVALID, "%u attention heads cannot be divided among %u ranks (--tensor-parallel-size)", heads,
                        size);
    if (size <= kv_heads ? kv_heads % size : size % kv_heads)
        return kvg_fail(err, KVG_INVALID, "%u kv heads cannot be divided among %u ranks, nor ranks among them", kv_heads, size);
    out->n_heads = heads / size;
    out->first_head = out->rank * out->n_heads;
    out->n_kv_heads = size <= kv_heads ? kv_heads / size : 1;
    out->first_kv_head = (uint32_t)((uint64_t)out->rank * kv_heads / size);
    return 0;
}

int share_of(struct share *out, const struct shape *shape, uint32_t ffn_block, uint32_t n_vocab, uint32_t rank, uint32_t size,
             struct kvg_error *err)
{
    *out = (struct share){.rank = rank, .size = size};
    int failed = share_heads(out, shape, err);
    if (failed)
        return failed;
    uint32_t unit = ffn_block > FFN_UNIT ? ffn_block : FFN_UNIT;
    comm_share(shape->ffn, unit, size, rank, &out->first_ffn, &out->ffn);
    comm_share(n_vocab, 1, size, rank, &out->first_id, &out->n_ids);
    if (size > 1 && (out->ffn == 0 || (n_vocab && out->n_ids == 0)))
        return kvg_fail(err, KVG_INVALID, "a feed-forward of %u in blocks of %u, or %u ids, cannot be divided among %u ranks",
                        shape->ffn, unit, n_vocab, size);
    return 0;
}
