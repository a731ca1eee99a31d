// What decode_attention's parts hand to each other.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace swiftapex {

constexpr int kTileTokens = 16;  // tokens that a warp takes at once
constexpr int kMaxGroup = 16;    // q heads of a KV head
constexpr int kMaxHeadDim = 256;
constexpr int kMaxWarps = 16;  // of a thread block
constexpr int kMaxCtas = 4096;
constexpr int kMaxStages = 4;

// What a warp has to do, kept from one layer of a pass to the next. The fields are those of Piece.
struct alignas(64) PlannedPiece {
    int32_t cut_span, cut_parts, cut_length, cut_longer;
    int32_t begin, end, warp_begin, warp_end;
    int32_t row, head, context, start;  // of its first segment
    int32_t has_empty_rows;
    int32_t is_newest;         // its first tile has a row's newest token
    int32_t rows[kMaxStages];  // of the KV, where K of its first tiles begins; -1: no tile
};

struct DecodeArgs {
    CUtensorMap kv_map;  // of decode_attention_tma alone
    const void* q;
    const void* kv;
    const int32_t* block_table;
    const int32_t* context_lens;
    void* out;
    int32_t* counters;     // [kMaxCtas]
    float* partials;       // [num_ctas][2][slot_floats(heads, head_dim)]
    float* warp_partials;  // [num_ctas][kMaxWarps][slot_floats]
    int64_t table_stride, q_stride, out_stride;
    int n, kv_heads, group, head_dim, block_size, dtype;
    float scale_log2;
    int block_shift;     // log2 of block_size, -1 if it is no power of two
    int splits;          // parts in which a group is taken, each reading K and V once
    int heads;           // q heads of such a part
    int stages;          // tiles of a warp in shared memory
    int warp_bytes;      // of a warp's stages, and its slot if that has a place of its own
    int permuted;        // bits of the head that permute the places of its sums; see place_in_slot
    PlannedPiece* plan;  // [num_ctas][kMaxWarps], or null
    bool is_planned;     // by an earlier call: else this one does it
};

// A partial result: [heads][head_dim] sums, then [heads] maxima, then [heads] sums of weights.
__host__ __device__ constexpr int slot_floats(int heads, int head_dim) {
    return (heads * (head_dim + 2) + 3) / 4 * 4;
}

// Token `position` of a request: the column of its block table, and the place in that block.
// Divisions are slow. kShifts: the block size is known to be a power of two.
template <bool kShifts = false>
__device__ inline int column_of(const DecodeArgs& args, int position) {
    if (kShifts || args.block_shift >= 0) return position >> args.block_shift;
    return position / args.block_size;
}
template <bool kShifts = false>
__device__ inline int place_in_block(const DecodeArgs& args, int position) {
    if (kShifts || args.block_shift >= 0) return position & (args.block_size - 1);
    return position % args.block_size;
}
__device__ inline int kv_head_of(const DecodeArgs& args, int head) {
    return args.splits == 1 ? head : head / args.splits;
}

int capability_cap();  // 0: none

// Launches for args with all fields set but kv_map, warp_partials and those from `splits` to
// `permuted`. The first two return false where they have no kernel for the shape or the device.
bool decode_attention_tma(DecodeArgs args, int64_t num_ctas, cudaStream_t stream);
bool decode_attention_mma(DecodeArgs args, int64_t num_ctas, cudaStream_t stream);
void decode_attention_fma(DecodeArgs args, int kv_dtype, int64_t num_ctas, cudaStream_t stream);

}  // namespace swiftapex
