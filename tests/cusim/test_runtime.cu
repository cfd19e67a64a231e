/* The runtime API under emulation: queues, graphs, limits, planned failures, what is reported and how the profiler counts. */
#include <stdio.h>
#include <stdlib.h>
#include "tests/cusim/world.h"

__global__ void add_kernel(int *x, const int *n)
{
    x[threadIdx.x] += *n;
}

static void work_runs_when_something_waits(void **)
{
    int one = 1, zeros[32] = {}, *pinned;
    device_array<int> x(zeros, 32), n(&one, 1);
    cudaStream_t s;
    cudaEvent_t half;
    assert_int_equal(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaSuccess);
    cudaEventCreateWithFlags(&half, cudaEventDisableTiming);
    cudaMallocHost((void **)&pinned, sizeof zeros);
    pinned[0] = -1;
    unsigned long before = cusim_launches();
    CU_LAUNCH(add_kernel, 1, 32, 0, s, x.p, n.p);
    cudaEventRecord(half, s);
    cudaMemcpyAsync(pinned, x.p, sizeof zeros, cudaMemcpyDeviceToHost, s);
    assert_int_equal(cudaStreamQuery(s), cudaErrorNotReady);
    assert_int_equal(pinned[0], -1);
    assert_int_equal(cudaEventSynchronize(half), cudaSuccess);
    assert_int_equal(cusim_launches() - before, 1);
    assert_int_equal(cudaStreamSynchronize(s), cudaSuccess);
    assert_int_equal(pinned[31], 1);
    assert_int_equal(cudaStreamQuery(s), cudaSuccess);
    cudaFreeHost(pinned);
    cudaStreamDestroy(s);
}

static void a_graph_runs_with_the_arguments_of_its_capture(void **)
{
    int one = 1, zeros[32] = {};
    device_array<int> x(zeros, 32), n(&one, 1);
    cudaStream_t s;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    size_t nodes;
    cudaStreamCreate(&s);
    assert_int_equal(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    CU_LAUNCH(add_kernel, 1, 32, 0, s, x.p, n.p);
    CU_LAUNCH(add_kernel, 1, 32, 0, s, x.p, n.p);
    assert_int_equal(cudaStreamEndCapture(s, &graph), cudaSuccess);
    assert_int_equal(cudaGraphGetNodes(graph, nullptr, &nodes), cudaSuccess);
    assert_int_equal(nodes, 2);
    assert_int_equal(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    cudaGraphDestroy(graph);
    x.read(zeros);
    assert_int_equal(zeros[0], 0); /* a capture runs nothing */
    for (int i = 0; i < 3; i++)
        assert_int_equal(cudaGraphLaunch(exec, s), cudaSuccess);
    cudaStreamSynchronize(s);
    x.read(zeros);
    assert_int_equal(zeros[31], 6);
    cudaGraphExecDestroy(exec);
}

static void a_capture_is_broken_by_what_waits_or_allocates(void **)
{
    cudaStream_t s;
    cudaGraph_t graph;
    void *p;
    cudaStreamCreate(&s);
    cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal);
    assert_int_equal(cudaMalloc(&p, 16), cudaErrorStreamCaptureUnsupported);
    assert_int_equal(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
    assert_null(graph);
    assert_int_equal(cusim_take_errors(), 1);
    cudaGetLastError();
}

static void launches_keep_to_the_limits_of_a_block(void **)
{
    int one = 1;
    device_array<int> x(&one, 1), n(&one, 1);
    const dim3 blocks[] = {dim3(1025), dim3(1, 1, 65), dim3(0), dim3(32, 33)};
    for (dim3 block : blocks) {
        CU_LAUNCH(add_kernel, 1, block, 0, 0, x.p, n.p);
        assert_int_equal(cudaGetLastError(), cudaErrorInvalidConfiguration);
    }
    CU_LAUNCH(add_kernel, dim3(1, 65536), 1, 0, 0, x.p, n.p);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidConfiguration);
    CU_LAUNCH(add_kernel, 1, 1, (48 << 10) + 16, 0, x.p, n.p);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidConfiguration);
    assert_int_equal(cudaFuncSetAttribute((const void *)add_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 228 << 10),
                     cudaErrorInvalidValue);
    cudaGetLastError();
    assert_int_equal(cudaGetLastError(), cudaSuccess);
}

static void memory_runs_out_at_the_device_size(void **)
{
    size_t free_bytes, total, after;
    void *p, *q;
    cudaMemGetInfo(&free_bytes, &total);
    assert_int_equal(cudaMalloc(&p, free_bytes / 2), cudaSuccess);
    cudaMemGetInfo(&after, &total);
    assert_int_equal(free_bytes - after, free_bytes / 2);
    assert_int_equal(cudaMalloc(&q, free_bytes - free_bytes / 4), cudaErrorMemoryAllocation);
    assert_int_equal(cudaGetLastError(), cudaErrorMemoryAllocation);
    cudaFree(p);
}

