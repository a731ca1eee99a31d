#include "kernels_cuda/launch.h"
#include "kernels_cuda/read_stream.h"
#include "kernels_cuda/reduce.cuh"

namespace swiftapex {
namespace {

constexpr int kThreads = 512;
constexpr int kInFlight = 8;

__global__ void __launch_bounds__(kThreads)
    read_stream_kernel(const float4* data, int64_t count, float* out) {
    __shared__ float scratch[32];
    const int64_t step = int64_t{gridDim.x} * kThreads * kInFlight;
    float sum = 0.0f;
    for (int64_t first = int64_t{blockIdx.x} * kThreads * kInFlight + threadIdx.x; first < count;
         first += step) {
        float4 loaded[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const int64_t at = first + i * kThreads;
            loaded[i] = at < count ? __ldcs(data + at) : float4{};
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            sum += loaded[i].x + loaded[i].y + loaded[i].z + loaded[i].w;
        }
    }
    sum = row_sum(sum, scratch);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

}  // namespace

void read_stream(const void* data, int64_t bytes, float* out, int64_t num_ctas,
                 cudaStream_t stream) {
    require(bytes >= 16 && bytes % 16 == 0 && aligned(16, data) && num_ctas >= 1,
            "read_stream: bad sizes or address");
    read_stream_kernel<<<static_cast<unsigned>(num_ctas), kThreads, 0, stream>>>(
        static_cast<const float4*>(data), bytes / 16, out);
    check_launch("read_stream");
}

}  // namespace swiftapex
