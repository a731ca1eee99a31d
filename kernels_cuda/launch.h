// What every checking launcher uses.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace swiftapex {

inline void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

inline void check(const char* name, cudaError_t error) {
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(error));
    }
}

inline void check_launch(const char* name) { check(name, cudaGetLastError()); }

// Whether all addresses and distances are multiples of `bytes`.
inline bool aligned(uint64_t bytes) { return bytes > 0; }
template <class... Rest>
bool aligned(uint64_t bytes, const void* first, Rest... rest) {
    return reinterpret_cast<uintptr_t>(first) % bytes == 0 && aligned(bytes, rest...);
}
template <class... Rest>
bool aligned(uint64_t bytes, int64_t first, Rest... rest) {
    return static_cast<uint64_t>(first) % bytes == 0 && aligned(bytes, rest...);
}

inline unsigned ceil_div(int64_t a, int64_t b) { return static_cast<unsigned>((a + b - 1) / b); }

constexpr int64_t kMaxGridY = 65535;
inline unsigned grid_y(int64_t n) { return static_cast<unsigned>(n < kMaxGridY ? n : kMaxGridY); }

}  // namespace swiftapex
