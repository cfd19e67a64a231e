/* Small kernels and host programs with one mistake each, and without it: `planted NAME right|wrong`.
 *
 * The program ends with 0 when the results are right and the emulator saw nothing, with another code otherwise; `planted list`
 * prints, for each mistake, its name, which builds must find it (plain, check, asan) and what it is. run.py makes the table.
 */
#include <stdio.h>
#include <stdlib.h>
#include <math.h>
#include <string>
#include <vector>
#include "gpu-worker/backend/cuda/cu_port.h"
#include "tests/cusim/control.h"

static bool wrong; /* plant the mistake? */

template <class T>
static T *device(const std::vector<T> &values)
{
    T *p;
    cudaMalloc((void **)&p, values.size() * sizeof(T));
    cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice);
    return p;
}

template <class T>
static T *device(size_t n)
{
    T *p;
    cudaMalloc((void **)&p, n * sizeof(T));
    return p;
}

template <class T>
static std::vector<T> host(const T *p, size_t n)
{
    std::vector<T> v(n);
    cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost);
    return v;
}

static std::vector<float> counting(size_t n)
{
    std::vector<float> v(n);
    for (size_t i = 0; i < n; i++)
        v[i] = (float)i;
    return v;
}

static bool equal(const std::vector<float> &a, const std::vector<float> &b)
{
    bool same = a.size() == b.size();
    for (size_t i = 0; same && i < a.size(); i++)
        same = a[i] == b[i];
    return same;
}

/* ---- order between threads ---- */

__global__ void barrier_kernel(const float *in, float *out, bool bug)
{
    CU_SHARED(float[64], s);
    s[threadIdx.x] = in[threadIdx.x];
    if (!bug)
        __syncthreads();
    out[threadIdx.x] = s[63 - threadIdx.x];
}

static bool missing_barrier()
{
    std::vector<float> in = counting(64), want(in.rbegin(), in.rend());
    float *o = device<float>(64);
    CU_LAUNCH(barrier_kernel, 1, 64, 0, 0, device(in), o, wrong);
    return equal(host(o, 64), want);
}

__global__ void reuse_kernel(const float *in, float *out, bool bug)
{
    CU_SHARED(float[64], s);
    for (int round = 0; round < 3; round++) {
        s[threadIdx.x] = in[threadIdx.x] + (float)round;
        __syncthreads();
        out[round * 64 + threadIdx.x] = s[threadIdx.x ^ 32];
        if (!bug)
            __syncthreads();
    }
}

static bool missing_second_barrier()
{
    std::vector<float> want(192);
    for (int i = 0; i < 192; i++)
        want[i] = (float)((i % 64 ^ 32) + i / 64);
    float *o = device<float>(192);
    CU_LAUNCH(reuse_kernel, 1, 64, 0, 0, device(counting(64)), o, wrong);
    return equal(host(o, 192), want);
}

__global__ void syncwarp_kernel(const float *in, float *out, bool bug)
{
    CU_SHARED(float[32], s);
    s[threadIdx.x] = in[threadIdx.x];
    if (!bug)
        __syncwarp();
    out[threadIdx.x] = s[31 - threadIdx.x];
}

static bool missing_syncwarp()
{
    std::vector<float> in = counting(32), want(in.rbegin(), in.rend());
    float *o = device<float>(32);
    CU_LAUNCH(syncwarp_kernel, 1, 32, 0, 0, device(in), o, wrong);
    return equal(host(o, 32), want);
}

/* Each warp's lane 0 writes a total that all of them read; who writes last is a matter of luck. */
__global__ void one_writer_kernel(float *out, bool bug)
{
    CU_SHARED(float[1], total);
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    if (lane == 0 && (bug || warp == 1))
        total[0] = (float)warp;
    __syncthreads();
    out[threadIdx.x] = total[0];
}

static bool two_writers()
{
    float *o = device<float>(64);
    CU_LAUNCH(one_writer_kernel, 1, 64, 0, 0, o, wrong);
    return equal(host(o, 64), std::vector<float>(64, 1.0f));
}

__global__ void sum_kernel(int *sum, bool bug)
{
    if (bug)
        *sum = *sum + 1;
    else
        atomicAdd(sum, 1);
}

static bool no_atomic()
{
    int *sum = device(std::vector<int>{0});
    CU_LAUNCH(sum_kernel, 4, 32, 0, 0, sum, wrong);
    return host(sum, 1)[0] == 128;
}

