#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace swiftapex {

// Reads `bytes` (a multiple of 16) of device memory once and adds all up, a float a thread block in
// out[num_ctas]: the yardstick of decode_attention, for nothing reads memory faster than this.
void read_stream(const void* data, int64_t bytes, float* out, int64_t num_ctas,
                 cudaStream_t stream);

}  // namespace swiftapex
