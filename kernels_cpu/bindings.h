#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels_cpu/kernel_table.h"

namespace swiftapex {

// Tensors come as addresses, so that the module needs no torch; swiftapex/backends/cpu.py checks
// shapes, dtypes and strides before it calls.
template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Python passes 0 for float32, 1 for float16, 2 for bfloat16.
inline DType dtype_of(int number) {
    if (number < 0 || number >= kNumDTypes) {
        throw std::invalid_argument("unknown dtype number " + std::to_string(number));
    }
    return static_cast<DType>(number);
}

// 3: int8, which only KV may have.
inline DType kv_dtype_of(int number) { return number == kInt8 ? kInt8 : dtype_of(number); }

// Every kernel call releases the GIL for as long as it runs.
using ReleaseGil = pybind11::call_guard<pybind11::gil_scoped_release>;

class DecodePlan;
struct DecodeAttentionArgs;

// The arguments that every call of decode attention takes from Python, after the plan.
DecodeAttentionArgs decode_attention_args(const DecodePlan& plan, int dtype, int kv_dtype,
                                          uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out,
                                          uintptr_t kv, uintptr_t block_table, int64_t q_stride,
                                          int64_t k_stride, int64_t v_stride, int64_t out_stride,
                                          int64_t block_table_stride, int q_heads, int head_dim,
                                          float scale);

void bind_paged_decode_attention(pybind11::module_& module);
void bind_lanes(pybind11::module_& module);  // attention_runtime.h, copy_blocks.h, task_lane.h

}  // namespace swiftapex
