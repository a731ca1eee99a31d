// The first index of each row's largest element.
#pragma once

#include "kernels_cpu/share.h"

namespace swiftapex::SWIFTAPEX_ISA {

constexpr int64_t kArgmaxBlock = 512;  // elements that are searched once their maximum is known

// Calls body(value, i) for elements in order until it returns true.
template <class T, class Body>
inline bool any_element(const T* x, int64_t n, Body body) {
    for (int64_t i = 0; i < n; i += kWidth) {
        const int lanes = n - i < kWidth ? int(n - i) : kWidth;
        float values[kWidth];
        store(values, load_lanes(x + i, lanes));
        for (int j = 0; j < lanes; ++j) {
            if (body(values[j], i + j)) return true;
        }
    }
    return false;
}

// The largest of n elements, NaN left out. `poison` becomes NaN for good once an element is NaN or
// infinite: that product with zero is NaN.
template <class T>
inline float largest(const T* x, int64_t n, F32& poison) {
    constexpr int kChains = 4;  // independent maxima hide the latency of each
    F32 highest[kChains], spoiled[kChains];
    for (int c = 0; c < kChains; ++c) highest[c] = set1(-__builtin_inff()), spoiled[c] = zero();
    int64_t i = 0;
    for (; i + kChains * kWidth <= n; i += kChains * kWidth) {
        for (int c = 0; c < kChains; ++c) {
            const F32 v = load(x + i + c * kWidth);
            highest[c] = max(v, highest[c]);
            spoiled[c] = fma(v, zero(), spoiled[c]);
        }
    }
    for (; i < n; i += kWidth) {
        float lanes[kWidth];
        store(lanes, load_lanes(x + i, n - i < kWidth ? int(n - i) : kWidth));
        for (int64_t j = n - i; j < kWidth; ++j) lanes[j] = lanes[0];
        highest[0] = max(load(lanes), highest[0]);
        spoiled[0] = fma(load(lanes), zero(), spoiled[0]);
    }
    for (int c = 0; c < kChains; ++c) poison = add(poison, spoiled[c]);
    return reduce_max(max(max(highest[0], highest[1]), max(highest[2], highest[3])));
}

// A row is invalid, and its index 0, if its largest element is NaN or infinite; one NaN is enough.
template <class T>
inline void argmax(const ArgmaxArgs& args, int thread, int num_threads) {
    const Range rows = share(args.n, 1, thread, num_threads);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
        F32 poison = zero();
        float highest = -__builtin_inff();
        int64_t begin = 0;  // of the first block that holds the largest element
        for (int64_t i = 0; i < args.dim; i += kArgmaxBlock) {
            const int64_t n = args.dim - i < kArgmaxBlock ? args.dim - i : kArgmaxBlock;
            const float candidate = largest(x + i, n, poison);
            if (candidate > highest) highest = candidate, begin = i;
        }
        bool valid = __builtin_isfinite(highest);
        const float sum = reduce_add(poison);
        if (valid && sum != sum) {  // NaN, or -inf, which the largest element may have beside it
            valid = !any_element(x, args.dim, [](float value, int64_t) { return value != value; });
        }
        int64_t index = 0;
        if (valid) {
            any_element(x + begin, args.dim - begin, [&](float value, int64_t i) {
                index = begin + i;
                return value == highest;
            });
        }
        args.index[row] = index;
        args.invalid[row] = !valid;
    }
}

}  // namespace swiftapex::SWIFTAPEX_ISA
