// Helpers that the kernels of every instruction set use, over its vector traits.
#pragma once

#include "kernels_cpu/kernel_table.h"
#include SWIFTAPEX_SIMD

namespace swiftapex::SWIFTAPEX_ISA {

struct Range {
    int64_t begin, end;
};

// The part of [0, total) that one thread works on: whole units, the last one possibly shorter,
// and no thread has more than one unit more than another.
inline Range share(int64_t total, int64_t unit, int thread, int num_threads) {
    const int64_t units = (total + unit - 1) / unit;
    const int64_t begin = units * thread / num_threads * unit;
    const int64_t end = units * (thread + 1) / num_threads * unit;
    return {begin < total ? begin : total, end < total ? end : total};
}

// x as it reads back after being stored as T.
template <class T>
inline F32 rounded(F32 x) {
    T lanes[kWidth];
    store(lanes, x);
    return load(lanes);
}
template <>
inline F32 rounded<float>(F32 x) {
    return x;
}

// Calls body(i, lanes) for i = 0, kWidth, ... below n; lanes is kWidth but at the end.
template <class Body>
inline void for_vectors(int64_t n, Body body) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) body(i, kWidth);
    if (i < n) body(i, int(n - i));
}

// With n == kWidth known to the compiler these are plain loads and stores.
template <class T>
inline F32 load_lanes(const T* p, int n) {
    return n == kWidth ? load(p) : load_partial(p, n);
}
template <class T>
inline void store_lanes(T* p, int n, F32 x) {
    n == kWidth ? store(p, x) : store_partial(p, n, x);
}

}  // namespace swiftapex::SWIFTAPEX_ISA
