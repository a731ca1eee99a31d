#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace swiftapex {

// The numbers are those of the Python side and of the CPU kernels.
enum DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

__host__ __device__ inline float to_float(float x) { return x; }
__host__ __device__ inline float to_float(__half x) { return __half2float(x); }
__host__ __device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
    return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
    return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

// kWidth elements that are loaded and stored as one.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
    T value[kWidth];
};

// Two at once: one instruction where rounding one takes a slow one (bfloat16, from 8.0 on).
template <class T>
__device__ inline Pack<T, 2> pair_from_floats(float first, float second) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
        return {{pair.x, pair.y}};
    } else {
        return {{from_float<T>(first), from_float<T>(second)}};
    }
}

template <class T, int kWidth>
__device__ inline Pack<T, kWidth> load_pack(const T* address) {
    return *reinterpret_cast<const Pack<T, kWidth>*>(address);
}
template <class T, int kWidth>
__device__ inline void store_pack(T* address, const Pack<T, kWidth>& pack) {
    *reinterpret_cast<Pack<T, kWidth>*>(address) = pack;
}

// Elements of a 16-byte access.
template <class T>
constexpr int kVector = 16 / sizeof(T);

// body(T{}) for the type of a dtype number.
template <class Body>
void with_dtype(const char* name, int dtype, Body body) {
    switch (dtype) {
        case kFloat32:
            return body(float{});
        case kFloat16:
            return body(__half{});
        case kBFloat16:
            return body(__nv_bfloat16{});
        default:
            throw std::invalid_argument(std::string(name) + ": unknown dtype " +
                                        std::to_string(dtype));
    }
}

inline int64_t dtype_bytes(int dtype) { return dtype == kFloat32 ? 4 : 2; }

}  // namespace swiftapex
