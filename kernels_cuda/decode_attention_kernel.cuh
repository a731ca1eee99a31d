// The kernel, for any way to compute a tile. Each warp reads its own tiles of K and V and computes
// them by itself, reading ahead across the ends of segments; the block meets only at its end.
#pragma once

#include <atomic>

#include "kernels_cuda/decode_attention_merge.cuh"
#include "kernels_cuda/dependent_launch.cuh"
#include "kernels_cuda/launch.h"

namespace swiftapex {

template <class Out>
__device__ inline void zero_empty_rows(const DecodeArgs& args) {
    const int quads = args.kv_heads * args.group * args.head_dim / 4;
    for (int row = blockIdx.x; row < args.n; row += gridDim.x) {
        if (args.context_lens[row] > 0) continue;
        for (int i = threadIdx.x; i < quads; i += blockDim.x) {
            store_out<Out>(args, row * args.out_stride + i * 4, float4{});
        }
    }
}

// keeps: this call keeps a plan, which the next kernel reads before it waits for this one. So that
// one starts when this one is done, and finds what each warp's first lane has written.
__device__ inline void meet_neighbours(bool keeps) {
    if (keeps && threadIdx.x % 32 == 0) __threadfence();
    wait_for_kernel_before();
    if (!keeps) let_next_kernel_start();
}

// The lengths, the block table and all KV but a row's newest token are read while the kernel before
// this one may still run: a Tile that is launched so waits before it reads the newest ones.
//
// What each warp has to do is found by the first call of a pass and kept for those of other layers,
// where a Tile can (kKeepsPlan): their first reads of KV then wait for one read, not for three.
//
// Tile: start(args, cursor, kept) begins to read ahead, and notes what it reads if `kept` is not
// null; start_planned(args, planned) and go_on_planned(args, planned) do so by these notes.
// load_queries(args, segment), before begin(args) goes over to that segment; step(args, valid,
// cursor) adds the tile that was read first and reads ahead. Then output(args, segment) writes the
// result, or finish(args, slot) leaves the warp's sums. A tile has its warp's memory for itself
// until it leaves its sums at the beginning of it. Out: as store_out's; Cursor: of its block sizes;
// kWarps: at most; kMinStages: of a warp, at least; kCapability: the least; kSplits: as heads_of's;
// kGathers: as merge_heads's, in its warp's memory.
template <class Tile>
__device__ inline void decode_attention_of_block(const DecodeArgs& args) {
    extern __shared__ __align__(kStageAlignment) char shared[];
    const MergeArea area(args, shared);
    const int warp = threadIdx.x / 32;

    Tile tile(args, area.own_memory(args), area.barriers + warp * kMaxStages);
    PlannedPiece* const of_warp = args.plan + blockIdx.x * kMaxWarps + warp;
    const bool is_planned = Tile::kKeepsPlan && args.is_planned;
    const bool keeps = Tile::kKeepsPlan && !is_planned && args.plan != nullptr;
    PlannedPiece* const kept = keeps && threadIdx.x % 32 == 0 ? of_warp : nullptr;
    Piece piece;
    PlannedPiece planned;
    if (is_planned) {
        planned = load_planned(of_warp);
        piece = piece_of(planned);
        if constexpr (Tile::kKeepsPlan) tile.start_planned(args, planned);
    } else {
        piece = find_piece(args);
        if (kept != nullptr) keep_piece(piece, kept);
    }
    if (threadIdx.x % 32 < 2) area.segments[2 * warp + threadIdx.x % 32].tiles = 0;
    __syncwarp();
    if (piece.warp_begin == piece.warp_end) {
        meet_neighbours(keeps);
    } else {
        typename Tile::Cursor cursor(args, piece);
        if (is_planned) {
            for (int i = 0; i < args.stages && cursor.valid(); ++i) cursor.move(args);
        } else {
            tile.start(args, cursor, kept);
        }
        meet_neighbours(keeps);
        int unit = piece.warp_begin;
        Segment segment = piece.first, next = segment;
        tile.load_queries(args, segment);
        if constexpr (Tile::kKeepsPlan) {
            if (is_planned) tile.go_on_planned(args, planned);
        }
        for (;; segment = next, unit = segment.start) {
            const int end = segment.end() < piece.warp_end ? segment.end() : piece.warp_end;
            const bool is_last = segment.after() >= piece.warp_end;
            tile.begin(args);
            if (!is_last) {
                advance(args, next);
                tile.load_queries(args, next);
            }
            for (; unit < end; ++unit) {
                const int valid = segment.context - (unit - segment.start) * kTileTokens;
                tile.step(args, valid, cursor);
            }
            const bool starts_here = segment.start >= piece.warp_begin;
            if (starts_here && segment.end() <= piece.warp_end) {
                tile.output(args, segment);
            } else {
                float* sums = is_last ? area.own_memory(args) : area.in_workspace(args);
                tile.finish(args, sums);
                if (threadIdx.x % 32 == 0) {
                    area.segments[2 * warp + starts_here] = segment;
                    area.sums[2 * warp + starts_here] = sums;
                }
            }
            if (is_last) break;
        }
    }
    if (piece.has_empty_rows) zero_empty_rows<typename Tile::Out>(args);
    if (piece.begin < piece.end) merge_piece<Tile>(args, piece, area);
}

// Not compiled for GPUs on which it is never launched.
template <class Tile>
__global__ void __launch_bounds__(Tile::kWarps * 32, 1)
    decode_attention_kernel(const __grid_constant__ DecodeArgs args) {
#ifdef __CUDA_ARCH__
    if constexpr (__CUDA_ARCH__ >= 10 * Tile::kCapability) decode_attention_of_block<Tile>(args);
#endif
}

struct DeviceLimits {
    int shared_bytes, capability;  // of a block; 10 * major + minor
};

inline DeviceLimits device_limits() {
    static std::atomic<int> known[64];  // by device: shared_bytes / 16 * 2048 + capability
    int device = 0;
    check("decode_attention", cudaGetDevice(&device));
    int value = device < 64 ? known[device].load() : 0;
    if (value == 0) {
        int bytes = 0, major = 0, minor = 0;
        const auto read = [&](int& into, cudaDeviceAttr what) {
            check("decode_attention", cudaDeviceGetAttribute(&into, what, device));
        };
        read(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
        read(major, cudaDevAttrComputeCapabilityMajor);
        read(minor, cudaDevAttrComputeCapabilityMinor);
        value = bytes / 16 * 2048 + major * 10 + minor;
        if (device < 64) known[device].store(value);
    }
    const int capability = value % 2048, cap = capability_cap();
    return {value / 2048 * 16, cap > 0 && cap < capability ? cap : capability};
}

// Warps and stages: the most tiles in flight, and of equal choices the most warps. As many for each
// of a multiprocessor's four schedulers: at 8 multiprocessors the one with most work decides.
template <class Tile>
void launch_decode_attention(DecodeArgs args, int64_t num_ctas, cudaStream_t stream) {
    const int limit = device_limits().shared_bytes;
    const int slot = slot_floats(args.heads, args.head_dim);
    int best_warps = 0, bytes = 0;
    for (int warps = Tile::kWarps; warps > 0; warps -= warps > 4 ? 4 : 1) {
        for (int stages = Tile::kMinStages; stages <= kMaxStages; ++stages) {
            const int warp_bytes = Tile::warp_bytes(args, stages);
            const int needed = MergeArea::kBeforeWarps + warps * warp_bytes;
            if (needed > limit || warps * stages <= best_warps * args.stages) continue;
            best_warps = warps, args.stages = stages, args.warp_bytes = warp_bytes, bytes = needed;
        }
    }
    require(best_warps > 0, "decode_attention: a tile does not fit into shared memory");
    args.warp_partials = args.partials + 2 * num_ctas * slot;
    const auto kernel = decode_attention_kernel<Tile>;
    check("decode_attention",
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    if constexpr (Tile::kCapability >= 90) {
        launch_dependent("decode_attention", kernel, num_ctas, best_warps * 32, bytes, stream,
                         args);
    } else {
        kernel<<<static_cast<unsigned>(num_ctas), best_warps * 32, bytes, stream>>>(args);
        check_launch("decode_attention");
    }
}

}  // namespace swiftapex
