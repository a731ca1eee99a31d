// Who computes what. The work is a line of units, ordered by row, KV head (or part of its group)
// and tile of 16 tokens. The thread blocks cut it into equal pieces, whatever lies where, or, where
// that takes no longer, at the ends of segments too; the warps of a block cut its piece again. A
// segment is the units of one row and head: its tiles, and kEndUnits after them, in place of the
// time that its end and the next one's beginning take. A warp's piece holds whole ones, parts of
// the first and the last, or part of a single one that many warps share.
#pragma once

#include "kernels_cuda/decode_attention_args.h"

namespace swiftapex {

constexpr unsigned kAllLanes = 0xffffffffu;

constexpr int kEndUnits = 2;

struct Segment {
    int row, head;       // head: of kv_heads * splits
    int context, tiles;  // tokens and tiles of the row
    int start;           // its first unit

    __device__ int end() const { return start + tiles; }                // of its tiles
    __device__ int after() const { return start + tiles + kEndUnits; }  // where the next one starts
};

__device__ inline int tiles_of(int context) {
    return context > 0 ? (context + kTileTokens - 1) / kTileTokens : 0;
}

__device__ inline int units_of(int context) {
    return context > 0 ? tiles_of(context) + kEndUnits : 0;
}

__device__ inline int sum_of_lanes(int x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(kAllLanes, x);
#else
    for (int distance = 16; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(kAllLanes, x, distance);
    }
    return x;
#endif
}

__device__ inline int max_of_lanes(int x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(kAllLanes, x);
#else
    for (int distance = 16; distance > 0; distance /= 2) {
        const int other = __shfl_xor_sync(kAllLanes, x, distance);
        x = x > other ? x : other;
    }
    return x;
#endif
}

// The segment after `segment`, which must not be the last.
__device__ inline void advance(const DecodeArgs& args, Segment& segment) {
    segment.start = segment.after();
    if (++segment.head < args.kv_heads * args.splits) return;
    segment.head = 0;
    do {
        segment.context = args.context_lens[++segment.row];
        segment.tiles = tiles_of(segment.context);
    } while (segment.tiles == 0);
}

// Equal spans from 0 on, each cut into `parts` pieces, the first ones longer by one where they
// cannot all be equal.
struct Cut {
    int span, parts;
    int length, longer;  // of a piece; how many of a span are longer by one

    __device__ Cut(int span, int parts)
        : span(span), parts(parts), length(span / parts), longer(span - length * parts) {}
    __device__ int begin(int piece) const {
        const int before = piece / parts, part = piece - before * parts;
        return before * span + part * length + (part < longer ? part : longer);
    }
    __device__ int owner(int unit) const {
        const int before = unit / span, in_longer = longer * (length + 1);
        unit -= before * span;
        const int part =
            unit < in_longer ? unit / (length + 1) : longer + (unit - in_longer) / length;
        return before * parts + part;
    }
};

struct Piece {
    Cut cut{1, 1};             // of all units, between the blocks
    int begin, end;            // this block's units
    int warp_begin, warp_end;  // this warp's; begins with a tile if it has any
    Segment first;             // the segment of warp_begin, if the warp has a tile
    bool has_empty_rows;       // any row without tokens
};

// The segment that has the unit. All lanes look for it and get the same.
__device__ inline Segment find_segment(const DecodeArgs& args, int unit) {
    const int lane = threadIdx.x % 32, segments = args.kv_heads * args.splits;  // of a row
    // The row is the first whose units, with those before it, are more than `target`.
    const int target = unit / segments;
    int before = 0;
#pragma unroll 1
    for (int base = 0;; base += 32) {
        const int context = base + lane < args.n ? args.context_lens[base + lane] : 0;
        int sum = units_of(context);
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(kAllLanes, sum, distance);
            if (lane >= distance) sum += other;
        }
        const unsigned found = __ballot_sync(kAllLanes, before + sum > target);
        if (found == 0) {
            before += __shfl_sync(kAllLanes, sum, 31);
            continue;
        }
        const int source = __ffs(found) - 1;
        Segment segment;
        segment.row = base + source;
        segment.context = __shfl_sync(kAllLanes, context, source);
        segment.tiles = tiles_of(segment.context);
        const int units = units_of(segment.context);
        const int row_start = (before + __shfl_sync(kAllLanes, sum, source) - units) * segments;
        segment.head = (unit - row_start) / units;
        segment.start = row_start + segment.head * units;
        return segment;
    }
}

// Between the blocks. Not more of them than can have a unit for each warp, so that little work is
// not cut to shreds. Such that equal segments end where pieces do, where segments are short on the
// average, or equal and a piece gets no longer than sharing a segment takes: that costs more than
// the multiprocessors that are left idle. A block that shares two segments comes last at both.
__device__ inline Cut cut_between_blocks(int total, int segments, int grid, int warps,
                                         bool are_equal) {
    constexpr int kSharingUnits = 6;  // 1.5 us of one of 132 multiprocessors
    const int most = total / warps > 1 ? total / warps : 1;
    const int ctas = grid < most ? grid : most;
    const int of_a_block = (segments + grid - 1) / grid;
    const int whole = (segments + of_a_block - 1) / of_a_block;
    const bool are_short = total / (3 * warps) < segments;
    const bool few_idle = segments <= grid || whole * 10 >= grid * 9;
    const int longest = total / ctas + kSharingUnits, segment = total / segments;
    const bool as_fast = are_equal && of_a_block * segment <= longest;
    if (((are_short && few_idle) || as_fast) && whole < ctas) return Cut(total, whole);
    const int per_segment = ctas / segments;
    const bool fit = are_equal && per_segment > 1 && (segment - 1) / per_segment < longest;
    return fit ? Cut(segment, per_segment) : Cut(total, ctas);
}

