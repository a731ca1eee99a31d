// From the warps' sums to the output. A warp writes the output of its whole segments by itself;
// what it has of others stays in shared memory, is merged there with what the block's other warps
// have, and, for segments that other blocks share, through the workspace. Softmax weights are
// powers of two of (score - maximum), scores being scaled by log2(e) * scale; sums with different
// maxima are brought to the larger one.
#pragma once

#include "kernels_cuda/decode_attention_plan.cuh"
#include "kernels_cuda/dtype.cuh"

namespace swiftapex {

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

constexpr int kMaxStages = 4;
constexpr int kStageAlignment = 1024;  // what the tensor memory accelerator's swizzle wants

// What the warps of a block leave for its end. Slot 2w is for the segment that warp w has from the
// warp before it, and in the workspace, as it is written while tiles still arrive in shared memory;
// slot 2w + 1 is for the segment that warp w starts and the next one goes on with.
struct MergeArea {
    uint64_t* barriers;  // [warps][kMaxStages]
    Segment* segments;   // [2 * warps]; tiles 0: the slot is empty
    int* is_last;        // [2]
    char* of_warps;      // args.warp_bytes each; the odd slots lie at their beginnings
    float* from_before;  // the even slots

    static constexpr int kFixed =
        kMaxWarps * (kMaxStages * sizeof(uint64_t) + 2 * sizeof(Segment)) + 16;
    static constexpr int kBeforeWarps =
        (kFixed + kStageAlignment - 1) / kStageAlignment * kStageAlignment;

