// Barriers in shared memory and the tensor memory accelerator of compute capability 9.0, as
// decode_attention_tma uses them (PTX ISA, "mbarrier" and "cp.async.bulk.tensor").
#pragma once

#include <cuda.h>

namespace swiftapex {

__device__ inline unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ inline uint4 load_shared(unsigned shared) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(shared)
                 : "memory");
    return x;
}

__device__ inline void init_barrier(unsigned barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
#endif
}

// The accelerator is to see what was written by ordinary stores.
__device__ inline void fence_accelerator() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ inline void expect_bytes(unsigned barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
#endif
}

__device__ inline void wait_barrier(unsigned barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "retry:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra retry;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}

// The map's first use then waits less.
__device__ inline void prefetch_map(const CUtensorMap& map) {
#if __CUDA_ARCH__ >= 900
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

// First to go from the L2 cache, as it is read once: else it would drive out what all blocks read
// again and again, the code and what they leave for each other.
__device__ inline void copy_box(unsigned shared, const CUtensorMap& map, int row,
                                unsigned barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .b64 policy;\n"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3, %2, %2}], [%4], policy;\n"
        "}" ::"r"(shared),
        "l"(&map), "r"(0), "r"(row), "r"(barrier)
        : "memory");
#endif
}

}  // namespace swiftapex
