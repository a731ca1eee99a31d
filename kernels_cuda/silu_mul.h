#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace swiftapex {

// y[n, inner] = silu(gate_up[:, :inner]) * gate_up[:, inner:] on `stream`; device memory, strides
// in elements, dtype 0 float32, 1 float16, 2 bfloat16. silu is rounded to the dtype before the
// product. Throws std::invalid_argument for bad sizes and std::runtime_error if the launch fails.
void silu_mul(int dtype, const void* gate_up, void* y, int64_t n, int64_t inner,
              int64_t gate_up_stride, int64_t y_stride, cudaStream_t stream);

}  // namespace swiftapex
