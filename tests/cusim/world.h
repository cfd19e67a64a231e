/* What the emulator's own tests share: cmocka in C++, arrays on the device, the orders to try. With ON_DEVICE they run on a GPU:
 * those of the kernel language then say whether it is what the emulator takes it for. KVGATE_GOLDENS=FILE: all that is read from
 * the device is written there. */
#pragma once
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include "gpu-worker/backend/cuda/cu_port.h"
extern "C" {
#include <cmocka.h>
}

#ifdef ON_DEVICE
static const char *const orders[] __attribute__((unused)) = {"the device's own"};
static inline void cusim_set_order(const char *) {}
static inline unsigned cusim_take_errors()
{
    return cudaDeviceSynchronize() != cudaSuccess;
}
#else
#include "tests/cusim/control.h"
static const char *const orders[] __attribute__((unused)) = {"fwd", "rev", "rand1", "rand2"};
#endif

static inline void record_golden(const void *bytes, size_t n)
{
    static FILE *golden = getenv("KVGATE_GOLDENS") ? fopen(getenv("KVGATE_GOLDENS"), "wb") : nullptr;
    if (golden)
        assert_int_equal(fwrite(bytes, 1, n, golden), n);
}

template <class T>
struct device_array {
    T *p;
    size_t n;
    explicit device_array(size_t count) : n(count)
    {
        assert_int_equal(cudaMalloc((void **)&p, n * sizeof(T)), cudaSuccess);
    }
    device_array(const T *values, size_t count) : device_array(count)
    {
        assert_int_equal(cudaMemcpy(p, values, n * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
    }
    device_array(const device_array &) = delete;
    ~device_array()
    {
        cudaFree(p);
    }
    void read(T *out) const
    {
        assert_int_equal(cudaMemcpy(out, p, n * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
        record_golden(out, n * sizeof(T));
    }
};

/* A test's teardown: what the emulator found fails the test. */
static int no_errors(void **)
{
    return (int)cusim_take_errors();
}