__global__ void neighbour_kernel(const float *in, float *out, bool bug)
{
    unsigned i = blockIdx.x * 32 + threadIdx.x;
    out[i] = in[i] * 2;
    if (bug && blockIdx.x)
        out[i] += out[i - 32]; /* another block's */
    else if (blockIdx.x)
        out[i] += in[i - 32] * 2;
}

static bool reads_another_block()
{
    std::vector<float> want(96);
    for (int i = 0; i < 96; i++)
        want[i] = (float)(2 * i + (i >= 32 ? 2 * (i - 32) : 0));
    float *o = device<float>(96);
    CU_LAUNCH(neighbour_kernel, 3, 32, 0, 0, device(counting(96)), o, wrong);
    return equal(host(o, 96), want);
}

/* ---- bounds, alignment, what was never written ---- */

__global__ void tail_kernel(const float *in, float *out, int n, bool bug)
{
    int i = (int)(blockIdx.x * 64 + threadIdx.x);
    if (bug || i < n)
        out[i] = in[i < n ? i : n - 1] + 1;
}

static bool no_tail_check()
{
    std::vector<float> in = counting(100), want = counting(101);
    want.erase(want.begin());
    float *o = device<float>(100);
    CU_LAUNCH(tail_kernel, 2, 64, 0, 0, device(in), o, 100, wrong);
    return equal(host(o, 100), want);
}

__global__ void read_past_kernel(const float *in, float *out, int n, bool bug)
{
    float sum = 0;
    for (int i = (int)threadIdx.x; i < n + (bug ? 32 : 0); i += 32)
        sum += in[i];
    out[threadIdx.x] = sum;
}

static bool reads_past_the_end()
{
    std::vector<float> want(32);
    for (int i = 0; i < 96; i++)
        want[i % 32] += (float)i;
    float *o = device<float>(32);
    CU_LAUNCH(read_past_kernel, 1, 32, 0, 0, device(counting(96)), o, 96, wrong);
    return equal(host(o, 32), want);
}

__global__ void shared_tail_kernel(const float *in, float *out, int n, bool bug)
{
    CU_DYN_SMEM(float, s);
    for (int i = (int)threadIdx.x; i < n + (bug ? 1 : 0); i += 32)
        s[i] = in[i < n ? i : 0];
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x] + s[n - 1];
}

static bool shared_past_the_end()
{
    std::vector<float> want(32);
    for (int i = 0; i < 32; i++)
        want[i] = (float)(i + 39);
    float *o = device<float>(32);
    CU_LAUNCH(shared_tail_kernel, 1, 32, 40 * sizeof(float), 0, device(counting(40)), o, 40, wrong);
    return equal(host(o, 32), want);
}

__global__ void local_kernel(const float *in, float *out, int n)
{
    float window[4] = {};
    for (int i = 0; i < n; i++)
        window[i] = in[i];
    out[threadIdx.x] = window[threadIdx.x & 3];
}

static bool local_past_the_end()
{
    float *o = device<float>(4);
    CU_LAUNCH(local_kernel, 1, 4, 0, 0, device(counting(8)), o, wrong ? 8 : 4);
    return equal(host(o, 4), counting(4));
}

__global__ void vector_kernel(const float *in, float *out, bool bug)
{
    float4 v = ldf4(in + threadIdx.x * 4 + (bug ? 1 : 0));
    stf4(out + threadIdx.x * 4, v);
}

static bool misaligned_vector()
{
    float *o = device<float>(64);
    CU_LAUNCH(vector_kernel, 1, 16, 0, 0, device(counting(80)), o, wrong);
    return equal(host(o, 64), counting(64));
}

__global__ void part_kernel(float *out, int n)
{
    if ((int)threadIdx.x < n)
        out[threadIdx.x] = 1;
}

__global__ void total_kernel(const float *in, float *out, int n)
{
    float sum = 0;
    for (int i = 0; i < n; i++)
        sum = fmaxf(sum, in[i]); /* a maximum swallows NaN */
    out[0] = sum;
}

static bool reads_never_written()
{
    float *part = device<float>(64), *o = device<float>(1);
    CU_LAUNCH(part_kernel, 1, 64, 0, 0, part, wrong ? 60 : 64);
    CU_LAUNCH(total_kernel, 1, 1, 0, 0, part, o, 64);
    return host(o, 1)[0] == 1;
}

__global__ void shared_part_kernel(float *out, int n)
{
    CU_SHARED(float[32], red);
    if ((int)threadIdx.x < n)
        red[threadIdx.x] = 1;
    __syncthreads();
    float sum = red[threadIdx.x];
    for (int o = 16; o; o >>= 1)
        sum += __shfl_xor_sync(0xffffffffu, sum, o);
    out[threadIdx.x] = sum;
}

