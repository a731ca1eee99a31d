#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace swiftapex {

// Attention of one query token a row over paged KV, on `stream`; device memory, strides in
// elements.
//   q             [n, q_heads, head_dim] of dtype, rows q_stride apart
//   kv            one layer [block][kv_head][K|V][token][head_dim] of kv_dtype
//   block_table   [n, table_stride] int32; entries past the context are not read
//   context_lens  [n] int32, the newest token included; a row with 0 gives zeros
//   out           [n, q_heads, head_dim] of dtype, rows out_stride apart
//   workspace     decode_attention_workspace() bytes, zeroed once, for one stream at a time. One
//                 that is large enough serves any call.
//   plan          decode_attention_plan_bytes(), or null: who computes what. is_planned: as an
//                 earlier call has left it, of another layer, with the same contexts, block table,
//                 sizes and alignment of q and out. One may follow the other directly, but a call
//                 that leaves a plan for other contexts must not follow one that reads it so.
// The grid is num_ctas thread blocks, whatever the contexts: they divide the work between them on
// the device (decode_attention_plan.cuh), so that a captured graph stays balanced when the contexts
// change. One block fills a multiprocessor: num_ctas is best the number of multiprocessors.
// From compute capability 9.0 on it begins while the kernel before it on the stream still runs:
// that one may write q, out and each row's newest token in kv, but nothing else that is read here.
// The same inputs give the same bits. 16-bit KV of the same dtype as q goes through the tensor
// cores for head_dim 64, 96, 128 and 256 and block sizes divisible by 16, from compute
// capability 8.0 on (from 9.0 on faster for block sizes that are powers of two, but head_dim 96),
// all else through float32 FMA. scale is above 0 and finite. Groups (q_heads / kv_heads) up to 16;
// head_dim a multiple of 8 up to 256. Throws std::invalid_argument for bad sizes and
// std::runtime_error if the launch fails.
void decode_attention(int dtype, int kv_dtype, const void* q, const void* kv,
                      const int32_t* block_table, const int32_t* context_lens, void* out,
                      void* workspace, int64_t n, int64_t q_heads, int64_t kv_heads,
                      int64_t head_dim, int64_t block_size, int64_t table_stride, int64_t q_stride,
                      int64_t out_stride, float scale, int64_t num_ctas, void* plan,
                      bool is_planned, cudaStream_t stream);

// Kernels for newer GPUs than this compute capability (10 * major + minor) are left alone, in the
// whole process; 0: no cap. For tests and comparisons.
void set_capability_cap(int capability);

int64_t decode_attention_plan_bytes(int64_t num_ctas);

int64_t decode_attention_workspace(int64_t n, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                                   int64_t num_ctas);

}  // namespace swiftapex
