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
// warp before it, slot 2w + 1 for the one that it starts and the next warp goes on with. The sums
// of a warp's last segment lie in shared memory, where its tiles were; those of an earlier one go
// to the workspace, as tiles still arrive.
struct MergeArea {
    uint64_t* barriers;  // [warps][kMaxStages]
    Segment* segments;   // [2 * warps]; tiles 0: the slot is empty
    float** sums;        // [2 * warps], where they are
    int* is_last;        // [2]
    char* of_warps;      // args.warp_bytes each

    static constexpr int kFixed =
        kMaxWarps * (kMaxStages * sizeof(uint64_t) + 2 * sizeof(Segment) + 2 * sizeof(float*)) + 16;
    static constexpr int kBeforeWarps =
        (kFixed + kStageAlignment - 1) / kStageAlignment * kStageAlignment;

    __device__ MergeArea(const DecodeArgs& args, char* memory)
        : barriers(reinterpret_cast<uint64_t*>(memory)),
          segments(reinterpret_cast<Segment*>(barriers + kMaxWarps * kMaxStages)),
          sums(reinterpret_cast<float**>(segments + 2 * kMaxWarps)),
          is_last(reinterpret_cast<int*>(sums + 2 * kMaxWarps)),
          of_warps(memory + kBeforeWarps) {}

    __device__ float* own_memory(const DecodeArgs& args) const {
        return reinterpret_cast<float*>(of_warps + threadIdx.x / 32 * args.warp_bytes);
    }
    __device__ float* in_workspace(const DecodeArgs& args) const {
        const int64_t warp = int64_t{blockIdx.x} * kMaxWarps + threadIdx.x / 32;
        return args.warp_partials + warp * slot_floats(args.heads, args.head_dim);
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

// The slots (a mask) from `begin` on, all of one segment, to the output, or, if other blocks have
// parts of it too, to the workspace. `turn` shifts the work to other threads, for the next segment.
__device__ inline void merge_slots(const DecodeArgs& args, const Piece& piece,
                                   const MergeArea& area, unsigned slots, int begin, int turn) {
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
        float4 sum{};
        for (unsigned rest = slots; rest != 0;) {
            // Some at once, as those in the workspace take a while to arrive.
            constexpr int kAtOnce = 4;
            float maxima[kAtOnce], weights[kAtOnce];
            float4 sums[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                maxima[i] = -INFINITY;
                if (rest == 0) continue;
                const float* of_warp = area.sums[__ffs(rest) - 1];
                rest &= rest - 1;
                maxima[i] = of_warp[scalars + head];
                weights[i] = of_warp[scalars + args.heads + head];
                sums[i] = reinterpret_cast<const float4*>(of_warp)[item];
            }
            float higher = maximum;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) higher = fmaxf(higher, maxima[i]);
            const float old_share = exp2_fast(maximum - higher);
            maximum = higher, weight *= old_share, sum = scaled(sum, old_share);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (maxima[i] == -INFINITY) continue;
                const float share = exp2_fast(maxima[i] - maximum);
                weight += share * weights[i];
                add_scaled(sum, sums[i], share);
            }
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

// Adds to a counter in device memory, after all that came before and before all that comes after,
// for the whole device; the value before.
__device__ inline int add_in_order(int32_t* counter, int x) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(x)
                 : "memory");
    return before;
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
                if (base + i > last) break;
                const float* partial = slot_of(base + i);
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
        const unsigned after = begins != 0 ? 0u - (begins & (0u - begins)) : 0u;
        merge_slots(args, piece, area, all & ~after & (0u - (1u << begin)), begin, turn);
        if (area.segments[begin].start < piece.begin) {
            from_before = begin;
        } else if (area.segments[begin].end() > piece.end) {
            to_next = begin;
        }
    }
    if (from_before < 0 && to_next < 0) return;

    // A block starts at most one shared segment, so its counter serves that one.
    const int shared = threadIdx.x == 0 ? from_before : to_next;
    int first = 0, others = 0;  // the blocks that have parts of it, how many but this one
    if (threadIdx.x < 2 && shared >= 0) {
        const Segment& segment = area.segments[shared];
        first = piece.cut.owner(segment.start);
        others = piece.cut.owner(segment.end() - 1) - first;
    }
    __syncthreads();  // the block's stores come before what these two threads do now
    if (threadIdx.x < 2) {
        const bool is_last = shared >= 0 && add_in_order(args.counters + first, 1) == others;
        if (is_last) args.counters[first] = 0;
        area.is_last[threadIdx.x] = is_last;
    }
    __syncthreads();
    for (int i = 0; i < 2; ++i) {
        if (!area.is_last[i]) continue;
        const Segment segment = area.segments[i == 0 ? from_before : to_next];
        merge_blocks(args, segment, piece.cut.owner(segment.start),
                     piece.cut.owner(segment.end() - 1));
    }
}

}  // namespace swiftapex
