// A tile on the tensor cores of compute capability 9.0, where the tensor memory accelerator brings
// tiles to shared memory: one instruction for K and V of a tile, so that a multiprocessor can read
// more than its load instructions could. The products are those of decode_attention_mma.cu.
#include "kernels_cuda/decode_attention_columns.cuh"
#include "kernels_cuda/driver.h"
#include "kernels_cuda/tensor_memory.cuh"

namespace swiftapex {
namespace {

// The same, in a register: else it would be computed anew for each tile.
__device__ inline unsigned held(unsigned x) { return __shfl_sync(kAllLanes, x, threadIdx.x % 32); }

// A stage: K, then V, each by parts of 64 dims, 16 rows of 128 bytes each, whose 16-byte chunks the
// accelerator permutes: chunk c of row r lies at c ^ (r % 8), so that the rows of an 8x8 matrix lie
// in different banks. Sum i has the dims 16 i + g and 8 more.
template <class T, int kHeadDim, int kColumns>
struct TmaTile : Columns<T, kHeadDim / 16, kColumns> {
    using Base = Columns<T, kHeadDim / 16, kColumns>;
    using Base::g, Base::t, Base::sums, Base::weights;
    static constexpr int kSteps = kHeadDim / 16, kParts = kHeadDim / 64;
    static constexpr int kPartBytes = kTileTokens * 128, kStageBytes = 2 * kParts * kPartBytes;
    // As many as the registers allow.
    static constexpr int kWarps = kHeadDim * kColumns <= 64    ? 16
                                  : kHeadDim * kColumns <= 128 ? 12
                                                               : 8;

    // Whether the registers have room for the next segment's queries.
    static constexpr bool kAhead = kHeadDim * kColumns <= 128;

    unsigned queries[kSteps][kColumns][2];
    unsigned next_queries[kAhead ? kSteps : 1][kColumns][2];
    const T* next_q;    // this lane's, of the next segment
    unsigned barriers;  // of this warp, in shared memory
    int stage;          // whose tile comes next
    unsigned parity;    // of that stage's barrier
    int free_stage;     // whose tile was taken last
    int next_row;       // of the KV: K of the tile that it gets; -1: none
    unsigned stages;    // in shared memory
    unsigned k, v;      // of the first stage: the chunk whose address this lane gives first

    using Out = T;
    using Cursor = swiftapex::Cursor<true>;
    static constexpr int kCapability = 90;
    static constexpr bool kKeepsPlan = true;
    static constexpr int kMinStages = 2;
    static constexpr bool kSplits = false;
    static constexpr bool kGathers = true;
    static int warp_bytes(const DecodeArgs&, int stages) { return stages * kStageBytes; }
    static_assert(slot_floats(8 * kColumns, kHeadDim) * 4 <= kMinStages * kStageBytes &&
                      kGatheredBytes <= kMinStages * kStageBytes,
                  "what is left for merges, and gathered there, lies where the stages were");

    __device__ TmaTile(const DecodeArgs& args, float* memory, uint64_t* warp_barriers)
        : barriers(held(shared_address(warp_barriers))),
          stage(0),
          parity(0),
          next_row(-1),
          stages(held(shared_address(memory))) {
        const int lane = threadIdx.x % 32;
        // K: matrices of rows 0-7 and 8-15, then the same of the next chunk. V, to be transposed:
        // two chunks of rows 0-7, then the same of rows 8-15.
        const int k_token = lane % 16, v_token = lane % 8 + lane / 16 * 8;
        k = held(stages + k_token * 128 + (lane / 16 ^ k_token % 8) * 16);
        v = held(stages + kParts * kPartBytes + v_token * 128 + (lane / 8 % 2 ^ v_token % 8) * 16);
        if (lane == 0) {
            prefetch_map(args.kv_map);
#pragma unroll 1
            for (int i = 0; i < args.stages; ++i) init_barrier(barriers + i * 8);
            fence_accelerator();
        }
        __syncwarp();
    }

    // Early, as it takes a while.
    __device__ void find_next(const DecodeArgs& args, Cursor& cursor) {
        next_row = -1;
        if (!cursor.valid()) return;
        const int place = place_in_block<true>(args, cursor.tile() * kTileTokens);
        const int head = cursor.segment.head;
        next_row = (cursor.block() * args.kv_heads + head) * 2 * args.block_size + place;
        cursor.move(args);
    }

    __device__ void copy_next(const DecodeArgs& args, int target) {
        const int row = next_row;
        next_row = -1;
        if (row < 0 || threadIdx.x % 32 != 0) return;
        const unsigned barrier = barriers + target * 8;
        expect_bytes(barrier, kStageBytes);
        copy_box(stages + target * kStageBytes, args.kv_map, row, barrier);
    }

    __device__ void start(const DecodeArgs& args, Cursor& cursor, PlannedPiece* kept) {
        for (int i = 0; i < args.stages; ++i) {
            // A row's newest token may be what the kernel before this one writes.
            const bool is_newest = cursor.valid() && cursor.tile() == cursor.segment.tiles - 1;
            if (is_newest) wait_for_kernel_before();
            find_next(args, cursor);
            if (kept != nullptr) kept->rows[i] = next_row;
            if (kept != nullptr && i == 0) kept->is_newest = is_newest;
            copy_next(args, i);
        }
    }

