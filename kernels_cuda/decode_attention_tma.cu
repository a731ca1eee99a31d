// A tile on the tensor cores of compute capability 9.0, where the tensor memory accelerator brings
// tiles to shared memory: one instruction for 64 dims of K and V, so that a multiprocessor can read
// more than its load instructions could. The products are those of decode_attention_mma.cu.
#include "kernels_cuda/decode_attention_columns.cuh"
#include "kernels_cuda/driver.h"
#include "kernels_cuda/tensor_memory.cuh"

namespace swiftapex {
namespace {

// A stage: for each 64 dims, 16 rows of K, then 16 of V, of 128 bytes each, whose 16-byte chunks
// the accelerator permutes: chunk c of row r lies at c ^ (r % 8), so that the rows of an 8x8 matrix
// lie in different banks. Sum i has the dims 16 i + g and 8 more.
template <class T, int kHeadDim, int kColumns>
struct TmaTile : Columns<T, kHeadDim / 16, kColumns> {
    using Base = Columns<T, kHeadDim / 16, kColumns>;
    using Base::g, Base::t, Base::sums;
    static constexpr int kSteps = kHeadDim / 16, kParts = kHeadDim / 64;
    static constexpr int kPartBytes = 2 * kTileTokens * 128, kStageBytes = kParts * kPartBytes;
    // As many as the registers allow.
    static constexpr int kWarps = kHeadDim * kColumns <= 64    ? 16
                                  : kHeadDim * kColumns <= 128 ? 12
                                                               : 8;

    // Whether the registers have room for the next segment's queries.
    static constexpr bool kAhead = kHeadDim * kColumns <= 128;

    unsigned queries[kSteps][kColumns][2];
    uint4 next_queries[kAhead ? kSteps / 2 : 1][kColumns];  // chunk 4 i + t of head g
    const T* next_q;                                        // of the next segment
    int next_heads;
    unsigned stages, barriers;  // of this warp, in shared memory
    int stage;                  // whose tile comes next
    unsigned parity;            // of that stage's barrier
    int free_stage;             // whose tile was taken last
    int next_row;               // of the KV: K of the tile that it gets; -1: none
    unsigned k_row, v_row;      // the rows whose address this lane gives, in bytes
    unsigned k_chunk, v_chunk;  // and the chunk of the first step, permuted

    using Out = T;
    static constexpr int kCapability = 90;
    static constexpr bool kKeepsPlan = true;
    static constexpr int kMinStages = 2;
    static int warp_bytes(const DecodeArgs& args, int stages) {
        const int slot = slot_floats(args.heads, kHeadDim) * 4, all = stages * kStageBytes;
        return slot <= all ? all : (slot + kStageAlignment - 1) / kStageAlignment * kStageAlignment;
    }

    __device__ TmaTile(const DecodeArgs& args, float* memory, uint64_t* warp_barriers)
        : stages(shared_address(memory)),
          barriers(shared_address(warp_barriers)),
          stage(0),
          parity(0),
          next_row(-1) {
        const int lane = threadIdx.x % 32;
        // K: matrices of rows 0-7 and 8-15, then the same of the next chunk. V, to be transposed:
        // two chunks of rows 0-7, then the same of rows 8-15.
        const int k_token = lane % 16, v_token = lane % 8 + lane / 16 * 8;
        k_row = k_token * 128;
        k_chunk = (lane / 16 ^ k_token % 8) * 16;
        v_row = (kTileTokens + v_token) * 128;
        v_chunk = (lane / 8 % 2 ^ v_token % 8) * 16;
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
        const int place = place_in_block(args, cursor.tile() * kTileTokens);
        const int head = kv_head_of(args, cursor.segment.head);
        next_row = (cursor.block() * args.kv_heads + head) * 2 * args.block_size + place;
        cursor.move(args);
    }

    __device__ void copy_next(const DecodeArgs& args, int target) {
        const int row = next_row;
        next_row = -1;
        if (row < 0 || threadIdx.x % 32 != 0) return;
        const unsigned barrier = barriers + target * 8;
        expect_bytes(barrier, kStageBytes);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const unsigned at = stages + target * kStageBytes + part * kPartBytes;
            copy_box(at, args.kv_map, part, row, barrier);
        }
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
    // of what that one's last blocks still have to read, and of the queries (kAhead).
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
        const Heads heads = heads_of(args, segment);
        next_heads = heads.count;
        next_q = static_cast<const T*>(args.q) + segment.row * args.q_stride +
                 int64_t{heads.first} * kHeadDim;
        if constexpr (kAhead) {
#pragma unroll
            for (int i = 0; i < kSteps / 2 * kColumns; ++i) {
                next_queries[i / kColumns][i % kColumns] = read_query(i / kColumns, i % kColumns);
            }
        }
    }

    __device__ uint4 read_query(int i, int c) const {
        const int head = 8 * c + g();
        const T* chunk = next_q + head * kHeadDim + (4 * i + t()) * 8;
        return head < next_heads ? *reinterpret_cast<const uint4*>(chunk) : uint4{};
    }

