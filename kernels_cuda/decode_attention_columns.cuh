// What the tensor core variants of decode_attention share: the running softmax of a warp whose
// products have the q heads as columns.
#pragma once

#include "kernels_cuda/decode_attention_kernel.cuh"
#include "kernels_cuda/mma.cuh"

namespace swiftapex {

// kSums products of 16 dims x 8 heads, for kColumns groups of 8 heads. A lane's columns are the
// heads 8c + 2t + {0, 1} (lane = 4g + t).
template <class T, int kSums, int kColumns>
struct Columns {
    float sums[kSums][kColumns][4];
    // Of products, what they are relative to: the same in all lanes of equal t. Scores may be
    // higher by kSlack, as raising it takes a while: weights then reach 2^kSlack.
    float maxima[kColumns][2];
    static constexpr float kSlack = 8.0f;
    float limits[kColumns][2];   // of products, above which maxima are raised
    float weights[kColumns][4];  // sums over all tokens in the first two, by a product with ones

    static __device__ int g() { return threadIdx.x % 32 / 4; }
    static __device__ int t() { return threadIdx.x % 4; }

    __device__ void clear() {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            maxima[c][0] = maxima[c][1] = limits[c][0] = limits[c][1] = -INFINITY;
#pragma unroll
            for (int i = 0; i < 4; ++i) weights[c][i] = 0.0f;
#pragma unroll
            for (int i = 0; i < kSums * 4; ++i) sums[i / 4][c][i % 4] = 0.0f;
        }
    }

    // A tile's products K q^T, tokens g and g + 8, in two parts. p: the weights, as the right
    // operand of the next product. Differences are scaled, not products: those of huge products
    // would be off by more than the exponents have room for.
    __device__ void soften(const DecodeArgs& args, const float (&even)[kColumns][4],
                           const float (&odd)[kColumns][4], int valid, unsigned (&p)[kColumns][2]) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            float products[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) products[i] = even[c][i] + odd[c][i];
            if (valid < kTileTokens) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (g() + i / 2 * 8 >= valid) products[i] = -INFINITY;
                }
            }
            const float high[2] = {fmaxf(products[0], products[2]),
                                   fmaxf(products[1], products[3])};
            // Seldom after the first tile.
            if (__any_sync(kAllLanes, high[0] > limits[c][0] || high[1] > limits[c][1])) {
                raise_maxima(args, c, high);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float exponents[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    exponents[i] = (products[2 * half + i] - maxima[c][i]) * args.scale_log2;
                }
                const Pack<T, 2> pair =
                    pair_from_floats<T>(exp2_fast(exponents[0]), exp2_fast(exponents[1]));
                p[c][half] = transpose(reinterpret_cast<const unsigned&>(pair));
            }
            // The rounded ones are added up, so that the weights sum to one.
            constexpr unsigned kOnes = std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u;
            mma<T>(weights[c], kOnes, kOnes, kOnes, kOnes, p[c][0], p[c][1]);
        }
    }

    __device__ void raise_maxima(const DecodeArgs& args, int c, const float (&high)[2]) {
#pragma unroll
        for (int column = 0; column < 2; ++column) {
            float maximum = fmaxf(maxima[c][column], high[column]);
#pragma unroll
            for (int distance = 16; distance >= 4; distance /= 2) {
                maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, distance));
            }
            limits[c][column] = __fadd_rd(maximum, __fdividef(kSlack, args.scale_log2));
            const float factor = exp2_fast((maxima[c][column] - maximum) * args.scale_log2);
            maxima[c][column] = maximum;
            weights[c][column] *= factor;
#pragma unroll
            for (int i = 0; i < kSums; ++i) {
                sums[i][c][column] *= factor;
                sums[i][c][column + 2] *= factor;
            }
        }
    }

    // body(head, c, column) for the lane's columns that are heads.
    template <class Body>
    __device__ void for_each_head(int heads, Body body) const {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
#pragma unroll
            for (int column = 0; column < 2; ++column) {
                const int head = 8 * c + 2 * t() + column;
                if (head < heads) body(head, c, column);
            }
        }
    }

    __device__ void store_scalars(const DecodeArgs& args, float* slot, int head, int c,
                                  int column) const {
        if (g() != 0) return;
        float* scalars = slot + args.heads * args.head_dim;
        scalars[head] = maxima[c][column] * args.scale_log2;
        scalars[args.heads + head] = weights[c][column];
    }
};

}  // namespace swiftapex
