/* The CUDA kernel language on a CPU: what cu_port.h becomes with -DCUSIM. Threads of a block are fibers, blocks run one after
 * another. This header declares what device code sees; the machine behind it is in block.cpp, shared.cpp and memcheck.cpp.
 *
 * -DCUSIM_CHECK (with -fsanitize=thread, whose callbacks memcheck.cpp supplies) makes every access of device code visible to the
 * checker. Functions here that touch a thread's operands are exempt (CUSIM_NOSAN) and announce their own accesses with `note`.
 */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#define CUSIM_NOSAN  __attribute__((no_sanitize_thread))
#define CUSIM_INLINE static inline __attribute__((always_inline))
#define CUSIM_HERE   __builtin_return_address(0)

namespace cusim
{
/* What an access does; COPIED is the landing of a cp.async. */
enum access { READ, WRITE, ATOMIC, ASYNC, COPIED };

/* Warp operations; lanes that meet in one must have called the same. */
enum warp_op {
    SYNCWARP,
    VOTE,
    SHUFFLE,
    SHUFFLE_UP,
    SHUFFLE_DOWN,
    SHUFFLE_XOR,
    MATCH,
    REDUCE,
    MMA_BF16,
    MMA_F16,
    MMA_S8,
    LDMATRIX
};

/* Computes all lanes' results from all lanes' operands, when the last lane of the mask has arrived; ins[lane], outs[lane]. */
typedef void (*warp_fn)(unsigned mask, const void *const ins[32], void *const outs[32]);

void barrier(int id, int threads, const void *site);           /* threads <= 0: all that have not exited */
int barrier_vote(int predicate, int *trues, const void *site); /* returns how many threads took part */
void warp_call(unsigned mask, warp_op op, const void *in, void *out, warp_fn fn, const void *site);

void *dynamic_shared();
void *static_shared(const void *key, size_t size);
void cp_async(void *smem, const void *gmem, int size, bool pred, const void *site);
void cp_async_commit();
void cp_async_wait(int groups_left);
void grid_wait();
int lane_index();

void note(const void *p, int size, access kind, const void *site); /* an access made on the thread's behalf */
void misaligned(const void *p, int size);

struct launch {
    const char *name;
    const void *kernel;
    dim3 grid, block;
    size_t dynamic_smem;
    cudaStream_t stream;
    bool early; /* programmatic dependent launch */
    void (*call)(void *args);
    std::shared_ptr<void> args; /* copied at the launch, as in CUDA; a graph keeps this copy */
    size_t args_size;
};
void enqueue(const launch &l);

template <class... P>
struct arguments {
    void (*kernel)(P...);
    std::tuple<std::decay_t<P>...> values;
    static void call(void *self)
    {
        arguments *a = static_cast<arguments *>(self);
        std::apply(a->kernel, a->values);
    }
};

template <class... P, class... A>
void launch_kernel(const char *name, bool early, void (*kernel)(P...), dim3 grid, dim3 block, size_t smem, cudaStream_t stream,
                   A &&...args)
{
    static_assert(sizeof...(P) == sizeof...(A), "the kernel takes another number of arguments");
    static_assert((sizeof(std::decay_t<P>) + ... + 0) <= 4096, "the parameters of a kernel take more than 4 KiB");
    using packed = arguments<P...>;
    auto p = std::make_shared<packed>(packed{kernel, std::tuple<std::decay_t<P>...>(static_cast<std::decay_t<P>>(args)...)});
    enqueue(
        launch{name, reinterpret_cast<const void *>(kernel), grid, block, smem, stream, early, packed::call, p, sizeof(packed)});
}

CUSIM_INLINE void check_aligned(const void *p, int size)
{
#ifndef CUSIM_CHECK
    if ((uintptr_t)p % size)
        misaligned(p, size);
#endif
}

/* Vector accesses: one access of the whole size to the checker, never several small ones. */
template <class T>
CUSIM_NOSAN __attribute__((noinline)) T load_noted(const void *p)
{
    note(p, sizeof(T), READ, CUSIM_HERE);
    T v;
    memcpy(&v, p, sizeof v);
    return v;
}

template <class T>
CUSIM_NOSAN __attribute__((noinline)) void store_noted(void *p, T v)
{
    note(p, sizeof(T), WRITE, CUSIM_HERE);
    memcpy(p, &v, sizeof v);
}

template <class T>
CUSIM_INLINE T load(const void *p)
{
#ifdef CUSIM_CHECK
    return load_noted<T>(p);
#else
    check_aligned(p, sizeof(T));
    T v;
    memcpy(&v, p, sizeof v);
    return v;
#endif
}

template <class T>
CUSIM_INLINE void store(void *p, T v)
{
#ifdef CUSIM_CHECK
    store_noted<T>(p, v);
#else
    check_aligned(p, sizeof(T));
    memcpy(p, &v, sizeof v);
#endif
}
} // namespace cusim

