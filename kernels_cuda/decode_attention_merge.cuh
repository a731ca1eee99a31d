// From the warps' sums to the output: within a block through shared memory, between blocks through
// the workspace. Softmax weights are powers of two of (score - maximum), scores being scaled by
// log2(e) * scale; sums with different maxima are brought to the larger one.
#pragma once

#include "kernels_cuda/decode_attention_plan.cuh"
#include "kernels_cuda/dtype.cuh"

namespace swiftapex {

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Shared memory in front of the warps' stages.
struct MergeArea {
    float* sums;          // [warps][heads][merge_stride(head_dim)]
    float* maxima;        // [warps][kMaxGroup]
    float* weights;       // [warps][kMaxGroup], sums of
    float* total_max;     // [kMaxGroup]
    float* total_weight;  // [kMaxGroup]
    int* is_last;

    static __host__ __device__ int bytes(int warps, int heads, int head_dim) {
        return warps * heads * merge_stride(head_dim) * 4 + (warps + 1) * kMaxGroup * 2 * 4 + 16;
    }
    __device__ MergeArea(float* memory, int warps, int heads, int head_dim) {
        sums = memory;
        maxima = sums + warps * heads * merge_stride(head_dim);
        weights = maxima + warps * kMaxGroup;
        total_max = weights + warps * kMaxGroup;
        total_weight = total_max + kMaxGroup;
        is_last = reinterpret_cast<int*>(total_weight + kMaxGroup);
    }
};

// Four neighbouring elements of the output.
__device__ inline void store_out(const DecodeArgs& args, int64_t offset, float4 x) {
    const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (args.dtype == kFloat32) {
            static_cast<float*>(args.out)[offset + i] = values[i];
        } else if (args.dtype == kFloat16) {
            static_cast<__half*>(args.out)[offset + i] = from_float<__half>(values[i]);
        } else {
            static_cast<__nv_bfloat16*>(args.out)[offset + i] =
                from_float<__nv_bfloat16>(values[i]);
        }
    }
}

__device__ inline void add_scaled(float4& sum, float4 x, float weight) {
    sum.x += x.x * weight, sum.y += x.y * weight, sum.z += x.z * weight, sum.w += x.w * weight;
}

__device__ inline float4 scaled(float4 x, float weight) {
    return {x.x * weight, x.y * weight, x.z * weight, x.w * weight};
}

// Where the output of a segment's first head begins, and how many heads it has: the last part of a
// group may have fewer.
__device__ inline int64_t out_offset(const DecodeArgs& args, const Segment& segment, int& heads) {
    const int kv_head = segment.head / args.splits, split = segment.head % args.splits;
    const int first = split * args.heads;
    heads = args.group - first < args.heads ? args.group - first : args.heads;
    return segment.row * args.out_stride + (int64_t{kv_head} * args.group + first) * args.head_dim;
}

// The block's warps have left their sums in `area`. Writes the output if the segment is all this
// block's, else a partial result to the workspace; the last block to do so for a segment merges
// them, in the order of the blocks, so that the bits do not depend on which one that is.
__device__ inline void merge_segment(const DecodeArgs& args, const Piece& piece,
                                     const Segment& segment, const MergeArea& area) {
    const int warps = blockDim.x / 32, stride = merge_stride(args.head_dim);
    const int quads = args.head_dim / 4;
    int heads;
    const int64_t offset = out_offset(args, segment, heads);
    const bool starts_here = segment.start >= piece.begin;
    const bool is_whole = starts_here && segment.end() <= piece.end;
    const int64_t slot = slot_floats(args.heads, args.head_dim);
    // A piece has at most one segment from an earlier block, its slot 0, and one that starts here
    // and goes on in the next, its slot 1.
    float* partial = args.partials + (2 * int64_t{blockIdx.x} + starts_here) * slot;

    __syncthreads();
    for (int item = threadIdx.x; item < heads * quads; item += blockDim.x) {
        const int head = item / quads, dim = item % quads * 4;
        float maximum = -INFINITY, weight = 0.0f;
        for (int w = 0; w < warps; ++w) {
            maximum = fmaxf(maximum, area.maxima[w * kMaxGroup + head]);
        }
        float4 sum{};
        for (int w = 0; w < warps; ++w) {
            const float share = exp2_fast(area.maxima[w * kMaxGroup + head] - maximum);
            weight += share * area.weights[w * kMaxGroup + head];
            const float* of_warp = area.sums + (w * args.heads + head) * stride + dim;
            add_scaled(sum, *reinterpret_cast<const float4*>(of_warp), share);
        }
        if (is_whole) {
            store_out(args, offset + head * args.head_dim + dim, scaled(sum, 1.0f / weight));
            continue;
        }
        __stcg(reinterpret_cast<float4*>(partial + head * args.head_dim + dim), sum);
        if (dim == 0) {
            float* scalars = partial + args.heads * args.head_dim;
            __stcg(scalars + head, maximum);
            __stcg(scalars + args.heads + head, weight);
        }
    }
    if (is_whole) return;

    const int first = piece.owner(segment.start), last = piece.owner(segment.end() - 1);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        // A block starts at most one shared segment, so its counter serves that one.
        const bool is_last = atomicAdd(args.counters + first, 1) == last - first;
        if (is_last) args.counters[first] = 0;
        *area.is_last = is_last;
    }
    __syncthreads();
    if (!*area.is_last) return;
    __threadfence();

    const auto slot_of = [&](int cta) {
        return args.partials + (2 * int64_t{cta} + (cta == first)) * slot;
    };
    const int lane = threadIdx.x % 32, scalars = args.heads * args.head_dim;
    for (int head = threadIdx.x / 32; head < heads; head += warps) {
        float maximum = -INFINITY, weight = 0.0f;
        for (int cta = first + lane; cta <= last; cta += 32) {
            maximum = fmaxf(maximum, __ldcg(slot_of(cta) + scalars + head));
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, distance));
        }
        for (int cta = first + lane; cta <= last; cta += 32) {
            const float* values = slot_of(cta) + scalars + head;
            weight += exp2_fast(__ldcg(values) - maximum) * __ldcg(values + args.heads);
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            weight += __shfl_xor_sync(0xffffffffu, weight, distance);
        }
        if (lane == 0) area.total_max[head] = maximum, area.total_weight[head] = weight;
    }
    __syncthreads();
    for (int item = threadIdx.x; item < heads * quads; item += blockDim.x) {
        const int head = item / quads, dim = item % quads * 4;
        float4 sum{};
#pragma unroll 4
        for (int cta = first; cta <= last; ++cta) {
            const float* partial_of = slot_of(cta);
            const float share =
                exp2_fast(__ldcg(partial_of + scalars + head) - area.total_max[head]);
            const float* values = partial_of + head * args.head_dim + dim;
            add_scaled(sum, __ldcg(reinterpret_cast<const float4*>(values)), share);
        }
        store_out(args, offset + head * args.head_dim + dim,
                  scaled(sum, 1.0f / area.total_weight[head]));
    }
}

}  // namespace swiftapex
