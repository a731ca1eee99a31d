// The kernel, for any way to compute a tile. Each warp reads its own tiles of K and V and computes
// them by itself, reading ahead across the ends of segments; the block meets only at its end.
#pragma once

#include <atomic>

#include "kernels_cuda/decode_attention_merge.cuh"
#include "kernels_cuda/launch.h"

namespace swiftapex {

__device__ inline void zero_empty_rows(const DecodeArgs& args) {
    const int quads = args.kv_heads * args.group * args.head_dim / 4;
    for (int row = blockIdx.x; row < args.n; row += gridDim.x) {
        if (args.context_lens[row] > 0) continue;
        for (int i = threadIdx.x; i < quads; i += blockDim.x) {
            store_out(args, row * args.out_stride + i * 4, float4{});
        }
    }
}

// Tile: start(args, cursor) begins to read ahead; begin(args, segment, scratch) loads the queries;
// step(args, scratch, valid, cursor) adds the tile that was read first and reads ahead;
// finish(args, slot) leaves the warp's sums. `scratch` is a slot that is free meanwhile.
template <class Tile>
__global__ void __launch_bounds__(Tile::kWarps * 32, 1) decode_attention_kernel(DecodeArgs args) {
    extern __shared__ float4 shared[];
    const MergeArea area(shared);
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int slot = slot_floats(args.heads, args.head_dim);
    float* from_before = area.slots + 2 * warp * slot;
    float* own = from_before + slot;

    const Piece piece = find_piece(args);
    zero_empty_rows(args);
    if (piece.begin == piece.end) return;
    if (threadIdx.x % 32 < 2) area.segments[2 * warp + threadIdx.x % 32].tiles = 0;
    __syncwarp();

    if (piece.warp_begin < piece.warp_end) {
        Cursor cursor(args, piece);
        Tile tile(args, area.slots + 2 * warps * slot);
        tile.start(args, cursor);
        int unit = piece.warp_begin;
        for (Segment segment = piece.first;; advance(args, segment)) {
            const int end = segment.end() < piece.warp_end ? segment.end() : piece.warp_end;
            tile.begin(args, segment, own);
            for (; unit < end; ++unit) {
                const int valid = segment.context - (unit - segment.start) * kTileTokens;
                tile.step(args, own, valid, cursor);
            }
            const bool starts_here = segment.start >= piece.warp_begin;
            tile.finish(args, starts_here ? own : from_before);
            if (starts_here && segment.end() <= piece.warp_end) {
                __syncwarp();
                store_whole(args, segment, own);
                __syncwarp();
            } else if (threadIdx.x % 32 == 0) {
                area.segments[2 * warp + starts_here] = segment;
            }
            if (end == piece.warp_end) break;
        }
    }
    merge_piece(args, piece, area);
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
    return {value / 2048 * 16, value % 2048};
}

// As many warps as the kernel is compiled for if shared memory has room for all of them, with two
// stages each where the kernel has stages, else fewer warps, and stages.
template <class Tile>
void launch_decode_attention(DecodeArgs args, int64_t num_ctas, cudaStream_t stream) {
    const int limit = device_limits().shared_bytes;
    const int stage = Tile::stage_bytes(args.head_dim);
    for (int stages = stage > 0 ? 2 : 1; stages > 0; --stages) {
        for (int warps = Tile::kWarps; warps > 0; warps = warps == 12 ? 8 : warps / 2) {
            const int area = MergeArea::bytes(warps, args.heads, args.head_dim);
            const int bytes = area + warps * stages * stage;
            if (bytes > limit) continue;
            args.stages = stages;
            const auto kernel = decode_attention_kernel<Tile>;
            check("decode_attention",
                  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
            kernel<<<static_cast<unsigned>(num_ctas), warps * 32, bytes, stream>>>(args);
            check_launch("decode_attention");
            return;
        }
    }
    throw std::invalid_argument("decode_attention: a tile does not fit into shared memory");
}

}  // namespace swiftapex
