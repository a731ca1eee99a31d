// A tile on the tensor cores of compute capability 9.0, where the tensor memory accelerator brings
// tiles to shared memory: one instruction for 64 dims of K and V, so that a multiprocessor can read
// more than its load instructions could. The products are those of decode_attention_mma.cu.
#include "kernels_cuda/decode_attention_columns.cuh"
#include "kernels_cuda/driver.h"

namespace swiftapex {
namespace {

__device__ inline unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ inline void init_barrier(unsigned barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
#endif
}

// The accelerator is to see what was written by ordinary stores.
__device__ inline void fence_accelerator() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ inline void expect_bytes(unsigned barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
#endif
}

__device__ inline void wait_barrier(unsigned barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "retry:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra retry;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}

__device__ inline void copy_box(unsigned shared, const CUtensorMap& map, int part, int row,
                                unsigned barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %2}], [%5];" ::"r"(shared),
        "l"(&map), "r"(0), "r"(part), "r"(row), "r"(barrier)
        : "memory");
#endif
}

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
                                  : kHeadDim * kColumns <= 128 ? 14
                                  : kHeadDim * kColumns <= 256 ? 10
                                                               : 8;

    unsigned queries[kSteps][kColumns][2];
    unsigned stages, barriers;  // of this warp, in shared memory
    int stage;                  // whose tile comes next
    unsigned parity;            // of that stage's barrier
    int next_row;               // of the KV: K of the tile to be copied next; -1: no more
    unsigned k_row, v_row;      // the rows whose address this lane gives, in bytes
    unsigned k_chunk, v_chunk;  // and the chunk of the first step, permuted

    static constexpr int kMinStages = 2;
    static int warp_bytes(const DecodeArgs& args, int stages) {
        const int slot = slot_floats(args.heads, kHeadDim) * 4, all = stages * kStageBytes;
        return slot <= all ? all : (slot + kStageAlignment - 1) / kStageAlignment * kStageAlignment;
    }

    __device__ TmaTile(const DecodeArgs& args, float* memory, uint64_t* warp_barriers)
        : stages(shared_address(memory)),
          barriers(shared_address(warp_barriers)),
          stage(0),
          parity(0) {
        const int lane = threadIdx.x % 32;
        // K: matrices of rows 0-7 and 8-15, then the same of the next chunk. V, to be transposed:
        // two chunks of rows 0-7, then the same of rows 8-15.
        const int k_token = lane % 16, v_token = lane % 8 + lane / 16 * 8;
        k_row = k_token * 128;
        k_chunk = (lane / 16 ^ k_token % 8) * 16;
        v_row = (kTileTokens + v_token) * 128;
        v_chunk = (lane / 8 % 2 ^ v_token % 8) * 16;
        if (lane == 0) {
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

    __device__ void copy_next(const DecodeArgs& args, int target) const {
        if (next_row < 0 || threadIdx.x % 32 != 0) return;
        const unsigned barrier = barriers + target * 8;
        expect_bytes(barrier, kStageBytes);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const unsigned at = stages + target * kStageBytes + part * kPartBytes;
            copy_box(at, args.kv_map, part, next_row, barrier);
        }
    }

    __device__ void start(const DecodeArgs& args, Cursor& cursor) {
        for (int i = 0; i < args.stages; ++i) {
            find_next(args, cursor);
            copy_next(args, i);
        }
    }

    __device__ void begin(const DecodeArgs& args, const Segment& segment) {
        const Heads heads = heads_of(args, segment);
        const T* q = static_cast<const T*>(args.q) + segment.row * args.q_stride +
                     int64_t{heads.first} * kHeadDim + 2 * t();
#pragma unroll
        for (int i = 0; i < kSteps * kColumns * 2; ++i) {
            const int step = i / kColumns / 2, c = i / 2 % kColumns, half = i % 2;
            const int head = 8 * c + g();
            const T* pair = q + head * kHeadDim + step * 16 + half * 8;
            queries[step][c][half] =
                head < heads.count ? *reinterpret_cast<const unsigned*>(pair) : 0u;
        }
        this->clear();
    }

    __device__ void step(const DecodeArgs& args, int valid, Cursor& cursor) {
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
        __syncwarp();  // all lanes have taken the tile
        copy_next(args, stage);
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

    __device__ void output(const DecodeArgs& args, const Segment& segment) const {
        const Heads heads = heads_of(args, segment);
        T* out = static_cast<T*>(args.out) + segment.row * args.out_stride +
                 int64_t{heads.first} * kHeadDim + g();
        this->for_each_head(heads.count, [&](int head, float weight, int c, int column) {
            const float factor = 1.0f / weight;
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
                T* at = out + head * kHeadDim + i * 16;
                at[0] = from_float<T>(sums[i][c][column] * factor);
                at[8] = from_float<T>(sums[i][c][column + 2] * factor);
            }
        });
    }

    __device__ void finish(const DecodeArgs& args, float* slot) const {
        __syncwarp();  // the slot may be where the last tile was
        this->for_each_head(args.heads, [&](int head, float weight, int c, int column) {
            this->store_scalars(args, slot, head, weight, c, column);
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
                float* at = slot + head * kHeadDim + i * 16 + g();
                at[0] = sums[i][c][column];
                at[8] = sums[i][c][column + 2];
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
    const bool fits = args.block_size % kTileTokens == 0 && aligned(4, args.q) &&
                      aligned(2, args.q_stride) && args.head_dim % 64 == 0 &&
                      device_limits().capability >= 90;
    if (!fits) return false;
    args.kv_map = map_of(args);
    args.splits = 1;
    args.heads = args.group;
    return args.dtype == kFloat16 ? launch_head_dim<__half>(args, num_ctas, stream)
                                  : launch_head_dim<__nv_bfloat16>(args, num_ctas, stream);
}

}  // namespace swiftapex
