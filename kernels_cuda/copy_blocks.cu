#include "kernels_cuda/copy_blocks.h"
#include "kernels_cuda/dtype.cuh"
#include "kernels_cuda/last_block.cuh"
#include "kernels_cuda/launch.h"

namespace swiftapex {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;  // loads of a thread at once: the bus to host memory is slow to answer

template <class S, class D, int kWidth>
__global__ void copy_blocks_kernel(const S* src, D* dst, const int64_t* src_ids,
                                   const int64_t* dst_ids, int64_t num_pairs,
                                   int64_t block_elements, int32_t* done, int32_t* counter) {
    const int64_t packs = block_elements / kWidth;
    const int64_t tiles = (packs + kThreads * kInFlight - 1) / (kThreads * kInFlight);
    for (int64_t tile = blockIdx.x; tile < num_pairs * tiles; tile += gridDim.x) {
        const int64_t pair = tile / tiles;
        const S* in = src + src_ids[pair] * block_elements;
        D* out = dst + dst_ids[pair] * block_elements;
        const int64_t first = tile % tiles * kThreads * kInFlight + threadIdx.x;
        Pack<S, kWidth> data[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const int64_t pack = first + i * kThreads;
            if (pack < packs) data[i] = load_pack<S, kWidth>(in + pack * kWidth);
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const int64_t pack = first + i * kThreads;
            if (pack >= packs) continue;
            Pack<D, kWidth> converted;
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                converted.value[j] = from_float<D>(to_float(data[i].value[j]));
            }
            store_pack(out + pack * kWidth, converted);
        }
    }
    store_word_after_all(done, 1, counter);
}

template <class S, class D, int kWidth>
void launch(const void* src, void* dst, const int64_t* src_ids, const int64_t* dst_ids,
            int64_t num_pairs, int64_t block_elements, int64_t max_ctas, int32_t* done,
            int32_t* counter, cudaStream_t stream) {
    const int64_t tiles = num_pairs * ceil_div(block_elements / kWidth, kThreads * kInFlight);
    const int64_t ctas = tiles < 1 ? 1 : tiles < max_ctas ? tiles : max_ctas;
    copy_blocks_kernel<S, D, kWidth><<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(
        static_cast<const S*>(src), static_cast<D*>(dst), src_ids, dst_ids, num_pairs,
        block_elements, done, counter);
}

}  // namespace

void copy_blocks(int src_dtype, int dst_dtype, const void* src, void* dst, const int64_t* src_ids,
                 const int64_t* dst_ids, int64_t num_pairs, int64_t block_elements,
                 int64_t max_ctas, int32_t* done, int32_t* counter, cudaStream_t stream) {
    require(num_pairs >= 0 && block_elements >= 1 && max_ctas >= 1 && max_ctas <= 65535,
            "copy_blocks: bad sizes");
    require(done == nullptr || counter != nullptr, "copy_blocks: a word needs a counter");
    if (num_pairs == 0 && done == nullptr) return;
    with_dtype("copy_blocks", src_dtype, [&](auto src_type) {
        with_dtype("copy_blocks", dst_dtype, [&](auto dst_type) {
            using S = decltype(src_type);
            using D = decltype(dst_type);
            constexpr int kWidth = kVector<S> < kVector<D> ? kVector<S> : kVector<D>;
            const bool vectors = aligned(16, src, dst) && aligned(kWidth, block_elements);
            const auto run = vectors ? launch<S, D, kWidth> : launch<S, D, 1>;
            run(src, dst, src_ids, dst_ids, num_pairs, block_elements, max_ctas, done, counter,
                stream);
        });
    });
    check_launch("copy_blocks");
}

}  // namespace swiftapex
