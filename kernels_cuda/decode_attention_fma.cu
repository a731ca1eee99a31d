// A tile in float32 FMA: any dtypes, head_dim and block size.
#include "kernels_cuda/decode_attention_kernel.cuh"

namespace swiftapex {
namespace {

// kHeads: at least args.heads. A stage holds the tile's rows of K, then those of V. Scores: lane
// 2t + h takes half of the 16-byte chunks of token t's row. Sums: lane d takes the dims d + 32 i.
template <class KV, int kHeads>
struct FmaTile {
    static constexpr int kChunk = kVector<KV>;  // elements
    static constexpr int kDims = kMaxHeadDim / 32;
    static constexpr int kWarps = 8;

    float sums[kHeads][kDims], maxima[kHeads], weights[kHeads];
    int lane, chunks;
    float* queries;  // [heads][head_dim], where the sums go in the end
    char* stages;
    Segment next;                                          // that begin() goes over to
    int stage;                                             // whose tile comes next
    int first_token, first_chunk, token_step, chunk_step;  // of the copy's walk over chunks

    // Chunks of a row in shared memory, 2 mod 8: then the eight lanes that are served at once, four
    // tokens by two chunks, read different banks.
    static __host__ __device__ int row_chunks(int head_dim) {
        const int chunks = head_dim / kChunk;
        return chunks + (10 - chunks % 8) % 8;
    }
    static __host__ __device__ int stage_bytes(int head_dim) {
        return 2 * kTileTokens * row_chunks(head_dim) * 16;
    }

    using Out = void;
    using Cursor = swiftapex::Cursor<false>;
    static constexpr int kCapability = 0;
    static constexpr bool kKeepsPlan = false;
    static constexpr int kMinStages = 1;
    static constexpr bool kSplits = true;
    static constexpr bool kGathers = false;
    static int warp_bytes(const DecodeArgs& args, int stages) {
        return slot_floats(args.heads, args.head_dim) * 4 + stages * stage_bytes(args.head_dim);
    }

    __device__ FmaTile(const DecodeArgs& args, float* memory, uint64_t*)
        : lane(threadIdx.x % 32), chunks(args.head_dim / kChunk), stage(0) {
        queries = memory;
        stages = reinterpret_cast<char*>(memory + slot_floats(args.heads, args.head_dim));
        first_token = lane / chunks, first_chunk = lane % chunks;
        token_step = 32 / chunks, chunk_step = 32 % chunks;
    }

    __device__ void start(const DecodeArgs& args, Cursor& cursor, PlannedPiece*) {
        for (int i = 0; i < args.stages; ++i) {
            copy(args, stages + i * stage_bytes(args.head_dim), cursor);
        }
    }

    __device__ void copy(const DecodeArgs& args, char* target, Cursor& cursor) const {
        if (cursor.valid()) {
            copy_tile(args, target, cursor);
            cursor.move(args);
        }
        commit_copies();
    }

    __device__ void copy_tile(const DecodeArgs& args, char* tile, const Cursor& cursor) const {
        const int row = row_chunks(args.head_dim), table_block = cursor.block();
        const int head = kv_head_of(args, cursor.segment.head), first = cursor.tile() * kTileTokens;
        const int valid = cursor.segment.context - first;
        const int64_t plane = int64_t{args.block_size} * args.head_dim;
        const bool one_block = args.block_size % kTileTokens == 0;
        const int32_t* table = args.block_table + cursor.segment.row * args.table_stride;
        int token = first_token, chunk = first_chunk;
        while (token < kTileTokens) {
            const bool is_valid = token < valid;
            const int position = first + (is_valid ? token : 0);
            const int64_t block = one_block ? table_block : table[column_of(args, position)];
            const KV* k = static_cast<const KV*>(args.kv) +
                          (block * args.kv_heads + head) * 2 * plane +
                          int64_t{place_in_block(args, position)} * args.head_dim + chunk * kChunk;
            char* target = tile + (token * row + chunk) * 16;
            copy_async(target, k, is_valid);
            copy_async(target + kTileTokens * row * 16, k + plane, is_valid);
            token += token_step, chunk += chunk_step;
            if (chunk >= chunks) chunk -= chunks, ++token;
        }
    }

    __device__ void load_queries(const DecodeArgs&, const Segment& segment) { next = segment; }

    __device__ void begin(const DecodeArgs& args) {
        const Heads heads = heads_of<kSplits>(args, next);
        const int64_t first = next.row * args.q_stride + int64_t{heads.first} * args.head_dim;
        for (int i = lane; i < args.heads * args.head_dim; i += 32) {
            float value = 0.0f;
            if (i < heads.count * args.head_dim) {
                if (args.dtype == kFloat32) {
                    value = static_cast<const float*>(args.q)[first + i];
                } else if (args.dtype == kFloat16) {
                    value = to_float(static_cast<const __half*>(args.q)[first + i]);
                } else {
                    value = to_float(static_cast<const __nv_bfloat16*>(args.q)[first + i]);
                }
            }
            queries[i] = value;
        }
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
            maxima[head] = -INFINITY, weights[head] = 0.0f;
#pragma unroll
            for (int i = 0; i < kDims; ++i) sums[head][i] = 0.0f;
        }
        __syncwarp();
    }

