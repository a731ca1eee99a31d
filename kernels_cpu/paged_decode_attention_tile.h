// The inner loops of paged decode attention. Included by every isa/<name>.cpp.
//
// A tile is one K plane and one V plane [tokens, head_dim] with `Heads` query
// heads of the group that shares them, so K and V are read from memory and
// converted once for these heads.
#pragma once

#include SWIFTAPEX_SIMD

namespace swiftapex::SWIFTAPEX_ISA {

constexpr int kPair = 2 * kWidth;
constexpr float kInfinity = __builtin_inff();

// How the scores of a tile lie in memory: in vectors of kTokens tokens times
// kPadded heads.
template <int Heads, bool HeadsInside>
struct TileShape {
    static constexpr int kHeads = Heads;
    // With four lanes a vector is one head's; wider ones are shared, padded to a
    // power of two.
    static constexpr int kPadded = kWidth == 4 || Heads <= 2 ? Heads : Heads <= 4 ? 4 : 8;
    static constexpr int kTokens = kWidth == 4 ? 4 : kWidth / kPadded;
    static constexpr int kVectors = kPadded * kTokens / kWidth;
    static constexpr int kLanes = kVectors * kWidth;
    static constexpr int kHeadStride = HeadsInside ? 1 : kTokens;
    static constexpr int kTokenStride = HeadsInside ? kPadded : 1;
    // Vector pairs of the output that stay in registers while V is read, for all
    // heads.
    static constexpr int kPairs = kRegisters == 32 ? (Heads <= 2   ? 4
                                                      : Heads <= 4 ? 2
                                                                   : 1)
                                                   : (Heads == 1   ? 4
                                                      : Heads == 2 ? 2
                                                                   : 1);

    // Position of the score of head 0 and a token; that of head h is h *
    // kHeadStride further.
    static int index(int token) {
        return token / kTokens * kLanes + token % kTokens * kTokenStride;
    }
};

// Fetches memory a few lines at a time, spread over the steps of a loop.
//
// `far`: the next tile, from memory into the second-level cache. Its lines are requested from four
// places in turn: a hardware prefetcher follows each of them within its page, and together they
// keep more requests on their way than one core has line buffers for.
// `near`: what is read kNearBytes later, on its way into the first-level cache: the rest of this
// plane, then the beginning of the one that follows. Fetching from memory straight into that cache
// leaves memory idle, for want of line buffers.
struct Prefetch {
    static constexpr int kStreams = 4;
    static constexpr int kGroup = kStreams * 64;  // bytes that are fetched at once
    static constexpr int kNearBytes = 32 * 64;

    struct Near {
        const char *at, *end, *after;  // `after` follows `end`
        int groups;
    };

    const char* far[kStreams];
    int far_groups;  // that are left
    Near near;
    int groups_per_step, steps_per_group;  // one of them is 1
    int wait;                              // steps up to the next group

    static Prefetch over(const char* const (&far)[kStreams], int far_groups, const Near& near,
                         int steps) {
        const int groups = far_groups > near.groups ? far_groups : near.groups;
        if (steps == 0 || groups == 0) return {{}, 0, {}, 0, 0, 0};
        return {{far[0], far[1], far[2], far[3]},    far_groups, near, (groups + steps - 1) / steps,
                steps > groups ? steps / groups : 1, 1};
    }

    [[gnu::always_inline]] void step() {
        if (--wait > 0) return;
        wait = steps_per_group;
        for (int i = 0; i < groups_per_step; ++i) {
            if (far_groups > 0) fetch_far();
            if (near.groups > 0) fetch_near();
        }
    }

    [[gnu::always_inline]] void fetch_far() {
        --far_groups;
        for (int j = 0; j < kStreams; ++j) {
            prefetch_far(far[j]);
            far[j] += 64;
        }
    }

