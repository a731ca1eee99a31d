// The interface of scalar.h in AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>
#include <string.h>

#include "kernels_cpu/simd/types.h"

namespace swiftapex::SWIFTAPEX_ISA {

using F32 = __m256;
constexpr int kWidth = 8;
constexpr int kRegisters = 16;

inline __m256 widen_half(__m128i x) { return _mm256_cvtph_ps(x); }
inline __m256 widen_bfloat16(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline __m128i narrow_half(__m256 x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }

// To nearest, ties to even; NaN stays NaN.
inline __m128i narrow_bfloat16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i even = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(even, quiet, nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

inline __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline F32 zero() { return _mm256_setzero_ps(); }
inline F32 set1(float x) { return _mm256_set1_ps(x); }

inline F32 load(const float* p) { return _mm256_loadu_ps(p); }
inline F32 load(const Half* p) { return widen_half(_mm_loadu_si128((const __m128i*)p)); }
inline F32 load(const BFloat16* p) { return widen_bfloat16(_mm_loadu_si128((const __m128i*)p)); }

inline F32 load(const Int8* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}

template <int k>
inline F32 repeat(const float* p) {
    static_assert(k == 2 || k == 4 || k == 8);
    if constexpr (k == 8) return load(p);
    if constexpr (k == 4) return _mm256_broadcast_ps((const __m128*)p);
    return _mm256_castpd_ps(_mm256_broadcast_sd((const double*)p));
}

// There are no masked loads of 16-bit elements: a partial one goes through the stack.
inline __m128i first_16bit(const void* p, int n) {
    __m128i x = _mm_setzero_si128();
    memcpy(&x, p, size_t(n) * 2);
    return x;
}
inline F32 load_partial(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
inline F32 load_partial(const Half* p, int n) {
    return n == kWidth ? load(p) : widen_half(first_16bit(p, n));
}
inline F32 load_partial(const BFloat16* p, int n) {
    return n == kWidth ? load(p) : widen_bfloat16(first_16bit(p, n));
}

inline F32 load_partial(const Int8* p, int n) {
    Int8 lanes[kWidth] = {};
    memcpy(lanes, p, size_t(n));
    return load(lanes);
}

inline void store(float* p, F32 x) { _mm256_storeu_ps(p, x); }
inline void store(Half* p, F32 x) { _mm_storeu_si128((__m128i*)p, narrow_half(x)); }
inline void store(BFloat16* p, F32 x) { _mm_storeu_si128((__m128i*)p, narrow_bfloat16(x)); }

inline void store_partial(float* p, int n, F32 x) { _mm256_maskstore_ps(p, first_lanes(n), x); }
inline void store_partial(Half* p, int n, F32 x) {
    const __m128i bits = narrow_half(x);
    memcpy(p, &bits, size_t(n) * 2);
}
inline void store_partial(BFloat16* p, int n, F32 x) {
    const __m128i bits = narrow_bfloat16(x);
    memcpy(p, &bits, size_t(n) * 2);
}

// bfloat16 pairs hold the even elements, then the odd ones: one operation each, no shuffles.
inline void split_bits(__m256i x, F32& even, F32& odd) {
    even = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xFFFF0000u))));
}

template <class T>
inline void load_pair(const T* p, F32& a, F32& b) {
    a = load(p);
    b = load(p + kWidth);
}
inline void load_pair(const BFloat16* p, F32& a, F32& b) {
    split_bits(_mm256_loadu_si256((const __m256i*)p), a, b);
}

template <class T>
inline void load_pair_partial(const T* p, int n, F32& a, F32& b) {
    a = load_partial(p, n < kWidth ? n : kWidth);
    b = load_partial(p + kWidth, n < kWidth ? 0 : n - kWidth);
}
inline void load_pair_partial(const BFloat16* p, int n, F32& a, F32& b) {
    const __m128i low = n < kWidth ? first_16bit(p, n) : _mm_loadu_si128((const __m128i*)p);
    const __m128i high = n > kWidth ? first_16bit(p + kWidth, n - kWidth) : _mm_setzero_si128();
    split_bits(_mm256_set_m128i(high, low), a, b);
}

template <class T>
inline void split_pair(F32&, F32&) {}
template <>
inline void split_pair<BFloat16>(F32& a, F32& b) {
    const __m256 even = _mm256_shuffle_ps(a, b, 0x88);  // 64-bit parts: a.low b.low a.high b.high
    const __m256 odd = _mm256_shuffle_ps(a, b, 0xDD);
    a = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(even), 0xD8));
    b = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(odd), 0xD8));
}

template <class T>
inline void join_pair(F32&, F32&) {}
template <>
inline void join_pair<BFloat16>(F32& a, F32& b) {
    const __m256 low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
    a = _mm256_permute2f128_ps(low, high, 0x20);
    b = _mm256_permute2f128_ps(low, high, 0x31);
}

inline F32 add(F32 a, F32 b) { return _mm256_add_ps(a, b); }
inline F32 sub(F32 a, F32 b) { return _mm256_sub_ps(a, b); }
inline F32 mul(F32 a, F32 b) { return _mm256_mul_ps(a, b); }
inline F32 div(F32 a, F32 b) { return _mm256_div_ps(a, b); }
inline F32 max(F32 a, F32 b) { return _mm256_max_ps(a, b); }
inline F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }

template <int k>
inline F32 swap_lanes(F32 x) {
    static_assert(k == 1 || k == 2 || k == 4);
    if constexpr (k == 1) return _mm256_permute_ps(x, 0xB1);
    if constexpr (k == 2) return _mm256_permute_ps(x, 0x4E);
    return _mm256_permute2f128_ps(x, x, 0x01);
}

inline float reduce_add(F32 x) {
    x = add(x, swap_lanes<4>(x));
    x = add(x, swap_lanes<2>(x));
    return _mm256_cvtss_f32(add(x, swap_lanes<1>(x)));
}
inline float reduce_max(F32 x) {
    x = max(x, swap_lanes<4>(x));
    x = max(x, swap_lanes<2>(x));
    return _mm256_cvtss_f32(max(x, swap_lanes<1>(x)));
}

// Within 128-bit lanes: lane j of each half takes the half's sum of x[j].
inline F32 half_sums(F32 x0, F32 x1, F32 x2, F32 x3) {
    const F32 a = add(_mm256_unpacklo_ps(x0, x1), _mm256_unpackhi_ps(x0, x1));
    const F32 b = add(_mm256_unpacklo_ps(x2, x3), _mm256_unpackhi_ps(x2, x3));
    return add(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xEE));
}
inline F32 transpose_sum(const F32 (&x)[kWidth]) {
    const F32 a = half_sums(x[0], x[1], x[2], x[3]);
    const F32 b = half_sums(x[4], x[5], x[6], x[7]);
    return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

inline F32 exp2(F32 x) {
    x = _mm256_min_ps(set1(127.0f), max(set1(-127.0f), x));
    const F32 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F32 f = sub(x, n);
    F32 p = set1(0.00132764704f);
    p = fma(p, f, set1(0.00967554162f));
    p = fma(p, f, set1(0.0555071328f));
    p = fma(p, f, set1(0.240221197f));
    p = fma(p, f, set1(0.693146967f));
    p = fma(p, f, set1(1.00000007f));
    // n = -127 makes the exponent bits zero, so the result is zero too.
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return mul(p, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
}

// In assembly: GCC removes loops that do nothing but prefetch through its builtin.
inline void prefetch(const void* p) {
    __asm__ volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(p)));
}
inline void prefetch_far(const void* p) {
    __asm__ volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(p)));
}

}  // namespace swiftapex::SWIFTAPEX_ISA