    // Lanes read chunks of 16 bytes, the products take a word of each chunk.
    __device__ void begin(const DecodeArgs&) {
#pragma unroll
        for (int i = 0; i < kSteps / 2 * kColumns; ++i) {
            const int quarter = i / kColumns, c = i % kColumns;
            const uint4 chunk =
                kAhead ? next_queries[kAhead ? quarter : 0][c] : read_query(quarter, c);
            unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
            transpose_words(words);
#pragma unroll
            for (int j = 0; j < 4; ++j) queries[2 * quarter + j / 2][c][j % 2] = words[j];
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
        const unsigned here = stages + stage * kStageBytes;
        wait_barrier(barriers + stage * 8, parity);
        // Two chains of sums, as each instruction waits for the one before it.
        float even[kColumns][4] = {}, odd[kColumns][4] = {};
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            unsigned k[4];  // tokens x dims
            load_matrices(k, here + i / 4 * kPartBytes + k_row + (k_chunk ^ i % 4 * 32));
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                mma<T>(i % 2 == 0 ? even[c] : odd[c], k[0], k[1], k[2], k[3], queries[i][c][0],
                       queries[i][c][1]);
            }
        }
        find_next(args, cursor);
        unsigned p[kColumns][2];  // tokens x heads
        this->soften(even, odd, args.scale_log2, valid, p);
        if (valid >= kTileTokens) {
            add_values<false>(here, valid, p);
        } else {
            add_values<true>(here, valid, p);
        }
        free_stage = stage;
        if (++stage == args.stages) stage = 0, parity ^= 1;
    }

    // kMasked: rows past the context become 0. Their weights are 0, but 0 * NaN is not.
    template <bool kMasked>
    __device__ void add_values(unsigned here, int valid, const unsigned (&p)[kColumns][2]) {
        const auto mask = [&](int token) {
            return (token < valid ? 0xffffu : 0u) | (token + 1 < valid ? 0xffff0000u : 0u);
        };
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            unsigned v[4];  // dims x tokens
            load_transposed(v, here + i / 4 * kPartBytes + v_row + (v_chunk ^ i % 4 * 32));
            if (kMasked) {
                v[0] &= mask(2 * t()), v[1] &= mask(2 * t());
                v[2] &= mask(2 * t() + 8), v[3] &= mask(2 * t() + 8);
            }
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                mma<T>(sums[i][c], v[0], v[1], v[2], v[3], p[c][0], p[c][1]);
            }
        }
    }

    // The heads lie side by side: through the free stage, so that lanes store 16 bytes of theirs.
    // Chunk c of head h lies at c ^ (h % 8), as those of K do.
    __device__ void output(const DecodeArgs& args, const Segment& segment) {
        constexpr int kRowBytes = kHeadDim * 2, kChunks = kHeadDim / 8;
        const Heads heads = heads_of(args, segment);
        const unsigned scratch = stages + free_stage * kStageBytes;
        float factors[kColumns][2];
        this->for_each_head(8 * kColumns, [&](int, float weight, int c, int column) {
            factors[c][column] = __fdividef(1.0f, weight);
        });
        __syncwarp();  // all lanes have taken the tile
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
#pragma unroll
            for (int step = 0; step < kSteps; step += 2) {
                unsigned words[4];  // of two heads: dims 16 (step + i / 2) + i % 2 * 8 + g
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float (&x)[4] = sums[step + i / 2][c];
                    const Pack<T, 2> pair = pair_from_floats<T>(x[i % 2 * 2] * factors[c][0],
                                                                x[i % 2 * 2 + 1] * factors[c][1]);
                    words[i] = reinterpret_cast<const unsigned&>(pair);
                }
                const int head = 8 * c + lane % 8, chunk = 2 * step + lane / 8;
                store_transposed(scratch + head * kRowBytes + (chunk ^ head % 8) * 16, words);
            }
        }
        __syncwarp();
        T* out = static_cast<T*>(args.out) + segment.row * args.out_stride +
                 int64_t{heads.first} * kHeadDim;
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
            if (i * 32 + lane >= heads.count * kChunks) continue;
            reinterpret_cast<uint4*>(out)[i * 32 + lane] = chunks[i];
        }
    }

    __device__ void finish(const DecodeArgs& args, float* slot) {
        refill(args);  // or all lanes have taken the tile where the slot is
        this->for_each_head(args.heads, [&](int head, float weight, int c, int column) {
            this->store_scalars(args, slot, head, weight, c, column);
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

// The KV as [K|V][rows][parts][64 dims] around any row: K of a tile, and V a plane further on.
CUtensorMap map_of(const DecodeArgs& args) {
    static const auto encode =
        driver_entry<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
    const cuuint64_t row = args.head_dim * 2, parts = args.head_dim / 64;
    const cuuint64_t sizes[4] = {64, parts, cuuint64_t{1} << 31, 2};
    const cuuint64_t strides[3] = {128, row, row * args.block_size};
    const cuuint32_t box[4] = {64, 1, kTileTokens, 2}, steps[4] = {1, 1, 1, 1};
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
void launch(const DecodeArgs& args, int64_t num_ctas, cudaStream_t stream) {
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
    const bool fits = args.block_size % kTileTokens == 0 && aligned(16, args.q, args.out) &&
                      aligned(8, args.q_stride, args.out_stride) && args.head_dim % 64 == 0 &&
                      device_limits().capability >= 90;
    if (!fits) return false;
    args.kv_map = map_of(args);
    args.splits = 1;
    args.permuted = 6;  // of eight fours, which lie in all banks: two for each pair of heads
    args.heads = args.group;
    return args.dtype == kFloat16 ? launch_head_dim<__half>(args, num_ctas, stream)
                                  : launch_head_dim<__nv_bfloat16>(args, num_ctas, stream);
}

}  // namespace swiftapex
