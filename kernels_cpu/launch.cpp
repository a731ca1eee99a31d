#include "kernels_cpu/launch.h"

#include <vector>

#include "kernels_cpu/dispatch.h"

namespace swiftapex {

uint64_t read_stream(ThreadPool& pool, const void* data, int64_t bytes) {
    const KernelTable& kernels = active_kernels();
    std::vector<uint64_t> partial(8 * static_cast<size_t>(pool.num_threads()));
    const ReadStreamArgs args{static_cast<const uint64_t*>(data), bytes / 8, partial.data()};
    auto task = [&](int thread) { kernels.read_stream(args, thread, pool.num_threads()); };
    pool.run(task);
    uint64_t sum = 0;
    for (size_t i = 0; i < partial.size(); i += 8) sum += partial[i];
    return sum;
}

}  // namespace swiftapex
