#include <atomic>

#include "kernels_cuda/decode_attention.h"
#include "kernels_cuda/decode_attention_args.h"
#include "kernels_cuda/dtype.cuh"
#include "kernels_cuda/launch.h"

namespace swiftapex {
namespace {

std::atomic<int> cap{0};

}  // namespace

void set_capability_cap(int capability) { cap.store(capability); }
int capability_cap() { return cap.load(); }

int64_t decode_attention_plan_bytes(int64_t num_ctas) {
    require(num_ctas >= 1 && num_ctas <= kMaxCtas, "decode_attention_plan_bytes: bad num_ctas");
    return num_ctas * kMaxWarps * int64_t{sizeof(PlannedPiece)};
}

int64_t decode_attention_workspace(int64_t n, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                                   int64_t num_ctas) {
    require(n >= 0 && kv_heads >= 1 && q_heads >= kv_heads && q_heads % kv_heads == 0 &&
                head_dim >= 1 && num_ctas >= 1 && num_ctas <= kMaxCtas,
            "decode_attention_workspace: bad sizes");
    return kMaxCtas * 4 +
           num_ctas * (2 + kMaxWarps) * slot_floats(q_heads / kv_heads, head_dim) * 4;
}

void decode_attention(int dtype, int kv_dtype, const void* q, const void* kv,
                      const int32_t* block_table, const int32_t* context_lens, void* out,
                      void* workspace, int64_t n, int64_t q_heads, int64_t kv_heads,
                      int64_t head_dim, int64_t block_size, int64_t table_stride, int64_t q_stride,
                      int64_t out_stride, float scale, int64_t num_ctas, void* plan,
                      bool is_planned, cudaStream_t stream) {
    require(n >= 0 && n < (int64_t{1} << 24) && kv_heads >= 1 && q_heads >= kv_heads &&
                q_heads % kv_heads == 0 && q_heads / kv_heads <= kMaxGroup && q_heads <= 65536,
            "decode_attention: bad rows or heads, or a group of more than 16");
    require(head_dim >= 8 && head_dim % 8 == 0 && head_dim <= kMaxHeadDim,
            "decode_attention: head_dim must be a multiple of 8 up to 256");
    require(block_size >= 1 && block_size <= 65536 && table_stride >= 0 && num_ctas >= 1 &&
                num_ctas <= kMaxCtas,
            "decode_attention: bad block size, table stride or num_ctas");
    require(n <= 1 || (q_stride >= q_heads * head_dim && out_stride >= q_heads * head_dim),
            "decode_attention: bad strides");
    require(scale > 0.0f && scale <= 1e38f, "decode_attention: scale must be above 0 and finite");
    require(dtype >= kFloat32 && dtype <= kBFloat16, "decode_attention: unknown dtype");
    require(aligned(16, kv, workspace),
            "decode_attention: kv and workspace need 16-byte alignment");
    require(aligned(64, plan) && (plan != nullptr || !is_planned),
            "decode_attention: a plan needs 64-byte alignment, and to be there");
    if (n == 0) return;
    constexpr double kLog2E = 1.4426950408889634;
    DecodeArgs args{};
    args.q = q;
    args.kv = kv;
    args.block_table = block_table;
    args.context_lens = context_lens;
    args.out = out;
    args.counters = static_cast<int32_t*>(workspace);
    args.partials = static_cast<float*>(workspace) + kMaxCtas;
    args.table_stride = table_stride;
    args.q_stride = q_stride;
    args.out_stride = out_stride;
    args.n = static_cast<int>(n);
    args.kv_heads = static_cast<int>(kv_heads);
    args.group = static_cast<int>(q_heads / kv_heads);
    args.head_dim = static_cast<int>(head_dim);
    args.block_size = static_cast<int>(block_size);
    args.dtype = dtype;
    args.plan = static_cast<PlannedPiece*>(plan);
    args.is_planned = is_planned;
    args.block_shift = -1;
    for (int shift = 0; shift <= 16; ++shift) {
        if (block_size == int64_t{1} << shift) args.block_shift = shift;
    }
    args.scale_log2 = static_cast<float>(scale * kLog2E);
    const bool same_16_bit = dtype == kv_dtype && dtype != kFloat32;
    if (same_16_bit && decode_attention_tma(args, num_ctas, stream)) return;
    if (same_16_bit && decode_attention_mma(args, num_ctas, stream)) return;
    decode_attention_fma(args, kv_dtype, num_ctas, stream);
}

}  // namespace swiftapex
