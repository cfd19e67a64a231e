/* Stands in for cuBLASLt: the real header's names, linked in its place. Refuses what the library refuses (leading dimensions,
 * shapes, types, alignment, host pointers) and computes in double.
 */
#include <cublasLt.h>
#include <string.h>
#include "tests/cusim/machine.h"

namespace
{
struct product {
    cublasComputeType_t compute;
    cudaDataType_t scale;
    cublasOperation_t op_a, op_b;
    cublasLtEpilogue_t epilogue;
    const void *bias;
};
struct matrix {
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t ld; /* of columns: the order is column-major */
    int32_t batch;
    int64_t stride;
};
static_assert(sizeof(product) <= sizeof(cublasLtMatmulDescOpaque_t), "fits into the header's descriptor");
static_assert(sizeof(matrix) <= sizeof(cublasLtMatrixLayoutOpaque_t), "fits into the header's layout");

const product &of(cublasLtMatmulDesc_t d)
{
    return *reinterpret_cast<const product *>(d);
}
const matrix &of(cublasLtMatrixLayout_t l)
{
    return *reinterpret_cast<const matrix *>(l);
}

size_t size_of(cudaDataType_t type)
{
    switch (type) {
    case CUDA_R_8I:
        return 1;
    case CUDA_R_16F:
    case CUDA_R_16BF:
        return 2;
    case CUDA_R_32I:
    case CUDA_R_32F:
        return 4;
    default:
        return 0;
    }
}

double get(const void *p, cudaDataType_t type, int64_t i)
{
    switch (type) {
    case CUDA_R_8I:
        return static_cast<const int8_t *>(p)[i];
    case CUDA_R_16F:
        return __half2float(static_cast<const __half *>(p)[i]);
    case CUDA_R_16BF:
        return __bfloat162float(static_cast<const __nv_bfloat16 *>(p)[i]);
    case CUDA_R_32I:
        return static_cast<const int32_t *>(p)[i];
    default:
        return static_cast<const float *>(p)[i];
    }
}

void put(void *p, cudaDataType_t type, int64_t i, double v)
{
    switch (type) {
    case CUDA_R_16F:
        static_cast<__half *>(p)[i] = __float2half((float)v);
        break;
    case CUDA_R_16BF:
        static_cast<__nv_bfloat16 *>(p)[i] = __float2bfloat16((float)v);
        break;
    case CUDA_R_32I:
        static_cast<int32_t *>(p)[i] = (int32_t)v;
        break;
    case CUDA_R_8I:
        static_cast<int8_t *>(p)[i] = (int8_t)v;
        break;
    default:
        static_cast<float *>(p)[i] = (float)v;
    }
}

/* Bytes from the first to the last element. */
size_t extent(const matrix &m)
{
    return ((m.cols ? (m.cols - 1) * (uint64_t)m.ld : 0) + m.rows + (uint64_t)(m.batch - 1) * (uint64_t)m.stride) *
           size_of(m.type);
}

uint64_t inner(const product &p, const matrix &a)
{
    return p.op_a == CUBLAS_OP_N ? a.cols : a.rows;
}

cublasStatus_t check_int8(const product &p, const matrix &a, const matrix &b, const matrix &d)
{
    bool types = a.type == CUDA_R_8I && b.type == CUDA_R_8I && (p.scale == CUDA_R_32I) == (d.type == CUDA_R_32I);
    bool form = p.op_a == CUBLAS_OP_T && p.op_b == CUBLAS_OP_N; /* the one with tensor cores */
    bool multiples = !(a.ld % 4 || b.ld % 4 || d.ld % 4 || a.rows % 4 || a.cols % 4);
    return types && form && multiples ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t check(const product &p, const matrix &a, const matrix &b, const matrix &c, const matrix &d)
{
    uint64_t m = p.op_a == CUBLAS_OP_N ? a.rows : a.cols, n = p.op_b == CUBLAS_OP_N ? b.cols : b.rows;
    uint64_t k = inner(p, a), k_b = p.op_b == CUBLAS_OP_N ? b.rows : b.cols;
    const matrix *all[] = {&a, &b, &c, &d};
    for (const matrix *x : all)
        if (!size_of(x->type) || x->ld < (int64_t)x->rows || !x->rows || !x->cols || x->batch != a.batch)
            return CUBLAS_STATUS_INVALID_VALUE;
    if (k != k_b || d.rows != m || d.cols != n || c.rows != m || c.cols != n || c.type != d.type)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (p.compute == CUBLAS_COMPUTE_32I)
        return check_int8(p, a, b, d);
    if (p.compute != CUBLAS_COMPUTE_32F || p.scale != CUDA_R_32F || a.type != b.type || size_of(a.type) < 2)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    return CUBLAS_STATUS_SUCCESS;
}

struct operands {
    product p;
    matrix a, b, c, d;
    const void *A, *B, *C;
    void *D;
    double alpha, beta;
};

/* beta 0 does not read C; the bias is per row of D. */
double element(const operands &o, int64_t row, int64_t col, int64_t batch)
{
    double sum = 0;
    for (int64_t k = 0; k < (int64_t)inner(o.p, o.a); k++) {
        int64_t at_a = o.p.op_a == CUBLAS_OP_N ? row + k * o.a.ld : k + row * o.a.ld;
        int64_t at_b = o.p.op_b == CUBLAS_OP_N ? k + col * o.b.ld : col + k * o.b.ld;
        sum += get(o.A, o.a.type, at_a + batch * o.a.stride) * get(o.B, o.b.type, at_b + batch * o.b.stride);
    }
    sum *= o.alpha;
    if (o.beta != 0)
        sum += o.beta * get(o.C, o.c.type, row + col * o.c.ld + batch * o.c.stride);
    if (o.p.bias)
        sum += get(o.p.bias, o.d.type, row);
    return sum;
}

void multiply(const operands &o)
{
    cusim::device_access access;
    cusim::memory_read(o.A, extent(o.a), "cublasLtMatmul (A)");
    cusim::memory_read(o.B, extent(o.b), "cublasLtMatmul (B)");
    if (o.beta != 0)
        cusim::memory_read(o.C, extent(o.c), "cublasLtMatmul (C)");
    for (int64_t batch = 0; batch < o.d.batch; batch++)
        for (int64_t col = 0; col < (int64_t)o.d.cols; col++)
            for (int64_t row = 0; row < (int64_t)o.d.rows; row++) {
                int64_t at = row + col * o.d.ld + batch * o.d.stride;
                put(o.D, o.d.type, at, element(o, row, col, batch));
                cusim::memory_written(static_cast<char *>(o.D) + (size_t)at * size_of(o.d.type), size_of(o.d.type));
            }
}

bool usable(const void *p, const matrix &m, const char *name)
{
    if (cusim::is_device(p, extent(m)) && (uintptr_t)p % 16 == 0)
        return true;
    cusim::report("cublasLtMatmul: %s at %p is %s for %zu bytes", name, p,
                  (uintptr_t)p % 16 ? "not 16-byte aligned" : "no device memory", extent(m));
    return false;
}
} // namespace

extern "C" {
cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    int n;
    if (cudaGetDeviceCount(&n) != cudaSuccess)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = reinterpret_cast<cublasLtHandle_t>(new int);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    delete reinterpret_cast<int *>(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t d, size_t, cublasComputeType_t compute, cudaDataType_t scale)
{
    product p = {compute, scale, CUBLAS_OP_N, CUBLAS_OP_N, CUBLASLT_EPILOGUE_DEFAULT, nullptr};
    memcpy(d, &p, sizeof p);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t compute, cudaDataType_t scale)
{
    *d = new cublasLtMatmulDescOpaque_t{};
    return cublasLtMatmulDescInit_internal(*d, sizeof **d, compute, scale);
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d)
{
    delete d;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t attribute, const void *value,
                                              size_t size)
{
    product *p = reinterpret_cast<product *>(d);
    size_t want = attribute == CUBLASLT_MATMUL_DESC_BIAS_POINTER ? sizeof(void *) : 4;
    if (!value || size != want)
        return CUBLAS_STATUS_INVALID_VALUE;
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
        memcpy(&p->op_a, value, size);
        break;
    case CUBLASLT_MATMUL_DESC_TRANSB:
        memcpy(&p->op_b, value, size);
        break;
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        memcpy(&p->bias, value, size);
        break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        memcpy(&p->epilogue, value, size);
        break;
    default:
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    bool known = p->epilogue == CUBLASLT_EPILOGUE_DEFAULT || p->epilogue == CUBLASLT_EPILOGUE_BIAS;
    return known ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t l, size_t, cudaDataType type, uint64_t rows,
                                                 uint64_t cols, int64_t ld)
{
    matrix m = {type, rows, cols, ld, 1, 0};
    memcpy(l, &m, sizeof m);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType type, uint64_t rows, uint64_t cols, int64_t ld)
{
    *l = new cublasLtMatrixLayoutOpaque_t{};
    return cublasLtMatrixLayoutInit_internal(*l, sizeof **l, type, rows, cols, ld);
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t size)
{
    matrix *m = reinterpret_cast<matrix *>(l);
    if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT && size == sizeof m->batch)
        memcpy(&m->batch, value, size);
    else if (attribute == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET && size == sizeof m->stride)
        memcpy(&m->stride, value, size);
    else
        return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l)
{
    delete l;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t p, size_t)
{
    memset(p, 0, sizeof *p);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p)
{
    *p = new cublasLtMatmulPreferenceOpaque_t{};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p)
{
    delete p;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                                                    const void *value, size_t size)
{
    return value && size ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t, int wanted, cublasLtMatmulHeuristicResult_t results[],
                                              int *found)
{
    cublasStatus_t status = wanted > 0 ? check(of(desc), of(a), of(b), of(c), of(d)) : CUBLAS_STATUS_INVALID_VALUE;
    *found = status == CUBLAS_STATUS_SUCCESS;
    if (*found) {
        memset(results, 0, sizeof *results);
        results->state = CUBLAS_STATUS_SUCCESS;
    }
    return status;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void *alpha, const void *A,
                              cublasLtMatrixLayout_t a, const void *B, cublasLtMatrixLayout_t b, const void *beta, const void *C,
                              cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *,
                              void *workspace, size_t workspace_size, cudaStream_t stream)
{
    operands o = {of(desc), of(a), of(b), of(c), of(d), A, B, C, D, 0, 0};
    cublasStatus_t status = check(o.p, o.a, o.b, o.c, o.d);
    if (status != CUBLAS_STATUS_SUCCESS)
        return status;
    o.alpha = get(alpha, o.p.scale, 0);
    o.beta = get(beta, o.p.scale, 0);
    bool good = usable(A, o.a, "A") && usable(B, o.b, "B") && usable(D, o.d, "D") && (o.beta == 0 || usable(C, o.c, "C"));
    if (!good || (workspace_size && !cusim::is_device(workspace, workspace_size)))
        return CUBLAS_STATUS_INVALID_VALUE;
    cusim::push(stream, [o] { multiply(o); });
    return CUBLAS_STATUS_SUCCESS;
}
}
