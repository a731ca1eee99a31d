// The interface of scalar.h in AVX-512 (F, BW, DQ, VL).
#pragma once

// GCC 12 warns about the undefined operands inside its own intrinsics.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include "kernels_cpu/simd/types.h"

namespace swiftapex::SWIFTAPEX_ISA {

using F32 = __m512;
constexpr int kWidth = 16;
constexpr int kRegisters = 32;

inline __m512 widen_half(__m256i x) { return _mm512_cvtph_ps(x); }
inline __m512 widen_bfloat16(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline __m256i narrow_half(__m512 x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }

// To nearest, ties to even; NaN stays NaN.
inline __m256i narrow_bfloat16(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

inline __mmask16 first_lanes(int n) { return __mmask16((1u << n) - 1); }

inline F32 zero() { return _mm512_setzero_ps(); }
inline F32 set1(float x) { return _mm512_set1_ps(x); }

inline F32 load(const float* p) { return _mm512_loadu_ps(p); }
inline F32 load(const Half* p) { return widen_half(_mm256_loadu_si256((const __m256i*)p)); }
inline F32 load(const BFloat16* p) { return widen_bfloat16(_mm256_loadu_si256((const __m256i*)p)); }

inline F32 widen_int8(__m128i x) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)); }
inline F32 load(const Int8* p) { return widen_int8(_mm_loadu_si128((const __m128i*)p)); }

template <int k>
inline F32 repeat(const float* p) {
    static_assert(k == 2 || k == 4 || k == 8 || k == 16);
    if constexpr (k == 16) return load(p);
    if constexpr (k == 8) return _mm512_broadcast_f32x8(_mm256_loadu_ps(p));
    if constexpr (k == 4) return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
    return _mm512_castsi512_ps(_mm512_broadcastq_epi64(_mm_loadl_epi64((const __m128i*)p)));
}

inline F32 load_partial(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline F32 load_partial(const Half* p, int n) {
    return widen_half(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
inline F32 load_partial(const BFloat16* p, int n) {
    return widen_bfloat16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}

inline F32 load_partial(const Int8* p, int n) {
    return widen_int8(_mm_maskz_loadu_epi8(first_lanes(n), p));
}

inline void store(float* p, F32 x) { _mm512_storeu_ps(p, x); }
inline void store(Half* p, F32 x) { _mm256_storeu_si256((__m256i*)p, narrow_half(x)); }
inline void store(BFloat16* p, F32 x) { _mm256_storeu_si256((__m256i*)p, narrow_bfloat16(x)); }

inline void store_partial(float* p, int n, F32 x) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
inline void store_partial(Half* p, int n, F32 x) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_half(x));
}
inline void store_partial(BFloat16* p, int n, F32 x) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bfloat16(x));
}

// bfloat16 pairs hold the even elements, then the odd ones: one operation each, no shuffles.
inline void split_bits(__m512i x, F32& even, F32& odd) {
    even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int(0xFFFF0000u))));
}

template <class T>
inline void load_pair(const T* p, F32& a, F32& b) {
    a = load(p);
    b = load(p + kWidth);
}
inline void load_pair(const BFloat16* p, F32& a, F32& b) {
    split_bits(_mm512_loadu_si512(p), a, b);
}

template <class T>
inline void load_pair_partial(const T* p, int n, F32& a, F32& b) {
    a = load_partial(p, n < kWidth ? n : kWidth);
    b = load_partial(p + kWidth, n < kWidth ? 0 : n - kWidth);
}
inline void load_pair_partial(const BFloat16* p, int n, F32& a, F32& b) {
    split_bits(_mm512_maskz_loadu_epi16(__mmask32((uint64_t{1} << n) - 1), p), a, b);
}

template <class T>
inline void split_pair(F32&, F32&) {}
template <>
inline void split_pair<BFloat16>(F32& a, F32& b) {
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const F32 first = a;
    a = _mm512_permutex2var_ps(first, even, b);
    b = _mm512_permutex2var_ps(first, odd, b);
}

template <class T>
inline void join_pair(F32&, F32&) {}
template <>
inline void join_pair<BFloat16>(F32& a, F32& b) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const F32 even = a;
    a = _mm512_permutex2var_ps(even, low, b);
    b = _mm512_permutex2var_ps(even, high, b);
}

inline F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
inline F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
inline F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
inline F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
inline F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
inline F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }

template <int k>
inline F32 swap_lanes(F32 x) {
    static_assert(k == 1 || k == 2 || k == 4 || k == 8);
    if constexpr (k == 1) return _mm512_permute_ps(x, 0xB1);
    if constexpr (k == 2) return _mm512_permute_ps(x, 0x4E);
    if constexpr (k == 4) return _mm512_shuffle_f32x4(x, x, 0xB1);
    return _mm512_shuffle_f32x4(x, x, 0x4E);
}

inline float reduce_add(F32 x) {
    x = add(x, swap_lanes<8>(x));
    x = add(x, swap_lanes<4>(x));
    x = add(x, swap_lanes<2>(x));
    return _mm512_cvtss_f32(add(x, swap_lanes<1>(x)));
}
inline float reduce_max(F32 x) {
    x = max(x, swap_lanes<8>(x));
    x = max(x, swap_lanes<4>(x));
    x = max(x, swap_lanes<2>(x));
    return _mm512_cvtss_f32(max(x, swap_lanes<1>(x)));
}

// Within 128-bit lanes: lane j of each quarter takes the quarter's sum of x[j].
inline __m512 quarter_sums(F32 x0, F32 x1, F32 x2, F32 x3) {
    const F32 a = add(_mm512_unpacklo_ps(x0, x1), _mm512_unpackhi_ps(x0, x1));
    const F32 b = add(_mm512_unpacklo_ps(x2, x3), _mm512_unpackhi_ps(x2, x3));
    return add(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
}
inline F32 transpose_sum(const F32 (&x)[kWidth]) {
    const F32 a = quarter_sums(x[0], x[1], x[2], x[3]);
    const F32 b = quarter_sums(x[4], x[5], x[6], x[7]);
    const F32 c = quarter_sums(x[8], x[9], x[10], x[11]);
    const F32 d = quarter_sums(x[12], x[13], x[14], x[15]);
    const F32 ab = add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    const F32 cd = add(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xDD));
    return add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
}

inline F32 exp2(F32 x) {
    const __mmask16 normal = _mm512_cmp_ps_mask(x, set1(-126.0f), _CMP_NLT_UQ);
    x = _mm512_min_ps(set1(127.0f), max(set1(-127.0f), x));
    const F32 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F32 f = sub(x, n);
    F32 p = set1(0.00132764704f);
    p = fma(p, f, set1(0.00967554162f));
    p = fma(p, f, set1(0.0555071328f));
    p = fma(p, f, set1(0.240221197f));
    p = fma(p, f, set1(0.693146967f));
    p = fma(p, f, set1(1.00000007f));
    return _mm512_maskz_scalef_ps(normal, p, n);  // no subnormal results: their users would be slow
}

// In assembly: GCC removes loops that do nothing but prefetch through its builtin.
inline void prefetch(const void* p) {
    __asm__ volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(p)));
}
inline void prefetch_far(const void* p) {
    __asm__ volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(p)));
}

}  // namespace swiftapex::SWIFTAPEX_ISA
