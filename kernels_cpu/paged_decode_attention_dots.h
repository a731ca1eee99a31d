// Attention to bfloat16 KV with AVX512-BF16. Logits by dot products where the activations are
// bfloat16 too: q is exact then, K is multiplied as it lies in memory, and the scale, which would
// round q, is left to the softmax. A single query head keeps its multiply-adds, which read memory
// faster there.
//
// Loops over a plane are functions of their own here: inlined into one, they take registers from
// each other.
#pragma once

#include "kernels_cpu/paged_decode_attention_heads.h"

namespace swiftapex::SWIFTAPEX_ISA {

// bfloat16 terms that hold q of such activations, in tile products to 16 bits.
template <class A>
constexpr int kQueryTerms = 2;
template <>
constexpr int kQueryTerms<BFloat16> = 1;

// 32 elements, zero from n on.
inline __m512bh load_bfloat16(const BFloat16* x) { return (__m512bh)_mm512_loadu_si512(x); }
inline __m512bh load_bfloat16(const BFloat16* x, int n) {
    return (__m512bh)_mm512_maskz_loadu_epi16(__mmask32((uint64_t{1} << n) - 1), x);
}

// acc[h][t] += q[h] * k[t] for 32 elements and kTokens tokens.
template <int kHeads, int kTokens, bool Partial>
[[gnu::always_inline]] inline void dot_pair(const BFloat16* k, int64_t head_dim, int n,
                                            const BFloat16* q, F32 (&acc)[kHeads * kTokens]) {
    __m512bh rows[kTokens];
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
        if constexpr (Partial) {
            rows[t] = load_bfloat16(k + t * head_dim, n);
        } else {
            rows[t] = load_bfloat16(k + t * head_dim);
        }
    }
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
        const __m512bh query = load_bfloat16(q + h * kPair);
#pragma GCC unroll 16
        for (int t = 0; t < kTokens; ++t) {
            F32& sum = acc[h * kTokens + t];
            sum = _mm512_dpbf16_ps(sum, rows[t], query);
        }
    }
}

// score_rows() of queries in bfloat16, [pair][head][kPair]: one address serves all heads.
template <int kHeads, int kTokens>
[[gnu::always_inline]] inline void score_rows(const BFloat16* k, int head_dim, const BFloat16* q,
                                              int, Prefetch& ahead, F32 (&acc)[kHeads * kTokens]) {
    const int whole = head_dim / kPair * kPair;
#pragma GCC unroll 32
    for (int i = 0; i < kHeads * kTokens; ++i) acc[i] = zero();
    for (int d = 0; d < whole; d += kPair) {
        ahead.step();
        dot_pair<kHeads, kTokens, false>(k + d, head_dim, 0, q + d * kHeads, acc);
    }
    if (whole < head_dim) {
        dot_pair<kHeads, kTokens, true>(k + whole, head_dim, head_dim - whole, q + whole * kHeads,
                                        acc);
    }
}

// From two query heads of a tile on; one takes multiply-adds.
struct DotScores : FmaScores<BFloat16> {
    using Fma = FmaScores<BFloat16>;
    template <int Heads, class A>
    static constexpr bool kUseDots = Heads >= 2 && kQueryTerms<A> == 1;

    template <int Heads, class A>
    static float remaining_scale(float scale) {
        return kUseDots<Heads, A> ? scale : 1.0f;
    }

    // rows with dot products: [pair][head][kPair] of bfloat16, zero past the end.
    template <int Heads, class A>
    static void read_queries(const A* q, int head_dim, float scale, float* rows) {
        if constexpr (kUseDots<Heads, A>) {
            auto* packed = reinterpret_cast<BFloat16*>(rows);
            for (int d = 0; d < head_dim; d += kPair) {
                const int n = head_dim - d < kPair ? head_dim - d : kPair;
                for (int h = 0; h < Heads; ++h, packed += kPair) {
                    _mm512_storeu_si512(packed, (__m512i)load_bfloat16(q + h * head_dim + d, n));
                }
            }
        } else {
            Fma::read_queries<Heads>(q, head_dim, scale, rows);
        }
    }

    template <int Heads, class A>
    static void score(const BFloat16* k, int head_dim, int tokens, const float* rows,
                      Prefetch ahead, float* scores) {
        if constexpr (kUseDots<Heads, A>) {
            score_dots<Heads>(k, head_dim, tokens, reinterpret_cast<const BFloat16*>(rows), ahead,
                              scores);
        } else {
            Fma::score<Heads, A>(k, head_dim, tokens, rows, ahead, scores);
        }
    }

    template <int Heads>
    [[gnu::noinline]] static void score_dots(const BFloat16* k, int head_dim, int tokens,
                                             const BFloat16* q, Prefetch ahead, float* scores) {
        score_tokens<Shape<Heads>>(k, head_dim, tokens, q, 0, ahead, scores);
    }
};

#ifndef __AMX_BF16__
template <>
struct Scores<BFloat16> : DotScores {};

// add_value_pairs, as a function of its own.
template <class Shape, int Pairs, bool Partial>
[[gnu::noinline, gnu::flatten]] inline void add_value_pairs_apart(
    const BFloat16* v, int head_dim, int n, int tokens, const float* weights, const float* rescale,
    Prefetch& ahead, float* values, int stride) {
    if constexpr (Pairs > 1) {  // few heads, whose loop is short: the prefetch stays in registers
        Prefetch copy = ahead;
        add_value_pairs<Shape, Pairs, Partial>(v, head_dim, n, tokens, weights, rescale, copy,
                                               values, stride);
        ahead = copy;
    } else {
        add_value_pairs<Shape, Pairs, Partial>(v, head_dim, n, tokens, weights, rescale, ahead,
                                               values, stride);
    }
}

template <>
struct Values<BFloat16> : FmaValues<BFloat16> {
    template <int Heads>
    static void add(const BFloat16* v, int head_dim, int tokens, float* weights,
                    const float* rescale, Prefetch ahead, float* values, int stride) {
        if constexpr (Heads == 1) {
            FmaValues::add<Heads>(v, head_dim, tokens, weights, rescale, ahead, values, stride);
        } else {
            add_apart<Shape<Heads>>(v, head_dim, tokens, weights, rescale, ahead, values, stride);
        }
    }

    template <class Tile>
    static void add_apart(const BFloat16* v, int head_dim, int tokens, const float* weights,
                          const float* rescale, Prefetch ahead, float* values, int stride) {
        constexpr int kPairs = Tile::kPairs;
        int d = 0;
        for (; d + kPairs * kPair <= head_dim; d += kPairs * kPair) {
            add_value_pairs_apart<Tile, kPairs, false>(v + d, head_dim, 0, tokens, weights, rescale,
                                                       ahead, values + d, stride);
        }
        for (; d + kPair <= head_dim; d += kPair) {
            add_value_pairs_apart<Tile, 1, false>(v + d, head_dim, 0, tokens, weights, rescale,
                                                  ahead, values + d, stride);
        }
        if (d < head_dim) {
            add_value_pairs_apart<Tile, 1, true>(v + d, head_dim, head_dim - d, tokens, weights,
                                                 rescale, ahead, values + d, stride);
        }
    }
};
#endif

}  // namespace swiftapex::SWIFTAPEX_ISA
