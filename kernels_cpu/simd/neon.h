// The interface of scalar.h in the baseline of 64-bit Arm.
#pragma once

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "kernels_cpu/simd/types.h"

namespace swiftapex::SWIFTAPEX_ISA {

using F32 = float32x4_t;
constexpr int kWidth = 4;
constexpr int kRegisters = 32;

inline F32 zero() { return vdupq_n_f32(0.0f); }
inline F32 set1(float x) { return vdupq_n_f32(x); }

inline F32 widen(const Half*, uint16x4_t x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
inline F32 widen(const BFloat16*, uint16x4_t x) {
    return vreinterpretq_f32_u32(vshll_n_u16(x, 16));
}
inline uint16x4_t narrow(const Half*, F32 x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }

// To nearest, ties to even; NaN stays NaN.
inline uint16x4_t narrow(const BFloat16*, F32 x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
}

inline F32 load(const float* p) { return vld1q_f32(p); }
template <class T>
inline F32 load(const T* p) {
    return widen(p, vld1_u16(&p->bits));
}
inline F32 load(const Int8* p) {
    int32_t bytes;
    memcpy(&bytes, p, 4);
    const int8x8_t x = vreinterpret_s8_s32(vdup_n_s32(bytes));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(x))));
}
template <int k>
inline F32 repeat(const float* p) {
    static_assert(k == 4);
    return load(p);
}
inline void store(float* p, F32 x) { vst1q_f32(p, x); }
template <class T>
inline void store(T* p, F32 x) {
    vst1_u16(&p->bits, narrow(p, x));
}

template <class T>
inline F32 load_partial(const T* p, int n) {
    T lanes[kWidth] = {};
    memcpy(lanes, p, size_t(n) * sizeof(T));
    return load(lanes);
}
template <class T>
inline void store_partial(T* p, int n, F32 x) {
    T lanes[kWidth];
    store(lanes, x);
    memcpy(p, lanes, size_t(n) * sizeof(T));
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

inline F32 add(F32 a, F32 b) { return vaddq_f32(a, b); }
inline F32 sub(F32 a, F32 b) { return vsubq_f32(a, b); }
inline F32 mul(F32 a, F32 b) { return vmulq_f32(a, b); }
inline F32 div(F32 a, F32 b) { return vdivq_f32(a, b); }
inline F32 max(F32 a, F32 b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline F32 fma(F32 a, F32 b, F32 c) { return vfmaq_f32(c, a, b); }

inline float reduce_add(F32 x) { return vaddvq_f32(x); }
inline float reduce_max(F32 x) { return vmaxvq_f32(x); }

template <int k>
inline F32 swap_lanes(F32 x) {
    static_assert(k == 1 || k == 2);
    if constexpr (k == 1) return vrev64q_f32(x);
    return vextq_f32(x, x, 2);
}

inline F32 transpose_sum(const F32 (&x)[kWidth]) {
    return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3]));
}

inline F32 exp2(F32 x) {
    x = vminq_f32(vmaxq_f32(x, set1(-127.0f)), set1(127.0f));
    const F32 n = vrndnq_f32(x), f = sub(x, n);
    F32 p = set1(0.00132764704f);
    p = fma(p, f, set1(0.00967554162f));
    p = fma(p, f, set1(0.0555071328f));
    p = fma(p, f, set1(0.240221197f));
    p = fma(p, f, set1(0.693146967f));
    p = fma(p, f, set1(1.00000007f));
    const int32x4_t biased = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
    return mul(p, vreinterpretq_f32_s32(vshlq_n_s32(biased, 23)));
}

// In assembly: GCC removes loops that do nothing but prefetch through its builtin.
inline void prefetch(const void* p) { __asm__ volatile("prfm pldl1keep, [%0]" : : "r"(p)); }
inline void prefetch_far(const void* p) { __asm__ volatile("prfm pldl2keep, [%0]" : : "r"(p)); }

}  // namespace swiftapex::SWIFTAPEX_ISA
