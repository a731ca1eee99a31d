#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace swiftapex {

// Copies block src_ids[i] of `src` to block dst_ids[i] of `dst` by the GPU's copy engines, so that
// no multiprocessor takes part, in one call of the driver where it has one for that (CUDA 13). A
// block is block_bytes contiguous bytes; src and dst are device memory or pinned host memory, and
// no block of the latter may reach over two areas that were pinned by different calls. No
// destination may occur twice or be a source. The lists are free once this returns.
// Throws std::invalid_argument for bad sizes and std::runtime_error if the launch fails.
void transfer_blocks(const void* src, void* dst, const std::vector<int64_t>& src_ids,
                     const std::vector<int64_t>& dst_ids, int64_t block_bytes, cudaStream_t stream);

}  // namespace swiftapex