    [[gnu::always_inline]] void fetch_near() {
        --near.groups;
        for (int j = 0; j < kStreams; ++j) prefetch(near.at + j * 64);
        near.at += kGroup;
        if (near.at >= near.end) {
            near.at = near.after;
            near.end = near.after + near.groups * kGroup;
        }
    }
};

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
template <class Shape, class T>
inline void score_tail(const T* k, int head_dim, int tokens, const float* q, int q_stride,
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
// three rows of the block that hold no tokens yet, and what it writes means nothing.
template <class Shape, class T>
inline void score_tokens(const T* k, int head_dim, int tokens, const float* q, int q_stride,
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

// Maximum over the tokens of a vector, in all lanes of the same head.
template <class Shape>
inline F32 max_over_tokens(F32 x) {
    constexpr int kStride = Shape::kTokenStride, kEnd = Shape::kTokens * kStride;
    if constexpr (kStride <= 8 && 8 < kEnd) x = max(x, swap_lanes<8>(x));
    if constexpr (kStride <= 4 && 4 < kEnd) x = max(x, swap_lanes<4>(x));
    if constexpr (kStride <= 2 && 2 < kEnd) x = max(x, swap_lanes<2>(x));
    if constexpr (kStride <= 1 && 1 < kEnd) x = max(x, swap_lanes<1>(x));
    return x;
}

// What K and V of a token are multiplied by: `k` goes into its scores, `v` into its weights.
struct NoScales {
    static constexpr bool kScaled = false;
    template <class Shape>
    F32 scaled_weight(F32 x, int) const {
        return x;
    }
};
struct TokenScales {
    static constexpr bool kScaled = true;
    const float* k;
    const float* v;
    // token: the first one of the vector x.
    template <class Shape>
    F32 scaled_score(F32 x, int token) const {
        return mul(x, repeat<Shape::kTokens>(k + token));
    }
    template <class Shape>
    F32 scaled_weight(F32 x, int token) const {
        return mul(x, repeat<Shape::kTokens>(v + token));
    }
};

// Sets the scores of a tile's last vectors to -infinity, but for those of the first `left` tokens.
template <class Shape>
inline void hide_surplus(float* scores, int left) {
    constexpr float x = kInfinity;
    static constexpr float kLimits[32] = {-x, -x, -x, -x, -x, -x, -x, -x, -x, -x, -x,
                                          -x, -x, -x, -x, -x, x,  x,  x,  x,  x,  x,
                                          x,  x,  x,  x,  x,  x,  x,  x,  x,  x};
    const float* limits = kLimits + 16 - left * Shape::kTokenStride;
    F32 limit;
    if constexpr (Shape::kTokenStride == 1) {
        limit = repeat<Shape::kTokens>(limits);
    } else {
        limit = load(limits);
    }
    for (int i = 0; i < Shape::kLanes; i += kWidth) {
        // Negated, as max() takes the second operand where the first one is NaN.
        const F32 negated = sub(zero(), load(scores + i));
        store(scores + i, sub(zero(), max(negated, limit)));
    }
}

// Turns scores into 2^(score * scale - maximum) with the running maximum.
// `maximum` and `sum` are the state of the heads, one vector of lanes each: the
// maximum is the same in a head's lanes, the sum is spread over them. `rescale`
// gets what earlier sums and values must be multiplied by.
template <class Shape, class Scales>
inline void softmax_tokens(float* scores, int tokens, float scale, Scales scales, float* maximum,
                           float* sum, float* rescale) {
    const F32 factor = set1(scale);
    const int vectors_end = (tokens + Shape::kTokens - 1) / Shape::kTokens * Shape::kLanes;
    const auto token = [](int i) { return i / Shape::kLanes * Shape::kTokens; };
    if constexpr (Scales::kScaled) {
        for (int i = 0; i < vectors_end; i += kWidth) {
            store(scores + i, scales.template scaled_score<Shape>(load(scores + i), token(i)));
        }
    }
    if (tokens % Shape::kTokens != 0) {
        float* last = scores + vectors_end - Shape::kLanes;
        hide_surplus<Shape>(last, tokens % Shape::kTokens);
    }
    for (int v = 0; v < Shape::kLanes; v += kWidth) {
        F32 highest = load(scores + v);
        for (int i = v + Shape::kLanes; i < vectors_end; i += Shape::kLanes) {
            highest = max(highest, load(scores + i));
        }
        const F32 before = load(maximum + v);
        const F32 now = max(before, mul(max_over_tokens<Shape>(highest), factor));
        const F32 correction = exp2(sub(before, now));
        const F32 negated = sub(zero(), now);
        F32 total = mul(load(sum + v), correction);
        for (int i = v; i < vectors_end; i += Shape::kLanes) {
            const F32 weight = exp2(fma(load(scores + i), factor, negated));
            store(scores + i, scales.template scaled_weight<Shape>(weight, token(i)));
            total = add(total, weight);
        }
        store(maximum + v, now);
        store(sum + v, total);
        store(rescale + v, correction);
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
