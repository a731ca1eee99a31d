// A tile on the tensor cores: 16-bit KV of q's dtype. K and V are the wide operands, 16 tokens or
// 16 dims high; the group's q heads are the 8 columns, or twice 8, some of them empty. So one
// instruction serves 256 elements of K or V whatever the group, and memory stays the limit.
#include "kernels_cuda/decode_attention_kernel.cuh"
#include "kernels_cuda/mma.cuh"

namespace swiftapex {
namespace {

// kColumns: groups of 8 columns. Scores are tokens x heads = K q^T, sums dims x heads = V^T p. In
// both, a lane's columns are heads 8c + 2t + {0, 1} (lane = 4 g + t).
template <class T, int kHeadDim, int kColumns>
struct MmaTile {
    static constexpr int kChunks = kHeadDim / 8;  // of 16 bytes, a row
    static constexpr int kSteps = kHeadDim / 16;
    static constexpr unsigned kAll = 0xffffffffu;

    unsigned queries[kSteps][kColumns][2];
    float sums[kSteps][kColumns][4];
    float maxima[kColumns][2];   // the same in all lanes of equal t
    float weights[kColumns][2];  // of this lane's tokens
    int lane;

    static __host__ __device__ int stage_bytes(int) { return 2 * kTileTokens * kHeadDim * 2; }

    // Byte offset of a row's chunk, permuted within the row so that the same chunk of eight rows
    // lies in eight different groups of banks.
    static __device__ int place(int row, int chunk) {
        constexpr int kMask = kChunks % 8 == 0 ? 7 : kChunks % 4 == 0 ? 3 : 1;
        constexpr int kShift = kMask == 7 ? 0 : kMask == 3 ? 1 : 2;
        return (row * kChunks + (chunk ^ (row >> kShift & kMask))) * 16;
    }

    __device__ explicit MmaTile(const DecodeArgs&) : lane(threadIdx.x % 32) {}

    __device__ void copy(const DecodeArgs& args, char* stage, const CopyCursor& cursor) const {
        const int first = cursor.token(), valid = cursor.segment.context - first;
        const int64_t plane = int64_t{args.block_size} * kHeadDim;
        const T* k = static_cast<const T*>(args.kv) +
                     (int64_t{cursor.block} * args.kv_heads + cursor.segment.head) * 2 * plane +
                     first % args.block_size * kHeadDim + lane * 8;
#pragma unroll
        for (int i = 0; i < kChunks / 2; ++i) {  // 16 rows are kChunks / 2 chunks a lane
            const int chunk = i * 32 + lane, row = chunk / kChunks;
            char* target = stage + place(row, chunk % kChunks);
            copy_async(target, k + i * 256, row < valid);
            copy_async(target + kTileTokens * kHeadDim * 2, k + plane + i * 256, row < valid);
        }
    }

    __device__ void begin(const DecodeArgs& args, const Segment& segment, float*) {
        const T* q = static_cast<const T*>(args.q) + segment.row * args.q_stride +
                     int64_t{segment.head} * args.group * kHeadDim + lane % 4 * 2;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            const int head = c * 8 + lane / 4;
            maxima[c][0] = maxima[c][1] = -INFINITY;
            weights[c][0] = weights[c][1] = 0.0f;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const T* pair = q + head * kHeadDim + step * 16 + half * 8;
                    queries[step][c][half] =
                        head < args.group ? *reinterpret_cast<const unsigned*>(pair) : 0u;
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[step][c][i] = 0.0f;
            }
        }
    }

