/* The stand-ins of cuBLASLt and NCCL compute, and refuse what the libraries refuse. */
#include <cublasLt.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include "tests/cusim/world.h"

struct product {
    cublasLtHandle_t lt;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t w, x, y;
};

/* y [m, n] = x [m, k] w [n, k]^T, all row-major: as cuBLASLt sees it, y^T = w^T^T x^T of column-major matrices. */
static product linear(cudaDataType_t in, cudaDataType_t out, cublasComputeType_t compute, cudaDataType_t scale, int m, int n,
                      int k, int ld_w)
{
    product p;
    cublasOperation_t transposed = CUBLAS_OP_T;
    assert_int_equal(cublasLtCreate(&p.lt), CUBLAS_STATUS_SUCCESS);
    cublasLtMatmulDescCreate(&p.desc, compute, scale);
    assert_int_equal(cublasLtMatmulDescSetAttribute(p.desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed), 0);
    cublasLtMatrixLayoutCreate(&p.w, in, (uint64_t)k, (uint64_t)n, ld_w);
    cublasLtMatrixLayoutCreate(&p.x, in, (uint64_t)k, (uint64_t)m, k);
    cublasLtMatrixLayoutCreate(&p.y, out, (uint64_t)n, (uint64_t)m, n);
    return p;
}

static cublasStatus_t multiply(const product &p, const void *one, const void *zero, const void *w, const void *x, void *y)
{
    return cublasLtMatmul(p.lt, p.desc, one, w, p.w, x, p.x, zero, y, p.y, y, p.y, nullptr, nullptr, 0, nullptr);
}

static void a_bf16_product_is_the_plain_one(void **)
{
    enum { M = 3, N = 8, K = 16 };
    __nv_bfloat16 x[M * K], w[N * K];
    float y[M * N], one = 1, zero = 0;
    for (int i = 0; i < M * K; i++)
        x[i] = __float2bfloat16((float)(i % 5 - 2));
    for (int i = 0; i < N * K; i++)
        w[i] = __float2bfloat16((float)(i % 7 - 3));
    device_array<__nv_bfloat16> dx(x, M * K), dw(w, N * K);
    device_array<float> dy(M * N);
    product p = linear(CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F, CUDA_R_32F, M, N, K, K);
    assert_int_equal(multiply(p, &one, &zero, dw.p, dx.p, dy.p), CUBLAS_STATUS_SUCCESS);
    dy.read(y);
    for (int i = 0; i < M * N; i++) {
        int want = 0;
        for (int k = 0; k < K; k++)
            want += ((i / N * K + k) % 5 - 2) * ((i % N * K + k) % 7 - 3);
        assert_int_equal((int)y[i], want);
    }
}

static void an_int8_product_is_exact(void **)
{
    enum { M = 2, N = 4, K = 32 };
    int8_t x[M * K], w[N * K];
    int y[M * N], one = 1, zero = 0;
    for (int i = 0; i < M * K; i++)
        x[i] = (int8_t)(i * 29);
    for (int i = 0; i < N * K; i++)
        w[i] = (int8_t)(i * 53 + 1);
    device_array<int8_t> dx(x, M * K), dw(w, N * K);
    device_array<int> dy(M * N);
    product p = linear(CUDA_R_8I, CUDA_R_32I, CUBLAS_COMPUTE_32I, CUDA_R_32I, M, N, K, K);
    assert_int_equal(multiply(p, &one, &zero, dw.p, dx.p, dy.p), CUBLAS_STATUS_SUCCESS);
    dy.read(y);
    for (int i = 0; i < M * N; i++) {
        int want = 0;
        for (int k = 0; k < K; k++)
            want += x[i / N * K + k] * w[i % N * K + k];
        assert_int_equal(y[i], want);
    }
}

static void a_wrong_product_is_refused(void **)
{
    device_array<__nv_bfloat16> x(64), w(64);
    device_array<float> y(64);
    float one = 1, zero = 0;
    cublasLtMatmulHeuristicResult_t result;
    int found;
    product good = linear(CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F, CUDA_R_32F, 2, 4, 8, 8);
    product short_ld = linear(CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F, CUDA_R_32F, 2, 4, 8, 7);
    product odd_int8 = linear(CUDA_R_8I, CUDA_R_32I, CUBLAS_COMPUTE_32I, CUDA_R_32I, 2, 4, 6, 6);
    product mixed = linear(CUDA_R_8I, CUDA_R_32F, CUBLAS_COMPUTE_32F, CUDA_R_32F, 2, 4, 8, 8);
    assert_int_equal(multiply(short_ld, &one, &zero, w.p, x.p, y.p), CUBLAS_STATUS_INVALID_VALUE);
    assert_int_equal(multiply(odd_int8, &one, &zero, w.p, x.p, y.p), CUBLAS_STATUS_NOT_SUPPORTED);
    assert_int_equal(multiply(mixed, &one, &zero, w.p, x.p, y.p), CUBLAS_STATUS_NOT_SUPPORTED);
    assert_int_not_equal(cublasLtMatmulAlgoGetHeuristic(short_ld.lt, short_ld.desc, short_ld.w, short_ld.x, short_ld.y,
                                                        short_ld.y, nullptr, 1, &result, &found),
                         CUBLAS_STATUS_SUCCESS);
    assert_int_equal(found, 0);
    assert_int_equal(cusim_take_errors(), 0);
    __nv_bfloat16 on_host[64];
    assert_int_equal(multiply(good, &one, &zero, on_host, x.p, y.p), CUBLAS_STATUS_INVALID_VALUE);
    assert_int_equal(multiply(good, &one, &zero, w.p + 1, x.p, y.p), CUBLAS_STATUS_INVALID_VALUE);  /* 2-byte aligned */
    assert_int_equal(multiply(good, &one, &zero, w.p + 40, x.p, y.p), CUBLAS_STATUS_INVALID_VALUE); /* past the end */
    assert_int_equal(cusim_take_errors(), 3);
}