static void planned_failures_come_at_their_call(void **)
{
    void *p;
    cusim_fail("malloc", 2);
    assert_int_equal(cudaMalloc(&p, 16), cudaSuccess);
    assert_int_equal(cudaMalloc(&p, 16), cudaErrorMemoryAllocation);
    assert_int_equal(cudaMalloc(&p, 16), cudaSuccess);
    cudaGetLastError();
}

static void wrong_copies_and_frees_are_reported(void **)
{
    float host[4] = {};
    device_array<float> d(host, 4);
    assert_int_equal(cudaMemcpy(d.p, host, sizeof host, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    assert_int_equal(cusim_take_errors(), 1);
    assert_int_equal(cudaMemcpy(d.p + 1, host, sizeof host, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    assert_int_equal(cusim_take_errors(), 1);
    assert_int_equal(cudaFree(d.p + 1), cudaErrorInvalidValue);
    assert_int_equal(cusim_take_errors(), 1);
    assert_int_equal(cudaMemset(host, 0, 4), cudaErrorInvalidValue);
    assert_int_equal(cusim_take_errors(), 1);
    cudaGetLastError();
}

static void two_dimensional_copies_keep_the_pitches(void **)
{
    int in[12], out[6] = {};
    for (int i = 0; i < 12; i++)
        in[i] = i;
    device_array<int> d(in, 12);
    assert_int_equal(cudaMemcpy2D(out, 8, d.p, 16, 8, 3, cudaMemcpyDeviceToHost), cudaSuccess);
    const int want[] = {0, 1, 4, 5, 8, 9};
    assert_memory_equal(out, want, sizeof want);
}

/* ---- the profiler (CHECK builds with CUSIM_PROF) ---- */

__global__ void access_kernel(const float *in, float *out, int stride)
{
    CU_SHARED(float[32 * 33], s);
    unsigned t = threadIdx.x;
    s[t * 32] = in[t];            /* every lane the same bank */
    s[t * 33 % 1056] = in[t * 8]; /* every lane its own; a sector a lane from memory */
    stf4(out + t * 4, ldf4(in + t * 4));
    out[128 + t] = s[t * 33 % 1056] + (float)stride;
}

static const cusim_profile_row *row_at(int shared, int store, int bytes, size_t number)
{
    const cusim_profile_row *rows;
    size_t n = cusim_profile(&rows), seen = 0;
    for (size_t i = 0; i < n; i++)
        if (strstr(rows[i].kernel, "access_kernel") && rows[i].shared == shared && rows[i].store == store &&
            rows[i].bytes == bytes && seen++ == number)
            return rows + i;
    return nullptr;
}

static void the_profiler_counts_sectors_and_bank_passes(void **)
{
    float in[256] = {};
    device_array<float> a(in, 256), b(160);
    CU_LAUNCH(access_kernel, 1, 32, 0, 0, a.p, b.p, 0);
    cudaDeviceSynchronize();
    if (!cusim_accesses() || !getenv("CUSIM_PROF"))
        return; /* the check build with CUSIM_PROF runs this */
    const cusim_profile_row *vector = row_at(0, 0, 16, 0), *close = row_at(0, 0, 4, 0), *apart = row_at(0, 0, 4, 1);
    assert_true(vector->sectors == 16 && vector->used == 1);
    double few = close->sectors < apart->sectors ? close->sectors : apart->sectors;
    double many = close->sectors < apart->sectors ? apart->sectors : close->sectors;
    assert_true(few == 4 && many == 32);
    double worst = 0, best = 100;
    for (size_t i = 0; i < 2; i++) {
        const cusim_profile_row *r = row_at(1, 1, 4, i);
        worst = r->passes > worst ? r->passes : worst;
        best = r->passes < best ? r->passes : best;
    }
    assert_true(worst == 32 && best == 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(work_runs_when_something_waits, no_errors),
        cmocka_unit_test_teardown(a_graph_runs_with_the_arguments_of_its_capture, no_errors),
        cmocka_unit_test_teardown(a_capture_is_broken_by_what_waits_or_allocates, no_errors),
        cmocka_unit_test_teardown(launches_keep_to_the_limits_of_a_block, no_errors),
        cmocka_unit_test_teardown(memory_runs_out_at_the_device_size, no_errors),
        cmocka_unit_test_teardown(planned_failures_come_at_their_call, no_errors),
        cmocka_unit_test_teardown(wrong_copies_and_frees_are_reported, no_errors),
        cmocka_unit_test_teardown(two_dimensional_copies_keep_the_pitches, no_errors),
        cmocka_unit_test_teardown(the_profiler_counts_sectors_and_bank_passes, no_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
