/* Launches of the kernels that know the KV pool. */
#include "gpu-worker/backend/cuda/attention.cuh"

typedef void (*decode_function)(struct attention_args, struct rope_args, struct kv_view, struct step_view,
                                struct attention_parts);
typedef void (*tile_function)(struct attention_args, struct kv_view, struct step_view);
typedef void (*rope_function)(struct rope_args, struct kv_view, struct step_view);

static constexpr int DIMS = 3, GROUPS = 4; /* 64, 128, 256; 1, 2, 4, 8 heads */
struct kv_kernels {
    rope_function rope_store;
    decode_function decode[DIMS][GROUPS];
    tile_function tile[DIMS];
};

template <int STORE>
static constexpr struct kv_kernels kv_kernels_of()
{
    return {rope_store_kernel<STORE>,
            {{attention_decode_kernel<1, 64, STORE>, attention_decode_kernel<2, 64, STORE>, attention_decode_kernel<4, 64, STORE>,
              attention_decode_kernel<8, 64, STORE>},
             {attention_decode_kernel<1, 128, STORE>, attention_decode_kernel<2, 128, STORE>,
              attention_decode_kernel<4, 128, STORE>, attention_decode_kernel<8, 128, STORE>},
             {attention_decode_kernel<1, 256, STORE>, attention_decode_kernel<2, 256, STORE>,
              attention_decode_kernel<4, 256, STORE>, attention_decode_kernel<8, 256, STORE>}},
            {attention_tile_kernel<64, STORE>, attention_tile_kernel<128, STORE>, attention_tile_kernel<256, STORE>}};
}

static const struct kv_kernels kv_kernels[KV_STORES] = {kv_kernels_of<STORE_BF16>(), kv_kernels_of<STORE_FP8>(),
                                                        kv_kernels_of<STORE_INT8>()};
static const size_t tile_bytes[DIMS] = {sizeof(tile_shared<64>), sizeof(tile_shared<128>), sizeof(tile_shared<256>)};
static const size_t tile_scale_bytes[DIMS] = {tile_shared<64>::scale_bytes, tile_shared<128>::scale_bytes,
                                              tile_shared<256>::scale_bytes};

static const struct kv_kernels &kernels_of(const struct cuda_backend *cuda)
{
    return kv_kernels[kv_store_of(&cuda->kv)];
}

static int dim_of(uint32_t head_dim)
{
    return head_dim <= 64 ? 0 : head_dim <= 128 ? 1 : 2;
}

/* The scales, which lie last, only where the pool has them: heads of 256 then just fit the 99 KiB of compute capability 8.6. */
static size_t tile_memory(const struct cuda_backend *cuda)
{
    int dim = dim_of(cuda->kv.head_dim);
    return tile_bytes[dim] - (kv_store_of(&cuda->kv) == STORE_INT8 ? 0 : tile_scale_bytes[dim]);
}

int attention_prepare(const struct cuda_backend *cuda, struct kvg_error *err)
{
    size_t wanted = tile_memory(cuda);
    if (wanted > cuda->shared_most)
        return kvg_fail(err, KVG_UNSUPPORTED,
                        "cuda: attention with heads of %u in %s takes %zu bytes of shared memory, %s has %zu", cuda->kv.head_dim,
                        backend_kv_dtype_name(cuda->kv.dtype), wanted, cuda->name, cuda->shared_most);
    const void *kernel = (const void *)kernels_of(cuda).tile[dim_of(cuda->kv.head_dim)];
    return cuda_failed(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)wanted), err,
                       "shared memory of attention");
}

