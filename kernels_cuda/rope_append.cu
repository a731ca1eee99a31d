#include "kernels_cuda/dependent_launch.cuh"
#include "kernels_cuda/dtype.cuh"
#include "kernels_cuda/launch.h"
#include "kernels_cuda/rope_append.h"

namespace swiftapex {
namespace {

constexpr int kThreads = 128;

template <class T, class KV>
struct RopeArgs {
    T* qkv;
    const float* rotation;
    const int64_t* slots;
    KV* kv;
    int64_t n, qkv_stride, block_size;
    int q_heads, kv_heads, head_dim;
};

template <class T, class KV, int kWidth>
__device__ void store_as(KV* address, const Pack<T, kWidth>& values) {
    Pack<KV, kWidth> converted;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
        converted.value[i] = from_float<KV>(to_float(values.value[i]));
    }
    store_pack(address, converted);
}

// One thread: kWidth elements of a head's first half and their partners in the second.
// Grid: x over the pairs of a row, y over the rows (in steps of gridDim.y).
template <class T, class KV, int kWidth>
__global__ void rope_append_kernel(RopeArgs<T, KV> args) {
    let_next_kernel_start();  // decode_attention
    const int half = args.head_dim / 2, packs = half / kWidth;
    const int item = blockIdx.x * kThreads + threadIdx.x;
    const int head = item / packs, i = item % packs * kWidth;
    if (head >= args.q_heads + 2 * args.kv_heads) return;
    const int kv_index = head - args.q_heads;  // < 0: a q head; >= kv_heads: a V head
    const bool rotates = args.rotation != nullptr && kv_index < args.kv_heads;

    for (int64_t row = blockIdx.y; row < args.n; row += gridDim.y) {
        const int64_t slot = args.slots != nullptr && kv_index >= 0 ? args.slots[row] : -1;
        if (!rotates && slot < 0) continue;
        T* address = args.qkv + row * args.qkv_stride + int64_t{head} * args.head_dim + i;
        auto first = load_pack<T, kWidth>(address);
        auto second = load_pack<T, kWidth>(address + half);
        if (rotates) {
            const float* angles = args.rotation + row * args.head_dim + i;
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                const float a = to_float(first.value[j]), b = to_float(second.value[j]);
                const float cos = angles[j], sin = angles[half + j];
                first.value[j] = from_float<T>(a * cos - b * sin);
                second.value[j] = from_float<T>(b * cos + a * sin);
            }
            store_pack(address, first);
            store_pack(address + half, second);
        }
        if (slot >= 0) {
            const int64_t block = slot / args.block_size, token = slot % args.block_size;
            const int is_v = kv_index >= args.kv_heads;
            const int64_t plane =
                (block * args.kv_heads + kv_index - is_v * args.kv_heads) * 2 + is_v;
            KV* target = args.kv + (plane * args.block_size + token) * args.head_dim + i;
            store_as<T, KV, kWidth>(target, first);
            store_as<T, KV, kWidth>(target + half, second);
        }
    }
}

template <class T, class KV, int kWidth>
void launch(const RopeArgs<T, KV>& args, cudaStream_t stream) {
    const int64_t items = int64_t{args.q_heads + 2 * args.kv_heads} * (args.head_dim / 2 / kWidth);
    const dim3 grid(ceil_div(items, kThreads), grid_y(args.n));
    rope_append_kernel<T, KV, kWidth><<<grid, kThreads, 0, stream>>>(args);
}

}  // namespace

void rope_append(int dtype, int kv_dtype, void* qkv, const float* rotation, const int64_t* slots,
                 void* kv, int64_t n, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                 int64_t qkv_stride, int64_t block_size, cudaStream_t stream) {
    require(n >= 0 && q_heads >= 0 && kv_heads >= (slots == nullptr ? 0 : 1) && head_dim >= 2 &&
                head_dim % 2 == 0,
            "rope_append: bad sizes");
    const int64_t width = (q_heads + 2 * kv_heads) * head_dim;
    require(width < (int64_t{1} << 30) && (n <= 1 || qkv_stride >= width),
            "rope_append: bad row size or stride");
    require(slots == nullptr || (kv != nullptr && block_size >= 1),
            "rope_append: slots need a KV cache and a block size");
    if (n == 0 || (rotation == nullptr && slots == nullptr)) return;
    with_dtype("rope_append", dtype, [&](auto type) {
        with_dtype("rope_append", kv_dtype, [&](auto kv_type) {
            using T = decltype(type);
            using KV = decltype(kv_type);
            const RopeArgs<T, KV> args{static_cast<T*>(qkv),
                                       rotation,
                                       slots,
                                       static_cast<KV*>(kv),
                                       n,
                                       qkv_stride,
                                       block_size,
                                       static_cast<int>(q_heads),
                                       static_cast<int>(kv_heads),
                                       static_cast<int>(head_dim)};
            constexpr int kWidth = kVector<T> < kVector<KV> ? kVector<T> : kVector<KV>;
            if (aligned(16, qkv, kv) && aligned(kVector<T>, qkv_stride) &&
                aligned(kWidth, head_dim / 2)) {
                launch<T, KV, kWidth>(args, stream);
            } else {
                launch<T, KV, 1>(args, stream);
            }
        });
    });
    check_launch("rope_append");
}

}  // namespace swiftapex
