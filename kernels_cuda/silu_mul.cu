#include "kernels_cuda/dtype.cuh"
#include "kernels_cuda/launch.h"
#include "kernels_cuda/silu_mul.h"

namespace swiftapex {
namespace {

constexpr int kThreads = 256;

// Grid: x over the columns, kWidth a thread, y over the rows (in steps of gridDim.y).
template <class T, int kWidth>
__global__ void silu_mul_kernel(const T* gate_up, T* y, int64_t n, int64_t inner,
                                int64_t gate_up_stride, int64_t y_stride) {
    const int64_t column = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
    if (column >= inner) return;
    for (int64_t row = blockIdx.y; row < n; row += gridDim.y) {
        const T* in = gate_up + row * gate_up_stride + column;
        const auto gates = load_pack<T, kWidth>(in);
        const auto ups = load_pack<T, kWidth>(in + inner);
        Pack<T, kWidth> result;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            const float gate = to_float(gates.value[i]);
            const float silu = to_float(from_float<T>(gate / (1.0f + __expf(-gate))));
            result.value[i] = from_float<T>(silu * to_float(ups.value[i]));
        }
        store_pack(y + row * y_stride + column, result);
    }
}

template <class T, int kWidth>
void launch(const void* gate_up, void* y, int64_t n, int64_t inner, int64_t gate_up_stride,
            int64_t y_stride, cudaStream_t stream) {
    const dim3 grid(ceil_div(inner, kThreads * kWidth), grid_y(n));
    silu_mul_kernel<T, kWidth><<<grid, kThreads, 0, stream>>>(
        static_cast<const T*>(gate_up), static_cast<T*>(y), n, inner, gate_up_stride, y_stride);
}

}  // namespace

void silu_mul(int dtype, const void* gate_up, void* y, int64_t n, int64_t inner,
              int64_t gate_up_stride, int64_t y_stride, cudaStream_t stream) {
    require(n >= 0 && inner >= 1 && gate_up_stride >= 2 * inner && y_stride >= inner,
            "silu_mul: bad sizes or strides");
    if (n == 0) return;
    with_dtype("silu_mul", dtype, [&](auto type) {
        using T = decltype(type);
        constexpr int kWidth = kVector<T>;
        if (aligned(16, gate_up, y) && aligned(kWidth, inner, gate_up_stride, y_stride)) {
            launch<T, kWidth>(gate_up, y, n, inner, gate_up_stride, y_stride, stream);
        } else {
            launch<T, 1>(gate_up, y, n, inner, gate_up_stride, y_stride, stream);
        }
    });
    check_launch("silu_mul");
}

}  // namespace swiftapex
