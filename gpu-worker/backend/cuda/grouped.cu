/* Launches of the products with grouped matrices. */
#include "gpu-worker/backend/cuda/grouped.cuh"
#include "gpu-worker/backend/cuda/cuda_internal.h"

typedef void (*grouped_function)(struct products, struct acts);

enum { SHARED_MOST = 48 << 10 };
struct grouped_kernels {
    grouped_function few[COL_BUCKETS], narrow, wide; /* narrow: up to 16 rows of x, wide: 64 a block */
    size_t narrow_shared, wide_shared;
};

template <int KIND>
static constexpr struct grouped_kernels grouped_kernels_of()
{
    static_assert(2 * sizeof(grouped_stage<KIND, 64>) <= SHARED_MOST, "more shared memory needs cudaFuncSetAttribute");
    return {
        {gemv_grouped_kernel<KIND, 1>, gemv_grouped_kernel<KIND, 2>, gemv_grouped_kernel<KIND, 4>, gemv_grouped_kernel<KIND, 8>},
        gemm_grouped_kernel<KIND, 16>,
        gemm_grouped_kernel<KIND, 64>,
        2 * sizeof(grouped_stage<KIND, 16>),
        2 * sizeof(grouped_stage<KIND, 64>)};
}

static const struct grouped_kernels grouped_kernels[MATRIX_KINDS - MATRIX_W8A8] = {grouped_kernels_of<MATRIX_W8A8>(),
                                                                                   grouped_kernels_of<MATRIX_W4A16>()};

void launch_grouped(struct cuda_backend *cuda, struct products *products, const struct tensor *x)
{
    const struct matrix *w = &products->p[0].w;
    const struct grouped_kernels &k = grouped_kernels[w->kind - MATRIX_W8A8];
    struct acts acts = cuda->acts[cuda->acts_at];
    uint32_t n = products->n;
    acts.n_groups = x->cols / QUANT_GROUP;
    if (takes_gemv(cuda, w, n)) {
        CU_LAUNCH(k.few[col_bucket(n)], count_blocks(products, GEMV_BLOCK_ROWS), GEMV_THREADS, 0, cuda->stream, *products, acts);
        return;
    }
    bool wide = n > 16;
    dim3 grid(count_blocks(products, GEMM_N), wide ? (n + 63) / 64 : 1);
    CU_LAUNCH(wide ? k.wide : k.narrow, grid, GEMM_THREADS, wide ? k.wide_shared : k.narrow_shared, cuda->stream, *products,
              acts);
}
