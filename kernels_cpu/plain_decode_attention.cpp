#include "kernels_cpu/plain_decode_attention.h"

#include <stdexcept>

#include "kernels_cpu/dispatch.h"

namespace swiftapex {

void plain_decode_attention(ThreadPool& pool, DecodePlan& plan, const DecodeAttentionArgs& args) {
    check_decode_attention(pool, plan, args);
    if (args.kv_dtype == kInt8) {
        throw std::invalid_argument("plain_decode_attention: int8 KV is for the tuned kernel");
    }
    if (plan.rows() == 0) return;
    const KernelTable& kernels = active_kernels();
    const int32_t* lens = plan.context_lens().data();
    const int rows = plan.rows(), threads = pool.num_threads();
    const size_t context = size_t(plan.max_blocks()) * size_t(plan.block_size());
    // The query heads of a group read what one thread appends, hence two fork-joins.
    const auto append = kernels.plain_append[args.kv_dtype];
    auto appends = [&](int thread) { append(args, lens, rows, thread, threads); };
    pool.run(appends);
    const auto attend = kernels.plain_attend[args.kv_dtype];
    auto attends = [&](int thread) {
        attend(args, lens, rows, pool.scratch(thread), thread, threads);
    };
    pool.run(attends, sizeof(float) * (3 * size_t(args.head_dim) + context));
}

}  // namespace swiftapex
