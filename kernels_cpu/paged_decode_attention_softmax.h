// The scores of paged decode attention: how they lie in memory, and their softmax. Included by
// every isa/<name>.cpp.
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

}  // namespace swiftapex::SWIFTAPEX_ISA
