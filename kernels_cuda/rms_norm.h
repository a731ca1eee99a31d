#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace swiftapex {

// y = x / sqrt(mean(x^2) + eps) * weight over the last dimension of x [n, heads, dim] on `stream`;
// device memory, strides in elements, dtype 0 float32, 1 float16, 2 bfloat16, weight [dim].
// Computed in float32; the normalised x is rounded to the dtype before the product. y may be x.
// Throws std::invalid_argument for bad sizes and std::runtime_error if the launch fails.
void rms_norm(int dtype, const void* x, const void* weight, void* y, int64_t n, int64_t heads,
              int64_t dim, int64_t x_stride, int64_t x_head_stride, int64_t y_stride,
              int64_t y_head_stride, float eps, cudaStream_t stream);

// sum = x + residual, rounded to the dtype, and y = rms_norm(sum), all [n, dim]. sum and y may each
// be x or residual, but not each other.
void add_rms_norm(int dtype, const void* x, const void* residual, const void* weight, void* sum,
                  void* y, int64_t n, int64_t dim, int64_t x_stride, int64_t residual_stride,
                  int64_t sum_stride, int64_t y_stride, float eps, cudaStream_t stream);

}  // namespace swiftapex
