// Vectors of float32 for any CPU: four lanes through the compiler's vector extension, conversions
// in integer arithmetic. It is also the description of the interface that every instruction set
// offers, in the namespace named by SWIFTAPEX_ISA, which the including file defines:
//
//   F32, kWidth, kRegisters        a vector, its lanes, how many of them the CPU can name
//   zero, set1, load, store        T is float, Half or BFloat16; no alignment is required
//                                  Int8 can be loaded, not stored
//   repeat<k>                      the first k floats at an address, over and over
//   load_partial, store_partial    the first n of kWidth elements; the other lanes read as zero
//   load_pair, load_pair_partial   2 * kWidth elements in T's cheapest order: which lane holds
//   which split_pair<T>, join_pair<T>    element is only known to split_pair (natural to T's order)
//   and
//                                  join_pair (back), so dot products and sums need no shuffles
//   add, sub, mul, div, max, fma   fma(a, b, c) = a * b + c; max(a, b) is b where a or b is NaN
//   reduce_add, reduce_max         over the lanes, always in the same order
//   swap_lanes<k>                  lane i takes lane i ^ k
//   transpose_sum                  lane i takes the sum over the lanes of vector i of kWidth
//   exp2                           relative error 2e-7; 0 below 2^-126, 2^127 at most, exp2(-inf) =
//   0 prefetch                       the 64 bytes at an address, into the first-level cache
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels_cpu/simd/types.h"

namespace swiftapex::SWIFTAPEX_ISA {

typedef float F32 __attribute__((vector_size(16)));
typedef int32_t I32 __attribute__((vector_size(16)));
constexpr int kWidth = 4;
constexpr int kRegisters = 16;

inline float to_float(float x) { return x; }

inline float to_float(BFloat16 x) {
    const uint32_t bits = uint32_t{x.bits} << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

// Shifts exponent and mantissa into place, then multiplies by 2^112 to correct the bias: the
// product is exact, for subnormal values too. Infinity and NaN keep all exponent bits set.
inline float to_float(Half x) {
    uint32_t bits = (x.bits & 0x7FFFu) << 13;
    float y;
    memcpy(&y, &bits, 4);
    y *= 5.192296858534828e33f;  // 2^112
    memcpy(&bits, &y, 4);
    if ((x.bits & 0x7C00u) == 0x7C00u) bits |= 0x7F800000u;
    bits |= (x.bits & 0x8000u) << 16;
    memcpy(&y, &bits, 4);
    return y;
}

inline float to_float(Int8 x) { return float(x.bits); }

// Rounds to nearest, ties to even, as all conversions here do.
inline void from_float(float x, float* out) { *out = x; }

inline void from_float(float x, BFloat16* out) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
        out->bits = uint16_t((bits >> 16) | 0x40u);  // quiet NaN
    } else {
        out->bits = uint16_t((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
    }
}

inline void from_float(float x, Half* out) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    bits &= 0x7FFFFFFFu;
    uint32_t half;
    if (bits > 0x7F800000u) {
        half = 0x7E00u;
    } else if (bits >= 0x477FF000u) {  // 65520 and more round to infinity
        half = 0x7C00u;
    } else if (bits < 0x38800000u) {  // below 2^-14: adding 0.5 puts the rounded bits at the end
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        memcpy(&half, &magnitude, 4);
        half -= 0x3F000000u;
    } else {
        half = (bits - 0x38000000u + 0xFFFu + ((bits >> 13) & 1u)) >> 13;
    }
    out->bits = uint16_t(sign | half);
}

inline F32 zero() { return F32{}; }
inline F32 set1(float x) { return F32{x, x, x, x}; }

inline F32 load(const float* p) {
    F32 x;
    memcpy(&x, p, 16);
    return x;
}
template <class T>
inline F32 load(const T* p) {
    return F32{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}
template <class T>
inline F32 load_partial(const T* p, int n) {
    F32 x{};
    for (int i = 0; i < n; ++i) x[i] = to_float(p[i]);
    return x;
}
template <int k>
inline F32 repeat(const float* p) {
    static_assert(k == 4);
    return load(p);
}
inline void store(float* p, F32 x) { memcpy(p, &x, 16); }
template <class T>
inline void store(T* p, F32 x) {
    for (int i = 0; i < kWidth; ++i) from_float(x[i], p + i);
}
template <class T>
inline void store_partial(T* p, int n, F32 x) {
    for (int i = 0; i < n; ++i) from_float(x[i], p + i);
}

template <class T>
inline void load_pair(const T* p, F32& a, F32& b) {
    a = load(p);
    b = load(p + kWidth);
}
template <class T>
inline void load_pair_partial(const T* p, int n, F32& a, F32& b) {
    a = load_partial(p, n < kWidth ? n : kWidth);
    b = load_partial(p + kWidth, n < kWidth ? 0 : n - kWidth);
}
template <class T>
inline void split_pair(F32&, F32&) {}
template <class T>
inline void join_pair(F32&, F32&) {}

inline F32 add(F32 a, F32 b) { return a + b; }
inline F32 sub(F32 a, F32 b) { return a - b; }
inline F32 mul(F32 a, F32 b) { return a * b; }
inline F32 div(F32 a, F32 b) { return a / b; }
inline F32 max(F32 a, F32 b) { return a > b ? a : b; }
inline F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }

inline float reduce_add(F32 x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline float reduce_max(F32 x) {
    const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
}

template <int k>
inline F32 swap_lanes(F32 x) {
    static_assert(k == 1 || k == 2);
    return F32{x[0 ^ k], x[1 ^ k], x[2 ^ k], x[3 ^ k]};
}

inline F32 transpose_sum(const F32 (&x)[kWidth]) {
    return F32{reduce_add(x[0]), reduce_add(x[1]), reduce_add(x[2]), reduce_add(x[3])};
}

inline F32 exp2(F32 x) {
    const F32 top = set1(127.0f);
    x = max(set1(-127.0f), x > top ? top : x);
    const F32 shifter = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const F32 n = (x + shifter) - shifter, f = x - n;
    F32 p = set1(0.00132764704f);
    p = fma(p, f, set1(0.00967554162f));
    p = fma(p, f, set1(0.0555071328f));
    p = fma(p, f, set1(0.240221197f));
    p = fma(p, f, set1(0.693146967f));
    p = fma(p, f, set1(1.00000007f));
    const I32 exponent = (__builtin_convertvector(n, I32) + 127) << 23;
    F32 scale;
    memcpy(&scale, &exponent, 16);
    return p * scale;
}

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace swiftapex::SWIFTAPEX_ISA
