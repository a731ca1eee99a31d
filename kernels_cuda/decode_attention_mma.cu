// A tile on the tensor cores: 16-bit KV of q's dtype. K and V are the wide operands, 16 tokens or
// 16 dims high; the group's q heads are the 8 columns, or twice 8, some of them empty. So one
// instruction serves 256 elements of K or V whatever the group, and memory stays the limit.
//
// K and V go from memory straight into the registers that the tensor cores read, 16 bytes a load,
// and the next tile's loads are under way while this one is computed: no shared memory, no barrier.
// That works because the order of what is summed over is free: lane 4g + t takes 8 neighbouring
// dims of K for the columns t of two products, and q is loaded alike.
#include "kernels_cuda/decode_attention_columns.cuh"

namespace swiftapex {
namespace {

// volatile: stays where it is written, ahead of the computation.
__device__ inline uint4 load_ahead(const void* address) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(address));
    return x;
}

// Scores are tokens x heads = K q^T, sums dims x heads = V^T p: sum 4i + j has the dims
// 8 (8i + g) + 2j + {0, 1}.
template <class T, int kHeadDim, int kColumns>
struct MmaTile : Columns<T, (kHeadDim + 63) / 64 * 4, kColumns> {
    using Base = Columns<T, (kHeadDim + 63) / 64 * 4, kColumns>;
    using Base::g, Base::t, Base::sums, Base::weights;

    static constexpr int kKLoads = kHeadDim / 32;         // of a row: chunk 4i + t
    static constexpr int kVLoads = (kHeadDim + 63) / 64;  // of a row: chunk 8i + g
    // As many as the registers allow.
    static constexpr int kWarps = kHeadDim * kColumns <= 64    ? 16
                                  : kHeadDim * kColumns <= 128 ? 12
                                                               : 8;

    uint4 queries[kKLoads][kColumns];
    uint4 k[kKLoads][2];  // rows g and g + 8
    uint4 v[kVLoads][4];  // rows 2t, 2t + 1, 2t + 8, 2t + 9
    const T* tile;        // K of the tile to be read
    int64_t plane;        // from K to V
    int last_row;         // of that tile
    Segment next;         // that begin() goes over to: the registers have no room for its queries

    using Out = T;
    using Cursor = swiftapex::Cursor<false>;
    static constexpr int kCapability = 80;
    static constexpr bool kKeepsPlan = false;
    static constexpr int kMinStages = 1;
    static constexpr bool kSplits = kHeadDim > 128;
    static constexpr bool kGathers = false;
    static int warp_bytes(const DecodeArgs& args, int) {
        return slot_floats(args.heads, kHeadDim) * 4;
    }

    __device__ MmaTile(const DecodeArgs& args, float*, uint64_t*)
        : plane(int64_t{args.block_size} * kHeadDim) {}