    __device__ void step(const DecodeArgs& args, int valid, Cursor& cursor) {
        char* tile = stages + stage * stage_bytes(args.head_dim);
        wait_copies(args.stages - 1);
        __syncwarp();
        float scores[kHeads];
        compute_scores(args, tile, scores);
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
            float score = scores[head] + __shfl_xor_sync(kAllLanes, scores[head], 1);
            score = lane / 2 < valid ? score * args.scale_log2 : -INFINITY;
            if (__any_sync(kAllLanes, score > maxima[head])) raise_maximum(head, score);
            scores[head] = exp2f(score - maxima[head]);
            weights[head] += scores[head];
        }
        add_values(args, tile + kTileTokens * row_chunks(args.head_dim) * 16, scores);
        __syncwarp();
        copy(args, tile, cursor);
        stage = stage + 1 == args.stages ? 0 : stage + 1;
    }

    __device__ void compute_scores(const DecodeArgs& args, const char* stage,
                                   float (&scores)[kHeads]) const {
        const char* row = stage + lane / 2 * row_chunks(args.head_dim) * 16;
#pragma unroll
        for (int head = 0; head < kHeads; ++head) scores[head] = 0.0f;
        for (int chunk = lane % 2; chunk < chunks; chunk += 2) {
            const auto k = load_pack<KV, kChunk>(reinterpret_cast<const KV*>(row + chunk * 16));
#pragma unroll
            for (int head = 0; head < kHeads; ++head) {
                if (head >= args.heads) break;
                const float* q = queries + head * args.head_dim + chunk * kChunk;
#pragma unroll
                for (int i = 0; i < kChunk; i += 4) {
                    const auto part = load_pack<float, 4>(q + i);
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        scores[head] += part.value[j] * to_float(k.value[i + j]);
                    }
                }
            }
        }
    }

    __device__ void raise_maximum(int head, float score) {
        float maximum = fmaxf(maxima[head], score);
#pragma unroll
        for (int distance = 16; distance > 1; distance /= 2) {
            maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, distance));
        }
        const float factor = exp2f(maxima[head] - maximum);
        maxima[head] = maximum;
        weights[head] *= factor;
#pragma unroll
        for (int i = 0; i < kDims; ++i) sums[head][i] *= factor;
    }

    __device__ void add_values(const DecodeArgs& args, const char* stage,
                               const float (&scores)[kHeads]) {
        for (int token = 0; token < kTileTokens; ++token) {
            const KV* v =
                reinterpret_cast<const KV*>(stage + token * row_chunks(args.head_dim) * 16);
            float values[kDims];
#pragma unroll
            for (int i = 0; i < kDims; ++i) {
                const int dim = lane + 32 * i;
                values[i] = dim < args.head_dim ? to_float(v[dim]) : 0.0f;
            }
#pragma unroll
            for (int head = 0; head < kHeads; ++head) {
                const float weight = __shfl_sync(kAllLanes, scores[head], 2 * token);
#pragma unroll
                for (int i = 0; i < kDims; ++i) sums[head][i] += weight * values[i];
            }
        }
    }

    __device__ void output(const DecodeArgs& args, const Segment& segment) {
        finish(args, queries);
        __syncwarp();
        const Heads heads = heads_of<kSplits>(args, segment);
        const float* all_weights = queries + args.heads * (args.head_dim + 1);
        const int64_t out = segment.row * args.out_stride + int64_t{heads.first} * args.head_dim;
        const int quads = args.head_dim / 4;
        for (int item = lane; item < heads.count * quads; item += 32) {
            const float4 sum = reinterpret_cast<const float4*>(queries)[item];
            store_out<Out>(args, out + item * 4, scaled(sum, 1.0f / all_weights[item / quads]));
        }
        __syncwarp();
    }

    __device__ void finish(const DecodeArgs& args, float* slot) {
        __syncwarp();  // the queries have been read
        float* scalars = slot + args.heads * args.head_dim;
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
            if (head >= args.heads) break;
            float weight = weights[head];
#pragma unroll
            for (int distance = 16; distance > 1; distance /= 2) {
                weight += __shfl_xor_sync(kAllLanes, weight, distance);
            }
            if (lane == 0) scalars[head] = maxima[head], scalars[args.heads + head] = weight;
#pragma unroll
            for (int i = 0; i < kDims; ++i) {
                const int dim = lane + 32 * i;
                if (dim < args.head_dim) slot[head * args.head_dim + dim] = sums[head][i];
            }
        }
    }
};

}  // namespace

void decode_attention_fma(DecodeArgs args, int kv_dtype, int64_t num_ctas, cudaStream_t stream) {
    constexpr int kMost = 8;  // heads at once; a group of more reads K and V twice
    args.splits = (args.group + kMost - 1) / kMost;
    args.heads = (args.group + args.splits - 1) / args.splits;
    with_dtype("decode_attention", kv_dtype, [&](auto type) {
        using KV = decltype(type);
        const auto run = args.heads <= 1   ? launch_decode_attention<FmaTile<KV, 1>>
                         : args.heads <= 2 ? launch_decode_attention<FmaTile<KV, 2>>
                         : args.heads <= 4 ? launch_decode_attention<FmaTile<KV, 4>>
                                           : launch_decode_attention<FmaTile<KV, 8>>;
        run(args, num_ctas, stream);
    });
}

}  // namespace swiftapex
