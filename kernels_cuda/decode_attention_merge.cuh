// From the warps' sums to the output. A warp writes the output of its whole segments by itself;
// what it has of others stays in shared memory, is merged there with what the block's other warps
// have, and, for segments that other blocks share, through the workspace. Softmax weights are
// powers of two of (score - maximum), scores being scaled by log2(e) * scale; sums with different
// maxima are brought to the larger one.
#pragma once

#include <type_traits>

#include "kernels_cuda/async_copy.cuh"
#include "kernels_cuda/decode_attention_plan.cuh"
#include "kernels_cuda/dtype.cuh"

namespace swiftapex {

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

constexpr int kStageAlignment = 1024;  // what the tensor memory accelerator's swizzle wants
constexpr int kBlocksAtOnce = 16;      // whose parts a warp adds up
constexpr int kGatheredBytes = kBlocksAtOnce * 32 * sizeof(float4);

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
        kMaxWarps * (kMaxStages * sizeof(uint64_t) + 2 * sizeof(Segment) + 2 * sizeof(float*)) +
        2 * sizeof(int2);
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

// Four neighbouring elements of the output. Out: its type, void if that is known at run time alone.
template <class Out>
__device__ inline void store_out(const DecodeArgs& args, int64_t offset, float4 x) {
    const float values[4] = {x.x, x.y, x.z, x.w};
    if constexpr (!std::is_void_v<Out>) {
        Pack<Out, 4> pack;
#pragma unroll
        for (int i = 0; i < 4; ++i) pack.value[i] = from_float<Out>(values[i]);
        store_pack(static_cast<Out*>(args.out) + offset, pack);
    } else {
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
}

__device__ inline void add_scaled(float4& sum, float4 x, float weight) {
    sum.x += x.x * weight, sum.y += x.y * weight, sum.z += x.z * weight, sum.w += x.w * weight;
}

__device__ inline float4 scaled(float4 x, float weight) {
    return {x.x * weight, x.y * weight, x.z * weight, x.w * weight};
}

// The q heads of a segment: the last part of a group may have fewer than args.heads. kSplits:
// whether groups may be taken in parts.
struct Heads {
    int first, count;
};
template <bool kSplits>
__device__ inline Heads heads_of(const DecodeArgs& args, const Segment& segment) {
    if (!kSplits) return {segment.head * args.group, args.group};
    const int kv_head = kv_head_of(args, segment.head);
    const int skipped = (segment.head - kv_head * args.splits) * args.heads;
    const int rest = args.group - skipped;
    return {kv_head * args.group + skipped, rest < args.heads ? rest : args.heads};
}

__device__ inline float max_of_lanes(float x) {
    // As integers of the same order, which one instruction compares.
    const int bits = __float_as_int(x), order = bits ^ ((bits >> 31) & 0x7fffffff);
    const int highest = max_of_lanes(order);
    return __int_as_float(highest ^ ((highest >> 31) & 0x7fffffff));
}

__device__ inline float sum_of_lanes(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(kAllLanes, x, distance);
    }
    return x;
}

// Where a segment's parts lie, in order: what warps of this block have left.
struct PartsOfWarps {
    const float* const* sums;  // of the first warp's slots
    bool starts;               // in the first warp
    int count;
    __device__ const float* at(int i) const { return sums[2 * i + (i == 0 && starts)]; }
    template <class T>
    static __device__ T load(const T* from) {
        return *from;
    }
};

// What blocks have left in the workspace: read past the first-level cache.
struct PartsOfBlocks {
    const float* sums;  // of the first block's slots
    int slot;           // floats
    int count;
    __device__ const float* at(int i) const { return sums + (i == 0 ? 1 : 2 * i) * slot; }
    template <class T>
    static __device__ T load(const T* from) {
        return __ldcg(from);
    }
};

// body(i) for i < count, kMost at most. What is not needed is jumped over by fours.
template <int kMost, class Body>
__device__ inline void for_each_part(int count, Body body) {
    constexpr int kStep = kMost < 4 ? kMost : 4;
    static_assert(kMost % kStep == 0);
#pragma unroll
    for (int first = 0; first < kMost; first += kStep) {
        if (first >= count) break;
#pragma unroll
        for (int i = first; i < first + kStep; ++i) {
            if (i < count) body(i);
        }
    }
}

// By a warp: a segment's sums of kHeads heads from `first` on, from parts to the output, or, if
// `partial` is not null, to a part that is larger. Each lane takes the scalars of one part of 32,
// and four dims of kAtOnce parts at once: what is read takes a while to arrive.
//
// kGathers: what lies in device memory is copied to `memory` first, kGatheredBytes at most. Loads
// would have to wait for room in the first-level cache, of which shared memory leaves little.
template <class Out, int kHeads, int kAtOnce, bool kGathers, class Parts>
__device__ inline void merge_heads(const DecodeArgs& args, int row, const Heads& heads,
                                   const Parts& parts, int first, float* partial,
                                   float* memory = nullptr) {
    static_assert(32 % kAtOnce == 0);
    static_assert(!kGathers || (kHeads == 1 && kAtOnce * 32 * sizeof(float4) <= kGatheredBytes));
    const int lane = threadIdx.x % 32;
    const int quads = args.head_dim / 4, scalars = args.heads * args.head_dim;
    const int64_t out = row * args.out_stride + int64_t{heads.first} * args.head_dim;
    const auto head_at = [&](int h) { return first + h < heads.count ? first + h : first; };
#pragma unroll 1
    for (int quad = lane; quad - lane < quads; quad += 32) {
        const auto place_of = [&](int head) {
            return place_in_slot(args, head, quad < quads ? quad : 0);
        };
        float maximum[kHeads], weight[kHeads], shares[kHeads], weights[kHeads];
        float4 sum[kHeads];
#pragma unroll
        for (int h = 0; h < kHeads; ++h) maximum[h] = -INFINITY, weight[h] = 0.0f, sum[h] = {};
#pragma unroll 1
        for (int done = 0; done < parts.count; done += kAtOnce) {
            const int rest = parts.count - done;
            if (done % 32 == 0) {
                const float* of_lane = parts.at(done + (lane < rest ? lane : 0)) + scalars;
#pragma unroll
                for (int h = 0; h < kHeads; ++h) {
                    shares[h] = Parts::load(of_lane + head_at(h));
                    weights[h] = Parts::load(of_lane + args.heads + head_at(h));
                }
            }
            float4 sums[kHeads][kGathers ? 1 : kAtOnce];
            float4* const gathered = reinterpret_cast<float4*>(memory) + lane;
            for_each_part<kAtOnce>(rest, [&](int i) {
                const float4* part = reinterpret_cast<const float4*>(parts.at(done + i));
#pragma unroll
                for (int h = 0; h < kHeads; ++h) {
                    const float4* from = part + place_of(head_at(h));
                    if constexpr (kGathers) {
                        copy_async(gathered + 32 * i, from);
                    } else {
                        sums[h][i] = Parts::load(from);
                    }
                }
            });
            if constexpr (kGathers) {
                commit_copies();
                wait_copies(0);
            }
            if (done % 32 == 0) {
#pragma unroll
                for (int h = 0; h < kHeads; ++h) {
                    if (lane >= rest) shares[h] = -INFINITY, weights[h] = 0.0f;
                    const float higher = fmaxf(maximum[h], max_of_lanes(shares[h]));
                    const float old_share = exp2_fast(maximum[h] - higher);
                    shares[h] = exp2_fast(shares[h] - higher);
                    maximum[h] = higher;
                    weight[h] = weight[h] * old_share + sum_of_lanes(shares[h] * weights[h]);
                    sum[h] = scaled(sum[h], old_share);
                }
            }
            for_each_part<kAtOnce>(rest, [&](int i) {
#pragma unroll
                for (int h = 0; h < kHeads; ++h) {
                    const float4 x = kGathers ? gathered[32 * i] : sums[h][i];
                    add_scaled(sum[h], x, __shfl_sync(kAllLanes, shares[h], done % 32 + i));
                }
            });
        }
        if (quad >= quads) continue;
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
            const int head = first + h;
            if (head >= heads.count) break;
            if (partial == nullptr) {
                const float4 result = scaled(sum[h], __fdividef(1.0f, weight[h]));
                store_out<Out>(args, out + head * args.head_dim + quad * 4, result);
                continue;
            }
            __stcg(reinterpret_cast<float4*>(partial) + place_of(head), sum[h]);
            if (quad == 0) {
                __stcg(partial + scalars + head, maximum[h]);
                __stcg(partial + scalars + args.heads + head, weight[h]);
            }
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

// By the whole block, once its warps have left what they have in the area: what its warps share,
// then what blocks share, by the one of them that comes last.
template <class Tile>
__device__ inline void merge_piece(const DecodeArgs& args, const Piece& piece,
                                   const MergeArea& area) {
    using Out = typename Tile::Out;
    // What a warp takes at once: as much as the registers allow. Spilling them costs more.
    constexpr int kHeads = Tile::kWarps > 12 ? 2 : 4;
    __syncthreads();
    // A segment's slots lie side by side: they begin where a warp starts one, and at the first.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int slot = slot_floats(args.heads, args.head_dim);
    const bool used = lane < 2 * warps && area.segments[lane].tiles > 0;
    const unsigned all = __ballot_sync(kAllLanes, used);
    if (all == 0) return;
    const unsigned begins = (all & 0xaaaaaaaau) | (all & (0u - all));
    // All segments at once, each by a team of warps. Where there are many, each has few parts, and
    // a warp many heads: it takes several at once.
    const int segments = __popc(begins), team = segments < warps ? warps / segments : 1;
    unsigned rest = begins;
#pragma unroll 1
    for (int i = 0; rest != 0; ++i) {
        const unsigned begin = rest & (0u - rest);
        rest ^= begin;
        if (i % (warps / team) != warp / team) continue;
        const unsigned next = rest & (0u - rest);  // bit of the next segment; 0: there is none
        const unsigned slots = all & (next - 1) & (0u - begin);
        const int first = __ffs(slots) - 1;
        const Segment segment = area.segments[first];
        const Heads heads = heads_of<Tile::kSplits>(args, segment);
        const bool starts_here = segment.start >= piece.begin;
        const bool is_whole = starts_here && segment.end() <= piece.end;
        float* partial = args.partials + (2 * int64_t{blockIdx.x} + starts_here) * slot;
        if (is_whole) partial = nullptr;
        const PartsOfWarps parts{area.sums + first / 2 * 2, first % 2 != 0, __popc(slots)};
        if (segments > 3) {
#pragma unroll 1
            for (int head = warp % team * kHeads; head < heads.count; head += team * kHeads) {
                merge_heads<Out, kHeads, 2, false>(args, segment.row, heads, parts, head, partial);
            }
        } else {
#pragma unroll 1
            for (int head = warp % team; head < heads.count; head += team) {
                merge_heads<Out, 1, 2 * kHeads, false>(args, segment.row, heads, parts, head,
                                                       partial);
            }
        }
    }
    // The slots of the segments that other blocks share; -1: there is none.
    int from_before = __ffs(all) - 1, to_next = 31 - __clz(static_cast<int>(begins));
    if (area.segments[from_before].start >= piece.begin) from_before = -1;
    if (to_next == from_before || area.segments[to_next].end() <= piece.end) to_next = -1;
    if (from_before < 0 && to_next < 0) return;

    // By two lanes of the last warp, which merges least. A block starts at most one shared segment,
    // so its counter serves that one.
    const bool counts = warp == warps - 1 && lane < 2;
    const int shared = lane == 0 ? from_before : to_next;
    int first = 0, count = 0;  // the blocks that have parts of it
    if (counts && shared >= 0) {
        const Segment& segment = area.segments[shared];
        first = piece.cut.owner(segment.start);
        count = piece.cut.owner(segment.end() - 1) - first + 1;
    }
    __syncthreads();  // the block's stores come before what these two lanes do now
    if (counts) {
        const bool is_last = shared >= 0 && add_in_order(args.counters + first, 1) == count - 1;
        if (is_last) args.counters[first] = 0;
        area.to_merge[lane] = {first, is_last ? count : 0};
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        const int2 blocks = area.to_merge[i];
        if (blocks.y == 0) continue;
        const Segment segment = area.segments[i == 0 ? from_before : to_next];
        const PartsOfBlocks parts{args.partials + 2 * int64_t{blocks.x} * slot, slot, blocks.y};
        const Heads heads = heads_of<Tile::kSplits>(args, segment);
#pragma unroll 1
        for (int head = warp; head < heads.count; head += warps) {
            merge_heads<Out, 1, kBlocksAtOnce, Tile::kGathers>(
                args, segment.row, heads, parts, head, nullptr, area.own_memory(args));
        }
    }
}

}  // namespace swiftapex
