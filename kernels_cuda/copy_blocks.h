#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace swiftapex {

// Copies block src_ids[i] of `src` to block dst_ids[i] of `dst` for all num_pairs pairs, in one
// launch of at most max_ctas thread blocks, converting where the dtypes differ. A block is
// block_elements contiguous elements; src and dst are device memory or pinned host memory, the ids
// int64 in either. Then stores 1 into `done` (pinned host memory; null: no word); `counter` as for
// gather_rows. No destination may occur twice or be a source.
// Throws std::invalid_argument for bad sizes and std::runtime_error if the launch fails.
void copy_blocks(int src_dtype, int dst_dtype, const void* src, void* dst, const int64_t* src_ids,
                 const int64_t* dst_ids, int64_t num_pairs, int64_t block_elements,
                 int64_t max_ctas, int32_t* done, int32_t* counter, cudaStream_t stream);

}  // namespace swiftapex
