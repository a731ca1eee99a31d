#include "kernels_cpu/launch.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels_cpu/dispatch.h"

namespace swiftapex {
namespace {

// Waking and joining threads costs 1 to 2 us, in which one core passes over this many elements.
constexpr int64_t kSerialElements = 16 * 1024;

// That a thread takes at a time of what all of them read: 4 and 256 KiB.
constexpr int64_t kMinReadWords = 512, kMaxReadWords = 32 * 1024;

using Buffer = std::unique_ptr<char[]>;

// Uninitialised memory for intermediate results.
Buffer buffer(DType dtype, int64_t elements) {
    return Buffer(new char[static_cast<size_t>(elements) * (dtype == kFloat32 ? 4 : 2)]);
}

// Calls kernel(thread, num_threads) on every thread of the pool, or once as (0, 1).
template <class Kernel>
void launch(ThreadPool& pool, int64_t elements, size_t scratch_bytes, Kernel kernel) {
    if (elements <= kSerialElements && pool.caller() == Caller::kWorks) {
        auto task = [&](int thread) { kernel(thread, 1); };
        pool.run_on_caller(task, scratch_bytes);
    } else {
        auto task = [&](int thread) { kernel(thread, pool.num_threads()); };
        pool.run(task, scratch_bytes);
    }
}

// Packed x (at most 4 bytes an element, padded to 64 elements a row and 16 rows) and sums of 64
// outputs.
size_t linear_scratch_bytes(int64_t n, int64_t in) {
    const int64_t rows = (n + 15) / 16 * 16, columns = (in + 63) / 64 * 64;
    return static_cast<size_t>(rows * columns * 4 + rows * 64 * 4 + 4096);
}

}  // namespace

void linear(ThreadPool& pool, DType dtype, const LinearArgs& args) {
    const auto kernel = active_kernels().linear[dtype];
    const int64_t elements = args.n * args.in * args.out / 4;  // four products take as long as one
    launch(pool, elements, linear_scratch_bytes(args.n, args.in), [&](int thread, int num_threads) {
        kernel(args, pool.scratch(thread), thread, num_threads);
    });
}

void rms_norm(ThreadPool& pool, DType dtype, const RmsNormArgs& args) {
    const auto kernel = active_kernels().rms_norm[dtype];
    launch(pool, args.n * args.heads * args.dim, 0,
           [&](int thread, int num_threads) { kernel(args, thread, num_threads); });
}

void rope(ThreadPool& pool, DType dtype, const RopeArgs& args) {
    const auto kernel = active_kernels().rope[dtype];
    launch(pool, args.n * args.heads * args.dim, 0,
           [&](int thread, int num_threads) { kernel(args, thread, num_threads); });
}

void silu_mul(ThreadPool& pool, DType dtype, const SiluMulArgs& args) {
    const auto kernel = active_kernels().silu_mul[dtype];
    launch(pool, args.n * args.inner, 0,
           [&](int thread, int num_threads) { kernel(args, thread, num_threads); });
}

void argmax(ThreadPool& pool, DType dtype, const ArgmaxArgs& args) {
    const auto kernel = active_kernels().argmax[dtype];
    launch(pool, args.n * args.dim, 0,
           [&](int thread, int num_threads) { kernel(args, thread, num_threads); });
}

void norm_linear(ThreadPool& pool, DType dtype, const NormLinearArgs& a) {
    const Buffer normed = buffer(dtype, a.n * a.in);
    rms_norm(pool, dtype,
             {a.x, a.norm_weight, normed.get(), a.n, 1, a.in, a.x_stride, a.in, a.in, a.in, a.eps});
    linear(pool, dtype,
           {normed.get(), a.weight, a.bias, nullptr, a.y, a.n, a.in, a.out, a.in, a.weight_stride,
            0, a.out});
    if (a.rotated == 0) return;
    rope(pool, dtype,
         {a.y, a.rotation, a.n, a.rotated / a.head_dim, a.head_dim, a.out, a.head_dim, a.head_dim});
}

void proj_ffn(ThreadPool& pool, DType dtype, const ProjFfnArgs& a) {
    const Buffer h = buffer(dtype, a.n * a.hidden);
    linear(pool, dtype,
           {a.o, a.proj, a.proj_bias, a.x, h.get(), a.n, a.width, a.hidden, a.o_stride,
            a.proj_stride, a.x_stride, a.hidden});
    const Buffer gate_up = buffer(dtype, a.n * 2 * a.inner);
    norm_linear(pool, dtype,
                {h.get(), a.norm_weight, a.eps, a.gate_up, a.gate_up_bias, gate_up.get(), nullptr,
                 a.n, a.hidden, 2 * a.inner, 0, 0, a.hidden, a.gate_up_stride});
    const Buffer inner = buffer(dtype, a.n * a.inner);
    silu_mul(pool, dtype, {gate_up.get(), inner.get(), a.n, a.inner, 2 * a.inner, a.inner});
    linear(pool, dtype,
           {inner.get(), a.down, a.down_bias, h.get(), a.y, a.n, a.inner, a.hidden, a.inner,
            a.down_stride, a.hidden, a.hidden});
}

uint64_t read_stream(ThreadPool& pool, const void* data, int64_t bytes) {
    const auto kernel = active_kernels().read_stream;
    const int64_t threads = pool.num_threads(), words = bytes / 8;
    const int64_t chunk = std::clamp<int64_t>(words / (threads * 16), kMinReadWords, kMaxReadWords);
    std::vector<uint64_t> partial(8 * static_cast<size_t>(threads));
    int64_t next = 0;
    const ReadStreamArgs args{static_cast<const uint64_t*>(data), words, chunk / 64 * 64, &next,
                              partial.data()};
    auto task = [&](int thread) { kernel(args, thread); };
    pool.run(task);
    uint64_t sum = 0;
    for (size_t i = 0; i < partial.size(); i += 8) sum += partial[i];
    return sum;
}

}  // namespace swiftapex
