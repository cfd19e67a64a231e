/* Launches of the kernels that know the KV pool. */
#include "gpu-worker/backend/cuda/attention.cuh"
#include "gpu-worker/backend/cuda/rope.cuh"

typedef void (*decode_function)(struct attention_args, struct kv_view, struct step_view, struct attention_parts);
typedef void (*tile_function)(struct attention_args, struct kv_view, struct step_view);

static constexpr int DIMS = 3; /* 64, 128, 256 */
static const decode_function decode_kernels[DIMS][4] = {{attention_decode_kernel<1, 64>, attention_decode_kernel<2, 64>,
                                                         attention_decode_kernel<4, 64>, attention_decode_kernel<8, 64>},
                                                        {attention_decode_kernel<1, 128>, attention_decode_kernel<2, 128>,
                                                         attention_decode_kernel<4, 128>, attention_decode_kernel<8, 128>},
                                                        {attention_decode_kernel<1, 256>, attention_decode_kernel<2, 256>,
                                                         attention_decode_kernel<4, 256>, attention_decode_kernel<8, 256>}};
static const struct {
    tile_function kernel;
    size_t shared;
} tile_kernels[DIMS] = {{attention_tile_kernel<64>, sizeof(tile_shared<64>)},
                        {attention_tile_kernel<128>, sizeof(tile_shared<128>)},
                        {attention_tile_kernel<256>, sizeof(tile_shared<256>)}};

int attention_prepare(struct kvg_error *err)
{
    int failed = 0;
    for (const auto &k : tile_kernels)
        if (!failed)
            failed = cuda_failed(
                cudaFuncSetAttribute((const void *)k.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)k.shared), err,
                "shared memory of attention");
    return failed;
}

static struct kv_view layer_view(const struct cuda_backend *cuda, uint32_t layer)
{
    const struct backend_kv *kv = &cuda->kv;
    size_t values = (size_t)kv->block_size * kv->n_kv_heads * kv->head_dim; /* of a block's k, or v, in one layer */
    struct kv_view view;
    view.k = cuda->kv_memory + (size_t)layer * 2 * values;
    view.v = view.k + values;
    view.block_values = (size_t)kv->n_layers * 2 * values;
    view.n_heads = kv->n_heads;
    view.n_kv_heads = kv->n_kv_heads;
    view.head_dim = kv->head_dim;
    view.block_size = kv->block_size;
    view.block_shift = (uint32_t)__builtin_ctz(kv->block_size);
    return view;
}

void launch_rope_store(struct cuda_backend *cuda, const struct op *op)
{
    const struct backend_rope *rope = &op->rope;
    struct rope_args args = {rope->q->data, rope->k->data, rope->v->data,      rope->angles->data,
                             rope->q->cols, rope->k->cols, rope->angles->cols, rope->style == ROPE_INTERLEAVED};
    CU_LAUNCH(rope_store_kernel, op->n, ROW_THREADS, 0, cuda->stream, args, layer_view(cuda, rope->layer), cuda->view);
    cuda_launched(cuda, "rope_store", rope->q->rows, rope->q->cols, op->n);
}

static int dim_of(uint32_t head_dim)
{
    return head_dim <= 64 ? 0 : head_dim <= 128 ? 1 : 2;
}

static void launch_decode(struct cuda_backend *cuda, const struct attention_args &args, const struct kv_view &kv,
                          const struct act_forms *forms)
{
    uint32_t group = kv.n_heads / kv.n_kv_heads;
    int bucket = group <= 1 ? 0 : group <= 2 ? 1 : group <= 4 ? 2 : 3;
    dim3 grid(kv.n_kv_heads * ((group + (1u << bucket) - 1) >> bucket), cuda->parts.splits, cuda->n_decodes);
    CU_LAUNCH(decode_kernels[dim_of(kv.head_dim)][bucket], grid, DECODE_WARPS * WARP, 0, cuda->stream, args, kv, cuda->view,
              cuda->parts);
    cuda_launched(cuda, "attention_decode", kv.n_heads, kv.head_dim, cuda->n_decodes);
    CU_LAUNCH(attention_combine_kernel, cuda->n_decodes, ROW_THREADS, kv.n_heads * cuda->parts.splits * sizeof(float),
              cuda->stream, args, kv, cuda->view, cuda->parts, *forms);
    cuda_launched(cuda, "attention_combine", kv.n_heads, kv.head_dim, cuda->n_decodes);
}

/* The combining kernel writes the form of its rows itself; tiles leave it to a kernel of its own. */
void launch_attention(struct cuda_backend *cuda, const struct op *op, const struct act_forms *forms)
{
    const struct backend_attention *attention = &op->attention;
    const struct kv_view kv = layer_view(cuda, attention->layer);
    struct attention_args args = {attention->q->data, attention->out->data, attention->q->cols,
                                  attention->scale * 1.44269504088896341f};
    struct act_forms none = {};
    if (cuda->n_decodes)
        launch_decode(cuda, args, kv, cuda->n_tiles ? &none : forms);
    if (!cuda->n_tiles)
        return;
    const auto &k = tile_kernels[dim_of(kv.head_dim)];
    CU_LAUNCH(k.kernel, dim3(kv.n_kv_heads, cuda->n_tiles), TILE_THREADS, k.shared, cuda->stream, args, kv, cuda->view);
    cuda_launched(cuda, "attention_tile", kv.n_heads, kv.head_dim, cuda->n_tiles);
    if (forms->form != FORM_NONE)
        launch_form(cuda, op->n, attention->out, forms);
}
