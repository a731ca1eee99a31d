// The inner loops of paged decode attention. Included by every isa/<name>.cpp.
//
// A tile is one K plane and one V plane [tokens, head_dim] with `Heads` query
// heads of the group that shares them, so K and V are read from memory and
// converted once for these heads.
#pragma once

#include "kernels_cpu/paged_decode_attention_prefetch.h"
#include "kernels_cpu/paged_decode_attention_softmax.h"

namespace swiftapex::SWIFTAPEX_ISA {

// acc[h][t] += q[h] * k[t] for one vector pair and kTokens tokens.
template <int kHeads, int kTokens, bool Partial, class T>
[[gnu::always_inline]] inline void score_pair(const T* k, int64_t head_dim, int n, const float* q,
                                              int q_stride, F32 (&acc)[kHeads * kTokens]) {
    F32 k0[kTokens], k1[kTokens];
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
        if constexpr (Partial) {
            load_pair_partial(k + t * head_dim, n, k0[t], k1[t]);
        } else {
            load_pair(k + t * head_dim, k0[t], k1[t]);
        }
        if constexpr (kHeads <= 2) {  // q stays in registers, K passes
#pragma GCC unroll 2
            for (int h = 0; h < kHeads; ++h) {
                F32& sum = acc[h * kTokens + t];
                sum = fma(k0[t], load(q + h * q_stride), sum);
                sum = fma(k1[t], load(q + h * q_stride + kWidth), sum);
            }
        }
    }
    if constexpr (kHeads > 2) {  // K stays in registers, q passes
#pragma GCC unroll 8
        for (int h = 0; h < kHeads; ++h) {
            const F32 q0 = load(q + h * q_stride), q1 = load(q + h * q_stride + kWidth);
#pragma GCC unroll 16
            for (int t = 0; t < kTokens; ++t) {
                F32& sum = acc[h * kTokens + t];
                sum = fma(k0[t], q0, sum);
                sum = fma(k1[t], q1, sum);
            }
        }
    }
}

// acc[h][t] = q[h] * k[t], in lanes that are yet to be added up.
template <int kHeads, int kTokens, class T>
[[gnu::always_inline]] inline void score_rows(const T* k, int head_dim, const float* q,
                                              int q_stride, Prefetch& ahead,
                                              F32 (&acc)[kHeads * kTokens]) {
    const int whole = head_dim / kPair * kPair;
#pragma GCC unroll 32
    for (int i = 0; i < kHeads * kTokens; ++i) acc[i] = zero();
    for (int d = 0; d < whole; d += kPair) {
        ahead.step();
        score_pair<kHeads, kTokens, false>(k + d, head_dim, 0, q + d, q_stride, acc);
    }
    if (whole < head_dim) {
        score_pair<kHeads, kTokens, true>(k + whole, head_dim, head_dim - whole, q + whole,
                                          q_stride, acc);
    }
}

// Tokens that score_tokens computes at once where a tile's last vectors are not full.
constexpr int kTailTokens = 4;

// Steps of an `ahead` that score_tokens and add_values make.
template <class Shape>
inline int score_steps(int head_dim, int tokens) {
    const int whole = tokens / Shape::kTokens, left = tokens % Shape::kTokens;
    const int tails =
        Shape::kTokens > kTailTokens ? (left + kTailTokens - 1) / kTailTokens : int(left > 0);
    return (whole + tails) * (head_dim / kPair);
}
template <class Shape>
inline int value_steps(int head_dim, int tokens) {
    constexpr int kPairs = Shape::kPairs;
    const int pairs = (head_dim + kPair - 1) / kPair;
    return tokens * (pairs / kPairs + pairs % kPairs);
}

template <class Shape>
[[gnu::always_inline]] inline void store_scores(const F32 (&acc)[Shape::kLanes], float* scores) {
#pragma GCC unroll 4
    for (int v = 0; v < Shape::kVectors; ++v) {
        F32 sums[kWidth];
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) sums[i] = acc[v * kWidth + i];
        store(scores + v * kWidth, transpose_sum(sums));
    }
}

