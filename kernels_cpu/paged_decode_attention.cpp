#include "kernels_cpu/paged_decode_attention.h"

#include <stdexcept>
#include <string>

#include "kernels_cpu/dispatch.h"

namespace swiftapex {
namespace {

void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(std::string("decode attention: ") + message);
}

// Of all heads: queries, values and two vectors of state (at most 16 lanes); a
// tile's scores.
size_t scratch_bytes(const DecodeAttentionArgs& args) {
    const size_t heads = size_t(args.q_heads);
    const size_t rows = heads * (kMaxQueryRows + 1);
    return sizeof(float) *
           (rows * size_t(padded_head_dim(args.head_dim)) + heads * 2 * 16 + kMaxBlockSize * 8);
}

}  // namespace

void check_decode_attention(const ThreadPool& pool, const DecodePlan& plan,
                            const DecodeAttentionArgs& args) {
    require(plan.num_threads() == pool.num_threads(), "the plan is for another number of threads");
    require(plan.kv_heads() == args.kv_heads && plan.block_size() == args.block_size,
            "the plan is for another number of kv heads or another block size");
    require(args.q_heads > 0 && args.q_heads % args.kv_heads == 0,
            "q_heads must be a multiple of kv_heads");
    require(args.head_dim > 0 && args.head_dim % 8 == 0, "head_dim must be a multiple of 8");
    require(args.block_size % 16 == 0 && args.block_size <= kMaxBlockSize,
            "block_size must be a multiple of 16, at most 128");
    require(args.scale > 0, "the scale must be positive");
    require(plan.rows() < 2 || args.block_table_stride >= plan.max_blocks(),
            "the block table is narrower than a context");
}

void paged_decode_attention(ThreadPool& pool, DecodePlan& plan, const DecodeAttentionArgs& args) {
    check_decode_attention(pool, plan, args);
    if (plan.rows() == 0) return;
    plan.reserve(args.q_heads, args.head_dim);
    const DecodePlanView view = plan.view();
    const KernelTable& kernels = active_kernels();
    const auto attend = kernels.decode_pieces[args.kv_dtype];
    auto pieces = [args, view, attend, &pool](int thread) {
        attend(args, view, pool.scratch(thread), thread);
    };
    pool.run(pieces, scratch_bytes(args));
    plan.end_call();
}

}  // namespace swiftapex
