/* Launches of the products for few rows. */
#include "gpu-worker/backend/cuda/gemv.cuh"
#include "gpu-worker/backend/cuda/cuda_internal.h"

typedef void (*quant_function)(struct products, struct acts);
typedef void (*float_function)(struct products, const float *);

struct quant_gemv {
    quant_function kernels[COL_BUCKETS];
};
struct float_gemv {
    float_function kernels[COL_BUCKETS];
};

template <int KIND>
static constexpr struct quant_gemv quant_gemv_of()
{
    return {{gemv_quant_kernel<KIND, 1>, gemv_quant_kernel<KIND, 2>, gemv_quant_kernel<KIND, 4>, gemv_quant_kernel<KIND, 8>}};
}

template <int KIND>
static constexpr struct float_gemv float_gemv_of()
{
    return {{gemv_float_kernel<KIND, 1>, gemv_float_kernel<KIND, 2>, gemv_float_kernel<KIND, 4>, gemv_float_kernel<KIND, 8>}};
}

static const struct quant_gemv quant_kernels[MATRIX_W8A8 - MATRIX_SCALE_4] = {
    quant_gemv_of<MATRIX_SCALE_4>(),     quant_gemv_of<MATRIX_SCALE_5>(),  quant_gemv_of<MATRIX_SCALE_8>(),
    quant_gemv_of<MATRIX_MIN_4>(),       quant_gemv_of<MATRIX_MIN_5>(),    quant_gemv_of<MATRIX_SUPER_MIN_4>(),
    quant_gemv_of<MATRIX_SUPER_MIN_5>(), quant_gemv_of<MATRIX_SUPER16_6>()};
static const struct float_gemv float_kernels[3] = {float_gemv_of<MATRIX_F32>(), float_gemv_of<MATRIX_F16>(),
                                                   float_gemv_of<MATRIX_BF16>()};

/* F32 matrices have no tensor-core kernel: eight rows of x at a time. */
static void launch_float(struct cuda_backend *cuda, struct products *products, const struct tensor *x)
{
    uint32_t n = products->n, blocks = count_blocks(products, GEMV_BLOCK_ROWS);
    for (uint32_t first = 0; first < n; first += GEMV_ROWS_MAX) {
        products->n = n - first < GEMV_ROWS_MAX ? n - first : (uint32_t)GEMV_ROWS_MAX;
        int bucket = col_bucket(products->n);
        CU_LAUNCH(float_kernels[products->p[0].w.kind].kernels[bucket], blocks, GEMV_THREADS, 0, cuda->stream, *products,
                  x->data + (size_t)first * x->cols);
        for (uint32_t i = 0; i < products->count; i++)
            products->p[i].out += (size_t)GEMV_ROWS_MAX * products->p[i].w.rows;
    }
    products->n = n;
}

void launch_gemv(struct cuda_backend *cuda, struct products *products, const struct tensor *x)
{
    if (matrix_is_float(&products->p[0].w)) {
        launch_float(cuda, products, x);
        return;
    }
    struct acts acts = cuda->acts[cuda->acts_at];
    acts.n_groups = x->cols / QUANT_GROUP;
    int bucket = col_bucket(products->n);
    uint32_t blocks = count_blocks(products, GEMV_BLOCK_ROWS);
    CU_LAUNCH(quant_kernels[products->p[0].w.kind - MATRIX_SCALE_4].kernels[bucket], blocks, GEMV_THREADS, 0, cuda->stream,
              *products, acts);
}