extern uint3 threadIdx, blockIdx; /* of the fiber that runs */
extern dim3 blockDim, gridDim;
static const int warpSize __attribute__((unused)) = 32;

#undef __launch_bounds__
#define __launch_bounds__(...)

#define CU_DEVICE static inline __attribute__((always_inline))
#define CU_LAUNCH(k, grid, block, smem, stream, ...)                                                                             \
    ::cusim::launch_kernel(#k, false, k, dim3(grid), dim3(block), (smem), (stream), __VA_ARGS__)
#define CU_LAUNCH_PDL(k, grid, block, smem, stream, ...)                                                                         \
    ::cusim::launch_kernel(#k, true, k, dim3(grid), dim3(block), (smem), (stream), __VA_ARGS__)
#define CU_DYN_SMEM(T, name) T *const name = reinterpret_cast<T *>(::cusim::dynamic_shared())
#define CU_SHARED(T, name)                                                                                                       \
    using cu_shared_##name = T;                                                                                                  \
    static const char cu_key_##name = 0;                                                                                         \
    cu_shared_##name &name =                                                                                                     \
        *reinterpret_cast<cu_shared_##name *>(::cusim::static_shared(&cu_key_##name, sizeof(cu_shared_##name)))

/* The site of a barrier is where the caller's code goes on. */
__attribute__((noinline, unused)) CUSIM_NOSAN static void cusim_barrier_here(int id, int threads)
{
    ::cusim::barrier(id, threads, CUSIM_HERE);
}
#define __syncthreads() cusim_barrier_here(0, 0)

CUSIM_INLINE void bar_sync(int id, int threads)
{
    cusim_barrier_here(id, threads);
}

__attribute__((noinline, unused)) CUSIM_NOSAN static int __syncthreads_count(int predicate)
{
    int trues;
    ::cusim::barrier_vote(predicate, &trues, CUSIM_HERE);
    return trues;
}

__attribute__((noinline, unused)) CUSIM_NOSAN static int __syncthreads_or(int predicate)
{
    int trues;
    ::cusim::barrier_vote(predicate, &trues, CUSIM_HERE);
    return trues != 0;
}

__attribute__((noinline, unused)) CUSIM_NOSAN static int __syncthreads_and(int predicate)
{
    int trues, threads = ::cusim::barrier_vote(predicate, &trues, CUSIM_HERE);
    return trues == threads;
}

CUSIM_INLINE void __threadfence() {}
CUSIM_INLINE void __threadfence_block() {}

CUSIM_INLINE void grid_wait()
{
    ::cusim::grid_wait();
}
CUSIM_INLINE void grid_release() {}

template <int N>
__attribute__((noinline)) CUSIM_NOSAN void cp_async(void *smem, const void *gmem, bool pred = true)
{
    static_assert(N == 4 || N == 8 || N == 16, "cp.async copies 4, 8 or 16 bytes");
    ::cusim::cp_async(smem, gmem, N, pred, CUSIM_HERE);
}
CUSIM_INLINE void cp_async_commit()
{
    ::cusim::cp_async_commit();
}
template <int N>
CUSIM_INLINE void cp_async_wait()
{
    ::cusim::cp_async_wait(N);
}

CUSIM_INLINE uint2 ld64(const void *p)
{
    return ::cusim::load<uint2>(p);
}
CUSIM_INLINE uint4 ld128(const void *p)
{
    return ::cusim::load<uint4>(p);
}
CUSIM_INLINE uint4 ldg_stream(const void *p)
{
    return ::cusim::load<uint4>(p);
}
CUSIM_INLINE float4 ldf4(const void *p)
{
    return ::cusim::load<float4>(p);
}
CUSIM_INLINE void st64(void *p, uint2 v)
{
    ::cusim::store(p, v);
}
CUSIM_INLINE void st128(void *p, uint4 v)
{
    ::cusim::store(p, v);
}
CUSIM_INLINE void stf4(void *p, float4 v)
{
    ::cusim::store(p, v);
}

#include "tests/cusim/cusim_math.h"
#include "tests/cusim/cusim_warp.h"
