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

constexpr int kStageAlignment = 1024;  // what the tensor memory accelerator's swizzle wants

// What the warps of a block leave for its end. Slot 2w is for the segment that warp w has from the
// warp before it, slot 2w + 1 for the one that it starts and the next warp goes on with. The sums
// of a warp's last segment lie in shared memory, where its tiles were; those of an earlier one go
// to the workspace, as tiles still arrive.
struct MergeArea {
    uint64_t* barriers;  // [warps][kMaxStages]
    Segment* segments;   // [2 * warps]; tiles 0: the slot is empty
    float** sums;        // [2 * warps], where they are
    int2* to_merge;      // [2]: the first block and how many, 0 if this one does not merge them
    char* of_warps;      // args.warp_bytes each

    static constexpr int kFixed =
        kMaxWarps * (kMaxStages * sizeof(uint64_t) + 2 * sizeof(Segment) + 2 * sizeof(float*)) + 16;
    static constexpr int kBeforeWarps =
        (kFixed + kStageAlignment - 1) / kStageAlignment * kStageAlignment;

    __device__ MergeArea(const DecodeArgs& args, char* memory)
        : barriers(reinterpret_cast<uint64_t*>(memory)),
          segments(reinterpret_cast<Segment*>(barriers + kMaxWarps * kMaxStages)),
          sums(reinterpret_cast<float**>(segments + 2 * kMaxWarps)),
          to_merge(reinterpret_cast<int2*>(sums + 2 * kMaxWarps)),
          of_warps(memory + kBeforeWarps) {}

    __device__ float* own_memory(const DecodeArgs& args) const {
        return reinterpret_cast<float*>(of_warps + threadIdx.x / 32 * args.warp_bytes);
    }
    __device__ float* in_workspace(const DecodeArgs& args) const {
        const int64_t warp = int64_t{blockIdx.x} * kMaxWarps + threadIdx.x / 32;
        return args.warp_partials + warp * slot_floats(args.heads, args.head_dim);
    }
};

// Where a slot has four dims of a head, in such fours. Those of two heads lie apart by whole rows
// of banks, and lanes store sums of eight heads at once: so they are permuted.
__device__ inline int place_in_slot(const DecodeArgs& args, int head, int quad) {
    return head * (args.head_dim / 4) + (quad ^ (head & args.permuted));
}

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

// The slots (a mask), all of one segment, to the output, or, if other blocks have parts of it too,
// to the workspace. By `warps` warps, of which this one is number `warp`: each takes whole heads,
// kHeads of kSlots slots at once, as those in the workspace take a while to arrive.
template <int kHeads, int kSlots>
__device__ inline void merge_slots(const DecodeArgs& args, const Piece& piece,
                                   const MergeArea& area, unsigned slots, int warp, int warps) {
    const Segment segment = area.segments[__ffs(slots) - 1];
    const Heads heads = heads_of(args, segment);
    const int quads = args.head_dim / 4, slot = slot_floats(args.heads, args.head_dim);
    const int scalars = args.heads * args.head_dim;
    const bool starts_here = segment.start >= piece.begin;
    const bool is_whole = starts_here && segment.end() <= piece.end;
    const int64_t out = segment.row * args.out_stride + int64_t{heads.first} * args.head_dim;
    float* partial = args.partials + (2 * int64_t{blockIdx.x} + starts_here) * slot;

    const auto merge = [&](int first, int quad) {
        float maximum[kHeads], weight[kHeads];
        float4 sum[kHeads];
#pragma unroll
        for (int i = 0; i < kHeads; ++i) maximum[i] = -INFINITY, weight[i] = 0.0f, sum[i] = {};
        for (unsigned rest = slots; rest != 0;) {
            float maxima[kSlots][kHeads], weights[kSlots][kHeads];
            float4 sums[kSlots][kHeads];
#pragma unroll
            for (int j = 0; j < kSlots; ++j) {
                const bool exists = rest != 0;
                const float* of_warp = area.sums[exists ? __ffs(rest) - 1 : 0];
                rest &= rest - 1;
#pragma unroll
                for (int i = 0; i < kHeads; ++i) {
                    const int head = first + i * warps;
                    maxima[j][i] = -INFINITY;
                    if (!exists || head >= heads.count) continue;
                    maxima[j][i] = of_warp[scalars + head];
                    weights[j][i] = of_warp[scalars + args.heads + head];
                    const int place = place_in_slot(args, head, quad);
                    sums[j][i] = reinterpret_cast<const float4*>(of_warp)[place];
                }
            }
#pragma unroll
            for (int i = 0; i < kHeads; ++i) {
                float higher = maximum[i];
#pragma unroll
                for (int j = 0; j < kSlots; ++j) higher = fmaxf(higher, maxima[j][i]);
                const float old_share = exp2_fast(maximum[i] - higher);
                maximum[i] = higher, weight[i] *= old_share, sum[i] = scaled(sum[i], old_share);
#pragma unroll
                for (int j = 0; j < kSlots; ++j) {
                    if (maxima[j][i] == -INFINITY) continue;
                    const float share = exp2_fast(maxima[j][i] - higher);
                    weight[i] += share * weights[j][i];
                    add_scaled(sum[i], sums[j][i], share);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kHeads; ++i) {
            const int head = first + i * warps, item = head * quads + quad;
            if (head >= heads.count) break;
            if (is_whole) {
                store_out(args, out + item * 4, scaled(sum[i], 1.0f / weight[i]));
                continue;
            }
            __stcg(reinterpret_cast<float4*>(partial) + item, sum[i]);
            if (quad == 0) {
                __stcg(partial + scalars + head, maximum[i]);
                __stcg(partial + scalars + args.heads + head, weight[i]);
            }
        }
    };
    for (int quad = threadIdx.x % 32; quad < quads; quad += 32) {
        for (int head = warp; head < heads.count; head += kHeads * warps) merge(head, quad);
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

__device__ inline float max_of_lanes(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, distance));
    }
    return x;
}

__device__ inline float sum_of_lanes(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(kAllLanes, x, distance);
    }
    return x;
}

