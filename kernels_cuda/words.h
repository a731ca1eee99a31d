// 32-bit words in pinned host memory that order a stream and host threads. All can be captured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace swiftapex {

// The stream waits until *word == value, without a kernel (cuStreamWaitValue32).
void wait_word(uint32_t* word, uint32_t value, cudaStream_t stream);

// *word = value once all work before it on the stream is visible (cuStreamWriteValue32).
void write_word(uint32_t* word, uint32_t value, cudaStream_t stream);

// The same by one spinning thread, and by one storing thread, for drivers without those calls.
void wait_word_kernel(const uint32_t* word, uint32_t value, cudaStream_t stream);
void write_word_kernel(uint32_t* word, uint32_t value, cudaStream_t stream);

}  // namespace swiftapex
