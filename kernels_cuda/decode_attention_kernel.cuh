// The kernel, for any way to compute a tile. Each warp copies its own tiles of K and V into its own
// ring of stages and computes them by itself; the block meets only where a segment ends. The copies
// run ahead across the ends of segments, so that memory is read without a pause.
#pragma once

#include <atomic>

#include "kernels_cuda/decode_attention_merge.cuh"
#include "kernels_cuda/launch.h"

namespace swiftapex {

// 16 bytes from global to shared memory, or zeros, without waiting.
__device__ inline void copy_async(void* shared, const void* global, bool valid) {
#if __CUDA_ARCH__ >= 800
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address),
                 "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
#else
    *static_cast<uint4*>(shared) = valid ? *static_cast<const uint4*>(global) : uint4{};
#endif
}

__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all but the newest `pending` groups of copies.
__device__ inline void wait_copies(int pending) {
#if __CUDA_ARCH__ >= 800
    switch (pending) {
        case 0:
            asm volatile("cp.async.wait_group 0;" ::: "memory");
            break;
        case 1:
            asm volatile("cp.async.wait_group 1;" ::: "memory");
            break;
        case 2:
            asm volatile("cp.async.wait_group 2;" ::: "memory");
            break;
        default:
            asm volatile("cp.async.wait_group 3;" ::: "memory");
            break;
    }
#endif
}
constexpr int kMaxStages = 4;

__device__ inline void zero_empty_rows(const DecodeArgs& args) {
    const int quads = args.kv_heads * args.group * args.head_dim / 4;
    for (int row = blockIdx.x; row < args.n; row += gridDim.x) {
        if (args.context_lens[row] > 0) continue;
        for (int i = threadIdx.x; i < quads; i += blockDim.x) {
            store_out(args, row * args.out_stride + i * 4, float4{});
        }
    }
}

// Tile: begin(args, segment, scratch) loads the queries, copy(args, stage, ...) starts the copy of
// a tile, step(args, stage, scratch, valid) adds one, finish(args, sums, maxima, weights) leaves
// the warp's results; `scratch` is the warp's place for its sums, free until then.
template <class Tile>
__global__ void __launch_bounds__(kMaxWarps * 32, 1) decode_attention_kernel(DecodeArgs args) {
    extern __shared__ float4 shared[];
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int area_bytes = MergeArea::bytes(warps, args.heads, args.head_dim);
    const MergeArea area(reinterpret_cast<float*>(shared), warps, args.heads, args.head_dim);
    const int stage_bytes = Tile::stage_bytes(args.head_dim);
    char* stages = reinterpret_cast<char*>(shared) + area_bytes + warp * args.stages * stage_bytes;
    float* sums = area.sums + warp * args.heads * merge_stride(args.head_dim);

    zero_empty_rows(args);
    const Piece piece = find_piece(args);
    if (piece.begin == piece.end) return;

    Tile tile(args);
    CopyCursor cursor{piece.first, 0, 0};
    cursor.move_to(args, piece.begin + warp, piece.end);
    const auto copy_next = [&](int stage) {
        if (cursor.unit < piece.end) {
            tile.copy(args, stages + stage * stage_bytes, cursor);
            cursor.move_to(args, cursor.unit + warps, piece.end);
        }
        commit_copies();
    };
    for (int stage = 0; stage < args.stages; ++stage) copy_next(stage);

    int unit = piece.begin + warp, stage = 0;
    for (Segment segment = piece.first;; advance(args, segment)) {
        const int end = segment.end() < piece.end ? segment.end() : piece.end;
        tile.begin(args, segment, sums);
        for (; unit < end; unit += warps) {
            wait_copies(args.stages - 1);
            __syncwarp();
            const int valid = segment.context - (unit - segment.start) * kTileTokens;
            tile.step(args, stages + stage * stage_bytes, sums, valid);
            __syncwarp();
            copy_next(stage);
            if (++stage == args.stages) stage = 0;
        }
        tile.finish(args, sums, area.maxima + warp * kMaxGroup, area.weights + warp * kMaxGroup);
        merge_segment(args, piece, segment, area);
        if (end == piece.end) return;
        __syncthreads();  // the area is free again
    }
}

struct SharedLimit {
    int bytes, capability;  // 10 * major + minor
};

inline SharedLimit shared_limit() {
    static std::atomic<int> known[64];  // by device: bytes * 128 + capability
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

// Warps and stages: eight warps if three stages of each fit into shared memory, else fewer warps.
template <class Tile>
void launch_decode_attention(DecodeArgs args, int64_t num_ctas, cudaStream_t stream) {
    const int limit = shared_limit().bytes, stage_bytes = Tile::stage_bytes(args.head_dim);
    for (int wanted = 3; wanted > 0; --wanted) {
        for (int warps = kMaxWarps; warps > 0; warps /= 2) {
            const int area = MergeArea::bytes(warps, args.heads, args.head_dim);
            const int stages = (limit - area) / (warps * stage_bytes);
            if (area >= limit || stages < wanted) continue;
            args.stages = stages < kMaxStages ? stages : kMaxStages;
            const int bytes = area + warps * args.stages * stage_bytes;
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
