#include "kernels_cuda/copy_rows.h"
#include "kernels_cuda/last_block.cuh"
#include "kernels_cuda/launch.h"

namespace swiftapex {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kMaxBlocks = 128;  // enough to fill the bus

// U: the unit of all addresses and strides, 16 bytes where they allow.
template <class U>
__global__ void copy_rows_kernel(const char* src, char* dst, int64_t n, int64_t units,
                                 int64_t src_stride, int64_t dst_stride, int32_t* word,
                                 int32_t value, int32_t* counter) {
    const int64_t step = int64_t{gridDim.x} * kThreads;
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n * units; i += step) {
        const int64_t row = i / units, unit = i % units;
        // .cv: a row in host memory is read anew.
        const U data = __ldcv(reinterpret_cast<const U*>(src + row * src_stride) + unit);
        reinterpret_cast<U*>(dst + row * dst_stride)[unit] = data;
    }
    store_word_after_all(word, value, counter);
}

template <class U>
void launch(const void* src, void* dst, int64_t n, int64_t row_bytes, int64_t src_stride,
            int64_t dst_stride, int32_t* word, int32_t value, int32_t* counter,
            cudaStream_t stream) {
    const int64_t units = row_bytes / static_cast<int64_t>(sizeof(U));
    unsigned blocks = ceil_div(n * units, kThreads);
    blocks = blocks < 1 ? 1 : blocks > kMaxBlocks ? kMaxBlocks : blocks;
    copy_rows_kernel<U>
        <<<blocks, kThreads, 0, stream>>>(static_cast<const char*>(src), static_cast<char*>(dst), n,
                                          units, src_stride, dst_stride, word, value, counter);
}

void copy_rows(const char* name, const void* src, void* dst, int64_t n, int64_t row_bytes,
               int64_t src_stride, int64_t dst_stride, int32_t* word, int32_t value,
               int32_t* counter, cudaStream_t stream) {
    require(n >= 0 && row_bytes >= 1, "copy_rows: bad sizes");
    require(n <= 1 || (src_stride >= row_bytes && dst_stride >= row_bytes),
            "copy_rows: bad strides");
    require(word == nullptr || counter != nullptr, "copy_rows: a word needs a counter");
    if (n == 0 && word == nullptr) return;
    const auto fits = [&](uint64_t bytes) {
        return aligned(bytes, src, dst) && aligned(bytes, row_bytes, src_stride, dst_stride);
    };
    const auto run = fits(16) ? launch<uint4> : fits(4) ? launch<unsigned> : launch<unsigned char>;
    run(src, dst, n, row_bytes, src_stride, dst_stride, word, value, counter, stream);
    check_launch(name);
}

}  // namespace

void gather_rows(const void* src, void* dst, int64_t n, int64_t row_bytes, int64_t src_stride_bytes,
                 int64_t dst_stride_bytes, int32_t* arrival, int32_t* counter,
                 cudaStream_t stream) {
    copy_rows("gather_rows", src, dst, n, row_bytes, src_stride_bytes, dst_stride_bytes, arrival, 1,
              counter, stream);
}

void scatter_rows(const void* src, void* dst, int64_t n, int64_t row_bytes,
                  int64_t src_stride_bytes, int64_t dst_stride_bytes, int32_t* done,
                  int32_t* counter, cudaStream_t stream) {
    copy_rows("scatter_rows", src, dst, n, row_bytes, src_stride_bytes, dst_stride_bytes, done, 0,
              counter, stream);
}

}  // namespace swiftapex
