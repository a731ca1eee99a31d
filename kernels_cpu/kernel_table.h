// The kernels of one instruction set, as plain function pointers. Included by code of every
// instruction set: types only, nothing here may become machine code.
#pragma once

#include <cstddef>
#include <cstdint>

namespace swiftapex {

// int8 is a dtype of KV only: whole numbers from -127 to 127 with a float32 scale per token and
// head. A plane [block_size, head_dim] is followed by its scales [block_size].
enum DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt8 = 3 };
constexpr int kNumDTypes = 3;
constexpr int kNumKvDTypes = 4;

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
    int64_t chunk;      // words that a thread takes at a time
    int64_t* next;      // first word that no thread has taken
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
    void (*read_stream)(const ReadStreamArgs&, int thread);
    // By KV dtype. `scratch`: see paged_decode_attention.cpp, aligned to 64, one per thread.
    void (*decode_pieces[kNumKvDTypes])(const DecodeAttentionArgs&, const DecodePlanView&,
                                        void* scratch, int thread);
    // By KV dtype, without int8; see plain_decode_attention.cpp. context_lens [rows].
    void (*plain_append[kNumDTypes])(const DecodeAttentionArgs&, const int32_t* context_lens,
                                     int rows, int thread, int num_threads);
    void (*plain_attend[kNumDTypes])(const DecodeAttentionArgs&, const int32_t* context_lens,
                                     int rows, void* scratch, int thread, int num_threads);
    // By source and target dtype: `count` elements, on the calling thread only.
    void (*convert[kNumDTypes][kNumDTypes])(const void* source, void* target, int64_t count);
    // One plane of KV between a dtype and int8, on the calling thread only.
    void (*quantize[kNumDTypes])(const void* source, void* plane, int rows, int head_dim);
    void (*dequantize[kNumDTypes])(const void* plane, void* target, int rows, int head_dim);
};

}  // namespace swiftapex