    __device__ MergeArea(const DecodeArgs& args, char* memory)
        : barriers(reinterpret_cast<uint64_t*>(memory)),
          segments(reinterpret_cast<Segment*>(barriers + kMaxWarps * kMaxStages)),
          is_last(reinterpret_cast<int*>(segments + 2 * kMaxWarps)),
          of_warps(memory + kBeforeWarps),
          from_before(args.warp_partials +
                      int64_t{blockIdx.x} * kMaxWarps * slot_floats(args.heads, args.head_dim)) {}
    __device__ float* slot(const DecodeArgs& args, int i) const {
        return i % 2 == 0 ? from_before + i / 2 * slot_floats(args.heads, args.head_dim)
                          : reinterpret_cast<float*>(of_warps + i / 2 * args.warp_bytes);
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

// The q heads of a segment: the last part of a group may have fewer than args.heads.
struct Heads {
    int first, count;
};
__device__ inline Heads heads_of(const DecodeArgs& args, const Segment& segment) {
    const int kv_head = kv_head_of(args, segment.head);
    const int skipped = (segment.head - kv_head * args.splits) * args.heads;
    const int rest = args.group - skipped;
    return {kv_head * args.group + skipped, rest < args.heads ? rest : args.heads};
}

// By one warp: the output of a segment whose sums are all in `slot`.
__device__ inline void store_whole(const DecodeArgs& args, const Segment& segment,
                                   const float* slot) {
    const Heads heads = heads_of(args, segment);
    const int quads = args.head_dim / 4;
    const float* weights = slot + args.heads * (args.head_dim + 1);
    const int64_t out = segment.row * args.out_stride + int64_t{heads.first} * args.head_dim;
    for (int item = threadIdx.x % 32; item < heads.count * quads; item += 32) {
        const float4 sum = reinterpret_cast<const float4*>(slot)[item];
        store_out(args, out + item * 4, scaled(sum, 1.0f / weights[item / quads]));
    }
}

// Slots `begin` to `end` of the area, one segment's, to the output, or, if other blocks have parts
// of it too, to the workspace. `turn` shifts the work to other threads, for the next segment.
__device__ inline void merge_slots(const DecodeArgs& args, const Piece& piece,
                                   const MergeArea& area, int begin, int end, int turn) {
    const Segment segment = area.segments[begin];
    const Heads heads = heads_of(args, segment);
    const int quads = args.head_dim / 4, slot = slot_floats(args.heads, args.head_dim);
    const int scalars = args.heads * args.head_dim, items = heads.count * quads;
    const bool starts_here = segment.start >= piece.begin;
    const bool is_whole = starts_here && segment.end() <= piece.end;
    const int64_t out = segment.row * args.out_stride + int64_t{heads.first} * args.head_dim;
    float* partial = args.partials + (2 * int64_t{blockIdx.x} + starts_here) * slot;

    const int threads = blockDim.x, shift = turn * items % threads;
    for (int item = (threadIdx.x + threads - shift) % threads; item < items; item += threads) {
        const int head = item / quads;
        float maximum = -INFINITY, weight = 0.0f;
        for (int i = begin; i < end; ++i) {
            if (area.segments[i].tiles == 0) continue;
            maximum = fmaxf(maximum, area.slot(args, i)[scalars + head]);
        }
        float4 sum{};
        for (int i = begin; i < end; ++i) {
            if (area.segments[i].tiles == 0) continue;
            const float* of_warp = area.slot(args, i);
            const float share = exp2_fast(of_warp[scalars + head] - maximum);
            weight += share * of_warp[scalars + args.heads + head];
            add_scaled(sum, reinterpret_cast<const float4*>(of_warp)[item], share);
        }
        if (is_whole) {
            store_out(args, out + item * 4, scaled(sum, 1.0f / weight));
            continue;
        }
        __stcg(reinterpret_cast<float4*>(partial) + item, sum);
        if (item % quads == 0) {
            __stcg(partial + scalars + head, maximum);
            __stcg(partial + scalars + args.heads + head, weight);
        }
    }
}

// The partial results that the blocks first to last left for a segment, in this order, twelve at
// once, as each takes a while to arrive.
__device__ inline void merge_blocks(const DecodeArgs& args, const Segment& segment, int first,
                                    int last) {
    const Heads heads = heads_of(args, segment);
    const int quads = args.head_dim / 4, scalars = args.heads * args.head_dim;
    constexpr int kAtOnce = 12;
    const int64_t slot = slot_floats(args.heads, args.head_dim);
    const auto slot_of = [&](int cta) {
        return args.partials + (2 * int64_t{cta} + (cta == first)) * slot;
    };
    const int64_t out = segment.row * args.out_stride + int64_t{heads.first} * args.head_dim;
    for (int item = threadIdx.x; item < heads.count * quads; item += blockDim.x) {
        const int head = item / quads;
        float maximum = -INFINITY, weight = 0.0f;
        float4 sum{};
        for (int base = first; base <= last; base += kAtOnce) {
            float maxima[kAtOnce], weights[kAtOnce];
            float4 sums[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const float* partial = slot_of(base + i <= last ? base + i : last);
                maxima[i] = __ldcg(partial + scalars + head);
                weights[i] = __ldcg(partial + scalars + args.heads + head);
                sums[i] = __ldcg(reinterpret_cast<const float4*>(partial) + item);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (base + i > last) break;
                const float higher = fmaxf(maximum, maxima[i]);
                const float old_share = exp2_fast(maximum - higher);
                const float share = exp2_fast(maxima[i] - higher);
                maximum = higher;
                weight = weight * old_share + weights[i] * share;
                sum = scaled(sum, old_share);
                add_scaled(sum, sums[i], share);
            }
        }
        store_out(args, out + item * 4, scaled(sum, 1.0f / weight));
    }
}

// By the whole block, once its warps have left what they have in the area.
__device__ inline void merge_piece(const DecodeArgs& args, const Piece& piece,
                                   const MergeArea& area) {
    __syncthreads();
    // A segment's slots lie side by side: they begin where a warp starts one, and at the first.
    const int lane = threadIdx.x % 32, slots = blockDim.x / 16;
    const bool used = lane < slots && area.segments[lane].tiles > 0;
    const unsigned all = __ballot_sync(kAllLanes, used);
    unsigned begins = (all & 0xaaaaaaaau) | (all & (0u - all));
    int from_before = -1, to_next = -1;  // slots of the segments that other blocks share
    for (int turn = 0; begins != 0; ++turn) {
        const int begin = __ffs(begins) - 1;
        begins &= begins - 1;
        merge_slots(args, piece, area, begin, begins != 0 ? __ffs(begins) - 1 : slots, turn);
        if (area.segments[begin].start < piece.begin) {
            from_before = begin;
        } else if (area.segments[begin].end() > piece.end) {
            to_next = begin;
        }
    }
    if (from_before < 0 && to_next < 0) return;

    __threadfence();
    __syncthreads();
    if (threadIdx.x < 2) {
        const int slot = threadIdx.x == 0 ? from_before : to_next;
        area.is_last[threadIdx.x] = 0;
        if (slot >= 0) {
            // A block starts at most one shared segment, so its counter serves that one.
            const Segment& segment = area.segments[slot];
            const int first = piece.cut.owner(segment.start),
                      last = piece.cut.owner(segment.end() - 1);
            const bool is_last = atomicAdd(args.counters + first, 1) == last - first;
            if (is_last) args.counters[first] = 0;
            area.is_last[threadIdx.x] = is_last;
        }
    }
    __syncthreads();
    for (int i = 0; i < 2; ++i) {
        if (!area.is_last[i]) continue;
        __threadfence();
        const Segment segment = area.segments[i == 0 ? from_before : to_next];
        merge_blocks(args, segment, piece.cut.owner(segment.start),
                     piece.cut.owner(segment.end() - 1));
    }
}

}  // namespace swiftapex
