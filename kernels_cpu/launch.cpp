#include "kernels_cpu/launch.h"

#include <vector>

#include "kernels_cpu/dispatch.h"

namespace swiftapex {
namespace {

// Waking and joining threads costs 1 to 2 us, in which one core passes over this many elements.
constexpr int64_t kSerialElements = 16 * 1024;

// Calls kernel(thread, num_threads) on every thread of the pool, or once.
template <class Kernel>
void launch(ThreadPool& pool, int64_t elements, Kernel kernel) {
    if (elements <= kSerialElements && pool.caller() == Caller::kWorks) {
        kernel(0, 1);
        return;
    }
    auto task = [&](int thread) { kernel(thread, pool.num_threads()); };
    pool.run(task);
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
    auto task = [&](int thread) { kernel(args, pool.scratch(thread), thread, pool.num_threads()); };
    pool.run(task, linear_scratch_bytes(args.n, args.in));
}

void rms_norm(ThreadPool& pool, DType dtype, const RmsNormArgs& args) {
    const auto kernel = active_kernels().rms_norm[dtype];
    launch(pool, args.n * args.heads * args.dim,
           [&](int thread, int num_threads) { kernel(args, thread, num_threads); });
}

void rope(ThreadPool& pool, DType dtype, const RopeArgs& args) {
    const auto kernel = active_kernels().rope[dtype];
    launch(pool, args.n * args.heads * args.dim,
           [&](int thread, int num_threads) { kernel(args, thread, num_threads); });
}

void silu_mul(ThreadPool& pool, DType dtype, const SiluMulArgs& args) {
    const auto kernel = active_kernels().silu_mul[dtype];
    launch(pool, args.n * args.inner,
           [&](int thread, int num_threads) { kernel(args, thread, num_threads); });
}

uint64_t read_stream(ThreadPool& pool, const void* data, int64_t bytes) {
    const auto kernel = active_kernels().read_stream;
    std::vector<uint64_t> partial(8 * static_cast<size_t>(pool.num_threads()));
    const ReadStreamArgs args{static_cast<const uint64_t*>(data), bytes / 8, partial.data()};
    auto task = [&](int thread) { kernel(args, thread, pool.num_threads()); };
    pool.run(task);
    uint64_t sum = 0;
    for (size_t i = 0; i < partial.size(); i += 8) sum += partial[i];
    return sum;
}

}  // namespace swiftapex
