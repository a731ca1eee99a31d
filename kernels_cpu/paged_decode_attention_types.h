// Attention of decode rows over paged KV: what a call and a plan consist of.
// Included by code of every instruction set: types only, nothing here may
// become machine code.
#pragma once

#include <cstdint>

#include "kernels_cpu/kernel_table.h"

namespace swiftapex {

// One layer's call. Row r has one new token: its k and v are appended to the
// row's blocks, then its q attends to the row's whole context, the new token
// included. Strides count elements and lie between rows; the heads of a row are
// contiguous.
struct DecodeAttentionArgs {
    const void* q;  // [rows, q_heads, head_dim]
    const void* k;  // [rows, kv_heads, head_dim]
    const void* v;
    void* out;                   // [rows, q_heads, head_dim]
    void* kv;                    // [blocks, kv_heads, K|V, block_size, head_dim] of this layer
    const int32_t* block_table;  // [rows, width]; entries past the context are unread
    int64_t q_stride, k_stride, v_stride, out_stride, block_table_stride;
    int32_t q_heads, kv_heads, head_dim, block_size;
    float scale;  // of q * k
    DType dtype;  // of q, k, v and out
    DType kv_dtype;
};

// A share of one row: a range of its kv heads over a range of its tokens. A
// thread takes its pieces in order, then those that other threads have not begun.
struct DecodePiece {
    int32_t row;
    int32_t head_begin, head_end;  // kv heads
    int32_t token_begin,
        token_end;  // token_begin lies on a block's edge; equal: an empty row
    bool appends;   // the row's new token is the last of this piece
    int64_t slot;   // of its unnormalised result, counted in kv heads; -1: it is
                    // the whole result
    int32_t merge;  // that the piece belongs to; -1: none
};

// Pieces of the same row and heads whose results become one.
struct DecodeMerge {
    int32_t row;
    int32_t head_begin, head_end;
    int32_t num_pieces;
    int64_t slot;  // of the first piece; the next one's is head_end - head_begin
                   // further
};

struct DecodePlanView {
    const DecodePiece* pieces;
    const int32_t* piece_begin;  // [threads + 1]: thread t has pieces [t] up to [t + 1]
    int32_t num_threads;
    bool threads_share;  // threads take over pieces of others
    // [threads], kCounterStep apart: how many of a thread's pieces were taken in all calls, of
    // which there were `calls` before this one.
    uint32_t* taken;
    uint32_t calls;
    const DecodeMerge* merges;
    // [slots], kCounterStep apart: 1 where one of the two results that are merged there is
    // finished; see DecodePieceRunner::join(). 0 between calls.
    uint32_t* waiting;
    // [slots, partial_stride], cache lines that no two slots share: the unnormalised values of a kv
    // head's q heads [group, padded_head_dim(head_dim)], in the order of the KV dtype's vector
    // pairs; the maxima of their logits in base 2 [group]; their sums of 2^(logit - maximum)
    // [group].
    float* partial;
    int64_t partial_stride;
};

// Rows of float32 in scratch memory are padded to whole vector pairs of every
// instruction set.
constexpr int32_t padded_head_dim(int32_t head_dim) { return (head_dim + 31) / 32 * 32; }

constexpr int32_t kCounterStep = 16;  // a cache line
constexpr int32_t kMaxBlockSize = 128;
constexpr int32_t kMaxQueryRows = 4;  // of float32 that a query head may occupy in scratch memory

}  // namespace swiftapex
