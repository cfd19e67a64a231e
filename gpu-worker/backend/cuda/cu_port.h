/* What a kernel source includes: CUDA C++ plus the few spellings below, under nvcc or, with -DCUSIM, under a host C++ compiler on
 * the emulator of tests/cusim/.
 *
 *   CU_LAUNCH(kernel, grid, block, smem, stream, args...)      instead of <<<>>>; parentheses around a template: (k<1, 2>)
 *   CU_LAUNCH_PDL(...)                                         the same, may start before its predecessor in the stream ends
 *   CU_SHARED(float[32], name);                                instead of __shared__ float name[32]; 16-byte aligned
 *   CU_DYN_SMEM(T, name);                                      T *name: the launch's dynamic shared memory; once in a kernel
 *   ld64, ld128, ldf4, st64, st128, stf4, ldg_stream           all accesses of 8 and 16 bytes
 *   cp_async<N>, cp_async_commit, cp_async_wait<N>             copies to shared memory that land at the wait
 *   mma_*, ldmatrix_*                                          whole warps, fragments as in the PTX manual
 *   bar_sync(id, threads)                                      a named barrier (1..15)
 *   grid_wait, grid_release                                    programmatic dependent launch; nothing below sm_90
 *
 * All else is as in CUDA: __syncthreads, __syncwarp, shuffles, votes, atomics, __dp4a, __byte_perm, half and bfloat16 functions.
 * Rules that keep a source correct on both: no asm but here; no memcpy of variable size in device code; no pointers into another
 * thread's locals; blocks of a grid run in any order and never wait for one another; no __activemask.
 */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

#ifdef CUSIM
#include "tests/cusim/cusim.h"
#else

#define CU_LAUNCH(k, grid, block, smem, stream, ...)     (k)<<<(grid), (block), (smem), (stream)>>>(__VA_ARGS__)
#define CU_LAUNCH_PDL(k, grid, block, smem, stream, ...) cu_launch_pdl((k), (grid), (block), (smem), (stream), __VA_ARGS__)
#define CU_DYN_SMEM(T, name)                                                                                                     \
    extern __shared__ __align__(16) unsigned char cu_dyn_smem[];                                                                 \
    T *const name = reinterpret_cast<T *>(cu_dyn_smem)
#define CU_SHARED(T, name)                                                                                                       \
    using cu_shared_##name = T;                                                                                                  \
    __shared__ __align__(16) cu_shared_##name name
#define CU_DEVICE static __device__ __forceinline__

/* The launch's error, if any, is cudaGetLastError's. */
template <class... P, class... A>
static inline void cu_launch_pdl(void (*kernel)(P...), dim3 grid, dim3 block, size_t smem, cudaStream_t stream, A &&...args)
{
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = smem, config.stream = stream;
    config.attrs = &early, config.numAttrs = 1;
    cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
}

/* What the predecessor wrote may be read after grid_wait only; grid_release lets the successor start early. */
CU_DEVICE void grid_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

CU_DEVICE void grid_release()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

CU_DEVICE void bar_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Address and size aligned to N (4, 8 or 16). Without pred N zero bytes are written and gmem is not read. */
template <int N>
CU_DEVICE void cp_async(void *smem, const void *gmem, bool pred = true)
{
    static_assert(N == 4 || N == 8 || N == 16, "cp.async copies 4, 8 or 16 bytes");
    unsigned to = (unsigned)__cvta_generic_to_shared(smem);
    int bytes = pred ? N : 0;
    if (N == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(gmem), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(gmem), "r"(bytes), "n"(N) : "memory");
}

/* The thread's copies since the last commit form a group; wait<N> returns when all but its latest N groups have landed. */
CU_DEVICE void cp_async_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N>
CU_DEVICE void cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* d[16 x 8] += a[16 x 16] b[16 x 8]; a row-major, b column-major, one warp. */
CU_DEVICE void mma_bf16_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

CU_DEVICE void mma_f16_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* d[16 x 8] += a[16 x 32] b[32 x 8] of int8, exact. */
CU_DEVICE void mma_s8_16832(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* 8 x 8 matrices of 16-bit elements from shared memory; lane 8 m + i gives the address of row i of matrix m. */
CU_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
}

CU_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
}

CU_DEVICE void ldmatrix_x2(uint32_t (&r)[2], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
}

CU_DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
}

CU_DEVICE uint2 ld64(const void *p)
{
    return *reinterpret_cast<const uint2 *>(p);
}

CU_DEVICE uint4 ld128(const void *p)
{
    return *reinterpret_cast<const uint4 *>(p);
}

CU_DEVICE float4 ldf4(const void *p)
{
    return *reinterpret_cast<const float4 *>(p);
}

CU_DEVICE void st64(void *p, uint2 v)
{
    *reinterpret_cast<uint2 *>(p) = v;
}

CU_DEVICE void st128(void *p, uint4 v)
{
    *reinterpret_cast<uint4 *>(p) = v;
}

CU_DEVICE void stf4(void *p, float4 v)
{
    *reinterpret_cast<float4 *>(p) = v;
}

/* 16 bytes that are read once and that nobody writes while the kernel runs (weights): past L1. */
CU_DEVICE uint4 ldg_stream(const void *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
#endif