// Every warp computes it by itself.
__device__ inline Piece find_piece(const DecodeArgs& args) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    constexpr int kAtOnce = 4;  // loads of a lane
    int units = 0, rows = 0;    // rows: with tokens
    int longest = 0;
#pragma unroll 1
    for (int base = lane; base < args.n; base += 32 * kAtOnce) {
        int contexts[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int row = base + 32 * i;
            contexts[i] = row < args.n ? args.context_lens[row] : 0;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            rows += contexts[i] > 0;
            units += units_of(contexts[i]);
            longest = longest > contexts[i] ? longest : contexts[i];
        }
    }
    units = sum_of_lanes(units), rows = sum_of_lanes(rows);
    Piece piece{};
    piece.has_empty_rows = rows < args.n;
    const int total = units * args.kv_heads * args.splits;
    const int grid = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
    if (total == 0) return piece;
    const bool are_equal = int64_t{rows} * units_of(max_of_lanes(longest)) == units;
    const int segments = rows * args.kv_heads * args.splits;
    piece.cut = cut_between_blocks(total, segments, grid, warps, are_equal);
    if (cta >= total / piece.cut.span * piece.cut.parts) return piece;
    piece.begin = piece.cut.begin(cta);
    piece.end = piece.cut.begin(cta + 1);
    const Cut between_warps(piece.end - piece.begin, warps);
    piece.warp_begin = piece.begin + between_warps.begin(warp);
    piece.warp_end = piece.begin + between_warps.begin(warp + 1);
    if (piece.warp_begin >= piece.warp_end) return piece;
    piece.first = find_segment(args, piece.warp_begin);
    if (piece.warp_begin >= piece.first.end()) {  // behind its tiles
        const bool more = piece.first.after() < piece.warp_end;
        piece.warp_begin = more ? piece.first.after() : piece.warp_end;
        if (more) advance(args, piece.first);
    }
    return piece;
}

// As an earlier call has left it; past the first-level cache, which may hold what was there before.
__device__ inline PlannedPiece load_planned(const PlannedPiece* at) {
    PlannedPiece planned;
    int4* to = reinterpret_cast<int4*>(&planned);
#pragma unroll
    for (int i = 0; i < int(sizeof(PlannedPiece) / sizeof(int4)); ++i) {
        to[i] = __ldcg(reinterpret_cast<const int4*>(at) + i);
    }
    return planned;
}

__device__ inline Piece piece_of(const PlannedPiece& planned) {
    Piece piece{};
    piece.cut.span = planned.cut_span, piece.cut.parts = planned.cut_parts;
    piece.cut.length = planned.cut_length, piece.cut.longer = planned.cut_longer;
    piece.begin = planned.begin, piece.end = planned.end;
    piece.warp_begin = planned.warp_begin, piece.warp_end = planned.warp_end;
    piece.first = {planned.row, planned.head, planned.context, tiles_of(planned.context),
                   planned.start};
    piece.has_empty_rows = planned.has_empty_rows;
    return piece;
}

// All but the first tiles, which whoever reads them adds.
__device__ inline void keep_piece(const Piece& piece, PlannedPiece* at) {
    at->cut_span = piece.cut.span, at->cut_parts = piece.cut.parts;
    at->cut_length = piece.cut.length, at->cut_longer = piece.cut.longer;
    at->begin = piece.begin, at->end = piece.end;
    at->warp_begin = piece.warp_begin, at->warp_end = piece.warp_end;
    at->row = piece.first.row, at->head = piece.first.head;
    at->context = piece.first.context, at->start = piece.first.start;
    at->has_empty_rows = piece.has_empty_rows;
}

// A warp's units in order, ahead of the computation: what is read next. kShifts: as column_of's.
template <bool kShifts>
struct Cursor {
    Segment segment;
    int unit, end;
    int stop;                 // the first unit beyond the segment, the piece or the 32 tiles
    int base;                 // tile of the segment whose block is lane 0's
    int blocks, next, first;  // of the 32 tiles from `base`, one a lane, of the 32 after them, and
                              // of the row's first ones, where its next head begins

    __device__ bool valid() const { return unit < end; }
    __device__ int tile() const { return unit - segment.start; }
    __device__ int block() const { return __shfl_sync(kAllLanes, blocks, tile() - base); }

    // Block of the lane's tile; loaded long before it is used, as the reads of KV wait for it.
    __device__ int load_blocks(const DecodeArgs& args, int first) const {
        const int tile = first + threadIdx.x % 32;
        if (tile >= segment.tiles) return 0;
        const int column = column_of<kShifts>(args, tile * kTileTokens);
        return args.block_table[segment.row * args.table_stride + column];
    }
    __device__ void find_stop() {
        const int last = segment.start + base + 32;
        stop = end < segment.end() ? end : segment.end();
        stop = stop < last ? stop : last;
    }
    __device__ Cursor(const DecodeArgs& args, const Piece& piece)
        : segment(piece.first), unit(piece.warp_begin), end(piece.warp_end), base(tile()) {
        blocks = load_blocks(args, base);
        next = load_blocks(args, base + 32);
        first = load_blocks(args, 0);
        find_stop();
    }
    __device__ void move(const DecodeArgs& args) {
        if (++unit != stop) return;
        if (unit == segment.end()) {
            unit = segment.after();
            if (unit >= end) return;
            const int row = segment.row;
            advance(args, segment);
            if (segment.row != row) first = load_blocks(args, 0);
            base = 0, blocks = first;
            next = load_blocks(args, 32);
        } else if (unit < end) {
            base += 32;
            blocks = next;
            next = load_blocks(args, base + 32);
        }
        find_stop();
    }
};

}  // namespace swiftapex
