#include "kernels_cuda/dtype.cuh"
#include "kernels_cuda/launch.h"
#include "kernels_cuda/reduce.cuh"
#include "kernels_cuda/rms_norm.h"

namespace swiftapex {
namespace {

constexpr int kSmallRow = 512;  // up to here one warp takes a row, above a whole block does
constexpr int kWarpsOfSmallRows = 4;
constexpr int kMaxThreads = 1024;

template <class T>
struct NormArgs {
    const T* x;
    const T* residual;  // null: none
    const T* weight;
    T* sum;  // where x + residual goes; written only with a residual
    T* y;
    int64_t rows, heads, dim;
    int64_t x_stride, x_head_stride, residual_stride, sum_stride, y_stride, y_head_stride;
    float eps;
};

// blockDim.x threads a row, blockDim.y rows a block. Each thread reads again in the second loop
// what it read, or wrote, in the first, which is why y may be x.
template <class T, int kWidth>
__global__ void rms_norm_kernel(NormArgs<T> args) {
    __shared__ float scratch[32];
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (row >= args.rows) return;  // only where a row is one warp
    const int64_t token = row / args.heads, head = row % args.heads;
    const T* x = args.x + token * args.x_stride + head * args.x_head_stride;
    T* y = args.y + token * args.y_stride + head * args.y_head_stride;
    const int64_t step = int64_t{blockDim.x} * kWidth;

    float squares = 0.0f;
    for (int64_t i = threadIdx.x * kWidth; i < args.dim; i += step) {
        auto values = load_pack<T, kWidth>(x + i);
        if (args.residual != nullptr) {
            const auto more =
                load_pack<T, kWidth>(args.residual + token * args.residual_stride + i);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                values.value[j] =
                    from_float<T>(to_float(values.value[j]) + to_float(more.value[j]));
            }
            store_pack(args.sum + token * args.sum_stride + i, values);
        }
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            squares += to_float(values.value[j]) * to_float(values.value[j]);
        }
    }
    const float mean = row_sum(squares, scratch) / static_cast<float>(args.dim);
    const float inverse = 1.0f / sqrtf(mean + args.eps);

    const T* normed = args.residual != nullptr ? args.sum + token * args.sum_stride : x;
    for (int64_t i = threadIdx.x * kWidth; i < args.dim; i += step) {
        auto values = load_pack<T, kWidth>(normed + i);
        const auto weights = load_pack<T, kWidth>(args.weight + i);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            const float scaled = to_float(from_float<T>(to_float(values.value[j]) * inverse));
            values.value[j] = from_float<T>(scaled * to_float(weights.value[j]));
        }
        store_pack(y + i, values);
    }
}

template <class T, int kWidth>
void launch(const NormArgs<T>& args, cudaStream_t stream) {
    dim3 block(32, kWarpsOfSmallRows);
    if (args.dim > kSmallRow) {
        const int64_t threads = int64_t{ceil_div(args.dim, kWidth * 32)} * 32;
        block = dim3(static_cast<unsigned>(threads < kMaxThreads ? threads : kMaxThreads));
    }
    const unsigned grid = ceil_div(args.rows, block.y);
    rms_norm_kernel<T, kWidth><<<grid, block, 0, stream>>>(args);
}

// The strides that no access uses are given as 0.
template <class T>
void launch_aligned(const NormArgs<T>& args, cudaStream_t stream) {
    constexpr int kWidth = kVector<T>;
    const bool vectors =
        aligned(16, args.x, args.residual, args.weight, args.sum, args.y) &&
        aligned(kWidth, args.dim, args.x_stride, args.x_head_stride, args.residual_stride,
                args.sum_stride, args.y_stride, args.y_head_stride);
    vectors ? launch<T, kWidth>(args, stream) : launch<T, 1>(args, stream);
}

}  // namespace

void rms_norm(int dtype, const void* x, const void* weight, void* y, int64_t n, int64_t heads,
              int64_t dim, int64_t x_stride, int64_t x_head_stride, int64_t y_stride,
              int64_t y_head_stride, float eps, cudaStream_t stream) {
    require(n >= 0 && heads >= 1 && dim >= 1, "rms_norm: bad sizes");
    require(heads == 1 || (x_head_stride >= dim && y_head_stride >= dim),
            "rms_norm: bad head strides");
    require(n <= 1 || (x_stride >= dim && y_stride >= dim), "rms_norm: bad strides");
    if (n == 0) return;
    if (heads == 1) x_head_stride = y_head_stride = 0;
    with_dtype("rms_norm", dtype, [&](auto type) {
        using T = decltype(type);
        launch_aligned<T>({static_cast<const T*>(x), nullptr, static_cast<const T*>(weight),
                           nullptr, static_cast<T*>(y), n * heads, heads, dim, x_stride,
                           x_head_stride, 0, 0, y_stride, y_head_stride, eps},
                          stream);
    });
    check_launch("rms_norm");
}

void add_rms_norm(int dtype, const void* x, const void* residual, const void* weight, void* sum,
                  void* y, int64_t n, int64_t dim, int64_t x_stride, int64_t residual_stride,
                  int64_t sum_stride, int64_t y_stride, float eps, cudaStream_t stream) {
    require(n >= 0 && dim >= 1, "add_rms_norm: bad sizes");
    require(n <= 1 ||
                (x_stride >= dim && residual_stride >= dim && sum_stride >= dim && y_stride >= dim),
            "add_rms_norm: bad strides");
    require(n == 0 || (residual != nullptr && sum != nullptr && sum != y),
            "add_rms_norm: needs a residual, and a sum that is not y");
    if (n == 0) return;
    with_dtype("add_rms_norm", dtype, [&](auto type) {
        using T = decltype(type);
        launch_aligned<T>({static_cast<const T*>(x), static_cast<const T*>(residual),
                           static_cast<const T*>(weight), static_cast<T*>(sum), static_cast<T*>(y),
                           n, 1, dim, x_stride, 0, residual_stride, sum_stride, y_stride, 0, eps},
                          stream);
    });
    check_launch("add_rms_norm");
}

}  // namespace swiftapex
