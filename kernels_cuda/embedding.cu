#include "kernels_cuda/dtype.cuh"
#include "kernels_cuda/embedding.h"
#include "kernels_cuda/launch.h"

namespace swiftapex {
namespace {

constexpr int kThreads = 256;

// Grid: x over the columns, kWidth a thread, y over the rows (in steps of gridDim.y).
template <class T, int kWidth>
__global__ void embedding_kernel(const int64_t* token_ids, const T* table, T* y, int64_t n,
                                 int64_t dim) {
    const int64_t column = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
    if (column >= dim) return;
    for (int64_t row = blockIdx.y; row < n; row += gridDim.y) {
        store_pack(y + row * dim + column,
                   load_pack<T, kWidth>(table + token_ids[row] * dim + column));
    }
}

}  // namespace

void embedding(int dtype, const int64_t* token_ids, const void* table, void* y, int64_t n,
               int64_t dim, cudaStream_t stream) {
    require(n >= 0 && dim >= 1, "embedding: bad sizes");
    if (n == 0) return;
    with_dtype("embedding", dtype, [&](auto type) {
        using T = decltype(type);
        constexpr int kWidth = kVector<T>;
        const bool vectors = aligned(16, table, y) && aligned(kWidth, dim);
        const auto kernel = vectors ? embedding_kernel<T, kWidth> : embedding_kernel<T, 1>;
        const dim3 grid(ceil_div(dim, kThreads * (vectors ? kWidth : 1)), grid_y(n));
        kernel<<<grid, kThreads, 0, stream>>>(token_ids, static_cast<const T*>(table),
                                              static_cast<T*>(y), n, dim);
    });
    check_launch("embedding");
}

}  // namespace swiftapex
