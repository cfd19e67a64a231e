/* What the emulator's own tests share: cmocka in C++, arrays on the device, the orders to try. */
#pragma once
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include "gpu-worker/backend/cuda/cu_port.h"
#include "tests/cusim/control.h"
extern "C" {
#include <cmocka.h>
}

static const char *const orders[] __attribute__((unused)) = {"fwd", "rev", "rand1", "rand2"};

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
    }
};

/* A test's teardown: what the emulator found fails the test. */
static int no_errors(void **)
{
    return (int)cusim_take_errors();
}
