/* Launches of the kernels that work row by row. */
#include "gpu-worker/backend/cuda/rows.cuh"

void cuda_launched(struct cuda_backend *cuda, const char *kernel, uint32_t rows, uint32_t cols, uint32_t n)
{
    cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess && !cuda->failure.code)
        kvg_fail(&cuda->failure, KVG_UNSUPPORTED, "cuda: kernel %s, %u x %u, %u rows: %s: %s", kernel, rows, cols, n,
                 cudaGetErrorName(error), cudaGetErrorString(error));
}

typedef void (*embed_function)(struct matrix, float *, struct step_view);
static const embed_function embed_kernels[MATRIX_KINDS] = {
    embed_kernel<MATRIX_F32>,         embed_kernel<MATRIX_F16>,      embed_kernel<MATRIX_BF16>,
    embed_kernel<MATRIX_SCALE_4>,     embed_kernel<MATRIX_SCALE_5>,  embed_kernel<MATRIX_SCALE_8>,
    embed_kernel<MATRIX_MIN_4>,       embed_kernel<MATRIX_MIN_5>,    embed_kernel<MATRIX_SUPER_MIN_4>,
    embed_kernel<MATRIX_SUPER_MIN_5>, embed_kernel<MATRIX_SUPER16_6>};

void launch_embed(struct cuda_backend *cuda, const struct op *op)
{
    CU_LAUNCH(embed_kernels[op->x->matrix.kind], op->n, ROW_THREADS, 0, cuda->stream, op->x->matrix, op->out->data, cuda->view);
    cuda_launched(cuda, "embed", op->x->rows, op->x->cols, op->n);
}

void launch_rmsnorm(struct cuda_backend *cuda, const struct op *op, const struct act_forms *forms)
{
    CU_LAUNCH(rmsnorm_kernel, op->n, ROW_THREADS, 0, cuda->stream, op->x->data, op->weight->data, op->out->data, op->x->cols,
              op->eps, *forms);
    cuda_launched(cuda, "rmsnorm", op->x->rows, op->x->cols, op->n);
}

void launch_form(struct cuda_backend *cuda, uint32_t n, const struct tensor *x, const struct column_order *order,
                 const struct act_forms *forms)
{
    CU_LAUNCH(form_kernel, n, ROW_THREADS, 0, cuda->stream, x->data, order ? order->device : NULL, x->cols, *forms);
    cuda_launched(cuda, "form", x->rows, x->cols, n);
}

void launch_angles(struct cuda_backend *cuda, const struct op *op)
{
    CU_LAUNCH(angles_kernel, op->n, ROW_THREADS, 0, cuda->stream, op->x->data, op->x->cols, op->out->data, cuda->view);
    cuda_launched(cuda, "angles", op->out->rows, op->out->cols, op->n);
}

void launch_silu_mul(struct cuda_backend *cuda, const struct op *op, const struct act_forms *forms)
{
    CU_LAUNCH(silu_mul_kernel, op->n, ROW_THREADS, 0, cuda->stream, op->out->data, op->x->data, op->out->cols, *forms);
    cuda_launched(cuda, "silu_mul", op->out->rows, op->out->cols, op->n);
}

void launch_gelu_mul(struct cuda_backend *cuda, const struct op *op, const struct act_forms *forms)
{
    CU_LAUNCH(gelu_mul_kernel, op->n, ROW_THREADS, 0, cuda->stream, op->out->data, op->x->data, op->out->cols, *forms);
    cuda_launched(cuda, "gelu_mul", op->out->rows, op->out->cols, op->n);
}

void launch_head_rmsnorm(struct cuda_backend *cuda, const struct op *op)
{
    CU_LAUNCH(head_rmsnorm_kernel, op->n, ROW_THREADS, 0, cuda->stream, op->out->data, op->weight->data, op->out->cols,
              op->weight->cols, op->eps);
    cuda_launched(cuda, "head_rmsnorm", op->out->rows, op->out->cols, op->n);
}

void launch_add(struct cuda_backend *cuda, const struct op *op)
{
    bool scales = op->kind == OP_SCALE;
    CU_LAUNCH(add_kernel, op->n, ROW_THREADS, 0, cuda->stream, op->out->data, scales ? NULL : op->x->data, op->out->cols,
              scales ? op->eps : 1.0f);
    cuda_launched(cuda, scales ? "scale" : "add", op->out->rows, op->out->cols, op->n);
}

void launch_gather(struct cuda_backend *cuda, const struct op *op)
{
    CU_LAUNCH(gather_kernel, op->n, ROW_THREADS, 0, cuda->stream, op->x->data, op->out->data, op->x->cols, cuda->view);
    cuda_launched(cuda, "gather", op->x->rows, op->x->cols, op->n);
}