static struct kv_view layer_view(const struct cuda_backend *cuda, uint32_t layer)
{
    const struct backend_kv *kv = &cuda->kv;
    size_t slots = (size_t)kv->block_size * kv->n_kv_heads, bytes = kv_layer_bytes(kv);
    size_t values = slots * kv->head_dim * (kv_store_of(kv) == STORE_BF16 ? 2 : 1); /* of a block's k, or v, in one layer */
    struct kv_view view;
    view.k = cuda->kv_memory + layer * bytes;
    view.v = view.k + values;
    view.k_scales = (float *)(view.v + values);
    view.v_scales = view.k_scales + slots;
    view.block_bytes = kv->n_layers * bytes;
    view.n_heads = kv->n_heads;
    view.n_kv_heads = kv->n_kv_heads;
    view.head_dim = kv->head_dim;
    view.block_size = kv->block_size;
    view.block_shift = (uint32_t)__builtin_ctz(kv->block_size);
    view.window = kv->windows ? kv->windows[layer] : 0;
    view.window_split = view.window ? keys_of_split(view.window, cuda->parts.splits) : 0;
    return view;
}

static struct rope_args rope_args_of(const struct backend_rope *rope)
{
    return {rope->q->data, rope->k->data, rope->v->data,      rope->angles->data,
            rope->q->cols, rope->k->cols, rope->angles->cols, rope->style == ROPE_INTERLEAVED};
}

void launch_rope_store(struct cuda_backend *cuda, const struct op *op)
{
    const struct backend_rope *rope = &op->rope;
    CU_LAUNCH(kernels_of(cuda).rope_store, op->n, ROW_THREADS, 0, cuda->stream, rope_args_of(rope), layer_view(cuda, rope->layer),
              cuda->view);
    cuda_launched(cuda, "rope_store", rope->q->rows, rope->q->cols, op->n);
}

static void launch_decode(struct cuda_backend *cuda, const struct attention_args &args, const struct rope_args &rope,
                          const struct kv_view &kv, const struct act_forms *forms)
{
    uint32_t group = kv.n_heads / kv.n_kv_heads;
    int bucket = group <= 1 ? 0 : group <= 2 ? 1 : group <= 4 ? 2 : 3;
    dim3 grid(kv.n_kv_heads * ((group + (1u << bucket) - 1) >> bucket), cuda->parts.splits, cuda->n_decodes);
    CU_LAUNCH(kernels_of(cuda).decode[dim_of(kv.head_dim)][bucket], grid, DECODE_WARPS * WARP, 0, cuda->stream, args, rope, kv,
              cuda->view, cuda->parts);
    cuda_launched(cuda, "attention_decode", kv.n_heads, kv.head_dim, cuda->n_decodes);
    CU_LAUNCH(attention_combine_kernel, cuda->n_decodes, ROW_THREADS, kv.n_heads * cuda->parts.splits * sizeof(float),
              cuda->stream, args, kv, cuda->view, cuda->parts, *forms);
    cuda_launched(cuda, "attention_combine", kv.n_heads, kv.head_dim, cuda->n_decodes);
}

/* The combining kernel writes the form of its rows itself; tiles leave it to a kernel of its own. */
void launch_attention(struct cuda_backend *cuda, const struct op *op, const struct backend_rope *rope,
                      const struct act_forms *forms)
{
    const struct backend_attention *attention = &op->attention;
    const struct kv_view kv = layer_view(cuda, attention->layer);
    struct attention_args args = {attention->q->data, attention->out->data, attention->q->cols,
                                  attention->scale * 1.44269504088896341f};
    struct act_forms none = {};
    if (cuda->n_decodes)
        launch_decode(cuda, args, rope ? rope_args_of(rope) : rope_args(), kv, cuda->n_tiles ? &none : forms);
    if (!cuda->n_tiles)
        return;
    CU_LAUNCH(kernels_of(cuda).tile[dim_of(kv.head_dim)], dim3(cuda->n_tiles, kv.n_kv_heads), TILE_THREADS, tile_memory(cuda),
              cuda->stream, args, kv, cuda->view);
    cuda_launched(cuda, "attention_tile", kv.n_heads, kv.head_dim, cuda->n_tiles);
    if (forms->form != FORM_NONE)
        launch_form(cuda, op->n, attention->out, NULL, forms);
}
