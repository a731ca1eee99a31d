#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace swiftapex {

// x [n, dim], rows `stride` elements apart. indices [n]: the lowest index of each row's largest
// element, -0.0 being equal to 0.0. invalid [n]: any element is NaN or the largest is infinite; the
// index is 0 then. Device memory.
// Throws std::invalid_argument for bad sizes and std::runtime_error if the launch fails.
void argmax(int dtype, const void* x, int64_t* indices, bool* invalid, int64_t n, int64_t dim,
            int64_t stride, cudaStream_t stream);

}  // namespace swiftapex