// The last vectors' scores where they are not full: no rows are read far beyond the tokens.
template <class Shape, class T, class Q>
inline void score_tail(const T* k, int head_dim, int tokens, const Q* q, int q_stride,
                       Prefetch& ahead, float* scores) {
    constexpr int kHeads = Shape::kHeads;
    F32 acc[Shape::kLanes];
#pragma GCC unroll 32
    for (int i = 0; i < Shape::kLanes; ++i) acc[i] = zero();
    for (int token = 0; token < tokens; token += kTailTokens) {
        F32 part[kHeads * kTailTokens];
        score_rows<kHeads, kTailTokens>(k + int64_t(token) * head_dim, head_dim, q, q_stride, ahead,
                                        part);
        for (int h = 0; h < kHeads; ++h) {
            for (int t = 0; t < kTailTokens; ++t) {
                acc[h * Shape::kTokens + token + t] = part[h * kTailTokens + t];
            }
        }
    }
    store_scores<Shape>(acc, scores);
}

// scores = q * k for `tokens` tokens, rounded up to whole vectors: the surplus reads up to
// three rows of the block that hold no tokens yet, and what it writes means nothing. Q: float, or
// what else there is a score_rows() for.
template <class Shape, class T, class Q>
inline void score_tokens(const T* k, int head_dim, int tokens, const Q* q, int q_stride,
                         Prefetch ahead, float* scores) {
    for (int token = 0; token < tokens; token += Shape::kTokens) {
        const T* rows = k + int64_t(token) * head_dim;
        if constexpr (Shape::kTokens > kTailTokens) {
            if (tokens - token < Shape::kTokens) {
                return score_tail<Shape>(rows, head_dim, tokens - token, q, q_stride, ahead,
                                         scores);
            }
        }
        F32 acc[Shape::kHeads * Shape::kTokens];
        score_rows<Shape::kHeads, Shape::kTokens>(rows, head_dim, q, q_stride, ahead, acc);
        F32 padded[Shape::kLanes];
#pragma GCC unroll 32
        for (int i = 0; i < Shape::kLanes; ++i) {
            padded[i] = i < Shape::kHeads * Shape::kTokens ? acc[i] : zero();
        }
        store_scores<Shape>(padded, scores);
        scores += Shape::kLanes;
    }
}

// values[h] = values[h] * rescale[h] + sum over tokens of weight[h][t] * v[t],
// for `Pairs` vector pairs of the head dimension. `v` and `values` point at the
// first of them.
template <class Shape, int Pairs, bool Partial, class T>
inline void add_value_pairs(const T* v, int head_dim, int n, int tokens, const float* weights,
                            const float* rescale, Prefetch& ahead, float* values, int stride) {
    constexpr int kHeads = Shape::kHeads;
    F32 acc[kHeads][2 * Pairs];
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
        const F32 factor = set1(rescale[h * Shape::kHeadStride]);
#pragma GCC unroll 8
        for (int i = 0; i < 2 * Pairs; ++i) {
            acc[h][i] = mul(load(values + h * stride + i * kWidth), factor);
        }
    }
    for (int t = 0; t < tokens; ++t) {
        const T* row = v + int64_t(t) * head_dim;
        const float* weight = weights + Shape::index(t);
        ahead.step();
        F32 x[2 * Pairs];
#pragma GCC unroll 4
        for (int p = 0; p < Pairs; ++p) {
            if constexpr (Partial) {
                load_pair_partial(row, n, x[0], x[1]);
            } else {
                load_pair(row + p * kPair, x[2 * p], x[2 * p + 1]);
            }
        }
#pragma GCC unroll 8
        for (int h = 0; h < kHeads; ++h) {
            const F32 w = set1(weight[h * Shape::kHeadStride]);
#pragma GCC unroll 8
            for (int i = 0; i < 2 * Pairs; ++i) acc[h][i] = fma(w, x[i], acc[h][i]);
        }
    }
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 8
        for (int i = 0; i < 2 * Pairs; ++i) store(values + h * stride + i * kWidth, acc[h][i]);
    }
}

template <class Shape, class T>
inline void add_values(const T* v, int head_dim, int tokens, const float* weights,
                       const float* rescale, Prefetch ahead, float* values, int stride) {
    constexpr int kPairs = Shape::kPairs;
    int d = 0;
    for (; d + kPairs * kPair <= head_dim; d += kPairs * kPair) {
        add_value_pairs<Shape, kPairs, false>(v + d, head_dim, 0, tokens, weights, rescale, ahead,
                                              values + d, stride);
    }
    for (; d + kPair <= head_dim; d += kPair) {
        add_value_pairs<Shape, 1, false>(v + d, head_dim, 0, tokens, weights, rescale, ahead,
                                         values + d, stride);
    }
    if (d < head_dim) {
        add_value_pairs<Shape, 1, true>(v + d, head_dim, head_dim - d, tokens, weights, rescale,
                                        ahead, values + d, stride);
    }
}

}  // namespace swiftapex::SWIFTAPEX_ISA
