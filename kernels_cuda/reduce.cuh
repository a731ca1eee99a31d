// Sums over the threads of a row.
#pragma once

namespace swiftapex {

__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, distance);
    }
    return x;
}

// Over the blockDim.x threads (whole warps) that share threadIdx.y; if those are more than one
// warp, they must be the whole block. `scratch`: 32 floats in shared memory.
__device__ inline float row_sum(float x, float* scratch) {
    x = warp_sum(x);
    if (blockDim.x == 32) return x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_sum(lane < blockDim.x / 32 ? scratch[lane] : 0.0f);
}

}  // namespace swiftapex