    // The first tile, before the kernel before this one is done. The others would queue up in front
    // of what that one's last blocks still have to read, and of the queries.
    __device__ void start_planned(const DecodeArgs& args, const PlannedPiece& planned) {
        if (planned.warp_begin == planned.warp_end) return;
        if (planned.is_newest) wait_for_kernel_before();
        next_row = planned.rows[0];
        copy_next(args, 0);
    }

    // The others, after it and after load_queries().
    __device__ void go_on_planned(const DecodeArgs& args, const PlannedPiece& planned) {
#pragma unroll
        for (int i = 1; i < kMaxStages; ++i) {
            if (i >= args.stages) break;
            next_row = planned.rows[i];
            copy_next(args, i);
        }
    }

    // Used by the next begin().
    __device__ void load_queries(const DecodeArgs& args, const Segment& segment) {
        next_q = static_cast<const T*>(args.q) + segment.row * args.q_stride +
                 (segment.head * args.heads + g()) * kHeadDim + t() * 8;
        if constexpr (kAhead) read_queries(args, next_queries);
    }

    // Of the heads 8 c + g, the t-th eight of each 32 dims.
    __device__ void read_queries(const DecodeArgs& args,
                                 unsigned (&to)[kSteps][kColumns][2]) const {
#pragma unroll
        for (int i = 0; i < kSteps / 2 * kColumns; ++i) {
            const int step = i / kColumns * 2, c = i % kColumns;
            const T* chunk = next_q + c * 8 * kHeadDim + step * 16;
            const bool exists = 8 * c + g() < args.heads;
            const uint4 words = exists ? *reinterpret_cast<const uint4*>(chunk) : uint4{};
            to[step][c][0] = words.x, to[step][c][1] = words.y;
            to[step + 1][c][0] = words.z, to[step + 1][c][1] = words.w;
        }
    }

    // Products take a word of each chunk.
    __device__ void begin(const DecodeArgs& args) {
        if constexpr (!kAhead) read_queries(args, queries);
#pragma unroll
        for (int i = 0; i < kSteps / 2 * kColumns; ++i) {
            const int step = i / kColumns * 2, c = i % kColumns;
            unsigned words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int from = step + j / 2;
                words[j] =
                    kAhead ? next_queries[kAhead ? from : 0][c][j % 2] : queries[from][c][j % 2];
            }
            transpose_words(words);
#pragma unroll
            for (int j = 0; j < 4; ++j) queries[step + j / 2][c][j % 2] = words[j];
        }
        this->clear();
    }

    // The tile that was taken last has made room, and for the end of its segment as well.
    __device__ void refill(const DecodeArgs& args) {
        __syncwarp();  // all lanes have taken it
        copy_next(args, free_stage);
    }

    __device__ void step(const DecodeArgs& args, int valid, Cursor& cursor) {
        refill(args);
        wait_barrier(barriers + stage * 8, parity);
        const unsigned k_here = k + stage * kStageBytes, v_here = v + stage * kStageBytes;
        // Two chains of sums, as each instruction waits for the one before it.
        float even[kColumns][4] = {}, odd[kColumns][4] = {};
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            unsigned a[4];  // tokens x dims
            load_matrices(a, (k_here ^ i % 4 * 32) + i / 4 * kPartBytes);
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                mma<T>(i % 2 == 0 ? even[c] : odd[c], a[0], a[1], a[2], a[3], queries[i][c][0],
                       queries[i][c][1]);
            }
        }
        find_next(args, cursor);
        unsigned p[kColumns][2];  // tokens x heads
        this->soften(args, even, odd, valid, p);
        if (valid >= kTileTokens) {
            add_values<false>(v_here, valid, p);
        } else {
            add_values<true>(v_here, valid, p);
        }
        free_stage = stage;
        if (++stage == args.stages) stage = 0, parity ^= 1;
    }

    // kMasked: rows past the context become 0. Their weights are 0, but 0 * NaN is not.
    template <bool kMasked>
    __device__ void add_values(unsigned v_here, int valid, const unsigned (&p)[kColumns][2]) {
        const auto mask = [&](int token) {
            return (token < valid ? 0xffffu : 0u) | (token + 1 < valid ? 0xffff0000u : 0u);
        };
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            unsigned a[4];  // dims x tokens
            load_transposed(a, (v_here ^ i % 4 * 32) + i / 4 * kPartBytes);
            if (kMasked) {
                a[0] &= mask(2 * t()), a[1] &= mask(2 * t());
                a[2] &= mask(2 * t() + 8), a[3] &= mask(2 * t() + 8);
            }
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                mma<T>(sums[i][c], a[0], a[1], a[2], a[3], p[c][0], p[c][1]);
            }
        }
    }

    // The heads lie side by side: turned around in the free stage, so that lanes store 16 bytes of
    // theirs. Chunk c of head h lies at c ^ (h % 8), as those of K do.
    __device__ void output(const DecodeArgs& args, const Segment& segment) {
        constexpr int kRowBytes = kHeadDim * 2, kChunks = kHeadDim / 8;
        const unsigned scratch = stages + free_stage * kStageBytes;
        __syncwarp();  // all lanes have taken the tile
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            const float factors[2] = {__fdividef(1.0f, weights[c][0]),
                                      __fdividef(1.0f, weights[c][1])};
#pragma unroll
            for (int step = 0; step < kSteps; step += 2) {
                unsigned words[4];  // of two heads: dims 16 (step + i / 2) + i % 2 * 8 + g
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float (&x)[4] = sums[step + i / 2][c];
                    const Pack<T, 2> pair = pair_from_floats<T>(x[i % 2 * 2] * factors[0],
                                                                x[i % 2 * 2 + 1] * factors[1]);
                    words[i] = reinterpret_cast<const unsigned&>(pair);
                }
                const int head = 8 * c + lane % 8, chunk = 2 * step + lane / 8;
                store_transposed(scratch + head * kRowBytes + (chunk ^ head % 8) * 16, words);
            }
        }
        __syncwarp();
        T* out = static_cast<T*>(args.out) + segment.row * args.out_stride +
                 segment.head * args.heads * kHeadDim;
        uint4 chunks[kColumns * kChunks / 4];
