#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels_cpu/kernel_table.h"

namespace swiftapex {

// Tensors come as addresses, so that the module needs no torch; swiftapex/backends/cpu.py checks
// shapes, dtypes and strides before it calls.
template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Python passes 0 for float32, 1 for float16, 2 for bfloat16.
inline DType dtype_of(int number) {
    if (number < 0 || number >= kNumDTypes) {
        throw std::invalid_argument("unknown dtype number " + std::to_string(number));
    }
    return static_cast<DType>(number);
}

// Every kernel call releases the GIL for as long as it runs.
using ReleaseGil = pybind11::call_guard<pybind11::gil_scoped_release>;

void bind_paged_decode_attention(pybind11::module_& module);

}  // namespace swiftapex
