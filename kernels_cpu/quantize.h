// Planes of KV in int8: rows of whole numbers from -127 to 127, then one float32 scale per row.
#pragma once

#include "kernels_cpu/share.h"

namespace swiftapex::SWIFTAPEX_ISA {

template <class T>
constexpr int kScaleElements = 0;  // of T that a row's scale takes
template <>
constexpr int kScaleElements<Int8> = 4;

// Elements of T from a plane to the next one.
template <class T>
inline int64_t plane_elements(int block_size, int head_dim) {
    return int64_t(block_size) * (head_dim + kScaleElements<T>);
}

inline const float* plane_scales(const Int8* plane, int block_size, int head_dim) {
    return reinterpret_cast<const float*>(plane + int64_t(block_size) * head_dim);
}

// To the nearest whole numbers, which fit.
inline void store_whole(Int8* y, int lanes, F32 x) {
#ifdef __AVX512BW__
    _mm512_mask_cvtepi32_storeu_epi8(y, first_lanes(lanes), _mm512_cvtps_epi32(x));
#else
    const F32 shifter = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    float whole[kWidth];
    store(whole, sub(add(x, shifter), shifter));
    for (int j = 0; j < lanes; ++j) y[j].bits = int8_t(whole[j]);
#endif
}

// Returns the row's scale: its largest magnitude is 127 of it. A row of zeros has the scale zero.
template <class A>
inline float quantize_row(const A* x, int head_dim, Int8* y) {
    F32 largest = zero();
    for_vectors(head_dim, [&](int64_t i, int lanes) {
        const F32 part = load_lanes(x + i, lanes);
        largest = max(largest, max(part, sub(zero(), part)));
    });
    const float scale = reduce_max(largest) / 127.0f;
    const F32 inverse = set1(scale > 0.0f ? 1.0f / scale : 0.0f);
    for_vectors(head_dim, [&](int64_t i, int lanes) {
        store_whole(y + i, lanes, mul(load_lanes(x + i, lanes), inverse));
    });
    return scale;
}

template <class A>
inline void quantize(const void* source, void* plane, int rows, int head_dim) {
    const A* x = static_cast<const A*>(source);
    Int8* y = static_cast<Int8*>(plane);
    float* scales = const_cast<float*>(plane_scales(y, rows, head_dim));
    for (int64_t row = 0; row < rows; ++row) {
        scales[row] = quantize_row(x + row * head_dim, head_dim, y + row * head_dim);
    }
}

template <class A>
inline void dequantize(const void* plane, void* target, int rows, int head_dim) {
    const Int8* x = static_cast<const Int8*>(plane);
    A* y = static_cast<A*>(target);
    const float* scales = plane_scales(x, rows, head_dim);
    for (int64_t row = 0; row < rows; ++row) {
        const F32 scale = set1(scales[row]);
        const int64_t first = row * head_dim;
        for_vectors(head_dim, [&](int64_t i, int lanes) {
            store_lanes(y + first + i, lanes, mul(load_lanes(x + first + i, lanes), scale));
        });
    }
}

}  // namespace swiftapex::SWIFTAPEX_ISA
