// Runs a kernel of the active instruction set on a pool's threads.
#pragma once

#include "kernels_cpu/kernel_table.h"
#include "kernels_cpu/thread_pool.h"

namespace swiftapex {

uint64_t read_stream(ThreadPool& pool, const void* data, int64_t bytes);

}  // namespace swiftapex
