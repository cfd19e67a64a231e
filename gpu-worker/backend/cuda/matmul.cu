/* Which kernel a product takes: by the kind of matrix and the number of rows. */
#include "gpu-worker/backend/cuda/gemm_float.cuh"
#include "gpu-worker/backend/cuda/cuda_internal.h"

typedef void (*quant_function)(struct products, struct acts);
typedef void (*half_function)(struct products, const uint16_t *);

struct quant_kernels {
    quant_function narrow, wide; /* narrow: up to 16 rows, wide: 64 a block */
    size_t narrow_shared, wide_shared;
};

template <int KIND>
static constexpr struct quant_kernels quant_kernels_of()
{
    return {gemm_quant_kernel<KIND, 16>, gemm_quant_kernel<KIND, 64>, gemm_quant_shared<KIND, 16>(),
            gemm_quant_shared<KIND, 64>()};
}

static const struct quant_kernels quant_kernels[MATRIX_W8A8 - MATRIX_SCALE_4] = {
    quant_kernels_of<MATRIX_SCALE_4>(),     quant_kernels_of<MATRIX_SCALE_5>(),  quant_kernels_of<MATRIX_SCALE_8>(),
    quant_kernels_of<MATRIX_MIN_4>(),       quant_kernels_of<MATRIX_MIN_5>(),    quant_kernels_of<MATRIX_SUPER_MIN_4>(),
    quant_kernels_of<MATRIX_SUPER_MIN_5>(), quant_kernels_of<MATRIX_SUPER16_6>()};

static const half_function half_gemm[2][2] = {{gemm_float_kernel<MATRIX_F16, 16>, gemm_float_kernel<MATRIX_F16, 64>},
                                              {gemm_float_kernel<MATRIX_BF16, 16>, gemm_float_kernel<MATRIX_BF16, 64>}};

static int allow_shared(const void *kernel, size_t bytes, struct kvg_error *err)
{
    return cuda_failed(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes), err,
                       "shared memory of a product");
}

int matmul_prepare(struct kvg_error *err)
{
    int failed = 0;
    for (const struct quant_kernels &k : quant_kernels)
        if (!failed && !(failed = allow_shared((const void *)k.narrow, k.narrow_shared, err)))
            failed = allow_shared((const void *)k.wide, k.wide_shared, err);
    for (int i = 0; i < 2; i++)
        if (!failed && !(failed = allow_shared((const void *)half_gemm[i][0], gemm_float_shared<16>(), err)))
            failed = allow_shared((const void *)half_gemm[i][1], gemm_float_shared<64>(), err);
    return failed;
}

/* In deterministic mode the number of rows chooses no kernel but among those with equal bits: both widths of a GEMM, all of the
 * GEMVs. */
bool takes_gemv(const struct cuda_backend *cuda, const struct matrix *w, uint32_t n)
{
    return w->kind == MATRIX_F32 || (n <= GEMV_ROWS_MAX && !cuda->options.deterministic);
}

enum act_form matmul_form(const struct cuda_backend *cuda, const struct matrix *w, uint32_t n)
{
    if (matrix_is_grouped(w))
        return w->kind == MATRIX_W8A8 ? FORM_ROWS_8 : FORM_ROWS_16;
    if (!matrix_is_float(w))
        return FORM_GROUPS;
    if (takes_gemv(cuda, w, n))
        return FORM_NONE;
    return w->kind == MATRIX_BF16 ? FORM_BF16 : FORM_F16;
}

uint32_t count_blocks(struct products *products, uint32_t rows)
{
    uint32_t blocks = 0;
    for (uint32_t i = 0; i < products->count; i++) {
        bool shared = products->then == THEN_GATE && i;
        products->p[i].first_block = shared ? UINT32_MAX : blocks;
        blocks += shared ? 0 : (products->p[i].w.rows + rows - 1) / rows;
    }
    return blocks;
}

static void launch_quant(struct cuda_backend *cuda, struct products *products, const struct tensor *x)
{
    const struct quant_kernels &k = quant_kernels[products->p[0].w.kind - MATRIX_SCALE_4];
    struct acts acts = cuda->acts[cuda->acts_at];
    acts.n_groups = x->cols / QUANT_GROUP;
    bool wide = products->n > 16;
    dim3 grid(count_blocks(products, GEMM_N), wide ? (products->n + 63) / 64 : 1);
    CU_LAUNCH(wide ? k.wide : k.narrow, grid, GEMM_THREADS, wide ? k.wide_shared : k.narrow_shared, cuda->stream, *products,
              acts);
}

static void launch_half(struct cuda_backend *cuda, struct products *products)
{
    bool wide = products->n > 16;
    dim3 grid(count_blocks(products, GEMM_N), wide ? (products->n + 63) / 64 : 1);
    CU_LAUNCH(half_gemm[products->p[0].w.kind - MATRIX_F16][wide], grid, GEMM_THREADS,
              wide ? gemm_float_shared<64>() : gemm_float_shared<16>(), cuda->stream, *products, cuda->halves);
}

void launch_products(struct cuda_backend *cuda, struct products *products, const struct tensor *x)
{
    const struct matrix *w = &products->p[0].w;
    if (matrix_is_grouped(w))
        launch_grouped(cuda, products, x);
    else if (takes_gemv(cuda, w, products->n))
        launch_gemv(cuda, products, x);
    else if (!matrix_is_float(w))
        launch_quant(cuda, products, x);
    else
        launch_half(cuda, products);
    cuda_launched(cuda, "matmul", w->rows, w->cols, products->n);
}
