// Programmatic dependent launch (CUDA programming guide, "Programmatic Dependent Launch and
// Synchronization"), from compute capability 9.0 on: a kernel's blocks begin while the kernel
// before it in the stream still runs, and wait where they need its results. The kernels before that
// one are done by then, as long as every block that lets its successor start has waited before.
#pragma once

#include "kernels_cuda/launch.h"

namespace swiftapex {

// Until the kernel before this one is done and its writes are visible. Every thread must call it.
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Once all blocks have called it or ended, a dependent kernel after this one may start.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <class Args>
void launch_dependent(const char* name, void (*kernel)(Args), int64_t num_ctas, int threads,
                      int shared_bytes, cudaStream_t stream, const Args& args) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(num_ctas));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    void* arguments[] = {const_cast<Args*>(&args)};
    check(name, cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments));
}

}  // namespace swiftapex