static bool shared_never_written()
{
    float *o = device<float>(32);
    CU_LAUNCH(shared_part_kernel, 1, 32, 0, 0, o, wrong ? 8 : 32);
    return equal(host(o, 32), std::vector<float>(32, 32.0f));
}

/* ---- cp.async ---- */

__global__ void async_kernel(const float *in, float *out, bool wait)
{
    CU_SHARED(float[128], s);
    cp_async<16>(s + threadIdx.x * 4, in + threadIdx.x * 4);
    cp_async_commit();
    if (wait)
        cp_async_wait<0>();
    __syncthreads();
    for (int i = 0; i < 4; i++)
        out[i * 32 + threadIdx.x] = s[i * 32 + threadIdx.x];
}

static bool async_without_wait()
{
    float *o = device<float>(128);
    CU_LAUNCH(async_kernel, 1, 32, 0, 0, device(counting(128)), o, !wrong);
    return equal(host(o, 128), counting(128));
}

/* Two stages; with one buffer the second copy overwrites what others still read. */
__global__ void stages_kernel(const float *in, float *out, bool bug)
{
    CU_SHARED(float[2][128], s);
    unsigned t = threadIdx.x;
    auto load = [&](int stage) {
        cp_async<16>(&s[bug ? 0 : stage & 1][t * 4], in + stage * 128 + t * 4);
        cp_async_commit();
    };
    load(0);
    for (int stage = 0; stage < 4; stage++) {
        if (stage + 1 < 4)
            load(stage + 1);
        else
            cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        for (int i = 0; i < 4; i++)
            out[stage * 128 + i * 32 + t] = s[bug ? 0 : stage & 1][i * 32 + t];
        __syncthreads();
    }
}

static bool async_into_what_is_read()
{
    float *o = device<float>(512);
    CU_LAUNCH(stages_kernel, 1, 32, 0, 0, device(counting(512)), o, wrong);
    return equal(host(o, 512), counting(512));
}

/* ---- divergence ---- */

__global__ void divergent_kernel(float *out, bool bug)
{
    CU_SHARED(float[32], s);
    s[threadIdx.x] = (float)threadIdx.x;
    if (bug && threadIdx.x & 1) {
        s[threadIdx.x] += 0;
        __syncthreads();
    } else {
        __syncthreads();
    }
    out[threadIdx.x] = s[31 - threadIdx.x];
}

static bool barrier_in_a_branch()
{
    std::vector<float> in = counting(32), want(in.rbegin(), in.rend());
    float *o = device<float>(32);
    CU_LAUNCH(divergent_kernel, 1, 32, 0, 0, o, wrong);
    return equal(host(o, 32), want);
}

__global__ void shuffle_exit_kernel(float *out, int n, bool bug)
{
    int i = (int)threadIdx.x;
    if (bug && i >= n)
        return;
    float v = i < n ? 1.0f : 0.0f;
    for (int o = 16; o; o >>= 1)
        v += __shfl_xor_sync(0xffffffffu, v, o);
    if (i < n)
        out[i] = v;
}

static bool shuffle_after_exit()
{
    float *o = device<float>(20);
    CU_LAUNCH(shuffle_exit_kernel, 1, 32, 0, 0, o, 20, wrong);
    return equal(host(o, 20), std::vector<float>(20, 20.0f));
}

__global__ void shuffle_branch_kernel(float *out, bool bug)
{
    float v = (float)threadIdx.x;
    if (!bug)
        v = __shfl_xor_sync(0xffffffffu, v, threadIdx.x < 16 ? 1 : 2);
    else if (threadIdx.x < 16)
        v = __shfl_xor_sync(0xffffffffu, v, 1);
    else
        v = __shfl_xor_sync(0xffffffffu, v, 2, 16);
    out[threadIdx.x] = v;
}

static bool shuffle_in_a_branch()
{
    std::vector<float> want(32);
    for (int i = 0; i < 32; i++)
        want[i] = (float)(i ^ (i < 16 ? 1 : 2));
    float *o = device<float>(32);
    CU_LAUNCH(shuffle_branch_kernel, 1, 32, 0, 0, o, wrong);
    return equal(host(o, 32), want);
}

__global__ void deadlock_kernel(float *out, bool bug)
{
    if (bug && threadIdx.x >= 32)
        bar_sync(1, 64);
    else if (!bug)
        bar_sync(1, 64);
    out[threadIdx.x] = 1;
}

static bool barrier_that_some_miss()
{
    float *o = device<float>(64);
    CU_LAUNCH(deadlock_kernel, 1, 64, 0, 0, o, wrong);
    return equal(host(o, 64), std::vector<float>(64, 1.0f));
}