/* ---- two ranks ---- */

/* Runs rank 1 in a child, rank 0 in another; returns how many ended well. */
static int two_ranks(int (*rank_main)(int rank, ncclComm_t comm))
{
    ncclUniqueId id;
    ncclGetUniqueId(&id);
    pid_t children[2];
    for (int rank = 0; rank < 2; rank++) {
        children[rank] = fork();
        if (children[rank] == 0) {
            ncclComm_t comm;
            freopen("/dev/null", "w", stderr);
            int failed = ncclCommInitRank(&comm, 2, id, rank) != ncclSuccess || rank_main(rank, comm);
            _exit(failed || cusim_take_errors() ? 1 : 0);
        }
    }
    int good = 0;
    for (pid_t child : children) {
        int status;
        waitpid(child, &status, 0);
        good += status == 0;
    }
    return good;
}

static int reduce_and_gather(int rank, ncclComm_t comm)
{
    enum { N = 300000 }; /* more than one slot of the segment */
    float *values = (float *)malloc(N * sizeof *values), *d, *all, got[2];
    for (int i = 0; i < N; i++)
        values[i] = (float)(i + rank);
    cudaMalloc((void **)&d, N * sizeof *d);
    cudaMalloc((void **)&all, 2 * sizeof *all);
    cudaMemcpy(d, values, N * sizeof *d, cudaMemcpyHostToDevice);
    if (ncclAllReduce(d, d, N, ncclFloat32, ncclSum, comm, nullptr) != ncclSuccess)
        return 1;
    if (ncclAllGather(d + rank, all, 1, ncclFloat32, comm, nullptr) != ncclSuccess)
        return 1;
    if (rank == 1)
        cudaMemset(d, 0, sizeof *d);
    if (ncclBroadcast(d, d, 1, ncclFloat32, 1, comm, nullptr) != ncclSuccess)
        return 1;
    cudaMemcpy(got, all, sizeof got, cudaMemcpyDeviceToHost);
    cudaMemcpy(values, d, N * sizeof *d, cudaMemcpyDeviceToHost);
    for (int i = 1; i < N; i++)
        if (values[i] != (float)(2 * i + 1))
            return 1;
    return values[0] != 0 || got[0] != 1 || got[1] != 3;
}

static void collectives_join_the_ranks(void **)
{
    assert_int_equal(two_ranks(reduce_and_gather), 2);
}

static int sizes_differ(int rank, ncclComm_t comm)
{
    float *d;
    cudaMalloc((void **)&d, 8 * sizeof *d);
    cudaMemset(d, 0, 8 * sizeof *d);
    ncclAllReduce(d, d, rank ? 7 : 8, ncclFloat32, ncclSum, comm, nullptr);
    return cudaDeviceSynchronize();
}

static int one_stays_away(int rank, ncclComm_t comm)
{
    setenv("CUSIM_PATIENCE", "200", 1);
    return rank ? 0 : sizes_differ(rank, comm);
}

static int on_the_host(int, ncclComm_t comm)
{
    float host[8] = {};
    return ncclAllReduce(host, host, 8, ncclFloat32, ncclSum, comm, nullptr) != ncclSuccess;
}

static void collectives_that_do_not_match_are_reported(void **)
{
    assert_int_equal(two_ranks(sizes_differ), 0);
    assert_int_equal(two_ranks(one_stays_away), 1);
    assert_int_equal(two_ranks(on_the_host), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_bf16_product_is_the_plain_one, no_errors),
        cmocka_unit_test_teardown(an_int8_product_is_exact, no_errors),
        cmocka_unit_test_teardown(a_wrong_product_is_refused, no_errors),
        cmocka_unit_test_teardown(collectives_join_the_ranks, no_errors),
        cmocka_unit_test_teardown(collectives_that_do_not_match_are_reported, no_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
