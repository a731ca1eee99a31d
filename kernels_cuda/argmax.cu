#include "kernels_cuda/argmax.h"
#include "kernels_cuda/dtype.cuh"
#include "kernels_cuda/launch.h"

namespace swiftapex {
namespace {

constexpr int kThreads = 512;

struct Best {
    float value;
    int64_t index;
    bool nan;
};

__device__ Best better(const Best& a, const Best& b) {
    const bool takes_b = b.value > a.value || (b.value == a.value && b.index < a.index);
    return {takes_b ? b.value : a.value, takes_b ? b.index : a.index, a.nan || b.nan};
}

__device__ Best best_of_warp(Best best) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        best =
            better(best, {__shfl_xor_sync(0xffffffffu, best.value, distance),
                          __shfl_xor_sync(0xffffffffu, best.index, distance),
                          __shfl_xor_sync(0xffffffffu, static_cast<int>(best.nan), distance) != 0});
    }
    return best;
}

// One block a row.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    argmax_kernel(const T* x, int64_t* indices, bool* invalid, int64_t dim, int64_t stride) {
    __shared__ Best of_warps[kThreads / 32];
    x += blockIdx.x * stride;
    const Best none{-INFINITY, dim, false};
    Best best = none;
#pragma unroll 4
    for (int64_t i = threadIdx.x * kWidth; i < dim; i += kThreads * kWidth) {
        const auto values = load_pack<T, kWidth>(x + i);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            const float value = to_float(values.value[j]);
            best.nan |= value != value;
            if (value > best.value) best.value = value, best.index = i + j;
        }
    }
    best = best_of_warp(best);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    best = best_of_warp(threadIdx.x < kThreads / 32 ? of_warps[threadIdx.x] : none);
    if (threadIdx.x == 0) {
        const bool bad = best.nan || isinf(best.value);
        indices[blockIdx.x] = bad ? 0 : best.index;
        invalid[blockIdx.x] = bad;
    }
}

}  // namespace

void argmax(int dtype, const void* x, int64_t* indices, bool* invalid, int64_t n, int64_t dim,
            int64_t stride, cudaStream_t stream) {
    require(n >= 0 && n < (int64_t{1} << 31) && dim >= 1 && (n <= 1 || stride >= dim),
            "argmax: bad sizes or stride");
    if (n == 0) return;
    with_dtype("argmax", dtype, [&](auto type) {
        using T = decltype(type);
        constexpr int kWidth = kVector<T>;
        const bool vectors = aligned(16, x) && aligned(kWidth, dim, stride);
        const auto kernel = vectors ? argmax_kernel<T, kWidth> : argmax_kernel<T, 1>;
        kernel<<<static_cast<unsigned>(n), kThreads, 0, stream>>>(static_cast<const T*>(x), indices,
                                                                  invalid, dim, stride);
    });
    check_launch("argmax");
}

}  // namespace swiftapex
