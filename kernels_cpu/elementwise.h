// Normalisation, rotation and activation. Arithmetic is in float32; where a model's own code would
// have stored an intermediate result, it is rounded to T at the same place.
#pragma once

#include "kernels_cpu/kernel_table.h"
#include "kernels_cpu/share.h"

namespace swiftapex::SWIFTAPEX_ISA {

// Rows of [n, heads, dim], numbered n-major; each thread takes consecutive ones.
template <class T>
inline void rms_norm(const RmsNormArgs& args, int thread, int num_threads) {
    const T* weight = static_cast<const T*>(args.weight);
    const Range rows = share(args.n * args.heads, 1, thread, num_threads);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        const int64_t token = row / args.heads, head = row % args.heads;
        const T* x =
            static_cast<const T*>(args.x) + token * args.x_stride_n + head * args.x_stride_head;
        T* y = static_cast<T*>(args.y) + token * args.y_stride_n + head * args.y_stride_head;
        F32 squares = zero();
        for_vectors(args.dim, [&](int64_t i, int lanes) {
            const F32 v = load_lanes(x + i, lanes);
            squares = fma(v, v, squares);
        });
        const float mean = reduce_add(squares) / float(args.dim);
        const F32 scale = set1(1.0f / __builtin_sqrtf(mean + args.eps));
        for_vectors(args.dim, [&](int64_t i, int lanes) {
            const F32 normed = rounded<T>(mul(load_lanes(x + i, lanes), scale));
            store_lanes(y + i, lanes, mul(load_lanes(weight + i, lanes), normed));
        });
    }
}

template <class T>
inline void rope(const RopeArgs& args, int thread, int num_threads) {
    const int64_t half = args.dim / 2;
    const Range rows = share(args.n * args.heads, 1, thread, num_threads);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        const int64_t token = row / args.heads, head = row % args.heads;
        T* first = static_cast<T*>(args.x) + token * args.x_stride_n + head * args.x_stride_head;
        T* second = first + half;
        const float* cosines = args.rotation + token * args.rotation_stride;
        const float* sines = cosines + half;
        for_vectors(half, [&](int64_t i, int lanes) {
            const F32 a = load_lanes(first + i, lanes), b = load_lanes(second + i, lanes);
            const F32 c = load_lanes(cosines + i, lanes), s = load_lanes(sines + i, lanes);
            store_lanes(first + i, lanes, sub(mul(a, c), mul(b, s)));
            store_lanes(second + i, lanes, add(mul(b, c), mul(a, s)));
        });
    }
}

// x / (1 + e^-x). Below -88 the result stays at that of -88, -5e-37, as e^-x would overflow.
inline F32 silu(F32 x) {
    x = max(set1(-88.0f), x);
    const F32 minus_log2_e = set1(-1.44269504f);
    return div(x, add(set1(1.0f), exp2(mul(x, minus_log2_e))));
}

// Threads split the columns of the flattened result, so that one row occupies them all too.
template <class T>
inline void silu_mul(const SiluMulArgs& args, int thread, int num_threads) {
    const Range range = share(args.n * args.inner, 64, thread, num_threads);
    for (int64_t at = range.begin; at < range.end;) {
        const int64_t row = at / args.inner, column = at % args.inner;
        const int64_t left = args.inner - column, wanted = range.end - at;
        const int64_t count = left < wanted ? left : wanted;
        const T* gate = static_cast<const T*>(args.gate_up) + row * args.gate_up_stride + column;
        const T* up = gate + args.inner;
        T* y = static_cast<T*>(args.y) + row * args.y_stride + column;
        for_vectors(count, [&](int64_t i, int lanes) {
            const F32 activated = rounded<T>(silu(load_lanes(gate + i, lanes)));
            store_lanes(y + i, lanes, mul(activated, load_lanes(up + i, lanes)));
        });
        at += count;
    }
}

}  // namespace swiftapex::SWIFTAPEX_ISA
