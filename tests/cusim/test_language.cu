/* The kernel language under emulation gives what the CUDA manuals say, in every order of threads. */
#include <stdio.h>
#include "tests/cusim/world.h"

/* ---- blocks, shared memory, barriers ---- */

__global__ void reverse_kernel(const int *in, int *out, int n)
{
    CU_SHARED(int[64], tile);
    CU_DYN_SMEM(int, copy);
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    tile[threadIdx.x] = i < n ? in[i] : -1;
    __syncthreads();
    copy[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
    __syncthreads();
    int from = (int)(threadIdx.x ^ 32);
    if (i < n)
        out[i] = copy[from];
}

static void each_thread_sees_what_was_written_before_the_barrier(void **)
{
    int in[150], out[150];
    for (int i = 0; i < 150; i++)
        in[i] = i * 3;
    for (const char *order : orders) {
        cusim_set_order(order);
        device_array<int> a(in, 150), b(150);
        CU_LAUNCH(reverse_kernel, 3, 64, 64 * sizeof(int), 0, a.p, b.p, 150);
        b.read(out);
        for (int i = 0; i < 150; i++) {
            int at = i / 64 * 64 + 63 - (i % 64 ^ 32);
            assert_int_equal(out[i], at < 150 ? in[at] : -1);
        }
    }
}

__global__ void grid_kernel(int *out)
{
    unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    out[block * 24 + thread] = (int)(block * 100 + thread);
}

static void every_block_and_thread_of_three_dimensions_runs_once(void **)
{
    int out[24 * 24];
    device_array<int> a(24 * 24);
    CU_LAUNCH(grid_kernel, dim3(2, 3, 4), dim3(4, 3, 2), 0, 0, a.p);
    a.read(out);
    for (int i = 0; i < 24 * 24; i++)
        assert_int_equal(out[i], i / 24 * 100 + i % 24);
}

__global__ void count_kernel(int *out, int n)
{
    int mine = (int)threadIdx.x < n;
    int all = __syncthreads_count(mine), any = __syncthreads_or(mine), every = __syncthreads_and(mine);
    if (threadIdx.x == 0)
        out[0] = all, out[1] = any, out[2] = every;
}

static void a_counting_barrier_counts(void **)
{
    int out[3];
    device_array<int> a(3);
    CU_LAUNCH(count_kernel, 1, 96, 0, 0, a.p, 70);
    a.read(out);
    assert_int_equal(out[0], 70);
    assert_int_equal(out[1], 1);
    assert_int_equal(out[2], 0);
}

/* Two producer warps hand a number to two consumer warps, which never meet the first pair's own barrier. */
__global__ void named_barrier_kernel(int *out)
{
    CU_SHARED(int[64], box);
    int warp = (int)threadIdx.x / 32;
    if (warp < 2) {
        box[threadIdx.x] = (int)threadIdx.x + 1;
        bar_sync(1, 128);
    } else {
        bar_sync(1, 128);
        out[threadIdx.x - 64] = box[127 - threadIdx.x];
        bar_sync(2, 64);
    }
}

static void a_named_barrier_orders_those_who_meet_in_it(void **)
{
    int out[64];
    for (const char *order : orders) {
        cusim_set_order(order);
        device_array<int> a(64);
        CU_LAUNCH(named_barrier_kernel, 1, 128, 0, 0, a.p);
        a.read(out);
        for (int i = 0; i < 64; i++)
            assert_int_equal(out[i], 64 - i);
    }
}

/* ---- warps ---- */

__global__ void warp_kernel(int *out)
{
    int lane = (int)threadIdx.x, *o = out + lane;
    unsigned all = 0xffffffffu;
    o[0 * 32] = __shfl_sync(all, lane, lane * 5);
    o[1 * 32] = __shfl_up_sync(all, lane, 3);
    o[2 * 32] = __shfl_down_sync(all, lane, 3, 8);
    o[3 * 32] = __shfl_xor_sync(all, lane, 17);
    o[4 * 32] = (int)__ballot_sync(all, lane % 3 == 0);
    o[5 * 32] = __any_sync(all, lane == 31) + 2 * __all_sync(all, lane < 31);
    o[6 * 32] = (int)__match_any_sync(all, lane / 7);
    o[7 * 32] = __reduce_add_sync(all, lane) * 1000 + __reduce_max_sync(all, lane) - __reduce_min_sync(all, lane);
    o[8 * 32] = lane < 8 ? __shfl_xor_sync(0xffu, lane, 7) : 0;
    o[9 * 32] = __shfl_sync(all, lane, 2, 16);
}

static void warp_operations_follow_the_manual(void **)
{
    int out[320];
    for (const char *order : orders) {
        cusim_set_order(order);
        device_array<int> a(320);
        CU_LAUNCH(warp_kernel, 1, 32, 0, 0, a.p);
        a.read(out);
        for (int lane = 0; lane < 32; lane++) {
            int first = lane / 7 * 7, count = first == 28 ? 4 : 7;
            int want[] = {lane * 5 % 32,
                          lane < 3 ? lane : lane - 3,
                          lane % 8 < 5 ? lane + 3 : lane,
                          lane ^ 17,
                          0x49249249,
                          1,
                          (int)(((1u << count) - 1) << first),
                          496031,
                          lane < 8 ? lane ^ 7 : 0,
                          lane / 16 * 16 + 2};
            for (int i = 0; i < 10; i++)
                assert_int_equal(out[i * 32 + lane], want[i]);
        }
    }
}

/* ---- matrices ---- */

CU_DEVICE uint32_t pack_bf16(float low, float high)
{
    return __bfloat16_as_ushort(__float2bfloat16(low)) | (uint32_t)__bfloat16_as_ushort(__float2bfloat16(high)) << 16;
}

/* d = a b^T of bf16 a [16, 16], b [8, 16]; the operands come through ldmatrix from shared memory. */
template <bool TRANSPOSED>
__global__ void matrix_kernel(const uint16_t *a, const uint16_t *b, float *d)
{
    CU_SHARED(uint16_t[16][24], sa);
    CU_SHARED(uint16_t[16][24], sb); /* transposed: b as [16, 8] */
    int lane = (int)threadIdx.x;
    for (int i = lane; i < 256; i += 32)
        sa[i / 16][i % 16] = a[i];
    for (int i = lane; i < 128; i += 32) {
        if (TRANSPOSED)
            sb[i % 16][i / 16] = b[i];
        else
            sb[i / 16][i % 16] = b[i];
    }
    __syncwarp();
    uint32_t fa[4], fb[2];
    float acc[4] = {};
    ldmatrix_x4(fa, &sa[lane & 15][(lane >> 4) * 8]);
    if (TRANSPOSED)
        ldmatrix_x2_trans(fb, &sb[lane & 15][0]);
    else
        ldmatrix_x2(fb, &sb[lane & 7][(lane >> 3 & 1) * 8]);
    mma_bf16_16816(acc, fa, fb);
    for (int i = 0; i < 4; i++)
        d[((lane >> 2) + (i >> 1) * 8) * 8 + (lane & 3) * 2 + (i & 1)] = acc[i];
}

static void matrix_products_have_the_layout_of_the_manual(void **)
{
    uint16_t a[256], b[128];
    float out[128];
    for (int i = 0; i < 256; i++)
        a[i] = __bfloat16_as_ushort(__float2bfloat16((float)(i % 13 - 6)));
    for (int i = 0; i < 128; i++)
        b[i] = __bfloat16_as_ushort(__float2bfloat16((float)(i % 7 - 3)));
    for (int transposed = 0; transposed < 2; transposed++) {
        device_array<uint16_t> da(a, 256), db(b, 128);
        device_array<float> dd(128);
        if (transposed)
            CU_LAUNCH((matrix_kernel<true>), 1, 32, 0, 0, da.p, db.p, dd.p);
        else
            CU_LAUNCH((matrix_kernel<false>), 1, 32, 0, 0, da.p, db.p, dd.p);
        dd.read(out);
        for (int i = 0; i < 128; i++) {
            int want = 0;
            for (int k = 0; k < 16; k++)
                want += ((i / 8 * 16 + k) % 13 - 6) * ((i % 8 * 16 + k) % 7 - 3);
            assert_int_equal((int)out[i], want);
        }
    }
}

/* The same with f16, both operands by ldmatrix_x4, a from its transpose; b is [16, 16], two tiles of which d takes the first. */
__global__ void half_matrix_kernel(const uint16_t *a, const uint16_t *b, float *d)
{
    CU_SHARED(uint16_t[16][24], sa); /* [k][row] */
    CU_SHARED(uint16_t[16][24], sb);
    int lane = (int)threadIdx.x;
    for (int i = lane; i < 256; i += 32) {
        sa[i % 16][i / 16] = a[i];
        sb[i / 16][i % 16] = b[i];
    }
    __syncwarp();
    uint32_t fa[4], fb[4];
    float acc[4] = {};
    ldmatrix_x4_trans(fa, &sa[lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8]);
    ldmatrix_x4(fb, &sb[lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8]);
    const uint32_t first[2] = {fb[0], fb[1]};
    mma_f16_16816(acc, fa, first);
    for (int i = 0; i < 4; i++)
        d[((lane >> 2) + (i >> 1) * 8) * 8 + (lane & 3) * 2 + (i & 1)] = acc[i];
}

/* Fractions: sums round, in an order of the device's own. */
static void half_products_are_near_the_exact_sums(void **)
{
    uint16_t a[256], b[256];
    float out[128];
    for (int i = 0; i < 256; i++) {
        a[i] = __half_as_ushort(__float2half((float)(i * 7 % 31 - 15) / 9));
        b[i] = __half_as_ushort(__float2half((float)(i * 5 % 23 - 11) / 7));
    }
    device_array<uint16_t> da(a, 256), db(b, 256);
    device_array<float> dd(128);
    CU_LAUNCH(half_matrix_kernel, 1, 32, 0, 0, da.p, db.p, dd.p);
    dd.read(out);
    for (int i = 0; i < 128; i++) {
        double want = 0, size = 0;
        for (int k = 0; k < 16; k++) {
            double term = (double)__half2float(__ushort_as_half(a[i / 8 * 16 + k])) *
                          (double)__half2float(__ushort_as_half(b[i % 8 * 16 + k]));
            want += term;
            size += term < 0 ? -term : term;
        }
        double error = (double)out[i] - want;
        assert_true((error < 0 ? -error : error) <= 1e-6 * size);
    }
}

__global__ void mma_s8_kernel(const uint32_t *a, const uint32_t *b, int *d)
{
    int lane = (int)threadIdx.x, row = lane >> 2, word = lane & 3; /* rows of 32 bytes are 8 words */
    uint32_t fa[4] = {a[row * 8 + word], a[(row + 8) * 8 + word], a[row * 8 + word + 4], a[(row + 8) * 8 + word + 4]};
    uint32_t fb[2] = {b[row * 8 + word], b[row * 8 + word + 4]};
    int acc[4] = {1, 1, 1, 1};
    mma_s8_16832(acc, fa, fb);
    for (int i = 0; i < 4; i++)
        d[(row + (i >> 1) * 8) * 8 + word * 2 + (i & 1)] = acc[i];
}

static void int8_products_are_exact(void **)
{
    int8_t a[16 * 32], b[8 * 32];
    int out[128];
    for (int i = 0; i < 16 * 32; i++)
        a[i] = (int8_t)(i * 37);
    for (int i = 0; i < 8 * 32; i++)
        b[i] = (int8_t)(i * 91 + 5);
    device_array<uint32_t> da((uint32_t *)a, 128), db((uint32_t *)b, 64);
    device_array<int> dd(128);
    CU_LAUNCH(mma_s8_kernel, 1, 32, 0, 0, da.p, db.p, dd.p);
    dd.read(out);
    for (int i = 0; i < 128; i++) {
        int want = 1;
        for (int k = 0; k < 32; k++)
            want += a[i / 8 * 32 + k] * b[i % 8 * 32 + k];
        assert_int_equal(out[i], want);
    }
}

/* ---- copies under way ---- */

__global__ void pipeline_kernel(const float *in, float *out, int chunks)
{
    CU_SHARED(float[2][128], stage);
    int t = (int)threadIdx.x;
    auto load = [&](int chunk) {
        cp_async<16>(&stage[chunk & 1][t * 4], in + chunk * 128 + t * 4, chunk < chunks);
        cp_async_commit();
    };
    float sum = 0;
    load(0);
    for (int chunk = 0; chunk < chunks; chunk++) {
        load(chunk + 1);
        cp_async_wait<1>();
        __syncthreads();
        for (int i = 0; i < 4; i++)
            sum += stage[chunk & 1][i * 32 + t];
        __syncthreads();
    }
    cp_async_wait<0>();
    out[t] = sum;
}

static void copies_land_at_their_wait(void **)
{
    float in[512], out[32];
    for (int i = 0; i < 512; i++)
        in[i] = (float)i;
    for (const char *order : orders) {
        cusim_set_order(order);
        device_array<float> a(in, 512), b(32);
        CU_LAUNCH(pipeline_kernel, 1, 32, 0, 0, a.p, b.p, 4);
        b.read(out);
        for (int t = 0; t < 32; t++)
            assert_int_equal((int)out[t], 16 * t + 32 * 120);
    }
}

/* ---- whole words, and kernels that start early ---- */

__global__ void vector_kernel(const float *in, float *out)
{
    int t = (int)threadIdx.x;
    uint4 streamed = ldg_stream(in + 4 * t), plain = ld128(in + 4 * t);
    float4 four = ldf4(in + 4 * t);
    uint2 two = ld64(in + 4 * t + 2);
    stf4(out + 12 * t, make_float4(four.w, four.z, four.y, four.x));
    st128(out + 12 * t + 4, make_uint4(streamed.y, plain.x, streamed.w, plain.z));
    st64(out + 12 * t + 8, two);
    st64(out + 12 * t + 10, make_uint2(streamed.x, plain.w));
}

static void words_of_8_and_16_bytes_keep_their_order(void **)
{
    float in[128], out[384];
    for (int i = 0; i < 128; i++)
        in[i] = (float)i;
    device_array<float> a(in, 128), b(384);
    CU_LAUNCH(vector_kernel, 1, 32, 0, 0, a.p, b.p);
    b.read(out);
    static const int from[12] = {3, 2, 1, 0, 1, 0, 3, 2, 2, 3, 0, 3};
    for (int i = 0; i < 384; i++)
        assert_int_equal((int)out[i], i / 12 * 4 + from[i % 12]);
}

__global__ void first_kernel(int *out)
{
    grid_release();
    out[threadIdx.x] = (int)threadIdx.x;
}

__global__ void second_kernel(const int *in, int *out)
{
    grid_wait();
    out[threadIdx.x] = in[63 - threadIdx.x] + 1;
}

static void a_kernel_that_starts_early_waits_for_what_it_reads(void **)
{
    int out[64];
    device_array<int> a(64), b(64);
    CU_LAUNCH(first_kernel, 1, 64, 0, 0, a.p);
    CU_LAUNCH_PDL(second_kernel, 1, 64, 0, 0, a.p, b.p);
    b.read(out);
    for (int i = 0; i < 64; i++)
        assert_int_equal(out[i], 64 - i);
}

/* ---- intrinsics ---- */

__global__ void intrinsics_kernel(int *out, float *fout)
{
    out[0] = __dp4a((int)0x01ff7f80, (int)0x02030405, 10); /* 1*2 - 1*3 + 127*4 - 128*5 + 10 */
    out[1] = (int)__byte_perm(0x33221100, 0x77665544, 0x7502);
    out[2] = (int)__vsubss4(0x80018000u, 0x01027f00u);
    out[3] = (int)__funnelshift_r(0x00000010u, 0x1u, 4);
    out[4] = __float2int_rn(2.5f) * 100 + __float2int_rn(-3e10f) / INT32_MIN;
    out[5] = __clz(1) + __popc(0xff) + __ffs(8);
    out[6] = (int)__umulhi(0x80000000u, 6);
    out[7] = (int)__vsub4(0x00ff0103u, 0x01000204u);
    fout[0] = rsqrtf(4.0f);
    fout[1] = __fmaf_rn(2, 3, 4);
    fout[2] = __low2float(__hfma2(__floats2half2_rn(1.5f, 2), __floats2half2_rn(2, 2), __floats2half2_rn(0.25f, 0)));
}

static void intrinsics_match_their_definitions(void **)
{
    int out[8];
    float fout[3];
    device_array<int> a(8);
    device_array<float> b(3);
    CU_LAUNCH(intrinsics_kernel, 1, 1, 0, 0, a.p, b.p);
    a.read(out);
    b.read(fout);
    const int want[] = {2 - 3 + 508 - 640 + 10, 0x77550022, (int)0x80ff8000, 0x10000001, 201, 31 + 8 + 4, 3, (int)0xffffffff};
    for (int i = 0; i < 8; i++)
        assert_int_equal(out[i], want[i]);
    assert_true(fout[0] == 0.5f && fout[1] == 10.0f && fout[2] == 3.25f);
}

__global__ void atomic_kernel(int *sum, unsigned *most, float *total)
{
    atomicAdd(sum, (int)threadIdx.x);
    atomicMax(most, blockIdx.x * 100 + threadIdx.x);
    atomicAdd(total, 0.5f);
}

static void atomics_of_all_blocks_add_up(void **)
{
    int sum = 0;
    unsigned most = 0;
    float total = 0;
    device_array<int> a(&sum, 1);
    device_array<unsigned> b(&most, 1);
    device_array<float> c(&total, 1);
    CU_LAUNCH(atomic_kernel, 3, 64, 0, 0, a.p, b.p, c.p);
    a.read(&sum);
    b.read(&most);
    c.read(&total);
    assert_int_equal(sum, 3 * 2016);
    assert_int_equal(most, 263);
    assert_true(total == 96.0f);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(each_thread_sees_what_was_written_before_the_barrier, no_errors),
        cmocka_unit_test_teardown(every_block_and_thread_of_three_dimensions_runs_once, no_errors),
        cmocka_unit_test_teardown(a_counting_barrier_counts, no_errors),
        cmocka_unit_test_teardown(a_named_barrier_orders_those_who_meet_in_it, no_errors),
        cmocka_unit_test_teardown(warp_operations_follow_the_manual, no_errors),
        cmocka_unit_test_teardown(matrix_products_have_the_layout_of_the_manual, no_errors),
        cmocka_unit_test_teardown(int8_products_are_exact, no_errors),
        cmocka_unit_test_teardown(half_products_are_near_the_exact_sums, no_errors),
        cmocka_unit_test_teardown(words_of_8_and_16_bytes_keep_their_order, no_errors),
        cmocka_unit_test_teardown(a_kernel_that_starts_early_waits_for_what_it_reads, no_errors),
        cmocka_unit_test_teardown(copies_land_at_their_wait, no_errors),
        cmocka_unit_test_teardown(intrinsics_match_their_definitions, no_errors),
        cmocka_unit_test_teardown(atomics_of_all_blocks_add_up, no_errors),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
