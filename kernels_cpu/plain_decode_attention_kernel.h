// The plain kernel: loops over tokens and elements that the compiler may vectorise, and no more.
// Included by every isa/<name>.cpp.
#pragma once

#include "kernels_cpu/paged_decode_attention_heads.h"
#include "kernels_cpu/share.h"

namespace swiftapex::SWIFTAPEX_ISA {

// Sums of their own per lane let the compiler use vectors without reordering additions. n is a
// multiple of 8.
inline float plain_dot(const float* x, const float* y, int n) {
    constexpr int kLanes = 8;
    float lanes[kLanes] = {};
    for (int i = 0; i < n; i += kLanes) {
        for (int j = 0; j < kLanes; ++j) lanes[j] += x[i + j] * y[i + j];
    }
    float sum = 0.0f;
    for (float lane : lanes) sum += lane;
    return sum;
}

// T: dtype of KV, A: of q, k, v and out.
template <class T, class A>
struct PlainDecode {
    const DecodeAttentionArgs& args;
    const int32_t* context_lens;  // [rows]

    // K (0) or V (1) of one token, [head_dim].
    T* kv_row(int64_t row, int64_t head, int which, int token) const {
        const int64_t block =
            args.block_table[row * args.block_table_stride + token / args.block_size];
        const int64_t plane = (block * args.kv_heads + head) * 2 + which;
        return static_cast<T*>(args.kv) +
               (plane * args.block_size + token % args.block_size) * args.head_dim;
    }

    // pair: row * kv_heads + kv head.
    void append(int64_t pair) const {
        const int64_t row = pair / args.kv_heads, head = pair % args.kv_heads;
        if (context_lens[row] == 0) return;
        const int token = context_lens[row] - 1;
        const A* k = static_cast<const A*>(args.k) + row * args.k_stride + head * args.head_dim;
        const A* v = static_cast<const A*>(args.v) + row * args.v_stride + head * args.head_dim;
        convert_head(k, args.head_dim, kv_row(row, head, 0, token));
        convert_head(v, args.head_dim, kv_row(row, head, 1, token));
    }

    // pair: row * q_heads + query head. scratch: [3 * head_dim + context].
    void attend(int64_t pair, float* scratch) const {
        const int64_t row = pair / args.q_heads, q_head = pair % args.q_heads;
        const int64_t head = q_head / (args.q_heads / args.kv_heads);
        const int dim = args.head_dim, context = context_lens[row];
        float *q = scratch, *x = q + dim, *sum = x + dim, *weights = sum + dim;
        convert_head(static_cast<const A*>(args.q) + row * args.q_stride + q_head * dim, dim, q);
        float highest = -kInfinity;
        for (int t = 0; t < context; ++t) {
            convert_head(kv_row(row, head, 0, t), dim, x);
            weights[t] = plain_dot(q, x, dim) * args.scale;
            if (weights[t] > highest) highest = weights[t];
        }
        for (int d = 0; d < dim; ++d) sum[d] = 0.0f;
        float total = 0.0f;
        for (int t = 0; t < context; ++t) {
            const float weight = __builtin_expf(weights[t] - highest);
            total += weight;
            convert_head(kv_row(row, head, 1, t), dim, x);
            for (int d = 0; d < dim; ++d) sum[d] += weight * x[d];
        }
        for (int d = 0; d < dim; ++d) sum[d] = total > 0.0f ? sum[d] / total : 0.0f;
        convert_head(sum, dim, static_cast<A*>(args.out) + row * args.out_stride + q_head * dim);
    }
};

// Calls body(decode) with the activations' dtype.
template <class T, class Body>
inline void with_plain_decode(const DecodeAttentionArgs& args, const int32_t* context_lens,
                              Body body) {
    switch (args.dtype) {
        case kFloat32:
            return body(PlainDecode<T, float>{args, context_lens});
        case kFloat16:
            return body(PlainDecode<T, Half>{args, context_lens});
        case kBFloat16:
            return body(PlainDecode<T, BFloat16>{args, context_lens});
        case kInt8:
            return;  // of KV only
    }
}

template <class T>
void plain_append(const DecodeAttentionArgs& args, const int32_t* context_lens, int rows,
                  int thread, int num_threads) {
    const auto [begin, end] = share(int64_t(rows) * args.kv_heads, 1, thread, num_threads);
    with_plain_decode<T>(args, context_lens, [begin = begin, end = end](const auto& decode) {
        for (int64_t pair = begin; pair < end; ++pair) decode.append(pair);
    });
}

template <class T>
void plain_attend(const DecodeAttentionArgs& args, const int32_t* context_lens, int rows,
                  void* scratch, int thread, int num_threads) {
    const auto [begin, end] = share(int64_t(rows) * args.q_heads, 1, thread, num_threads);
    float* memory = static_cast<float*>(scratch);
    with_plain_decode<T>(args, context_lens,
                         [begin = begin, end = end, memory](const auto& decode) {
                             for (int64_t pair = begin; pair < end; ++pair) {
                                 decode.attend(pair, memory);
                             }
                         });
}

}  // namespace swiftapex::SWIFTAPEX_ISA