    // Rows past the context are read as its last one: their weights are 0, but 0 * NaN is not.
    __device__ const T* row(int index) const {
        return tile + (index < last_row ? index : last_row) * kHeadDim;
    }
    __device__ void load_k() {
        const T *low = row(g()) + t() * 8, *high = row(g() + 8) + t() * 8;
#pragma unroll
        for (int i = 0; i < kKLoads; ++i) {
            k[i][0] = load_ahead(low + i * 32);
            k[i][1] = load_ahead(high + i * 32);
        }
    }
    __device__ void load_v() {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const T* from = row(2 * t() + j % 2 + j / 2 * 8) + plane + g() * 8;
#pragma unroll
            for (int i = 0; i < kVLoads; ++i) {
                const bool exists = kHeadDim % 64 == 0 || 8 * i + g() < kHeadDim / 8;
                v[i][j] = exists ? load_ahead(from + i * 64) : uint4{};
            }
        }
    }
    // Early, as the address takes a while to compute.
    __device__ void find_tile(const DecodeArgs& args, const Cursor& cursor) {
        if (!cursor.valid()) return;
        const int first = cursor.tile() * kTileTokens, rest = cursor.segment.context - first;
        const int head = kv_head_of(args, cursor.segment.head);
        tile = static_cast<const T*>(args.kv) +
               (int64_t{cursor.block()} * args.kv_heads + head) * 2 * plane +
               place_in_block(args, first) * kHeadDim;
        last_row = rest < kTileTokens ? rest - 1 : kTileTokens - 1;
    }

    __device__ void start(const DecodeArgs& args, Cursor& cursor, PlannedPiece*) {
        find_tile(args, cursor);
        load_k();
        load_v();
        cursor.move(args);
        find_tile(args, cursor);
    }

    __device__ void load_queries(const DecodeArgs&, const Segment& segment) { next = segment; }

    __device__ void begin(const DecodeArgs& args) {
        const Heads heads = heads_of<kSplits>(args, next);
        const T* q = static_cast<const T*>(args.q) + next.row * args.q_stride +
                     int64_t{heads.first} * kHeadDim + t() * 8;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            const int head = 8 * c + g();
#pragma unroll
            for (int i = 0; i < kKLoads; ++i) {
                const T* chunk = q + head * kHeadDim + i * 32;
                queries[i][c] =
                    head < heads.count ? *reinterpret_cast<const uint4*>(chunk) : uint4{};
            }
        }
        this->clear();
    }

    __device__ void step(const DecodeArgs& args, int valid, Cursor& cursor) {
        // Two chains of sums, as each instruction waits for the one before it.
        float even[kColumns][4] = {}, odd[kColumns][4] = {};
#pragma unroll
        for (int i = 0; i < kKLoads; ++i) {
            const uint4 low = k[i][0], high = k[i][1];
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                const uint4 q = queries[i][c];
                mma<T>(even[c], low.x, high.x, low.y, high.y, q.x, q.y);
                mma<T>(odd[c], low.z, high.z, low.w, high.w, q.z, q.w);
            }
        }
        const bool more = cursor.valid();
        if (more) load_k();
        unsigned p[kColumns][2];  // tokens x heads
        this->soften(args, even, odd, valid, p);
        add_values(p);
        if (more) {
            load_v();
            cursor.move(args);
            find_tile(args, cursor);
        }
    }

    // Two neighbouring dims of four tokens are in one word each; the operand wants one dim of two
    // neighbouring tokens in a word.
    __device__ void add_values(const unsigned (&p)[kColumns][2]) {
        const auto word = [](const uint4& x, int j) {
            return j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w;
        };
#pragma unroll
        for (int i = 0; i < kVLoads; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const unsigned a = word(v[i][0], j), b = word(v[i][1], j);
                const unsigned c = word(v[i][2], j), d = word(v[i][3], j);
                const unsigned low = __byte_perm(a, b, 0x5410), high = __byte_perm(a, b, 0x7632);
                const unsigned low8 = __byte_perm(c, d, 0x5410);
                const unsigned high8 = __byte_perm(c, d, 0x7632);
#pragma unroll
                for (int column = 0; column < kColumns; ++column) {
                    mma<T>(sums[4 * i + j][column], low, high, low8, high8, p[column][0],
                           p[column][1]);
                }
            }
        }
    }

    // body(i, dim) for the lane's dims, dim being the first of two neighbours.
    template <class Body>
    static __device__ void for_each_pair(Body body) {
#pragma unroll
        for (int i = 0; i < kVLoads * 4; ++i) {
            const int dim = 8 * (i / 4 * 8 + g()) + i % 4 * 2;
            if (kHeadDim % 64 == 0 || dim < kHeadDim) body(i, dim);
        }
    }

    __device__ void output(const DecodeArgs& args, const Segment& segment) const {
        const Heads heads = heads_of<kSplits>(args, segment);
        T* out = static_cast<T*>(args.out) + segment.row * args.out_stride +
                 int64_t{heads.first} * kHeadDim;
        this->for_each_head(heads.count, [&](int head, int c, int column) {
            const float factor = 1.0f / weights[c][column];
            for_each_pair([&](int i, int dim) {
                store_pack(out + head * kHeadDim + dim,
                           Pack<T, 2>{{from_float<T>(sums[i][c][column] * factor),
                                       from_float<T>(sums[i][c][column + 2] * factor)}});
            });
        });
    }

    __device__ void finish(const DecodeArgs& args, float* slot) const {
        this->for_each_head(args.heads, [&](int head, int c, int column) {
            this->store_scalars(args, slot, head, c, column);
            for_each_pair([&](int i, int dim) {
                store_pack(slot + head * kHeadDim + dim,
                           Pack<float, 2>{{sums[i][c][column], sums[i][c][column + 2]}});
            });
        });
    }
};

template <class T, int kHeadDim>
void launch(DecodeArgs args, int64_t num_ctas, cudaStream_t stream) {
    if constexpr (kHeadDim <= 128) {
        if (args.heads > 8) {
            return launch_decode_attention<MmaTile<T, kHeadDim, 2>>(args, num_ctas, stream);
        }
    }
    // Two times 8 columns of 256 dims do not fit into the registers: K and V are read twice.
    args.splits = args.heads > 8 ? 2 : 1;
    args.heads = (args.heads + args.splits - 1) / args.splits;
    launch_decode_attention<MmaTile<T, kHeadDim, 1>>(args, num_ctas, stream);
}

template <class T>
bool launch_head_dim(const DecodeArgs& args, int64_t num_ctas, cudaStream_t stream) {
    switch (args.head_dim) {
        case 64:
            return launch<T, 64>(args, num_ctas, stream), true;
        case 96:
            return launch<T, 96>(args, num_ctas, stream), true;
        case 128:
            return launch<T, 128>(args, num_ctas, stream), true;
        case 256:
            return launch<T, 256>(args, num_ctas, stream), true;
        default:
            return false;
    }
}

}  // namespace

bool decode_attention_mma(DecodeArgs args, int64_t num_ctas, cudaStream_t stream) {
    const bool fits = args.block_size % kTileTokens == 0 && aligned(16, args.q, args.out) &&
                      aligned(8, args.q_stride, args.out_stride) &&
                      device_limits().capability >= 80;
    if (!fits) return false;
    args.splits = 1;
    args.heads = args.group;
    return args.dtype == kFloat16 ? launch_head_dim<__half>(args, num_ctas, stream)
                                  : launch_head_dim<__nv_bfloat16>(args, num_ctas, stream);
}

}  // namespace swiftapex
