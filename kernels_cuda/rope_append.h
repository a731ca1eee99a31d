#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace swiftapex {

// qkv [n, q_heads + 2 * kv_heads, head_dim], rows qkv_stride elements apart, device memory.
// Rotates the q and k heads in place (half-split pairs: i with i + head_dim/2); rotation
// [n, head_dim] float32: cos in the first half of a row, sin in the second; null: no rotation.
// Then appends K and V of each row with slots[row] >= 0 to `kv`, one layer of
// [block][kv_head][K|V][token][head_dim], slot = block * block_size + token, as kv_dtype; slots [n]
// int64 device memory, null: nothing is appended. No two rows may have the same slot.
// Throws std::invalid_argument for bad sizes and std::runtime_error if the launch fails.
void rope_append(int dtype, int kv_dtype, void* qkv, const float* rotation, const int64_t* slots,
                 void* kv, int64_t n, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                 int64_t qkv_stride, int64_t block_size, cudaStream_t stream);

}  // namespace swiftapex