// The partial results that `count` blocks from `first` on left for a segment, in this order. A warp
// takes a head: of 32 blocks, each lane the scalars of one, and of eighteen the sums at once, as
// they take a while to arrive.
__device__ inline void merge_blocks(const DecodeArgs& args, const Segment& segment, int first,
                                    int count) {
    const Heads heads = heads_of(args, segment);
    const int quads = args.head_dim / 4, scalars = args.heads * args.head_dim;
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    constexpr int kAtOnce = 18;
    const int slot = slot_floats(args.heads, args.head_dim);
    const float* partials = args.partials + 2 * int64_t{first} * slot;
    const auto slot_of = [&](int i) { return partials + (i == 0 ? 1 : 2 * i) * slot; };
    const int64_t out = segment.row * args.out_stride + int64_t{heads.first} * args.head_dim;
    const auto merge = [&](int head, int quad) {
        const int item = head * quads + quad;
        float maximum = -INFINITY, weight = 0.0f;
        float4 sum{};
        for (int base = 0; base < count; base += 32) {
            const int here = count - base < 32 ? count - base : 32;
            const float* scalar = slot_of(base + (lane < here ? lane : 0)) + scalars + head;
            const float of_lane = lane < here ? __ldcg(scalar) : -INFINITY;
            const float weight_of_lane = lane < here ? __ldcg(scalar + args.heads) : 0.0f;
            float share = 0.0f;
            for (int part = 0; part < here; part += kAtOnce) {
                float4 sums[kAtOnce];
                const int loads = quad < quads ? here - part : 0;
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    sums[i] = float4{};
                    if (i >= loads) continue;
                    const float* partial = slot_of(base + part + i);
                    sums[i] = __ldcg(reinterpret_cast<const float4*>(partial) + item);
                }
                if (part == 0) {
                    const float higher = fmaxf(maximum, max_of_lanes(of_lane));
                    const float old_share = exp2_fast(maximum - higher);
                    share = exp2_fast(of_lane - higher);
                    maximum = higher;
                    weight = weight * old_share + sum_of_lanes(share * weight_of_lane);
                    sum = scaled(sum, old_share);
                }
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    add_scaled(sum, sums[i], __shfl_sync(kAllLanes, share, part + i));
                }
            }
        }
        if (quad < quads) store_out(args, out + item * 4, scaled(sum, 1.0f / weight));
    };
    for (int head = threadIdx.x / 32; head < heads.count; head += warps) {
        for (int quad = lane; quad - lane < quads; quad += 32) merge(head, quad);
    }
}

// By the whole block, once its warps have left what they have in the area. kSlots: of a head, where
// each warp has one at most.
template <int kHeads, int kSlots>
__device__ inline void merge_piece(const DecodeArgs& args, const Piece& piece,
                                   const MergeArea& area) {
    __syncthreads();
    // A segment's slots lie side by side: they begin where a warp starts one, and at the first.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const bool used = lane < 2 * warps && area.segments[lane].tiles > 0;
    const unsigned all = __ballot_sync(kAllLanes, used);
    if (all == 0) return;
    const unsigned begins = (all & 0xaaaaaaaau) | (all & (0u - all));
    // All segments at once, each by a team of warps. With more segments than warps, by one warp.
    const int segments = __popc(begins), team = segments < warps ? warps / segments : 1;
    int mine = warp / team;
    unsigned rest = begins;
    for (int i = 0; rest != 0; ++i) {
        const unsigned begin = rest & (0u - rest);
        rest ^= begin;
        if (i != mine) continue;
        mine += warps;
        const unsigned next = rest & (0u - rest);  // bit of the next segment; 0: there is none
        const unsigned slots = all & (next - 1) & (0u - begin);
        if (args.heads <= team) {
            merge_slots<1, kSlots>(args, piece, area, slots, warp % team, team);
        } else {
            merge_slots<kHeads, 2>(args, piece, area, slots, warp % team, team);
        }
    }
    // The slots of the segments that other blocks share; -1: there is none.
    int from_before = __ffs(all) - 1, to_next = 31 - __clz(static_cast<int>(begins));
    if (area.segments[from_before].start >= piece.begin) from_before = -1;
    if (to_next == from_before || area.segments[to_next].end() <= piece.end) to_next = -1;
    if (from_before < 0 && to_next < 0) return;

    // A block starts at most one shared segment, so its counter serves that one.
    const int shared = threadIdx.x == 0 ? from_before : to_next;
    int first = 0, count = 0;  // the blocks that have parts of it
    if (threadIdx.x < 2 && shared >= 0) {
        const Segment& segment = area.segments[shared];
        first = piece.cut.owner(segment.start);
        count = piece.cut.owner(segment.end() - 1) - first + 1;
    }
    __syncthreads();  // the block's stores come before what these two threads do now
    if (threadIdx.x < 2) {
        const bool is_last = shared >= 0 && add_in_order(args.counters + first, 1) == count - 1;
        if (is_last) args.counters[first] = 0;
        area.to_merge[threadIdx.x] = {first, is_last ? count : 0};
    }
    __syncthreads();
    for (int i = 0; i < 2; ++i) {
        const int2 blocks = area.to_merge[i];
        if (blocks.y == 0) continue;
        merge_blocks(args, area.segments[i == 0 ? from_before : to_next], blocks.x, blocks.y);
    }
}

}  // namespace swiftapex
