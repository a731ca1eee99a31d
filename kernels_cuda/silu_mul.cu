#include <stdexcept>
#include <string>

#include "kernels_cuda/dtype.cuh"
#include "kernels_cuda/silu_mul.h"

namespace swiftapex {
namespace {

constexpr int kThreads = 256;

// Grid: x over the columns, y over the rows (in steps of gridDim.y).
template <class T>
__global__ void silu_mul_kernel(const T* gate_up, T* y, int64_t n, int64_t inner,
                                int64_t gate_up_stride, int64_t y_stride) {
    const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (column >= inner) return;
    for (int64_t row = blockIdx.y; row < n; row += gridDim.y) {
        const T* in = gate_up + row * gate_up_stride + column;
        const float gate = to_float(in[0]);
        const float silu = to_float(from_float<T>(gate / (1.0f + __expf(-gate))));
        y[row * y_stride + column] = from_float<T>(silu * to_float(in[inner]));
    }
}

template <class T>
void launch(const void* gate_up, void* y, int64_t n, int64_t inner, int64_t gate_up_stride,
            int64_t y_stride, cudaStream_t stream) {
    constexpr int64_t kMaxGridY = 65535;
    const dim3 grid(static_cast<unsigned>((inner + kThreads - 1) / kThreads),
                    static_cast<unsigned>(n < kMaxGridY ? n : kMaxGridY));
    silu_mul_kernel<T><<<grid, kThreads, 0, stream>>>(
        static_cast<const T*>(gate_up), static_cast<T*>(y), n, inner, gate_up_stride, y_stride);
}

}  // namespace

void silu_mul(int dtype, const void* gate_up, void* y, int64_t n, int64_t inner,
              int64_t gate_up_stride, int64_t y_stride, cudaStream_t stream) {
    if (n < 0 || inner < 1 || gate_up_stride < 2 * inner || y_stride < inner) {
        throw std::invalid_argument("silu_mul: bad sizes or strides");
    }
    if (n == 0) return;
    switch (dtype) {
        case kFloat32:
            launch<float>(gate_up, y, n, inner, gate_up_stride, y_stride, stream);
            break;
        case kFloat16:
            launch<__half>(gate_up, y, n, inner, gate_up_stride, y_stride, stream);
            break;
        case kBFloat16:
            launch<__nv_bfloat16>(gate_up, y, n, inner, gate_up_stride, y_stride, stream);
            break;
        default:
            throw std::invalid_argument("silu_mul: unknown dtype " + std::to_string(dtype));
    }
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string("silu_mul: ") + cudaGetErrorString(error));
    }
}

}  // namespace swiftapex
