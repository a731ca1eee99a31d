#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace swiftapex {

// y[n, dim] = rows token_ids[n] (int64) of table[vocab, dim]; device memory, both contiguous. The
// ids are not checked.
// Throws std::invalid_argument for bad sizes and std::runtime_error if the launch fails.
void embedding(int dtype, const int64_t* token_ids, const void* table, void* y, int64_t n,
               int64_t dim, cudaStream_t stream);

}  // namespace swiftapex