/* ---- host side ---- */

__global__ void add_kernel(float *out, const float *in, float n)
{
    out[threadIdx.x] += in[threadIdx.x] + n;
}

static bool no_synchronize()
{
    cudaStream_t s;
    float *o = device(counting(32)), *got;
    cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    cudaHostAlloc((void **)&got, 32 * sizeof(float), 0);
    CU_LAUNCH(add_kernel, 1, 32, 0, s, o, device(counting(32)), 0.0f);
    cudaMemcpyAsync(got, o, 32 * sizeof(float), cudaMemcpyDeviceToHost, s);
    if (!wrong)
        cudaStreamSynchronize(s);
    return got[31] == 62;
}

static bool scalar_in_a_graph()
{
    cudaStream_t s;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    float n = 0, *o = device(std::vector<float>(32)), *staging;
    std::vector<float> zeros(32);
    float *in = device(zeros);
    cudaStreamCreate(&s);
    cudaHostAlloc((void **)&staging, 32 * sizeof(float), 0);
    cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal);
    cudaMemcpyAsync(in, staging, 32 * sizeof(float), cudaMemcpyHostToDevice, s);
    CU_LAUNCH(add_kernel, 1, 32, 0, s, o, in, n);
    cudaStreamEndCapture(s, &graph);
    cudaGraphInstantiate(&exec, graph, 0);
    for (int step = 1; step <= 3; step++) {
        n = (float)step; /* the graph keeps the old one */
        for (int i = 0; i < 32; i++)
            staging[i] = wrong ? 0 : n;
        cudaGraphLaunch(exec, s);
        cudaStreamSynchronize(s);
    }
    return host(o, 1)[0] == 6;
}

static bool staging_overwritten()
{
    cudaStream_t s;
    float *staging, *d = device<float>(8);
    cudaStreamCreate(&s);
    cudaHostAlloc((void **)&staging, 8 * sizeof(float), 0);
    for (int i = 0; i < 8; i++)
        staging[i] = 1;
    cudaMemcpyAsync(d, staging, 8 * sizeof(float), cudaMemcpyHostToDevice, s);
    if (!wrong)
        cudaStreamSynchronize(s);
    staging[3] = 2;
    cudaStreamSynchronize(s);
    return host(d, 8)[3] == 1;
}

static bool other_stream()
{
    cudaStream_t a, b;
    cudaEvent_t done;
    float *x = device(std::vector<float>(32)), *y = device(std::vector<float>(32)), *one = device(std::vector<float>(32, 1.0f));
    cudaStreamCreate(&a);
    cudaStreamCreate(&b);
    cudaEventCreateWithFlags(&done, cudaEventDisableTiming);
    CU_LAUNCH(add_kernel, 1, 32, 0, a, x, one, 0.0f);
    cudaEventRecord(done, a);
    if (!wrong)
        cudaStreamWaitEvent(b, done, 0);
    CU_LAUNCH(add_kernel, 1, 32, 0, b, y, x, 0.0f);
    cudaStreamSynchronize(b);
    return host(y, 1)[0] == 1;
}

static bool host_reads_device()
{
    float *d = device(counting(4));
    cudaDeviceSynchronize();
    return wrong ? d[2] == 2 : host(d, 4)[2] == 2;
}

static bool host_pointer_in_kernel()
{
    std::vector<float> memory(32);
    float *d = device(memory), *o = device(memory);
    CU_LAUNCH(add_kernel, 1, 32, 0, 0, o, wrong ? memory.data() : d, 1.0f);
    return host(o, 1)[0] == 1;
}

static bool use_after_free()
{
    float *d = device(counting(32)), *o = device(counting(32));
    if (wrong)
        cudaFree(d);
    CU_LAUNCH(add_kernel, 1, 32, 0, 0, o, d, 0.0f);
    return host(o, 32)[31] == 62;
}

static bool copy_past_the_end()
{
    float *d = device<float>(30);
    cudaMemset(d, 0, 30 * sizeof(float));
    std::vector<float> v(32);
    return cudaMemcpy(v.data(), d, (wrong ? 32 : 30) * sizeof(float), cudaMemcpyDeviceToHost) == cudaSuccess;
}

static bool too_much_shared_memory()
{
    float *d = device(counting(40)), *o = device<float>(32);
    size_t size = 64 << 10;
    if (!wrong)
        cudaFuncSetAttribute((const void *)shared_tail_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)size);
    CU_LAUNCH(shared_tail_kernel, 1, 32, size, 0, d, o, 40, false);
    return cudaGetLastError() == cudaSuccess && host(o, 1)[0] == 39;
}

