#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace swiftapex {

// Tensors come as addresses, so that the module needs no torch; swiftapex/backends/cpu.py checks
// shapes, dtypes and strides before it calls.
template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Every kernel call releases the GIL for as long as it runs.
using ReleaseGil = pybind11::call_guard<pybind11::gil_scoped_release>;

}  // namespace swiftapex
