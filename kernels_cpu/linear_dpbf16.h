// linear for bfloat16 with AVX512-BF16: two products per lane and instruction, no widening. The
// instruction flushes subnormal inputs and results to zero.
#pragma once

#include "kernels_cpu/linear.h"

namespace swiftapex::SWIFTAPEX_ISA {

struct DpBf16Dot {
    using Weight = BFloat16;
    using Packed = BFloat16;
    using Lanes = __m512bh;
    static constexpr int kStep = 2 * kWidth;  // elements of k
    static Lanes load_weight(const BFloat16* w) { return (__m512bh)_mm512_loadu_si512(w); }
    static Lanes load_weight(const BFloat16* w, int n) {
        return (__m512bh)_mm512_maskz_loadu_epi16((__mmask32(1) << n) - 1, w);
    }
    static F32 dot(Lanes w, const BFloat16* x, F32 sum) {
        return _mm512_dpbf16_ps(sum, w, load_weight(x));
    }
    static void pack(const BFloat16* x, int n, BFloat16* packed) {
        const Lanes lanes = n == kStep ? load_weight(x) : load_weight(x, n);
        _mm512_storeu_si512(packed, (__m512i)lanes);
    }
};

// One or two rows leave the memory as the bottleneck whichever way they are computed: there the
// exact products of the float32 kernel cost nothing.
inline void linear_bfloat16(const LinearArgs& args, void* scratch, int thread, int num_threads) {
    if (args.n <= 2) {
        linear<FmaDot<BFloat16>>(args, scratch, thread, num_threads);
    } else {
        linear<DpBf16Dot>(args, scratch, thread, num_threads);
    }
}

}  // namespace swiftapex::SWIFTAPEX_ISA
