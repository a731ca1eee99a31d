// Who computes what. The work is a line of units, ordered by row, KV head (or part of its group)
// and tile of 16 tokens; the thread blocks cut it into equal pieces, whatever lies where. A segment
// is the units of one row and head; a piece holds several whole ones, or parts of one that several
// blocks share. Within a piece the warps take units in turn.
#pragma once

#include "kernels_cuda/decode_attention_args.h"

namespace swiftapex {

struct Segment {
    int row, head;       // head: of kv_heads * splits
    int context, tiles;  // tokens and tiles of the row
    int start;           // its first unit

    __device__ int end() const { return start + tiles; }
};

__device__ inline int tiles_of(int context) {
    return context > 0 ? (context + kTileTokens - 1) / kTileTokens : 0;
}

// The segment after `segment`, which must not be the last.
__device__ inline void advance(const DecodeArgs& args, Segment& segment) {
    segment.start += segment.tiles;
    if (++segment.head < args.kv_heads * args.splits) return;
    segment.head = 0;
    do {
        segment.context = args.context_lens[++segment.row];
        segment.tiles = tiles_of(segment.context);
    } while (segment.tiles == 0);
}

struct Piece {
    int total, ctas;  // all units, and the blocks that have any
    int begin, end;   // this block's units
    Segment first;    // the segment of `begin`

    // The block whose piece has the unit: the last i with total * i / ctas <= unit.
    __device__ int owner(int unit) const {
        return static_cast<int>(((int64_t{unit} + 1) * ctas - 1) / total);
    }
};

// Every warp computes it by itself; all its lanes get the same.
__device__ inline Piece find_piece(const DecodeArgs& args) {
    constexpr unsigned kAll = 0xffffffffu;
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int segments = args.kv_heads * args.splits;  // of a row

    int tiles = 0;
    for (int row = lane; row < args.n; row += 32) tiles += tiles_of(args.context_lens[row]);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        tiles += __shfl_xor_sync(kAll, tiles, distance);
    }
    Piece piece{};
    piece.total = tiles * segments;
    // No more blocks than can have a unit for each warp, so that little work is not cut to shreds.
    const int most = piece.total / warps > 1 ? piece.total / warps : 1;
    piece.ctas = static_cast<int>(gridDim.x) < most ? gridDim.x : most;
    if (piece.total == 0 || blockIdx.x >= piece.ctas) return piece;
    piece.begin = static_cast<int>(int64_t{piece.total} * blockIdx.x / piece.ctas);
    piece.end = static_cast<int>(int64_t{piece.total} * (blockIdx.x + 1) / piece.ctas);

    // The row is the first whose tiles, with those before it, are more than `target`.
    const int target = piece.begin / segments;
    int before = 0;
    for (int base = 0;; base += 32) {
        const int context = base + lane < args.n ? args.context_lens[base + lane] : 0;
        int sum = tiles_of(context);
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(kAll, sum, distance);
            if (lane >= distance) sum += other;
        }
        const unsigned found = __ballot_sync(kAll, before + sum > target);
        if (found != 0) {
            const int source = __ffs(found) - 1;
            Segment& first = piece.first;
            first.row = base + source;
            first.context = __shfl_sync(kAll, context, source);
            first.tiles = tiles_of(first.context);
            const int row_start =
                (before + __shfl_sync(kAll, sum, source) - first.tiles) * segments;
            first.head = (piece.begin - row_start) / first.tiles;
            first.start = row_start + first.head * first.tiles;
            return piece;
        }
        before += __shfl_sync(kAll, sum, 31);
    }
}

// The units of one warp, in order, ahead of the computation: what is copied next.
struct CopyCursor {
    Segment segment;
    int unit;   // >= the piece's end: no more
    int block;  // of the unit's first token; loaded one unit ahead, as the copy waits for it

    __device__ int token() const { return (unit - segment.start) * kTileTokens; }

    __device__ void load_block(const DecodeArgs& args) {
        block = args.block_table[segment.row * args.table_stride + token() / args.block_size];
    }
    __device__ void move_to(const DecodeArgs& args, int next, int end) {
        unit = next;
        if (unit >= end) return;
        while (unit >= segment.end()) advance(args, segment);
        load_block(args);
    }
};

}  // namespace swiftapex
