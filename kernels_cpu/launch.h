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
void argmax(ThreadPool& pool, DType dtype, const ArgmaxArgs& args);

// Sequences of the above in one call: between two small kernels a call from Python costs more than
// the kernels, as reading the weights has just driven the interpreter out of the caches.

// y[n, out] = linear(rms_norm(x)); the first `rotated` outputs of a row are heads of head_dim,
// which are rotated (see RopeArgs).
struct NormLinearArgs {
    const void* x;  // [n, in]
    const void* norm_weight;
    float eps;
    const void* weight;     // [out, in]
    const void* bias;       // null: none
    void* y;                // [n, out], dense
    const float* rotation;  // [n, head_dim], dense; not read if nothing is rotated
    int64_t n, in, out, rotated, head_dim;
    int64_t x_stride, weight_stride;
};
void norm_linear(ThreadPool& pool, DType dtype, const NormLinearArgs& args);

// y[n, hidden] = h + down * silu_mul(gate_up * rms_norm(h)), where h = x + proj * o.
struct ProjFfnArgs {
    const void* o;     // [n, width]
    const void* proj;  // [hidden, width]
    const void* proj_bias;
    const void* x;  // [n, hidden]
    const void* norm_weight;
    float eps;
    const void* gate_up;  // [2 * inner, hidden]
    const void* gate_up_bias;
    const void* down;  // [hidden, inner]
    const void* down_bias;
    void* y;  // [n, hidden], dense
    int64_t n, width, hidden, inner;
    int64_t o_stride, proj_stride, x_stride, gate_up_stride, down_stride;
};
void proj_ffn(ThreadPool& pool, DType dtype, const ProjFfnArgs& args);

// Wrapping sum of the buffer's whole 64-bit words.
uint64_t read_stream(ThreadPool& pool, const void* data, int64_t bytes);

}  // namespace swiftapex
