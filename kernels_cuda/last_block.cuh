// A word of pinned host memory that a kernel stores when all its blocks are done.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace swiftapex {

// Called by all threads of all blocks, after their accesses. Order: every thread's accesses, its
// fence, the block's barrier, the count, the last block's fence, the word. The host that reads the
// new word (acquire) therefore sees all that the kernel wrote.
__device__ inline void store_word_after_all(int32_t* word, int32_t value, int32_t* counter) {
    if (word == nullptr) return;
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x != 0 || threadIdx.y != 0) return;
    const int32_t last = static_cast<int32_t>(gridDim.x * gridDim.y) - 1;
    if (atomicAdd(counter, 1) != last) return;
    *counter = 0;
    __threadfence_system();
    *static_cast<volatile int32_t*>(word) = value;
}

}  // namespace swiftapex