#pragma unroll
        for (int i = 0; i < kColumns * kChunks / 4; ++i) {
            const int head = (i * 32 + lane) / kChunks, chunk = (i * 32 + lane) % kChunks;
            chunks[i] = load_shared(scratch + head * kRowBytes + (chunk ^ head % 8) * 16);
        }
        fence_accelerator();
        refill(args);
#pragma unroll
        for (int i = 0; i < kColumns * kChunks / 4; ++i) {
            if (i * 32 + lane >= args.heads * kChunks) continue;
            reinterpret_cast<uint4*>(out)[i * 32 + lane] = chunks[i];
        }
    }

    __device__ void finish(const DecodeArgs& args, float* slot) {
        refill(args);  // or all lanes have taken the tile where the slot is
        this->for_each_head(args.heads, [&](int head, int c, int column) {
            this->store_scalars(args, slot, head, c, column);
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
                // place_in_slot, with what is known here.
                float* dims = slot + head * kHeadDim + i / 2 * 32 + g() % 4;
                const int quad = i % 2 * 4 + g() / 4;
                dims[(quad ^ 2 * t()) * 4] = sums[i][c][column];
                dims[((quad + 2) ^ 2 * t()) * 4] = sums[i][c][column + 2];
            }
        });
    }
};

// The KV as [K|V][parts][rows][64 dims] around any row: K of a tile, and V a plane further on.
// Parts lie nearer to each other than rows, but come behind them, as they shall in shared memory.
CUtensorMap map_of(const DecodeArgs& args) {
    static const auto encode =
        driver_entry<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
    const cuuint64_t row = args.head_dim * 2, parts = args.head_dim / 64;
    const cuuint64_t sizes[4] = {64, cuuint64_t{1} << 31, parts, 2};
    const cuuint64_t strides[3] = {row, 128, row * args.block_size};
    const cuuint32_t box[4] = {64, kTileTokens, static_cast<cuuint32_t>(parts), 2};
    const cuuint32_t steps[4] = {1, 1, 1, 1};
    CUtensorMap map;
    const CUresult result =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(args.kv), sizes, strides,
               box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        throw std::runtime_error("decode_attention: no tensor map, driver error " +
                                 std::to_string(result));
    }
    return map;
}

template <class T, int kHeadDim>
void launch(DecodeArgs args, int64_t num_ctas, cudaStream_t stream) {
    args.kv_map = map_of(args);
    const auto run = args.heads <= 8 ? launch_decode_attention<TmaTile<T, kHeadDim, 1>>
                                     : launch_decode_attention<TmaTile<T, kHeadDim, 2>>;
    run(args, num_ctas, stream);
}

template <class T>
bool launch_head_dim(const DecodeArgs& args, int64_t num_ctas, cudaStream_t stream) {
    switch (args.head_dim) {
        case 64:
            return launch<T, 64>(args, num_ctas, stream), true;
        case 128:
            return launch<T, 128>(args, num_ctas, stream), true;
        case 256:
            return launch<T, 256>(args, num_ctas, stream), true;
        default:
            return false;
    }
}

}  // namespace

bool decode_attention_tma(DecodeArgs args, int64_t num_ctas, cudaStream_t stream) {
    const bool fits = args.block_size % kTileTokens == 0 && args.block_shift >= 0 &&
                      aligned(16, args.q, args.out) && aligned(8, args.q_stride, args.out_stride) &&
                      args.head_dim % 64 == 0 && device_limits().capability >= 90;
    if (!fits) return false;
    args.splits = 1;
    args.permuted = 6;  // of eight fours, which lie in all banks: two for each pair of heads
    args.heads = args.group;
    return args.dtype == kFloat16 ? launch_head_dim<__half>(args, num_ctas, stream)
                                  : launch_head_dim<__nv_bfloat16>(args, num_ctas, stream);
}

}  // namespace swiftapex