__global__ void scale_kernel(float *x)
{
    x[threadIdx.x] = 2;
}

__global__ void early_kernel(const float *x, float *out, bool wait)
{
    if (wait)
        grid_wait();
    out[threadIdx.x] = x[threadIdx.x];
}

static bool early_launch_without_wait()
{
    float *x = device(counting(32)), *o = device<float>(32);
    CU_LAUNCH(scale_kernel, 1, 32, 0, 0, x);
    CU_LAUNCH_PDL(early_kernel, 1, 32, 0, 0, x, o, !wrong);
    return equal(host(o, 32), std::vector<float>(32, 2.0f));
}

/* ---- the table ---- */

enum { PLAIN = 1, CHECK = 2, ASAN = 4, ALL = 7 };
static const struct {
    const char *name;
    int found_by; /* builds that must find it; others may */
    const char *what;
    bool (*run)();
} mistakes[] = {
    {"missing_barrier", ALL, "no __syncthreads between write and read", missing_barrier},
    {"missing_second_barrier", ALL, "shared memory reused without a barrier", missing_second_barrier},
    {"missing_syncwarp", ALL, "lanes exchange through shared memory without __syncwarp", missing_syncwarp},
    {"two_writers", ALL, "two warps write one word", two_writers},
    {"no_atomic", CHECK, "read-modify-write without an atomic", no_atomic},
    {"reads_another_block", ALL, "a block reads what another writes", reads_another_block},
    {"no_tail_check", ALL, "write past the end of an array", no_tail_check},
    {"reads_past_the_end", ALL, "read past the end of an array", reads_past_the_end},
    {"shared_past_the_end", ALL, "write past the end of shared memory", shared_past_the_end},
    {"local_past_the_end", ASAN, "write past the end of a local array", local_past_the_end},
    {"misaligned_vector", ALL, "16-byte load from a 4-byte aligned address", misaligned_vector},
    {"reads_never_written", CHECK, "read of fresh device memory, hidden by a maximum", reads_never_written},
    {"shared_never_written", ALL, "read of fresh shared memory", shared_never_written},
    {"async_without_wait", ALL, "cp.async read before its wait", async_without_wait},
    {"async_into_what_is_read", CHECK, "cp.async into the stage that is read", async_into_what_is_read},
    {"barrier_in_a_branch", ALL, "two __syncthreads in the branches of a warp", barrier_in_a_branch},
    {"shuffle_after_exit", ALL, "shuffle with lanes that have exited", shuffle_after_exit},
    {"shuffle_in_a_branch", ALL, "full-mask shuffles in the branches of a warp", shuffle_in_a_branch},
    {"barrier_that_some_miss", ALL, "a named barrier that half the threads miss", barrier_that_some_miss},
    {"no_synchronize", ALL, "result read before the stream is waited for", no_synchronize},
    {"scalar_in_a_graph", ALL, "a changing scalar captured in a graph", scalar_in_a_graph},
    {"staging_overwritten", ALL, "pinned source changed under a queued copy", staging_overwritten},
    {"other_stream", ALL, "streams without an event between them", other_stream},
    {"host_reads_device", ALL, "host code dereferences a device pointer", host_reads_device},
    {"host_pointer_in_kernel", CHECK, "a kernel dereferences a host pointer", host_pointer_in_kernel},
    {"use_after_free", ALL, "a kernel reads freed memory", use_after_free},
    {"copy_past_the_end", ALL, "a copy longer than the allocation", copy_past_the_end},
    {"too_much_shared_memory", ALL, "dynamic shared memory above the kernel's limit", too_much_shared_memory},
    {"early_launch_without_wait", CHECK, "dependent launch reads before grid_wait", early_launch_without_wait},
};

int main(int argc, char **argv)
{
    std::string name = argc > 1 ? argv[1] : "list";
    wrong = argc > 2 && strcmp(argv[2], "wrong") == 0;
    for (const auto &m : mistakes) {
        if (name == "list")
            printf("%s\t%s%s%s\t%s\n", m.name, m.found_by & PLAIN ? "plain " : "", m.found_by & CHECK ? "check " : "",
                   m.found_by & ASAN ? "asan" : "", m.what);
        else if (name == m.name) {
            bool good = m.run();
            unsigned errors = cusim_take_errors();
            printf("%s: results %s, %u errors\n", m.name, good ? "right" : "wrong", errors);
            return good && !errors ? 0 : 1;
        }
    }
    return name == "list" ? 0 : 2;
}
