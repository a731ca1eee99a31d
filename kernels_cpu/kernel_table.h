// The kernels of one instruction set, as plain function pointers. Included by code of every
// instruction set: types only, nothing here may become machine code.
#pragma once

#include <cstddef>
#include <cstdint>

namespace swiftapex {

enum DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
constexpr int kNumDTypes = 3;

// Every kernel is called once on each thread of a pool, with `thread` in [0, num_threads), and
// picks its share of the rows by that. Strides count elements.

// y[n, out] = x[n, in] * w[out, in]^T + bias[out] + residual[n, out]. Rows of w are contiguous.
struct LinearArgs {
    const void* x;
    const void* weight;
    const void* bias;      // null: none
    const void* residual;  // null: none
    void* y;
    int64_t n, in, out;
    int64_t x_stride, weight_stride, residual_stride, y_stride;
};

// y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, for n * heads rows. y may be x.
struct RmsNormArgs {
    const void* x;  // [n, heads, dim]
    const void* weight;
    void* y;  // [n, heads, dim]
    int64_t n, heads, dim;
    int64_t x_stride_n, x_stride_head, y_stride_n, y_stride_head;
    float eps;
};

// Rotates x [n, heads, dim] in place, pairs (i, i + dim / 2). rotation [n, dim]: cos, then sin.
struct RopeArgs {
    void* x;
    const float* rotation;
    int64_t n, heads, dim;
    int64_t x_stride_n, x_stride_head, rotation_stride;
};

// y[n, inner] = silu(gate_up[:, :inner]) * gate_up[:, inner:].
struct SiluMulArgs {
    const void* gate_up;
    void* y;
    int64_t n, inner;
    int64_t gate_up_stride, y_stride;
};

// index[n] = the first index of the largest element of each row; 0, and invalid[n] = true, where
// that is NaN (as it is if any element is) or infinite.
struct ArgmaxArgs {
    const void* x;  // [n, dim]
    int64_t* index;
    bool* invalid;
    int64_t n, dim, x_stride;
};

// Sum of `count` 64-bit words, wrapping; reads every byte once. One partial sum per thread.
struct ReadStreamArgs {
    const uint64_t* words;
    int64_t count;
    uint64_t* partial;  // [num_threads], 64 bytes apart
};

struct DecodeAttentionArgs;  // paged_decode_attention_types.h
struct DecodePlanView;

struct KernelTable {
    const char* isa;
    // linear: `scratch` holds linear_scratch_bytes(n, in), aligned to 64, one per thread.
    void (*linear[kNumDTypes])(const LinearArgs&, void* scratch, int thread, int num_threads);
    void (*rms_norm[kNumDTypes])(const RmsNormArgs&, int thread, int num_threads);
    void (*rope[kNumDTypes])(const RopeArgs&, int thread, int num_threads);
    void (*silu_mul[kNumDTypes])(const SiluMulArgs&, int thread, int num_threads);
    void (*argmax[kNumDTypes])(const ArgmaxArgs&, int thread, int num_threads);
    void (*read_stream)(const ReadStreamArgs&, int thread, int num_threads);
    // By KV dtype. `scratch`: see paged_decode_attention.cpp, aligned to 64, one per thread. The
    // merge must not begin before every thread has finished its pieces.
    void (*decode_pieces[kNumDTypes])(const DecodeAttentionArgs&, const DecodePlanView&,
                                      void* scratch, int thread);
    void (*decode_merge[kNumDTypes])(const DecodeAttentionArgs&, const DecodePlanView&,
                                     void* scratch, int thread, int num_threads);
    // By source and target dtype: `count` elements, on the calling thread only.
    void (*convert[kNumDTypes][kNumDTypes])(const void* source, void* target, int64_t count);
};

}  // namespace swiftapex
