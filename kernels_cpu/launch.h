// Runs a kernel of the active instruction set on a pool's threads; see kernel_table.h for the
// arguments. Work too small to be worth waking threads runs on the calling thread.
#pragma once

#include "kernels_cpu/kernel_table.h"
#include "kernels_cpu/thread_pool.h"

namespace swiftapex {

void linear(ThreadPool& pool, DType dtype, const LinearArgs& args);
void rms_norm(ThreadPool& pool, DType dtype, const RmsNormArgs& args);
void rope(ThreadPool& pool, DType dtype, const RopeArgs& args);
void silu_mul(ThreadPool& pool, DType dtype, const SiluMulArgs& args);

// Wrapping sum of the buffer's whole 64-bit words.
uint64_t read_stream(ThreadPool& pool, const void* data, int64_t bytes);

}  // namespace swiftapex