    __device__ void step(const DecodeArgs& args, const char* stage, const float*, int valid) {
        // Two chains of sums, as each instruction waits for the one before it.
        float even[kColumns][4] = {}, odd[kColumns][4] = {};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            unsigned k[4];  // tokens x dims
            load_matrices(k, stage + place(lane % 16, step * 2 + lane / 16));
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                mma<T>(step % 2 == 0 ? even[c] : odd[c], k, queries[step][c]);
            }
        }
        unsigned p[kColumns][2];  // tokens x heads
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = lane / 4 + i / 2 * 8;
                even[c][i] = token < valid ? (even[c][i] + odd[c][i]) * args.scale_log2 : -INFINITY;
            }
            soften(c, even[c], p[c]);
        }
        const char* v_stage = stage + kTileTokens * kHeadDim * 2;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            unsigned v[4];  // dims x tokens
            load_transposed(v, v_stage + place(lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2));
#pragma unroll
            for (int c = 0; c < kColumns; ++c) mma<T>(sums[step][c], v, p[c]);
        }
    }

    // The weights of a tile's scores, as the right operand of the next product.
    __device__ void soften(int c, const float (&scores)[4], unsigned (&p)[2]) {
        const float high[2] = {fmaxf(scores[0], scores[2]), fmaxf(scores[1], scores[3])};
        // The maximum rarely rises after the first tiles.
        if (__any_sync(kAll, high[0] > maxima[c][0] || high[1] > maxima[c][1])) {
            raise_maxima(c, high);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const T first = from_float<T>(exp2_fast(scores[2 * half] - maxima[c][0]));
            const T second = from_float<T>(exp2_fast(scores[2 * half + 1] - maxima[c][1]));
            // The rounded ones are added up, so that the weights sum to one.
            weights[c][0] += to_float(first), weights[c][1] += to_float(second);
            Pack<T, 2> pair{{first, second}};
            p[half] = transpose(reinterpret_cast<const unsigned&>(pair));
        }
    }

    __device__ void raise_maxima(int c, const float (&high)[2]) {
#pragma unroll
        for (int column = 0; column < 2; ++column) {
            float maximum = fmaxf(maxima[c][column], high[column]);
#pragma unroll
            for (int distance = 16; distance >= 4; distance /= 2) {
                maximum = fmaxf(maximum, __shfl_xor_sync(kAll, maximum, distance));
            }
            const float factor = exp2_fast(maxima[c][column] - maximum);
            maxima[c][column] = maximum;
            weights[c][column] *= factor;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                sums[step][c][column] *= factor;
                sums[step][c][column + 2] *= factor;
            }
        }
    }

    __device__ void finish(const DecodeArgs& args, float* target, float* target_maxima,
                           float* target_weights) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
#pragma unroll
            for (int column = 0; column < 2; ++column) {
                const int head = c * 8 + lane % 4 * 2 + column;
                float weight = weights[c][column];
#pragma unroll
                for (int distance = 16; distance >= 4; distance /= 2) {
                    weight += __shfl_xor_sync(kAll, weight, distance);
                }
                if (head >= args.heads) continue;
                if (lane < 4) {
                    target_maxima[head] = maxima[c][column], target_weights[head] = weight;
                }
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    float* at = target + head * merge_stride(kHeadDim) + step * 16 + lane / 4;
                    at[0] = sums[step][c][column];
                    at[8] = sums[step][c][column + 2];
                }
            }
        }
    }
};

template <class T, int kHeadDim>
void launch(const DecodeArgs& args, int64_t num_ctas, cudaStream_t stream) {
    const auto run = args.heads <= 8 ? launch_decode_attention<MmaTile<T, kHeadDim, 1>>
                                     : launch_decode_attention<MmaTile<T, kHeadDim, 2>>;
    run(args, num_ctas, stream);
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
    const bool fits = args.block_size % kTileTokens == 0 && aligned(4, args.q) &&
                      aligned(2, args.q_stride) && shared_limit().capability >= 80;
    if (!fits) return false;
    args.splits = 1;
    args.heads = args.group;
    return args.dtype == kFloat16 ? launch_head_dim<__half>(args, num_ctas, stream)
                                  : launch_head_dim<__nv_bfloat16>(args, num_ctas, stream);
}

}  // namespace swiftapex
