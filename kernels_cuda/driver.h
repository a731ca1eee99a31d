// Functions of the driver, looked up at run time: the module also loads where there is no driver.
#pragma once

#include <cuda.h>

#include "kernels_cuda/launch.h"

namespace swiftapex {

template <class Function>
Function driver_entry(const char* name) {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(name, cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess || entry == nullptr) {
        throw std::runtime_error(std::string(name) + ": the driver does not have it");
    }
    return reinterpret_cast<Function>(entry);
}

}  // namespace swiftapex
