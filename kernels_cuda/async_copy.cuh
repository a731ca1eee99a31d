// Copies from global to shared memory that a warp does not wait for, from compute capability 8.0 on
// (PTX ISA, "cp.async"); before that, copies.
#pragma once

#include <cuda_runtime_api.h>

namespace swiftapex {

// 16 bytes, or zeros.
__device__ inline void copy_async(void* shared, const void* global, bool valid = true) {
#if __CUDA_ARCH__ >= 800
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address),
                 "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
#else
    *static_cast<uint4*>(shared) = valid ? *static_cast<const uint4*>(global) : uint4{};
#endif
}

__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all but the newest `pending` groups of copies.
__device__ inline void wait_copies(int pending) {
#if __CUDA_ARCH__ >= 800
#define SWIFTAPEX_WAIT(n)                                            \
    case n:                                                          \
        asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory"); \
        break;
    switch (pending) {
        SWIFTAPEX_WAIT(1)
        SWIFTAPEX_WAIT(2)
        SWIFTAPEX_WAIT(3)
        default:
            asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
#undef SWIFTAPEX_WAIT
#endif
}

}  // namespace swiftapex
