#pragma once

#include <cuda_runtime_api.h>

namespace swiftapex {

// A stream whose kernels run on some of a GPU's multiprocessors only, so that a large GPU can stand
// in for a small one. Copy engines, caches and memory bandwidth are not limited.
class GreenContext {
  public:
    // `num_sms` multiprocessors of `device`, or the next larger number that the GPU can set apart.
    // Throws std::invalid_argument if it has fewer, std::runtime_error if the driver refuses.
    GreenContext(int device, int num_sms);
    ~GreenContext();
    GreenContext(const GreenContext&) = delete;
    GreenContext& operator=(const GreenContext&) = delete;

    int num_sms() const { return num_sms_; }
    cudaStream_t stream() const { return stream_; }

  private:
    void* context_ = nullptr;
    cudaStream_t stream_ = nullptr;
    int num_sms_ = 0;
};

}  // namespace swiftapex
