#include "kernels_cuda/driver.h"
#include "kernels_cuda/words.h"

namespace swiftapex {
namespace {

using StreamWord = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

void call(const char* name, StreamWord entry, const void* word, uint32_t value, unsigned flags,
          cudaStream_t stream) {
    require(word != nullptr && aligned(4, word), "a word needs an address divisible by 4");
    const CUresult result = entry(stream, reinterpret_cast<CUdeviceptr>(word), value, flags);
    if (result != CUDA_SUCCESS) {
        throw std::runtime_error(std::string(name) + ": driver error " + std::to_string(result));
    }
}

__global__ void wait_word_spin(const volatile uint32_t* word, uint32_t value) {
    while (*word != value) __nanosleep(200);
    __threadfence_system();
}

__global__ void write_word_store(volatile uint32_t* word, uint32_t value) {
    __threadfence_system();
    *word = value;
}

}  // namespace

void wait_word(uint32_t* word, uint32_t value, cudaStream_t stream) {
    static const StreamWord entry = driver_entry<StreamWord>("cuStreamWaitValue32");
    call("wait_word", entry, word, value, CU_STREAM_WAIT_VALUE_EQ, stream);
}

void write_word(uint32_t* word, uint32_t value, cudaStream_t stream) {
    static const StreamWord entry = driver_entry<StreamWord>("cuStreamWriteValue32");
    call("write_word", entry, word, value, CU_STREAM_WRITE_VALUE_DEFAULT, stream);
}

void wait_word_kernel(const uint32_t* word, uint32_t value, cudaStream_t stream) {
    require(word != nullptr, "wait_word_kernel: needs a word");
    wait_word_spin<<<1, 1, 0, stream>>>(word, value);
    check_launch("wait_word_kernel");
}

void write_word_kernel(uint32_t* word, uint32_t value, cudaStream_t stream) {
    require(word != nullptr, "write_word_kernel: needs a word");
    write_word_store<<<1, 1, 0, stream>>>(word, value);
    check_launch("write_word_kernel");
}

}  // namespace swiftapex
